"""Passes over captured calls: each makes one spelling of one meaning."""

from tapas.capture.calls import ExportedCall, FlatProgram
from tapas.capture.passes.order_of_use import in_order_of_use
from tapas.capture.passes.split_packed import split_packed
from tapas.capture.passes.unflatten_products import unflatten_products
from tapas.capture.passes.unmerge import unmerge


def rewritten(
    calls: list[ExportedCall], program: FlatProgram, outputs: tuple[str, ...], given: tuple[str, ...] | None = None
) -> list[ExportedCall]:
    """`given`: parameters and inputs of a model, and not of a submodule by itself."""
    for rewrite in (unflatten_products, split_packed, unmerge):
        calls = rewrite(calls, program, outputs)
    return calls if given is None else in_order_of_use(calls, program, given, outputs)
