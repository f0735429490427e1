"""Spellings that users know from torchtitan and Megatron-LM, and what they are called here."""

from __future__ import annotations

from dataclasses import replace

from parallel3d.config.errors import Problem, dotted
from parallel3d.config.file import Node

SECTION_ALIASES = {"parallelism": "parallel", "training": "train"}

# torchtitan keeps the schedule in its parallelism section, so an alias may live in another section.
_SPELLINGS = {
    "parallel.dp": (
        "parallel.data_parallel_degree",
        "parallel.data_parallel_replicate_degree",
        "parallel.data_parallel_size",
    ),
    "parallel.tp": (
        "parallel.tensor_parallel_degree",
        "parallel.tensor_parallel_size",
        "parallel.tensor_model_parallel_size",
    ),
    "parallel.pp": (
        "parallel.pipeline_parallel_degree",
        "parallel.pipeline_parallel_size",
        "parallel.pipeline_model_parallel_size",
    ),
    "pipeline.schedule": ("pipeline.pipeline_parallel_schedule", "parallel.pipeline_parallel_schedule"),
    "pipeline.microbatches": ("pipeline.num_microbatches",),
    "pipeline.virtual_stages": (
        "pipeline.num_virtual_stages_per_rank",
        "pipeline.virtual_pipeline_model_parallel_size",
        "parallel.virtual_pipeline_model_parallel_size",
    ),
    "comm.timeout": ("comm.train_timeout_seconds",),
    "comm.startup_timeout": ("comm.init_timeout_seconds",),
    "optimizer.lr": ("optimizer.learning_rate",),
    "train.steps": ("train.train_iters", "train.training_steps"),
    "train.batch_size": ("train.global_batch_size",),
    "model.args.layers": ("model.args.num_layers", "model.args.n_layers"),
    "model.args.width": ("model.args.hidden_size",),
    "model.args.heads": ("model.args.num_attention_heads", "model.args.n_heads"),
    "model.args.vocabulary": ("model.args.vocab_size",),
    "model.args.sequence": ("model.args.seq_length", "model.args.seq_len"),
}
ALIASES = {alias: name for name, aliases in _SPELLINGS.items() for alias in aliases}

VALUE_ALIASES = {
    "pipeline.schedule": {
        "1F1B": "1f1b",
        "Interleaved1F1B": "interleaved",
        "GPipe": "gpipe",
        "LoopedBFS": "round-robin",
        "ZBVZeroBubble": "zbv",
        "DualPipeV": "dualpipe-v",
    },
    "optimizer.name": {"AdamW": "adamw", "SGD": "sgd"},
    "train.precision": {"fp32": "float32", "bf16": "bfloat16"},
}


def rename(tree: Node, *, own_model: bool) -> list[Problem]:
    """Give every key and value in the tree our name for it; a key beside its alias is a problem.

    The keywords of a user's own model are theirs, so `model.args` is left alone there.
    """
    sections = [_move(tree, (alias,), (name,)) for alias, name in SECTION_ALIASES.items()]
    aliases = {alias: name for alias, name in ALIASES.items() if not own_model or not alias.startswith("model.args.")}
    keys = [_move(tree, tuple(alias.split(".")), tuple(name.split("."))) for alias, name in aliases.items()]
    for path, words in VALUE_ALIASES.items():
        _rename_value(tree, tuple(path.split(".")), words)
    return [problem for problem in (*sections, *keys) if problem is not None]


def _move(tree: Node, alias: tuple[str, ...], name: tuple[str, ...]) -> Problem | None:
    node, parent = tree.find(alias), tree.find(alias[:-1])
    if node is None or parent is None:
        return None
    node = replace(node, written=tree.as_written(alias))
    del parent.value[alias[-1]]
    given = tree.find(name)
    if given is not None:
        message = f"the same key as {dotted(tree.as_written(name))}, which is given at {given.key_place}."
        return Problem(
            node.key_place or node.place, dotted(node.written or alias), None, message, "Keep one of the two."
        )
    target = tree
    for part in name[:-1]:
        if part not in target.value or target.value[part].value is None:
            target.value[part] = Node({}, node.place, node.key_place)
        target = target.value[part]
        if not isinstance(target.value, dict):
            return None  # not a section at all, which is a problem of its own
    target.value[name[-1]] = node
    return None


def _rename_value(tree: Node, path: tuple[str, ...], words: dict[str, str]) -> None:
    node, parent = tree.find(path), tree.find(path[:-1])
    if node is not None and parent is not None and isinstance(node.value, str) and node.value in words:
        parent.value[path[-1]] = replace(node, value=words[node.value])
