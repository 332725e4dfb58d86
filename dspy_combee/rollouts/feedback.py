"""What the metric says of rollouts: their scores, and the reflection records with its feedback on each predictor."""

from __future__ import annotations

import logging
import math
import numbers
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dspy
from dspy.adapters.chat_adapter import ChatAdapter
from dspy.adapters.types import History
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.utils.exceptions import AdapterParseError

from dspy_combee.calls.executors import Executor
from dspy_combee.calls.lm_calls import UsageMeter, collect_history, usage_of
from dspy_combee.calls.provider_errors import is_outage, is_refusal
from dspy_combee.records.errors import ProviderError
from dspy_combee.records.secrets import shorten
from dspy_combee.records.text import text_of
from dspy_combee.records.types import ReflectionRecord, Rollout, TraceStep, Usage

logger = logging.getLogger("dspy_combee")

MISMATCH = (
    "The metric gave a different score when it was asked for feedback on a predictor. The score that it gave to the "
    "whole rollout stands. This is harmless if the metric is not deterministic; a metric that scores predictors should "
    "still return the rollout's score"
)
SCORE_ALONE = "Feedback on such an example is its score alone."


@dataclass(eq=False)
class Scorer:
    """Call the metric and make a score of what it returns; warn once about each kind of trouble."""

    metric: Callable[..., Any]
    """`metric(example, prediction, trace, pred_name, pred_trace)`."""
    failure_score: float = 0.0
    """The score where there is none."""
    perfect_score: float | None = None
    """The highest score that the metric should give."""
    wants_program_trace: bool = False
    """Whether the metric takes `program_trace` (DSPy passes it for `dspy.Flex` programs)."""
    _warned: dict[str, object] = field(default_factory=dict, init=False, repr=False)
    _kept: list[tuple[str, str, str]] | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": []}  # A copy in another process keeps its warnings for this one to give.

    def take_warnings(self) -> list[tuple[str, str, str]]:
        """Return the warnings kept since the last call, each as arguments of `warn_once`."""
        if not self._kept:
            return []
        warnings, self._kept = self._kept, []
        return warnings

    def score(self, rollout: Rollout) -> Rollout:
        """Return the rollout with its score; a metric that raises gives the failure score."""
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
        """Return the score and the objective scores in a metric's result; the failure score where it has none."""
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
            self.warn_once("kind", f"The metric returned {shorten(value, 80, repr)} instead of a number")
            return self.failure_score
        try:
            number = float(value)
        except Exception:  # An array, a complex number, an int beyond all floats.
            number = math.nan
        if not math.isfinite(number):
            self.warn_once("finite", f"The metric returned {shorten(value, 80, repr)}, which is not a finite number")
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
    """Return the rollout's trace in DSPy's form: (predictor, inputs, prediction) for each call."""
    return [(step.predictor, dict(step.inputs), step.outputs) for step in rollout.trace]


def feedback_of(result: Any) -> str | None:
    """Return the feedback in what a metric returned; None where there is none."""
    feedback = result.get("feedback") if isinstance(result, Mapping | dspy.Prediction) else None
    return None if feedback is None else text_of(feedback)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Iterate over the error, what it was raised from, and so on."""
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
            return  # There was a reply; the program has recovered from whatever went wrong before it.
        if isinstance(cause, ProviderError):
            raise cause
        if isinstance(cause, ValueError) and str(cause).startswith("No LM is loaded"):
            raise ProviderError(str(cause)) from error  # DSPy's own text, which says what to do.
        transient = is_outage(cause)
        if transient or is_refusal(cause):
            text = f"A language model call failed: {shorten(str(cause))}"
            retry_after = getattr(cause, "retry_after", None)
            raise ProviderError(text, transient=transient, retry_after=retry_after) from error


# Reflection records -------------------------------------------------------------------------------------------


class ReflectiveDataset(dict[str, list[Any]]):
    """Hold the reflection records by component.

    Args:
        records: The records.
        scores: The scores of the minibatch that the records come from, the very list that GEPA's events carry.
    """

    def __init__(self, records: Mapping[str, list[Any]], scores: list[float]) -> None:
        super().__init__(records)
        self.scores = scores


@dataclass(frozen=True)
class _RecordRequest:
    component: str
    rollout: Rollout
    calls: list[TraceStep]
    """The component's calls in the rollout, the one to reflect on last."""

    @property
    def asks_metric(self) -> bool:
        return self.rollout.error is None and not _is_unparsed(self.calls[-1])

    @property
    def score_alone(self) -> str:
        return f"This trajectory got a score of {self.rollout.score}."


