"""Traces as reflection sees them: whole where there is room, else cut to a number of tokens.

What stays longest: the task, what was said of the run (score, errors, the verifier's output), the last steps, and
outputs of tools that look like errors. Outputs of tools are cut first, each to its beginning and its end; then steps
of the middle are left out; then what is left of long messages is cut. Each cut leaves a mark that says how much is
gone. Tokens are counted as by `estimate_tokens`: four ASCII characters are one, any other character is one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dspy_combee.records.text import estimate_tokens
from dspy_combee.records.types import ReflectionRecord
from dspy_combee.traces.programs import plain_text
from dspy_combee.traces.types import Trace, TraceMessage

MIN_RECORD_TOKENS = 64
"""Below this a record would be little more than its keys."""

# Lengths and limits in here are in quarters of a token: an ASCII character is one, any other four.
_QUARTERS = 4
# Of the room: what the task, the feedback, the outputs and the steps may take when all of them want more.
_SHARES = (0.25, 0.25, 0.1, 0.4)
_LEAST_OUTPUT = 120
_MARK = 64
_NUM_LAST = 10
_ERROR = re.compile(
    "error|exception|traceback|failed|failure|fatal|panic|segmentation fault|not found|no such file|denied|timed out"
    "|exit (?:code|status):? [1-9]",
    re.IGNORECASE,
)


def render_trace(trace: Trace, max_tokens: int | None = None) -> str:
    """Return a trace as text: the task, what was said of the run, what came out of it, and its steps.

    Args:
        trace: The trace.
        max_tokens: The most tokens that the text may have (estimated); None for no limit. It never has more, and is
            never empty.

    Raises:
        ValueError: If `max_tokens` is no int >= 1.
    """
    limit = _limit(max_tokens, 1)
    parts = _Parts.of(trace)
    if limit is not None:
        parts = parts.fitted(limit - len("Task:\n\n\nFeedback:\n\n\nOutcome:\n\n\nSteps:\n"))
    bodies = (_joined_fields(parts.inputs), parts.feedback, _joined_fields(parts.outputs), parts.steps)
    sections = zip(("Task", "Feedback", "Outcome", "Steps"), bodies, strict=True)
    text = "\n\n".join(f"{title}:\n{body}" for title, body in sections if body)
    return text if limit is None else cut(text or "Feedback: cut", limit)


def to_record(trace: Trace, max_tokens: int | None = None, source: int = 0) -> ReflectionRecord:
    """Return a trace as a reflection record: `Inputs`, `Generated Outputs`, `Feedback`.

    The steps stand in the outputs as one text, `trajectory` (`steps` if there is an output of that name). A record
    that is short enough keeps its values as they are; in one that is cut they are text.

    Args:
        trace: The trace.
        max_tokens: The most tokens that the record may have (estimated); None for no limit. It never has more.
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
    return ReflectionRecord({"Inputs": dict(inputs), "Generated Outputs": outputs, "Feedback": parts.feedback}, source)


def _limit(max_tokens: int | None, least: int) -> int | None:
    if max_tokens is None:
        return None
    if type(max_tokens) is not int or max_tokens < least:
        raise ValueError(f"max_tokens must be an int >= {least} or None, got {max_tokens!r}")
    return max_tokens * _QUARTERS


@dataclass(frozen=True)
class _Parts:
    """Hold the texts that a trace is shown as."""

    inputs: Mapping[str, str]
    feedback: str
    outputs: Mapping[str, str]
    messages: Sequence[TraceMessage]
    steps: str

    @classmethod
    def of(cls, trace: Trace) -> _Parts:
        """Return the whole of a trace; what its steps only repeat of the task and the outcome is left out of them."""
        inputs, outputs = (
            {name: plain_text(value) for name, value in fields.items()} for fields in (trace.inputs, trace.outputs)
        )
        shown = {"user": inputs.values(), "agent": outputs.values()}
        messages = [message for message in trace.steps if message.text not in shown.get(message.kind, ())]
        score = [] if trace.score is None else [f"This trajectory got a score of {trace.score}."]
        feedback = "\n".join(score + ([trace.feedback] if trace.feedback.strip() else []))
        feedback = feedback or "Nobody scored this trajectory or said anything about it."
        return cls(inputs, feedback, outputs, messages, _joined_messages(messages, range(len(messages)), {}))

    def fitted(self, limit: int) -> _Parts:
        """Return the parts cut so that their texts take no more than `limit` together."""
        inputs, outputs = _joined_fields(self.inputs), _joined_fields(self.outputs)
        sizes = [_size(text) for text in (inputs, self.feedback, outputs, self.steps)]
        task, feedback, outcome, steps = allot(sizes, _SHARES, max(0, limit))
        return _Parts(
            _fit_fields(self.inputs, task),
            cut(self.feedback, feedback),
            _fit_fields(self.outputs, outcome),
            self.messages,
            _fit_steps(self.messages, steps) if _size(self.steps) > steps else self.steps,
        )


