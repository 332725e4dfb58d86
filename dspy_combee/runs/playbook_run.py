"""One call of `PlaybookOptimizer.compile` or `learn`, with parts of its own, so that calls do not meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dspy

from dspy_combee.controller.batch_size import FixedSize, PowerLawBatchSize, ReplayedSizes, StepTiming, resolve_sizer
from dspy_combee.controller.budget import Ledger
from dspy_combee.controller.sampling import Budget, EpochSampler
from dspy_combee.learners.options import PlaybookOptions
from dspy_combee.learners.playbook import PlaybookLearner, StepOutcome, last_step_of
from dspy_combee.learners.program import PlaybookProgram, Playbooks
from dspy_combee.learners.traces import UNCHECKED, TraceSource, not_kept
from dspy_combee.playbook import Playbook
from dspy_combee.playbook.records import PlaybookStep
from dspy_combee.records.checks import digest_of
from dspy_combee.records.errors import ReflectionError
from dspy_combee.records.secrecy import keeping_secret, secrets_of, traceback_of
from dspy_combee.records.types import Rollout, Spent, Usage
from dspy_combee.report.step_log import StepLog, alone_in
from dspy_combee.runs.playbook_result import PlaybookResult
from dspy_combee.runs.playbook_state import RunState, RunStateFile
from dspy_combee.runs.progress import ProgressLine

logger = logging.getLogger("dspy_combee")

FAILED_STEPS = 3
"""A run ends when this many steps in a row propose nothing because reflection failed."""


@dataclass(frozen=True)
class _Made:
    """What a step made of its minibatch.

    Attributes:
        sampler: Drew it.
        ids: Its ids.
        outcome: What was learned.
        scores: The scores of its rollouts.
        used: What the rollouts and the reflection calls took.
        times: Seconds by phase.
        from_traces: Whether it is one of traces.
    """

    sampler: EpochSampler
    ids: Sequence[Any]
    outcome: StepOutcome
    scores: tuple[float, ...]
    used: Usage
    times: Mapping[str, float]
    from_traces: bool = False

    @property
    def flaw(self) -> str:
        """Why the step's time is no measurement of its size; empty when it is one."""
        if self.outcome.failed or not self.outcome.reductions:
            return self.outcome.reason or "there was nothing to reflect on"
        if self.sampler.decision is not None and self.sampler.decision.clamped:
            return "the budget cut it short"
        if 2 * self.used.cache_hits > self.used.calls:
            return f"the cache answered {self.used.cache_hits} of its {self.used.calls} LM calls"
        return ""


