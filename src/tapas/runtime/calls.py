"""What a program is written with: an fx graph, and calls that are more than one of torch's own operators."""

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
    set_checkpoint_early_stop,
)

from tapas.rules.base import SELECTIVE, Local, Rule
from tapas.runtime.draws import Draws
from tapas.runtime.kernels import kernel_function
from tapas.runtime.kernels.common import empty_results
from tapas.runtime.lost_ranks import Journal
from tapas.runtime.untraced import around_blocks, untraced


class Draft:
    """An fx graph as it is written, with the modules it calls."""

    def __init__(self) -> None:
        self.root, self.graph = nn.Module(), fx.Graph()
        self.names: dict[nn.Module, str] = {}
        self.last: fx.Node | None = None  # of the arguments

    def placeholder(self, name: str) -> fx.Node:
        """Arguments come first, in the order in which they are asked for."""
        with self.graph.inserting_after(self.last) if self.last else self.graph.inserting_before():
            self.last = self.graph.placeholder(name)
        return self.last

    def module(self, called: nn.Module, *args: Any, **kwargs: Any) -> fx.Node:
        """A module is added once, however often it is called."""
        if called not in self.names:
            self.names[called] = f"{type(called).__name__.lower()}_{len(self.names)}"
            self.root.add_module(self.names[called], called)
        return self.graph.call_module(self.names[called], args, kwargs)

    def call(self, called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        if isinstance(called, nn.Module):
            return self.module(called, *args, **kwargs)
        return self.graph.call_function(called, args, kwargs)

    def unpacked(self, node: fx.Node, count: int) -> list[fx.Node]:
        return [self.graph.call_function(operator.getitem, (node, i)) for i in range(count)]

    def finished(self, values: Sequence[fx.Node], name: str) -> fx.GraphModule:
        self.graph.output(tuple(values))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, name)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """With a stride of one in the last dim, copied if need be; what is expanded in other dims stays so."""
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    once = x[tuple([slice(None) if stride else slice(1) for stride in x.stride()[:-1]])]
    return once.contiguous().expand(x.shape)


class OwnPrecision(nn.Module):
    """A call in a region of autocast of the model's own: its casts are written down, and the caller's do not count."""

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        super().__init__()
        self.function, self.kind = function, device.type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.kind, enabled=False):
            return self.function(*args, **kwargs)


class KernelCall(nn.Module):
    """A sharded implementation with its own small collectives."""

    def __init__(self, kernel: str, local: Local, comms: Mapping[int, Any], full_precision: bool) -> None:
        super().__init__()
        self.function, self.local, self.comms = kernel_function(kernel), local, comms
        # autocast knows the operators, but not our implementations of them
        self.dtypes = [getattr(torch, t.dtype) for t in local.call.operands] if full_precision else []

    def forward(self, *operands: torch.Tensor) -> Any:
        if self.dtypes and torch.is_autocast_enabled(operands[0].device.type):
            operands = tuple(x.to(dtype) for x, dtype in zip(operands, self.dtypes, strict=True))
        return self.function(self.local, self.comms, *operands)


class Nothing(nn.Module):
    """A rank that got nothing of an operator does not call it: not every one takes empty shards."""

    def __init__(self, local: Local) -> None:
        super().__init__()
        self.local = local

    def forward(self, *operands: torch.Tensor) -> Any:
        return empty_results(self.local, operands)


class DrawnCall(nn.Module):
    """A block with random operators: their stream is started here, outside of what torch.compile takes."""

    def __init__(self, block: nn.Module, shard: int, draws: Draws) -> None:
        super().__init__()
        self.block, self.draws = block, draws
        self.shard: int | None = shard  # None: the numbers come from elsewhere

    @around_blocks
    def forward(self, *args: torch.Tensor) -> Any:
        if self.shard is not None:
            self.draws.start(self.shard)
        return self.block(*args)


class OtherStream(nn.Module):
    """A random operator that is split in another way than the one before it: it starts a stream of its own."""

    def __init__(self, function: Callable[..., Any], shard: int, draws: Draws) -> None:
        super().__init__()
        self.function, self.shard, self.draws = function, shard, draws

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.draws.start(self.shard)
        return self.function(*args, **kwargs)


_inside = threading.local()  # whether an operator is at work of which nothing is kept


class ComputedAgain(nn.Module):
    """An operator of which a selective block keeps nothing, though it multiplies matrices inside: recurrent layers
    go on to change these products in place."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _inside.again = True
        try:
            return self.function(*args, **kwargs)
        finally:
            _inside.again = False


def recomputable(function: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    """An operator as a selective block has to call it."""
    return ComputedAgain(function) if rule.flops and not rule.products else function


class Recomputed(nn.Module):
    """A block that does not keep its activations: they are computed again when the backward pass gets there. What a
    selective one keeps are the results of products."""

    def __init__(
        self, block: nn.Module, mode: str, products: frozenset[str], draws: Draws, streams: Sequence[int] = (),
        journal: Journal | None = None,
    ) -> None:  # fmt: skip
        """`streams`: the shards that its random operators draw for, in turn."""
        super().__init__()
        self.block, self.draws, self.streams, self.journal = block, draws, streams, journal or Journal()
        policy = partial(_policy, products)
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
        self.keeping: Any = contexts if mode == SELECTIVE else {}

    def forward(self, *args: torch.Tensor) -> Any:
        if torch.compiler.is_compiling() and len(self.streams) <= 1:
            # compiled, it draws again what it drew without our help
            return checkpoint(self.block, *args, use_reentrant=False, **self.keeping)
        return self.uncompiled(*args)

    @untraced  # streams may be started in the midst of it
    def uncompiled(self, *args: torch.Tensor) -> Any:
        contexts = partial(self.contexts, self.draws.number, self.journal.path)
        # to the end, though the last operators are not needed: so that as much is sent as was predicted
        with set_checkpoint_early_stop(False):
            return checkpoint(self.block, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=False)

    def contexts(self, number: int, path: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What the block runs in, and what it runs in when it is computed again."""
        first, again = self.keeping.get("context_fn", noop_context_fn)()
        return first, _Again(self, number, path, again)


class _Again(AbstractContextManager[None]):
    """Another context, in the same copy of the block and with the random numbers that were drawn. A backward pass may
    come twice, and enter twice."""

    def __init__(self, block: Recomputed, number: int, path: str, inner: AbstractContextManager[Any]) -> None:
        self.block, self.number, self.path, self.inner = block, number, path, inner

    def __enter__(self) -> None:
        self.stack, block = ExitStack(), self.block
        block.journal.path = self.path
        if block.streams:
            self.stack.enter_context(block.draws.again(self.number, block.streams[0]))
        self.stack.enter_context(self.inner)

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)


def _policy(products: frozenset[str], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = str(operator) in products and not getattr(_inside, "again", False)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
