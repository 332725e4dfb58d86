"""The charts of a run, drawn by matplotlib (which is imported on use) on given axes or as the page's SVG."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from dspy_combee.records.types import StepRecord
from dspy_combee.report.playbook import PlaybookHistory
from dspy_combee.report.summary import mean, run_seconds, tree_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCENT, GOOD, BAD, SOFT, LINE, GROUND = "#2557c7", "#17734a", "#b42318", "#8a93a1", "#dde1e8", "#ffffff"
INSTALL = "pip install 'dspy-combee[report]'"


def draw_scores(steps: Sequence[StepRecord], over: str = "metric calls", ax: Axes | None = None) -> Axes:
    """Draw the best score over metric calls or seconds; without validation, the minibatch scores."""
    places = run_seconds(steps) if over == "seconds" else [float(step.metric_calls) for step in steps]
    validated = any(step.best_score is not None for step in steps)
    scores = [step.best_score if validated else mean(step.scores_before) for step in steps]
    scored = [(x, score, step) for x, score, step in zip(places, scores, steps, strict=True) if score is not None]
    if not scored:
        raise ValueError("There is nothing to plot: no step has a score.")
    axes = _axes(ax)
    label, style = ("best", "steps-post") if validated else ("minibatch, before", "default")
    axes.plot(*_columns([(x, score) for x, score, _ in scored]), color=ACCENT, label=label, drawstyle=style)
    rejected = [(x, score) for x, score, step in scored if not step.accepted]
    accepted = [
        (x, score if s.validation_score is None else s.validation_score) for x, score, s in scored if s.accepted
    ]
    if rejected:
        axes.plot(*_columns(rejected), "o", color=SOFT, markerfacecolor=GROUND, markersize=4, label="not accepted")
    axes.plot(*_columns(accepted), "o", color=GOOD, label="accepted")
    axes.set(xlabel=over, ylabel="mean validation score" if validated else "mean minibatch score")
    axes.legend()
    return axes


def draw_delay(steps: Sequence[StepRecord], ax: Axes | None = None) -> Axes:
    """Draw the delay curve by the controller's last fit (paper, section 3.3), or of the steps alone without one.

    Where a run read traces first, it is that of the steps with rollouts.
    """
    steps = [step for step in steps if not step.from_traces] or steps
    timed = [s for s in steps if s.seconds > 0 and s.n > 0 and any(node.output is not None for node in s.nodes)]
    fit = next((step.fit for step in reversed(steps) if step.fit is not None), None)
    size = 0
    if fit is not None and fit.medians and fit.A is not None:
        # T(n) = A * n**-alpha = d(n) * N / n; least squares passes through the means of the logarithms.
        scale, alpha = fit.A, fit.alpha or 0.0
        size = round(statistics.geometric_mean(scale * n ** (1 - alpha) / seconds for n, seconds in fit.medians))
    points = [(step.n, step.epoch_seconds(size or 1)) for step in timed]
    medians = [] if fit is None else [(n, seconds * (size or 1) / n) for n, seconds in fit.medians]
    if not points and not medians:
        raise ValueError("There is nothing to plot: no step was timed.")
    axes = _axes(ax)
    from matplotlib.ticker import LogLocator

    axes.plot(*_columns(points), "o", color=SOFT, alpha=0.5, markersize=4, label="a step")
    if medians:
        axes.plot(*_columns(medians), "o", color=ACCENT, label="median of a size")
    if fit is not None:
        sizes = [n for n, _ in (*medians, *points)] + [fit.choice]
        if size:
            ends = [(n, scale * n**-alpha) for n in (min(sizes), max(sizes))]
            axes.plot(*_columns(ends), "--", color=SOFT, linewidth=1.2, label="fit")
        axes.axvline(fit.choice, color=GOOD, label=f"chosen n = {fit.choice}")
    whole = f"epoch of {size} examples" if size else "example"
    axes.set(xscale="log", yscale="log", xlabel="minibatch size n", ylabel=f"seconds per {whole}")
    for axis in (axes.xaxis, axes.yaxis):  # Matplotlib's own labels, 2 x 10^1, stand in each other's way.
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.legend()
    return axes


def draw_tree(
    steps: Sequence[StepRecord], iteration: int | None = None, component: str | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the Reduce tree of a step: by default of the last one accepted, else of the last one that has a tree."""
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
    last = [step for step, _ in found if step.accepted] or [step for step, _ in found]
    step, reduction = next((step, reduction) for step, reduction in found if step is last[-1])
    axes, tree = _axes(ax), tree_of(reduction)
    rows = [[f"r{position}" for position in range(len(reduction.sources))]]
    rows += [[name for name in tree.levels if tree.levels[name] == level] for level in range(1, tree.height + 1)]
    places = {name: ((i + 0.5) / len(row), float(y)) for y, row in enumerate(rows) for i, name in enumerate(row)}
    for node in reduction.nodes:
        for item in node.inputs:
            if item in places:
                axes.plot(*_columns([places[item], places[node.id]]), color=SOFT, linewidth=0.6, alpha=0.6, zorder=1)
        color = BAD if node.output is None else ACCENT if node.id in tree.survivors else SOFT
        box = {"boxstyle": "round", "facecolor": GROUND, "edgecolor": color}
        axes.text(*places[node.id], node.id, ha="center", va="center", fontsize=8, bbox=box, zorder=3)
    for name in rows[0]:
        axes.plot(*places[name], "o", color=BAD if name in tree.lost else "black", markersize=3, zorder=2)
    axes.set_title(f"step {step.iteration}, {reduction.component}: n = {step.n}, {len(tree.lost)} records lost")
    axes.set_ylim(-0.3, tree.height + 0.4)
    axes.set_axis_off()
    return axes