@dataclass(eq=False)
class RecordMaker:
    """Make the reflection records of rollouts, asking the metric for feedback on each predictor.

    A record shows one call of the predictor: the one that could not be parsed, else the last. Other calls of the
    same rollout stand beside it as `Earlier Calls`, except those that a later one repeats (the transcript of an
    agent grows from call to call).
    """

    scorer: Scorer
    """Holds the metric and judges what it returns."""
    executor: Executor
    """Runs the feedback calls."""
    keep_unparsed: bool
    """Whether an answer that could not be parsed gives a record."""
    warn_of_mismatch: bool
    """Whether to warn (once) when the metric scores differently at feedback time."""
    timeout: float | None = None
    """Seconds that the metric may take for the feedback of one record; None for no limit."""
    feedback_calls: int = field(default=0, init=False)
    """Metric calls made for feedback and not yet accounted for."""
    meter: UsageMeter = field(default_factory=UsageMeter, init=False)
    """Usage of those calls."""

    def take_feedback_calls(self) -> tuple[int, Usage]:
        """Return the number of metric calls for feedback since the last call, and their usage."""
        calls, self.feedback_calls = self.feedback_calls, 0
        return calls, self.meter.take()

    def records(self, rollouts: Sequence[Rollout], components: Sequence[str]) -> dict[str, list[Any]]:
        """Return the records of each component, in the order of the rollouts that reached it.

        Inputs and outputs keep their types.
        """
        requests = [
            _RecordRequest(component, rollout, calls)
            for component in components
            for rollout in rollouts
            if (calls := self._calls_of(component, rollout))
        ]
        made = self.executor.map(self._answer, requests, timeout=self.timeout, on_timeout=self._timed_out)
        self.feedback_calls += sum(request.asks_metric for request in requests)
        records: dict[str, list[Any]] = {component: [] for component in components}
        for request, record in zip(requests, made, strict=True):
            records[request.component].append(record)
        return records

    def _calls_of(self, component: str, rollout: Rollout) -> list[TraceStep]:
        if not self.keep_unparsed and any(map(_is_unparsed, rollout.trace)):
            return []  # DSPy's rule: an answer that could not be parsed then gives no record, wherever it failed.
        calls = [step for step in rollout.trace if step.name == component]
        return [step for step in calls if not _is_unparsed(step)] + list(filter(_is_unparsed, calls))[:1]

    def _answer(self, request: _RecordRequest) -> ReflectionRecord:
        return _record(request, self._feedback(request))

    def _timed_out(self, request: _RecordRequest) -> ReflectionRecord:
        what = f"The metric took longer than {self.timeout:g} seconds for its feedback"
        self.scorer.warn_once("feedback time", what, SCORE_ALONE)
        return _record(request, request.score_alone)

    def _feedback(self, request: _RecordRequest) -> str:
        rollout, call = request.rollout, request.calls[-1]
        if _is_unparsed(call):
            structure = ChatAdapter().format(call.predictor.signature, [], {})
            lines = "".join(f"{message['role']}: {message['content']}\n" for message in structure)
            return f"Your output failed to parse. Follow this structure:\n{lines}"
        if rollout.error is not None:
            return f"The program failed on this example: {rollout.error}"
        own_trace = [(call.predictor, dict(call.inputs), call.outputs)]
        heard: list[Mapping[str, Any]] = []
        try:
            with collect_history(heard):  # The metric may ask a language model.
                result = self.scorer.metric(
                    rollout.example, rollout.prediction, program_trace(rollout), request.component, own_trace
                )
        except (Exception, CancelledError) as error:
            raise_if_provider(error)
            what = f"The metric raised {type(error).__name__}: {shorten(error)}"
            self.scorer.warn_once("feedback", what, SCORE_ALONE)
            return request.score_alone
        finally:
            self.meter.add(usage_of(heard))
        score, _ = self.scorer.coerce(result)
        if score != rollout.score and self.warn_of_mismatch:
            self.scorer.warn_once("mismatch", MISMATCH, "Silence this with warn_on_score_mismatch=False.")
        feedback = feedback_of(result)
        if feedback is None and isinstance(result, int | float) and result == rollout.score:
            return f"This trajectory got a score of {result}."  # As the metric wrote it, like DSPy: 1, not 1.0.
        return request.score_alone if feedback is None else feedback


def _is_unparsed(step: TraceStep) -> bool:
    return isinstance(step.outputs, FailedPrediction)


def _record(request: _RecordRequest, feedback: str) -> ReflectionRecord:
    *others, call = request.calls
    fields: dict[str, Any] = {**_shown(call), "Feedback": feedback}
    earlier = [
        _shown(step)
        for position, step in enumerate(others, start=1)
        if not any(_includes(later, name, step) for later in request.calls[position:] for name in step.inputs)
    ]
    if earlier:
        fields["Earlier Calls"] = earlier
    return ReflectionRecord(fields, source=request.rollout.index)


def _shown(step: TraceStep) -> dict[str, Any]:
    # The first history goes under `Context`, as in `dspy.GEPA`.
    histories = [name for name, value in step.inputs.items() if isinstance(value, History)]
    context = histories[0] if histories and "Context" not in step.inputs else None
    inputs = {} if context is None else {"Context": step.inputs[context]}
    inputs.update({name: value for name, value in step.inputs.items() if name != context})
    outputs: Any = "None: the call did not end."
    if isinstance(step.outputs, FailedPrediction):
        outputs = (
            "Couldn't parse the output as per the expected output format. The model's raw response was:\n"
            f"```\n{step.outputs.completion_text}\n```\n\n"
        )
    elif step.outputs is not None:
        outputs = dict(step.outputs.items())
    return {"Inputs": inputs, "Generated Outputs": outputs}


def _includes(later: TraceStep, name: str, step: TraceStep) -> bool:
    """Return whether `later` shows all that `step` shows: its input `name` is a transcript that has gained `step`."""
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
    """Return what a transcript has gained: texts, or messages; nothing where it is no transcript."""
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
