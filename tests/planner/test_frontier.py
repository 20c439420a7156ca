"""The trade-off between step time and memory: what its points are, what is printed, drawn and saved."""

import builtins
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tapas.cost.collectives import ClusterRouter
from tapas.cost.memory import Optimizer
from tapas.errors import TapasError
from tapas.hardware.cluster_files import cluster_from_dict
from tapas.ir.fold import fold
from tapas.models.source import ModelSource
from tapas.plan.plan import load_plan, mesh_of, plan_from_dict
from tapas.planner.assignment import choices_of, followed
from tapas.planner.frontier import Frontier, FrontierPoint, check_folder, file_names, knees, plan_frontier
from tapas.planner.memory import MemoryModel
from tapas.planner.pipeline import within
from tapas.planner.request import Request
from tapas.problem.build import build_problem
from tapas.report import text_of
from tapas.report.frontier import draw_frontier, frontier_page, recomputed
from tapas.search import cost_of
from tests.cli.test_cli import MODEL, refused, run
from tests.distributed.small import EAGER

SETTINGS = {
    "num_hidden_layers": "5", "hidden_size": "64", "intermediate_size": "128", "num_attention_heads": "8",
    "num_key_value_heads": "4", "vocab_size": "256",
}  # fmt: skip
SOURCE = ModelSource("llama3-8b", 8, 64, SETTINGS)


def request(mesh: str = "2", **rest: Any) -> Request:
    return Request.of(mesh, EAGER, memory=None, **rest)


def traded(asked: Request, points: int) -> Frontier:
    graph, hints = SOURCE.capture(asked.training)
    return plan_frontier(graph, asked, points, hints).keeping(SOURCE.recorded_in)


@pytest.fixture(scope="module")
def graph():
    return SOURCE.capture(None)[0]


@pytest.fixture(scope="module")
def curve() -> Frontier:
    return traded(request(), 6)


# ----------------------------------------------------------------------------------------- the points


def check(curve: Frontier) -> None:
    sizes, seconds = [p.nbytes for p in curve.points], [p.seconds for p in curve.points]
    assert sizes == sorted(set(sizes)) and seconds == sorted(set(seconds), reverse=True), "none is dominated"
    for point in curve.points:
        assert 0 < point.plan.bound <= point.seconds and 0 <= point.gap < 1
        assert not point.plan.limit or point.nbytes <= point.plan.limit
    corners = [(p.nbytes, p.seconds) for p in curve.points if p.knee]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(corners)]
    assert slopes == sorted(set(slopes)), "convex"
    assert curve.points[0].knee and curve.points[-1].knee
    for point in curve.points:
        for a, b in pairwise(corners):
            if a[0] <= point.nbytes <= b[0]:
                chord = a[1] + (b[1] - a[1]) * (point.nbytes - a[0]) / (b[0] - a[0])
                assert point.seconds >= chord * (1 - 1e-12), "no point is below the hull"


def test_the_points_are_a_curve(curve: Frontier) -> None:
    check(curve)
    assert len(curve.points) == 6


def test_the_ends_are_the_fastest_and_the_most_frugal_plan(curve: Frontier, graph) -> None:
    limits = within(graph, request())
    fastest = limits.best()
    assert curve.points[-1].seconds == pytest.approx(fastest.answer.cost, rel=1e-9)
    assert curve.points[-1].plan.proof == "optimal"
    assert curve.points[0].nbytes <= limits.smallest().nbytes


def test_a_longer_search_respects_the_bounds(curve: Frontier, graph) -> None:
    point = curve.points[-2]
    found = within(graph, replace(request(), memory=point.plan.limit)).best()
    assert found.answer.cost >= point.plan.bound * (1 - 1e-9)
    assert found.answer.bound <= point.seconds * (1 + 1e-9)


@pytest.mark.full
def test_the_same_again(curve: Frontier) -> None:
    assert traded(request(), 6).to_dict() == curve.to_dict()


@pytest.mark.full
def test_fewer_points_where_there_are_no_more() -> None:
    alone = traded(request("1", recompute="none"), 6)
    assert len(alone.points) == 1 and alone.points[0].knee
    assert "fastest" in text_of(frontier_page(alone))
    check(traded(request(), 2))


