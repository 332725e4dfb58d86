"""Provenance: from a final instruction back to the examples whose records fed it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspy_combee.records.types import Reduction, StepRecord


@dataclass(frozen=True)
class Provenance:
    """Record where one rewrite of an instruction came from."""

    iteration: int
    """The step that made it."""
    candidate: int
    """Index of the candidate that it made."""
    parent: int
    """Index of the candidate that it changed."""
    nodes: tuple[str, ...]
    """Ids of the reflection calls that led to it, the last one first."""
    fed: tuple[Any, ...]
    """Ids of the examples whose records reached it."""
    lost: tuple[Any, ...]
    """Ids of the examples whose records reached no call that led to it."""
    text: Any
    """The instruction that it made."""


def trace_back(steps: Sequence[StepRecord], candidate: int, component: str) -> list[Provenance]:
    """Return the rewrites that led to a candidate's component, the last one first.

    Args:
        steps: The steps of the run.
        candidate: Index of the candidate in the pool.
        component: Name of the component.

    Returns:
        One entry for each step in the candidate's ancestry that rewrote the component; none when the component is
        still the program's own. A candidate that GEPA's merge made has no step of its own and ends the walk. Where
        steps on collected traces came first, candidate 0 is what the last of them made.
    """
    kept = [step for step in steps if step.candidate is not None]
    made_by = {step.candidate: step for step in kept if not step.from_traces}
    learned = [step for step in kept if step.from_traces]
    found: list[Provenance] = []
    while candidate in made_by or (candidate == 0 and learned):
        step = made_by[candidate] if candidate in made_by else learned.pop()
        candidate = candidate if step.candidate is None else step.candidate
        found.extend(
            _provenance(step, candidate, reduction)
            for reduction in step.reductions
            if reduction.component == component and reduction.text is not None
        )
        candidate = 0 if step.from_traces else step.parent
    return found


def _provenance(step: StepRecord, candidate: int, reduction: Reduction) -> Provenance:
    nodes = surviving_nodes(reduction)
    survivors = set(nodes)
    read = {item for node in reduction.nodes if node.id in survivors for item in node.inputs}
    ids = step.minibatch_ids
    sources = reduction.sources
    fed = [ids[source] for position, source in enumerate(sources) if f"r{position}" in read]
    lost = [ids[source] for position, source in enumerate(sources) if f"r{position}" not in read]
    return Provenance(
        iteration=step.iteration,
        candidate=candidate,
        parent=step.parent,
        nodes=nodes,
        fed=tuple(fed),
        lost=tuple(lost),
        text=reduction.text,
    )


def surviving_nodes(reduction: Reduction) -> tuple[str, ...]:
    """Return the ids of the calls whose output the reduction's text was made of, the last one first."""
    by_id = {node.id: node for node in reduction.nodes}
    # Equal proposals are merged without a call: every call that gave the text, and fed no other, is a root.
    fed = {item for node in reduction.nodes for item in node.inputs}
    roots = (node.id for node in reversed(reduction.nodes) if node.output == reduction.text and node.id not in fed)
    queue = deque(roots)
    found: dict[str, None] = {}
    while queue:
        identifier = queue.popleft()
        if identifier not in found:
            found[identifier] = None
            queue.extend(item for item in by_id[identifier].inputs if item in by_id)
    return tuple(found)
