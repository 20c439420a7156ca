"""The machine at hand as a cluster file: what `tapas calibrate` measures on two local ranks, as a user does it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WORLD = 2


@contextmanager
def calibrated(given: Path | None) -> Iterator[str]:
    """The path of a file: the given one, or else one that lasts as long as it is used."""
    if given is not None:
        yield str(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "here.toml")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", "-m"]
        command += ["tapas.cli", "calibrate", "-o", path, "--device", "cpu", "--force"]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        yield path
