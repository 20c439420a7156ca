"""Small models whose plans are taken to other tools, without dropout."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from torch import nn

from tests.distributed.small import small


def _tokens(vocab: int = 50) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, vocab, (4, 8)), "labels": torch.randint(3, vocab, (4, 8))}


_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50, "num_hidden_layers": 2}


def distilbert():
    config = T.DistilBertConfig(n_layers=2, dim=32, hidden_dim=48, n_heads=4, vocab_size=50, max_position_embeddings=16)
    return T.DistilBertForMaskedLM(config), _tokens()


def electra():
    config = T.ElectraConfig(intermediate_size=48, embedding_size=32, max_position_embeddings=16, **_SIZES)
    return T.ElectraForMaskedLM(config), _tokens()


def roberta():
    config = T.RobertaConfig(intermediate_size=48, max_position_embeddings=20, **_SIZES)
    return T.RobertaForMaskedLM(config), _tokens()


def opt():
    config = T.OPTConfig(ffn_dim=48, max_position_embeddings=16, word_embed_proj_dim=32, use_cache=False, **_SIZES)
    return T.OPTForCausalLM(config), _tokens()


def bart():
    config = T.BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=50, max_position_embeddings=16,
        use_cache=False,
    )  # fmt: skip
    return T.BartForConditionalGeneration(config), _tokens()


def gptj():
    config = T.GPTJConfig(n_embd=32, n_head=4, n_layer=2, n_positions=16, vocab_size=50, rotary_dim=4, use_cache=False,
                          bos_token_id=0, eos_token_id=0)  # fmt: skip
    return T.GPTJForCausalLM(config), _tokens()


def phi3():
    config = T.Phi3Config(intermediate_size=48, num_key_value_heads=4, use_cache=False, pad_token_id=0, **_SIZES)
    return T.Phi3ForCausalLM(config), _tokens()


_EXPERTS = {"intermediate_size": 24, "num_key_value_heads": 2, "num_experts_per_tok": 2, "use_cache": False}


def three_experts():
    config = T.MixtralConfig(num_local_experts=3, **_EXPERTS, **_SIZES)
    return T.MixtralForCausalLM(config), _tokens()


def qwen3_moe():
    config = T.Qwen3MoeConfig(num_experts=4, moe_intermediate_size=24, head_dim=8, **_EXPERTS, **_SIZES)
    return T.Qwen3MoeForCausalLM(config), _tokens()


_OWN: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (distilbert, electra, roberta, opt, bart, gptj, phi3, three_experts, qwen3_moe)
}


def get(family: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model, inputs = _OWN[family]() if family in _OWN else small(family)
        with torch.no_grad():
            for parameter in model.parameters():  # zeros and ones would hide what is forgotten
                parameter.add_(0.05 * torch.randn_like(parameter))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    labels = inputs["labels"]  # all count: a mean over parts of a batch is a mean of means
    return model.eval(), inputs | {"labels": torch.where(labels < 0, labels + 101, labels)}