def _joined_fields(fields: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {text}" for name, text in fields.items())


def _fit_fields(fields: Mapping[str, str], limit: int) -> Mapping[str, str]:
    """Cut each field to a fair share; make one text of them if the names alone would take half of the room."""
    joined = _joined_fields(fields)
    if _size(joined) <= limit:
        return fields
    names = sum(_size(name) + 3 for name in fields)
    if names > limit // 2:
        return {"fields": text} if (text := cut(joined, limit)) else {}
    limits = allot([_size(text) for text in fields.values()], [1.0] * len(fields), limit - names)
    return {name: cut(text, room) for (name, text), room in zip(fields.items(), limits, strict=True)}


def _fit_steps(messages: Sequence[TraceMessage], limit: int) -> str:
    """Cut outputs of tools to what the messages leave of `limit`; if that is too little, leave out the middle."""
    heads = [_size(_head(message)) + 1 for message in messages]
    sizes = [_size(message.text) for message in messages]
    outputs = {index: sizes[index] for index, m in enumerate(messages) if m.kind in ("output", "input")}
    is_error = [message.kind == "output" and bool(_ERROR.search(message.text)) for message in messages]
    left = limit - sum(heads) - sum(sizes) + sum(outputs.values())
    if left >= sum(min(size, _LEAST_OUTPUT) for size in outputs.values()):
        weights = [4.0 if is_error[index] or index >= len(messages) - _NUM_LAST else 1.0 for index in outputs]
        rooms = allot(list(outputs.values()), weights, left, _LEAST_OUTPUT)
        return _joined_messages(messages, range(len(messages)), dict(zip(outputs, rooms, strict=True)))
    caps = {
        index: min(size, max(_LEAST_OUTPUT, limit // 20) if index in outputs else max(160, limit // 6))
        for index, size in enumerate(sizes)
    }
    kept = _kept([head + caps[index] for index, head in enumerate(heads)], is_error, limit)
    return cut(_joined_messages(messages, kept, caps), limit)


def _kept(costs: Sequence[int], is_error: Sequence[bool], limit: int) -> Collection[int]:
    """Choose the messages that stay: from the end up to half of the room, errors, and then from the beginning."""
    backwards = range(len(costs) - 1, -1, -1)
    kept: set[int] = set()
    used = 2 * _MARK
    for index in backwards:
        if kept and used + costs[index] > limit // 2:
            break
        kept.add(index)
        used += costs[index]
    for index in backwards:
        if is_error[index] and index not in kept and used + costs[index] + _MARK <= limit * 3 // 4:
            kept.add(index)
            used += costs[index] + _MARK
    for index in range(len(costs)):
        if index not in kept:
            if used + costs[index] > limit:
                break
            kept.add(index)
            used += costs[index]
    return kept


def _joined_messages(messages: Sequence[TraceMessage], kept: Collection[int], limits: Mapping[int, int]) -> str:
    """Join the kept messages, each cut to its limit, with a mark where some are left out."""
    blocks = []
    for is_kept, run in groupby(range(len(messages)), key=kept.__contains__):
        indexes = list(run)
        if is_kept:
            texts = (cut(messages[i].text, limits[i]) if i in limits else messages[i].text for i in indexes)
            blocks += [_head(messages[i]) + text for i, text in zip(indexes, texts, strict=True)]
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
    hungry = {index for index, size in enumerate(sizes) if size > given[index]}
    while hungry and left > 0:
        per_weight = left / sum(weights[index] for index in hungry)
        full = {index for index in hungry if sizes[index] - given[index] <= per_weight * weights[index]}
        for index in full or hungry:
            more = sizes[index] - given[index] if full else int(per_weight * weights[index])
            given[index] += more
            left -= more
        hungry = hungry - full if full else set()
    return given


def cut(text: str, limit: int) -> str:
    """Cut `text` to `limit` quarters of a token: its beginning, a mark, and its end, which gets twice as much."""
    if _size(text) <= limit:
        return text
    room = limit - len(f"\n[... {len(text):,} characters cut ...]\n")
    if room < 16:
        return _start(text, max(0, limit))
    head, end = _start(text, room // 3), _start(text[: -room - 1 : -1], room - room // 3)[::-1]
    return f"{head}\n[... {len(text) - len(head) - len(end):,} characters cut ...]\n{end}"


def _start(text: str, limit: int) -> str:
    text = text[:limit]
    if text.isascii():
        return text
    return text[: bisect_right(range(len(text)), limit, key=lambda length: _size(text[: length + 1]))]


def _size(text: str) -> int:
    return len(text) if text.isascii() else _QUARTERS * len(text) - 3 * len(text.encode("ascii", "ignore"))
