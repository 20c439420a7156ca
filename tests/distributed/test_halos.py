"""Borders exchanged from process to process: gradients of one device, compiled as well."""

import pytest

from tests.distributed.eager_and_compiled import trained
from tests.distributed.pool import Pool

POSITIONS = [("*", "[height, width]")]


@pytest.mark.full
def test_borders_of_processes(pool: Pool) -> None:
    for eager, compiled, sent, sent_compiled, breaks in pool(trained, "residuals", POSITIONS):
        assert eager < 1e-9 and compiled < 1e-9
        assert sent == sent_compiled and all(("halo", (axis,)) in phase for phase in sent for axis in (0, 1))
        assert breaks == []
