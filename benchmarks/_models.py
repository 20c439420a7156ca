"""Models of many kinds at sizes for one GPU: those that speeds and prices are held against."""

from collections.abc import Callable
from typing import Any

import torch

from tapas.models.wide_resnet import WideResNet, WideResNetConfig

Config = dict[str, Any]
_LLAMA: Config = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                  "num_key_value_heads": 8, "vocab_size": 32000, "use_cache": False}  # fmt: skip
_TINY: Config = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "n_layer": 2, "n_embd": 64, "n_head": 4, "num_layers": 2,
    "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4,
}  # fmt: skip


def _ids(below: int, *shape: int) -> torch.Tensor:
    """The same numbers wherever the model is."""
    return torch.randint(0, below, shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu")


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu")


def without_data(name: str, batch: int | None = None) -> tuple[Any, Config]:
    """The model and its inputs as they are trained, in bfloat16, on the meta device; in a batch of another size, if so
    wanted."""
    with torch.device("meta"):
        model, inputs = MODELS[name](False)
    model = model.to(torch.bfloat16).train()
    return model, {
        k: torch.empty(
            batch or len(v), *v.shape[1:], dtype=torch.bfloat16 if v.is_floating_point() else v.dtype, device="meta"
        )
        for k, v in inputs.items()
    }


def on_device(name: str, tiny: bool, device: str) -> tuple[Any, Config]:
    """The model and its inputs as they are trained, in bfloat16; weights are drawn where they are."""
    torch.manual_seed(0)
    with torch.device(device):
        model, inputs = MODELS[name](tiny)
    model = model.to(torch.bfloat16).train()
    return model, {k: v.to(device, torch.bfloat16 if v.is_floating_point() else None) for k, v in inputs.items()}


def text(model: str, batch: int, length: int, **config: Any) -> Callable[[bool], tuple[Any, Config]]:
    def made(tiny: bool) -> tuple[Any, Config]:
        import transformers as T

        sizes = config | {key: value for key, value in _TINY.items() if key in config} if tiny else config
        rows, columns = (2, 16) if tiny else (batch, length)
        built = getattr(T, model)(getattr(T, model).config_class(**sizes))
        x = _ids(sizes["vocab_size"], rows, columns)
        return built, {"input_ids": x, "labels": x.clone()}

    return made


def images(model: str, batch: int, **config: Any) -> Callable[[bool], tuple[Any, Config]]:
    def made(tiny: bool) -> tuple[Any, Config]:
        import transformers as T

        small = _TINY | {"image_size": 32, "depths": [1, 1], "num_heads": [2, 2], "hidden_sizes": [16, 32],
                         "embed_dim": 16, "window_size": 4, "patch_size": 4}  # fmt: skip
        sizes = config | {key: value for key, value in small.items() if key in config} if tiny else config
        built = getattr(T, model)(getattr(T, model).config_class(num_labels=10, **sizes))
        rows, side = (2, 32) if tiny else (batch, 224)
        pixels = _values(rows, 3, side, side)
        return built, {"pixel_values": pixels, "labels": torch.arange(rows, device="cpu") % 10}

    return made


def wide_resnet(batch: int) -> Callable[[bool], tuple[Any, Config]]:
    def made(tiny: bool) -> tuple[Any, Config]:
        rows, side = (2, 32) if tiny else (batch, 224)
        config = WideResNetConfig(depths=(1, 1)) if tiny else WideResNetConfig()
        return WideResNet(config), {"pixel_values": _values(rows, 3, side, side), "labels": _ids(1000, rows)}

    return made


def speech(model: str, batch: int, length: int, **config: Any) -> Callable[[bool], tuple[Any, Config]]:
    def made(tiny: bool) -> tuple[Any, Config]:
        import transformers as T

        small = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                 "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 256,
                 "max_source_positions": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
                 "decoder_start_token_id": 0}  # fmt: skip
        built = getattr(T, model)(getattr(T, model).config_class(**config | small if tiny else config))
        rows, columns, frames = (2, 8, 32) if tiny else (batch, length, 3000)
        sounds = _values(rows, built.config.num_mel_bins, frames)
        words = _ids(built.config.vocab_size, rows, columns)
        return built, {"input_features": sounds, "labels": words}

    return made


