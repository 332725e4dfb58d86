"""`StepRecorder`: makes a `StepRecord` of each proposal from GEPA's events."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from dspy_combee.controller.batch_size import StepTiming
from dspy_combee.controller.sampling import EpochSampler
from dspy_combee.records.secrets import shorten
from dspy_combee.records.types import Reduction, Rollout, StepRecord, Usage
from dspy_combee.runs.scope import RunScope, answered_by_cache

logger = logging.getLogger("dspy_combee")

REPEATED = "the same proposal again"
"""How the reason of a step begins whose proposal was not evaluated, because it had been before."""


class _Task:
    """Collect what is known so far of one proposal of the step under way."""

    def __init__(self, parent: int) -> None:
        self.parent = parent
        self.minibatch_ids: tuple[Any, ...] = ()
        self.scores_before: list[float] | None = None
        self.scores_after: list[float] = []
        self.reflected = False
        self.reductions: tuple[Reduction, ...] = ()
        self.child: dict[str, str] | None = None
        self.candidate: int | None = None
        self.reason = ""


class StepRecorder:
    """Make a `StepRecord` of each proposal from GEPA's events, as a GEPA callback.

    Args:
        scope: The run, which keeps the records.
        sampler: The run's sampler, which is told how long each step took; None where the user gave one.
        steps_before: Steps that the run made before the search, on traces.
    """

    def __init__(self, scope: RunScope, sampler: EpochSampler | None = None, steps_before: int = 0) -> None:
        self.scope = scope
        self.sampler = sampler
        self.state: Any = None
        """GEPA's state, from the first step on."""
        self.iteration = self._steps_before = steps_before
        """GEPA's iteration, the steps before it included."""
        self.accepted_last = False
        self._metric_calls_before = scope.spent.metric_calls
        self._phases: dict[str, float] = {}
        self._marked = time.monotonic()
        self._evaluations: set[tuple[str, str]] = set()
        self._minibatch = False
        self._usage = Usage()
        self._tasks: list[_Task] = []
        self._entered: dict[int, dict[str, str]] = {}
        self._scores: dict[int, float] = {}
        self._rejections: list[tuple[float, float, str]] = []
        self._error = ""
        self._started = 0.0
        self._evaluated: float | None = None

    def on_iteration_start(self, event: Any) -> None:
        """Begin a step."""
        self.state = event["state"]
        self.iteration = event["iteration"] + self._steps_before
        self._tasks = []
        self._entered = {}
        self._rejections = []
        self._error = ""
        self._started = self.scope.clock()
        self._evaluated = None
        self._minibatch = False
        self._usage = Usage()
        self._phases = {}
        self._marked = time.monotonic()

    def on_evaluation_start(self, event: Any) -> None:
        """Take the rollouts that come for those of a minibatch, until the evaluation ends."""
        self._minibatch = True
        if event["candidate_idx"] is None:
            self._mark("reflection")

    def _mark(self, phase: str) -> None:
        """Add the time since the last mark to this phase."""
        now = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._marked
        self._marked = now

    def note_rollouts(self, rollouts: Sequence[Rollout], traced: bool) -> None:
        """Account for rollouts, made with traces or without; only those of a minibatch are announced by GEPA."""
        phase = "validation"
        if traced and self._minibatch:
            phase = "profiling" if self._decision is not None and self._decision.profiling else "rollouts"
            self._usage = sum((rollout.usage for rollout in rollouts), self._usage)
        self.scope.note_rollouts(phase, rollouts)

    @property
    def _decision(self) -> Any:
        return None if self.sampler is None else self.sampler.decision

    def on_candidate_selected(self, event: Any) -> None:
        """Note a parent: one proposal will come of it."""
        self._tasks.append(_Task(event["candidate_idx"]))

    def on_minibatch_sampled(self, event: Any) -> None:
        """Note the minibatch of the last chosen parent."""
        self._tasks[-1].minibatch_ids = tuple(event["minibatch_ids"])

    def on_evaluation_end(self, event: Any) -> None:
        """Note the scores of a parent or a child on its minibatch, in the order of the proposals."""
        self._minibatch = False
        self._mark("rollouts")
        if event["candidate_idx"] is not None:
            task = next((t for t in self._tasks if t.scores_before is None), None)
            if task is not None:
                task.scores_before = event["scores"]
            return
        self._evaluated = self.scope.clock()
        task = next((t for t in self._tasks if t.child is not None and not t.scores_after), None)
        if task is not None:
            task.scores_after = event["scores"]

    def on_evaluation_skipped(self, event: Any) -> None:
        """Note that a parent's minibatch gives nothing to reflect on."""
        task = self._task_of(event["scores"])
        if task is not None:
            task.reason = event["reason"]

    def on_valset_evaluated(self, event: Any) -> None:
        """Note that a child has entered the pool; `on_candidate_accepted` follows."""
        self._entered[event["candidate_idx"]] = event["candidate"]
        self._scores[event["candidate_idx"]] = event["average_score"]

    def on_candidate_accepted(self, event: Any) -> None:
        """Find the task whose child with this minibatch score has entered the pool."""
        index = event["new_candidate_idx"]
        fits = [
            task
            for task in self._tasks
            if task.child is not None
            and task.candidate is None
            and task.child == self._entered.get(index)
            and [task.parent] == list(event["parent_ids"])
            and sum(task.scores_after) == event["new_score"]
        ]
        # Two tasks of a step may have made the same child; GEPA has refused one of them before.
        refused = [scores for *scores, _ in self._rejections]
        fits.sort(key=lambda task: [sum(task.scores_before or ()), sum(task.scores_after)] in refused)
        if fits:
            fits[0].candidate = index

    def on_candidate_rejected(self, event: Any) -> None:
        """Note that a child has not entered the pool; GEPA reports these in the order of the proposals."""
        self._rejections.append((event["old_score"], event["new_score"], event["reason"]))

    def on_error(self, event: Any) -> None:
        """Note what the step has raised; `on_iteration_end` follows."""
        error = event["exception"]
        self._error = f"the step raised {type(error).__name__}: {shorten(error)}"

    def on_iteration_end(self, event: Any) -> None:
        """End the step: make its records."""
        ended = self.scope.clock()
        evaluated = ended if self._evaluated is None else self._evaluated
        self._mark("validation" if self._entered else "reflection")
        records: list[StepRecord] = []
        rejections = iter([reason for _, _, reason in self._rejections])
        for task in self._tasks:
            if task.scores_before is None:
                continue
            if task.child is not None and task.scores_after:
                self._evaluations.add(_evaluation_key(task.child, task.minibatch_ids))
            if task.candidate is None and task.scores_after:
                task.reason = next(rejections, "") or self._error
            elif task.candidate is None and not task.reason:
                task.reason = self._error or ("" if task.reflected else "no reflection records")
            records.append(self._record(task, evaluated - self._started, ended - evaluated))
        self.scope.log_steps(records)
        self.scope.tell_listeners(records)
        self.accepted_last = event["proposal_accepted"]
        if self.sampler is not None and records:
            first, num_examples = records[0], self.sampler.budget.num_examples
            logger.info(
                "Step %d: n = %d took %.3g s, an epoch at this speed %.3g s (%.3g s with validation).",
                first.iteration,
                first.n,
                first.seconds,
                first.epoch_seconds(num_examples),
                first.epoch_seconds(num_examples, with_validation=True),
            )
            self.sampler.observe(StepTiming(first.n, len(records), first.seconds, self._invalid_reason(records)))

    def _invalid_reason(self, records: Sequence[StepRecord]) -> str:
        """Say why the step's time is no measurement of its size; empty when it is one."""
        for record in records:
            if not record.scores_after:
                return record.reason or "it made no candidate"
        if any(record.n != records[0].n for record in records):
            return f"its minibatches differ in size ({', '.join(str(record.n) for record in records)})"
        if self._decision is not None and (self._decision.clamped or records[0].n < self._decision.n):
            return "the budget cut it short"
        return answered_by_cache(records[0].usage)

    def get_state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on counting."""
        return {
            "batch_sizes": list(self.scope.batch_sizes),
            "spent": self.scope.spent_without_reflection,
            "evaluations": sorted(self._evaluations),
            "iteration": self.iteration,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the account of another run."""
        self.scope.batch_sizes = list(state["batch_sizes"])
        self.scope.restore(state["spent"])
        self._evaluations = set(state["evaluations"])
        self.iteration = state["iteration"]
        self.scope.resume_steps(state["iteration"] + 1)

    def repeat_of(self, scores: Any, child: dict[str, str]) -> str | None:
        """Say why a child need not be evaluated: it is a candidate already, or was evaluated on the same examples.

        Args:
            scores: The parent's scores on the minibatch (the very list of GEPA's events).
            child: The candidate that reflection has made.
        """
        pool = [] if self.state is None else self.state.program_candidates
        if child in pool:
            return f"{REPEATED}: it is candidate {pool.index(child)}"
        task = self._task_of(scores)
        if task is not None and _evaluation_key(child, task.minibatch_ids) in self._evaluations:
            return f"{REPEATED}: these examples have refused it before"
        return None

    def note_reductions(
        self,
        scores: Any,
        parent: dict[str, str],
        texts: dict[str, str],
        made: Sequence[Reduction],
        repeated: str | None = None,
    ) -> None:
        """Note what reflection on the minibatch with these scores (the very list of GEPA's events) gave.

        Args:
            scores: The parent's scores.
            parent: The parent's texts.
            texts: The new texts; none when there is no child.
            made: The trees.
            repeated: Why the child is not evaluated (see `repeat_of`).
        """
        task = self._task_of(scores)
        if task is None:
            return
        task.reflected = True
        task.reductions = tuple(made)
        if texts:
            task.child = {**parent, **texts}
        else:
            errors = [f"{reduction.component}: {reduction.error}" for reduction in made if reduction.error]
            task.reason = repeated or "; ".join(errors) or "reflection gave no text"

    def _task_of(self, scores: Any) -> _Task | None:
        fresh = (t for t in self._tasks if t.scores_before is scores and not t.reason and not t.reflected)
        return next(fresh, None)

    def _record(self, task: _Task, seconds: float, validation_seconds: float) -> StepRecord:
        return StepRecord(
            iteration=self.iteration,
            parent=task.parent,
            minibatch_ids=task.minibatch_ids,
            n=len(task.minibatch_ids),
            k=max((reduction.num_groups for reduction in task.reductions), default=0),
            duplication_factor=min((reduction.duplication_factor for reduction in task.reductions), default=0),
            scores_before=tuple(task.scores_before or ()),
            scores_after=tuple(task.scores_after),
            accepted=task.candidate is not None,
            candidate=task.candidate,
            reason=task.reason,
            reductions=task.reductions,
            seconds=seconds,
            validation_seconds=validation_seconds,
            profiling=self._decision is not None and self._decision.profiling,
            size_reason="" if self._decision is None else self._decision.reason,
            fit=None if self._decision is None else self._decision.fit,
            usage=sum((n.usage for t in self._tasks for r in t.reductions for n in r.nodes), self._usage),
            num_tasks=sum(t.scores_before is not None for t in self._tasks),
            phase_seconds=dict(self._phases),
            metric_calls=self.state.total_num_evals + self._metric_calls_before,
            elapsed=self.scope.elapsed,
            validation_score=None if task.candidate is None else self._scores.get(task.candidate),
            best_score=max(self.state.program_full_scores_val_set, default=None),
        )


def _evaluation_key(candidate: dict[str, str], ids: Sequence[Any]) -> tuple[str, str]:
    return _digest(sorted(candidate.items())), _digest(sorted(map(str, ids)))


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "backslashreplace")).hexdigest()[:16]
