"""How the files of collected traces are opened: regular files only, without links, never more than a bound."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from dspy_combee.traces.types import TraceError

# More than any trace should have: a single one is held in memory whole.
MAX_BYTES = 256 * 2**20


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file; a pipe, which would wait for its other end, is none.

    Raises:
        OSError: If it is not there, is something else, or may not be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return open(path, "rb")


def read_json(path: Path) -> Any:
    """The JSON value that a file holds.

    Raises:
        OSError: If it cannot be read.
        TraceError: If it is no JSON, or longer than `MAX_BYTES`; it names the file.
    """
    with open_file(path) as file:
        return parse_json(file.read(MAX_BYTES + 1), path)


def parse_json(data: bytes, place: str | os.PathLike[str]) -> Any:
    """The JSON value in UTF-8 bytes that stand at a place.

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
    """What is said of a file that cannot be read."""
    place = error.filename if isinstance(error.filename, str) else path
    return TraceError(f"cannot be read: {error.strerror or type(error).__name__}", place)


def has_file(folder: Path, *parts: str) -> bool:
    """Whether a regular file is there, without a link on the way to it from the folder."""
    for part in parts[:-1]:
        folder = folder / part
        if not _is(stat.S_ISDIR, folder):
            return False
    return _is(stat.S_ISREG, folder / parts[-1])


def has_folder(folder: Path, name: str) -> bool:
    """Whether a folder is there that is no link."""
    return _is(stat.S_ISDIR, folder / name)


def _is(kind: Callable[[int], bool], path: Path) -> bool:
    try:
        return kind(os.lstat(path).st_mode)
    except OSError:
        return False
