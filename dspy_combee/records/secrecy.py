"""No secrets in logs, records and reports: texts that go there come through `shorten` or `hide_secrets`."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from dspy_combee.records.redaction import REDACTED, redact
from dspy_combee.records.text import text_of

_SECRETS: ContextVar[tuple[str, ...]] = ContextVar("dspy_combee_secrets", default=())
_SECRET_VARIABLES = ("_API_KEY", "_ACCESS_KEY", "_TOKEN", "_SECRET")
_SECRET_OPTION = re.compile("key|secret|credentials|passw|(?:^|_)token(?:_|$)")
_SECRET_HEADER = re.compile("auth|key|token|secret|cookie|credential|passw|session", re.IGNORECASE)


def shorten(value: object, limit: int = 500, form: Callable[[Any], str] = str) -> str:
    """A text, or that of `value`, on one line: cut at `limit` with a mark, without what looks like a secret."""
    line = " ".join(hide_secrets(text_of(value, form)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def traceback_of(error: BaseException) -> str:
    """The traceback of an error as a log may show it, without what looks like a secret."""
    return hide_secrets("".join(traceback.format_exception(error)).rstrip())


def hide_own_secrets(value: Any) -> Any:
    """Plain data without the run's own secrets; what only looks like a secret stays, for it may be the task's."""
    if isinstance(value, str):
        for secret in _SECRETS.get():
            value = value.replace(secret, REDACTED)
        return value
    if isinstance(value, dict):
        return {hide_own_secrets(key): hide_own_secrets(item) for key, item in value.items()}
    return [hide_own_secrets(item) for item in value] if isinstance(value, list) else value


def holds_own_secret(data: bytes) -> bool:
    """Whether one of the run's own secrets stands in `data`."""
    return any(secret.encode() in data for secret in _SECRETS.get())


def hide_secrets(text: str) -> str:
    """`text` with what looks like a secret, and the run's own secrets (`keeping_secret`), made `[redacted]`."""
    return redact(text, _SECRETS.get())


@contextmanager
def keeping_secret(secrets: Iterable[str]) -> Iterator[None]:
    """While this lasts, `hide_secrets` hides these texts too, in every task that is started inside.

    An error that leaves loses, of the errors that it came from, those whose text holds a secret.
    """
    token = _SECRETS.set(tuple(sorted({*_SECRETS.get(), *secrets}, key=len, reverse=True)))
    try:
        yield
    except BaseException as error:
        _cut_chain(error)
        raise
    finally:
        _SECRETS.reset(token)


def _cut_chain(error: BaseException) -> None:
    cause = error.__cause__ or error.__context__
    while cause is not None:
        text = text_of(cause)
        if hide_secrets(text) != text:
            error.__cause__ = error.__context__ = None
            return
        error, cause = cause, cause.__cause__ or cause.__context__


def _is_random(text: str) -> bool:
    return len(text) >= 20 and text.isalnum() and not text.isalpha()


def secrets_of(lms: Iterable[Any]) -> set[str]:
    """The keys and header values that language models were given, and the keys in the environment."""
    found: set[str] = set()
    for lm in lms:
        found.update(_secret_values(getattr(lm, "kwargs", {})))
    found.update(value for name, value in os.environ.items() if name.endswith(_SECRET_VARIABLES))
    return {secret for secret in found if len(secret) >= 8}


def _secret_values(options: Mapping[Any, Any]) -> Iterator[str]:
    """The texts that stand under a secret's name, also in options that are groups of options (credentials)."""
    for name, value in ((str(name), value) for name, value in options.items()):
        if name.endswith("headers") and isinstance(value, Mapping):
            for header, item in value.items():
                # `Bearer KEY` is a secret, and KEY is one by itself.
                parts = [str(item), *str(item).split()]
                yield from (part for part in parts if _SECRET_HEADER.search(str(header)) or _is_random(part))
        elif _SECRET_OPTION.search(name):
            if isinstance(value, Mapping):
                yield from _secret_values(value)
            elif isinstance(value, str):
                yield value
