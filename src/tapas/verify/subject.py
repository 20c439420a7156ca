"""The model to check: real weights, no dropout on ranks, and not larger than this machine can take.

Dropout is set to zero where ranks are compared: kernels that draw inside of an operator draw for their own part. The
plan is made, or followed, for the model as it is; only what runs here is silenced.
"""

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tapas._torch import pytree, schema_arguments
from tapas.capture.program import Captured, capture_program
from tapas.errors import TapasError
from tapas.ir.fold import Folded, fold
from tapas.ir.graph import Graph, Op
from tapas.ir.inline import unfold
from tapas.ir.interpreter import leaf_values, resolve
from tapas.runtime.initialize import initial_values

LIMIT = 8_000_000_000  # bytes, over all ranks
COPIES = 4  # of every weight in float64: itself, its gradient, two moments


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    call: tuple[tuple[Any, ...], dict[str, Any]]  # as the model is called
    captured: Captured

    @cached_property
    def folded(self) -> Folded:
        return fold(self.graph)

    @property
    def graph(self) -> Graph:
        return self.captured.graph

    def leaves(self) -> dict[str, torch.Tensor]:
        inputs = _by_name(self.model, *self.call)
        missing = [leaf.paths[0] for leaf in self.graph.leaves if leaf.kind == "input" and leaf.paths[0] not in inputs]
        if missing:
            raise TapasError(missing[0], "is not among the example inputs by this name", "give inputs by keyword")
        return leaf_values(self.graph, self.model, inputs) | self.captured.constants


def capture_subject(
    model: nn.Module, inputs: Any, training: bool | None = None, name: str = "", losses: Sequence[str] = (),
    capacity: float | None = None,
) -> Subject:  # fmt: skip
    _check_real(model, inputs)
    captured = capture_program(model, inputs, training=training, name=name, losses=losses, capacity=capacity)
    return subject_of(model, inputs, captured)


def subject_of(model: nn.Module, inputs: Any, captured: Captured) -> Subject:
    captured = replace(captured, graph=unfold(captured.graph))  # operator by operator, so that one can be blamed
    return Subject(model, _called(inputs), captured)


def check_size(place: str, parameters: int, ranks: int, share: float = 0.0, remedy: str = "") -> None:
    """`share`: bytes that a rank needs, once a plan says so."""
    nbytes = COPIES * 8 * parameters + ranks * max(share, COPIES * 8 * parameters / ranks)
    if nbytes > LIMIT:
        raise TapasError(
            place,
            f"original and {ranks} ranks in float64 take about {nbytes / 1e9:.0f} GB here, the limit is"
            f" {LIMIT / 1e9:.0f} GB ({parameters / 1e6:,.0f} M parameters)",
            remedy
            or "check a smaller version of it: --set num_hidden_layers=2 --set hidden_size=256 --batch 4 --seq 32",
        )


def _called(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return ((inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)), {}


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Tensors of the inputs as capture calls them: `x`, and `batch_x` for batch["x"]."""
    signature = inspect.signature(model.forward)
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    flat, _ = pytree.tree_flatten_with_path(given)
    return {"_".join(_key_text(key) for key in path): value for path, value in flat}


def _key_text(key: Any) -> str:
    name = next(getattr(key, field) for field in ("key", "idx", "name") if hasattr(key, field))
    return re.sub(r"\W", "_", str(name))


def _check_real(model: nn.Module, inputs: Any) -> None:
    args, kwargs = _called(inputs)
    given = _by_name(model, args, kwargs)
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *given.items()):
        if isinstance(tensor, torch.Tensor) and (tensor.is_meta or tensor.device.type != "cpu"):
            raise TapasError(str(name), f"is on the {tensor.device.type} device", "give a real tensor on the CPU")


def with_weights(model: nn.Module, seed: int = 1) -> nn.Module:
    """The model; what it has on the meta device is made as its author makes it, in a copy."""
    held = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    if not any(t.is_meta for t in held.values()):
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        values = {k: v for part in initial_values(model, torch.device("cpu")) for k, v in part.items()}
    made = {id(held[path]): _like(held[path], value) for path, value in values.items()}
    return copy.deepcopy(model, {**made, **{id(t): t for t in held.values() if not t.is_meta}})


def _like(t: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(value, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else value


def disturb(model: nn.Module, seed: int = 1) -> None:
    """A bias of zeros or a norm's weight of ones would hide mistakes: give them some noise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.is_floating_point()
                and parameter.numel()
                and bool((parameter == parameter.flatten()[0]).all())
            ):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((0.1 * noise).to(parameter.dtype))


_CHANCES = ("p", "dropout_p", "dropout")  # what torch's schemas call the share that is dropped


def silent_graph(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """The graph without dropout, and the modules where there was some."""
    ops = tuple(_silent(op) for op in graph.ops)
    changed = dict.fromkeys(old.module or old.name for old, new in zip(graph.ops, ops, strict=True) if old != new)
    return replace(graph, ops=ops), tuple(changed)


def silent_folded(folded: Folded) -> Folded:
    blocks = tuple(replace(block, ops=tuple(map(_silent, block.ops))) for block in folded.blocks)
    return replace(folded, blocks=blocks)


def _silent(op: Op) -> Op:
    """Dropout, by itself or inside of attention and recurrent layers, with nothing to drop."""
    function: Any = resolve(op.target)
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):  # a user's own function has none
        return op
    names = [name for name, _ in schema_arguments(function)]
    known = _CHANCES if "dropout" in op.target else _CHANCES[1:]  # the p of a Bernoulli variable is no dropout
    position = next((names.index(name) for name in known if name in names), None)
    if position is None:
        return op
    args = tuple(0.0 if i == position else value for i, value in enumerate(op.args))
    kwargs = tuple((key, 0.0 if key == names[position] else value) for key, value in op.kwargs)
    return op if (args, kwargs) == (op.args, op.kwargs) else replace(op, args=args, kwargs=kwargs)
