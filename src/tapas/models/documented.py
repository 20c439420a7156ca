"""Inputs by what the documentation of a model of transformers says of them: their dtypes, and their dims by name."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tapas.models.inputs import field

_ENTRY = re.compile(r"^\s*(\w+) \(`*([\w.\[\]]*)`*\s+of shape\s+`*\(([^()]*(?:\([^()]*\)[^()]*)*)\)`*", re.MULTILINE)
_TERM = re.compile(r"^(?:config\.)?([a-z_]\w*|\d+)(?:\s*([-+*/]+)\s*(?:config\.)?([a-z_]\w*|\d+))?$")
_LENGTHS = re.compile(r"seq|len|tokens|frames|num_|max_|total_|points|boxes")


@dataclass(frozen=True, slots=True)
class DocumentedInput:
    dtype: str  # as it is written there: torch.LongTensor, or nothing
    dims: tuple[str, ...]

    def shape(self, config: Any, batch: int, seq: int) -> tuple[int, ...]:
        return tuple(_size(dim, config, batch, seq) for dim in self.dims)

    def value(self, name: str, config: Any, batch: int, seq: int) -> torch.Tensor:
        shape = self.shape(config, batch, seq)
        if "mask" in name:
            return torch.ones(shape, dtype=torch.bool if "Bool" in self.dtype else torch.long)
        if "bbox" in name or ("box" in name and shape[-1:] == (4,)):  # corners, the first before the second
            corners = torch.tensor([1, 2, 3, 4] if "Long" in self.dtype or "bbox" in name else [0.1, 0.2, 0.3, 0.4])
            return corners.expand(shape).clone()
        if "Bool" in self.dtype:
            return torch.ones(shape, dtype=torch.bool)
        if name.endswith(("ids", "codes", "tokens")):
            return torch.randint(3, max(min(96, field(config, "vocab_size", 96)), 4), shape)
        if "Long" in self.dtype or "Int" in self.dtype or name.endswith(("_id", "_type", "index", "idx")):
            told = {"shape": 4, "size": 4, "len": seq, "duration": 1}
            whole = next((number for word, number in told.items() if word in name), None)
            return torch.randint(0, 2, shape) if whole is None else torch.full(shape, whole)
        return torch.rand(shape)


def documented_inputs(forward: Any) -> Mapping[str, DocumentedInput]:
    """By name, those whose shape is told.

    >>> def forward(self, states):
    ...     '''Args:
    ...         states (`torch.FloatTensor` of shape `(batch_size, sequence_length, 2)`, *optional*):
    ...     '''
    >>> documented_inputs(forward)["states"].shape(None, batch=5, seq=7)
    (5, 7, 2)
    """
    text = inspect.getdoc(forward) or ""
    found = {name: (dtype, dims) for name, dtype, dims in reversed(_ENTRY.findall(text))}  # the first of each
    return {
        name: DocumentedInput(dtype, tuple(dim.strip() for dim in re.sub(r"\s*\([^()]*\)", "", dims).split(",") if dim))
        for name, (dtype, dims) in found.items()
    }


def _size(dim: str, config: Any, batch: int, seq: int) -> int:
    term = _TERM.match(dim)
    if term is None:
        return seq
    first, sign, second = term.groups()
    size = _named(first, config, batch, seq)
    if not sign:
        return size
    other = _named(second, config, batch, seq)
    return {"+": size + other, "-": size - other, "*": size * other}.get(sign, size // max(other, 1))


def _named(name: str, config: Any, batch: int, seq: int) -> int:
    if name.isdigit():
        return int(name)
    if "batch" in name and "point" not in name:
        return batch
    if name in ("height", "width", "image_height", "image_width"):
        name = "image_size"
    size = field(config, name, None) if config is not None else None
    if isinstance(size, (list, tuple)) and size:
        size = size[0]
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    return seq if _LENGTHS.search(name) else _width(name, config)


def _width(name: str, config: Any) -> int:
    """Of a field that is called much the same, or of what is hidden."""
    fields = vars(config).items() if config is not None else ()
    stem = re.sub(r"_(dim|size|channels)$", "", name)
    alike = rf"{stem}_(dim|size|channels)"
    size = next((value for key, value in fields if isinstance(value, int) and re.fullmatch(alike, key)), None)
    return size or next(
        (w for w in (field(config, n, None) for n in ("hidden_size", "d_model", "embed_dim")) if isinstance(w, int)), 32
    )
