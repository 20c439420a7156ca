"""How fast tensors are copied into the buffers of collectives and out of them, on a GPU.

    python benchmarks/gpu_copies.py [--megabytes N ...] [--device cpu --tiny]

For each kind of move the runtime's own packing, of real values: what is copied is read once and written once. The
first dim needs no copy; small tensors that travel together are copied by one kernel.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from tapas.runtime.joined import Joined
from tapas.runtime.packing import Deal, Packing

ROUNDS = 20


def seconds(work: Callable[[], object], device: str) -> float:
    for _ in range(3):
        work()
    if device == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(ROUNDS):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / ROUNDS


def even(dim: int, size: int, members: int) -> Packing:
    held = tuple(((i * size // members, (i + 1) * size // members),) for i in range(members))
    return Packing(Deal(dim, held, 0), (members,))


def cases(nbytes: int, members: int, device: str) -> list[tuple[str, Callable[[], object], int]]:
    """What is done, and how many bytes are read and written."""
    width = 4096 if nbytes > 1 << 20 else 64
    rows = nbytes // 2 // width
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    found = []
    for name, dim, shape in (
        ("first dim", 0, (rows, width)), ("last dim", 1, (rows, width)),
        ("second of three (sequence)", 1, (8, rows // 8, width)), ("second of four (heads)", 1, (8, 32, -1, 128)),
        ("third of four", 2, (8, -1, 32, 128)),
    ):  # fmt: skip
        whole = x.view(shape) if x.numel() >= 8 * 32 * 128 else x
        if whole.dim() <= dim:
            continue
        packing = even(dim, whole.shape[dim], members)
        part = packing.deal.take(whole, 0).contiguous()
        flat, made = packing.pack(whole), torch.empty_like(whole)
        copied = flat.data_ptr() != whole.data_ptr()
        found.append((f"deal out, {name}", lambda p=packing, w=whole: p.pack(w), 2 * x.nbytes * copied))
        unpack = lambda p=packing, f=flat, s=part.shape, m=made: p.unpack(f, s, m)  # noqa: E731
        arrives = packing.arrives_whole(part.shape)
        found.append((f"put together, {name}", unpack, 2 * x.nbytes * (not arrives)))
    parts = [*x.view(-1).split(x.numel() // 16)][:16]
    joined = Joined(members, tuple(p.numel() // members for p in parts))
    flat = joined.pack_wholes(parts)
    found.append(("16 weights into one buffer", lambda: joined.pack_wholes(parts), 2 * flat.nbytes))
    found.append(("16 weights out of one buffer", lambda: joined.unpack_wholes(flat, parts), 2 * flat.nbytes))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", nargs="+", type=int, default=[4, 16, 64, 256, 1024])
    parser.add_argument("--members", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    sizes = [1] if chosen.tiny else chosen.megabytes
    table = Table(title="TB/s read and written, bfloat16: the least over 2, 4 and 8 devices")
    for heading in ("", *(f"{size} MB" for size in sizes)):
        table.add_column(heading)
    rates: dict[str, list[float | None]] = {}
    for size in sizes:
        least: dict[str, float | None] = {}
        for members in chosen.members:
            for name, work, moved in cases(size << 20, members, chosen.device):
                rate = moved / seconds(work, chosen.device) / 1e12 if moved else None
                before = least.get(name)
                least[name] = rate if rate is None or before is None else min(rate, before)
        for name, rate in least.items():
            rates.setdefault(name, []).append(rate)
    for name, row in rates.items():
        table.add_row(name, *("no copy" if rate is None else f"{rate:.2f}" for rate in row))
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
