"""What an operator of a program takes that has next to nothing to do: on a CPU the host is the device.

Calling the operator, and the views before it, costs several times what the shortest kernel does, and nothing hides it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tapas.calibrate.timing import Stopwatch
from tapas.capture import capture
from tapas.ir.fold import fold
from tapas.planner.assignment import followed
from tapas.planner.pipeline import plan_graph
from tapas.planner.request import Request
from tapas.rules.base import Call, rule_for
from tapas.runtime.collectives import Count, Rank
from tapas.runtime.program import write_program

WIDTH, HEADS, TOKENS = 16, 4, 4


class SmallLayer(nn.Module):
    """Of a transformer, as small as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        q, k, v = (one(normed).view(1, TOKENS, HEADS, -1).transpose(1, 2) for one in self.qkv)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(1, TOKENS, WIDTH))
        return x + self.down(F.silu(self.up(self.norm(x))))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale


def operator_seconds(watch: Stopwatch) -> float:
    """Of an operator that has a kernel, with the views around it."""
    module = SmallLayer().eval()
    x = torch.ones(1, TOKENS, WIDTH)
    graph = capture(module, (x,), training=False, name="small layer")
    folded = fold(graph)
    plan = plan_graph(graph, Request.of("1", training=False, baselines=False))
    rank = Rank((1,), (0,), [], Count(), watch.device)
    program = write_program(graph, folded, followed(plan, graph, folded), rank)
    held = dict(module.named_parameters())
    given = [held[leaf.paths[0]].detach() if leaf.kind == "parameter" else x for leaf in graph.given_leaves]
    calls = [Call.of(op, graph.tensors) for op in graph.ops]
    kernels = sum(not rule_for(call).view for call in calls)
    with torch.no_grad():
        return watch(lambda: program(*given)) / kernels
