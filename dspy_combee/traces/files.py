"""Files of JSON traces: opened without following links, read in bounded memory, one record a trace.

`*.json` files are read whole, all others line by line. A file whose first line is JSON and no trace is something else;
after a first trace every line must be one.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from dspy_combee.traces.types import Trace, TraceError

# More than any trace should have: a single one is held in memory whole.
MAX_BYTES = 256 * 2**20
UNKNOWN_FORM = "no trace in a known form"


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file (a pipe would wait for its other end).

    Raises:
        OSError: If it is not there, is something else, or may not be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return open(path, "rb")


def read_json(path: Path) -> Any:
    """Return the JSON value that a file holds.

    Raises:
        OSError: If it cannot be read.
        TraceError: If it is no JSON, or longer than `MAX_BYTES`; it names the file.
    """
    with open_file(path) as file:
        return parse_json(file.read(MAX_BYTES + 1), path)


def parse_json(data: bytes, place: str | os.PathLike[str]) -> Any:
    """Return the JSON value in UTF-8 bytes.

    Raises:
        TraceError: If it is none, or longer than `MAX_BYTES`; it names the place.
    """
    if len(data) > MAX_BYTES:
        raise TraceError(f"longer than {MAX_BYTES:,} bytes", place)
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise TraceError(f"not UTF-8: {error.reason} at byte {error.start}", place) from None
    except ValueError as error:
        raise TraceError(f"not JSON: {error}", place) from None
    except RecursionError:
        raise TraceError("nested too deeply", place) from None


def unreadable(error: OSError, path: Path) -> TraceError:
    """Return the error for a file that cannot be read."""
    place = error.filename if isinstance(error.filename, str) else path
    return TraceError(f"cannot be read: {error.strerror or type(error).__name__}", place)


def has_file(folder: Path, *parts: str) -> bool:
    """Tell whether a regular file is there, without a link on the way to it from the folder."""
    paths = [folder.joinpath(*parts[: length + 1]) for length in range(len(parts))]
    return os.path.isfile(paths[-1]) and not any(map(os.path.islink, paths))


class JsonForm(ABC):
    """Read the traces of a form in which each JSON value is one; base of such `TraceReader`s."""

    @abstractmethod
    def matches(self, value: Any) -> bool:
        """Tell whether a JSON value looks like a trace of this form."""

    @abstractmethod
    def to_trace(self, value: Any) -> Trace:
        """Return the trace that a JSON value holds.

        Raises:
            TraceError: If it holds none.
        """

    def sniff(self, path: Path, head: bytes) -> bool:
        """Tell whether the first line, or the whole, of a file's beginning is a trace of this form."""
        for data in (head, head.partition(b"\n")[0]):
            try:
                return self.matches(parse_json(data, path))
            except TraceError:
                continue
        return False

    def read(self, path: Path) -> Iterator[Trace | TraceError]:
        """Yield the traces of a file, and the error in the place of each bad one."""
        for found in read_records(path, (self,), is_known=True):
            item = found.trace or found.error
            if item is not None:
                yield item


@dataclass(frozen=True)
class Found:
    """Hold what stands at one place of a file; without a trace and an error it is something else."""

    trace: Trace | None = None
    error: TraceError | None = None
    line: int = 0
    """The line, counted from 1; 0 where the file has none."""
    offset: int = 0
    """The byte at which the line begins."""


def read_records(path: Path, forms: Sequence[JsonForm], is_known: bool) -> Iterator[Found]:
    """Yield what stands at each place of a JSON file.

    Args:
        path: The file.
        forms: The forms that its traces may have.
        is_known: Whether it must hold traces: whatever is none is then an error.

    Raises:
        OSError: If it cannot be read.
    """
    if path.suffix.lower() == ".json":
        yield read_record(path, forms, is_known)
        return
    with open_file(path) as stream:
        line = offset = 0
        while data := _next_line(stream):
            line, start, offset = line + 1, offset, stream.tell()
            if data.strip():
                found = _record(data, f"{path}:{line}", forms, is_known)
                yield replace(found, line=line, offset=start)
                if not found.trace and not found.error:
                    return
                is_known = True


def read_record(path: Path, forms: Sequence[JsonForm], is_known: bool, line: int = 0, offset: int = 0) -> Found:
    """Return what stands at one place; without a line, in the whole file."""
    with open_file(path) as stream:
        stream.seek(offset)
        data = _next_line(stream) if line else stream.read(MAX_BYTES + 1)
    return _record(data, f"{path}:{line}" if line else path, forms, is_known)


def _record(data: bytes, place: str | Path, forms: Sequence[JsonForm], is_known: bool) -> Found:
    try:
        value = parse_json(data, place)
        form = next((form for form in forms if form.matches(value)), None)
        if form is None and is_known:
            if len(forms) != 1 or not isinstance(value, dict):
                raise TraceError(UNKNOWN_FORM, place)
            form = forms[0]  # Its own error says more.
        return Found(form.to_trace(value) if form else None)
    except TraceError as error:
        return Found(error=error.at(place))
    except RecursionError:
        return Found(error=TraceError("nested too deeply", place))


def _next_line(stream: IO[bytes]) -> bytes:
    """Return the next line; of one longer than `MAX_BYTES` no more than shows that it is."""
    data = part = stream.readline(MAX_BYTES + 1)
    while len(data) > MAX_BYTES and part and not part.endswith(b"\n"):
        part = stream.readline(2**20)
    return data
