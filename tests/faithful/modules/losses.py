"""Several losses, losses made outside, contrastive ones."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats, ints

B, D = 4, 8


def batch():
    return call(floats(B, D))


def labelled():
    return call(floats(B, D), ints(4, B))


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(D, 16), nn.Linear(16, 4), nn.Linear(16, D)


@case(labelled, loss=lambda out: sum(out.values()))
class LossesInADict(_TwoHeads):
    """Detection models return their losses by name; the user adds them up."""

    def forward(self, x, y):
        h = self.body(x).relu()
        return {"classes": F.cross_entropy(self.a(h), y), "boxes": F.smooth_l1_loss(self.b(h), x)}


@case(labelled, loss=lambda out: out[0] + 0.3 * out[1])
class LossesInATuple(_TwoHeads):
    def forward(self, x, y):
        h = self.body(x).relu()
        return F.cross_entropy(self.a(h), y), F.mse_loss(self.b(h), x)


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@case(labelled, loss=lambda out: out.loss + 0.5 * out.logits.pow(2).mean())
class LossAndPenaltyOutside(_TwoHeads):
    """The model's own loss, and one more from its logits."""

    def forward(self, x, y):
        logits = self.a(self.body(x).relu())
        return Output(F.cross_entropy(logits, y), logits)


@case(batch, loss=lambda out: out.square().mean())
class LossOutside(_TwoHeads):
    """A model that returns logits and nothing else."""

    def forward(self, x):
        return self.a(self.body(x).relu())


@case(batch, loss=lambda out: F.cross_entropy(out["logits"], torch.arange(B)) + out["hidden"].abs().mean())
class LossFromTwoOutputs(_TwoHeads):
    def forward(self, x):
        h = self.body(x).relu()
        return {"logits": self.a(h), "hidden": h}


@case(batch, loss=lambda out: out.mean())
class LossPerExample(_TwoHeads):
    """reduction='none': the mean is the user's."""

    def forward(self, x):
        return F.mse_loss(self.b(self.body(x).relu()), x, reduction="none").mean(-1)


@case(batch, loss=lambda out: out[1])
class SecondLossOnly(_TwoHeads):
    """The first is for the log."""

    def forward(self, x):
        h = self.body(x).relu()
        return self.a(h).square().mean(), self.b(h).square().mean()


@case(labelled)
class WeightedClasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.criterion = nn.Linear(D, 4), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0]))

    def forward(self, x, y):
        return self.criterion(self.a(x), y)


@case(lambda: call(ints(8, B, 6), torch.where(torch.rand(B, 6) < 0.3, -100, ints(8, B, 6))))
class IgnoredTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, D)
        self.head = nn.Linear(D, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        logits = self.head(self.embed(ids))
        return F.cross_entropy(logits[:, :-1].reshape(-1, 8), labels[:, 1:].reshape(-1), ignore_index=-100)


@case(lambda: call(floats(B, D), floats(B, D)))
class ClipContrastive(nn.Module):
    """CLIP with its learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(D, D), nn.Linear(D, D)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        logits = self.logit_scale.exp() * a @ b.t()
        target = torch.arange(len(logits))
        return {"loss": (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2, "logits": logits}


@case(lambda: call(floats(2 * B, D)))
class SimClr(nn.Module):
    """Two views in one batch, the diagonal masked out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, D))

    def forward(self, x):
        z = F.normalize(self.net(x), dim=1)
        sim = (z @ z.T / 0.5).masked_fill(torch.eye(2 * B, dtype=torch.bool), -1e9)
        target = torch.arange(2 * B).roll(B)
        return F.cross_entropy(sim, target)


@case(lambda: call(floats(B, D), floats(B, D), floats(B, D)))
class Triplets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.criterion = nn.Linear(D, D), nn.TripletMarginLoss(margin=2.0)

    def forward(self, anchor, positive, negative):
        return self.criterion(self.net(anchor), self.net(positive), self.net(negative))


@case(lambda: call(floats(B, D), floats(B, D)))
class Preferences(nn.Module):
    """DPO: a policy beside a frozen copy."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = nn.Linear(D, 1), nn.Linear(D, 1)
        self.reference.requires_grad_(False)

    def forward(self, chosen, rejected):
        margin = self.policy(chosen) - self.policy(rejected)
        with torch.no_grad():
            base = self.reference(chosen) - self.reference(rejected)
        reward = (margin - base).detach()
        return {"loss": -F.logsigmoid(0.5 * (margin - base)).mean(), "accuracy": (reward > 0).to(reward.dtype).mean()}


@case(lambda: call(floats(B, D), floats(B, D)))
class Distillation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(D, D), nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        for p in self.teacher.parameters():
            p.requires_grad = False

    def forward(self, x, y):
        s, t = F.log_softmax(self.student(x) / 2, -1), F.softmax(self.teacher(x) / 2, -1)
        return 4 * F.kl_div(s, t, reduction="batchmean") + F.mse_loss(self.student(x), y)


@case(lambda: call(floats(6, B, D), ints(4, B, 3) + 1))
class Ctc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(D, 5)

    def forward(self, x, targets):
        log = self.out(x).log_softmax(-1)
        lengths = torch.full((B,), 6), torch.full((B,), 3)
        return F.ctc_loss(log, targets, *lengths)


@case(lambda: call(floats(B, D), ints(4, B)))
class CenterAndFocal(nn.Module):
    """A focal loss and learned centres, several terms in one."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head, self.centers = nn.Linear(D, D), nn.Linear(D, 4), nn.Parameter(torch.randn(4, D))

    def forward(self, x, y):
        h = self.net(x)
        log = F.log_softmax(self.head(h), -1).gather(1, y.unsqueeze(1)).squeeze(1)
        focal = -((1 - log.exp()) ** 2 * log).mean()
        return focal + 0.1 * (h - self.centers[y]).square().sum(1).clamp(1e-12, 1e12).mean()
