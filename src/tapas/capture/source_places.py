"""Where in the user's model something happened: module path and source line."""

from torch import fx

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
