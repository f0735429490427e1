"""What a configuration that is right gives: defaults, aliases, overrides, and the way back to YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from parallel3d.config import RunConfig, load_config
from parallel3d.config.aliases import ALIASES, VALUE_ALIASES
from parallel3d.config.sections import CustomModel, GptModel, HfModel, LlamaArgs, LlamaModel

CONFIGS = Path(__file__).parents[3] / "configs"


def load(text: str, here: Path, **options: Any) -> RunConfig:
    (here / "run.yaml").write_text(text, encoding="utf-8")
    return load_config("run.yaml", **{"environ": {}, **options})


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "parallel:\nmemory: {}\nmonitoring:\nmodel: {args: }\n"])
def test_an_empty_file_is_all_defaults(text, here):
    config = load(text, here)
    assert config == load_config(None, environ={})
    assert config.model_dump(mode="json") == {
        "model": {
            "factory": "gpt",
            "args": {
                "layers": 24,
                "width": 512,
                "heads": 8,
                "vocabulary": 256,
                "sequence": 128,
                "dropout": 0.0,
                "tied": False,
            },
            "loss": "cross_entropy",
        },
        "data": {
            "source": "text",
            "path": None,
            "token_type": "uint16",
            "sequence": None,
            "shuffle": True,
            "prefetch": 2,
            "factory": None,
        },
        "parallel": {
            "dp": 1,
            "tp": 1,
            "pp": 1,
            "order": "auto",
            "tensor_plan": None,
            "sequence_parallel": False,
        },
        "pipeline": {"schedule": "1f1b", "microbatches": 1, "virtual_stages": 1, "layers_per_stage": None},
        "comm": {
            "backend": "auto",
            "strategy": "default",
            "strategy_table": None,
            "bucket_size": 25 * 1024 * 1024,
            "timeout": 30.0,
            "startup_timeout": 120.0,
        },
        "memory": {"budget": 8 * 1024**3},
        "optimizer": {
            "name": "adamw",
            "lr": 3e-4,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "momentum": 0.0,
            "weight_decay": None,
            "schedule": "constant",
            "warmup_steps": 0,
            "min_lr": 0.0,
            "clip_norm": None,
            "shard": False,
        },
        "train": {"steps": 100, "batch_size": 1, "seed": 0, "precision": "float32"},
        "monitoring": {
            "enabled": True,
            "host": "127.0.0.1",
            "port": None,
            "per_rank": False,
            "token_file": None,
            "tls_certificate": None,
            "tls_key": None,
            "linger_seconds": 15.0,
            "trace_steps": 3,
        },
        "runtime": {"threads": None, "run_dir": None},
    }


RANKS_OF_CONFIGS = {
    "dp": 4, "gpu-8": 8, "llama": 4, "mesh-2x2x2": 8, "nodes-4x8": 32, "pp": 4, "single": 1, "tp": 2,
}  # fmt: skip


def test_every_file_in_configs_is_valid():
    found = {path.stem: load_config(path, environ={}).world_size for path in CONFIGS.glob("*.yaml")}
    assert found == RANKS_OF_CONFIGS


def test_a_config_never_changes():
    config = load_config(None, environ={})
    with pytest.raises(ValidationError):
        config.parallel.dp = 2


def test_batch_size_defaults_to_microbatches_of_one(here):
    assert load("{parallel: {dp: 3}, pipeline: {microbatches: 4}}", here).train.batch_size == 12


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe-v"])
def test_v_schedules_imply_two_virtual_stages(schedule, here):
    config = load(f"{{pipeline: {{schedule: {schedule}, microbatches: 4}}, parallel: {{pp: 2}}}}", here)
    assert (config.pipeline.virtual_stages, config.num_stages) == (2, 4)


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("1", 1),
        ("25 MiB", 25 << 20),
        ("8GiB", 8 << 30),
        ('"1.5 KiB"', 1536),
        ("2 kB", 2000),
        ("4.1 kB", 4100),
        ("1 TB", 10**12),
    ],
)
def test_sizes(written, num_bytes, here):
    assert load(f"memory: {{budget: {written}}}", here).memory.budget == num_bytes


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("5", 5.0),
        ("0.5", 0.5),
        ("30s", 30.0),
        ("2min", 120.0),
        ('"2 min"', 120.0),
        ("250ms", 0.25),
        ("1h", 3600.0),
    ],
)
def test_durations(written, seconds, here):
    assert load(f"comm: {{timeout: {written}}}", here).comm.timeout == seconds


def test_numbers_are_read_as_yaml_1_2_reads_them(here):
    text = "{model: {factory: 'os:walk', args: {a: 3e-4, b: no, c: 1:30, d: 0x1f, e: 012, f: ~, g: !!str 4}}}"
    config = load(text, here)
    assert isinstance(config.model, CustomModel)
    assert config.model.args == {"a": 3e-4, "b": "no", "c": "1:30", "d": 31, "e": 12, "f": None, "g": "4"}


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_every_alias_means_its_key(alias, name):
    words = {"pipeline.schedule": "gpipe", "optimizer.schedule": "cosine", "model.args.tied": True}
    value: Any = words.get(name, 0.5 if name == "optimizer.lr" else 2)
    more: dict[str, Any] = {"pipeline.schedule": "csv:table.csv"} if name == "pipeline.virtual_stages" else {}
    more |= {"model.args.heads": 1} if name == "model.args.width" else {}
    more |= {"model.factory": "llama"} if name.removeprefix("model.args.") in LlamaArgs.model_fields else {}
    config = load_config(None, overrides={alias: value, **more}, environ={})
    assert config == load_config(None, overrides={name: value, **more}, environ={})
    assert config != load_config(None, overrides=more, environ={})


@pytest.mark.parametrize(
    ("path", "word", "ours"),
    [(path, *pair) for path, words in VALUE_ALIASES.items() for pair in words.items()],
)
def test_every_known_word_means_ours(path, word, ours):
    sizes = {"pipeline.virtual_stages": 2, "pipeline.microbatches": 2}
    more = sizes if ours in ("interleaved", "round-robin", "dualpipe-v") else {}
    section, key = path.split(".")
    config = load_config(None, overrides={path: word, **more}, environ={})
    assert getattr(getattr(config, section), key) == ours


def test_a_torchtitan_file_is_understood(here):
    config = load(
        "parallelism: {pipeline_parallel_degree: 2, pipeline_parallel_schedule: Interleaved1F1B}\n"
        "pipeline: {num_virtual_stages_per_rank: 3, microbatches: 4}\n"
        "training: {global_batch_size: 4, steps: 7}\n",
        here,
    )
    assert (config.parallel.pp, config.pipeline.schedule, config.num_stages) == (2, "interleaved", 6)
    assert (config.train.batch_size, config.train.steps) == (4, 7)


def test_keywords_of_a_users_model_are_never_renamed(here):
    config = load('model: {factory: "os:walk", args: {num_layers: 3, layers: 4}}', here)
    assert config.model.args == {"num_layers": 3, "layers": 4}


def test_set_wins_over_the_environment_and_that_over_the_file(here):
    environ = {
        "PARALLEL3D_TRAIN__STEPS": "20",
        "PARALLEL3D_TRAIN__SEED": "5",
        "PARALLEL3D_OPTIMIZER__LR": "1e-3",
    }
    config = load("train: {steps: 10, seed: 1, batch_size: 8}", here, environ=environ, overrides={"train.steps": "30"})
    assert (config.train.steps, config.train.seed, config.train.batch_size) == (30, 5, 8)
    assert config.optimizer.lr == 1e-3


def test_an_alias_overrides_its_key(here):
    assert load("parallel: {tp: 4}", here, overrides={"parallelism.tensor_parallel_degree": "2"}).parallel.tp == 2


def test_overrides_take_yaml_lists_and_python_values():
    overrides = {
        "parallel.order": "[[0,0,1],[0,0,0]]",
        "parallel.pp": 2,
        "pipeline.layers_per_stage": [20, 4],
        "data": {"path": "corpus.txt"},
        "runtime.run_dir": '"7"',
    }
    config = load_config(None, overrides=overrides, environ={})
    assert config.parallel.order == ((0, 0, 1), (0, 0, 0))
    assert config.pipeline.layers_per_stage == (20, 4)
    assert (config.data.path, config.runtime.run_dir) == ("corpus.txt", "7")


@pytest.mark.parametrize("way", ["even", "parameters", "profile"])
def test_a_word_says_how_layers_are_cut(way, here):
    config = load(f"{{parallel: {{pp: 5}}, pipeline: {{layers_per_stage: {way}}}}}", here)
    assert config.pipeline.layers_per_stage == way
    assert load(config.to_yaml(), here) == config


def test_layers_need_not_be_a_multiple_of_the_stages(here):
    assert load("parallel: {pp: 5}", here).pipeline.layers_per_stage is None


def test_environment_names_without_a_double_underscore_are_not_ours():
    environ = {
        "PARALLEL3D_HOST": "a",
        "PARALLEL3D_STORE_FD": "3",
        "PARALLEL3D_CONTROL_FD": "4",
        "PATH__X": "b",
    }
    assert load_config(None, environ=environ) == load_config(None, environ={})


def test_aliases_of_yaml_keep_their_own_copies(here):
    config = load("{parallel: &size {dp: 2}, model: {factory: 'os:walk', args: *size}}", here)
    assert isinstance(config.model, CustomModel)
    assert (config.parallel.dp, config.model.args) == (2, {"dp": 2})


@pytest.mark.parametrize("order", ["auto", "dp-tp-pp", "pp-dp-tp", "[[0, 0, 1], [0, 0, 0]]"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "csv:table.csv"])
def test_to_yaml_and_back(order, schedule, here):
    text = f"parallel: {{pp: 2, order: {order}}}\npipeline: {{schedule: '{schedule}'}}\noptimizer: {{lr: 1e-5}}"
    config = load(text, here, world_size=2)
    assert isinstance(config.model, GptModel)
    assert load(config.to_yaml(), here) == config


def test_a_llama_and_back(here):
    text = "model: {factory: llama, args: {n_kv_heads: 2, rope_theta: 5e5, tied: true}}\nparallel: {tp: 2}"
    config = load(text, here)
    assert isinstance(config.model, LlamaModel)
    assert (config.model.args.num_kv_heads, config.model.args.rope_base, config.model.args.tied) == (2, 5e5, True)
    assert load(config.to_yaml(), here) == config


@pytest.mark.parametrize(("width", "inner"), [(512, 1408), (48, 128), (24, 64), (1, 64), (4096, 10944)])
def test_sizes_that_a_llama_was_not_given(width, inner):
    args = LlamaArgs(width=width, heads=1)
    assert (args.num_kv_heads, args.inner_width) == (1, inner)
    assert LlamaArgs(mlp_width=7, heads=4, kv_heads=2).inner_width == 7


def test_a_hugging_face_model_and_back(here):
    config = load("model: {factory: hf, args: {config: {model_type: llama, hidden_size: 64}, seq_len: 32}}", here)
    assert isinstance(config.model, HfModel)
    assert config.model.args.config == {"model_type": "llama", "hidden_size": 64}
    assert config.sequence == 32
    assert load(config.to_yaml(), here) == config


@pytest.mark.parametrize(
    ("text", "sequence"),
    [
        ("", 128),
        ("model: {args: {sequence: 64}}", 64),
        ("{model: {args: {sequence: 64}}, data: {sequence: 32}}", 32),
        ("{model: {factory: llama, args: {sequence: 64}}, data: {sequence: 96}}", 96),
        ("model: {factory: 'os:walk', args: {sequence: 16}}", 16),
        ("model: {factory: 'os:walk', args: {sequence: many}}", 128),
        ("model: {factory: 'os:walk', args: {sequence: true}}", 128),
    ],
)
def test_tokens_of_a_sample(text, sequence, here):
    assert load(text, here).sequence == sequence


def test_an_optimizer_and_back(here):
    text = "optimizer: {betas: [0.8, 0.95], clip_grad: 1, weight_decay: 0, schedule: cosine, min_lr: 1e-5, shard: true}"
    config = load(text, here)
    assert config.optimizer.betas == (0.8, 0.95)
    assert config.optimizer.clip_norm == 1.0
    assert config.optimizer.weight_decay == 0.0
    assert load(config.to_yaml(), here) == config
    assert load("optimizer: {betas: [0, 0.5]}", here).optimizer.betas == (0.0, 0.5)


def test_a_tensor_plan_keeps_its_order_on_the_way_through_yaml(here):
    plan = {"blocks.*.up": "column", "blocks.0.up": "replicated", "head": "vocab", "1.down": "row"}
    config = load_config(None, overrides={"parallel.tensor_plan": plan, "parallel.tp": 3}, environ={})
    again = load(config.to_yaml(), here)
    assert again == config
    assert list((again.parallel.tensor_plan or {}).items()) == list(plan.items())


def test_an_empty_tensor_plan_is_not_the_models_own(here):
    assert load("parallel: {tensor_plan: {}}", here).parallel.tensor_plan == {}


@pytest.mark.parametrize("text", ["lr_scheduler:", "lr_scheduler: {}", "lr_scheduler: {warmup_steps: 0}"])
def test_a_section_of_torchtitans_leaves_nothing_behind(text, here):
    assert load(text, here) == load("", here)


def test_rules_are_silent_where_nothing_is_wrong(here):
    load("{parallel: {tp: 3}, model: {factory: 'os:walk', args: {heads: 8}}}", here)
    load("{parallel: {tp: 3, tensor_plan: {blocks.*.mlp.up: column}}}", here)
    load("{parallel: {tp: 3, sequence_parallel: true, tensor_plan: {}}, data: {factory: 'os:walk'}}", here)
    load("{model: {factory: llama, args: {sequence: 8}}, data: {sequence: 64}}", here)
    load("{optimizer: {min_lr: 1}}", here)
    load("{data: {source: tokens, factory: 'os:walk'}}", here)


def test_to_yaml_keeps_text_that_looks_like_something_else(here):
    words = [
        "1e-4",
        "no",
        "1:30",
        "0o7",
        "null",
        "~",
        ".inf",
        "2024-01-01",
        "a: b",
        "# c",
        "é\n\u2028",
        "<<",
        "=",
        "",
    ]
    args = {"words": words, "numbers": [1e-05, 1e20, 3, True, None], "yes": {"on": 1}}
    config = load_config(None, overrides={"model.factory": "os:walk", "model.args": args}, environ={})
    assert load(config.to_yaml(), here) == config


def test_a_strategy_table_is_sorted_by_size_and_can_be_written_down_again(here):
    (here / "run.yaml").write_text("comm: {strategy: adaptive, strategy_table: {1 GiB: ring, 64 KiB: tree}}")
    config = load_config("run.yaml")
    assert config.comm.strategy_table == ((64 << 10, "tree"), (1 << 30, "ring"))
    written = config.model_dump(mode="json")["comm"]["strategy_table"]
    assert written == {"65536 B": "tree", "1073741824 B": "ring"}
    (here / "again.yaml").write_text(f"comm: {{strategy: adaptive, strategy_table: {written}}}")
    assert load_config("again.yaml").comm.strategy_table == config.comm.strategy_table


@pytest.mark.parametrize("key", ["1024", "1024 B", "1 KiB", "1000.0"])
def test_a_strategy_table_takes_bytes_without_a_unit(key):
    table = {key: "ring"}
    config = load_config(None, overrides={"comm.strategy": "adaptive", "comm.strategy_table": table}, environ={})
    assert config.comm.strategy_table == ((1000 if key == "1000.0" else 1024, "ring"),)


def test_a_strategy_table_may_be_long():
    table = {f"{size} B": "ring" for size in range(1, 5000)}
    config = load_config(None, overrides={"comm.strategy": "adaptive", "comm.strategy_table": table}, environ={})
    assert len(config.comm.strategy_table or ()) == 4999
