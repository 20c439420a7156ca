"""What a rule is: the factors of an operator, einsum-like, and how a rank calls it.

Sharding a mesh axis by a factor f means: operands that have f are S on that dim, operands that lack
it are B (each device sees part of the work, so their gradients are partial sums), results that have
f are S, results that lack it are P. Nothing else has to be said about most operators.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapas.ir.graph import Op, Ref, Tensor, as_read
from tapas.sharding.layout import Layout, local_pieces, local_shape


@dataclass(frozen=True, slots=True)
class At:
    """Where a factor sits in one tensor: the major part of `dim`, `inner` elements a unit.

    `start:stop` (in units) says that this tensor holds only that section of the factor, as the
    results of a split or the operands of a concatenation do. `repeat` says that the dim holds the
    whole factor several times over, one after the other (gate and up packed in one matrix).
    """

    dim: int
    inner: int = 1
    start: int = 0
    stop: int | None = None
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class Collective:
    """What a kernel sends along its axis: a payload of the product of these factors' local sizes. `height+` is what a
    rank has along that factor with its borders, in elements (see `Halo`), and behind a joint factor's name `+` is what
    it has room for of the one that it deals out (see `Kernel.capacity`)."""

    kind: str  # "all_reduce", "ring": passed on from rank to rank until all have seen it, or "halo": to neighbours
    factors: tuple[str, ...]
    itemsize: int = 4  # bytes of a point; of a halo: of what goes to the next rank
    backward: bool = False
    imbalance: float = 1.0  # what the busiest rank sends or gets, over the mean
    previous: int = 0  # of a halo: bytes of a point of what goes to the rank before, never more than `itemsize`
    everywhere: bool = False  # along all axes of the mesh: all ranks have to know
    after: bool = False  # of a ring: sent once a piece is computed, as gradients are, and not while it is

    def axes(self, own: int, mesh: Sequence[int]) -> list[int]:
        """Along which it is sent."""
        return [axis for axis, devices in enumerate(mesh) if axis == own or (self.everywhere and devices > 1)]

    def messages(self, devices: int) -> int:
        """How many of such a payload a rank sends."""
        return devices - 1 if self.kind == "ring" else 1

    def point_nbytes(self, devices: int, place: int | None = None) -> int:
        """Bytes of a point in one message of the rank at a place; without one, of the busiest rank: where there are two
        neighbours to send to, or else the first."""
        if self.kind != "halo":
            return self.itemsize
        place = int(devices > 2) if place is None else place
        return (place < devices - 1) * self.itemsize + (place > 0) * self.previous


@dataclass(frozen=True, slots=True)
class Halo:
    """A rank needs so many elements before and after its own ones, which its neighbours have."""

    before: int
    after: int


Kept = tuple[tuple[str, ...], float]  # bytes for each point of the product of these factors' local sizes


@dataclass(frozen=True, slots=True)
class Kernel:
    """A sharded implementation of one factor that is more than calling the operator locally.

    `operands` and `results` override the states of those that lack the factor ("R" instead of
    B or P), None keeps the default. `imbalance` is the largest share of the work over the mean, less what is `lighter`
    about it over the number of devices. `lean` ones have no use for the rule's workspace. `slower`: what it takes,
    forward and backward, over the fused kernel that it stands in for, on an H200. What `saved` says is kept besides for
    the backward pass, what `products` says is among the results that a selective block keeps, what `working` says is
    there besides while it is at it, and what `moved` says is read and written besides, forward and backward. What
    several factors say is saved or working in the same words is one thing; saved may be `instead` of an operand. With a
    `capacity` every rank has buffers for each other one, of so many times an equal share of what the most have.
    """

    collectives: tuple[Collective, ...] = ()
    operands: tuple[str | None, ...] = ()
    results: tuple[str | None, ...] = ()
    imbalance: float = 1.0
    lighter: float = 0.0
    lean: bool = False
    slower: tuple[float, float] = (1.0, 1.0)
    saved: tuple[Kept, ...] = ()
    products: tuple[Kept, ...] = ()
    working: tuple[Kept, ...] = ()
    moved: tuple[tuple[Kept, ...], tuple[Kept, ...]] = ((), ())
    halo: Halo | None = None
    instead: int | None = None
    capacity: float = 0.0


@dataclass(frozen=True, slots=True)
class Factor:
    name: str
    size: int  # in units: what may be dealt out to devices
    operands: tuple[At | None, ...]
    results: tuple[At | None, ...]
    after: tuple[str, ...] = ()  # a minor factor: outer axes must have split these down to one unit
    blocked: bool = False  # counts as work, is never split
    kernel: Kernel | None = None
    joint: str = ""  # deals out that factor, whose work it is, and with it dims of other tensors, over one axis
    without: tuple[str, ...] = ()  # never split together with these
    least: int = 0  # dealt out over one axis in equal shares, none of which has fewer units; 0: in any way

    def fits(self, devices: int) -> bool:
        """Whether an axis of so many devices may deal it out."""
        return not self.least or (self.size % devices == 0 and self.size // devices >= self.least)

    def bordered(self, units: Any, split: Any) -> Any:
        """Elements that a rank with so many units has of the operand, with its borders if the factor is split."""
        inner = next(at.inner for at in self.operands if at is not None)
        halo = self.kernel.halo if self.kernel is not None else None
        return units * inner + (split * (halo.before + halo.after) if halo is not None else 0)


BORDERED = "+"  # behind a factor's name


def buffered(capacity: float, units: Any, devices: Any) -> Any:
    """In how many units buffers for all ranks of an axis have room together, for a rank that has so many."""
    return devices * -(-capacity * units // devices)


@dataclass(frozen=True, slots=True)
class Call:
    """One operator with the shapes it was called on."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    @classmethod
    def of(cls, op: Op, tensors: Mapping[str, Tensor]) -> "Call":
        return cls(op.target, op.args, op.kwargs, as_read(op, tensors), tuple(tensors[name] for name in op.results))

    @property
    def rank(self) -> int:
        """Of the first operand: how many dims it has."""
        return len(self.operands[0].shape)

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by position or by name, Refs not resolved."""
        if index < len(self.args):
            return self.args[index]
        return dict(self.kwargs).get(name, default)

    def tensor(self, value: Any) -> Tensor | None:
        return self.operands[value.index] if isinstance(value, Ref) else None


@dataclass(frozen=True, slots=True)
class Local:
    """One rank's view of a call: mesh sizes, its coordinate, and the layouts around the operator."""

    call: Call
    mesh: tuple[int, ...]
    coord: tuple[int, ...]
    choice: tuple[str, ...]  # per axis: a factor's name, or "R", "B", "P0", "P1", ...
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]

    def operand_shape(self, index: int) -> tuple[int, ...]:
        return local_shape(self.call.operands[index].shape, self.operands[index], self.mesh, self.coord)

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        return local_shape(self.call.results[index].shape, self.results[index], self.mesh, self.coord)

    def operand_pieces(self, index: int, dim: int) -> tuple[tuple[int, int], ...]:
        """The ranges of the global dim that this rank holds of an operand."""
        return local_pieces(self.call.operands[index].shape, self.operands[index], self.mesh, self.coord)[dim]

    def result_pieces(self, index: int, dim: int) -> tuple[tuple[int, int], ...]:
        return local_pieces(self.call.results[index].shape, self.results[index], self.mesh, self.coord)[dim]

    def axes_of(self, factor: str) -> tuple[int, ...]:
        """The mesh axes that a factor is split over, outermost first."""
        return tuple(axis for axis, name in enumerate(self.choice) if name == factor)


