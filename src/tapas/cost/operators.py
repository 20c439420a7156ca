"""Seconds and bytes of an operator under each of its choices, and of storing a weight. A choice's share of the work is
that of its most loaded device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapas.cost.collectives import Interconnect, collective_seconds
from tapas.cost.kernels import Fused, Sizes, work_of
from tapas.cost.memory import FULL, Optimizer
from tapas.hardware.cluster import Cluster, Device
from tapas.rules.base import BORDERED, Call, Kept, Kernel, Rule, buffered
from tapas.rules.choices import Choice, ChoiceTable, OperatorChoices, Option
from tapas.sharding.layout import Tiling, extents
from tapas.sharding.layout_grid import axis_set_devices
from tapas.sharding.routing import LayoutSpace

Kernels = Sequence[tuple[np.ndarray, Kernel]]  # of options, with the axes that do it under each choice


@dataclass(frozen=True)
class OpTable:
    """Every choice of an operator with the layouts and the costs that come with it."""

    options: tuple[Option, ...]
    combos: np.ndarray  # [choice, axis] -> option
    operands: tuple[np.ndarray, ...]  # [choice] -> layout number in the operand's space
    results: tuple[np.ndarray, ...]
    forward_seconds: np.ndarray
    backward_seconds: np.ndarray
    kernel_seconds: np.ndarray  # communication inside sharded implementations that is waited for
    hidden_seconds: np.ndarray  # and what is not: it runs beside what they compute
    again_seconds: np.ndarray  # what computing it a second time takes: the forward part of all of this
    saved_bytes: np.ndarray  # kept for the backward pass
    working_bytes: np.ndarray  # needed while the backward pass is at it (in inference: while it runs)
    result_bytes: np.ndarray  # of what selective recomputation keeps, if it is a product
    resident_bytes: np.ndarray  # of a buffer that is there all the time, as it is read here

    def __len__(self) -> int:
        return len(self.combos)

    def choice(self, index: int) -> Choice:
        return Choice(tuple(self.options[o] for o in self.combos[index]))

    @property
    def seconds(self) -> np.ndarray:
        return self.forward_seconds + self.backward_seconds + self.kernel_seconds


def op_table(
    call: Call,
    rule: Rule,
    available: OperatorChoices,
    spaces: Sequence[LayoutSpace],
    saved: Sequence[float],
    sole: Sequence[bool],
    links: Interconnect,
    fused: Fused | None = None,
) -> OpTable:
    """All choices of a call; `spaces` are those of its operands and results, `saved` the share of each of these that
    counts as kept by this call, `sole` says whether nobody else keeps it. What is `fused` is a kernel of its own only
    where it is a sharded implementation."""
    choices = available.on(links.mesh.sizes, [space.grid for space in spaces])
    held = [space.nbytes[layout] for space, layout in zip(spaces, choices.layouts, strict=True)]
    none, operands = np.zeros(len(choices.combos)), len(call.operands)
    kernels = [(mask, o.factor.kernel) for mask, o in choices.splits if o.factor and o.factor.kernel]
    sizes = _local_sizes(rule, choices, links.mesh.sizes) if rule.flops or rule.spread or kernels else {}
    devices = axis_set_devices(links.mesh.sizes)
    imbalance = [
        np.where(mask > 0, kernel.imbalance - kernel.lighter / devices[mask], 1.0)
        for mask, kernel in kernels
        if kernel.imbalance != 1.0
    ]
    device = links.cluster.device
    seconds = work_of(call, rule, sizes, held or [none], imbalance).seconds(device)
    forward, backward = _with_kernels(call, sizes, kernels, seconds, none, device)
    alone = np.any([none > 0, *(mask > 0 for mask, _ in kernels)], axis=0)
    if fused is not None:
        together = fused.seconds(held, device)
        forward, backward = (np.where(alone, *both) for both in zip((forward, backward), together, strict=True))
    (ahead, back), hidden = _kernel_seconds(call, sizes, kernels, (forward, backward), links)
    working = _working_bytes(call, rule, held, none)
    if fused is not None:
        working = np.where(alone, working, none + fused.moved(held, [float(share > 0) for share in fused.forward]))
    elif rule.workspace is not None and call.operands[rule.workspace].priced:
        lean = np.any([none > 0, *(mask > 0 for mask, kernel in kernels if kernel.lean)], axis=0)
        working = working + np.where(lean, 0.0, held[rule.workspace])
    kept = sum((nbytes * share for nbytes, share in zip(held, saved, strict=True) if share), start=none)
    results = sum(held[operands:], start=none)
    if rule.saved_bytes and fused is None and any(t.priced for t in call.operands):
        elements = spaces[operands].elements[choices.layouts[operands]]
        besides = _points(sizes, rule.saved_factors, none) if rule.saved_factors else elements
        besides = besides * float(rule.saved_bytes) * device.family(rule.kernels_of).keeps
        kept = kept + besides
        results = results + besides if rule.saved_factors else results
    working = working + _said(sizes, [(mask, kernel.working) for mask, kernel in kernels], none)
    for mask, kernel in kernels if any(t.priced for t in call.operands) else ():
        results = results + np.where(mask > 0, _held(sizes, kernel.products, none), 0.0)
    if any(t.priced for t in call.operands):
        kept = kept + _said(sizes, [(mask, kernel.saved) for mask, kernel in kernels], none)
    for i in {kernel.instead for _, kernel in kernels if kernel.instead is not None}:
        unused = np.any([mask > 0 for mask, kernel in kernels if kernel.instead == i], axis=0)
        kept = kept - np.where(unused & sole[i], held[i] * saved[i], 0.0)
    return OpTable(
        choices.options, choices.combos, choices.layouts[:operands], choices.layouts[operands:],
        forward, backward, ahead + back, hidden, forward + ahead, kept,
        working, results, held[rule.resident] if rule.resident is not None else none,
    )  # fmt: skip


def _with_kernels(
    call: Call, sizes: Sizes, kernels: Kernels, seconds: tuple[np.ndarray, np.ndarray], none: np.ndarray, device: Device
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds forward and backward, where some options have sharded implementations."""
    forward, backward = seconds
    bytes_per_s = device.memory_bytes_per_s * device.family("pointwise").forward
    trained = any(t.priced for t in call.operands)
    for mask, kernel in kernels:
        there, back = (_held(sizes, moved, none) / bytes_per_s for moved in kernel.moved)
        forward = np.where(mask > 0, forward * kernel.slower[0] + there, forward)
        backward = np.where(mask > 0, backward * kernel.slower[1] + (back if trained else 0.0), backward)
    return forward, backward


