"""Collectives within a node of H100s as OpenXLA measured them, against what the preset says they take.

    python benchmarks/links.py [--fit]

The measurements are in links_h100.json. The start of the program is part of them, and is taken off. A message never
takes longer than a larger one: what says so was held up by something else, and the time of the larger one counts.
`--fit` prints the curves of clusters.toml, beside its latency and bandwidth, and those of rings alone for A100s, whose
switches do not add up: an all-reduce is a reduce-scatter and an all-gather.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from _results import Results, parser_for

from tapas.cost.collectives import AxisLink, collective_seconds
from tapas.hardware.cluster import COLLECTIVES, MESSAGES, Link
from tapas.hardware.cluster_files import load_cluster

FILE = Path(__file__).with_name("links_h100.json")
CLUSTER, DEVICES = "h100-sxm", (2, 4, 8)
# By how much the shortest all-reduces take longer than in nccl-tests, which start nothing: 26 against 17 us on eight
# devices (H20, 4 KiB; github.com/deepseek-ai/DeepEP/issues/303), 14 against 10 on two (A100, 8 bytes;
# github.com/NVIDIA/nccl-tests/issues/331).
START_SECONDS = 7e-6
SIZES = tuple(1 << 20 + 3 * k for k in range(4))  # between those of MESSAGES, where curves are what was measured


def measured(kind: str, devices: int) -> dict[int, float]:
    """Seconds by size."""
    known: Mapping[str, float] = json.loads(FILE.read_text(encoding="utf-8"))["microseconds"][kind][str(devices)]
    least, found = float("inf"), dict[int, float]()
    for size, microseconds in sorted(((int(size), one) for size, one in known.items()), reverse=True):
        least = min(least, 1e-6 * microseconds - START_SECONDS)
        found[size] = least
    return found


def priced(kind: str, devices: int, nbytes: int, link: Link) -> float:
    return float(collective_seconds(kind, nbytes, AxisLink.of(devices, link)))


def curves(link: Link, devices: int) -> dict[str, list[float]]:
    """How many times as long as latency and bandwidth say, for clusters.toml."""
    plain = replace(link, times=())
    return {
        kind: [round(measured(kind, devices)[size] / priced(kind, devices, size, plain), 2) for size in MESSAGES]
        for kind in COLLECTIVES
    }


def in_rings(known: dict[str, list[float]]) -> dict[str, list[float]]:
    pairs = zip(known["reduce_scatter"], known["all_gather"], strict=True)
    return known | {"all_reduce": [round((there + back) / 2, 2) for there, back in pairs]}


def print_curves(link: Link) -> None:
    for devices in DEVICES:
        own = curves(link, devices)
        for say, some in (("", own), ("in rings, ", in_rings(own))):
            print(f"# {say}{devices} devices", *(f"{kind} = {curve}" for kind, curve in some.items()), sep="\n")


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--fit", action="store_true", help="print curves for clusters.toml")
    chosen = parser.parse_args()
    link = load_cluster(CLUSTER).intra
    if chosen.fit:
        print_curves(link)
        return 0
    rows: list[tuple[str, ...]] = []
    for kind in COLLECTIVES:
        for devices in DEVICES:
            seconds = measured(kind, devices)
            pairs = [(priced(kind, devices, size, link), seconds[size]) for size in SIZES]
            cells = [f"{1e6 * theirs:.0f} ({ours / theirs:.2f})" for ours, theirs in pairs]
            rows.append((kind.replace("_", "-"), str(devices), *cells))
    sizes = [f"{size >> 20} MiB" for size in SIZES]
    title = "microseconds of collectives on H100s, measured (priced / measured)"
    Results(chosen.json).table("links", title, ("", "devices", *sizes), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
