"""Tables in torch's CSV form: what is read is what was written, and what is wrong is shown in its row."""

from __future__ import annotations

import csv

import pytest
from torch.distributed.pipelining.schedules import _Action as TorchAction

from parallel3d.pipeline.schedules.actions import parse_actions
from parallel3d.pipeline.schedules.build import build
from parallel3d.pipeline.schedules.csv_table import read_csv, write_csv
from parallel3d.pipeline.schedules.table import Table
from runtime.errors import InvalidCall

SIZES = {"interleaved": 2, "round-robin": 2}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """The table of a file with that text."""
    monkeypatch.chdir(tmp_path)

    def read(text: str) -> Table:
        (tmp_path / "my.csv").write_text(text, encoding="utf-8")
        return read_csv("my.csv")

    return read


@pytest.fixture
def refused(read):
    def refused(text: str) -> str:
        with pytest.raises(InvalidCall) as error:
            read(text)
        return str(error.value)

    return refused


def column(text: str):
    return tuple(action for word in text.split() for action in parse_actions(word))


def test_a_row_is_a_rank_and_an_empty_cell_is_idle(read):
    assert read("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n") == Table(
        "csv:my.csv", 2, 2, (column("0F0 0F1 0B0 0B1"), column("1F0 1B0 1F1 1B1"))
    )


def test_a_byte_order_mark_spaces_and_lines_left_empty_do_not_matter(read):
    assert read("\ufeff 0F0 , 0B0 \r\n\r\n , \r\n").columns == (column("0F0 0B0"),)


def test_the_two_of_an_overlapped_pair_follow_each_other(read):
    table = read("0F0,1F0,(0F1;1B0)OVERLAP_F_B,(1F1;0B0)OVERLAP_F_B,1B1,0B1\n")
    assert table.columns == (column("0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1"),)


def test_communication_is_read_and_weights_that_torch_gathers_are_not(read):
    table = read("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0I0,0W0,0RESHARD,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert table.columns == (column("0F0 0SEND_F0 0RECV_B0 0I0 0W0 0REDUCE_GRAD"), column("1RECV_F0 1F0 1B0 1SEND_B0"))
    assert table.compute_only().columns == (column("0F0 0I0 0W0"), column("1F0 1B0"))


def test_a_file_has_a_cell_a_step(tmp_path):
    write_csv(build("1f1b", 2, 3), tmp_path / "1f1b.csv")
    assert (tmp_path / "1f1b.csv").read_bytes() == (
        b"0F0,0F1,,0B0,0F2,0B1,,0B2\r\n"  # rank 0 waits for the gradients of microbatches 0 and 2
        b",1F0,1B0,1F1,1B1,1F2,1B2\r\n"
    )


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved", "round-robin", "zero-bubble", "zbv", "dualpipe-v"]
)
@pytest.mark.parametrize("communication", [False, True])
def test_what_was_written_is_read_again_by_us_and_by_torch(schedule, communication, tmp_path):
    path = tmp_path / "table.csv"
    table = build(schedule, 4, 8, SIZES.get(schedule))
    table = table.with_communication() if communication else table
    write_csv(table, path)
    assert read_csv(path) == Table(f"csv:{path}", table.stages, table.microbatches, table.columns)
    with path.open(newline="") as file:
        cells = [[str(TorchAction.from_str(cell)) for cell in row if cell] for row in csv.reader(file)]
    assert cells == [list(map(str, actions)) for actions in table.columns]


def test_a_table_that_never_ends_is_not_written(tmp_path):
    table = Table("mine", 2, 1, (column("0B0 0F0"), column("1F0 1B0")))
    with pytest.raises(InvalidCall) as error:
        write_csv(table, tmp_path / "mine.csv")
    assert str(error.value) == (
        "mine never ends: rank 0 waits at 0B0, rank 1 waits at 1F0. Put first what these wait for."
    )
    assert not (tmp_path / "mine.csv").exists()


