"""A user's dataset; its errors name the key and the sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallel3d.config.errors import ConfigProblems, problem_of_key
from parallel3d.config.factories import call_factory, describe
from parallel3d.data.batch import Batch, collate
from parallel3d.seeding import seeded
from runtime.errors import DataError


class UserDataset:
    """A map-style dataset that can stack its samples into batches."""

    def __init__(self, dataset: Any, factory: str) -> None:
        self._dataset, self._factory, self._length = dataset, factory, len(dataset)

    def __len__(self) -> int:
        return self._length

    def __str__(self) -> str:
        return f"{self._length} samples of {self._factory}"

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        sample = self._sample(index)
        self._collated([sample], [index])
        return sample[0], sample[1]

    def batch(self, indices: Sequence[int]) -> Batch:
        """These samples, stacked."""
        return self._collated([self._sample(index) for index in indices], indices)

    def _sample(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except (Exception, SystemExit) as error:
            raise DataError(f"data.factory = {self._factory}: sample {index} raised {describe(error)}.") from error

    def _collated(self, samples: Sequence[Any], indices: Sequence[int]) -> Batch:
        try:
            return collate(samples)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            which = f"sample {indices[0]}" if len(indices) == 1 else f"samples {', '.join(map(str, indices))}"
            raise DataError(f"data.factory = {self._factory}: {which}: {error}.") from error


def make_user_dataset(factory: str, seed: int) -> UserDataset:
    """Call the factory, and check the first sample."""
    with seeded(seed):  # every rank calls it for itself
        dataset = call_factory("data.factory", factory)
    if not hasattr(type(dataset), "__len__") or not hasattr(type(dataset), "__getitem__"):
        message = f"it returned a value of type {type(dataset).__name__}, which has no len(d) or no d[i]."
        raise _refused(factory, message)
    try:
        length = len(dataset)
    except Exception as error:
        raise _refused(factory, f"the dataset's len raised {describe(error)}.") from error
    if length == 0:
        raise problem_of_key("data.factory", factory, "the dataset has no samples.", "Return one that has some.")
    return _with_a_good_sample(UserDataset(dataset, factory), factory)


def _with_a_good_sample(dataset: UserDataset, factory: str) -> UserDataset:
    try:
        dataset[0]
    except DataError as error:
        text = str(error).removeprefix(f"data.factory = {factory}: ")
        raise _refused(factory, text) from error.__cause__
    return dataset


def _refused(factory: str, message: str) -> ConfigProblems:
    remedy = "Return a map-style dataset: len(d), and d[i] gives (input, target)."
    return problem_of_key("data.factory", factory, message, remedy)
