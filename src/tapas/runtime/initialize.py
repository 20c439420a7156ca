"""Weights of a model on the meta device, made part by part as its author initialises them.

Every rank draws the same numbers for a whole part (a small model, a layer, or a single module) and keeps its
shards: so the weights do not depend on the mesh, and no rank ever holds more than its shards and one part.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tapas.errors import TapasError

LIMIT = 2_000_000_000  # bytes of a part that is made at once; larger ones are made child by child
Values = dict[str, torch.Tensor]


def initial_values(model: nn.Module, device: torch.device, only: set[str] | None = None) -> Iterator[Values]:
    """Part by part, what was on the meta device, by its path in the model; `only` those."""
    done: set[int] = set()
    for path, module, deep in _parts("", model) if only is None else _owners(model, only):
        held = _held(module, deep)
        missing = {
            name: t
            for name, t in held.items()
            if t.is_meta and id(t) not in done and (only is None or f"{path}.{name}".lstrip(".") in only)
        }
        if not missing:
            continue
        done |= {id(t) for t in missing.values()}
        twin = _twin(module, deep, device)
        with torch.no_grad():
            _initialise(model, path, twin)
        made = _held(twin, deep)
        for name in missing:
            if _unset(made[name]):
                raise _cannot_be_made(f"{path}.{name}".lstrip("."), model, only is None)
        yield {f"{path}.{name}".lstrip("."): made[name].detach() for name in missing}


def _cannot_be_made(path: str, model: nn.Module, loadable: bool) -> TapasError:
    home = model.get_submodule(path.rpartition(".")[0])
    fact = f"is on the meta device, and {type(home).__name__} has no reset_parameters() that sets it"
    remedy = "write one, or give the model real weights, or pass initialize=False and load a checkpoint"
    if not loadable:
        fact += ", and no checkpoint has it: it is not persistent"
        remedy = "write one, or make this buffer on a real device, or make it persistent"
    return TapasError(path, fact, remedy)


def own_buffers(model: nn.Module) -> set[str]:
    """The buffers on the meta device that no checkpoint has: only the model's code can make them."""
    saved = set(model.state_dict())
    return {path for path, t in model.named_buffers(remove_duplicate=False) if t.is_meta and path not in saved}


def _owners(model: nn.Module, paths: set[str]) -> Iterator[tuple[str, nn.Module, bool]]:
    """The modules that hold these tensors."""
    for path in dict.fromkeys(path.rpartition(".")[0] for path in sorted(paths)):
        yield next(_parts(path, model.get_submodule(path)))


def _parts(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Modules with all they contain where that is small, else the module's own tensors and then its children."""
    if sum(t.nbytes for t in {id(t): t for t in _held(module, True).values()}.values()) <= LIMIT:
        yield path, module, True
        return
    yield path, module, False
    for name, child in module.named_children():
        yield from _parts(f"{path}.{name}".lstrip("."), child)


def _held(module: nn.Module, deep: bool) -> Values:
    parameters = module.named_parameters(recurse=deep, remove_duplicate=False)
    buffers = module.named_buffers(recurse=deep, remove_duplicate=False)
    return dict((*parameters, *buffers))


def _twin(module: nn.Module, deep: bool, device: torch.device) -> nn.Module:
    """A copy with real memory, marked as not set; without its children unless `deep`."""
    memo: dict[int, Any] = {}
    for t in (*module.parameters(recurse=deep), *module.buffers(recurse=deep)):
        made = _mark(torch.empty_like(t, device=device)) if t.is_meta else t.detach().clone()
        memo[id(t)] = nn.Parameter(made, requires_grad=False) if isinstance(t, nn.Parameter) else made
    if not deep:
        module = copy.copy(module)
        module._modules = {}
    return copy.deepcopy(module, memo)


def _mark(t: torch.Tensor) -> torch.Tensor:
    """Fill with what no initialisation writes."""
    if t.is_floating_point() or t.is_complex():
        return t.fill_(float("nan"))
    return t.zero_() if t.dtype == torch.bool else t.fill_(torch.iinfo(t.dtype).min)


def _unset(t: torch.Tensor) -> bool:
    if not t.numel() or t.dtype == torch.bool:
        return False
    if t.is_floating_point() or t.is_complex():
        return bool(t.isnan().any())
    return bool((t == torch.iinfo(t.dtype).min).any())


def _initialise(model: nn.Module, path: str, twin: nn.Module) -> None:
    """Children first, as `nn.Module.apply` does: each as the transformers model around it says, or by itself."""
    above = [model.get_submodule(".".join(path.split(".")[:i])) for i in range(len(path.split(".")) + 1)]
    outer = next((m for m in reversed(above) if hasattr(m, "_init_weights")), None)
    _apply(twin, outer)


def _apply(module: nn.Module, outer: Any) -> None:
    mine = module if hasattr(module, "_init_weights") else outer
    for child in module.children():
        _apply(child, mine)
    if mine is not None:
        mine._init_weights(module)  # type: ignore[operator]
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]


@contextmanager
def same_numbers(seed: int) -> Iterator[None]:
    """All ranks of a mesh draw what one seed says; their own generators stay where they are."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
