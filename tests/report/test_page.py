"""The page's data, what is escaped in it, the command that makes a plan again, and what a notebook shows."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tapas.hardware.cluster_files import cluster_to_dict, load_cluster
from tapas.plan.plan import load_plan
from tapas.planner.explain import Alternative, ExplainedOperator, ExplainedVariable, WhatIf
from tapas.report.html import Findings, View, notebook_html, page_html
from tapas.report.html.command import command
from tapas.report.html.graph import operators_by_block
from tapas.report.html.page import json_text
from tapas.report.html.slices import ranges
from tapas.report.words import steps
from tests.cli.test_cli import MODEL, refused, run
from tests.plan.test_plan import drawable_plan, small_plan
from tests.report import browser


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert run("plan", *MODEL, "--mesh", "2x4", "--pin", "*=megatron", "-o", path).exit_code == 0
    return path


@pytest.fixture(scope="module")
def data(llama: Path) -> dict:
    return View(load_plan(llama)).data()


def test_operators_are_wired_as_in_the_model(data: dict) -> None:
    layer = next(block for block in data["blocks"] if block["copies"] == 2)
    names = [op["name"] for op in layer["operators"]]
    attention = next(op for op in layer["operators"] if op["kind"] == "attention")
    assert attention["shown"] and attention["split"].startswith("batch over x, heads over y")

    def makers(number: int) -> set[str]:
        """The weights that an operator depends on, through what has none."""
        op = layer["operators"][number]
        if op["weights"]:
            return set(op["weights"])
        read = [o["from"] for o in op["operands"] if o["from"][0].isdigit()]
        return {name for reference in read for name in makers(int(reference.split(".")[0]))}

    number = layer["operators"].index(attention)
    assert makers(number) == {f"self_attn.{part}_proj" for part in "qkv"}
    query = layer["operators"][names.index("self_attn.q_proj")]
    weight = query["operands"][1]
    assert weight["from"] == "w1" and weight["shape"] == [256, 256] and weight["local"] == [64, 256]
    assert layer["weights"][1] == {"name": "self_attn.q_proj", "shape": "256 × 256"}


def test_every_move_of_the_plan_is_drawn_once(llama: Path, data: dict) -> None:
    """On the edge to its reader, or where all readers find the tensor."""
    plan = load_plan(llama)
    drawn = [m for b in data["blocks"] for moves in b["shared"].values() for m in moves]
    drawn += [m for b in data["blocks"] for op in b["operators"] for o in op["operands"] for m in o["moves"]]
    sent = [m for m in plan.moves if steps(m, "forward") or steps(m, "backward")]
    assert sum(m["copies"] * m["seconds"] for m in drawn) == pytest.approx(sum(m.copies * m.seconds for m in sent))
    assert len(drawn) == len(sent) > 0


def test_blocks_are_linked_from_first_to_last(data: dict) -> None:
    links = {(link["from"], link["to"]): link["times"] for link in data["links"]}
    layers = next(i for i, block in enumerate(data["blocks"]) if block["copies"] == 2)
    assert links[layers, layers] == 1 and any(to == layers for _, to in links if _ != layers)


def test_seconds_of_blocks_add_up_to_the_step(llama: Path) -> None:
    view = View(load_plan(llama))
    assert sum(b.total for b in view.blocks) + view.plan.seconds["update"] == pytest.approx(view.plan.cost)
    assert sum(b.hidden for b in view.blocks) == pytest.approx(view.plan.seconds["hidden"])


def test_slices_cover_a_dim_once() -> None:
    held = ranges(10, (), [2, 2])
    assert [r for place in held for r in place] == [[0, 3], [3, 5], [5, 8], [8, 10]]
    assert ranges(6, ((3, 1), (3, 1)), [3])[1] == [[1, 2], [4, 5]], "part by part"


def test_alternatives_belong_to_all_blocks_of_their_copies(llama: Path) -> None:
    plan = load_plan(llama)
    layer = next(i for i, b in enumerate(plan.blocks) if b.copies == 2)
    other = Alternative("x", "whole", 2 * plan.cost, {}, None, 0.0, 10**12)
    never = Alternative("y", "batch", None, {}, None, 0.0)
    subject = ExplainedVariable("q", "aten.linear.default", 2, (1,), ("batch",), (other, never))
    tried = WhatIf(plan.cost, (ExplainedOperator(plan.blocks[layer].numbers, 8, subject),), 3, 1.0)
    view = View(plan, Findings(what_if=tried))
    (found,) = view.data()["alternatives"]
    assert (found["block"], found["operator"]) == (layer, 8)
    assert [(a["does"], a["cost"]) for a in found["others"]] == [("whole", 2 * plan.cost), ("batch", None)]
    assert "1 s were not enough for 3 of them" in view.untried
    assert "need the model" in View(plan).untried and "need the model" in View(small_plan()).untried


def test_names_cannot_end_the_script_or_the_markup() -> None:
    text = json_text({"a": "</script><!-- & \u2028\u2029"})
    assert not set(text) & {"<", ">", "&", "\u2028", "\u2029"}
    assert json.loads(text) == {"a": "</script><!-- & \u2028\u2029"}
    evil = "</script><script>alert(1)</script>"
    page = page_html([View(small_plan(model=evil, warnings=(evil,)))])
    assert evil not in page and "&lt;/script&gt;&lt;script&gt;" in page


def test_a_page_is_one_file(llama: Path) -> None:
    page = page_html([View(load_plan(llama))])
    outside = re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*|@import|https?://(?!www\.w3\.org)[\w./-]+""", page)
    assert [link for link in outside if "github.com" not in link] == [], "licences name their homes, nothing is loaded"
    assert "MIT" in page and "dagre" in page and "Content-Security-Policy" in page


