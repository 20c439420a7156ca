"""One rank as a process of its own that records a step: `python -m tapas.verify.traced_rank FOLDER RANK`."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from tapas.verify.homes import enter_homes
from tapas.verify.rank import hand_in, run_and_exit
from tapas.verify.recorded_step import RecordedTrial, record_step

# NCCL takes several ranks of one device for a mistake, unless they seem to be on several hosts
_APART = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def main(folder: Path, rank: int) -> None:
    given: RecordedTrial = torch.load(folder / "trial.pt", weights_only=False)  # written by our own parent
    trial, backend = given.trial, "gloo"
    enter_homes(trial.homes, trial.graph)
    world = trial.mesh.devices
    if given.device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if torch.cuda.device_count() < world:
            os.environ.update(_APART | {"NCCL_HOSTID": f"tapas{rank}"})
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    hand_in(record_step(trial, given.device), folder, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_and_exit(main)
