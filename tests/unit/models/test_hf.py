"""Models of Hugging Face: their stages are the model, bit for bit, and what cannot be cut is refused by name."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from functools import cache

import pytest
import torch

from parallel3d.config.sections import HfArgs, HfModel, Parallel, RunConfig
from parallel3d.models import hf
from parallel3d.models.build import build_model
from parallel3d.models.hf import build_hf
from parallel3d.models.materialize import materialize
from parallel3d.planning.blueprint import draw
from runtime.errors import ConfigError

SMALL = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
# Shorter than the sequences here, so that the masks differ from layer to layer.
WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

MODELS = {
    "llama": {"model_type": "llama", **GROUPED},
    "llama, tied": {"model_type": "llama", **GROUPED, "tie_word_embeddings": True},
    "llama, eager": {"model_type": "llama", **GROUPED, "attn_implementation": "eager"},
    "llama, yarn": {
        "model_type": "llama",
        **GROUPED,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    },
    "qwen2": {"model_type": "qwen2", **GROUPED, "use_sliding_window": True, **WINDOWS},
    "qwen3": {"model_type": "qwen3", **GROUPED, "head_dim": 8},
    "mistral": {"model_type": "mistral", **GROUPED, "head_dim": 4, "sliding_window": 3},
    "phi": {"model_type": "phi", **SMALL},
    "gpt_neox": {"model_type": "gpt_neox", **SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gemma, scaled and tied": {"model_type": "gemma", **GROUPED, "head_dim": 4},
    "gemma2, capped logits": {"model_type": "gemma2", **GROUPED, "head_dim": 4, **WINDOWS},
    "gemma3, two kinds of positions": {"model_type": "gemma3_text", **GROUPED, "head_dim": 4, **WINDOWS},
    "granite, scaled at both ends": {
        "model_type": "granite",
        **GROUPED,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "cohere, scaled logits": {"model_type": "cohere", **GROUPED},
    "mixtral, experts": {
        "model_type": "mixtral",
        **GROUPED,
        "num_local_experts": 3,
        "experts_implementation": "eager",  # the default has no float64
    },
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def run_of(config=None, *, path=None, **parallel):
    args = HfArgs(config=config, path=None if path is None else str(path))
    return RunConfig(model=HfModel(factory="hf", args=args), parallel=Parallel(**parallel))


@cache
def whole_model(name):
    """The model that transformers itself builds."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]), dtype=torch.float32)
        for parameter in model.parameters():  # biases begin as zeros, which would hide much
            torch.nn.init.normal_(parameter, std=0.3)
    return model.double().train()


def stages_of(model, cut):
    modules = [(path, model.module(path)) for path in model.row]
    materialize(model, modules, 0, torch.float64, "cpu")
    return [model.stage(cut, index) for index in range(len(cut))]


def run(stages, tokens=TOKENS):
    values = tokens
    for stage in stages:
        values = stage(values)
    return values


def gradients(model, logits):
    for parameter in model.parameters():
        parameter.grad = None
    (logits * torch.arange(logits.numel()).view(logits.shape).sin()).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", MODELS)
def test_stages_give_logits_and_gradients_of_the_model(name):
    theirs = whole_model(name)
    expected = theirs(TOKENS).logits
    expected_gradients = gradients(theirs, expected)
    model = dataclasses.replace(build_hf(run_of(MODELS[name])), weights=theirs.state_dict().__getitem__)
    for cut in ((3,), (1, 2), (1, 1, 1)):
        logits = run(stages_of(model, cut))
        same(logits, expected)
        same(gradients(model.whole, logits), expected_gradients)


def test_a_stage_takes_any_length_and_may_evaluate_before_it_trains():
    model = build_hf(run_of(MODELS["qwen2"]))
    stages = stages_of(model, (1, 2))
    with torch.inference_mode():
        first = run(stages)
    same(run(stages, TOKENS[:1, :4]), first[:1, :4].clone())
    gradients(model.whole, run(stages))


