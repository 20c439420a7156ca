"""The parallel module: the original's tree of modules, its parameters as DTensors, a rank's program behind it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tapas._torch import copied_weight
from tapas.capture.program import Captured
from tapas.errors import TapasError
from tapas.plan.assignment import resident_layouts, weight_layouts
from tapas.runtime.agreement import differing, from_first
from tapas.runtime.call_signature import CallSignature
from tapas.runtime.counterparts import CounterpartModule, Tree, grow, home_of, parallel_class
from tapas.runtime.executor import Again, Compilable, Executor, Options
from tapas.runtime.initialize import initial_values, own_buffers, same_numbers
from tapas.runtime.parts import placement, shard
from tapas.runtime.untraced import around_blocks
from tapas.sharding.layout import Layout, R


class ParallelModule(CounterpartModule):
    """Computes what the original model computes; every rank calls it as the original is called."""

    def __new__(cls, model: nn.Module, *_: Any, **__: Any) -> "ParallelModule":
        return super().__new__(parallel_class(cls, model))

    def __init__(
        self, model: nn.Module, source: Compilable, device_mesh: DeviceMesh, inputs: Any = None,
        again: Again | None = None, options: Options | None = None,
    ) -> None:  # fmt: skip
        """`inputs` are those that were captured; without, the module takes the program's inputs by name."""
        nn.Module.__init__(self)
        names = [leaf.paths[0] for leaf in source.captured.graph.leaves if leaf.kind == "input"]
        calls = CallSignature.by_name(names) if inputs is None else CallSignature.of(model, inputs, names)
        executor = Executor(model, source, device_mesh, calls, again, options)
        tree = Tree(executor.rank)
        grow(self, model, tree)
        layouts = weight_layouts(source.assignment, source.folded) | resident_layouts(source.assignment, source.folded)
        _Filling(self, model, executor).fill(source.captured, layouts)
        executor.attach(self)
        tree.executor = executor

    @around_blocks  # of this, torch.compile is to take the blocks only
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        executor: Any = executor_of(self)
        prepared, gradients, leaves = executor.read(args, kwargs)
        with executor.drawing(prepared):
            results = prepared.program.forward(*leaves)
        return executor.hand_out(prepared, gradients, results)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within keep the gradients that have to be summed over ranks; the first one after it sends
        them together with its own. Until then the parameters do not have them."""
        accumulation = executor_of(self).accumulation
        before, accumulation.sends = accumulation.sends, False
        try:
            yield
        finally:
            accumulation.sends = before

    def train(self, mode: bool = True) -> "ParallelModule":
        """The original's own code says which of its modules are trained: some keep a part in evaluation mode."""
        again = executor_of(self).again
        if again is None:
            return super().train(mode)
        again.skeleton.train(mode)
        modes = {path: module.training for path, module in again.skeleton.named_modules()}
        for path, module in self.named_modules():
            module.training = modes[path]
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":  # it is called as it is here, unlike that of a submodule
            vars(self)[name] = value
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelModule":
        """Tensors of its own, the same programs."""
        twin: ParallelModule = object.__new__(type(self))
        tree, executor = Tree(self._tapas.tree.rank), copy.copy(executor_of(self))
        memo |= {id(self): twin, id(self._tapas.tree): tree}
        memo |= {id(t): copied_weight(t) for t in (*self.parameters(), *self.buffers()) if isinstance(t, DTensor)}
        vars(twin).update(copy.deepcopy(vars(self), memo))
        executor.attach(twin)
        tree.executor = executor
        return twin


def executor_of(module: nn.Module) -> Executor:
    """What runs a parallel module."""
    return module._tapas.tree.executor  # type: ignore[union-attr, return-value]


