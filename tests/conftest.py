"""How the tests are run: by default without those marked `full`, and under `make test` on two workers, file by file.

Tests of one file share what they capture and plan, so a file goes to one worker as a whole. Tests that start
processes are one group: two pools would fight for the cores, and some tests look for processes that are left over.
"""

import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

from tests.distributed.pool import Pool
from tests.report.browser import skipped

os.environ.pop("COLUMNS", None)  # xdist tells workers the width of its terminal; texts are expected in the usual one
torch.set_num_threads(1)  # many tiny operators, and as many workers as there are cores

settings.register_profile("quick", max_examples=25)  # in percent, for tests.properties.examples
settings.register_profile("full", max_examples=100)
settings.load_profile("quick")

# The slowest groups come first: whoever is done early takes what is left.
SLOWEST = (
    "processes", "tests/capture/test_repeated.py", "tests/oracle/test_optimum.py", "tests/oracle/test_rules.py",
    "tests/planner/test_memory.py", "tests/verify/test_verify.py", "tests/faithful/test_modules.py",
    "tests/plan/test_assignment.py", "tests/problem/test_baselines.py",
)  # fmt: skip


def group_of(nodeid: str) -> str:
    path = nodeid.partition("::")[0]
    return "processes" if path.startswith("tests/distributed/") or path.endswith("/test_processes.py") else path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {group: place for place, group in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))


class Groups(LoadGroupScheduling):
    """Groups by path: xdist 3.8 writes those of its marker into an attribute that pytest 9.2 no longer reads."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups:
    return Groups(config, log)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """For the tests of one file: what a worker has done keeps threads busy; others are forked within a second."""
    made = Pool(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


# --------------------------------------------------------------------------------------------- processor time

STARTED = pytest.StashKey[float]()
SECONDS: dict[str, float] = defaultdict(float)


def processor_seconds() -> float:
    """Of this process, of those it has started, of those they have: also if they are done and were waited for."""
    return sum(os.times()[:4]) + sum(map(_of_process, _descendants("self")))


def _descendants(pid: str) -> Iterator[str]:
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(thread).split():
            yield child
            yield from _descendants(child)


def _of_process(pid: str) -> float:
    ticks = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process is gone
        return ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-time", action="store_true", help="processor seconds of the slowest files and tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[STARTED] = processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        report.user_properties.append(("processor_seconds", processor_seconds() - item.stash[STARTED]))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        SECONDS[report.nodeid] += float(str(dict(report.user_properties)["processor_seconds"]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if skipped():
        terminalreporter.line(f"Pages were not looked at: {skipped()}")
    if not config.getoption("--processor-time"):
        return
    files: dict[str, float] = defaultdict(float)
    for test, seconds in SECONDS.items():
        files[test.partition("::")[0]] += seconds
    terminalreporter.section(f"{sum(SECONDS.values()):.0f} processor seconds")
    for table in (files, SECONDS):
        for name, seconds in sorted(table.items(), key=lambda entry: -entry[1])[:40]:
            terminalreporter.line(f"{seconds:8.2f}  {name}")
