"""`ProgressLine`: the one progress line of a run."""

from __future__ import annotations

import math
import sys
from typing import Any

from tqdm.auto import tqdm


class ProgressLine:
    """Show one tqdm line: rollouts of the budget, step, n, best score, reflection calls, dollars, time left.

    It shows in a terminal and in a notebook, and nowhere else. It reaches its end when the run does, and only then.

    Args:
        total: Rollouts of the budget; None where it is not known.
        verbose: Whether to show it.
        unit: What is counted.
    """

    def __init__(self, total: int | None, verbose: bool = True, unit: str = "rollout") -> None:
        self.total = total
        shown = verbose and (sys.stderr.isatty() or _in_notebook())
        make_bar: Any = tqdm
        self._bar = make_bar(total=total, desc="Combee", unit=unit, disable=not shown, dynamic_ncols=True)
        self._done = 0

    def advance(self, rollouts: int, before: int) -> None:
        """Count more rollouts.

        Args:
            rollouts: How many.
            before: How many had been done, those of a run that this one goes on from included.
        """
        if self._done < before:  # Not done in the time that the line has been there: no part of its speed.
            self._bar.initial = self._bar.n = self._highest(before)
        self._done = before + rollouts
        if (reached := self._highest(self._done)) > self._bar.n:
            self._bar.update(reached - self._bar.n)

    def _highest(self, done: int) -> int:
        """Return the most that may show before the end: tqdm rounds, and 99.5 % would show as 100."""
        return done if self.total is None else max(0, min(done, math.ceil(0.995 * self.total) - 1))

    def show(self, **facts: Any) -> None:
        """Show these facts behind the bar."""
        self._bar.set_postfix({name: _short(value) for name, value in facts.items() if value is not None})

    def close(self, finished: bool) -> None:
        """End the line with the run; an error leaves it where it is."""
        if finished:
            self._bar.total = max(self._done, 1)
            self._bar.n = self._bar.total
            self._bar.refresh()
        self._bar.close()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return shell is not None and type(shell()).__name__ == "ZMQInteractiveShell"