def test_what_layers_are_given_is_kept_for_few_shapes_only():
    model = build_hf(run_of(MODELS["llama"]))
    (stage,) = stages_of(model, (3,))
    expected = run([stage])
    for length in range(1, 7):
        for batch in (1, 2):
            run([stage], TOKENS[:batch, :length])
    assert len(stage.get_submodule("1").inputs._known) <= 8
    same(run([stage]), expected)


def test_bfloat16_autocast():
    stages = stages_of(build_hf(run_of(MODELS["llama"])), (1, 2))
    for stage in stages:
        stage.float()
    with torch.autocast("cpu", torch.bfloat16):
        logits = run(stages)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), run(stages), rtol=0, atol=0.01)


def test_built_on_meta_but_for_what_every_stage_needs():
    model = build_hf(run_of(MODELS["llama"]))
    assert all(parameter.is_meta for parameter in model.whole.parameters())
    buffers = dict(model.whole.named_buffers())
    assert set(buffers) == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    same(buffers["model.rotary_emb.inv_freq"], torch.tensor([1.0, 0.01]))


def test_first_weights_are_drawn_by_the_rules_of_the_model():
    config = {**MODELS["qwen2"], "hidden_size": 256, "initializer_range": 0.05}
    model = build_hf(run_of(config))
    stages_of(model, (3,))
    for path, parameter in model.whole.named_parameters():
        if path.endswith("norm.weight"):
            assert parameter.eq(1).all()
        elif path.endswith("bias"):
            assert parameter.eq(0).all()
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.1), path


def test_tied_weights_stay_tied():
    model = build_hf(run_of(MODELS["llama, tied"]))
    paths = ("model.embed_tokens.weight", "lm_head.weight")
    assert model.tied() == {paths[0]: paths}
    first, last = stages_of(model, (1, 2))
    assert first.get_submodule("0").weight is last.get_submodule("5").weight
    assert build_hf(run_of(MODELS["llama"])).tied() == {}


# Plans


def test_row_and_plan_of_llama():
    model = build_hf(run_of(MODELS["llama"], tp=2))
    assert model.before == ("model.embed_tokens",)
    assert model.layers == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert model.after == ("model.norm", "lm_head")
    assert model.plan == {
        "model.embed_tokens": "vocab",
        "lm_head": "vocab",
        "model.layers.*.self_attn.q_proj": "column",
        "model.layers.*.self_attn.k_proj": "column",
        "model.layers.*.self_attn.v_proj": "column",
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp.gate_proj": "column",
        "model.layers.*.mlp.up_proj": "column",
        "model.layers.*.mlp.down_proj": "row",
    }


def test_row_and_plan_of_gpt_neox():
    model = build_hf(run_of(MODELS["gpt_neox"], tp=2))
    assert model.before == ("gpt_neox.embed_in", "gpt_neox.emb_dropout")
    assert model.after == ("gpt_neox.final_layer_norm", "lm_head")
    assert model.plan["gpt_neox.embed_in"] == "vocab"
    assert model.plan["gpt_neox.layers.*.attention.query_key_value"] == "column"


def test_a_word_without_counterpart_is_refused_only_where_it_counts():
    config = MODELS["mixtral, experts"]
    with pytest.raises(ConfigError, match=r'mixtral says "packed_colwise" of model\.layers\.\*\.mlp\.experts\.gate_up'):
        build_hf(run_of(config, tp=2))
    own = {"model.layers.*.self_attn.*_proj": "replicated"}
    for run_config in (run_of(config), run_of(config, tp=2, tensor_plan=own)):
        plan = build_hf(run_config).plan
        assert plan["model.layers.*.self_attn.q_proj"] == "column"
        assert not any("experts" in pattern for pattern in plan)


def test_norms_of_heads_are_replicated():
    plan = build_hf(run_of(MODELS["qwen3"], tp=2)).plan
    assert plan["model.layers.*.self_attn.q_norm"] == "replicated"


