# ruff: noqa: C408  (keyword calls read as the config fields they are)
"""The presets: published sizes, made from config classes; nothing is downloaded."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    name: str
    description: str
    parameters: float  # how many, as published
    model_type: str  # of transformers, or "wide-resnet" for our own
    fields: dict[str, Any] = field(default_factory=dict)
    batch: int = 64
    seq: int | None = None

    @property
    def source(self) -> str:
        return "tapas" if self.model_type == "wide-resnet" else f"hf:{self.model_type}"


def _llama3(name: str, text: str, size: float, hidden: int, inner: int, layers: int, heads: int) -> Preset:
    fields = dict(
        vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_theta=500000.0, tie_word_embeddings=False,
    )  # fmt: skip
    return Preset(name, text, size, "llama", fields, seq=2048)


def _gpt2(name: str, text: str, size: float, hidden: int, layers: int, heads: int, seq: int = 1024) -> Preset:
    return Preset(name, text, size, "gpt2", dict(n_embd=hidden, n_layer=layers, n_head=heads, n_positions=seq), seq=seq)


def _bert(name: str, text: str, size: float, hidden: int, layers: int, heads: int) -> Preset:
    fields = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden)
    return Preset(name, text, size, "bert", fields, seq=512)


def _t5(name: str, size: float, hidden: int, inner: int, layers: int, heads: int, head: int) -> Preset:
    fields = dict(d_model=hidden, d_ff=inner, num_layers=layers, num_heads=heads, d_kv=head, decoder_start_token_id=0)
    return Preset(name, "T5, encoder and decoder", size, "t5", fields, seq=512)


def _vit(name: str, text: str, size: float, hidden: int, layers: int, heads: int, patch: int) -> Preset:
    fields = dict(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden,
        patch_size=patch, image_size=224, num_labels=1000,
    )  # fmt: skip
    return Preset(name, text, size, "vit", fields)


def _qwen3(name: str, size: float, hidden: int, inner: int, layers: int, heads: int, tied: bool = False) -> Preset:
    fields = dict(
        vocab_size=151936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
        rope_theta=1000000.0, tie_word_embeddings=tied,
    )  # fmt: skip
    return Preset(name, "Qwen3, dense", size, "qwen3", fields, seq=2048)


_LLAMA2 = dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=False,
)  # fmt: skip
_MIXTRAL = dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=32768, rope_theta=1000000.0, num_local_experts=8,
    num_experts_per_tok=2, sliding_window=None, tie_word_embeddings=False,
)  # fmt: skip
_QWEN3_MOE = dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, max_position_embeddings=40960, rope_theta=1000000.0, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
    tie_word_embeddings=False,
)  # fmt: skip
_WHISPER = dict(
    d_model=1280, encoder_layers=32, decoder_layers=32, encoder_attention_heads=20, decoder_attention_heads=20,
    encoder_ffn_dim=5120, decoder_ffn_dim=5120, vocab_size=51866, num_mel_bins=128,
)  # fmt: skip
_CLIP = dict(
    projection_dim=768,
    text_config=dict(hidden_size=768, intermediate_size=3072, num_attention_heads=12, num_hidden_layers=12),
    vision_config=dict(
        hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_hidden_layers=24, patch_size=14
    ),
)

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        _llama3("llama3-8b", "Llama 3, grouped-query attention", 8.03e9, 4096, 14336, 32, 32),
        _llama3("llama3-70b", "Llama 3, grouped-query attention", 70.55e9, 8192, 28672, 80, 64),
        _llama3("llama3-405b", "Llama 3.1, grouped-query attention", 405.85e9, 16384, 53248, 126, 128),
        Preset("llama2-7b", "Llama 2, full multi-head attention", 6.74e9, "llama", _LLAMA2, seq=2048),
        _gpt2("gpt2", "GPT-2 small, tied embeddings", 124.4e6, 768, 12, 12),
        _gpt2("gpt2-medium", "GPT-2 medium", 354.8e6, 1024, 24, 16),
        _gpt2("gpt2-large", "GPT-2 large", 774.0e6, 1280, 36, 20),
        _gpt2("gpt2-xl", "GPT-2 XL, 25 heads", 1.558e9, 1600, 48, 25),
        _gpt2("gpt3-175b", "GPT-3 as a GPT-2 of its size", 174.6e9, 12288, 96, 96, 2048),
        _bert("bert-base", "BERT, masked language model", 109.5e6, 768, 12, 12),
        _bert("bert-large", "BERT, masked language model", 335.2e6, 1024, 24, 16),
        _t5("t5-small", 60.5e6, 512, 2048, 6, 8, 64),
        _t5("t5-large", 737.7e6, 1024, 4096, 24, 16, 64),
        _t5("t5-3b", 2.852e9, 1024, 16384, 24, 32, 128),
        _t5("t5-11b", 11.307e9, 1024, 65536, 24, 128, 128),
        _vit("vit-b16", "Vision Transformer, 16x16 patches", 86.6e6, 768, 12, 12, 16),
        _vit("vit-l16", "Vision Transformer, 16x16 patches", 304.3e6, 1024, 24, 16, 16),
        _vit("vit-h14", "Vision Transformer, 14x14 patches", 632.0e6, 1280, 32, 16, 14),
        Preset("mixtral-8x7b", "mixture of 8 experts, 2 a token", 46.7e9, "mixtral", _MIXTRAL, seq=2048),
        _qwen3("qwen3-0.6b", 596e6, 1024, 3072, 28, 16, tied=True),
        _qwen3("qwen3-8b", 8.19e9, 4096, 12288, 36, 32),
        _qwen3("qwen3-32b", 32.76e9, 5120, 25600, 64, 64),
        Preset("qwen3-30b-a3b", "Qwen3, mixture of 128 experts, 8 a token", 30.5e9, "qwen3_moe", _QWEN3_MOE, seq=2048),
        Preset("resnet50", "ResNet-50, ImageNet head", 25.6e6, "resnet", dict(num_labels=1000), batch=1024),
        Preset("resnet50-100k", "ResNet-50, 100,000 classes", 228.4e6, "resnet", dict(num_labels=100_000), batch=1024),
        Preset("wide-resnet", "Wide ResNet-50-2", 68.9e6, "wide-resnet", batch=1024),
        Preset("whisper-large", "Whisper large v3, speech to text", 1.543e9, "whisper", _WHISPER, seq=448),
        Preset("clip-vit-l14", "CLIP, contrastive text and image", 427.6e6, "clip", _CLIP),
    )
}
