"""The wheel: it holds every file of the package, says the version that the command says, and runs where it lies."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tapas.util import VERSION
from tests.pages import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "copy" / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "copy")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", str(folder), str(folder / "copy")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    source = ROOT / "src"
    wanted = {str(p.relative_to(source)) for p in (source / "tapas").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info")}
    assert held == wanted and "tapas/hardware/clusters.toml" in held
    assert wheel.name == f"tapas_parallel-{VERSION}-py3-none-any.whl"


def test_what_is_installed_runs(wheel: Path, tmp_path: Path) -> None:
    """Its own files are found: without the repository, isolated from whatever else is on the path."""
    with zipfile.ZipFile(wheel) as archive:  # what pip does with one that has no scripts to build
        archive.extractall(tmp_path)
        (points,) = (archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt"))
    assert "tapas = tapas.cli.__main__:main" in points
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['tapas', *{{}}]\n"
    code += "import tapas; assert tapas.__file__.startswith(sys.path[0]); from tapas.cli.__main__ import main; main()"
    for arguments, words in ((["--version"], f"tapas {VERSION}"), (["clusters"], "h100-sxm")):
        command = [sys.executable, "-I", "-c", code.format(arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert words in done.stdout, done.stderr
