"""Copies round the cache: every byte, and no other; what the machine code says; where it may not be used."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from process_groups.shared_memory import streaming
from process_groups.shared_memory.streaming import CODE, LISTING, stream
from tests.support.tools import needs

needs_code = pytest.mark.skipif(streaming._code is None, reason="needs x86_64 and memory that may be executed")


def aligned_bytes(num: int) -> torch.Tensor:
    """Zeros that begin with a cache line."""
    room = torch.zeros(num + 64, dtype=torch.uint8)
    skipped = -room.data_ptr() % 64
    return room[skipped : skipped + num]


@pytest.mark.parametrize("place", [64, 80, 72, 65])  # a line, what one store needs, and neither
@pytest.mark.parametrize("begin", [0, 1, 16])
def test_every_byte_is_copied_and_no_other_is_touched(place, begin):
    values = torch.randint(1, 256, (600,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for num in range(500):
        room, source = aligned_bytes(700), values[begin : begin + num]
        stream(room[place : place + num], source)
        assert torch.equal(room[place : place + num], source)
        assert not room[:place].any()
        assert not room[place + num :].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool, torch.complex64])
def test_bits_stay_as_they_are(dtype):
    values = torch.randint(0, 2, (1 << 20,), dtype=torch.uint8).view(dtype)
    target = torch.empty_like(values)
    stream(target, values)
    assert torch.equal(target.view(torch.uint8), values.view(torch.uint8))


@needs_code
@pytest.mark.parametrize(("num", "function"), [(200, "_copy_few_lines"), ((64 << 10) + 8, "_copy_lines")])
def test_lines_go_through_the_machine_code(monkeypatch, num, function):
    assert getattr(streaming, function) is not None
    calls = []
    monkeypatch.setattr(streaming, function, lambda *call: calls.append(call))
    target, source = aligned_bytes(num), torch.ones(num, dtype=torch.uint8)
    stream(target, source)
    assert calls == [(target.data_ptr(), source.data_ptr(), num - 8)]
    assert target.tolist() == [0] * (num - 8) + [1] * 8, "what is no whole line is left to memmove"


@needs_code
def test_other_threads_run_during_a_long_copy():
    """Where it is short they don't: whoever takes the GIL may keep it for milliseconds."""
    assert streaming._copy_lines is not None
    assert streaming._copy_few_lines is not None
    pythonapi = 4  # ctypes.FUNCFLAG_PYTHONAPI: with the GIL
    assert not streaming._copy_lines._flags_ & pythonapi
    assert streaming._copy_few_lines._flags_ & pythonapi


@pytest.mark.parametrize("begin", [0, 1000])
def test_a_tensor_without_memory_is_copied_by_torch(begin):
    target = torch.ones(1000)
    stream(target, torch._efficientzerotensor(2000)[begin : begin + 1000])
    assert not target.any()


@needs_code
def test_the_code_can_never_be_written_while_it_can_be_called():
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "copy-lines" in line]
    assert maps
    assert {line[1] for line in maps} == {"r-xp"}


def refuse(*_: object, **__: object) -> int:
    raise PermissionError("not here")


@pytest.mark.parametrize("refused", [(os, "memfd_create"), (mmap, "mmap")])
def test_where_code_is_refused_copies_are_ordinary(monkeypatch, refused):
    monkeypatch.setattr(*refused, refuse)
    before = len(os.listdir("/proc/self/fd"))
    assert streaming._map_code() is None
    assert len(os.listdir("/proc/self/fd")) == before
    for function in ("_copy_lines", "_copy_few_lines"):
        monkeypatch.setattr(streaming, function, None)
    for num in (1000, 100_000):
        values, target = torch.arange(float(num)), torch.zeros(num)
        stream(target, values)
        assert torch.equal(target, values)


def test_other_processors_have_none(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert streaming._map_code() is None


def test_the_environment_can_switch_it_off(monkeypatch):
    monkeypatch.setenv("PARALLEL3D_STREAMING", "0")
    assert streaming._map_code() is None


def test_the_listing_goes_round_the_cache_and_ends_with_a_fence():
    mnemonics = [words(line[14:])[0] for line in LISTING.strip().splitlines()]
    assert mnemonics == ["movdqu"] * 4 + ["movntdq"] * 4 + ["add", "add", "sub", "jne", "sfence", "ret"]


@needs_code
@needs("objdump")
def test_the_listing_is_what_the_machine_code_says(tmp_path):
    (tmp_path / "code").write_bytes(CODE)
    command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", "-M", "intel", "--insn-width=16", "code"]
    printed = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60).stdout
    found = [line.split("\t")[1:] for line in printed.splitlines() if line.count("\t") == 2]
    assert [(code.split(), words(text)) for code, text in found] == [
        (line[:14].split(), words(line[14:].partition("#")[0])) for line in LISTING.strip().splitlines()
    ]


def words(text: str) -> list[str]:
    return text.replace("XMMWORD PTR ", "").replace(",", " ").split()
