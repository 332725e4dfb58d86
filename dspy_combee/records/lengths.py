"""How long a value is as text, and how to cut it to fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspy.adapters.types.base_type import Type


def estimate_tokens(value: Any) -> int:
    """A rough count of the tokens of `value` as text, at least 1.

    A quarter of the ASCII characters and all of the others; an image or its like counts as a thousand.
    """
    if isinstance(value, Mapping):
        return 1 + sum(estimate_tokens(key) + estimate_tokens(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return 1 + sum(estimate_tokens(item) for item in value)
    if isinstance(value, Type):
        return 1000
    text = value if isinstance(value, str) else str(value)
    plain = len(text.encode("ascii", "ignore"))
    return max(1, plain // 4 + len(text) - plain)


def cut_to_fit(value: Any, max_tokens: int) -> Any:
    """`value` with its longest texts cut in the middle, with a mark, until it takes at most `max_tokens`.

    Only texts are cut; where the rest takes more than that alone, the result does too.
    """
    while (over := estimate_tokens(value) - max_tokens) > 0:
        longest = max(_leaves(value), key=estimate_tokens, default="")
        shorter = _cut_middle(longest, max(0, estimate_tokens(longest) - over))
        if len(shorter) >= len(longest):
            return value
        value = _replaced(value, longest, shorter)
    return value


def _leaves(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = list(value.values()) if isinstance(value, Mapping) else value
    return [leaf for part in parts for leaf in _leaves(part)] if isinstance(parts, list | tuple) else []


def _replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, str):
        return new if value == old else value
    if isinstance(value, Mapping):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, old, new) for item in value]
    return value


def _cut_middle(text: str, max_tokens: int) -> str:
    """The start and the end of `text`, within so many tokens where the mark alone is not more."""
    kept = int(len(text) * max_tokens / max(1, estimate_tokens(text)))
    while True:
        mark = f" [... {len(text) - kept:,} characters cut ...] "
        head, tail = (kept + 1) // 2, kept // 2
        cut = text[:head] + mark + (text[-tail:] if tail else "")
        if kept == 0 or estimate_tokens(cut) <= max_tokens:
            return cut
        kept = max(0, kept - max(1, kept // 50))
