from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def plain_attention() -> Iterator[None]:
    """The fused attention of CPUs does not check shapes: a split that cannot work would corrupt memory."""
    before = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(before)
