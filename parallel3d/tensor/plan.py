"""Tensor-parallel plans: which modules of a model are sharded over the ranks, and how.

A plan maps patterns of module paths to strategies. `*` in a pattern stands for one name or a part of it; where several
patterns match a path, the last one counts:

    blocks.*.attention.[qkv]   column      some outputs of a Linear
    blocks.*.attention.o       row         some inputs of a Linear
    embedding.tokens, head     vocab       some rows of the vocabulary
    blocks.3                   replicated  nothing inside is sharded
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from parallel3d.config.errors import ConfigProblems, Place, Problem, nearest, problem_of_key
from parallel3d.models.layered import LayeredModel

KEY = "parallel.tensor_plan"
_SEQUENCE_KEY = "parallel.sequence_parallel"
_REPLICATED = "replicated"


class TensorPlan:
    """A plan that was checked against its model. Raises ConfigError, which names the key and the module."""

    def __init__(
        self,
        model: LayeredModel,
        plan: Mapping[str, str],
        tp: int,
        layers_per_stage: Sequence[int],
        *,
        sequence_parallel: bool = False,
    ) -> None:
        self._model, self._tp = model, tp
        self._key = KEY if plan is not model.plan else "the model's tensor_plan"
        self.modules = dict(model.whole.named_modules(remove_duplicate=False))
        """By path; a module that stands at several paths is here with each."""
        self._found = self._match(plan)
        for path, (pattern, strategy) in self._found.items():
            self._check_module(path, pattern, strategy)
        if tp == 1:
            self._found = {}
        self._check_tied()
        self._check_order(layers_per_stage)
        self.sequence = self._find_sequence() if sequence_parallel and tp > 1 else None
        """With sequence parallelism, the first and the last of the called modules that see a slice of the sequence."""

    def strategy(self, path: str) -> str:
        """The strategy of the module at this path."""
        return self._found[path][1] if path in self._found else _REPLICATED

    @property
    def head(self) -> str | None:
        """The path of the vocabulary-parallel head, if there is one."""
        return next((path for path in self._with("vocab") if is_linear(self.modules[path])), None)

    def _with(self, strategy: str) -> list[str]:
        return [path for path, (_, own) in self._found.items() if own == strategy]

    # Patterns.

    def _match(self, plan: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """From each path that is sharded to the pattern that counts, and its strategy."""
        found: dict[str, tuple[str, str]] = {}
        for pattern, strategy in plan.items():
            matching = [path for path in self.modules if _matches(pattern, path)]
            if not matching:
                raise self._refused(pattern, strategy, "no module has such a path.", self._nearest(pattern))
            if strategy == _REPLICATED:
                found = {path: each for path, each in found.items() if not _is_in_one_of(path, matching)}
            else:
                found |= dict.fromkeys(matching, (pattern, strategy))
        return found

    def _nearest(self, pattern: str) -> str:
        paths = [path for path in self.modules if path]
        similar = nearest(pattern.replace("*", "0"), paths)
        if similar is not None:
            return f"The nearest is {similar}."
        linears = [path for path in paths if is_linear(self.modules[path]) or is_embedding(self.modules[path])]
        return f"There are, for example, {', '.join(linears[:3] or paths[:3])}."

    def _refused(self, pattern: str, strategy: str, message: str, remedy: str) -> ConfigProblems:
        return problem_of_key(f'{self._key}["{pattern}"]', strategy, message, remedy)

    def _refused_plan(self, message: str, remedy: str) -> ConfigProblems:
        return ConfigProblems([Problem(Place(""), self._key, None, message, remedy)])

    # What may be sharded.

    def _check_module(self, path: str, pattern: str, strategy: str) -> None:
        module, name = self.modules[path], _name(path)
        if not path:
            raise self._refused(pattern, strategy, "the model itself cannot be replaced.", "Put it into another one.")
        if strategy == "vocab":
            if is_embedding(module) or is_linear(module):
                self._check_vocabulary(path, pattern, module)
                return
            message = f"{name} is {type(module).__name__}, which has no vocabulary."
            raise self._refused(pattern, strategy, message, "Name an Embedding or a Linear.")
        if not is_linear(module):
            remedy = "Use vocab for an Embedding." if is_embedding(module) else "Name a Linear."
            raise self._refused(pattern, strategy, f"{name} is {type(module).__name__}, not Linear.", remedy)
        assert isinstance(module, nn.Linear)
        self._check_divides(name, strategy, module)

    def _check_divides(self, name: str, strategy: str, module: nn.Linear) -> None:
        tp = self._tp
        what, size = ("outputs", module.out_features) if strategy == "column" else ("inputs", module.in_features)
        if size % tp:
            below = size // tp * tp
            near = f"{below} or {below + tp}" if below else f"{tp}"
            divisor = max(each for each in range(1, tp) if size % each == 0)
            raise problem_of_key(
                "parallel.tp",
                tp,
                f"{name} ({strategy}) has {size} {what}, which is no multiple of tp({tp}).",
                f"Set tp to {divisor}, or give it {near} {what}, or have {KEY} replicate it.",
            )

    def _check_vocabulary(self, path: str, pattern: str, module: nn.Module) -> None:
        last = self._model.row[-1]
        if isinstance(module, nn.Embedding):
            size = module.num_embeddings
            for option in ("max_norm", "sparse", "scale_grad_by_freq"):
                if getattr(module, option):
                    message = f"{path} has {option}, which does not work on a shard of its rows."
                    raise self._refused(pattern, "vocab", message, "Have it replicated.")
        else:
            assert isinstance(module, nn.Linear)
            size = module.out_features
            if not is_inside(path, last):
                message = f"{path} is a Linear, but what the model calls last is {_name(last)}."
                raise self._refused(pattern, "vocab", message, "Use column, and row for what comes after it.")
        if size < self._tp:
            message = f"{path} (vocab) has {size} rows, fewer than there are ranks."
            raise problem_of_key("parallel.tp", self._tp, message, f"Set it to {size} at most.")

    def _check_tied(self) -> None:
        """A tied parameter is sharded in one way."""
        for paths in self._model.tied().values():
            strategies = {path.rpartition(".")[0]: self.strategy(path.rpartition(".")[0]) for path in paths}
            if len({sharded_dim(strategy, paths[0].rpartition(".")[2]) for strategy in strategies.values()}) > 1:
                words = " and ".join(f"{path} ({strategy})" for path, strategy in strategies.items())
                message = f"{words} share one parameter, but are sharded in different ways."
                raise self._refused_plan(message, "Give all of them vocab, or have all replicated.")

    # How columns and rows follow each other.

    def _places(self, strategy: str) -> list[int]:
        """The places in the row of called modules that have such a module inside."""
        paths, row = self._with(strategy), self._model.row
        return [place for place, holder in enumerate(row) if any(is_inside(path, holder) for path in paths)]

    def _check_order(self, layers_per_stage: Sequence[int]) -> None:
        """In every stage a row comes after the last column, so that a stage's output is replicated: partial gradients
        are found only between the columns and rows of one stage."""
        row, columns, rows, first = self._model.row, self._places("column"), self._places("row"), 0
        for stage in range(len(layers_per_stage)):
            end = first + len(self._model.paths(layers_per_stage, stage))
            own, ending = ([each for each in some if first <= each < end] for some in (columns, rows))
            if own and (not ending or ending[-1] < own[-1]):
                if any(each >= end for each in rows):
                    message = f"stage {stage} ends between the column in {_name(row[own[-1]])} and its row."
                    remedy = "End the stage after the row."
                    raise problem_of_key("pipeline.layers_per_stage", list(layers_per_stage), message, remedy)
                message = f"{_name(row[own[-1]])} has a column, but no row follows: its output would stay sharded."
                raise self._refused_plan(message, "Add a row, or vocab for the last Linear of a model.")
            if ending and (not own or own[0] > ending[0]):
                message = f"{_name(row[ending[0]])} has a row, but there is no column before it."
                raise self._refused_plan(message, "Add a column, or have it replicated.")
            first = end

    def _find_sequence(self) -> tuple[str, str]:
        """The first module with a column, and the last with a row."""
        row, columns, rows = self._model.row, self._places("column"), self._places("row")
        if not columns:
            raise problem_of_key(_SEQUENCE_KEY, True, f"{self._key} has no columns and rows.", "Set it to false.")
        for place in self._places("vocab"):
            if columns[0] <= place <= rows[-1]:
                message = f"{_name(row[place])} has a vocabulary, which needs the whole sequence on each rank, between "
                message += "columns and rows, which have a slice of it."
                raise problem_of_key(
                    _SEQUENCE_KEY, True, message, "Have it replicated, or set sequence_parallel to false."
                )
        self._check_tied_over_sequence(row[columns[0] : rows[-1] + 1])
        return row[columns[0]], row[rows[-1]]

    def _check_tied_over_sequence(self, sliced: Sequence[str]) -> None:
        """A tied parameter must not get a partial gradient at one place and a whole one at another."""
        for paths in self._model.tied().values():
            owners = [path.rpartition(".")[0] for path in paths]
            if len({_is_in_one_of(owner, sliced) for owner in owners}) > 1:
                words = " and ".join(map(_name, owners))
                message = f"{words} share one parameter, but not all of them are between columns and rows."
                raise problem_of_key(_SEQUENCE_KEY, True, message, "Set it to false, or don't tie them.")


def sharded_dim(strategy: str, name: str) -> int | None:
    """The dimension along which a parameter of this name is sharded; None if it is replicated."""
    if strategy in ("column", "vocab"):
        return 0
    return 1 if strategy == "row" and name == "weight" else None


def is_linear(module: nn.Module) -> bool:
    """Whether it is a Linear with torch's own forward; another forward would be lost."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward


def is_inside(path: str, place: str) -> bool:
    """Whether a path is this place, or inside of it."""
    return not place or path == place or path.startswith(f"{place}.")


def _is_in_one_of(path: str, places: Iterable[str]) -> bool:
    return any(is_inside(path, place) for place in places)


def _matches(pattern: str, path: str) -> bool:
    """Whether each name of the path matches that of the pattern."""
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


def _name(path: str) -> str:
    return path or "the model itself"
