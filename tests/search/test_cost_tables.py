"""Tables of costs."""

import numpy as np
import pytest

from tapas.search import diagonal_table, table


def test_a_variable_that_occurs_twice_takes_the_diagonal() -> None:
    array = np.arange(27.0).reshape(3, 3, 3)
    made = diagonal_table((7, 4, 7), array)
    assert made.scope == (7, 4)
    assert all(made.array[i, j] == array[i, j, i] for i in range(3) for j in range(3))
    with pytest.raises(ValueError, match="twice"):
        table((1, 1), np.zeros((2, 2)))
    with pytest.raises(ValueError, match="dims"):
        table((1,), np.zeros((2, 2)))
