"""Reflection records: what happened at one predictor in one rollout, as reflection reads it."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dspy
from dspy.adapters.chat_adapter import ChatAdapter
from dspy.adapters.types import History
from dspy.teleprompt.bootstrap_trace import FailedPrediction

from dspy_combee.calls.executors import Executor
from dspy_combee.calls.lm_calls import UsageMeter, hearing, usage_of
from dspy_combee.records.secrecy import shorten
from dspy_combee.records.text import text_of
from dspy_combee.records.types import ReflectionRecord, Rollout, TraceStep, Usage
from dspy_combee.rollouts.scoring import Scorer, program_trace, raise_if_provider

logger = logging.getLogger("dspy_combee")


MISMATCH = (
    "The metric gave another score when it was asked for feedback on a predictor. The score that it gave to the whole "
    "rollout stands. This is harmless where the metric is not deterministic; a metric that scores predictors should "
    "still return the rollout's score"
)
SCORE_ALONE = "Feedback on such an example is its score alone."


class ReflectiveDataset(dict[str, list[Any]]):
    """The reflection records by component.

    Attributes:
        scores: The scores of the minibatch that the records come from, the very list that GEPA's events carry.
    """

    def __init__(self, records: Mapping[str, list[Any]], scores: list[float]) -> None:
        super().__init__(records)
        self.scores = scores


class RecordMaker:
    """Makes the reflection records of rollouts, asking the metric for feedback on each predictor.

    A record shows one call of the predictor: the one that could not be parsed, else the last. Other calls of the
    same rollout stand beside it as `Earlier Calls`, except those that a later one repeats (the transcript of an
    agent grows from call to call).

    Args:
        scorer: Holds the metric and judges what it returns.
        executor: Runs the feedback calls.
        keep_unparsed: Whether an answer that could not be parsed gives a record.
        warn_of_mismatch: Whether to warn (once) when the metric scores differently at feedback time.
        timeout: Seconds that the metric may take for the feedback of one record; None for no limit.

    Attributes:
        feedback_calls: Metric calls made for feedback and not yet taken into account.
    """

    def __init__(
        self,
        scorer: Scorer,
        executor: Executor,
        keep_unparsed: bool,
        warn_of_mismatch: bool,
        timeout: float | None = None,
    ) -> None:
        self.scorer = scorer
        self.timeout = timeout
        self.executor = executor
        self.keep_unparsed = keep_unparsed
        self.warn_of_mismatch = warn_of_mismatch
        self.feedback_calls = 0
        self.meter = UsageMeter()

    def take_feedback_calls(self) -> tuple[int, Usage]:
        """The metric calls for feedback since this was last asked, and what their language-model calls took."""
        calls, self.feedback_calls = self.feedback_calls, 0
        return calls, self.meter.take()

    def records(self, rollouts: Sequence[Rollout], components: Sequence[str]) -> dict[str, list[Any]]:
        """The records of each component, in the order of the rollouts that reached it.

        Inputs and outputs keep their types.
        """
        requests = [
            _FeedbackRequest(component, rollout, calls)
            for component in components
            for rollout in rollouts
            if (calls := self._calls_of(component, rollout))
        ]
        made = self.executor.map(self._asked, requests, timeout=self.timeout, on_timeout=self._timed_out)
        self.feedback_calls += sum(request.asks_the_metric for request in requests)
        records: dict[str, list[Any]] = {component: [] for component in components}
        for request, record in zip(requests, made, strict=True):
            records[request.component].append(record)
        return records

    def _calls_of(self, component: str, rollout: Rollout) -> list[TraceStep]:
        """The component's calls in a rollout, the one to reflect on last."""
        if not self.keep_unparsed and any(isinstance(step.outputs, FailedPrediction) for step in rollout.trace):
            return []  # DSPy's rule: an answer that could not be parsed then gives no record, wherever it failed.
        calls = [step for step in rollout.trace if step.name == component]
        unparsed = [step for step in calls if isinstance(step.outputs, FailedPrediction)]
        return [step for step in calls if not isinstance(step.outputs, FailedPrediction)] + unparsed[:1]

    def _asked(self, request: _FeedbackRequest) -> ReflectionRecord:
        return self._record(request, self._feedback(request, request.calls[-1]))

    def _timed_out(self, request: _FeedbackRequest) -> ReflectionRecord:
        what = f"The metric took longer than {self.timeout:g} seconds for its feedback"
        self.scorer.warn_once("feedback time", what, SCORE_ALONE)
        return self._record(request, f"This trajectory got a score of {request.rollout.score}.")

    def _record(self, request: _FeedbackRequest, feedback: str) -> ReflectionRecord:
        call = request.calls[-1]
        fields: dict[str, Any] = {
            "Inputs": _input_fields(call.inputs),
            "Generated Outputs": _output_fields(call),
            "Feedback": feedback,
        }
        earlier = [
            {"Inputs": _input_fields(step.inputs), "Generated Outputs": _output_fields(step)}
            for position, step in enumerate(request.calls[:-1], start=1)
            if not any(_repeated_by(step, later) for later in request.calls[position:])
        ]
        if earlier:
            fields["Earlier Calls"] = earlier
        return ReflectionRecord(fields, source=request.rollout.index)

    def _feedback(self, request: _FeedbackRequest, call: TraceStep) -> str:
        if isinstance(call.outputs, FailedPrediction):
            structure = ChatAdapter().format(call.predictor.signature, [], {})
            lines = "".join(f"{message['role']}: {message['content']}\n" for message in structure)
            return f"Your output failed to parse. Follow this structure:\n{lines}"
        if not request.asks_the_metric:
            return f"The program failed on this example: {request.rollout.error}"
        rollout = request.rollout
        own_trace = [(call.predictor, dict(call.inputs), call.outputs)]
        heard: list[Mapping[str, Any]] = []
        try:
            with hearing(heard):  # The metric may ask a language model.
                result = self.scorer.metric(
                    rollout.example, rollout.prediction, program_trace(rollout), request.component, own_trace
                )
        except (Exception, CancelledError) as error:
            raise_if_provider(error)
            what = f"The metric raised {type(error).__name__}: {shorten(error)}"
            self.scorer.warn_once("feedback", what, SCORE_ALONE)
            return f"This trajectory got a score of {rollout.score}."
        finally:
            self.meter.add(usage_of(heard))
        score, _ = self.scorer.coerce(result)
        if score != rollout.score and self.warn_of_mismatch:
            self.scorer.warn_once("mismatch", MISMATCH, "Silence this with warn_on_score_mismatch=False.")
        feedback = feedback_of(result)
        if feedback is None:
            # As the metric wrote it, like DSPy: 1, not 1.0.
            shown = result if isinstance(result, int | float) and result == rollout.score else rollout.score
            return f"This trajectory got a score of {shown}."
        return feedback


