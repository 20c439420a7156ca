"""All meshes ranked: in order, with plans that are what they claim, and with reasons where there is none."""

import json
from dataclasses import replace
from functools import cache

import pytest

from tapas.capture import capture
from tapas.cost.collectives import ClusterRouter
from tapas.errors import PlanError
from tapas.hardware.cluster import Link
from tapas.hardware.mesh import Mesh, factorizations
from tapas.ir.fold import fold
from tapas.planner.device_sweep import parse_sweep
from tapas.planner.fit import search
from tapas.planner.mesh_ranking import best_of, rank_meshes, seeds
from tapas.planner.pipeline import plan_graph
from tapas.planner.request import Request
from tapas.planner.solution import Solution
from tapas.problem.build import build_problem
from tapas.search import SearchAnswer
from tests.cli.test_cli import MODEL, refused, run
from tests.distributed.small import EAGER, small


@cache
def graph_of(family: str):
    model, inputs = small(family)
    return capture(model, inputs, name=family)


@cache
def ranked(family: str, devices: int, limit: float | None = None):
    return rank_meshes(graph_of(family), factorizations(devices), Request.of(str(devices), EAGER, memory=limit))


def costs(rows):
    return [row.cost for row in rows if row.cost is not None]


def test_all_meshes_in_order() -> None:
    rows = ranked("llama", 8)
    assert {row.mesh for row in rows} == set(factorizations(8))
    assert len(costs(rows)) == 4 and costs(rows) == sorted(costs(rows))
    assert all(len(row.axes) == len(row.mesh.sizes) for row in rows)


@pytest.mark.parametrize("family", ["llama", "gpt2", "packed"])
def test_the_quick_search_is_close(family: str) -> None:
    """2 KV heads, or 5 heads, over 8 devices: the plans of all meshes, against everything there is."""
    folded = fold(graph_of(family))
    for row in ranked(family, 8):
        exact = search(build_problem(folded, ClusterRouter(row.mesh, EAGER))).answer
        assert row.cost is not None and exact.bound * (1 - 1e-9) <= row.cost <= 1.05 * exact.cost, str(row.mesh)


def test_a_row_is_the_plan_it_claims_to_be() -> None:
    free = ranked("deep_llama", 4)
    limit = 0.85 * free[0].nbytes
    for row in ranked("deep_llama", 4, limit):
        assert row.start is not None and row.nbytes <= limit
        solution = Solution(row.start.problem, SearchAnswer(row.start.choices, row.cost, 0.0, False))
        kinds = solution.seconds()
        assert sum(kinds.values()) - kinds["hidden"] == pytest.approx(row.cost)
        assert solution.peak.nbytes <= row.nbytes


def test_the_best_mesh_is_planned_as_if_alone() -> None:
    best = best_of(ranked("llama", 8))
    request = Request.of(best.mesh, EAGER, baselines=False, memory=None)
    alone = plan_graph(graph_of("llama"), request)
    known = plan_graph(graph_of("llama"), request, start=best.start)
    assert known.cost == pytest.approx(alone.cost) and known.cost <= best.cost * (1 + 1e-9)


def test_a_limit_that_binds() -> None:
    free = ranked("deep_llama", 4)
    limit = 0.85 * free[0].nbytes
    rows = ranked("deep_llama", 4, limit)
    best = best_of(rows)
    assert best.cost >= free[0].cost and best.nbytes <= limit
    request = Request.of(best.mesh, EAGER, memory=limit, baselines=False)
    plan = plan_graph(graph_of("deep_llama"), request, start=best.start)
    assert plan.cost <= best.cost * (1 + 1e-9) and sum(plan.memory.values()) <= limit


def test_meshes_without_a_plan_are_listed() -> None:
    rows = ranked("llama", 4, 1000.0)
    assert costs(rows) == [] and all("does not fit" in row.why and row.nbytes > 1000 for row in rows)
    assert [row.nbytes for row in rows] == sorted(row.nbytes for row in rows)
    with pytest.raises(PlanError, match="no plan fits on any of the 2 meshes: the smallest needs"):
        best_of(rows)


