"""The command line's arguments and options, each described once."""

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

# most options have no default that would be worth printing
_argument, _option = partial(Argument, show_default=False), partial(Option, show_default=False)

_MODEL = "A preset (see `tapas models`), hf:<model_type>, a config.json, or file.py:function."
_MESH = "Devices along each axis, slowest link first: 8, 2x4 or dp=2,tp=4. Required."
_ANY_MESH = "Devices along each axis, slowest link first: 8, 2x4 or dp=2,tp=4. Or give --devices."
_PIN = "Insist on a strategy (ddp, fsdp, megatron, megatron-sp) or on a layout such as '[R, S(0)]'."

Model = Annotated[str, _argument(metavar="MODEL", help=_MODEL)]
ModelOrPlan = Annotated[str, _argument(metavar="MODEL", help=f"{_MODEL} Or a plan that `tapas plan -o` wrote.")]
PlanFile = Annotated[Path, _argument(metavar="PLAN", help="A plan that `tapas plan -o` wrote.")]
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
ClusterText = Annotated[str, Option("--cluster", "-c", help="See `tapas clusters`; or a .toml or .json file.")]
_BATCH = "Samples in a step, over all devices. Default: a preset's own (see `tapas models`), else 64."
_SEQ = "Tokens in a sample. Default: a preset's own, else 512 or as many as the model has positions for."
_DTYPE = "Of weights and activations. Default: bfloat16; a model of file.py stays as it is made."
Batch = Annotated[int | None, _option(help=_BATCH)]
Seq = Annotated[int | None, _option(help=_SEQ)]
_SET = "Change the model's configuration, or give an argument to the function of file.py."
Set = Annotated[list[str] | None, _option("--set", metavar="FIELD=VALUE", help=_SET)]
Dtype = Annotated[str, _option(help=_DTYPE)]
Inference = Annotated[bool, Option("--inference", help="Plan the forward pass only.")]
NoBatchSplit = Annotated[bool, Option("--no-batch-split", help="Do not split the batch over devices.")]
Pin = Annotated[list[str] | None, _option("--pin", metavar="PATTERN=WHAT", help=_PIN)]
Forbid = Annotated[
    list[str] | None,
    _option("--forbid", metavar="PATTERN=FACTOR", help="Do not split a factor, or `batch` or `sequence`, there."),
]
NoBaselines = Annotated[bool, Option("--no-baselines", help="Skip the comparison with known strategies.")]
_MEMORY = "Of a device, for the plan: 40GB, device (its own less a tenth for driver and fragmentation) or none."
Memory = Annotated[str, Option("--memory", metavar="AMOUNT", help=_MEMORY)]
OptimizerName = Annotated[str, Option("--optimizer", help="adam, adam8bit, momentum or sgd: how much state it keeps.")]
NoMaster = Annotated[bool, Option("--no-master", help="Narrow weights have no copy in float32.")]
_RECOMPUTE = "In the backward pass: none, selective (all but products), block, or auto (as is fastest and fits)."
Recompute = Annotated[str, Option("--recompute", help=_RECOMPUTE)]
CheckFold = Annotated[bool, Option("--check-fold", help="Trace every copy of a block as well, and compare.")]
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
Json = Annotated[bool, Option("--json", help="Print JSON.")]
