"""Collected traces as plain data: one logged run, its messages, and the error for what is no trace."""

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
    """Report a trace, or a place where one should be, that cannot be read.

    The message says what is wrong and where; what looks like a secret in it is redacted.
    """

    place: str
    """The file, with the line where it has lines (`runs/a.jsonl:12`); `""` where no file is read."""

    def __init__(self, message: str, place: str | os.PathLike[str] = "") -> None:
        self.place = os.fspath(place)
        message = hide_secrets(message)
        super().__init__(f"{self.place}: {message}" if self.place else message)

    def at(self, place: str | os.PathLike[str]) -> TraceError:
        """Return the same error with a place, unless it has one."""
        return self if self.place else TraceError(str(self), place)


@dataclass(frozen=True)
class TraceMessage:
    """Hold one message of a trace. Lone surrogates become U+FFFD.

    Raises:
        TraceError: If a field has the wrong type, or the kind is unknown.
    """

    kind: str
    """Who spoke: `"system"`, `"user"`, `"agent"` or `"reasoning"`. A tool call is `"call"` (its text: the arguments),
    what the tool or the environment returned is `"output"`, what a predictor was given is `"input"`."""
    text: str
    """What was said, passed or returned; may be empty."""
    tool: str | None = None
    """Name of the tool or of the predictor; None where there is none."""
    step: int = 0
    """The step of the run that it belongs to, counted from 1; 0 where unknown."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TraceError(f"a message's kind is one of {', '.join(KINDS)}, not {self.kind!r}")
        _repair_text(self, "text", "a message's text")
        if self.tool is not None:
            _repair_text(self, "tool", "a message's tool")
        if type(self.step) is not int or self.step < 0:
            raise TraceError(f"a message's step must be an int >= 0, not {self.step!r}")


@dataclass(frozen=True)
class Trace:
    """Hold one collected run of a whole program or of one predictor.

    Mappings are copied, their keys become text, tuples inside them lists, and lone surrogates U+FFFD; other objects
    (images, say, in traces that were never in a file) are passed by reference. Two traces are equal when all but
    their source is.

    Raises:
        TraceError: If a field has the wrong type, or the score is not finite.
    """

    inputs: Mapping[str, Any]
    """What the run was given, by field."""
    outputs: Mapping[str, Any] = field(default_factory=dict)
    """What it returned, by field; empty when it returned nothing."""
    feedback: str = ""
    """What was said about it by a metric, a verifier or a person."""
    score: float | None = None
    """A finite number, higher is better; None when nobody scored it."""
    predictor: str | None = None
    """Name of the predictor that it is a trace of, as in `named_predictors()`; None for the whole program."""
    steps: tuple[TraceMessage, ...] = ()
    """Its messages, in order."""
    source: str = field(default="", compare=False)
    """Where it was read: the file's path inside the folder, with the line where it has lines."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What else is known (the agent, the model, the trial); not shown to reflection."""

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "metadata"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise TraceError(f"{name} must be a mapping of field names to values, not {type(value).__name__}")
            object.__setattr__(self, name, _plain(value))
        for name in ("feedback", "source") if self.predictor is None else ("feedback", "source", "predictor"):
            _repair_text(self, name, name)
        if self.score is not None:
            object.__setattr__(self, "score", as_score(self.score))
        steps = tuple(self.steps)
        if not all(isinstance(step, TraceMessage) for step in steps):
            raise TraceError("steps must be TraceMessage objects")
        object.__setattr__(self, "steps", steps)


def as_score(value: object) -> float:
    """Return `value`, which may be a number, a bool or the text of a number, as a score.

    Raises:
        TraceError: If it is none of these, or not finite.
    """
    try:
        score = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise TraceError(f"a score must be a finite number, not {value!r:.100}")
    return score


def _repair_text(target: Trace | TraceMessage, name: str, description: str) -> None:
    value = getattr(target, name)
    if not isinstance(value, str):
        raise TraceError(f"{description} must be text, not {type(value).__name__}")
    object.__setattr__(target, name, repair(value))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return repair(value)
    if isinstance(value, Mapping):
        return {repair(str(key)): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_plain(item) for item in value]
    return value