# (file, the whole error)
REFUSALS = [
    pytest.param(
        "0F0,0B0\n,1F0,1X0,1B0\n",
        """\
my.csv, row 2 (rank 1), cell 3: '1X0' is no action: write a stage, one of F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, \
REDUCE_GRAD, and a microbatch, such as 2F0; REDUCE_GRAD has no microbatch.
    . 1F0 1X0 1B0
          ^^^""",
        id="no action",
    ),
    pytest.param(
        "0F0,(0F1;0Q0)OVERLAP_F_B\n",
        """\
my.csv, row 1 (rank 0), cell 2: '0Q0' is no action: write a stage, one of F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, \
REDUCE_GRAD, and a microbatch, such as 2F0; REDUCE_GRAD has no microbatch.
    0F0 (0F1;0Q0)OVERLAP_F_B
        ^^^^^^^^^^^^^^^^^^^^""",
        id="no action in a pair",
    ),
    pytest.param(
        "0F0,0F1,0F2,0F3,0F4,0F5,0F6,0F7,\x1b[2J,0B0,0B1,0B2,0B3,0B4,0B5,0B6,0B7\n",
        """\
my.csv, row 1 (rank 0), cell 9: '\\x1b[2J' is no action: write a stage, one of F, B, I, W, SEND_F, RECV_F, SEND_B, \
RECV_B, REDUCE_GRAD, and a microbatch, such as 2F0; REDUCE_GRAD has no microbatch.
    … 0F2 0F3 0F4 0F5 0F6 0F7 ?[2J 0B0 0B1 0B2 0B3 0B4 0B5 …
                              ^^^^""",
        id="of a long row the neighbourhood, and nothing that a terminal obeys",
    ),
    pytest.param(
        f"0F0,{'9' * 5000}F0\n",
        f"""\
my.csv, row 1 (rank 0), cell 2: '{"9" * 40}' is no action: write a stage, one of F, B, I, W, SEND_F, RECV_F, SEND_B, \
RECV_B, REDUCE_GRAD, and a microbatch, such as 2F0; REDUCE_GRAD has no microbatch.
    0F0 {"9" * 23}…
        {"^" * 24}""",
        id="a very long number",
    ),
    pytest.param(
        "0F0,0B0\n\n1F0,1B0\n",
        """\
my.csv, row 2 (rank 1), cell 1: a rank without actions. Give it a stage, or remove the row.
    .
    ^""",
        id="a rank without actions",
    ),
    pytest.param(
        "0F0,0B0\n1F0,0F1,1B0\n",
        """\
my.csv, row 2 (rank 1), cell 2: stage 0 is in row 1 already. A stage belongs to one rank.
    1F0 0F1 1B0
        ^^^""",
        id="a stage on two ranks",
    ),
    pytest.param(
        "0F0,,0F0,0B0\n",
        """\
my.csv, row 1 (rank 0), cell 3: 0F0 is in cell 1 already. Remove one of the two.
    0F0 . 0F0 0B0
          ^^^""",
        id="twice",
    ),
    pytest.param(
        "0SEND_F0\n",
        """\
my.csv, row 1 (rank 0), cell 1: there are only sends and receives. Add the forwards and backwards.
    0SEND_F0
    ^^^^^^^^""",
        id="nothing to compute",
    ),
    pytest.param(
        "0F0,0B0\n2F0,2B0\n",
        """\
my.csv, row 2 (rank 1), cell 1: stage 2 is here, but there is no stage 1. Count from 0 without a gap.
    2F0 2B0
    ^^^""",
        id="a gap in the stages",
    ),
    pytest.param(
        "0F0,0F2,0B0,0B2\n",
        """\
my.csv, row 1 (rank 0), cell 2: microbatch 2 is here, but there is no microbatch 1. Count from 0 without a gap.
    0F0 0F2 0B0 0B2
        ^^^""",
        id="a gap in the microbatches",
    ),
    pytest.param(
        "0F1,0B1\n",
        """\
my.csv, row 1 (rank 0), cell 1: microbatch 1 is here, but there is no microbatch 0. Count from 0 without a gap.
    0F1 0B1
    ^^^""",
        id="not from 0",
    ),
    pytest.param(
        "0F0,0F1,0B0,0B1\n1F0,1B0\n",
        "my.csv, row 2 (rank 1): 1F1 and its backward are missing. Add them: there are 2 stages and 2 microbatches.",
        id="a microbatch that one stage has not",
    ),
    pytest.param(
        "0F0,0F1,0B0\n",
        """\
my.csv, row 1 (rank 0), cell 2: 0F1 has no backward. Add 0B1, or 0I1 and 0W1.
    0F0 0F1 0B0
        ^^^""",
        id="no backward",
    ),
    pytest.param(
        "0F0,0B0,0B1\n",
        """\
my.csv, row 1 (rank 0), cell 3: 0B1 is here, but there is no 0F1. Add it.
    0F0 0B0 0B1
            ^^^""",
        id="no forward",
    ),
    pytest.param(
        "0F0,0I0\n",
        """\
my.csv, row 1 (rank 0), cell 2: 0I0 is here, but there is no 0W0. Add it.
    0F0 0I0
        ^^^""",
        id="no weight part",
    ),
    pytest.param(
        "0F0,0W0\n",
        """\
my.csv, row 1 (rank 0), cell 2: 0W0 is here, but there is no 0I0. Add it.
    0F0 0W0
        ^^^""",
        id="no input part",
    ),
    pytest.param(
        "0F0,0B0,0I0,0W0\n",
        """\
my.csv, row 1 (rank 0), cell 3: 0I0 is a part of 0B0, which is in cell 2. Remove one of the two.
    0F0 0B0 0I0 0W0
            ^^^""",
        id="a backward both whole and in parts",
    ),
    pytest.param(
        "0B0,,0F0\n",
        """\
my.csv, row 1 (rank 0), cell 1: 0B0 comes before 0F0, which it needs, in cell 3.
    0B0 . 0F0
    ^^^""",
        id="a backward before its forward",
    ),
    pytest.param(
        "0F0,(0W0;0I0)OVERLAP_F_B\n",
        """\
my.csv, row 1 (rank 0), cell 2: 0W0 comes before 0I0, which it needs, in cell 2.
    0F0 (0W0;0I0)OVERLAP_F_B
        ^^^^^^^^^^^^^^^^^^^^""",
        id="a wrong order in a pair",
    ),
    pytest.param(
        "0F0,0B0,0SEND_B1\n",
        """\
my.csv, row 1 (rank 0), cell 3: 0SEND_B1 is here, but there is no 0B1 or 0I1. Add it.
    0F0 0B0 0SEND_B1
            ^^^^^^^^""",
        id="a send of nothing",
    ),
    pytest.param(
        "0F0,0B0,1REDUCE_GRAD\n",
        """\
my.csv, row 1 (rank 0), cell 3: 1REDUCE_GRAD is here, but stage 1 does nothing. Remove it.
    0F0 0B0 1REDUCE_GRAD
            ^^^^^^^^^^^^""",
        id="a reduction of nothing",
    ),
    pytest.param("\n,,\n", "my.csv is empty. Write a row a rank, such as 0F0,0F1,,0B0,0B1.", id="empty"),
]


