"""Scoring a rollout: the metric's result made a score, and the errors that are the provider's and nobody's fault."""

from __future__ import annotations

import logging
import math
import numbers
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dspy
from dspy.adapters.chat_adapter import ChatAdapter
from dspy.adapters.types import History
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.utils.exceptions import AdapterParseError

from dspy_combee.calls.executors import Executor
from dspy_combee.calls.lm_calls import UsageMeter, hearing, usage_of
from dspy_combee.calls.provider_errors import is_outage, is_refusal
from dspy_combee.records.errors import ProviderError
from dspy_combee.records.secrecy import shorten
from dspy_combee.records.text import text_of
from dspy_combee.records.types import ReflectionRecord, Rollout, TraceStep, Usage

logger = logging.getLogger("dspy_combee")


class Scorer:
    """Calls the metric and makes a score of what it returns; warns once for each kind of trouble.

    Args:
        metric: `metric(example, prediction, trace, pred_name, pred_trace)`.
        failure_score: The score where there is none.
        perfect_score: The highest score that the metric should give.
        wants_program_trace: Whether the metric takes `program_trace` (DSPy passes it for `dspy.Flex` programs).
    """

    def __init__(
        self,
        metric: Callable[..., Any],
        failure_score: float = 0.0,
        perfect_score: float | None = None,
        wants_program_trace: bool = False,
    ) -> None:
        self.metric = metric
        self.failure_score = failure_score
        self.perfect_score = perfect_score
        self.wants_program_trace = wants_program_trace
        self._warned: dict[str, object] = {}
        self._kept: list[tuple[str, str, str]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": []}  # A copy in another process keeps its warnings for this one to give.

    def take_warnings(self) -> list[tuple[str, str, str]]:
        """The warnings kept since this was last asked: the arguments of `warn_once`."""
        if not self._kept:
            return []
        warnings, self._kept = self._kept, []
        return warnings

    def score(self, rollout: Rollout) -> Rollout:
        """The rollout with its score; a metric that raises gives the failure score."""
        extra = {"program_trace": program_trace(rollout)} if self.wants_program_trace else {}
        try:
            result = self.metric(rollout.example, rollout.prediction, None, None, None, **extra)
        except (Exception, CancelledError) as error:
            raise_if_provider(error)
            self.warn_once("raised", f"The metric raised {type(error).__name__}: {shorten(error)}")
            return replace(rollout, score=self.failure_score, result=None)
        score, objectives = self.coerce(result)
        return replace(rollout, score=score, result=result, objective_scores=objectives)

    def coerce(self, result: Any) -> tuple[float, dict[str, float]]:
        """The score and the objective scores of a metric's result; the failure score where it has none."""
        value, objectives = result, None
        if isinstance(result, Mapping | dspy.Prediction):
            value, objectives = result.get("score"), result.get("objective_scores")
        number = self._number(value)
        if self.perfect_score is not None and number > self.perfect_score:
            text = f"The metric gave {number:g}, above perfect_score={self.perfect_score:g}"
            self.warn_once("perfect", text, "GEPA skips minibatches at or above perfect_score; set it.")
        objectives = objectives if isinstance(objectives, Mapping) else {}
        return number, {str(name): self._number(objective) for name, objective in objectives.items()}

    def _number(self, value: Any) -> float:
        if isinstance(value, str | bytes) or not (isinstance(value, numbers.Number) or hasattr(value, "__float__")):
            self.warn_once("kind", f"The metric gave no number but {shorten(value, 80, repr)}")
            return self.failure_score
        try:
            number = float(value)
        except Exception:  # An array, a complex number, an int beyond all floats.
            number = math.nan
        if not math.isfinite(number):
            self.warn_once("finite", f"The metric gave {shorten(value, 80, repr)}, which is no finite number")
            return self.failure_score
        return number

    def warn_once(self, kind: str, text: str, consequence: str | None = None) -> None:
        """Log a warning of this kind the first time."""
        mine = object()
        if self._warned.setdefault(kind, mine) is mine:
            consequence = consequence or f"Such an example scores failure_score={self.failure_score:g}."
            if self._kept is not None:
                self._kept.append((kind, text, consequence))
                return
            logger.warning("%s. %s (Said once.)", text, consequence)


def program_trace(rollout: Rollout) -> list[tuple[Any, dict[str, Any], Any]]:
    """The rollout's trace in DSPy's form: (predictor, inputs, prediction) for each call."""
    return [(step.predictor, dict(step.inputs), step.outputs) for step in rollout.trace]


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def raise_if_provider(error: BaseException) -> None:
    """Raise `ProviderError` for an error that is the provider's, in whatever it was wrapped.

    A transient one is what DSPy would try again, any server error included
    (`provider_errors.may_pass` says why that is not so in reflection).
    """
    for cause in causes_of(error):
        if isinstance(cause, AdapterParseError):
            return  # There was a reply; what went wrong before it has been got over.
        if isinstance(cause, ProviderError):
            raise cause
        if isinstance(cause, ValueError) and str(cause).startswith("No LM is loaded"):
            raise ProviderError(str(cause)) from error  # DSPy's own text, which says what to do.
        transient = is_outage(cause)
        if transient or is_refusal(cause):
            text = f"A language model call failed: {shorten(str(cause))}"
            retry_after = getattr(cause, "retry_after", None)
            raise ProviderError(text, transient=transient, retry_after=retry_after) from error


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
