"""What changed from one text to another, line by line, with the changed words marked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

CONTEXT_LINES = 3
WORDS_COMPARED = 1000  # The word matcher takes quadratic time: blocks with more words are marked as a whole.
ALIKE = 0.3  # Below this share of common words, marked words would only make two texts harder to read.

Part = tuple[bool, str]
"""A stretch of a line: whether it changed, and its text."""
DiffLine = tuple[str, list[Part]]
"""A line of a diff: " ", "-", "+" or "skip" (its text is the number of lines left out), and its parts."""


def diff_lines(old: str, new: str) -> list[DiffLine]:
    """The lines of both texts, in order; of a long unchanged stretch only what is next to a change.

    Args:
        old: The text before.
        new: The text after.

    Returns:
        No lines at all when the texts are equal.
    """
    if old == new:
        return []
    before, after = _lines(old), _lines(new)
    found: list[DiffLine] = []
    opcodes = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    for position, (kind, i1, i2, j1, j2) in enumerate(opcodes):
        if kind == "equal":
            found.extend(_unchanged(before[i1:i2], position == 0, position == len(opcodes) - 1))
        else:
            found.extend(_changed(before[i1:i2], after[j1:j2]))
    return found


def _lines(text: str) -> list[str]:
    return text.split("\n") if text else []


def _unchanged(lines: Sequence[str], first: bool, last: bool) -> Iterator[DiffLine]:
    head = 0 if first else CONTEXT_LINES
    tail = 0 if last else CONTEXT_LINES
    skipped = len(lines) - head - tail
    if skipped <= 1:  # A line that says that one line is missing takes the place of the line.
        head, skipped = len(lines), 0
    for line in lines[:head]:
        yield " ", [(False, line)]
    if skipped > 0:
        yield "skip", [(False, str(skipped))]
        for line in lines[len(lines) - tail :] if tail else []:
            yield " ", [(False, line)]


def _changed(before: Sequence[str], after: Sequence[str]) -> Iterator[DiffLine]:
    removed, added = _mark_words("\n".join(before), "\n".join(after)) if before and after else ([], [])
    for sign, lines, parts in (("-", before, removed), ("+", after, added)):
        if parts:
            yield from ((sign, line) for line in _split(parts))
        else:
            yield from ((sign, [(False, line)]) for line in lines)


def _mark_words(old: str, new: str) -> tuple[list[Part], list[Part]]:
    """Both texts in parts; nothing when they have too little in common or are too long."""
    before, after = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (old, new))
    if max(len(before), len(after)) > WORDS_COMPARED:
        return [], []
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    if matcher.ratio() < ALIKE:
        return [], []
    removed: list[Part] = []
    added: list[Part] = []
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        removed.append((kind != "equal", "".join(before[i1:i2])))
        added.append((kind != "equal", "".join(after[j1:j2])))
    return removed, added


def _split(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts of a text as those of its lines."""
    lines: list[list[Part]] = [[]]
    for changed, text in parts:
        for number, piece in enumerate(text.split("\n")):
            if number:
                lines.append([])
            if piece:
                lines[-1].append((changed, piece))
    return lines
