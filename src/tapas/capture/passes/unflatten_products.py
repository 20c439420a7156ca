"""Products on flattened tokens, put back on the dims they were made from.

GPT-2 flattens [batch, seq, k] to [batch * seq, k] for `addmm` and undoes it afterwards. In that form the
seq dim is hidden behind batch and cannot be split. `tapas::affine` on the unflattened tensor is the same product in
the same kernel, and reads the weight as it is stored.
"""

from collections import Counter

import torch

from tapas.capture.calls import ExportedCall, FlatProgram, Value, operands
from tapas.ir import custom_ops as _  # noqa: F401 - registers operators of our own

aten = torch.ops.aten


def unflatten_products(calls: list[ExportedCall], program: FlatProgram, outputs: tuple[str, ...]) -> list[ExportedCall]:
    """reshape, addmm, reshape -> affine."""
    if not any(call.target is aten.addmm.default for call in calls):
        return calls
    makers = {call.results[0]: call for call in calls}
    reads = Counter(name for call in calls for name in operands(call))
    reads.update(outputs)
    replaced: dict[str, ExportedCall] = {}  # by the result of the last reshape
    gone: set[str] = set()
    for call in calls:
        product = _product(call, makers, program)
        if product is not None and reads[product.results[0]] == 1:
            replaced[call.results[0]] = _affine(call, product, makers)
            gone.add(product.results[0])
    kept = (call for call in calls if call.results[0] not in gone)
    return [replaced.get(call.results[0], call) for call in kept]


def _product(call: ExportedCall, makers: dict[str, ExportedCall], program: FlatProgram) -> ExportedCall | None:
    """The addmm to which `call` gives back the leading dims that a reshape before it took away."""
    product = _maker(call, 0, makers, aten.reshape.default)
    if product is None or product.kwargs or len(product.args) != 3:
        return None
    flatten = _maker(product, 1, makers, aten.addmm.default)
    if flatten is None or flatten.target is not aten.reshape.default:
        return None
    if not call.grad == product.grad == flatten.grad:
        return None
    bias, weight = (program.meta[product.args[position].name] for position in (0, 2))
    before, after = program.meta[flatten.args[0].name].shape, program.meta[call.results[0]].shape
    same = len(before) > 2 and before[:-1] == after[:-1] and before[-1] == weight.shape[0]
    return product if same and bias.dim() == 1 and after[-1] == weight.shape[1] == bias.shape[0] else None


def _maker(call: ExportedCall, position: int, makers: dict[str, ExportedCall], target: object) -> ExportedCall | None:
    """The call that made an argument of `call`, if `call` is one of `target`."""
    if call.target is not target:
        return None
    value = call.args[position]
    return makers.get(value.name) if isinstance(value, Value) else None


def _affine(call: ExportedCall, product: ExportedCall, makers: dict[str, ExportedCall]) -> ExportedCall:
    bias, flat, weight = product.args
    rows = makers[flat.name].args[0]
    return product.at_its_place(torch.ops.tapas.affine.default, (rows, weight, bias), call.results)
