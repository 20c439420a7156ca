"""Images and signals."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats, ints

B = 4


def images():
    return call(floats(B, 4, 8, 8), ints(4, B))


@case(images)
class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x, y):
        h = F.relu(self.bn(self.conv(x)))
        return F.cross_entropy(self.fc(F.adaptive_avg_pool2d(h, 1).flatten(1)), y)


@case(images, refused="depends on the values of a tensor")
class BatchNormByCumulativeAverage(nn.Module):
    """momentum=None: the factor depends on num_batches_tracked."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.fc = nn.BatchNorm2d(4, momentum=None), nn.Linear(4, 4)

    def forward(self, x, y):
        return F.cross_entropy(self.fc(self.bn(x).mean((2, 3))), y)


@case(images)
class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 8, 3, 2, 1, bias=False), nn.Conv2d(8, 8, 3, 1, 1, bias=False)
        self.na, self.nb, self.skip = nn.GroupNorm(2, 8), nn.GroupNorm(2, 8), nn.Conv2d(4, 8, 1, 2)
        self.fc = nn.Linear(8, 4)

    def forward(self, x, y):
        h = self.nb(self.b(F.relu(self.na(self.a(x)), inplace=True)))
        h += self.skip(x)
        return F.cross_entropy(self.fc(F.relu_(h).mean([-1, -2])), y, label_smoothing=0.1)


@case(lambda: call(floats(B, 4, 8, 8)))
class DepthwiseSeparable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depth, self.point = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 8, 1)
        self.se1, self.se2 = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)

    def forward(self, x):
        h = F.hardswish(self.point(self.depth(x)))
        gate = torch.sigmoid(self.se2(F.relu(self.se1(h.mean((2, 3), keepdim=True)))))
        return (h * gate).square().mean()


@case(lambda: call(floats(B, 4, 8, 8)))
class SmallUnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        a = F.gelu(self.down(x))
        b = F.gelu(self.mid(F.max_pool2d(a, 2)))
        return F.mse_loss(self.out(torch.cat([a, self.up(b)], 1)), x)


@case(lambda: call(floats(B, 3, 8, 8), ints(4, B)))
class PatchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.zeros(1, 1, 8))
        self.pos, self.block, self.head = nn.Parameter(torch.randn(1, 5, 8)), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, labels):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.pos
        x = x + F.softmax(x @ x.transpose(1, 2), -1) @ self.block(x)
        return F.cross_entropy(self.head(x[:, 0]), labels)


@case(lambda: call(floats(B, 4, 16)))
class CausalConvolutions(nn.Module):
    """Dilated, padded on the left, as WaveNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=2**i) for i in range(3))
        self.mix = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3))

    def forward(self, x):
        for i, (conv, mix) in enumerate(zip(self.convs, self.mix, strict=True)):
            a, b = conv(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            x = x + mix(torch.tanh(a) * torch.sigmoid(b))
        return x.square().mean()


@case(lambda: call(floats(2, 4, 4, 4, 4)))
class VideoNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv3d(4, 8, 3, padding=1), nn.BatchNorm3d(8)

    def forward(self, x):
        return F.avg_pool3d(self.bn(self.conv(x)).relu(), 2).square().mean()


@case(lambda: call(floats(B, 4, 4, 4)))
class PixelShuffleSuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 16, 3, padding=1)

    def forward(self, x):
        y = F.pixel_shuffle(self.conv(x), 2)
        return F.l1_loss(y, F.interpolate(x, scale_factor=2, mode="nearest"))


@case(lambda: call(floats(B, 4, 8, 8)))
class SpectralNormConv(nn.Module):
    """Power iteration writes its vectors in every training step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 8, 3))

    def forward(self, x):
        return self.conv(x).square().mean()


@case(lambda: call(floats(B, 4, 8)))
class WeightNormConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 3))

    def forward(self, x):
        return self.conv(x).square().mean()


@case(lambda: call(floats(B, 8, 8)))
class FourierLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 8, 8, 2) * 0.2)

    def forward(self, x):
        f = torch.fft.rfft(x, dim=1)
        y = torch.fft.irfft(torch.einsum("bfi,fio->bfo", f, torch.view_as_complex(self.w)), n=8, dim=1)
        return y.square().mean()
