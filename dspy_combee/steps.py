"""`StepRecorder`: makes a `StepRecord` of each proposal from GEPA's events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dspy_combee.records import Reduction, StepRecord


class _Task:
    """What is known so far of one proposal of the step under way."""

    def __init__(self, parent: int, parent_candidate: dict[str, str]) -> None:
        self.parent = parent
        self.parent_candidate = parent_candidate
        self.minibatch_ids: tuple[Any, ...] = ()
        self.scores_before: list[float] | None = None
        self.scores_after: list[float] = []
        self.reductions: tuple[Reduction, ...] = ()
        self.child: dict[str, str] | None = None
        self.candidate: int | None = None
        self.reason = ""


class StepRecorder:
    """A GEPA callback that keeps the account of the run.

    Attributes:
        records: The steps so far.
        state: GEPA's state, from the first step on.
        iteration: GEPA's iteration, from 1; 0 before the first.
    """

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.state: Any = None
        self.iteration = 0
        self._tasks: list[_Task] = []
        self._rejections: list[str] = []
        self._started = 0.0
        self._evaluated: float | None = None

    def on_iteration_start(self, event: Any) -> None:
        """A step begins."""
        self.state = event["state"]
        self.iteration = event["iteration"]
        self._tasks = []
        self._rejections = []
        self._started = time.perf_counter()
        self._evaluated = None

    def on_candidate_selected(self, event: Any) -> None:
        """A parent has been chosen: one proposal will come of it."""
        self._tasks.append(_Task(event["candidate_idx"], event["candidate"]))

    def on_minibatch_sampled(self, event: Any) -> None:
        """The minibatch of the last chosen parent."""
        self._tasks[-1].minibatch_ids = tuple(event["minibatch_ids"])

    def on_evaluation_end(self, event: Any) -> None:
        """A parent or a child has been run on its minibatch, in the order of the proposals."""
        if event["candidate_idx"] is not None:
            task = next((t for t in self._tasks if t.scores_before is None), None)
            if task is not None:
                task.scores_before = event["scores"]
            return
        self._evaluated = time.perf_counter()
        task = next((t for t in self._tasks if t.child is not None and not t.scores_after), None)
        if task is not None:
            task.scores_after = event["scores"]

    def on_evaluation_skipped(self, event: Any) -> None:
        """A parent's minibatch gives nothing to reflect on."""
        task = self._task_of(event["scores"])
        if task is not None:
            task.reason = event["reason"]

    def on_valset_evaluated(self, event: Any) -> None:
        """A child has entered the pool."""
        task = next((t for t in self._tasks if t.child == event["candidate"] and t.candidate is None), None)
        if task is not None:
            task.candidate = event["candidate_idx"]

    def on_candidate_rejected(self, event: Any) -> None:
        """A child has not entered the pool; GEPA reports these in the order of the proposals."""
        self._rejections.append(event["reason"])

    def on_iteration_end(self, event: Any) -> None:
        """The step is over: its records are made."""
        ended = time.perf_counter()
        evaluated = self._evaluated or ended
        rejections = iter(self._rejections)
        for task in self._tasks:
            if task.scores_before is None:
                continue
            if task.candidate is None and task.scores_after:
                task.reason = next(rejections, "")
            self.records.append(self._record(task, evaluated - self._started, ended - evaluated))

    def note_reductions(
        self, scores: Any, parent: dict[str, str], texts: dict[str, str], made: Sequence[Reduction]
    ) -> None:
        """Reflection on the minibatch with these scores (the very list of GEPA's events) has ended."""
        task = self._task_of(scores)
        if task is None:
            return
        task.reductions = tuple(made)
        if texts:
            task.child = {**parent, **texts}
        else:
            errors = [f"{reduction.component}: {reduction.error}" for reduction in made if reduction.error]
            task.reason = "; ".join(errors) or "reflection gave no text"

    def _task_of(self, scores: Any) -> _Task | None:
        fresh = (t for t in self._tasks if t.scores_before is scores and not t.reason and not t.reductions)
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
        )
