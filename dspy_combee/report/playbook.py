"""The bullets of playbooks with their counters over time, replayed from the steps of `PlaybookOptimizer`.

Bullets that a run started with show up once a step names them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dspy_combee.playbook.deltas import Add, Applied, Conflict, Remove, merged_ids
from dspy_combee.playbook.playbook import read_tag
from dspy_combee.playbook.records import PlaybookChange, PlaybookStep
from dspy_combee.records.types import StepRecord


@dataclass
class BulletHistory:
    """Follow one bullet while the steps are replayed; section and content are empty where no step says them."""

    id: str
    section: str = ""
    content: str = ""
    counters: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(helpful, harmful) after each iteration that changed one of them."""
    events: list[str] = field(default_factory=list)
    """What happened to it, in order: `step 3: ADD from s3.r1`."""
    gone: bool = False
    """Whether it left the playbook."""

    @property
    def counts(self) -> tuple[int, int]:
        """Return (helpful, harmful) as they are now."""
        return next(reversed(self.counters.values()), (0, 0))

    def count(self, iteration: int, helpful: int, harmful: int) -> None:
        """Add tags, or the counters of a bullet that became part of this one."""
        if helpful or harmful:
            self.counters[iteration] = (self.counts[0] + helpful, self.counts[1] + harmful)


class PlaybookHistory:
    """Replay the steps of one playbook."""

    def __init__(self, component: str) -> None:
        self.component = component
        self.bullets: dict[str, BulletHistory] = {}
        self.changes: list[tuple[int, PlaybookChange, Counter[str]]] = []
        """(iteration, change, deltas that took effect by operation) of each step."""

    def play(self, step: PlaybookStep, change: PlaybookChange) -> None:
        """Replay a step: the tags first, then the deltas, then what was pruned."""
        self._tag(step, change)
        for item in change.applied:
            self._apply(step.iteration, item, change.conflicts)
        for pruned in change.pruned:
            bullet = self._bullet(pruned.bullet.id)
            bullet.content, bullet.section = pruned.bullet.content, pruned.bullet.section
            self._leave(step.iteration, bullet, f"pruned ({pruned.reason})", pruned.into)
        operations = Counter(item.delta.type for item in change.applied)
        self.changes.append((step.iteration, change, operations))

    def _bullet(self, bullet_id: str) -> BulletHistory:
        return self.bullets.setdefault(bullet_id, BulletHistory(bullet_id))

    def _tag(self, step: PlaybookStep, change: PlaybookChange) -> None:
        own = [reflection for reflection in step.reflections if reflection.predictor == self.component]
        # A tag that is refused because it came twice equals the one that was counted.
        refused = [item.given for item in change.tags_refused if item.reason.startswith("unknown")]
        for reflection in own or step.reflections:  # One playbook may be shared by all predictors.
            tags: dict[str, str] = {}
            for given in reflection.tags:
                bullet_id, tag = read_tag(given)
                tags.setdefault(bullet_id, "" if given in refused else tag)
            for bullet_id, tag in tags.items():
                if tag in ("helpful", "harmful"):
                    self._bullet(bullet_id).count(step.iteration, tag == "helpful", tag == "harmful")

    def _apply(self, iteration: int, item: Applied, conflicts: Sequence[Conflict]) -> None:
        delta, bullet = item.delta, self._bullet(item.bullet_id)
        if isinstance(delta, Remove):
            self._leave(iteration, bullet, f"removed ({delta.reason})" if delta.reason else "removed")
            return
        if isinstance(delta, Add) and not bullet.content:
            bullet.section = delta.section
        bullet.content = delta.content
        sources = f" from {', '.join(delta.reflection_ids)}" if delta.reflection_ids else ""
        bullet.events.append(f"step {iteration}: {delta.type}{sources}")
        for bullet_id in merged_ids(item, conflicts):
            if bullet_id != item.bullet_id:
                self._leave(iteration, self._bullet(bullet_id), "merged", item.bullet_id)

    def _leave(self, iteration: int, bullet: BulletHistory, why: str, into: str | None = None) -> None:
        if not bullet.gone:
            bullet.gone = True
            bullet.events.append(f"step {iteration}: {why}" + ("" if into is None else f" into {into}"))
            if into is not None:
                self._bullet(into).count(iteration, *bullet.counts)


def playbook_histories(steps: Sequence[StepRecord]) -> list[PlaybookHistory]:
    """Replay each playbook of a run; none where the steps are not those of playbook learning."""
    histories: dict[str, PlaybookHistory] = {}
    for step in steps:
        if isinstance(step, PlaybookStep):
            for change in step.changes:
                histories.setdefault(change.component, PlaybookHistory(change.component)).play(step, change)
    return list(histories.values())
