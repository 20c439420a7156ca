"""What is said of a collective that failed, by who else has failed and where."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tapas._torch import default_store
from tapas.runtime import lost_ranks
from tapas.runtime.lost_ranks import CollectiveFailed, Sent, Site, collective_failed, site_of_parameters
from tapas.runtime.recorder import StepRecorder
from tapas.runtime.side_groups import SideGroups

FAILURE = RuntimeError("[/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:156. This is typical.")


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lost_ranks, "PATIENCE", 0.2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def failed_beside(reports: dict[int, tuple[int, list[int]]]) -> str:
    """This is rank 0, in a collective with ranks 1 and 2; others report the number of theirs, and its ranks."""
    for rank, (number, partners) in reports.items():
        report = {"number": number, "place": f"place {rank}", "what": f"what {rank}", "with": partners}
        default_store().set(f"tapas/lost/{rank}", json.dumps(report))
    sent = Sent("layers.3.mlp", "all_reduce", (0, 1), 2048, "forward", 17)
    return str(collective_failed(sent, [2, 0, 1], FAILURE))


WHAT = "layers.3.mlp: all-reduce over axes 0, 1 in the forward pass (2,048 bytes, collective 17) failed: "


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ({1: (17, [0, 1, 2])}, "rank 2 did not arrive (Connection closed by peer [127.0.0.1]:156); "),
        ({}, "one of ranks 1, 2 did not arrive, and the others of them wait for it ("),
        ({1: (17, [0, 1, 2]), 2: (18, [2, 5])}, "rank 5 did not arrive ("),
        ({1: (17, [0, 1, 2]), 2: (15, [0, 1, 2])}, "rank 2 was still at place 2: what 2 ("),
        ({1: (17, [0, 1, 2]), 2: (17, [0, 1, 2])}, "all of its ranks are alive ("),
    ],
)
def test_who_is_missing(reports: dict[int, tuple[int, list[int]]], said: str) -> None:
    assert failed_beside(reports).startswith(WHAT + said)


def test_without_a_store() -> None:
    dist.destroy_process_group()
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make("localhost", 0, 1, is_master=True, wait_for_workers=False)
    client = make("localhost", store.port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=client, rank=0, world_size=1)
    del store  # its host has ended
    assert failed_beside({}).startswith(WHAT + "who is missing cannot be told, the store of the process groups")


def test_places() -> None:
    site = Site("layers.0.mlp", "layers.0", "layers.0.mlp.down")
    assert site.within("layers.7") == "layers.7.mlp.down -> layers.7.mlp"
    assert site.within(None) == "layers.0.mlp.down -> layers.0.mlp or a copy of it"
    assert Site("layers.01.mlp", "layers.0").within("layers.7") == "layers.01.mlp"
    assert Site("norm").within("") == "norm" and Site().within("") == "model"
    assert site_of_parameters(["a.b.weight"]) == "a.b.weight"
    assert site_of_parameters(["a.b.weight", "a.b.bias"]).startswith("a.b (2 parameters")
    assert site_of_parameters(["a.b.weight", "c.b.bias"]).startswith("model (2 parameters")


@pytest.mark.parametrize("recorded", [False, True])
def test_what_is_sent_beside_the_computation(recorded: bool) -> None:
    recorder = StepRecorder()
    groups = SideGroups(init_device_mesh("cpu", (1,)), (0,), recorder.count)
    groups.paths = ["a.weight", "a.bias"]
    groups.add("all_reduce", (0,))
    side = recorder.side(groups) if recorded else groups
    side.sum((0,), torch.ones(2), of=(0, 1)).wait()
    with pytest.raises(CollectiveFailed, match=r"gradients of a \(2 parameters, .*\): all-reduce .* failed"):
        side.sum((0,), torch.ones(2, dtype=torch.int16), of=(0, 1)).wait()  # gloo has no sum of these