def test_inference() -> None:
    found = traded(request(training=False), 3)
    check(found)
    assert not found.points[0].plan.training and all(not p.recomputed("block") for p in found.points)


def test_knees_of_known_points() -> None:
    assert knees([(0, 4), (1, 2), (2, 1), (3, 0.5)]) == [0, 1, 2, 3]
    assert knees([(0, 4), (1, 3.9), (2, 1), (3, 0.5)]) == [0, 2, 3]
    assert knees([(0, 3), (1, 2), (2, 1)]) == [0, 2], "what lies on a line is none"
    assert knees([(5, 1)]) == [0]


# ------------------------------------------------------------------------------------------ the files


def test_saved_plans_are_those_of_the_curve(curve: Frontier, graph, tmp_path: Path) -> None:
    curve.save(tmp_path / "new" / "folder")
    files = sorted((tmp_path / "new" / "folder").iterdir())
    assert [f.name for f in files] == list(curve.files)
    for file, point in zip(files, curve.files.values(), strict=True):
        assert load_plan(file).to_json() == point.plan.to_json()


def test_a_plan_that_is_followed_is_the_same(curve: Frontier, graph) -> None:
    """Also one that recomputes in some copies of a block only."""
    modes = [{b.recompute for b in p.plan.blocks if b.paths} for p in curve.points]
    assert any(len(m) > 1 for m in modes)
    for point in curve.points:
        plan = plan_from_dict(json.loads(point.plan.to_json()))
        folded = fold(graph)
        assignment = followed(plan, graph, folded)
        assert assignment == plan.assignment == point.plan.assignment
        optimizer = Optimizer(plan.optimizer, plan.master)
        problem = build_problem(folded, ClusterRouter(mesh_of(plan), cluster_from_dict(plan.cluster)), optimizer)
        choices = choices_of(problem, assignment)
        assert choices is not None and MemoryModel(problem).peak(choices).kinds == plan.memory
        assert cost_of(problem.network({}), choices) == pytest.approx(point.seconds, rel=1e-9)


def test_a_folder_with_something_in_it_is_left_alone(curve: Frontier, tmp_path: Path) -> None:
    (tmp_path / "plan-001GB.json").write_text("mine")
    with pytest.raises(TapasError, match="not empty"):
        curve.save(tmp_path)
    assert [f.read_text() for f in tmp_path.iterdir()] == ["mine"]
    for place in (tmp_path / "plan-001GB.json", tmp_path / "plan-001GB.json" / "below"):
        with pytest.raises(TapasError, match=r"is a file|cannot be written"):
            check_folder(place)


def test_names_sort_by_memory() -> None:
    assert file_names([8_000_000_000, 40_200_000_000]) == ["plan-008GB.json", "plan-040GB.json"]
    assert file_names([40_100_000_000, 40_400_000_000]) == ["plan-040.1GB.json", "plan-040.4GB.json"]
    assert file_names([9_000, 1_234_567]) == ["plan-000MB.json", "plan-001MB.json"]
    assert file_names([7]) == ["plan-007B.json"]
    sizes = [999, 1_000_000_000_001, 1_000_000_000_002]
    assert file_names(sizes) == sorted(file_names(sizes)) and len({*file_names(sizes)}) == 3


# --------------------------------------------------------------------------------- tables and pictures


def test_the_page_says_what_a_point_is(curve: Frontier) -> None:
    between = (curve.points[2].nbytes + curve.points[3].nbytes) / 2
    text = text_of(frontier_page(replace(curve, usable=between), Path("there")))
    rows = [line for line in text.splitlines() if line.endswith((" yes", " no"))]
    assert [row.endswith("yes") for row in rows] == [True] * 3 + [False] * 3
    assert all(row.startswith("◆") == point.knee for row, point in zip(rows, curve.points, strict=True))
    assert "fastest" in rows[-1] and "slower" in rows[0] and "in there: plan-" in text
    assert max(map(len, text.splitlines())) <= 110
    assert max(map(len, text_of(frontier_page(curve), 80).splitlines())) <= 80


