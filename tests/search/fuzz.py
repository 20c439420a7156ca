"""`make fuzz-limits`: random problems with limits, searched and solved by HiGHS. Stopped, it goes on where it was:
every finished seed is a line of the state file."""

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.search.limited import verdicts

STATE = Path(".fuzz") / "limits.jsonl"


def finished(path: Path) -> dict[int, dict[str, str]]:
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {line["seed"]: line["verdicts"] for line in lines}


def run(seeds: list[int], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with path.open("a") as state:
        for number, seed in enumerate(seeds, 1):
            state.write(json.dumps({"seed": seed, "verdicts": verdicts(seed)}) + "\n")
            state.flush()
            if number % 500 == 0:
                print(f"{number} of {len(seeds)} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def report(done: dict[int, dict[str, str]]) -> bool:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    wrong: dict[str, list[int]] = defaultdict(list)
    for seed, found in done.items():
        for way, verdict in found.items():
            counts[way][verdict] += 1
            if verdict[:2].isupper():
                wrong[f"{way}: {verdict}"].append(seed)
    print(f"{len(done)} problems")
    for way, verdict_counts in sorted(counts.items()):
        print(f"  {way:22}", ", ".join(f"{count} {verdict}" for verdict, count in verdict_counts.most_common()))
    for what, seeds in wrong.items():
        print(f"{what}: {len(seeds)} seeds, such as {seeds[:8]}")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--again", action="store_true", help="try those again in which something was wrong")
    given = parser.parse_args()
    done = finished(given.state)
    if given.again:
        done = {seed: found for seed, found in done.items() if not any(v[:2].isupper() for v in found.values())}
    wanted = range(given.first, given.first + given.count)
    run([seed for seed in wanted if seed not in done], given.state)
    done = finished(given.state)
    return 0 if report({seed: done[seed] for seed in wanted}) else 1


if __name__ == "__main__":
    sys.exit(main())
