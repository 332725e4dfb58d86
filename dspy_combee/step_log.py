"""`steps.jsonl`: the steps of a run on disk, one JSON object a line, readable after a kill."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from dspy_combee.records import StepRecord

logger = logging.getLogger("dspy_combee")

FILE_NAME = "steps.jsonl"


class StepLog:
    """Appends the steps of a run to `steps.jsonl` in its `log_dir`.

    Args:
        log_dir: The folder; it is made when it is not there.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self.path = Path(log_dir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, record: StepRecord) -> None:
        """Add a step; it is on disk when this returns."""
        line = json.dumps(record.to_dict(), ensure_ascii=False, default=str)
        # A lone surrogate, which UTF-8 does not know, is written as the escape that JSON has for it.
        with self.path.open("ab") as file:
            file.write((line + "\n").encode("utf-8", "backslashreplace"))

    def resume(self, iteration: int) -> list[StepRecord]:
        """The steps before `iteration`; later ones, which the run makes again, are taken off the file.

        Raises:
            ValueError: If a line is no step; the file is then as it was.
        """
        kept = [(line, record) for line, record in _lines(self.path) if record.iteration < iteration]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(line + b"\n" for line, _ in kept))
        os.replace(temporary, self.path)
        return [record for _, record in kept]


def read_steps(path: str | os.PathLike[str]) -> list[StepRecord]:
    """The steps in a `steps.jsonl` file, or in the `log_dir` that holds one.

    A last line that a kill cut short is left out.

    Args:
        path: The file or the folder.

    Returns:
        The steps in order, those of a `PlaybookOptimizer` as `PlaybookStep`s; none when there is no file.

    Raises:
        ValueError: If another line is no step; the message names the file and the line.
    """
    file = Path(path)
    return [record for _, record in _lines(file / FILE_NAME if file.is_dir() else file)]


def _lines(file: Path) -> Iterator[tuple[bytes, StepRecord]]:
    """Each line that holds a step, and the step."""
    if not file.exists():
        return
    from dspy_combee.step_reading import step_from_dict  # It knows the steps of both optimizers.

    lines = file.read_bytes().split(b"\n")  # Bytes: a kill may cut a character in two.
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield line, step_from_dict(json.loads(line.decode("utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines):  # Each whole line ends in a newline, so this one is not whole.
                logger.warning("%s:%d is cut short and is left out.", file, number)
                continue
            raise ValueError(f"{file}:{number} is no step record: {error}") from error
