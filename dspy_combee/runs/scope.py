"""`RunScope`: what every run needs, whatever it learns and whichever loop drives it.

The lock of `log_dir`, the run's secrets, the executor, the limits of time and money, the account of what was spent,
the step log, the listeners (progress line, trackers, callbacks), and what becomes of an error or an interrupt: written
once, here. GEPA's search (`runs.search`) and the walk-forward loop (`runs.loop`) stand on it.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import dspy
from tqdm.auto import tqdm

from dspy_combee.calls import resolve_executor
from dspy_combee.calls.executors import Executor
from dspy_combee.calls.guard import CallGuard
from dspy_combee.controller.batch_size import PowerLawBatchSize
from dspy_combee.learners.learner import LearnerTools
from dspy_combee.records.checks import check_callbacks, check_finite, check_int, check_lm, check_positive, check_priced
from dspy_combee.records.errors import ReflectionError
from dspy_combee.records.secrets import keeping_secret, secrets_of, traceback_of
from dspy_combee.records.step_log import StepLog
from dspy_combee.records.types import Rollout, Spent, StepRecord, Usage
from dspy_combee.rollouts.feedback import Scorer
from dspy_combee.rollouts.map import MapStage, ProgramCopier, lms_in
from dspy_combee.runs.tracking import StepTracking, TrackingOptions

logger = logging.getLogger("dspy_combee")

FAILED_STEPS = 3
"""A run ends when this many steps in a row propose nothing because reflection failed."""

LOCK_NAME = ".lock"


@dataclass(frozen=True)
class RunOptions:
    """Hold what both optimizers are given about a run; their docstrings say what each option means.

    Raises:
        TypeError: If one has the wrong type.
        ValueError: If one is out of range, or a name is unknown.
    """

    metric: Callable[..., Any]
    reflection_lm: Any
    executor: str | Executor
    num_threads: int | None
    seed: int | None
    log_dir: str | os.PathLike[str] | None
    step_callbacks: Sequence[Callable[[Any], Any]]
    max_reflection_cost: float | None
    rollout_timeout: float | None
    reflection_timeout: float | None
    failure_score: float
    perfect_score: float
    track_stats: bool
    verbose: bool
    tracking: TrackingOptions = field(default_factory=TrackingOptions)

    def __post_init__(self) -> None:
        _check_metric(self.metric)
        if self.reflection_lm is not None:
            check_lm("reflection_lm", self.reflection_lm)
        resolve_executor(self.executor)
        check_callbacks(self.step_callbacks)
        if self.num_threads is not None:
            check_int("num_threads", self.num_threads)
        if self.seed is not None:
            check_int("seed", self.seed, None)
        for name in ("max_reflection_cost", "rollout_timeout", "reflection_timeout"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_finite("failure_score", self.failure_score)
        if self.perfect_score is not None:
            check_finite("perfect_score", self.perfect_score)
        if self.log_dir is not None and not isinstance(self.log_dir, str | os.PathLike):
            raise TypeError(f"log_dir must be a path, got {self.log_dir!r}.")
        if self.max_reflection_cost is not None and self.reflection_lm is not None:
            check_priced(self.reflection_lm)


class RunScope:
    """Hold what a run needs and the account of what it did.

    Args:
        options: The options.
        student: The program; it is never changed.
        reflection_lm: The language model that reflects.
        num_examples: N, the size of the trainset (or the number of traces), for the trackers.
        total: Rollouts, or examples, that the progress line counts to; None where that is not known.
        minibatch_size: The minibatch size as it was given, whose controller may have a clock of its own.
    """

    def __init__(
        self,
        options: RunOptions,
        student: Any,
        reflection_lm: Any,
        num_examples: int,
        total: int | None,
        minibatch_size: Any = None,
    ) -> None:
        self.options = options
        self.student = student
        self.reflection_lm = reflection_lm
        self.executor = resolve_executor(options.executor, options.num_threads)
        self.guard = CallGuard(self.executor, options.reflection_timeout, options.max_reflection_cost)
        self.scorer = Scorer(options.metric, options.failure_score, options.perfect_score)
        self.stage = MapStage(ProgramCopier(student), self.scorer, self.executor, options.rollout_timeout)
        self.clock = minibatch_size.clock if isinstance(minibatch_size, PowerLawBatchSize) else time.monotonic
        self.log_dir = options.log_dir
        self.step_log: StepLog | None = None if options.log_dir is None else StepLog(options.log_dir)
        self.progress = ProgressLine(total, options.verbose)
        self.tracking = StepTracking(options.tracking, num_examples)
        self.batch_sizes: list[int] = []
        """n of each step, those before a resume included."""
        self._spent = Spent()
        self._steps: list[StepRecord] = []
        self._began = time.monotonic()

    def tools(self) -> LearnerTools:
        """Return what a learner uses of the run."""
        options = self.options
        return LearnerTools(
            self.guard, self.executor, self.scorer, self.reflection_lm, options.seed, options.rollout_timeout
        )

    # From start to end -----------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, examples: Iterable[Any], makes_rollouts: bool = True, tracked: bool = True) -> Iterator[None]:
        """Keep the run's resources for its duration: lock, secrets, executor, tracked run.

        Args:
            examples: What rollouts will be made on; only an executor that sends them elsewhere looks at them.
            makes_rollouts: Whether there will be rollouts; otherwise the executor is not opened.
            tracked: Whether to open the tracked run here; gepa opens that of a search by itself.

        Raises:
            ValueError: If another run uses `log_dir`.
            TypeError: If the executor cannot take the program, the metric or an example where it runs them.
            ExecutorError: If the executor cannot be reached.
        """
        lms = [self.reflection_lm, dspy.settings.lm, *lms_in(self.student)]
        with ExitStack() as stack:
            stack.push(lambda kind, error, trace: self.progress.close(finished=kind is None))
            stack.enter_context(exclusive(self.log_dir))
            stack.enter_context(keeping_secret(secrets_of(lm for lm in lms if lm is not None)))
            if makes_rollouts:
                self.stage.check(self.student, examples)
                stack.enter_context(self.executor.opened())
            if tracked:
                stack.enter_context(self.tracking.opened())
            yield

    @contextmanager
    def running(self, best_program: Callable[[], Any], resumable: Callable[[], str]) -> Iterator[None]:
        """See a run to its end: what is raised carries the best program, and an interrupt says how to go on.

        Args:
            best_program: Builds the best program so far.
            resumable: Says, after an interrupt, how to go on.
        """
        try:
            yield
        except BaseException as error:
            error.best_program = best_program()  # type: ignore[attr-defined]
            if isinstance(error, KeyboardInterrupt):
                logger.warning("Interrupted; %s", resumable())
            raise

    # The account -----------------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        """Return the seconds since the run began in this process."""
        return time.monotonic() - self._began

    @property
    def spent(self) -> Spent:
        """Return what was spent so far, by phase."""
        return self._spent.plus("reflection", 0, self.guard.meter.usage)

    @property
    def spent_without_reflection(self) -> Spent:
        """Return what was spent so far, without the reflection calls, which the guard's meter counts."""
        return self._spent

    def restore(self, spent: Spent, reflection: Usage | None = None) -> None:
        """Go on counting from the account of a run that this one resumes."""
        self._spent = spent
        if reflection is not None:
            self.guard.meter.set_state(reflection)

    def note_rollouts(self, phase: str, rollouts: Sequence[Rollout]) -> None:
        """Account for rollouts of a phase: `"profiling"`, `"rollouts"` or `"validation"`; each is one metric call."""
        usage = sum((rollout.usage for rollout in rollouts), self.stage.aborted_usage.take())
        self._spent = self._spent.plus(phase, len(rollouts), usage)

    def note_feedback(self, metric_calls: int, usage: Usage) -> None:
        """Account for metric calls that asked for feedback, and what their language-model calls used."""
        self._spent = self._spent.plus("feedback", metric_calls, usage)

    def evaluate(self, program: Any, examples: Sequence[Any], phase: str) -> list[Rollout]:
        """Run a program on examples and account for it."""
        rollouts = self.stage.run([(program, examples)])
        self.note_rollouts(phase, rollouts)
        return rollouts

    # Steps -----------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[Any]:
        """Return the steps so far; the last one alone where nobody asked for them."""
        if self.step_log is not None and self.options.track_stats:
            try:
                return self.step_log.read()
            except (OSError, ValueError) as error:
                logger.warning("The steps cannot be read: %s", error)
        return list(self._steps)

    def resume_steps(self, iteration: int) -> None:
        """Keep the steps before `iteration` in the step log; the run makes the later ones again.

        Raises:
            ValueError: If the log is damaged.
        """
        if self.step_log is not None:
            self._keep(self.step_log.resume(iteration))

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        """Take in the steps of an iteration, on disk too; a step log that cannot be written ends no run."""
        self._keep(records)
        self.batch_sizes.extend(record.n for record in records)
        if self.step_log is None:
            return
        for record in records:
            try:
                self.step_log.append(record)
            except Exception as error:
                logger.warning("Step %d is not in %s yet: %s", record.iteration, self.step_log.path, error)

    def tell_listeners(self, records: Sequence[StepRecord], facts: Mapping[str, Any] | None = None) -> None:
        """Tell progress line, trackers and callbacks of steps; one that fails ends no run that has been paid for.

        Args:
            records: The steps.
            facts: What the progress line shows of them beside the rest.
        """
        tracking = [self.tracking] if self.tracking.is_wanted else []
        listeners: list[Callable[[Any], Any]] = [
            partial(self._show, facts or {}),
            *tracking,
            *self.options.step_callbacks,
        ]
        for record in records:
            for listener in listeners:
                try:
                    listener(record)
                except Exception as error:
                    logger.error("A step callback raised an error; the run goes on.\n%s", traceback_of(error))

    def _keep(self, records: Sequence[StepRecord]) -> None:
        """Hold the steps in memory where they are wanted after the run and are not on disk; else the last one."""
        if self.options.track_stats and self.step_log is None:
            self._steps.extend(records)
        elif records:
            self._steps = [records[-1]]

    def _show(self, facts: Mapping[str, Any], record: StepRecord) -> None:
        usage = self.guard.meter.usage
        self.progress.show(
            step=len(self.batch_sizes),
            n=record.n,
            **facts,
            best=record.best_score,
            reflections=usage.calls,
            dollars=usage.cost or None,
        )


