"""`tapas export` and `tapas plan --from` as users call them: what they write, print and refuse."""

import json
import runpy
from pathlib import Path

import pytest

from tapas.export.parameters import stored_parameters
from tapas.plan.plan import Plan, load_plan
from tapas.sharding.layout import Layout
from tests.cli.test_cli import MODEL, refused, run

CLUSTER = Path(__file__).parents[1] / "golden" / "cluster.toml"


def planned(folder: Path, *options: str) -> Path:
    path = folder / "plan.json"
    done = run("plan", *MODEL, "--mesh", "2", "--cluster", CLUSTER, "--no-baselines", "-o", path, *options)
    assert done.exit_code == 0, done.output
    return path


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With weights that are small stored whole: stored in pieces they are gathered, which no style of a module does."""
    pins = ["*=megatron", "model.embed_tokens.weight=[R]", "*norm.weight=[R]"]
    return planned(tmp_path_factory.mktemp("megatron"), *(text for pin in pins for text in ("--pin", pin)))


@pytest.fixture(scope="module")
def gathering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights are stored as the model's own plan says, and so small that it is best to gather some for their use: no
    style of a module does that."""
    return planned(tmp_path_factory.mktemp("own"), "--from", "transformers")


def stored(plan: Plan) -> dict[str, Layout]:
    return {parameter.name: parameter.layout for parameter in stored_parameters(plan)}


def test_there_and_back_again(megatron: Path, tmp_path: Path) -> None:
    """What is exported is imported with the same weights split in the same way."""
    file = tmp_path / "tp.json"
    done = run("export", megatron, "--to", "transformers", "-o", file)
    assert done.exit_code == 0 and done.stdout.startswith(f"wrote {file}\n"), done.output
    said = json.loads(file.read_text())
    assert said["tp_size"] == 2 and said["tp_plan"]["model.layers.*.self_attn.q_proj"] == "colwise"
    again = load_plan(planned(tmp_path, "--from", str(file)))
    assert stored(again) == stored(load_plan(megatron)) and again.cost <= load_plan(megatron).cost


def test_placements_there_and_back_again(megatron: Path, tmp_path: Path) -> None:
    file = tmp_path / "placements.json"
    assert run("export", megatron, "--to", "dtensor", "-o", file).exit_code == 0
    again = load_plan(planned(tmp_path, "--from", str(file)))
    assert stored(again) == stored(load_plan(megatron)) and again.cost <= load_plan(megatron).cost


def test_a_file_for_torch_is_python(megatron: Path, tmp_path: Path) -> None:
    done = run("export", megatron, "--to", "torch", "-o", tmp_path / "split.py")
    assert done.exit_code == 0, done.output
    assert {"make_mesh", "parallelize"} <= runpy.run_path(str(tmp_path / "split.py")).keys()


def test_what_is_left_out_is_said_beside_the_file(gathering: Path) -> None:
    reasons = refused("export", gathering, "--to", "transformers")
    assert "places that it has no words for: (1)" in reasons and "--approximate" in reasons
    done = run("export", gathering, "--to", "transformers", "--approximate")
    assert json.loads(done.stdout)["dropped"], "standard output is the file and nothing else"
    assert "left out: " in done.stderr and "by the cost model a step takes" in done.stderr
    data = json.loads(run("export", gathering, "--to", "transformers", "--approximate", "--json").stdout)
    assert data["dropped"] and data["seconds"] > 0 and "tp_size" in data["data"]


def test_all_reasons_are_listed_as_json(gathering: Path) -> None:
    done = run("export", gathering, "--to", "transformers", "--json")
    error = json.loads(done.stderr)["error"]
    assert done.exit_code == 2 and error["kind"] == "CannotSay" and error["reasons"]


def test_what_cannot_be_exported(megatron: Path, tmp_path: Path) -> None:
    assert "did you mean torch" in refused("export", megatron, "--to", "torhc")
    assert "no such file" in refused("export", tmp_path / "none.json", "--to", "jax")
    assert "folder does not exist" in refused("export", megatron, "--to", "jax", "-o", tmp_path / "no" / "x.py")
    (tmp_path / "bad.json").write_text("{")
    assert "is not JSON" in refused("export", tmp_path / "bad.json", "--to", "jax")
    python = tmp_path / "python.json"
    python.write_text(json.dumps({**json.loads(megatron.read_text()), "source": {}}))
    assert "does not say which model" in refused("export", python, "--to", "torch")
    assert run("export", python, "--to", "dtensor").exit_code == 0, "which needs no model"


def test_what_cannot_be_imported(megatron: Path, tmp_path: Path) -> None:
    def said(data: object) -> Path:
        (tmp_path / "said.json").write_text(data if isinstance(data, str) else json.dumps(data))
        return tmp_path / "said.json"

    asked = ("plan", *MODEL, "--mesh", "2", "--no-baselines", "--from")
    assert "is a plan of TAPAS itself" in refused(*asked, megatron)
    assert "cannot be read as JSON" in refused(*asked, said("{"))
    entry = {"model.layers.*.mlp.upp_proj": "colwise"}
    assert "upp_proj matches no parameter" in refused(*asked, said(entry))
    assert "no such file" in refused(*asked, tmp_path / "none.json")
    assert "give that with --mesh" in refused("plan", *MODEL, "--devices", "2", "--from", megatron)
