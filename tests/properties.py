"""How thoroughly properties are tried."""

from hypothesis import settings


def examples(count: int) -> int:
    """What `make test-full` tries is `count`; `make test` tries a quarter of that (profiles of tests/conftest.py)."""
    return count * settings.default.max_examples // 100