@pytest.mark.parametrize(("text", "error"), REFUSALS)
def test_what_is_wrong_is_shown_in_its_row(text, error, refused):
    assert refused(text) == error


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidCall) as error:
        read_csv("none.csv")
    assert str(error.value) == "none.csv cannot be read: No such file or directory. Give the path of a CSV file."
    with pytest.raises(InvalidCall) as error:
        read_csv(".")
    assert str(error.value) == ". cannot be read: Is a directory. Give the path of a CSV file."
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(InvalidCall) as error:
        read_csv("picture.csv")
    assert str(error.value) == (
        "picture.csv is no CSV file: 'utf-8' codec can't decode byte 0x89 in position 0: invalid start byte. "
        "Write a row a rank, such as 0F0,0F1,,0B0,0B1."
    )


# (ranks, microbatches, virtual stages, error)
DISAGREEMENTS = [
    (3, None, None, "my.csv: 3 ranks were asked for, but the file has 2. Use 2."),
    (2, 3, None, "my.csv: 3 microbatches were asked for, but the file has 1. Use 1."),
    (2, 1, 1, "my.csv: 2 stages were asked for, but the file has 4. Use 4."),
]


@pytest.mark.parametrize(("ranks", "microbatches", "virtual_stages", "error"), DISAGREEMENTS)
def test_sizes_that_are_given_agree_with_the_file(ranks, microbatches, virtual_stages, error, read):
    read("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    with pytest.raises(InvalidCall) as refusal:
        build("csv:my.csv", ranks, microbatches, virtual_stages)
    assert str(refusal.value) == error


def test_a_file_is_a_schedule_too(read):
    read("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    table = Table("csv:my.csv", 2, 1, (column("0F0 0B0"), column("1F0 1B0")))
    assert build("csv:my.csv", None, None) == build("csv:my.csv", 2, 1) == build("csv:my.csv", 2, 1, 1) == table
