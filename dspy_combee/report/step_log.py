"""`steps.jsonl`: the steps of a run on disk, one JSON object a line, readable after a kill."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dspy_combee.records.types import StepRecord

try:
    import fcntl
except ImportError:  # Windows; there two runs in one folder are not told apart.
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("dspy_combee")

FILE_NAME = "steps.jsonl"


@contextmanager
def alone_in(log_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    """The length of a run: no other run uses its `log_dir` meanwhile. A process that is killed leaves no lock.

    Raises:
        ValueError: If another run does.
    """
    if log_dir is None or fcntl is None:
        yield
        return
    folder = os.open(log_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"log_dir {log_dir} is in use by a run that has not ended; give another one.") from None
        except OSError as error:
            logger.debug("%s cannot be locked: %s", log_dir, error)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_UN)  # A fork of this process may still have the folder open.
        os.close(folder)


class StepLog:
    """Appends the steps of a run to `steps.jsonl` in its `log_dir`.

    Args:
        log_dir: The folder; it is made when it is not there.
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
                while lines:  # A disk that becomes full takes a part.
                    lines = lines[file.write(lines) :]
            except BaseException:
                file.truncate(end)
                raise
        self.unwritten.clear()

    def read(self) -> list[StepRecord]:
        """The steps so far, those that could not be written included."""
        return [*read_steps(self.path), *self.unwritten]

    def resume(self, iteration: int) -> list[StepRecord]:
        """The steps before `iteration`; later ones, which the run makes again, are taken off the file.

        Raises:
            ValueError: If a line is no step; the file is then as it was.
        """
        kept = [(line, record) for line, record in _lines(self.path) if record.iteration < iteration]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(line + b"\n" for line, _ in kept))
        os.replace(temporary, self.path)
        self.unwritten = [step for step in self.unwritten if step.iteration < iteration]
        return [*(record for _, record in kept), *self.unwritten]


def _line(record: StepRecord) -> bytes:
    line = json.dumps(record.to_dict(), ensure_ascii=False, default=str)
    # A lone surrogate, which UTF-8 does not know, is written as the escape that JSON has for it.
    return (line + "\n").encode("utf-8", "backslashreplace")


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
    from dspy_combee.report.step_reading import step_from_dict  # It knows the steps of both optimizers.

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
