"""What a report shows, as numbers and texts: made from the `StepRecord`s of a run and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from itertools import groupby
from typing import Any

from dspy_combee.records.provenance import surviving_nodes
from dspy_combee.records.types import ProposalNode, Reduction, StepRecord, Usage
from dspy_combee.report.diff import diff_lines
from dspy_combee.report.playbook import playbook_history

LONGEST_PROMPT = 20_000
"""Characters of a prompt that the page holds; the records hold all of them."""


@dataclass(frozen=True)
class ScorePoint:
    """The scores of a run after one step.

    Attributes:
        iteration: The step.
        metric_calls: Metric calls of the run so far.
        seconds: Seconds of the run so far, those before a resume included.
        best: The best mean validation score so far; None without validation.
        validation: That of the step's candidate; None when it is not in the pool.
        minibatch: The parent's mean score on the minibatch.
        accepted: Whether the candidate entered the pool.
    """

    iteration: int
    metric_calls: int
    seconds: float
    best: float | None
    validation: float | None
    minibatch: float | None
    accepted: bool


@dataclass(frozen=True)
class DelayCurve:
    """The delay curve T(n) of a run: measured points, fit and choice (paper, section 3.3).

    Attributes:
        num_examples: N, as the fit implies it; None without one: times are then seconds per example.
        steps: (n, T) of each step in which a reflection call succeeded.
        medians: (n, T) of each size that the fit used.
        line: (n, T) on the fitted curve, from the smallest to the largest size; empty without a fit.
        choice: The minibatch size that the fit chose; None without one.
        reason: Why.
    """

    num_examples: int | None
    steps: tuple[tuple[int, float], ...]
    medians: tuple[tuple[int, float], ...]
    line: tuple[tuple[float, float], ...]
    choice: int | None
    reason: str


@dataclass(frozen=True)
class PhaseRow:
    """Time and language-model usage of one phase; no usage where the steps do not record it."""

    name: str
    seconds: float
    usage: Usage | None


@dataclass(frozen=True)
class Tree:
    """The calls of one component, as a tree is drawn.

    Attributes:
        levels: The calls by level, level 1 (which reads records) first.
        survivors: Ids of the calls that the proposal was made of.
        lost: Positions of the records that reached no such call.
    """

    levels: tuple[tuple[ProposalNode, ...], ...]
    survivors: frozenset[str]
    lost: tuple[int, ...]


def page_data(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Everything that the page shows, as plain values that JSON takes (no NaN, no infinity)."""
    data = {
        "totals": _totals(steps),
        "scores": [asdict(point) for point in score_points(steps)],
        "delay": asdict(delay_curve(steps)),
        "phases": [asdict(row) for row in phase_rows(steps)],
        "steps": [_step(step, first) for iteration in _iterations(steps) for step, first in _numbered(iteration)],
        "playbooks": playbook_history(steps),
    }
    plain: dict[str, Any] = _plain(data)
    return plain


def score_points(steps: Sequence[StepRecord]) -> list[ScorePoint]:
    """The scores after each step."""
    points = []
    before, last = 0.0, 0.0
    for step in steps:
        if step.elapsed < last:  # A resumed run counts its seconds anew.
            before += last
        last = step.elapsed
        points.append(
            ScorePoint(
                step.iteration,
                step.metric_calls,
                before + last,
                step.best_score,
                step.validation_score,
                _mean(step.scores_before),
                step.accepted,
            )
        )
    return points


def delay_curve(steps: Sequence[StepRecord]) -> DelayCurve:
    """The delay curve by the controller's last fit; the steps alone where there is none.

    Where a run read traces first, it is that of the steps with rollouts.
    """
    steps = [step for step in steps if not step.from_traces] or steps
    timed = [s for s in steps if s.seconds > 0 and s.n > 0 and any(node.output is not None for node in s.nodes)]
    fit = next((step.fit for step in reversed(steps) if step.fit is not None), None)
    size = None if fit is None else _num_examples(fit)
    points = tuple((step.n, step.epoch_seconds(size or 1)) for step in timed)
    if fit is None or size is None:
        return DelayCurve(None, points, (), (), None, "")
    medians = tuple((n, seconds * size / n) for n, seconds in fit.medians)
    line: tuple[tuple[float, float], ...] = ()
    if fit.A is not None and fit.alpha is not None:
        sizes = [n for n, _ in (*medians, *points)] + [fit.choice]
        line = tuple((float(n), fit.A * n**-fit.alpha) for n in (min(sizes), max(sizes)))
    return DelayCurve(size, points, medians, line, fit.choice, fit.reason)


