"""Provenance of a bullet: from a playbook back to the reflections, and the examples, that fed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dspy_combee.playbook import Remove
from dspy_combee.playbook.deltas import merged_ids
from dspy_combee.playbook.records import PlaybookChange, PlaybookStep, Reflection


@dataclass(frozen=True)
class BulletProvenance:
    """Hold one change that led to a bullet."""

    iteration: int
    """The step that made it."""
    component: str
    """The playbook: the predictor's name, or `shared`."""
    bullet_id: str
    """The bullet that it made or changed: the one in question, or one that was united with it later."""
    change: str
    """`ADD`, `UPDATE`, `MERGE`, `REMOVE` or, where a near-duplicate was united with it, `UNITE`."""
    content: str
    """The text that it gave the bullet; for `UNITE` that of the near-duplicate, for `REMOVE` none."""
    reflections: tuple[Reflection, ...]
    """The reflections that the change came from."""
    nodes: tuple[str, ...]
    """Ids of the curator calls whose deltas name one of them, the last call first."""
    fed: tuple[Any, ...]
    """Ids of the examples of those reflections: positions in the trainset."""
    lost: tuple[Any, ...]
    """Ids of the step's examples whose reflections fed nothing that was kept in this playbook."""


def trace_bullet(steps: Sequence[PlaybookStep], component: str, bullet_id: str) -> list[BulletProvenance]:
    """Return the changes that led to a bullet, the last one first.

    There is one entry for each change to it or to a bullet that became part of it, and none for a bullet that the run
    started with and did not change.
    """
    wanted = {bullet_id}  # Ids never come twice, so this only grows on the way back.
    found: list[BulletProvenance] = []
    for step in reversed(steps):
        for change in step.changes:
            if change.component == component:
                found.extend(_trace_step(step, change, wanted))
    return found


def bullet_ids(steps: Sequence[PlaybookStep], component: str) -> set[str]:
    """Return the ids of all bullets of a playbook that the steps mention."""
    changes = [change for step in steps for change in step.changes if change.component == component]
    pruned = {item.bullet.id for change in changes for item in change.pruned}
    return pruned | {item.bullet_id for change in changes for item in change.applied}


def _trace_step(step: PlaybookStep, change: PlaybookChange, wanted: set[str]) -> Iterator[BulletProvenance]:
    """Walk a step from its end to its start; bullets that became part of a wanted one are wanted from then on."""
    # Those of the predictor whose playbook it is; of all predictors where they share one.
    own = [item for item in step.reflections if item.predictor == change.component] or step.reflections
    used = {item.source for item in own if item.id not in step.unused_reflections}
    lost = tuple(step.minibatch_ids[source] for source in _sources(own) if source not in used)

    def entry(bullet_id: str, kind: str, content: str, reflection_ids: Sequence[str] = ()) -> BulletProvenance:
        fed = tuple(item for item in own if item.id in reflection_ids)
        examples = tuple(step.minibatch_ids[source] for source in _sources(fed))
        nodes = _nodes_naming(step, change.component, {item.id for item in fed})
        return BulletProvenance(
            step.iteration, change.component, bullet_id, kind, content, fed, nodes, fed=examples, lost=lost
        )

    for pruned in reversed(change.pruned):
        if pruned.into in wanted:
            wanted.add(pruned.bullet.id)
            yield entry(pruned.bullet.id, "UNITE", pruned.bullet.content)
    for item in reversed(change.applied):
        if item.bullet_id in wanted:
            wanted.update(merged_ids(item, change.conflicts))
            delta = item.delta
            content = "" if isinstance(delta, Remove) else delta.content
            yield entry(item.bullet_id, delta.type, content, delta.reflection_ids)


def _sources(reflections: Iterable[Reflection]) -> list[int]:
    return list(dict.fromkeys(item.source for item in reflections))


def _nodes_naming(step: PlaybookStep, component: str, reflection_ids: set[str]) -> tuple[str, ...]:
    """Return the calls for a playbook whose deltas name one of the reflections, the last call first."""
    reduction = next((made for made in step.reductions if made.component == component), None)
    named = {
        node.id: {name for delta in node.output or () for name in getattr(delta, "reflection_ids", ())}
        for node in reversed(reduction.nodes if reduction else ())
    }
    return tuple(node for node, names in named.items() if names & reflection_ids)
