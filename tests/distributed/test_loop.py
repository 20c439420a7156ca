"""What people do with a module besides calling it: other inputs, precision, accumulation, compilation."""

import warnings
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

import tapas
from tapas.errors import TapasError
from tapas.runtime.module import executor_of
from tests.distributed.parallel import mesh_of, parallel_of
from tests.distributed.pool import Pool
from tests.distributed.small import EAGER, llama, small

MESH = (2, 2)
full = pytest.mark.full


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        found[name] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()
    return found


def differ(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((one[n] - two[n]).norm() / two[n].norm().clamp(min=1e-6)) for n in one)


# -- inputs ------------------------------------------------------------------------------------------


def given_in_many_ways(rank: int) -> list[float]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(MESH)
    pin = [("*", "ddp")]  # so that the batch is split
    model, inputs, module = parallel_of("packed", mesh, pins=pin)
    of_parts = tapas.parallelize(model, inputs, mesh=mesh, cluster=EAGER, pins=pin, parts=True)
    part = {name: value[rank : rank + 1] for name, value in inputs.items()}
    whole = {n: distribute_tensor(v, mesh, [Replicate(), Replicate()]) for n, v in inputs.items()}
    split = {n: distribute_tensor(v, mesh, [Shard(0), Shard(0)]) for n, v in inputs.items()}
    losses = [float(module(**given)["loss"]) for given in (inputs, whole, split)]
    losses += [float(of_parts(**given)["loss"]) for given in (part, split)]
    return [*losses, float(module(*inputs.values())["loss"]), float(model(**inputs)["loss"])]


def test_global_batch_part_or_dtensor(pool: Pool) -> None:
    for losses in pool(given_in_many_ways):
        assert losses == pytest.approx([losses[-1]] * len(losses), rel=1e-12)


def other_batches(rank: int, family: str, batches: list[int]) -> list[tuple[float, float, float]]:
    model, inputs, module = parallel_of(family, mesh_of(MESH))
    found = []
    for batch in batches:
        given = {n: v.repeat(3, *[1] * (v.dim() - 1))[:batch] for n, v in inputs.items()}
        results = []
        for one in (model, module):
            one.zero_grad()
            loss = one(**given)["loss"]
            loss.backward()
            results.append(loss.item())
        found.append((*results, differ(gradients(module), gradients(model))))
    return found


SIZES = [4, 8, 12, 6, 5, 4]


@pytest.mark.parametrize(("family", "sizes"), [("packed", SIZES), pytest.param("llama", SIZES, marks=full)])
def test_other_batch_sizes(pool: Pool, family: str, sizes: list[int]) -> None:
    """The plan's decisions are kept; a batch that does not divide is split unevenly."""
    near = {"packed": 1e-9, "llama": 1e-5}[family]
    for found in pool(other_batches, family, sizes):
        for original, ours, error in found:
            assert ours == pytest.approx(original, rel=near)
            assert error < near


def refused(rank: int) -> list[str]:
    _, inputs, module = parallel_of("packed", mesh_of(MESH))
    found = []
    for given in (
        {"x": inputs["x"]},
        {**inputs, "z": inputs["x"]},
        {**inputs, "x": inputs["x"][0]},
        {**inputs, "x": inputs["x"][..., :7]},
        {**inputs, "x": inputs["x"].clone().requires_grad_()},
        {**inputs, "x": None},
    ):
        try:
            module(**given)
        except TapasError as error:
            found.append(str(error))
    return found


def test_wrong_inputs_are_refused(pool: Pool) -> None:
    for found in pool(refused):
        assert len(found) == 6
        assert "y" in found[0] and "z" in found[1] and "(6, 24)" in found[2]


def planned_apart(rank: int) -> str:
    """The last rank plans for itself, and otherwise."""
    model, inputs = small("packed")
    pins = {"*": "ddp" if rank < 3 else "fsdp"}
    try:
        tapas.parallelize(model, inputs, mesh=mesh_of(MESH), cluster=EAGER, pins=pins)
    except TapasError as error:
        return str(error)
    return ""


def test_plans_that_differ_are_refused_by_all(pool: Pool) -> None:
    assert all(found.startswith("plan: is not the same on all ranks") for found in pool(planned_apart))


# -- the loop ----------------------------------------------------------------------------------------


