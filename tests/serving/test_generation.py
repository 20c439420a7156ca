"""What `generate` of a served model takes, and what it refuses before anything runs."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.stopping_criteria import MaxTimeCriteria

from tapas.errors import TapasError
from tapas.serving.generation import FilledCache, served_model
from tapas.serving.wanted import CARRIED
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
    ({"max_time": 1.0}, "a limit of time"),
    ({"stopping_criteria": [MaxTimeCriteria(1.0)]}, "a limit of time"),
    ({"generation_config": GenerationConfig(num_beams=2)}, "beam search"),
])  # fmt: skip
def test_refused_by_name(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(TapasError, match=words):
        served().generate(PROMPTS, **asked)


def test_refused_in_a_configuration() -> None:
    """Also in the model's own beneath one that does not say; and then leaving it out is no remedy."""
    model = served()
    model.generation_config.num_beams = 4
    for given in (None, GenerationConfig(do_sample=False)):
        with pytest.raises(TapasError, match="beam search") as error:
            model.generate(PROMPTS, generation_config=given)
        assert "pass num_beams=1" in error.value.remedy


def test_kind_of_cache_in_a_configuration() -> None:
    """Checkpoints say it; it tells how keys and values are kept, and ours are kept in our own way."""
    model = generating("llama")
    model.generation_config.cache_implementation = "hybrid"
    assert served_model(model, nn.Linear(1, 1), Workload(4, 6, 8)).generation_config.cache_implementation is None  # type: ignore[arg-type]


def test_more_than_planned() -> None:
    for asked, words in (
        ({"max_new_tokens": 9}, "max_new_tokens 9: the plan is for 4 prompts of 6 tokens"),
        ({"max_length": 13}, "max_length 13, 9 new tokens after 4: the plan is for"),
        ({"generation_config": GenerationConfig(max_length=13)}, "max_length 13, 9 new tokens after 4"),
        ({"inputs": torch.ones(5, 4, dtype=torch.long)}, "batch 5"),
        ({"inputs": torch.ones(2, 7, dtype=torch.long)}, "prompt 7"),
    ):
        with pytest.raises(TapasError, match=words):
            served().generate(**{"inputs": PROMPTS, **asked})


def test_what_no_program_reads() -> None:
    with pytest.raises(TapasError, match="head_mask is not carried"):
        served()(PROMPTS, past_key_values=FilledCache(), head_mask=torch.ones(4))


def test_called_by_generate_only() -> None:
    with pytest.raises(TapasError, match="is called by generate"):
        served()(PROMPTS)


def test_options_are_those_of_transformers() -> None:
    """What is looked at exists: a name that is gone would let through what it was to refuse."""
    import inspect

    known = set(vars(GenerationConfig())) | set(inspect.signature(GenerationMixin.generate).parameters)
    inputs = {"past_key_values", "inputs_embeds", "encoder_outputs", "token_type_ids", "decoder_attention_mask"}
    assert set(CARRIED) - inputs - known == set()
