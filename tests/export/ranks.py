"""Ranks as processes that load what was exported as its tool does, and run it beside the whole model."""

import json
import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.distributed.pool import IMPORTED

STEPS, RATE = 3, 0.1


def whole(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs and gradients of one rank, and its losses in some steps of training."""
    return {
        "outputs": _outputs(model, inputs),
        "gradients": _gradients(model, inputs),
        "losses": _trained(model, inputs),
    }


def _outputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        found = model(**inputs)
    return {name: found[name].clone() for name in ("loss", "logits") if name in found}


def _gradients(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**inputs)["loss"].backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    full = {name: _full(grad).clone() for name, grad in found.items()}
    model.zero_grad()
    return full


def _full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _trained(model: nn.Module, inputs: Mapping[str, Any]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), RATE, foreach=False)
    losses: list[float] = []
    for _ in range(STEPS):
        loss = model(**inputs)["loss"]
        losses.append(float(_full(loss.detach())))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run(folder: Path, cases: Iterable[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """What the first rank has of every case, or the error that it met. Ranks are forked from the server that the pool
    of other tests uses, too: it has imported already what takes longest."""
    (folder / "cases.json").write_text(json.dumps(list(cases)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
              "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    started = [context.Process(target=_rank, args=(rank, folder, shared), daemon=True) for rank in range(ranks)]
    for process in started:
        process.start()
    try:
        for process in started:
            process.join(300)
    finally:
        for process in started:
            process.kill()
    words = "\n".join(file.read_text() for file in sorted(folder.glob("rank*.txt")))
    assert all(process.exitcode == 0 for process in started), f"{[p.exitcode for p in started]} {words}"
    return torch.load(folder / "found.pt", weights_only=False)


def _rank(rank: int, folder: Path, shared: Mapping[str, str]) -> None:
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    warnings.simplefilter("ignore")  # what the tools warn of is theirs
    try:
        main(folder)
    except BaseException:
        (folder / f"rank{rank}.txt").write_text(traceback.format_exc())
        raise


def main(folder: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for case in json.loads((folder / "cases.json").read_text()):
        inputs = torch.load(folder / case["name"] / "inputs.pt")
        try:
            model = LOADERS[case["to"]](folder / case["name"], case)
            found.append(_averaged(whole(model, _own_part(inputs, case)), case))
        except Exception as error:  # the same on all ranks, or the next case hangs and the test with it
            found.append({"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"})
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def _in_transformers(folder: Path, case: Mapping[str, Any]) -> nn.Module:
    import transformers

    said = json.loads((folder / "exported").read_text())
    kind = getattr(transformers, case["class"])
    return kind.from_pretrained(folder, distributed_config=said, dtype=getattr(torch, case["dtype"])).eval()


def _in_torch(folder: Path, case: Mapping[str, Any]) -> nn.Module:
    import runpy

    import transformers

    said = runpy.run_path(str(folder / "exported"))
    model = getattr(transformers, case["class"]).from_pretrained(folder, dtype=getattr(torch, case["dtype"])).eval()
    return said["parallelize"](model, said["make_mesh"]("cpu"))


LOADERS = {"transformers": _in_transformers, "torch": _in_torch}


def _own_part(inputs: Mapping[str, Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """Of the batch, along the outer axis of the mesh."""
    import torch.distributed as dist

    parts = case["data"]
    return {
        name: value.chunk(parts)[dist.get_rank() * parts // dist.get_world_size()] for name, value in inputs.items()
    }


def _averaged(found: dict[str, Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """Over the parts of the batch."""
    import torch.distributed as dist

    if case["data"] == 1:
        return found
    losses = torch.tensor([float(found["outputs"]["loss"]), *found["losses"]], dtype=torch.float64)
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    return {"outputs": {"loss": losses[0]}, "gradients": found["gradients"], "losses": losses[1:].tolist()}