def _points(sizes: Sizes, factors: Sequence[str], none: np.ndarray) -> np.ndarray:
    """Of the product of some factors, on a rank."""
    points = none + 1.0
    for factor in factors:
        points = points * sizes[factor]
    return points


def _held(sizes: Sizes, amounts: Sequence[Kept], none: np.ndarray) -> np.ndarray:
    return sum((_points(sizes, factors, none) * nbytes for factors, nbytes in amounts), start=none)


def _said(sizes: Sizes, amounts: Sequence[tuple[np.ndarray, tuple[Kept, ...]]], none: np.ndarray) -> np.ndarray:
    """What options say is there, by the axes that do them: in the same words it is one thing."""
    chosen: dict[Kept, np.ndarray] = {}
    for mask, said in amounts:
        chosen |= {what: chosen.get(what, none > 0) | (mask > 0) for what in said}
    return sum((np.where(where, _held(sizes, (what,), none), 0.0) for what, where in chosen.items()), start=none)


def _local_sizes(rule: Rule, choices: ChoiceTable, mesh: tuple[int, ...]) -> Sizes:
    """The largest local size of each factor under each choice. Joint ones cut the factor that they deal out, too."""
    sizes: Sizes = {factor.name: factor.size for factor in rule.factors}
    cuts: dict[tuple[str, Tiling], np.ndarray] = {}
    for mask, option in choices.splits:
        assert option.factor is not None
        for name in filter(None, (option.name, option.factor.joint)):
            cuts[name, option.tiling] = cuts.get((name, option.tiling), 0) | mask
    for (name, tiling), mask in cuts.items():
        split = extents(rule.factor(name).size, tiling, mesh)[mask]
        sizes[name] = np.where(mask > 0, split, sizes[name])
    dealt = {option.name: mask > 0 for mask, option in choices.splits}
    for factor in rule.factors:
        if factor.least:
            sizes[factor.name + BORDERED] = factor.bordered(sizes[factor.name], dealt.get(factor.name, False))
    devices = axis_set_devices(mesh)
    for mask, option in choices.splits:
        factor = option.factor
        if factor is not None and factor.kernel is not None and (capacity := factor.kernel.capacity):
            room, known = buffered(capacity, sizes[factor.joint], devices[mask]), sizes.get(factor.name + BORDERED, 0)
            sizes[factor.name + BORDERED] = np.where(mask > 0, room, known)
    return sizes


