"""All that is used of torch and transformers and is not part of their public interfaces.

Each name says why it is needed and what happens if it is gone; tests/test_torch_private.py tries them all, so that a
new version of torch fails there first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn

# A guard without which torch functions on our own tensors would come back to us. Gone: no repeated submodule can be
# told from the program around it; capture has to trace all.
from torch._C import DisableTorchFunction

# An export changes which operators are composite; what is run for comparison must not depend on that. Gone: the same.
from torch._dispatch.python import no_python_dispatcher

# torch.compiler.disable(recursive=False) has torch 2.13 leave its own wrapper alone and trace what is wrapped, again at
# every call. Gone: that one has to do.
from torch._dynamo.decorators import skip as skip_frame

# Calling conditions of the exporter: code asks torch.compiler.is_exporting(), and must get the same answer when it is
# run for comparison. Gone: submodules that ask may deviate, and are traced.
from torch._export.utils import _compiling_state_context as as_in_export

# What a graph's calls are: no public class to ask for. Gone: calls cannot be told from higher-order operators.
from torch._ops import HigherOrderOperator, OpOverload

# No public way to make tensors without data that tell any device. Gone: models with data cannot be captured lightly.
from torch._subclasses import FakeTensor, FakeTensorMode

# The place where a failing export prints its graph. Gone: it prints.
from torch.export import _trace
from torch.nn.modules import module as _module
from torch.nn.modules import transformer as _transformer

# How torch.export itself flattens inputs and outputs: its specs are of this kind. Gone: nothing works.
from torch.utils import _pytree as pytree

# The documented base of modes that see what is dispatched stands in a private module. Gone: nothing can be compared.
from torch.utils._python_dispatch import TorchDispatchMode

# Within an export, code has to run that the export must not see. Gone: nothing can be folded before it is traced.
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

# Whether code has put a mode of its own above ours. Gone: all operators of composite functions are compared.
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode

__all__ = [
    "CHECKPOINT_CLASSES", "RESIZE_MEMORY", "DisableTorchFunction", "FakeTensor", "FakeTensorMode",
    "HigherOrderOperator", "OpOverload", "TorchDispatchMode", "accumulation_hooks", "applied_functions_patched",
    "as_in_export", "as_subclass", "assert_on_device", "autocast_depth", "autocasting", "backward_number",
    "checkpoints_patched", "copied_weight", "current_dispatch_mode", "default_store", "distributions_unchecked",
    "fused_attention", "fused_attention_backward", "gate_of", "gather_together", "globally_hooked", "gradient_hooks",
    "has_attributes", "held_modules", "hooked", "hooks_on", "ignores_torch_function", "in_backward", "like_parameter",
    "local_part", "masks_as_given", "no_dispatch_modes", "no_python_dispatcher", "operator_name", "profiled_span",
    "profiled_until", "pytree", "scatter_together", "schema_arguments", "schema_of", "silent_export", "silent_group",
    "skip_frame", "storage_holders", "storages", "strided_shard", "sum_together", "tensor_checks_replaced",
    "timeout_of", "uncompiled", "when_backward_ends", "whole_tensor", "writes_to", "writes_to_operands",
]  # fmt: skip

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# One question for all devices, asked for every operator that runs. Gone: ask torch.is_autocast_enabled of each device.
autocasting = torch._C._is_any_autocast_enabled


def autocast_depth() -> int:
    """How many regions of autocast, on or off, the code is in. The counter is public, if not documented; gone: a region
    that is switched off cannot be told from none, so count `torch.autocast.__enter__`."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


# In a subclass of Tensor: operators on it are not handed to the class. Gone: set __torch_function__ by hand.
ignores_torch_function: Any = torch._C._disabled_torch_function_impl


def as_subclass(kind: type[torch.Tensor], tensor: torch.Tensor, requires_grad: bool) -> Any:
    """A tensor of another class on the same data. Tensor.as_subclass is the public way, but it is an operator, which
    the export would write down."""
    return torch.Tensor._make_subclass(kind, tensor, requires_grad)


def hooked(module: nn.Module) -> bool:
    """Whether somebody listens to a module. There is no public way to ask."""
    own = module.__dict__
    return any(map(own.get, _HOOKS))


def globally_hooked() -> bool:
    """Whether somebody listens to all modules."""
    return any(getattr(_module, f"_global{name}") for name in _HOOKS)


