"""What the commands share: an error for the user, checked options and files, quiet logs, an LM that answers."""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dspy


class CommandError(Exception):
    """Say what is wrong with an option or a file, to the user."""


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Keep warnings off the screen: what goes wrong for good is raised, and the rest would break up the output."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def positive(text: str) -> int:
    """Return the value of an option that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def check_writable(option: str, path: Path, suffix: str = "") -> None:
    """Raise `CommandError` if a file cannot be written; nothing is made at its path."""
    if not path.name.endswith(suffix):
        raise CommandError(f"{option} {path}: expected a {suffix} file")
    if not path.parent.is_dir():
        raise CommandError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise CommandError(f"{option} {path} is a folder; expected a file")
    try:
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise CommandError(f"{option} {path} cannot be written: {error}") from error
    if path.exists() and not os.access(path, os.W_OK):
        raise CommandError(f"{option} {path} cannot be written: it is read-only")


def reachable_lm(option: str, model: str, api_base: str | None) -> dspy.LM:
    """Return an LM after one short call, so that a missing key or a server that is down shows at once.

    Args:
        option: The option that names the model, for the error.
        model: As `dspy.LM` takes it.
        api_base: Address of its server; None for the provider's.
    """
    settings: dict[str, Any] = {} if api_base is None else {"api_base": api_base}
    try:
        lm = dspy.LM(model, **settings)
        lm.copy(num_retries=0, cache=False)("Say OK.")
    except (ValueError, TypeError) as error:
        raise CommandError(f"{option} {model!r}: {error}") from error
    return lm
