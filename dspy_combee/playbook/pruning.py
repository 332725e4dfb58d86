"""Making a playbook smaller: near-duplicates are united, then bullets go until the token budget holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dspy_combee.playbook.bullets import Bullet, bullet_support, join_ids
from dspy_combee.playbook.deltas import Add
from dspy_combee.playbook.near_duplicates import NearDuplicates, profile


@dataclass(frozen=True)
class Pruned:
    """A bullet that left a playbook.

    Attributes:
        bullet: As it was.
        reason: `"near-duplicate"`, `"harmful"` (tagged harmful more often than helpful) or `"least used"`.
        into: The id of the bullet that it was united into; None for the other reasons.
    """

    bullet: Bullet
    reason: str
    into: str | None = None


@dataclass(frozen=True)
class UnitedAdd:
    """An ADD that stands for one or several of a batch; `indices` are their places in it, its own first."""

    add: Add
    indices: tuple[int, ...]


def estimate_tokens(text: str) -> int:
    """The estimated number of tokens of `text`: a quarter of its bytes in UTF-8, rounded up.

    It needs no tokenizer and errs by up to a third for English; texts in other scripts take more bytes and more
    tokens per character alike.
    """
    return -(-len(text.encode("utf-8", "replace")) // 4)


def unite_bullets(bullets: Sequence[Bullet], near_duplicates: NearDuplicates) -> tuple[list[Bullet], list[Pruned]]:
    """Unite near-duplicates: the better supported content stays, counters are summed, reflection ids joined."""
    ranked = sorted(bullets, key=bullet_support, reverse=True)
    leaders = near_duplicates.leaders([bullet.content for bullet in ranked])
    kept = {bullet.id: bullet for bullet, leader in zip(ranked, leaders, strict=True) if bullet is ranked[leader]}
    pruned = []
    for bullet, leader in zip(ranked, leaders, strict=True):
        first = kept[ranked[leader].id]
        if bullet.id == first.id:
            continue
        kept[first.id] = replace(
            first,
            helpful=first.helpful + bullet.helpful,
            harmful=first.harmful + bullet.harmful,
            reflection_ids=join_ids(first.reflection_ids, bullet.reflection_ids),
        )
        pruned.append(Pruned(bullet, "near-duplicate", first.id))
    return [kept[bullet.id] for bullet in bullets if bullet.id in kept], pruned


def prune(
    bullets: Sequence[Bullet],
    budget: int,
    count: Callable[[Sequence[Bullet]], int],
    near_duplicates: NearDuplicates,
) -> tuple[list[Bullet], list[Pruned]]:
    """Take bullets away until the rest fits, in three steps, each only if the one before was not enough.

    All near-duplicates are united; all bullets with more harmful than helpful tags go; then the least used go, no
    more than needed: fewest tags first, then fewest helpful ones, fewest reflections, and of those still equal the
    older one, which has had more time to be of use.

    Args:
        bullets: Those of a playbook.
        budget: The most tokens that `count` may give for what is left.
        count: The number of tokens of the playbook with these bullets.
        near_duplicates: Decides which are united.

    Returns:
        What is left, in the order given, and what went.
    """
    kept = list(bullets)
    if count(kept) <= budget:
        return kept, []
    kept, pruned = unite_bullets(kept, near_duplicates)
    if count(kept) <= budget:
        return kept, pruned
    pruned += [Pruned(bullet, "harmful") for bullet in kept if bullet.harmful > bullet.helpful]
    kept = [bullet for bullet in kept if bullet.harmful <= bullet.helpful]
    order = sorted(kept, key=_use)
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if count(_without(kept, order[:middle])) <= budget:
            high = middle
        else:
            low = middle + 1
    return _without(kept, order[:low]), pruned + [Pruned(bullet, "least used") for bullet in order[:low]]


def unite_adds(adds: Sequence[Add], near_duplicates: NearDuplicates) -> list[UnitedAdd]:
    """Unite near-identical ADDs of a batch, reflection ids joined; in order of first appearance.

    The content with most words stays, and so with `TokenJaccard` every content word of those united into it.
    """
    words = [len(profile(add.content).content) for add in adds]
    ranked = sorted(
        range(len(adds)),
        key=lambda index: (-words[index], -len(adds[index].content), adds[index].content, index),
    )
    leaders = near_duplicates.leaders([adds[index].content for index in ranked])
    groups: dict[int, list[int]] = {}
    for index, leader in zip(ranked, leaders, strict=True):
        groups.setdefault(ranked[leader], []).append(index)
    united = []
    for first, members in groups.items():
        reflections = join_ids(*(adds[index].reflection_ids for index in sorted(members)))
        rest = sorted(index for index in members if index != first)
        united.append(UnitedAdd(replace(adds[first], reflection_ids=reflections), (first, *rest)))
    return sorted(united, key=lambda item: min(item.indices))


def _without(bullets: Sequence[Bullet], gone: Sequence[Bullet]) -> list[Bullet]:
    ids = {bullet.id for bullet in gone}
    return [bullet for bullet in bullets if bullet.id not in ids]


def _use(bullet: Bullet) -> tuple[int, int, int, int]:
    return bullet.helpful + bullet.harmful, bullet.helpful, len(bullet.reflection_ids), bullet.number
