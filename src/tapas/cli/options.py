"""The command line's arguments and options, each described once, and what those of a command ask for together."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from tapas.cli.completion import cluster_names, presets
from tapas.errors import TapasError

if TYPE_CHECKING:
    from tapas.hardware.cluster import Cluster
    from tapas.models.source import ModelSource
    from tapas.plan.plan import Plan
    from tapas.planner.request import Request

# most options have no default that would be worth printing
_argument, _option = partial(Argument, show_default=False), partial(Option, show_default=False)

_MODEL = "A preset (see `tapas models`), hf:<model_type>, a config.json, or file.py:function."
_MESH = "Devices along each axis, slowest link first: 8, 2x4 or dp=2,tp=4. Required."
_ANY_MESH = "Devices along each axis, slowest link first: 8, 2x4 or dp=2,tp=4. Or give --devices."
_CLUSTER = "See `tapas clusters`; or a .toml or .json file."
_FORBID = "Do not split a factor, or `batch` or `sequence`, there."
_OPTIMIZER = "adam, adam8bit, momentum or sgd: how much state it keeps."
DEVICE = "device"  # the default of --memory
_PIN = (
    "Insist on a strategy (ddp, fsdp, hsdp, megatron, megatron-sp, fsdp+tp), on a layout such as '[R, S(0)]', or on "
    "what operators are split by: 'batch' over some axis, '[batch, *]' over the first."
)

Model = Annotated[str, _argument(metavar="MODEL", help=_MODEL, autocompletion=presets)]
_MODEL_OR_PLAN = f"{_MODEL} Or a plan that `tapas plan -o` wrote."
ModelOrPlan = Annotated[str, _argument(metavar="MODEL", help=_MODEL_OR_PLAN, autocompletion=presets)]
PlanFile = Annotated[Path, _argument(metavar="PLAN", help="A plan that `tapas plan -o` wrote.")]
ModelTypes = Annotated[
    list[str] | None, _argument(metavar="[TYPE]...", help="Types as a config.json says them. Default: all there are.")
]
ZooFile = Annotated[Path, _option("--output", "-o", metavar="FILE", help="Results, one line of JSON for each type.")]
ZooPage = Annotated[Path | None, _option(metavar="FILE", help="Write them as a page of Markdown, too.")]
Jobs = Annotated[int, _option(min=1, help="How many at a time.")]
Pattern = Annotated[
    str, _argument(metavar="PATTERN", help="Names of modules and weights, such as 'model.layers.*.mlp.*'.")
]
MeshText = Annotated[str, _option("--mesh", "-m", metavar="AxB", help=_MESH)]
AnyMesh = Annotated[str, _option("--mesh", "-m", metavar="AxB", help=_ANY_MESH)]
Devices = Annotated[int | None, _option(help="How many there are: all meshes of them are tried, and ranked.")]
Nodes = Annotated[int | None, _option(help="The same by nodes.")]
PerNode = Annotated[int | None, _option(help="Devices in a node. Default: as in the cluster.")]
_SWEEP = "The best mesh for each number of devices: devices=8,16,64 or devices=8,16,...,4096."
Sweep = Annotated[str, _option("--sweep", metavar="devices=N,N,...", help=_SWEEP)]
_BATCH = "Samples in a step, over all devices. Default: a preset's own (see `tapas models`), else 64."
_SEQ = "Tokens in a sample. Default: a preset's own, else 512 or as many as the model has positions for."
_DTYPE = "Of weights and activations. Default: bfloat16; a model of file.py stays as it is made."
_SET = "Change the model's configuration, or give an argument to the function of file.py."
NoBaselines = Annotated[bool, Option("--no-baselines", help="Skip the comparison with known strategies.")]
_MEMORY = "Of a device, for the plan: 40GB, device (its own less a tenth for driver and fragmentation) or none."
Memory = Annotated[str, Option("--memory", metavar="AMOUNT", help=_MEMORY)]
_RECOMPUTE = (
    "In the backward pass: none, gather (weights are gathered again), selective (all but products, too), block, or "
    "auto (as is fastest and fits)."
)
_NO_DISCOVERY = "Do not try out how operators without a rule can be split: they run whole."
_PIECES = "Of the batch: activations of one are sent while products of another are computed. 1: they are waited for."
_CAPACITY = (
    "Of the buffers in which tokens are sent to experts: so many times an equal share. Where it is not enough, that is "
    "an error. Default: as many as there are, which the host reads once a layer."
)
_COMPILE = "The program is to run under torch.compile, and is priced so."
_ACCUMULATE = "Micro batches before each step of the optimizer; --batch is that of one of them."
_TIME_LIMIT = "For the search: then it ends with the best plan so far, and says how far from the best that may be."
TimeLimit = Annotated[float | None, _option("--time-limit", min=0, metavar="SECONDS", help=_TIME_LIMIT)]
CheckFold = Annotated[bool, Option("--check-fold", help="Trace every copy of a block as well, and compare.")]
_FROM = "Take a plan of another tool as pins: a JSON file, or transformers for the model's own tp_plan."
From = Annotated[str, _option("--from", metavar="FILE", help=_FROM)]
Output = Annotated[Path | None, _option("--output", "-o", help="Write the plan to this file, too.")]
Points = Annotated[int, Option("--points", min=2, help="How many plans to look for.")]
_FOLDER = "Write the plans at the knees, and the fastest that fits the device, into this new or empty folder."
Folder = Annotated[Path | None, _option("--output", "-o", metavar="FOLDER", help=_FOLDER)]
_PLOT = "Draw the curve, or what --sweep found: FILE.svg or FILE.png (needs matplotlib)."
Plot = Annotated[Path | None, _option("--plot", metavar="FILE", help=_PLOT)]
Limit = Annotated[int, Option(min=1, help="How many operators, and how many weights, to look at.")]
InProcess = Annotated[bool, Option("--in-process", help="Ranks are threads of one process: faster, no process groups.")]
Steps = Annotated[int, Option(min=0, help="Optimizer steps after which weights are compared.")]
Timeout = Annotated[float, Option(min=1, help="Seconds after which ranks that hang are ended.")]
_TRACE = "Record one step of every rank for ui.perfetto.dev, FILE.json or FILE.json.gz, and say what was hidden."
TraceFile = Annotated[Path | None, _option("--trace", metavar="FILE", help=_TRACE)]
TraceDevice = Annotated[str, Option("--trace-device", help="Where that step runs: cpu (gloo) or cuda (NCCL).")]
_TIMELINE = "Write the simulated step for ui.perfetto.dev, FILE.json or FILE.json.gz."
TimelineFile = Annotated[Path | None, _option("--trace", metavar="FILE", help=_TIMELINE)]
_REPORT = "Write a page for the browser, too: one file with graph, times, memory and alternatives."
ReportFile = Annotated[Path | None, _option("--report", metavar="FILE", help=_REPORT)]
PageFile = Annotated[Path, _option("--output", "-o", metavar="FILE", help="Where to write the page, e.g. plan.html.")]
_ALTERNATIVES = "Seconds to spend on what else each operator with weights could do; 0: none. Default: 20, for a PLAN 0."
Alternatives = Annotated[float | None, _option("--alternatives", min=0, metavar="SECONDS", help=_ALTERNATIVES)]
_CURVE = "Show step time against memory as well, with so many plans (see `tapas frontier`)."
CurvePoints = Annotated[int, Option("--curve", min=0, metavar="POINTS", help=_CURVE)]
_OTHER = "A second plan, to compare the first with."
OtherPlan = Annotated[Path | None, _argument(metavar="PLAN", help=_OTHER)]
_SERVE = "Plan how to serve a model of transformers that generates: prefill and decode over one set of weights."
Serve = Annotated[bool, Option("--serve", help=_SERVE)]
Prompt = Annotated[int | None, _option("--prompt", min=2, help="With --serve: tokens of a prompt, at most.")]
New = Annotated[int | None, _option("--new", min=1, help="With --serve: tokens that each prompt is continued by.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What to make of a model."""

    batch: Annotated[int | None, _option(help=_BATCH)] = None
    seq: Annotated[int | None, _option(help=_SEQ)] = None
    settings: Annotated[list[str] | None, _option("--set", metavar="FIELD=VALUE", help=_SET)] = None
    dtype: Annotated[str, _option(help=_DTYPE)] = ""
    inference: Annotated[bool, Option("--inference", help="Plan the forward pass only.")] = False

    @property
    def training(self) -> bool | None:
        return False if self.inference else None

    def source(self, model: str) -> "ModelSource":
        from tapas.models.source import ModelSource
        from tapas.planner.request import parse_pairs

        return ModelSource(model, self.batch, self.seq, dict(parse_pairs("--set", self.settings)), self.dtype)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What to ask for besides a mesh."""

    cluster: Annotated[str, Option("--cluster", "-c", help=_CLUSTER, autocompletion=cluster_names)] = "h100-sxm"
    no_batch_split: Annotated[bool, Option("--no-batch-split", help="Do not split the batch over devices.")] = False
    pin: Annotated[list[str] | None, _option("--pin", metavar="PATTERN=WHAT", help=_PIN)] = None
    forbid: Annotated[list[str] | None, _option("--forbid", metavar="PATTERN=FACTOR", help=_FORBID)] = None
    optimizer: Annotated[str, Option("--optimizer", help=_OPTIMIZER)] = "adam"
    no_master: Annotated[bool, Option("--no-master", help="Narrow weights have no copy in float32.")] = False
    recompute: Annotated[str, Option("--recompute", help=_RECOMPUTE)] = "auto"
    pieces: Annotated[int, Option("--pieces", min=1, help=_PIECES)] = 1
    compile: Annotated[bool, Option("--compile", help=_COMPILE)] = False
    accumulate: Annotated[int, Option("--accumulate", min=1, help=_ACCUMULATE)] = 1
    no_discovery: Annotated[bool, Option("--no-discovery", help=_NO_DISCOVERY)] = False
    capacity: Annotated[float | None, _option("--capacity", min=1, help=_CAPACITY)] = None

    def request(
        self,
        mesh: str,
        training: bool | None,
        memory: str = DEVICE,
        cluster: "Cluster | None" = None,
        baselines: bool = True,
        time_limit: float | None = None,
    ) -> "Request":
        from tapas.cost.memory import Optimizer
        from tapas.planner.request import Request, parse_pairs

        if not mesh:
            remedy = "write the axis sizes, slowest link first, such as --mesh 2x4"
            raise TapasError("--mesh", "no mesh was given", remedy)
        return Request.of(
            mesh, cluster or self.cluster, training=training, pins=parse_pairs("--pin", self.pin),
            forbid=parse_pairs("--forbid", self.forbid), batch_split=not self.no_batch_split, memory=memory,
            optimizer=Optimizer(self.optimizer, not self.no_master), recompute=self.recompute, baselines=baselines,
            pieces=self.pieces, compile=self.compile, accumulate=self.accumulate, time_limit=time_limit,
            discovery=not self.no_discovery, capacity=self.capacity,
        )  # fmt: skip


def model_or_plan(
    model: str, mesh: str, sources: SourceOptions, requests: RequestOptions, memory: str = DEVICE
) -> "tuple[ModelSource, Request, Plan | None]":
    """What was asked for; or, with a saved plan, what that was made from, which allows no other options."""
    from tapas.models.source import saved_plan, source_of

    plan = saved_plan(model)
    if plan is None:
        return sources.source(model), requests.request(mesh, sources.training, memory), None
    if (mesh, memory, sources, requests) != ("", DEVICE, SourceOptions(), RequestOptions()):
        raise TapasError(model, "a plan brings its mesh, model and pins along", "leave these options out")
    return *source_of(plan, model), plan
