"""Embeddings: tokens, features, or the rows of the table are dealt out."""

from tapas.rules.base import Call, Kernel, Rule, from_labels, rule
from tapas.rules.labels import Term
from tapas.rules.placed import number, placed


@rule("aten.embedding.default")
def embedding(call: Call) -> Rule:
    """With the rows split, each rank looks up the tokens it knows: the result is a partial sum."""
    table, indices = number(call, 0, "weight"), number(call, 1, "indices")
    assert table is not None and indices is not None
    # Gradients divided by how often a token occurs need all tokens.
    mark = "!" if call.arg(3, "scale_grad_by_freq", False) else ""
    tokens: Term = [[f"{mark}d{i}"] for i in range(len(call.operands[indices].shape))]
    operands = placed(call, (0, "weight", [[mark + "v"], ["h"]]), (1, "indices", tokens))
    return from_labels(
        operands, [[*tokens, ["h"]]], call, kernels={"v": Kernel()}, kernel="embedding", linear=((table,),)
    )


@rule("aten.embedding_bag.default", "aten.embedding_bag.padding_idx", "aten._embedding_bag.default")
def embedding_bag(call: Call) -> Rule:
    """Features only; what comes with the bags is the same on all ranks."""
    largest = call.arg(4, "mode", 0) == 2  # its fourth result then is by feature, too
    if largest:
        return Rule()
    operands = placed(call, (0, "weight", [["1"], ["h"]]))
    whole = Kernel(results=(None, "R", "R", "R"))
    return from_labels(operands, [[["1"], ["h"]], None, None, None], call, kernels={"h": whole})
