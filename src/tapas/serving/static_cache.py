"""A cache of transformers whose tensors are buffers of the attention modules, written and read by operators of ours.

The code of a model asks a cache for its length and adds keys and values to it; here the length is a tensor, so that one
program serves all positions, and what is added goes through `tapas.write_cache`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from tapas._torch import pytree

KEYS, VALUES = "tapas_cached_keys", "tapas_cached_values"  # names of the buffers


def is_cache(path: str) -> bool:
    return path.rpartition(".")[2] in (KEYS, VALUES)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Of the keys, or of the values, of a layer."""

    batch: int
    heads: int
    places: int
    features: int
    dtype: torch.dtype

    def add_to(self, module: nn.Module, name: str, device: torch.device) -> None:
        """A buffer that takes no memory: a parallel module has its own."""
        whole = self.batch, self.heads, self.places, self.features
        zero = torch.zeros((1,) * len(whole), dtype=self.dtype, device=device)
        module.register_buffer(name, zero.expand(whole), persistent=False)


@dataclass
class CacheHomes:
    """The attention modules whose buffers are a cache, by layer. No configuration says of all models how many heads and
    features their layers cache: what is added elsewhere than where it fits is noted, for buffers that do fit."""

    modules: tuple[nn.Module, ...]
    misfits: dict[tuple[nn.Module, str], CacheShape] = field(default_factory=dict)
    measured: bool = False  # somebody asked how many places a mask has to have

    def fit(self, device: torch.device) -> bool:
        """Whether something was amiss: what was captured is of no use then."""
        for (module, name), shape in self.misfits.items():
            shape.add_to(module, name, device)
        amiss = bool(self.misfits)
        self.misfits.clear()
        return amiss


class CachedLayer:
    """One attention module's part of a cache."""

    is_compileable, is_sliding, is_initialized = True, False, True

    def __init__(self, homes: CacheHomes, number: int, places: torch.Tensor) -> None:
        self.homes, self.module, self.places = homes, homes.modules[number], places

    def _read(self, name: str) -> torch.Tensor:
        return torch.ops.tapas.read_cache(getattr(self.module, name), self.places)

    @property
    def keys(self) -> torch.Tensor:
        return self._read(KEYS)

    @property
    def values(self) -> torch.Tensor:
        return self._read(VALUES)

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._written(KEYS, keys), self._written(VALUES, values)

    def _written(self, name: str, made: torch.Tensor) -> torch.Tensor:
        held, (batch, heads, _, features) = getattr(self.module, name), made.shape
        if (*held.shape, held.dtype) != (batch, heads, held.shape[2], features, made.dtype):
            self.homes.misfits[self.module, name] = CacheShape(batch, heads, held.shape[2], features, made.dtype)
            return made.new_zeros(batch, heads, held.shape[2], features)
        return torch.ops.tapas.write_cache(held, made, self.places)


class StaticBufferCache(Cache):
    """As long as its buffers; what is computed now goes to `places`, of which the first is `position`."""

    def __init__(self, homes: CacheHomes, places: torch.Tensor, position: Any, length: int) -> None:
        self.layers: Any = [CachedLayer(homes, number, places) for number in range(len(homes.modules))]
        self.homes, self.places, self.position, self.length = homes, places, position, length
        self.layer_class_to_replicate, self.offloading = None, False

    def told_of_it(self) -> tuple[Any, ...]:
        """What layers can tell calls apart by; each of them writes to buffers of its own."""
        return self.places, self.position, self.length, id(self.homes)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.position

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        self.homes.measured = True
        return self.length, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers[layer_idx].update(key_states, value_states)


class StaticBufferCaches(EncoderDecoderCache):
    """Of a decoder that looks at an encoder's results; their keys and values may be there already."""

    def __init__(self, own: StaticBufferCache, cross: StaticBufferCache, filled: bool) -> None:
        self.self_attention_cache, self.cross_attention_cache, self.filled = own, cross, filled
        self.is_updated = dict.fromkeys(range(len(cross.layers)), filled)

    def told_of_it(self) -> tuple[Any, ...]:
        return self.self_attention_cache, self.cross_attention_cache, self.filled


def _register(kind: Any, names: tuple[str, ...], held: Callable[[Any], Any], made: Callable[[Any, Any], Any]) -> None:
    """For capture a cache that is given to a layer is its tensors: so layers that are alike are known to be."""

    def flat(cache: Any) -> tuple[list[Any], Any]:
        return [getattr(cache, name) for name in names], held(cache)

    def with_keys(cache: Any) -> tuple[list[Any], Any]:
        return [(pytree.GetAttrKey(name), getattr(cache, name)) for name in names], held(cache)

    pytree.register_pytree_node(kind, flat, made, flatten_with_keys_fn=with_keys)


_register(
    StaticBufferCache, ("places", "position"), lambda cache: (cache.homes, cache.length),
    lambda given, held: StaticBufferCache(held[0], given[0], given[1], held[1]),
)  # fmt: skip
_register(
    StaticBufferCaches, ("self_attention_cache", "cross_attention_cache"), lambda both: both.filled,
    lambda given, filled: StaticBufferCaches(given[0], given[1], filled),
)  # fmt: skip
