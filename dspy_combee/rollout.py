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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import dspy
from dspy.adapters.types import History
from dspy.adapters.types.base_type import Type
from dspy.clients.base_lm import BaseLM
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.utils.exceptions import AdapterParseError, is_retryable_lm_error

from dspy_combee.calls import FATAL_ERRORS, UsageMeter, usage_of
from dspy_combee.errors import ProviderError
from dspy_combee.executors import Executor
from dspy_combee.records import Rollout, TraceStep
from dspy_combee.secrecy import shorten

logger = logging.getLogger("dspy_combee")

_STAGE_PREFIX = "dspy_combee:"
_UNCHANGING = (str, bytes, int, float, type(None), Type)
_MAX_TRACE_SIZE = 10_000
_MOST_COPIED = 100_000  # An attribute with more items than this (or an array of 10 MB) is shared by copies.


class ProgramCopier:
    """Copies programs fast and quietly.

    The copies share language models, whatever cannot be copied (a lock, a client) and what is too big to copy for
    each run (a corpus, an index).

    Args:
        program: The program that the later copies are made of, or of copies of it.
    """

    def __init__(self, program: Any) -> None:
        self._shared: dict[int, Any] = {}
        values = [value for _, module in program.named_sub_modules() for value in module.__getstate__().values()]
        for find in (_find_lms, _find_uncopyable):
            for value in values:
                find(value, self._shared)

    def copy(self, program: Any) -> Any:
        """A copy of `program` whose predictors and state are its own."""
        return self._copy(program, dict(self._shared))

    def _copy(self, value: Any, memo: dict[int, Any]) -> Any:
        attempt = dict(memo)
        try:
            new = copy.deepcopy(value, attempt)
        except Exception:
            if not isinstance(value, dspy.Module):
                return value
            # It has got something that it had not before, or refuses to be copied as a whole.
            memo[id(value)] = new = value.__class__.__new__(value.__class__)
            new.__setstate__({name: self._copy(part, memo) for name, part in value.__getstate__().items()})
        else:
            memo.update(attempt)
        return new


def _find_lms(value: Any, found: dict[int, Any]) -> None:
    if isinstance(value, BaseLM):
        found[id(value)] = value
    for item in _items(value):
        _find_lms(item, found)


def _find_uncopyable(value: Any, found: dict[int, Any]) -> None:
    """Find what cannot be copied in an attribute of a module; the modules in it are looked at by themselves."""
    if isinstance(value, dspy.Module):
        return
    if _leads_to_module(value):
        for part in _parts(value):
            _find_uncopyable(part, found)
    elif not _can_copy(value, found):
        found[id(value)] = value


def _leads_to_module(value: Any, depth: int = 5) -> bool:
    """Whether `value` holds a module, or a tool that is a method of one."""
    deeper = depth > 0 and any(_leads_to_module(part, depth - 1) for part in _parts(value))
    return deeper or isinstance(value, dspy.Module)


def _parts(value: Any) -> Collection[Any]:
    if isinstance(value, dspy.Tool):
        return (value.func,)
    if isinstance(value, MethodType):
        return (value.__self__,)
    return _items(value)


def _items(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _can_copy(value: Any, shared: Mapping[int, Any]) -> bool:
    memo = dict(shared)
    try:
        copy.deepcopy(value, memo)
    except Exception:
        return False
    copied = [item for key, item in memo.items() if key not in shared]
    return sum(map(_size, copied)) <= _MOST_COPIED


def _size(value: Any) -> int:
    """How much there is to copy in one object: its items, or a hundredth of an array's bytes."""
    nbytes = getattr(value, "nbytes", 0)
    return len(value) if isinstance(value, list | tuple | set | Mapping) else nbytes // 100


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

    def score(self, rollout: Rollout) -> Rollout:
        """The rollout with its score; a metric that raises gives the failure score."""
        extra = {"program_trace": program_trace(rollout)} if self.wants_program_trace else {}
        try:
            result = self.metric(rollout.example, rollout.prediction, None, None, None, **extra)
        except Exception as error:
            raise_if_provider(error)
            self.warn_once("raised", f"The metric raised {type(error).__name__}: {shorten(str(error))}")
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
            self.warn_once("kind", f"The metric gave no number but {shorten(repr(value), 80)}")
            return self.failure_score
        try:
            number = float(value)
        except Exception:  # An array, a complex number, an int beyond all floats.
            number = math.nan
        if not math.isfinite(number):
            self.warn_once("finite", f"The metric gave {shorten(repr(value), 80)}, which is no finite number")
            return self.failure_score
        return number

    def warn_once(self, kind: str, text: str, consequence: str | None = None) -> None:
        """Log a warning of this kind the first time."""
        mine = object()
        if self._warned.setdefault(kind, mine) is mine:
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
        if error is None:
            rollout = self.scorer.score(rollout)
        return replace(rollout, seconds=time.perf_counter() - started, usage=usage_of(program.history))

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
    for cause in _causes(error):
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


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def raise_if_provider(error: BaseException) -> None:
    """Raise `ProviderError` for an error that is the provider's, in whatever it was wrapped."""
    for cause in _causes(error):
        if isinstance(cause, AdapterParseError):
            return  # There was a reply; what went wrong before it has been got over.
        if isinstance(cause, ProviderError):
            raise cause
        if isinstance(cause, Exception):
            transient = is_retryable_lm_error(cause)
            if transient or isinstance(cause, FATAL_ERRORS):
                text = f"A language model call failed: {shorten(str(cause))}"
                retry_after = getattr(cause, "retry_after", None)
                raise ProviderError(text, transient=transient, retry_after=retry_after) from error
