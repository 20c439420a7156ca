"""What `generate` of a served model takes, and what it refuses before anything runs."""

from typing import Any

import pytest
import torch
from torch import nn

from tapas.errors import TapasError
from tapas.serving.generation import CARRIED, FilledCache, served_model
from tapas.serving.workload import Workload
from tests.serving.models import generating

PROMPTS = torch.ones(2, 4, dtype=torch.long)


def served() -> Any:
    """Without programs: nothing here comes that far."""
    return served_model(generating("llama"), nn.Linear(1, 1), Workload(4, 6, 8))  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "words"), [
    ({"num_beams": 2}, "beam search"),
    ({"assistant_model": object()}, "assisted decoding"),
    ({"penalty_alpha": 0.5}, "contrastive search"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    ({"use_cache": False}, "use_cache"),
    ({"guidance_scale": 1.5}, "guidance_scale"),
    ({"past_key_values": FilledCache()}, "past_key_values"),
    ({"cache_implementation": "offloaded"}, "cache_implementation"),
])  # fmt: skip
def test_refused_by_name(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(TapasError, match=words):
        served().generate(PROMPTS, **asked)


def test_refused_in_a_configuration() -> None:
    model = served()
    model.generation_config.num_beams = 4
    with pytest.raises(TapasError, match="beam search"):
        model.generate(PROMPTS)


def test_more_than_planned() -> None:
    with pytest.raises(TapasError, match="max_new_tokens 9: the plan is for 4 prompts of 6 tokens"):
        served().generate(PROMPTS, max_new_tokens=9)
    with pytest.raises(TapasError, match="batch 5"):
        served().generate(torch.ones(5, 4, dtype=torch.long))
    with pytest.raises(TapasError, match="prompt 7"):
        served().generate(torch.ones(2, 7, dtype=torch.long))


def test_called_by_generate_only() -> None:
    with pytest.raises(TapasError, match="is called by generate"):
        served()(PROMPTS)


def test_options_are_those_of_transformers() -> None:
    """What is looked at exists: a name that is gone would let through what it was to refuse."""
    import inspect

    from transformers import GenerationConfig, GenerationMixin

    known = set(vars(GenerationConfig())) | set(inspect.signature(GenerationMixin.generate).parameters)
    inputs = {"past_key_values", "inputs_embeds", "encoder_outputs", "token_type_ids", "decoder_attention_mask"}
    assert set(CARRIED) - inputs - known == set()
