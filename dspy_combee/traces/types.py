"""What a collected trace is: a run that somebody logged, as plain data."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dspy_combee.records.errors import CombeeError
from dspy_combee.records.secrets import hide_secrets
from dspy_combee.records.text import repair

KINDS = ("system", "user", "agent", "reasoning", "input", "call", "output")


class TraceError(CombeeError, ValueError):
    """A trace, or a place where one should be, is not what it should be; the message says what and where.

    What looks like a secret in the message is redacted.

    Attributes:
        place: The file, with the line where it has lines (`runs/a.jsonl:12`); `""` where no file is read.
    """

    def __init__(self, message: str, place: str | os.PathLike[str] = "") -> None:
        self.place = os.fspath(place)
        message = hide_secrets(message)
        super().__init__(f"{self.place}: {message}" if self.place else message)


@dataclass(frozen=True)
class TraceMessage:
    """One message of a trace. Lone surrogates become U+FFFD.

    Attributes:
        kind: `"system"`, `"user"`, `"agent"` and `"reasoning"` are who spoke; `"call"` is a tool call (its text: the
            arguments) and `"output"` what the tool, or the environment, gave back; `"input"` is what a predictor of
            a program was given.
        text: What was said, passed or given back; may be empty.
        tool: The name of the tool, or of the predictor; None where there is none.
        step: The step of the run that it belongs to, counted from 1; 0 where unknown.

    Raises:
        TraceError: If a field has another type, or the kind is none of these.
    """

    kind: str
    text: str
    tool: str | None = None
    step: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TraceError(f"a message's kind is one of {', '.join(KINDS)}, not {self.kind!r}")
        object.__setattr__(self, "text", _text(self.text, "a message's text"))
        if self.tool is not None:
            object.__setattr__(self, "tool", _text(self.tool, "a message's tool"))
        if type(self.step) is not int or self.step < 0:
            raise TraceError(f"a message's step must be an int >= 0, not {self.step!r}")


@dataclass(frozen=True)
class Trace:
    """One collected run, of a whole program or of one predictor.

    Mappings are copied, their keys become text, tuples inside them lists, and lone surrogates U+FFFD; other objects
    (images, say, in traces that never were in a file) are passed by reference. Two traces are equal when all but
    their source is.

    Attributes:
        inputs: What the run was given, by field.
        outputs: What it gave, by field; empty when it gave nothing.
        feedback: What was said about it: by a metric, a verifier, a person.
        score: A finite number, higher is better; None when nobody scored it.
        predictor: The name of the predictor that it is a trace of, as `named_predictors()` gives it; None for the
            whole program.
        steps: Its messages, in order.
        source: Where it was read: the file's path inside the folder, with the line where it has lines.
        metadata: What else is known: the agent, the model, the task's name. Not shown to reflection.

    Raises:
        TraceError: If a field has another type, or the score is not finite.
    """

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any] = field(default_factory=dict)
    feedback: str = ""
    score: float | None = None
    predictor: str | None = None
    steps: tuple[TraceMessage, ...] = ()
    source: str = field(default="", compare=False)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "metadata"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise TraceError(f"{name} must be a mapping of field names to values, not {type(value).__name__}")
            object.__setattr__(self, name, _plain(value))
        for name in ("feedback", "source"):
            object.__setattr__(self, name, _text(getattr(self, name), name))
        if self.predictor is not None:
            object.__setattr__(self, "predictor", _text(self.predictor, "predictor"))
        if self.score is not None:
            object.__setattr__(self, "score", as_score(self.score))
        steps = tuple(self.steps)
        if not all(isinstance(step, TraceMessage) for step in steps):
            raise TraceError("steps must be TraceMessage objects")
        object.__setattr__(self, "steps", steps)


def as_score(value: object) -> float:
    """`value` as a score: a finite number, a bool, or a text that spells a number.

    Raises:
        TraceError: If it is none of these.
    """
    try:
        score = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise TraceError(f"a score must be a finite number, not {value!r:.100}")
    return score


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise TraceError(f"{what} must be text, not {type(value).__name__}")
    return repair(value)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return repair(value)
    if isinstance(value, Mapping):
        return {repair(str(key)): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_plain(item) for item in value]
    return value
