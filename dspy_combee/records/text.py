"""Text that is data: what goes into a prompt, or comes out of a reply, never taken for anything else."""

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
    """`str(value)`, or another form of it; where the value's own method fails, its type and the failure's."""
    try:
        return form(value)
    except Exception as error:
        return f"<{type(value).__name__} without a text: {type(error).__name__}>"


def as_text(text: str) -> str:
    """`text` as it may stand in a prompt: repaired, with DSPy's custom-type markers made inert."""
    return _TYPE_MARKERS.sub("<<" + _WORD_JOINER, repair(text))


def as_data(value: Any) -> Any:
    """`value` with every text in it made safe for a prompt.

    DSPy's own types (images, histories) stay what they are and are passed by reference; what has no plain
    form becomes its `str`.
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
    """`value` with every text in it made safe and every type kept; `value` itself where nothing changes."""
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
