"""Seconds and bytes of an operator under each of its choices, and of storing a weight.

Compute follows a roofline: the slower of arithmetic and memory traffic, never less than a kernel
launch. A choice's share of the work is that of its most loaded device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from tapas.cluster import Cluster
from tapas.layout import extents
from tapas.optimizer import Optimizer
from tapas.routing import Router, Space, collective_seconds
from tapas.rules.base import Call, Factor, Rule
from tapas.rules.choices import Choice, Option, clash


@dataclass(frozen=True)
class OpTable:
    """Every choice of an operator with the layouts and the costs that come with it."""

    options: tuple[Option, ...]
    combos: np.ndarray  # [choice, axis] -> option
    operands: tuple[np.ndarray, ...]  # [choice] -> layout number in the operand's space
    results: tuple[np.ndarray, ...]
    forward_seconds: np.ndarray
    backward_seconds: np.ndarray
    kernel_seconds: np.ndarray  # communication inside sharded implementations
    again_seconds: np.ndarray  # what computing it a second time takes: the forward part of all of this
    saved_bytes: np.ndarray  # kept for the backward pass
    working_bytes: np.ndarray  # needed while the backward pass is at it (in inference: while it runs)
    result_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.combos)

    def choice(self, index: int) -> Choice:
        return Choice(tuple(self.options[o] for o in self.combos[index]))

    @property
    def seconds(self) -> np.ndarray:
        return self.forward_seconds + self.backward_seconds + self.kernel_seconds


def _legal(options: Sequence[Option], combos: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """Which combinations the runtime can execute (see rules/choices.py, `legal`), all at once."""
    ok = np.ones(len(combos), bool)
    names = {o.factor.name: o.factor for o in options if o.factor is not None}
    uses = {name: np.array([o.name == name and o.factor is not None for o in options])[combos] for name in names}
    for number, option in enumerate(options):
        if option.factor is None:
            continue
        here = combos == number
        split = np.prod(np.where(uses[option.name], mesh, 1), axis=1)
        ok &= ~here.any(1) | (split <= option.count)
        twins = [i for i, o in enumerate(options) if i != number and o.name == option.name and o.factor is not None]
        if twins:  # one factor, one tiling
            ok &= ~(here.any(1) & np.isin(combos, twins).any(1))
        for major in option.factor.after:
            if major not in names:
                ok &= ~here.any(1)
                continue
            for axis in range(combos.shape[1]):
                outer = np.prod(np.where(uses[major][:, :axis], mesh[:axis], 1), axis=1)
                ok &= ~here[:, axis] | (outer >= names[major].size)
    if len(options) > 1 and combos.shape[1] > 1:
        fits = np.array([[not (a.factor and b.factor and clash(a, b)) for b in options] for a in options])
        for one, two in combinations(range(combos.shape[1]), 2):
            ok &= fits[combos[:, one], combos[:, two]]
    return ok


def _local_sizes(factor: Factor, options: Sequence[Option], combos: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """The largest local size of a factor under each combination."""
    result = np.full(len(combos), factor.size)
    for number, option in enumerate(options):
        if option.factor is None or option.name != factor.name:
            continue
        mask = ((combos == number) << np.arange(len(mesh))).sum(1)
        result = np.where(mask > 0, extents(factor.size, option.tiling, mesh)[mask], result)
    return result


def _combined(allowed: Sequence[Sequence[Option]]) -> tuple[tuple[Option, ...], np.ndarray]:
    """All options, and every combination of those of each axis."""
    first = allowed[0]
    if all(axis is first for axis in allowed):
        return tuple(first), _grid(tuple([len(first)] * len(allowed)))
    options = tuple(dict.fromkeys(o for axis in allowed for o in axis))
    number = {o: i for i, o in enumerate(options)}
    per_axis = [np.array([number[o] for o in axis], int) for axis in allowed]
    grid = _grid(tuple(map(len, allowed)))
    return options, np.stack([numbers[grid[:, a]] for a, numbers in enumerate(per_axis)], axis=1)


@lru_cache(1024)
def _grid(counts: tuple[int, ...]) -> np.ndarray:
    return np.indices(counts).reshape(len(counts), -1).T


def op_table(
    call: Call,
    rule: Rule,
    allowed: Sequence[Sequence[Option]],
    operand_spaces: Sequence[Space],
    result_spaces: Sequence[Space],
    saved: Sequence[float],
    router: Router,
) -> OpTable:
    """All choices of a call; `allowed` lists the options of each axis, `saved` the share of each operand and result
    that counts as kept by this call."""
    mesh = router.mesh.sizes
    options, combos = _combined(allowed)
    ok = _legal(options, combos, mesh)
    indices = []
    for position, space in enumerate((*operand_spaces, *result_spaces)):
        states = [(*o.operands, *o.results)[position] for o in options]
        numbers = np.array([space.number.get(s, -1) for s in states])[combos]
        index = np.where((numbers >= 0).all(1), space.index[(numbers.clip(0) * space.radix).sum(1)], -1)
        ok &= index >= 0
        indices.append(index)
    combos = combos[ok]
    indices = [index[ok] for index in indices]
    operands, results = tuple(indices[: len(operand_spaces)]), tuple(indices[len(operand_spaces) :])
    sizes = {f.name: _local_sizes(f, options, combos, mesh) for f in rule.factors}
    forward, backward = _compute_seconds(
        call, rule, sizes, options, combos, operands, results, operand_spaces, result_spaces, router.cluster
    )
    ahead, back = _kernel_seconds(call, rule, sizes, options, combos, router)
    taken = [space.nbytes[index] for index, space in zip(operands, operand_spaces, strict=True)]
    made = [space.nbytes[index] for index, space in zip(results, result_spaces, strict=True)]
    none = np.zeros(len(combos))
    kept = sum((nbytes * share for nbytes, share in zip((*taken, *made), saved, strict=True)), start=none)
    for number, option in enumerate(options):
        if option.factor and option.factor.kernel and option.factor.kernel.kept != 1:
            kept = kept * np.where((combos == number).any(1), option.factor.kernel.kept, 1.0)
    return OpTable(
        options, combos, operands, results, forward, backward, ahead + back, forward + ahead, kept,
        _working_bytes(call, rule, taken, made), sum(made, start=none),
    )  # fmt: skip


def _working_bytes(call: Call, rule: Rule, taken: Sequence[np.ndarray], made: Sequence[np.ndarray]) -> np.ndarray:
    """Gradients that come in and go out; without any, the tensors themselves."""
    tensors = list(zip((*call.operands, *call.results), (*taken, *made), strict=True))
    trained = any(t.differentiable for t in call.operands)
    counted = [nbytes for t, nbytes in tensors if not rule.view and (t.differentiable or not trained)]
    return sum(counted, start=np.zeros(len((*taken, *made)[0])))


def _compute_seconds(
    call: Call, rule: Rule, sizes: dict[str, np.ndarray], options: Sequence[Option], combos: np.ndarray,
    operands: Sequence[np.ndarray], results: Sequence[np.ndarray],
    operand_spaces: Sequence[Space], result_spaces: Sequence[Space], cluster: Cluster,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    if rule.view:
        return np.zeros(len(combos)), np.zeros(len(combos))
    device = cluster.device
    traffic = np.zeros(len(combos))
    for index, space in zip((*operands, *results), (*operand_spaces, *result_spaces), strict=True):
        traffic = traffic + space.nbytes[index]
    flops = np.full(len(combos), float(rule.flops))
    for size in sizes.values():
        flops = flops * size
    for number, option in enumerate(options):
        if option.factor and option.factor.kernel:
            flops = flops * np.where((combos == number).any(1), option.factor.kernel.imbalance, 1.0)
    rate = device.rate(call.results[0].dtype)
    forward = np.maximum(np.maximum(flops / rate, traffic / device.memory_bytes_per_s), device.launch_seconds)
    wanted = sum(t.differentiable for t in call.operands)
    if not wanted:
        return forward, np.zeros(len(combos))
    passes = min(wanted, 2) if rule.flops else 1  # one product for each operand that wants a gradient
    traffic = traffic * (passes if rule.flops else 1.5)
    backward = np.maximum(np.maximum(passes * flops / rate, traffic / device.memory_bytes_per_s), device.launch_seconds)
    return forward, backward


def _kernel_seconds(
    call: Call, rule: Rule, sizes: dict[str, np.ndarray], options: Sequence[Option], combos: np.ndarray, router: Router
) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward."""
    total = {False: np.zeros(len(combos)), True: np.zeros(len(combos))}
    trained = any(t.differentiable for t in call.operands)
    for number, option in enumerate(options):
        if option.factor is None or option.factor.kernel is None:
            continue
        for sent in option.factor.kernel.collectives:
            if sent.backward and not trained:
                continue
            nbytes = np.full(len(combos), float(sent.itemsize))
            for name in sent.factors:
                nbytes = nbytes * sizes[name]
            for axis, (n, link) in enumerate(zip(router.mesh.sizes, router.links, strict=True)):
                seconds = collective_seconds(sent.kind, nbytes, n, link)
                total[sent.backward] += np.where(combos[:, axis] == number, seconds, 0.0)
    return total[False], total[True]


def update_seconds(space: Space, cluster: Cluster, optimizer: Optimizer) -> np.ndarray:
    """The optimizer's step on what a device stores of a weight, per layout."""
    # read and write weight, read gradient, read and write state
    per_element = 3 * space.itemsize + 2 * optimizer.state_bytes(space.itemsize)
    return space.elements * per_element / cluster.device.memory_bytes_per_s
