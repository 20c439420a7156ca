"""What a user asked for on the command line, as data: a plan keeps it, so that it can be asked about later."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tapas.cost.optimizers import Optimizer
from tapas.errors import CaptureError, PlanError, TapasError
from tapas.hardware.cluster import Cluster, Mesh, check_mesh, cluster_from_dict, load_cluster, parse_mesh
from tapas.hardware.memory_limit import memory_limit
from tapas.plan.plan import Plan
from tapas.problem.problem import check_mode
from tapas.util import paused

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    model: str
    mesh: Mesh
    cluster: Cluster
    batch: int | None = None
    seq: int | None = None
    settings: dict[str, str] = field(default_factory=dict)
    dtype: str = ""  # "": not said
    inference: bool = False
    batch_split: bool = True
    pins: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    memory: str = "device"  # see memory_limit
    optimizer: str = "adam"
    master: bool = True
    recompute: str = "auto"

    @property
    def updates(self) -> Optimizer:
        return Optimizer(self.optimizer, self.master)

    @property
    def posed(self) -> dict[str, Any]:
        """What the problem is besides the model and the machine, as `pose` takes it."""
        return {
            "pins": pairs("--pin", self.pins), "forbid": pairs("--forbid", self.forbid),
            "batch_split": self.batch_split, "optimizer": self.updates, "recompute": self.recompute,
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Without mesh and cluster: a plan has them anyway."""
        data = {key: value for key, value in asdict(self).items() if key not in ("mesh", "cluster")}
        return data | {"pins": list(self.pins), "forbid": list(self.forbid)}


def make(model: str, mesh: str | Mesh, cluster: str | Cluster, settings: Sequence[str] = (), **rest: Any) -> Request:
    """From the texts of the command line; the cheap checks come before any work."""
    if not mesh:
        raise TapasError("--mesh", "no mesh was given", "write the axis sizes, slowest link first, such as --mesh 2x4")
    made = Request(model, parse_mesh(mesh), load_cluster(cluster), settings=dict(pairs("--set", settings)), **rest)
    check_mesh(made.mesh, made.cluster)
    memory_limit(made.memory, made.cluster)
    check_mode(made.recompute)
    assert made.posed  # or it says what is wrong
    return made


def asked(model: str, mesh: str, cluster: str, settings: Sequence[str], **rest: Any) -> tuple[Request, bool]:
    """What a saved plan was made from, or a new request; and whether it was a plan, which allows no other options."""
    request = reopened(model)
    if request is None:
        return make(model, mesh, cluster, settings, **rest), False
    if mesh or settings or any(value != getattr(Request, name) for name, value in rest.items()):
        raise TapasError(model, "a plan brings its mesh, model and pins along", "leave these options out")
    return request, True


def from_plan(plan: Plan, place: str) -> Request:
    """What a plan was made from."""
    if "model" not in plan.source:
        raise PlanError(place, "does not say which model it was made from", "make it with `tapas plan MODEL -o`")
    mesh = Mesh(tuple(plan.mesh["sizes"]), tuple(plan.mesh["names"]))
    given = {**plan.source, "pins": tuple(plan.source.get("pins", ())), "forbid": tuple(plan.source.get("forbid", ()))}
    try:
        return Request(mesh=mesh, cluster=cluster_from_dict(plan.cluster, place), **given)
    except TypeError:
        raise PlanError(place, "its source has unknown fields", "the file is damaged; make the plan again") from None


_SHAPES = {
    "--set": ("FIELD=VALUE", "num_hidden_layers=4"),
    "--pin": ("PATTERN=WHAT", "'model.layers.*.mlp.*=megatron'"),
    "--forbid": ("PATTERN=FACTOR", "'lm_head=batch'"),
}


