"""When two texts say the same: which bullets of a playbook may be united into one.

To keep a duplicate costs a few tokens, to unite two different lessons loses one. So the default rule is strict.
`TokenJaccard` takes two texts for near-duplicates if

1. the Jaccard similarity of their token sets is at least 0.8, and
2. the content words of the one stand in the other, in the same order: one text may have words that the other has
   not, but no word is swapped for another and none changes places ("divide income by equity" and "divide equity by
   income" have equal token sets), and
3. no *key token* is among the words that only one of them has.

Key tokens are numbers and words for numbers, negations, conditions and limits ("only", "unless", "before"),
directions ("up", "more"), names in code, acronyms and other words with a capital inside a sentence, operators (and
the brackets of a text that has some) and all symbols but punctuation, and any word with a letter outside ASCII,
which this module cannot judge. Case, punctuation, small words ("the", "of", "always"), the plural and verb endings
of English, and a few verbs that instructions use for one another ("check", "verify") do not count as differences.

So "a rate of 5 %" and "a rate of 6 %" stay apart however long the texts around them are, as do "include" and
"exclude"; "Check the units before adding" and "Check units before adding." unite. Where both texts have fewer than
five tokens, nothing but case, punctuation and endings may differ (three tokens out of four are below 0.8).

`EmbeddingCosine` lets an embedder judge instead of 1 and 2, and keeps the key tokens: both texts must have the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from dspy_combee.playbook.bullets import PlaybookError


class NearDuplicates(Protocol):
    """Decides which texts are united."""

    def leaders(self, texts: Sequence[str]) -> list[int]:
        """For each text the index of the text that it is united into, its own if it stays.

        Args:
            texts: In order of preference. A text is only united into one that comes earlier and itself stays, and
                with which it is a near-duplicate: texts are not chained together over others.
        """


@dataclass(frozen=True)
class TokenJaccard:
    """Near-duplicates by their tokens, as the module says; needs no model.

    Only texts with the same key tokens are compared, of which one has the other's rarest content word: the work grows
    little faster than the number of texts, unless they share one small vocabulary. Texts without any content word
    unite only if they are equal.

    Args:
        threshold: The least Jaccard similarity, above 0 and at most 1.
    """

    threshold: float = 0.8

    def __post_init__(self) -> None:
        _check_threshold(self.threshold)

    def leaders(self, texts: Sequence[str]) -> list[int]:
        """For each text the index of the first that it is a near-duplicate of; see `NearDuplicates`."""
        profiles = [profile(text) for text in texts]
        frequency = Counter(token for item in profiles for token in item.words)
        found: list[int] = []
        equal: dict[tuple[tuple[str, ...], str], int] = {}
        # Of two texts the one has all content words of the other, so it has the rarest of them.
        by_word: dict[tuple[tuple[str, ...], str], list[int]] = {}
        by_rarest: dict[tuple[tuple[str, ...], str], list[int]] = {}
        for place, item in enumerate(profiles):
            identity = item.sequence, "" if item.sequence else texts[place].strip()
            rarest = min(item.words, key=lambda token: (frequency[token], token), default="")
            leader = equal.get(identity)
            if leader is None:
                candidates = set(by_word.get((item.keys, rarest), ()))
                candidates.update(*(by_rarest.get((item.keys, token), ()) for token in item.words))
                near = (at for at in sorted(candidates) if self._similar(item, profiles[at]))
                leader = next(near, None)
            if leader is None:
                leader = equal[identity] = place
                by_rarest.setdefault((item.keys, rarest), []).append(place)
                for token in item.words:
                    by_word.setdefault((item.keys, token), []).append(place)
            found.append(leader)
        return found

    def _similar(self, one: Profile, other: Profile) -> bool:
        shorter, longer = (one, other) if len(one.content) <= len(other.content) else (other, one)
        if not shorter.words <= longer.words:
            return False
        shared = len(one.tokens & other.tokens)
        if shared < self.threshold * (len(one.tokens) + len(other.tokens) - shared) - 1e-9:
            return False
        return _is_subsequence(shorter.content, longer.content) and not _left_over(longer, shorter) & longer.names


@dataclass(frozen=True)
class EmbeddingCosine:
    """Near-duplicates by the cosine of their embeddings, if they have the same key tokens.

    Args:
        embedder: A `dspy.Embedder`, or any callable from a list of n texts to n vectors. What it raises is passed on.
        threshold: The least cosine, above 0 and at most 1. Embedders differ in what they give to paraphrases.
    """

    embedder: Callable[[list[str]], Any]
    threshold: float = 0.9

    def __post_init__(self) -> None:
        _check_threshold(self.threshold)
        if not callable(self.embedder):
            raise TypeError(f"embedder must be callable, not {self.embedder!r}")

    def leaders(self, texts: Sequence[str]) -> list[int]:
        """For each text the index of the first that it is a near-duplicate of; see `NearDuplicates`.

        Raises:
            PlaybookError: If the embedder does not give one vector of finite numbers per text, all of one length.
        """
        if not texts:
            return []
        vectors = self._unit_vectors(texts)
        profiles = [profile(text) for text in texts]
        found: list[int] = []
        block = 256
        for start in range(0, len(texts), block):
            similar = vectors[start : start + block] @ vectors.T >= self.threshold - 1e-6
            for place in range(start, min(start + block, len(texts))):
                earlier = similar[place - start, :place].nonzero()[0].tolist()
                leader = next(
                    (at for at in earlier if found[at] == at and _no_key_differs(profiles[place], profiles[at])),
                    place,
                )
                found.append(leader)
        return found

    def _unit_vectors(self, texts: Sequence[str]) -> Any:
        import numpy as np

        given = self.embedder(list(texts))
        expected = f"the embedder must give {len(texts)} vectors of finite numbers, all of one length"
        try:
            vectors = np.asarray(given)
            if vectors.dtype.kind in "SUc":
                raise TypeError(f"numbers of the type {vectors.dtype}")
            with np.errstate(over="ignore"):
                vectors = vectors.astype(np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise PlaybookError(f"{expected}; what it gave is no array of numbers: {error}") from error
        if vectors.ndim != 2 or len(vectors) != len(texts) or not vectors.shape[1]:
            raise PlaybookError(f"{expected}, not an array of the shape {vectors.shape}")
        if not np.isfinite(vectors).all():
            raise PlaybookError(f"{expected}; there are NaN or infinity among them")
        # The square of a number may be too large, or too small, for a float: first by the largest of each vector.
        largest = np.abs(vectors).max(axis=1, keepdims=True)
        vectors /= np.where(largest > 0, largest, 1)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)


@dataclass(frozen=True)
class Profile:
    """A text as it is compared.

    Attributes:
        sequence: All its tokens in order, case and endings taken off.
        tokens: The same as a set.
        content: Those that are not small words, in order.
        words: The same as a set.
        keys: The key tokens but names, sorted, each as often as it comes.
        names: Acronyms and words with a capital inside a sentence. They are key tokens too, but the same word may
            stand without its capital in another text.
    """

    sequence: tuple[str, ...]
    tokens: frozenset[str]
    content: tuple[str, ...]
    words: frozenset[str]
    keys: tuple[str, ...]
    names: frozenset[str]


@lru_cache(maxsize=8192)  # Every step asks about every bullet of the playbook again.
def profile(text: str) -> Profile:
    """Cut a text into tokens and tell the small, the ordinary and the key ones apart."""
    text = unicodedata.normalize("NFC", text).replace("\u2019", "'")
    ignored = _PUNCTUATION if _OPERATOR.search(text) else _PUNCTUATION | _BRACKETS
    sequence: list[str] = []
    content: list[str] = []
    keys: list[str] = []
    names: set[str] = set()
    opens_sentence = True
    for match in _TOKEN.finditer(text):
        word = match[0]
        if word in ignored and match.lastgroup != "minus":
            opens_sentence = opens_sentence or word in _SENTENCE_ENDS
            continue
        folded = word.casefold()
        token = _stem(folded)
        token = _SAME.get(token, token)
        sequence.append(token)
        if folded not in _SMALL:
            content.append(token)
            if _is_key(word, folded, token):
                keys.append(token)
            elif word[1:] != word[1:].lower() or (word[0].isupper() and not opens_sentence):
                names.add(token)
        opens_sentence = False
    return Profile(
        tuple(sequence), frozenset(sequence), tuple(content), frozenset(content), tuple(sorted(keys)), frozenset(names)
    )


def _check_threshold(threshold: float) -> None:
    if not isinstance(threshold, int | float) or isinstance(threshold, bool) or not 0 < threshold <= 1:
        raise ValueError(f"threshold must be a number above 0 and at most 1, not {threshold!r}")


def _is_subsequence(shorter: Sequence[str], longer: Sequence[str]) -> bool:
    rest = iter(longer)
    return all(token in rest for token in shorter)


def _left_over(one: Profile, other: Profile) -> set[str]:
    """The content words that `one` has more often than `other`."""
    return set(Counter(one.content) - Counter(other.content))


def _no_key_differs(one: Profile, other: Profile) -> bool:
    """Whether both have the same key tokens, and not merely the same words in another order."""
    if one.keys != other.keys or _left_over(one, other) & one.names or _left_over(other, one) & other.names:
        return False
    return one.content == other.content or sorted(one.content) != sorted(other.content)


def _is_key(word: str, folded: str, token: str) -> bool:
    if not word.isascii() or folded in _KEY_WORDS or token in _KEY_STEMS or folded.endswith("n't"):
        return True
    return not word.replace("'", "").isalpha()


def _stem(word: str) -> str:
    """The word without an English plural or verb ending, roughly; only to compare words with each other."""
    if not (word.isascii() and word.isalpha()):
        return word
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    for ending in ("ing", "ed"):
        stem = word.removesuffix(ending)
        doubled = stem[-1:] == stem[-2:-1]
        # At least four letters, so that "noted" does not become "not"; "add" is let through.
        if stem != word and (len(stem) > 3 or (len(stem) == 3 and doubled)):
            if doubled and len(stem) > 3 and stem[-1] not in "ls":
                return stem[:-1]
            return stem.removesuffix("e") if len(stem) > 4 else stem
    if len(word) > 3 and word.endswith("s") and word[-2] not in "sui":
        word = word[:-1]
    return word.removesuffix("e") if len(word) > 4 else word


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words and numbers with what joins their parts, then operators of two characters, then single symbols.
_TOKEN = re.compile(
    r"\w+(?:['.,:/]\w+)*|[!<>=]=|<-|->|=>|&&|\|\||\*\*|!(?=[\w(])"
    r"|(?P<minus>(?<![\w-])-(?=[\w(.])|(?<=\S )-(?= ))|[^\w\s]|\n"
)
_OPERATOR = re.compile(r"[+*/=<>^\u00d7\u00f7\u2212]|(?<=\S )-(?= )")
_PUNCTUATION = frozenset(".,;:!?\"'`-\u2010\u2011\u2012\u2013\u2014\u2018\u201c\u201d\u2026\n")
_BRACKETS = frozenset("()")
_SENTENCE_ENDS = frozenset(".:!?\n")

_SMALL = _words(
    "a an the of to is are be been was were that this these those it its in on at as with and for so then also "
    "please you your we our i should must do does will shall there which who just simply really very always "
    "carefully properly make sure"
)
_SAME = {"verify": "check", "confirm": "check", "ensure": "check", "ensur": "check", "calculat": "comput"}
_KEY_WORDS = _words(
    # negations, those of other languages in Latin script too
    "not no non none never nor neither cannot without nothing nobody avoid refrain except unless instead rather "
    "nicht kein keine keinen keiner keines nie niemals ohne ne pas jamais sans rien ni nunca nada sin mai senza "
    "nem sem niet geen nooit zonder inte aldrig utan ikke aldri uten bez tidak jangan bukan "
    # numbers and shares
    "zero one two three four five six seven eight nine ten eleven twelve twenty thirty fifty hundred thousand "
    "million billion trillion percent half third quarter double triple single dozen once twice first second last "
    "fourth fifth "
    # conditions and limits
    "only if when while until till before after during since or xor either both all any each every some few many "
    "most least may might can could optional otherwise than per by from against out off but however "
    # directions and opposites
    "up down above below over under more less fewer higher lower larger smaller greater bigger max min maximum "
    "minimum increase decrease add subtract plus minus multiply divide times include exclude "
    "begin end start stop left right top bottom ascending descending true false yes enable "
    "disable allow deny input output gross net debit credit buy sell long short early late earlier later daily "
    "weekly monthly quarterly annual yearly positive negative absolute relative"
)
_KEY_STEMS = frozenset(_stem(word) for word in _KEY_WORDS)