def _num_examples(fit: Any) -> int | None:
    """N, which a fit does not hold: least squares passes through the means, and T = d * N / n."""
    if not fit.medians:
        return None
    if fit.A is None or fit.alpha is None:
        n, seconds = fit.medians[0]
        return round(fit.first_epoch_seconds * n / seconds) if fit.first_epoch_seconds else None
    mean_log_n = math.fsum(math.log(n) for n, _ in fit.medians) / len(fit.medians)
    mean_log_seconds = math.fsum(math.log(seconds) for _, seconds in fit.medians) / len(fit.medians)
    return round(math.exp(math.log(fit.A) + (1 - fit.alpha) * mean_log_n - mean_log_seconds))


def phase_rows(steps: Sequence[StepRecord]) -> list[PhaseRow]:
    """Time and usage by phase: the rollouts of the steps that time a size are `profiling`."""
    seconds: dict[str, float] = {}
    usages: dict[str, Usage] = {}
    for records in _iterations(steps):
        first = records[0]
        rollouts = "profiling" if first.profiling else "rollouts"
        reflection = sum((reflection_usage(step) for step in records), Usage())
        for phase, usage in ((rollouts, _less(first.usage, reflection)), ("reflection", reflection)):
            usages[phase] = usages.get(phase, Usage()) + usage
        for phase, spent in first.phase_seconds.items():
            name = rollouts if phase == "rollouts" else phase
            seconds[name] = seconds.get(name, 0.0) + spent
    names = dict.fromkeys(("profiling", "rollouts", "reflection", "validation", *seconds, *usages))
    return [
        PhaseRow(name, seconds.get(name, 0.0), usages.get(name)) for name in names if name in seconds or name in usages
    ]


def reflection_usage(step: StepRecord) -> Usage:
    """What the reflection calls of a step took; those of a playbook's reflections too."""
    made = [node.usage for node in step.nodes]
    made += [reflection.usage for reflection in getattr(step, "reflections", ())]
    return sum(made, Usage())


def tree_of(reduction: Reduction) -> Tree:
    """The calls of a reduction by level, which of them its text was made of, and the records that were lost."""
    levels: dict[str, int] = {}
    for node in reduction.nodes:
        levels[node.id] = 1 + max((levels.get(item, 0) for item in node.inputs), default=0)
    rows = [
        tuple(node for node in reduction.nodes if levels[node.id] == level)
        for level in range(1, max(levels.values(), default=0) + 1)
    ]
    survivors = frozenset() if reduction.text is None else frozenset(_survivors(reduction))
    read = {item for node in reduction.nodes if node.id in survivors for item in node.inputs}
    lost = tuple(position for position in range(len(reduction.sources)) if f"r{position}" not in read)
    return Tree(tuple(rows), survivors, lost)


def _survivors(reduction: Reduction) -> Iterable[str]:
    try:
        return surviving_nodes(reduction)
    except ValueError:  # An aggregator of the user's own may name its calls as it likes.
        return [node.id for node in reduction.nodes if node.output is not None]


