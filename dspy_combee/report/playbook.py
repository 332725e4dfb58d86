"""The bullets of playbooks with their counters over time, replayed from the steps of `PlaybookOptimizer`.

A step says which tags were given and which deltas took effect; nothing else of it is read here, so any record
with the attributes of a `PlaybookStep` will do. Bullets that a run started with show up once a step names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TAGS = ("helpful", "harmful")


@dataclass
class BulletHistory:
    """A bullet while the steps are replayed.

    Attributes:
        id: Its id.
        section: Its section; empty where no step says it.
        content: Its content; empty where no step says it.
        made: The iteration that added it; None where it was there before.
        counters: (iteration, helpful, harmful) for each step that changed one.
        gone: The iteration in which it left.
        why: Why it left.
    """

    id: str
    section: str = ""
    content: str = ""
    made: int | None = None
    counters: list[tuple[int, int, int]] = field(default_factory=list)
    gone: int | None = None
    why: str = ""

    def count(self, iteration: int, helpful: int, harmful: int) -> None:
        """So many more tags (counters of a bullet that was merged into this one, too)."""
        if helpful or harmful:
            _, had_helpful, had_harmful = self.counters[-1] if self.counters else (0, 0, 0)
            self.counters.append((iteration, had_helpful + helpful, had_harmful + harmful))

    def leave(self, iteration: int, why: str) -> None:
        """The bullet is no longer part of the playbook."""
        self.gone, self.why = iteration, why

    def to_dict(self) -> dict[str, Any]:
        """The bullet as plain values; one entry of `counters` an iteration."""
        last = {iteration: (helpful, harmful) for iteration, helpful, harmful in self.counters}
        counters = [[iteration, *counts] for iteration, counts in last.items()]
        return {**vars(self), "counters": counters}


def playbook_history(steps: Sequence[Any]) -> list[dict[str, Any]]:
    """Each playbook of the run: its size over the steps, and its bullets; nothing where no step has changes."""
    replays: dict[str, _Replay] = {}
    for step in steps:
        for change in getattr(step, "changes", ()):
            replays.setdefault(change.component, _Replay(change.component)).play(step, change)
    return [replay.to_dict() for replay in replays.values()]


class _Replay:
    """One playbook while the steps are replayed."""

    def __init__(self, component: str) -> None:
        self.component = component
        self.bullets: dict[str, BulletHistory] = {}
        self.sizes: list[dict[str, Any]] = []

    def play(self, step: Any, change: Any) -> None:
        """Replay a step: the tags first, then the deltas, then what was pruned."""
        self._tag(step, change)
        for item in change.applied:
            self._apply(step.iteration, item, change.conflicts)
        for pruned in change.pruned:
            bullet = self._bullet(pruned.bullet.id)
            bullet.content, bullet.section = pruned.bullet.content, pruned.bullet.section
            self._unite(step.iteration, bullet, pruned.into, f"pruned ({pruned.reason})")
        self.sizes.append(
            {
                "iteration": step.iteration,
                "bullets": change.bullets,
                "tokens": change.tokens,
                "helpful": change.helpful,
                "harmful": change.harmful,
                "neutral": change.neutral,
                "operations": _operations(change.applied),
                "refused": len(change.refused) + len(change.tags_refused),
                "conflicts": len(change.conflicts),
                "pruned": len(change.pruned),
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """The playbook as plain values."""
        bullets = [bullet.to_dict() for bullet in self.bullets.values()]
        return {"component": self.component, "sizes": self.sizes, "bullets": bullets}

    def _bullet(self, bullet_id: str) -> BulletHistory:
        return self.bullets.setdefault(bullet_id, BulletHistory(bullet_id))

    def _tag(self, step: Any, change: Any) -> None:
        predictors = {reflection.predictor for reflection in step.reflections}
        shared = self.component not in predictors
        # A tag that is refused because it came twice equals the one that was counted.
        refused = [item.given for item in change.tags_refused if item.reason.startswith("unknown")]
        for reflection in step.reflections:
            if not shared and reflection.predictor != self.component:
                continue
            seen: set[str] = set()
            for given in reflection.tags:
                bullet_id, tag = _pair(given)
                if tag in TAGS and bullet_id not in seen and given not in refused:
                    self._bullet(bullet_id).count(step.iteration, tag == "helpful", tag == "harmful")
                seen.add(bullet_id)

    def _apply(self, iteration: int, item: Any, conflicts: Iterable[Any]) -> None:
        delta = item.delta
        bullet = self._bullet(item.bullet_id)
        kind = type(delta).__name__
        if kind == "Remove":
            bullet.leave(iteration, f"removed ({delta.reason})" if delta.reason else "removed")
            return
        if kind == "Add" and not bullet.content:
            bullet.made, bullet.section = iteration, delta.section
        bullet.content = delta.content
        if kind == "Merge":
            elsewhere = {found.bullet_id for found in conflicts if _escapes(found, item.index)}
            for bullet_id in delta.ids:
                if bullet_id != item.bullet_id and bullet_id not in elsewhere:
                    self._unite(iteration, self._bullet(bullet_id), item.bullet_id, "merged")

    def _unite(self, iteration: int, bullet: BulletHistory, into: str | None, why: str) -> None:
        if bullet.gone is not None:
            return
        if into is not None:
            _, helpful, harmful = bullet.counters[-1] if bullet.counters else (0, 0, 0)
            self._bullet(into).count(iteration, helpful, harmful)
            why = f"{why} into {into}"
        bullet.leave(iteration, why)


def _escapes(conflict: Any, merge_index: int) -> bool:
    """Whether the conflict kept its bullet out of this MERGE: another delta has it, the first that it names."""
    if conflict.kind == "merges":
        return bool(conflict.kept[0] != merge_index)
    return conflict.kind in ("merge_over_updated", "merge_over_removed")


def _operations(applied: Iterable[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in applied:
        name = type(item.delta).__name__.upper()
        found[name] = found.get(name, 0) + 1
    return found


def _pair(given: Any) -> tuple[str, str]:
    """The id and the tag of a tag as it was given; empty where it is none."""
    if isinstance(given, Mapping):
        given = (given.get("id", given.get("bullet_id")), given.get("tag"))
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2:
        return str(given[0]).strip().removeprefix("[").removesuffix("]"), str(given[1]).strip().lower()
    return "", ""