def hooks_on(tensors: Sequence[torch.Tensor]) -> int:
    """On how many tensors code has set a hook for their gradient. There is no public way to ask."""
    hooked = [t for t in tensors if t._backward_hooks is not None or t._post_accumulate_grad_hooks is not None]
    return len(hooked)


def gradient_hooks(tensor: torch.Tensor) -> Sequence[Callable[..., Any]]:
    """What register_hook has registered. Gone: parameters of parallel modules have no hooks."""
    hooks = tensor._backward_hooks
    return tuple(hooks.values()) if hooks else ()


def accumulation_hooks(tensor: torch.Tensor) -> Sequence[Callable[..., Any]]:
    """What register_post_accumulate_grad_hook has registered. Gone: the same."""
    hooks = tensor._post_accumulate_grad_hooks
    return tuple(hooks.values()) if hooks else ()


@contextmanager
def applied_functions_patched(call: Callable[..., Any]) -> Iterator[None]:
    """Within, what `torch.autograd.Function.apply` ends in is `call(cls, *args)`, also where code holds on to it
    (`exp = Exp.apply`). Gone: the gradients of such functions would be lost without a word."""
    below = torch.autograd.Function.__mro__[1]
    with mock.patch.object(below, "apply", classmethod(call), create=True):
        yield


@contextmanager
def checkpoints_patched(region: Callable[..., AbstractContextManager[None]]) -> Iterator[None]:
    """Within, torch.utils.checkpoint calls its function in `region`, and that is all. Gone: replace the function
    itself, which misses code that has imported it by name."""

    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        with region(*args, **kwargs):
            yield

    with mock.patch.object(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", around):
        yield


def has_attributes(tensor: torch.Tensor) -> bool:
    """Whether code has written attributes on a tensor. A fake tensor keeps its own there."""
    own = vars(tensor)
    return bool(own) and (not isinstance(tensor, FakeTensor) or not _fake_attributes() >= own.keys())


@cache
def _fake_attributes() -> frozenset[str]:
    with no_dispatch_modes(), FakeTensorMode():
        return frozenset(vars(torch.empty(1)))


@cache
def operator_name(operator: OpOverload) -> tuple[str, str]:
    """`add`, `Tensor`. The public name() has both in one text, and leaves `default` out."""
    return operator._opname, operator._overloadname


def schema_of(operator: OpOverload) -> Any:
    """Only the schema tells arguments by name, which of them are written to, and which results are views."""
    return operator._schema


@cache
def writes_to_operands(operator: OpOverload) -> bool:
    return operator._schema.is_mutable


def writes_to(tensor: torch.Tensor) -> int:
    """How often a tensor was written to. Autograd counts; there is no public way to ask."""
    return tensor._version


def held_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules that one holds, by name. named_children() leaves out those that stand at several places."""
    return module._modules


@contextmanager
def masks_as_given() -> Iterator[None]:
    """To find out whether a mask is the causal one, torch.nn.Transformer compares its values: control flow on data. The
    mask itself gives the same result as the flag, so it is not asked for. Gone: there is nothing to replace."""
    if not hasattr(_transformer, "_detect_is_causal_mask"):
        yield
        return
    told = lambda mask, is_causal=None, size=None: is_causal is True  # noqa: E731
    with mock.patch.object(_transformer, "_detect_is_causal_mask", told):
        yield


def storages(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Equal for tensors that may share memory. Tensors without data have no data_ptr to compare."""
    try:
        return [tensor.untyped_storage()._cdata for tensor in tensors]
    except (NotImplementedError, RuntimeError):  # of some, which then have to be asked one by one
        return list(map(_storage, tensors))


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


@contextmanager
def tensor_checks_replaced(check: Callable[..., None], truth: Callable[[Any, Any], bool]) -> Iterator[None]:
    """Within, checks that all of a tensor is true (transformers makes them in most of its models) are `check`, and the
    truth of a number without value is `truth`; both get what they replace first. Gone: such checks read values."""
    all_true, plain = torch._check_tensor_all_with, torch.SymBool.__bool__
    with (
        mock.patch.object(torch, "_check_tensor_all_with", lambda *args, **named: check(all_true, *args, **named)),
        mock.patch.object(torch.SymBool, "__bool__", lambda number: truth(plain, number)),
    ):
        yield


@contextmanager
def distributions_unchecked(told: Callable[[], None]) -> Iterator[None]:
    """Within, torch.distributions does not look at the values of its arguments unless it is asked to; `told` of each
    distribution that it would have looked at. What the setting was has no public name. Gone: leave it as it is."""
    kind: Any = torch.distributions.Distribution
    before, plain = kind._validate_args, kind.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if before:
            told()
        plain(self, *args, **kwargs)

    kind.set_default_validate_args(False)
    try:
        with mock.patch.object(kind, "__init__", made):
            yield
    finally:
        kind.set_default_validate_args(before)


@contextmanager
def silent_export() -> Iterator[None]:
    """A failing export prints its graph by a plain print; to redirect stderr would silence others too."""
    with mock.patch.object(_trace, "print", lambda *_, **__: None, create=True):
        yield


# What the metadata of torch.distributed.checkpoint is pickled from; nothing else is unpickled. A name more in a newer
# version: its checkpoints are refused until it stands here.
CHECKPOINT_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}  # fmt: skip