def accumulated(rank: int) -> float:
    """Two backward passes before a step, and one backward pass through two forward passes."""
    model, inputs, module = parallel_of("packed", mesh_of(MESH))
    for one in (model, module):
        one(**inputs)["loss"].backward()
        more = {**inputs, "y": inputs["y"] + 1}
        (one(**inputs)["loss"] * 0.5 + one(**more)["loss"]).backward()
    return differ(gradients(module), gradients(model))


def test_accumulation(pool: Pool) -> None:
    assert max(pool(accumulated)) < 1e-10


def reduced(rank: int, family: str, strategy: str) -> tuple[float, int, list[int], int, int]:
    """How far gradients are off; whole weights, how many share each message; how many are to be scattered, and
    how many were while the backward pass went on."""
    model, inputs, module = parallel_of(family, mesh_of((4,)), pins=[("*", strategy)])
    ((prepared, gathering),) = executor_of(module).programs
    honest, handed = gathering._scatter, set()

    def noted(arriving: Any) -> None:
        handed.update(arriving.gradients)
        honest(arriving)

    gathering._scatter = noted
    for one in (model, module):
        one(**inputs)["loss"].backward()
    sent = [len(bucket.members) for bucket in gathering.packed.buckets]
    whole = sum(all(p.is_replicate() for p in q.placements) for q in module.parameters())
    return differ(gradients(module), gradients(model)), whole, sent, sum(map(len, prepared.units)), len(handed)


@pytest.mark.parametrize("family", ["packed", "llama"])
def test_gradients_are_packed_or_scattered(pool: Pool, family: str) -> None:
    near = {"packed": 1e-10, "llama": 1e-5}[family]
    for error, whole, sent, scattered, _ in pool(reduced, family, "ddp"):
        assert error < near
        assert sent == [whole]
        assert scattered == 0
    for error, whole, _, scattered, handed in pool(reduced, family, "fsdp"):
        assert error < near
        assert whole == 0 and handed == scattered > 0


def kept(rank: int) -> tuple[float, bool, int]:
    """How far gradients that somebody kept are from what they were; whether the others' memory is used again."""
    _, inputs, module = parallel_of("packed", mesh_of((4,)), pins=[("*", "ddp")])
    other = {**inputs, "y": inputs["y"] + 1}

    def step(given: dict[str, torch.Tensor]) -> torch.Tensor:
        module.zero_grad()
        module(**given)["loss"].backward()
        return next(module.parameters()).grad.to_local()  # type: ignore[union-attr]

    mine = step(inputs)[:1].detach()  # one row of one of them: it holds all
    before = mine.clone()
    places = [step(other).data_ptr() for _ in range(3)]
    return float((mine - before).abs().max()), mine.data_ptr() not in places, len(set(places))


def test_kept_gradients_stay_and_memory_is_used_again(pool: Pool) -> None:
    assert pool(kept) == [(0.0, True, 1)] * 4


def frozen(rank: int) -> float:
    """Some weights' gradients are not wanted any more, or again."""
    model, inputs, module = parallel_of("packed", mesh_of((4,)), pins=[("*", "ddp")])
    errors = []
    for wanted in (True, False, True):
        for one in (model, module):
            one.zero_grad()
            next(one.parameters()).requires_grad_(wanted)
            one(**inputs)["loss"].backward()
        errors.append(differ(gradients(module), gradients(model)))
    return max(errors)


def test_weights_that_are_frozen_for_a_while(pool: Pool) -> None:
    assert max(pool(frozen)) < 1e-10


def checkpointed(rank: int) -> float:
    from torch.utils.checkpoint import checkpoint

    model, inputs, module = parallel_of("packed", mesh_of(MESH))
    model(**inputs)["loss"].backward()
    checkpoint(lambda: module(**inputs)["loss"], use_reentrant=False).backward()
    return differ(gradients(module), gradients(model))


def test_activation_checkpointing(pool: Pool) -> None:
    assert max(pool(checkpointed)) < 1e-10


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(24, 40), nn.BatchNorm1d(40), nn.Linear(40, 24)
        self.drop = nn.Dropout(0.5)

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.down(self.drop(self.norm(self.up(x)).relu())) - y).square().mean()}


def evaluated(rank: int) -> tuple[list[float], list[float], float]:
    """Training, then evaluation: no dropout, and the statistics that training has gathered."""
    torch.manual_seed(0)
    model = Dropping().double()
    inputs = {"x": torch.randn(8, 24).double(), "y": torch.randn(8, 24).double()}  # not in the order of forward
    module = tapas.parallelize(model, inputs, mesh=mesh_of(MESH), cluster=EAGER)
    for one in (model, module):
        one(**inputs)["loss"].backward()
        one.eval()
    with torch.no_grad():
        wanted = [one(inputs["y"], inputs["x"])["loss"].item() for one in (model, module)]
    again = [module(**inputs)["loss"].item() for _ in range(2)]
    module.train()
    losses = [module(**inputs)["loss"].item() for _ in range(2)]
    return wanted, again, abs(losses[0] - losses[1])


