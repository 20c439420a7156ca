"""The first of the modules that `make fuzz` tries."""

from collections.abc import Iterator

import pytest

from tests.faithful.generate import Node, case_of, generated, shrunk
from tests.faithful.ranks import thread_groups
from tests.faithful.run import Meshes, verdict

COUNT, QUICK = 50, 30  # the rest by `make test-full`
SEEDS = [pytest.param(seed, marks=pytest.mark.full if seed >= QUICK else ()) for seed in range(COUNT)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Meshes]:
    with thread_groups() as found:
        yield found


@pytest.mark.parametrize("seed", SEEDS)
def test_generated_module_is_the_original(seed: int, ranks: Meshes) -> None:
    program = generated(seed)
    found = verdict(case_of(program), program.setting, ranks)
    assert found.kind in ("passes", "unstable"), f"{program}: {found}"


def test_a_seed_is_a_program() -> None:
    assert generated(7) == generated(7) != generated(8)


def test_shrinking_keeps_what_fails() -> None:
    def fails(program) -> bool:
        return "linear" in program.body.names()

    program = next(p for p in map(generated, range(100)) if fails(p) and len(list(p.body.names())) > 6)
    assert shrunk(program, fails, tries=1000).body == Node("linear")
