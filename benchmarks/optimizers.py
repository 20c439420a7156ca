"""What a step of an optimizer takes: over plain tensors, over DTensors, and by `tapas.local_optimizer`, on one rank.

    python benchmarks/optimizers.py [--rounds N] [--layers N] [--width N]

The parameters are those of a BERT, some 200 and tiny, so that what is measured is the way to the kernels rather than
the kernels. All ways take turns; the times are the best of all rounds. Exit code 1 if `local_optimizer` takes more than
twice as long as plain tensors, with one of the optimizers.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _results import Results, parser_for
from _timing import in_turn, timed
from torch import nn

import tapas

LIMIT = 2.0
KINDS: dict[str, dict[str, Any]] = {
    "AdamW fused": {"fused": True},
    "AdamW foreach": {"foreach": True},
    "AdamW": {"foreach": False},
    "SGD": {"momentum": 0.9, "foreach": False},
}


def shapes(layers: int, width: int) -> list[tuple[int, ...]]:
    """Of a BERT's parameters."""
    square, bias = (width, width), (width,)
    layer = [*[square, bias] * 4, bias, bias, (4 * width, width), (4 * width,), (width, 4 * width), bias, bias, bias]
    return [(64, width), (16, width), (2, width), bias, bias, *layer * layers]


def parameters(layers: int, width: int, mesh: Any) -> list[nn.Parameter]:
    from torch.distributed.tensor import DTensor, Shard

    made = []
    for shape in shapes(layers, width):
        values, gradient = torch.ones(shape), torch.ones(shape)
        if mesh is not None:
            values, gradient = (DTensor.from_local(x, mesh, [Shard(0)], run_check=False) for x in (values, gradient))
        parameter = nn.Parameter(values)
        parameter.grad = gradient
        made.append(parameter)
    return made


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=16)
    given = parser.parse_args()
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    mesh = init_device_mesh("cpu", (1,))
    out, met = Results(given.json), True

    def made(place: Any) -> list[nn.Parameter]:
        return parameters(given.layers, given.width, place)

    rows: list[tuple[str, ...]] = []
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # the first one imports
    for name, options in KINDS.items():
        kind = getattr(torch.optim, name.split()[0])
        making, local = timed(
            lambda k=kind, o=options: tapas.local_optimizer(k, made(mesh), lr=1e-3, **o), time.process_time
        )
        asked = tapas.local_optimizer(kind, made(mesh), lr=1e-3, **options)
        _ = asked.state
        ways: dict[str, Callable[[], Any]] = {
            "plain": kind(made(None), lr=1e-3, **options).step,
            "dtensor": kind(made(mesh), lr=1e-3, **options).step,
            "local": local.step,
            "asked": asked.step,
        }
        best = {way: min(rounds) for way, rounds in in_turn(ways, given.rounds, time.process_time).items()}
        rows.append((name, *(f"{1e3 * seconds:.2f}" for seconds in (*best.values(), making))))
        met = met and best["local"] <= LIMIT * best["plain"]
    title = f"A step on {len(shapes(given.layers, given.width))} small parameters, best of {given.rounds}, processor ms"
    columns = ("", "plain tensors", "DTensors", "local_optimizer", "once asked for its state", "to make it")
    out.table("step", title, columns, rows)
    dist.destroy_process_group()
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
