"""The oracle of the rules: an operator run whole equals the operator run as its rule says and combined.

`check` tries what the rule of a case offers on several meshes, values and gradients.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod
from typing import Any

import torch

import tapas.rules  # noqa: F401 - registers the rules
from tapas.ir.graph import Op, Ref, Tensor
from tapas.ir.interpreter import argument, resolve
from tapas.rules.base import Call, Collective, Local, Rule, rule_for
from tapas.rules.choices import Choice, OperatorChoices, Option, options
from tapas.rules.tiling import Divisibility, find_tilings
from tapas.runtime.kernels import kernel_function
from tapas.sharding.layout import B, Layout, R, S, local_pieces
from tapas.sharding.layout_grid import tensor_grid
from tests.oracle.case import Case, booleans, floats, integers, like, positive
from tests.oracle.dealing import combine, deal, gradients, ranks, values
from tests.oracle.threads import Coord, comms_of, run_ranks

__all__ = ["Built", "Case", "booleans", "build", "check", "floats", "integers", "positive", "simulate"]

SAMPLES, MORE = 5, 12  # combinations tried on a mesh of two axes; and by `make test-full`


@dataclass(frozen=True)
class Built:
    """A case as the planner sees it, with its tensors and the whole run to compare with."""

    case: Case
    op: Op
    call: Call
    rule: Rule
    tensors: list[torch.Tensor]
    results: list[torch.Tensor]
    seeds: list[torch.Tensor | None]  # gradients of the results
    gradients: list[torch.Tensor | None]  # of the operands

    @property
    def tolerance(self) -> float:
        """Cases are double; operators of models may pass through single."""
        return 1e-4 if "float32" in {t.dtype for t in (*self.call.operands, *self.call.results)} else 1e-9


def call_function(target: str, args: tuple, kwargs: tuple, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found = resolve(target)(
        *(argument(a, tensors) for a in args), **{key: argument(value, tensors) for key, value in kwargs}
    )
    return [found] if isinstance(found, torch.Tensor) else [r for r in found if isinstance(r, torch.Tensor)]


def build(case: Case) -> Built:
    tensors: list[torch.Tensor] = []

    def symbolic(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            wanted = (value.is_floating_point() or value.is_complex()) and len(tensors) not in case.frozen
            tensors.append(value.detach().clone().requires_grad_(wanted))
            return Ref(len(tensors) - 1)
        if isinstance(value, (tuple, list)):
            return tuple(symbolic(v) for v in value)
        return str(value) if isinstance(value, (torch.dtype, torch.layout)) else value

    def described(name: str, tensor: torch.Tensor) -> Tensor:
        return Tensor(name, tuple(tensor.shape), str(tensor.dtype)[6:], tensor.requires_grad)

    args = tuple(symbolic(a) for a in case.args)
    kwargs = tuple((key, symbolic(value)) for key, value in case.kwargs.items())
    results = call_function(case.target, args, kwargs, tensors)
    operands = tuple(described(f"x{i}", t) for i, t in enumerate(tensors))
    call = Call(case.target, args, kwargs, operands, tuple(described(f"y{i}", t) for i, t in enumerate(results)))
    op = Op("op", case.target, tuple(t.name for t in operands), tuple(t.name for t in call.results), args, kwargs)
    seeds = [like(r) if r.requires_grad else None for r in results]
    gradients = differentiate(results, tensors, seeds)
    return Built(case, op, call, rule_for(call), tensors, [r.detach() for r in results], seeds, gradients)


def differentiate(
    results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Gradients of the operands that want one; zero where nothing flows."""
    outputs = [(r, s) for r, s in zip(results, seeds, strict=True) if s is not None and r.requires_grad]
    inputs = [t for t in operands if t.requires_grad]
    found: Iterator[torch.Tensor | None] = iter([None] * len(inputs))
    if outputs and inputs:
        found = iter(torch.autograd.grad([r for r, _ in outputs], inputs, [s for _, s in outputs], allow_unused=True))

    def one(t: torch.Tensor) -> torch.Tensor | None:
        if not t.requires_grad:
            return None
        gradient = next(found)
        return torch.zeros_like(t) if gradient is None else gradient

    return [one(t) for t in operands]


