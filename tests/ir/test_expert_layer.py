"""Experts in both ways, against the sum that defines them; and what the host asks of the device."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tapas._torch import FakeTensorMode, TorchDispatchMode
from tapas.ir import expert_layer
from tapas.ir.activations import ACTIVATIONS
from tapas.ir.expert_layer import ExpertLayer
from tapas.ir.gating import ALONE, PAIRS, Gating, gating_of

HOST_READS = {"_local_scalar_dense", "nonzero", "bincount", "is_nonzero", "equal", "unique_dim", "_unique2"}
T, K, H, E, W = 24, 2, 16, 5, 8  # tokens, slots, hidden, experts, width of an expert
ROUTES = {
    "all": torch.arange(T * K).view(T, K) % E,
    "some without tokens": torch.tensor([1, 3]).repeat(T, 1),
    "some elsewhere": torch.arange(T * K).view(T, K) % (E + 4) - 2,
    "all elsewhere": torch.full((T, K), E),
}


CLAMPED = "silu pairs limit=0.75 alpha=1.702 shift=1.0"  # as gpt-oss does


def mixture(route: str, dtype: torch.dtype, gating: str = "silu", biased: bool = False) -> tuple[ExpertLayer, Tensor]:
    """And a gradient."""
    torch.manual_seed(0)
    found, parts = gating_of(gating), gating_of(gating).parts
    hidden, weight, grad = torch.randn(T, H), torch.rand(T, K), torch.randn(T, H)
    gate_up, down = torch.randn(E, parts * W, H) / H**0.5, torch.randn(E, H, W) / W**0.5
    biases = {"gate_up_bias": torch.randn(E, parts * W), "down_bias": torch.randn(E, H)} if biased else {}
    hidden, weight, gate_up, down, grad = (x.to(dtype) for x in (hidden, weight, gate_up, down, grad))
    made = {name: x.to(dtype) for name, x in biases.items()}
    return ExpertLayer(hidden, ROUTES[route], weight, gate_up, down, found, **made), grad


def between(packed: Tensor, gating: Gating) -> Tensor:
    """What lies between the products, one definition after the other."""
    act = ACTIVATIONS[gating.activation].forward
    if gating.packing == ALONE:
        return act(packed)
    gate, up = (packed[::2], packed[1::2]) if gating.packing == PAIRS else packed.chunk(2)
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return act(gating.alpha * gate) / gating.alpha * (up + gating.shift)


def truth(m: ExpertLayer, grad: Tensor) -> tuple[Tensor, ...]:
    """The result and the gradients, slot by slot in float64."""
    biases = [x for x in (m.gate_up_bias, m.down_bias) if x is not None]
    given = [x.double().requires_grad_() for x in (m.hidden, m.weight, m.gate_up, m.down, *biases)]
    hidden, weight, gate_up, down, *added = given
    first, last = added or (torch.zeros(E, 1, dtype=torch.float64),) * 2
    total = 0 * hidden
    for token in range(T):
        for slot, expert in enumerate(m.index[token].tolist()):
            if 0 <= expert < E:
                inner = between(gate_up[expert] @ hidden[token] + first[expert], m.gating)
                made = weight[token, slot] * (down[expert] @ inner + last[expert])
                total = total + F.pad(made.unsqueeze(0), (0, 0, token, T - token - 1))
    return (total.detach(), *torch.autograd.grad(total, [*given], grad.double(), materialize_grads=True))


Way = tuple[Callable[..., Any], Callable[..., Any]]  # forward and backward
SORTED: Way = (expert_layer.sorted_forward, expert_layer.sorted_backward)
LOOPED: Way = (expert_layer.looped_forward, expert_layer.looped_backward)


def computed(way: Way, m: ExpertLayer, grad: Tensor) -> tuple[Tensor, ...]:
    """The result and the gradients."""
    result, kept = way[0](m)
    return result, *way[1](grad, m, kept)


def compare(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], tolerance: float) -> None:
    for mine, right in zip(got, wanted, strict=True):
        assert (mine.double() - right).abs().max() <= tolerance * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_results_and_gradients(route: str, dtype: torch.dtype, tolerance: float) -> None:
    m, grad = mixture(route, dtype)
    wanted = truth(m, grad)
    for got in (computed(way, m, grad) for way in (SORTED, LOOPED)):
        compare(got, wanted, tolerance)
        assert [x.dtype for x in got] == [dtype] * 5


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "gating", [*ACTIVATIONS, *(f"{name} alone" for name in ACTIVATIONS), CLAMPED, "gelu limit=0.5", "relu pairs"]
)
def test_between_the_products(gating: str, biased: bool) -> None:
    m, grad = mixture("some elsewhere", torch.float32, gating, biased)
    for got in (computed(way, m, grad) for way in (SORTED, LOOPED)):
        compare(got, truth(m, grad), 2e-6)


@pytest.mark.parametrize("route", ROUTES)
def test_biases(route: str) -> None:
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 3e-2)):
        m, grad = mixture(route, dtype, CLAMPED, biased=True)
        for got in (computed(way, m, grad) for way in (SORTED, LOOPED)):
            compare(got, truth(m, grad), tolerance)
            assert [x.dtype for x in got] == [dtype] * 7


def test_words() -> None:
    for words in ("silu", "relu2 alone", CLAMPED, "gelu_tanh limit=7.0", "silu pairs transposed", "silu transposed"):
        assert str(gating_of(words)) == words


@pytest.mark.parametrize("route", ["some without tokens", "some elsewhere", "all elsewhere"])
def test_what_products_leave_behind_goes_nowhere(route: str) -> None:
    """Rows behind those of the last expert are not written to: here they are no numbers."""
    m, grad = mixture(route, torch.float32, CLAMPED, biased=True)
    wanted, own = truth(m, grad), F.grouped_mm

    def poisoned(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        made = own(a, b, offs=offs)
        if b.dim() == 3:
            made[int(offs[-1]) :] = torch.nan
        return made

    with patch.object(F, "grouped_mm", poisoned):
        compare(computed(SORTED, m, grad), wanted, 2e-6)


class Reads(TorchDispatchMode):
    """Counts what waits for the device, and copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in HOST_READS or (name == "_to_copy" and (kwargs or {}).get("device") is not None):
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


