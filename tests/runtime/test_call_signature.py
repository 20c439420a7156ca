"""A call is read as the model's forward reads it."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tapas.capture.inputs import register_dataclasses
from tapas.errors import TapasError
from tapas.runtime.call_signature import CallSignature


class Reader(nn.Module):
    def forward(self, batch, *more, mask=None, use_cache=False, **others):
        return batch


A, B, C = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)


def signature(*args, names: str = "a b c d") -> CallSignature:
    return CallSignature.of(Reader(), args, names.split())


def test_nested_arguments_are_named_as_they_were_captured() -> None:
    planned = signature({"image": A, "text": [B, 2.0]}, C)
    assert planned.tensors(({"image": B, "text": [C, 2.0]}, A), {}) == {"a": B, "b": C, "c": A}
    assert planned.tensors(({"text": [C, 2.0], "image": B}, A), {"use_cache": False}) == {"a": B, "b": C, "c": A}


@dataclass
class Text:
    ids: torch.Tensor
    length: int = 3


@dataclass
class Batch:
    image: torch.Tensor
    text: Text


def test_dataclasses_are_looked_into() -> None:
    register_dataclasses((Batch(A, Text(B)),))
    planned = signature(Batch(A, Text(B)))
    assert planned.tensors((Batch(B, Text(C)),), {}) == {"a": B, "b": C}
    with pytest.raises(TapasError, match=re.escape("batch.text.length: is 4, the plan was made with 3")):
        planned.tensors((Batch(B, Text(C, 4)),), {})


def test_keywords_in_any_order() -> None:
    planned = CallSignature.of(Reader(), {"batch": A, "z": B, "y": C}, ["a", "b", "c"])
    assert planned.tensors((A,), {"y": B, "z": C}) == {"a": A, "b": C, "c": B}


def test_the_planned_call_with_other_tensors() -> None:
    planned = CallSignature.of(Reader(), {"batch": [A, 3], "mask": B}, ["a", "b"])
    assert planned.filled({"a": B, "b": C}) == {"batch": [B, 3], "mask": C}
    assert signature(A, B).filled({"a": C, "b": A}) == (C, A)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (({"x": A},), {"use_cache": True}, "use_cache: is True, the plan was made with False"),
        (({"x": A},), {"use_cache": 0}, "use_cache: is 0, the plan"),  # equal, but another type
        (({"x": A},), {"mask": A}, "mask: is a tensor, the plan was made with None"),
        (({"x": None},), {}, "batch['x']: is None, the plan was made with a tensor"),
        (({"x": A, "y": A},), {}, "batch['y']: is not an input"),
        (({"y": A},), {}, "batch['x']: is missing"),
        (({"x": A}, A), {}, "more[0]: is not an input"),
        (({"x": A},), {"other": A}, "others['other']: is not an input"),
        ((), {}, "inputs: missing a required argument: 'batch'"),
        (({"x": torch.zeros(1, requires_grad=True)},), {}, "batch['x']: requires a gradient"),
    ],
)
def test_what_was_not_planned_is_refused(args, kwargs, text: str) -> None:
    with pytest.raises(TapasError, match=re.escape(text)):
        signature({"x": A}).tensors(args, kwargs)


def test_inputs_by_the_names_of_the_program() -> None:
    planned = CallSignature.by_name(["x", "y"])
    assert planned.tensors((), {"y": A, "x": B}) == {"x": B, "y": A}
