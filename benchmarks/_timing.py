"""How the benchmarks take their times."""

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

from tapas.cost.collectives import ClusterRouter
from tapas.hardware.cluster_files import load_cluster
from tapas.hardware.mesh import parse_mesh
from tapas.ir.fold import fold
from tapas.ir.graph import Graph
from tapas.planner.fit import search
from tapas.planner.solution import Solution
from tapas.problem.build import build_problem
from tapas.problem.problem import Problem

CLUSTER = "h100-sxm"
Clock = Callable[[], float]
Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


def timed(work: Callable[[], Made], clock: Clock = time.perf_counter) -> tuple[float, Made]:
    gc.collect()  # what earlier rounds left behind is not this one's work
    start = clock()
    made = work()
    return clock() - start, made


def in_turn(
    works: Mapping[Key, Callable[[], Any]], rounds: int, clock: Clock = time.perf_counter
) -> dict[Key, list[float]]:
    """Seconds of every round, the best one first: all of them in every round, so that a busy moment of the machine
    hits none alone."""
    seconds: dict[Key, list[float]] = {key: [] for key in works}
    for _ in range(rounds):
        for key, work in works.items():
            seconds[key].append(timed(work, clock)[0])
    return {key: sorted(some) for key, some in seconds.items()}


def span(seconds: list[float], digits: int = 2) -> str:
    """The best round, and the worst one in brackets."""
    low, high = f"{min(seconds):.{digits}f}", f"{max(seconds):.{digits}f}"
    return f"{low} ({high})" if len(seconds) > 1 else low


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median, and where it is in 95 % of all samples that are drawn from these."""
    numbers = torch.randint(len(ratios), (4000, len(ratios)), generator=torch.Generator().manual_seed(0))
    medians = torch.tensor(ratios)[numbers].median(1).values
    low, high = torch.quantile(medians, torch.tensor([0.025, 0.975])).tolist()
    return statistics.median(ratios), low, high


def planned(
    graph: Graph, mesh: str, clock: Clock = time.perf_counter
) -> tuple[tuple[float, float, float], Problem, Solution]:
    """One round of everything after capture, with nothing cached from the round before."""
    folding, folded = timed(lambda: fold(graph), clock)
    building, problem = timed(
        lambda: build_problem(folded, ClusterRouter(parse_mesh(mesh), load_cluster(CLUSTER))), clock
    )
    searching, solution = timed(lambda: search(problem), clock)
    return (folding, building, searching), problem, solution
