"""Several lists of deltas made one: what needs no language model, and what a language model may decide.

Equal deltas and near-identical ADDs are united, their reflection ids joined. What is left is a matter for the merge
call only where deltas are *related*: ADDs that resemble each other, UPDATEs of one bullet with different contents,
a MERGE that another delta gets in the way of. The reply can say that an ADD is covered, by a bullet or by another
ADD that it names; that UPDATEs are combined; that one side of a conflict is dropped. Whatever it does not mention
stays, and what it says of names that nobody knows is refused: forgetting something cannot lose it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dspy_combee.playbook import Playbook
from dspy_combee.playbook.bullets import Bullet, join_ids
from dspy_combee.playbook.deltas import Add, Delta, Merge, Refused, Remove, Update
from dspy_combee.playbook.near_duplicates import EmbeddingCosine, NearDuplicates, TokenJaccard, profile
from dspy_combee.playbook.pruning import unite_adds
from dspy_combee.records.secrecy import shorten

logger = logging.getLogger("dspy_combee")

RELATED = 0.5
"""ADDs whose content words have at least this Jaccard similarity may say the same, and are asked about, unless each has
a key token (a number, a negation, a symbol; see `playbook.near_duplicates`) that the other lacks: two lessons."""


class EmbedderOrTokens:
    """Near-duplicates by an embedder; by their tokens, the stricter rule, when the embedder fails.

    Args:
        embedder: From a list of texts to vectors.
    """

    def __init__(self, embedder: Callable[[list[str]], Any]) -> None:
        self.by_embedding = EmbeddingCosine(embedder)
        self.by_tokens = TokenJaccard()
        self._warned = False

    def leaders(self, texts: Sequence[str]) -> list[int]:
        """See `NearDuplicates.leaders`."""
        try:
            return self.by_embedding.leaders(texts)
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "The embedder failed (%s: %s): near-duplicates are told by their tokens until it works. (Once.)",
                    type(error).__name__,
                    shorten(str(error)),
                )
            return self.by_tokens.leaders(texts)


@dataclass(frozen=True)
class Relation:
    """Deltas that have to do with each other.

    Attributes:
        kind: `"similar additions"`, `"updates of one bullet"` or `"operations on the same bullets"`.
        places: Their places in the list.
    """

    kind: str
    places: tuple[int, ...]


@dataclass(frozen=True)
class Decided:
    """What a merge reply came to.

    Attributes:
        deltas: The deltas that are left.
        refused: Decisions that were not followed, and why.
    """

    deltas: tuple[Delta, ...]
    refused: tuple[Refused, ...]


def unite_deltas(deltas: Sequence[Delta], near_duplicates: NearDuplicates) -> list[Delta]:
    """Equal deltas and near-identical ADDs made one, reflection ids joined, in the order of first appearance."""
    adds = [(place, delta) for place, delta in enumerate(deltas) if isinstance(delta, Add)]
    united: list[tuple[int, Delta]] = [
        (min(adds[index][0] for index in item.indices), item.add)
        for item in unite_adds([add for _, add in adds], near_duplicates)
    ]
    others: dict[Any, tuple[int, Delta]] = {}
    for place, delta in enumerate(deltas):
        if isinstance(delta, Add):
            continue
        first = others.setdefault(_identity(delta), (place, delta))
        joined = join_ids(first[1].reflection_ids, delta.reflection_ids)
        others[_identity(delta)] = (first[0], replace(first[1], reflection_ids=joined))
    return [delta for _, delta in sorted([*united, *others.values()], key=lambda item: item[0])]


def covering_bullets(deltas: Sequence[Delta], playbook: Playbook, near_duplicates: NearDuplicates) -> dict[int, Bullet]:
    """For each ADD that a bullet says already (a near-duplicate that no delta touches): its place, and that bullet."""
    touched = touched_ids(deltas)
    standing = [bullet for bullet in playbook if bullet.id not in touched]
    adds = [(place, delta) for place, delta in enumerate(deltas) if isinstance(delta, Add)]
    if not standing or not adds:
        return {}
    contents = [bullet.content for bullet in standing] + [add.content for _, add in adds]
    leaders = near_duplicates.leaders(contents)
    found = zip(adds, leaders[len(standing) :], strict=True)
    return {place: standing[leader] for (place, _), leader in found if leader < len(standing)}


def settle(deltas: Sequence[Delta], playbook: Playbook, near_duplicates: NearDuplicates) -> list[Delta]:
    """The deltas as they are to be applied: united, and an ADD that a bullet says already in that bullet's words.

    Applying such an ADD joins its reflection ids to the bullet.
    """
    united = unite_deltas(deltas, near_duplicates)
    for place, bullet in covering_bullets(united, playbook, near_duplicates).items():
        united[place] = _joining(united[place], bullet)
    return united


def find_relations(deltas: Sequence[Delta], covered: Collection[int] = ()) -> list[Relation]:
    """What a merge call has to decide about a united list; nothing where all can stand side by side.

    An UPDATE beside a REMOVE is none of it: UPDATE wins.

    Args:
        deltas: The list.
        covered: Places of ADDs that a bullet says already.
    """
    adds = [place for place, delta in enumerate(deltas) if isinstance(delta, Add) and place not in covered]
    profiles = {place: profile(_content(deltas[place])) for place in adds}
    words = {place: frozenset(item.content) for place, item in profiles.items()}
    keys = {place: frozenset(item.keys) for place, item in profiles.items()}
    pairs = [
        (one, other)
        for index, one in enumerate(adds)
        for other in adds[index + 1 :]
        if len(words[one] & words[other]) >= RELATED * len(words[one] | words[other]) > 0
        and (keys[one] <= keys[other] or keys[other] <= keys[one])
    ]
    relations = [Relation("similar additions", group) for group in _groups(pairs)]
    users: dict[str, list[int]] = {}
    for place, delta in enumerate(deltas):
        for bullet_id in _touched(delta):
            users.setdefault(bullet_id, []).append(place)
    clashes: list[tuple[int, int]] = []
    for places in users.values():
        merged = any(isinstance(deltas[place], Merge) for place in places)
        clashing = places if merged else [place for place in places if isinstance(deltas[place], Update)]
        clashes += [(clashing[0], place) for place in clashing[1:]]
    for group in _groups(clashes):
        only_updates = all(isinstance(deltas[place], Update) for place in group)
        kind = "updates of one bullet" if only_updates else "operations on the same bullets"
        relations.append(Relation(kind, group))
    return relations


def has_rival_updates(deltas: Sequence[Delta]) -> bool:
    """Whether UPDATEs of one bullet differ."""
    updates = {(delta.id, delta.content) for delta in deltas if isinstance(delta, Update)}
    return len(updates) > len({bullet_id for bullet_id, _ in updates})


def touched_ids(deltas: Sequence[Delta]) -> set[str]:
    """The bullets that the deltas change or remove."""
    return {bullet_id for delta in deltas for bullet_id in _touched(delta)}


class DecisionReader:
    """Follows the decisions of a merge reply, one after the other.

    Args:
        deltas: The united list.
        relations: What was asked.
        playbook: The playbook that the deltas are for.
    """

    def __init__(self, deltas: Sequence[Delta], relations: Sequence[Relation], playbook: Playbook) -> None:
        self.deltas = list(deltas)
        self.relations = relations
        self.playbook = playbook
        self.touched = touched_ids(deltas)
        self.keys = {f"d{place}": place for relation in relations for place in relation.places}
        self._gone: set[int] = set()
        self._covers: dict[int, int] = {}

    def read(self, decisions: Sequence[Any]) -> Decided:
        """Follow what can be followed.

        Args:
            decisions: Mappings with a `type` (`COVERED`, `COMBINE`, `DROP`, `KEEP`), `deltas` (their keys) and, by
                type, `by` or `content`.
        """
        refused = []
        for index, decision in enumerate(decisions):
            problem = self._follow(decision)
            if problem:
                refused.append(Refused(index, decision, problem))
        left = [delta for place, delta in enumerate(self.deltas) if place not in self._gone]
        return Decided(tuple(left), tuple(refused))

    def _follow(self, decision: Any) -> str:
        """Follow one decision; why not, where it cannot be followed."""
        if not isinstance(decision, Mapping):
            return "a decision is a JSON object"
        kind = str(decision.get("type", "")).strip().upper()
        given = decision.get("deltas")
        names = [given] if isinstance(given, str) else given
        if not isinstance(names, list) or not names:
            return "it names no delta"
        places = []
        for name in names:
            place = self.keys.get(name.strip()) if isinstance(name, str) else None
            if place is None:
                return f"unknown delta {name!r}"
            if place in self._gone:
                return f"delta {name!r} is gone already"
            places.append(place)
        places = list(dict.fromkeys(places))
        if kind == "KEEP":
            return ""
        if kind == "COVERED":
            return self._cover(places, decision.get("by"))
        if kind == "COMBINE":
            return self._combine(places, decision.get("content"))
        return self._drop(places) if kind == "DROP" else f"unknown decision {decision.get('type')!r}"

    def _cover(self, places: Sequence[int], by: Any) -> str:
        if not all(isinstance(self.deltas[place], Add) for place in places):
            return "only an ADD can be covered"
        name = by.strip().removeprefix("[").removesuffix("]") if isinstance(by, str) else by
        if name in self.keys:
            return self._cover_by_add(places, self._last_cover(self.keys[name]))
        bullet = self.playbook.get(name) if isinstance(name, str) else None
        if bullet is None:
            return f"what should cover it is unknown: {by!r}"
        if bullet.id in self.touched:
            return f"[{bullet.id}] is itself changed by a delta"
        for place in places:
            self.deltas[place] = _joining(self.deltas[place], bullet)
        return ""

    def _cover_by_add(self, places: Sequence[int], first: int) -> str:
        cover = self.deltas[first]
        if not isinstance(cover, Add) or first in self._gone:
            return "an ADD is covered by a bullet or by an ADD that stays"
        if first in places:
            return "an ADD cannot cover itself"
        reflections = join_ids(cover.reflection_ids, *(self.deltas[place].reflection_ids for place in places))
        self.deltas[first] = replace(cover, reflection_ids=reflections)
        self._gone.update(places)
        self._covers.update(dict.fromkeys(places, first))
        return ""

    def _last_cover(self, place: int) -> int:
        while place in self._covers:
            place = self._covers[place]
        return place

    def _combine(self, places: Sequence[int], content: Any) -> str:
        if not isinstance(content, str) or not content.strip():
            return "the combined content is empty"
        chosen = [self.deltas[place] for place in places]
        updates = [delta for delta in chosen if isinstance(delta, Update)]
        if len(updates) != len(places) or len(updates) < 2 or len({update.id for update in updates}) > 1:
            return "only several UPDATEs of one bullet are combined"
        reflections = join_ids(*(update.reflection_ids for update in updates))
        self.deltas[places[0]] = Update(updates[0].id, content, reflections)
        self._gone.update(places[1:])
        return ""

    def _drop(self, places: Sequence[int]) -> str:
        if any(isinstance(self.deltas[place], Add) for place in places):
            return "an ADD goes only if something is named that covers it"
        gone = self._gone.union(places)
        if any(gone.issuperset(relation.places) for relation in self.relations):
            return "one of those in a conflict has to stay"
        self._gone = gone
        return ""


def _joining(delta: Delta, bullet: Bullet) -> Delta:
    """An ADD of what the bullet says: nothing new, the reflection ids go to the bullet."""
    return Add(bullet.section, bullet.content, delta.reflection_ids)


def _touched(delta: Delta) -> tuple[str, ...]:
    if isinstance(delta, Merge):
        return delta.ids
    return () if isinstance(delta, Add) else (delta.id,)


def _identity(delta: Delta) -> Any:
    if isinstance(delta, Merge):
        return Merge, frozenset(delta.ids), delta.content
    if isinstance(delta, Update):
        return Update, delta.id, delta.content
    return type(delta), _touched(delta)


def _content(delta: Delta) -> str:
    return "" if isinstance(delta, Remove) else delta.content


def _groups(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The connected groups of places, each sorted, by their first place."""
    group_of: dict[int, set[int]] = {}
    for pair in pairs:
        joined: set[int] = set().union(*(group_of.get(place, {place}) for place in pair))
        group_of.update(dict.fromkeys(joined, joined))
    return sorted({tuple(sorted(group)) for group in group_of.values()})
