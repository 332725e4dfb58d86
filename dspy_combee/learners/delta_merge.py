"""Merging several lists of deltas: what needs no language model, and what a language model may decide.

Equal deltas and near-identical ADDs are united, and their reflection ids joined. Of the rest, a merge call is asked
only about deltas that are *related*: ADDs that resemble each other, UPDATEs of one bullet with different contents, a
MERGE that conflicts with another delta. The reply can say that an ADD is covered, by a bullet or by another ADD that it
names; that UPDATEs are combined; that one side of a conflict is dropped. Whatever it does not mention stays, and
decisions about unknown names are refused: an omission in the reply cannot lose a lesson.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

from dspy_combee.playbook import Add, Bullet, Merge, Playbook, PlaybookError, Refused, Update
from dspy_combee.playbook.bullets import bare_id, join_ids
from dspy_combee.playbook.deltas import Delta, identity, touched_ids
from dspy_combee.playbook.pruning import PUNCTUATION, NearDuplicates, fold, telling_words

RELATED = 0.5
"""The least Jaccard similarity of the words of two ADDs that a merge call is asked about. It is not asked where each
has a telling word (a number, a negation, a symbol; see `playbook.pruning`) that the other lacks: two lessons."""


class Relation(NamedTuple):
    """Hold the places of deltas in a list that have to do with each other."""

    kind: str
    """`"similar additions"`, `"updates of one bullet"` or `"operations on the same bullets"`."""
    places: tuple[int, ...]


def unite_deltas(deltas: Sequence[Delta], near_duplicates: NearDuplicates) -> list[Delta]:
    """Unite equal deltas and near-identical ADDs, joining their reflection ids, in the order of first appearance.

    Of near-identical ADDs the longest one stays.
    """
    adds = {place: delta.content for place, delta in enumerate(deltas) if isinstance(delta, Add)}
    ranked = sorted(adds, key=lambda place: (-len(adds[place]), adds[place], place))
    leaders = near_duplicates([adds[place] for place in ranked])
    leader_of = {place: ranked[leader] for place, leader in zip(ranked, leaders, strict=True)}
    groups: dict[Any, list[int]] = {}
    for place, delta in enumerate(deltas):
        groups.setdefault(leader_of.get(place, identity(delta)), []).append(place)
    return [
        replace(
            deltas[leader_of.get(places[0], places[0])],
            reflection_ids=join_ids(*(deltas[place].reflection_ids for place in places)),
        )
        for places in groups.values()
    ]


def covering_bullets(deltas: Sequence[Delta], playbook: Playbook, near_duplicates: NearDuplicates) -> dict[int, Bullet]:
    """Map the places of ADDs to the bullets that say the same already, except bullets that a delta touches."""
    touched = {bullet_id for delta in deltas for bullet_id in touched_ids(delta)}
    standing = [bullet for bullet in playbook if bullet.id not in touched]
    adds = {place: delta.content for place, delta in enumerate(deltas) if isinstance(delta, Add)}
    if not standing or not adds:
        return {}
    leaders = near_duplicates([*(bullet.content for bullet in standing), *adds.values()])
    found = zip(adds, leaders[len(standing) :], strict=True)
    return {place: standing[leader] for place, leader in found if leader < len(standing)}


def settle(deltas: Sequence[Delta], playbook: Playbook, near_duplicates: NearDuplicates) -> list[Delta]:
    """Unite the deltas, and put ADDs that a bullet covers in the bullet's own words.

    Applying such an ADD joins its reflection ids to the bullet.
    """
    united = unite_deltas(deltas, near_duplicates)
    for place, bullet in covering_bullets(united, playbook, near_duplicates).items():
        united[place] = _joining(united[place], bullet)
    return united


def find_relations(deltas: Sequence[Delta], covered: Collection[int] = ()) -> list[Relation]:
    """Find what a merge call has to decide about a united list; nothing if all its deltas can be applied together.

    An UPDATE and a REMOVE of one bullet need no decision: UPDATE wins.

    Args:
        deltas: The list.
        covered: Places of ADDs that a bullet covers.
    """
    adds = {
        place: (set(fold(delta.content)) - PUNCTUATION, set(telling_words(delta.content)))
        for place, delta in enumerate(deltas)
        if isinstance(delta, Add) and place not in covered
    }
    pairs = [
        (one, other)
        for (one, (words, telling)), (other, (other_words, other_telling)) in combinations(adds.items(), 2)
        if (shared := len(words & other_words)) >= RELATED * (len(words) + len(other_words) - shared) > 0
        and (telling <= other_telling or other_telling <= telling)
    ]
    users: dict[str, list[int]] = {}
    for place, delta in enumerate(deltas):
        for bullet_id in touched_ids(delta):
            users.setdefault(bullet_id, []).append(place)
    clashes = []
    for places in users.values():
        merged = any(isinstance(deltas[place], Merge) for place in places)
        clashes.append([place for place in places if merged or isinstance(deltas[place], Update)])
    relations = [Relation("similar additions", group) for group in _connected(pairs)]
    for group in _connected(clashes):
        only_updates = all(isinstance(deltas[place], Update) for place in group)
        relations.append(Relation("updates of one bullet" if only_updates else "operations on the same bullets", group))
    return relations


def has_rival_updates(deltas: Sequence[Delta]) -> bool:
    """Tell whether there are different UPDATEs of one bullet."""
    updates = {(delta.id, delta.content) for delta in deltas if isinstance(delta, Update)}
    return len(updates) > len({bullet_id for bullet_id, _ in updates})


class DecisionReader:
    """Follow the decisions of a merge reply, one after the other."""

    def __init__(self, deltas: Sequence[Delta], relations: Sequence[Relation], playbook: Playbook) -> None:
        self.deltas = list(deltas)
        self.relations = relations
        self.playbook = playbook
        self.keys = {f"d{place}": place for relation in relations for place in relation.places}
        self._gone: set[int] = set()
        self._covers: dict[int, int] = {}

    def read(self, decisions: Sequence[Any]) -> tuple[tuple[Delta, ...], tuple[Refused, ...]]:
        """Follow what can be followed.

        Args:
            decisions: Mappings with a `type` (`COVERED`, `COMBINE`, `DROP`, `KEEP`), `deltas` (their keys) and, by
                type, `by` or `content`.

        Returns:
            The deltas that are left, and the decisions that were not followed.
        """
        refused = []
        for index, decision in enumerate(decisions):
            try:
                self._follow(decision)
            except PlaybookError as error:
                refused.append(Refused(index, decision, str(error)))
        left = (delta for place, delta in enumerate(self.deltas) if place not in self._gone)
        return tuple(left), tuple(refused)

    def _follow(self, decision: Any) -> None:
        if not isinstance(decision, Mapping):
            raise PlaybookError("a decision is a JSON object")
        places = self._read_keys(decision.get("deltas"))
        kind = str(decision.get("type", "")).strip().upper()
        if kind == "COVERED":
            self._cover(places, decision.get("by"))
        elif kind == "COMBINE":
            self._combine(places, decision.get("content"))
        elif kind == "DROP":
            self._drop(places)
        elif kind != "KEEP":
            raise PlaybookError(f"unknown decision {decision.get('type')!r}")

    def _read_keys(self, given: Any) -> list[int]:
        names = [given] if isinstance(given, str) else given
        if not isinstance(names, list) or not names:
            raise PlaybookError("it names no delta")
        places: dict[int, None] = {}
        for name in names:
            place = self.keys.get(name.strip()) if isinstance(name, str) else None
            if place is None:
                raise PlaybookError(f"unknown delta {name!r}")
            if place in self._gone:
                raise PlaybookError(f"delta {name!r} is gone already")
            places[place] = None
        return list(places)

    def _cover(self, places: Sequence[int], by: Any) -> None:
        if not all(isinstance(self.deltas[place], Add) for place in places):
            raise PlaybookError("only an ADD can be covered")
        name = bare_id(by) or ""
        if name in self.keys:
            self._cover_by_add(places, self.keys[name])
            return
        bullet = self.playbook.get(name)
        if bullet is None:
            raise PlaybookError(f"what should cover it is unknown: {by!r}")
        if any(bullet.id in touched_ids(delta) for delta in self.deltas):
            raise PlaybookError(f"[{bullet.id}] is itself changed by a delta")
        for place in places:
            self.deltas[place] = _joining(self.deltas[place], bullet)

    def _cover_by_add(self, places: Sequence[int], first: int) -> None:
        while first in self._covers:
            first = self._covers[first]
        cover = self.deltas[first]
        if not isinstance(cover, Add) or first in self._gone:
            raise PlaybookError("an ADD is covered by a bullet or by an ADD that stays")
        if first in places:
            raise PlaybookError("an ADD cannot cover itself")
        reflections = join_ids(cover.reflection_ids, *(self.deltas[place].reflection_ids for place in places))
        self.deltas[first] = replace(cover, reflection_ids=reflections)
        self._gone.update(places)
        self._covers.update(dict.fromkeys(places, first))

    def _combine(self, places: Sequence[int], content: Any) -> None:
        if not isinstance(content, str) or not content.strip():
            raise PlaybookError("the combined content is empty")
        updates = [delta for delta in (self.deltas[place] for place in places) if isinstance(delta, Update)]
        if not 2 <= len(updates) == len(places) or len({update.id for update in updates}) > 1:
            raise PlaybookError("only several UPDATEs of one bullet are combined")
        reflections = join_ids(*(update.reflection_ids for update in updates))
        self.deltas[places[0]] = Update(updates[0].id, content, reflections)
        self._gone.update(places[1:])

    def _drop(self, places: Sequence[int]) -> None:
        if any(isinstance(self.deltas[place], Add) for place in places):
            raise PlaybookError("an ADD goes only if something is named that covers it")
        gone = self._gone.union(places)
        if any(gone.issuperset(relation.places) for relation in self.relations):
            raise PlaybookError("one of those in a conflict has to stay")
        self._gone = gone


def _joining(delta: Delta, bullet: Bullet) -> Delta:
    """Return an ADD that adds nothing but the reflection ids of `delta` to the bullet."""
    return Add(bullet.section, bullet.content, delta.reflection_ids)


def _connected(groups: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """Join the groups that overlap, and return those of several places, each sorted."""
    found: list[set[int]] = []
    for group in groups:
        joined = set(group).union(*(other for other in found if not other.isdisjoint(group)))
        found = [*(other for other in found if other.isdisjoint(joined)), joined]
    return sorted(tuple(sorted(places)) for places in found if len(places) > 1)
