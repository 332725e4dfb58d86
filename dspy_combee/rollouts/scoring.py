"""Scoring a rollout: the metric's result made a score, and the errors that are the provider's and nobody's fault."""

from __future__ import annotations

import logging
import math
import numbers
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError

from dspy_combee.calls.provider_errors import is_outage, is_refusal
from dspy_combee.records.errors import ProviderError
from dspy_combee.records.secrecy import shorten
from dspy_combee.records.types import Rollout

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
