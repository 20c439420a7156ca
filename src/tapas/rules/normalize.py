"""Norms and softmax. Split over what is normalized, the statistics are all-reduced, forward and backward."""

from dataclasses import replace
from typing import Any

from tapas.rules.base import Call, Kernel, Rule, Wording, rule
from tapas.rules.notation import Term, from_labels, number, placed, real, sums, wide, wrap

# the backward pass reads values and gradients twice, once for the gradients of the parameters
SLOWER = (6.0, 3.8)  # pointwise operators in float32, one after the other
NORM: dict[str, Any] = {"family": "norm", "backward": 2.5}
FEATURES = Wording(factors={"h0": "features"})
CHANNELS = Wording(factors={"c": "channels", "n": "batch"})


def _last_dims(call: Call, kernel: str, statistics: int, *parameters: tuple[int, str], **options: Any) -> Rule:
    """Layer norm and RMS norm: d0 d1 ... are rows, h0 h1 ... are normalized."""
    x, normalized = call.operands[0], call.arg(1, "normalized_shape")
    lead = len(x.shape) - len(normalized)
    rows: Term = [[f"d{i}"] for i in range(lead)]
    inner: Term = [[f"h{i}"] for i in range(len(normalized))]
    operands = placed(call, (0, "input", [*rows, *inner]), *((*p, inner) for p in parameters))
    saved: Term = [*rows, *[["1"]] * len(inner)]
    sent = sums(real((r[0] for r in rows), x.shape[:lead]), wide(x), statistics, statistics if x.priced else 0)
    split = Kernel(sent, results=(None, *["R"] * (len(call.results) - 1)), slower=SLOWER)
    results = [[*rows, *inner], *[saved] * (len(call.results) - 1)]
    kernels = {h[0]: split for h in inner}
    return from_labels(operands, results, call, kernels=kernels, kernel=kernel, spread=inner[-1][0], **NORM, **options)


@rule("aten.native_layer_norm.default")
@rule("aten.layer_norm.default", wording=FEATURES)
def layer_norm(call: Call) -> Rule:
    return _last_dims(call, "normalize.layer_norm", 2, (2, "weight"), (3, "bias"), full_precision=True)


@rule("aten.rms_norm.default", "aten._fused_rms_norm.default", wording=FEATURES)
def rms_norm(call: Call) -> Rule:
    return _last_dims(call, "normalize.rms_norm", 1, (2, "weight"))


def _positions(call: Call) -> Term:
    return [[f"s{i}"] for i in range(call.rank - 2)]


@rule("aten.group_norm.default", wording=Wording(factors={"g": "channel groups", "n": "batch"}))
def group_norm(call: Call) -> Rule:
    """Whole groups are dealt out; a group is cut along its positions only."""
    x, groups = call.operands[0], call.arg(1, "num_groups")
    term: Term = [["n"], ["g", "!c"], *_positions(call)]
    operands = placed(call, (0, "input", term), (2, "weight", [["g", "!c"]]), (3, "bias", [["g", "!c"]]))
    sent = sums(real("ng", (x.shape[0], groups)), wide(x), 2, 2 if x.priced else 0)
    kernels = {s[0]: Kernel(sent, slower=SLOWER) for s in _positions(call)} | {"g": Kernel()}
    sizes = {"g": groups, "c": x.shape[1] // groups}
    return from_labels(operands, [term], call, sizes, kernels, kernel="normalize.group_norm", full_precision=True,
                       **NORM)  # fmt: skip


@rule("aten._native_batch_norm_legit.default", "aten._native_batch_norm_legit_functional.default")
@rule("aten.batch_norm.default", "tapas.batch_norm.default", "aten.native_batch_norm.default", wording=CHANNELS)
def batch_norm(call: Call) -> Rule:
    """In training, statistics are those of the whole batch, wherever it is; else each channel is scaled."""
    x, training = call.operands[0], call.arg(5, "training")
    term: Term = [["n"], ["c"], *_positions(call)]
    channel: Term = [["c"]]
    operands = placed(call, (0, "input", term), *((i + 1, name, channel) for i, name in enumerate(_PER_CHANNEL)))
    sent = sums(real("c", x.shape[1:2]), wide(x), 2, 2 if x.priced else 0) if training else ()
    slower = (5.0, 9.0) if training else (1.0, 1.0)  # estimated from what split layer norms take
    split = Kernel(sent, results=(None, *["R"] * (len(call.results) - 1)), slower=slower)
    kernels = {label[0]: split for label in (["n"], *_positions(call))} | {"c": Kernel()}
    results = [term, *(channel if r.shape == x.shape[1:2] else [["1"]] for r in call.results[1:])]
    return from_labels(operands, results, call, kernels=kernels, kernel="normalize.batch_norm", family="batch_norm",
                       spread="c")  # fmt: skip


_PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")


@rule("aten.instance_norm.default", "tapas.instance_norm.default")
def instance_norm(call: Call) -> Rule:
    """Each sample's channel is normalized by itself. Running statistics are means over samples."""
    own = call.arg(5, "use_input_stats")
    averaged = own and number(call, 3, "running_mean") is not None
    positions = [["!" + s[0]] for s in _positions(call)] if own else _positions(call)
    term: Term = [["!n" if averaged else "n"], ["c"], *positions]
    operands = placed(call, (0, "input", term), *((i + 1, name, [["c"]]) for i, name in enumerate(_PER_CHANNEL)))
    return from_labels(operands, [term, *[[["c"]]] * (len(call.results) - 1)], call, family="batch_norm", spread="c")


# ---------------------------------------------------------------------------------------------
# Softmax: the largest element and the sum of exponentials


def _along(call: Call, kernel: str | None) -> Rule:
    x = call.operands[0]
    dim = wrap(call.arg(1, "dim"), len(x.shape))
    term: Term = [["c" if kernel else "!c"] if i == dim else [f"d{i}"] for i in range(len(x.shape))]
    rows = real((t[0] for i, t in enumerate(term) if i != dim), (s for i, s in enumerate(x.shape) if i != dim))
    sent = sums(rows, wide(call.results[0]), 2, 1 if x.priced else 0)
    return from_labels(
        [term], [term], call, kernels={"c": Kernel(sent, slower=(5.0, 1.7))}, kernel=kernel, saves_result=True,
        full_precision=True, family="softmax",
    )  # fmt: skip


@rule("aten.softmax.int", "aten._softmax.default")
def softmax(call: Call) -> Rule:
    return replace(_along(call, "normalize.softmax"), attended="c")


@rule("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax(call: Call) -> Rule:
    return _along(call, "normalize.log_softmax")


@rule("aten._safe_softmax.default")
def safe_softmax(call: Call) -> Rule:
    return _along(call, None)
