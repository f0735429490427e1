"""The YAML file as frozen, strict models. The docstring under a field is its entry in docs/configuration.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from parallel3d.config import yaml_scalars
from parallel3d.config.fields import (
    BUILT_IN_MODELS,
    AdaptiveTable,
    Backend,
    Betas,
    CommStrategy,
    Count,
    DataSource,
    Duration,
    Factory,
    HostAddress,
    LayersPerStage,
    LearningRate,
    LearningRateSchedule,
    Loss,
    ModelFactory,
    OptimizerName,
    Order,
    Port,
    Precision,
    Probability,
    Schedule,
    Size,
    TensorPlan,
    TokenType,
)
from parallel3d.pipeline.schedules.limits import IMPLIES_TWO_VIRTUAL_STAGES


class Section(BaseModel):
    """Strict and frozen: no type conversion, unknown keys are errors, a built value never changes."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=False
    )


class GptArgs(Section):
    """The built-in GPT: pre-norm blocks, learned positions, biases."""

    layers: Count = 24
    """Number of transformer blocks, split over `parallel.pp` x `pipeline.virtual_stages` stages as
    `pipeline.layers_per_stage` says."""
    width: Count = 512
    """Size of the hidden state; a multiple of `heads`."""
    heads: Count = 8
    """Attention heads per block; each has `width / heads` channels."""
    vocabulary: Count = 256
    """Number of different tokens. The default fits bytes, the tokens of `data.source: text`."""
    sequence: Count = 128
    """Tokens per sample, and number of learned positions."""
    dropout: Probability = 0.0
    """Share of activations dropped in training, from 0 to below 1. With 0, every mesh gives the same losses."""
    tied: bool = False
    """Whether the head shares its weight with the token embedding."""


