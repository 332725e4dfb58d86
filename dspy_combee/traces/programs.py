"""Traces from memory: the runs of DSPy programs, as `dspy` and this package return them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import dspy
from dspy.adapters.types import History
from dspy.adapters.types.base_type import Type
from dspy.teleprompt.bootstrap_trace import FailedPrediction

from dspy_combee.records.text import as_data
from dspy_combee.traces.types import Trace, TraceError, TraceMessage, as_score


def traces_from(program_runs: Iterable[Any], program: Any = None) -> list[Trace]:
    """Make traces of runs of a DSPy program.

    Without `program` every run gives one trace, of the whole program, whose steps are the predictor calls. With it
    every run gives one trace for each predictor that it reached: the inputs and outputs of the predictor's last call,
    the score and the feedback of the run, and the predictor's earlier calls as steps.

    Values keep their types, images and histories included, and nothing is redacted: see `redact_trace`.

    Args:
        program_runs: The runs, each `(example, prediction, trace)`, `(example, prediction, trace, score)` or
            `(example, prediction, trace, score, feedback)`, or a mapping or an object with these names (a `Rollout`
            and the items of `dspy`'s `bootstrap_trace_data` are). A trace is DSPy's list of `(predictor, inputs,
            prediction)`; a score is a number, None, or what a metric returns (`score` and `feedback`).
        program: The program that ran, which names its predictors. A predictor that it does not hold itself is
            recognised by its signature if only one of the program's has it, and left out otherwise.

    Raises:
        TraceError: If a run has another form; the message says which.
    """
    return [trace for index, run in enumerate(program_runs) for trace in _traces_of(run, f"run {index}", program)]


class _Call(NamedTuple):
    """Hold one predictor call: of DSPy's traces, or a `TraceStep`."""

    name: str | None
    predictor: Any
    inputs: dict[str, Any]
    prediction: Any

    @classmethod
    def of(cls, call: Any) -> _Call:
        if isinstance(call, tuple | list):
            predictor, inputs, prediction = call
            return cls(None, predictor, dict(inputs), prediction)
        return cls(call.name, call.predictor, dict(call.inputs), call.outputs)


def _traces_of(run: Any, source: str, program: Any) -> list[Trace]:
    try:
        example, prediction, trace, score, feedback = _parts(run)
        if isinstance(score, Mapping | dspy.Prediction):
            feedback = score.get("feedback") if feedback is None else feedback
            score = score.get("score")
        score = None if score is None else as_score(score)
    except TraceError as error:
        raise error.at(source) from None
    try:
        calls = [_Call.of(call) for call in trace or ()]
    except (TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"its trace is no list of (predictor, inputs, prediction): {error}", source) from error

    def make(inputs: Mapping[str, Any], output: Any, steps: Sequence[_Call], name: str | None = None) -> Trace:
        feedback_text = "" if feedback is None else str(feedback)
        return Trace(inputs, _outputs(output), feedback_text, score, name, _messages(steps), source)

    if program is None:
        return [make(_inputs(example), prediction, calls)]
    known = dict(program.named_predictors())
    by_name: dict[str, list[_Call]] = {name: [] for name in known}
    for call in calls:
        name = call.name if call.name in known else _name_of(call.predictor, known)
        if name is not None:
            by_name[name].append(call)
    return [make(own[-1].inputs, own[-1].prediction, own[:-1], name) for name, own in by_name.items() if own]


def _name_of(predictor: Any, known: Mapping[str, Any]) -> str | None:
    """Return the name of a predictor, or of the only one that has its signature."""
    signature = getattr(predictor, "signature", None)
    same = [name for name, own in known.items() if own is predictor]
    if not same and signature is not None:
        same = [name for name, own in known.items() if own.signature is signature]
        same = same or [name for name, own in known.items() if own.signature.equals(signature)]
    return same[0] if len(same) == 1 else None


def _messages(calls: Sequence[_Call]) -> tuple[TraceMessage, ...]:
    messages = []
    for number, call in enumerate(calls, 1):
        signature = getattr(call.predictor, "signature", None)
        name = call.name or getattr(signature, "__name__", None) or type(call.predictor).__name__
        messages.append(TraceMessage("input", plain_text(call.inputs), name, number))
        messages.append(TraceMessage("agent", plain_text(_outputs(call.prediction)), name, number))
    return tuple(messages)


def _parts(run: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return the example, the prediction, the trace, the score and the feedback of a run."""
    if isinstance(run, tuple | list):
        if not 3 <= len(run) <= 5:
            raise TraceError(f"a run has 3 to 5 parts (example, prediction, trace, score, feedback), not {len(run)}")
        example, prediction, calls, score, feedback = (*run, None, None)[:5]
        return example, prediction, calls, score, feedback
    names = ("example", "prediction", "trace", "score", "result", "feedback", "error")
    parts = {name: run.get(name) if isinstance(run, Mapping) else getattr(run, name, None) for name in names}
    if parts["example"] is None:
        raise TraceError(f"a run is (example, prediction, trace, ...), not {type(run).__name__}")
    # A rollout's `result` is what its metric returned, which may hold feedback; its `error` says why it failed.
    result, feedback = parts["result"], parts["feedback"]
    if feedback is None and isinstance(result, Mapping | dspy.Prediction):
        feedback = result.get("feedback")
    if feedback is None and parts["error"]:
        feedback = f"The program failed on this example: {parts['error']}"
    return parts["example"], parts["prediction"], parts["trace"], parts["score"], feedback


def _inputs(example: Any) -> dict[str, Any]:
    """Return the example's inputs, or all its fields where it does not say which are inputs."""
    if isinstance(example, dspy.Example):
        try:
            return dict(example.inputs().items())
        except ValueError:
            return dict(example.items())
    return dict(example) if isinstance(example, Mapping) else {"input": example}


def _outputs(prediction: Any) -> dict[str, Any]:
    if prediction is None:
        return {}
    if isinstance(prediction, FailedPrediction):
        return {"reply that could not be parsed": prediction.completion_text}
    return dict(prediction.items()) if isinstance(prediction, dspy.Example | Mapping) else {"output": prediction}


def plain_text(value: Any) -> str:
    """Return any value as text: a text as it is, data as JSON, an image or its like as the name of its type."""

    def stand_in(item: Any) -> Any:
        if isinstance(item, History):
            return item.messages
        return f"[{type(item).__name__}]" if isinstance(item, Type) else str(item)

    return value if isinstance(value, str) else json.dumps(as_data(value), ensure_ascii=False, default=stand_in)