def _working_bytes(call: Call, rule: Rule, held: Sequence[np.ndarray], none: np.ndarray) -> np.ndarray:
    """Gradients that come in and go out; without any, the tensors themselves."""
    if rule.view:
        return none
    trained = any(t.priced for t in call.operands)
    tensors = zip((*call.operands, *call.results), held, strict=True)
    return sum((nbytes for t, nbytes in tensors if t.priced or not trained), start=none)


def _kernel_seconds(
    call: Call, sizes: Sizes, kernels: Kernels, computed: tuple[np.ndarray, np.ndarray], links: Interconnect
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """What is waited for, forward and backward, and what hides behind what is `computed` there."""
    none = np.zeros_like(computed[0])
    total, rounds = {False: none, True: none}, [_Round(none) for _ in computed]
    trained = any(t.priced for t in call.operands)
    for mask, kernel in kernels:
        for sent in kernel.collectives:
            if sent.backward and not trained:
                continue
            points = _points(sizes, sent.factors, none) * sent.imbalance
            for axis, link in enumerate(links.axes):
                nbytes = points * sent.point_nbytes(links.mesh.sizes[axis])
                seconds = collective_seconds(sent.kind, nbytes, link)
                doing = mask > 0 if sent.everywhere else mask >> axis & 1
                total[sent.backward] = total[sent.backward] + np.where(doing, seconds, 0.0)
                if sent.kind == "ring":
                    one = np.where(doing, seconds / max(sent.messages(links.mesh.sizes[axis]), 1), 0.0)
                    rounds[sent.backward].add(one, np.where(doing, links.mesh.sizes[axis], 1), sent.after)
    ahead, back = (links.cluster.overlap * r.hidden(s) for r, s in zip(rounds, computed, strict=True))
    return (total[False] - ahead, total[True] - back), ahead + back


class _Round:
    """Of a ring: a message for every piece but the last, sent while that is computed; or one after every piece but the
    first, which travels while the next one is computed."""

    def __init__(self, none: np.ndarray) -> None:
        self.pieces, self.beside, self.after = none + 1.0, none, none

    def add(self, message: np.ndarray, pieces: np.ndarray, after: bool) -> None:
        self.pieces = np.maximum(self.pieces, pieces)
        self.beside, self.after = (self.beside, self.after + message) if after else (self.beside + message, self.after)

    def hidden(self, seconds: np.ndarray) -> np.ndarray:
        """Behind pieces that take so long together: the first two have only what is sent beside them, the last one what
        was sent before it; and what is sent after that is waited for."""
        piece, many = seconds / self.pieces, self.pieces > 2
        alone = np.minimum(self.pieces - 1, 2) * np.minimum(self.beside, piece)
        both = np.maximum(self.pieces - 3, 0) * np.minimum(self.beside + self.after, piece)
        return alone + both + np.where(many, np.minimum(self.after, piece), 0.0)


def update_seconds(space: LayoutSpace, cluster: Cluster, optimizer: Optimizer) -> np.ndarray:
    """The optimizer's step on what a device stores of a weight, per layout."""
    # read and write weight, read gradient, read and write state
    per_element = 3 * space.itemsize + 2 * optimizer.state_bytes(space.itemsize)
    wide = space.itemsize >= FULL or optimizer.master
    reached = cluster.device.family("optimizer" if wide else "narrow_optimizer").forward
    return space.elements * per_element / (cluster.device.memory_bytes_per_s * reached)