def test_plans_that_say_less_have_a_page_all_the_same() -> None:
    """One of an older format, one for inference on one axis, one that was changed by hand."""
    assert "does not say enough to draw the model" in page_html([View(small_plan())])
    whole = drawable_plan()
    (op,) = whole.operators
    assert View(whole).drawable and [len(ops) for ops in operators_by_block(whole)] == [1]
    assert not View(replace(whole, operators=(replace(op, target="aten.mm.default"),))).drawable
    assert page_html([View(whole), View(small_plan(memory={"weights": 10**12}), letter="b")]).count("Does not fit") == 1


def test_inference(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = run("plan", *MODEL, "--mesh", "2", "--inference", "--no-baselines", "-o", path)
    assert done.exit_code == 0, done.output
    plan = load_plan(path)
    assert {point.phase for point in plan.timeline} == {"forward"}
    assert max(sum(p.nbytes.values()) for p in plan.timeline) == sum(plan.memory.values())
    assert "inference on" in page_html([View(plan)])


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_makes_the_same_plan_again(llama: Path, tmp_path: Path) -> None:
    words = shlex.split(command(load_plan(llama)))
    assert words[:2] == ["tapas", "plan"] and "*=megatron" in words
    assert run(*words[1:], "-o", tmp_path / "again.json").exit_code == 0
    assert load_plan(tmp_path / "again.json") == load_plan(llama)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"model": "m", "batch": 4, "memory": 4e10, "training": False},
         "--batch 4 --inference --memory 40000000000.0B"),
        ({"model": "my file.py:f", "master": False, "batch_split": False}, "'my file.py:f' --mesh 2x4"),
        ({"model": "m", "optimizer": "sgd", "recompute": "block", "memory": "none"},
         "--memory none --optimizer sgd --recompute block"),
        ({"pins": ["*=ddp"], "training": None, "memory": "device"},
         "tapas.plan(model, inputs, mesh={'x': 2, 'y': 4}, cluster='h100-sxm', pins=['*=ddp'])"),
    ],
)  # fmt: skip
def test_commands(source: dict, text: str) -> None:
    assert text in command(small_plan(source=source))


def test_a_cluster_that_is_no_preset_is_a_file() -> None:
    own = cluster_to_dict(load_cluster("h100-sxm")) | {"per_node": 4}
    assert "--cluster h100-sxm.toml" in command(small_plan(source={"model": "m"}, cluster=own))


# ---------------------------------------------------------------------------------------- command line, notebook


def test_reports_of_plans(llama: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("report", llama, "-o", page).stdout.endswith(f"Report written to {page}\n")
    assert "need the model" in page.read_text()
    assert run("report", llama, llama, "-o", page).exit_code == 0
    assert "Both plans split every weight and every operator alike" in page.read_text()


def test_what_no_report_can_be_written_of(llama: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert "the folder does not exist" in refused("report", llama, "-o", tmp_path / "no" / "page.html")
    assert "is for one plan" in refused("report", llama, llama, "-o", page, "--curve", "4")
    assert "no such file" in refused("report", tmp_path / "none.json", "-o", page)
    assert "no mesh was given" in refused("report", "llama3-8b", "-o", page)
    assert not page.exists()


OWN = """
import torch
from torch import nn

class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def make():
    return Trained(), (torch.zeros(4096, 1024),)
"""


def test_meshes_and_curve_and_alternatives(tmp_path: Path) -> None:
    page, own = tmp_path / "page.html", tmp_path / "own.py"
    own.write_text(OWN)
    done = run("plan", f"{own}:make", "--devices", "4", "--no-baselines", "--report", page)
    assert done.exit_code == 0 and done.stdout.endswith(f"Report written to {page}\n"), done.output
    assert "All meshes of 4 devices" in page.read_text()
    done = run("report", f"{own}:make", "--mesh", "2", "-o", page, "--curve", "2", "--alternatives", "20")
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "Step time against memory" in text and '"alternatives":[{' in text


def test_a_notebook_shows_a_plan() -> None:
    html = small_plan(model="<toy>")._repr_html_()
    assert html == notebook_html(small_plan(model="<toy>"))
    assert "&lt;toy&gt;" in html and "proven optimal" in html and "<script" not in html and "layers.*" in html


def test_a_browser_that_is_required_and_missing_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """`.ci/run` must not be green because nothing was looked at."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("TAPAS_BROWSER", "required")
    assert browser.skipped() == ""
    with pytest.raises(RuntimeError, match="not installed"), browser.browser():
        pass
    monkeypatch.delenv("TAPAS_BROWSER")
    assert "not installed" in browser.skipped()
