"""Traces from memory: the runs of DSPy programs, as `dspy` and this package give them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dspy
from dspy.adapters.types import History
from dspy.adapters.types.base_type import Type
from dspy.teleprompt.bootstrap_trace import FailedPrediction

from dspy_combee.records.text import as_data
from dspy_combee.traces.types import Trace, TraceError, TraceMessage, as_score


def traces_from(program_runs: Iterable[Any], program: Any = None) -> list[Trace]:
    """Collected traces of runs of a DSPy program.

    Without `program` every run gives one trace, of the whole program, whose steps are the predictor calls. With it
    every run gives one trace for each predictor that it reached: the inputs and outputs of the predictor's last call,
    the score and the feedback of the run, and the predictor's earlier calls as steps.

    Values keep their types, images and histories included, and nothing is redacted: see `redact_trace`.

    Args:
        program_runs: The runs, each `(example, prediction, trace)`, `(example, prediction, trace, score)` or
            `(example, prediction, trace, score, feedback)`, or a mapping or an object with these names (a `Rollout`
            and what `dspy`'s `bootstrap_trace_data` gives are). A trace is DSPy's list of `(predictor, inputs,
            prediction)`; a score is a number, None, or what a metric returns (`score` and `feedback`).
        program: The program that ran, which names its predictors. One that it does not hold itself is told by its
            signature, if only one of the program's has it, and left out otherwise.

    Raises:
        TraceError: If a run has another form; the message says which.
    """
    return [trace for index, run in enumerate(program_runs) for trace in _Run(run, index).traces(program)]


class _Run:
    """One run, its parts found in whatever form it came."""

    def __init__(self, run: Any, index: int) -> None:
        self.source = f"run {index}"
        example, prediction, calls, score, feedback = _parts(run, self.source)
        judged = score if isinstance(score, Mapping | dspy.Prediction) else None
        if judged is not None:
            score, feedback = judged.get("score"), judged.get("feedback") if feedback is None else feedback
        self.inputs = _inputs(example)
        self.prediction = prediction
        try:
            self.score = None if score is None else as_score(score)
        except TraceError as error:
            raise TraceError(str(error), self.source) from None
        self.feedback = "" if feedback is None else str(feedback)
        try:
            self.calls = [_Call(call) for call in calls or ()]
        except (TypeError, ValueError, AttributeError) as error:
            raise TraceError(
                f"its trace is no list of (predictor, inputs, prediction): {error}", self.source
            ) from error

    def traces(self, program: Any) -> list[Trace]:
        if program is None:
            steps = tuple(message for number, call in enumerate(self.calls, 1) for message in call.messages(number))
            return [self._trace(self.inputs, _outputs(self.prediction), steps)]
        names = _Names(program)
        by_name: dict[str, list[_Call]] = {}
        for call in self.calls:
            name = call.name if call.name in names.known else names.of(call.predictor)
            if name is not None:
                by_name.setdefault(name, []).append(call)
        return [self._trace_of(name, by_name[name]) for name in names.known if name in by_name]

    def _trace_of(self, name: str, calls: Sequence[_Call]) -> Trace:
        *earlier, last = calls
        steps = tuple(message for number, call in enumerate(earlier, 1) for message in call.messages(number))
        return self._trace(last.inputs, _outputs(last.prediction), steps, name)

    def _trace(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        steps: tuple[TraceMessage, ...],
        name: str | None = None,
    ) -> Trace:
        return Trace(inputs, outputs, self.feedback, self.score, name, steps, self.source)


class _Call:
    """One predictor call: of DSPy's traces, or a `TraceStep`."""

    def __init__(self, call: Any) -> None:
        self.name: str | None = None
        if isinstance(call, tuple | list):
            self.predictor, inputs, self.prediction = call
        else:
            self.name, self.predictor, inputs, self.prediction = call.name, call.predictor, call.inputs, call.outputs
        self.inputs = dict(inputs)

    def messages(self, number: int) -> list[TraceMessage]:
        """The call as messages of a step."""
        signature = getattr(self.predictor, "signature", None)
        name = self.name or getattr(signature, "__name__", None) or type(self.predictor).__name__
        return [
            TraceMessage("input", plain_text(self.inputs), name, number),
            TraceMessage("agent", plain_text(_outputs(self.prediction)), name, number),
        ]


class _Names:
    """The names of a program's predictors."""

    def __init__(self, program: Any) -> None:
        predictors = dict(program.named_predictors())
        self.known: list[str] = list(predictors)
        self._by_id: dict[int, str] = {id(predictor): name for name, predictor in predictors.items()}
        self._signatures = [(name, predictor.signature) for name, predictor in predictors.items()]

    def of(self, predictor: Any) -> str | None:
        """The name of a predictor, or of the only one that has its signature."""
        if id(predictor) in self._by_id:
            return self._by_id[id(predictor)]
        signature = getattr(predictor, "signature", None)
        if signature is None:
            return None
        same = [name for name, own in self._signatures if own is signature]
        same = same or [name for name, own in self._signatures if own.equals(signature)]
        return same[0] if len(same) == 1 else None


def _parts(run: Any, place: str) -> tuple[Any, Any, Any, Any, Any]:
    if isinstance(run, tuple | list):
        if not 3 <= len(run) <= 5:
            raise TraceError(
                f"a run has 3 to 5 parts (example, prediction, trace, score, feedback), not {len(run)}", place
            )
        example, prediction, calls, *rest = run
        score, feedback = (*rest, None, None)[:2]
        return example, prediction, calls, score, feedback
    names = ("example", "prediction", "trace", "score", "result", "feedback", "error")
    parts = {name: run.get(name) if isinstance(run, Mapping) else getattr(run, name, None) for name in names}
    if parts["example"] is None:
        raise TraceError(f"a run is (example, prediction, trace, ...), not {type(run).__name__}", place)
    # A rollout's `result` is what its metric returned, which may hold feedback; its `error` says why it failed.
    result, feedback = parts["result"], parts["feedback"]
    if feedback is None and isinstance(result, Mapping | dspy.Prediction):
        feedback = result.get("feedback")
    if feedback is None and parts["error"]:
        feedback = f"The program failed on this example: {parts['error']}"
    return parts["example"], parts["prediction"], parts["trace"], parts["score"], feedback


def _inputs(example: Any) -> dict[str, Any]:
    """The example's inputs; all its fields where it does not say which are inputs."""
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
    if isinstance(prediction, dspy.Example | Mapping):
        return dict(prediction.items())
    return {"output": prediction}


def plain_text(value: Any) -> str:
    """Any value as text: a text as it is, data as JSON, an image or its like by the name of its type."""
    return value if isinstance(value, str) else json.dumps(as_data(value), ensure_ascii=False, default=_stand_in)


def _stand_in(value: Any) -> Any:
    if isinstance(value, History):
        return value.messages
    return f"[{type(value).__name__}]" if isinstance(value, Type) else str(value)
