"""The report of a run: one HTML page that stands alone, opens without a network and runs no script."""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspy_combee.records.step_log import FILE_NAME, read_steps
from dspy_combee.records.text import repair
from dspy_combee.records.types import StepRecord, Usage

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.axes import Axes

LONGEST_TEXT = 20_000
"""Characters of a prompt or reply that the page holds; the records hold all of them."""
ALL_TEXTS = 30_000_000
"""Characters of all prompts and replies together: in a run of thousands of steps each is cut to its share."""
MANY_CALLS = 4_000
"""Calls that can be opened one by one; those of a longer run stand in the page as plain text, which a browser bears."""


def html_page(steps: Sequence[StepRecord]) -> str:
    """Return the report as one HTML page; its charts are there if matplotlib (the extra `report`) is installed.

    Args:
        steps: The steps of a run, in order.
    """
    from dspy_combee.report import summary  # What a page is made with loads with the first page.
    from dspy_combee.report.playbook import playbook_histories

    num_calls = sum(len(step.nodes) for step in steps)
    num_texts = 2 * num_calls + sum(len(getattr(step, "reflections", ())) for step in steps)
    page = _template().render(
        steps=steps,
        usage=sum((records[0].usage for records in summary.by_iteration(steps)), Usage()),
        histories=playbook_histories(steps),
        longest=min(LONGEST_TEXT, ALL_TEXTS // max(1, num_texts)),
        plain=num_calls > MANY_CALLS,
        charts=find_spec("matplotlib") is not None,
    )
    return repair(page.lstrip())


def report_main(log_dir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> tuple[Path, int]:
    """Write the report of a run from its `log_dir`; return its path and the number of steps.

    Args:
        log_dir: The folder, or the `steps.jsonl` in it.
        out: The file to write. Default: `report.html` beside the steps.

    Raises:
        ValueError: If there are no steps, or the file holds something else; the message is one line.
        OSError: If a file cannot be read or written.
    """
    file = Path(log_dir) / FILE_NAME if Path(log_dir).is_dir() else Path(log_dir)
    if not file.is_file():
        raise ValueError(f"There is no {file}; expected the log_dir of a run")
    steps = read_steps(file)
    if not steps:
        raise ValueError(f"{file} holds no steps yet")
    page = Path(file.with_name("report.html") if out is None else out)
    try:
        _write(steps, page)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{file} holds values of the wrong kind: {error}") from error
    return page, len(steps)


def _write(steps: Sequence[StepRecord], file: Path) -> None:
    file.write_text(html_page(steps), encoding="utf-8", newline="\n")


class RunReport:
    """Show the steps of a result: as a page, as plots (which need the extra `report`), and the controller's last fit.

    Every plot is drawn on the axes `ax`, by default those of a new figure, and raises an `ImportError` where
    matplotlib is not installed, a `ValueError` where there is nothing to plot.
    """

    steps: Sequence[StepRecord]

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report of the run: one HTML page that stands alone and opens without a network.

        Args:
            path: The file; one that is there is replaced.
        """
        _write(self.steps, Path(path))

    def plot_scores(self, ax: Axes | None = None) -> Axes:
        """Plot the best score over metric calls; without validation, the minibatch scores."""
        from dspy_combee.report import plots

        return plots.draw_scores(self.steps, ax=ax)

    def plot_delay(self, ax: Axes | None = None) -> Axes:
        """Plot the delay curve, log-log: measured points, fit and chosen n (paper, section 3.3)."""
        from dspy_combee.report import plots

        return plots.draw_delay(self.steps, ax)

    def plot_tree(self, iteration: int | None = None, component: str | None = None, ax: Axes | None = None) -> Axes:
        """Plot the Reduce tree of a step, or its curators': which records fed which calls, and so the proposal.

        Args:
            iteration: The step. Default: the last one accepted (that changed a playbook), else the last one that
                has a tree.
            component: The component, or playbook. Default: the step's first.
            ax: Where to draw.
        """
        from dspy_combee.report import plots

        return plots.draw_tree(self.steps, iteration, component, ax)

    @property
    def batch_size_fit(self) -> Any:
        """Return the controller's last `BatchSizeFit`, or None where no step was sized by one."""
        return next((step.fit for step in reversed(self.steps) if step.fit is not None), None)


# What the template is made with ------------------------------------------------------------------------------


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from dspy_combee.report import plots, summary
    from dspy_combee.report.diff import diff_lines

    loader = PackageLoader("dspy_combee", "report")
    environment = Environment(
        autoescape=True, loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style, _, _ = loader.get_source(environment, "page.css")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment.filters["number"] = number
    environment.globals.update(style=style, style_hash=f"sha256-{digest}")
    environment.globals.update(plots=plots, summary=summary, diff_lines=diff_lines)
    return environment.get_template("page.html.jinja")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with so many significant digits, or more where it has more before the point."""
    if value is None or not math.isfinite(value):
        return "\N{EN DASH}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.{digits}g} M"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.{max(digits, math.ceil(math.log10(abs(value) + 1)))}g}"