class _Filling:
    """Gives a new parallel module its tensors."""

    def __init__(self, module: ParallelModule, model: nn.Module, executor: Executor) -> None:
        self.module, self.model, self.executor, self.rank = module, model, executor, executor.rank
        self.layouts: dict[str, Layout] = {}
        self.held: dict[str, torch.Tensor] = {}  # what the module has, by path

    def fill(self, captured: Captured, layouts: dict[str, Layout]) -> None:
        """Parameters and buffers, under the names they have in the model."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        state = parameters | dict(self.model.named_buffers(remove_duplicate=False))
        saved = set(self.model.state_dict())
        held = [leaf for leaf in captured.graph.leaves if leaf.kind in ("parameter", "buffer")]
        caches = {path for leaf in held if leaf.kind == "buffer" and leaf.tensor in layouts for path in leaf.paths}
        self.check({path: t for path, t in state.items() if path not in caches})
        for leaf in held:
            source = state[leaf.paths[0]]
            if leaf.kind == "parameter":  # or a buffer that is a weight
                layout = layouts.get(leaf.tensor, (R,) * len(self.rank.mesh))
                self.hold(leaf.paths, source, layout, None if leaf.paths[0] in parameters else saved)
            else:
                whole = self.agreed(source)
                mine = shard(whole, layouts[leaf.tensor], *self.place) if leaf.tensor in layouts else whole
                self.register(leaf.paths, self.copied(mine), saved)
        self.initialize()

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self.rank.mesh), tuple(self.rank.coord)

    def check(self, state: dict[str, torch.Tensor]) -> None:
        """Whether all ranks have the same weights; on the meta device there are none."""
        if self.executor.options.broadcast:
            return
        name = differing({path: t for path, t in state.items() if not t.is_meta}, self.rank)
        if name is not None:
            raise TapasError(
                name, "is not the same on all ranks",
                "seed all ranks alike before the model is made, or pass broadcast=True to have the first rank's",
            )  # fmt: skip

    def agreed(self, source: torch.Tensor) -> torch.Tensor:
        """What all ranks take for a tensor of the model."""
        if not self.executor.options.broadcast or source.is_meta:
            return source.detach()
        return from_first(source.detach().to(self.rank.device), self.executor.mesh)

    def copied(self, source: torch.Tensor) -> torch.Tensor:
        """Memory of our own on the rank's device."""
        if source.is_meta:
            return torch.empty_like(source, device=self.rank.device)
        return source.to(self.rank.device, copy=True)

    def hold(self, paths: tuple[str, ...], source: torch.Tensor, layout: Layout, saved: set[str] | None) -> None:
        """A weight; `saved`: of a buffer, the paths that a checkpoint has."""
        made = DTensor.from_local(
            self.copied(shard(self.agreed(source), layout, *self.place)).contiguous(),
            self.executor.mesh, [placement(s) for s in layout], run_check=False,
            shape=source.shape, stride=torch.empty(source.shape, device="meta").stride(),
        )  # fmt: skip
        self.register(paths, made if saved is not None else nn.Parameter(made, source.requires_grad), saved)
        for path in paths:
            home, name = home_of(self.module, path)
            home._tapas.layouts[name] = self.layouts[path] = layout

    def register(self, paths: tuple[str, ...], held: torch.Tensor, saved: set[str] | None) -> None:
        for path in paths:
            home, name = home_of(self.module, path)
            if isinstance(held, nn.Parameter):
                home.register_parameter(name, held)
            else:
                home.register_buffer(name, held, saved is None or path in saved)
            self.held[path] = held

    def initialize(self) -> None:
        """What was on the meta device: all of it, or what no checkpoint will have."""
        if not any(t.is_meta for t in (*self.model.parameters(), *self.model.buffers())):
            return
        everything = self.executor.options.initialize
        made = initial_values(self.model, self.rank.device, None if everything else own_buffers(self.model))
        with same_numbers(self.executor.draws.seed), torch.no_grad():
            for values in made:
                for path, value in values.items():
                    if path in self.layouts:
                        part = shard(value, self.layouts[path], *self.place)
                        self.held[path].to_local().copy_(part)  # type: ignore[operator]
                    elif path in self.held:
                        self.held[path].copy_(value)
