"""Small models that generate, one of each family that serving is said to carry."""

from typing import Any

import torch
import transformers as T

from tests.distributed.small import small
from tests.quantised import quantised_llama

FAMILIES = ("llama", "quantised", "gpt2", "qwen3", "mixtral", "gemma", "gemma2", "t5", "bart")
# With places that cannot be seen these two have no numbers in float64: torch has no grouped product there, and eager
# attention adds the least number of float64 to scores that it then casts to float32.
SINGLE = ("mixtral", "gemma2")
_SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 50}
_BART = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
_GEMMA: dict[str, Any] = {
    **_SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def generating(family: str, places: int = 64) -> Any:
    """In float64 where its kernels can, so that ranks may add up in another order."""
    torch.manual_seed(0)
    if family == "gemma":
        model: Any = T.GemmaForCausalLM(T.GemmaConfig(**_GEMMA))
    elif family == "gemma2":  # every other layer sees the last four tokens only
        model = T.Gemma2ForCausalLM(T.Gemma2Config(**_GEMMA, sliding_window=4, query_pre_attn_scalar=8))
    elif family == "quantised":
        model = quantised_llama()
    elif family == "bart":
        layers = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _BART.items()}
        model = T.BartForConditionalGeneration(
            T.BartConfig(d_model=32, vocab_size=50, max_position_embeddings=places, **layers)
        )
    elif family == "gpt2":
        config = T.GPT2Config(
            n_layer=2, n_embd=24, n_head=4, vocab_size=50, n_positions=places, bos_token_id=1, eos_token_id=1
        )
        model = T.GPT2LMHeadModel(config)
    else:
        model = small(family)[0]
    return model.eval() if family in SINGLE else model.double().eval()


def prompts(family: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Of unequal length: before a decoder padded on the left, before an encoder on the right."""
    ids, mask = torch.randint(3, 50, (batch, length)), torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        mask[row, : row % (length - 1)] = 0
    return {"input_ids": ids, "attention_mask": mask.flip(1) if family in ("t5", "bart") else mask}
