"""Recurrent layers as one operator: samples. Steps follow one another, and features meet in every step."""

from typing import Any

from tapas.ir.graph import refs
from tapas.rules.base import Call, Rule, rule
from tapas.rules.notation import Term, from_labels


@rule("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
def recurrent(call: Call) -> Rule:
    """input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first."""
    shape = call.operands[0].shape
    turned = bool(call.args[8])
    flops = recurrent_flops(call, call.args[2], shape[1 if turned else 0])
    random = call.args[5] > 0 and bool(call.args[6])
    sequence: Term = [["b"], ["1"], ["1"]] if turned else [["1"], ["b"], ["1"]]
    return _samples(call, sequence, [["1"], ["b"], ["1"]], sequence, flops, random)


@rule("aten.lstm_cell.default", "aten.gru_cell.default", "aten.rnn_tanh_cell.default", "aten.rnn_relu_cell.default")
def cell(call: Call) -> Rule:
    """A single step: input, hx, and the weights one by one."""
    flops = recurrent_flops(call, call.args[2:], 1)
    states: Term = [["b"], ["1"]]
    return _samples(call, states, states, states, flops, False)


def _samples(call: Call, given: Term, states: Term, made: Term, flops: float, random: bool) -> Rule:
    operands: list[Term | None] = [None] * len(call.operands)
    operands[0] = given
    for index in refs((call.args[1],)):
        operands[index] = states
    results = [made, *[states] * (len(call.results) - 1)]
    return from_labels(operands, results, call, flops=flops, random=random)


def recurrent_flops(call: Call, weights: Any, steps: int) -> float:
    """In every step a sample passes through every matrix once."""
    shapes = [call.operands[i].shape for i in refs(weights)]
    return 2.0 * steps * sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
