"""The example: one process and many have the same loss curve, on any mesh and across checkpoints; and a
rank that is killed leaves nothing behind."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.distributed.pool import Pool

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "train_gpt.py"
SMALL = ["--dtype", "float64", "--width", "24", "--length", "16", "--batch", "8", "--heads", "3"]
SPLIT = ["--pin", "blocks.*=megatron", "--pin", "head.weight=S(0)"]


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(rank: int, arguments: list[str]) -> list[float]:
    """On a worker, where a process group exists."""
    import warnings

    warnings.simplefilter("ignore")
    found = example()
    return found.train(found.options(arguments))


@pytest.mark.parametrize("steps", [24, pytest.param(200, marks=pytest.mark.full)])
def test_loss_curve_across_meshes_and_a_checkpoint(pool: Pool, tmp_path: Path, steps: int) -> None:
    found = example()
    half, all_steps = steps // 2, ["--steps", str(steps)]
    wanted = found.train(found.options([*SMALL, *all_steps]))
    assert len(wanted) == steps
    assert wanted[-1] < 0.9 * wanted[0]
    saved = ["--save", str(tmp_path / "half")]
    whole = pool(trained, [*SMALL, *SPLIT, "--mesh", "2x2", *all_steps])
    assert all(losses == pytest.approx(wanted, abs=1e-8, rel=0) for losses in whole)
    first = pool(trained, [*SMALL, *SPLIT, "--mesh", "2x2", "--steps", str(half), *saved])
    assert all(losses == pytest.approx(wanted[:half], abs=1e-8, rel=0) for losses in first)
    resumed = ["--resume", str(tmp_path / "half"), *all_steps]
    second = pool(trained, [*SMALL, "--mesh", "4", "--pin", "*=fsdp", *resumed])
    assert all(losses == pytest.approx(wanted[half:], abs=1e-8, rel=0) for losses in second)
    alone = found.train(found.options([*SMALL, *resumed]))
    assert alone == pytest.approx(wanted[half:], abs=1e-8, rel=0)


# -- a rank is killed --------------------------------------------------------------------------------


def _stat(pid: str) -> tuple[int, int]:
    """Parent and session of a process; of one that is gone, none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0, 0
    return (0, 0) if fields[0] == "Z" else (int(fields[1]), int(fields[3]))


def _processes() -> dict[int, tuple[int, int]]:
    return {int(name): _stat(name) for name in os.listdir("/proc") if name.isdigit()}


def _descendants(pid: int) -> list[int]:
    everyone = _processes()
    found, seen = [pid], 0
    while seen < len(found):
        found += [p for p, (parent, _) in everyone.items() if parent == found[seen] and p not in found]
        seen += 1
    return found[1:]


def _ranks(launcher: int) -> list[int]:
    """Its processes that run the example (the launcher has helpers of its own)."""
    found = []
    for pid in _descendants(launcher):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"train_gpt.py") for word in words):
            found.append(pid)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.full)])
def test_a_killed_rank_leaves_nothing_behind(tmp_path: Path, kills: int) -> None:
    """Ranks that save after every step; one of them is killed at a random moment, starting up included."""
    chance = random.Random(2023)
    target = tmp_path / "checkpoint"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    command += [*SMALL, "--steps", "100000", "--mesh", "2", "--save", str(target), "--every", "1"]
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    complete = 0
    for number in range(kills):
        resume = ["--resume", str(target)] if target.exists() else []
        log = tmp_path / f"{number}.txt"
        with open(log, "w") as words:
            run = subprocess.Popen(command + resume, env=quiet, stdout=words, stderr=words, start_new_session=True)
        try:
            deadline = time.monotonic() + 60
            while len(_ranks(run.pid)) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            early = number % 4 == 0  # mostly while it trains and saves, sometimes before that
            while not early and not target.exists():
                assert run.poll() is None, log.read_text()
                time.sleep(0.05)
            time.sleep(chance.uniform(0, 6 if early else 2))  # starting takes seconds, a step and its save do not
            started = set(_descendants(run.pid))
            ranks = _ranks(run.pid)
            assert len(ranks) == 2, log.read_text()
            os.kill(chance.choice(ranks), signal.SIGKILL)
            assert run.wait(60) != 0
            time.sleep(0.5)
            left = [pid for pid, (_, session) in _processes().items() if session == run.pid or pid in started]
            assert left == []
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
        if target.exists():
            complete += 1
            found = example()
            alone = found.train(found.options([*SMALL, "--steps", "0", "--resume", str(target)]))
            assert alone == []  # all of it could be read
    assert complete >= kills // 2
    found = example()
    found.train(found.options([*SMALL, "--steps", "1", "--save", str(target)]))
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".txt"] == ["checkpoint"]  # and nothing hidden
