"""An optimizer on parts is the plain one over DTensors, bit for bit: its steps, its state and its checkpoints."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import tapas
from tapas._torch import TorchDispatchMode, local_part
from tapas.errors import TapasError
from tests.distributed import saved
from tests.distributed.parallel import mesh_of, parallel_of
from tests.distributed.pool import Pool
from tests.distributed.saved import Hand, contents, placed
from tests.distributed.test_checkpoints import NEAR, ranks, same
from tests.runtime.test_elementwise import OTHERS

R = Replicate()
PLACEMENTS: dict[tuple[int, ...], dict[str, Any]] = {
    (2,): {"a": [Shard(0)], "b": [R], "c": [_StridedShard(0, split_factor=3)], "d": [R], "e": [Shard(1)],
           "f": [Shard(1)]},
    (2, 2): {"a": [Shard(1), Shard(0)], "b": [Shard(0), Shard(0)], "c": [Shard(0), Shard(1)], "d": [R, R],
             "e": [Shard(0), Shard(0)], "f": [R, Shard(1)]},
}  # fmt: skip
COMMON = {"maximize": [False, True], "weight_decay": [0.0, 0.1], "foreach": [None, True]}
CHOICES: dict[str, dict[str, list[Any]]] = {
    "SGD": COMMON | {"lr": [0.1], "momentum": [0.0, 0.9], "fused": [None, True]},
    "Adam": COMMON | {"amsgrad": [False, True], "fused": [None, True], "lr": [0.1, "tensor"]},
    "AdamW": COMMON | {"amsgrad": [False, True], "fused": [None, True], "betas": [(0.8, 0.9), (0.0, 0.99)]},
    "Adamax": COMMON,
    "Adadelta": COMMON,
    "Adagrad": COMMON | {"lr_decay": [0.0, 0.1], "initial_accumulator_value": [0.0, 1.0], "fused": [None, True]},
    "RMSprop": COMMON | {"momentum": [0.0, 0.9], "centered": [False, True]},
    "Rprop": {"maximize": [False, True], "foreach": [None, True]},
    "NAdam": COMMON | {"decoupled_weight_decay": [False, True]},
    "RAdam": COMMON | {"decoupled_weight_decay": [False, True]},
    "ASGD": COMMON | {"t0": [1, 1e6]},
}


def drawn(kind: str, seed: int) -> dict[str, Any]:
    draw = random.Random(f"{seed} {kind}")
    options = {key: draw.choice(values) for key, values in CHOICES[kind].items()}
    if options.get("fused"):
        del options["foreach"]
    if options.get("lr") == "tensor":
        options["lr"] = torch.tensor(0.1)  # of its own: schedules write to it
        options.pop("foreach", None)
    return options


Way = Callable[..., torch.optim.Optimizer]


def plainly(kind: Any, params: Any, /, **options: Any) -> torch.optim.Optimizer:
    return kind(params, **options)


WAYS: dict[str, Way] = {"plain": plainly, "local": tapas.local_optimizer}


def by_hand(shape: tuple[int, ...]) -> Hand:
    return Hand(mesh_of(shape), PLACEMENTS[shape])


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    first, second, *rest = module.parameters()
    return [{"params": [first], "weight_decay": 0.3}, {"params": [second, *rest]}]


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    """With gradients of which some are missing now and then, and which are clipped."""
    generator = torch.Generator().manual_seed(seed)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for step in range(steps):
        for number, p in enumerate(module.parameters()):
            p.grad = None
            whole = torch.randn(p.shape, generator=generator)
            if step == 0 or (number + step) % 4:  # fused SGD wants all of them in the first step
                p.grad = placed(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole
        for p in module.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def differing(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """Where two do not have the same."""
    wrong = sorted(one.keys() ^ two.keys())
    for name in one.keys() & two.keys():
        a, b = one[name], two[name]
        same = type(a) is type(b) and (torch.equal(a, b) and a.dtype == b.dtype if torch.is_tensor(a) else a == b)
        wrong += [] if same else [name]
    return wrong


def kinds(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Of all that is remembered: what it is, and how it is placed."""
    return [
        (number, key, type(x), getattr(x, "placements", None), getattr(x, "shape", None), getattr(x, "dtype", None))
        for number, held in optimizer.state_dict()["state"].items()
        for key, x in held.items()
    ]


def both_ways(rank: int, shape: tuple[int, ...], kind: str, seeds: int) -> tuple[list[str], int]:
    """What differs after some steps, and how often DTensor had no way to do them."""
    if rank >= torch.Size(shape).numel():
        return [], 0
    wrong, refused = [], 0
    for seed in range(seeds):
        after: dict[str, Any] = {}
        for way, make in {"whole": plainly, **WAYS}.items():
            options = drawn(kind, seed)
            module = Hand() if way == "whole" else by_hand(shape)
            params = groups_of(module) if "weight_decay" in options and seed % 2 else module.parameters()
            try:
                optimizer = make(getattr(torch.optim, kind), params, **options)
                trained(module, optimizer, 5, seed)
            except (NotImplementedError, RuntimeError) as error:
                assert way == "plain" and (options.get("fused") or kind == "Rprop"), error
                refused += 1
                continue
            after[way] = contents(module, optimizer), kinds(optimizer)
        local, remembered = after["local"]
        options = drawn(kind, seed)
        if "plain" in after:
            wrong += [f"{options}: {name}" for name in differing(after["plain"][0], local)]
            wrong += [f"{options}: {a} {b}" for a, b in zip(after["plain"][1], remembered, strict=True) if a != b]
        for name, value in after["whole"][0].items():
            if torch.is_tensor(value) and not torch.allclose(value, local[name], rtol=1e-5):
                wrong.append(f"{options}: {name} is not that of one device")
    return wrong, refused


