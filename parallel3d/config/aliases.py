"""Keys and values as torchtitan, Megatron-LM and Hugging Face spell them, and our names for them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from parallel3d.config.errors import Problem, dotted, enumerate_words
from parallel3d.config.yaml_positions import Node

SECTION_ALIASES = {"parallelism": "parallel", "training": "train"}
# Sections of torchtitan whose keys belong to several sections here.
OTHER_SECTIONS = ("lr_scheduler",)

# An alias may be in another section: torchtitan has the schedule under parallelism.
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
    "data.sequence": ("train.seq_len",),
    "optimizer.lr": ("optimizer.learning_rate",),
    "optimizer.schedule": ("optimizer.lr_decay_style",),
    "optimizer.warmup_steps": ("optimizer.lr_warmup_iters", "lr_scheduler.warmup_steps"),
    "optimizer.clip_norm": ("optimizer.clip_grad", "train.max_norm"),
    "train.steps": ("train.train_iters", "train.training_steps"),
    "train.batch_size": ("train.global_batch_size",),
    "model.args.layers": ("model.args.num_layers", "model.args.n_layers"),
    "model.args.width": ("model.args.hidden_size",),
    "model.args.heads": ("model.args.num_attention_heads", "model.args.n_heads"),
    "model.args.kv_heads": (
        "model.args.n_kv_heads",
        "model.args.num_key_value_heads",
        "model.args.num_query_groups",
    ),
    "model.args.mlp_width": ("model.args.ffn_hidden_size", "model.args.intermediate_size"),
    "model.args.rope_base": ("model.args.rope_theta", "model.args.rotary_base"),
    "model.args.tied": ("model.args.tie_word_embeddings",),
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

# Features of other frameworks that are missing here: the remedy of such an unknown key says so.
NOT_YET = {
    "activation_checkpoint": "Activation recompute is",
    "checkpoint": "Checkpoints are",
    "comm.compression": "Gradient compression is",
    "memory.strategy": "Recompute and offload are",
}


def rename(tree: Node, *, model_args: Collection[str]) -> list[Problem]:
    """Rename keys and values in the tree to ours, in place. A key given together with its alias is a problem.

    model_args: our names of the built-in model's keywords; empty for a model of the user's, which has no aliases.
    """
    sections = [_move(tree, (alias,), (name,)) for alias, name in SECTION_ALIASES.items()]
    aliases = {
        alias: name
        for alias, name in ALIASES.items()
        if not name.startswith("model.args.") or name.removeprefix("model.args.") in model_args
    }
    keys = [_move(tree, tuple(alias.split(".")), tuple(name.split("."))) for alias, name in aliases.items()]
    left = [problem for section in OTHER_SECTIONS for problem in _left_over(tree, section)]
    for path, words in VALUE_ALIASES.items():
        _rename_value(tree, tuple(path.split(".")), words)
    return [*left, *(problem for problem in (*sections, *keys) if problem is not None)]


def _left_over(tree: Node, section: str) -> list[Problem]:
    """Removes one of `OTHER_SECTIONS`; its keys that are no alias are unknown."""
    node = tree.find((section,))
    if node is None or not (node.value is None or isinstance(node.value, dict)):
        return []
    del tree.value[section]
    known = [alias for alias in ALIASES if alias.startswith(f"{section}.")]
    remedy = f"Of {section} there is only {enumerate_words(known, 'and')}."
    return [
        Problem(child.key_place or child.place, dotted((section, key)), None, "unknown key.", remedy)
        for key, child in (node.value or {}).items()
    ]


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
            return None  # not a mapping: validation reports it
    target.value[name[-1]] = node
    return None


def _rename_value(tree: Node, path: tuple[str, ...], words: dict[str, str]) -> None:
    node, parent = tree.find(path), tree.find(path[:-1])
    if node is not None and parent is not None and isinstance(node.value, str) and node.value in words:
        parent.value[path[-1]] = replace(node, value=words[node.value])
