"""Sources of samples: text, tokens, the standard library, and what is refused, by its key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallel3d.config import load_config
from parallel3d.data import Dataset, make_dataset
from parallel3d.data.token_sources import TextFile, TextFiles, standard_library, text_files
from runtime.errors import ConfigError, DataError


def dataset(**overrides: Any) -> Dataset:
    settings = {name.replace("__", "."): value for name, value in overrides.items()}
    return make_dataset(load_config(None, overrides={"data.sequence": 4, **settings}, environ={}))


def refused(**overrides: Any) -> str:
    with pytest.raises(ConfigError) as error:
        dataset(**overrides)
    return str(error.value)


def text_of(data: Dataset) -> bytes:
    """All inputs one after the other, and the last target."""
    rows = [data[index] for index in range(len(data))]
    return bytes([*(token for inputs, _ in rows for token in inputs.tolist()), rows[-1][1].tolist()[-1]])


def test_a_text_is_cut_into_windows_with_the_next_tokens_as_targets(here):
    (here / "a.txt").write_text("abcdefghijkl")
    data = dataset(data__path="a.txt")
    assert len(data) == 2  # the twelfth letter has no follower
    assert [bytes(part.tolist()) for part in data[1]] == [b"efgh", b"fghi"]
    inputs, targets = data.batch([1, 0])
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert [bytes(row.tolist()) for row in inputs] == [b"efgh", b"abcd"]
    assert [bytes(row.tolist()) for row in targets] == [b"fghi", b"bcde"]
    assert str(data) == "2 samples of 4 tokens"


@pytest.mark.parametrize("index", [-1, 2, 10**20])
def test_a_window_that_is_not_there(index, here):
    (here / "a.txt").write_text("abcdefghijkl")
    with pytest.raises(IndexError):
        dataset(data__path="a.txt")[index]


def test_a_dataset_can_be_iterated_over(here):
    (here / "a.txt").write_text("abcdefghi")
    assert [bytes(inputs.tolist()) for inputs, _ in dataset(data__path="a.txt")] == [b"abcd", b"efgh"]


def test_a_folder_is_read_in_the_order_of_its_paths(here):
    folder = here / "corpus"
    (folder / "b" / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, content in {
        "b/deep/x.md": b"3",
        "b/a.txt": b"2",
        "b.txt": b"5",
        "a": b"1\xff",
        "b/z": b"4",
        "c.bin": b"no\0text",
        ".hidden": b"no",
        ".git/config": b"no",
        "empty": b"",
        "d": b"6" * 9000 + b"\0",
    }.items():
        (folder / name).write_bytes(content)
    files = text_files("corpus")
    assert [os.path.relpath(file.path, "corpus") for file in files] == [
        "a",
        "b/a.txt",
        "b/deep/x.md",
        "b/z",
        "b.txt",
        "d",
    ]
    row = TextFiles(files)
    assert len(row) == 9007
    assert bytes(row.read(0, 8)) == b"1\xff234566"
    assert bytes(row.read(2, 3)) == b"2"
    assert text_of(dataset(data__path="corpus", data__sequence=2))[:6] == b"1\xff2345"


def test_links_are_followed_to_files_only(here):
    (here / "corpus").mkdir()
    (here / "one.txt").write_text("one")
    (here / "corpus" / "link.txt").symlink_to(here / "one.txt")
    (here / "corpus" / "circle").symlink_to(here / "corpus")
    (here / "corpus" / "broken").symlink_to(here / "nowhere")
    assert [os.path.basename(file.path) for file in text_files("corpus")] == ["link.txt"]


def test_pieces_of_any_place_and_length(here):
    content = b"".join(bytes([65 + number]) * number for number in range(20))
    for number in range(20):
        (here / f"{number:02}").write_bytes(bytes([65 + number]) * number)
    row = TextFiles(text_files("."))
    for start in range(0, len(content), 7):
        for stop in range(start, len(content) + 1, 5):
            assert bytes(row.read(start, stop)) == content[start:stop]


def test_the_standard_library_is_the_default_and_the_same_everywhere():
    names = [file.path for file in standard_library()]
    assert names == sorted(names, key=lambda path: path.split(os.sep))
    assert any(name.endswith(os.sep + "argparse.py") for name in names)
    assert any(name.endswith(os.path.join("asyncio", "tasks.py")) for name in names)
    parts = {part for name in names for part in name.split(os.sep)}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert not any("sysconfigdata" in name or "sitecustomize" in name for name in names)
    data = dataset(data__sequence=128, train__batch_size=16)
    assert len(data) > 30_000
    assert all(name.endswith(".py") for name in names)


@pytest.mark.parametrize("folder", ["", "python311.zip"])
def test_a_python_without_sources(folder, monkeypatch, here):
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(here / folder))
    assert refused() == (
        f"data.path = null: no sources of the standard library in {here / folder}.\n"
        "Set data.path to a text file or a folder of them."
    )


@pytest.mark.parametrize("token_type", ["uint8", "uint16", "int32", "int64"])
def test_a_file_of_tokens_is_mapped(token_type, here):
    np.arange(100, 109).astype(np.dtype(token_type).newbyteorder("<")).tofile("tokens.bin")
    data = dataset(data__source="tokens", data__path="tokens.bin", data__token_type=token_type)
    assert len(data) == 2
    assert [part.tolist() for part in data[1]] == [[104, 105, 106, 107], [105, 106, 107, 108]]
    assert data.batch([0]).inputs.dtype == torch.int64


def test_a_mapped_file_is_not_read_into_memory(here):
    with open("tokens.bin", "wb") as file:
        file.truncate(1 << 40)  # a hole
    data = dataset(data__source="tokens", data__path="tokens.bin", data__sequence=128)
    assert len(data) == ((1 << 39) - 1) // 128
    assert data[len(data) - 1][0].tolist() == [0] * 128


CASES = [
    (
        {"data__path": "none.txt"},
        'data.path = "none.txt": no such file or directory.\nCheck the name; the current folder is {here}.',
    ),
    (
        {"data__path": "tokens.txt", "data__source": "tokens"},
        'data.path = "tokens.txt": no such file or directory.\nCheck the name; the current folder is {here}.',
    ),
    (
        {"data__path": "folder", "data__source": "tokens"},
        'data.path = "folder": is a directory.\nName a file that can be read.',
    ),
    (
        {"data__path": "folder"},
        'data.path = "folder": no text file in this folder.\nName a folder or a file with text.',
    ),
    ({"data__path": "a/b"}, 'data.path = "a/b": not a directory.\nName a file that can be read.'),
    ({"data__path": "/dev/null"}, 'data.path = "/dev/null": not a file.\nName a file.'),
    (
        {"data__path": "a"},
        'data.path = "a": 10 tokens are too few: one step of 3 samples of 4 tokens needs 13.\n'
        "Give more text or tokens, or make train.batch_size or the sequence smaller.",
    ),
    (
        {"data__path": "empty"},
        'data.path = "empty": 0 tokens are too few: one step of 3 samples of 4 tokens needs 13.\n'
        "Give more text or tokens, or make train.batch_size or the sequence smaller.",
    ),
    (
        {"data__path": "empty", "data__source": "tokens"},
        'data.path = "empty": the file is empty.\nName a file of tokens.',
    ),
    (
        {"data__path": "a", "data__source": "tokens", "data__token_type": "int32"},
        'data.path = "a": a has 10 bytes, which is not a multiple of int32\'s 4.\n'
        "Set data.token_type to that of the file.",
    ),
    (
        {"data__path": "a", "data__source": "tokens"},
        'data.path = "a": 5 tokens are too few: one step of 3 samples of 4 tokens needs 13.\n'
        "Give more text or tokens, or make train.batch_size or the sequence smaller.",
    ),
    (
        {"data__path": "array.npy", "data__source": "tokens"},
        'data.path = "array.npy": a .npy file has a header before its numbers.\nWrite it with array.tofile(path).',
    ),
]


@pytest.mark.parametrize(("overrides", "message"), CASES)
def test_what_is_refused(overrides, message, here):
    (here / "folder" / "inner").mkdir(parents=True)
    (here / "folder" / "zeros").write_bytes(b"\0" * 100)
    (here / "a").write_bytes(b"0123456789")
    (here / "empty").touch()
    np.save("array.npy", np.arange(100))
    assert refused(train__batch_size=3, **overrides) == message.format(here=here)


def test_a_batch_just_fits(here):
    (here / "a").write_bytes(b"0123456789abc")
    assert len(dataset(data__path="a", train__batch_size=3)) == 3


def test_a_byte_beyond_the_vocabulary(here):
    (here / "a.txt").write_bytes(b"abcdefgh\xe4jklm")
    data = dataset(data__path="a.txt", model__args__vocabulary=128)
    assert data.batch([0]).inputs.tolist() == [[97, 98, 99, 100]]
    for index in (1, 2):  # as the last target, and as an input
        with pytest.raises(DataError) as error:
            data.batch([0, index])
        assert str(error.value) == (
            f"model.args.vocabulary = 128: sample {index} has the token 228 at 8 of the data, "
            "and the tokens end at 127.\n"
            "Set model.args.vocabulary to 229 or more, or give data that fits."
        )


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"model.args.vocabulary": 300}, "model.args.vocabulary"),
        ({"model.factory": "llama", "model.args.vocabulary": 300}, "model.args.vocabulary"),
        (
            {"model.factory": "hf", "model.args.config": {"model_type": "llama", "vocab_size": 300}},
            "model.args.config.vocab_size",
        ),
        ({"model.factory": "os:walk", "model.args": {"vocabulary": 300}}, "model.args.vocabulary"),
        ({"model.factory": "os:walk", "model.args": {"vocabulary": "many"}}, None),
        ({"model.factory": "os:walk"}, None),
        ({"model.factory": "hf", "model.args.config": {"model_type": "llama"}}, None),
    ],
)
def test_tokens_are_checked_where_the_vocabulary_is_known(overrides, key, here):
    np.arange(296, 305, dtype="<u2").tofile("tokens.bin")
    settings = {"data.source": "tokens", "data.path": "tokens.bin", "data.sequence": 4, **overrides}
    data = make_dataset(load_config(None, overrides=settings, environ={}))
    if key is None:
        assert data.batch([1]).targets.tolist() == [[301, 302, 303, 304]]
    else:
        with pytest.raises(DataError, match=rf"{key} = 300: sample 1 has the token 304 at 8 of the data"):
            data.batch([0, 1])


def test_tokens_are_checked_with_a_model_from_a_folder(here):
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    np.arange(296, 305, dtype="<u2").tofile("tokens.bin")
    settings = {"model.factory": "hf", "model.args.path": "model", "data.source": "tokens", "data.path": "tokens.bin"}
    data = make_dataset(load_config(None, overrides={**settings, "data.sequence": 4}, environ={}))
    with pytest.raises(DataError) as refused:
        data.batch([0, 1])
    assert str(refused.value) == (
        "model.args.path = model: sample 1 has the token 304 at 8 of the data, and the tokens end at 299.\n"
        "Give a model with a vocabulary of 305 or more, or give data that fits."
    )


def test_a_token_below_zero(here):
    np.array([1, 2, 3, 4, 5, -100, 7, 8, 9], "<i4").tofile("tokens.bin")
    data = dataset(data__source="tokens", data__path="tokens.bin", data__token_type="int32", model__factory="os:walk")
    with pytest.raises(
        DataError, match=r"data.path: sample 1 has the token -100 at 5 of the data, and tokens begin at 0"
    ):
        data.batch([0, 1])


def test_a_file_that_shrinks_or_goes(here):
    (here / "a.txt").write_bytes(b"x" * 100)
    data = dataset(data__path="a.txt")
    (here / "a.txt").write_bytes(b"x" * 10)
    with pytest.raises(DataError, match=r"data.path: a.txt had 100 bytes at the start, and now has fewer"):
        data.batch([20])
    (here / "a.txt").unlink()
    with pytest.raises(DataError, match=r"data.path: a.txt can no longer be read: No such file"):
        data.batch([0])


def test_a_text_file_by_itself():
    assert TextFiles([TextFile(__file__, 5)]).read(0, 3).tobytes() == Path(__file__).read_bytes()[:3]
