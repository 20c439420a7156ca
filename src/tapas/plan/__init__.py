"""The result as data: what was decided, what it costs, as a file."""

from collections.abc import Callable
from typing import Any

renderer: Callable[[Any], str] = repr  # of a plan that is printed; the public package sets it to one for people
html_renderer: Callable[[Any], str] = repr  # the same for notebooks