class LlamaArgs(Section):
    """The built-in Llama-style decoder: rotary positions, RMSNorm, grouped-query attention, SwiGLU, no biases."""

    layers: Count = 24
    """Number of decoder blocks, split into stages as for `gpt`."""
    width: Count = 512
    """Size of the hidden state; a multiple of `heads`, with an even number of channels per head."""
    heads: Count = 8
    """Query heads per block."""
    kv_heads: Count | None = None
    """Key and value heads per block; each serves `heads / kv_heads` query heads. Null: the same as `heads`."""
    mlp_width: Count | None = None
    """Hidden size of the MLP. Null: 8/3 of `width`, rounded up to a multiple of 64."""
    vocabulary: Count = 256
    """Number of different tokens."""
    sequence: Count = 128
    """Tokens per sample, unless `data.sequence` is set. Rotary positions have no upper limit."""
    rope_base: Annotated[float, Field(gt=1, le=1e12)] = 10_000.0
    """Base of the rotary frequencies."""
    dropout: Probability = 0.0
    """Share of activations dropped in training, from 0 to below 1."""
    tied: bool = False
    """Whether the head shares its weight with the token embedding."""

    @property
    def num_kv_heads(self) -> int:
        """`kv_heads`, or its default."""
        return self.kv_heads or self.heads

    @property
    def inner_width(self) -> int:
        """`mlp_width`, or its default."""
        return self.mlp_width or -(-8 * self.width // (3 * 64)) * 64


class HfArgs(Section):
    """A causal language model of Hugging Face `transformers`, which must be installed."""

    path: str | None = None
    """A folder with `config.json` and weights, as `save_pretrained` writes it. Nothing is downloaded."""
    config: dict[str, Any] | None = None
    """Instead of `path`: the model's configuration with its `model_type`, such as `{model_type: llama, hidden_size:
    64}`. Weights start at random."""
    sequence: Count = 128
    """Tokens per sample, unless `data.sequence` is set."""


class GptModel(Section):
    """The model and its loss."""

    factory: Literal["gpt"] = "gpt"
    """`gpt`, `llama`, `hf` (a causal model of Hugging Face `transformers`), or `"package.module:callable"`, your own,
    which returns an `nn.Module`. The current folder is on the import path."""
    args: GptArgs = GptArgs()
    """Keyword arguments of the factory. For `gpt`, `llama` and `hf`: the keys below; for your own: any."""
    loss: Loss = "cross_entropy"
    """`cross_entropy`, which ignores targets of -100, `mse`, or `"package.module:function"`: a function of (output,
    target) that returns the mean over its samples, or (sum, count)."""


class LlamaModel(Section):
    """The built-in Llama-style decoder."""

    factory: Literal["llama"]
    """`llama`."""
    args: LlamaArgs = LlamaArgs()
    """Keyword arguments of the model."""
    loss: Loss = "cross_entropy"
    """As for `gpt`."""


class HfModel(Section):
    """A causal language model of Hugging Face `transformers`."""

    factory: Literal["hf"]
    """`hf`."""
    args: HfArgs = HfArgs()
    """Keyword arguments of the model."""
    loss: Loss = "cross_entropy"
    """As for `gpt`."""


class CustomModel(Section):
    """A model of the user's own."""

    factory: ModelFactory
    """`"package.module:callable"`, which returns an `nn.Module`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    loss: Loss = "cross_entropy"
    """As for `gpt`."""
    layers: str | None = None
    """Only for a factory of your own: the layers that are split into stages, such as `blocks.*`, the children of the
    model's `blocks` in order. Children of the model before `blocks` run one after the other before the first layer,
    children after it run after the last. Null: the children of an `nn.Sequential`, or what the model's method
    `pipeline_layers()` returns."""


def _kind_of_model(value: Any) -> str:
    """The union's tag, a key of `MODELS`."""
    factory = value.get("factory", "gpt") if isinstance(value, dict) else getattr(value, "factory", "gpt")
    return factory if factory in BUILT_IN_MODELS else "custom"


Model = Annotated[
    Annotated[GptModel, Tag("gpt")]
    | Annotated[LlamaModel, Tag("llama")]
    | Annotated[HfModel, Tag("hf")]
    | Annotated[CustomModel, Tag("custom")],
    Discriminator(_kind_of_model),
]
MODELS: Mapping[str, type[Section]] = {"gpt": GptModel, "llama": LlamaModel, "hf": HfModel, "custom": CustomModel}
ARGS: Mapping[str, type[Section]] = {"gpt": GptArgs, "llama": LlamaArgs, "hf": HfArgs}
"""The `model.args` of built-in models; a user's factory takes any."""


class Data(Section):
    """Where samples come from."""

    source: DataSource = "text"
    """`text`: bytes of text files. `tokens`: a file of token numbers, mapped from disk. Both are split into samples of
    `sequence` tokens, with the following token of each as its target. Ignored if `factory` is set."""
    path: str | None = None
    """For `text`: a file, or a folder whose files are read recursively in the order of their paths, except hidden and
    empty files and files with a zero byte in their first 8192 bytes, which are no text. Null: the sources of Python's
    standard library without its tests, so that a first run needs no download. For `tokens`: the file."""
    token_type: TokenType = "uint16"
    """Type of the numbers in a token file, which has no header and is little-endian: `uint8`, `uint16`, `int32` or
    `int64`. Ignored for other sources."""
    sequence: Count | None = None
    """Tokens per sample. Null: `model.args.sequence`, or 128 if your own model has no such keyword. Ignored if
    `factory` is set."""
    shuffle: bool = True
    """Whether each pass over the data has a random order of its own, from `train.seed`. False: the order of the
    data."""
    prefetch: Count = 2
    """Number of steps whose samples are loaded ahead, in a thread of each rank."""
    factory: Factory | None = None
    """`"package.module:callable"` that returns a map-style dataset: `len(d)`, and `d[i]` returns (input, target). It is
    called without arguments on every rank, seeded with `train.seed`. Inputs and targets are tensors, arrays or numbers,
    which are stacked; an input may also be a tuple of them. `d[i]` runs in a separate thread and must return the same
    on every rank. Cannot be combined with `path`."""


class Parallel(Section):
    """The rank mesh. dp x tp x pp must equal the number of ranks started."""

    dp: Count = 1
    """Data-parallel replicas; each takes an equal part of every batch."""
    tp: Count = 1
    """Tensor-parallel ranks; each layer is split over them."""
    pp: Count = 1
    """Pipeline-parallel ranks; each holds some of the layers."""
    order: Order = "auto"
    """How ranks are numbered, slowest axis first, such as `dp-tp-pp` or `pp-dp-tp`; or a list with one `[dp, tp, pp]`
    per rank. `auto`: `dp-tp-pp` if tp x pp ranks fit one host, else `pp-dp-tp`."""
    tensor_plan: TensorPlan | None = None
    """How modules are split over the tensor-parallel ranks: a map from patterns of module paths to `column`, `row`,
    `vocab` or `replicated`, such as `{"blocks.*.up": column, "blocks.*.down": row}`. If several patterns match a
    module, the last counts; a module without a match is replicated; a pattern without a match is an error. Null: the
    model's own plan."""
    sequence_parallel: bool = False
    """Whether activations between tensor-parallel layers are split along the sequence, dimension 1, instead of repeated
    on every rank. That takes less memory, and replaces each all-reduce by an all-gather and a reduce-scatter."""


class Pipeline(Section):
    """How microbatches flow through the stages."""

    schedule: Schedule = "1f1b"
    """`gpipe`, `1f1b`, `interleaved`, `round-robin`, `zero-bubble`, `zbv`, `dualpipe-v`, or `"csv:PATH"`, a table of
    your own. The default keeps fewer activations than `gpipe` and needs no virtual stages."""
    microbatches: Count = 1
    """Number of microbatches into which each replica's part of a batch is split. More make the bubble smaller.
    `interleaved` needs a multiple of `parallel.pp`, `dualpipe-v` at least 2 x pp."""
    virtual_stages: Count = 1
    """Stages per rank: 2 or more for `interleaved` and `round-robin`; 2 for `zbv` and `dualpipe-v`, also if left out;
    the table's own number for `csv:`; 1 for the others."""
    layers_per_stage: LayersPerStage | None = None
    """Layers of each stage, first stage first: pp x virtual_stages numbers whose sum is the model's number of layers.
    Or a method: `even`: numbers that differ by at most one, larger ones first. `parameters`: the largest stage has as
    few parameters as possible. `profile`: the slowest stage is as fast as possible, by the time of each layer, measured
    at the start. Null: `even`."""

    @model_validator(mode="before")
    @classmethod
    def _imply_virtual_stages(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "virtual_stages" in values:
            return values
        schedule = values.get("schedule")
        implied = isinstance(schedule, str) and schedule in IMPLIES_TWO_VIRTUAL_STAGES
        return {**values, "virtual_stages": 2} if implied else values


class Comm(Section):
    """How ranks communicate."""

    backend: Backend = "auto"
    """`auto`: `nccl` if there is a CUDA device; otherwise shared memory between ranks of a host and `gloo` between
    hosts. `gloo` or `nccl`: only that."""
    strategy: CommStrategy = "default"
    """Algorithm of all-reduces that don't name one; partial sums inside tensor-parallel layers have their own.
    `default`: the transport's: direct slice reduction in shared memory, which adds up in rank order on every mesh, or
    torch's. `ring`: reduce-scatter and all-gather around a ring. `tree`: a double binary tree. `hierarchical`: inside
    each host, across hosts, inside each host. `adaptive`: the fastest for each size, measured when groups form. All but
    `default` in shared memory have summation orders of their own."""
    strategy_table: AdaptiveTable | None = None
    """For `adaptive`, instead of measuring: a map from sizes to strategies, such as `{"64 KiB": tree, "1 GiB": ring}`;
    a size without a unit is bytes, in quotes: `"65536"`. A strategy is used up to its size, the last one also above it.
    An error unless `strategy` is `adaptive`."""
    bucket_size: Size = 25 << 20
    """Approximate size of the buckets in which gradients are reduced: an integer is bytes, text has a unit. The default
    is 25 MiB, as in torch's DDP."""
    timeout: Duration = 30.0
    """Longest wait for any operation between ranks: a number is seconds, text has a unit. After it the run fails with
    an error that names the missing rank."""
    startup_timeout: Duration = 120.0
    """Longest wait for all ranks to connect at the start: a number is seconds, text has a unit."""


class Memory(Section):
    """How much memory a rank may use."""

    budget: Size = 8 << 30
    """Memory of one rank for weights, gradients, optimizer state and activations: an integer is bytes, text has a unit.
    Nothing enforces it: reports show it beside the memory used, and the bottlenecks `memory_pressure` and
    `memory_imbalance` warn near it. The default is 8 GiB."""


class Optimizer(Section):
    """How weights are updated."""

    name: OptimizerName = "adamw"
    """`adamw` or `sgd`."""
    lr: LearningRate = 3.0e-4
    """Learning rate, above 0."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of AdamW's two running means, each from 0 to below 1. Ignored for `sgd`."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1.0e-8
    """Added to AdamW's denominator. Ignored for `sgd`."""
    momentum: Probability = 0.0
    """Momentum of `sgd`, from 0 to below 1. Ignored for `adamw`."""
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Weight decay. Null: torch's default, 0.01 for `adamw` and 0 for `sgd`."""
    schedule: LearningRateSchedule = "constant"
    """Learning rate after the warm-up: `constant`, or `cosine` down to `min_lr` at the last step."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**12)] = 0
    """Steps in which the learning rate grows linearly to `lr`, before `schedule` begins."""
    min_lr: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Learning rate at the end of `cosine`, at most `lr`. Ignored for `constant`."""
    clip_norm: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Largest norm of all gradients together; gradients above it are scaled down to it. Null: no clipping."""
    shard: bool = False
    """ZeRO-1: each data-parallel replica keeps and updates its part of the optimizer's state. The weights are the same
    to the bit."""


class Train(Section):
    """How long and on how many samples to train."""

    steps: Annotated[int, Field(ge=1, le=10**12)] = 100
    """Number of optimizer steps."""
    batch_size: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Samples per step over the whole mesh; a multiple of dp x microbatches. Null: dp x microbatches, which makes
    microbatches of one sample."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of all random numbers: initial weights, sample order, dropout."""
    precision: Precision = "float32"
    """`float32` or `float64`: type of weights and activations. `bfloat16`: activations under autocast, weights in
    float32."""


class Monitoring(Section):
    """How the run is observed: where its time goes, found while it runs and served for Prometheus and browsers."""

    enabled: bool = True
    """Whether ranks record events and the run serves them. False: no attribution of time, no bottlenecks, no endpoint;
    the run's folder still has losses and step times."""
    host: HostAddress = "127.0.0.1"
    """Address of this host to listen on; `0.0.0.0` and `::` are all addresses. Any but a loopback address needs
    `token_file`, `tls_certificate` and `tls_key`."""
    port: Port | None = None
    """Port of the run's endpoint, which serves `/metrics` and the page. A port in use is an error. Null: a free one,
    written to `endpoints.json`."""
    per_rank: bool = False
    """Whether each rank also serves its own `/metrics`, on a free port of its host's loopback address. The run's
    endpoint lists them at `/sd` for Prometheus' HTTP service discovery."""
    token_file: str | None = None
    """File with the token that the page requires, and `/metrics` too on other addresses than loopback: text of at least
    16 characters without spaces. Null: a new token for each run, in `endpoints.json`."""
    tls_certificate: str | None = None
    """File with the endpoint's certificate and its chain, in PEM. Null: no TLS."""
    tls_key: str | None = None
    """File with the certificate's key, in PEM, without a passphrase."""
    linger_seconds: Annotated[float, Field(ge=0, le=600)] = 15.0
    """After a failed run: longest time that its endpoint waits for one more scrape, so that Prometheus sees the
    failure; a scrape interval is enough. Ignored if the run succeeded or was never scraped."""
    trace_steps: Annotated[int, Field(ge=0, le=1000)] = 3
    """Number of last steps in `trace.json.gz`."""


class Runtime(Section):
    """Threads and folder of the run."""

    threads: Count | None = None
    """torch threads per rank. Null: max(1, cores // ranks on this host)."""
    run_dir: str | None = None
    """Folder that the run writes; an error if it is not empty. Null: `runs/<run_id>`."""


class RunConfig(Section):
    """One run, as its YAML file describes it. `load_config` makes one and also checks rules over several keys."""

    model: Model = GptModel()
    """The model and its loss."""
    data: Data = Data()
    """Where samples come from."""
    parallel: Parallel = Parallel()
    """The rank mesh. dp x tp x pp must equal the number of ranks started."""
    pipeline: Pipeline = Pipeline()
    """How microbatches flow through the stages."""
    comm: Comm = Comm()
    """How ranks communicate."""
    memory: Memory = Memory()
    """How much memory a rank may use."""
    optimizer: Optimizer = Optimizer()
    """How weights are updated."""
    train: Train = Train()
    """How long and on how many samples to train."""
    monitoring: Monitoring = Monitoring()
    """How the run is observed: where its time goes, found while it runs and served for Prometheus and browsers."""
    runtime: Runtime = Runtime()
    """Threads and folder of the run."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the mesh."""
        return self.parallel.dp * self.parallel.tp * self.parallel.pp

    @property
    def num_stages(self) -> int:
        """Pipeline stages, virtual ones included."""
        return self.parallel.pp * self.pipeline.virtual_stages

    @property
    def batch_size(self) -> int:
        """Samples per step over the whole mesh."""
        return self.train.batch_size or self.parallel.dp * self.pipeline.microbatches

    @property
    def sequence(self) -> int:
        """Tokens per sample; meaningless with `data.factory`."""
        args = self.model.args
        of_model = args.get("sequence") if isinstance(args, dict) else args.sequence
        return self.data.sequence or (of_model if type(of_model) is int and of_model > 0 else GptArgs().sequence)

    def to_yaml(self) -> str:
        """All keys with their values, as YAML that `load_config` reads back to an equal config."""
        return yaml_scalars.dump(self.model_dump(mode="json"))
