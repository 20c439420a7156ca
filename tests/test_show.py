"""The printed plan: golden text of a real one, and the words for what it may say."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from test_cli import MODEL, run
from test_plans import small_plan

from tapas.compare import compare
from tapas.plans import Move, PlanBlock
from tapas.show import plan_text, print_plan, units
from tapas.show.words import part_words, steps, storage, traffic

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plan_llama_tiny", (*MODEL, "--mesh", "2x4")),
        ("plan_llama_tp", ("llama3-8b", "--set", "num_hidden_layers=2", "--mesh", "tp=4", "--no-batch-split")),
    ],
)
def test_golden(name: str, options: tuple[str, ...]) -> None:
    """A change of rules, costs or words is a readable diff. Accept it with TAPAS_UPDATE_GOLDEN=1."""
    text, path = run("plan", *options).stdout, GOLDEN / f"{name}.txt"
    if os.environ.get("TAPAS_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_words_of_a_small_plan() -> None:
    text = plan_text(small_plan(warnings=("no rule for aten.odd",)))
    assert "Step time 2.00 ms = compute 1.50 ms + communication 500 µs (100 µs more is hidden" in text
    assert "Optimal: by this cost model no other plan is faster" in text
    assert "layers.* × 2" in text and "batch over x" in text and "output features over y" in text
    assert "gather, scatter grads (x)" in text and "all-gather (x,y)" in text
    assert "2.0 times as long" in text and "not applicable: none" in text and "fits" in text
    assert text.endswith("warning: no rule for aten.odd")


def test_a_gap_and_pins_are_said() -> None:
    text = plan_text(small_plan(bound=1.9e-3, proof="gap 0.0001 s (5.00%)", pins=("fc=ddp",)))
    assert "Within 5.00% of the best possible: no plan among those your pins leave is faster than 1.90 ms" in text


def test_too_much_memory_is_said() -> None:
    assert "does NOT fit" in plan_text(small_plan(memory={"weights": 10**12}))


def test_many_weights_treated_alike_share_a_row() -> None:
    (op,) = small_plan().operators
    names = [f"fc{i}.weight" for i in range(70)]
    text = plan_text(
        small_plan(
            parameters={name: ["R", "R"] for name in names[1:]} | {names[0]: ["R", "S(0)"]},
            operators=tuple(replace(op, weights=(name,), block="") for name in names),
            moves=(),
        )
    )
    assert "69 weights such as fc1" in text and "dim 0 over y" in text and "fc2" not in text


def test_tied_weights_share_a_row() -> None:
    weight = "layers.*.fc.weight"
    parameters = {weight: ["S(0)", "S(0)"], "head.weight": ["S(0)", "S(0)"]}
    text = plan_text(small_plan(parameters=parameters, tied={"head.weight": weight}))
    assert "(= head.weight)" in text and "\nhead" not in text


def test_colours_only_where_there_are_any() -> None:
    console = Console(width=110, force_terminal=True, color_system="truecolor", record=True, quiet=True)
    print_plan(small_plan(), console)
    assert "\x1b[" not in plan_text(small_plan())


def test_names_with_brackets_are_not_markup() -> None:
    assert "[bold]odd[/bold]" in plan_text(small_plan(model="[bold]odd[/bold]"))


@pytest.mark.parametrize(
    ("target", "option", "role", "result", "words"),
    [
        ("aten.linear.default", "n", "", "S(2)", "output features"),
        ("aten.linear.default", "k", "", "P", "input features"),
        ("aten.linear.default", "d0", "batch", "S(0)", "batch"),
        ("aten.linear.default", "P0", "", "P", "partial sums"),
        ("aten.linear.default", "B", "", "B", ""),
        ("aten.scaled_dot_product_attention.default", "h|25/1", "", "S(1)", "heads"),
        ("aten.mul.Tensor", "d2", "", "S(2)", "result dim 2"),
        ("aten.mean.dim", "d2", "", "P", "what it sums up"),
    ],
)
def test_work_in_words(target: str, option: str, role: str, result: str, words: str) -> None:
    assert part_words(target, option, role, result) == words


def test_storage_and_traffic_in_words() -> None:
    assert storage(["R", "R"], "xy") == "whole"
    assert storage(["S(0)", "S(0)"], "xy") == "dim 0 over x,y"
    assert storage(["R", "S(0|3x1600/64)"], "xy") == "dim 0 of each of 3 parts over y"
    step = {"axes": ["x"], "forward": "none", "backward": "all_reduce"}
    move = Move("w", "m", ("R", "S(0)"), ("B", "S(0)"), (step,), 8, 0.0, 0.0, 1)
    assert traffic([move], "xy") == "add up grads (x)" and traffic([], "xy") == "nothing"
    assert steps(move, "forward") == "" and steps(move, "backward") == "all-reduce (x)"


def test_units() -> None:
    assert [units.seconds(s) for s in (1.63, 0.0393, 1.8e-5, 0.0)] == ["1.63 s", "39.3 ms", "18.0 µs", "0"]
    assert [units.nbytes(b) for b in (4, 8192, 117440512, 132e9)] == ["4 B", "8.19 kB", "117 MB", "132 GB"]
    assert [units.slower(r) for r in (1.0, 1.21, 1.002, 0.97, 3.0)] == [
        "as fast", "21 % slower", "0.2 % slower", "3.0 % faster", "3.0 times as long",
    ]  # fmt: skip
    assert units.count(8030261248) == "8.03B" and units.shape([2, 3]) == "2 × 3"


def test_compare_sees_through_groupings() -> None:
    """`layers.*` in one plan and `layers.0`, `layers.1` in another are the same layers."""
    weight, plan = "layers.*.fc.weight", small_plan()
    (op,) = plan.operators
    apart = replace(
        plan,
        parameters={"layers.0.fc.weight": ["S(0)", "S(0)"], "layers.1.fc.weight": ["R", "S(0)"]},
        operators=tuple(replace(op, module=f"layers.{i}.fc", block=f"layers.{i}", copies=1) for i in range(2)),
        blocks=tuple(PlanBlock(f"layers.{i}", 1, 1, 7e-4, 2.5e-4, (f"layers.{i}",)) for i in range(2)),
    )
    found = compare(plan, apart)
    assert [(d.name, d.first, d.second) for d in found.parameters] == [
        ("layers.1.fc.weight", ("S(0)", "S(0)"), ("R", "S(0)"))
    ]
    assert found.operators == () and weight in plan.parameters
