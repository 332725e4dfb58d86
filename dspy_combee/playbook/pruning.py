"""Making a playbook smaller: near-duplicates are united, then bullets go until the token budget holds.

To keep a duplicate costs a few tokens, to unite two different lessons loses one. So the rules are strict. `same_words`
takes texts for near-duplicates if they have the same words and symbols in the same order, once case, plurals, past
tenses, articles, a few words of emphasis and the punctuation at the end are taken off: "Always check the units before
adding!" and "Check unit before adding" unite, "a rate of 5 %" and "a rate of 6 %" stay apart. `EmbeddingCosine` lets
an embedder judge, and keeps texts apart that differ in a *telling* word: a number, a name, a symbol, a negation, a
direction, or any word with a letter outside ASCII.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dspy_combee.playbook.bullets import Bullet, bullet_number, bullet_support
from dspy_combee.playbook.deltas import unite
from dspy_combee.records.secrets import shorten

logger = logging.getLogger("dspy_combee")

NearDuplicates = Callable[[Sequence[str]], list[int]]
"""Decides which texts are united. It gets them in order of preference and gives, for each, the index of the text that
it is united into: one that comes earlier and stays, or itself."""

_TOKEN = re.compile(r"\w+(?:['.,:/-]\w+)*|[^\w\s]")
_END = re.compile(r"(?<=\w{3})[!?]+$|[.,;:]+$")
_ENDING = re.compile(r"(?<=[a-z]{3}[b-hj-rtv-z])s$|(?<=[a-z]{4})ed$")
_EMPTY = frozenset({"a", "an", "the", "is", "are", "be", "its", "please", "always", "carefully"})
_TELLING = re.compile(
    "no|not|none|never|nor|neither|nothing|without|avoid|except|unless|only|instead|rather|cannot|if|or|either|both|any|all"
    "|nicht|kein.*|nie|ohne|ne|pas|jamais|sans|nunca|sin|non|mai|senza|niet|geen"
    "|than|from|to|by|per|off|out|until|while|before|after|during|up|down|above|below|over|under|more|most|less|least"
    "|fewer|few|first|last|once|twice|zero|one|two|three|half|double|million|billion|thousand|percent"
    "|max|min|(?:max|min)im.+|(?:in|ex)clu.+|(?:in|de)creas.+|add.*|subtract.*|plus|minus|multipl.+|divid.+"
    "|(?:high|low|larg|small|great|bigg)er?|top|bottom|left|right|begin.*|start.*|end.*|stop.*|true|false|yes"
    "|(?:as|des)cending|(?:en|dis)abl.+|allow.*|deny|input.*|output.*|gross|net|debit.*|credit.*|buy.*|sell.*|long|short"
    "|early|late|daily|weekly|monthly|quarterly|annual|yearly|positive|negative|absolute|relative"
)
PUNCTUATION = frozenset(".,;:\"'")
_NAME = re.compile(r"(?<=[\w,;] )[A-Z]\w*|\b[A-Z]{2,}\b")


@dataclass(frozen=True)
class Pruned:
    """Record a bullet that left a playbook, as it was."""

    bullet: Bullet
    reason: str
    """`"near-duplicate"`, `"harmful"` (tagged harmful more often than helpful) or `"least used"`."""
    into: str | None = None
    """The id of the bullet that it was united into; None for the other reasons."""


def fold(text: str) -> list[str]:
    """Return the words and symbols of a text in order, without what makes no difference to its meaning."""
    text = unicodedata.normalize("NFC", text).replace("\u2019", "'").strip()
    return [
        _ENDING.sub("", token.casefold())
        for place, token in enumerate(_TOKEN.findall(_END.sub("", text)))
        # "option A" and "the WHO" are no articles, but the first word of a text may be one.
        if token.casefold() not in _EMPTY or (place and token != token.lower())
    ]


def telling_words(text: str) -> list[str]:
    """Return the words of a text, sorted, of which none may differ in a near-duplicate, however alike the rest."""
    names = {_ENDING.sub("", name.casefold()) for name in _NAME.findall(text)}
    # Whatever is more than letters of ASCII tells: a number, a symbol, a contraction, a name in code.
    return sorted(
        word
        for word in fold(text)
        if word not in PUNCTUATION
        and (not (word.isascii() and word.isalpha()) or _TELLING.fullmatch(word) or word in names)
    )


def same_words(texts: Sequence[str]) -> list[int]:
    """Unite texts with the same folded words in the same order; texts without any, if they are equal."""
    first: dict[Any, int] = {}
    return [first.setdefault(tuple(fold(text)) or text.strip(), place) for place, text in enumerate(texts)]


class EmbeddingCosine:
    """Unite texts whose embeddings are alike, if their telling words are the same; it is a `NearDuplicates`.

    Texts with the same words in another order ("divide income by equity", "divide equity by income") stay apart.
    Where the embedder fails, `same_words` decides, with one warning.

    Args:
        embedder: A `dspy.Embedder`, or any callable from a list of n texts to n vectors of one length.
        threshold: The least cosine, above 0 and at most 1. Embedders differ in what they give to paraphrases.
    """

    def __init__(self, embedder: Callable[[list[str]], Any], threshold: float = 0.9) -> None:
        if not callable(embedder):
            raise TypeError(f"embedder must be callable, not {embedder!r}")
        if not isinstance(threshold, int | float) or isinstance(threshold, bool) or not 0 < threshold <= 1:
            raise ValueError(f"threshold must be a number above 0 and at most 1, not {threshold!r}")
        self.embedder = embedder
        self.threshold = threshold
        self._warned = False

    def __call__(self, texts: Sequence[str]) -> list[int]:
        """Return for each text the index of the one that it is united into; see `NearDuplicates`."""
        if not texts:
            return []
        try:
            vectors = self._unit_vectors(texts)
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "The embedder failed (%s: %s): until it works, only bullets with the same words are united. "
                    "(This is logged once.)",
                    type(error).__name__,
                    shorten(str(error)),
                )
            return same_words(texts)
        words = [fold(text) for text in texts]
        telling = [telling_words(text) for text in texts]
        found: list[int] = []
        for place in range(len(texts)):
            alike = (vectors[:place] @ vectors[place] >= self.threshold - 1e-6).nonzero()[0].tolist()
            leaders = (
                at
                for at in alike
                if found[at] == at
                and telling[at] == telling[place]
                and (words[at] == words[place] or sorted(words[at]) != sorted(words[place]))
            )
            found.append(next(leaders, place))
        return found

    def _unit_vectors(self, texts: Sequence[str]) -> Any:
        import numpy as np

        with np.errstate(over="ignore"):
            vectors = np.array(self.embedder(list(texts)), dtype=np.float64)
        if vectors.ndim != 2 or len(vectors) != len(texts) or not vectors.size or not np.isfinite(vectors).all():
            raise ValueError(f"{len(texts)} vectors of finite numbers, all of one length, are expected")
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(lengths > 0, lengths, 1)


def prune(
    bullets: Sequence[Bullet],
    budget: int,
    count: Callable[[Sequence[Bullet]], int],
    near_duplicates: NearDuplicates,
) -> tuple[list[Bullet], list[Pruned]]:
    """Take bullets away until the rest fits, in three steps, each only if the one before was not enough.

    All near-duplicates are united (the better supported content stays); all bullets with more harmful than helpful
    tags go; then the least used go, no more than needed: fewest tags first, then fewest helpful ones, fewest
    reflections, and of those still equal the older one, which has had more time to be of use.
    """
    kept = list(bullets)
    if count(kept) <= budget:
        return kept, []
    kept, pruned = _unite_near_duplicates(kept, near_duplicates)
    if count(kept) <= budget:
        return kept, pruned
    pruned += [Pruned(bullet, "harmful") for bullet in kept if bullet.harmful > bullet.helpful]
    kept = [bullet for bullet in kept if bullet.harmful <= bullet.helpful]
    least_used = sorted(kept, key=_use)
    gone = bisect_left(
        range(len(least_used)), True, key=lambda number: count(_without(kept, least_used[:number])) <= budget
    )
    return _without(kept, least_used[:gone]), pruned + [Pruned(bullet, "least used") for bullet in least_used[:gone]]


def _unite_near_duplicates(
    bullets: Sequence[Bullet], near_duplicates: NearDuplicates
) -> tuple[list[Bullet], list[Pruned]]:
    ranked = sorted(bullets, key=bullet_support, reverse=True)
    leaders = near_duplicates([bullet.content for bullet in ranked])
    members: dict[str, list[Bullet]] = {}
    pruned = []
    for bullet, leader in zip(ranked, leaders, strict=True):
        first = ranked[leader]
        members.setdefault(first.id, []).append(bullet)
        if bullet is not first:
            pruned.append(Pruned(bullet, "near-duplicate", first.id))
    return [unite(bullet, members[bullet.id]) for bullet in bullets if bullet.id in members], pruned


def _without(bullets: Sequence[Bullet], gone: Sequence[Bullet]) -> list[Bullet]:
    ids = {bullet.id for bullet in gone}
    return [bullet for bullet in bullets if bullet.id not in ids]


def _use(bullet: Bullet) -> tuple[int, int, int, int]:
    return bullet.helpful + bullet.harmful, bullet.helpful, len(bullet.reflection_ids), bullet_number(bullet.id)