def schema_arguments(operator: Any) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of an operator's arguments; only the schema has them. Gone: parse str(schema)."""
    return tuple((argument.name, argument.default_value) for argument in operator._schema.arguments)


def in_backward() -> bool:
    """Whether a backward pass is under way on this thread. Gone: a pass that failed half-way cannot be told."""
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(work: Callable[[], None]) -> None:
    """Have something done at the end of the backward pass that is under way, as DistributedDataParallel does. Gone:
    gradients would have to be collected by the optimizer."""
    torch.autograd.Variable._execution_engine.queue_callback(work)  # type: ignore[attr-defined]


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors and others hold on to a tensor's memory. Gone: memory is made anew in every step."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def local_part(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor. to_local is the public way, and takes ten times as long."""
    return tensor._local_tensor


def like_parameter(local: torch.Tensor, parameter: Any) -> torch.Tensor:
    """A DTensor of this part that is placed as another one. DTensor.from_local is the public way, and far slower."""
    kind: Any = type(parameter)
    return kind.__new__(kind, local, parameter._spec, requires_grad=False)  # __init__ does nothing, in 2 us


def copied_weight(weight: Any) -> torch.Tensor:
    """With memory of its own, on the same mesh: copy.deepcopy would copy that as well."""
    made = like_parameter(weight._local_tensor.clone(), weight)
    return nn.Parameter(made, requires_grad=weight.requires_grad) if isinstance(weight, nn.Parameter) else made


def strided_shard(dim: int, segments: int) -> Any:
    """How DTensor places a packed weight, each of whose segments is split. Gone: packed weights are stored whole."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=segments)


def whole_tensor(tensor: Any) -> torch.Tensor:
    """What full_tensor returns, also of packed weights: before torch 2.13 it takes them for tensors that are split in
    another order of the axes, and fails. Gone: full_tensor has been mended for longer than we support."""
    from torch.distributed.tensor import DTensor

    spec = tensor._spec
    if getattr(spec, "use_strided_shard_as_shard_order", False):
        literal = replace(spec, use_strided_shard_as_shard_order=False)
        tensor = DTensor(tensor._local_tensor, literal, requires_grad=False)  # type: ignore[call-arg]
    return tensor.full_tensor()


def gather_together(group: Any, wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Any:
    """All-gathers of several tensors as one collective; wait() on what is returned. No public function takes several.
    Gone: one after the other."""
    start = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    return start(list(wholes), list(parts))


def scatter_together(group: Any, parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor]) -> Any:
    """The same of reduce-scatters."""
    start = getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
    return start(list(parts), list(wholes))


def sum_together(group: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The same of all-reduces, in place."""
    return group.allreduce_coalesced([torch.view_as_real(x) if x.is_complex() else x for x in tensors])


# Gives the memory of a tensor back, or gets some again: whoever holds the tensor, or a view of it, finds it there. An
# operator, unlike the public way, so that whoever follows the use of memory sees it. Gone: that one.
RESIZE_MEMORY: Any = torch.ops.inductor.resize_storage_bytes_.default


def backward_number() -> int:
    """Of the backward pass that is under way on this thread; -1: none is. Gone: see in_backward."""
    return torch._C._current_graph_task_id()


