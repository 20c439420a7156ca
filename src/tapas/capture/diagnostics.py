"""Where in the user's model something happened, and what went wrong in an export, in a sentence."""

import os
import re
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn

from tapas.capture.inputs import describe
from tapas.errors import CaptureError


def module_of(node: fx.Node) -> str:
    """The path of the innermost module the call was made in."""
    stack = node.meta.get("nn_module_stack")
    return clean_path(next(reversed(stack.values()))[0]) if stack else ""


def clean_path(path: str) -> str:
    """Export writes `L['self'].`, `slice(None, 4, None)` and `@1` into paths; a reader wants none of them."""
    path = path.partition("@")[0]
    for prefix in ("L['self'].", "L['self']", "L__self__"):
        path = path.removeprefix(prefix)
    return ".".join(part for part in path.split(".") if part and not part.startswith("slice("))


def source_of(node: fx.Node) -> str:
    """`modeling_llama.py:123 in forward`, from the innermost frame of the stack trace."""
    trace = node.meta.get("stack_trace") or ""
    start = trace.rfind('File "')
    if start < 0:
        return ""
    path, _, rest = trace[start + 6 :].partition("\n")[0].partition('", line ')
    number, _, function = rest.partition(", in ")
    return f"{path.replace(chr(92), '/').rpartition('/')[2]}:{number} in {function}"


def place_of(node: fx.Node) -> str:
    module, source = module_of(node) or "model", source_of(node)
    return f"{module} ({source})" if source else module


def data_dependent(place: str, fact: str) -> CaptureError:
    return CaptureError(place, fact, "compute it with fixed sizes instead: masks, torch.where, top-k with a fixed k")


_OURS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def explain(error: BaseException, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureError:
    module, source = _where(error.__traceback__, model)
    place = f"{module or type(model).__name__}" + (f" ({source})" if source else "")
    kind, text = type(error).__name__, _sentence(str(error))
    if "DataDependent" in kind or "GuardOnDataDependent" in kind or "UserError" in kind or "unbacked" in text:
        return CaptureError(
            place,
            "the program depends on the values of a tensor (an if, a loop, .item(), nonzero or a boolean index)",
            "compute it with fixed sizes instead: masks, torch.where, top-k with a fixed k",
        )
    given = describe(args, kwargs)
    if isinstance(error, (RuntimeError, IndexError, ValueError, AssertionError, TypeError, AttributeError)):
        return CaptureError(
            place,
            f"the model fails on the example inputs ({given}): {text or kind}",
            "check their shapes and dtypes by running the model on them",
        )
    return CaptureError(place, f"{kind}: {text}", f"run the model on inputs like these to see why: {given}")


def _where(trace: TracebackType | None, model: nn.Module) -> tuple[str, str]:
    """Innermost module of the model, and innermost line that is neither torch's nor ours."""
    paths = {id(module): path for path, module in model.named_modules()}
    module, source = "", ""
    while trace is not None:
        frame = trace.tb_frame
        filename = frame.f_code.co_filename
        owner = frame.f_locals.get("self")
        helper = owner is not None and not isinstance(owner, nn.Module)  # a config, a cache: not where the model is
        if not helper and not filename.startswith((*_OURS, "<")):
            source = f"{os.path.basename(filename)}:{trace.tb_lineno} in {frame.f_code.co_name}"
        module = paths.get(id(owner), "") or module
        trace = trace.tb_next
    return module, source


def _sentence(text: str) -> str:
    """The first paragraph, on one line, without what is meant for torch's developers."""
    text = re.split(
        r"\n\s*\n|\nWhile executing|\nOriginal traceback|\nFrom user code|\nThe following call", text.strip()
    )[0]
    text = " ".join(text.split()).rstrip(".")
    return text[:300] + ("..." if len(text) > 300 else "")
