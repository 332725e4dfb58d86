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
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import dspy
from dspy.adapters.types import History
from dspy.adapters.types.base_type import Type
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.utils.exceptions import AdapterParseError

from dspy_combee.calls import UsageMeter, hearing, usage_of
from dspy_combee.errors import ProviderError
from dspy_combee.executors import Executor
from dspy_combee.program_copies import ProgramCopier
from dspy_combee.records import Rollout, TraceStep
from dspy_combee.scoring import Scorer, causes_of, raise_if_provider
from dspy_combee.secrecy import shorten

logger = logging.getLogger("dspy_combee")

_STAGE_PREFIX = "dspy_combee:"
_UNCHANGING = (str, bytes, int, float, type(None), Type)
_MAX_TRACE_SIZE = 10_000


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


@dataclass(frozen=True)
class _Run:
    """A job, what the jobs of its program share (a copy whose predictors carry their names, and these), its trace."""

    job: RolloutJob
    template: Any
    predictors: Mapping[str, Any]
    trace: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class MapStage:
    """Runs rollouts.

    Attributes:
        copier: Copies the programs.
        scorer: Scores the predictions.
        executor: Runs the jobs, all candidates in one flat map.
        timeout: Seconds that one rollout may take; None for no limit.
        cut_short: What rollouts had used that a provider's error cut short (and that were then made again).
    """

    copier: ProgramCopier
    scorer: Scorer
    executor: Executor
    timeout: float | None = None
    cut_short: UsageMeter = field(default_factory=UsageMeter)

    def run(self, jobs: Sequence[RolloutJob]) -> list[Rollout]:
        """Run every job.

        Returns:
            The rollouts, in the order of the jobs.

        Raises:
            ProviderError: If a language model's provider refuses a call for good or cannot be reached.
        """
        programs = {id(job.program): job.program for job in jobs}
        templates = {key: self._template(program) for key, program in programs.items()}
        runs = [_Run(job, *templates[id(job.program)]) for job in jobs]
        return self.executor.map(self._run_one, runs, timeout=self.timeout, on_timeout=self._timed_out)

    def _template(self, program: Any) -> tuple[Any, dict[str, Any]]:
        template = self.copier.copy(program)
        predictors = dict(template.named_predictors())
        for name, predictor in predictors.items():
            predictor.stage = _STAGE_PREFIX + name
        return template, predictors

    def _run_one(self, run: _Run) -> Rollout:
        started = time.perf_counter()
        inputs = {name: _own(value) for name, value in run.job.example.inputs().items()}
        program = self.copier.copy(run.template)
        failed_step: TraceStep | None = None
        prediction, error = None, None
        run.trace.clear()  # Another attempt, which the provider cut short, may have left something.
        with dspy.context(trace=run.trace, max_trace_size=_MAX_TRACE_SIZE):
            try:
                prediction = _call(program, inputs)
            except Exception as failure:
                self._raise_if_provider(failure, program)
                failed_step = _failed_step(failure, run.predictors)
                error = f"{type(failure).__name__}: {shorten(str(failure), 1000)}"
        if error is None and prediction is None:
            error = "the program returned nothing"
        rollout = self._rollout(run, prediction, error, failed_step)
        heard = list(program.history)
        if error is None:
            with hearing(heard):  # The metric may ask a language model.
                rollout = self.scorer.score(rollout)
        return replace(rollout, seconds=time.perf_counter() - started, usage=usage_of(heard))

    def _rollout(self, run: _Run, prediction: Any, error: str | None, failed_step: TraceStep | None = None) -> Rollout:
        steps = [_step(*entry, originals=run.predictors) for entry in list(run.trace)]
        run.trace.clear()  # It holds on to the copy that ran.
        return Rollout(
            index=run.job.index,
            example=run.job.example,
            prediction=prediction if error is None else None,
            trace=tuple(steps if failed_step is None else [*steps, failed_step]),
            score=self.scorer.failure_score,
            result=None,
            error=error,
        )

    def _raise_if_provider(self, error: Exception, program: Any) -> None:
        try:
            raise_if_provider(error)
        except ProviderError:
            self.cut_short.add(usage_of(program.history))
            raise

    def _timed_out(self, run: _Run) -> Rollout:
        rollout = self._rollout(run, None, f"the rollout took longer than {self.timeout:g} seconds")
        return replace(rollout, seconds=self.timeout or 0.0)


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


def _own(value: Any) -> Any:
    """An input of the run's own, so that no run changes an example in place; images and their like stay."""
    if isinstance(value, History):
        return value.model_copy(update={"messages": _own(value.messages)})
    if isinstance(value, _UNCHANGING):
        return value
    if type(value) is list:
        return [_own(item) for item in value]
    if type(value) is dict:
        return {key: _own(item) for key, item in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def _step(predictor: Any, inputs: Mapping[str, Any], outputs: Any, *, originals: Mapping[str, Any]) -> TraceStep:
    stage = str(getattr(predictor, "stage", ""))
    name = stage.removeprefix(_STAGE_PREFIX) if stage.startswith(_STAGE_PREFIX) else None
    # The candidate's own predictor stands for the copy that ran, so that the copy can be freed.
    return TraceStep(name, originals.get(name, predictor) if name else predictor, inputs, outputs)


def _failed_step(error: BaseException, originals: Mapping[str, Any]) -> TraceStep | None:
    """The predictor call that an error came from, found in its traceback; None when it came from elsewhere."""
    for cause in causes_of(error):
        predictor, inputs = None, {}
        frame = cause.__traceback__
        while frame is not None:
            owner = frame.tb_frame.f_locals.get("self")
            if isinstance(owner, dspy.Predict) and "kwargs" in frame.tb_frame.f_locals:
                predictor, inputs = owner, dict(frame.tb_frame.f_locals["kwargs"])
            frame = frame.tb_next
        if predictor is not None:
            raw = cause.lm_response if isinstance(cause, AdapterParseError) else None
            failed = None if raw is None else FailedPrediction(completion_text=str(raw))
            return _step(predictor, inputs, failed, originals=originals)
    return None
