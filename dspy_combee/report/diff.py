"""The changes from one text to another, line by line, with the changed words marked."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

CONTEXT_LINES = 3
WORDS_COMPARED = 1000  # The word matcher takes quadratic time: blocks with more words are marked as a whole.
ALIKE = 0.3  # Below this share of common words, marked words would only make two texts harder to read.

Part = tuple[bool, str]
"""A stretch of a line: whether it changed, and its text."""
DiffLine = tuple[str, list[Part]]
"""A line of a diff: " ", "-", "+" or "skip" (its text is the number of lines left out), and its parts."""


def diff_lines(old: str, new: str) -> list[DiffLine]:
    """Return the changed lines with a few lines around each change; none when the texts are equal."""
    before, after = (text.split("\n") if text else [] for text in (old, new))
    found: list[DiffLine] = []
    shown = 0
    for group in SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(CONTEXT_LINES):
        found += _skip(group[0][1] - shown)
        shown = group[-1][2]
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                found += [(" ", [(False, line)]) for line in before[i1:i2]]
            else:
                removed, added = _mark_words("\n".join(before[i1:i2]), "\n".join(after[j1:j2]))
                found += [("-", parts) for parts in _split(removed) if i1 < i2]
                found += [("+", parts) for parts in _split(added) if j1 < j2]
    return [*found, *_skip(len(before) - shown)] if found else []


def _skip(lines: int) -> list[DiffLine]:
    return [("skip", [(False, str(lines))])] if lines else []


def _mark_words(old: str, new: str) -> tuple[list[Part], list[Part]]:
    before, after = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (old, new))
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    if not old or not new or max(len(before), len(after)) > WORDS_COMPARED or matcher.ratio() < ALIKE:
        return [(False, old)], [(False, new)]
    changes = [(kind != "equal", before[i1:i2], after[j1:j2]) for kind, i1, i2, j1, j2 in matcher.get_opcodes()]
    return [(c, "".join(words)) for c, words, _ in changes], [(c, "".join(words)) for c, _, words in changes]


def _split(parts: list[Part]) -> list[list[Part]]:
    """Return the parts of a text as those of its lines."""
    lines: list[list[Part]] = [[]]
    for changed, text in parts:
        first, *rest = text.split("\n")
        lines[-1].append((changed, first))
        lines += [[(changed, piece)] for piece in rest]
    return [[part for part in line if part[1]] for line in lines]