def test_an_embedding_with_a_forward_of_its_own_is_not_cut():
    tied, untied = MODELS["gemma, scaled and tied"], {**MODELS["gemma, scaled and tied"], "tie_word_embeddings": False}
    for config, head in ((tied, "replicated"), (untied, "vocab")):
        plan = build_hf(run_of(config, tp=2)).plan
        assert (plan["model.embed_tokens"], plan["lm_head"]) == ("replicated", head)


OWN_PLAN = {"model.layers.*.self_attn.[qkv]_proj": "column", "model.layers.*.self_attn.o_proj": "row"}


@pytest.mark.parametrize("plan", [None, OWN_PLAN], ids=["its plan", "own plan"])
@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (4, "splits heads, but num_key_value_heads(2) is no multiple of tp(4). Set tp to 2, or"),
        (8, "splits heads, but num_attention_heads(4) is no multiple of tp(8). Set tp to 4, or"),
    ],
)
def test_heads_are_not_cut(tp, message, plan):
    given = run_of({**MODELS["llama"], "intermediate_size": 32}, tp=tp, tensor_plan=plan)
    with pytest.raises(ConfigError) as refused:
        draw(given)
    text = " ".join(str(refused.value).split())
    assert text.startswith(f"parallel.tp = {tp}: model.layers.0.self_attn.q_proj (column) {message}")


def test_a_word_that_nobody_knows(monkeypatch):
    monkeypatch.delitem(hf._STRATEGIES, "rowwise")
    message = r'llama says "rowwise" of model\.layers\.\*\.self_attn\.o_proj, which is not known here'
    with pytest.raises(ConfigError, match=message):
        build_hf(run_of(MODELS["llama"], tp=2))


def test_patterns_that_match_nothing_in_this_model_are_left_out():
    from transformers import AutoConfig

    config = {"model_type": "qwen2_moe", **GROUPED, "mlp_only_layers": [0, 1, 2]}
    assert "layers.*.mlp.experts" in AutoConfig.for_model("qwen2_moe").base_model_tp_plan
    plan = build_hf(run_of(config, tp=2)).plan
    assert plan["model.layers.*.mlp.gate_proj"] == "column"


@pytest.mark.parametrize(
    ("config", "parallel", "message"),
    [
        (MODELS["llama"], {"tp": 2, "sequence_parallel": True}, "parallel.sequence_parallel = true: attention of"),
        (
            {"model_type": "gpt_oss", **GROUPED, "num_local_experts": 3, "head_dim": 4},
            {"tp": 2},
            "parallel.tp = 2: gpt_oss has no tensor-parallel plan",
        ),
        ({"model_type": "gpt2", "n_layer": 2}, {}, 'model.factory = "hf": gpt2 has no pipeline plan'),
        ({"model_type": "vit"}, {}, 'model.factory = "hf": transformers cannot build a causal vit'),
        ({"model_type": "lama"}, {}, "Did you mean llama?"),
        ({**MODELS["llama"], "hiden_size": 3}, {}, "model.args.config.hiden_size = 3: llama has no such key"),
        ({**MODELS["llama"], "zebra": 1}, {}, "Remove it."),
        ({**MODELS["llama"], "hidden_size": "wide"}, {}, "hidden_size"),
        ({**MODELS["llama"], "hidden_size": 18}, {}, "The hidden size (18) is not a multiple"),
        ({**MODELS["llama"], "attn_implementation": "some/kernel"}, {}, "some/kernel would have to be downloaded"),
        ({**MODELS["llama"], "quantization_config": {"quant_method": "fp8"}}, {}, "quantized weights"),
    ],
)
def test_refusals(config, parallel, message):
    with pytest.raises(ConfigError) as refused:
        build_hf(run_of(config, **parallel))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "glm_moe_dsa", "num_hidden_layers": 3}, "glm_moe_dsa cannot be cut into stages: its forward"),
        (
            {"model_type": "gemma4_unified_text", "num_hidden_layers": 3},
            "model.layers.0 is not the same for all inputs",
        ),
        ({"model_type": "deepseek_v4", "num_hidden_layers": 3}, "deepseek_v4 has no place for model.hc_head.hc_fn"),
        ({"model_type": "apertus", "num_hidden_layers": 1}, "gives model.layers.0.mlp.act_fn.beta no values"),
    ],
)
def test_models_that_are_more_than_their_plan_are_refused(config, message):
    with pytest.raises(ConfigError) as refused:
        build_hf(run_of(config))
    assert message in str(refused.value)