# ---------------------------------------------------------------------------------------------
# Running a call as its rule says


def local_view(call: Call, choice: Choice, mesh: tuple[int, ...], coord: Coord) -> Local:
    return Local(
        call,
        mesh,
        coord,
        choice.names,
        tuple(choice.operand(i) for i in range(len(call.operands))),
        tuple(choice.result(i) for i in range(len(call.results))),
    )


def kernel_of(rule: Rule, choice: Choice) -> Callable | None:
    if rule.kernel is None or not any(o.factor is not None and o.factor.kernel for o in choice.options):
        return None
    return kernel_function(rule.kernel)


def run_rank(built: Built, local: Local, kernel: Callable | None, comms: Any, tensors: list) -> list[torch.Tensor]:
    if kernel is not None:
        found = kernel(local, comms, *tensors)
        return [found] if isinstance(found, torch.Tensor) else list(found)
    if all(0 in local.result_shape(i) for i in range(len(built.results))):
        # a rank that got nothing does not call the operator: not every one takes empty shards
        return [torch.zeros(local.result_shape(i), dtype=whole.dtype) for i, whole in enumerate(built.results)]
    args, kwargs = built.rule.local(local) if built.rule.local else (built.call.args, built.call.kwargs)
    return call_function(built.rule.target or built.call.target, args, kwargs, tensors)


def simulate(built: Built, choice: Choice, mesh: tuple[int, ...], backward: bool = True) -> None:
    """Run all ranks under a choice and compare values and gradients with the whole run."""
    call = built.call
    coords, kernel = ranks(mesh), kernel_of(built.rule, choice)
    comms = comms_of(mesh, coords)
    dealt = [deal(t.detach(), values(choice.operand(i)), mesh) for i, t in enumerate(built.tensors)]
    seeds = [
        None if seed is None or not backward else deal(seed, gradients(choice.result(i)), mesh)
        for i, seed in enumerate(built.seeds)
    ]

    def work(coord: Coord) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        tensors = [
            parts[coord].requires_grad_(whole.requires_grad) for parts, whole in zip(dealt, built.tensors, strict=True)
        ]
        local = local_view(call, choice, mesh, coord)
        results = run_rank(built, local, kernel, comms[coord], tensors)
        for i, (result, whole) in enumerate(zip(results, built.results, strict=True)):
            assert tuple(result.shape) == local.result_shape(i), (
                f"result {i}: {result.shape}, not {local.result_shape(i)}"
            )
            assert result.dtype == whole.dtype, f"result {i}: {result.dtype}, not {whole.dtype}"
        found = differentiate(results, tensors, [None if s is None else s[coord] for s in seeds])
        return [r.detach() for r in results], found

    done = run_ranks(coords, comms, work) if kernel else {coord: work(coord) for coord in coords}
    if built.case.exact:
        for i, whole in enumerate(built.results):
            same(
                f"result {i}",
                {c: done[c][0][i] for c in coords},
                values(choice.result(i)),
                mesh,
                whole,
                built.tolerance,
            )
        for i, whole in enumerate(built.gradients):
            if whole is not None and backward:
                local = {c: done[c][1][i] for c in coords}
                same(f"gradient of operand {i}", local, gradients(choice.operand(i)), mesh, whole, built.tolerance)
    if kernel:
        _check_bytes(built, choice, mesh, comms)


def same(
    place: str, local: dict[Coord, Any], layout: Layout, mesh: Sequence[int], whole: torch.Tensor, tolerance: float
) -> None:
    dtype = torch.int64 if whole.dtype == torch.bool else whole.dtype
    for found in combine(local, layout, mesh, whole.shape, dtype):
        if not torch.allclose(found, whole.to(dtype), tolerance, tolerance, equal_nan=True):  # faster than what it says
            torch.testing.assert_close(
                found, whole.to(dtype), rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{place}: {m}"
            )