def as_text(value: Any) -> str | None:
    """A proposal as text: deltas and other values that are no text as indented JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(_plain(value), indent=2, ensure_ascii=False)


def _totals(steps: Sequence[StepRecord]) -> dict[str, Any]:
    points = score_points(steps)
    reflection = sum((reflection_usage(step) for step in steps), Usage())
    usage = sum((records[0].usage for records in _iterations(steps)), Usage())
    scores = [point.best for point in points if point.best is not None]
    return {
        "steps": len(steps),
        "accepted": sum(step.accepted for step in steps),
        "best": scores[-1] if scores else None,
        "first": scores[0] if scores else None,
        "metric_calls": max((point.metric_calls for point in points), default=0),
        "seconds": points[-1].seconds if points else 0.0,
        "reflection_calls": reflection.calls,
        "tokens": usage.input_tokens + usage.output_tokens,
        "cost": usage.cost,
    }


def _step(step: StepRecord, first: bool) -> dict[str, Any]:
    """A step; `first` is whether it is the first proposal of its iteration, whose time and tokens all share."""
    return {
        "iteration": step.iteration,
        "shares": not first,
        "parent": step.parent,
        "candidate": step.candidate,
        "accepted": step.accepted,
        "reason": step.reason,
        "n": step.n,
        "k": step.k,
        "p": step.duplication_factor,
        "before": _mean(step.scores_before),
        "after": _mean(step.scores_after),
        "validation": step.validation_score,
        "profiling": step.profiling,
        "size_reason": step.size_reason,
        "phases": step.phase_seconds,
        "seconds": step.seconds + step.validation_seconds,
        "reflection_calls": reflection_usage(step).calls,
        "tokens": step.usage.input_tokens + step.usage.output_tokens,
        "cost": step.usage.cost,
        "examples": [str(identifier) for identifier in step.minibatch_ids],
        "scores_before": step.scores_before,
        "scores_after": step.scores_after,
        "components": [_component(reduction) for reduction in step.reductions],
        "reflections": _reflections(step),
    }


def _reflections(step: StepRecord) -> list[dict[str, Any]]:
    """The reflections of a step of playbook learning."""
    unused = getattr(step, "unused_reflections", ())
    return [
        {"id": item.id, "source": item.source, "text": item.text, "error": item.error, "unused": item.id in unused}
        for item in getattr(step, "reflections", ())
    ]


def _component(reduction: Reduction) -> dict[str, Any]:
    tree = tree_of(reduction)
    text = as_text(reduction.text)
    comparable = isinstance(reduction.text, str) and isinstance(reduction.current, str)
    return {
        "name": reduction.component,
        "error": reduction.error,
        "groups": reduction.num_groups,
        "copies": reduction.duplication_factor,
        "sources": reduction.sources,
        "lost": tree.lost,
        "levels": [[node.id for node in level] for level in tree.levels],
        "nodes": [_node(node, node.id in tree.survivors) for node in reduction.nodes],
        "text": text,
        "diff": diff_lines(reduction.current, reduction.text) if comparable else None,
    }


def _node(node: ProposalNode, survives: bool) -> dict[str, Any]:
    return {
        "id": node.id,
        "inputs": node.inputs,
        "survives": survives,
        "output": as_text(node.output),
        "reply": node.raw_output if node.output is None else "",
        "prompt": node.prompt[:LONGEST_PROMPT],
        "prompt_left_out": max(0, len(node.prompt) - LONGEST_PROMPT),
        "seconds": node.seconds,
        "usage": asdict(node.usage),
        "error": node.error,
    }


def _iterations(steps: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """The steps of each iteration: several proposals may have been made in one, which share its time."""
    return [list(records) for _, records in groupby(steps, key=lambda step: step.iteration)]


def _numbered(records: Sequence[StepRecord]) -> list[tuple[StepRecord, bool]]:
    return [(step, position == 0) for position, step in enumerate(records)]


def _less(usage: Usage, part: Usage) -> Usage:
    """A usage without a part of it."""
    cost = None if usage.cost is None or part.cost is None else max(0.0, usage.cost - part.cost)
    counts = {
        name: max(0, getattr(usage, name) - getattr(part, name))
        for name in ("calls", "cache_hits", "input_tokens", "output_tokens")
    }
    return Usage(**counts, cost=cost)


def _mean(scores: Sequence[float]) -> float | None:
    return sum(scores) / len(scores) if scores else None


def _plain(value: Any) -> Any:
    """The value as strict JSON takes it; numbers that are not finite become None."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, **{name: _plain(item) for name, item in vars(value).items()}}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
