"""Map: run a program on examples, one `Rollout` each (paper, section 3, appendix C).

Every rollout runs on its own copy of the program, in a copy of the caller's context, with a trace of its own, so
nothing is patched and nothing mixes. A failure is data: the rollout says why and gets the failure score. Only what
says nothing about the program (the provider refuses, the network is gone) stops the run.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import logging
import math
import numbers
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import dspy
from dspy.adapters.types import History
from dspy.adapters.types.base_type import Type
from dspy.clients.base_lm import BaseLM
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.utils.exceptions import AdapterParseError, is_retryable_lm_error

from dspy_combee.calls import FATAL_ERRORS, usage_of
from dspy_combee.errors import ProviderError
from dspy_combee.executors import Executor
from dspy_combee.records import Rollout, TraceStep
from dspy_combee.text import shorten

logger = logging.getLogger("dspy_combee")

_STAGE_PREFIX = "dspy_combee:"


class ProgramCopier:
    """Copies programs fast and quietly.

    Language models, and whatever cannot be copied (a lock, a client), are shared by the copies.

    Args:
        program: The program that the later copies are made of, or of copies of it.
    """

    def __init__(self, program: Any) -> None:
        shared: dict[int, Any] = {}
        for _, module in program.named_sub_modules():
            for value in vars(module).values():
                _find_lms(value, shared)
        for _, module in program.named_sub_modules():
            for value in vars(module).values():
                if not isinstance(value, dspy.Module) and not _can_copy(value, shared):
                    shared[id(value)] = value
        self._shared = shared

    def copy(self, program: Any) -> Any:
        """A copy of `program` whose predictors and state are its own."""
        try:
            return copy.deepcopy(program, dict(self._shared))
        except Exception:
            return self._copy_parts(program)

    def _copy_parts(self, module: Any) -> Any:
        new = module.__class__.__new__(module.__class__)
        for name, value in vars(module).items():
            if isinstance(value, dspy.Module):
                value = self.copy(value)
            elif _can_copy(value, self._shared):
                value = copy.deepcopy(value, dict(self._shared))
            new.__dict__[name] = value
        return new


def _find_lms(value: Any, found: dict[int, Any]) -> None:
    if isinstance(value, BaseLM):
        found[id(value)] = value
    elif isinstance(value, Mapping):
        for item in value.values():
            _find_lms(item, found)
    elif isinstance(value, list | tuple):
        for item in value:
            _find_lms(item, found)


def _can_copy(value: Any, shared: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(shared))
    except Exception:
        return False
    return True


@dataclass(frozen=True)
class RolloutJob:
    """One run to make.

    Attributes:
        program: The built candidate, shared by its jobs; each run copies it.
        example: The example.
        index: Position of the example in its batch.
    """

    program: Any
    example: Any
    index: int


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
        self._warned: set[str] = set()

    def score(self, rollout: Rollout) -> Rollout:
        """The rollout with its score; a metric that raises gives the failure score."""
        extra = {"program_trace": program_trace(rollout)} if self.wants_program_trace else {}
        try:
            result = self.metric(rollout.example, rollout.prediction, None, None, None, **extra)
        except Exception as error:
            _raise_if_provider(error)
            self.warn_once("raised", f"The metric raised {type(error).__name__}: {shorten(str(error))}")
            return replace(rollout, score=self.failure_score, result=None)
        score, objectives = self.coerce(result)
        return replace(rollout, score=score, result=result, objective_scores=objectives)

    def coerce(self, result: Any) -> tuple[float, dict[str, float]]:
        """The score and the objective scores of a metric's result; the failure score where it has none."""
        value, objectives = result, {}
        if isinstance(result, Mapping | dspy.Prediction):
            value = result.get("score")
            objectives = dict(result.get("objective_scores") or {})
        if isinstance(value, str | bytes) or not (isinstance(value, numbers.Number) or hasattr(value, "__float__")):
            self.warn_once("kind", f"The metric gave no number but {shorten(repr(value), 80)}")
            return self.failure_score, objectives
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            self.warn_once("finite", f"The metric gave {shorten(repr(value), 80)}, which is no finite number")
            return self.failure_score, objectives
        if self.perfect_score is not None and number > self.perfect_score:
            logger_text = f"The metric gave {number:g}, above perfect_score={self.perfect_score:g}"
            self.warn_once("perfect", logger_text, "GEPA skips minibatches at or above perfect_score; set it.")
        return number, objectives

    def warn_once(self, kind: str, text: str, consequence: str | None = None) -> None:
        """Log a warning of this kind the first time."""
        if kind not in self._warned:
            self._warned.add(kind)
            consequence = consequence or f"Such an example scores failure_score={self.failure_score:g}."
            logger.warning("%s. %s (Said once.)", text, consequence)


def program_trace(rollout: Rollout) -> list[tuple[Any, dict[str, Any], Any]]:
    """The rollout's trace in DSPy's form: (predictor, inputs, prediction) for each call."""
    return [(step.predictor, dict(step.inputs), step.outputs) for step in rollout.trace]


