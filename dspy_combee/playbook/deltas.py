"""Delta operations on a playbook's bullets, and what happens when several of one batch touch the same bullet.

All deltas of a batch were proposed against one and the same playbook, so none sees what another does:

- UPDATE wins over REMOVE.
- Several UPDATEs of one bullet with different contents go to `resolve`; without an answer from it the better
  supported one wins: more reflection ids, then the longer content, then the later in text order.
- MERGE over a bullet that is removed drops its id and rewrites what is left, be it one bullet. MERGE over a
  bullet that is updated, or that a better supported MERGE has taken, drops that id too; if fewer than two are
  left it does nothing, since those bullets live on elsewhere.
- An ADD of a content that stands in the playbook already (white space aside) joins that bullet, as equal ADDs join
  each other: nothing is lost, so this is no conflict.

Every delta of a batch ends in exactly one place: applied, refused (it was not valid), or dropped by a conflict.
None of this depends on the order of the deltas in the batch; only the numbers of new ids, and the order of
reflection ids, follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dspy_combee.playbook.bullets import (
    DEFAULT_SECTION,
    Bullet,
    PlaybookError,
    bullet_support,
    clean_ids,
    clean_text,
    find_section,
    join_ids,
    slug_of,
)


@dataclass(frozen=True)
class Add:
    """A new bullet. A section spelled as ACE spells it (`formulas_and_calculations`) is recognized."""

    section: str
    content: str
    reflection_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Update:
    """A new content for the bullet `id`; its counters stay, its reflection ids grow."""

    id: str
    content: str
    reflection_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Merge:
    """One bullet in place of several; it keeps the id and section of the best supported, counters are summed."""

    ids: tuple[str, ...]
    content: str
    reflection_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Remove:
    """The bullet `id` goes."""

    id: str
    reason: str = ""
    reflection_ids: tuple[str, ...] = ()


Delta = Add | Update | Merge | Remove
# Gets the bullet and its differing updates, best supported first; returns the content, or None for no answer.
Resolve = Callable[[Bullet, Sequence[Update]], str | None]


@dataclass(frozen=True)
class Applied:
    """A delta that took effect: its place in the batch, and the bullet that it made, changed, joined or removed."""

    index: int
    delta: Delta
    bullet_id: str


@dataclass(frozen=True)
class Refused:
    """A delta or tag that was not valid: its place in the batch, as it was given, and why."""

    index: int
    given: Any
    reason: str


@dataclass(frozen=True)
class Conflict:
    """Deltas of one batch that touched the same bullet.

    Attributes:
        kind: `"update_over_remove"`, `"updates"`, `"merge_over_removed"`, `"merge_over_updated"` or `"merges"`.
        bullet_id: The bullet they touched.
        kept: The places in the batch of the deltas that took effect.
        dropped: The places of those that did not.
        detail: How it was settled.
    """

    kind: str
    bullet_id: str
    kept: tuple[int, ...]
    dropped: tuple[int, ...]
    detail: str


def delta_from(value: Mapping[str, Any]) -> Delta:
    """Read a delta from a curator's JSON: `{"type": "ADD", "section": ..., "content": ...}`.

    The operation may stand under `type`, `op` or `operation`, in any case; `bullet_id` may stand for `id`,
    `bullet_ids` for `ids`. Keys that are not known are ignored. What is missing becomes empty, for
    `Playbook.apply` to refuse.

    Raises:
        PlaybookError: If the operation is none of ADD, UPDATE, MERGE and REMOVE.
    """
    operation = next((value[key] for key in ("type", "op", "operation") if key in value), None)
    name = operation.strip().upper() if isinstance(operation, str) else operation
    reflections = value.get("reflection_ids") or ()
    bullet_id = value.get("id", value.get("bullet_id", ""))
    content = value.get("content", "")
    reflections = tuple(reflections) if isinstance(reflections, list) else reflections
    if name == "ADD":
        return Add(value.get("section", DEFAULT_SECTION), content, reflections)
    if name == "UPDATE":
        return Update(bullet_id, content, reflections)
    if name == "MERGE":
        ids = value.get("ids", value.get("bullet_ids", ()))
        return Merge(tuple(ids) if isinstance(ids, list) else ids, content, reflections)
    if name == "REMOVE":
        return Remove(bullet_id, value.get("reason", ""), reflections)
    raise PlaybookError(f"unknown operation {operation!r}; known are ADD, UPDATE, MERGE and REMOVE")


class Batch:
    """The bullets of a playbook while one batch of deltas is applied to them; used once.

    Attributes:
        sections: The playbook's sections, new ones appended.
        bullets: By id, in order: first those of the playbook that are left, then the new ones.
        next_number: The number that the next new bullet gets.
        applied, refused, conflicts: What became of the deltas.
    """

    def __init__(self, sections: Iterable[str], bullets: Iterable[Bullet], next_number: int) -> None:
        self.sections = list(sections)
        self.bullets = {bullet.id: bullet for bullet in bullets}
        self.next_number = next_number
        self.applied: list[Applied] = []
        self.refused: list[Refused] = []
        self.conflicts: list[Conflict] = []
        self._adds: dict[int, Add] = {}
        self._updates: dict[str, dict[int, Update]] = {}
        self._merges: dict[int, Merge] = {}
        self._removes: dict[str, dict[int, Remove]] = {}

    def run(self, deltas: Iterable[Any], resolve: Resolve | None) -> None:
        """Apply the deltas: sort them out first, then touch the bullets, additions last."""
        for index, delta in enumerate(deltas):
            try:
                self._sort_in(index, _checked(delta, self.bullets))
            except PlaybookError as error:
                self.refused.append(Refused(index, delta, str(error)))
        self._apply_updates(resolve)
        self._apply_merges()
        for bullet_id, removes in self._removes.items():
            if bullet_id not in self._updates:
                self.bullets.pop(bullet_id, None)
                self._record(removes, bullet_id)
        self._apply_adds()
        self.applied.sort(key=lambda item: item.index)

    def _sort_in(self, index: int, delta: Delta) -> None:
        if isinstance(delta, Add):
            self._adds[index] = delta
        elif isinstance(delta, Update):
            self._updates.setdefault(delta.id, {})[index] = delta
        elif isinstance(delta, Merge):
            self._merges[index] = delta
        else:
            self._removes.setdefault(delta.id, {})[index] = delta

    def _record(self, deltas: Mapping[int, Delta], bullet_id: str) -> None:
        self.applied += [Applied(index, delta, bullet_id) for index, delta in deltas.items()]

    def _apply_updates(self, resolve: Resolve | None) -> None:
        for bullet_id, updates in self._updates.items():
            bullet = self.bullets[bullet_id]
            choices = _join_equal(list(updates.values()))
            content, kept = choices[0].content, updates
            if len(choices) > 1:
                merged = resolve(bullet, choices) if resolve else None
                if isinstance(merged, str) and merged.strip():
                    content, how = merged, "merged into one content"
                else:
                    kept = {index: delta for index, delta in updates.items() if delta.content == content}
                    how = "the better supported one wins"
                dropped = tuple(index for index in updates if index not in kept)
                self.conflicts.append(Conflict("updates", bullet_id, tuple(kept), dropped, how))
            reflections = join_ids(bullet.reflection_ids, *(delta.reflection_ids for delta in kept.values()))
            self.bullets[bullet_id] = replace(bullet, content=content, reflection_ids=reflections)
            self._record(kept, bullet_id)
            if removes := self._removes.get(bullet_id):
                detail = "UPDATE wins"
                self.conflicts.append(Conflict("update_over_remove", bullet_id, tuple(kept), tuple(removes), detail))
            self._updates[bullet_id] = kept

    def _apply_merges(self) -> None:
        equal: dict[tuple[frozenset[str], str], dict[int, Merge]] = {}
        for index, merge in self._merges.items():
            equal.setdefault((frozenset(merge.ids), merge.content), {})[index] = merge
        taken: dict[str, tuple[int, ...]] = {}
        for merges in sorted(equal.values(), key=_merge_support, reverse=True):
            indices = tuple(merges)
            left: list[str] = []
            lost: list[tuple[str, str, tuple[int, ...]]] = []
            for bullet_id in next(iter(merges.values())).ids:
                if bullet_id in self._updates:
                    lost.append(("merge_over_updated", bullet_id, tuple(self._updates[bullet_id])))
                elif bullet_id in self._removes:
                    lost.append(("merge_over_removed", bullet_id, tuple(self._removes[bullet_id])))
                elif bullet_id in taken:
                    lost.append(("merges", bullet_id, taken[bullet_id]))
                else:
                    left.append(bullet_id)
            only_removed = all(kind == "merge_over_removed" for kind, _, _ in lost)
            works = len(left) > 1 or (len(left) == 1 and only_removed)
            detail = f"MERGE over [{', '.join(left)}], which is left" if works else "too few left for a MERGE"
            for kind, bullet_id, others in lost:
                kept, dropped = ((*others, *indices), ()) if works else (others, indices)
                self.conflicts.append(Conflict(kind, bullet_id, kept, dropped, detail))
            if works:
                taken.update(dict.fromkeys(left, indices))
                self._merge(merges, left)

    def _merge(self, merges: Mapping[int, Merge], ids: Sequence[str]) -> None:
        members = [bullet for bullet in self.bullets.values() if bullet.id in ids]
        first = max(members, key=bullet_support)
        new_reflections = join_ids(*(merge.reflection_ids for merge in merges.values()))
        for member in members:
            if member is not first:
                del self.bullets[member.id]
        self.bullets[first.id] = replace(
            first,
            content=next(iter(merges.values())).content,
            helpful=sum(member.helpful for member in members),
            harmful=sum(member.harmful for member in members),
            reflection_ids=join_ids(*(member.reflection_ids for member in members), new_reflections),
        )
        self._record(merges, first.id)

    def _apply_adds(self) -> None:
        present = {_folded(bullet.content): bullet.id for bullet in reversed(self.bullets.values())}
        for index, add in self._adds.items():
            bullet_id = present.get(_folded(add.content))
            if bullet_id is None:
                section = find_section(add.section, self.sections)
                if section not in self.sections:
                    self.sections.append(section)
                bullet_id = self._new_id(section)
                present[_folded(add.content)] = bullet_id
                self.bullets[bullet_id] = Bullet(bullet_id, section, add.content, 0, 0, add.reflection_ids)
            else:
                bullet = self.bullets[bullet_id]
                reflections = join_ids(bullet.reflection_ids, add.reflection_ids)
                self.bullets[bullet_id] = replace(bullet, reflection_ids=reflections)
            self._record({index: add}, bullet_id)

    def _new_id(self, section: str) -> str:
        while True:
            bullet_id = f"{slug_of(section)}-{self.next_number:05d}"
            self.next_number += 1
            if bullet_id not in self.bullets:
                return bullet_id


def _checked(delta: Any, known: Mapping[str, Bullet]) -> Delta:
    """The delta, its texts and ids cleaned.

    Raises:
        PlaybookError: If it cannot be applied.
    """
    if isinstance(delta, Mapping):
        delta = delta_from(delta)
    if not isinstance(delta, Add | Update | Merge | Remove):
        raise PlaybookError(f"a delta is an Add, Update, Merge or Remove, not {type(delta).__name__}")
    reflections = clean_ids(delta.reflection_ids)
    if isinstance(delta, Remove):
        return replace(delta, id=_known(delta.id, known), reflection_ids=reflections)
    content = clean_text(delta.content, "the content")
    if not content.strip():
        raise PlaybookError("the content is empty")
    if isinstance(delta, Add):
        section = clean_text(delta.section, "the section")
        return replace(delta, section=section, content=content, reflection_ids=reflections)
    if isinstance(delta, Update):
        return replace(delta, id=_known(delta.id, known), content=content, reflection_ids=reflections)
    if isinstance(delta.ids, str) or not isinstance(delta.ids, Iterable):
        raise PlaybookError(f"the ids of a MERGE are a list, not {delta.ids!r}")
    ids = tuple(dict.fromkeys(_known(bullet_id, known) for bullet_id in delta.ids))
    if len(ids) < 2:
        raise PlaybookError(f"a MERGE needs two different ids, not {list(ids)}")
    return replace(delta, ids=ids, content=content, reflection_ids=reflections)


def _known(bullet_id: Any, known: Mapping[str, Bullet]) -> str:
    """The id, with or without its brackets, if the playbook has it."""
    bare = bullet_id.strip().removeprefix("[").removesuffix("]") if isinstance(bullet_id, str) else bullet_id
    if not isinstance(bare, str) or bare not in known:
        raise PlaybookError(f"unknown id {bullet_id!r}")
    return bare


def _join_equal(updates: Sequence[Update]) -> list[Update]:
    """One update for each content, reflection ids joined, the better supported first."""
    joined: dict[str, Update] = {}
    for update in updates:
        first = joined.get(update.content)
        reflections = join_ids(first.reflection_ids if first else (), update.reflection_ids)
        joined[update.content] = replace(update, reflection_ids=reflections)
    return sorted(
        joined.values(),
        key=lambda item: (len(item.reflection_ids), len(item.content), item.content),
        reverse=True,
    )


def _merge_support(merges: Mapping[int, Merge]) -> tuple[int, int, str, tuple[str, ...]]:
    """A sort key for equal MERGEs: more reflections, then more bullets; the rest only settles ties."""
    merge = next(iter(merges.values()))
    reflections = join_ids(*(item.reflection_ids for item in merges.values()))
    return len(reflections), len(merge.ids), merge.content, tuple(sorted(merge.ids))


def _folded(content: str) -> str:
    return " ".join(content.split())
