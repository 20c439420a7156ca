"""What a model does besides computing, while it is captured.

A `torch.autograd.Function` of the user's has a backward pass that says something else than its forward pass: it stays
an operator of its own, which every rank runs whole. A buffer that is set to another tensor is written to. What is
inside of `torch.utils.checkpoint` is computed once: what to compute again is for the plan to say. What would be lost
without a word is refused: hooks on tensors, and other tensors that are set (gradients that are taken on the way: see
diagnostics.py).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils.checkpoint import CheckpointFunction

from tapas._torch import FakeTensor, applied_functions_patched, checkpoints_patched, pytree
from tapas.capture.diagnostics import NoOperator
from tapas.capture.repeated.answers import StandIn
from tapas.errors import CaptureError
from tapas.ir.custom_functions import record, run_as_it_is, running_as_it_is

CAPTURED = (FakeTensor, StandIn)  # other tensors are those of other threads
PLAIN = (int, float, bool, str, type(None), torch.dtype)


@contextmanager
def side_effects_kept() -> Iterator[None]:
    """Within, users' functions are recorded as single operators and buffers as written, or it is an error."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(_recorded)))
        stack.enter_context(applied_functions_patched(_reached))  # by those who got hold of `apply` before
        stack.enter_context(mock.patch.object(nn.Module, "__setattr__", _assigned))
        stack.enter_context(mock.patch.object(torch.Tensor, "register_hook", _hooked))
        stack.enter_context(checkpoints_patched(checkpointed_region))
        yield


_REGION = "tapas_checkpoint"  # what nodes are annotated with
_regions = 0  # that the code is in


@contextmanager
def checkpointed_region(*_: Any, **__: Any) -> Iterator[None]:
    """In place of what a checkpoint does around a function; an export of nested ones would forget operators."""
    global _regions
    _regions += 1
    try:
        with preserve_node_meta(), annotate({_REGION: True}):
            yield
    finally:
        _regions -= 1


def in_checkpoint() -> bool:
    return _regions > 0


def was_in_checkpoint(node: fx.Node) -> bool:
    """Whether the original computes it again in the backward pass."""
    return _REGION in (node.meta.get("custom") or ())


_base: Any = torch.autograd.Function.__mro__[1]
_setattr = nn.Module.__setattr__
_register_hook = torch.Tensor.register_hook


def _assigned(module: nn.Module, name: str, value: Any) -> None:
    """An export forgets what a submodule's buffer is set to: it is written to instead. Other tensors are no state."""
    if isinstance(value, CAPTURED):
        old = module._buffers.get(name)
        if old is not None and value is not old:
            if (old.shape, old.dtype) != (value.shape, value.dtype):
                fact = f"forward sets this buffer to another shape or dtype, {tuple(value.shape)} {value.dtype}"
                raise CaptureError(f"{type(module).__name__}.{name}", fact, "keep its shape and dtype")
            old.copy_(value)
            return
        if isinstance(vars(module).get(name), torch.Tensor):
            fact = "forward sets this tensor, which is no buffer"
            raise CaptureError(f"{type(module).__name__}.{name}", fact, "make it a buffer (register_buffer)")
    _setattr(module, name, value)


def _reached(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return super(_base, cls).apply(*args, **kwargs) if running_as_it_is() else _recorded(cls, *args, **kwargs)


def _recorded(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """One call of a user's function, as an operator."""
    if cls is CheckpointFunction:
        function, _, *given = args
        with checkpointed_region():
            return function(*given)
    if cls.__module__.startswith(("torch.", "tapas.")):
        return run_as_it_is(cls, *args, **kwargs)
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not any(isinstance(tensor, CAPTURED) for tensor in tensors):
        return run_as_it_is(cls, *args, **kwargs)
    if any(not isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves) or not _simple((args, kwargs)):
        raise NoOperator(
            f"{cls.__module__}.{cls.__qualname__}, a torch.autograd.Function, is given more than tensors and numbers",
            "give it tensors, numbers and texts only, or tuples and lists of them",
        )
    return record(cls, args, kwargs, tensors)


def _simple(tree: Any) -> bool:
    """Whether it is made of tuples, lists and dicts only."""
    if isinstance(tree, dict):
        return all(map(_simple, tree.values()))
    if isinstance(tree, (list, tuple)):
        return type(tree) in (list, tuple) and all(map(_simple, tree))
    return isinstance(tree, (torch.Tensor, *PLAIN))


def _hooked(tensor: torch.Tensor, hook: Any) -> Any:
    if isinstance(tensor, CAPTURED):
        remedy = "to change gradients on the way, write a torch.autograd.Function"
        raise CaptureError("forward", "sets a hook on a tensor, which would be lost", remedy)
    return _register_hook(tensor, hook)
