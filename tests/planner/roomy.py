"""Every preset family in sizes where tensors outweigh the odds and ends of a program."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as T

from tests.distributed.small import Packed, _images, _tokens

_DECODER: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 512, "use_cache": False,
}  # fmt: skip
_ENCODER: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8,
}  # fmt: skip


def _text() -> dict[str, torch.Tensor]:
    return _tokens(512, 8, 64)


def gpt2():
    sizes = {"n_layer": 4, "n_embd": 128, "n_head": 8, "vocab_size": 512, "n_positions": 64}
    return T.GPT2LMHeadModel(T.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)), _text()


def llama():
    return T.LlamaForCausalLM(T.LlamaConfig(intermediate_size=352, **_DECODER)), _text()


def qwen3():
    return T.Qwen3ForCausalLM(T.Qwen3Config(intermediate_size=352, head_dim=16, **_DECODER)), _text()


def mixtral():
    return T.MixtralForCausalLM(T.MixtralConfig(intermediate_size=128, num_local_experts=4, **_DECODER)), _text()


def bert():
    return T.BertForMaskedLM(T.BertConfig(vocab_size=512, max_position_embeddings=64, **_ENCODER)), _text()


def t5():
    sizes = {"num_layers": 4, "d_model": 128, "d_kv": 16, "d_ff": 352, "num_heads": 8, "vocab_size": 512}
    config = T.T5Config(**sizes, use_cache=False, decoder_start_token_id=0, pad_token_id=0)
    return T.T5ForConditionalGeneration(config), _text()


def vit():
    config = T.ViTConfig(image_size=64, patch_size=8, num_labels=7, **_ENCODER)
    return T.ViTForImageClassification(config), _images(7, 8, 64)


def resnet():
    config = T.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], num_labels=7)
    return T.ResNetForImageClassification(config), _images(7, 8, 64)


def packed():
    return Packed(96, 4), {"x": torch.randn(8, 64, 96), "y": torch.randn(8, 64, 96)}


FAMILIES: dict[str, Callable] = {f.__name__: f for f in (gpt2, llama, bert, t5, vit, mixtral, qwen3, resnet, packed)}


def roomy(family: str):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FAMILIES[family]()
