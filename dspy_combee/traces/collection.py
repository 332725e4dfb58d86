"""Collections of traces read from files, and the files that traces are saved in.

A trace is other people's text: nothing in it is executed, unpickled or followed as a path, and what looks like a
secret is redacted on load (see `records.secrets`).
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

from dspy_combee.records.files import replacing
from dspy_combee.records.secrets import redact, redact_data
from dspy_combee.traces.files import Found
from dspy_combee.traces.forms import to_json_line
from dspy_combee.traces.readers import Readers, TraceFile, all_readers
from dspy_combee.traces.types import Trace, TraceError

logger = logging.getLogger("dspy_combee")

ON_ERROR = ("raise", "skip")
_LOGGED_ERRORS = 10


def known_formats() -> tuple[str, ...]:
    """Return what `load_traces` takes as `format`."""
    return ("auto", *all_readers())


@dataclass(frozen=True)
class TraceCounts:
    """Count what one pass over the files met."""

    read: int = 0
    """Traces."""
    bad: int = 0
    """Files and lines that should hold a trace and do not, skipped."""
    other: int = 0
    """Files that hold no traces, and symbolic links, passed over."""


class TraceCollection(Sequence[Trace]):
    """Read the traces of a file or a folder when they are asked for; only their places stay in memory.

    It can be iterated any number of times, from several threads. Its length, and the access by index, take one pass
    over the files, the first; then a trace is read from its place. The files must stay as they are meanwhile.
    Made by `load_traces`.
    """

    def __init__(self, path: Path, form: str, skip_bad: bool, redacted: bool, extra_secrets: tuple[str, ...]) -> None:
        self._path = path
        self._readers = Readers(form)
        self._skip_bad = skip_bad
        self._redacted = redacted
        self._extra_secrets = extra_secrets
        self._counts: TraceCounts | None = None
        # Three numbers a trace: its file in the list, the line, and the byte where it begins.
        self._files: list[TraceFile] = []
        self._places: array[int] = array("q")

    def __repr__(self) -> str:
        return f"TraceCollection({os.fspath(self._path)!r}, {self._counts or 'not read yet'})"

    @property
    def counts(self) -> TraceCounts:
        """Return what the first complete pass met; takes that pass if there was none.

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
        files: list[TraceFile] = []
        places = array("q")
        bad = other = 0
        for file, found in self._found():
            if file is not None and found.trace is not None:
                if not files or files[-1] is not file:
                    files.append(file)
                places.extend((len(files) - 1, found.line, found.offset))
                yield found.trace
            elif found.error is not None:
                bad += 1
                self._skip(found.error, bad)
            else:
                other += 1
        self._finish(files, places, TraceCounts(len(places) // 3, bad, other))

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

    def _found(self) -> Iterator[tuple[TraceFile | None, Found]]:
        for file in self._readers.files(self._path):
            if isinstance(file, TraceFile):
                yield from ((file, self._redact(file, found)) for found in self._readers.read(file))
            else:
                yield None, Found(error=file)

    def _at(self, number: int) -> Trace:
        index, line, offset = self._places[3 * number : 3 * number + 3]
        file = self._files[index]
        found = self._redact(file, self._readers.read_at(file, line, offset))
        if found.trace is None:
            raise found.error or TraceError("the trace that was here is gone", file.path)
        return found.trace

    def _redact(self, file: TraceFile, found: Found) -> Found:
        if found.trace is None or not self._redacted:
            return found
        try:
            return replace(found, trace=redact_trace(found.trace, self._extra_secrets))
        except RecursionError:
            return Found(error=TraceError("nested too deeply", file.path))

    def _skip(self, error: TraceError, bad: int) -> None:
        if not self._skip_bad:
            raise error
        if self._counts is None and bad <= _LOGGED_ERRORS:
            more = "; further ones are only counted" if bad == _LOGGED_ERRORS else ""
            logger.warning("Skipped a bad trace: %s%s", error, more)

    def _finish(self, files: list[TraceFile], places: array[int], counts: TraceCounts) -> None:
        if self._counts is not None:
            return
        self._files, self._places, self._counts = files, places, counts
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
        path: A file or a folder. Symbolic links and hidden files in a folder are passed over.
        format: `"jsonl"` (our own), `"atif"` (trajectories, alone or in trial folders of Harbor), `"terminal_bench"`
            (rows of the public data), the name of a registered reader, or `"auto"`, which tells them apart trace by
            trace. See `traces.forms` and `traces.readers`.
        on_error: `"raise"` stops at a bad file or line; `"skip"` leaves it out, counts it and logs it.
        redact: Whether what looks like a secret becomes `[redacted]`; see `records.secrets` for the patterns.
        extra_secrets: Secrets that are redacted whatever they look like.

    Returns:
        A sequence that reads the files when it is iterated. It raises `TraceError`, which names the file and line, at
        a bad trace, and `ImportError` when a trajectory needs the package `atif` (extra `traces`).

    Raises:
        ValueError: If `format` or `on_error` is unknown.
        FileNotFoundError: If there is no such file or folder.
    """
    for name, value, known in (("format", format, known_formats()), ("on_error", on_error, ON_ERROR)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"there are no traces at {os.fspath(path)!r}: no such file or folder")
    if isinstance(extra_secrets, str):
        raise TypeError("extra_secrets must be several texts, such as a list of them, not one text")
    return TraceCollection(root, format, on_error == "skip", redact, tuple(extra_secrets))


def redact_trace(trace: Trace, extra_secrets: Iterable[str] = ()) -> Trace:
    """Return the trace with what looks like a secret replaced by `[redacted]`, in every field."""
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
    """Write traces in our own form, one JSON object a line; the file appears whole or not at all.

    `load_traces(path, redact=False)` returns equal traces if their values are what JSON holds; other objects become
    their text.

    Args:
        traces: The traces, taken one by one.
        path: The file; it should end in `.jsonl`.

    Returns:
        How many were written.

    Raises:
        OSError: If the file cannot be written; an older one is then still there.
        TypeError: If something is no `Trace`.
    """
    count = 0
    with replacing(path) as file:
        for trace in traces:
            if not isinstance(trace, Trace):
                raise TypeError(f"traces must be Trace objects, not {type(trace).__name__}")
            file.write(to_json_line(trace))
            count += 1
    return count