def test_words_for_what_is_computed_again(curve: Frontier) -> None:
    plan = next(p.plan for p in curve.points if len(p.plan.blocks) > 1)
    block = next(b for b in plan.blocks if b.paths)

    def words(*modes: tuple[int, str]) -> str:
        blocks = tuple(replace(block, copies=copies, recompute=mode) for copies, mode in modes)
        return recomputed(FrontierPoint(replace(plan, blocks=blocks), 1.0, True))

    assert words((5, "none")) == "nothing"
    assert words((3, "none"), (2, "block")) == "2 of 5 blocks"
    assert words((3, "none"), (2, "selective")) == "2 of 5 blocks, all but products"
    assert words((3, "block"), (2, "selective")) == "5 of 5 blocks, 2 all but products"


def test_the_picture_shows_something(curve: Frontier, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    inside = replace(curve, usable=(curve.points[0].nbytes + curve.points[-1].nbytes) / 2)
    draw_frontier(inside, tmp_path / "curve.png")
    pixels = image.imread(tmp_path / "curve.png")
    assert pixels.shape[0] > 400 and pixels.shape[1] > 600
    ink = (pixels[..., :3].min(2) < 0.9).mean()
    assert 0.005 < ink < 0.5, "neither empty nor black"
    draw_frontier(inside, tmp_path / "curve.svg")
    drawing = (tmp_path / "curve.svg").read_text()
    assert drawing.startswith("<?xml") and "memory per device" in drawing and "slow" in drawing and "knees" in drawing
    draw_frontier(inside, tmp_path / "again.SVG")
    assert (tmp_path / "again.SVG").read_text() == drawing
    assert len(list(tmp_path.iterdir())) == 3


def test_without_matplotlib_there_is_a_remedy(curve: Frontier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def lacking(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return importing(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(TapasError, match=r"not installed; pip install 'tapas-parallel\[plot\]'"):
        draw_frontier(curve, tmp_path / "curve.png")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------ the command line


def test_the_command(tmp_path: Path) -> None:
    result = run("frontier", *MODEL, "--mesh", "2", "--points", 4, "-o", tmp_path / "plans", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data.keys() >= {"model", "mesh", "cluster", "training", "inputs", "pins", "usable_bytes", "points"}
    points = data["points"]
    assert 2 <= len(points) <= 4 and points[-1]["slower"] == 0.0
    for point in points:
        assert point.keys() == {
            "memory", "seconds", "slower", "bound", "gap", "limit", "knee", "fits", "file", "kinds", "stored",
            "recompute",
        }  # fmt: skip
        assert sum(point["kinds"].values()) == point["memory"] and point["fits"] and 0 < point["stored"] <= 1
        assert not point["knee"] or point["file"]
    files = [p["file"] for p in points if p["file"]]
    assert sorted(f.name for f in (tmp_path / "plans").iterdir()) == files == sorted(files)
    shown = run("show", tmp_path / "plans" / files[0])
    assert shown.exit_code == 0 and " per device is faster" in shown.stdout, "not just any plan"
    again = refused("frontier", *MODEL, "--mesh", "2x2", "-o", tmp_path / "plans")
    assert "is not empty; give a new folder" in again


def test_nonsense_is_refused(tmp_path: Path) -> None:
    common = ("frontier", *MODEL, "--mesh", "2x2")
    assert run(*common, "--points", 0).exit_code == 2 and run(*common, "--points", "many").exit_code == 2
    assert run(*common, "--memory", "40GB").exit_code == 2
    assert "end its name in .svg or .png" in refused(*common, "--plot", tmp_path / "curve.pdf")
    assert "end its name in .svg or .png" in refused(*common, "--plot", tmp_path / "curve")
    assert "the folder does not exist" in refused(*common, "--plot", tmp_path / "none" / "curve.svg")
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(*common, "-o", tmp_path / "file")
    assert "cannot be written to" in refused(*common, "-o", tmp_path / "file" / "below")
    assert "no mesh was given" in refused("frontier", *MODEL)