@dataclass(frozen=True)
class _FeedbackRequest:
    """A record to be made: the component, the rollout, and the component's calls in it."""

    component: str
    rollout: Rollout
    calls: list[TraceStep]

    @property
    def asks_the_metric(self) -> bool:
        return self.rollout.error is None and not isinstance(self.calls[-1].outputs, FailedPrediction)


def feedback_of(result: Any) -> str | None:
    """The feedback in what a metric returned; None where there is none."""
    feedback = result.get("feedback") if isinstance(result, Mapping | dspy.Prediction) else None
    return None if feedback is None else text_of(feedback)


def _input_fields(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs by name; the first history goes under `Context`, as in `dspy.GEPA`."""
    histories = [name for name, value in inputs.items() if isinstance(value, History) and "Context" not in inputs]
    fields = {"Context": inputs[histories[0]]} if histories else {}
    fields.update({name: value for name, value in inputs.items() if name not in histories[:1]})
    return fields


def _output_fields(step: TraceStep) -> Any:
    if isinstance(step.outputs, FailedPrediction):
        raw = step.outputs.completion_text
        return (
            "Couldn't parse the output as per the expected output format. The model's raw response was:\n"
            f"```\n{raw}\n```\n\n"
        )
    if step.outputs is None:
        return "None: the call did not end."
    return dict(step.outputs.items())


def _repeated_by(step: TraceStep, later: TraceStep) -> bool:
    """Whether `later` shows all that `step` shows: one of its inputs is a transcript that has taken `step` up."""
    return any(_has_taken_up(name, step, later) for name in step.inputs)


def _has_taken_up(name: str, step: TraceStep, later: TraceStep) -> bool:
    added = _added(step.inputs[name], later.inputs.get(name))
    if not added or not isinstance(step.outputs, dspy.Prediction):
        return False
    # An agent's first transcript is empty, and so is a first critique: there the answer must stand by itself.
    whole = not step.inputs[name]
    said = [value for value in step.outputs.values() if isinstance(value, str | dspy.Reasoning)]
    unsaid = [
        value for other, value in step.inputs.items() if other != name and not _same(value, later.inputs.get(other))
    ]
    if not said or not all(isinstance(value, str) and value.strip() for value in unsaid):
        return False
    texts = [str(value).strip() for value in (*said, *unsaid)]
    return all(any(_holds(item, text, whole) for item in added) for text in texts if text)


def _added(value: Any, later: Any) -> list[Any]:
    """What a transcript has got in addition: texts, or messages; nothing where it is no transcript."""
    if isinstance(value, str) and isinstance(later, str):
        return [later[len(value) :]] if later.startswith(value) and len(later) > len(value) else []
    if isinstance(value, History) and isinstance(later, History):
        if value is later:
            return list(later.messages)  # It grows in place (`dspy.ReActV2`): every call shows what came after it.
        value, later = value.messages, later.messages
    if not isinstance(value, list) or not isinstance(later, list):
        return []
    return later[len(value) :] if _same(value, later[: len(value)]) else []


def _holds(item: Any, text: str, whole: bool) -> bool:
    if isinstance(item, Mapping):
        return any(text_of(value).strip() == text for value in item.values())
    shown = text_of(item)
    return f"\n{text}\n" in f"\n{shown.strip()}\n" if whole else text in shown


def _same(value: Any, other: Any) -> bool:
    try:
        return value is other or bool(value == other)
    except Exception:  # An array does not say whether it is equal.
        return False
