"""Forms in which a JSON value is a trace: our own, ATIF trajectories, and rows of the Terminal-Bench data.

Our own form, version 1, is one JSON object a line:

    {"format": "dspy_combee.trace", "version": 1,
     "inputs": {"question": "..."}, "outputs": {"answer": "..."}, "feedback": "...", "score": 0.5,
     "predictor": null, "steps": [{"kind": "agent", "text": "...", "tool": null, "step": 1}],
     "source": "...", "metadata": {"model": "..."}}

Only `inputs` must be there; `format` and `version` may be left out when one of `outputs`, `feedback`, `score` and
`steps` is there. Other keys are refused, so that a misspelt one is not lost.

The steps of all other forms are read by `conversation`, which understands the usual names of their parts:
`src`/`source`/`role`, `msg`/`message`/`content`, `tools`/`tool_calls` with `fn`/`function_name`/`name` and
`cmd`/`arguments`, `obs`/`observation`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from dspy_combee.records.secrets import shorten
from dspy_combee.traces.files import JsonForm
from dspy_combee.traces.types import Trace, TraceError, TraceMessage, as_score

_FORMAT, _VERSION = "dspy_combee.trace", 1
_FIELDS = ("inputs", "outputs", "feedback", "score", "predictor", "steps", "source", "metadata")
_RESULT_FIELDS = frozenset({"outputs", "feedback", "score", "steps"})

_SPEAKERS = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("agent", "assistant", "ai", "model"), "agent"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "environment", "observation"), "output"),
}


class OwnForm(JsonForm):
    """Read our own form."""

    def matches(self, value: Any) -> bool:
        """Tell whether a value names the form, or has inputs and something that came of them."""
        if not isinstance(value, dict):
            return False
        return value.get("format") == _FORMAT or ("inputs" in value and not _RESULT_FIELDS.isdisjoint(value))

    def to_trace(self, value: Any) -> Trace:
        """Return the trace as it was saved."""
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
        if isinstance(score := fields.get("score"), str):
            raise TraceError(f"a score must be a number, not {score!r:.100}")
        return Trace(**fields, steps=tuple(TraceMessage(**step) for step in steps))


def to_json_line(trace: Trace) -> str:
    """Return a trace in our own form, on one line; what JSON has no form for becomes its text."""
    value: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
    value |= {name: getattr(trace, name) for name in _FIELDS}
    value["steps"] = [vars(step) for step in trace.steps]
    return json.dumps(value, ensure_ascii=False, default=str) + "\n"


def _refuse_others(value: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    if unknown := sorted(value.keys() - set(known)):
        raise TraceError(f"{what} has no field {unknown[0]!r:.100}; known are {', '.join(known)}")


class AtifForm(JsonForm):
    """Read trajectories in the Agent Trajectory Interchange Format, validated by the package `atif`."""

    def matches(self, value: Any) -> bool:
        """Tell whether a value names an ATIF schema."""
        return isinstance(value, dict) and str(value.get("schema_version")).startswith("ATIF-")

    def to_trace(self, value: Any) -> Trace:
        """Return a trajectory's trace, which has no score."""
        validate_atif(value)
        return conversation(value["steps"], metadata=agent_of(value))


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
    """Return the agent and the model of an ATIF trajectory."""
    agent = value["agent"]
    return {"agent": agent["name"]} | ({"model": agent["model_name"]} if agent.get("model_name") else {})


class TerminalBenchRows(JsonForm):
    """Read rows of the Terminal-Bench data: `task_name`, `agent`, `model`, `reward` and `steps`, a JSON text."""

    def matches(self, value: Any) -> bool:
        """Tell whether a value has a task's name and steps."""
        return isinstance(value, dict) and {"task_name", "steps"} <= value.keys()

    def to_trace(self, value: Any) -> Trace:
        """Return a row's trace."""
        steps = value.get("steps") or []
        if isinstance(steps, str):
            try:
                steps = json.loads(steps) if steps.strip() else []
            except ValueError as error:
                raise TraceError(f"'steps' is not JSON: {error}") from error
        if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
            raise TraceError("'steps' must be a JSON text of a list of objects")
        task_name, reward = value.get("task_name"), value.get("reward")
        if not isinstance(task_name, str):
            raise TraceError(f"'task_name' must be text, not {type(task_name).__name__}")
        names = ("agent", "model", "trial_id", "trial_name")
        metadata = {name: value[name] for name in names if isinstance(value.get(name), str)}
        return conversation(steps, task_name, None if reward in (None, "") else as_score(reward), metadata)


def conversation(
    steps: Sequence[Mapping[str, Any]],
    task_name: str | None = None,
    score: float | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Trace:
    """Return the trace of an agent's run; its input is the user's first message, its output the agent's last.

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
    """Yield the messages of one step: reasoning, what was said, the tool calls, what came back."""
    kind = _SPEAKERS.get(str(_first(step, "source", "src", "role", "from") or "").lower(), "agent")
    tool = step.get("name") if kind == "output" and isinstance(step.get("name"), str) else None
    if reasoning := as_readable(_first(step, "reasoning_content", "reasoning", "thought")):
        yield TraceMessage("reasoning", reasoning, step=number)
    if text := as_readable(_first(step, "message", "msg", "content", "text", "value")):
        yield TraceMessage(kind, text, tool, number)
    names: dict[Any, str] = {}
    calls = _first(step, "tool_calls", "tools")
    for index, call in enumerate(calls if isinstance(calls, list) else [] if calls is None else [calls]):
        name, arguments = _call(call)
        call_id = _first(call, "tool_call_id", "id") if isinstance(call, Mapping) else None
        names[call_id if isinstance(call_id, str) else index] = name
        yield TraceMessage("call", arguments, name, number)
    lone = next(iter(names.values())) if len(names) == 1 else None
    for source, output in _outputs(_first(step, "observation", "obs", "output")):
        yield TraceMessage("output", output, names.get(source, lone) if isinstance(source, str) else lone, number)


def _call(call: Any) -> tuple[str, str]:
    """Return the name and the arguments of a tool call."""
    if not isinstance(call, Mapping):
        return "tool", as_readable(call)
    if isinstance(call.get("function"), Mapping):
        call = call["function"]
    name = _first(call, "function_name", "fn", "name", "tool")
    return str(name or "tool"), as_readable(_first(call, "arguments", "cmd", "command", "args", "input"))


def _outputs(observation: Any) -> Iterator[tuple[Any, str]]:
    """Yield what came back, each with the id of the call that it answers."""
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


def _first(value: Mapping[str, Any], *names: str) -> Any:
    """Return the first of the named items that is there and not None."""
    return next((value[name] for name in names if value.get(name) is not None), None)


def as_readable(value: Any) -> str:
    """Return a JSON value as a person writes it: texts as they are, parts one after another, the rest as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "type" in part for part in value):
        # Of an image or a sound only that there was one, wherever it may be.
        return "\n".join(part["text"] if isinstance(part.get("text"), str) else f"[{part['type']}]" for part in value)
    return json.dumps(value, ensure_ascii=False, default=str)
