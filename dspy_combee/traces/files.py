"""The files that collected traces stand in: which are read, and how, in bounded memory.

A folder is walked in the order of the names in it. Read are `*.jsonl` and `*.ndjson` files line by line, `*.json`
files whole, and trial directories (see `traces.trials`). A file whose first line is JSON and no trace in the form that
was asked for, and a `*.json` file that is none, is something else and passed over, as is every other file.

Nothing outside the folder is read: symbolic links in it are not followed (one that stays inside leads to what is read
anyway), nor are paths that stand in a trace. Hidden files and folders are passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from dspy_combee.traces.formats import form_of, to_trace
from dspy_combee.traces.io import MAX_BYTES, open_file, parse_json, read_json, unreadable
from dspy_combee.traces.trials import is_part, read_trial, trajectory_of
from dspy_combee.traces.types import Trace, TraceError

_LINE_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class TraceFile:
    """A file, or a trial directory, that may hold traces.

    Attributes:
        path: Where it is.
        name: Its path inside the folder that was given, with `/`; the file's own name where a file was given.
        kind: `"lines"`, `"whole"`, `"trial"`, or `"folder"` for a folder that cannot be read.
        given: Whether it was given by its own path, so that it must hold traces.
    """

    path: Path
    name: str
    kind: str
    given: bool = False


@dataclass(frozen=True)
class Found:
    """A place in a file, and the trace that is there or what is wrong with it.

    Attributes:
        line: The line, counted from 1; 0 where the file has none.
        offset: The byte at which it begins.
        trace: The trace; None where there is none.
        error: Why there is none; None also where the file is something else.
    """

    line: int
    offset: int
    trace: Trace | None
    error: TraceError | None = None


def file_at(path: Path) -> TraceFile:
    """A file that was given by its own path."""
    return TraceFile(path, path.name, "whole" if path.suffix.lower() == ".json" else "lines", given=True)


MAX_DEPTH = 100


def walk(folder: Path, inside: str = "", depth: int = 0) -> Iterator[TraceFile | None]:
    """The files of a folder that may hold traces, in sorted order, and None for each other file or link.

    Args:
        folder: The folder.
        inside: What the names of its files begin with.
        depth: How deep it lies in the folder that the walk began with; below `MAX_DEPTH` it counts as unreadable.
    """
    trajectory = trajectory_of(folder)
    if trajectory:
        yield TraceFile(folder, inside + trajectory, "trial")
    try:
        with os.scandir(folder) as scan:
            entries = sorted((entry for entry in scan if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError:
        yield TraceFile(folder, inside, "folder")
        return
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False)
        if trajectory and is_part(entry.name, is_folder):
            continue
        path, name, suffix = folder / entry.name, inside + entry.name, os.path.splitext(entry.name)[1].lower()
        if is_folder:
            if depth >= MAX_DEPTH:
                yield TraceFile(path, name, "folder")
            else:
                yield from walk(path, name + "/", depth + 1)
        elif suffix in (*_LINE_SUFFIXES, ".json") and entry.is_file(follow_symlinks=False):
            yield TraceFile(path, name, "whole" if suffix == ".json" else "lines")
        else:
            yield None


def read(file: TraceFile, form: str) -> Iterator[Found]:
    """Every trace of a file, and every place of it that is bad; nothing of it is kept.

    Args:
        file: The file.
        form: The form of its traces, or `"auto"`.
    """
    try:
        for found in _read_lines(file, form) if file.kind == "lines" else _read_one(file, form):
            if file.given and found.trace is None and found.error is None:
                yield Found(found.line, found.offset, None, TraceError("no trace in a known form", file.path))
            else:
                yield found
    except OSError as error:
        yield Found(0, 0, None, unreadable(error, file.path))


def read_at(file: TraceFile, form: str, line: int, offset: int) -> Trace:
    """The trace at a place that `read` has found.

    Raises:
        TraceError: If it is no longer there.
    """
    try:
        if file.kind == "lines":
            with open_file(file.path) as stream:
                stream.seek(offset)
                found = _of_line(file, form, line, offset, _next_line(stream))
        else:
            found = next(_read_one(file, form))
    except OSError as error:
        raise unreadable(error, file.path) from error
    if found.trace is None:
        raise found.error or TraceError("the trace that was here is gone", file.path)
    return found.trace


def _read_lines(file: TraceFile, form: str) -> Iterator[Found]:
    with open_file(file.path) as stream:
        line, offset, found_any = 0, 0, False
        while data := _next_line(stream):
            line, here, offset = line + 1, offset, stream.tell()
            if not data.strip():
                continue
            found = _of_line(file, form, line, here, data)
            if found.trace is None and found.error is None:
                if not found_any:
                    yield found
                    return
                found = replace(found, error=TraceError("no trace in a known form", f"{file.path}:{line}"))
            found_any = True
            yield found


def _next_line(stream: IO[bytes]) -> bytes:
    """The next line; of one that is longer than `MAX_BYTES` no more than shows that it is."""
    data = part = stream.readline(MAX_BYTES + 1)
    while len(data) > MAX_BYTES and part and not part.endswith(b"\n"):
        part = stream.readline(2**20)
    return data


def _of_line(file: TraceFile, form: str, line: int, offset: int, data: bytes) -> Found:
    place = f"{file.path}:{line}"
    try:
        value = parse_json(data, place)
        found = _form_to_read(file, form, value)
        trace = _to_trace(value, found, place, f"{file.name}:{line}") if found else None
        return Found(line, offset, trace)
    except TraceError as error:
        return Found(line, offset, None, error)


def _read_one(file: TraceFile, form: str) -> Iterator[Found]:
    try:
        if file.kind == "folder":
            os.listdir(file.path)
        if file.kind == "trial":
            trace = replace(read_trial(file.path), source=file.name) if form in ("auto", "atif") else None
        else:
            value = read_json(file.path)
            found = _form_to_read(file, form, value)
            trace = _to_trace(value, found, file.path, file.name) if found else None
        yield Found(0, 0, trace)
    except TraceError as error:
        yield Found(0, 0, None, error)
    except RecursionError:
        yield Found(0, 0, None, TraceError("nested too deeply", file.path))


def _form_to_read(file: TraceFile, form: str, value: object) -> str | None:
    """The form in which a JSON value is to be read; None where it is something else."""
    found = form_of(value)
    if form == "auto" or found == form:
        return found
    return form if file.given else None


def _to_trace(value: object, form: str, place: str | os.PathLike[str], source: str) -> Trace:
    try:
        trace = to_trace(value, form)
    except RecursionError:
        raise TraceError("nested too deeply", place) from None
    except TraceError as error:
        raise TraceError(str(error), place) from None
    return trace if trace.source else replace(trace, source=source)
