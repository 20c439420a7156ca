"""Small models of transformers: widths that hang together stay so, inputs are what is documented and asked for."""

from typing import Any

import pytest
import torch
from torch import nn

from tapas.models.completed import completed
from tapas.models.documented import documented_inputs
from tapas.models.tiny_scaled import WIDTH, scaled
from tapas.models.tiny_trials import tiny_model


@pytest.mark.parametrize("heads", [4, 12, 32, 71])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("expand", [1, 2])
def test_widths_are_divided_by_one_factor(heads: int, dim: int, expand: int) -> None:
    from transformers import LlamaConfig

    width = heads * dim
    config = LlamaConfig(
        hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads, head_dim=dim,
        intermediate_size=3 * width, vocab_size=50_257,
    )  # fmt: skip
    config.mamba_n_heads, config.mamba_d_head, config.upsample_groups = heads, expand * dim, width
    made = {"num_hidden_layers": 2, **scaled(config, {"num_hidden_layers": 2})}
    width, heads = made.get("hidden_size", width), made.get("num_attention_heads", heads)
    assert WIDTH <= width == heads * made.get("head_dim", dim)
    assert made.get("intermediate_size", 3 * width) == 3 * width and made.get("upsample_groups", width) == width
    assert made.get("mamba_n_heads", heads) * made.get("mamba_d_head", expand * dim) == expand * width
    assert made["num_hidden_layers"] == 2 and "vocab_size" not in made
    assert width < 1024 or heads % 2  # it is smaller where it can be


@pytest.mark.filterwarnings("ignore")
def test_types_that_are_made_in_one_of_these_ways() -> None:
    """Bamba has products of heads; GPT-Neo a list of the kinds of its layers; Aimv2's text model is a part that no task
    is known for; Decision Transformer wants what its documentation says; SigLIP 2 takes rows of patches."""
    for name, parameters in (("bamba", 400_000), ("gpt_neo", 100_000), ("aimv2_text_model", 100_000)):
        model, _ = tiny_model(name)
        assert sum(parameter.numel() for parameter in model.parameters()) < parameters, name
    model, inputs = tiny_model("decision_transformer")
    config: Any = model.config
    assert inputs["states"].shape[-1] == config.state_dim and inputs["timesteps"].dtype == torch.long
    assert tiny_model("siglip2")[1]["pixel_values"].dim() == 3


class Asking(nn.Module):
    """Reads what it was not given."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: torch.Tensor | None = None,
        unread: torch.Tensor | None = None, past_key_values: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        if scale is None:
            raise ValueError("scale has to be given")
        return self.masked(x * scale, mask)

    def masked(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return x * mask.float()  # pyright: ignore[reportOptionalMemberAccess]


def test_what_a_failing_statement_reads_is_added() -> None:
    given = completed(Asking(), {"x": torch.ones(3)}, lambda name: torch.ones(3))
    assert list(given) == ["x", "scale", "mask"]


def test_how_it_fails_is_told_where_nothing_can_be_added() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        completed(Asking(), {"x": torch.ones(3), "scale": torch.ones(2)}, lambda name: torch.ones(3))


class Sizes:
    state_dim, hidden_size, image_size, n_docs = 6, 32, 8, 5


def documented(states: Any, bbox: Any, docs: Any, pixels: Any, labels: Any) -> None:
    """Args:
    states (`torch.FloatTensor` of shape `(batch_size, episode_length, state_dim)`):
        What it sees.
    bbox (`torch.LongTensor` of shape `(batch_size, seq_length, 4)`, *optional*):
    docs (`torch.LongTensor` of shape `(batch_size * config.n_docs, sequence_length + 1)`):
    pixels (`torch.FloatTensor` of shape `(batch_size, 3, height, width)`):
    labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
    """


def test_dims_are_read_from_the_documentation() -> None:
    found = {name: entry.value(name, Sizes(), 2, 16) for name, entry in documented_inputs(documented).items()}
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    assert shapes == {
        "states": (2, 16, 6), "bbox": (2, 16, 4), "docs": (10, 17), "pixels": (2, 3, 8, 8), "labels": (2,),
    }  # fmt: skip
    assert found["bbox"][0, 0].tolist() == [1, 2, 3, 4] and not found["labels"].is_floating_point()
