"""The parallel module in a normal training loop, on real process groups."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tapas.capture import capture
from tapas.ir.fold import fold
from tapas.plan.traffic import predicted
from tapas.planner.pipeline import decided
from tapas.planner.request import Request
from tapas.runtime.module import executor_of
from tapas.verify.traffic import executed
from tests.distributed.parallel import mesh_of, model_of, parallel_of
from tests.distributed.pool import Pool
from tests.distributed.small import EAGER

STEPS = 5
MESHES = [(2,), (4,), (2, 2)]
DEEP = {"deep": 1e-9, "deep_llama": 1e-5}
TOLERANCE = {"gpt2": 1e-5, "packed": 1e-9, "llama": 1e-5}  # transformers' losses and norms are float32 in any case


def train(model: nn.Module, inputs: dict[str, Any], whole: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs)["loss"]
        loss.backward()
        if not step:
            gradients = {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        norms.append(float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
        optimizer.step()
        losses.append(float(whole(loss)))
    return {"losses": losses, "norms": norms, "gradients": gradients, "names": sorted(model.state_dict())}


def in_parallel(rank: int, family: str, sizes: tuple[int, ...]) -> dict[str, Any] | None:
    mesh = mesh_of(sizes)
    if mesh.get_coordinate() is None:
        return None
    _, inputs, module = parallel_of(family, mesh)
    found = train(module, inputs, lambda x: x.full_tensor() if isinstance(x, DTensor) else x.detach())
    found["sent"] = executed([executor_of(module).count])
    found["split"] = sum(any(p.is_shard() for p in q.placements) for q in module.parameters())
    return found


def planned_bytes(model: nn.Module, inputs: dict[str, Any], mesh: tuple[int, ...]) -> Counter:
    graph = capture(model, inputs)
    folded = fold(graph)
    return predicted(folded, decided(graph, folded, Request.of(mesh, EAGER)))


QUICK = {("llama", (2, 2)), ("gpt2", (4,)), *(("packed", mesh) for mesh in MESHES)}
CASES = [
    pytest.param(*case, id="{}-{}".format(*case), marks=() if case in QUICK else pytest.mark.full)
    for case in product(TOLERANCE, MESHES)
]
CASES += [pytest.param(family, (2, 2), id=f"{family}-(2, 2)") for family in DEEP]


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_training_is_that_of_the_original(pool: Pool, family: str, mesh: tuple[int, ...]) -> None:
    model, inputs = model_of(family)
    planned = planned_bytes(model, inputs, mesh)
    wanted = train(model, inputs, lambda x: x.detach())
    near = (TOLERANCE | DEEP)[family]
    ranks = [found for found in pool(in_parallel, family, mesh) if found is not None]
    assert len(ranks) == torch.Size(mesh).numel()
    for found in ranks:
        assert found["losses"] == pytest.approx(wanted["losses"], rel=near)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=near)
        assert found["names"] == wanted["names"]
        assert found["split"] > 0
        for name, gradient in wanted["gradients"].items():
            scale = max(float(gradient.norm()), 1e-6)
            assert float((found["gradients"][name] - gradient).norm()) / scale < near, name
    for key in planned.keys() | ranks[0]["sent"].keys():
        assert max(found["sent"][key] for found in ranks) == STEPS * planned[key], key
