r"""The text form of a playbook, written and read.

    ## FORMULAS & CALCULATIONS
    [calc-00003] helpful=8 harmful=0 :: NPV = sum of CF / (1 + r)^t
      a second line of the same content, indented by two spaces
    any other line: kept as text

    <!-- next-id 7 -->
    <!-- reflections calc-00003 ["r1", "r2"] -->

The two notes at the end stand there only where they say something: that ids above the highest one in sight were
given out, and which reflections a bullet came from. ACE's own readers skip both.

Whatever a content holds, reading gives it back. Three devices see to that, and each shows only where it is needed:

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
    number_of,
)

BEGIN = "===== PLAYBOOK BEGIN ====="
END = "===== PLAYBOOK END ====="

_INDENT = "  "
_BEGIN_LINE = re.compile(rf"(?<![^\n]){re.escape(BEGIN)}\n")
_HEADER = re.compile(r"##[ \t]+(\S.*)")
_BULLET = re.compile(rf"\[({ID_PATTERN})\](?:[ \t](.*))?", re.DOTALL)
_COUNTERS = re.compile(r"[ \t]*helpful=([0-9]+)[ \t]+harmful=([0-9]+)[ \t]*::(?:[ \t](.*)|(.*))", re.DOTALL)
_LOOKS_NAMED = re.compile(rf"[\s\\*+-]*\[({ID_PATTERN})\]")
_LOOKS_COUNTED = re.compile(r"[ \t]*(?:helpful|harmful)=")
_NOTE = re.compile(r"<!-- (?:next-id|reflections)\b.*")
_NEXT_ID = re.compile(r"<!-- next-id ([0-9]{1,13}) -->")
_REFLECTIONS = re.compile(rf"<!-- reflections ({ID_PATTERN}) (\[.*\]) -->")
_ESCAPED = re.compile(r"(\\*)(.*)", re.DOTALL)

_MARKED = re.compile("[\r\ufeff]")
_MARKED_AND_TABS = re.compile("[\r\ufeff\t]")
_AMPERSAND = re.compile(r"&(?=(?:#38;)*#(?:9|13|65279);)")
_MARK = re.compile(r"&#38;(?=(?:#38;)*#(?:9|13|65279);)|&#(?:9|13|65279);")


class Parts(NamedTuple):
    """What a text holds: section names in order, entries in order, and the number of the next id."""

    sections: list[str]
    entries: list[Entry]
    next_number: int


class BulletLine(NamedTuple):
    """The first line of a bullet, its content not yet decoded."""

    id: str
    helpful: int
    harmful: int
    content: str


def render(
    sections: Iterable[str],
    entries: Sequence[Entry],
    next_number: int,
    *,
    reflections: bool,
    tabs: bool = True,
) -> str:
    """Write the text form; it ends with a newline unless it is empty.

    Args:
        sections: The names of all sections, in order, empty ones included.
        entries: Grouped by section, those of the section `""` first.
        next_number: The number that the next new bullet gets.
        reflections: Whether to note which reflections each bullet came from.
        tabs: Whether a tab may stand as it is; if not, it is written as `&#9;`.
    """
    by_section = {name: list(group) for name, group in groupby(entries, key=lambda entry: entry.section)}
    marked = _MARKED if tabs else _MARKED_AND_TABS
    blocks = ["\n".join(_lines(by_section[""], marked))] if "" in by_section else []
    blocks += [
        "\n".join([f"## {_encode(name, marked)}", *_lines(by_section.get(name, []), marked)]) for name in sections
    ]
    bullets = [entry for entry in entries if isinstance(entry, Bullet)]
    notes = []
    if next_number != following_number(entries):
        notes.append(f"<!-- next-id {next_number} -->")
    if reflections:
        notes += [
            f"<!-- reflections {bullet.id} {json.dumps(bullet.reflection_ids)} -->"
            for bullet in bullets
            if bullet.reflection_ids
        ]
    if notes:
        blocks.append("\n".join(notes))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def render_bullet(bullet: Bullet, marked: re.Pattern[str] = _MARKED) -> str:
    """Write one bullet; a newline in its content becomes a line indented by two spaces."""
    content = _encode(bullet.content, marked).replace("\n", "\n" + _INDENT)
    return f"[{bullet.id}] helpful={bullet.helpful} harmful={bullet.harmful} :: {content}"


def following_number(entries: Iterable[Entry]) -> int:
    """The number after the highest in use; a line of text that looks like a bullet uses that of its id."""
    named = ((entry.id if isinstance(entry, Bullet) else _id_in(entry.text)) for entry in entries)
    numbers = (number_of(name) for name in named if name)
    return max((number for number in numbers if number < MAX_NUMBER), default=0) + 1


def parse(text: str, *, strict: bool) -> Parts:
    r"""Read the text form.

    Args:
        text: Lines that end in `\n` or `\r\n`.
        strict: Whether a line that is no bullet, header, note or blank is an error; else it is kept as text.

    Raises:
        PlaybookError: In strict mode, with the line's number.
    """
    reader = _Reader(strict)
    for number, line in enumerate(text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n"), start=1):
        reader.read(number, line)
    return reader.finish()


def find_block(text: str) -> tuple[str, str] | None:
    """Cut a text that ends with a delimited playbook into what stands before it and the playbook's text.

    A line inside a playbook never begins with a delimiter, so the last one that opens is the right one.
    """
    body = text.rstrip()
    if not body.endswith("\n" + END):
        return None
    start = max((match.start() for match in _BEGIN_LINE.finditer(body)), default=-1)
    if start < 0:
        return None
    before = body[:start]
    before = before.removesuffix("\n\n") if before.endswith("\n\n") else before.removesuffix("\n")
    return before, body[start + len(BEGIN) + 1 : -len(END)]


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
            line = _escape(line)
            after_bullet = False
        lines.append(line)
    return lines


def _encode(text: str, marked: re.Pattern[str]) -> str:
    return marked.sub(lambda match: f"&#{ord(match[0])};", _AMPERSAND.sub("&#38;", text))


def _decode(text: str) -> str:
    return _MARK.sub(lambda match: chr(int(match[0][2:-1])), text)


def _id_in(line: str) -> str:
    match = _LOOKS_NAMED.match(line)
    return match[1] if match else ""


def _count(digits: str) -> int:
    """A counter; Python itself refuses to read more than some thousand digits."""
    return MAX_COUNT if len(digits.lstrip("0")) > len(str(MAX_COUNT)) else int(digits)


def _escape(line: str) -> str:
    return "\\" + line if _has_meaning(line.lstrip("\\")) else line


def _unescape(line: str) -> str:
    return line[1:] if line.startswith("\\") and _has_meaning(line.lstrip("\\")) else line


def _has_meaning(line: str) -> bool:
    """Whether a reader could take the line for something else than text; a blank one is never written as text."""
    return bool(
        line.startswith((BEGIN, END))
        or (line.startswith(_INDENT) and line.strip())
        or _HEADER.fullmatch(line)
        or _NOTE.fullmatch(line)
        or read_bullet_line(line)
    )


def read_bullet_line(line: str) -> BulletLine | None:
    """The first line of a bullet, with or without counters; None where the line is none.

    Where counters are begun they must be whole: a line such as `[calc-00003] helpful=x :: ...` is no bullet.
    """
    match = _BULLET.fullmatch(line)
    if match is None:
        return None
    rest = match[2] or ""
    counted = _COUNTERS.fullmatch(rest)
    if counted:
        content = counted[3] if counted[3] is not None else counted[4]
        return BulletLine(match[1], _count(counted[1]), _count(counted[2]), content)
    return None if _LOOKS_COUNTED.match(rest) else BulletLine(match[1], 0, 0, rest)


class _Reader:
    """Reads a playbook's text line by line."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.sections: list[str] = []
        self.section = ""
        self.entries: list[Entry] = []
        self.ids: set[str] = set()
        self.next_number = 1
        self.reflections: dict[str, tuple[str, ...]] = {}
        self.open: BulletLine | None = None
        self.open_lines: list[tuple[int, str]] = []
        self.blank_lines = 0

    def read(self, number: int, line: str) -> None:
        if self.open and line.startswith(_INDENT):
            self.open_lines += [(number, "")] * self.blank_lines
            self.open_lines.append((number, line))
            self.blank_lines = 0
        elif not line.strip():
            self.blank_lines += 1
        else:
            self.close()
            if not (self.read_header(line) or self.read_note(line) or self.read_bullet(number, line)):
                self.read_text(number, line)

    def read_header(self, line: str) -> bool:
        match = _HEADER.fullmatch(line)
        name = " ".join(_decode(match[1]).split()) if match else ""
        if not name:
            return False
        self.section = name
        if name not in self.sections:
            self.sections.append(name)
        return True

    def read_note(self, line: str) -> bool:
        if match := _NEXT_ID.fullmatch(line):
            if not 1 <= int(match[1]) <= MAX_NEXT_NUMBER:
                return False
            self.next_number = max(self.next_number, int(match[1]))
            return True
        match = _REFLECTIONS.fullmatch(line)
        if match is None or match[1] not in self.ids or match[1] in self.reflections:
            return False
        ids = _read_list(match[2])
        if not ids:
            return False
        self.reflections[match[1]] = ids
        return True

    def read_bullet(self, number: int, line: str) -> bool:
        self.open = read_bullet_line(line)
        if self.open is None:
            return False
        if self.open.id in self.ids:
            self.open = None
            return False
        self.open_lines = [(number, line)]
        return True

    def read_text(self, number: int, line: str) -> None:
        if self.strict:
            bullet = read_bullet_line(line)
            problem = f"[{bullet.id}] comes twice" if bullet else "no bullet, section or next line of a bullet"
            raise PlaybookError(f"line {number}: {problem}: {line!r}")
        raw = _unescape(line)
        text = _decode(raw)
        # `&#13;` alone on a line stays as it is: decoded it would be blank.
        self.entries.append(TextLine(self.section, text if text.strip() else raw))

    def close(self) -> None:
        """Finish the bullet that is open; one without content is a malformed line."""
        bullet, self.open, self.blank_lines = self.open, None, 0
        if bullet is None:
            return
        lines = [bullet.content, *(line[len(_INDENT) :] for _, line in self.open_lines[1:])]
        content = _decode("\n".join(lines))
        if content.strip():
            self.ids.add(bullet.id)
            self.entries.append(Bullet(bullet.id, self.section, content, bullet.helpful, bullet.harmful))
            return
        if self.strict:
            raise PlaybookError(f"line {self.open_lines[0][0]}: [{bullet.id}] has no content")
        for number, line in self.open_lines:
            if line.strip():
                self.read_text(number, line)

    def finish(self) -> Parts:
        self.close()
        for place, entry in enumerate(self.entries):
            if isinstance(entry, Bullet) and entry.id in self.reflections:
                self.entries[place] = replace(entry, reflection_ids=self.reflections[entry.id])
        return Parts(self.sections, self.entries, max(self.next_number, following_number(self.entries)))


def _read_list(text: str) -> tuple[str, ...]:
    """The texts of a JSON list; none where it is not one."""
    try:
        items: Any = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(items, list) or not all(isinstance(item, str) and item.strip() for item in items):
        return ()
    return tuple(items)
