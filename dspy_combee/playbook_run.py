"""One call of `PlaybookOptimizer.compile` or `learn`, with parts of its own, so that calls do not meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dspy_combee.batch_size import PowerLawBatchSize
from dspy_combee.budget import Budget, Ledger
from dspy_combee.errors import ReflectionError
from dspy_combee.playbook import Playbook
from dspy_combee.playbook_options import PlaybookOptions
from dspy_combee.playbook_program import PlaybookProgram, Playbooks
from dspy_combee.playbook_records import PlaybookResult, PlaybookStep
from dspy_combee.playbook_state import RunState, StateFile
from dspy_combee.playbook_step import PlaybookLearner, StepOutcome, last_step_of
from dspy_combee.records import Rollout, Spent, Usage
from dspy_combee.sampling import EpochSampler
from dspy_combee.sizes import FixedSize, SizeDecision, StepTiming, resolve_sizer

logger = logging.getLogger("dspy_combee")

FAILED_STEPS = 3
"""A run ends when this many steps in a row propose nothing because reflection failed."""


@dataclass(frozen=True)
class _Position:
    """Where the run is, as the sampler asks for it: the step, and metric calls, which it does not limit."""

    i: int
    total_num_evals: int = 0


@dataclass(frozen=True)
class _Ids:
    """The ids of the trainset: its positions."""

    number: int

    def all_ids(self) -> range:
        return range(self.number)


class PlaybookRun:
    """One run over a trainset.

    Args:
        options: The options.
        student: The program; it stays as it is.
        trainset: Examples to learn from.
        valset: Examples that decide which playbooks are best; None for none.
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
            FixedSize(len(trainset))
            if online
            else resolve_sizer(size, len(trainset), self.budget.minibatch_rollouts, 1)
        )
        self.sampler = EpochSampler(sizer, self.budget, options.seed)
        self.ledger = Ledger()
        self.steps: list[PlaybookStep] = []
        self.rollouts: list[Rollout] = []
        self.state = RunState(self.program.start(options.playbook, own_first=online))
        self._failed_steps = 0
        self._first_step = last_step_of(self.state.playbooks.values())
        self._began = time.monotonic()
        self.state_file: StateFile | None = None
        if options.log_dir is not None and not online:
            self.state_file = StateFile(options.log_dir, self._identity())

    def execute(self) -> Any:
        """Learn, and build the program.

        Returns:
            The program, with `detailed_results` when stats are tracked.
        """
        try:
            self._resume()
            if self.valset is not None and self.state.best_score is None:
                score, _ = self._validate(self.state.playbooks)
                self._keep(best=self.state.playbooks, best_score=score)
            while not self._is_over():
                self._step()
        except BaseException as error:
            error.best_program = self.program.build(self.best)  # type: ignore[attr-defined]
            if isinstance(error, KeyboardInterrupt):
                self._log_interrupt()
            raise
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

    def _identity(self) -> dict[str, Any]:
        return {
            "program": self.program.fingerprint(),
            "trainset": len(self.trainset),
            "valset": None if self.valset is None else len(self.valset),
            "seed": self.options.seed,
        }

    def _resume(self) -> None:
        saved = None if self.state_file is None else self.state_file.load()
        if saved is None:
            return
        logger.info("Going on from step %d of %s.", saved.step, self.options.log_dir)
        self.state = saved
        if saved.sampler is not None:
            self.sampler.set_state(dict(saved.sampler))
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
        return self.budget.is_spent(0, self.sampler.drawn, merge_may_be_due=False)

    # A step --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        number = self.state.step + 1
        before = self.state.playbooks
        started = self.clock()
        ids = self.sampler.next_minibatch_ids(_Ids(len(self.trainset)), _Position(number))
        decision = self.sampler.decision
        profiling = decision is not None and decision.profiling
        self.rollouts = self.learner.run(before, [self.trainset[i] for i in ids])
        cut_short = self.learner.stage.cut_short.take()
        self.ledger.add_rollouts("profiling" if profiling else "rollouts", self.rollouts, cut_short)
        ran = self.clock()
        outcome = self.learner.learn(before, self.rollouts, self._first_step + number)
        self.ledger.add_feedback(outcome.feedback_calls, outcome.feedback_usage)
        ended = self.clock()
        used = sum((rollout.usage for rollout in self.rollouts), outcome.reflection_usage)
        flaw = _flaw(outcome, decision, used)
        self.sampler.observe(StepTiming(len(ids), 1, ended - started, flaw))
        record = self._record(ids, outcome, used)
        times = {"rollouts": ran - started, "reflection": ended - ran}
        record = replace(record, seconds=ended - started, phase_seconds=times)
        record = self._finish_step(record, outcome)
        self._failed_steps = self._failed_steps + 1 if outcome.failed else 0
        self.steps.append(record)
        self._tell(record)

    def _record(self, ids: Sequence[int], outcome: StepOutcome, used: Usage) -> PlaybookStep:
        number = self.state.step + 1
        accepted = outcome.playbooks != dict(self.state.playbooks)
        decision = self.sampler.decision
        return PlaybookStep(
            iteration=number,
            parent=number - 1,
            minibatch_ids=tuple(ids),
            n=len(ids),
            k=max((made.num_groups for made in outcome.reductions), default=0),
            duplication_factor=min((made.duplication_factor for made in outcome.reductions), default=0),
            scores_before=tuple(rollout.score for rollout in self.rollouts),
            scores_after=(),
            accepted=accepted,
            candidate=number if accepted else None,
            reason=outcome.reason,
            reductions=outcome.reductions,
            seconds=0.0,
            validation_seconds=0.0,
            profiling=decision is not None and decision.profiling,
            size_reason="" if decision is None else decision.reason,
            fit=None if decision is None else decision.fit,
            usage=used,
            changes=outcome.changes,
            reflections=outcome.reflections,
            unused_reflections=outcome.unused_reflections,
        )

    def _finish_step(self, record: PlaybookStep, outcome: StepOutcome) -> PlaybookStep:
        """Validate, and save."""
        score, seconds = None, 0.0
        best, best_score = self.state.best, self.state.best_score
        if self.valset is not None and record.accepted:
            score, seconds = self._validate(outcome.playbooks)
            if best_score is None or score > best_score:
                best, best_score = outcome.playbooks, score
        self._keep(
            playbooks=outcome.playbooks,
            step=record.iteration,
            best=best,
            best_score=best_score,
            batch_sizes=(*self.state.batch_sizes, record.n),
            sampler=self.sampler.get_state(),
        )
        times = dict(record.phase_seconds) if score is None else {**record.phase_seconds, "validation": seconds}
        return replace(
            record,
            validation_seconds=seconds,
            phase_seconds=times,
            validation_score=score,
            best_score=best_score,
            metric_calls=self.ledger.spent.metric_calls,
            elapsed=time.monotonic() - self._began,
        )

    def _validate(self, playbooks: Mapping[str, Playbook]) -> tuple[float, float]:
        """The mean score on the validation examples, and the seconds it took."""
        started = self.clock()
        rollouts = self.learner.run(playbooks, list(self.valset or ()))
        self.ledger.add_rollouts("validation", rollouts, self.learner.stage.cut_short.take())
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
        for callback in self.options.step_callbacks:
            try:
                callback(record)
            except Exception:
                logger.exception("A step callback failed: %r", callback)

    def _log_interrupt(self) -> None:
        if self.state_file is None:
            logger.warning("Interrupted; no state saved: give a log_dir to be able to go on.")
        else:
            where = self.options.log_dir
            logger.warning("Interrupted; state saved in %s: compile with the same log_dir goes on from there.", where)


def _flaw(outcome: StepOutcome, decision: SizeDecision | None, used: Usage) -> str:
    """Why a step's time is no measurement of its size; empty when it is one."""
    if outcome.failed or not outcome.reductions:
        return outcome.reason or "there was nothing to reflect on"
    if decision is not None and decision.clamped:
        return "the budget cut it short"
    if 2 * used.cache_hits > used.calls:
        return f"the cache answered {used.cache_hits} of its {used.calls} LM calls"
    return ""
