"""Linear layers with quantised weights in buffers, as users and libraries write them, and a Llama of such."""

import torch
import torch.nn.functional as F
import transformers as T
from torch import nn

GROUP = 16


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


class Int8Linear(nn.Module):
    """Per-channel scales after the product."""

    def __init__(self, features: int, made: int) -> None:
        super().__init__()
        self.register_buffer("q", torch.randint(-127, 128, (made, features), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(made) / 512)

    def forward(self, x):
        return F.linear(x, self.q.to(x.dtype)) * self.scale


class Int4Linear(nn.Module):
    """Two weights in a byte, a scale and a zero for each group of input features."""

    def __init__(self, features: int, made: int) -> None:
        super().__init__()
        self.register_buffer("q", torch.randint(0, 256, (made, features // 2), dtype=torch.uint8))
        self.register_buffer("scale", torch.rand(made, features // GROUP, 1) / 64)
        self.register_buffer(
            "zero", torch.randint(0, 16, (made, features // GROUP, 1), dtype=torch.uint8), persistent=False
        )

    def forward(self, x):
        w = torch.stack([self.q & 15, self.q >> 4], -1).view(len(self.q), -1, GROUP).to(x.dtype)
        return x @ ((w - self.zero) * self.scale).flatten(1).t()


class Int4Written(Int4Linear):
    """Unpacked into a tensor of its own."""

    def forward(self, x):
        w = torch.empty(len(self.q), 2 * self.q.size(1), dtype=torch.int8, device=x.device)
        w[:, ::2] = self.q & 15
        w[:, 1::2] = self.q >> 4
        return F.linear(x, ((w.view(len(self.q), -1, GROUP).to(x.dtype) - self.zero) * self.scale).flatten(1))


class PackedLinear(nn.Module):
    """Eight weights in an int32, along the input features, as GPTQ has them; groups in any order."""

    def __init__(self, features: int, made: int) -> None:
        super().__init__()
        groups = features // GROUP
        self.register_buffer("q", _words(features // 8, made))
        self.register_buffer("zeros", _words(groups, made // 8))
        self.register_buffer("scales", torch.rand(groups, made) / 64)
        self.register_buffer("group", torch.arange(features).roll(3) // GROUP)
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32), persistent=False)

    def forward(self, x):
        zeros = (self.zeros.unsqueeze(2) >> self.shifts) & 15
        w = (self.q.unsqueeze(1) >> self.shifts.view(-1, 1)) & 15
        w = self.scales[self.group] * (w.flatten(0, 1) - zeros.flatten(1)[self.group])
        return x @ w.to(x.dtype)


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self, base: nn.Module, features: int, made: int) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(features, 2, bias=False), nn.Linear(2, made, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def quantised_llama(kind: type[nn.Module] = Int4Linear, adapters: bool = False) -> T.LlamaForCausalLM:
    """All but its embeddings and norms; `adapters`: which alone are trained."""
    config = T.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=50, use_cache=not adapters,
    )  # fmt: skip
    model = T.LlamaForCausalLM(config)
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path != "lm_head":
            sizes = module.in_features, module.out_features
            made = kind(*sizes)
            home, _, name = path.rpartition(".")
            setattr(model.get_submodule(home), name, Adapted(made, *sizes) if adapters else made)
    return model