def draw_bullets(history: PlaybookHistory, ax: Axes) -> None:
    """Draw the number of a playbook's bullets over the steps."""
    sizes = [(float(iteration), float(change.bullets)) for iteration, change, _ in history.changes]
    ax.plot(*_columns(sizes), "o-", color=ACCENT, markersize=4)
    ax.locator_params(integer=True)
    ax.set(xlabel="step", ylabel="bullets", ylim=(0, None))


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(f"Plots need matplotlib: {INSTALL}") from error
    axes: Axes = pyplot.subplots()[1]
    return axes


# The page's charts -------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 345.6, 201.6  # in points
COLORS = {ACCENT: "accent", GOOD: "good", BAD: "bad", SOFT: "soft", LINE: "line", GROUND: "card"}
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), SOFT),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "legend.edgecolor"), LINE),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "grid.linewidth": 0.5,
    "font.size": 10,
    "legend.fancybox": False,
    "svg.fonttype": "none",
}


def svg_chart(label: str, draw: Callable[..., object], *values: object) -> str:
    """Return a chart as an SVG element in the page's colors; empty where there is nothing to plot.

    Args:
        label: Names the chart where it cannot be seen, and keeps the ids of the page's charts apart.
        draw: Draws on the axes `ax`.
        *values: The other values that it takes.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    file = io.StringIO()
    with mpl.rc_context():
        mpl.rcdefaults()  # Nothing of the user's own style.
        mpl.rcParams.update({**STYLE, "svg.hashsalt": label})
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
        try:
            draw(*values, ax=figure.subplots())
        except ValueError:
            return ""
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    _, _, body = file.getvalue().partition("<svg")[2].partition(">")
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    # The page's policy refuses style attributes, and takes the same as attributes of SVG; fonts are the page's own.
    body = re.sub(r' style="([^"]*)"', _attributes, body)
    for color, variable in COLORS.items():
        body = body.replace(f'"{color}"', f'"var(--{variable})"')
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH} {HEIGHT}">{body}'


def _attributes(style: re.Match[str]) -> str:
    return "".join(f' {name}="{value}"' for name, value in re.findall(r"\b(?!font)([\w-]+): ([^;]+)", style[1]))