def test_evaluation_mode(pool: Pool) -> None:
    for wanted, again, noise in pool(evaluated):
        assert wanted[1] == pytest.approx(wanted[0], rel=1e-9)
        assert again == pytest.approx([wanted[0]] * 2, rel=1e-9)
        assert noise > 1e-3  # dropout is back


def failing(rank: int) -> float:
    """A backward pass that fails half-way does not spoil the next one."""
    model, inputs, module = parallel_of("packed", mesh_of(MESH))

    (_, gathering), *_ = executor_of(module).programs
    honest, calls = gathering._arrived, 0

    def third_fails(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ArithmeticError
        honest(*given)

    gathering._arrived = third_fails
    with pytest.raises(ArithmeticError):
        module(**inputs)["loss"].backward()
    assert gathering.waiting
    model(**inputs)["loss"].backward()
    module(**inputs)["loss"].backward()
    return differ(gradients(module), gradients(model))


def test_after_a_failed_backward_pass(pool: Pool) -> None:
    assert max(pool(failing)) < 1e-10


def in_half_precision(rank: int, family: str) -> tuple[list[float], list[float], float]:
    model, inputs = small(family)
    module = tapas.parallelize(model, inputs, mesh=mesh_of(MESH), cluster=EAGER)
    losses: list[list[float]] = []
    for one in (model, module):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = one(**inputs)["loss"]
            assert loss.dtype == torch.float32
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    return losses[0], losses[1], losses[0][0] - losses[0][-1]


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=full)])
def test_autocast(pool: Pool, family: str) -> None:
    for original, ours, progress in pool(in_half_precision, family):
        assert progress > 0.1
        assert ours == pytest.approx(original, abs=0.02 * progress)


def compiled(rank: int, family: str) -> tuple[float, float, float, list[str], dict, dict]:
    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    counters.clear()
    _, inputs, module = parallel_of(family, mesh_of(MESH))
    loss = module(**inputs)["loss"]
    loss.backward()
    eager = dict(executor_of(module).count.forward), dict(executor_of(module).count.backward)
    wanted = gradients(module)
    module.zero_grad()
    executor_of(module).count.clear()
    again = torch.compile(module, backend="aot_eager")(**inputs)["loss"]
    again.backward()
    error = differ(gradients(module), wanted)
    breaks = list(counters["graph_break"])
    bytes_now = dict(executor_of(module).count.forward), dict(executor_of(module).count.backward)
    return loss.item(), again.item(), error, breaks, {"eager": eager}, {"eager": bytes_now}


@pytest.mark.parametrize("family", ["packed", *(pytest.param(f, marks=full) for f in ("llama", "gpt2"))])
def test_compile(pool: Pool, family: str) -> None:
    """No graph breaks, the same numbers, the same bytes on the wire."""
    for loss, again, error, breaks, eager, now in pool(compiled, family):
        assert again == pytest.approx(loss, rel=1e-6)
        assert error < 1e-5
        assert breaks == []
        assert eager == now


def compiled_once(rank: int, sizes: tuple[int, ...], layers: int) -> tuple[int, int, list[str], float, float] | None:
    """Blocks, graphs that were compiled and their breaks; how far loss and gradients are off after two steps."""
    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    mesh = mesh_of(sizes)
    if mesh.get_coordinate() is None:
        return None
    model, inputs = llama(layers)
    module = tapas.parallelize(model, inputs, mesh=mesh, cluster=EAGER)
    found = []
    with torch._dynamo.config.patch(error_on_recompile=True):  # not for another copy, not for another step
        for one in (*[torch.compile(module, backend="aot_eager")] * 2, module):
            module.zero_grad()
            loss = one(**inputs)["loss"]
            loss.backward()
            found.append((loss.item(), gradients(module)))
    (_, _), (loss, ours), (wanted, eager) = found
    blocks = len(list(executor_of(module).program.children()))
    graphs, breaks = counters["stats"]["unique_graphs"], list(counters["graph_break"])
    return blocks, graphs, breaks, abs(loss - wanted), differ(ours, eager)