_GPT2: Config = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "use_cache": False}
_QUIET: Config = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BERT: Config = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
MODELS: dict[str, Callable[[bool], tuple[Any, Config]]] = {
    "llama-1.1b": text("LlamaForCausalLM", 8, 2048, **_LLAMA),
    "llama-1.5b-8k": text("LlamaForCausalLM", 1, 8192, **_LLAMA | {"vocab_size": 128256}),
    "llama-8b-4-layers": text("LlamaForCausalLM", 4, 2048, **_LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4}),
    "gpt2-xl-24-layers": text("GPT2LMHeadModel", 8, 1024, **_GPT2 | {"n_layer": 24, "n_embd": 1600, "n_head": 25}),
    "bert-large": text("BertForMaskedLM", 32, 512, **_BERT, vocab_size=30522),
    "t5-large-12-layers": text("T5ForConditionalGeneration", 16, 512, num_layers=12, d_model=1024, d_ff=4096, d_kv=64,
                               num_heads=16, vocab_size=32128, use_cache=False, decoder_start_token_id=0,
                               dropout_rate=0.0),
    "vit-h-16-layers": images("ViTForImageClassification", 64, hidden_size=1280, intermediate_size=5120,
                              num_hidden_layers=16, num_attention_heads=16, image_size=224, patch_size=14),
    "whisper-8-layers": speech("WhisperForConditionalGeneration", 8, 448, d_model=1280, encoder_layers=8,
                               decoder_layers=8, encoder_attention_heads=20, decoder_attention_heads=20,
                               encoder_ffn_dim=5120, decoder_ffn_dim=5120, vocab_size=51866, num_mel_bins=128,
                               use_cache=False),
    "mixtral-small": text("MixtralForCausalLM", 8, 2048, **_LLAMA | {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 16}),
    "wide-resnet": wide_resnet(64),
    "resnet-50": images("ResNetForImageClassification", 64, embedding_size=64, depths=[3, 4, 6, 3],
                        hidden_sizes=[256, 512, 1024, 2048]),
    "swin-t": images("SwinForImageClassification", 64, image_size=224, embed_dim=96, window_size=7,
                     depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24]),
    "gpt2": text("GPT2LMHeadModel", 4, 1024, **_GPT2, **_QUIET),
    "gpt2-dropout": text("GPT2LMHeadModel", 4, 1024, **_GPT2),
    # Chosen before prices were last fitted, measured after it.
    "qwen3-12-layers": text("Qwen3ForCausalLM", 8, 2048, hidden_size=1024, intermediate_size=3072, num_hidden_layers=12,
                            num_attention_heads=16, num_key_value_heads=8, vocab_size=151936, use_cache=False),
    "opt-12-layers": text("OPTForCausalLM", 8, 1024, hidden_size=2048, ffn_dim=8192, num_hidden_layers=12,
                          num_attention_heads=32, word_embed_proj_dim=2048, vocab_size=50272, use_cache=False),
    "pythia-8-layers": text("GPTNeoXForCausalLM", 8, 1024, hidden_size=2048, intermediate_size=8192,
                            num_hidden_layers=8, num_attention_heads=8, vocab_size=50304, use_cache=False),
    "convnext-t": images("ConvNextForImageClassification", 64, depths=[3, 3, 9, 3], hidden_sizes=[96, 192, 384, 768]),
    "dinov2-b": images("Dinov2ForImageClassification", 64, image_size=224, hidden_size=768, num_hidden_layers=12,
                       num_attention_heads=12, patch_size=14),
    "gpt2-1x128": text("GPT2LMHeadModel", 1, 128, **_GPT2, **_QUIET),
}  # fmt: skip
