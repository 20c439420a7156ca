"""One request: the same options in the same forms for every way of asking, and none beside a plan that is given."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tapas
from tapas.cost.memory import Optimizer
from tapas.errors import PlanError, TapasError
from tapas.hardware.cluster_files import load_cluster
from tapas.hardware.mesh import parse_mesh
from tapas.planner.request import Request, parse_pairs

PAIR = ("0.weight", "S(0)")
FORMS = {"dict": {PAIR[0]: PAIR[1]}, "texts": ["0.weight=S(0)"], "pairs": [PAIR], "spaces": [" 0.weight = S(0) "]}
INPUTS = (torch.zeros(8, 16),)
ASKING: dict[str, Callable[..., Any]] = {
    "plan": lambda model, **asked: tapas.plan(model, INPUTS, **asked),
    "verify": lambda model, **asked: tapas.verify(model, INPUTS, in_process=True, steps=1, **asked),
    "parallelize": lambda model, **asked: tapas.parallelize(model, INPUTS, **asked),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


@pytest.fixture(scope="module")
def plan() -> tapas.Plan:
    return tapas.plan(model(), INPUTS, mesh="2", pins=FORMS["dict"], baselines=False)


@pytest.fixture
def saved(plan: tapas.Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_pins(form: str) -> None:
    given: Any = FORMS[form]
    assert parse_pairs("pins", given) == (PAIR,)
    assert Request.of("2", pins=given, forbid=given) == Request.of("2", pins=[PAIR], forbid=[PAIR])
    plan = tapas.plan(model(), INPUTS, mesh="2", pins=given, baselines=False)
    assert plan.parameters["0.weight"] == ["S(0)"] and plan.source["pins"] == ["0.weight=S(0)"]
    assert tapas.verify(model(), INPUTS, mesh="2", pins=given, in_process=True, steps=1).ok


@pytest.mark.parametrize("given", ["0.weight=S(0)", ["0.weight"], ["=S(0)"], [("a", "b", "c")], 3, [3], {"a": 1}])
def test_what_is_no_pin(given: Any) -> None:
    for name in ("pins", "forbid"):
        with pytest.raises(PlanError, match=name):
            Request.of("2", **{name: given})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"mesh": None}, "no mesh"), ({"mesh": "0x2"}, "mesh"), ({"cluster": "h100-sx"}, "h100-sxm"),
        ({"memory": "much"}, "memory"), ({"memory": -1.0}, "memory"), ({"memory": True}, "memory"),
        ({"recompute": "som"}, "recompute"), ({"optimizer": "adm"}, "adam"), ({"baselines": ["dp"]}, "ddp"),
        ({"capacity": 0.9}, "capacity"), ({"capacity": "much"}, "capacity"),
    ],
)  # fmt: skip
def test_refused_before_any_work(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(TapasError, match=words):
        Request.of(**({"mesh": "2"} | asked))


def test_limits() -> None:
    assert Request.of("2", memory=None).limit is None is Request.of("2", memory="none").limit
    assert Request.of("2", memory="40GB").limit == 40e9 == Request.of("2", memory=40e9).limit
    assert Request.of("2").limit == 0.9 * load_cluster("h100-sxm").device.memory_bytes


def test_a_plan_keeps_what_was_asked() -> None:
    asked = Request.of(
        {"dp": 2}, training=False, pins=[PAIR], forbid={"0": "batch"}, batch_split=False, memory=None,
        optimizer=Optimizer("sgd", False), recompute="none", time_limit=2.5, capacity=1.25,
    )  # fmt: skip
    again = Request.from_dict(asked.to_dict(), parse_mesh("dp=2"), load_cluster("h100-sxm"))
    assert again.to_dict() == asked.to_dict() and again.limit is None and again.optimizer == asked.optimizer
    with pytest.raises(TypeError):
        Request.from_dict({"piins": []}, parse_mesh("2"), load_cluster("h100-sxm"))


def test_the_same_names_everywhere() -> None:
    wanted = set(inspect.signature(Request.of).parameters) - {"baselines", "tp_plan"}  # which `tapas plan --from` reads
    for function in (tapas.plan, tapas.verify, tapas.parallelize):
        parameters = inspect.signature(function).parameters
        if function is not tapas.plan:  # ranks that stop by the clock would stop with different plans
            wanted -= {"time_limit"}
            assert "time_limit" not in parameters
        assert wanted <= set(parameters), function
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values()), "an unknown one is a TypeError"


@pytest.mark.parametrize("name", ASKING)
def test_an_unknown_option(name: str) -> None:
    with pytest.raises(TypeError, match="pinns"):
        ASKING[name](model(), mesh="2", pinns={})


@pytest.mark.parametrize("name", ["verify", "parallelize"])
@pytest.mark.parametrize(
    "asked",
    [
        {"pins": {"*": "ddp"}}, {"pins": None}, {"forbid": ["0=batch"]}, {"cluster": "h100-sxm"}, {"memory": "device"},
        {"training": False}, {"batch_split": True}, {"optimizer": "sgd"}, {"recompute": "auto"},
    ],
)  # fmt: skip
def test_options_beside_a_plan(name: str, asked: dict[str, Any], plan: tapas.Plan) -> None:
    with pytest.raises(PlanError, match=f"{next(iter(asked))}: the plan that is given has decided this already; leave"):
        ASKING[name](model(), mesh="2", plan=plan, **asked)


@pytest.mark.parametrize("name", ["verify", "parallelize"])
def test_another_mesh_than_the_plans(name: str, plan: tapas.Plan, saved: Path) -> None:
    for given in (plan, saved, str(saved)):
        with pytest.raises(PlanError, match="mesh 4: the plan is for a mesh of 2; make"):
            ASKING[name](model(), mesh="4", plan=given)
    with pytest.raises(PlanError, match="plan: is a dict; give a Plan"):
        ASKING[name](model(), mesh="2", plan=plan.to_dict())


def test_a_plan_by_its_path(plan: tapas.Plan, saved: Path) -> None:
    for given in (plan, saved, str(saved)):
        report = tapas.verify(model(), INPUTS, plan=given, in_process=True, steps=1)
        assert report.ok and report.mesh.sizes == (2,)
    with pytest.raises(PlanError, match="no such file"):
        tapas.verify(model(), INPUTS, plan=saved.with_name("none.json"))


def test_a_saved_plan_runs(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    original, given = model(), (torch.randn(8, 16),)
    tapas.plan(original, given, mesh="1", baselines=False).save(path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for plan in (path, str(path), tapas.load_plan(path)):
            parallel = tapas.parallelize(model(), given, mesh="1", plan=plan)
            assert torch.equal(parallel(*given).full_tensor(), original(*given))
    finally:
        dist.destroy_process_group()
