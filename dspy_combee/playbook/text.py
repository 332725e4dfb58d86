r"""The text form of a playbook, written and read.

    ## FORMULAS & CALCULATIONS
    [calc-00003] helpful=8 harmful=0 :: NPV = sum of CF / (1 + r)^t
      a second line of the same content, indented by two spaces
    any other line: kept as text

    <!-- next-id 7 -->
    <!-- reflections calc-00003 ["r1", "r2"] -->

The two notes at the end are written only if needed: that ids above the highest one in the text were given out, and
which reflections a bullet came from. ACE's own readers skip both.

Whatever a content holds, reading gives it back. Three kinds of escapes see to that, each used only where it is needed:

- Lines end at `\n` alone. A carriage return and a byte order mark, which files and editors change, are written as
  `&#13;` and `&#65279;`; a tab too where DSPy would expand it (in instructions). Where a content has such a mark
  of its own, its `&` is written as `&#38;`.
- A line of text that would be read as a bullet, a header, a note or a delimiter is written with a backslash before
  it (and one that already looks so escaped, with one more).
- An empty line between the lines of a content is written as two spaces, and read back with or without them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from dspy_combee.playbook.bullets import (
    ID_PATTERN,
    MAX_COUNT,
    MAX_NEXT_NUMBER,
    MAX_NUMBER,
    Bullet,
    Entry,
    PlaybookError,
    TextLine,
    bullet_number,
)

BEGIN = "===== PLAYBOOK BEGIN ====="
END = "===== PLAYBOOK END ====="

_INDENT = "  "
_HEADER = re.compile(r"##[ \t]+(\S.*)")
_BULLET = re.compile(rf"\[({ID_PATTERN})\](?:[ \t](.*))?", re.DOTALL)
_COUNTERS = re.compile(r"[ \t]*helpful=([0-9]+)[ \t]+harmful=([0-9]+)[ \t]*::[ \t]?(.*)", re.DOTALL)
_LOOKS_NAMED = re.compile(rf"[\s\\*+-]*\[({ID_PATTERN})\]")
_LOOKS_COUNTED = re.compile(r"[ \t]*(?:helpful|harmful)=")
_NOTE = re.compile(r"<!-- (?:next-id|reflections)\b.*")
_NEXT_ID = re.compile(r"<!-- next-id ([0-9]{1,13}) -->")
_REFLECTIONS = re.compile(rf"<!-- reflections ({ID_PATTERN}) (\[.*\]) -->")

_MARKED = re.compile("[\r\ufeff]")
_MARKED_AND_TABS = re.compile("[\r\ufeff\t]")
_AMPERSAND = re.compile(r"&(?=(?:#38;)*#(?:9|13|65279);)")
_MARK = re.compile(r"&#38;(?=(?:#38;)*#(?:9|13|65279);)|&#(?:9|13|65279);")


def render(sections: Iterable[str], entries: Sequence[Entry], next_number: int, *, for_prompt: bool = False) -> str:
    """Write the text form of entries that are grouped by section; it ends with a newline unless it is empty.

    For a prompt it leaves out which reflections bullets came from, and writes tabs as `&#9;`.
    """
    marked = _MARKED_AND_TABS if for_prompt else _MARKED
    by_section = {name: _lines(group, marked) for name, group in groupby(entries, key=lambda entry: entry.section)}
    blocks = [by_section[""]] if "" in by_section else []
    blocks += [[f"## {_encode(name, marked)}", *by_section.get(name, [])] for name in sections]
    notes = []
    if next_number != number_after(entries):
        notes.append(f"<!-- next-id {next_number} -->")
    bullets = [] if for_prompt else [entry for entry in entries if isinstance(entry, Bullet) and entry.reflection_ids]
    notes += [f"<!-- reflections {bullet.id} {json.dumps(bullet.reflection_ids)} -->" for bullet in bullets]
    if notes:
        blocks.append(notes)
    return "\n\n".join("\n".join(block) for block in blocks) + "\n" if blocks else ""


def render_bullet(bullet: Bullet, marked: re.Pattern[str] = _MARKED) -> str:
    """Write one bullet; further lines of its content are indented by two spaces."""
    content = _encode(bullet.content, marked).replace("\n", "\n" + _INDENT)
    return f"[{bullet.id}] helpful={bullet.helpful} harmful={bullet.harmful} :: {content}"


def number_after(entries: Iterable[Entry]) -> int:
    """Return the number after the highest in use, be it in the id of a line of text that looks like a bullet."""
    ids: list[str] = []
    for entry in entries:
        if isinstance(entry, Bullet):
            ids.append(entry.id)
        elif match := _LOOKS_NAMED.match(entry.text):
            ids.append(match[1])
    return max((number for number in map(bullet_number, ids) if number < MAX_NUMBER), default=0) + 1


def parse(text: str, *, strict: bool) -> tuple[tuple[str, ...], tuple[Entry, ...], int]:
    r"""Read the text form.

    Args:
        text: Lines that end in `\n` or `\r\n`.
        strict: Whether a line that is not a bullet, header, note or blank is an error; else it is kept as text.

    Returns:
        The section names in order, the entries in order, and the number of the next id.

    Raises:
        PlaybookError: In strict mode, with the line's number.
    """
    reader = _Reader(text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n"), strict)
    while reader.place < len(reader.lines):
        reader.read_next()
    entries = tuple(
        replace(entry, reflection_ids=reader.reflections.get(entry.id, ())) if isinstance(entry, Bullet) else entry
        for entry in reader.entries
    )
    return tuple(reader.sections), entries, max(reader.next_number, number_after(entries))


def _lines(entries: Iterable[Entry], marked: re.Pattern[str]) -> list[str]:
    lines: list[str] = []
    after_bullet = False
    for entry in entries:
        if isinstance(entry, Bullet):
            lines.append(render_bullet(entry, marked))
            after_bullet = True
            continue
        line = _encode(entry.text, marked)
        # Indented text is taken for a bullet's content only where a bullet stands before it.
        if after_bullet or not line.startswith(_INDENT):
            line = "\\" + line if _has_meaning(line.lstrip("\\")) else line
            after_bullet = False
        lines.append(line)
    return lines


def _encode(text: str, marked: re.Pattern[str]) -> str:
    return marked.sub(lambda match: f"&#{ord(match[0])};", _AMPERSAND.sub("&#38;", text))


def _decode(text: str) -> str:
    return _MARK.sub(lambda match: chr(int(match[0][2:-1])), text)


def _has_meaning(line: str) -> bool:
    """Tell whether a reader would take the line for something other than text; blank lines are never asked about."""
    return bool(
        line.startswith((BEGIN, END))
        or (line.startswith(_INDENT) and line.strip())
        or _HEADER.fullmatch(line)
        or _NOTE.fullmatch(line)
        or _read_bullet_line(line)
    )


class _BulletLine(NamedTuple):
    """Hold the parts of the first line of a bullet, its content still encoded."""

    id: str
    helpful: int
    harmful: int
    content: str


def _read_bullet_line(line: str) -> _BulletLine | None:
    """Read the first line of a bullet, with or without counters; return None for any other line.

    Counters must be whole where there are any: a line such as `[calc-00003] helpful=x :: ...` is not a bullet.
    """
    match = _BULLET.fullmatch(line)
    if match is None:
        return None
    rest = match[2] or ""
    if counted := _COUNTERS.fullmatch(rest):
        return _BulletLine(match[1], _read_count(counted[1]), _read_count(counted[2]), counted[3])
    return None if _LOOKS_COUNTED.match(rest) else _BulletLine(match[1], 0, 0, rest)


def _read_count(digits: str) -> int:
    # Python itself refuses to read more than some thousand digits.
    return MAX_COUNT if len(digits.lstrip("0")) > len(str(MAX_COUNT)) else int(digits)


class _Reader:
    """Read the text form line by line."""

    def __init__(self, lines: Sequence[str], strict: bool) -> None:
        self.lines = lines
        self.strict = strict
        self.place = 0
        self.sections: dict[str, None] = {}
        self.section = ""
        self.entries: list[Entry] = []
        self.ids: set[str] = set()
        self.next_number = 1
        self.reflections: dict[str, tuple[str, ...]] = {}

    def read_next(self) -> None:
        place, line = self.place, self.lines[self.place]
        self.place += 1
        if line.strip() and not (self.read_header(line) or self.read_note(line) or self.read_bullet(place, line)):
            self.keep_text(place, line)

    def read_header(self, line: str) -> bool:
        match = _HEADER.fullmatch(line)
        name = " ".join(_decode(match[1]).split()) if match else ""
        if name:
            self.section = name
            self.sections[name] = None
        return bool(name)

    def read_note(self, line: str) -> bool:
        if (match := _NEXT_ID.fullmatch(line)) and 1 <= int(match[1]) <= MAX_NEXT_NUMBER:
            self.next_number = max(self.next_number, int(match[1]))
            return True
        match = _REFLECTIONS.fullmatch(line)
        if match is None or match[1] not in self.ids or match[1] in self.reflections:
            return False
        ids = _read_list(match[2])
        if ids:
            self.reflections[match[1]] = ids
        return bool(ids)

    def read_bullet(self, place: int, line: str) -> bool:
        bullet = _read_bullet_line(line)
        if bullet is None or bullet.id in self.ids:
            return False
        end = self.place
        for position in range(self.place, len(self.lines)):
            if self.lines[position].startswith(_INDENT):
                end = position + 1
            elif self.lines[position].strip():
                break
        more = [text[len(_INDENT) :] if text.startswith(_INDENT) else "" for text in self.lines[self.place : end]]
        self.place = end
        content = _decode("\n".join([bullet.content, *more]))
        if content.strip():
            self.ids.add(bullet.id)
            self.entries.append(Bullet(bullet.id, self.section, content, bullet.helpful, bullet.harmful))
            return True
        if self.strict:
            raise PlaybookError(f"line {place + 1}: [{bullet.id}] has no content")
        for position in range(place, end):
            if self.lines[position].strip():
                self.keep_text(position, self.lines[position])
        return True

    def keep_text(self, place: int, line: str) -> None:
        if self.strict:
            bullet = _read_bullet_line(line)
            problem = f"[{bullet.id}] comes twice" if bullet else "no bullet, section or next line of a bullet"
            raise PlaybookError(f"line {place + 1}: {problem}: {line!r}")
        raw = line[1:] if line.startswith("\\") and _has_meaning(line.lstrip("\\")) else line
        text = _decode(raw)
        # `&#13;` alone on a line stays as it is: decoded it would be blank.
        self.entries.append(TextLine(self.section, text if text.strip() else raw))


def _read_list(text: str) -> tuple[str, ...]:
    """Return the texts of a JSON list; an empty tuple for anything else."""
    try:
        items: Any = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(items, list) or not all(isinstance(item, str) and item.strip() for item in items):
        return ()
    return tuple(items)
