"""Passes over captured calls: each makes one spelling of one meaning."""

from tapas.capture.calls import ExportedCall, FlatProgram
from tapas.capture.passes.split_packed import split_packed
from tapas.capture.passes.unflatten_products import unflatten_products
from tapas.capture.passes.unmerge import unmerge


def rewritten(calls: list[ExportedCall], program: FlatProgram, outputs: tuple[str, ...]) -> list[ExportedCall]:
    for rewrite in (unflatten_products, split_packed, unmerge):
        calls = rewrite(calls, program, outputs)
    return calls
