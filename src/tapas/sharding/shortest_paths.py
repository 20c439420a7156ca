"""The cheapest paths between layouts, step by step: between all of them, or to a few only."""

from functools import cached_property

import numpy as np

from tapas.sharding.layout_grid import StepGraph

TIE = 1e-12  # seconds per step: of paths that cost the same, the one with fewer steps wins
FEW = 4  # one of so many layouts, or less: paths to these alone are found sooner than all


class ShortestPaths:
    """For steps that take so many seconds, forward and backward, between layouts that are numbered."""

    def __init__(self, steps: StepGraph, ahead: np.ndarray, back: np.ndarray) -> None:
        self.steps, self.ahead, self.back, self.layouts = steps, ahead, back, steps.layouts
        self.column = np.full(self.layouts, -1)  # of layouts in `total` and `forward`
        self.total = self.forward = np.zeros((self.layouts, 0))  # [layout, column]

    @cached_property
    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """[i, j]: seconds of the step from i to j, forward and backward; inf where there is none."""
        forward = np.full((self.layouts, self.layouts), np.inf)
        backward, places = forward.copy(), (self.steps.source, self.steps.target)
        forward[places], backward[places] = self.ahead, self.back
        return forward, backward

    @cached_property
    def seconds(self) -> np.ndarray:
        """[i, j]: the cheapest path."""
        if "both" in self.__dict__:
            return self.both[0]
        total = self.matrices[0] + self.matrices[1] + TIE
        np.fill_diagonal(total, 0.0)
        through = np.empty_like(total)
        for k in range(self.layouts):
            np.add(total[:, k, None], total[None, k, :], out=through)
            np.minimum(total, through, out=total)
        return total

    @cached_property
    def both(self) -> tuple[np.ndarray, np.ndarray]:
        """The same, and what it takes of it forward: that takes twice as long to find."""
        forward, backward = self.matrices
        total, forward = forward + backward + TIE, forward.copy()
        np.fill_diagonal(total, 0.0)
        np.fill_diagonal(forward, 0.0)
        through, better = np.empty_like(total), np.empty(total.shape, bool)
        for k in range(self.layouts):
            np.add(total[:, k, None], total[None, k, :], out=through)
            np.less(through, total, out=better)
            np.copyto(total, through, where=better)
            np.add(forward[:, k, None], forward[None, k, :], out=through)
            np.copyto(forward, through, where=better)
        return total, forward

    def between(self, sources: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both from some layouts to others. As long as few are asked for, only paths to these are looked for."""
        if "both" not in self.__dict__:
            missing = np.unique(targets[self.column[targets] < 0])
            if FEW * (len(missing) + self.total.shape[1]) <= self.layouts:
                if len(missing):
                    self._add(missing)
                places = sources[:, None], self.column[targets]
                return self.total[places], self.forward[places]
        total, forward = self.both
        return total[sources[:, None], targets], forward[sources[:, None], targets]

    def _add(self, targets: np.ndarray) -> None:
        """One more step at the start of all paths, as long as that helps any of them."""
        leaving, columns, rows = self.steps.leaving, np.arange(len(targets)), np.arange(self.layouts)[:, None]
        to, weight = np.append(self.steps.target, 0)[leaving], np.append(self.ahead + self.back + TIE, np.inf)[leaving]
        total = through = np.full((self.layouts, len(targets)), np.inf)
        total[targets, columns] = 0.0
        longer = True
        while longer:
            through = total.take(to, axis=0) + weight[:, :, None]  # [step, layout, column]
            shorter = np.minimum(total, np.minimum.reduce(through))
            total, longer = shorter, bool((shorter < total).any())
        first = through.argmin(0)
        following, forward = to[first, rows], np.append(self.ahead, 0.0)[leaving[first, rows]]
        forward[np.isinf(total)], forward[targets, columns] = np.inf, 0.0
        following = np.where(np.isfinite(forward) & (total > 0.0), following, targets)
        while (following != targets).any():  # twice as many steps at a time
            forward, following = forward + forward[following, columns], following[following, columns]
        self.column[targets] = columns + self.total.shape[1]
        self.total, self.forward = np.hstack([self.total, total]), np.hstack([self.forward, forward])