class PlaybookRun:
    """One run over a trainset, over collected traces, or over traces first and a trainset then.

    Args:
        options: The options.
        student: The program; it stays as it is.
        trainset: Examples to learn from.
        valset: Examples that decide which playbooks are best; None for none.
        traces: Collected traces, from which it learns first; None for none.
        online: Whether this is one window of `learn`: the metric is called once per example, and there is no state.

    Attributes:
        steps: The steps so far.
        rollouts: The rollouts of the last step.
    """

    def __init__(
        self,
        options: PlaybookOptions,
        student: Any,
        trainset: Sequence[Any],
        valset: Sequence[Any] | None = None,
        *,
        traces: Any = None,
        online: bool = False,
    ) -> None:
        self.options = options
        self.trainset = trainset
        self.valset = valset
        self.program = PlaybookProgram(student, options.shared_playbook)
        self.learner = PlaybookLearner(options, self.program, asks_for_feedback=not online)
        size = options.minibatch_size
        self.clock = size.clock if isinstance(size, PowerLawBatchSize) else time.monotonic
        self.budget = Budget(len(trainset), len(valset or ()), num_epochs=1 if online else options.num_epochs)
        sizer = (
            FixedSize(max(1, len(trainset)))
            if online or not trainset
            else resolve_sizer(size, len(trainset), self.budget.minibatch_rollouts, 1)
        )
        self.traces: TraceSource | None = None
        if traces is not None:
            replayed = ReplayedSizes(size) if isinstance(size, list | tuple) else None
            sizer = replayed or sizer  # A list replays a whole run, the steps on traces included.
            self.traces = TraceSource(options, self.program, self.learner.aggregator, traces, replayed)
        self.sampler = EpochSampler(sizer, self.budget, options.seed)
        self.ledger = Ledger()
        self.steps: list[PlaybookStep] = []
        self.rollouts: list[Rollout] = []
        self.state = RunState(self.program.start(options.playbook, own_first=online))
        self._failed_steps = 0
        self._first_step = last_step_of(self.state.playbooks.values())
        self._began = time.monotonic()
        self.state_file: RunStateFile | None = None
        self.step_log: StepLog | None = None
        if options.log_dir is not None and not online:
            self.state_file = RunStateFile(options.log_dir, self._identity())
            self.step_log = StepLog(options.log_dir)
        draws = self.budget.num_draws + (0 if self.traces is None else self.traces.batches.budget.num_draws)
        self.progress = ProgressLine(int(draws), options.verbose and not online)

    def execute(self) -> Any:
        """Learn, and build the program.

        Returns:
            The program, with `detailed_results` when stats are tracked.
        """
        predictors = [predictor for _, predictor in self.program.student.named_predictors()]
        lms = [self.options.reflection_lm, dspy.settings.lm, *(predictor.lm for predictor in predictors)]
        self.learner.check([*self.trainset, *(self.valset or ())])
        secrets = secrets_of(lm for lm in lms if lm is not None)
        log_dir = None if self.step_log is None else self.options.log_dir
        with alone_in(log_dir), keeping_secret(secrets), self.learner.executor.opened():
            return self._execute()

    def _execute(self) -> Any:
        try:
            self._resume()
            if self.valset is not None and self.state.best_score is None:
                score, _ = self._validate(self.state.playbooks)
                self._keep(best=self.state.playbooks, best_score=score)
            if self.traces is not None and self.valset is None:
                logger.warning(UNCHECKED)
            while not self._is_over():
                self._step()
        except BaseException as error:
            self.progress.close(finished=False)
            error.best_program = self.program.build(self.best)  # type: ignore[attr-defined]
            if isinstance(error, KeyboardInterrupt):
                self._log_interrupt()
            raise
        self.progress.close(finished=True)
        program = self.program.build(self.best)
        logger.info(
            "Playbook learning ended after %d steps: %d bullets, %d rollouts and %d reflection calls%s.",
            self.state.step,
            sum(len(playbook) for playbook in self.best.values()),
            self.spent.metric_calls,
            self.spent.usage_in("reflection").calls,
            "" if self.state.best_score is None else f", validation score {self.state.best_score:.4g}",
        )
        if self.options.track_stats:
            program.detailed_results = PlaybookResult(
                playbooks=self.program.by_predictor(self.best),
                best_score=self.state.best_score,
                steps=tuple(self.steps),
                batch_sizes=self.state.batch_sizes,
                spent=self.spent,
                best_step=self.state.step if self.state.best is None else self.state.best_step,
            )
        return program

    @property
    def best(self) -> Playbooks:
        """The best playbooks by validation; without a valset, the last."""
        return self.state.playbooks if self.state.best is None else self.state.best

    @property
    def spent(self) -> Spent:
        """What was spent so far, by phase."""
        return self.ledger.spent.plus("reflection", 0, self.learner.meter.usage)

    @property
    def _minibatch_rollouts(self) -> int:
        return self.ledger.spent.metric_calls_in("profiling") + self.ledger.spent.metric_calls_in("rollouts")

    def _identity(self) -> dict[str, Any]:
        return {
            "program": self.program.fingerprint(),
            "trainset": [len(self.trainset), digest_of(self.trainset)],
            "valset": None if self.valset is None else [len(self.valset), digest_of(self.valset)],
            "seed": self.options.seed,
            "traces": None if self.traces is None else [len(self.traces.batches), self.traces.batches.digest],
            "start": digest_of([playbook.to_text() for _, playbook in sorted(self.state.playbooks.items())]),
        }

    def _resume(self) -> None:
        saved = None if self.state_file is None else self.state_file.load(self.state.playbooks)
        if self.step_log is not None:
            kept = self.step_log.resume(0 if saved is None else saved.step + 1)
            self.steps = [step for step in kept if isinstance(step, PlaybookStep)]
        if saved is None:
            return
        logger.info("Going on from step %d of %s.", saved.step, self.options.log_dir)
        self.state = saved
        if saved.sampler is not None:
            self.sampler.set_state(dict(saved.sampler))
        if self.traces is not None and saved.trace_sampler is not None:
            self.traces.batches.sampler.set_state(dict(saved.trace_sampler))
        self.ledger.set_state(saved.spent)
        self.learner.meter.set_state(saved.reflection)

    def _keep(self, **changes: Any) -> None:
        """The one place where the state changes, and is saved."""
        spent, reflection = self.ledger.spent, self.learner.meter.usage
        self.state = replace(self.state, spent=spent, reflection=reflection, **changes)
        if self.state_file is not None:
            self.state_file.save(self.state)

    def _is_over(self) -> bool:
        if self._failed_steps >= FAILED_STEPS:
            raise ReflectionError(
                f"Reflection proposed nothing in {FAILED_STEPS} steps in a row. The last cause: {self.steps[-1].reason}"
            )
        if self.learner.guard.is_spent:
            logger.info("The run ends: max_reflection_cost=$%g is spent.", self.options.max_reflection_cost)
            return True
        return self._unread is None and self.budget.is_spent(0, self.sampler.drawn, merge_may_be_due=False)

    @property
    def _unread(self) -> TraceSource | None:
        """The traces, until they have been read."""
        return None if self.traces is None or self.traces.batches.is_spent else self.traces

    @property
    def _num_read(self) -> int:
        return 0 if self.traces is None else self.traces.batches.sampler.drawn

    # A step --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        number = self.state.step + 1
        source = self._unread
        made = self._learn_from_rollouts(number) if source is None else self._learn_from_traces(source, number)
        made.sampler.observe(StepTiming(len(made.ids), 1, sum(made.times.values()), made.flaw))
        record = self._finish_step(self._record(made), made)
        self._failed_steps = self._failed_steps + 1 if made.outcome.failed else 0
        if made.outcome.failed:
            logger.warning("Step %d taught nothing: %s", record.iteration, record.reason)
        self.steps.append(record)
        self._tell(record)

    def _learn_from_rollouts(self, number: int) -> _Made:
        before = self.state.playbooks
        started = self.clock()
        ids = self.sampler.draw(range(len(self.trainset)), number)
        profiling = self.sampler.decision is not None and self.sampler.decision.profiling
        self.rollouts = self.learner.run(before, [self.trainset[i] for i in ids])
        cut_short = self.learner.stage.aborted_usage.take()
        done = self._minibatch_rollouts + self._num_read
        self.ledger.add_rollouts("profiling" if profiling else "rollouts", self.rollouts, cut_short)
        self.progress.advance(len(self.rollouts), done)
        ran = self.clock()
        outcome = self.learner.learn(before, self.rollouts, self._first_step + number)
        self.ledger.add_feedback(outcome.feedback_calls, outcome.feedback_usage)
        times = {"rollouts": ran - started, "reflection": self.clock() - ran}
        used = sum((rollout.usage for rollout in self.rollouts), outcome.reflection_usage)
        scores = tuple(rollout.score for rollout in self.rollouts)
        return _Made(self.sampler, ids, outcome, scores, used, times)

    def _learn_from_traces(self, source: TraceSource, number: int) -> _Made:
        before = self.state.playbooks
        self.rollouts = []
        started = self.clock()
        batch = source.batches.draw(number)
        step = self._first_step + number
        reflector = source.make_reflector(self.learner.meter)
        with dspy.context(trace=None):  # DSPy's trace would hold the records of many steps.
            outcome = self.learner.learn_from(before, source.jobs(before, batch, step), step, reflector)
        times = {"reflection": self.clock() - started}
        self.progress.advance(len(batch.ids), self._num_read - len(batch.ids))
        return _Made(source.batches.sampler, batch.ids, outcome, (), outcome.reflection_usage, times, True)

    def _record(self, made: _Made) -> PlaybookStep:
        number, outcome = self.state.step + 1, made.outcome
        accepted = outcome.playbooks != dict(self.state.playbooks)
        decision = made.sampler.decision
        return PlaybookStep(
            iteration=number,
            parent=number - 1,
            minibatch_ids=tuple(made.ids),
            n=len(made.ids),
            k=max((item.num_groups for item in outcome.reductions), default=0),
            duplication_factor=min((item.duplication_factor for item in outcome.reductions), default=0),
            scores_before=made.scores,
            scores_after=(),
            accepted=accepted,
            candidate=number if accepted else None,
            reason=outcome.reason,
            reductions=outcome.reductions,
            seconds=sum(made.times.values()),
            validation_seconds=0.0,
            profiling=decision is not None and decision.profiling,
            size_reason="" if decision is None else decision.reason,
            fit=None if decision is None else decision.fit,
            usage=made.used,
            changes=outcome.changes,
            reflections=outcome.reflections,
            unused_reflections=outcome.unused_reflections,
            phase_seconds=made.times,
            from_traces=made.from_traces,
        )

    def _finish_step(self, record: PlaybookStep, made: _Made) -> PlaybookStep:
        """Validate, and save the step and the state after it."""
        score, seconds, playbooks = None, 0.0, made.outcome.playbooks
        best, best_score, best_step = self.state.best, self.state.best_score, self.state.best_step
        if self.valset is not None and record.accepted:
            score, seconds = self._validate(playbooks)
            if best_score is None or score > best_score:
                best, best_score, best_step = playbooks, score, record.iteration
            elif made.from_traces:
                playbooks = dict(self.state.playbooks)
                record = not_kept(record, playbooks, f"validation score {score:.4g} is no better than {best_score:.4g}")
        times = dict(record.phase_seconds) if score is None else {**record.phase_seconds, "validation": seconds}
        record = replace(
            record,
            validation_seconds=seconds,
            phase_seconds=times,
            validation_score=score,
            best_score=best_score,
            metric_calls=self.ledger.spent.metric_calls,
            elapsed=time.monotonic() - self._began,
        )
        if self.step_log is not None:  # Before the state: what it holds beyond that is taken off at a resume.
            self.step_log.append(record)
        self._keep(
            playbooks=playbooks,
            step=record.iteration,
            best=best,
            best_score=best_score,
            best_step=best_step,
            batch_sizes=(*self.state.batch_sizes, record.n),
            sampler=self.sampler.get_state(),
            trace_sampler=None if self.traces is None else self.traces.batches.sampler.get_state(),
        )
        return record

    def _validate(self, playbooks: Mapping[str, Playbook]) -> tuple[float, float]:
        """The mean score on the validation examples, and the seconds it took."""
        started = self.clock()
        rollouts = self.learner.run(playbooks, list(self.valset or ()))
        self.ledger.add_rollouts("validation", rollouts, self.learner.stage.aborted_usage.take())
        return sum(rollout.score for rollout in rollouts) / len(rollouts), self.clock() - started

    def _tell(self, record: PlaybookStep) -> None:
        logger.info(
            "Step %d: n = %d, %d of %d reflections used, %d bullets, %d tokens%s%s.",
            record.iteration,
            record.n,
            len(record.reflections) - len(record.unused_reflections),
            len(record.reflections),
            record.bullets,
            record.tokens,
            "" if record.validation_score is None else f", validation score {record.validation_score:.4g}",
            f" ({record.reason})" if record.reason else "",
        )
        reflection = self.spent.usage_in("reflection")
        self.progress.show(
            step=record.iteration,
            n=record.n,
            bullets=record.bullets,
            best=record.best_score,
            reflections=reflection.calls,
            dollars=reflection.cost or None,
        )
        for callback in self.options.step_callbacks:
            try:
                callback(record)
            except Exception as error:
                logger.error("A step callback failed: %r\n%s", callback, traceback_of(error))

    def _log_interrupt(self) -> None:
        if self.state_file is None:
            logger.warning("Interrupted; no state saved: give a log_dir to be able to go on.")
        else:
            where = self.options.log_dir
            logger.warning("Interrupted; state saved in %s: compile with the same log_dir goes on from there.", where)
