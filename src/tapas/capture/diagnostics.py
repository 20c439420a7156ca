"""Where in the user's model something happened, and what went wrong in an export, in a sentence."""

import inspect
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.export import ExportedProgram

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
    """`modeling_llama.py:123 in forward`, from the innermost frame of the stack trace that is a file's."""
    trace = node.meta.get("stack_trace") or ""
    start = trace.rfind('File "')
    while trace.startswith('File "<', start):  # written by torch itself
        start = trace.rfind('File "', 0, start)
    if start < 0:
        return ""
    path, _, rest = trace[start + 6 :].partition("\n")[0].partition('", line ')
    number, _, function = rest.partition(", in ")
    return f"{path.replace(chr(92), '/').rpartition('/')[2]}:{number} in {function}"


def place_of(node: fx.Node) -> str:
    module, source = module_of(node) or "model", source_of(node)
    return f"{module} ({source})" if source else module


def higher_order(kind: str) -> tuple[str, str]:
    """Fact and remedy."""
    remedies = {
        "cond": "compute both sides and choose with torch.where",
        "flex_attention": "use F.scaled_dot_product_attention (in transformers: attn_implementation='sdpa')",
        "while_loop": "run a fixed number of steps, and keep what is done with torch.where",
        "scan": "write the loop in Python",
    }
    default = "replace it by plain operators (for attention: attn_implementation='sdpa')"
    fact = f"the higher-order operator {kind} has a body that cannot be planned"
    return fact, remedies.get(kind, default)


def data_dependent(place: str, fact: str) -> CaptureError:
    return CaptureError(place, fact, "compute it with fixed sizes instead: masks, torch.where, top-k with a fixed k")


class GradientInForward(Exception):
    """A model takes a gradient in its forward pass."""


class NoOperator(Exception):
    """Code does what a graph cannot hold; whether it stays whole, capture tries to find out."""

    def __init__(self, fact: str, remedy: str) -> None:
        super().__init__(fact)
        self.fact, self.remedy = fact, remedy


@contextmanager
def without_inner_gradients() -> Iterator[None]:
    """An export does not follow gradients that are taken within: it would hold their first values for ever."""

    here = threading.get_ident()

    def refusing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here:  # others may train meanwhile
                return plain(*args, **kwargs)
            raise GradientInForward

        return refused

    with ExitStack() as stack:
        for name in ("grad", "backward"):
            plain = getattr(torch.autograd, name)
            stack.enter_context(mock.patch.object(torch.autograd, name, refusing(plain)))
        yield


TRANSFORMED = (
    "it calls torch.vmap or another transform of torch.func, of which an export keeps only traces",
    "write it with operators that take the batch as a dim: einsum, bmm, broadcasting",
)


def is_transform(function: Any) -> bool:
    return "functorch" in (getattr(function, "__module__", "") or "")


def check_transforms(exported: ExportedProgram) -> None:
    """What torch.func does around operators is no operator: an export lets it through, and nobody can run it."""
    graphs = [module.graph for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule)]
    for node in chain.from_iterable(graph.nodes for graph in graphs):
        if node.op == "call_function" and is_transform(node.target):
            raise CaptureError(place_of(node), *TRANSFORMED)


# words of torch's for what is no fault of the inputs: fact and remedy instead
_KNOWN = (
    (
        r"FlexAttention does not support backward|flex_attention",
        "torch cannot run flex_attention here: {text}",
        "use F.scaled_dot_product_attention, or plan for inference (training=False)",
    ),
    (
        r"Found <class '[^']*'> in output, which is not a known type",
        "it returns what torch cannot take apart into tensors: {text}",
        "return tensors, in tuples, lists, dicts or dataclasses; or register the class with torch.utils._pytree",
    ),
    (
        r"functorch",
        "torch.func transforms (vmap, grad, jacrev) cannot be exported: {text}",
        "write it with operators that take the batch as a dim, and take gradients outside of forward",
    ),
)
FAILS = "the model fails on the example inputs"
_OURS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def explain(error: BaseException, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureError:
    module, source = _where(error.__traceback__, model)
    place = f"{module or type(model).__name__}" + (f" ({source})" if source else "")
    kind, text = type(error).__name__, _sentence(str(error))
    special = _special(error, model, module, text)
    if special is not None:
        return CaptureError(place, *special)
    if "DataDependent" in kind or "UserError" in kind or "unbacked" in text:
        return data_dependent(
            place, "the program depends on the values of a tensor (an if, a loop, .item(), nonzero or a boolean index)"
        )
    given = describe(args, kwargs)
    if isinstance(error, (RuntimeError, IndexError, ValueError, AssertionError, TypeError, AttributeError)):
        return CaptureError(
            place,
            f"{FAILS} ({given}): {text or kind}",
            "check their shapes and dtypes by running the model on them",
        )
    return CaptureError(place, f"{kind}: {text}", f"run the model on inputs like these to see why: {given}")


def _special(error: BaseException, model: nn.Module, module: str, text: str) -> tuple[str, str] | None:
    """Fact and remedy of what has its own reason, which is not in torch's words."""
    if isinstance(error, GradientInForward):
        return (
            "takes a gradient in forward (torch.autograd.grad or backward), which an export cannot follow",
            "return what the gradient is of, and take it outside: outputs have gradients of their own",
        )
    if isinstance(error, NoOperator):
        return error.fact, error.remedy
    if type(error).__name__ == "DynamicOutputShapeException":
        return (
            f"{text} gives a result whose shape depends on values, or reads values to run: it has no form without data",
            "compute it outside of the model, from an output (plan with training=True)",
        )
    if isinstance(model.get_submodule(module), torch.jit.ScriptModule):
        return "is scripted (torch.jit), which an export cannot look into", "give the module that was scripted"
    if _passes(error.__traceback__, "torch/distributions/"):
        return (
            "torch.distributions checks the values of its arguments",
            "make the distribution with validate_args=False",
        )
    known = ((fact.format(text=text), remedy) for words, fact, remedy in _KNOWN if re.search(words, str(error)))
    return next(known, None)


def _passes(trace: TracebackType | None, folder: str) -> bool:
    """Whether an error comes through a file there."""
    while trace is not None:
        if folder in trace.tb_frame.f_code.co_filename.replace(os.sep, "/"):
            return True
        trace = trace.tb_next
    return False


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


def live_place(model: nn.Module) -> str:
    """Where in the model code is now: its innermost module, and the innermost line there."""
    paths = {id(module): path for path, module in model.named_modules()}
    source = ""
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        if frame.f_code.co_filename.startswith((*_OURS, "<")):
            continue
        owner = frame.f_locals.get("self")
        here = f"{os.path.basename(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
        if isinstance(owner, nn.Module):
            return f"{paths.get(id(owner)) or type(owner).__name__} ({here})"
        source = source or here
    return f"{type(model).__name__} ({source})" if source else type(model).__name__


def _sentence(text: str) -> str:
    """The first paragraph, on one line, without what is meant for torch's developers."""
    text = re.split(
        r"\n\s*\n|\nWhile executing|\nOriginal traceback|\nFrom user code|\nThe following call", text.strip()
    )[0]
    text = " ".join(text.split()).rstrip(".")
    return text[:300] + ("..." if len(text) > 300 else "")
