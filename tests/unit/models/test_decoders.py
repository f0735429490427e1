"""The built-in GPT and Llama-style decoder beside plain formulas, and on cut widths."""

from __future__ import annotations

import copy
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from parallel3d.config.sections import GptArgs, LlamaArgs
from parallel3d.models.gpt import build_gpt
from parallel3d.models.layered import LayeredModel
from parallel3d.models.llama import Rotary, build_llama
from parallel3d.models.materialize import materialize
from runtime.errors import InvalidCall
from tests.support.processes import ROOT

GPT = GptArgs(layers=3, width=12, heads=3, vocabulary=17, sequence=7)
LLAMA = LlamaArgs(layers=3, width=16, heads=4, kv_heads=2, mlp_width=24, vocabulary=17, sequence=7)


def real(model: LayeredModel) -> nn.Module:
    """In float64, and without small first values, which would hide mistakes."""
    materialize(model, [("", model.whole)], 3, torch.float64, "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.whole.parameters():
            parameter += torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4
    return model.whole


def tokens(length: int = 7) -> torch.Tensor:
    return (torch.arange(2 * length) * 5 % 17).reshape(2, length)


# Names and shapes.

GPT_BLOCK = {
    "attention_norm.weight": (12,),
    "attention_norm.bias": (12,),
    **{f"attention.{name}.weight": (12, 12) for name in "qkvo"},
    **{f"attention.{name}.bias": (12,) for name in "qkvo"},
    "mlp_norm.weight": (12,),
    "mlp_norm.bias": (12,),
    "mlp.up.weight": (48, 12),
    "mlp.up.bias": (48,),
    "mlp.down.weight": (12, 48),
    "mlp.down.bias": (12,),
}
LLAMA_BLOCK = {
    "attention_norm.weight": (16,),
    "attention.q.weight": (16, 16),
    "attention.k.weight": (8, 16),
    "attention.v.weight": (8, 16),
    "attention.o.weight": (16, 16),
    "mlp_norm.weight": (16,),
    "mlp.gate.weight": (24, 16),
    "mlp.up.weight": (24, 16),
    "mlp.down.weight": (16, 24),
}


def shapes(model: LayeredModel) -> dict[str, tuple[int, ...]]:
    assert all(each.is_meta for each in model.whole.parameters())
    assert list(model.whole.buffers()) == []
    return {name: tuple(each.shape) for name, each in model.whole.named_parameters()}


def test_what_the_parameters_of_a_gpt_are_called():
    assert shapes(build_gpt(GPT)) == {
        "embedding.tokens.weight": (17, 12),
        "embedding.positions.weight": (7, 12),
        **{f"blocks.{index}.{name}": shape for index in range(3) for name, shape in GPT_BLOCK.items()},
        "norm.weight": (12,),
        "norm.bias": (12,),
        "head.weight": (17, 12),
    }


def test_what_the_parameters_of_a_llama_are_called():
    assert shapes(build_llama(LLAMA)) == {
        "embedding.tokens.weight": (17, 16),
        **{f"blocks.{index}.{name}": shape for index in range(3) for name, shape in LLAMA_BLOCK.items()},
        "norm.weight": (16,),
        "head.weight": (17, 16),
    }


def test_a_llama_chooses_its_own_widths():
    found = shapes(build_llama(LlamaArgs(layers=1, width=512, heads=8)))
    # 8/3 x 512 = 1365.3; the next multiple of 64.
    assert found["blocks.0.mlp.up.weight"] == (1408, 512)
    assert found["blocks.0.attention.k.weight"] == (512, 512)
    assert shapes(build_llama(LlamaArgs(layers=1, width=24, heads=2)))["blocks.0.mlp.up.weight"] == (64, 24)


@pytest.mark.parametrize("model", [build_gpt(GPT), build_llama(LLAMA)])
def test_the_row_and_the_plan(model):
    assert (model.before, model.layers) == (("embedding",), ("blocks.0", "blocks.1", "blocks.2"))
    assert (model.after, model.tied()) == (("norm", "head"), {})
    patterns = {pattern.replace("*", str(index)): word for pattern, word in model.plan.items() for index in range(3)}
    linears = {path for path, each in model.whole.named_modules() if isinstance(each, nn.Linear)}
    assert set(patterns) == {*linears, "embedding.tokens"}
    rows = {pattern for pattern, word in model.plan.items() if word == "row"}
    assert rows == {"blocks.*.attention.o", "blocks.*.mlp.down"}
    assert {pattern for pattern, word in model.plan.items() if word == "vocab"} == {"embedding.tokens", "head"}
    assert set(model.plan.values()) == {"column", "row", "vocab"}


@pytest.mark.parametrize(
    "model", [build_gpt(GPT.model_copy(update={"tied": True})), build_llama(LLAMA.model_copy(update={"tied": True}))]
)
def test_a_tied_head_is_the_embedding(model):
    assert model.tied() == {"embedding.tokens.weight": ("embedding.tokens.weight", "head.weight")}


# The GPT.


def plain_gpt(weights: dict[str, torch.Tensor], words: torch.Tensor, heads: int) -> torch.Tensor:
    """Without a module or a fused kernel."""

    def linear(name: str, values: torch.Tensor) -> torch.Tensor:
        return values @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def norm(name: str, values: torch.Tensor) -> torch.Tensor:
        centred = values - values.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attention(name: str, values: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.stack(linear(f"{name}.{each}", values).chunk(heads, -1)) for each in "qkv")
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        return linear(f"{name}.o", torch.cat(list(mixed), -1))

    values = weights["embedding.tokens.weight"][words] + weights["embedding.positions.weight"][: words.shape[1]]
    for index in range(3):
        block = f"blocks.{index}"
        values = values + attention(f"{block}.attention", norm(f"{block}.attention_norm", values))
        inner = linear(f"{block}.mlp.up", norm(f"{block}.mlp_norm", values))
        gelu = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
        values = values + linear(f"{block}.mlp.down", gelu)
    return linear("head", norm("norm", values))


@pytest.mark.parametrize("length", [1, 4, 7])
def test_a_gpt_equals_its_formulas(length):
    model = real(build_gpt(GPT))
    expected = plain_gpt(model.state_dict(), tokens(length), GPT.heads)
    torch.testing.assert_close(model(tokens(length)), expected, rtol=1e-12, atol=1e-12)


def test_a_sample_longer_than_the_positions_is_refused():
    with pytest.raises(InvalidCall) as error:
        build_gpt(GPT).whole(torch.zeros(1, 8, dtype=torch.long, device="meta"))
    assert str(error.value) == "samples of 8 tokens, but model.args.sequence = 7: give no more than that."


# The Llama.


def plain_llama(weights: dict[str, torch.Tensor], words: torch.Tensor, args: LlamaArgs) -> torch.Tensor:
    """With complex numbers for the rotation, and with keys and values repeated for each head."""
    width, length = args.width // args.heads, words.shape[1]
    speeds = torch.tensor([args.rope_base ** (-2 * pair / width) for pair in range(width // 2)], dtype=torch.float64)
    turns = torch.polar(torch.ones(()).double(), torch.arange(length).unsqueeze(-1) * speeds)

    def norm(name: str, values: torch.Tensor) -> torch.Tensor:
        return values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    def turned(heads: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(*heads.chunk(2, -1)) * turns
        return torch.cat((pairs.real, pairs.imag), -1)

    def attention(name: str, values: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.stack((values @ weights[f"{name}.{each}.weight"].T).split(width, -1)) for each in "qkv")
        k, v = (torch.stack([each[head * len(each) // len(q)] for head in range(len(q))]) for each in (k, v))
        scores = turned(q) @ turned(k).transpose(-1, -2) / math.sqrt(width)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        return torch.cat(list(mixed), -1) @ weights[f"{name}.o.weight"].T

    values = weights["embedding.tokens.weight"][words]
    for index in range(args.layers):
        block = f"blocks.{index}"
        values = values + attention(f"{block}.attention", norm(f"{block}.attention_norm", values))
        inner = norm(f"{block}.mlp_norm", values)
        gate, up = (inner @ weights[f"{block}.mlp.{each}.weight"].T for each in ("gate", "up"))
        values = values + (gate * gate.sigmoid() * up) @ weights[f"{block}.mlp.down.weight"].T
    return norm("norm", values) @ weights["head.weight"].T


@pytest.mark.parametrize("kv_heads", [None, 1, 2, 4])
@pytest.mark.parametrize("length", [1, 7, 20])
def test_a_llama_equals_its_formulas(kv_heads, length):
    args = LLAMA.model_copy(update={"kv_heads": kv_heads, "rope_base": 100.0})
    model = real(build_llama(args))
    expected = plain_llama(model.state_dict(), tokens(length), args)
    torch.testing.assert_close(model(tokens(length)), expected, rtol=1e-11, atol=1e-11)


def test_grouped_queries_equal_repeated_heads():
    few = real(build_llama(LLAMA))
    many = real(build_llama(LLAMA.model_copy(update={"kv_heads": 4})))
    weights = few.state_dict()
    for name in weights:
        if name.endswith((".k.weight", ".v.weight")):
            weights[name] = weights[name].unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
    many.load_state_dict(weights)
    torch.testing.assert_close(many(tokens()), few(tokens()), rtol=1e-12, atol=1e-12)


def test_a_rotated_query_and_key_see_only_how_far_they_are_apart():
    torch.manual_seed(0)
    rotary, query, key = Rotary(8, 10_000.0), *torch.randn(2, 8, dtype=torch.float64)
    queries, keys = (rotary(each.expand(1, 1, 30, 8))[0, 0] for each in (query, key))
    scores = queries @ keys.T
    for distance in (-29, -3, 0, 1, 7):
        same = scores.diagonal(distance)
        torch.testing.assert_close(same, same[:1].expand_as(same))
    assert not torch.isclose(scores[0, 0], scores[5, 0])
    torch.testing.assert_close(scores[0, 0], query @ key)


def test_rotation_keeps_the_type_and_is_done_in_float32_at_least():
    rotary = Rotary(8, 10_000.0)
    heads = torch.randn(1, 1, 5000, 8, generator=torch.Generator().manual_seed(0))
    short = rotary(heads.bfloat16())
    assert short.dtype == torch.bfloat16
    torch.testing.assert_close(short.float(), rotary(heads.bfloat16().float()), rtol=2**-8, atol=1e-3)
    assert rotary(heads.double()).dtype == torch.float64


def test_rotation_made_without_gradients_can_be_trained_with():
    rotary = Rotary(4, 100.0)
    with torch.inference_mode():
        rotary(torch.ones(1, 1, 3, 4))
    heads = torch.ones(1, 1, 3, 4, requires_grad=True)
    rotary(heads).sum().backward()
    assert heads.grad is not None


# Both.


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight, linear.bias = nn.Parameter(weight), bias if bias is None else nn.Parameter(bias)
    return linear


def part_of(attention: nn.Module, rank: int, size: int) -> nn.Module:
    """As a tensor-parallel rank has it."""
    part = copy.deepcopy(attention)
    for name in "qkv":
        whole = attention.get_submodule(name)
        bias = None if whole.bias is None else whole.bias.chunk(size)[rank]
        part.add_module(name, linear_of(whole.weight.chunk(size)[rank], bias))
    part.o = linear_of(attention.o.weight.chunk(size, dim=1)[rank], None)
    return part


@pytest.mark.parametrize(("model", "size"), [(build_gpt(GPT), 3), (build_llama(LLAMA), 2)])
def test_attention_works_on_some_of_the_heads(model, size):
    attention = real(model).blocks[0].attention
    values = torch.randn(2, 5, attention.q.in_features, generator=torch.Generator().manual_seed(1)).double()
    total = sum(part_of(attention, rank, size)(values) for rank in range(size))
    expected = attention(values) - (0 if attention.o.bias is None else attention.o.bias)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("build", [build_gpt, build_llama])
def test_dropout_drops_in_training_only(build):
    args = (GPT if build is build_gpt else LLAMA).model_copy(update={"dropout": 0.5})
    model = real(build(args))
    torch.manual_seed(0)
    one, other = model(tokens()), model(tokens())
    assert not torch.allclose(one, other)
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))
    places = [path for path, each in model.named_modules() if isinstance(each, nn.Dropout)]
    assert places == ["embedding.dropout", *(f"blocks.{index}.dropout" for index in range(3))]


@pytest.mark.parametrize("model", [build_gpt(GPT), build_llama(LLAMA)])
def test_both_work_under_autocast(model):
    materialize(model, [("", model.whole)], 3, torch.float32, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.whole(tokens())
    functional.cross_entropy(logits.float().flatten(0, 1), tokens().flatten()).backward()
    torch.testing.assert_close(logits.float(), model.whole(tokens()), rtol=0.1, atol=0.02)
    assert all(each.grad.dtype == torch.float32 for each in model.whole.parameters())


def test_a_model_is_built_without_torchs_compiler():
    """Which takes 2 seconds to import, on every rank."""
    source = (
        "from parallel3d.config.sections import GptArgs, LlamaArgs; from parallel3d.models.gpt import build_gpt; "
        "from parallel3d.models.llama import build_llama; import sys; "
        "build_gpt(GptArgs(layers=1)), build_llama(LlamaArgs(layers=1)); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")
