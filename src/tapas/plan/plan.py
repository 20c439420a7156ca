"""The plan: what was decided and what it costs, as plain data. Folded, readable, loadable."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tapas.errors import PlanError
from tapas.hardware.cluster import COLLECTIVES
from tapas.hardware.mesh import Mesh
from tapas.plan.assignment import LATER, Assignment
from tapas.util import write_file

VERSION = 3  # 1: decisions were not written down as such, and followed from costs
OLDER = (2,)  # formats that are read as well: they lack what only pictures need, see schema.py


@dataclass(frozen=True)
class Operator:
    """One operator of a block, for all copies that do the same."""

    module: str  # pattern of the module it is called in
    target: str
    choice: tuple[str, ...]  # per mesh axis: the factor it splits, or R, B (whole), P (partial sums pass)
    result: tuple[str, ...]  # layout of its first result
    seconds: float  # compute, forward and backward, of one copy
    communication: float  # inside a sharded implementation
    copies: int
    name: str = ""  # in the first of these copies
    block: str = ""
    missing_rule: bool = False
    roles: tuple[str, ...] = ()  # per mesh axis: "batch" or "sequence" where its factor is one of them
    weights: tuple[str, ...] = ()  # patterns of the parameters it reads
    factors: str = ""  # of all its tensors, such as `d0 d1 k, n k -> d0 d1 n`
    operands: tuple[tuple[int, ...], ...] = ()  # shapes of what it reads, whole
    results: tuple[tuple[int, ...], ...] = ()
    forward: float = field(default=0.0, metadata=LATER)  # of its seconds, those of the forward pass
    sent_forward: float = field(default=0.0, metadata=LATER)  # and of its communication
    again: bool = field(default=False, metadata=LATER)  # the forward part is done a second time, in the backward pass
    sent_nbytes: int = field(default=0, metadata=LATER)  # by its sharded implementation in a step, by one copy
    hidden: float = field(default=0.0, metadata=LATER)  # seconds that it sends beside what it computes
    capacity: float = field(default=0.0, metadata=LATER)  # of the buffers that it sends; 0: they hold what there is


@dataclass(frozen=True)
class Move:
    """A tensor that changes its layout on its way to an operator."""

    tensor: str
    at: str  # pattern of the module that needs it
    before: tuple[str, ...]
    after: tuple[str, ...]
    steps: tuple[dict[str, Any], ...]  # axes, forward and backward collective, nbytes, seconds
    nbytes: int  # largest of the steps
    seconds: float  # that one copy waits for it
    hidden: float  # seconds that hide behind what is computed
    copies: int
    block: str = ""
    kind: str = "activation"  # or "weight"
    again: bool = False  # the forward part is sent a second time, in a block that is computed again
    copy: int = -1  # the first copy that does so, as in the assignment; -1: not known
    source: str = ""  # the tensor as its block's structure calls it: `w0`, `p0` or `3.0`
    reader: int = -1  # number of the operator that reads it in its block; -1: all who read it find it so
    numbers: tuple[int, ...] = field(default=(), metadata=LATER)  # of the copies that do so, as in the assignment

    @property
    def sent_nbytes(self) -> int:
        """In a step, by one copy, forward and backward."""
        return sum(
            step["nbytes"] * (times * (step["forward"] in COLLECTIVES) + (step["backward"] in COLLECTIVES))
            for step in self.steps
            for times in [2 if step.get("again", self.again) else 1]
        )


@dataclass(frozen=True)
class PlanBlock:
    name: str
    copies: int
    operators: int
    compute: float  # seconds of one copy
    communication: float
    paths: tuple[str, ...] = ()
    recompute: str = "none"  # in the backward pass: nothing, all but products ("selective"), or all of it ("block")
    hidden: float = 0.0  # seconds of one copy's communication that nobody waits for
    numbers: tuple[int, ...] = ()  # of its copies, as in the assignment


@dataclass(frozen=True)
class MemoryPoint:
    """What a device holds when a copy of a block is done with its forward pass, or at its worst in its backward pass.
    Between two points the copies are alike, and the amounts change evenly."""

    phase: str  # "forward", "backward" or "update"
    copy: int  # as in the assignment; the last one at the optimizer's update
    nbytes: dict[str, int]  # by kind, as in `Plan.memory`


@dataclass(frozen=True)
class Plan:
    """`assignment` is what was decided, and all that is ever executed; the rest describes it, and what it costs."""

    model: str
    mesh: dict[str, Any]  # names, sizes
    cluster: dict[str, Any]
    training: bool
    inputs: dict[str, list[int]]
    cost: float  # seconds per step
    bound: float  # no plan at all is cheaper than this
    proof: str  # "optimal", or the gap
    seconds: dict[str, float]
    memory: dict[str, int]  # bytes per device by kind
    parameters: dict[str, list[str]]  # pattern -> how it is stored
    operators: tuple[Operator, ...]
    moves: tuple[Move, ...]
    blocks: tuple[PlanBlock, ...]
    baselines: dict[str, dict[str, Any]]
    assignment: Assignment
    graph: dict[str, Any] = field(default_factory=dict[str, Any])  # operators, unique, trimmed, parameters
    warnings: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()  # all that the user insisted on: PATTERN=WHAT of --pin, other options as they are
    shapes: dict[str, list[int]] = field(
        default_factory=dict[str, list[int]]
    )  # of the parameters, by the same patterns
    tied: dict[str, str] = field(default_factory=dict[str, str])  # parameters that are another one by a second name
    source: dict[str, Any] = field(default_factory=dict[str, Any])  # what the command line made it from; {} in Python
    dtype: str = ""  # of most parameters
    versions: dict[str, str] = field(default_factory=dict[str, str])  # of the libraries that it was made with
    limit: float = 0.0  # bytes of memory that a device has for the plan; 0: as many as it likes
    optimizer: str = "adam"
    master: bool = True  # weights narrower than float32 have a copy in float32
    timeline: tuple[MemoryPoint, ...] = ()  # memory over the step, in its order
    # Of the faster plan that this one stands for: its cost. Layers do the same in so many `runs`, `instead_of` its own.
    faster: dict[str, float] = field(default_factory=dict[str, float], metadata=LATER)
    version: int = VERSION

    @property
    def losses(self) -> tuple[str, ...]:
        """The outputs that were named as those to plan for."""
        return tuple(self.source.get("losses", ()))

    @property
    def capacity(self) -> float | None:
        """Of the buffers in which tokens are sent to experts."""
        return self.source.get("capacity")

    @property
    def gap(self) -> float:
        return self.cost - self.bound

    def to_dict(self) -> dict[str, Any]:
        from tapas.plan.schema import plain

        return plain(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def save(self, path: str | Path) -> None:
        """Write the plan; the file is complete or not there at all."""
        write_file(path, (self.to_json() + "\n").encode())

    def __repr__(self) -> str:
        sizes = "x".join(map(str, self.mesh["sizes"]))
        return f"<Plan {self.model} on {sizes} {self.cluster['name']}: {self.cost:.4g} s a step, {self.proof}>"

    def __str__(self) -> str:
        from tapas.plan import renderer

        return renderer(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from tapas.plan import html_renderer

        return html_renderer(self)


def mesh_of(plan: Plan) -> Mesh:
    return Mesh(tuple(plan.mesh["sizes"]), tuple(plan.mesh["names"]))


_REMEDY = "give the path of a plan made by `tapas plan -o`"
_AGAIN = "the file is damaged; make the plan again"


def load_plan(path: str | Path) -> Plan:
    """A plan from a file that `Plan.save` or `tapas plan -o` wrote."""
    place, text = str(path), ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = json.loads(text)
    except FileNotFoundError:
        raise PlanError(place, "no such file", _REMEDY) from None
    except OSError as error:
        raise PlanError(place, f"cannot be read: {error.strerror}", _REMEDY) from None
    except UnicodeDecodeError:
        raise PlanError(place, "is not a text file", _REMEDY) from None
    except json.JSONDecodeError as error:
        started = text.lstrip().startswith("{")  # otherwise it never was one
        fact = f"is not JSON (line {error.lineno})" if started else "is not a plan file: it is not JSON"
        raise PlanError(place, fact, _AGAIN if started else _REMEDY) from None
    except RecursionError:
        raise PlanError(place, "is not a plan: it is nested too deeply", _REMEDY) from None
    return plan_from_dict(data, place)


def plan_from_dict(data: Any, place: str = "plan") -> Plan:
    if not isinstance(data, dict) or "version" not in data:
        raise PlanError(place, "is not a plan: it has no version", _REMEDY)
    version = cast(dict[str, Any], data)["version"]
    if "kind" in data:
        raise PlanError(place, f"is a {data['kind']}", "give it to tapas.serve(model, mesh=..., plan=...)")
    if isinstance(version, bool) or version not in (VERSION, *OLDER):
        raise PlanError(place, f"has format {version}, this TAPAS reads {VERSION}", "make the plan again")

    from tapas.plan.schema import read_plan, upgraded

    try:
        return read_plan(data if version == VERSION else upgraded(cast(dict[str, Any], data)))
    except ValueError as error:
        raise PlanError(place, str(error), _AGAIN) from None
