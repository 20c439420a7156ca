"""What a user asks for besides the model: parsed and checked once, and the same for every way of asking.

`plan`, `parallelize`, `verify`, rankings, frontiers, explanations and the command line all take their options by the
names and in the forms of `Request.of`. A plan keeps the request, so that it can be asked about later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from tapas.cost.collectives import ClusterRouter
from tapas.cost.memory import ADAM, Optimizer
from tapas.errors import PlanError, TapasError, nearest
from tapas.hardware.cluster import DEVICE, NONE, Cluster, memory_limit
from tapas.hardware.cluster_files import load_cluster
from tapas.hardware.mesh import Mesh, MeshLike, check_mesh, parse_mesh
from tapas.problem.baselines import NAMES
from tapas.problem.problem import AUTO, check_mode
from tapas.problem.restrictions import Constraints, Pairs

PairsLike = Mapping[str, str] | Sequence[str] | Sequence[tuple[str, str]] | None
DEFAULT_CLUSTER = "h100-sxm"

# option -> the form of its texts, and an example of one
_FORMS = {
    "pins": ("PATTERN=WHAT", "'model.layers.*.mlp.*=megatron'"),
    "forbid": ("PATTERN=FACTOR", "'lm_head=batch'"),
    "--pin": ("PATTERN=WHAT", "--pin 'model.layers.*.mlp.*=megatron'"),
    "--forbid": ("PATTERN=FACTOR", "--forbid 'lm_head=batch'"),
    "--set": ("FIELD=VALUE", "--set num_hidden_layers=4"),
}


@dataclass(frozen=True, slots=True)
class Request:
    mesh: Mesh
    cluster: Cluster
    training: bool | None = None  # None: if the model returns a loss
    pins: Pairs = ()
    forbid: Pairs = ()
    batch_split: bool = True
    memory: float | str | None = DEVICE  # of a device, for the plan: see `limit`
    optimizer: Optimizer = ADAM
    recompute: str = AUTO
    baselines: tuple[str, ...] = NAMES  # strategies that the plan is compared with
    tp_plan: Pairs = ()  # of transformers, for the strategy hf; (): the model's own
    losses: tuple[str, ...] = ()  # outputs whose gradients are planned for; (): the loss, or all if there is none
    pieces: int = 1  # of activations that travel while products are computed, see plan/pieces.py
    compile: bool = False  # the program runs under torch.compile, and is priced so
    accumulate: int = 1  # micro batches, forward and backward, before each step of the optimizer
    time_limit: float | None = None  # seconds for the search, which then ends with the best plan so far
    discovery: bool = True  # operators without a rule are tried out
    capacity: float | None = None  # of buffers in which tokens are sent to experts, see ir/capacity.py

    @classmethod
    def of(
        cls,
        mesh: MeshLike | None,
        cluster: str | Cluster = DEFAULT_CLUSTER,
        *,
        training: bool | None = None,
        pins: PairsLike = None,
        forbid: PairsLike = None,
        batch_split: bool = True,
        memory: float | str | None = DEVICE,
        optimizer: str | Optimizer = ADAM,
        recompute: str = AUTO,
        baselines: bool | Sequence[str] = True,
        losses: Sequence[str] = (),
        pieces: int = 1,
        compile: bool = False,
        accumulate: int = 1,
        tp_plan: Mapping[str, str] | None = None,
        time_limit: float | None = None,
        discovery: bool = True,
        capacity: float | None = None,
    ) -> "Request":
        """From what a user says, in any of its forms; the cheap checks come before any work."""
        if mesh is None or mesh == "":
            raise TapasError(
                "mesh", "no mesh was given", "write the axis sizes, slowest link first, such as 2x4 or (2, 4)"
            )
        return cls(
            parse_mesh(mesh), load_cluster(cluster), training, parse_pairs("pins", pins), parse_pairs("forbid", forbid),
            batch_split, memory, optimizer if isinstance(optimizer, Optimizer) else Optimizer(optimizer), recompute,
            NAMES if baselines is True else tuple(baselines or ()), tuple((tp_plan or {}).items()),
            (losses,) if isinstance(losses, str) else tuple(map(str, losses)), pieces, compile, accumulate,
            time_limit, discovery, capacity,
        )  # fmt: skip

    def __post_init__(self) -> None:
        check_mesh(self.mesh, self.cluster)
        memory_limit(self.memory, self.cluster)
        check_mode(self.recompute)
        if not isinstance(self.pieces, int) or self.pieces < 1:
            raise TapasError(f"pieces {self.pieces}", "is not a number of pieces", "give 1 (none), or 2 to 8")
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            place = f"accumulate {self.accumulate}"
            raise TapasError(place, "is not a number of micro batches", "give a whole number from 1 on")
        if self.accumulate > 1 and self.training is False:
            raise TapasError("accumulate", "is given, and the plan is for inference", "leave one of them out")
        if self.capacity is not None and (not isinstance(self.capacity, (int, float)) or not 1 <= self.capacity < inf):
            fact = "is not how many times an equal share experts have room for"
            raise TapasError(f"capacity {self.capacity}", fact, "give a number from 1 on, such as 1.25, or None")
        seconds = self.time_limit
        if seconds is not None and (not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf")):
            raise TapasError(f"time limit {seconds}", "is not a number of seconds", "give one such as 10, or None")
        if self.losses and self.training is False:
            raise TapasError("losses", "are given, and the plan is for inference", "leave one of them out")
        for name in self.baselines:
            if name not in NAMES:
                raise TapasError(f"baseline {name}", "there is no such strategy", nearest(name, list(NAMES)))

    @property
    def limit(self) -> float | None:
        """Bytes that a device has for the plan; None: as many as it likes."""
        return memory_limit(self.memory, self.cluster)

    def router(self, mesh: Mesh | None = None) -> ClusterRouter:
        """Of its mesh, or of another one."""
        return ClusterRouter(mesh or self.mesh, self.cluster, self.accumulate, self.compile)

    def constraints(self, hints: Mapping[str, str] | None = None) -> Constraints:
        """What a plan has to keep to; `hints` are those of `tp_hints`."""
        return Constraints(self.pins, self.forbid, self.batch_split, self.recompute, dict(self.tp_plan) or hints)

    def to_dict(self) -> dict[str, Any]:
        """Without mesh and cluster: a plan has them anyway."""
        return {
            "training": self.training, "pins": ["=".join(pair) for pair in self.pins],
            "forbid": ["=".join(pair) for pair in self.forbid], "batch_split": self.batch_split,
            "memory": NONE if self.memory is None else self.memory, "optimizer": self.optimizer.name,
            "master": self.optimizer.master, "recompute": self.recompute, "losses": list(self.losses),
            "pieces": self.pieces, **({"compile": True} if self.compile else {}),
            **({"accumulate": self.accumulate} if self.accumulate > 1 else {}),
            **({"tp_plan": dict(self.tp_plan)} if self.tp_plan else {}),
            **({} if self.time_limit is None else {"time_limit": self.time_limit}),
            **({} if self.discovery else {"discovery": False}),
            **({} if self.capacity is None else {"capacity": self.capacity}),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], mesh: Mesh, cluster: Cluster) -> "Request":
        """The inverse of `to_dict`; a TypeError if a field is unknown."""
        fields = dict(data)
        optimizer = Optimizer(fields.pop("optimizer", ADAM.name), fields.pop("master", ADAM.master))
        return cls.of(mesh, cluster, optimizer=optimizer, **fields)


def parse_pairs(option: str, given: PairsLike) -> Pairs:
    """From a dict, from texts such as `PATTERN=WHAT`, or from pairs."""
    items = list(given.items()) if isinstance(given, Mapping) else given or ()
    form, example = _FORMS[option]
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise PlanError(option, f"is a {type(given).__name__}", f"give a dict, or texts {form}, e.g. [{example}]")
    pairs = []
    for item in items:
        pair = tuple(item.split("=", 1)) if isinstance(item, str) else item
        if not (
            isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(p, str) and p.strip() for p in pair)
        ):
            raise PlanError(f"{option} {item}", f"is not {form}", f"write e.g. {example}")
        pairs.append((pair[0].strip(), pair[1].strip()))
    return tuple(pairs)
