"""`python -m tests.faithful [NAME ...]`: what comes of each case, in every setting."""

import sys
import time

import torch

from tests.faithful.modules import CASES
from tests.faithful.ranks import thread_groups
from tests.faithful.run import SETTINGS, verdicts


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    with thread_groups() as ranks:
        for case in CASES.values():
            if (names and case.name not in names) or case.drawn:
                continue
            started = time.process_time()
            found = verdicts(case, SETTINGS, ranks, to_the_end=True)
            texts = {str(verdict): [s for s in SETTINGS if found[s] == verdict] for verdict in found.values()}
            for text, settings in texts.items():
                where = "" if len(texts) == 1 else f" [{', '.join(map(str, settings))}]"
                print(f"{case.name}{where}: {text}", flush=True)
            print(f"    {time.process_time() - started:.2f} s", file=sys.stderr, flush=True)


main(sys.argv[1:])
