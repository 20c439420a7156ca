"""Cases of indexing, counting and experts."""

import torch
import transformers.integrations.moe  # noqa: F401 - registers its grouped product

import tapas.ir.custom_ops  # noqa: F401 - registers our own operators
from tests.oracle.case import Case, booleans, floats, integers


def reading() -> list[Case]:
    x, order = floats(4, 5, 6), torch.tensor([3, 0, 2])
    return [
        Case("aten.gather.default", (floats(4, 5), 1, integers(4, 3, high=5))),
        Case("aten.gather.default", (floats(4, 5), -1, integers(2, 4, high=5))),
        Case("aten.gather.default", (x, 0, integers(2, 5, 6, high=4))),
        Case("aten.gather.default", (booleans(4, 5), 1, integers(4, 3, high=5))),
        Case("aten.gather.default", (integers(4, 6, high=999), 1, integers(4, 1, high=6))),
        Case("aten.take_along_dim.default", (floats(4, 5), integers(1, 3, high=5), 1)),
        Case("aten.take_along_dim.default", (floats(1, 5), integers(4, 3, high=5), -1)),
        Case("aten.take_along_dim.default", (floats(4, 5), integers(3, high=20))),
        Case("aten.index_select.default", (x, 1, integers(7, high=5))),
        Case("aten.index_select.default", (x, -1, integers(4, high=6))),
        Case("aten.index.Tensor", (x, (order,))),
        Case("aten.index.Tensor", (x, (None, order, None))),
        Case("aten.index.Tensor", (x, (None, integers(2, 3, high=5)))),
        Case("aten.index.Tensor", (x, (order, integers(2, 1, high=5)))),
        Case("aten.index.Tensor", (x, (integers(4, 1, high=4), None, integers(5, high=6)))),
        Case("aten.index.Tensor", (x, (torch.tensor([-1, 1, -3, 0]), torch.tensor([0, 4, -5, 2])))),
        Case("aten.index.Tensor", (floats(5, 2), (integers(4, 4, high=5), torch.tensor(1)))),
        Case("aten.index.Tensor", (booleans(4, 6), (order,))),
        Case("aten.index.Tensor", (floats(4, 6), (torch.tensor([True, False, True, True]),))),
        Case("aten._unsafe_index.Tensor", (x, (None, order))),
        Case("aten.one_hot.default", (integers(4, 3, high=5), 5)),
        Case("aten.one_hot.default", (torch.tensor([0, 1, 2, 4]), -1)),
        Case("aten.histc.default", (floats(4, 5), 6, -3, 3), frozen=(0,)),
        Case("aten.histc.default", (floats(4, 5), 6), frozen=(0,)),
        Case("aten.bincount.default", (torch.tensor([4, 3, 1, 0, 0, 1, 2, 2]),)),
        Case("aten.searchsorted.Tensor", (floats(6).sort()[0], floats(4, 3)), frozen=(0, 1)),
        Case("aten.searchsorted.Tensor", (floats(4, 6).sort()[0], floats(4, 3)), {"right": True}, frozen=(0, 1)),
        Case("aten.searchsorted.Tensor", (floats(6), floats(4)), {"sorter": floats(6).argsort()}, frozen=(0, 1)),
        Case("aten.bucketize.Tensor", (floats(4, 3), floats(6).sort()[0]), frozen=(0, 1)),
    ]