@dataclass(frozen=True)
class MapStage:
    """Runs rollouts.

    Attributes:
        copier: Copies the programs.
        scorer: Scores the predictions.
        executor: Runs the jobs, all candidates in one flat map.
        timeout: Seconds that one rollout may take; None for no limit.
    """

    copier: ProgramCopier
    scorer: Scorer
    executor: Executor
    timeout: float | None = None

    def run(self, jobs: Sequence[RolloutJob]) -> list[Rollout]:
        """Run every job.

        Returns:
            The rollouts, in the order of the jobs.

        Raises:
            ProviderError: If a language model's provider refuses a call for good or cannot be reached.
        """
        return self.executor.map(self._run_one, jobs, timeout=self.timeout, on_timeout=self._timed_out)

    def _run_one(self, job: RolloutJob) -> Rollout:
        started = time.perf_counter()
        program = self.copier.copy(job.program)
        for name, predictor in program.named_predictors():
            predictor.stage = _STAGE_PREFIX + name
        originals = dict(job.program.named_predictors())
        failed_step: TraceStep | None = None
        prediction, error = None, None
        with dspy.context(trace=[]):
            trace = dspy.settings.trace
            try:
                prediction = _call(program, _own_inputs(job.example))
            except Exception as failure:
                _raise_if_provider(failure)
                failed_step = _failed_step(failure, originals)
                error = f"{type(failure).__name__}: {shorten(str(failure), 1000)}"
            steps = [_step(*entry, originals=originals) for entry in trace]
        if error is None and prediction is None:
            error = "the program returned nothing"
        rollout = Rollout(
            index=job.index,
            example=job.example,
            prediction=prediction if error is None else None,
            trace=tuple(steps if failed_step is None else [*steps, failed_step]),
            score=self.scorer.failure_score,
            result=None,
            error=error,
            usage=usage_of(program.history),
        )
        if error is None:
            rollout = self.scorer.score(rollout)
        return replace(rollout, seconds=time.perf_counter() - started)

    def _timed_out(self, job: RolloutJob) -> Rollout:
        return Rollout(
            index=job.index,
            example=job.example,
            prediction=None,
            trace=(),
            score=self.scorer.failure_score,
            result=None,
            error=f"the rollout took longer than {self.timeout:g} seconds",
            seconds=self.timeout or 0.0,
        )


def _call(program: Any, inputs: dict[str, Any]) -> Any:
    if hasattr(type(program), "forward"):
        return program(**inputs)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(program.acall(**inputs))
    # A loop runs in this thread already (a notebook, say): the program needs a thread for its own.
    future: Future[Any] = Future()
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(_run_async, program, inputs, future), daemon=True)
    thread.start()
    return future.result()


def _run_async(program: Any, inputs: dict[str, Any], future: Future[Any]) -> None:
    try:
        future.set_result(asyncio.run(program.acall(**inputs)))
    except BaseException as error:
        future.set_exception(error)


def _own_inputs(example: Any) -> dict[str, Any]:
    """The example's inputs, with copies of what a program could change in place."""
    inputs: dict[str, Any] = dict(example.inputs())
    for name, value in inputs.items():
        if isinstance(value, str | int | float) or (isinstance(value, Type) and not isinstance(value, History)):
            continue
        try:
            inputs[name] = copy.deepcopy(value)
        except Exception:
            continue
    return inputs


def _step(predictor: Any, inputs: Mapping[str, Any], outputs: Any, *, originals: Mapping[str, Any]) -> TraceStep:
    stage = str(getattr(predictor, "stage", ""))
    name = stage.removeprefix(_STAGE_PREFIX) if stage.startswith(_STAGE_PREFIX) else None
    # The candidate's own predictor stands for the copy that ran, so that the copy can be freed.
    return TraceStep(name, originals.get(name, predictor) if name else predictor, inputs, outputs)


def _failed_step(error: BaseException, originals: Mapping[str, Any]) -> TraceStep | None:
    """The predictor call that an error came from, found in its traceback; None when it came from elsewhere."""
    predictor, inputs = None, {}
    frame = error.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, dspy.Predict) and "kwargs" in frame.tb_frame.f_locals:
            predictor, inputs = owner, dict(frame.tb_frame.f_locals["kwargs"])
        frame = frame.tb_next
    if predictor is None:
        return None
    raw = error.lm_response if isinstance(error, AdapterParseError) else None
    failed = None if raw is None else FailedPrediction(completion_text=str(raw))
    return _step(predictor, inputs, failed, originals=originals)


def _raise_if_provider(error: BaseException) -> None:
    """Raise `ProviderError` for an error that is the provider's, in whatever it was wrapped."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ProviderError):
            raise cause
        if isinstance(cause, FATAL_ERRORS) or (isinstance(cause, Exception) and is_retryable_lm_error(cause)):
            raise ProviderError(f"A language model call failed: {shorten(str(cause))}") from error
        cause = cause.__cause__
