"""`TraceRun`: the steps of `CombeeOptimizer` that learn from collected traces, before GEPA's search or without it.

The traces stand in the place of Map; Shuffle and Reduce are those of every step (paper, sections 3.1, 3.2 and 4.2). A
step takes n traces and, against one frozen candidate, makes a proposal for each predictor that has records. With a
valset the proposal is kept if its mean score there is better than the candidate's; without one it is taken.

- A trace with a predictor's name gives that predictor a record. A trace of the whole program gives its one predictor
  a record; where there are several, each gets one that says what it is. The code of `dspy.Flex` learns nothing here.
- Budget: one pass over the traces, or `num_epochs` passes. A proposal costs one validation pass and no other metric
  calls; `max_metric_calls` (or what `auto` and `max_full_evals` come to) is never exceeded, and where a search follows,
  the traces take at most half of it.
- What is learned is the seed candidate of the search, which validates it once more, as it does every seed.
- The prompts in the step records are cut, so that a long run does not hold all its traces in memory.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dspy

from dspy_combee.calls import resolve_executor
from dspy_combee.controller.batch_size import PowerLawBatchSize, StepTiming
from dspy_combee.learners.trace_batches import (
    TraceBatch,
    TraceBatches,
    check_traces,
    concerns,
    group_tokens,
    trace_record,
)
from dspy_combee.records.checks import digest_of
from dspy_combee.records.errors import OutOfBudgetError, ReflectionError
from dspy_combee.records.secrecy import keeping_secret
from dspy_combee.records.text import estimate_tokens
from dspy_combee.records.types import Reduction, ReflectionRecord, Rollout, Spent, StepRecord, Usage
from dspy_combee.report.step_log import StepLog, alone_in
from dspy_combee.runs.events import StepRecorder
from dspy_combee.runs.parts import has_gepa_state, make_adapter, make_reflection, ready_to_run, secrets_in_run
from dspy_combee.runs.progress import ProgressLine
from dspy_combee.runs.trace_state import TraceState, TraceStateFile
from dspy_combee.runs.trace_steps import failure_of, flaw_of, step_record, without_long_prompt

logger = logging.getLogger("dspy_combee")

FAILED_STEPS = 3
"""A run ends when this many steps in a row propose nothing because reflection failed."""

UNCHECKED = "No valset: what the traces teach is taken as it comes, step by step, and nothing checks it."


@dataclass(frozen=True)
class _Verdict:
    """What became of a proposal."""

    accepted: bool
    reason: str
    scores: tuple[float, ...] | None = None
    seconds: float = 0.0

    @property
    def score(self) -> float | None:
        return sum(self.scores) / len(self.scores) if self.scores else None


class TraceRun:
    """One run over collected traces.

    Args:
        optimizer: The `CombeeOptimizer`; it holds the options and is not changed.
        student: The program; it stays as it is.
        traces: The traces.
        trainset: Examples of the search that follows; empty where none does.
        valset: Examples that decide; None for none.

    Attributes:
        recorder: Keeps the account.
        meter: What reflection has used.
        state: Where the run is.

    Raises:
        TypeError: If the traces are none.
        ValueError: If there is none, or one is of a predictor that the program does not have.
    """

    def __init__(
        self, optimizer: Any, student: Any, traces: Any, trainset: Sequence[Any], valset: Sequence[Any] | None
    ) -> None:
        self.optimizer = optimizer
        self.valset = list(valset or ())
        self.trainset = trainset
        self.search_follows = bool(trainset)
        self.names = [name for name, _ in student.named_predictors()]
        executor = resolve_executor(optimizer.executor, optimizer.num_threads)
        self.adapter = make_adapter(optimizer, student, executor, self)
        self.reflection = make_reflection(optimizer, executor)
        self.meter = self.reflection.meter
        self.batches = TraceBatches(
            check_traces(traces, self.names),
            optimizer.reflection_minibatch_size,
            optimizer.num_epochs or 1,
            optimizer.seed,
        )
        self.max_metric_calls: int | None = None
        if self.valset:
            total = optimizer.budget_for(student, trainset, valset)
            self.max_metric_calls = total // 2 if total is not None and trainset else total
        size = optimizer.reflection_minibatch_size
        self.clock = size.clock if isinstance(size, PowerLawBatchSize) else time.monotonic
        self.step_log = StepLog(optimizer.log_dir) if optimizer.log_dir is not None else None
        self.recorder = StepRecorder(
            listeners=[self._show, *optimizer.step_callbacks], clock=self.clock, log=self.step_log
        )
        self.progress = ProgressLine(int(self.batches.budget.num_draws), optimizer.verbose, unit="trace")
        self.state = TraceState(self.adapter.seed_candidate())
        self.state_file: TraceStateFile | None = None
        if optimizer.log_dir is not None:
            self.state_file = TraceStateFile(optimizer.log_dir, self._identity())
        self._failed_steps = 0
        self._began = time.monotonic()

    def execute(self) -> None:
        """Learn; the outcome is in `state` and `recorder`.

        Raises:
            ReflectionError: If reflection fails in three steps in a row.
            ProviderError: If a language model's provider refuses a call for good or cannot be reached.
            ValueError: If `log_dir` holds the state of another run.

            Whatever is raised carries `best_program`.
        """
        secrets = secrets_in_run(self.adapter.student, self.reflection.proposer.reflection_lm)
        log_dir = self.optimizer.log_dir
        with alone_in(log_dir), keeping_secret(secrets), ready_to_run(self.adapter, self.valset, later=self.trainset):
            self._execute()

    def _execute(self) -> None:
        try:
            self._resume()
            self._learn()
        except BaseException as error:
            self.progress.close(finished=False)
            error.best_program = self.build_program()  # type: ignore[attr-defined]
            if isinstance(error, KeyboardInterrupt):
                where = self.optimizer.log_dir
                logger.warning("Interrupted; %s.", f"state saved in {where}" if where else "no state is saved")
            raise
        self.progress.close(finished=True)

    def build_program(self) -> Any:
        """The student with what was learned so far."""
        return self.adapter.build_program(dict(self.state.candidate))

    @property
    def spent(self) -> Spent:
        """What was spent so far, by phase."""
        return self.recorder.ledger.spent.plus("reflection", 0, self.meter.usage)

    def note_rollouts(self, rollouts: Sequence[Rollout], traced: bool, cut_short: Usage) -> None:
        """See `RolloutObserver`."""
        self.recorder.note_rollouts(rollouts, traced, cut_short)

    def note_feedback(self, metric_calls: int, usage: Usage) -> None:
        """See `RolloutObserver`."""
        self.recorder.ledger.add_feedback(metric_calls, usage)

    # The run -------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        if self.state.done:
            return
        logger.info(
            "Learning from %d traces: %s. A step makes no rollouts%s.",
            len(self.batches),
            self.batches.sizer.description,
            f" but the {len(self.valset)} of validation" if self.valset else "",
        )
        if not self.valset:
            logger.warning(UNCHECKED)
        elif self.state.scores is None and self._affords(2):
            scores, _ = self._validate(dict(self.state.candidate))
            self._keep(scores=scores)
        while not self._is_over():
            self._step()
        # Spent money may be given more, as long as no search has begun from what was learned.
        self._keep(done=self.batches.is_spent or self.search_follows)
        logger.info(
            "The traces have been read: %d steps, of which %d changed the instructions, and %d reflection calls.",
            self.state.step,
            self.state.kept,
            self.meter.usage.calls,
        )

    def _affords(self, passes: int) -> bool:
        """Whether so many validation passes are left in the budget."""
        if not self.valset or self.max_metric_calls is None:
            return True
        return self.recorder.ledger.spent.metric_calls + passes * len(self.valset) <= self.max_metric_calls

    def _is_over(self) -> bool:
        if self._failed_steps >= FAILED_STEPS:
            raise ReflectionError(
                f"Reflection proposed nothing in {FAILED_STEPS} steps in a row. The last cause: "
                f"{self.recorder.records[-1].reason}"
            )
        if self.batches.is_spent:
            return True
        if self.reflection.guard.is_spent:
            logger.info("The traces are left: max_reflection_cost=$%g is spent.", self.optimizer.max_reflection_cost)
            return True
        if not self._affords(1) or (self.valset and self.state.scores is None):
            logger.warning(
                "The traces are left after %d of them: a validation pass (%d) is not left in the %s metric calls that "
                "they may take.",
                self.batches.sampler.drawn,
                len(self.valset),
                self.max_metric_calls,
            )
            return True
        return False

    def _step(self) -> None:
        number = self.state.step + 1
        candidate = dict(self.state.candidate)
        started = self.clock()
        batch = self.batches.draw(number)
        reductions, failure = self._reduce(candidate, batch, number)
        ended = self.clock()
        texts = {made.component: made.text for made in reductions if made.text is not None}
        child = {**candidate, **texts}
        verdict = self._judge(candidate, child, failure or failure_of(reductions))
        usage = sum((node.usage for made in reductions for node in made.nodes), Usage())
        self.batches.sampler.observe(StepTiming(len(batch.ids), 1, ended - started, flaw_of(reductions, batch, usage)))
        self._failed_steps = 0 if texts or failure else self._failed_steps + bool(failure_of(reductions))
        kept = self.state.kept + verdict.accepted
        scores = verdict.scores if verdict.accepted and verdict.scores else self.state.scores
        record = step_record(number, self.state.kept, batch, reductions, usage)
        record = replace(
            record,
            accepted=verdict.accepted,
            candidate=kept if verdict.accepted else None,
            reason=verdict.reason,
            seconds=ended - started,
            validation_seconds=verdict.seconds,
            phase_seconds={
                "reflection": ended - started,
                **({"validation": verdict.seconds} if verdict.scores else {}),
            },
            metric_calls=self.recorder.ledger.spent.metric_calls,
            elapsed=time.monotonic() - self._began,
            validation_score=verdict.score,
            best_score=sum(scores) / len(scores) if scores else None,
        )
        # First into the step log, which a resumed run cuts back to the state.
        self.recorder.add(record)
        self._keep(
            candidate=child if verdict.accepted else candidate,
            kept=kept,
            step=number,
            scores=scores,
            batch_sizes=tuple(self.recorder.batch_sizes),
            sampler=self.batches.sampler.get_state(),
        )

    def _reduce(self, candidate: dict[str, str], batch: TraceBatch, number: int) -> tuple[list[Reduction], str]:
        """The trees of a step, their prompts cut; and why they are cut short, where the money is spent."""
        dataset = self._records(candidate, batch)
        try:
            job = (candidate, dataset, list(dataset))
            with dspy.context(trace=None):  # DSPy's trace would hold the records of many steps.
                made, failure = self.reflection.proposer.reduce([job], [f"traces/{number}"])[0], ""
        except OutOfBudgetError as error:
            made, failure = getattr(error, "reductions", [[]])[0], str(error)
        return [replace(item, nodes=tuple(without_long_prompt(node) for node in item.nodes)) for item in made], failure

    def _records(self, candidate: Mapping[str, str], batch: TraceBatch) -> dict[str, list[ReflectionRecord]]:
        proposer = self.reflection.proposer
        dataset = {}
        for name in self.names:
            mine = [(source, trace) for source, trace in enumerate(batch.traces) if concerns(trace, name)]
            current = estimate_tokens(candidate[name])
            most = group_tokens(
                proposer.aggregator, current, len(mine), proposer.num_groups, proposer.duplication_factor
            )
            if mine:
                dataset[name] = [trace_record(trace, most, source, name, self.names) for source, trace in mine]
        return dataset

    def _judge(self, candidate: dict[str, str], child: dict[str, str], failure: str) -> _Verdict:
        if failure and child == candidate:
            return _Verdict(False, failure)
        if child == candidate:
            return _Verdict(False, "the proposal changes nothing")
        if not self.valset:
            return _Verdict(True, f"taken unchecked: there is no valset{f'; {failure}' if failure else ''}")
        scores, seconds = self._validate(child)
        before, after = self.state.score or 0.0, sum(scores) / len(scores)
        if after > before:
            return _Verdict(True, failure, scores, seconds)
        reason = f"validation score {after:.4g} is no better than {before:.4g}"
        return _Verdict(False, reason, scores, seconds)

    def _validate(self, candidate: dict[str, str]) -> tuple[tuple[float, ...], float]:
        """The scores on the validation examples, and the seconds they took."""
        started = self.clock()
        (evaluated,) = self.adapter.batch_evaluate([(candidate, self.valset)], capture_traces=False)
        return tuple(evaluated.scores), self.clock() - started

    def _show(self, step: StepRecord) -> None:
        usage = self.meter.usage
        self.progress.advance(step.n, self.batches.sampler.drawn - step.n)
        self.progress.show(
            step=step.iteration, n=step.n, best=step.best_score, reflections=usage.calls, dollars=usage.cost or None
        )
        verdict = "kept" if step.accepted else "not kept"
        logger.info(
            "Step %d: n = %d traces, %.3g s; %s%s.",
            step.iteration,
            step.n,
            step.seconds,
            verdict,
            f" ({step.reason})" if step.reason else "",
        )

    # The state -----------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        texts = repr(sorted(self.adapter.seed_candidate().items())).encode("utf-8", "backslashreplace")
        return {
            "program": hashlib.sha256(texts).hexdigest()[:16],
            "traces": [len(self.batches), self.batches.digest],
            "valset": [len(self.valset), digest_of(self.valset)],
            "seed": self.optimizer.seed,
        }

    def _keep(self, **changes: Any) -> None:
        """The one place where the state changes, and is saved."""
        spent, reflection = self.recorder.ledger.spent, self.meter.usage
        self.state = replace(self.state, spent=spent, reflection=reflection, **changes)
        if self.state_file is not None:
            self.state_file.save(self.state)

    def _resume(self) -> None:
        saved = None if self.state_file is None else self.state_file.load(self.state.candidate)
        if saved is None:
            if has_gepa_state(self.optimizer.log_dir):
                raise ValueError(
                    f"{self.optimizer.log_dir} holds the state of a run without traces. Give another log_dir."
                )
            saved = self.state
        elif not saved.done:
            logger.info("Going on from step %d of %s.", saved.step, self.optimizer.log_dir)
        self.state = saved
        if self.step_log is not None and not has_gepa_state(self.optimizer.log_dir):
            self.recorder.records = self.step_log.resume(saved.step + 1)
        self.recorder.batch_sizes = list(saved.batch_sizes)
        self.recorder.ledger.set_state(saved.spent)
        self.meter.set_state(saved.reflection)
        if saved.sampler is not None:
            self.batches.sampler.set_state(dict(saved.sampler))
