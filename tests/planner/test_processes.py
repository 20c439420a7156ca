"""Plans that have to fit, in real processes: threads hold parts of each other's tensors while they send."""

import pytest

from tapas.planner.fit import LimitedProblem
from tapas.planner.solution import Solution
from tapas.search import cost_of
from tests.planner.test_memory import CLOSE, limits
from tests.subjects import roomy_subject
from tests.verify.solved import examine_solution

# Small models with meshes on which a plan within a limit is found in seconds
QUICK = [("llama", "2")]
BINDING = [
    ("vit", "2"), ("gpt2", "2x2"), ("mixtral", "2x2"), ("resnet", "2x2"), ("bert", "4"),
    ("vit", "4"), ("llama", "4"), ("qwen3", "4"),
]  # fmt: skip


def frugal(family: str, mesh: str) -> tuple[LimitedProblem, Solution, float]:
    """The fastest plan, and a limit half way between what it needs and the least that any plan needs."""
    asked = limits(family, mesh, made=roomy_subject)
    fastest = asked.best()
    least = asked.fitting().smallest[0].nbytes
    return asked, fastest, (least + fastest.peak.nbytes) / 2


@pytest.mark.parametrize(
    ("family", "mesh"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in BINDING)]
)
def test_a_limit_that_binds(family: str, mesh: str) -> None:
    _, fastest, limit = frugal(family, mesh)
    asked = limits(family, mesh, limit, roomy_subject)
    found = asked.best()
    assert found.peak.nbytes <= limit < fastest.peak.nbytes
    assert fastest.answer.cost <= found.answer.bound <= found.answer.cost <= found.answer.bound * 1.01
    # the cost is that of the choices, copy by copy
    assert cost_of(asked.problem.network({}), found.answer.choices) == pytest.approx(found.answer.cost, rel=1e-9)
    report = examine_solution(roomy_subject(family), found, steps=2)
    assert report.ok
    used = report.memory["float32"]
    assert used.predicted_nbytes == pytest.approx(used.measured_nbytes, rel=CLOSE)
