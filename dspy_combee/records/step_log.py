"""`steps.jsonl`: the steps of a run on disk, one JSON object a line, readable after a kill."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from dspy_combee.records.types import StepRecord, from_plain

logger = logging.getLogger("dspy_combee")

FILE_NAME = "steps.jsonl"


class StepLog:
    """Append the steps of a run to `steps.jsonl` in its `log_dir`.

    Args:
        log_dir: The folder; it is made if it does not exist.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self.path = Path(log_dir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.unwritten: list[StepRecord] = []

    def append(self, record: StepRecord) -> None:
        """Add a step; it is on disk when this returns.

        Raises:
            OSError: If it cannot be written. The file is then as it was, and the step is written with the next one.
        """
        lines = b"".join(_line(step) for step in (*self.unwritten, record))
        self.unwritten.append(record)
        with self.path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                while lines:  # A disk that becomes full takes only a part.
                    lines = lines[file.write(lines) :]
            except BaseException:
                file.truncate(end)
                raise
        self.unwritten.clear()

    def read(self) -> list[StepRecord]:
        """Return the steps so far, including those that could not be written."""
        return [*read_steps(self.path), *self.unwritten]

    def resume(self, iteration: int) -> list[StepRecord]:
        """Return the steps before `iteration`, and take the later ones, which the run makes again, off the file.

        Raises:
            ValueError: If a line is no step; the file is then as it was.
        """
        kept = [(line, record) for line, record in _lines(self.path) if record.iteration < iteration]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(line + b"\n" for line, _ in kept))
        os.replace(temporary, self.path)
        self.unwritten = [step for step in self.unwritten if step.iteration < iteration]
        return [*(record for _, record in kept), *self.unwritten]


def read_steps(path: str | os.PathLike[str]) -> list[StepRecord]:
    """Return the steps of a `steps.jsonl` file, or of the `log_dir` that holds one; none if there is no file.

    An incomplete last line, which a kill leaves, is left out.

    Raises:
        ValueError: If another line is no step; the message names the file and the line.
    """
    file = Path(path)
    return [record for _, record in _lines(file / FILE_NAME if file.is_dir() else file)]


def step_from_dict(plain: dict[str, Any]) -> StepRecord:
    """Return the step that `to_dict` made these values of; fields of a later version are ignored.

    A subclass of `StepRecord`, such as `PlaybookStep`, is known by its fields. What `to_dict` writes as text, because
    JSON has no form for it, stays text.

    Raises:
        ValueError: If a field is missing or has a value of another type.
    """
    kinds = [kind for kind in StepRecord.__subclasses__() if {*kind.__annotations__} <= plain.keys()]
    return from_plain(max(kinds, key=lambda kind: len(fields(kind)), default=StepRecord), plain)


def _line(record: StepRecord) -> bytes:
    line = json.dumps(record.to_dict(), ensure_ascii=False)
    # A lone surrogate, which UTF-8 cannot encode, is written as JSON's escape for it.
    return (line + "\n").encode("utf-8", "backslashreplace")


def _lines(file: Path) -> Iterator[tuple[bytes, StepRecord]]:
    """Yield each line that holds a step, and the step."""
    if not file.exists():
        return
    lines = file.read_bytes().split(b"\n")  # Bytes: a kill may cut a character in two.
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield line, step_from_dict(json.loads(line.decode("utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines):  # A complete line ends in a newline.
                logger.warning("%s:%d is incomplete and is left out.", file, number)
                continue
            raise ValueError(f"{file}:{number} is no step record: {error}") from error