# Folders


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("somebody wanted the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("shard", ["1GB", "4KB"])
@pytest.mark.parametrize("name", ["llama", "llama, tied", "gemma, scaled and tied"])
def test_stored_weights(tmp_path, name, shard):
    theirs = whole_model(name)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "4KB")
    model = build_model(run_of(path=tmp_path))
    assert all(parameter.is_meta for parameter in model.whole.parameters())
    same(run(stages_of(model, (1, 2))), theirs(TOKENS).logits)


def test_stored_in_bfloat16_trained_in_float32(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["llama"]), dtype=torch.bfloat16)
    stored.save_pretrained(tmp_path)
    model = build_hf(run_of(path=tmp_path))
    assert model.weights is not None
    assert model.weights("lm_head.weight").dtype == torch.bfloat16
    stages_of(model, (3,))
    same(model.whole.lm_head.weight.detach(), stored.lm_head.weight.detach().double())


@pytest.fixture
def folder(tmp_path):
    whole_model("llama").save_pretrained(tmp_path)
    return tmp_path


def refused(folder):
    with pytest.raises(ConfigError) as error:
        build_hf(run_of(path=folder))
    text = str(error.value)
    assert "model.args.path" in text
    return text


def rewrite_config(folder, **keys):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def test_pickles_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in refused(folder)


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refused(folder)


def test_a_folder_without_configuration(tmp_path):
    assert "there is no" in refused(tmp_path)
    assert "there is no" in refused("meta-llama/Llama-3")


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "none"}', '{"model_type": "llama", "hidden_size": "x"}'])
def test_a_broken_configuration(folder, text):
    (folder / "config.json").write_text(text)
    assert "transformers refuses its config.json" in refused(folder)


def test_code_in_the_folder_is_not_run(folder):
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    rewrite_config(folder, model_type="own", auto_map=code)
    assert "custom code" in refused(folder)
    rewrite_config(folder, model_type="llama")
    build_hf(run_of(path=folder))


def test_weights_of_another_model(folder):
    rewrite_config(folder, num_hidden_layers=4)
    assert "no file there has model.layers.3.self_attn.q_proj.weight (and 8 more)" in refused(folder)
    rewrite_config(folder, num_hidden_layers=3, intermediate_size=32)
    assert (
        "model.layers.0.mlp.gate_proj.weight in model.safetensors is [24, 16], but by config.json it is [32, 16]"
        in (refused(folder))
    )


def test_a_cut_off_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors cannot be read" in refused(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names ../model.safetensors"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "names pytorch_model.bin"),
        ('{"weight_map": {"a": "other.safetensors"}}', "other.safetensors cannot be read"),
    ],
)
def test_a_wrong_index(folder, index, message):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    assert message in refused(folder)


def test_buffers_that_are_stored_are_refused(folder):
    rewrite_config(folder, model_type="glm4_moe", n_routed_experts=4, num_experts_per_tok=1, head_dim=4)
    assert "is stored, but no parameter" in refused(folder)


# The package


@pytest.mark.parametrize("package", ["transformers", "safetensors"])
def test_a_missing_package(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"model\.factory = \"hf\".*(\n.*)?pip install 'parallel3d\[hf\]'"):
        build_model(run_of(MODELS["llama"]))


def test_an_old_package(monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    with pytest.raises(ConfigError, match=r"transformers 4\.57\.6 is too old: 5 or later is needed"):
        build_hf(run_of(MODELS["llama"]))


def test_other_models_need_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert build_model(RunConfig()).layers