def pairs(option: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for text in texts:
        left, sign, right = text.partition("=")
        if not (sign and left.strip() and right.strip()):
            form, example = _SHAPES[option]
            raise TapasError(f"{option} {text}", f"is not {form}", f"write e.g. {option} {example}")
        found.append((left.strip(), right.strip()))
    return found


def captured(request: Request, progress: Progress, check_fold: bool = False):
    """The model's graph, and what transformers says about its parallel plan."""
    progress("load")
    from tapas.models import load as presets
    from tapas.planner.pipeline import tp_hints

    loaded = presets.load(
        request.model, batch=request.batch, seq=request.seq, settings=request.settings,
        training=not request.inference, dtype=request.dtype,
    )  # fmt: skip
    loaded.check_seq(request.seq)
    progress("capture")
    from tapas.capture import capture

    try:  # without --inference, a model that returns no loss is planned for inference all the same
        graph = capture(
            loaded.model, loaded.inputs, training=False if request.inference else None, name=loaded.name,
            check_fold=check_fold,
        )  # fmt: skip
    except CaptureError as error:
        raise presets.blamed(error, request.model, request.settings) from error
    return graph, tp_hints(loaded.model)


@paused
def planned(request: Request, progress: Progress, baselines: bool = True, check_fold: bool = False) -> Plan:
    from dataclasses import replace

    graph, hints = captured(request, progress, check_fold)
    from tapas.planner.pipeline import plan_graph
    from tapas.problem.baselines import NAMES

    plan = plan_graph(
        graph, request.mesh, request.cluster, **request.posed, limit=memory_limit(request.memory, request.cluster),
        baselines=NAMES if baselines else (), hints=hints, progress=progress,
    )  # fmt: skip
    return replace(plan, source=request.to_dict())


@paused
def traded(request: Request, points: int, progress: Progress, check_fold: bool = False):
    """Plans from the most frugal to the fastest, see frontier.py."""
    from dataclasses import replace

    graph, hints = captured(request, progress, check_fold)
    from tapas.planner.curve import drawn
    from tapas.planner.frontier import frontier
    from tapas.planner.pipeline import described, within
    from tapas.problem.restrictions import restrictions

    posed, usable = request.posed, memory_limit("device", request.cluster)
    assert usable is not None
    limits = within(graph, request.mesh, request.cluster, None, **posed, hints=hints, progress=progress)
    found = frontier(limits, points, [usable], progress)
    said = restrictions(posed["pins"], posed["forbid"], request.batch_split, request.recompute)
    plans = []
    for point in found:
        plan = described(point.solution, graph, point.limit, said, {})
        memory = "none" if point.limit is None else str(round(point.limit))
        plans.append((replace(plan, source=request.to_dict() | {"memory": memory}), point.stored))
    return drawn(plans, usable)


@paused
def ranked(request: Request, devices: int, progress: Progress, baselines: bool = True, check_fold: bool = False):
    """All meshes of so many devices, ranked, and the plan for the best of them."""
    from dataclasses import replace

    from tapas.hardware.meshes import factorizations
    from tapas.problem.baselines import NAMES

    meshes, limit = factorizations(devices), memory_limit(request.memory, request.cluster)
    graph, hints = captured(request, progress, check_fold)
    from tapas.planner.mesh_ranking import best_of, rank
    from tapas.planner.pipeline import plan_graph

    rows = rank(graph, meshes, request.cluster, limit, **request.posed, hints=hints, progress=progress)
    best = best_of(rows)
    plan = plan_graph(
        graph, best.mesh, request.cluster, **request.posed, limit=limit, baselines=NAMES if baselines else (),
        hints=hints, progress=progress, start=best.known,
    )  # fmt: skip
    return rows, replace(plan, source=request.to_dict())


@paused
def swept(request: Request, counts: Sequence[int], progress: Progress):
    """The best mesh for each number of devices; the model is captured once."""
    from tapas.hardware.meshes import factorizations

    limit = memory_limit(request.memory, request.cluster)
    graph, hints = captured(request, progress)
    from tapas.planner.device_sweep import scaled
    from tapas.planner.mesh_ranking import rank

    asked = {**request.posed, "hints": hints, "progress": progress}
    return scaled([rank(graph, factorizations(n), request.cluster, limit, **asked) for n in counts])


def reopened(model: str) -> Request | None:
    """The request behind a plan file; None for anything that is a model. Both may end in .json."""
    import json
    from pathlib import Path

    from tapas.plan.plan import load_plan

    path = Path(model)
    if path.suffix != ".json" or path.is_dir():
        return None
    if not path.exists():
        raise PlanError(model, "no such file", "give a plan that `tapas plan -o` wrote, or a model")
    try:
        data = json.loads(path.read_text())
    except (ValueError, OSError):
        data = {}
    if isinstance(data, dict) and "model_type" in data:
        return None
    return from_plan(load_plan(path), model)


def explained(request: Request, pattern: str, limit: int, progress: Progress):
    """The alternatives of what matches a pattern, see explain.py."""
    graph, hints = captured(request, progress)
    from tapas.planner.explain import explain
    from tapas.planner.pipeline import pose

    problem, rows = pose(
        graph, request.mesh, request.cluster, **request.posed, apart=[pattern], hints=hints, progress=progress
    )
    progress("search")
    return explain(problem, rows, pattern, limit, progress)