QUICK = ("AdamW", "SGD", "Adafactor", "RMSprop")


@pytest.mark.parametrize("shape", PLACEMENTS, ids=str)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.full) for kind in CHOICES]
)
def test_as_the_plain_one(pool: Pool, kind: str, shape: tuple[int, ...]) -> None:
    """Where there is a plain one: DTensor has neither fused SGD and Adagrad nor Rprop."""
    for wrong, refused in pool(both_ways, shape, kind, 3):
        assert not wrong
        assert refused < 3 or kind == "Rprop"


# -- in a loop -----------------------------------------------------------------------------------------


class Dispatches(TorchDispatchMode):
    """Counts operators on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            self.count += 1
            return NotImplemented
        return func(*args, **(kwargs or {}))


def in_a_loop(rank: int, family: str) -> tuple[list[str], dict[str, int], list[list[float]]]:
    """What differs, how many operators on DTensors a step takes, and the losses."""
    after, counts, losses = {}, {}, []
    for way, make in WAYS.items():
        _, inputs, module = parallel_of(family, mesh_of((2, 2)))
        optimizer = make(torch.optim.AdamW, module.parameters(), lr=1e-2)
        values = []
        for _ in range(4):
            loss = module(**inputs)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            with Dispatches() as seen:
                optimizer.step()
            counts[way] = seen.count
            optimizer.zero_grad()
            values.append(float(loss.detach()))
        losses.append(values)
        after[way] = contents(module, optimizer)
    return differing(after["plain"], after["local"]), counts, losses


@pytest.mark.parametrize("family", ["packed", pytest.param("llama", marks=pytest.mark.full)])
def test_in_a_loop(pool: Pool, family: str) -> None:
    for wrong, counts, (plain, local) in pool(in_a_loop, family):
        assert not wrong
        assert plain == local and plain[-1] < plain[0]
        assert counts["plain"] > 50 and counts["local"] == 0


def used_in_many_ways(rank: int) -> None:
    """As any optimizer is: closures, hooks, groups that come later, state that users change."""
    seen: list[Any] = []
    found = {}
    for way, make in WAYS.items():
        _, inputs, module = parallel_of("packed", mesh_of((2, 2)))
        first, *others = module.named_parameters()
        optimizer = make(torch.optim.Adam, [first], lr=1e-2)
        optimizer.add_param_group({"params": others, "lr": 1e-3, "amsgrad": True})
        assert optimizer.param_groups[1]["param_names"] == [name for name, _ in others]
        assert optimizer.defaults["lr"] == 1e-2 and not optimizer.state
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": [others[0]]})
        optimizer.register_step_pre_hook(lambda opt, *_: seen.append(len(opt.param_groups)))
        optimizer.register_step_post_hook(lambda opt, *_: seen.append(len(opt.state)))

        def closure(module: nn.Module = module, inputs: Any = inputs, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = module(**inputs)["loss"]
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure))]
        weight = others[0][1]
        held = optimizer.state[weight]
        held["exp_avg"].zero_()  # in place,
        held["exp_avg_sq"] = held["exp_avg_sq"] * 2  # by another tensor,
        optimizer.state[first[1]].clear()  # and not at all any more
        losses.append(float(optimizer.step(closure)))
        assert held is optimizer.state[weight] and float(optimizer.state[first[1]]["step"]) == 1
        optimizer.state.pop(weight)
        losses.append(float(optimizer.step(closure)))
        with torch.no_grad():  # other memory for a parameter
            weight.data = weight.data * 0.5
        losses.append(float(optimizer.step(closure)))

        def without(weight: Any = weight, closure: Any = closure) -> Any:
            loss = closure()
            weight.grad = None  # it had one when the step began
            return loss

        losses.append(float(optimizer.step(without)))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(module(**inputs)["loss"]).backward()
        scaler.step(optimizer)
        found[way] = {**contents(module, optimizer), "losses": losses}
    assert not differing(found["plain"], found["local"])
    assert seen == [2, len(list(module.parameters()))] * 12


def test_used_in_many_ways(pool: Pool) -> None:
    pool(used_in_many_ways)


# -- checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.full) for f in ("packed", "gpt2")])
def test_checkpoints_of_both_ways(pool: Pool, tmp_path: Path, family: str) -> None:
    """What one saves the other loads, on any mesh, and goes on as if nothing had happened."""
    a, b, c = (str(tmp_path / name) for name in "abc")
    first = ranks(pool(saved.run, family, (2, 2), "local", None, 2, a, 2), (2, 2))
    plain = ranks(pool(saved.run, family, (2, 2), "adamw", None, 2, c, 2), (2, 2))
    for one, other in zip(first, plain, strict=True):
        same(one["saved"], other["saved"])
        assert one["more"] == other["more"]
    for kind in "adamw", "local":
        for rank, before in zip(pool(saved.run, family, (2, 2), kind, a, 2, None), first, strict=True):
            same(rank["loaded"], before["saved"])
            assert rank["losses"] == before["more"]
    for path in a, c:
        for rank in ranks(pool(saved.run, family, (4,), "local", path, 0, b, 2), (4,)):
            same(rank["loaded"], first[0]["saved"])
            assert rank["more"] == pytest.approx(first[0]["more"], rel=NEAR[family])
    for kind in "adamw", "local":
        alone = saved.run(0, family, (), kind, b, 0, None)
        assert alone is not None
        same(alone["loaded"], first[0]["saved"])


def through_torch(rank: int, path: str) -> None:
    """torch.distributed.checkpoint, and states handed from one optimizer to the other."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    def start(way: str, mesh: tuple[int, ...]) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        _, inputs, module = parallel_of("bert", mesh_of(mesh))
        return module, WAYS[way](torch.optim.AdamW, module.parameters(), lr=1e-2), inputs

    module, optimizer, inputs = start("local", (2, 2))
    saved.train(module, optimizer, inputs, 2)
    weights = module.state_dict()
    save({"weights": weights, "optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=path)
    before = contents(module, optimizer)
    losses = saved.train(module, optimizer, inputs, 2)
    for way, mesh in (("local", (2, 2)), ("plain", (2, 2)), ("local", (4,))):
        other, its, inputs = start(way, mesh)
        state = {"weights": other.state_dict(), "optimizer": get_optimizer_state_dict(other, its)}
        load(state, checkpoint_id=path)
        set_optimizer_state_dict(other, its, state["optimizer"])
        assert not differing(contents(other, its), before), (way, mesh)
        if mesh == (2, 2):
            assert saved.train(other, its, inputs, 2) == losses
    for giver, taker in (("local", "plain"), ("plain", "local")):
        given, its, inputs = start(giver, (2, 2))
        saved.train(given, its, inputs, 2)
        taken, other, _ = start(taker, (2, 2))
        taken.load_state_dict(given.state_dict())
        other.load_state_dict(its.state_dict())
        assert not differing(contents(given, its), contents(taken, other))
        del its
        assert saved.train(taken, other, inputs, 2) == losses


@pytest.mark.full
def test_checkpoints_of_torch(pool: Pool, tmp_path: Path) -> None:
    pool(through_torch, str(tmp_path / "a"))


# -- what is refused -----------------------------------------------------------------------------------


def refusals(rank: int) -> list[str]:
    mesh, found = mesh_of((4,)), []

    def refused(work: Callable[[], Any]) -> None:
        with pytest.raises(TapasError) as error:
            work()
        found.append(str(error.value))

    def parameter(*placements: Any) -> nn.Parameter:
        return nn.Parameter(placed(torch.ones(4, 6), mesh, placements))

    for kind, options in OTHERS.items():
        refused(lambda k=kind, o=options: tapas.local_optimizer(getattr(torch.optim, k), [parameter(Shard(0))], **o))
        # whole on all ranks, it is the same on each of them
        after = {}
        for way, make in WAYS.items():
            whole = parameter(Replicate())
            optimizer: Any = make(getattr(torch.optim, kind), [("w", whole)], **options)
            for step in range(3):

                def closure(whole: Any = whole, step: int = step) -> torch.Tensor:
                    whole.grad = placed(torch.arange(24.0).reshape(4, 6).sin() + step, mesh, whole.placements)
                    return torch.ones(())

                closure()
                try:
                    optimizer.step(closure)
                except (NotImplementedError, RuntimeError) as error:
                    assert way == "plain", error
            after[way] = local_part(whole)
        assert not torch.equal(after["local"], torch.ones(4, 6)), kind
        if not torch.equal(after["plain"], torch.ones(4, 6)):
            assert torch.allclose(after["local"], after["plain"]), kind
    split = parameter(Shard(0))
    optimizer = tapas.local_optimizer(torch.optim.Adam, [split])
    split.grad = placed(torch.ones(4, 6), mesh, [Replicate()])  # placed otherwise
    optimizer.step()
    assert torch.allclose(local_part(split), torch.full((1, 6), 0.999))
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.ones(4, 6)
    refused(lambda: optimizer.load_state_dict(state))
    refused(lambda: copy.deepcopy(optimizer))
    refused(lambda: tapas.local_optimizer(torch.optim.Adam, [split], differentiable=True))
    return found


def test_refusals(pool: Pool) -> None:
    for found in pool(refusals):
        for name, text in zip(OTHERS, found, strict=False):
            assert f"{name} cannot work on a part" in text and "(4, 6)" in text
        plain, copied, differentiable = found[len(OTHERS) :]
        assert "exp_avg" in plain and "state_dict()" in copied and "differentiable" in differentiable
