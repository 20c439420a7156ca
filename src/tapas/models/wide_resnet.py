"""Wide ResNet-50-2 in a few lines: ResNet-50 whose 3x3 convolutions are twice as wide."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(slots=True)
class WideResNetConfig:
    depths: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 2  # 1 is ResNet-50
    num_labels: int = 1000
    image_size: int = 224


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.reduce, self.conv, self.expand = (
            _conv(inputs, inner, 1),
            _conv(inner, inner, 3, stride),
            _conv(inner, outputs, 1),
        )
        changes = inputs != outputs or stride != 1
        self.shortcut = _conv(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.expand(F.relu(self.conv(F.relu(self.reduce(x)))))
        return F.relu(y + self.shortcut(x))


class WideResNet(nn.Module):
    def __init__(self, config: WideResNetConfig) -> None:
        super().__init__()
        self.stem = _conv(3, 64, 7, 2)
        layers, inputs = [], 64
        for stage, depth in enumerate(config.depths):
            outputs = 256 * 2**stage
            for number in range(depth):
                stride = 2 if stage and not number else 1
                layers.append(Bottleneck(inputs, outputs // 4 * config.width, outputs, stride))
                inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, config.num_labels)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = F.max_pool2d(F.relu(self.stem(pixel_values)), 3, 2, 1)
        logits = self.classifier(F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def build(config: WideResNetConfig, dtype: torch.dtype, device: str = "meta") -> WideResNet:
    with torch.device(device):
        return WideResNet(config).to(dtype)
