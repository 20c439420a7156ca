"""docs/results.md is what benchmarks/results.py makes of what was measured, and README.md claims nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import results

    return results


def test_page_is_made_of_what_was_measured(results: Any, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert results.written(text, results.DATA, tmp_path) == text, "run `python benchmarks/results.py --page`"
    drawn = list(tmp_path.iterdir())
    assert drawn
    for picture in drawn:
        assert picture.read_bytes() == (PAGE.parent / picture.name).read_bytes()


def test_parts_of_a_page(results: Any, tmp_path: Path) -> None:
    origin = {"command": "benchmarks/x.py --cpu", "versions": {"torch": "2.13"}, "date": "2026-11-18"}
    table = {"title": "Seconds", "columns": ["", "a|b"], "rows": [["ours", "1.5 (1.6)"]], **origin}
    curve = {"title": "Growth", "across": "layers", "up": "s", "lines": {"ours": {"1": 1.0, "8": 2.0}}, "dashed": ""}
    kept = {"tables": {"time": table}, "curves": {"time": {**curve, **origin}}}
    (tmp_path / "x.json").write_text(json.dumps(kept))
    page = "<!-- table x time -->\nold\n<!-- end -->\nkept\n<!-- curves x time -->\n<!-- end -->\n"
    page += "<!-- table y time -->\n<!-- end -->\n"
    made = results.written(page, tmp_path, tmp_path)
    assert "| ours | 1.5 (1.6) |" in made and "a\\|b" in made
    assert "`benchmarks/x.py --cpu`; torch 2.13; 2026-11-18" in made
    assert "old" not in made and "kept" in made
    assert "](results_x_time.svg)" in made and (tmp_path / "results_x_time.svg").is_file()
    assert "Not measured yet: `make bench BENCH=y`." in made
    assert results.written(made, tmp_path, tmp_path) == made


def test_tables_are_kept_beside_those_of_other_runs(
    results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from _results import Results  # pyright: ignore[reportMissingImports]

    file = tmp_path / "x.json"
    monkeypatch.setattr("sys.argv", ["/home/me/x.py", "--from", "/home/me/sources", "--json", str(file), "--cpu"])
    Results(file).table("one", "One", ("", "a"), [("ours", "1")])
    again = Results(file, versions={"Other": "abc"})
    again.table("two", "Two", ("", "a"), [("ours", "2")])
    assert again.want("seconds", 1.0, 2.0) and not again.want("seconds", 3.0, 2.0) and not again.met
    kept = json.loads(file.read_text())["tables"]
    assert kept["one"]["rows"] == [["ours", "1"]] and kept["two"]["versions"]["Other"] == "abc"
    assert kept["two"]["command"] == "benchmarks/x.py --from sources --cpu"


def test_a_run_goes_on_after_a_miss_and_where_it_was_stopped(
    results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text(sys.argv[0]); sys.exit({})"
    for name, status in (("one", 1), ("two", 0), ("_helper", 3)):
        (tmp_path / f"{name}.py").write_text(said.format(status))
    for name, path in (("HERE", tmp_path), ("DATA", tmp_path), ("STATE", tmp_path / "state.json")):
        monkeypatch.setattr(results, name, path)
    assert results.run_all() == {"one": 1, "two": 0}
    assert (tmp_path / "two.json").is_file() and not results.STATE.exists()
    results.STATE.write_text('{"one": 1}')  # stopped after the first one
    (tmp_path / "one.json").unlink()
    assert results.run_all() == {"one": 1, "two": 0} and not (tmp_path / "one.json").exists()


def test_every_part_names_a_benchmark(results: Any) -> None:
    named = {name for _, _, name, _, _ in results.MARKER.findall(PAGE.read_text(encoding="utf-8"))}
    assert named <= set(results.names())


def test_figures_of_the_readme_are_among_the_results() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## What it beats", 1)[1].split("\n## ", 1)[0]
    claims = re.findall(r"\*\*(\d[\d.,]*)\*\*", section)
    assert len(claims) >= 4
    text = PAGE.read_text(encoding="utf-8")
    missing = [claim for claim in claims if not re.search(rf"(?<![\d.,]){re.escape(claim)}(?![\d]|[.,]\d)", text)]
    assert not missing, "the results have changed: say what docs/results.md says"
