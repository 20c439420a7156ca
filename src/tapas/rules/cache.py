"""Caches of keys and values: dealt out by samples, by heads and by places, and never moved.

The features of a head are met by all queries, and not split.
"""

from tapas.rules.base import Call, Kernel, Rule, Wording, rule
from tapas.rules.notation import Term, from_labels

CACHE: Term = [["b"], ["h"], ["c"], ["!e"]]
WORDS = Wording("cache", {"b": "batch", "h": "heads", "c": "places"})


@rule("tapas.write_cache.default", wording=WORDS)
def write_cache(call: Call) -> Rule:
    """It takes as long as its rows take, which is nothing beside what reads the cache."""
    return from_labels(
        [CACHE, [["b"], ["h"], ["!k"], ["!e"]], [["!k"]]], [CACHE], call, view=True, resident=0,
        kernels={"c": Kernel()}, kernel="cache.write",
    )  # fmt: skip


@rule("tapas.read_cache.default", wording=WORDS)
def read_cache(call: Call) -> Rule:
    return from_labels([CACHE, [["!k"]]], [CACHE], call, view=True, resident=0)
