"""torch.nn.Transformer, while being captured.

To find out whether a mask is the causal one, its layers compare the values: control flow on data, which
cannot be captured. The mask itself gives the same result as the flag, so it is not asked for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor
from torch.nn.modules import transformer


def _as_told(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


@contextmanager
def masks_as_given() -> Iterator[None]:
    # The function is private to torch; without it (another version) there is nothing to replace.
    if not hasattr(transformer, "_detect_is_causal_mask"):
        yield
        return
    with mock.patch.object(transformer, "_detect_is_causal_mask", _as_told):
        yield