def test_pins_that_only_some_meshes_take() -> None:
    pins = [("model.layers.*.mlp.down_proj.weight", "[R, S(1)]")]
    rows = rank_meshes(graph_of("llama"), factorizations(4), Request.of("4", EAGER, memory=None, pins=pins))
    assert [str(row.mesh) for row in rows if row.cost is not None] == ["2x2"]
    assert "2 states for 1 mesh axes" in rows[-1].why


def test_seeds_lie_over_the_nodes() -> None:
    assert seeds(factorizations(64), EAGER) == [Mesh((64,)), Mesh((8, 8))]
    assert seeds(factorizations(8), EAGER) == [Mesh((8,)), Mesh((4, 2))]
    assert seeds(factorizations(7), EAGER) == [Mesh((7,))] and seeds(factorizations(1), EAGER) == [Mesh((1,))]


# ----------------------------------------------------------------------------------- what does not pay


def slower(bytes_per_s: float):
    return replace(EAGER, intra=Link(bytes_per_s, 0.0), inter=Link(bytes_per_s, 0.0))


@pytest.mark.parametrize(
    "bytes_per_s, what", [(1e8, "every matrix product on the batch only"), (1e6, "no matrix product at all")]
)
def test_slow_links_leave_little_to_split(bytes_per_s: float, what: str) -> None:
    links = f"with links of {bytes_per_s / 1e9:.3g} GB/s and operators as short as these"
    words = f"{links}: the best plan splits {what}; megatron takes"
    warned = plan_graph(
        graph_of("vit"), Request.of("2", slower(bytes_per_s), memory=None, baselines=["megatron"])
    ).warnings[-1]
    assert warned.startswith(f"tensor parallelism cannot pay {words}")


@pytest.mark.parametrize("bytes_per_s, pins", [(1e13, []), (1e8, [("*", "ddp")])])
def test_no_word_where_it_pays_or_is_not_wanted(bytes_per_s: float, pins: list) -> None:
    plan = plan_graph(graph_of("vit"), Request.of("2", slower(bytes_per_s), memory=None, baselines=False, pins=pins))
    assert not any("tensor parallelism" in warning for warning in plan.warnings)


# ------------------------------------------------------------------------------- on the command line


def test_devices_without_a_mesh(tmp_path) -> None:
    path = tmp_path / "best.json"
    result = run("plan", *MODEL, "--devices", "4", "--no-baselines", "-o", path)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Meshes of 4 devices, outermost axis first: 2 in all")
    assert "Step time" in result.stdout and max(map(len, result.stdout.splitlines())) <= 110
    saved = json.loads(path.read_text())
    assert "meshes" not in saved
    alone = run("plan", *MODEL, "--mesh", "x".join(map(str, saved["mesh"]["sizes"])), "--no-baselines", "--json")
    assert json.loads(alone.stdout)["cost"] == pytest.approx(saved["cost"])


def test_json_has_meshes_and_plan() -> None:
    result = run("plan", *MODEL, "--nodes", "2", "--per-node", "2", "--no-baselines", "--json")
    data = json.loads(result.stdout)
    assert {row["mesh"]["sizes"][0] for row in data["meshes"]} == {4, 2} and len(data["meshes"]) == 2
    assert data["cluster"]["per_node"] == 2
    assert data["mesh"] == data["meshes"][0]["mesh"]
    assert all(set(row) == {"mesh", "cost", "memory", "axes", "why"} for row in data["meshes"])


def test_nonsense_is_refused() -> None:
    assert "--devices 0" in refused("plan", *MODEL, "--devices", "0")
    assert "the mesh takes 4 devices" in refused("plan", *MODEL, "--devices", "8", "--mesh", "2x2")
    assert "leave one of them out" in refused("plan", *MODEL, "--devices", "8", "--nodes", "3")
    assert "no mesh was given" in refused("plan", *MODEL)


