"""The numbers and texts that the page and the plots show, derived from step records alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dspy_combee.records.provenance import Provenance, surviving_nodes, trace_back
from dspy_combee.records.types import ProposalNode, Reduction, StepRecord, Usage, to_plain


def by_iteration(steps: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """Group the steps of each iteration: the proposals made in one share its time and usage."""
    return [list(records) for _, records in groupby(steps, key=lambda step: step.iteration)]


def run_seconds(steps: Sequence[StepRecord]) -> list[float]:
    """Return the seconds of the run after each step, those before a resume included."""
    found: list[float] = []
    before, last = 0.0, 0.0
    for step in steps:
        if step.elapsed < last:  # A resumed run counts its seconds anew.
            before += last
        last = step.elapsed
        found.append(before + last)
    return found


def reflection_usage(*steps: StepRecord) -> Usage:
    """Return the usage of the steps' reflection calls, those of a playbook's reflections included."""
    made = [item for step in steps for item in (*step.nodes, *getattr(step, "reflections", ()))]
    return sum((item.usage for item in made), Usage())


def spent_by_phase(steps: Sequence[StepRecord]) -> dict[str, tuple[float, Usage | None]]:
    """Return seconds and usage by phase; the rollouts of steps that time a size are the phase `profiling`.

    The usage is None where the steps do not record it.
    """
    seconds: dict[str, float] = {}
    usages: dict[str, Usage] = {}
    for records in by_iteration(steps):
        first = records[0]
        rollouts = "profiling" if first.profiling else "rollouts"
        reflection = reflection_usage(*records)
        for phase, usage in ((rollouts, _subtract(first.usage, reflection)), ("reflection", reflection)):
            usages[phase] = usages.get(phase, Usage()) + usage
        for phase, spent in first.phase_seconds.items():
            name = rollouts if phase == "rollouts" else phase
            seconds[name] = seconds.get(name, 0.0) + spent
    names = dict.fromkeys(("profiling", "rollouts", "reflection", "validation", *seconds))
    return {name: (seconds.get(name, 0.0), usages.get(name)) for name in names if name in seconds or name in usages}


def _subtract(usage: Usage, part: Usage) -> Usage:
    cost = None if usage.cost is None or part.cost is None else max(0.0, usage.cost - part.cost)
    names = ("calls", "cache_hits", "input_tokens", "output_tokens")
    return Usage(**{name: max(0, getattr(usage, name) - getattr(part, name)) for name in names}, cost=cost)


@dataclass(frozen=True)
class Tree:
    """Arrange the calls of one component as a tree."""

    rows: tuple[ProposalNode, ...]
    """The calls, each before those it read: the tree from its root down."""
    levels: Mapping[str, int]
    """The level of each call by its id; level 1 reads records."""
    survivors: frozenset[str]
    """Ids of the calls that the proposal was made of."""
    lost: tuple[str, ...]
    """Ids (`r7`) of the records that reached no such call."""

    @property
    def height(self) -> int:
        """Return the number of levels."""
        return max(self.levels.values(), default=0)


def tree_of(reduction: Reduction) -> Tree:
    """Arrange the calls of a reduction; find which of them its text was made of and which records were lost."""
    by_id = {node.id: node for node in reduction.nodes}
    levels: dict[str, int] = {}
    for node in reduction.nodes:
        levels[node.id] = 1 + max((levels.get(item, 0) for item in node.inputs), default=0)
    rows: dict[str, ProposalNode] = {}
    # Taken from the end: those of the highest level first, and of one level the first one first.
    waiting = sorted(reduction.nodes, key=lambda node: levels[node.id], reverse=True)[::-1]
    while waiting:
        node = waiting.pop()
        if node.id not in rows:
            rows[node.id] = node
            waiting += [by_id[item] for item in reversed(node.inputs) if item in by_id]
    survivors = frozenset() if reduction.text is None else frozenset(surviving_nodes(reduction))
    kept = {item for name in survivors for item in by_id[name].inputs}
    records = [f"r{position}" for position in range(len(reduction.sources))]
    return Tree(tuple(rows.values()), levels, survivors, tuple(name for name in records if name not in kept))


def final_texts(steps: Sequence[StepRecord]) -> dict[str, list[Provenance]]:
    """Return the rewrites that led to each text of the best candidate, the last one first.

    A component is left out where no step of these made its text: it is the student's own, or of GEPA's merge.
    """
    made = [step for step in steps if step.candidate is not None and not step.from_traces]
    best = steps[-1].best_score
    candidate: int | None = 0  # Where there was no search it is what traces taught.
    if made and best is None:
        candidate = made[-1].candidate
    elif made:
        candidate = next((step.candidate for step in made if step.validation_score == best), None)
    names = dict.fromkeys(reduction.component for step in steps for reduction in step.reductions)
    found = {name: [] if candidate is None else trace_back(steps, candidate, name) for name in names}
    return {name: rewrites for name, rewrites in found.items() if rewrites and isinstance(rewrites[0].text, str)}


def as_text(value: Any) -> str:
    """Return a proposal as text: deltas and other values that are no text as indented JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(to_plain(value), indent=2, ensure_ascii=False)


def mean(scores: Sequence[float]) -> float | None:
    """Return the mean, or None without scores."""
    return sum(scores) / len(scores) if scores else None
