"""What every result of a run shows of its steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dspy_combee.controller.batch_size import BatchSizeFit
from dspy_combee.records.types import StepRecord
from dspy_combee.report import page, plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class RunReport:
    """The page, the plots and the last fit of a result; the result has the steps."""

    steps: Sequence[StepRecord]

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report of the run: one HTML page that stands alone and opens without a network.

        Args:
            path: The file; one that is there is replaced.
        """
        page.save_html(self.steps, path)

    def plot_scores(self, ax: Axes | None = None) -> Axes:
        """Plot the best score over metric calls; see `plots.plot_scores`. Needs the extra `report`."""
        return plots.plot_scores(self.steps, ax)

    def plot_delay(self, ax: Axes | None = None) -> Axes:
        """Plot the delay curve with its fit and choice; see `plots.plot_delay`. Needs the extra `report`."""
        return plots.plot_delay(self.steps, ax)

    def plot_tree(self, iteration: int | None = None, component: str | None = None, ax: Axes | None = None) -> Axes:
        """Plot the Reduce tree of a step, or its curators'; see `plots.plot_tree`. Needs the extra `report`.

        Args:
            iteration: The step. Default: the last one accepted (that changed a playbook), else the last one that
                has a tree.
            component: The component, or playbook. Default: the step's first.
            ax: Where to draw. Default: a new figure.
        """
        return plots.plot_tree(self.steps, iteration, component, ax)

    @property
    def batch_size_fit(self) -> BatchSizeFit | None:
        """The controller's last fit; None where no step was sized by one."""
        fits: list[BatchSizeFit] = [step.fit for step in self.steps if step.fit is not None]
        return fits[-1] if fits else None
