"""Small versions of every preset family, with inputs, and a cluster on which splitting them pays."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers as T
from torch import nn

from tapas.hardware.cluster import Cluster, Device, Link
from tests.quantised import quantised_llama

# Nothing costs a fixed time: even the smallest operator is best split.
_DEVICE = Device("slow", 10**12, 1e11, (("float32", 1e9), ("bfloat16", 1e9)), 0.0, 1.0)
EAGER = Cluster("eager", _DEVICE, 8, Link(1e9, 0.0), Link(0.5e9, 0.0), "invented for tests")


def _tokens(vocab: int, *shape: int) -> dict[str, torch.Tensor]:
    labels = torch.randint(0, vocab, shape)
    labels[torch.rand(shape) < 0.2] = -100
    return {"input_ids": torch.randint(0, vocab, shape), "labels": labels}


def _images(classes: int, batch: int, size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, classes, (batch,))}


def gpt2():
    config = T.GPT2Config(n_layer=2, n_embd=20, n_head=5, vocab_size=51, n_positions=16, use_cache=False,
                          bos_token_id=0, eos_token_id=0)  # fmt: skip
    return T.GPT2LMHeadModel(config), _tokens(51, 4, 8)


_DECODER = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 50, "use_cache": False}  # fmt: skip


def llama(layers: int = 2):
    config = T.LlamaConfig(intermediate_size=48, **(_DECODER | {"num_hidden_layers": layers}))
    return T.LlamaForCausalLM(config), _tokens(50, 4, 8)


def qwen3():
    return T.Qwen3ForCausalLM(T.Qwen3Config(intermediate_size=48, head_dim=8, **_DECODER)), _tokens(50, 4, 8)


def mistral():
    """Each token looks at itself and the one before."""
    config = T.MistralConfig(intermediate_size=48, sliding_window=2, **_DECODER)
    return T.MistralForCausalLM(config), _tokens(50, 4, 8)


def mixtral():
    config = T.MixtralConfig(intermediate_size=24, num_local_experts=4, **_DECODER)
    return T.MixtralForCausalLM(config), _tokens(50, 4, 8)


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


def qwen3_moe():
    config = T.Qwen3MoeConfig(intermediate_size=48, moe_intermediate_size=24, head_dim=8, output_router_logits=True,
                              **_EXPERTS, **_DECODER)  # fmt: skip
    return T.Qwen3MoeForCausalLM(config), _tokens(50, 4, 8)


def olmoe():
    config = T.OlmoeConfig(intermediate_size=24, eos_token_id=0, **_EXPERTS, **_DECODER)
    return T.OlmoeForCausalLM(config), _tokens(50, 4, 8)


def deepseek_v3():
    """A dense layer, and one of experts."""
    config = T.DeepseekV3Config(
        intermediate_size=48, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, v_head_dim=8,
        qk_nope_head_dim=8, **(_DECODER | {"num_key_value_heads": 4}),
    )  # fmt: skip
    return T.DeepseekV3ForCausalLM(config), _tokens(50, 4, 8)


def gpt_oss(slots: int = 2):
    """Experts with biases, gate and up in turn, within limits; attention with sinks, in one layer over a window."""
    config = T.GptOssConfig(
        intermediate_size=24, num_local_experts=4, num_experts_per_tok=slots, head_dim=8, sliding_window=4,
        swiglu_limit=0.5, pad_token_id=0, **_DECODER,
    )  # fmt: skip
    model = T.GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "experts" in name:  # as made they hardly change a result, and never reach their limits
            nn.init.normal_(parameter, std=0.5)
    return model, _tokens(50, 4, 8)


def gpt_oss_one_expert():
    """Routers that choose by their bias alone, and with that the first expert."""
    model, inputs = gpt_oss(slots=1)
    for name, parameter in model.named_parameters():
        if "router" in name:
            parameter.data = torch.zeros_like(parameter)
            parameter.data[0] += name.endswith("bias")
    return model, inputs


def one_expert():
    """A Mixtral whose routers see no difference: all tokens go to the first expert."""
    config = T.MixtralConfig(intermediate_size=24, num_local_experts=4, num_experts_per_tok=1, **_DECODER)
    model = T.MixtralForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            nn.init.zeros_(parameter)
    return model, _tokens(50, 4, 8)


EXPERTS: dict[str, Callable] = {
    f.__name__: f for f in (mixtral, qwen3_moe, olmoe, deepseek_v3, gpt_oss, one_expert, gpt_oss_one_expert)
}


def bert():
    config = T.BertConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
                          vocab_size=50, max_position_embeddings=16)  # fmt: skip
    return T.BertForMaskedLM(config), _tokens(50, 4, 8)


def t5():
    config = T.T5Config(num_layers=2, d_model=32, d_kv=8, d_ff=48, num_heads=4, vocab_size=50, use_cache=False,
                        decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
    return T.T5ForConditionalGeneration(config), _tokens(50, 4, 8)


def vit():
    config = T.ViTConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
                         image_size=16, patch_size=4, num_labels=7)  # fmt: skip
    return T.ViTForImageClassification(config), _images(7, 4, 16)


def resnet():
    config = T.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], num_labels=7)
    return T.ResNetForImageClassification(config), _images(7, 8, 32)


def _twice(into: int, out: int) -> nn.Sequential:
    """As U-Nets have them, with either kind of norm."""
    return nn.Sequential(
        nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
        nn.Conv2d(out, out, 3, padding="same", dilation=2), nn.GroupNorm(2, out), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Down by pooling and by strides, up by transposed convolutions and by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = _twice(3, 4), _twice(4, 6), _twice(6, 8)
        self.strided, self.pool = nn.Conv2d(6, 6, 3, 2, 1), nn.MaxPool2d(3, 2, 1)
        self.up, self.flat = nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.Conv2d(6, 4, 1)
        self.right, self.last = _twice(12, 6), nn.Conv2d(8, 2, 5, padding=2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        high = self.first(x)
        middle = self.second(self.pool(high))
        low = self.up(self.third(self.strided(middle)))
        joined = self.right(torch.cat((middle, low), 1))
        back = F.interpolate(self.flat(joined), scale_factor=2, mode="bilinear")
        made = self.last(torch.cat((high, back), 1))
        return {"loss": F.mse_loss(made, y), "made": made}


def unet():
    return UNet(), {"x": torch.randn(1, 3, 32, 32), "y": torch.randn(1, 2, 32, 32)}


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv3d(1, 4, (3, 5, 5), (1, 2, 2), (1, 2, 2)), nn.MaxPool3d(3, 1, 1)
        self.norm, self.deep = nn.BatchNorm3d(4), nn.Conv3d(4, 6, 3, padding=1, groups=2)
        self.shrink, self.mean = nn.Conv3d(6, 4, 1, 2), nn.AvgPool3d(3, 1, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.relu(self.norm(self.pool(self.stem(x))))
        x = F.interpolate(self.mean(self.shrink(F.gelu(self.deep(x)))), scale_factor=2, mode="nearest")
        return {"loss": F.l1_loss(x, y)}


def volumes():
    return Volumes(), {"x": torch.randn(1, 1, 8, 16, 16), "y": torch.randn(1, 4, 8, 8, 8)}


class Packed(nn.Module):
    """Attention with Q, K and V in one matrix, and gate and up in another."""

    def __init__(self, hidden: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.gate_up, self.down = nn.Linear(hidden, 64, bias=False), nn.Linear(32, hidden, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.view(b, s, self.heads, h // self.heads).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h))
        gate, up = self.gate_up(x).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return {"loss": (x - y).square().mean(), "hidden": x}


def packed():
    return Packed(), {"x": torch.randn(4, 6, 24), "y": torch.randn(4, 6, 24)}


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(6, 6, 3, padding=1), nn.AvgPool2d(3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pool(F.gelu(self.conv(x)))


class Residuals(nn.Module):
    """Deep enough for blocks to repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 6, 7, 2, 3), nn.Sequential(*(_Residual() for _ in range(4)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.blocks(self.stem(x)), y)}


