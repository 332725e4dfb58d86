"""Collected traces: runs that somebody logged, read from files or taken from memory, to learn from without running.

`load_traces` reads files, `traces_from` takes the runs of DSPy programs, `save_traces` writes our own form (see
`traces.formats`), `to_record` and `render_trace` show a trace to reflection. A trace is other people's text: nothing in
it is executed, unpickled or followed as a path, and what looks like a secret is redacted on load (`records.secrets`).
"""

from __future__ import annotations

import logging
import os
import uuid
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

from dspy_combee.records.secrets import redact, redact_data
from dspy_combee.traces.files import Found, TraceFile, file_at, read, read_at, walk
from dspy_combee.traces.formats import READERS, to_json_line
from dspy_combee.traces.types import Trace, TraceError

logger = logging.getLogger("dspy_combee")

FORMATS = ("auto", *READERS)
ON_ERROR = ("raise", "skip")
_LOGGED_ERRORS = 10


@dataclass(frozen=True)
class TraceCounts:
    """What one pass over the files met.

    Attributes:
        read: Traces.
        bad: Files and lines that should hold a trace and do not, skipped.
        other: Files that hold no traces, and symbolic links, passed over.
    """

    read: int = 0
    bad: int = 0
    other: int = 0


@dataclass
class _Index:
    """Where every trace is: the file's number, the line and the byte at which it begins."""

    files: list[TraceFile]
    numbers: array[int]
    lines: array[int]
    offsets: array[int]

    @classmethod
    def empty(cls) -> _Index:
        return cls([], array("q"), array("q"), array("q"))

    def add(self, file: TraceFile, found: Found) -> None:
        if not self.files or self.files[-1] is not file:
            self.files.append(file)
        self.numbers.append(len(self.files) - 1)
        self.lines.append(found.line)
        self.offsets.append(found.offset)


class TraceCollection(Sequence[Trace]):
    """The traces of a file or a folder, read when they are asked for; only their places stay in memory.

    It can be gone through any number of times, from several threads. Its length, and the access by index, take one
    pass over the files, the first; then a trace is read from its place. The files must stay as they are meanwhile.
    Made by `load_traces`.
    """

    def __init__(self, path: Path, form: str, skip_bad: bool, redacted: bool, extra_secrets: tuple[str, ...]) -> None:
        self._path = path
        self._form = form
        self._skip_bad = skip_bad
        self._redacted = redacted
        self._extra_secrets = extra_secrets
        self._index: _Index | None = None
        self._counts: TraceCounts | None = None

    def __repr__(self) -> str:
        return f"TraceCollection({os.fspath(self._path)!r}, {self._counts or 'not read yet'})"

    @property
    def counts(self) -> TraceCounts:
        """What the first complete pass met; takes that pass when there was none.

        Raises:
            TraceError: If a trace is bad and none is to be skipped.
        """
        if self._counts is None:
            for _ in self:
                pass
        return self._counts or TraceCounts()

    def __bool__(self) -> bool:
        return self._counts.read > 0 if self._counts else any(True for _ in self)

    def __len__(self) -> int:
        return self.counts.read

    def __iter__(self) -> Iterator[Trace]:
        index = _Index.empty()
        read_count = bad = other = 0
        for file in walk(self._path) if self._path.is_dir() else [file_at(self._path)]:
            if file is None:
                other += 1
                continue
            for found in read(file, self._form):
                trace, error = self._prepared(file, found)
                if trace is not None:
                    index.add(file, found)
                    read_count += 1
                    yield trace
                elif error is not None:
                    bad += 1
                    self._skip(error, bad)
                else:
                    other += 1
        self._finish(index, TraceCounts(read_count, bad, other))

    @overload
    def __getitem__(self, position: int) -> Trace: ...

    @overload
    def __getitem__(self, position: slice) -> list[Trace]: ...

    def __getitem__(self, position: int | slice) -> Trace | list[Trace]:
        if isinstance(position, slice):
            return [self._at(number) for number in range(len(self))[position]]
        try:
            return self._at(range(len(self))[position])
        except IndexError:
            raise IndexError(f"there are {len(self)} traces, none at {position}") from None

    def _at(self, number: int) -> Trace:
        index = self._index
        if index is None:
            raise IndexError("there is no trace")
        file = index.files[index.numbers[number]]
        found = Found(0, 0, read_at(file, self._form, index.lines[number], index.offsets[number]))
        trace, error = self._prepared(file, found)
        if trace is None:
            raise error or TraceError("the trace that was here is gone", file.path)
        return trace

    def _prepared(self, file: TraceFile, found: Found) -> tuple[Trace | None, TraceError | None]:
        """The trace that was found, redacted where that is wanted, or what is wrong with it."""
        if found.trace is None or not self._redacted:
            return found.trace, found.error
        try:
            return redact_trace(found.trace, self._extra_secrets), None
        except RecursionError:
            return None, TraceError("nested too deeply", file.path)

    def _skip(self, error: TraceError, bad: int) -> None:
        if not self._skip_bad:
            raise error
        if self._counts is None and bad <= _LOGGED_ERRORS:
            more = "; further ones are only counted" if bad == _LOGGED_ERRORS else ""
            logger.warning("Skipped a bad trace: %s%s", error, more)

    def _finish(self, index: _Index, counts: TraceCounts) -> None:
        if self._counts is not None:
            return
        self._index = index
        self._counts = counts
        logger.log(
            logging.INFO if counts.read and not counts.bad else logging.WARNING,
            "Read %d traces from %s; skipped %d bad ones and passed over %d files that hold no traces.",
            counts.read,
            self._path,
            counts.bad,
            counts.other,
        )


