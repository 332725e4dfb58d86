"""A playbook's JSON form, and how its files are read and written."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from dspy_combee.playbook.bullets import Bullet, Entry, PlaybookError, TextLine
from dspy_combee.playbook.text import Parts

_FORMAT = "dspy_combee.playbook"
_VERSION = 1


def to_json(sections: Iterable[str], entries: Sequence[Entry], next_number: int) -> str:
    """Write the JSON form: an entry with a `text` is a line of text, any other a bullet."""
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "next_number": next_number,
        "sections": list(sections),
        "entries": [asdict(entry) for entry in entries],
    }
    return json.dumps(data, ensure_ascii=False, indent=2) + "\n"


def from_json(text: str) -> Parts:
    """Read the JSON form.

    Raises:
        PlaybookError: If the text is no JSON or not a playbook.
    """
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlaybookError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("version") != _VERSION:
        raise PlaybookError(f"not a playbook: 'format' {_FORMAT!r} and 'version' {_VERSION} are expected")
    sections, entries = data.get("sections"), data.get("entries")
    if not isinstance(sections, list) or not isinstance(entries, list):
        raise PlaybookError("not a playbook: 'sections' and 'entries' must be lists")
    try:
        read: list[Entry] = [TextLine(**item) if "text" in item else Bullet(**item) for item in entries]
    except TypeError as error:
        raise PlaybookError(f"not a playbook: {error}") from error
    return Parts(sections, read, data.get("next_number", 1))


def is_json(path: str | os.PathLike[str]) -> bool:
    """Whether the file's name says that it holds the JSON form."""
    return os.fspath(path).lower().endswith(".json")


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` in UTF-8 to a file, whole or not at all; line ends stay as they are.

    Raises:
        OSError: If the file cannot be written; an older one is then still there.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:50]}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def read_whole(path: str | os.PathLike[str]) -> str:
    """Read a file in UTF-8; line ends stay as they are.

    Raises:
        OSError: If the file cannot be read.
        PlaybookError: If it is not UTF-8.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise PlaybookError(f"{os.fspath(path)} is not UTF-8: {error}") from error
