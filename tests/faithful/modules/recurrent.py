"""Recurrent and state-space models."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.case import call, case, floats, ints

B, S, D = 4, 6, 8


def sequence():
    return call(floats(B, S, D))


@case(lambda: call(ints(16, B, S), ints(16, B, S)))
class LstmLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(16, D), nn.LSTM(D, D, 2, batch_first=True), nn.Linear(D, 16)

    def forward(self, tokens, labels):
        h, _ = self.rnn(self.embed(tokens))
        return F.cross_entropy(self.head(h).view(-1, 16), labels.view(-1))


@case(sequence)
class BidirectionalGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(D, D, batch_first=True, bidirectional=True), nn.Linear(2 * D, 4)

    def forward(self, x):
        y, last = self.rnn(x)
        return self.out(y).square().mean() + last.mean()


@case(sequence)
class CellLoop(nn.Module):
    """A loop in Python over a cell, with states in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(D, D), nn.Linear(D, D)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], D)
        states = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            states.append(h)
        return self.out(torch.stack(states, 1)).square().mean()


@case(lambda: call(floats(B, S, D), floats(1, B, D)))
class RnnWithState(nn.Module):
    """Takes and returns its state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(D, D, batch_first=True)

    def forward(self, x, h):
        y, h = self.rnn(x, h)
        return {"loss": y.square().mean(), "state": h.detach()}


@case(sequence)
class DiagonalStateSpace(nn.Module):
    """S4D: a kernel from the diagonal, then a long convolution by FFT."""

    def __init__(self) -> None:
        super().__init__()
        self.log_a, self.b, self.c = (nn.Parameter(torch.randn(D, 4)) for _ in range(3))
        self.d = nn.Parameter(torch.ones(D))

    def forward(self, x):
        length = x.shape[1]
        a = -torch.exp(self.log_a)
        powers = torch.exp(a.unsqueeze(-1) * torch.arange(length))
        kernel = torch.einsum("dn,dn,dnl->dl", self.b, self.c, powers)
        u = x.transpose(1, 2)
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length), n=2 * length)
        return (y[..., :length] + u * self.d.unsqueeze(-1)).square().mean()


@case(sequence)
class SelectiveScan(nn.Module):
    """Mamba, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.x_proj, self.dt = nn.Linear(D, 2 * D), nn.Linear(D, 8), nn.Linear(D, D)
        self.a_log, self.conv = nn.Parameter(torch.randn(D, 4)), nn.Conv1d(D, D, 3, groups=D, padding=2)
        self.out = nn.Linear(D, D)

    def forward(self, x):
        u, z = self.inner(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        b, c = self.x_proj(u).split([4, 4], -1)
        delta = F.softplus(self.dt(u))
        h = x.new_zeros(x.shape[0], D, 4)
        ys = []
        for t in range(x.shape[1]):
            decay = torch.exp(delta[:, t, :, None] * -torch.exp(self.a_log))
            h = decay * h + (delta[:, t] * u[:, t])[..., None] * b[:, t, None]
            ys.append((h * c[:, t, None]).sum(-1))
        return self.out(torch.stack(ys, 1) * F.silu(z)).square().mean()


@case(sequence)
class LinearRecurrence(nn.Module):
    """A gated recurrence by cumulative sums."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        log = F.logsigmoid(self.gate(x)).cumsum(1)
        return ((self.value(x) * (-log).exp()).cumsum(1) * log.exp()).square().mean()


@case(lambda: call(floats(B, S, D), torch.tensor([6, 5, 3, 2])))
class LastOfEach(nn.Module):
    """The state at the end of each sequence, by gather."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(D, D, batch_first=True)

    def forward(self, x, lengths):
        y, _ = self.rnn(x)
        last = y.gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, D)).squeeze(1)
        return last.square().mean()
