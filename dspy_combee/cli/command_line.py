"""What the commands of `python -m dspy_combee` share: their errors as one line, quiet logs, an LM that answers."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dspy
from dspy.utils.exceptions import LMError

from dspy_combee.records.errors import CombeeError


class CommandError(Exception):
    """The command cannot go on; the message is for the user."""


def run_command(
    command: Callable[[], None],
    input_errors: tuple[type[Exception], ...] = (),
    run_errors: tuple[type[Exception], ...] = (),
) -> int:
    """Run a command; an error that it may meet becomes one line.

    Args:
        command: Does the work.
        input_errors: What it raises, beside `CommandError`, for options or files that are no good.
        run_errors: What it raises, beside the errors of language models, of this package and of the system, in a run.

    Returns:
        The exit status: 0, 2 for options or files that are no good, 1 for a run that failed, 130 for Ctrl-C.
    """
    no_good: tuple[type[Exception], ...] = (CommandError, *input_errors)
    failed: tuple[type[Exception], ...] = (LMError, CombeeError, OSError, *run_errors)
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its price map is not worth a download
    try:
        with quiet_logs():
            command()
    except no_good as error:
        return _fail(error, 2)
    except failed as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


@contextmanager
def quiet_logs() -> Iterator[None]:
    """What goes wrong for good is raised; the rest would only break up what is printed."""
    loggers = [logging.getLogger(name) for name in ("dspy", "dspy_combee", "LiteLLM")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _fail(error: object, status: int) -> int:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    print(f"error: {lines[0][:500]}", file=sys.stderr)
    return status


def positive(text: str) -> int:
    """The value of an option that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def reachable_lm(option: str, model: str, api_base: str | None) -> Any:
    """The LM, after one short call, so that a missing key or a server that is down shows at once.

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
