"""Known strategies as pins on the same problem, each solved to its best.

ddp          every operator splits the batch over all axes, weights are stored whole
fsdp         the same, weights are stored split over all axes
hsdp         the same, weights are stored split over the innermost axis, and whole along the others (replicas of shards)
megatron     the innermost axis splits heads, features and vocabulary of every product with a weight that
             has some to split, and keeps the stream between blocks whole; the other axes are ddp
megatron-sp  the same, with the stream between blocks split on the sequence
fsdp+tp      megatron-sp with weights stored split over the other axes, too
hf           transformers' own tp_plan on the innermost axis, where the architecture brings one
"""

from collections.abc import Callable, Mapping
from math import prod

import numpy as np

from tapas.errors import PlanError
from tapas.ir.patterns import matches
from tapas.problem.pins import OTHERS, NamedVariable, common, named_variables, restrict, speaking, unmatched
from tapas.problem.problem import OpVariable, Problem, Rows, WeightVariable
from tapas.rules.choices import Option
from tapas.sharding.layout import State

Left = dict[tuple[int, int], np.ndarray]
NAMES = ("ddp", "fsdp", "hsdp", "megatron", "megatron-sp", "fsdp+tp", "hf")
OF_TWO_AXES = ("hsdp", "fsdp+tp")  # with one axis they are what another strategy is


def _splits_batch(site: NamedVariable) -> bool:
    assert isinstance(site.variable, OpVariable)
    return any(site.role(option) == "batch" for option in site.variable.table.options)


