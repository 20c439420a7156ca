"""Configurations that are smaller by one factor: what hangs together in products and sums, as the heads of a layer and
its width do, hangs together afterwards too."""

import re
from collections.abc import Iterator
from typing import Any

WIDTH = 64  # what the largest of the model is to come to
NARROWEST = 16
_HEADS = re.compile(r"(^|_)(n|num)_.*heads?$|(^|_)(n_head|heads|num_heads)$|attention_heads$")
_HEAD_DIMS = re.compile(r"(head_dim|d_kv|d_head|head_size|channels_per_head)$")
_WIDTHS = re.compile(r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|(^|_)dim)$")
_COUNTED = re.compile(  # what is no width, however large
    r"^(num|n|max|min)_|vocab|layers?$|depth|position|image|patch|token|window|kernel|stride|frame|mel|label|length|"
    r"sampling|rate|_id$|_ids$|codebook_size|codes|chunk|context|expert|topk|ratio|period|factor$|bins"
)


def scaled(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields`, and all widths, heads and their dims in a configuration and its parts divided."""
    by_heads, by_dim = _factors(config)
    return _divided(config, fields, by_heads, by_dim)


def _factors(config: Any) -> tuple[int, int]:
    """Powers of two that heads and their dims are divided by; widths by both."""
    named = [*_named(config)]
    widths = _widths(config)
    heads = [value for name, value in named if _HEADS.search(name) and value > 1]
    dims = [value for name, value in named if _HEAD_DIMS.search(name)]
    most = min(max(widths, default=0) // WIDTH, min(widths, default=0) // NARROWEST)
    by_heads = _largest(min(most, 8), lambda p: all(count % p == 0 for count in heads))
    by_dim = _largest(most // by_heads, lambda p: all(dim % (2 * p) == 0 and dim // p >= 4 for dim in dims))
    return by_heads, by_dim


def _widths(config: Any) -> list[int]:
    return [value for name, value in _named(config) if _WIDTHS.search(name) and value >= WIDTH]


def _largest(most: int, fits: Any) -> int:
    powers = [2**n for n in range(most.bit_length()) if 2**n <= most]
    return max((power for power in powers if fits(power)), default=1)


def _named(config: Any) -> Iterator[tuple[str, int]]:
    """All numbers of a configuration, those in lists and in its parts too."""
    for name, value in vars(config).items():
        if hasattr(value, "to_diff_dict"):
            yield from _named(value)
        else:
            several: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
            yield from ((name, number) for number in several if type(number) is int)


def _divided(config: Any, fields: dict[str, Any], by_heads: int, by_dim: int) -> dict[str, Any]:
    made = dict(fields)
    for name, value in vars(config).items():
        if hasattr(value, "to_diff_dict"):
            made[name] = _divided(value, fields.get(name, {}), by_heads, by_dim)
            continue
        by = by_heads if _HEADS.search(name) else by_dim if _HEAD_DIMS.search(name) else by_heads * by_dim
        if by == 1 or name[0] == "_" or (_COUNTED.search(name) and not _HEADS.search(name)):
            continue
        if name.endswith("groups") and value != max(_widths(config), default=0):  # else each channel is one
            continue
        if isinstance(value, (list, tuple)) and value and all(type(n) is int and n % by == 0 for n in value):
            made[name] = [n // by for n in value]
        elif type(value) is int and value > 1 and value % by == 0:
            made[name] = value // by
    return made
