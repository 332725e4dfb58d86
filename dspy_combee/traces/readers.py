r"""Readers of traces by the name of their form, and the files of a folder that each of them reads.

Another form is read by a class of about a dozen lines:

    class LabLogs:
        def sniff(self, path, head):
            return path.suffix == ".lab" and head.startswith(b"LAB 1")

        def read(self, path):
            for block in path.read_text("utf-8").split("\n\n")[1:]:
                question, answer, verdict = block.splitlines()
                yield Trace({"question": question}, {"answer": answer}, score=verdict == "right")

    register_reader("lab", LabLogs())

A package offers its readers as entry points of the group `dspy_combee.trace_readers`: `lab = "my_package:LabLogs"`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Protocol

from dspy_combee.traces.files import Found, JsonForm, open_file, read_record, read_records, unreadable
from dspy_combee.traces.forms import AtifForm, OwnForm, TerminalBenchRows
from dspy_combee.traces.harbor import HarborTrials
from dspy_combee.traces.types import Trace, TraceError

HEAD_BYTES = 64 * 2**10
MAX_DEPTH = 100
"""Folders nested deeper than this are reported as errors."""

_SUFFIXES = (".json", ".jsonl", ".ndjson")


class TraceReader(Protocol):
    """Read the traces of one form."""

    def sniff(self, path: Path, head: bytes) -> bool:
        """Tell whether a file or a folder holds traces of this form; a folder then belongs to the reader whole.

        Args:
            path: The file or the folder.
            head: The first `HEAD_BYTES` of the file; empty for a folder.
        """

    def read(self, path: Path) -> Iterator[Trace | TraceError]:
        """Yield the traces, and a `TraceError` in the place of each bad one. Whatever is raised ends the file."""


_HARBOR = HarborTrials()
_JSON_FORMS: dict[str, JsonForm] = {"jsonl": OwnForm(), "atif": AtifForm(), "terminal_bench": TerminalBenchRows()}
_registered: dict[str, TraceReader] = {}


@cache
def _installed() -> dict[str, TraceReader]:
    return {entry.name: entry.load()() for entry in entry_points(group="dspy_combee.trace_readers")}


def register_reader(name: str, reader: TraceReader) -> None:
    """Make a reader known by the name of its form; it is asked before those that come with the package."""
    _registered[name] = reader


def all_readers() -> dict[str, TraceReader]:
    """Return the readers by the name of their form."""
    return {**_registered, **_installed(), **_JSON_FORMS, "harbor": _HARBOR}


@dataclass(frozen=True)
class TraceFile:
    """Name a file, or a folder, that may hold traces."""

    path: Path
    name: str
    """Its path inside the folder that was given, with `/`; the file's own name where a file was given."""
    reader: TraceReader | None = None
    """None for JSON records."""
    is_given: bool = False
    """Whether it was given by its own path, so that it must hold traces."""


class Readers:
    """Find and read the traces of some forms.

    Args:
        form: The name of a form, or `"auto"` for all. Trial folders hold ATIF trajectories, so `"atif"` reads both.
    """

    def __init__(self, form: str) -> None:
        names = {form, "harbor"} if form == "atif" else {form}
        wanted = {name: reader for name, reader in all_readers().items() if form == "auto" or name in names}
        self._forms: Sequence[JsonForm] = [json_form for name, json_form in _JSON_FORMS.items() if name in wanted]
        self._others = [reader for name, reader in wanted.items() if name not in {*_JSON_FORMS, "harbor"}]
        self._reads_trials = "harbor" in wanted

    def files(self, path: Path) -> Iterator[TraceFile | TraceError | None]:
        """Yield what may hold traces, in sorted order, an error for what cannot be read, and None for the rest.

        Of a folder every file that a reader recognises is read, and every `*.json`, `*.jsonl` and `*.ndjson` file.
        Symbolic links in it are not followed (one that stays inside leads to what is read anyway), nor are paths that
        stand in a trace. Hidden files and folders are passed over without a count.
        """
        if path.is_dir():
            yield from self._walk(path, "", 0)
        else:
            yield TraceFile(path, path.name, self._reader_of(path), is_given=True)

    def _walk(self, folder: Path, inside: str, depth: int) -> Iterator[TraceFile | TraceError | None]:
        is_trial = _HARBOR.sniff(folder, b"")
        owner = _HARBOR if is_trial else next((reader for reader in self._others if reader.sniff(folder, b"")), None)
        if owner is not None:
            yield TraceFile(folder, inside, owner) if self._reads_trials or not is_trial else None
            if not is_trial:
                return
        try:
            with os.scandir(folder) as scan:
                entries = sorted((e for e in scan if not e.name.startswith(".")), key=lambda entry: entry.name)
        except OSError as error:
            yield unreadable(error, folder)
            return
        for entry in entries:
            path, name, is_folder = folder / entry.name, inside + entry.name, entry.is_dir(follow_symlinks=False)
            if is_trial and _HARBOR.is_part(entry.name, is_folder):
                continue
            if is_folder and depth == MAX_DEPTH:
                yield TraceError("nested too deeply", path)
            elif is_folder:
                yield from self._walk(path, name + "/", depth + 1)
            elif not entry.is_file(follow_symlinks=False):
                yield None
            elif (reader := self._reader_of(path)) or path.suffix.lower() in _SUFFIXES:
                yield TraceFile(path, name, reader)
            else:
                yield None

    def _reader_of(self, path: Path) -> TraceReader | None:
        if not self._others:
            return None
        try:
            with open_file(path) as stream:
                head = stream.read(HEAD_BYTES)
        except OSError:
            return None  # It is reported when it is read.
        return next((reader for reader in self._others if reader.sniff(path, head)), None)

    def read(self, file: TraceFile) -> Iterator[Found]:
        """Yield what stands at every place of a file."""
        try:
            if file.reader is None:
                places = read_records(file.path, self._forms, is_known=file.is_given)
            else:
                places = _numbered(file.reader.read(file.path), file.path)
            for found in places:
                yield _with_source(found, file)
        except TraceError as error:
            yield Found(error=error.at(file.path))
        except RecursionError:
            yield Found(error=TraceError("nested too deeply", file.path))
        except OSError as error:
            yield Found(error=unreadable(error, file.path))

    def read_at(self, file: TraceFile, line: int, offset: int) -> Found:
        """Return what stands at a place that `read` has found."""
        if file.reader is not None:
            return next(islice(self.read(file), offset, None), Found())
        try:
            found = read_record(file.path, self._forms, file.is_given, line, offset)
        except OSError as error:
            return Found(error=unreadable(error, file.path))
        return _with_source(replace(found, line=line), file)


def _numbered(items: Iterator[Trace | TraceError], path: Path) -> Iterator[Found]:
    for position, item in enumerate(items):
        yield Found(item, offset=position) if isinstance(item, Trace) else Found(error=item.at(path))


def _with_source(found: Found, file: TraceFile) -> Found:
    """Name the source of a trace; one that a folder's reader gives is a path inside that folder."""
    trace = found.trace
    if trace is None:
        return found
    if file.path.is_dir():
        return replace(found, trace=replace(trace, source=file.name + trace.source))
    name = f"{file.name}:{found.line}" if found.line else file.name
    return found if trace.source else replace(found, trace=replace(trace, source=name))
