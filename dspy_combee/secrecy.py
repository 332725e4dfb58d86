"""No secrets in logs, records and reports: texts that go there come through `shorten` or `hide_secrets`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from dspy_combee.redaction import redact

_SECRETS: ContextVar[tuple[str, ...]] = ContextVar("dspy_combee_secrets", default=())


def shorten(text: str, limit: int = 500) -> str:
    """`text` on one line, cut at `limit` characters with a mark, and without what looks like a secret."""
    line = " ".join(hide_secrets(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def hide_secrets(text: str) -> str:
    """`text` with what looks like a secret, and the run's own secrets (`keeping_secret`), made `[redacted]`."""
    return redact(text, _SECRETS.get())


@contextmanager
def keeping_secret(secrets: Iterable[str]) -> Iterator[None]:
    """While this lasts, `hide_secrets` hides these texts too, in every task that is started inside."""
    token = _SECRETS.set((*_SECRETS.get(), *secrets))
    try:
        yield
    finally:
        _SECRETS.reset(token)


def secrets_of(lms: Iterable[Any]) -> set[str]:
    """The keys and header values that language models were given, and the keys in the environment."""
    found: set[str] = set()
    for lm in lms:
        for name, value in getattr(lm, "kwargs", {}).items():
            if name.endswith(("headers",)) and isinstance(value, Mapping):
                found.update(str(item) for item in value.values())
            elif "key" in name or "token" in name.split("_") or "secret" in name:
                found.add(value if isinstance(value, str) else "")
    found.update(value for name, value in os.environ.items() if name.endswith(("_API_KEY", "_TOKEN", "_SECRET")))
    return {secret for secret in found if len(secret) >= 8}
