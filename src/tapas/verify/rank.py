"""One rank as a process of its own: `python -m tapas.verify.rank FOLDER RANK`. Started by processes.py."""

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapas.runtime.collectives import Rank
from tapas.runtime.executor import Executor, Options
from tapas.verify.draws import with_same_draws
from tapas.verify.homes import enter_homes
from tapas.verify.precision import default_dtype
from tapas.verify.steps import Outcome, Stepper, take_steps
from tapas.verify.trial import PRECISIONS, Trial


class Held(nn.Module):
    """Leaves as the parallel module wants to read them from a model."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial, self.trained = trial, set(trial.trained())

    def _of(self, kind: str):
        for leaf in self.trial.graph.leaves:
            if leaf.kind == kind:
                value = self.trial.leaves[leaf.tensor]
                yield leaf.paths[0], value.requires_grad_(leaf.tensor in self.trained)

    def named_parameters(self, *_, **__):  # type: ignore[override]
        return self._of("parameter")

    def named_buffers(self, *_, **__):  # type: ignore[override]
        return self._of("buffer")


def end_with_parent() -> None:
    """Whoever started this holds the other end of stdin: when that closes, however it came, so does this."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(3)

    threading.Thread(target=wait, daemon=True).start()


def parallel_stepper(trial: Trial, device: str = "cpu", options: Options | None = None) -> tuple[Stepper, Executor]:
    """The parallel module that this rank trains, on the mesh of all of them."""
    from torch.distributed.device_mesh import init_device_mesh

    from tapas.runtime.module import ParallelModule, executor_of

    device_mesh = init_device_mesh(device, trial.mesh.sizes, mesh_dim_names=trial.mesh.names)
    coord = tuple(device_mesh.get_coordinate() or ())
    module = ParallelModule(Held(trial), trial.source(), device_mesh, options=options)
    executor, graph = executor_of(module), trial.graph
    inputs = {leaf.paths[0]: trial.leaves[leaf.tensor].to(device) for leaf in graph.leaves if leaf.kind == "input"}
    parameters = {name: module.get_parameter(graph.leaf_of[name].paths[0]) for name in trial.trained()}
    held = [*module.parameters(), *module.buffers(), *executor.constants]

    def buffers() -> dict[str, torch.Tensor]:
        return {buffer: module.get_buffer(graph.leaf_of[buffer].paths[0]) for buffer, _ in graph.writes}

    stepper = Stepper(
        graph, lambda: module(**inputs), parameters, buffers, trial.placed.share(coord), executor.count, held,
        list(inputs.values()),
    )  # fmt: skip
    return stepper, executor


def run_trial(trial: Trial) -> Outcome:
    stepper, executor = parallel_stepper(trial)
    rank = Rank(trial.mesh.sizes, executor.rank.coord, [], executor.count, torch.device("cpu"))
    with_same_draws(executor.program, trial, rank)
    return take_steps(stepper, trial.steps)


def _run_at(trial: Trial, precision: str) -> Outcome:
    with default_dtype(precision):
        return run_trial(trial.at(precision))


def main(folder: Path, rank: int) -> None:
    import torch.distributed as dist

    trial: Trial = torch.load(folder / "trial.pt", weights_only=False)  # written by our own parent a moment ago
    enter_homes(trial.homes, trial.graph)
    world = trial.mesh.devices
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    hand_in([_run_at(trial, precision) for precision in PRECISIONS], folder, rank)
    dist.destroy_process_group()


def hand_in(result: Any, folder: Path, rank: int) -> None:
    """For the parent, complete or not at all."""
    torch.save(result, folder / f"rank{rank}.pt.part")
    os.replace(folder / f"rank{rank}.pt.part", folder / f"rank{rank}.pt")


def run_and_exit(main: Callable[[Path, int], None] = main) -> None:
    """The whole life of the process, with the folder and the rank from the command line."""
    end_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the parent asks where a rank hangs
    torch.set_num_threads(1)
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a normal exit would wait for ranks that wait for this one
    os._exit(0)


if __name__ == "__main__":
    run_and_exit()
