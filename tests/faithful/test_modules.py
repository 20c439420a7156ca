"""What `parallelize` returns behaves as the module that went in, or is refused with the error that the case names."""

from collections.abc import Iterator
from operator import attrgetter

import pytest

from tests.faithful.case import Case
from tests.faithful.modules import CASES
from tests.faithful.ranks import thread_groups
from tests.faithful.run import SETTINGS, Meshes, Setting, Verdict, as_wanted, verdicts


@pytest.fixture(scope="module")
def ranks() -> Iterator[Meshes]:
    with thread_groups() as found:
        yield found


def expect(case: Case, found: dict[Setting, Verdict]) -> None:
    for setting, verdict in found.items():
        assert as_wanted(case, verdict), f"{setting}: {verdict}"


IN_THREADS = [case for case in CASES.values() if not case.drawn]


QUICK = [
    pytest.param(case, id=case.name, marks=pytest.mark.full if number // len(SETTINGS) % 3 == 2 else ())
    for number, case in enumerate(IN_THREADS)
]


@pytest.mark.parametrize("case", QUICK)
def test_parallel_module_is_the_original(case: Case, ranks: Meshes) -> None:
    """On two ranks or on four: another setting for the next case."""
    expect(case, verdicts(case, (SETTINGS[IN_THREADS.index(case) % len(SETTINGS)],), ranks))


@pytest.mark.full
@pytest.mark.parametrize("case", IN_THREADS, ids=attrgetter("name"))
def test_in_all_settings(case: Case, ranks: Meshes) -> None:
    more = tuple(Setting(mesh, "random", seed) for mesh in ((2,), (2, 2)) for seed in (3, 4, 5))
    expect(case, verdicts(case, SETTINGS + more, ranks))