def _check_bytes(built: Built, choice: Choice, mesh: tuple[int, ...], comms: dict[Coord, dict]) -> None:
    """What the first rank (it holds the largest shards) sent is what the kernels announced; of borders, each rank."""

    def size_of(name: str) -> int:
        if name.endswith("+"):
            factor = built.rule.factor(name[:-1])
            if factor.joint and factor.kernel is not None:  # a buffer for each rank
                ranks = mesh[choice.names.index(factor.name)]
                return ranks * ceil(Fraction(factor.kernel.capacity) * size_of(factor.joint) / ranks)
            (inner,) = {at.inner for at in factor.operands if at is not None}
            assert factor.kernel is not None and factor.kernel.halo is not None
            halo = factor.kernel.halo
            return inner * size_of(name[:-1]) + (halo.before + halo.after) * (name[:-1] in choice.names)
        joint = {o.name for o in choice.options if o.factor is not None and o.factor.joint == name}
        axes = [mesh[a] for a, chosen in enumerate(choice.names) if chosen in {name, *joint}]
        factor = built.rule.factor(name)
        tiling = next((o.tiling for o in choice.options if o.name == name), ())
        return sum(stop - start for ranges in local_pieces(
            (factor.size,), tuple(S(0, tiling) for _ in axes), axes, (0,) * len(axes)
        ) for start, stop in ranges)  # fmt: skip

    kernels = [option.factor.kernel if option.factor is not None else None for option in choice.options]
    for axis, option in enumerate(choice.options):
        sending = [sent for i, k in enumerate(kernels) if k for sent in k.collectives if axis in sent.axes(i, mesh)]
        every = tuple(sending)

        def _announced(place: int | None, sending: Sequence[Collective] = every, n: int = mesh[axis]) -> dict[str, int]:
            announced = {"forward": 0, "backward": 0}
            for sent in sending:
                points = prod(map(size_of, sent.factors)) * sent.messages(n)
                announced["backward" if sent.backward else "forward"] += points * sent.point_nbytes(n, place)
            return announced

        along = [(*(0,) * axis, place, *(0,) * (len(mesh) - axis - 1)) for place in range(mesh[axis])]
        borders = any(sent.kind == "halo" for sent in every)
        for place, coord in enumerate(along if borders else along[:1]):
            sent, announced = comms[coord][axis].sent, _announced(place)
            assert sent == announced, f"axis {axis} ({option}): rank {place} sent {sent}, announced {announced}"
        if borders:
            assert _announced(None) == {way: max(comms[c][axis].sent[way] for c in along) for way in _announced(None)}


def offered(built: Built, mesh: tuple[int, ...]) -> list[Option]:
    per_call, _ = find_tilings([(built.op, built.call, built.rule)], Divisibility(mesh))
    return options(built.rule, built.call, per_call[0], Divisibility(mesh))


def choices(call: Call, available: Sequence[Option], mesh: tuple[int, ...]) -> list[Choice]:
    """All that a plan can choose from, if the tensors may have any layout that the options know."""
    grids = []
    for position, tensor in enumerate((*call.operands, *call.results)):
        states = {(*o.operands, *o.results)[position] for o in available} | ({R, B} if tensor.differentiable else {R})
        grids.append(tensor_grid(tensor.shape, tuple(sorted(states)), mesh))
    table = OperatorChoices(available).on(mesh, grids)
    return [table[i] for i in range(len(table))]


def sampled(found: list[Choice], samples: int, seed: str) -> list[Choice]:
    """Some of the choices, among them always some that split a minor factor, which are rare."""
    draw = random.Random(seed)
    nested = [c for c in found if any(o.factor is not None and o.factor.after for o in c.options)]
    return [*draw.sample(found, min(samples, len(found))), *draw.sample(nested, min(samples // 3, len(nested)))]


def check(case: Case, meshes: Sequence[tuple[int, ...]] = (), samples: int = SAMPLES) -> int:
    """Try everything the rule of a case offers; returns how many choices were run."""
    built, tried = build(case), 0
    assert not built.rule.missing, f"{case.target} has no rule"
    for mesh in meshes or case.meshes:
        found = choices(built.call, offered(built, mesh), mesh)
        if len(mesh) > 1:
            found = sampled(found, samples, str((case.id, mesh)))
        for choice in found:
            try:
                simulate(built, choice, mesh)
            except Exception as error:
                raise AssertionError(f"{case.id} on {mesh} with {choice}: {error}") from error
            tried += 1
    return tried
