"""Copies of blocks as the search sees them: what they read are variables of other copies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, overload

from tapas.search.chains import Place, Reader


class BlockCopy(NamedTuple):
    block: int
    ports: tuple[Place, ...]


@dataclass(frozen=True, eq=False)
class LazyCopies(Sequence[BlockCopy]):
    """Copies that read exports, as copies that read variables. Of a deep model most are never asked for."""

    readers: Sequence[Reader]
    exports: Sequence[Sequence[int]]  # by block, the variable of each export
    known: dict[int, BlockCopy] = field(default_factory=dict, repr=False)

    def _made(self, number: int) -> BlockCopy:
        if number not in self.known:
            readers, exports = self.readers, self.exports
            block, ports = readers[number].block, readers[number].ports
            self.known[number] = BlockCopy(block, tuple([(c, exports[readers[c].block][e]) for c, e in ports]))
        return self.known[number]

    @cached_property
    def _all(self) -> tuple[BlockCopy, ...]:
        return tuple(map(self._made, range(len(self.readers))))

    @overload
    def __getitem__(self, number: int) -> BlockCopy: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[BlockCopy, ...]: ...
    def __getitem__(self, number: int | slice) -> BlockCopy | tuple[BlockCopy, ...]:
        return self._all[number] if isinstance(number, slice) else self._made(number)

    def __iter__(self) -> Iterator[BlockCopy]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self.readers)
