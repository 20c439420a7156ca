"""What autograd keeps of an operator for the backward pass."""

from tapas.rules.base import Call, Rule

# Their derivatives are written in terms of their results.
_RESULT = """
    exp.default exp2.default expm1.default relu.default rsqrt.default sigmoid.default sqrt.default tanh.default
    reciprocal.default elu.default softmax.int _softmax.default _safe_softmax.default log_softmax.int
    _log_softmax.default
"""
RESULT = frozenset(f"aten.{name}" for name in _RESULT.split())

# Their backward pass goes through log-probabilities, whose gradient is as large as that of the first operand.
TWO_STEPS = frozenset({"aten.cross_entropy_loss.default"})


def kept_operands(call: Call, rule: Rule) -> list[bool]:
    """Which operands are kept: those that the gradient of another one is multiplied by, or of a function of them."""
    trained = [t.differentiable for t in call.operands]
    if rule.view or not any(trained) or call.target in RESULT:
        return [False] * len(trained)
    flags = []
    for i in range(len(trained)):
        group = next((g for g in rule.linear if i in g), ())
        flags.append(not group or any(wants and j not in group for j, wants in enumerate(trained)))
    return flags


def kept_results(call: Call) -> bool:
    return call.target in RESULT and any(t.differentiable for t in call.operands)


def kept_besides(call: Call) -> int:
    """Bytes for each element of the first result: pooling remembers where it found the largest."""
    return 8 if "max_pool" in call.target and any(t.differentiable for t in call.operands) else 0
