"""`ProgressLine`: the one progress line of a run."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm


class ProgressLine:
    """One tqdm line: rollouts of the budget, step, n, best score, reflection calls, dollars, time left.

    It shows in a terminal and in a notebook, and nowhere else. It reaches its end when the run does, and only then.

    Args:
        total: Rollouts of the budget; None where it is not known.
        verbose: Whether to show it.
    """

    def __init__(self, total: int | None, verbose: bool = True) -> None:
        self.total = total
        shown = verbose and (sys.stderr.isatty() or _in_notebook())
        make_bar: Any = tqdm
        self._bar = make_bar(total=total, desc="Combee", unit="rollout", disable=not shown, dynamic_ncols=True)
        self._done = 0

    def advance(self, rollouts: int) -> None:
        """So many more rollouts are done."""
        self._done += rollouts
        most = self._done if self.total is None else min(self._done, self.total - 1)
        if most > self._bar.n:
            self._bar.update(most - self._bar.n)

    def show(self, **facts: Any) -> None:
        """Show these facts behind the bar."""
        self._bar.set_postfix({name: _short(value) for name, value in facts.items() if value is not None})

    def close(self, finished: bool) -> None:
        """The run is over: by itself, or by an error, which leaves the line where it is."""
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
