"""Delta operations on a playbook's bullets, and what happens when several of one batch touch the same bullet.

All deltas of a batch were proposed against the same playbook, so none of them knows what another does:

- UPDATE wins over REMOVE.
- Of several UPDATEs of one bullet with different contents the better supported one wins: more reflection ids, then
  the longer content, then the later in text order.
- MERGE over a bullet that is removed drops its id and rewrites what is left, even if that is one bullet. MERGE over a
  bullet that is updated, or that a better supported MERGE has taken, drops that id too; if fewer than two are
  left it does nothing, since those bullets live on elsewhere.
- An ADD of a content that is in the playbook already (white space aside) joins that bullet, and equal ADDs join each
  other: nothing is lost, so this is not a conflict.

Every delta of a batch ends up in exactly one place: applied, refused (it was not valid), or dropped by a conflict.
The order of the deltas in the batch decides nothing but the numbers of new ids and the order of reflection ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator

from dspy_combee.playbook.bullets import (
    DEFAULT_SECTION,
    Bullet,
    PlaybookError,
    bare_id,
    bullet_support,
    clean_ids,
    clean_text,
    find_section,
    join_ids,
    section_slug,
)
from dspy_combee.records.types import Plain


@dataclass(frozen=True)
class Add:
    """Add a bullet. A section spelled as ACE spells it (`formulas_and_calculations`) is recognized."""

    type: str = field(default="ADD", init=False, repr=False)
    section: str
    content: str
    reflection_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Update:
    """Give the bullet `id` a new content; its counters stay, its reflection ids grow."""

    type: str = field(default="UPDATE", init=False, repr=False)
    id: str
    content: str
    reflection_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Merge:
    """Replace several bullets by one, which keeps the id and section of the best supported; counters are summed."""

    type: str = field(default="MERGE", init=False, repr=False)
    ids: tuple[str, ...]
    content: str
    reflection_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Remove:
    """Remove the bullet `id`."""

    type: str = field(default="REMOVE", init=False, repr=False)
    id: str
    reason: str = ""
    reflection_ids: tuple[str, ...] = ()


Delta = Annotated[
    Add | Update | Merge | Remove,
    BeforeValidator(lambda value: delta_from(value) if isinstance(value, Mapping) else value),
]
"""Any of the four. Step records are read back with `delta_from`."""
_D = TypeVar("_D", Add, Update, Merge, Remove)
_MERGE_CONFLICTS = {Update: "merge_over_updated", Remove: "merge_over_removed", Merge: "merges"}


@dataclass(frozen=True)
class Applied:
    """Record a delta that took effect."""

    index: int
    """Its place in the batch."""
    delta: Delta
    bullet_id: str
    """The bullet that it made, changed, joined or removed."""


@dataclass(frozen=True)
class Refused:
    """Record a delta or tag that was not valid, as it was given."""

    index: int
    """Its place in the batch."""
    given: Plain
    reason: str


@dataclass(frozen=True)
class Conflict:
    """Record that deltas of one batch touched the same bullet."""

    kind: str
    """`"update_over_remove"`, `"updates"`, `"merge_over_removed"`, `"merge_over_updated"` or `"merges"`."""
    bullet_id: str
    kept: tuple[int, ...]
    """The places in the batch of the deltas that took effect."""
    dropped: tuple[int, ...]
    """The places of those that did not."""
    detail: str
    """How it was settled."""


def merged_ids(item: Applied, conflicts: Sequence[Conflict]) -> list[str]:
    """Return the bullets that a MERGE has made one, without those that another delta kept out of it."""
    if not isinstance(item.delta, Merge):
        return []
    kept_out = {
        found.bullet_id
        for found in conflicts
        if found.kind in _MERGE_CONFLICTS.values()
        and item.index in (*found.kept, *found.dropped)
        and found.kept[0] != item.index
    }
    return [bullet_id for bullet_id in item.delta.ids if bullet_id not in kept_out]


def delta_from(value: Mapping[str, Any]) -> Delta:
    """Read a delta from a curator's JSON: `{"type": "ADD", "section": ..., "content": ...}`.

    The operation may stand under `type`, `op` or `operation`, in any case; `bullet_id` may stand for `id`,
    `bullet_ids` for `ids`. Other keys are ignored. What is missing becomes empty, for `Playbook.apply` to refuse.

    Raises:
        PlaybookError: If the operation is none of ADD, UPDATE, MERGE and REMOVE.
    """
    operation = next((value[key] for key in ("type", "op", "operation") if key in value), None)
    name = operation.strip().upper() if isinstance(operation, str) else operation
    bullet_id = value.get("id", value.get("bullet_id", ""))
    content = value.get("content", "")
    reflections = _as_tuple(value.get("reflection_ids") or ())
    if name == "ADD":
        return Add(value.get("section", DEFAULT_SECTION), content, reflections)
    if name == "UPDATE":
        return Update(bullet_id, content, reflections)
    if name == "MERGE":
        return Merge(_as_tuple(value.get("ids", value.get("bullet_ids", ()))), content, reflections)
    if name == "REMOVE":
        return Remove(bullet_id, value.get("reason", ""), reflections)
    raise PlaybookError(f"unknown operation {operation!r}; known are ADD, UPDATE, MERGE and REMOVE")


def check_delta(delta: Any, known: Mapping[str, Bullet]) -> Delta:
    """Return a delta (or one that `delta_from` reads from a mapping) with its texts and ids cleaned.

    Raises:
        PlaybookError: If it cannot be applied to the `known` bullets, which are given by id.
    """
    if isinstance(delta, Mapping):
        delta = delta_from(delta)
    if not isinstance(delta, Add | Update | Merge | Remove):
        raise PlaybookError(f"a delta is an Add, Update, Merge or Remove, not {type(delta).__name__}")
    clean: dict[str, Any] = {"reflection_ids": clean_ids(delta.reflection_ids)}
    if not isinstance(delta, Remove):
        clean["content"] = clean_text(delta.content, "the content")
        if not delta.content.strip():
            raise PlaybookError("the content is empty")
    if isinstance(delta, Add):
        clean["section"] = clean_text(delta.section, "the section")
    elif isinstance(delta, Merge):
        if isinstance(delta.ids, str) or not isinstance(delta.ids, Iterable):
            raise PlaybookError(f"the ids of a MERGE are a list, not {delta.ids!r}")
        clean["ids"] = tuple(dict.fromkeys(_check_id(bullet_id, known) for bullet_id in delta.ids))
        if len(clean["ids"]) < 2:
            raise PlaybookError(f"a MERGE needs two different ids, not {list(clean['ids'])}")
    else:
        clean["id"] = _check_id(delta.id, known)
    return replace(delta, **clean)


def identity(delta: Delta) -> Any:
    """Return a key that is equal for deltas that do the same, whatever their reasons and reflections."""
    if isinstance(delta, Remove):
        return Remove, delta.id
    content = " ".join(delta.content.split()) if isinstance(delta, Add) else delta.content
    return type(delta), frozenset(touched_ids(delta)), content


def touched_ids(delta: Delta) -> tuple[str, ...]:
    """Return the ids of the bullets that a delta changes or removes."""
    if isinstance(delta, Merge):
        return delta.ids
    return () if isinstance(delta, Add) else (delta.id,)


class Batch:
    """Apply one batch of deltas to a playbook's bullets; used once."""

    def __init__(self, sections: Iterable[str], bullets: Iterable[Bullet], next_number: int) -> None:
        self.sections = list(sections)
        self.bullets = {bullet.id: bullet for bullet in bullets}
        self.next_number = next_number
        self.applied: list[Applied] = []
        self.refused: list[Refused] = []
        self.conflicts: list[Conflict] = []
        self._equal: dict[Any, dict[int, Delta]] = {}

    def run(self, deltas: Iterable[Any]) -> None:
        """Apply the deltas: equal ones are treated as one, and additions come last."""
        for index, given in enumerate(deltas):
            try:
                delta = check_delta(given, self.bullets)
                self._equal.setdefault(identity(delta), {})[index] = delta
            except PlaybookError as error:
                self.refused.append(Refused(index, given, str(error)))
        removed = {remove.id: remove for remove in self._all(Remove)}
        updated = self._apply_updates(removed)
        self._apply_merges(updated, removed)
        for bullet_id, remove in removed.items():
            if bullet_id not in updated:
                self.bullets.pop(bullet_id, None)
                self._record(remove, bullet_id)
        self._apply_adds()
        self.applied.sort(key=lambda item: item.index)

    def _all(self, kind: type[_D]) -> list[_D]:
        """Return the deltas of a kind, equal ones as one that has the reflections of all."""
        groups = [list(group.values()) for group in self._equal.values()]
        return [
            replace(group[0], reflection_ids=join_ids(*(delta.reflection_ids for delta in group)))
            for group in groups
            if isinstance(group[0], kind)
        ]

    def _record(self, delta: Delta, bullet_id: str) -> None:
        self.applied += [Applied(index, item, bullet_id) for index, item in self._equal[identity(delta)].items()]

    def _places(self, deltas: Iterable[Delta]) -> tuple[int, ...]:
        return tuple(index for delta in deltas for index in self._equal[identity(delta)])

    def _conflict(self, kind: str, bullet_id: str, kept: Sequence[Delta], dropped: Sequence[Delta], how: str) -> None:
        self.conflicts.append(Conflict(kind, bullet_id, self._places(kept), self._places(dropped), how))

    def _rewrite(self, bullet: Bullet, delta: Update | Merge) -> None:
        reflections = join_ids(bullet.reflection_ids, delta.reflection_ids)
        self.bullets[bullet.id] = replace(bullet, content=delta.content, reflection_ids=reflections)
        self._record(delta, bullet.id)

    def _apply_updates(self, removed: Mapping[str, Remove]) -> dict[str, Update]:
        """Apply the best supported UPDATE of each bullet, and return it."""
        rivals: dict[str, list[Update]] = {}
        for update in sorted(self._all(Update), key=_support, reverse=True):
            rivals.setdefault(update.id, []).append(update)
        for bullet_id, (best, *others) in rivals.items():
            if others:
                self._conflict("updates", bullet_id, [best], others, "the better supported one wins")
            if bullet_id in removed:
                self._conflict("update_over_remove", bullet_id, [best], [removed[bullet_id]], "UPDATE wins")
            self._rewrite(self.bullets[bullet_id], best)
        return {bullet_id: updates[0] for bullet_id, updates in rivals.items()}

    def _apply_merges(self, updated: Mapping[str, Update], removed: Mapping[str, Remove]) -> None:
        taken: dict[str, Merge] = {}
        for merge in sorted(self._all(Merge), key=_support, reverse=True):
            rivals: dict[str, Delta] = {**taken, **removed, **updated}
            lost = [rivals[bullet_id] for bullet_id in merge.ids if bullet_id in rivals]
            left = [bullet_id for bullet_id in merge.ids if bullet_id not in rivals]
            works = len(left) > 1 or (len(left) == 1 and all(isinstance(rival, Remove) for rival in lost))
            detail = f"MERGE over [{', '.join(left)}], which is left" if works else "too few left for a MERGE"
            for bullet_id in merge.ids:
                if rival := rivals.get(bullet_id):
                    kept, dropped = ([rival, merge], []) if works else ([rival], [merge])
                    self._conflict(_MERGE_CONFLICTS[type(rival)], bullet_id, kept, dropped, detail)
            if works:
                taken.update(dict.fromkeys(left, merge))
                members = [bullet for bullet in self.bullets.values() if bullet.id in left]
                united = unite(max(members, key=bullet_support), members)
                for bullet_id in left:
                    if bullet_id != united.id:
                        del self.bullets[bullet_id]
                self._rewrite(united, merge)

    def _apply_adds(self) -> None:
        present = {identity(Add("", bullet.content)): bullet for bullet in reversed(self.bullets.values())}
        for add in self._all(Add):
            bullet = present.get(identity(add))
            if bullet is None:
                section = find_section(add.section, self.sections)
                if section not in self.sections:
                    self.sections.append(section)
                bullet = Bullet(self._new_id(section), section, add.content)
            reflections = join_ids(bullet.reflection_ids, add.reflection_ids)
            self.bullets[bullet.id] = replace(bullet, reflection_ids=reflections)
            self._record(add, bullet.id)

    def _new_id(self, section: str) -> str:
        while True:
            bullet_id = f"{section_slug(section)}-{self.next_number:05d}"
            self.next_number += 1
            if bullet_id not in self.bullets:
                return bullet_id


def unite(first: Bullet, bullets: Sequence[Bullet]) -> Bullet:
    """Return `first` with the counters and reflection ids of all `bullets`, itself included."""
    return replace(
        first,
        helpful=sum(bullet.helpful for bullet in bullets),
        harmful=sum(bullet.harmful for bullet in bullets),
        reflection_ids=join_ids(*(bullet.reflection_ids for bullet in bullets)),
    )


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_id(bullet_id: Any, known: Mapping[str, Bullet]) -> str:
    bare = bare_id(bullet_id)
    if bare is None or bare not in known:
        raise PlaybookError(f"unknown id {bullet_id!r}")
    return bare


def _support(delta: Update | Merge) -> tuple[int, int, str, list[str]]:
    """Return a sort key: more reflections, then more bullets or a longer content; the rest only settles ties."""
    size = len(delta.ids) if isinstance(delta, Merge) else len(delta.content)
    return len(delta.reflection_ids), size, delta.content, sorted(touched_ids(delta))
