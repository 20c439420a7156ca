"""The command line: what it prints, what it refuses and with which words and exit codes."""

import json
import os
import pickle
import subprocess
import sys
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import tapas
from tapas import __version__
from tapas.cli.main import app
from tapas.cli.options import RequestOptions, SourceOptions
from tapas.errors import TapasError
from tapas.ir.graph import Graph
from tapas.plan.plan import load_plan
from tapas.planner.describe import _more_room
from tapas.planner.pipeline import plan_graph
from tapas.report import print_plan

SMALL = ["num_hidden_layers=2", "hidden_size=256", "intermediate_size=512", "num_attention_heads=8", "vocab_size=1024"]
MODEL = ["llama3-8b", *(part for s in SMALL for part in ("--set", s)), "--batch", "8", "--seq", "64"]
KEYS = {"version", "model", "mesh", "cost", "bound", "proof", "seconds", "memory", "parameters", "operators", "moves",
        "baselines"}  # fmt: skip


def run(*arguments: str):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": None})


def refused(*arguments: str) -> str:
    """The one line that a mistake gets."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    return lines[0]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    result = run("plan", *MODEL, "--mesh", "2x4", "-o", str(path))
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="module")
def captured() -> Graph:
    return SourceOptions(batch=8, seq=64, settings=SMALL).source("llama3-8b").capture(None)[0]


# --------------------------------------------------------------------------------------- what it does


def test_help_and_version_import_nothing_heavy() -> None:
    code = "import sys; from tapas.cli.main import main; sys.argv = ['tapas', '{}']\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += "print(sorted(m for m in ('torch', 'numpy', 'transformers') if m in sys.modules))"
    for argument in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", code.format(argument)], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]", argument
    assert run("--version").output == f"tapas {__version__}\n"


def test_names_are_listed_and_imported_on_use() -> None:
    code = "import sys, tapas; names = dir(tapas); assert 'torch' not in sys.modules, 1; print(*names)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"plan", "load_plan", "parallelize", "verify", "save_checkpoint"} <= set(done.stdout.split())
    assert all(hasattr(tapas, name) for name in tapas.__all__)


def test_a_plan_prints_itself_wherever_it_comes_from(plan_file: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "plan.pickle"
    pickled.write_bytes(pickle.dumps(load_plan(plan_file)))
    loads = f"import tapas; plan = tapas.load_plan({str(plan_file)!r})"
    unpickles = f"import pickle; plan = pickle.load(open({str(pickled)!r}, 'rb'))"
    shown = run("show", plan_file).stdout
    for code in (loads, unpickles):
        code += "\nimport sys; assert 'rich' not in sys.modules; print(plan)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == shown


def test_plan_json_is_the_plan_and_nothing_else(plan_file: Path) -> None:
    result = run("plan", *MODEL, "--mesh", "2x4", "--json")
    data = json.loads(result.stdout)
    assert data.keys() >= KEYS
    assert set(data["baselines"]) == {"ddp", "fsdp", "hsdp", "megatron", "megatron-sp", "fsdp+tp", "hf"}
    assert all("cost" in figures for figures in data["baselines"].values())
    assert data["mesh"] == {"names": ["x", "y"], "sizes": [2, 4]}
    assert data == json.loads(plan_file.read_text()), "two runs agree"


def test_show_prints_the_same_as_plan(plan_file: Path) -> None:
    planned, shown = run("plan", *MODEL, "--mesh", "2x4"), run("show", plan_file)
    assert planned.stdout == shown.stdout
    assert "\x1b" not in shown.stdout and max(map(len, shown.stdout.splitlines())) <= 110


def test_piped_output_has_no_codes(plan_file: Path) -> None:
    command = [sys.executable, "-m", "tapas.cli", "show", str(plan_file)]
    done = subprocess.run(command, capture_output=True, check=True, env={"TERM": "xterm-256color", "FORCE_COLOR": "1"})
    assert b"\x1b" not in done.stdout and done.stderr == b""
    assert "Step time" in done.stdout.decode()


def test_fold_counts_operators() -> None:
    data = json.loads(run("fold", *MODEL, "--json").stdout)
    layers = next(b for b in data["blocks"] if b["copies"] == 2)
    assert data["operators"] == data["unique"] + layers["operators"]
    assert "model.layers.*" in run("fold", *MODEL).stdout


def test_pins_and_named_axes() -> None:
    options = ("--mesh", "dp=2,tp=4", "--pin", "lm_head.weight=[R, S(0)]", "--no-baselines", "--json")
    data = json.loads(run("plan", *MODEL, *options).stdout)
    assert data["parameters"]["lm_head.weight"] == ["R", "S(0)"] and data["mesh"]["names"] == ["dp", "tp"]
    assert data["source"]["pins"] == ["lm_head.weight=[R, S(0)]"] and data["baselines"] == {}


def test_every_restriction_is_kept_and_said() -> None:
    options = ("--mesh", "2x4", "--no-baselines", "--no-batch-split", "--forbid", "lm_head=sequence")
    data = json.loads(run("plan", *MODEL, *options, "--json").stdout)
    assert data["pins"] == ["--no-batch-split", "--forbid lm_head=sequence"]
    assert "among those your restrictions leave" in run("plan", *MODEL, *options).stdout


USER = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), (torch.zeros(8, 64),)

def large(width=4096):
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(20))), (torch.zeros(8, width),)
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(USER)
    return path


def test_a_users_model_keeps_its_dtype_unless_told(user_file: Path) -> None:
    source = f"{user_file}:make"
    assert json.loads(run("plan", source, "--mesh", "2", "--json").stdout)["dtype"] == "float32"
    data = json.loads(run("plan", source, "--mesh", "2", "--dtype", "bfloat16", "--json").stdout)
    assert data["dtype"] == "bfloat16" and "hf" not in data["baselines"], "transformers has no say in it"
    assert "it takes none" in refused("plan", source, "--mesh", "2", "--set", "d=3")


def test_too_large_to_verify_gets_options_that_work(user_file: Path, tmp_path: Path) -> None:
    words = refused("verify", f"{user_file}:large", "--mesh", "2")
    assert "let the function make a smaller model" in words and "num_hidden_layers" not in words
    assert "--set num_hidden_layers=2" in refused("verify", "llama3-70b", "--mesh", "2")
    plan = tmp_path / "plan.json"
    run("plan", "gpt2-xl", "--set", "n_layer=12", "--mesh", "2", "--no-baselines", "-o", plan)
    assert "tapas plan gpt2-xl --mesh AxB --set num_hidden_layers=2" in refused("verify", plan)


def test_sequence_of_a_model_without_one() -> None:
    for model in ("vit-b16", "wide-resnet"):
        assert "--seq does not change its inputs" in refused("plan", model, "--mesh", "2", "--seq", "99")


def test_warnings_of_uneven_meshes_and_of_memory() -> None:
    text = " ".join(run("plan", *MODEL, "--mesh", "3x5", "--no-baselines").stdout.split())
    assert "warning: 5 devices along y take 0.625 nodes of 8" in text
    assert "does not divide" not in text  # the batch stays whole
    text = " ".join(run("plan", *MODEL, "--mesh", "3x2", "--pin", "*=ddp", "--no-baselines").stdout.split())
    assert "warning: a batch of 8 does not divide over x = 3: the device" in text
    large = ("llama3-8b", "--set", "num_hidden_layers=1", "--mesh", "2x2", "--cluster", "v100-16g", "--no-baselines")
    text = " ".join(run("plan", *large, "--memory", "none").stdout.split())
    assert "does NOT fit" in text and "has 16 GB: use more devices, or a smaller batch (--batch)" in text
    assert "no plan fits into 14.4 GB per device: the smallest needs" in refused("plan", *large)
    fitting = {"ddp": {"cost": 1.0, "memory": 9}, "fsdp": {"cost": 2.0, "memory": 3}, "hf": {"cost": None}}
    assert _more_room(5, fitting).endswith("or take what fits: fsdp does (--pin '*=fsdp')")


def test_help_flows_and_names_defaults() -> None:
    text = " ".join(run("verify", "--help").stdout.split())
    assert "The plan is the best one for the cluster" in text
    assert "else 64" in " ".join(run("plan", "--help").stdout.replace("│", " ").split())
    example = run("clusters", "--help").stdout
    assert "per_node = 4" in example and "flops_per_s = {" in example


def test_explain_tells_why_alternatives_lose(plan_file: Path) -> None:
    data = json.loads(run("explain", plan_file, "mlp.down_proj", "--json").stdout)
    assert data["cost"] == pytest.approx(load_plan(plan_file).cost)
    operator, weight = data["subjects"]
    assert operator["kind"] == "aten.linear.default" and weight["kind"] == "weight"
    costs = [a["cost"] for s in data["subjects"] for a in s["alternatives"] if a["cost"] is not None]
    assert costs and min(costs) >= data["cost"] * (1 - 1e-9), "the plan is the best of all"
    for subject in data["subjects"]:
        for other in subject["alternatives"]:
            if other["cost"] is not None:
                assert sum(other["seconds"].values()) == pytest.approx(other["cost"] - data["cost"], abs=1e-9)
    text = run("explain", *MODEL, "--mesh", "2x4", "--limit", "1", "*.down_proj").stdout
    assert "chosen:" in text and "communication +" in text


def test_compare(plan_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    assert run("plan", *MODEL, "--mesh", "8", "--no-baselines", "-o", other).exit_code == 0
    data = json.loads(run("compare", plan_file, other, "--json").stdout)
    assert data["first"]["cost"] == load_plan(plan_file).cost and data["second"]["mesh"]["sizes"] == [8]
    assert "Figures" in run("compare", plan_file, other).stdout
    assert "alike" in run("compare", plan_file, plan_file).stdout


def test_lists() -> None:
    assert "llama3-8b" in run("models").stdout and "h100-sxm" in run("clusters").stdout
    assert "gpt2" in {m["name"] for m in json.loads(run("models", "--json").stdout)}
    assert all(c["source"] for c in json.loads(run("clusters", "--json").stdout))


# -------------------------------------------------------------------------------------- what it refuses


def test_types_are_not_dumped() -> None:
    assert len(refused("plan", "hf:", "--mesh", "4")) < 120
    assert len(refused("plan", "hf:qqqqzzzz", "--mesh", "4")) < 160


def test_unknown_names_get_the_nearest() -> None:
    assert "llama3-8b" in refused("plan", "lama3-8b", "--mesh", "4")
    assert "h100-sxm" in refused("plan", "gpt2", "--mesh", "4", "--cluster", "h100-sx")
    assert "llama" in refused("plan", "hf:lama", "--mesh", "4")


@pytest.mark.parametrize("mesh", ["", "2y4", "0x4", "2x2x2x2", "dp=2,4", "-1"])
def test_mesh_garbage(mesh: str) -> None:
    assert "mesh" in refused("plan", "gpt2", "--mesh", mesh)


def test_missing_mesh() -> None:
    assert refused("plan", "gpt2").startswith("error: --mesh: no mesh was given; write")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--set", "num_hidden_layers"), "FIELD=VALUE"),
        (("--set", "num_hiden_layers=2"), "num_hidden_layers"),
        (("--set", "num_hidden_layers=two"), "int"),
        (("--pin", "nothing"), "PATTERN=WHAT"),
        (("--forbid", "=x"), "PATTERN=FACTOR"),
        (("--batch", "0"), "positive"),
        (("--memory", "40"), "--memory 40: has no unit; write 40GB"),
        (("--dtype", "float8"), "dtype"),
    ],
)
def test_bad_options(options: tuple[str, ...], words: str) -> None:
    assert words in refused("plan", *MODEL, "--mesh", "4", *options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--pin", "no.such.*=megatron"), "no parameter or module matches"),
        (("--pin", "lm_hed.weight=megatron"), "did you mean lm_head.weight"),
        (("--pin", "layers.*.mlp.up=R"), "did you mean model.layers.0.mlp.up_proj"),
        (("--forbid", "lm_hed=batch"), "did you mean lm_head"),
        (("--pin", "model.layers.*.mpl.*=megatron"), "did you mean model.layers.0.mlp"),
        (("--pin", "layers.*.mul_proj=megatron"), "did you mean model.layers.0.mlp.up_proj"),
        (("--pin", "lm_head=[S(0), R"), "its brackets are not a pair"),
        (("--pin", "lm_head=S(0)]"), "its brackets are not a pair"),
        (("--pin", "lm_head=[R,R,R]"), "3 states for 2 mesh axes"),
        (("--pin", "lm_head.weight=[R]"), "1 state for 2 mesh axes; write one state per axis in brackets, or R alone"),
        (("--pin", "lm_head.weight=[R, S(5)]"), "lm_head.weight has 2 dims (1024 × 256)"),
        (("--pin", "lm_head.weight=[R, P]"), "weights are stored split, S(dim), or whole, R"),
        (("--pin", "*=megatrn"), "there is no strategy megatrn; did you mean megatron"),
        (("--pin", "lm_head=[batch]"), "1 word for 2 mesh axes"),
        (("--pin", "lm_head=heads"), "there is no strategy heads"),
        (("--no-batch-split", "--pin", "lm_head=batch"), "contradicts --no-batch-split; drop one of them"),
        (("--no-batch-split", "--pin", "*=ddp"), "contradicts --no-batch-split; drop one of them"),
        (("--pin", "lm_head.weight=R", "--pin", "lm_head.weight=S(0)"), "contradicts lm_head.weight=R; drop one"),
    ],
)  # fmt: skip
def test_bad_pins(options: tuple[str, ...], words: str, captured: Graph) -> None:
    """The model is captured once for all of them."""
    given = {"pin": [], "forbid": []}
    for option, value in pairwise(options):
        if option in ("--pin", "--forbid"):
            given[option.removeprefix("--")].append(value)
    asked = RequestOptions(no_batch_split="--no-batch-split" in options, **given)
    with pytest.raises(TapasError) as error:
        plan_graph(captured, asked.request("2x4", None))
    assert words in str(error.value)


def test_a_bad_pin_is_one_line() -> None:
    assert "did you mean lm_head.weight" in refused("plan", *MODEL, "--mesh", "2x4", "--pin", "lm_hed.weight=megatron")


@pytest.mark.parametrize("arguments", [
    ("plan", "gpt2", "--mesh", "2y4"), ("show", "no/such.json"), ("plan", "gpt2", "--bogus"), ("nothing",), ("show",),
])  # fmt: skip
def test_a_mistake_is_json_where_json_was_asked_for(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--json")
    assert result.exit_code == 2 and result.stdout == ""
    error = json.loads(result.stderr)["error"]
    assert error["place"] and error["fact"] and error["remedy"] and error["kind"].endswith("Error")


def test_a_pattern_to_explain_that_matches_nothing() -> None:
    assert "did you mean lm_head" in refused("explain", *MODEL, "--mesh", "4", "lm_hed")


def test_output_is_checked_before_any_work(tmp_path: Path) -> None:
    assert "folder does not exist" in refused("plan", "llama3-405b", "--mesh", "4", "-o", tmp_path / "no" / "p.json")
    assert "is a folder" in refused("plan", "llama3-405b", "--mesh", "4", "-o", tmp_path)


def test_unreadable_plans(tmp_path: Path, plan_file: Path) -> None:
    assert "no such file" in refused("show", tmp_path / "none.json")
    assert "no such file" in refused("explain", tmp_path / "none.json", "lm_head")
    assert "cannot be read" in refused("compare", plan_file, tmp_path)
    script = tmp_path / "ex.py"
    script.write_text("import torch\n")
    assert "not a plan file" in refused("show", script)
    assert "tapas show" in refused("plan", plan_file, "--mesh", "2")
    damaged = tmp_path / "damaged.json"
    damaged.write_text(plan_file.read_text()[:1000])
    assert "is not JSON" in refused("show", damaged) and "is not JSON" in refused("explain", damaged, "x")
    damaged.write_text(json.dumps({**json.loads(plan_file.read_text()), "version": 99}))
    assert "format 99" in refused("show", damaged)


def test_a_plan_from_python_cannot_be_explained(tmp_path: Path, plan_file: Path) -> None:
    path = tmp_path / "python.json"
    path.write_text(json.dumps({**json.loads(plan_file.read_text()), "source": {}}))
    assert "does not say which model" in refused("explain", path, "lm_head")
    for option in (("--mesh", "4"), ("--cluster", "h200-sxm"), ("--pin", "*=ddp"), ("--batch", "8"), ("--inference",)):
        assert "leave these options out" in refused("explain", plan_file, "lm_head", *option)
        assert "leave these options out" in refused("verify", plan_file, *option)


def test_commands_have_the_same_options() -> None:
    shared = ("--cluster", "--batch", "--seq", "--set", "--dtype", "--inference", "--no-batch-split", "--pin",
              "--forbid", "--optimizer", "--no-master", "--recompute", "--pieces")  # fmt: skip
    for command in ("plan", "frontier", "explain", "verify"):
        words = run(command, "--help").output
        assert all(option in words for option in shared), command


def test_usage_errors_exit_with_2() -> None:
    for arguments in (["plan"], ["plan", "gpt2", "--nonsense"], ["nonsense"], ["plan", "gpt2", "--batch", "many"]):
        result = run(*arguments)
        assert result.exit_code == 2 and "Traceback" not in result.output


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tapas.planner.pipeline.plan_graph", interrupt)
    assert run("plan", "gpt2", "--mesh", "4").exit_code == 130


def test_a_time_limit_gives_a_plan_and_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = run("plan", *MODEL, "--mesh", "2x2x2", "--time-limit", "0", "-o", str(path))
    assert result.exit_code == 0, result.output
    assert "of the best possible" in result.stdout
    assert "warning: the search was stopped after" in " ".join(result.stdout.split())
    assert json.loads(path.read_text())["warnings"][0].startswith("the search was stopped")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("tapas.planner.pipeline.plan_graph", broken)
    assert isinstance(run("plan", "gpt2", "--mesh", "4").exception, ZeroDivisionError)


# -------------------------------------------------------------------------------------------------- manners


def test_ctrl_c_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch, plan_file: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["tapas.plan.plan"], "load_plan", interrupted)
    for options in ((), ("--json",)):
        result = run("show", plan_file, *options)
        assert result.exit_code == 130 and "Traceback" not in result.output, result.output


def test_ctrl_c_while_it_starts_leaves_no_traceback() -> None:
    code = "import sys\nfrom tapas.cli.__main__ import main\nclass Interrupting:\n"
    code += "    def find_spec(self, name, path=None, target=None):\n"
    code += "        if name == 'typer': raise KeyboardInterrupt\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "sys.meta_path.insert(0, Interrupting())\nmain()"], capture_output=True, text=True
    )
    assert done.returncode == 130 and done.stderr == ""


@pytest.mark.parametrize("coloured", [True, False])
def test_no_color_is_honoured(plan_file: Path, monkeypatch: pytest.MonkeyPatch, coloured: bool) -> None:
    """Bold is no colour. A terminal is wanted: without one there are no codes at all."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not coloured:
        monkeypatch.setenv("NO_COLOR", "1")
    file = StringIO()
    print_plan(load_plan(plan_file), Console(file=file, force_terminal=True))
    assert ("\x1b[1;32m" in file.getvalue()) == coloured and "\x1b[1m" in file.getvalue()


def test_shells_complete_commands_options_and_names() -> None:
    """As a shell asks: by variables, of the same program."""
    asks = (("tapas pl", 1, "plan"), ("tapas plan --rep", 2, "--report"), ("tapas plan llama3-7", 2, "llama3-70b"),
            ("tapas plan gpt2 --cluster h2", 4, "h200-sxm"))  # fmt: skip
    for words, place, wanted in asks:
        asked = {"_TAPAS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        code = "import sys; sys.argv = ['tapas']; from tapas.cli.main import main; main()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asked)
        assert wanted in done.stdout.split(), done.stderr
    assert "--install-completion" in run("--help").stdout
