"""Models to verify, captured once in a run of the tests whoever asks for them."""

from functools import cache

from tapas.verify.subject import Subject, capture_subject, disturb
from tests.distributed.small import small
from tests.planner.roomy import roomy


@cache
def small_subject(family: str) -> Subject:
    model, inputs = small(family)
    disturb(model)
    return capture_subject(model, inputs)


@cache
def roomy_subject(family: str) -> Subject:
    """In sizes where tensors outweigh the odds and ends of a program."""
    model, inputs = roomy(family)
    disturb(model)
    return capture_subject(model, inputs)
