"""Ranks as processes that load what was exported as its tool does, and run it beside the whole model."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    """What the first rank has of every case, or the error that it met."""
    (folder / "cases.json").write_text(json.dumps(list(cases)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, sys.path))
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": path,
              "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "tests.export.ranks", str(folder)]
    started = [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": str(r), "LOCAL_RANK": str(r)},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for r in range(ranks)
    ]  # fmt: skip
    try:
        words = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(words)
    return torch.load(folder / "found.pt", weights_only=False)


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
            import traceback

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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
