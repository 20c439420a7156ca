"""`verify` raises no false alarm on users' modules: numbers agree, and what is sent is what was predicted."""

from operator import attrgetter

import pytest

from tests.faithful.case import Case
from tests.faithful.modules import CASES
from tests.faithful.run import PINS, SETTINGS, Setting, verified

RUNNING = [case for case in CASES.values() if case.refused is None]
PINNED = [setting for setting in SETTINGS if setting.split in PINS]
QUICK = 8  # of so many cases one


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