def profiled_span(name: str) -> AbstractContextManager[Any]:
    """What is done within, under this name in a profile. torch.profiler.record_function is the public way; it is an
    operator, which modes that follow operators would see, and takes ten times as long."""
    return torch._C._profiler._RecordFunctionFast(name)  # type: ignore[attr-defined]


def profiled_until(name: str, launch: Callable[[], Any]) -> tuple[Any, Any]:
    """What `launch` returns, a work of a process group, and a future: when that is done the profile has a span under
    this name from the launch to the end of the work, whoever ends it. Not all works can tell their end: then the span
    is that of the launch, and there is no future. Gone: a Python callback, which has to wait for the interpreter."""
    span = torch.profiler.record_function(name)
    with span:
        work = launch()
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's reduce-scatter is several all-reduces
            return work, None
        return work, span._call_end_callbacks_on_future(future)


def default_store() -> Any:
    """What the processes met with, and can write to when their groups fail. Gone: nobody can say which rank is lost."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def timeout_of(group: Any, device_type: str) -> Any:
    """How long a process group waits. New groups would wait as long as is usual with their backend, whatever the user
    said when the processes met. Gone, or of a group that has no such backend: they do."""
    try:
        return group._get_backend(torch.device(device_type)).options._timeout
    except (AttributeError, RuntimeError):
        return None


def uncompiled(module: nn.Module) -> nn.Module:
    """What torch.compile wraps, whose names have no prefix. Gone: checkpoints of compiled modules have one."""
    return getattr(module, "_orig_mod", module)


def gate_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What experts of transformers make of gate and up. Gone: no module of experts is known, and all are traced."""
    return getattr(module, "_apply_gate", None)


def assert_on_device(true: torch.Tensor, text: str) -> None:
    """An error if it is not so, which nobody waits for: torch says the text, and fails where the host waits next. Gone:
    the host waits here."""
    later = getattr(torch, "_assert_async", None)
    if later is not None:
        later(true, text)
    elif not bool(true):
        raise RuntimeError(text)


@contextmanager
def silent_group(ranks: int) -> Iterator[None]:
    """A default process group of many ranks of which only the first one is there: torch has one for its own tests.
    Gone: no rank's program can be run alone."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


# Attention by kernels that hold no scores. They give the logarithm of its sum of exponentials, with which parts are
# combined; the public function keeps that to itself. Gone: scores are computed whole, which takes more memory.


def _fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> str:
    """The kernel that takes these tensors; "" for none."""
    alike = q.dim() == 4 and q.shape[:2] == k.shape[:2] and q.shape[-1] == k.shape[-1] == v.shape[-1]
    if not alike or not all(x.numel() and x.stride(-1) == 1 for x in (q, k, v)):
        return ""
    if q.device.type != "cuda":
        return "cpu" if q.device.type == "cpu" else ""
    asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, False)
    if torch.backends.cuda.can_use_flash_attention(asked):
        return "flash"
    return "efficient" if torch.backends.cuda.can_use_efficient_attention(asked) else ""


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, kernel: str | None = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The result and the logarithm of its sum of exponentials. None: no fused kernel takes it."""
    kernel = _fused_attention(q, k, v, causal) if kernel is None else kernel
    if kernel == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if kernel == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    if kernel == "efficient":
        forward = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse = forward(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
        return out, lse.narrow(-1, 0, q.shape[-2])  # which it fills up to whole tiles
    return None


def fused_attention_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    causal: bool, scale: float, kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """The gradients of its operands: their shares, if result and logarithms are those of more keys."""
    kernel = _fused_attention(q, k, v, causal) if kernel is None else kernel
    if kernel == "cpu":
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return on_cpu(gradient, q, k, v, out, lse, 0.0, causal, scale=scale)
    lengths = q.shape[-2], k.shape[-2]
    if kernel == "flash":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        undrawn = (torch.zeros(2, dtype=torch.uint64, device=q.device), torch.zeros(0, device=q.device))
        lse = lse.contiguous()
        return flash(gradient, q, k, v, out, lse, None, None, *lengths, 0.0, causal, *undrawn, scale=scale)
    if kernel == "efficient":
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        lse = torch.nn.functional.pad(lse, (0, -lengths[0] % 32), value=torch.inf)  # as the forward pass gives them
        undrawn = [torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2)]
        wanted = [True, True, True, False]
        return efficient(gradient, q, k, v, None, out, lse, *undrawn, 0.0, wanted, causal, scale=scale)[:3]
    return None
