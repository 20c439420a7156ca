"""The capture of a model, from its first fake input to the verified graph."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.export import ExportedProgram, _trace
from torch.utils import _pytree as pytree

from tapas.capture.build import Pieces, build
from tapas.capture.calls import Value, flatten
from tapas.capture.explain import explain
from tapas.capture.functional import functionalize
from tapas.capture.fuse import unflatten_products
from tapas.capture.hub import as_in_eager
from tapas.capture.inputs import Inputs, prepare
from tapas.capture.leaves import find_leaves
from tapas.capture.packed import split_packed
from tapas.capture.results import loss_position
from tapas.capture.stock import masks_as_given
from tapas.capture.unmerge import unmerge
from tapas.errors import CaptureError
from tapas.graph import Graph, Leaf, verify


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph with what running it needs besides: the values of constants, the shape of the output."""

    graph: Graph
    constants: dict[str, torch.Tensor]  # by tensor name
    output_spec: pytree.TreeSpec
    output_values: tuple[Any, ...]  # flattened outputs: tensor names as Value, all else as it is


def capture(model: nn.Module, inputs: Inputs, *, training: bool | None = None, name: str = "") -> Graph:
    """The model's forward operators on these inputs.

    `inputs` is a tuple of positional or a dict of keyword inputs. With `training` the model must return
    a loss; None trains when there is one.
    """
    return capture_program(model, inputs, training=training, name=name).graph


def capture_program(model: nn.Module, inputs: Inputs, *, training: bool | None = None, name: str = "") -> Captured:
    if not isinstance(model, nn.Module):
        raise CaptureError("model", f"it is a {type(model).__name__}", "give a torch.nn.Module")
    args, kwargs = prepare(model, inputs)
    exported = _export(model, args, kwargs)
    leaves = find_leaves(exported, model)
    program, output = flatten(exported.graph_module, leaves.bind)
    functional = functionalize(program)
    flat = tuple(Value(functional.read(v.name)) if isinstance(v, Value) else v for v in output)
    spec = exported.call_spec.out_spec
    assert spec is not None
    loss = _loss(flat, spec, program.meta, training, model)
    attributes = tuple(Leaf(tensor, "constant", (path,)) for tensor, path in program.attributes.items())
    outputs = tuple(v.name for v in flat if isinstance(v, Value))
    pieces = Pieces(
        leaves.leaves + attributes,
        outputs,
        loss,
        leaves.trainable,
        frozenset(functional.mutated),
        name or type(model).__name__,
    )
    calls = functional.out
    for rewrite in (unflatten_products, split_packed, unmerge):
        calls = rewrite(calls, program, outputs)
    graph = verify(build(calls, program, pieces))
    if training and not graph.training:
        raise CaptureError(
            type(model).__name__,
            "no gradient reaches any parameter from its loss",
            "set requires_grad on the parameters to train, or plan for inference",
        )
    return Captured(graph, _constant_values(exported, graph), spec, flat)


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    try:
        with as_in_eager(model, kwargs), masks_as_given(), torch.enable_grad(), _quiet():
            return torch.export.export(model, args, kwargs, strict=False)
    except CaptureError:
        raise
    except Exception as error:  # a model may raise anything: the user gets the place and the reason
        raise explain(error, model, args, kwargs) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """A failing export prints its graph and warns: the user gets our sentence instead."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        # The graph is printed by a plain print in this module; to redirect stderr would silence others too.
        with warnings.catch_warnings(), mock.patch.object(_trace, "print", lambda *_, **__: None, create=True):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _loss(
    flat: tuple[Any, ...], spec: pytree.TreeSpec, meta: dict[str, torch.Tensor], training: bool | None, model: nn.Module
) -> str | None:
    if training is False:
        return None
    position = loss_position(spec)
    candidates = [flat[position]] if position is not None else list(flat)
    for value in candidates:
        if isinstance(value, Value) and meta[value.name].is_floating_point() and meta[value.name].numel() == 1:
            return value.name
    if training:
        raise CaptureError(
            type(model).__name__,
            "it returns no loss on the example inputs",
            "add labels to the inputs, return a scalar (or a dict with 'loss'), or plan for inference",
        )
    return None


def _constant_values(exported: ExportedProgram, graph: Graph) -> dict[str, torch.Tensor]:
    """Tensors that the model holds outside its parameters and buffers."""
    paths = {leaf.tensor: leaf.paths[0] for leaf in graph.leaves if leaf.kind == "constant" and leaf.paths}
    found = {tensor: exported.constants.get(path) for tensor, path in paths.items()}
    return {tensor: value for tensor, value in found.items() if isinstance(value, torch.Tensor)}
