"""Generators and critics."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats

B, D = 4, 8


class _Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(D, 16), nn.LeakyReLU(0.2), nn.Linear(16, D))
        self.critic = nn.Sequential(nn.Linear(D, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def both():
    return call(floats(B, D), floats(B, D))


@case(both, loss=lambda out: out["critic"] + out["generator"])
class GeneratorAndCritic(_Adversaries):
    """Two losses; the critic's does not train the generator."""

    def forward(self, z, real):
        fake = self.generator(z)
        ones, zeros = torch.ones(B, 1), torch.zeros(B, 1)
        critic = F.binary_cross_entropy_with_logits(self.critic(real), ones)
        critic = critic + F.binary_cross_entropy_with_logits(self.critic(fake.detach()), zeros)
        return {"critic": critic, "generator": F.softplus(-self.critic(fake)).mean()}


@case(both, refused="takes a gradient")
class GradientPenalty(_Adversaries):
    """WGAN-GP: the norm of a gradient is part of the loss."""

    def forward(self, z, real):
        fake = self.generator(z).detach()
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean()


@case(both, refused="takes a gradient")
class AdversarialExamples(_Adversaries):
    """A step along the sign of an inner gradient, then the loss there."""

    def forward(self, z, real):
        with torch.enable_grad():
            x = real.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.critic(x).square().mean(), x)
        return self.critic(real + 0.1 * g.detach().sign()).square().mean() + self.generator(z).square().mean()


@case(lambda: call(floats(B, D), torch.tensor([1.0, 0.0, 1.0, 0.0])))
class HingeOnHalves(_Adversaries):
    """One batch of both kinds, told apart by a mask."""

    def forward(self, x, real):
        x = torch.where(real.bool()[:, None], x, self.generator(x))
        score = self.critic(x).squeeze(-1)
        return (F.relu(1 - score) * real + F.relu(1 + score) * (1 - real)).mean()
