"""Which module chooses the experts of each token, where experts are to be dealt out to devices.

transformers leaves every device the tokens of its own experts by changing what the router returns: (logits, weights,
numbers of experts, ...). That is right only where these weights and numbers go to the experts, and nowhere else.
"""

import torch
from torch import nn

from tapas._torch import FakeTensorMode
from tapas.export.dry_run import without_data
from tapas.export.sites import EXPERTS, Sites
from tapas.ir.fold import Block, Folded
from tapas.ir.graph import Op

HIDDEN, NUMBERS, WEIGHTS = 0, 1, 2  # operands of tapas::experts


def find_routers(folded: Folded, sites: Sites) -> dict[str, str]:
    """Module of experts -> its router, in the first copy of each block; none for those that cannot be dealt out."""
    found: dict[str, str] = {}
    for block in folded.blocks:
        for op in block.ops:
            if sites.kind(op) == EXPERTS and (path := _router(block, op)):
                shape = folded.tensors[op.operands[HIDDEN]].shape
                if _routes(sites.modules[path], shape, folded.tensors[op.operands[NUMBERS]].shape):
                    found[op.module] = path
    return found


def _router(block: Block, experts: Op) -> str:
    """The one module that makes numbers and weights, if nobody else reads them."""
    chosen = {experts.operands[NUMBERS], experts.operands[WEIGHTS]}
    makers = {op.module for op in block.ops if chosen & set(op.results)}
    made = {name for op in block.ops for name in op.results}
    readers = [op for op in block.ops if chosen & set(op.operands)]
    alone = chosen <= made and readers == [experts] and not chosen & set(block.exports)
    return makers.pop() if alone and len(makers) == 1 and experts.module not in makers else ""


def _routes(module: nn.Module, hidden: tuple[int, ...], numbers: tuple[int, ...]) -> bool:
    """Whether it returns logits, weights and numbers in this order, and knows how many experts there are."""
    known = hasattr(module, "num_experts") or hasattr(getattr(module, "config", None), "num_experts")
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            given = next((p.dtype for p in module.parameters()), torch.get_default_dtype())
            made = without_data(module)(torch.empty(hidden, dtype=given))
    except Exception:  # it takes more than the tokens: not one that is known
        return False
    if not known or not isinstance(made, tuple) or len(made) < 3:
        return False
    floating = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in made[:3]]
    return floating == [True, True, False] and made[1].shape == made[2].shape == numbers
