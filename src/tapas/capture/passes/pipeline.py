"""Rewrites of functional calls that make more of a program splittable."""

from tapas.capture.calls import Call, Program
from tapas.capture.passes.split_packed import split_packed
from tapas.capture.passes.unflatten_products import unflatten_products
from tapas.capture.passes.unmerge import unmerge


def rewritten(calls: list[Call], program: Program, outputs: tuple[str, ...]) -> list[Call]:
    for rewrite in (unflatten_products, split_packed, unmerge):
        calls = rewrite(calls, program, outputs)
    return calls
