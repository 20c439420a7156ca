"""The helpers that all rooms share: files that are complete or not there."""

import os
import stat
from pathlib import Path

import pytest

from tapas.errors import PlanError
from tapas.util import write_file


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_mode_of_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "new", b"content")
    finally:
        os.umask(before)
    assert (tmp_path / "new").read_bytes() == b"content" and mode(tmp_path / "new") == 0o640


def test_a_file_that_is_written_again_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")
    path.chmod(0o600)
    write_file(str(path), b"new")
    assert path.read_bytes() == b"new" and mode(path) == 0o600


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanError, match="cannot be written: No space left on device"):
        write_file(path, b"new")
    assert os.listdir(tmp_path) == ["old"] and path.read_bytes() == b"old"


def test_names_of_temporary_files_cannot_be_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (names.append(Path(a)), replace(a, b)))
    for _ in range(2):
        write_file(tmp_path / "plan.json", b"")
    assert names[0] != names[1] and all(name.parent == tmp_path for name in names), "in the same folder"
    assert not any(str(os.getpid()) in name.name for name in names)
