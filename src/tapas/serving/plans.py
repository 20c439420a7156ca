"""A plan for serving as data: two plans that hold weights and cache alike, and what they are compared with."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tapas.errors import PlanError
from tapas.plan.plan import Plan, plan_from_dict
from tapas.plan.simulate import simulate
from tapas.serving.workload import Workload
from tapas.util import write_file

KIND = "tapas serving plan"
VERSION = 1


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """What one way of splitting takes."""

    first_token_seconds: float  # of the prefill
    token_seconds: float  # of a decode step
    nbytes: int  # of a device, when it needs most

    def total(self, workload: Workload) -> float:
        return self.first_token_seconds + workload.steps * self.token_seconds

    def tokens_per_s(self, workload: Workload) -> float:
        return workload.batch / self.token_seconds


@dataclass(frozen=True)
class ServingPlan:
    workload: Workload
    prefill: Plan
    decode: Plan
    bound: float  # seconds of prompts and all new tokens: no plan takes less
    weights: int  # bytes on a device
    cache: int
    cache_layouts: dict[str, tuple[str, ...]]  # by pattern of the modules that have a cache of this layout
    # plain tensor parallelism by its degree (the batch is dealt out over the other devices), or why it cannot be
    degrees: dict[int, PhaseFigures | str] = field(default_factory=dict[int, PhaseFigures | str])

    @property
    def figures(self) -> PhaseFigures:
        nbytes = max(sum(self.prefill.memory.values()), sum(self.decode.memory.values()))
        return PhaseFigures(self.prefill.cost, self.decode.cost, nbytes)

    @property
    def eager(self) -> PhaseFigures | None:
        """The same with operators that the host launches one by one."""
        prefill, decode = simulate(self.prefill), simulate(self.decode)
        if prefill is None or decode is None:
            return None
        return PhaseFigures(prefill.seconds, decode.seconds, self.figures.nbytes)

    @property
    def cost(self) -> float:
        return self.figures.total(self.workload)

    def to_dict(self) -> dict[str, Any]:
        degrees = {str(n): f if isinstance(f, str) else asdict(f) for n, f in self.degrees.items()}
        eager = self.eager
        return {
            "kind": KIND, "version": VERSION, "workload": asdict(self.workload), "bound": self.bound,
            "first_token_seconds": self.figures.first_token_seconds, "token_seconds": self.figures.token_seconds,
            "tokens_per_s": self.figures.tokens_per_s(self.workload),
            "launched": {
                "first_token_seconds": eager.first_token_seconds, "token_seconds": eager.token_seconds,
                "tokens_per_s": eager.tokens_per_s(self.workload),
            } if eager is not None else None,
            "weights": self.weights, "cache": self.cache,
            "cache_layouts": {name: list(layout) for name, layout in self.cache_layouts.items()}, "degrees": degrees,
            "prefill": self.prefill.to_dict(), "decode": self.decode.to_dict(),
        }  # fmt: skip

    def save(self, path: str | Path) -> None:
        write_file(path, (json.dumps(self.to_dict(), indent=1) + "\n").encode())

    def __repr__(self) -> str:
        return f"<ServingPlan {self.decode.model}: {self.cost:.4g} s for {self.workload}>"


def load_serving_plan(path: str | Path) -> ServingPlan:
    place = str(path)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(place, f"cannot be read: {error.strerror}", "make it with `tapas plan --serve -o`") from None
    except ValueError:
        data = None
    if not isinstance(data, dict) or data.get("kind") != KIND or data.get("version") != VERSION:
        raise PlanError(place, "is no plan for serving", "make it with `tapas plan --serve -o`")
    try:
        return _read(data, place)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise PlanError(place, "the file is damaged", "make it again with `tapas plan --serve -o`") from None


def _read(data: Mapping[str, Any], place: str) -> ServingPlan:
    degrees = {int(n): f if isinstance(f, str) else PhaseFigures(**f) for n, f in data["degrees"].items()}
    layouts = {name: tuple(layout) for name, layout in data["cache_layouts"].items()}
    return ServingPlan(
        Workload(**data["workload"]), plan_from_dict(data["prefill"], place), plan_from_dict(data["decode"], place),
        data["bound"], data["weights"], data["cache"], layouts, degrees,
    )  # fmt: skip
