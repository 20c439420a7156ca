"""Every family of models that speeds are stated for, as small as its operators allow, and some with masks."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from torch import nn

from tapas.models.wide_resnet import WideResNet, WideResNetConfig

Subject = tuple[nn.Module, dict[str, Any]]
VOCABULARY, BATCH, LENGTH = 100, 4, 16
_DECODER: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": VOCABULARY, "use_cache": False,
}  # fmt: skip
_ENCODER: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
}  # fmt: skip
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _tokens(padded: int = 0) -> dict[str, Any]:
    inputs = {name: torch.randint(0, VOCABULARY, (BATCH, LENGTH)) for name in ("input_ids", "labels")}
    if padded:
        inputs["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
        inputs["attention_mask"][:2, -padded:] = 0
    return inputs


def _config(kind: Any, **settings: Any) -> Any:
    """Configurations take more than their signatures tell."""
    return kind(**settings)


def _images(size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, 7, (BATCH,))}


def llama() -> Subject:
    return T.LlamaForCausalLM(T.LlamaConfig(**_DECODER)), _tokens()


def llama_shared() -> Subject:
    """With fewer heads of keys than some meshes have ranks."""
    return T.LlamaForCausalLM(_config(T.LlamaConfig, **_DECODER | {"num_key_value_heads": 2})), _tokens()


def llama_masked() -> Subject:
    return T.LlamaForCausalLM(T.LlamaConfig(**_DECODER)), _tokens(padded=3)


def qwen3() -> Subject:
    return T.Qwen3ForCausalLM(T.Qwen3Config(head_dim=8, **_DECODER)), _tokens()


def gemma3() -> Subject:
    """Sliding windows in one layer."""
    layers = ["sliding_attention", "full_attention"]
    config = T.Gemma3TextConfig(head_dim=8, sliding_window=8, layer_types=layers, **_DECODER)
    return T.Gemma3ForCausalLM(config), _tokens()


def mixtral() -> Subject:
    return T.MixtralForCausalLM(T.MixtralConfig(num_local_experts=4, **_DECODER)), _tokens()


def gpt2(dropout: float = 0.0) -> Subject:
    config = T.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, use_cache=False, bos_token_id=0,
        eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return T.GPT2LMHeadModel(config), _tokens()


def gpt2_dropout() -> Subject:
    return gpt2(0.1)


def bert(padded: int = 0) -> Subject:
    config = T.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **_ENCODER, **_NO_DROPOUT)
    return T.BertForMaskedLM(config), _tokens(padded)


def bert_masked() -> Subject:
    return bert(padded=4)


def deberta() -> Subject:
    config = _config(
        T.DebertaV2Config, vocab_size=VOCABULARY, relative_attention=True, pos_att_type=["p2c", "c2p"],
        max_position_embeddings=LENGTH, position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm",
        **_ENCODER, **_NO_DROPOUT,
    )  # fmt: skip
    return T.DebertaV2ForMaskedLM(config), _tokens()


def t5() -> Subject:
    config = _config(
        T.T5Config, num_layers=2, d_model=64, d_kv=16, d_ff=96, num_heads=4, vocab_size=VOCABULARY, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    return T.T5ForConditionalGeneration(config), _tokens()


def whisper() -> Subject:
    config = T.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, d_model=64, max_source_positions=LENGTH,
        max_target_positions=LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        dropout=0.0, use_cache=False, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(BATCH, 8, 2 * LENGTH), "labels": _tokens()["labels"]}
    return T.WhisperForConditionalGeneration(config), inputs


def vit() -> Subject:
    config = _config(T.ViTConfig, image_size=32, patch_size=8, num_labels=7, **_ENCODER, **_NO_DROPOUT)
    return T.ViTForImageClassification(config), _images(32)


def clip() -> Subject:
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": 2, **_ENCODER}
    config = T.CLIPConfig(text_config=text, vision_config={"image_size": 32, "patch_size": 8, **_ENCODER})
    inputs = {"input_ids": _tokens()["input_ids"], "pixel_values": _images(32)["pixel_values"], "return_loss": True}
    return T.CLIPModel(config), inputs


def swin() -> Subject:
    """Windows, and windows that are shifted, with a bias that is trained."""
    config = _config(
        T.SwinConfig, image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        num_labels=7, drop_path_rate=0.0,
    )  # fmt: skip
    return T.SwinForImageClassification(config), _images(32)


def resnet() -> Subject:
    config = _config(T.ResNetConfig, embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], num_labels=7)
    return T.ResNetForImageClassification(config), _images(32)


def wide_resnet() -> Subject:
    return WideResNet(WideResNetConfig(depths=(2, 1), width=1, num_labels=7)), _images(32)


FAMILIES: dict[str, Callable[[], Subject]] = {
    make.__name__: make
    for make in (
        llama, llama_shared, llama_masked, qwen3, gemma3, mixtral, gpt2, gpt2_dropout, bert, bert_masked, deberta, t5,
        whisper, vit, clip, swin, resnet, wide_resnet,
    )
}  # fmt: skip


def family(name: str) -> Subject:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FAMILIES[name]()