class ProgressLine:
    """Show one tqdm line: rollouts of the budget, step, n, best score, reflection calls, dollars, time left.

    It shows in a terminal and in a notebook, and nowhere else. It reaches its end when the run does, and only then.

    Args:
        total: Rollouts of the budget; None where it is not known.
        verbose: Whether to show it.
    """

    def __init__(self, total: int | None, verbose: bool = True) -> None:
        self.total = total
        shown = verbose and (sys.stderr.isatty() or _in_notebook())
        make_bar: Any = tqdm
        self._bar = make_bar(total=total, desc="Combee", unit="rollout", disable=not shown, dynamic_ncols=True)
        self._done = 0

    def advance(self, rollouts: int, before: int) -> None:
        """Count more rollouts.

        Args:
            rollouts: How many.
            before: How many had been done, those of a run that this one goes on from included.
        """
        if self._done < before:  # Not done in the time that the line has been there: no part of its speed.
            self._bar.initial = self._bar.n = self._highest(before)
        self._done = before + rollouts
        if (reached := self._highest(self._done)) > self._bar.n:
            self._bar.update(reached - self._bar.n)

    def _highest(self, done: int) -> int:
        """Return the most that may show before the end: tqdm rounds, and 99.5 % would show as 100."""
        return done if self.total is None else max(0, min(done, math.ceil(0.995 * self.total) - 1))

    def show(self, **facts: Any) -> None:
        """Show these facts behind the bar."""
        self._bar.set_postfix({name: _short(value) for name, value in facts.items() if value is not None})

    def close(self, finished: bool) -> None:
        """End the line with the run; an error leaves it where it is."""
        if finished:
            self._bar.total = max(self._done, 1)
            self._bar.n = self._bar.total
            self._bar.refresh()
        self._bar.close()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return shell is not None and type(shell()).__name__ == "ZMQInteractiveShell"


