"""`verify` raises no false alarm on users' modules: numbers agree, and what is sent is what was predicted."""

import warnings
from operator import attrgetter
from typing import Any

import pytest

import tapas
from tapas.errors import PlanError
from tests.distributed.small import EAGER
from tests.faithful.case import Case
from tests.faithful.modules import CASES
from tests.faithful.run import FREE, PINS, SETTINGS, Setting, calls_of, example_inputs, made, numbers_of

RUNNING = [case for case in CASES.values() if case.refused is None]
PINNED = [setting for setting in SETTINGS if setting.split in PINS]
QUICK = 8  # of so many cases one


def verified(case: Case, setting: Setting) -> Any:
    with numbers_of(case), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = made(case)
        inputs = example_inputs(model, calls_of(case)[0])
        training = True if case.train and case.loss is not None else None
        options: dict[str, Any] = {"cluster": EAGER, "training": training, "in_process": True, "steps": 2}
        try:
            return tapas.verify(model, inputs, mesh=setting.mesh, **options, **PINS[setting.split])
        except PlanError:
            return tapas.verify(model, inputs, mesh=setting.mesh, **options, **FREE[setting.split])


def expect_no_alarm(case: Case, setting: Setting) -> None:
    report = verified(case, setting)
    wrong = [check for check in report.checks if not check.ok]
    wrong += [sent for precision in report.sent.values() for sent in precision if not sent.ok]
    assert report.ok, (str(setting), wrong, report.culprit)


@pytest.mark.parametrize("case", RUNNING[::QUICK], ids=attrgetter("name"))
def test_no_alarm(case: Case) -> None:
    expect_no_alarm(case, PINNED[RUNNING.index(case) // QUICK % len(PINNED)])


@pytest.mark.full
@pytest.mark.parametrize("setting", PINNED, ids=str)
@pytest.mark.parametrize("case", RUNNING, ids=attrgetter("name"))
def test_no_alarm_in_any_setting(case: Case, setting: Setting) -> None:
    expect_no_alarm(case, setting)