Arguments = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]


@dataclass(frozen=True, slots=True)
class Rule:
    """All that is known about an operator on the shapes of one call. Adding an operator is adding a rule."""

    factors: tuple[Factor, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()  # groups of operands through which partial sums may pass
    flops: float = 0.0  # per point of the product of all factors; 0: bound by memory alone
    family: str = ""  # of kernels that serve it, which says what they reach (hardware/efficiency.py); see `kernels_of`
    backward: float = 1.5  # what its backward pass reads and writes, over what the forward pass does; 0: nothing runs
    added: int | None = None  # an operand that a product adds: its gradient is a sum over the result's
    view: bool = False  # moves no bytes forward
    scattered: float = 0.0  # of a view: what its gradient reads and writes, to lie in zeros, over operand and result
    random: bool = False
    own_gradient: bool = False  # that need not be linear in its results': it is given whole gradients, or none
    local: Callable[[Local], Arguments] | None = None  # how constants change for local shapes
    target: str | None = None  # what a rank calls instead, where the operator's own constants cannot say it
    kernel: str | None = None  # `module.function` of runtime/kernels that serves the factors with a Kernel
    full_precision: bool = False  # autocast computes it in float32: so must the kernel
    saves_result: bool = False  # its derivative is written in terms of its result, not of its operands
    saved_bytes: float = 0.0  # that its backward pass keeps besides, for each element of the first result
    saved_factors: tuple[str, ...] = ()  # or for each point of these, as a result of its product
    workspace: int | None = None  # its backward pass needs as much again as this operand takes
    products: tuple[str, ...] = ()  # what torch runs that selective recomputation keeps; none: all runs again
    resident: int | None = None  # an operand that is a buffer of which each rank holds what it reads here, and no more
    dense_rows: bool = False  # fused kernels take its operands only where their last dim has a stride of one
    spread: str | None = None  # the factor by whose size its kernels are spread over a device
    channels: int | None = None  # a product whose depth is this dim of the second operand, and more: that is aligned
    looked_up: int | None = None  # an operand of which no more is read than is made
    attended: str | None = None  # the factor whose elements look at each other, as those of a sequence do
    seen: float = 1.0  # the share of these that each looks at, on average
    missing: bool = False  # no rule is known: runs whole
    unknown_work: bool = False  # costed by its bytes although it may be much arithmetic

    @property
    def kernels_of(self) -> str:
        """Its family; those that nobody named are products, or copy as they go."""
        return self.family or ("matmul" if self.flops else "strided")

    @property
    def dealt(self) -> tuple[Factor, ...]:
        """The factors whose product is the work: joint ones are another way to deal out one of these."""
        return tuple(f for f in self.factors if not f.joint)

    def factor(self, name: str) -> Factor:
        return next(f for f in self.factors if f.name == name)

    def saved_operands(self, call: Call) -> list[bool]:
        """Which operands are kept for the backward pass: those that the gradient of another one is multiplied by, or
        of a function of them."""
        trained = [t.priced for t in call.operands]
        if self.view or self.saves_result or not any(trained):
            return [False] * len(trained)
        flags = []
        for i in range(len(trained)):
            group = next((g for g in self.linear if i in g), ())
            flags.append(not group or any(wants and j not in group for j, wants in enumerate(trained)))
        return flags

    def saved_results(self, call: Call) -> bool:
        return self.saves_result and any(t.priced for t in call.operands)

    def saved(self, call: Call) -> tuple[bool, ...]:
        """Which operands, and then which results, are kept for the backward pass."""
        return *self.saved_operands(call), *[self.saved_results(call)] * len(call.results)


# What a block does about its activations, and about weights that it gathered. They are kept for the backward pass; or
# activations are, and weights are gathered again; or only what the block reads is kept, and the rest is computed (and
# gathered) again; or the results of products as well, which are dear to compute.
KEEP, GATHER, SELECTIVE, BLOCK = MODES = ("none", "gather", "selective", "block")


RECOMPUTED = (SELECTIVE, BLOCK)


def repeated(mode: str, rule: Rule) -> bool:
    """Whether an operator of a block in this mode is computed twice."""
    return mode == BLOCK or (mode == SELECTIVE and not rule.products)


def gathered_again(mode: str, exported: bool, saved: bool) -> bool:
    """Whether a gathered weight is freed after the forward pass of its block. Other blocks may read it, too; and where
    only weights are gathered again, nobody need do so for one that no operator keeps."""
    return (mode in (SELECTIVE, BLOCK) and not exported) or (mode == GATHER and saved and not exported)


@dataclass(frozen=True, slots=True)
class Wording:
    """How reports speak of an operator."""

    name: str = ""  # instead of torch's own
    factors: Mapping[str, str] = field(default_factory=dict)  # what they are
    joint: Mapping[str, str] = field(
        default_factory=dict
    )  # what joint ones are, `sequence (ring)`, whatever their role
    listed: bool = False  # in the table of a plan, though it may have no weight


RuleFunction = Callable[[Call], Rule]
_RULES: dict[str, RuleFunction] = {}
_WORDINGS: dict[str, Wording] = {}


def rule(*targets: str, wording: Wording | None = None) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule for operators; two rules for one operator are an error."""

    def register(function: RuleFunction) -> RuleFunction:
        for target in targets:
            if target in _RULES:
                raise ValueError(f"{target} has two rules: {_RULES[target].__module__} and {function.__module__}")
            _RULES[target] = function
            if wording is not None:
                _WORDINGS[target] = wording
        return function

    return register


def wording(target: str) -> Wording:
    return _WORDINGS.get(target, Wording())


def registered() -> dict[str, RuleFunction]:
    return dict(_RULES)


def rule_for(call: Call, found: Mapping[str, str] | None = None) -> Rule:
    """The rule of a call; an operator nobody described runs whole, unless it was found out how it splits."""
    if found:
        from tapas.rules.found import found_rule

        if (rule := found_rule(call, found)) is not None:
            return rule
    function = _RULES.get(call.target)
    if function is not None:
        return function(call)
    from tapas.rules.unregistered import without_rule  # asks torch, which takes long to import

    return without_rule(call)