@contextmanager
def exclusive(log_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    """Hold an exclusive lock on `log_dir`; the OS releases it if the process dies.

    Raises:
        ValueError: If another run holds it.
    """
    if log_dir is None:
        yield
        return
    from filelock import FileLock, Timeout

    folder = Path(log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOCK_NAME).touch()  # An OSError where nothing can be written says so; a lock would only time out.
    try:
        lock = FileLock(folder / LOCK_NAME, blocking=False, thread_local=False)
        lock.acquire()
    except Timeout:
        raise ValueError(f"log_dir {log_dir} is in use by a run that has not ended; give another one.") from None
    except NotImplementedError as error:  # A file system without locks.
        logger.debug("%s cannot be locked: %s", log_dir, error)
        yield
        return
    try:
        yield
    finally:
        lock.release()


def reflection_failed(reason: str) -> ReflectionError:
    """Return the error that ends a run after `FAILED_STEPS` steps in a row that proposed nothing."""
    return ReflectionError(f"Reflection proposed nothing in {FAILED_STEPS} steps in a row. The last cause: {reason}")


def answered_by_cache(usage: Usage) -> str:
    """Say that the cache answered most of a step's LM calls, so that its time is no measurement; else nothing."""
    if 2 * usage.cache_hits <= usage.calls:
        return ""
    return f"the cache answered {usage.cache_hits} of its {usage.calls} LM calls"


def mean(scores: Iterable[float]) -> float | None:
    """Return the mean of some scores; None where there are none."""
    listed = list(scores)
    return sum(listed) / len(listed) if listed else None


def _check_metric(metric: Any) -> None:
    if not callable(metric):
        raise TypeError(f"metric must be callable, got {metric!r}.")
    if inspect.iscoroutinefunction(metric):
        raise TypeError("metric is a coroutine function; give a plain function that returns the score.")
    try:
        inspect.signature(metric).bind(None, None, None, None, None)
    except TypeError as error:
        raise TypeError(
            "metric must take five arguments, as a dspy.GEPA metric does: (gold, pred, trace, pred_name, pred_trace); "
            f"{error}."
        ) from error
    except ValueError:
        return  # A callable that does not tell its signature.
