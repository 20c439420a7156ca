"""Plans as files: they come back as they were, and what is not a plan is refused."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapas.errors import PlanError
from tapas.hardware.cluster_files import cluster_to_dict, load_cluster
from tapas.plan.assignment import Assignment, BlockDecision, OperatorDecision, OutputDecision, TensorDecision
from tapas.plan.fingerprint import BlockStructure, CopyStructure, GraphStructure
from tapas.plan.plan import MemoryPoint, Move, Operator, Plan, PlanBlock, load_plan, plan_from_dict
from tapas.plan.schema import ADDED
from tapas.report import plan_text
from tapas.report.html import View, page_html
from tapas.sharding.layout import B, R, S
from tapas.sharding.route import Hop
from tests.properties import examples

LISTS = {"operators": Operator, "moves": Move, "blocks": PlanBlock}
STEP = {"axes": ["x", "y"], "forward": "all_gather", "backward": "reduce_scatter", "nbytes": 8, "forward_seconds": 1e-5,
        "backward_seconds": 1e-5}  # fmt: skip


def small_assignment() -> Assignment:
    """Both layers do the same: the batch is split over one axis, features over the other."""
    block = BlockStructure(("fc: aten.linear.default(c0, w0)",), ("fc.weight 64x32",), ("0.0",), 0, 1)
    copies = CopyStructure(0, "layers.0", ()), CopyStructure(0, "layers.1", ())
    features, split = (B, S(0)), (S(0), S(1))
    gather = Hop((0,), S(0), B)
    operator = OperatorDecision(("d0", "n"), ((S(0), R), features), (split,), ((), (gather,)))
    decision = BlockDecision(
        "none", ((S(0), S(0)),), (), (operator,), (TensorDecision("0.0", split, ()),),
        (OutputDecision(0, False, False, split, ()),),
    )  # fmt: skip
    return Assignment((2, 4), GraphStructure((block,), copies, ((1, 0),)), (decision,), (0, 0))


def small_plan(**changes: Any) -> Plan:
    """A plan of two layers with one weight each, by hand."""
    weight = "layers.*.fc.weight"
    seconds = {
        "compute": 1.5e-3,
        "forward": 5e-4,
        "backward": 9e-4,
        "update": 1e-4,
        "communication": 5e-4,
        "hidden": 1e-4,
    }
    operator = Operator(
        "layers.*.fc",
        "aten.linear.default",
        ("d0", "n"),
        ("S(0)", "S(1)"),
        7e-4,
        0.0,
        2,
        "linear",
        "layers.*",
        roles=("batch", ""),
        weights=(weight,),
    )
    move = Move(
        weight, "layers.*.fc", ("S(0)", "S(0)"), ("B", "S(0)"), (STEP,), 8, 2.5e-4, 5e-5, 2, "layers.*", "weight"
    )
    fields: dict[str, Any] = {
        "model": "toy", "mesh": {"names": ["x", "y"], "sizes": [2, 4]}, "training": True, "inputs": {"x": [8, 16]},
        "cluster": cluster_to_dict(load_cluster("h100-sxm")), "cost": 2e-3, "bound": 2e-3, "proof": "optimal",
        "seconds": seconds, "parameters": {weight: ["S(0)", "S(0)"]}, "shapes": {weight: [64, 32]},
        "memory": {"weights": 1000, "gradients": 1000, "optimizer": 6000, "activations": 10**9, "buffers": 8},
        "operators": (operator,), "moves": (move,),
        "blocks": (PlanBlock("layers.*", 2, 1, 7e-4, 2.5e-4, ("layers.0", "layers.1")),),
        "baselines": {"ddp": {"cost": 4e-3, "ratio": 2.0, "seconds": {}, "memory": 10**9},
                      "hf": {"cost": None, "why": "none"}},
        "assignment": small_assignment(), "graph": {"operators": 2, "unique": 1, "trimmed": 0, "parameters": 4096},
    }  # fmt: skip
    return Plan(**{**fields, **changes})


def drawable_plan() -> Plan:
    """The same with all that a picture needs."""
    (operator,), (move,), (block,) = small_plan().operators, small_plan().moves, small_plan().blocks
    return small_plan(
        operators=(replace(operator, factors="d0 k, n k -> d0 n", operands=((8, 32), (64, 32)), results=((8, 64),)),),
        moves=(replace(move, copy=0, source="w0", reader=0),), blocks=(replace(block, numbers=(0, 1)),),
        timeline=(MemoryPoint("forward", 0, {"weights": 1}), MemoryPoint("backward", 1, {"weights": 2})),
    )  # fmt: skip


def test_a_saved_plan_comes_back(tmp_path: Path) -> None:
    plan = small_plan(pins=("layers.*=ddp",), warnings=("careful",), source={"model": "toy", "settings": {"a": "1"}})
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"], "no temporary file stays"


def test_a_file_without_pieces_has_one() -> None:
    data = json.loads(small_plan().to_json())
    assert data["assignment"].pop("pieces") == 1
    assert plan_from_dict(data) == small_plan()
    data["assignment"]["pieces"] = 4
    assert plan_from_dict(data).assignment.pieces == 4
    for wrong, words in ((0, "from 1 on"), ("two", "a whole number")):
        data["assignment"]["pieces"] = wrong
        with pytest.raises(PlanError, match=f"assignment.pieces is not .*{words}"):
            plan_from_dict(data)


def test_files_of_the_first_format_are_refused() -> None:
    data = json.loads(small_plan().to_json()) | {"version": 1}
    del data["assignment"]
    with pytest.raises(PlanError, match="has format 1, this TAPAS reads 3; make the plan again"):
        plan_from_dict(data)


def test_files_of_the_second_format_are_read() -> None:
    """They lack what only pictures need; what else is missing is still named."""
    plan = small_plan()
    data = json.loads(plan.to_json()) | {"version": 2}
    for kind, names in ADDED.items():
        (table,) = [t for t, of in (([data], Plan), *((data[k], v) for k, v in LISTS.items())) if of is kind]
        for entry in table:
            for name in names:
                del entry[name]
    assert plan_from_dict(data) == plan
    del data["moves"][0]["kind"]
    with pytest.raises(PlanError, match=r"moves\[0\] lacks kind"):
        plan_from_dict(data)


def test_places_that_are_not_there_are_refused() -> None:
    (move,), (block,) = small_plan().moves, small_plan().blocks
    point = MemoryPoint("forward", 0, {"weights": 1})
    for change, words in (
        ({"moves": (replace(move, copy=2),)}, "not a copy"),
        ({"moves": (replace(move, copy=0, reader=1),)}, "operator"),
        ({"blocks": (replace(block, numbers=(0, 9)),)}, "list of copies"),
        ({"timeline": (replace(point, copy=5),)}, "not a copy"), ({"timeline": (replace(point, phase="x"),)}, "one of"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=words):
            plan_from_dict(json.loads(small_plan(**change).to_json()))


def test_repr_is_short() -> None:
    assert repr(small_plan()) == "<Plan toy on 2x4 h100-sxm: 0.002 s a step, optimal>"


def test_an_old_file_survives_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(PlanError, match="No space left"):
        small_plan(model="other").save(path)
    assert path.read_text() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a plan file"), ("import torch", "not a plan file"), ('{"version": ', "is not JSON"),
        ("[]", "no version"), ("{}", "no version"), ('{"version": 4}', "format 4"),
        ('{"version": true}', "format True"), ('{"version": 2}', "lacks model"), ("[" * 100_000, "nested"),
    ],
)  # fmt: skip
def test_what_is_not_a_plan(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=words):
        load_plan(path)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("cost", "fast", "cost is not a number"), ("cost", float("nan"), "cost is not a number"),
        ("training", 1, "training is not true or false"), ("mesh", {"names": ["x"], "sizes": [0]}, "size 0"),
        ("parameters", {"w": ["S(0)"]}, "one state for each of 2 axes"),
        ("parameters", {"w": ["Q", "R"]}, "not a state"), ("baselines", {"ddp": {"cost": []}}, "baselines.ddp"),
        ("operators", [{}], "lacks module"), ("memory", {"weights": "much"}, "memory.weights is not a whole number"),
        ("assignment", {}, "assignment lacks mesh"), ("cluster", {}, "cluster"), ("more", 1, "unknown fields more"),
    ],
)  # fmt: skip
def test_damage_is_named(field: str, value: Any, words: str) -> None:
    data = {**json.loads(small_plan().to_json()), field: value}
    with pytest.raises(PlanError, match=words):
        plan_from_dict(data)


JUNK = st.sampled_from([None, True, 0, -1, 1.5, float("inf"), "", "S(0)", "S(x)", [], ["R"], {}, {"a": 1}])


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), JUNK)
def test_whatever_is_accepted_can_be_shown(data: st.DataObject, junk: Any) -> None:
    """Damage one place of a plan: it is refused with a PlanError, or it still prints."""
    whole = copy.deepcopy(json.loads(drawable_plan().to_json()))
    at: Any = whole
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(at[key], dict | list) and at[key]) or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = junk
    try:
        plan = plan_from_dict(whole)
    except PlanError:
        return
    assert plan_text(plan) and page_html([View(plan)])
