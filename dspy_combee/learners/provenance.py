"""Provenance of a bullet: from a playbook back to the reflections, and the examples, that fed it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dspy_combee.playbook import Applied, Conflict, Merge, Remove
from dspy_combee.playbook.records import PlaybookChange, PlaybookStep, Reflection
from dspy_combee.records.types import Reduction


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
    """The text that it gave the bullet; that of the near-duplicate, and of a bullet removed, none."""
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

    There is one entry for each change to it, and to the bullets that became part of it; none for a bullet that the run
    started with and left alone.
    """
    wanted = {bullet_id}  # Ids never come twice, so this only grows on the way back.
    found: list[BulletProvenance] = []
    for step in reversed(steps):
        for change in step.changes:
            if change.component == component:
                found.extend(_trace_step(step, change, wanted))
    return found


def bullet_ids(steps: Sequence[PlaybookStep], component: str) -> set[str]:
    """Return the ids of all bullets that the steps name in a playbook."""
    changes = [change for step in steps for change in step.changes if change.component == component]
    pruned = {item.bullet.id for change in changes for item in change.pruned}
    return pruned | {item.bullet_id for change in changes for item in change.applied}


def _trace_step(step: PlaybookStep, change: PlaybookChange, wanted: set[str]) -> Iterator[BulletProvenance]:
    """Walk a step from its end to its start; bullets that became part of a wanted one are wanted from then on."""
    reflections = _reflections_of(step, change.component)
    for pruned in reversed(change.pruned):
        if pruned.into in wanted:
            wanted.add(pruned.bullet.id)
            yield _entry(step, change, reflections, pruned.bullet.id, "UNITE", pruned.bullet.content, ())
    for item in reversed(change.applied):
        if item.bullet_id in wanted:
            wanted.update(_united(item, change.conflicts))
            delta = item.delta
            content = "" if isinstance(delta, Remove) else delta.content
            kind = type(delta).__name__.upper()
            yield _entry(step, change, reflections, item.bullet_id, kind, content, delta.reflection_ids)


def _united(item: Applied, conflicts: Sequence[Conflict]) -> set[str]:
    """Return the bullets that a MERGE has made one, without those that another delta kept out of it."""
    if not isinstance(item.delta, Merge):
        return set()
    kinds = ("merge_over_updated", "merge_over_removed", "merges")
    kept_out = {
        found.bullet_id
        for found in conflicts
        if found.kind in kinds and item.index in (*found.kept, *found.dropped) and found.kept[0] != item.index
    }
    return set(item.delta.ids) - kept_out


def _entry(
    step: PlaybookStep,
    change: PlaybookChange,
    reflections: Sequence[Reflection],
    bullet_id: str,
    kind: str,
    content: str,
    reflection_ids: Sequence[str],
) -> BulletProvenance:
    ids = step.minibatch_ids
    used = {item.source for item in reflections if item.id not in step.unused_reflections}
    sources = dict.fromkeys(item.source for item in reflections)
    fed = tuple(item for item in reflections if item.id in reflection_ids)
    reduction = next((made for made in step.reductions if made.component == change.component), None)
    return BulletProvenance(
        iteration=step.iteration,
        component=change.component,
        bullet_id=bullet_id,
        change=kind,
        content=content,
        reflections=fed,
        nodes=() if reduction is None else _nodes(reduction, {item.id for item in fed}),
        fed=tuple(ids[source] for source in dict.fromkeys(item.source for item in fed)),
        lost=tuple(ids[source] for source in sources if source not in used),
    )


def _nodes(reduction: Reduction, reflection_ids: set[str]) -> tuple[str, ...]:
    named = {
        node.id: {name for delta in node.output or () for name in getattr(delta, "reflection_ids", ())}
        for node in reversed(reduction.nodes)
    }
    return tuple(node for node, names in named.items() if names & reflection_ids)


def _reflections_of(step: PlaybookStep, component: str) -> list[Reflection]:
    """Return those of the predictors whose playbook it is: of all predictors where they share one."""
    own = [item for item in step.reflections if item.predictor == component]
    return own or list(step.reflections)
