"""Functions that check values; pytest would rewrite their assertions in a file of tests."""

# ruff: noqa: RUF018

import torch


def asserted(h: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    assert n.max().item() < 4
    assert h.max().item() < 1e6
    if torch.isnan(h).any():
        raise ValueError
    return h


def failing(h: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    assert n.max().item() < 3
    return h


def used(h: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    assert (factor := h.max().item()) < 1e6
    return h * factor


def caught(h: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    try:
        if h.sum() > 0:
            raise ValueError
    except ValueError:
        return -h
    return h


def chosen(h: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return h if h.sum() > 0 else -h
