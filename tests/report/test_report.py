"""The printed plan: golden text of a real one, and the words for what it may say."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tapas.plan.compare import compare
from tapas.plan.fingerprint import BlockStructure
from tapas.plan.plan import Move, PlanBlock
from tapas.plan.simulate import simulate
from tapas.plan.words import part_words
from tapas.planner.explain import Alternative, ExplainedVariable, Explanation
from tapas.report import plan_text, print_plan, text_of, units, width_from
from tapas.report.compare import compare_page
from tapas.report.explain import explain_page
from tapas.report.frame import broken
from tapas.report.plan import plan_page, throughput
from tapas.report.wiring import follows
from tapas.report.words import steps, storage, traffic, work
from tests.cli.test_cli import MODEL, run
from tests.plan.test_plan import small_plan

GOLDEN = Path(__file__).parents[1] / "golden"


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
    assert "weight, gradient (x)" in text and "all-gather (x,y)" in text
    assert "2.0 times as long" in text and "not applicable: none" in text and "fits" in text
    assert text.endswith("warning: no rule for aten.odd")


def test_a_gap_and_pins_are_said() -> None:
    text = plan_text(small_plan(bound=1.9e-3, proof="gap 0.0001 s (5.00%)", pins=("fc=ddp",)))
    assert "Within 5.00% of the best possible: no plan among those your pins leave is faster than 1.90 ms" in text


def test_restrictions_other_than_pins_are_said() -> None:
    restricted = small_plan(pins=("--no-batch-split", "--forbid lm_head=batch"))
    text = plan_text(restricted)
    assert "no other plan among those your restrictions leave is faster (proven)" in text
    assert "Pins and restrictions given: --no-batch-split, --forbid lm_head=batch" in text
    found = compare(restricted, small_plan())
    assert "--no-batch-split" in text_of(compare_page(found, ("a", "b"))).splitlines()[0]
    assert found.to_dict()["first"]["pins"] == ["--no-batch-split", "--forbid lm_head=batch"]


@pytest.mark.parametrize("width", [80, 95, 110, 200])
def test_long_names_break_and_figures_stay(width: int) -> None:
    (op,), (block,) = small_plan().operators, small_plan().blocks
    long = "some_model.encoder.very_long_module_name.attention.another_long_name"
    weight = f"{long}.output.dense.weight"
    plan = small_plan(
        operators=(replace(op, module=f"{long}.first", weights=(weight,), block="b"),
                   replace(op, module=f"{long}.output.dense", weights=(), block="b")),
        parameters={weight: ["R", "S(0)"], f"{long}.tied.weight": ["R", "S(0)"]}, tied={f"{long}.tied.weight": weight},
        blocks=(replace(block, name="b", paths=(), compute=0.41e-3, communication=1.52e-3, copies=3),),
    )  # fmt: skip
    text = text_of(plan_page(plan), width)
    assert max(map(len, text.splitlines())) <= width
    (row,) = (line for line in text.splitlines() if "1.23 ms" in line)
    assert " 3 " in row and "4.56 ms" in row and "290%" in row, "of all copies"
    assert "dim 0 over y" in text and "batch over x" in text, "words break between words only"


def test_a_tensor_is_named_by_what_it_comes_from() -> None:
    """Keys that were rotated come from k_proj, what attention gave from attention, a residual sum from its branch."""
    block = BlockStructure(
        ("attn.k_proj: aten.linear.default(p0, w0)", "attn: aten.mul.Tensor(0.0, c0)", "attn: aten.neg.default(0.0)",
         "attn: aten.add.Tensor(1.0, 2.0)", "attn: aten.scaled_dot_product_attention.default(p0, 3.0, p0)",
         "attn: aten.transpose.int(4.0)", "attn.o_proj: aten.linear.default(5.0, w1)", ": aten.add.Tensor(p0, 6.0)"),
        ("attn.k_proj.weight 8x8", "attn.o_proj.weight 8x8"), ("7.0",), 1, 1,
    )  # fmt: skip
    assert [follows(block, source) for source in ("3.0", "4.0", "5.0", "7.0", "p0", "w0")] == [
        ["attn.k_proj"], ["attn.k_proj"], ["attention"], ["attn.o_proj"], [], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"input_ids": [16, 2048], "labels": [16, 2048]}, "16.4M tokens/s, 2.05M a device"),
        ({"pixel_values": [6, 3, 32, 32]}, "3.00k images/s, 375 a device"),
        ({"x": [4, 8]}, ""),
    ],
)
def test_throughput_where_inputs_say_what_they_are(inputs: dict[str, list[int]], text: str) -> None:
    plan = small_plan(inputs=inputs)
    assert (throughput(plan), simulate(plan), plan.cost) == (text, None, 2e-3)


def test_names_break_after_dots_and_underscores() -> None:
    assert broken("model.layers.norm", 20) == ["model.layers.norm"]
    assert broken("  model.layers.norm", 14) == ["  model.", "    layers.", "    norm"]
    assert broken("self_attn_layer_norm", 12) == ["self_attn_", "  layer_norm"]
    assert all(len(line) <= 9 for line in broken("abcdefghijklmnopqrstuvwxyz", 9))
    assert "".join(line.strip() for line in broken("abcdefghijklmnopqrstuvwxyz", 9)) == "abcdefghijklmnopqrstuvwxyz"


def test_columns_are_honoured() -> None:
    assert [width_from({"COLUMNS": c}) for c in ("200", "40", "", "many")] == [200, 80, 110, 110]
    assert width_from({}) == 110


def test_the_legend_explains_what_is_there() -> None:
    text = plan_text(small_plan())
    assert "Sent, weight: the pieces" in text and "Sent, gradient: " in text and "repeated" not in text
    (op,), (move,) = small_plan().operators, small_plan().moves
    other = small_plan(
        operators=(replace(op, choice=("R", "R"), roles=()), replace(op, target="aten.mul.Tensor", choice=("R", "d1"))),
        moves=(replace(move, after=("S(1)", "R")),),
    )
    text = " ".join(plan_text(other).split())
    assert "repeated: every device does all of it" in text and "result dim 1: that dim" in text
    assert "a / b: several operators" in text
    unsent = plan_text(small_plan(moves=()))
    assert "Sent, " not in unsent and "nothing" in unsent


def test_blocks_without_anything_have_no_row() -> None:
    (block,) = small_plan().blocks
    empty = replace(block, name="shared weights", operators=0, compute=0.0, communication=0.0, paths=())
    assert "shared weights" not in plan_text(small_plan(blocks=(empty, block)))
    busy = replace(empty, communication=1e-3)
    assert "shared weights" in plan_text(small_plan(blocks=(busy, block)))


def test_the_header() -> None:
    text = plan_text(small_plan(dtype="bfloat16", graph={"operators": 3, "unique": 3, "parameters": 4096}))
    assert "4.10k parameters in bfloat16, training step" in text
    assert "3 operators\n" in text and "unique" not in text
    assert "2 operators, 1 of them unique" in plan_text(small_plan())


def test_operators_without_weights_are_called_operators() -> None:
    (op,) = small_plan().operators
    products = [replace(op, target="aten.bmm.default", module=f"m{i}", weights=(), block="") for i in range(20)]
    assert "m0 (bmm) and 19 more operators like it" in plan_text(small_plan(operators=(op, *products)))


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
    assert "fc1 and 68 more weights like it" in text and "dim 0 over y" in text and "fc2" not in text


def test_tied_weights_share_a_row() -> None:
    weight = "layers.*.fc.weight"
    parameters = {weight: ["S(0)", "S(0)"], "head.weight": ["S(0)", "S(0)"]}
    text = plan_text(small_plan(parameters=parameters, tied={"head.weight": weight}))
    assert "\n    = head" in text and "\nhead" not in text
    assert "= name: the same weight by another name" in " ".join(text.split())


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
        ("tapas.window_attention.default", "near", "sequence", "S(2)", "sequence (neighbours)"),
        ("tapas.window_attention.default", "l", "", "S(2)", "queries"),
        ("aten.conv2d.default", "height", "", "S(2)", "height (halo exchange)"),
        ("aten.conv2d.padding", "p1", "", "S(3)", "width"),
        ("aten.conv_transpose3d.input", "p0", "", "S(2)", "depth"),
        ("aten.max_pool1d.default", "length", "", "S(2)", "length (halo exchange)"),
        ("aten.mul.Tensor", "d2", "", "S(2)", "result dim 2"),
        ("aten.mean.dim", "d2", "", "P", "what it sums up"),
    ],
)
def test_work_in_words(target: str, option: str, role: str, result: str, words: str) -> None:
    assert part_words(target, option, role, result) == words


def test_how_tokens_are_sent_in_words() -> None:
    target, words = "tapas.experts.default", "experts, tokens sent (all-to-all, capacity 1.25)"
    assert part_words(target, "dispatch", "", "S(0)", 1.25) == words
    (op,) = small_plan().operators
    sent = replace(op, target=target, choice=("R", "dispatch"), roles=(), result=("R", "S(0)"), capacity=1.25)
    assert work(sent, "xy") == "experts over y, tokens sent (all-to-all, capacity 1.25)"


def test_an_explanation_says_what_it_is_with_and_without() -> None:
    def explained(chosen: tuple[str, str], *others: tuple[str, str, float]) -> str:
        rows = tuple(Alternative(axis, does, cost, {}, None, 0.0) for axis, does, cost in others)
        subject = ExplainedVariable("mlp.experts", "tapas.experts.default", 1, (8, 8), chosen, rows)
        return text_of(explain_page(Explanation("mlp", replace(small_plan(), cost=2.0), (subject,), 1)))

    sent = "experts, tokens sent (all-to-all, capacity 1.25)"
    said = "Experts, tokens sent (all-to-all): {} s a step at best, {} s without."
    text = explained(("batch", "batch"), ("x", sent, 4.0), ("y", sent, 3.0), ("y", "experts", 2.5))
    assert said.format("3.00", "2.00") in text
    text = explained(("batch", sent), ("x", "whole", 2.2), ("y", "experts", 2.5), ("y", "whole", 3.0))
    assert said.format("2.00", "2.50") in text
    assert "a step at best" not in explained(("batch", "batch"), ("y", "experts", 2.5))


def test_storage_and_traffic_in_words() -> None:
    assert storage(["R", "R"], "xy") == "whole"
    assert storage(["S(0)", "S(0)"], "xy") == "dim 0 over x,y"
    assert storage(["R", "S(0|3x1600/64)"], "xy") == "dim 0 of each of 3 parts over y"
    step = {"axes": ["x"], "forward": "none", "backward": "all_reduce"}
    move = Move("w", "m", ("R", "S(0)"), ("B", "S(0)"), (step,), 8, 0.0, 0.0, 1)
    assert traffic([move], "xy") == "gradient (x)" and traffic([], "xy") == "nothing"
    ways = {("S(0)", "B"): "weight, gradient", ("S(0)", "R"): "weight", ("S(0)", "S(1)"): "weight, gradient",
            ("R", "S(0)"): "gradient", ("S(0)", "P"): "nothing"}  # fmt: skip
    for (stored, used), words in ways.items():
        assert traffic([replace(move, before=(stored,), after=(used,))], "x") == words
    assert steps(move, "forward") == "" and steps(move, "backward") == "all-reduce (x)"


def test_units() -> None:
    assert [units.seconds(s) for s in (1.63, 0.0393, 1.8e-5, 0.0)] == ["1.63 s", "39.3 ms", "18.0 µs", "0"]
    assert [units.nbytes(b) for b in (4, 8192, 117440512, 132e9)] == ["4 B", "8.19 kB", "117 MB", "132 GB"]
    assert [units.slower(r) for r in (1.0, 1.21, 1.002, 0.97, 3.0)] == [
        "as fast", "21% slower", "0.2% slower", "3.0% faster", "3.0 times as long",
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
