"""What the judge calls wrong, and what it does not: rounding, dropout and random numbers are no mistakes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as T
from torch import nn

from tapas.api import verify
from tapas.errors import TapasError
from tapas.verify.judge import scale
from tapas.verify.verification import Report
from tests.distributed.small import EAGER


def verified(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> Report:
    options = {"mesh": "2", "cluster": EAGER, "in_process": True, "steps": 2, **options}
    report = verify(model, inputs, **options)
    assert report.ok, (report.checks, report.culprit)
    return report


def checked(report: Report) -> set[str]:
    return {check.what for check in report.checks}


def test_a_fresh_bert_is_no_alarm() -> None:
    config = T.BertConfig(num_hidden_layers=1, hidden_size=16, intermediate_size=24, num_attention_heads=2,
                          vocab_size=40, max_position_embeddings=16)  # fmt: skip
    ids = torch.randint(0, 40, (4, 8))
    report = verify(T.BertForMaskedLM(config).train(), {"input_ids": ids, "labels": ids}, mesh="2", cluster=EAGER,
                    pins={"*": "megatron"}, in_process=True)  # fmt: skip
    assert report.ok, report.checks
    assert report.silenced


class KeyBias(nn.Module):
    """The bias of keys moves all scores of a query alike: its gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(1e4 * self.q(x), self.k(x), self.v(x)).square().mean()


class NormedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x)).tanh().square().mean()


@pytest.mark.parametrize("make", [KeyBias, NormedBias])
@pytest.mark.parametrize("pin", ["ddp", "megatron"])
def test_a_gradient_that_is_zero_is_no_alarm(make: type[nn.Module], pin: str) -> None:
    x = torch.randn(4, 6, 8) if make is KeyBias else torch.randn(8, 8)
    verified(make(), x, pins={"*": pin})


def test_what_is_large_is_held_against_itself() -> None:
    x = torch.randn(10, dtype=torch.float64)
    assert scale(x, [x * (1 + 1e-16)], 1e-9) == pytest.approx(float(x.norm()))
    assert scale(0 * x, [1e-16 * x], 1e-9) == pytest.approx(50e-7 * float(x.norm()))


class Dropped(nn.Module):
    """As nanoGPT writes it; and a name with "drop" in it that is no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop_scale = nn.Linear(8, 16), nn.Linear(16, 8), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.a(x).relu(), 0.1, self.training)
        return (self.drop_scale * self.b(hidden)).square().mean()


def test_dropout_is_an_operator_and_no_name() -> None:
    report = verified(Dropped(), torch.randn(4, 8), pins={"*": "megatron"})
    assert len(report.silenced) == 1
    assert max(check.errors["capture"] for check in report.checks) < 1e-6


class Sampled(nn.Module):
    """A variational autoencoder, categories by Gumbel noise, and a mask that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.a(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * spread.exp()
        kinds = F.gumbel_softmax(self.b(z), tau=0.5)
        kept = torch.bernoulli(torch.sigmoid(z.detach()))
        order = torch.rand(z.shape[0], device=z.device).argsort()
        return (self.c(kinds)[order] * kept + z).square().mean()


@pytest.mark.parametrize("pin", ["ddp", "megatron"])
def test_both_sides_draw_the_same(pin: str) -> None:
    report = verified(Sampled(), torch.randn(4, 8), pins={"*": pin})
    assert report.silenced == ()


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.a(x).relu()
        return {"first": self.b(hidden).square().mean(), "second": self.c(hidden).sin().mean(), "hidden": hidden}


def test_gradients_through_all_outputs_are_compared() -> None:
    report = verified(TwoLosses(), torch.randn(4, 8), pins={"*": "megatron"})
    assert "gradients through all outputs" in checked(report)


def test_a_model_without_a_loss_is_trained_from_what_it_returns() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    report = verified(model, torch.randn(4, 8), training=True, pins={"*": "megatron"})
    assert checked(report) == {"outputs", "gradients", "weights after all steps"}


def test_buffers_are_compared() -> None:
    report = verified(NormedBias(), torch.randn(8, 8), pins={"*": "ddp"})
    assert {c.what: c.compared for c in report.checks}["buffers after all steps"] >= 2


# ------------------------------------------------------------------------------------- odd precisions


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.a(x)
            with torch.autocast("cpu", enabled=False):
                y = self.b(y.float())
        return y.square().mean()


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.a = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.table(x)).square().mean()


class WideClassWeights(nn.Module):
    """In float32, whatever the model is converted to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.weights = nn.Linear(8, 8, dtype=torch.bfloat16), torch.rand(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.a(x.bfloat16()).float(), x.argmax(-1), weight=self.weights)


class ComplexSlice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(x.shape[0], 8, dtype=torch.cfloat)
        whole[:, :5] = torch.fft.rfft(self.a(x))
        return whole.abs().square().mean()


@pytest.mark.parametrize("model", [Autocast(), WideClassWeights()], ids=["autocast", "class weights"])
def test_odd_precisions_are_verified(model: nn.Module) -> None:
    verified(model, torch.randn(4, 8), pins={"*": "ddp"})


def test_gradients_that_are_sparse_are_refused_by_name() -> None:
    with pytest.raises(TapasError, match=r"table.*sparse=True"):
        verified(SparseTable(), torch.randint(0, 10, (4, 3)), pins={"*": "ddp"})


def test_what_torch_cannot_differentiate_is_named() -> None:
    with pytest.raises(TapasError, match=r"slice_scatter.* torch\.cat") as caught:
        verified(ComplexSlice(), torch.randn(4, 8))
    assert "test_judge.py" in caught.value.place


# ------------------------------------------------------------------------------------- how much was tested


def test_a_plan_that_splits_little_is_verified_in_part() -> None:
    from tapas.report import text_of
    from tapas.report.verify import verify_page

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    report = verify(model, (torch.randn(4, 8),), mesh="2", in_process=True)
    assert report.ok and report.little and report.split[0] == 0
    assert report.advice is not None and report.advice.split[0] > 0
    page = text_of(verify_page(report), 120)
    assert "VERIFIED IN PART" in page and f"--pin '{report.advice.pin}' splits" in page
    assert "IN PART" not in text_of(verify_page(verified(model, torch.randn(4, 8))), 120)


def test_float32_is_held_against_float64_and_what_is_next_to_nothing_against_nothing() -> None:
    wanted, finer = torch.tensor([1.0]), torch.tensor([1.01], dtype=torch.float64)
    assert scale(wanted, [], 1e-4) == 1.0 and scale(wanted, [finer], 1e-4) == pytest.approx(5e3, rel=1e-3)
    assert scale(torch.tensor([5e-39]), [], 1e-4) > 1e-32 > scale(torch.tensor([5e-39], dtype=torch.float64), [], 1e-9)
