"""Folders that are there completely or not at all.

A new one is made beside the old, under a name with a dot; the old one is moved aside, the new one in its
place. Whoever is killed between these two renames leaves the old one aside, where readers find it.
"""

import os
import re
import secrets
import shutil
from pathlib import Path

from tapas.checkpoint.module_state import CheckpointError


def real(path: str | os.PathLike[str]) -> Path:
    """A link stays where it is: what it points to is replaced."""
    return Path(os.path.realpath(path))


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def standing(target: Path) -> Path:
    """Where a folder is to be read."""
    return target if target.exists() or not _aside(target).is_dir() else _aside(target)


def begin(target: Path) -> Path:
    """An empty folder to write to; what was left by those who did not finish is removed."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if _aside(target).exists():
            if target.exists():
                shutil.rmtree(_aside(target))
            else:
                os.rename(_aside(target), target)
        for entry in list(target.parent.iterdir()):
            if re.fullmatch(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.part", entry.name):
                shutil.rmtree(entry)
        part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
        part.mkdir()
    except OSError as error:
        raise CheckpointError(str(target), f"cannot be written: {error.strerror}", "write elsewhere") from None
    return part


def finish(part: Path, target: Path) -> None:
    """Put a complete folder into its place."""
    sync(part)
    aside = _aside(target)
    if target.exists():
        os.rename(target, aside)
    try:
        os.rename(part, target)
    except OSError:
        if aside.exists():
            os.rename(aside, target)
        raise
    sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def discard(part: Path) -> None:
    shutil.rmtree(part, ignore_errors=True)


def sync(path: Path) -> None:
    """Have a file or the names in a folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)