@pytest.mark.parametrize("mesh", [pytest.param(mesh, marks=full) for mesh in ((2,), MESH)], ids=str)
def test_a_block_is_compiled_once(pool: Pool, mesh: tuple[int, ...]) -> None:
    few, many = ([found for found in pool(compiled_once, mesh, layers) if found is not None] for layers in (3, 6))
    assert len(few) == len(many) == torch.Size(mesh).numel()
    for blocks, graphs, breaks, off, error in (*few, *many):
        assert graphs == few[0][1] <= blocks
        assert breaks == []
        assert off < 1e-5 and error < 1e-4


# -- weights on the meta device ----------------------------------------------------------------------


def config() -> T.LlamaConfig:
    return T.LlamaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=50, use_cache=False)  # fmt: skip


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)
        self.register_buffer("scale", torch.ones(24))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.down(self.up(x).relu()) * self.scale).square().mean()}


def from_meta(rank: int, shape: tuple[int, ...]) -> dict[str, torch.Tensor] | None:
    mesh = mesh_of(shape)
    torch.manual_seed(7 if not rank else 100 + rank)  # only the first rank's seed counts
    if mesh.get_coordinate() is None:
        return None
    inputs = {"input_ids": torch.zeros(4, 8, dtype=torch.long), "labels": torch.ones(4, 8, dtype=torch.long)}
    with torch.device("meta"):
        model = T.LlamaForCausalLM(config())
    module = tapas.parallelize(model, inputs, mesh=mesh, cluster=EAGER)
    found = {n: p.detach().full_tensor() for n, p in module.named_parameters()}
    found["loss"] = module(**inputs)["loss"].detach()
    return found


def test_meta_weights_are_the_same_on_every_mesh(pool: Pool) -> None:
    first = None
    for shape in ((4,), (2, 2), (2,)):  # the last one without two of the workers
        ranks = [found for found in pool(from_meta, shape) if found is not None]
        assert len(ranks) == torch.Size(shape).numel()
        for found in ranks:
            first = first or found
            assert all(torch.equal(found[n], first[n]) for n in first if n != "loss")
            assert float(found["loss"]) == pytest.approx(float(first["loss"]), rel=1e-5)
    assert first is not None
    assert float(first["model.embed_tokens.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first["model.norm.weight"], torch.ones(32))
    assert float(first["model.layers.0.mlp.up_proj.weight"].std()) == pytest.approx(0.02, rel=0.1)


def gpt2_from_meta(rank: int) -> tuple[float, float]:
    torch.manual_seed(0)
    config = T.GPT2Config(n_layer=8, n_embd=32, n_head=4, vocab_size=51, n_positions=16, use_cache=False,
                          bos_token_id=0, eos_token_id=0)  # fmt: skip
    with torch.device("meta"):
        model = T.GPT2LMHeadModel(config)
    ids = torch.zeros(4, 8, dtype=torch.long)
    module = tapas.parallelize(model, {"input_ids": ids, "labels": ids}, mesh=mesh_of(MESH), cluster=EAGER)
    found = dict(module.named_parameters())
    return tuple(
        float(found[f"transformer.h.0.mlp.{n}.weight"].detach().full_tensor().std()) for n in ("c_fc", "c_proj")
    )  # type: ignore[return-value, attr-defined]


def test_initialisation_that_parents_do(pool: Pool) -> None:
    """GPT-2 scales the last weights of its branches by depth."""
    for first, last in pool(gpt2_from_meta):
        assert first == pytest.approx(0.02, rel=0.1)
        assert last == pytest.approx(0.02 / 4, rel=0.1)


def plain_from_meta(rank: int) -> tuple[str, float, float]:
    inputs = (torch.randn(4, 24),)
    with torch.device("meta"):
        model = Plain()
    try:
        tapas.parallelize(model, inputs, mesh=mesh_of(MESH), cluster=EAGER)
        error = ""
    except TapasError as found:
        error = str(found)
    model.scale = torch.ones(24)
    torch.manual_seed(3)
    module = tapas.parallelize(model, inputs, mesh=mesh_of(MESH), cluster=EAGER)
    weight = module.get_parameter("up.weight").detach().full_tensor()  # type: ignore[attr-defined]
    return error, float(weight.abs().max()), float(weight.std())


def test_modules_initialise_themselves(pool: Pool) -> None:
    for error, largest, deviation in pool(plain_from_meta):
        assert "scale" in error and "reset_parameters" in error
        assert largest <= 24**-0.5 + 1e-6
        assert deviation == pytest.approx(24**-0.5 / 3**0.5, rel=0.1)
