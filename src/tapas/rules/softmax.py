"""Softmax and log-softmax. Over a split dim: the largest element and the sum of exponentials are all-reduced."""

from tapas.rules.base import Call, Kernel, Rule, from_labels, rule
from tapas.rules.labels import Term, wrap
from tapas.rules.placed import real, sums, wide


def _along(call: Call, kernel: str | None) -> Rule:
    x = call.operands[0]
    dim = wrap(call.arg(1, "dim"), len(x.shape))
    term: Term = [["c" if kernel else "!c"] if i == dim else [f"d{i}"] for i in range(len(x.shape))]
    rows = real((t[0] for i, t in enumerate(term) if i != dim), (s for i, s in enumerate(x.shape) if i != dim))
    sent = sums(rows, wide(call.results[0]), 2, 1 if x.differentiable else 0)
    return from_labels([term], [term], call, kernels={"c": Kernel(sent)}, kernel=kernel)


@rule("aten.softmax.int", "aten._softmax.default")
def softmax(call: Call) -> Rule:
    return _along(call, "softmax")


@rule("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax(call: Call) -> Rule:
    return _along(call, "log_softmax")


@rule("aten._safe_softmax.default")
def safe_softmax(call: Call) -> Rule:
    return _along(call, None)
