"""`make fuzz`: many generated modules, original and parallel side by side. Stopped, it goes on where it was.

Every finished seed is a line of the state file: its verdict and what its module was made of. Lines hold for the code
that wrote them; `--again` tries those once more that did not pass.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from tests.faithful.generate import Program, case_of, generated, shrunk
from tests.faithful.ranks import thread_groups
from tests.faithful.run import Meshes, Verdict, verdict

STATE = Path(".fuzz") / "state.jsonl"
SHOWN = 12  # reasons


def tried(program: Program, ranks: Meshes) -> Verdict:
    return verdict(case_of(program), program.setting, ranks)


def reason(found: Verdict) -> str:
    """A verdict's text without what is of one module only: numbers, places and sizes."""
    text = found.text
    if found.kind == "refused":
        text = text.partition(": ")[2] or text
    text = re.sub(r"\(?[\w.]+\.py:\d+( in \w+)?\)?", "", text)
    text = re.sub(r"(step|rank) \d+: ?|, and \d+ more|\[[^\]]*\]|of [\w.]*\w|buffer [\w.]+|-?\d[\d.e+-]*", "", text)
    return f"{found.kind}: {' '.join(text.split())[:110]}"


def finished(path: Path) -> dict[int, dict[str, Any]]:
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["seed"]: line for line in lines}


def run(seeds: list[int], path: Path, ranks: Meshes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with path.open("a") as state:
        for number, seed in enumerate(seeds, 1):
            program = generated(seed)
            found = tried(program, ranks)
            line = {"seed": seed, "kind": found.kind, "text": found.text, "families": sorted(program.families())}
            state.write(json.dumps(line) + "\n")
            state.flush()
            if number % 100 == 0:
                print(f"{number} of {len(seeds)} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def report(lines: list[dict[str, Any]], ranks: Meshes) -> bool:
    """Counts by family and reason, and the smallest program of every kind of failure."""
    kinds = Counter(line["kind"] for line in lines)
    print(f"{len(lines)} modules: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}")
    _by_family(lines)
    reasons: dict[str, list[int]] = defaultdict(list)
    for line in lines:
        if line["kind"] != "passes":
            reasons[reason(Verdict(line["kind"], line["text"]))].append(line["seed"])
    common = sorted(reasons.items(), key=lambda entry: -len(entry[1]))
    print()
    for text, seeds in common:
        print(f"{len(seeds):6}  {text}   seeds {', '.join(map(str, seeds[:5]))}")
    failures = [(text, seeds) for text, seeds in common if text.startswith(("wrong", "traceback"))]
    for text, seeds in failures[:SHOWN]:
        program = shrunk(generated(seeds[0]), lambda p, text=text: reason(tried(p, ranks)) == text)
        print(f"\nseed {seeds[0]}: {tried(program, ranks)}\n  {program}")
    return not failures


def _by_family(lines: list[dict[str, Any]]) -> None:
    families: dict[str, Counter] = defaultdict(Counter)
    for line in lines:
        for family in line["families"]:
            families[family][line["kind"]] += 1
    order = ("passes", "refused", "unusable", "unstable", "wrong", "traceback")
    print(f"\n{'':20}" + "".join(f"{kind:>10}" for kind in order))
    for family, counts in sorted(families.items()):
        print(f"{family:20}" + "".join(f"{counts[kind]:10}" for kind in order))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--again", action="store_true", help="try those again that did not pass")
    given = parser.parse_args()
    torch.set_num_threads(1)
    wanted = range(given.first, given.first + given.count)
    done = {seed for seed, line in finished(given.state).items() if line["kind"] == "passes" or not given.again}
    with thread_groups() as ranks:
        run([seed for seed in wanted if seed not in done], given.state, ranks)
        lines = finished(given.state)
        return 0 if report([lines[seed] for seed in wanted], ranks) else 1


if __name__ == "__main__":
    sys.exit(main())
