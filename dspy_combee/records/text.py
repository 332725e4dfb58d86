"""Text as data: made safe for a prompt, measured in tokens, and cut to fit.

What stands in a prompt or comes out of a reply is never taken for anything else: placeholders, backticks, field markers
and DSPy's custom-type markers in it change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from dspy.adapters.types import History
from dspy.adapters.types.base_type import Type
from dspy.primitives.repl_types import REPLHistory
from pydantic import BaseModel, RootModel

_SURROGATES = re.compile("[\ud800-\udfff]")
# DSPy cuts user messages at these markers and reads what stands between them as content blocks. A word joiner
# (U+2060), which shows nothing, keeps a marker that is part of a record from being one.
_TYPE_MARKERS = re.compile(r"<<(?=CUSTOM-TYPE-(?:START|END)-IDENTIFIER>>)")
_WORD_JOINER = "\u2060"
# What Python writes for an object that has no text of its own: it differs from process to process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")


def repair(text: str) -> str:
    """Replace lone surrogates, which no provider can receive, by U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


def text_of(value: object, form: Callable[[Any], str] = str) -> str:
    """Return `form(value)`; if the value's own method raises, name the type of the value and of the error instead."""
    try:
        return form(value)
    except Exception as error:
        return f"<{type(value).__name__} without a text: {type(error).__name__}>"


def as_text(text: str) -> str:
    """Make `text` safe for a prompt: repair it, and make DSPy's custom-type markers in it inert."""
    return _TYPE_MARKERS.sub("<<" + _WORD_JOINER, repair(text))


def as_data(value: Any) -> Any:
    """Make every text in `value` safe for a prompt.

    DSPy's own types (images, histories) keep their type and are passed by reference; an object without a plain form
    becomes its `str`.
    """
    if isinstance(value, str):
        return as_text(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, History):
        return value.model_copy(update={"messages": [as_data(message) for message in value.messages]})
    if isinstance(value, Type):
        formatted = value.format()
        return as_text(formatted) if isinstance(formatted, str) else _same_type(value)
    if isinstance(value, REPLHistory):
        return _same_type(value)
    if isinstance(value, RootModel):
        return as_data(value.root)
    if isinstance(value, BaseModel):
        return as_data(_fields(value))
    if isinstance(value, Enum):
        return as_data(value.value)
    if isinstance(value, Mapping):
        return {as_text(str(key)): as_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((as_data(item) for item in value), key=str)  # The order of a set differs from run to run.
    return as_text(_ADDRESS.sub("", text_of(value)))


def _same_type(value: Any) -> Any:
    """Make every text in `value` safe and keep every type; return `value` itself if nothing changes."""
    if isinstance(value, str):
        return as_text(value)
    if isinstance(value, BaseModel):
        fields = {name: _same_type(item) for name, item in _fields(value).items()}
        return value if fields == _fields(value) else value.model_copy(update=fields)
    if isinstance(value, dict):
        return {key: _same_type(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_same_type(item) for item in value]
    return value


def _fields(model: BaseModel) -> dict[str, Any]:
    return {**vars(model), **(model.model_extra or {})}


def estimate_tokens(value: Any) -> int:
    """Estimate the tokens that `value` takes as text, at least 1.

    Four ASCII characters count as one token, any other character as one; an image or other DSPy type as 1,000.
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
    """Cut the longest texts in `value` in the middle, leaving a mark, until it takes at most `max_tokens`.

    Only texts are cut: if the rest alone takes more than that, so does the result.
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
    """Keep the start and the end of `text` within `max_tokens`, or only the mark if that alone takes more."""
    kept = int(len(text) * max_tokens / max(1, estimate_tokens(text)))
    while True:
        mark = f" [... {len(text) - kept:,} characters cut ...] "
        head, tail = (kept + 1) // 2, kept // 2
        cut = text[:head] + mark + (text[-tail:] if tail else "")
        if kept == 0 or estimate_tokens(cut) <= max_tokens:
            return cut
        kept = max(0, kept - max(1, kept // 50))
