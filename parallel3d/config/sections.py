"""The YAML file as frozen, strict models. The docstring under a field is its entry in the reference."""

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
    """Nothing is guessed: text is no number, an unknown key is an error, a built value never changes."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=False
    )


class GptArgs(Section):
    """The built-in GPT: pre-norm blocks, learned positions, biases, an untied head unless asked."""

    layers: Count = 24
    """Transformer blocks. They are split over `parallel.pp` x `pipeline.virtual_stages` stages, evenly
    unless `pipeline.layers_per_stage` says otherwise."""
    width: Count = 512
    """Size of the hidden state; a multiple of `heads`."""
    heads: Count = 8
    """Attention heads of a block; each has `width / heads` channels."""
    vocabulary: Count = 256
    """Different tokens. The default fits bytes, which is what `data.source: text` gives."""
    sequence: Count = 128
    """Tokens of one sample."""
    dropout: Probability = 0.0
    """Share of activations dropped in training, from 0 to below 1. At 0 every mesh gives the same losses."""
    tied: bool = False
    """Whether the head's weight is the token embedding's."""


class LlamaArgs(Section):
    """The built-in Llama-style decoder: rotary positions, RMSNorm, grouped-query attention, SwiGLU, no biases."""

    layers: Count = 24
    """Decoder blocks."""
    width: Count = 512
    """Size of the hidden state; a multiple of `heads`."""
    heads: Count = 8
    """Query heads of a block."""
    kv_heads: Count | None = None
    """Key and value heads, each shared by `heads / kv_heads` query heads. Null: as many as `heads`."""
    mlp_width: Count | None = None
    """Size between the MLP's two layers. Null: 8/3 of `width`, up to the next multiple of 64."""
    vocabulary: Count = 256
    """Different tokens."""
    sequence: Count = 128
    """Tokens of one sample."""
    rope_base: Annotated[float, Field(gt=1, le=1e12)] = 10_000.0
    """Base of the rotary frequencies."""
    dropout: Probability = 0.0
    """Share of activations dropped in training, from 0 to below 1."""
    tied: bool = False
    """Whether the head's weight is the token embedding's."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads, where none were given too."""
        return self.kv_heads or self.heads

    @property
    def inner_width(self) -> int:
        """The MLP's size, where none was given too."""
        return self.mlp_width or -(-8 * self.width // (3 * 64)) * 64


class HfArgs(Section):
    """A causal language model of Hugging Face `transformers`, which has to be installed."""

    path: str | None = None
    """A folder with `config.json` and weights, as `save_pretrained` writes it. Nothing is downloaded."""
    config: dict[str, Any] | None = None
    """Instead of `path`: the model's own configuration, with its `model_type`, such as `{model_type: llama,
    hidden_size: 64}`. The weights begin at random."""
    sequence: Count = 128
    """Tokens of one sample."""


class GptModel(Section):
    """What is trained, and how its error is measured."""

    factory: Literal["gpt"] = "gpt"
    """`gpt`, `llama`, `hf` (a causal model of Hugging Face `transformers`), or `"package.module:callable"`: your own,
    which returns an `nn.Module`. The current folder is on the import path."""
    args: GptArgs = GptArgs()
    """The factory's keywords. For a factory of your own: any; for `gpt`, `llama` and `hf`: those below."""
    loss: Loss = "cross_entropy"
    """`cross_entropy`, `mse`, or `"package.module:function"` of (output, target) that returns a mean over
    the samples it is given, or (sum, count). `cross_entropy` leaves out targets of -100."""


class LlamaModel(Section):
    """The built-in Llama-style decoder."""

    factory: Literal["llama"]
    """`llama`."""
    args: LlamaArgs = LlamaArgs()
    """Its keywords."""
    loss: Loss = "cross_entropy"
    """As for `gpt`."""


class HfModel(Section):
    """A causal language model of Hugging Face `transformers`."""

    factory: Literal["hf"]
    """`hf`."""
    args: HfArgs = HfArgs()
    """Its keywords."""
    loss: Loss = "cross_entropy"
    """As for `gpt`."""


class CustomModel(Section):
    """A model of the user's own."""

    factory: ModelFactory
    """`"package.module:callable"`, which returns an `nn.Module`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """The keywords that the factory is called with."""
    loss: Loss = "cross_entropy"
    """As for `gpt`."""
    layers: str | None = None
    """For a factory of your own: where the layers are that are cut into stages, such as `blocks.*`: the children of
    the model's `blocks`, in order. The model's other children that stand before `blocks` are called before the first
    layer, one after the other, those that stand after it after the last. Null: the children of an `nn.Sequential`, or
    what the model's method `pipeline_layers()` gives."""


def _kind_of_model(value: Any) -> str:
    """The tag, a key of `MODELS`."""
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
"""What `model.args` holds; a factory of the user's own has keywords of its own."""


class Data(Section):
    """Where samples come from."""

    source: DataSource = "text"
    """`text`: bytes of text files. `tokens`: a file of token numbers, mapped from disk. Both are cut into samples of
    `sequence` tokens, each with the tokens that follow as its target. Not read when `factory` is given."""
    path: str | None = None
    """`text`: a file, taken as it is; or a folder, of which all files are read, also in folders inside, one after the
    other in the order of their paths, except hidden ones, empty ones and those with a zero byte among their first
    8192, which are no text. Null: the Python standard library's own sources without its tests, so that a first run
    needs no download. `tokens`: the file."""
    token_type: TokenType = "uint16"
    """Of the numbers in a file of tokens, which has nothing else in it, little-endian: `uint8`, `uint16`, `int32` or
    `int64`. Not read for other sources."""
    sequence: Count | None = None
    """Tokens of one sample. Null: `model.args.sequence`, or 128 where a model of your own has no such keyword. Not read
    when `factory` is given."""
    shuffle: bool = True
    """Whether every pass over the data has an order of its own, drawn from `train.seed`; else that of the data."""
    prefetch: Count = 2
    """Steps whose samples are loaded ahead, in a thread of each rank."""
    factory: Factory | None = None
    """`"package.module:callable"` that returns a map-style dataset: `len(d)`, and `d[i]` gives (input, target). It is
    called without arguments, on every rank with the same random numbers, those of `train.seed`. Inputs and targets are
    tensors, arrays or numbers, which are stacked; an input may also be a tuple of them. `d[i]` is called in a thread
    of its own, and must give the same on every rank. Cannot stand beside `path`."""


class Parallel(Section):
    """The rank mesh. dp x tp x pp must be the number of ranks that are started."""

    dp: Count = 1
    """Data-parallel replicas; each takes an equal part of every batch."""
    tp: Count = 1
    """Tensor-parallel ranks that share each layer."""
    pp: Count = 1
    """Pipeline-parallel ranks, each with one part of the layers."""
    order: Order = "auto"
    """How ranks are numbered, slowest axis first, such as `dp-tp-pp` or `pp-dp-tp`; or a table with one
    `[dp, tp, pp]` a rank. `auto` is `dp-tp-pp` when tp x pp ranks fit one host, else `pp-dp-tp`."""
    tensor_plan: TensorPlan | None = None
    """How modules are cut over the tensor-parallel ranks: from patterns of their paths to `column`, `row`, `vocab` or
    `replicated`, such as `{"blocks.*.up": column, "blocks.*.down": row}`. A pattern that matches nothing is refused;
    of several that match, the last counts; what none matches is replicated. Null: the model's own plan."""
    sequence_parallel: bool = False
    """Whether what lies between tensor-parallel layers is cut along the sequence, dimension 1, instead of repeated on
    every rank: less memory, and an all-gather and a reduce-scatter in place of each all-reduce."""


class Pipeline(Section):
    """How microbatches flow through the stages."""

    schedule: Schedule = "1f1b"
    """`gpipe`, `1f1b`, `interleaved`, `round-robin`, `zero-bubble`, `zbv`, `dualpipe-v`, or `"csv:PATH"`: a
    table of your own. The default keeps fewer activations than `gpipe` and needs no virtual stages."""
    microbatches: Count = 1
    """Microbatches that each replica's share of a batch is cut into. More of them make the bubble smaller.
    `interleaved` needs a multiple of `parallel.pp`, `dualpipe-v` at least 2 x pp."""
    virtual_stages: Count = 1
    """Stages a rank. 2 or more for `interleaved` and `round-robin`, always 2 for `zbv` and `dualpipe-v`
    (may be left out), the table's own for `csv:`, 1 for the others."""
    layers_per_stage: LayersPerStage | None = None
    """Layers of each stage, first stage first: pp x virtual_stages numbers that add up to the model's
    layers. Or how they are found: `even`: numbers that differ by at most one, the first stages have more.
    `parameters`: the largest stage has as few parameters as it can. `profile`: the slowest stage is as fast as
    it can be, by the time each layer takes, measured at the start. Null: `even`."""

    @model_validator(mode="before")
    @classmethod
    def _imply_virtual_stages(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "virtual_stages" in values:
            return values
        schedule = values.get("schedule")
        implied = isinstance(schedule, str) and schedule in IMPLIES_TWO_VIRTUAL_STAGES
        return {**values, "virtual_stages": 2} if implied else values


class Comm(Section):
    """How ranks talk."""

    backend: Backend = "auto"
    """`auto`: `nccl` where there is a CUDA device; else shared memory between ranks of one host, and `gloo` between
    hosts. `gloo` or `nccl`: that, for everything."""
    strategy: CommStrategy = "default"
    """How all-reduces are carried out that don't say it themselves; partial sums inside tensor-parallel layers have a
    way of their own. `default`: the transport's own way, direct slice reduction in shared memory, else torch's. In
    shared memory it adds up in rank order on every mesh; torch and the other strategies have orders of their own.
    `ring`: reduce-scatter and all-gather around a ring. `tree`: a double binary tree. `hierarchical`: inside each host,
    across hosts, inside each host. `adaptive`: for each size what is fastest, measured when groups form."""
    strategy_table: AdaptiveTable | None = None
    """What `adaptive` uses, instead of measuring: a map from sizes to strategies, such as
    `{"64 KiB": tree, "1 GiB": ring}`; a size without a unit is bytes, in quotes: `"65536"`. Up to a size its strategy
    is used, and above the last one the last. Refused unless `strategy` is `adaptive`."""
    bucket_size: Size = 25 << 20
    """Gradients are reduced in buckets of about this size: an integer is bytes, text has a unit. The default
    is 25 MiB, as in torch's DDP."""
    timeout: Duration = 30.0
    """Longest wait for any operation between ranks: a number is seconds, text has a unit. Then the rank that
    did not come is named."""
    startup_timeout: Duration = 120.0
    """Longest wait for all ranks to meet at the start: a number is seconds, text has a unit."""


class Memory(Section):
    """How much memory a rank may use."""

    budget: Size = 8 << 30
    """Memory of one rank for weights, gradients, optimizer state and activations: an integer is bytes, text has a
    unit. Reports compare what a rank uses with it, and bottlenecks `memory_pressure` and `memory_imbalance` warn near
    it; nothing enforces it. The default is 8 GiB."""


class Optimizer(Section):
    """How weights change."""

    name: OptimizerName = "adamw"
    """`adamw` or `sgd`."""
    lr: LearningRate = 3.0e-4
    """Learning rate, above 0."""
    betas: Betas = (0.9, 0.999)
    """Decay of AdamW's two running means, each from 0 to below 1. Not read by `sgd`."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1.0e-8
    """Added to AdamW's denominator. Not read by `sgd`."""
    momentum: Probability = 0.0
    """Of `sgd`, from 0 to below 1. Not read by `adamw`."""
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Null: torch's own, 0.01 for `adamw` and 0 for `sgd`."""
    schedule: LearningRateSchedule = "constant"
    """How the learning rate goes on after the warm-up: `constant`, or `cosine` down to `min_lr` at the last step."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**12)] = 0
    """Steps in which the learning rate grows evenly up to `lr`, before `schedule` begins."""
    min_lr: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Where `cosine` ends, at most `lr`. Not read by `constant`."""
    clip_norm: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """The largest norm of all gradients together; larger ones are scaled down to it. Null: never."""
    shard: bool = False
    """ZeRO-1: each data-parallel replica keeps and updates its share of the optimizer's state, with the same bits as
    without."""


class Train(Section):
    """How long and on how much."""

    steps: Annotated[int, Field(ge=1, le=10**12)] = 100
    """Optimizer steps of the run."""
    batch_size: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Samples of one step over the whole mesh; a multiple of dp x microbatches. Null: dp x microbatches,
    which makes microbatches of one sample."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Start of every random number: initial weights, sample order, dropout."""
    precision: Precision = "float32"
    """`float32` and `float64`: the type of weights and activations. `bfloat16`: activations under autocast, with
    weights in float32."""


class Monitoring(Section):
    """How the run is watched: where its time goes is found while it goes on, and served for Prometheus and browsers."""

    enabled: bool = True
    """Whether ranks note what they do, and the run serves it. False: no attribution, no bottlenecks, no endpoint; the
    run's folder keeps losses and times of steps."""
    host: HostAddress = "127.0.0.1"
    """The address of this host that is listened on. Any but a loopback one needs `token_file`, `tls_certificate` and
    `tls_key`. `0.0.0.0` and `::` are all addresses."""
    port: Port | None = None
    """Of the run's one endpoint, with `/metrics` and the page. A port that is taken is refused. Null: a free one, which
    `endpoints.json` tells."""
    per_rank: bool = False
    """Whether each rank also serves its own `/metrics`, on a free port of its host's loopback address. The run's
    endpoint lists them at `/sd`, as Prometheus' HTTP service discovery wants it."""
    token_file: str | None = None
    """A file with the token that the page asks for, and on other addresses than loopback `/metrics` too: at least 16
    characters without spaces, as text. Null: a new one for each run, in `endpoints.json`."""
    tls_certificate: str | None = None
    """A file with the endpoint's certificate, and those that lead to its root, in PEM. Null: no TLS."""
    tls_key: str | None = None
    """A file with the certificate's key in PEM, without a passphrase."""
    linger_seconds: Annotated[float, Field(ge=0, le=600)] = 15.0
    """After a run that failed: how long at most its endpoint waits for the next scrape, so that Prometheus hears of it.
    A scrape interval is enough. A run that nobody has scraped, or that ended well, waits for nobody."""
    trace_steps: Annotated[int, Field(ge=0, le=1000)] = 3
    """How many of the last steps `trace.json.gz` holds."""


class Runtime(Section):
    """How processes live."""

    threads: Count | None = None
    """torch threads a rank. Null: max(1, cores // ranks on this host)."""
    run_dir: str | None = None
    """The folder that the run writes; refused when it is not empty. Null: `runs/<run_id>`."""


class RunConfig(Section):
    """One run, as its YAML file describes it. `load_config` makes one and checks what spans several keys."""

    model: Model = GptModel()
    """What is trained, and how its error is measured."""
    data: Data = Data()
    """Where samples come from."""
    parallel: Parallel = Parallel()
    """The rank mesh. dp x tp x pp must be the number of ranks that are started."""
    pipeline: Pipeline = Pipeline()
    """How microbatches flow through the stages."""
    comm: Comm = Comm()
    """How ranks talk."""
    memory: Memory = Memory()
    """How much memory a rank may use."""
    optimizer: Optimizer = Optimizer()
    """How weights change."""
    train: Train = Train()
    """How long and on how much."""
    monitoring: Monitoring = Monitoring()
    """How the run is watched: where its time goes is found while it goes on, and served for Prometheus and browsers."""
    runtime: Runtime = Runtime()
    """How processes live."""

    @property
    def world_size(self) -> int:
        """Ranks that this run needs."""
        return self.parallel.dp * self.parallel.tp * self.parallel.pp

    @property
    def num_stages(self) -> int:
        """Pipeline stages, virtual ones counted."""
        return self.parallel.pp * self.pipeline.virtual_stages

    @property
    def batch_size(self) -> int:
        """Samples of one step over the whole mesh."""
        return self.train.batch_size or self.parallel.dp * self.pipeline.microbatches

    @property
    def sequence(self) -> int:
        """Tokens of one sample, where `data.factory` does not make them."""
        args = self.model.args
        of_model = args.get("sequence") if isinstance(args, dict) else args.sequence
        return self.data.sequence or (of_model if type(of_model) is int and of_model > 0 else GptArgs().sequence)

    def to_yaml(self) -> str:
        """Every key with its value; `load_config` of it gives an equal config."""
        return yaml_scalars.dump(self.model_dump(mode="json"))
