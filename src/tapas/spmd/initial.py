"""Weights of a model on the meta device, made module by module as its author initialises them.

Every rank draws the same numbers for a whole module and keeps its part: so the weights do not depend on the
mesh, and no rank ever holds more than its part and one module's own tensors.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from tapas.errors import TapasError

Values = dict[str, torch.Tensor]


def initial_values(model: nn.Module, device: torch.device) -> Iterator[Values]:
    """Module by module, its own parameters and buffers by their paths in the model."""
    done: set[int] = set()
    for path, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        missing = {name: t for name, t in own.items() if t is not None and t.is_meta and id(t) not in done}
        if not missing:
            continue
        done |= {id(t) for t in missing.values()}
        twin = _twin(module, device)
        initialise = _initialiser(model, path, module)
        if initialise is None:
            raise TapasError(
                f"{path}.{next(iter(missing))}".lstrip("."),
                f"is on the meta device, and {type(module).__name__} has no reset_parameters()",
                "write one, or give the model real weights, or pass initialize=False and load a checkpoint",
            )
        with torch.no_grad():
            initialise(twin)
        made = {**twin._parameters, **twin._buffers}
        yield {f"{path}.{name}".lstrip("."): made[name].detach() for name in missing}  # type: ignore[union-attr]


def _twin(module: nn.Module, device: torch.device) -> nn.Module:
    """The module without its children, with real memory for what it holds itself."""
    twin = copy.copy(module)
    twin._modules = {}

    def real(t: torch.Tensor | None) -> torch.Tensor | None:
        return torch.empty_like(t, device=device) if t is not None and t.is_meta else t

    twin._parameters = {
        name: None if p is None else nn.Parameter(real(p), requires_grad=False)  # type: ignore[arg-type]
        for name, p in module._parameters.items()
    }
    twin._buffers = {name: real(b) for name, b in module._buffers.items()}
    return twin


def _initialiser(model: nn.Module, path: str, module: nn.Module) -> Callable[[nn.Module], None] | None:
    """What transformers' models do to their modules, or else what torch's modules do to themselves."""
    above = [model.get_submodule(".".join(path.split(".")[:i])) for i in range(len(path.split(".")), -1, -1)]
    for parent in above:
        if hasattr(parent, "_init_weights"):
            return parent._init_weights  # type: ignore[return-value]
    if hasattr(module, "reset_parameters"):
        return lambda twin: twin.reset_parameters()  # type: ignore[operator]
    return None


@contextmanager
def same_numbers(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """All ranks draw what the first one's seed says; their own generators stay where they are."""
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0, group=group)
    with torch.random.fork_rng():
        torch.manual_seed(seed[0])
        yield
