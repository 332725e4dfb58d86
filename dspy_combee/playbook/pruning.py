"""Shrinking a playbook: near-duplicates are united, then bullets are dropped until the token budget holds.

Keeping a duplicate costs a few tokens; uniting two different lessons loses one. So both rules are strict. `same_words`
unites texts that have the same words and symbols in the same order, ignoring case, plurals, past tenses, articles, a
few words of emphasis and the punctuation at the end: it unites "Always check the units before adding!" and "Check unit
before adding", and keeps "a rate of 5 %" and "a rate of 6 %" apart. `EmbeddingCosine` lets an embedder judge, but keeps
texts apart that differ in a *telling* word: a number, a name, a symbol, a negation, a direction, or any word with a
letter outside ASCII.
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
"""Decides which texts are united. It is given texts in order of preference and returns, for each, the index of the text
it is united into: an earlier one that stays, or itself."""

PUNCTUATION = frozenset(".,;:\"'")

_TOKEN = re.compile(r"\w+(?:['.,:/-]\w+)*|[^\w\s]")
_END = re.compile(r"(?<=\w{3})[!?]+$|[.,;:]+$")
_SUFFIX = re.compile(r"(?<=[a-z]{3}[b-hj-rtv-z])s$|(?<=[a-z]{4})ed$")
_FILLERS = frozenset({"a", "an", "the", "is", "are", "be", "its", "please", "always", "carefully"})
_NAME = re.compile(r"(?<=[\w,;] )[A-Z]\w*|\b[A-Z]{2,}\b")
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


@dataclass(frozen=True)
class Pruned:
    """Record a bullet that left a playbook."""

    bullet: Bullet
    reason: str
    """`"near-duplicate"`, `"harmful"` (tagged harmful more often than helpful) or `"least used"`."""
    into: str | None = None
    """The id of the bullet that it was united into; None for the other reasons."""


def fold(text: str) -> list[str]:
    """Split a text into its words and symbols, without what makes no difference to its meaning."""
    text = unicodedata.normalize("NFC", text).replace("\u2019", "'").strip()
    return [
        _SUFFIX.sub("", token.casefold())
        for place, token in enumerate(_TOKEN.findall(_END.sub("", text)))
        # A capital letter makes an article of the first word only: not of "option A" or "the WHO".
        if token.casefold() not in _FILLERS or (place and token != token.lower())
    ]


def telling_words(text: str) -> list[str]:
    """List the words that near-duplicates must share, however alike their embeddings are; sorted."""
    names = {_SUFFIX.sub("", name.casefold()) for name in _NAME.findall(text)}
    return sorted(
        word
        for word in fold(text)
        if word not in PUNCTUATION
        and (word in names or _TELLING.fullmatch(word) or not (word.isascii() and word.isalpha()))
    )


def same_words(texts: Sequence[str]) -> list[int]:
    """Unite texts that fold to the same words in the same order, and equal texts; see `NearDuplicates`."""
    first: dict[Any, int] = {}
    return [first.setdefault(tuple(fold(text)) or text.strip(), place) for place, text in enumerate(texts)]


class EmbeddingCosine:
    """Unite texts whose embeddings are alike and whose telling words are the same; see `NearDuplicates`.

    Texts with the same words in a different order ("divide income by equity", "divide equity by income") stay apart.
    If the embedder fails, this falls back to `same_words` and logs a warning once.

    Args:
        embedder: A `dspy.Embedder`, or any callable from a list of n texts to n vectors of one length.
        threshold: The least cosine, above 0 and at most 1. Embedders differ in how close they put paraphrases.
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
        """Return, for each text, the index of the text that it is united into."""
        if not texts:
            return []
        try:
            vectors = self._unit_vectors(texts)
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "The embedder failed (%s: %s). Until it works, only bullets with the same words are united. "
                    "This is logged once.",
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
            raise ValueError(f"expected {len(texts)} vectors of finite numbers, all of one length")
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(lengths > 0, lengths, 1)


def prune(
    bullets: Sequence[Bullet], budget: int, count: Callable[[Sequence[Bullet]], int], near_duplicates: NearDuplicates
) -> tuple[list[Bullet], list[Pruned]]:
    """Drop bullets until `count` of the rest is within the budget, in three steps, each only if it is needed.

    First all near-duplicates are united, and the better supported content stays. Then all bullets with more harmful
    than helpful tags go. Then the least used go, no more than needed: fewest tags first, then fewest helpful ones, then
    fewest reflections, then the oldest, which has had most time to be of use.

    Returns:
        What is left, in the order given, and what went.
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

    def without(number: int) -> list[Bullet]:
        gone = {bullet.id for bullet in least_used[:number]}
        return [bullet for bullet in kept if bullet.id not in gone]

    number = bisect_left(range(len(kept)), True, key=lambda number: count(without(number)) <= budget)
    return without(number), pruned + [Pruned(bullet, "least used") for bullet in least_used[:number]]


def _unite_near_duplicates(
    bullets: Sequence[Bullet], near_duplicates: NearDuplicates
) -> tuple[list[Bullet], list[Pruned]]:
    ranked = sorted(bullets, key=bullet_support, reverse=True)
    members: dict[str, list[Bullet]] = {}
    pruned = []
    for bullet, leader in zip(ranked, near_duplicates([bullet.content for bullet in ranked]), strict=True):
        first = ranked[leader]
        members.setdefault(first.id, []).append(bullet)
        if bullet is not first:
            pruned.append(Pruned(bullet, "near-duplicate", first.id))
    return [unite(bullet, members[bullet.id]) for bullet in bullets if bullet.id in members], pruned


def _use(bullet: Bullet) -> tuple[int, int, int, int]:
    return bullet.helpful + bullet.harmful, bullet.helpful, len(bullet.reflection_ids), bullet_number(bullet.id)