def load_traces(
    path: str | os.PathLike[str],
    format: str = "auto",  # noqa: A002
    on_error: str = "raise",
    redact: bool = True,
    *,
    extra_secrets: Iterable[str] = (),
) -> TraceCollection:
    """Read collected traces from a file or from all the files of a folder, in sorted order.

    Nothing is read before it is asked for, and nothing stays in memory: 50,000 traces take no more than one. How
    many were read and skipped is in the collection's `counts` and is logged after the first pass.

    Args:
        path: A file or a folder. Which files of a folder are read: see `traces.files`.
        format: `"jsonl"` (our own), `"atif"` (trajectories, alone or in trial directories of Harbor),
            `"terminal_bench"` (rows of the public data), or `"auto"`, which tells them apart trace by trace. See
            `traces.formats`.
        on_error: `"raise"` stops at a bad file or line; `"skip"` leaves it out, counts it and logs it.
        redact: Whether what looks like a secret becomes `[redacted]`; see `records.secrets` for the patterns.
        extra_secrets: Secrets that are redacted whatever they look like.

    Returns:
        A sequence that reads the files when it is gone through. It raises `TraceError`, which names the file and
        line, at a bad trace, and `ImportError` when a trajectory needs the package `atif` (extra `traces`).

    Raises:
        ValueError: If `format` or `on_error` is unknown.
        FileNotFoundError: If there is no such file or folder.
    """
    for name, value, known in (("format", format, FORMATS), ("on_error", on_error, ON_ERROR)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"there are no traces at {os.fspath(path)!r}: no such file or folder")
    if isinstance(extra_secrets, str):
        raise TypeError("extra_secrets must be several texts, such as a list of them, not one text")
    return TraceCollection(root, format, on_error == "skip", redact, tuple(extra_secrets))


def redact_trace(trace: Trace, extra_secrets: Iterable[str] = ()) -> Trace:
    """The trace with what looks like a secret replaced by `[redacted]`, in every field."""
    secrets = tuple(extra_secrets)
    return replace(
        trace,
        predictor=trace.predictor and redact(trace.predictor, secrets),
        source=redact(trace.source, secrets),
        inputs=redact_data(trace.inputs, secrets),
        outputs=redact_data(trace.outputs, secrets),
        metadata=redact_data(trace.metadata, secrets),
        feedback=redact(trace.feedback, secrets),
        steps=tuple(
            replace(step, text=redact(step.text, secrets), tool=step.tool and redact(step.tool, secrets))
            for step in trace.steps
        ),
    )


def save_traces(traces: Iterable[Trace], path: str | os.PathLike[str]) -> int:
    """Write traces in our own form, one JSON object a line; the file is there whole or not at all.

    `load_traces(path, redact=False)` gives equal traces back, if their values are what JSON holds; other objects
    become their text.

    Args:
        traces: The traces, taken one by one.
        path: The file; it should end in `.jsonl`.

    Returns:
        How many were written.

    Raises:
        OSError: If the file cannot be written; an older one is then still there.
        TypeError: If something is no `Trace`.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:50]}.{uuid.uuid4().hex}.tmp")
    count = 0
    try:
        with open(temporary, "x", encoding="utf-8", newline="") as file:
            for trace in traces:
                if not isinstance(trace, Trace):
                    raise TypeError(f"traces must be Trace objects, not {type(trace).__name__}")
                file.write(to_json_line(trace))
                count += 1
        os.replace(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return count
