"""What a block may do about its activations, and which of its operators are then computed twice."""

from tapas.rules.base import Rule

# They are kept for the backward pass; or only what the block reads is, and the rest is computed again; or the results
# of products as well, which are dear to compute.
KEEP, SELECTIVE, BLOCK = MODES = ("none", "selective", "block")


def repeated(mode: str, rule: Rule) -> bool:
    """Whether an operator of a block in this mode is computed twice."""
    return mode == BLOCK or (mode == SELECTIVE and not rule.products)