# ------------------------------------------------------------------------------------------ sweeps


def test_a_sweep_is_a_table_with_bars_and_a_plot(tmp_path) -> None:
    path = tmp_path / "scaling.svg"
    result = run("plan", *MODEL, "--sweep", "devices=1,2,4", "--plot", path)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("The best mesh for each number of devices")
    assert [line.split()[:2] for line in lines[3:6]] == [["1", "1"], ["2", "2"], ["4", lines[5].split()[1]]]
    assert "█" in result.stdout and f"Plot written to {path}" in result.stdout.replace("\n", " ")
    drawn = path.read_text()
    assert "<svg" in drawn and run("plan", *MODEL, "--sweep", "devices=1,2,4", "--plot", path).exit_code == 0
    assert path.read_text() == drawn, "two runs draw the same"


def test_sweep_json() -> None:
    rows = json.loads(run("plan", *MODEL, "--sweep", "devices=1,2", "--json").stdout)["sweep"]
    assert [row["devices"] for row in rows] == [1, 2] and rows[0]["speedup"] == rows[0]["efficiency"] == 1.0
    assert rows[1]["efficiency"] == pytest.approx(rows[1]["speedup"] / 2)
    assert rows[1]["speedup"] == pytest.approx(rows[0]["cost"] / rows[1]["cost"])


def test_a_sweep_says_where_nothing_fits() -> None:
    result = run("plan", *MODEL, "--sweep", "devices=1,2", "--memory", "1MB")
    assert result.exit_code == 0 and result.stdout.count("does not fit into 0.001 GB") == 2


@pytest.mark.parametrize(
    "text, found",
    [("devices=8", [8]), ("devices = 1, 3,5", [1, 3, 5]), ("devices=8,16,...,128", [8, 16, 32, 64, 128]),
     ("devices=1,2,3,9,…,81", [1, 2, 3, 9, 27, 81]), ("devices=2,4,...,8", [2, 4, 8])],
)  # fmt: skip
def test_numbers_of_a_sweep(text: str, found: list[int]) -> None:
    assert parse_sweep(text) == found


@pytest.mark.parametrize(
    "text, words",
    [("foo", "is not devices=N,N"), ("nodes=1,2", "is not devices=N,N"), ("devices=", "'' is not a number"),
     ("devices=0,1", "'0' is not a number"), ("devices=8,...,16", "from two numbers"),
     ("devices=8,16,...", "have to increase"), ("devices=16,8", "have to increase"),
     ("devices=4,4", "have to increase"), ("devices=4,6,...,12", "not clear how 4, 6 goes on"),
     ("devices=1,2,...,7", "does not come to 7; end it with 8")],
)  # fmt: skip
def test_nonsense_of_a_sweep(text: str, words: str) -> None:
    assert words in refused("plan", *MODEL, "--sweep", text)


def test_a_sweep_stands_alone(tmp_path) -> None:
    for more in (["--mesh", "2"], ["--devices", "2"], ["-o", tmp_path / "plan.json"]):
        assert "leave out --mesh" in refused("plan", *MODEL, "--sweep", "devices=1,2", *more)
    assert "there is no sweep" in refused("plan", *MODEL, "--mesh", "2", "--plot", tmp_path / "x.svg")
    assert "end its name in .svg" in refused("plan", *MODEL, "--sweep", "devices=1,2", "--plot", tmp_path / "x.txt")


def test_what_is_over_one_axis_leaves_something_for_the_others() -> None:
    """One axis deals out positions, and nothing else: on three axes that is no choice at all."""
    meshes = [Mesh((8,)), Mesh((2, 4)), Mesh((4, 2)), Mesh((2, 2, 2))]
    rows = rank_meshes(graph_of("volumes"), meshes, Request.of("8", EAGER, memory=None))
    assert len(rows) == 4 and all(row.cost is not None for row in rows)
