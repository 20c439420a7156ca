"""Models as they run in eager mode, while being captured.

Under export, transformers spells out masks that it would leave to the attention kernel, keeps a cache nobody asked
for, and sorts tokens by expert. None of this is what a training step should be planned for. And torch.nn.Transformer
compares the values of a mask to find out whether it is the causal one: control flow on data, which cannot be captured.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

from tapas._torch import held_modules
from tapas.capture.experts import experts_as_operators
from tapas.capture.repeated.candidates import Candidate

_lock = threading.RLock()


@contextmanager
def as_in_eager(model: nn.Module, inputs: dict[str, Any], members: Sequence[Candidate] = ()) -> Iterator[None]:
    """Within, the model behaves in export as it does in eager mode. One capture at a time."""
    if "transformers" not in sys.modules:  # then the model cannot be one of theirs
        yield
        return
    with _lock, ExitStack() as stack:
        stack.enter_context(_masks(positions_given="position_ids" in inputs))
        stack.enter_context(experts_as_operators())
        stack.enter_context(_quiet())
        configs, dropping = _settings(model, members)
        for config in configs:
            if getattr(config, "use_cache", False):
                stack.enter_context(mock.patch.object(config, "use_cache", False))
        for holder in (*dropping, *configs):
            if isinstance(vars(holder).get("layerdrop"), (int, float)):
                stack.enter_context(mock.patch.dict(vars(holder), layerdrop=_NeverDrop()))
        yield


class _NeverDrop:
    """A probability that no random tensor is below: the step to plan for is one that drops no layer.

    Comparing with a number would make the graph depend on the random value; a tensor leaves the
    comparison with an object like this to the object.
    """

    def __gt__(self, _: Any) -> bool:  # random < never
        return False

    def __ge__(self, _: Any) -> bool:
        return False

    def __lt__(self, _: Any) -> bool:  # random > never
        return True

    def __le__(self, _: Any) -> bool:
        return True


@contextmanager
def _masks(positions_given: bool) -> Iterator[None]:
    """Let a causal mask be the kernel's flag. Only positions that the user gives can tell of packed sequences."""
    from transformers import masking_utils

    with ExitStack() as stack:
        if hasattr(masking_utils, "is_torchdynamo_exporting"):
            stack.enter_context(mock.patch.object(masking_utils, "is_torchdynamo_exporting", lambda: False))
        elif hasattr(masking_utils, "is_tracing"):  # before 5.22: asked of the mask, also where there is none
            tracing = masking_utils.is_tracing  # type: ignore[attr-defined]
            patched = lambda mask=None: mask is not None and tracing(mask)  # noqa: E731
            stack.enter_context(mock.patch.object(masking_utils, "is_tracing", patched))
        if not positions_given and hasattr(masking_utils, "find_packed_sequence_indices"):
            stack.enter_context(mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None))
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _settings(model: nn.Module, members: Sequence[Candidate]) -> tuple[list[Any], list[nn.Module]]:
    """The configurations that modules hold, and modules that may drop layers."""
    from transformers import PreTrainedConfig

    found = [module for module in _outside(model, members) if _tells(module)]
    places: dict[int, list[int]] = {}  # the same for all members of a structure: they have attributes of the same names
    for member in members:
        number, inside = member.structure.number, member.inside.modules
        if number not in places:
            places[number] = [place for place, module in enumerate(inside) if _tells(module)]
        found += [inside[place] for place in places[number]]
    configs = (getattr(module, "config", None) for module in found)
    own = {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}
    return list(own.values()), [module for module in found if "layerdrop" in vars(module)]


def _tells(module: nn.Module) -> bool:
    own = vars(module)
    return "config" in own or "layerdrop" in own or hasattr(type(module), "config")


def _outside(model: nn.Module, members: Sequence[Candidate]) -> Iterator[nn.Module]:
    """All modules but those of members."""
    seen = {member.module for member in members}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in seen:
            seen.add(module)
            yield module
            waiting += held_modules(module).values()
