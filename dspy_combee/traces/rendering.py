"""How a collected trace is shown to reflection: whole where there is room, else cut to a number of tokens.

What stays longest: the task, what was said of the run (score, errors, the verifier's output), the last steps, and
outputs of tools that look like errors. Outputs of tools are cut first, each to its beginning and its end; then steps
of the middle are left out; then what is left of long messages is cut. Each cut leaves a mark that says how much is
gone. Tokens are counted as by `estimate_tokens`: a quarter of the ASCII characters and all of the others.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dspy_combee.records.text import estimate_tokens
from dspy_combee.records.types import ReflectionRecord
from dspy_combee.traces.programs import plain_text
from dspy_combee.traces.types import Trace, TraceMessage

# Under this a record would be little more than its keys.
MIN_RECORD_TOKENS = 64

# Lengths and limits in here are in quarters of a token: an ASCII character is one, any other four.
_QUARTERS = 4
# Of the room: what the task, the feedback, the outputs and the steps may take when all of them want more.
_SHARES = (0.25, 0.25, 0.1, 0.4)
_LEAST_OUTPUT = 120
_MARK_BYTES = 64
_MORE_WEIGHT = 4.0
_NUM_LAST = 10
_ERROR_WORDS = (
    *("error", "exception", "traceback", "failed", "failure", "fatal", "panic", "segmentation fault"),
    *("not found", "no such file", "denied", "timed out"),
)
_EXIT_CODE = re.compile(r"exit (?:code|status):? [1-9]")


def render_trace(trace: Trace, max_tokens: int | None = None) -> str:
    """A trace as text: the task, what was said of the run, what came out of it, and its steps.

    Args:
        trace: The trace.
        max_tokens: The most tokens that the text may have (estimated); None for no limit. It is never more, and the
            text is never empty.

    Raises:
        ValueError: If `max_tokens` is no int >= 1.
    """
    limit = _limit(max_tokens, 1)
    parts = _Parts.of(trace)
    if limit is not None:
        parts = parts.fitted(limit - sum(len(title) + 4 for title in ("Task", "Feedback", "Outcome", "Steps")))
    sections = [
        ("Task", _lines(parts.inputs)),
        ("Feedback", parts.feedback),
        ("Outcome", _lines(parts.outputs)),
        ("Steps", parts.steps),
    ]
    text = "\n\n".join(f"{title}:\n{body}" for title, body in sections if body)
    return text if limit is None else cut(text or "Feedback: cut", limit)


def to_record(trace: Trace, max_tokens: int | None = None, source: int = 0) -> ReflectionRecord:
    """A trace as a reflection record: `Inputs`, `Generated Outputs`, `Feedback`.

    The steps stand in the outputs as one text, `trajectory` (`steps` where there is an output of that name). A record
    that is short enough keeps its values as they are; in one that is cut they are text.

    Args:
        trace: The trace.
        max_tokens: The most tokens that the record may have (estimated); None for no limit. It is never more.
        source: Position of the trace in its minibatch.

    Raises:
        ValueError: If `max_tokens` is no int >= 64.
    """
    room = _limit(max_tokens, MIN_RECORD_TOKENS)
    parts = _Parts.of(trace)
    record = _record(trace.inputs, trace.outputs, parts, source)
    while max_tokens is not None and room is not None and (tokens := estimate_tokens(record)) > max_tokens:
        fitted = parts.fitted(room)
        record = _record(fitted.inputs, fitted.outputs, fitted, source)
        # How much the record takes beyond its texts is only known when it is made.
        room = int(room * min(0.97, max_tokens / tokens)) if tokens < 2 * max_tokens else room - max(1, room // 8)
    return record


def _record(inputs: Mapping[str, Any], outputs: Mapping[str, Any], parts: _Parts, source: int) -> ReflectionRecord:
    outputs = dict(outputs)
    if parts.steps:
        outputs["steps" if "trajectory" in outputs else "trajectory"] = parts.steps
    fields = {"Inputs": dict(inputs), "Generated Outputs": outputs, "Feedback": parts.feedback}
    return ReflectionRecord(fields, source)


def _limit(max_tokens: int | None, least: int) -> int | None:
    """The limit in quarters of a token."""
    if max_tokens is None:
        return None
    if type(max_tokens) is not int or max_tokens < least:
        raise ValueError(f"max_tokens must be an int >= {least} or None, got {max_tokens!r}")
    return max_tokens * _QUARTERS


@dataclass(frozen=True)
class _Parts:
    """What a trace is shown as."""

    inputs: dict[str, str]
    feedback: str
    outputs: dict[str, str]
    messages: tuple[TraceMessage, ...]
    steps: str

    @classmethod
    def of(cls, trace: Trace) -> _Parts:
        """The whole of a trace; what its steps only repeat of the task and the outcome is left out of them."""
        inputs, outputs = _texts(trace.inputs), _texts(trace.outputs)
        shown = {"user": set(inputs.values()), "agent": set(outputs.values())}
        messages = tuple(m for m in trace.steps if m.text not in shown.get(m.kind, ()))
        return cls(inputs, _feedback(trace), outputs, messages, _joined(messages, range(len(messages))))

    def fitted(self, limit: int) -> _Parts:
        """The parts cut so that their texts take no more than `limit` together."""
        sizes = [_fields_size(self.inputs), _size(self.feedback), _fields_size(self.outputs), _size(self.steps)]
        task, feedback, outcome, steps = allot(sizes, _SHARES, max(0, limit))
        return _Parts(
            _fit_fields(self.inputs, task),
            cut(self.feedback, feedback),
            _fit_fields(self.outputs, outcome),
            self.messages,
            _fit_steps(self.messages, steps) if _size(self.steps) > steps else self.steps,
        )


def _feedback(trace: Trace) -> str:
    score = [] if trace.score is None else [f"This trajectory got a score of {trace.score}."]
    said = [trace.feedback] if trace.feedback.strip() else []
    return "\n".join(score + said) or "Nobody scored this trajectory or said anything about it."


def _texts(fields: Mapping[str, Any]) -> dict[str, str]:
    return {name: plain_text(value) for name, value in fields.items()}


def _lines(fields: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {text}" for name, text in fields.items())


def _fields_size(fields: Mapping[str, str]) -> int:
    return sum(_size(name) + 3 + _size(text) for name, text in fields.items())


def _fit_fields(fields: Mapping[str, str], limit: int) -> dict[str, str]:
    """The fields, each cut to a fair share; one text where the names alone would take half of the room."""
    if not fields or _fields_size(fields) <= limit:
        return dict(fields)
    names = sum(_size(name) + 3 for name in fields)
    if names > limit // 2:
        text = cut(_lines(fields), limit)
        return {"fields": text} if text else {}
    limits = allot([_size(text) for text in fields.values()], [1.0] * len(fields), limit - names)
    return {name: cut(text, room) for (name, text), room in zip(fields.items(), limits, strict=True)}


def _fit_steps(messages: Sequence[TraceMessage], limit: int) -> str:
    """The steps in no more than `limit`: outputs of tools cut to what the messages leave, else the middle left out."""
    heads = [_size(_head(message)) + 1 for message in messages]
    sizes = [_size(message.text) for message in messages]
    outputs = [index for index, message in enumerate(messages) if message.kind in ("output", "input")]
    is_output = set(outputs)
    left = limit - sum(heads) - sum(size for index, size in enumerate(sizes) if index not in is_output)
    if left >= sum(min(sizes[index], _LEAST_OUTPUT) for index in outputs):
        weights = [_weight(messages, index) for index in outputs]
        rooms = allot([sizes[index] for index in outputs], weights, left, _LEAST_OUTPUT)
        limits = dict(zip(outputs, rooms, strict=True))
        return _joined(messages, range(len(messages)), limits)
    caps = {
        index: min(size, max(_LEAST_OUTPUT, limit // 20) if index in is_output else max(160, limit // 6))
        for index, size in enumerate(sizes)
    }
    costs = [head + caps[index] for index, head in enumerate(heads)]
    return cut(_joined(messages, _kept(messages, costs, limit), caps), limit)


def _weight(messages: Sequence[TraceMessage], index: int) -> float:
    last = index >= len(messages) - _NUM_LAST
    return _MORE_WEIGHT if last or _is_error(messages[index]) else 1.0


def _is_error(message: TraceMessage) -> bool:
    if message.kind != "output":
        return False
    text = message.text.lower()
    return any(word in text for word in _ERROR_WORDS) or bool(_EXIT_CODE.search(text))


def _kept(messages: Sequence[TraceMessage], costs: Sequence[int], limit: int) -> list[int]:
    """The messages that stay, in order: from the end up to half of the room, errors, and then from the beginning."""
    count = len(messages)
    kept: dict[int, None] = {}
    used = 2 * _MARK_BYTES
    for index in range(count - 1, -1, -1):
        if kept and used + costs[index] > limit // 2:
            break
        kept[index] = None
        used += costs[index]
    for index in range(count - 1, -1, -1):
        cost = costs[index] + _MARK_BYTES
        if index not in kept and used + cost <= limit * 3 // 4 and _is_error(messages[index]):
            kept[index] = None
            used += cost
    for index in range(count):
        if index in kept:
            continue
        if used + costs[index] > limit:
            break
        kept[index] = None
        used += costs[index]
    return sorted(kept)


def _joined(messages: Sequence[TraceMessage], kept: Iterable[int], limits: Mapping[int, int] | None = None) -> str:
    """The kept messages one after another, with a mark wherever some are left out."""
    limits = limits or {}
    stays = set(kept)
    blocks = []
    for is_kept, run in groupby(range(len(messages)), key=stays.__contains__):
        indexes = list(run)
        if is_kept:
            blocks += [
                _head(messages[i]) + (cut(messages[i].text, limits[i]) if i in limits else messages[i].text)
                for i in indexes
            ]
        else:
            steps = len({messages[i].step for i in indexes})
            characters = sum(len(messages[i].text) for i in indexes)
            blocks.append(f"[... {len(indexes):,} messages of {steps:,} steps ({characters:,} characters) cut ...]")
    return "\n".join(blocks)


def _head(message: TraceMessage) -> str:
    step = f"[{message.step}] " if message.step else ""
    return f"{step}{message.kind}{' ' + message.tool if message.tool else ''}: "


def allot(sizes: Sequence[int], weights: Sequence[float], total: int, least: int = 0) -> list[int]:
    """Share `total` among parts by weight; a part that needs less than its share leaves the rest to the others.

    Args:
        sizes: What each part would take.
        weights: What each may take, in proportion.
        total: What there is.
        least: What each part gets in any case, if it needs it; there must be enough for that.
    """
    given = [min(size, least) for size in sizes]
    left = total - sum(given)
    open_parts = [index for index, size in enumerate(sizes) if size > given[index]]
    while open_parts and left > 0:
        weight = sum(weights[index] for index in open_parts)
        full = [i for i in open_parts if sizes[i] - given[i] <= left * weights[i] / weight]
        for index in full:
            left -= sizes[index] - given[index]
            given[index] = sizes[index]
        if not full:
            for index in open_parts:
                given[index] += int(left * weights[index] / weight)
            break
        open_parts = [index for index in open_parts if index not in set(full)]
    return given


def cut(text: str, limit: int) -> str:
    """`text` in at most `limit` quarters of a token: its beginning and, twice as much, its end, a mark between them."""
    if _size(text) <= limit:
        return text
    room = limit - len(f"\n[... {len(text):,} characters cut ...]\n")
    if room < 16:
        return _start(text, max(0, limit))
    head, end = _start(text, room // 3), _start(text[: -room - 1 : -1], room - room // 3)[::-1]
    return f"{head}\n[... {len(text) - len(head) - len(end):,} characters cut ...]\n{end}"


def _start(text: str, limit: int) -> str:
    """As much of the beginning of `text` as `limit` holds."""
    text = text[:limit]
    if text.isascii():
        return text
    return text[: bisect_right(range(len(text)), limit, key=lambda length: _size(text[: length + 1]))]


def _size(text: str) -> int:
    """How long a text is, in quarters of a token."""
    return len(text) if text.isascii() else _QUARTERS * len(text) - 3 * len(text.encode("ascii", "ignore"))
