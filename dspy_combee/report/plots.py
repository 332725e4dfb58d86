"""Plots of a run for notebooks and papers, by matplotlib, which is imported on use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dspy_combee.records.types import Reduction, StepRecord
from dspy_combee.report.data import delay_curve, score_points, tree_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCENT, GOOD, BAD, SOFT = "#2557c7", "#17734a", "#b42318", "#8a93a1"


def plot_scores(steps: Sequence[StepRecord], ax: Axes | None = None) -> Axes:
    """Plot the best score over metric calls; without validation, the minibatch scores.

    Args:
        steps: The steps of a run.
        ax: Where to draw. Default: a new figure.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If no step has a score.
    """
    points = score_points(steps)
    if all(point.best is None and point.minibatch is None for point in points):
        raise ValueError("There is nothing to plot: no step has a score.")
    axes = _axes(ax)
    if any(point.best is not None for point in points):
        scored = [(point, point.best) for point in points if point.best is not None]
        axes.step([p.metric_calls for p, _ in scored], [s for _, s in scored], where="post", color=ACCENT, label="best")
        axes.set_ylabel("mean validation score")
    else:
        scored = [(point, point.minibatch) for point in points if point.minibatch is not None]
        axes.plot([p.metric_calls for p, _ in scored], [s for _, s in scored], color=ACCENT, label="minibatch, before")
        axes.set_ylabel("mean minibatch score")
    accepted = [(p.metric_calls, score if p.validation is None else p.validation) for p, score in scored if p.accepted]
    axes.plot(*_columns(accepted), "o", color=GOOD, label="accepted")
    axes.set_xlabel("metric calls")
    axes.legend()
    return axes


def plot_delay(steps: Sequence[StepRecord], ax: Axes | None = None) -> Axes:
    """Plot the delay curve, log-log: measured points, fit and chosen n (paper, section 3.3).

    Args:
        steps: The steps of a run.
        ax: Where to draw. Default: a new figure.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If no step was timed.
    """
    curve = delay_curve(steps)
    if not curve.steps and not curve.medians:
        raise ValueError("There is nothing to plot: no step was timed.")
    axes = _axes(ax)
    axes.plot(*_columns(curve.steps), "o", color=SOFT, alpha=0.5, markersize=4, label="a step")
    if curve.medians:
        axes.plot(*_columns(curve.medians), "o", color=ACCENT, label="median of a size")
    if curve.line:
        axes.plot(*_columns(curve.line), "--", color="black", linewidth=1, label="fit")
    if curve.choice is not None:
        axes.axvline(curve.choice, color=GOOD, label=f"chosen n = {curve.choice}")
    _make_logarithmic(axes)
    axes.set_xlabel("minibatch size n")
    whole = "example" if curve.num_examples is None else f"epoch of {curve.num_examples} examples"
    axes.set_ylabel(f"seconds per {whole}")
    axes.legend()
    return axes


def plot_tree(
    steps: Sequence[StepRecord], iteration: int | None = None, component: str | None = None, ax: Axes | None = None
) -> Axes:
    """Plot the Reduce tree of one step: which records fed which calls, and which calls fed the proposal.

    Args:
        steps: The steps of a run.
        iteration: The step. Default: the last one accepted, else the last one that has a tree.
        component: The component. Default: the step's first.
        ax: Where to draw. Default: a new figure.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there is no such tree.
    """
    step, reduction = _choose(steps, iteration, component)
    axes = _axes(ax)
    tree = tree_of(reduction)
    places: dict[str, tuple[float, float]] = {
        f"r{position}": ((position + 0.5) / len(reduction.sources), 0.0) for position in range(len(reduction.sources))
    }
    for height, level in enumerate(tree.levels, start=1):
        places |= {node.id: ((position + 0.5) / len(level), float(height)) for position, node in enumerate(level)}
    for node in reduction.nodes:
        for item in node.inputs:
            if item in places:
                axes.plot(*_columns([places[item], places[node.id]]), color=SOFT, linewidth=0.6, alpha=0.6, zorder=1)
    for node in reduction.nodes:
        color = BAD if node.output is None else ACCENT if node.id in tree.survivors else SOFT
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": color}
        axes.text(*places[node.id], node.id, ha="center", va="center", fontsize=8, bbox=box, zorder=3)
    lost = set(tree.lost)
    for position in range(len(reduction.sources)):
        color = BAD if position in lost else "black"
        axes.plot(*places[f"r{position}"], "o", color=color, markersize=3, zorder=2)
    axes.set_title(f"step {step.iteration}, {reduction.component}: n = {step.n}, {len(lost)} records lost")
    axes.set_ylim(-0.3, len(tree.levels) + 0.4)
    axes.set_axis_off()
    return axes


def _choose(steps: Sequence[StepRecord], iteration: int | None, component: str | None) -> tuple[StepRecord, Reduction]:
    found = [
        (step, reduction)
        for step in steps
        for reduction in step.reductions
        if reduction.nodes and iteration in (None, step.iteration) and component in (None, reduction.component)
    ]
    if not found:
        asked = "" if iteration is None else f" in step {iteration}"
        asked += "" if component is None else f" for component {component!r}"
        raise ValueError(f"There is no tree{asked}: no reflection call was made.")
    found = [pair for pair in found if pair[0].accepted] or found
    chosen = found[-1][0]
    return next(pair for pair in found if pair[0] is chosen)


def _make_logarithmic(axes: Axes) -> None:
    from matplotlib import ticker

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):  # Matplotlib's own labels, 2 x 10^1, stand in each other's way.
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.NullFormatter())


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _axes(ax: Axes | None) -> Axes:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'dspy-combee[report]'") from error
    if ax is not None:
        return ax
    axes: Any = pyplot.subplots()[1]
    made: Axes = axes
    return made
