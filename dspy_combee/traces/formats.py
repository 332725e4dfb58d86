"""The forms in which collected traces stand in files: one JSON value to one `Trace`.

Our own form (`"jsonl"`), version 1, is one JSON object a line:

    {"format": "dspy_combee.trace", "version": 1,
     "inputs": {"question": "..."}, "outputs": {"answer": "..."}, "feedback": "...", "score": 0.5,
     "predictor": null, "steps": [{"kind": "agent", "text": "...", "tool": null, "step": 1}],
     "source": "...", "metadata": {"model": "..."}}

Only `inputs` must be there; `format` and `version` may be left out when one of `outputs`, `feedback`, `score` and
`steps` is there. Other keys are refused, so that a misspelt one is not lost.

The others are read, not written: `"atif"`, trajectories in the Agent Trajectory Interchange Format, which the package
`atif` validates, and `"terminal_bench"`, rows of the public Terminal-Bench trajectory data (`task_name`, `agent`,
`model`, `reward` and `steps`, a JSON text). Of how a step of such a row is written little is promised, so that the
usual names are understood: `src`/`source`/`role`, `msg`/`message`/`content`, `tools`/`tool_calls` with
`fn`/`function_name`/`name` and `cmd`/`arguments`, `obs`/`observation`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from dspy_combee.records.secrets import shorten
from dspy_combee.traces.types import Trace, TraceError, TraceMessage, as_score

_FORMAT = "dspy_combee.trace"
_VERSION = 1
_FIELDS = ("inputs", "outputs", "feedback", "score", "predictor", "steps", "source", "metadata")
_RESULT_FIELDS = frozenset({"outputs", "feedback", "score", "steps"})

_SPEAKERS = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("agent", "assistant", "ai", "model"), "agent"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "environment", "observation"), "output"),
}
_SPEAKER_KEYS = ("source", "src", "role", "from")
_TEXT_KEYS = ("message", "msg", "content", "text", "value")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thought")
_CALL_KEYS = ("tool_calls", "tools")
_OUTPUT_KEYS = ("observation", "obs", "output")


def form_of(value: Any) -> str | None:
    """The name of the form in which a JSON value is a trace; None when it is none."""
    if not isinstance(value, dict):
        return None
    if value.get("format") == _FORMAT or ("inputs" in value and not _RESULT_FIELDS.isdisjoint(value)):
        return "jsonl"
    if str(value.get("schema_version")).startswith("ATIF-"):
        return "atif"
    if {"task_name", "steps"} <= value.keys():
        return "terminal_bench"
    return None


def to_trace(value: Any, form: str) -> Trace:
    """The trace that a JSON value holds.

    Args:
        value: What `json.loads` gave.
        form: One of `READERS`.

    Raises:
        TraceError: If the value has another form.
        ImportError: If `atif` is needed and not installed.
    """
    if not isinstance(value, dict):
        raise TraceError(f"a trace is a JSON object, not {type(value).__name__}")
    return READERS[form](value)


def to_json_line(trace: Trace) -> str:
    """Our own form of a trace, on one line; what JSON has no form for becomes its text."""
    value: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
    value |= {name: getattr(trace, name) for name in _FIELDS}
    value["steps"] = [vars(step) for step in trace.steps]
    return json.dumps(value, ensure_ascii=False, default=str) + "\n"


def _from_own(value: Mapping[str, Any]) -> Trace:
    if value.get("format", _FORMAT) != _FORMAT or value.get("version", _VERSION) != _VERSION:
        raise TraceError(f"'format' {_FORMAT!r} and 'version' {_VERSION} are expected")
    _refuse_others(value, ("format", "version", *_FIELDS), "a trace")
    fields: dict[str, Any] = {name: value[name] for name in _FIELDS if value.get(name) is not None}
    if "inputs" not in fields:
        raise TraceError("a trace has 'inputs'")
    steps = fields.pop("steps", [])
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise TraceError("'steps' must be a list of objects")
    for step in steps:
        _refuse_others(step, ("kind", "text", "tool", "step"), "a step")
        if not {"kind", "text"} <= step.keys():
            raise TraceError("a step has 'kind' and 'text'")
    score = fields.get("score")
    if isinstance(score, str):
        raise TraceError(f"a score must be a number, not {score!r:.100}")
    return Trace(**fields, steps=tuple(TraceMessage(**step) for step in steps))


def _refuse_others(value: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    if unknown := sorted(value.keys() - set(known)):
        raise TraceError(f"{what} has no field {unknown[0]!r:.100}; known are {', '.join(known)}")


def _from_row(value: Mapping[str, Any]) -> Trace:
    steps = value.get("steps")
    if isinstance(steps, str):
        try:
            steps = json.loads(steps) if steps.strip() else []
        except ValueError as error:
            raise TraceError(f"'steps' is not JSON: {error}") from error
    if steps is None:
        steps = []
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise TraceError("'steps' must be a JSON text of a list of objects")
    task_name, reward = value.get("task_name"), value.get("reward")
    if not isinstance(task_name, str):
        raise TraceError(f"'task_name' must be text, not {type(task_name).__name__}")
    names = ("agent", "model", "trial_id", "trial_name")
    return conversation_trace(
        steps,
        task_name=task_name,
        score=None if reward is None or reward == "" else as_score(reward),
        metadata={name: value[name] for name in names if isinstance(value.get(name), str)},
    )


def _from_atif(value: Mapping[str, Any]) -> Trace:
    validate_atif(value)
    return conversation_trace(value["steps"], metadata=agent_of(value))


def validate_atif(value: Any) -> None:
    """Check a trajectory with the package `atif`.

    Raises:
        TraceError: If it breaks a rule of the format.
        ImportError: If `atif` is not installed.
    """
    try:
        model = importlib.import_module("atif").Trajectory
    except ImportError as error:
        raise ImportError(
            "ATIF trajectories are validated by the package 'atif', which is not installed: install "
            "'dspy-combee[traces]' (atif needs Python 3.11 or newer)"
        ) from error
    try:
        model.model_validate(value)
    except ValidationError as error:
        # Without the values, which are not redacted yet.
        first, *others = error.errors(include_url=False, include_input=False, include_context=False)
        where = ".".join(str(part) for part in first["loc"])
        more = f" (and {len(others)} more)" if others else ""
        what = shorten(first["msg"], 300)
        raise TraceError(f"not an ATIF trajectory: {where + ': ' if where else ''}{what}{more}") from None


def agent_of(value: Mapping[str, Any]) -> dict[str, str]:
    """The agent and the model of an ATIF trajectory."""
    agent = value["agent"]
    return {"agent": agent["name"]} | ({"model": agent["model_name"]} if agent.get("model_name") else {})


READERS: dict[str, Callable[[Mapping[str, Any]], Trace]] = {
    "jsonl": _from_own,
    "atif": _from_atif,
    "terminal_bench": _from_row,
}


def conversation_trace(
    steps: list[Any],
    task_name: str | None = None,
    score: float | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Trace:
    """The trace of an agent's run: its input is the first thing that the user said, its output the agent's last word.

    Steps that an agent copied from an earlier part of the run (`is_copied_context`) give the task and nothing else.
    """
    messages: list[TraceMessage] = []
    task: str | None = None
    for number, step in enumerate(steps, start=1):
        for message in _messages(step, number):
            if task is None and message.kind == "user" and message.text.strip():
                task = message.text
            if not step.get("is_copied_context"):
                messages.append(message)
    inputs = {"task_name": task_name, "task": task}
    said = [message.text for message in messages if message.kind == "agent" and message.text.strip()]
    return Trace(
        inputs={name: text for name, text in inputs.items() if text is not None},
        outputs={"final_message": said[-1]} if said else {},
        score=score,
        steps=tuple(messages),
        metadata=metadata or {},
    )


def _messages(step: Mapping[str, Any], number: int) -> Iterator[TraceMessage]:
    """The messages of one step: reasoning, what was said, the tool calls, what came back."""
    speaker = str(_first(step, _SPEAKER_KEYS) or "").lower()
    kind = _SPEAKERS.get(speaker, "agent")
    tool = step.get("name") if kind == "output" and isinstance(step.get("name"), str) else None
    if reasoning := as_readable(_first(step, _REASONING_KEYS)):
        yield TraceMessage("reasoning", reasoning, step=number)
    if text := as_readable(_first(step, _TEXT_KEYS)):
        yield TraceMessage(kind, text, tool, number)
    names: dict[Any, str] = {}
    calls = _first(step, _CALL_KEYS)
    for index, call in enumerate(calls if isinstance(calls, list) else [] if calls is None else [calls]):
        name, arguments = _call(call)
        call_id = _first(call, ("tool_call_id", "id")) if isinstance(call, Mapping) else None
        names[call_id if isinstance(call_id, str) else index] = name
        yield TraceMessage("call", arguments, name, number)
    lone = next(iter(names.values())) if len(names) == 1 else None
    for source, output in _outputs(_first(step, _OUTPUT_KEYS)):
        yield TraceMessage("output", output, names.get(source, lone) if isinstance(source, str) else lone, number)


def _call(call: Any) -> tuple[str, str]:
    """The name and the arguments of a tool call."""
    if not isinstance(call, Mapping):
        return "tool", as_readable(call)
    if isinstance(call.get("function"), Mapping):
        call = call["function"]
    name = _first(call, ("function_name", "fn", "name", "tool"))
    return str(name or "tool"), as_readable(_first(call, ("arguments", "cmd", "command", "args", "input")))


def _outputs(observation: Any) -> Iterator[tuple[Any, str]]:
    """What came back, each with the id of the call that it answers."""
    results = observation.get("results") if isinstance(observation, Mapping) else None
    if not isinstance(results, list):
        if text := as_readable(observation):
            yield None, text
        return
    for result in results:
        if not isinstance(result, Mapping):
            yield None, as_readable(result)
            continue
        text = as_readable(result.get("content"))
        if not text and result.get("subagent_trajectory_ref"):
            text = "[the trajectory of a subagent, not shown]"
        if text:
            yield result.get("source_call_id"), text


def _first(value: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The first of the named items that is there and not None."""
    return next((value[name] for name in names if value.get(name) is not None), None)


def as_readable(value: Any) -> str:
    """A JSON value as a person writes it: texts as they are, parts one after another, the rest as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "type" in part for part in value):
        return "\n".join(_part(part) for part in value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _part(part: Mapping[str, Any]) -> str:
    """A part of a message; of an image or a sound only that there was one, wherever it may be."""
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part['type']}]"