def residuals():
    return Residuals(), {"x": torch.randn(1, 3, 16, 32), "y": torch.randn(1, 6, 8, 16)}


PICTURES: dict[str, Callable] = {f.__name__: f for f in (unet, volumes, residuals)}
FAMILIES: dict[str, Callable] = {f.__name__: f for f in (gpt2, llama, bert, t5, vit, mixtral, qwen3, resnet, packed)}


class _Masked(nn.Module):
    """With a buffer, a constant and a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(self.norm(x)))) * self.scale.square()
        return x + y * torch.arange(x.shape[1]).view(-1, 1).add(torch.tensor([1.0])).reciprocal()


class _Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*(_Masked() for _ in range(layers))), nn.Linear(24, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.head(self.layers(x)), y)}


def deep():
    """Deep enough for capture to trace one layer for all of them."""
    return _Deep(6), {"x": torch.randn(4, 6, 24), "y": torch.randn(4, 6, 3)}


def deep_llama():
    return llama(5)


def quantised():
    """Adapters beside weights in int4."""
    return quantised_llama(adapters=True), _tokens(50, 4, 8)


def small(family: str):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return (
            FAMILIES
            | EXPERTS
            | PICTURES
            | {"deep": deep, "deep_llama": deep_llama, "mistral": mistral, "quantised": quantised}
        )[family]()