def writing() -> list[Case]:
    x, src, order = floats(6, 5), floats(4, 5), torch.tensor([5, 0, 2, 3])
    rows = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:4] for i in range(5)], 1)
    repeated = integers(4, 5, high=6)
    return [
        Case("aten.scatter.src", (x, 0, rows, src)),
        Case("aten.scatter.src", (x, 0, rows[:3, :4], src), frozen=(2,)),
        Case("aten.scatter.src", (x, -2, rows[:4], floats(6, 5)), frozen=(2,)),
        Case("aten.scatter.value", (x, 0, rows, 0.0)),
        Case("aten.scatter.value", (x, 0, rows, 1.5)),
        Case("aten.scatter_add.default", (x, 0, repeated, src)),
        Case("aten.scatter_add.default", (floats(4, 6), 1, integers(4, 3, high=6), floats(4, 3))),
        Case("aten.scatter_add.default", (floats(4, 6), -1, integers(2, 3, high=6), floats(3, 4)), frozen=(2,)),
        *(
            Case("aten.scatter_reduce.two", (x, 0, repeated, src, kind), {"include_self": own})
            for kind in ("sum", "mean", "amax", "prod")
            for own in (True, False)
        ),
        Case("aten.index_add.default", (x, 0, torch.tensor([5, 0, 0, 3]), src), {"alpha": 2}),
        Case("aten.index_add.default", (floats(4, 6), -1, torch.tensor([5, 0, 0]), floats(4, 3))),
        Case("aten.index_copy.default", (x, 0, order, src)),
        Case("aten.index_fill.int_Scalar", (x, 1, torch.tensor([4, 0]), 2.0)),
        Case("aten.index_fill.int_Tensor", (x, 0, order, floats())),
        Case("aten.index_put.default", (x, (order,), src)),
        Case("aten.index_put.default", (x, (torch.tensor([5, -6, 2, 2]),), src, True)),
        Case("aten.index_put.default", (x, (None, torch.tensor([4, 0])), floats(6, 1))),
        Case("aten.index_put.default", (x, (order, torch.tensor([0, 1, 1, 4])), floats(4))),
        Case("aten.index_put.default", (x, (integers(4, high=6), integers(4, high=5)), floats()), {"accumulate": True}),
        Case(
            "aten.index_put.default",
            (floats(4, 5, 6), (torch.tensor([[0], [2]]), None, torch.tensor([1, 5])), floats(2, 2, 5)),
        ),
        Case("aten.index_put.default", (x, (booleans(6, 5),), floats())),
        Case("aten.index_put.default", (x, (torch.tensor([True, False, True, False, False, True]),), floats(3, 5))),
        Case("aten._unsafe_index_put.default", (x, (order,), src)),
        Case("aten.masked_scatter.default", (x, booleans(6, 5), floats(30))),
    ]


def experts() -> list[Case]:
    ends = torch.tensor([2, 2, 5, 8, 8], dtype=torch.int32)
    single = (floats(8, 16).float(), floats(4, 16, 8).float())
    mixture = (floats(5, 4), integers(5, 2, high=6), floats(5, 2), floats(6, 6, 4), floats(6, 4, 3), "silu")
    skipped = (floats(4, 4), integers(4, 2, low=-1, high=6), floats(4, 2), floats(5, 8, 4), floats(5, 4, 4), "gelu")
    single_slot = (floats(5, 4), integers(5, 1, high=4), floats(5, 1), floats(4, 6, 4), floats(4, 4, 3), "silu")
    clamped = "silu pairs limit=0.5 alpha=1.702 shift=1.0 transposed"  # as gpt-oss does
    biased = (
        floats(5, 4), integers(5, 2, high=6), floats(5, 2), floats(6, 4, 10), floats(6, 5, 4), clamped,
        floats(6, 10), floats(6, 4),
    )  # fmt: skip
    halves = (*mixture[:5], "silu", floats(6, 6), floats(6, 4))
    alone = (floats(5, 4), integers(5, 2, high=4), floats(5, 2), floats(4, 6, 4), floats(4, 4, 6), "relu2 alone")
    transposed = (*mixture[:3], floats(6, 4, 6), floats(6, 3, 4), "gelu transposed")
    fallback = "transformers.grouped_mm_fallback.default"
    return [
        Case(fallback, (floats(8, 4), floats(5, 4, 6), ends)),
        Case(fallback, (floats(7, 4), floats(4, 4, 3), torch.tensor([0, 3, 3, 7], dtype=torch.int32))),
        # In float32 only: compared in shape here, in value by the product above, which has the same kernel.
        Case("aten._grouped_mm.default", (*single, torch.tensor([2, 2, 5, 8], dtype=torch.int32)), exact=False),
        Case("aten._grouped_mm.default", (floats(2, 8, 8).float(), floats(2, 8, 8).float()), exact=False),
        Case("tapas.experts.default", mixture),
        Case("tapas.experts.default", skipped),
        Case("tapas.experts.default", single_slot),
        *[Case("tapas.experts.default", args) for args in (biased, halves, alone, transposed)],
        # room for all tokens, in buffers that are filled up
        *[Case("tapas.experts.default", args, {"capacity": 4.0}) for args in (mixture, skipped, biased)],
    ]


def caches() -> list[Case]:
    """Nobody trains through a cache."""
    held, rows, places = floats(4, 6, 5, 3), floats(4, 6, 2, 3), torch.tensor([1, 2])
    return [
        Case("tapas.write_cache.default", (held, rows, places), frozen=(0, 1)),
        # which places were written only says what comes before what
        Case(
            "tapas.read_cache.default", (held, places), frozen=(0,), known=("S(0), S(0) -> S(0)", "S(1), S(0) -> S(1)")
        ),
    ]


CASES = [*reading(), *writing(), *experts(), *caches()]