def reads(work: Any, *args: Any) -> int:
    own, lists = Tensor.tolist, Counter[str]()

    def tolist(x: Tensor) -> Any:
        lists["tolist"] += 1
        return own(x)

    with patch.object(Tensor, "tolist", tolist), Reads() as counted:
        work(*args)
    return counted.counted.total() + lists.total()


def test_host_reads() -> None:
    """None where group sizes stay on the device, one for each pass elsewhere."""
    m, grad = mixture("some elsewhere", torch.float32)
    for (ahead, back), wanted in ((SORTED, 0), (LOOPED, 1)):
        _, kept = ahead(m)
        assert reads(ahead, m) == reads(back, grad, m, kept) == wanted


def test_which_way() -> None:
    """Offsets only where torch's kernel takes them without asking: bfloat16 on Hopper, rows of 16 bytes."""
    m, _ = mixture("all", torch.bfloat16)
    assert not m.on_device
    with FakeTensorMode(), patch.object(expert_layer, "_is_hopper", lambda _: True):
        gate_up, down, odd, cut = (
            torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="cuda")
            for shape, strides in (
                (m.gate_up.shape, m.gate_up.stride()), (m.down.shape, m.down.stride()), ((E, H, 7), (H * 7, 7, 1)),
                ((E, H, W), (H * 20, 20, 1)),
            )
        )  # fmt: skip
        single = torch.empty(gate_up.shape, device="cuda")
        assert replace(m, gate_up=gate_up, down=down).on_device
        for other in ({"down": odd}, {"down": cut}, {"gate_up": single}, {"gate_up": m.gate_up}):
            assert not replace(m, **{"gate_up": gate_up, "down": down, **other}).on_device
        with patch.object(expert_layer, "_is_hopper", lambda _: False):
            assert not replace(m, gate_up=gate_up, down=down).on_device
