"""What a step launches: kernels by kind, and calls of attention with the memory layout of what they are given."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tapas._torch import OpOverload, TorchDispatchMode, pytree, schema_of

# Operators that differ in how they are called, not in what a device does.
KINDS = {
    "copy": "clone copy _to_copy slice_scatter select_scatter lift_fresh_copy",
    "fill": "arange full full_like fill zeros zeros_like zero new_zeros new_ones ones ones_like new_full scalar_tensor",
    "host read": "_local_scalar_dense is_nonzero equal nonzero",
}
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
# Nothing is launched for them, though no schema says so.
_FREE = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach"))
_OPERANDS = ("query", "key", "value", "attn_mask")


def kind_of(operator: OpOverload) -> str | None:
    """None for what launches no kernel: views, and memory that nobody has written to."""
    namespace, _, name = operator.name().partition("::")
    name = name.partition(".")[0].rstrip("_")
    views = (r.alias_info is not None and not r.alias_info.is_write for r in schema_of(operator).returns)
    if namespace not in ("aten", "tapas") or name in _FREE or any(views):
        return None
    return _KIND_OF.get(name, name)


class Kernels(TorchDispatchMode):
    """Counts kernels by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of(func)
        if kind is not None:
            self.launched[kind] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class AttentionCall:
    dense: bool  # the last dim of all operands lies side by side: no fused kernel takes others
    masked: bool
    causal: bool
    shared: bool  # several heads of queries look at one of keys, which are not repeated for them
    mask_nbytes: int  # in memory: what is expanded counts once


class Attention(TorchFunctionMode):
    """Notes how attention is called, before torch picks a kernel: which one depends on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "scaled_dot_product_attention" in str(getattr(func, "__name__", func)):
            names = (*_OPERANDS, "dropout_p", "is_causal")
            given = dict(zip(names, args, strict=False)) | kwargs
            tensors = [given[name] for name in _OPERANDS if given.get(name) is not None]
            mask = given.get("attn_mask")
            self.calls.append(AttentionCall(
                all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in tensors),
                mask is not None, bool(given.get("is_causal")), bool(given.get("enable_gqa")),
                0 if mask is None else _nbytes(mask),
            ))  # fmt: skip
        return func(*args, **kwargs)


def _nbytes(x: torch.Tensor) -> int:
    size = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        size *= length if stride else 1
    return size


@dataclass(frozen=True)
class Launched:
    kernels: Counter[str]
    attention: list[AttentionCall]
    loss: float

    def fused(self) -> int:
        """Kernels of fused attention, forward and backward."""
        return sum(count for kind, count in self.kernels.items() if kind.startswith("_scaled_dot_product"))


def launched(model: nn.Module, inputs: dict[str, Any]) -> Launched:
    """What the second step of a module launches, forward and backward: the first one may prepare things."""
    for _ in range(2):
        model.zero_grad()
        with Kernels() as kernels, Attention() as attention:
            loss = model(**inputs)["loss"]
            loss.backward()
    return Launched(kernels.launched, attention.calls, float(pytree.tree_leaves(loss)[0].detach()))
