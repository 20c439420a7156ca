"""The original model, run as it is: the judge of the float32 run."""

import copy
from typing import Any

import torch

from tapas._torch import pytree
from tapas.capture.calls import Value
from tapas.errors import CaptureError
from tapas.verify.dropout import silence
from tapas.verify.lifting import lifted_value
from tapas.verify.steps import Outcome, take_steps
from tapas.verify.subject import Subject


def run_original(subject: Subject, steps: int) -> Outcome:
    """Forward, backward and optimizer steps of the module itself, in float32."""
    graph = subject.graph
    model = copy.deepcopy(subject.model).float()
    silence(model)
    inputs = {k: lifted_value(v, "float32") if isinstance(v, torch.Tensor) else v for k, v in subject.inputs.items()}
    named = dict(model.named_parameters(remove_duplicate=False))
    trained = [leaf for leaf in graph.parameters() if graph.tensors[leaf.tensor].differentiable]
    parameters = {leaf.tensor: named[leaf.paths[0]] for leaf in trained}
    loss_at = graph.outputs.index(graph.loss) if graph.loss is not None else None
    return take_steps(lambda: _outputs(subject, model(**inputs)), parameters, loss_at, steps)


def _outputs(subject: Subject, made: Any) -> list[torch.Tensor]:
    """What the model returned, in the order of the graph's outputs."""
    flat = pytree.tree_leaves(made)
    values = subject.captured.output_values
    if len(flat) != len(values):
        raise CaptureError(
            type(subject.model).__name__,
            f"it returns {len(flat)} values where {len(values)} were captured",
            "let it return the same in every call",
        )
    found = {v.name: x for v, x in zip(values, flat, strict=True) if isinstance(v, Value)}
    return [found[name] for name in subject.graph.outputs]
