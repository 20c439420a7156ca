"""Norms. Split over what is normalized, the statistics are all-reduced: once for each, forward and backward."""

from tapas.rules.base import Call, Kernel, Rule, from_labels, rule
from tapas.rules.labels import Term
from tapas.rules.placed import number, placed, real, sums, wide


def _last_dims(call: Call, kernel: str, statistics: int, *parameters: tuple[int, str]) -> Rule:
    """Layer norm and RMS norm: d0 d1 ... are rows, h0 h1 ... are normalized."""
    x, normalized = call.operands[0], call.arg(1, "normalized_shape")
    lead = len(x.shape) - len(normalized)
    rows: Term = [[f"d{i}"] for i in range(lead)]
    inner: Term = [[f"h{i}"] for i in range(len(normalized))]
    operands = placed(call, (0, "input", [*rows, *inner]), *((*p, inner) for p in parameters))
    saved: Term = [*rows, *[["1"]] * len(inner)]
    sent = sums(real((r[0] for r in rows), x.shape[:lead]), wide(x), statistics, statistics if x.differentiable else 0)
    split = Kernel(sent, results=(None, *["R"] * (len(call.results) - 1)))
    results = [[*rows, *inner], *[saved] * (len(call.results) - 1)]
    return from_labels(operands, results, call, kernels={h[0]: split for h in inner}, kernel=kernel)


@rule("aten.layer_norm.default", "aten.native_layer_norm.default")
def layer_norm(call: Call) -> Rule:
    return _last_dims(call, "layer_norm", 2, (2, "weight"), (3, "bias"))


@rule("aten.rms_norm.default", "aten._fused_rms_norm.default")
def rms_norm(call: Call) -> Rule:
    return _last_dims(call, "rms_norm", 1, (2, "weight"))


def _positions(call: Call) -> Term:
    return [[f"s{i}"] for i in range(len(call.operands[0].shape) - 2)]


@rule("aten.group_norm.default")
def group_norm(call: Call) -> Rule:
    """Whole groups are dealt out; a group is cut along its positions only."""
    x, groups = call.operands[0], call.arg(1, "num_groups")
    term: Term = [["n"], ["g", "!c"], *_positions(call)]
    operands = placed(call, (0, "input", term), (2, "weight", [["g", "!c"]]), (3, "bias", [["g", "!c"]]))
    sent = sums(real("ng", (x.shape[0], groups)), wide(x), 2, 2 if x.differentiable else 0)
    kernels = {s[0]: Kernel(sent) for s in _positions(call)} | {"g": Kernel()}
    sizes = {"g": groups, "c": x.shape[1] // groups}
    return from_labels(operands, [term], call, sizes, kernels, kernel="group_norm")


@rule(
    "aten.batch_norm.default", "aten._native_batch_norm_legit.default",
    "aten._native_batch_norm_legit_functional.default", "aten.native_batch_norm.default",
)  # fmt: skip
def batch_norm(call: Call) -> Rule:
    """In training, statistics are those of the whole batch, wherever it is; else each channel is scaled."""
    x, training = call.operands[0], call.arg(5, "training")
    term: Term = [["n"], ["c"], *_positions(call)]
    channel: Term = [["c"]]
    operands = placed(call, (0, "input", term), *((i + 1, name, channel) for i, name in enumerate(_PER_CHANNEL)))
    sent = sums(real("c", x.shape[1:2]), wide(x), 2, 2 if x.differentiable else 0) if training else ()
    split = Kernel(sent, results=(None, *["R"] * (len(call.results) - 1)))
    kernels = {label[0]: split for label in (["n"], *_positions(call))} | {"c": Kernel()}
    results = [term, *(channel if r.shape == x.shape[1:2] else [["1"]] for r in call.results[1:])]
    return from_labels(operands, results, call, kernels=kernels, kernel="batch_norm")


_PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")


@rule("aten.instance_norm.default")
def instance_norm(call: Call) -> Rule:
    """Each sample's channel is normalized by itself. Running statistics are means over samples."""
    own = call.arg(5, "use_input_stats")
    averaged = own and number(call, 3, "running_mean") is not None
    positions = [["!" + s[0]] for s in _positions(call)] if own else _positions(call)
    term: Term = [["!n" if averaged else "n"], ["c"], *positions]
    operands = placed(call, (0, "input", term), *((i + 1, name, [["c"]]) for i, name in enumerate(_PER_CHANNEL)))
    return from_labels(operands, [term], call)
