"""Lines, prefixes, lists of ranks, and a writer whose reader is slow or gone."""

from __future__ import annotations

import os
import threading

import pytest

from runtime.errors import LaunchError
from runtime.launch.output import MAX_LINE_BYTES, LineSplitter, Writer, rank_prefix
from runtime.launch.spec import parse_ranks


def test_lines_come_out_whole():
    lines = LineSplitter()
    assert lines.feed(b"a\nb") == b"a\n"
    assert lines.feed(b"c") == b""
    assert lines.feed(b"d\n") == b"bcd\n"
    assert lines.feed(b"rest") == b""
    assert lines.finish() == b"rest"
    assert lines.finish() == b""


def test_a_line_without_end_is_kept_within_bounds():
    lines = LineSplitter()
    out = b"".join(lines.feed(b"x" * 65536) for _ in range(40))
    assert len(out) >= 40 * 65536 - MAX_LINE_BYTES
    assert out + lines.finish() == b"x" * 65536 * 40


def test_every_line_gets_the_prefix():
    assert rank_prefix(3, 8, False).apply(b"a\n\nb\n") == b"[3] a\n[3] \n[3] b\n"
    assert rank_prefix(3, 12, False).apply(b"a") == b"[ 3] a\n"
    assert rank_prefix(0, 2, True).apply(b"\xff\n") == b"\x1b[36m[0]\x1b[0m \xff\n"


@pytest.mark.parametrize(("text", "ranks"), [("0", {0}), ("0,3-5", {0, 3, 4, 5}), (" 1 , 2-2", {1, 2}), ("7", {7})])
def test_lists_of_ranks(text, ranks):
    assert parse_ranks(text, 8) == ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--only '' is not a list of ranks such as 0 or 0,3-5"),
        ("a", "--only 'a' is not a list of ranks such as 0 or 0,3-5"),
        ("0,", "--only '0,' is not a list of ranks such as 0 or 0,3-5"),
        ("-1", "--only '-1' is not a list of ranks such as 0 or 0,3-5"),
        ("3-1", "--only '3-1': 3-1 runs backwards"),
        ("0,8", "--only '0,8': there is no rank 8; the last of 8 is 7"),
    ],
)
def test_bad_lists_of_ranks(text, message):
    with pytest.raises(LaunchError) as caught:
        parse_ranks(text, 8)
    assert str(caught.value) == message


def test_the_writer_keeps_order_and_ends_when_all_is_written():
    done = threading.Event()
    reader, writer_fd = os.pipe()
    writer = Writer(done.set)
    for number in range(100):
        writer.write(writer_fd, b"%d\n" % number)
    writer.close()
    assert done.wait(10)
    os.close(writer_fd)
    with open(reader, "rb") as file:
        assert file.read() == b"".join(b"%d\n" % number for number in range(100))


def test_a_reader_that_left_does_not_stop_the_others():
    done = threading.Event()
    broken_reader, broken = os.pipe()
    reader, writer_fd = os.pipe()
    os.close(broken_reader)
    writer = Writer(done.set)
    writer.write(broken, b"lost\n")
    writer.write(writer_fd, b"kept\n")
    writer.close()
    assert done.wait(10)
    os.close(broken)
    os.close(writer_fd)
    with open(reader, "rb") as file:
        assert file.read() == b"kept\n"