class _Batch:
    """Operators that can split the batch do so on the given axes."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        self.axes = axes
        self.known: dict[int, bool] = {}

    def __call__(self, site: NamedVariable, option: Option, axis: int) -> bool:
        if axis not in self.axes:
            return True
        able = self.known.setdefault(id(site), _splits_batch(site))
        return not able or site.role(option) == "batch"


def batch_of(problem: Problem) -> int:
    """Samples in a step; 0 where the inputs do not say."""
    folded = problem.folded
    sizes = [folded.tensors[leaf.tensor].shape[:1] for leaf in folded.inputs]
    return min((size[0] for size in sizes if size), default=0)


def _need_batch(problem: Problem, axes: tuple[int, ...], name: str) -> None:
    """A batch that is smaller than the devices cannot be dealt out."""
    batch = batch_of(problem)
    devices = prod(problem.router.mesh.sizes[a] for a in axes)
    if batch < devices:
        raise PlanError(name, f"a batch of {batch} does not split over {devices} devices", "use a larger batch")


def ddp(problem: Problem, hints: Mapping[str, str] | None = None) -> Left:
    axes = tuple(range(len(problem.router.mesh.sizes)))
    _need_batch(problem, axes, "ddp")
    return restrict(problem, op=_Batch(axes), weight=lambda site, state, axis: state.kind == "R", place="ddp")


def fsdp(problem: Problem, hints: Mapping[str, str] | None = None) -> Left:
    axes = tuple(range(len(problem.router.mesh.sizes)))
    _need_batch(problem, axes, "fsdp")
    return _split_most(problem, restrict(problem, op=_Batch(axes), place="fsdp"), axes)


def hsdp(problem: Problem, hints: Mapping[str, str] | None = None) -> Left:
    _need_two_axes(problem, "hsdp")
    *outer, last = axes = tuple(range(len(problem.router.mesh.sizes)))
    _need_batch(problem, axes, "hsdp")

    def weight(site: NamedVariable, state: State, axis: int) -> bool:
        return axis not in outer or state.kind == "R"

    return _split_most(problem, restrict(problem, op=_Batch(axes), weight=weight, place="hsdp"), (last,))


def _split_most(problem: Problem, left: Left, axes: tuple[int, ...]) -> Left:
    """Weights are stored split over as many of these axes as they can be."""
    for key, site in named_variables(problem).items():
        if isinstance(site.variable, WeightVariable):
            space, rows = site.variable.space, left.get(key, np.arange(len(site.variable.stored)))
            plainly = np.array([s.sharded and not s.tiling for s in space.states])
            split = plainly[space.combos[site.variable.stored[rows]][:, list(axes)]].sum(1)
            left[key] = rows[split == split.max()]
    return left


def several_axes(problem: Problem) -> bool:
    return sum(n > 1 for n in problem.router.mesh.sizes) > 1


def _need_two_axes(problem: Problem, name: str) -> None:
    if not several_axes(problem):
        fact = f"mesh {problem.router.mesh} has one axis"
        raise PlanError(name, fact, "give the mesh another one, such as 2x4")


def _weightlike(problem: Problem) -> set[str]:
    """Parameters, and what is made of them without inputs: `x @ (q * scale).T` is a product with a weight, too."""
    leaves, found, fixed = problem.folded.leaf_of, set[str](), set[str]()
    for part in problem.blocks:
        read = leaves.keys() & {name for op in part.block.ops for name in op.operands}
        found |= {name for name in read if leaves[name].kind == "parameter"}
        fixed |= {name for name in read if leaves[name].kind in ("buffer", "constant")}
        for variable in part.variables:
            operands = set(variable.op.operands) if isinstance(variable, OpVariable) else set[str]()
            if isinstance(variable, OpVariable) and operands & found and operands <= found | fixed:
                found |= set(variable.op.results)
    return found


class _Features:
    """Products with weights that can split a feature, a head or the vocabulary on the last axis do so: a small
    model would otherwise be fastest unsplit, and that is no Megatron."""

    def __init__(self, problem: Problem, batch: _Batch) -> None:
        self.weights, self.batch = _weightlike(problem), batch
        self.last = len(problem.router.mesh.sizes) - 1
        self.known: dict[int, set[str]] = {}

    def __call__(self, site: NamedVariable, option: Option) -> bool:
        able = self.known.get(id(site))
        if able is None:
            able = self.known[id(site)] = self._able(site)
        return not able or str(option) in able

    def _able(self, site: NamedVariable) -> set[str]:
        """The options that split a dim of a weight and nothing else, among those that leave the batch to other axes."""
        assert isinstance(site.variable, OpVariable)
        op, table = site.variable.op, site.variable.table
        places = [i for i, name in enumerate(op.operands) if name in self.weights]
        if not (site.variable.rule.flops and places):
            return set()
        good = [
            o.factor is not None and not (o.factor.joint or site.role(o)) and any(o.operands[i].sharded for i in places)
            for o in table.options
        ]
        fits = np.array(good)[table.combos[:, self.last]]
        for axis in range(self.last):
            fits &= np.array([self.batch(site, o, axis) for o in table.options])[table.combos[:, axis]]
        return {str(table.options[i]) for i in np.unique(table.combos[fits, self.last])}


def _tensor_parallel(
    problem: Problem, stream: Callable[[NamedVariable, State], bool], spread: bool, name: str, insist: bool = True,
    pieces: bool = False,
) -> Left:  # fmt: skip
    """Batch on the outer axes; features on the innermost, with a condition on what leaves a block. Weights are whole on
    the outer axes, or may be stored in `pieces`."""
    last = len(problem.router.mesh.sizes) - 1
    batch = _Batch(tuple(range(last)))
    _need_batch(problem, tuple(range(last)), name)
    features = _Features(problem, batch)

    def op(site: NamedVariable, option: Option, axis: int) -> bool:
        if axis != last:
            return batch(site, option, axis)
        assert isinstance(site.variable, OpVariable)
        if insist and not features(site, option):
            return False
        role, factor = site.role(option), option.factor
        ours = factor is not None and (factor.joint or (factor.kernel is not None and factor.kernel.halo is not None))
        return (role == "" and not ours) or (spread and role == "sequence" and not site.variable.rule.flops)

    def weight(site: NamedVariable, state: State, axis: int) -> bool:
        return axis == last or pieces or state.kind == "R"

    def tensor(site: NamedVariable, state: State, axis: int) -> bool:
        return axis != last or not site.stream or stream(site, state)

    return restrict(problem, op=op, weight=weight, tensor=tensor, place=name)


def megatron(problem: Problem, hints: Mapping[str, str] | None = None) -> Left:
    return _tensor_parallel(problem, _whole, False, "megatron")


def _whole(site: NamedVariable, state: State) -> bool:
    return state.kind in "RB"


def megatron_sp(problem: Problem, hints: Mapping[str, str] | None = None) -> Left:
    return _tensor_parallel(problem, _split_sequence, True, "megatron-sp")


def fsdp_tp(problem: Problem, hints: Mapping[str, str] | None = None) -> Left:
    _need_two_axes(problem, "fsdp+tp")
    left = _tensor_parallel(problem, _split_sequence, True, "fsdp+tp", pieces=True)
    return _split_most(problem, left, tuple(range(len(problem.router.mesh.sizes) - 1)))


def _split_sequence(site: NamedVariable, state: State) -> bool:
    dims = range(len(site.variable.tensor.shape)) if not isinstance(site.variable, OpVariable) else ()
    able = any(site.dim_role(dim) == "sequence" for dim in dims)
    return (state.sharded and site.dim_role(state.dim) == "sequence") if able else state.kind in "RB"


# transformers' styles: those that split the features that a module makes, or those that it reads, ...
_COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output", "local_colwise", "packed_colwise")
_ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise", "packed_rowwise")
_DIMS = {"embedding_rowwise": 0, "embedding_colwise": 1, "grouped_gemm": 0}  # ... or this dim, ...
# ... and those that split no weight, but say what happens around a module
_AROUND = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "moe_tp_experts",
           "moe_identity_expert", "ep_router", "ep_dispatch_experts", "gather", "sequence_parallel")  # fmt: skip
STYLES = (*_COLUMNS, *_ROWS, *_DIMS, *_AROUND)


def splits_weights(style: str) -> bool:
    return style not in _AROUND


def styled_dim(style: str, rank: int) -> int:
    """The dim of a weight that a style splits, counted from the front; -1 for none. Biases follow their results.

    >>> styled_dim("colwise", 2), styled_dim("rowwise", 3), styled_dim("rowwise", 1), styled_dim("replicate", 2)
    (0, 2, -1, -1)
    """
    if style in _COLUMNS:
        return max(rank - 2, 0)
    if style in _ROWS:
        return rank - 1 if rank > 1 else -1
    return _DIMS.get(style, -1)


def hf(problem: Problem, hints: Mapping[str, str] | None = None) -> Left:
    if not hints:
        raise PlanError("hf", "the architecture brings no tp_plan")
    return _styled(problem, hints, "hf", False)


def hf_fsdp(problem: Problem, hints: Mapping[str, str] | None = None) -> Left:
    """The same with weights stored in pieces on the other axes."""
    return _styled(problem, hints or {}, "hf-fsdp", True)


def _styled(problem: Problem, hints: Mapping[str, str], name: str, pieces: bool) -> Left:
    # the tp_plan says what is split
    left = _tensor_parallel(problem, _whole, False, name, insist=False, pieces=pieces)
    last = len(problem.router.mesh.sizes) - 1
    splitting = {pattern: style for pattern, style in hints.items() if splits_weights(style)}

    def weight(site: NamedVariable, state: State, axis: int) -> bool:
        if axis != last:
            return True
        for pattern, style in splitting.items():
            if any(matches(name, pattern) for name in site.names):
                rank = len(site.variable.tensor.shape) if isinstance(site.variable, WeightVariable) else 0
                dim = styled_dim(style, rank)
                return state.kind == "R" if dim < 0 else state.sharded and state.dim == dim
        return state.kind == "R"

    found = restrict(problem, weight=weight, rows=left, place=name, others="the rest of the tp_plan")
    return _in_pieces(problem, found) if pieces else found


def _in_pieces(problem: Problem, left: Left) -> Left:
    """Weights split on as many of the outer axes as they can be."""
    outer = slice(0, len(problem.router.mesh.sizes) - 1)
    for key, site in named_variables(problem).items():
        if isinstance(site.variable, WeightVariable):
            space, stored = site.variable.space, site.variable.stored
            rows = left.get(key, np.arange(len(stored)))
            split = np.array([s.sharded and not s.tiling for s in space.states])[space.combos[stored[rows]]]
            many = split[:, outer].sum(1)
            left[key] = rows[many == many.max()]
    return left


STRATEGIES: dict[str, Callable[..., Left]] = {
    "ddp": ddp, "fsdp": fsdp, "hsdp": hsdp, "megatron": megatron, "megatron-sp": megatron_sp, "fsdp+tp": fsdp_tp,
    "hf": hf, "hf-fsdp": hf_fsdp,
}  # fmt: skip


def _half_chosen(problem: Problem, chosen: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Tensors that copies of one block read from several places, not all of which are chosen: a block has
    one table for all its copies, so these stay free."""
    exported: dict[str, set[tuple[int, int]]] = {}
    for b, part in enumerate(problem.blocks):
        for name, v in zip(part.block.exports, part.exports, strict=True):
            exported.setdefault(problem.name_of(name), set()).add((b, v))
    return {key for keys in exported.values() if not keys <= chosen for key in keys}


def pin_strategy(
    problem: Problem, pattern: str, name: str, rows: Rows, hints: Mapping[str, str] | None = None, others: str = OTHERS
) -> Left:
    """A strategy for the operators and weights that match a pattern only."""
    whole = STRATEGIES[name](problem, hints)
    chosen = {key for key, site in named_variables(problem).items() if any(matches(n, pattern) for n in site.names)}
    chosen -= _half_chosen(problem, chosen)
    place = f"--pin {pattern}={name}"
    if not chosen:
        known = speaking(named_variables(problem).values())
        raise PlanError(place, "no parameter or module matches this pattern", unmatched(pattern, known))
    return common(problem, {key: rows for key, rows in whole.items() if key in chosen}, rows, place, others)
