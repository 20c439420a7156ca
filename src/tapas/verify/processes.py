"""All ranks as processes of their own. However it ends, none of them is left."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tapas.errors import TapasError
from tapas.verify.homes import IMPORTING
from tapas.verify.steps import Outcome
from tapas.verify.trial import Trial

RANK = "tapas.verify.rank"  # the module that each process runs
POLL, GRACE = 0.05, 0.5  # seconds: between looks, and for others to say why they failed
LINES = 6  # of a rank's last words
_ECHO = ("Connection closed by peer", "Connection reset by peer", "gloo", "Broken pipe")  # another rank's death
_WAITING = ("distributed_c10d.py", "_functional_collectives.py")


class RankFailed(TapasError):
    """A rank died or hangs."""


def run_in_processes(trial: Trial, timeout: float) -> list[list[Outcome]]:
    """For each rank, what it has in each precision."""
    return run_ranks(RANK, trial, trial.mesh.devices, timeout)


def run_ranks(module: str, trial: Any, ranks: int, timeout: float) -> list[Any]:
    """What each of some processes hands in; `module`: what they run, `trial`: what they are given."""
    with tempfile.TemporaryDirectory(prefix="tapas-verify-") as name:
        folder = Path(name)
        torch.save(trial, folder / "trial.pt")
        started: list[subprocess.Popen] = []
        try:
            for rank in range(ranks):
                started.append(_start(module, folder, rank))
            _watch(started, folder, timeout)
        finally:
            _end(started)
        return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(ranks)]


def _environment() -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:  # nothing of this leaves the machine
        quiet["GLOO_SOCKET_IFNAME"] = loopback[0]
    path = os.pathsep.join(folder for folder in sys.path if folder)  # of users' modules, too
    return os.environ | quiet | {"PYTHONPATH": path, IMPORTING: "1"}


def _start(module: str, folder: Path, rank: int) -> subprocess.Popen:
    with open(folder / f"rank{rank}.txt", "wb") as words:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(rank)], env=_environment(),
            stdin=subprocess.PIPE, stdout=words, stderr=words, start_new_session=True,
        )  # fmt: skip


def _watch(ranks: list[subprocess.Popen], folder: Path, timeout: float) -> None:
    """Return when all are done; raise when one is not going to be."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return
        if any(code not in (None, 0) for code in codes):
            time.sleep(GRACE)
            raise _death([rank.poll() for rank in ranks], folder)
        if time.monotonic() > deadline:
            raise _hang(ranks, folder, timeout)
        time.sleep(POLL)


def _words(folder: Path, rank: int) -> str:
    return (folder / f"rank{rank}.txt").read_text(errors="replace")


def _tail(text: str) -> str:
    return " | ".join(line.strip() for line in text.splitlines()[-LINES:] if line.strip()) or "it said nothing"


def _death(codes: list[int | None], folder: Path) -> RankFailed:
    """The rank that failed first: those that only lost their partner come last."""

    def order(rank: int) -> tuple[int, int]:
        code = codes[rank] or 0
        lost = any(sign in _tail(_words(folder, rank)) for sign in _ECHO)
        return 0 if code < 0 else 1 + lost, rank

    rank = min((r for r, code in enumerate(codes) if code not in (None, 0)), key=order)
    code = codes[rank] or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "failed"
    return RankFailed(f"rank {rank}", f"{how}: {_tail(_words(folder, rank))}", "all ranks were ended")


def _hang(ranks: list[subprocess.Popen], folder: Path, timeout: float) -> RankFailed:
    """Ask all where they are: the one to blame is not in a collective."""
    running = [r for r, rank in enumerate(ranks) if rank.poll() is None]
    for r in running:
        ranks[r].send_signal(signal.SIGUSR1)
    time.sleep(GRACE)
    stacks = {r: _words(folder, r) for r in running}
    lost = [r for r in running if not any(place in stacks[r] for place in _WAITING)]
    rank = (lost or running or [0])[0]
    where = " | ".join(line.strip() for line in stacks.get(rank, "").splitlines() if "File" in line)
    return RankFailed(
        f"rank {rank}", f"did not finish within {timeout:g} s; it is at: {where[:600] or 'an unknown place'}",
        "all ranks were ended; raise --timeout if it was only slow",
    )  # fmt: skip


def _end(ranks: list[subprocess.Popen]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            with suppress(ProcessLookupError):  # it may end by itself in the meantime
                os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()
        if rank.stdin is not None:
            rank.stdin.close()
