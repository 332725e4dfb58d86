"""`RunReflection`: the reflection strategy of a `CombeeOptimizer` run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import dspy
from gepa.proposer.reflective_mutation.reflection_lm import ReflectionProposal

from dspy_combee.calls.lm_calls import audible, hearing, usage_of
from dspy_combee.controller.budget import CostGuard
from dspy_combee.learners.proposer import CombeeProposer, Job, to_proposal
from dspy_combee.records.errors import CombeeError, OutOfBudgetError, ReflectionError
from dspy_combee.records.secrecy import shorten
from dspy_combee.records.types import Reduction
from dspy_combee.rollouts.feedback import raise_if_provider
from dspy_combee.runs.adapter import CombeeAdapter
from dspy_combee.runs.events import StepRecorder

logger = logging.getLogger("dspy_combee")

FAILED_STEPS = 3
"""A run ends when this many steps in a row propose nothing because reflection failed."""


class RunReflection:
    """gepa's `ReflectionLM` for one run: instructions go to the proposer, `dspy.Flex` code to the code proposer.

    gepa swallows what a strategy raises and asks again, so failures are kept here and `check` raises them where
    gepa lets them through (it is one of the run's stop callbacks).

    Args:
        proposer: The proposer, made for this run.
        adapter: The run's adapter.
        recorder: Takes the trees of each step.
        guard: Watches `max_reflection_cost`; the proposer's calls run through it.
    """

    def __init__(
        self, proposer: CombeeProposer, adapter: CombeeAdapter, recorder: StepRecorder, guard: CostGuard
    ) -> None:
        self.proposer = proposer
        self.adapter = adapter
        self.recorder = recorder
        self.guard = guard
        self.failure: Exception | None = None
        self._failed_steps = 0

    @property
    def total_cost(self) -> float:
        """US dollars of reflection so far, as far as the LM reports them."""
        return self.proposer.total_cost

    def check(self, state: Any) -> bool:
        """A stop callback: raises the failure that should end the run, and stops it when its money is spent."""
        failure = self.failure or self.adapter.failure
        if failure is not None:
            raise failure
        return self.guard.is_spent

    def reflect(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> tuple[ReflectionProposal, RunReflection]:
        """Propose new texts for one job."""
        return self.reflect_many([(candidate, reflective_dataset, components_to_update)])[0]

    def reflect_many(self, jobs: list[Job]) -> list[tuple[ReflectionProposal, RunReflection]]:
        """Propose new texts for the jobs of a step; a job without a usable proposal gets none."""
        code = self.adapter.code_components
        plain = [(candidate, dataset, [c for c in names if c not in code]) for candidate, dataset, names in jobs]
        positions = [f"{self.recorder.iteration}.{index}" for index in range(len(jobs))]
        reductions: list[list[Reduction]] = [[] for _ in jobs]
        try:
            if self.adapter.failure is not None:  # Of another job of this step: it ends the run.
                raise self.adapter.failure
            reductions = self.proposer.reduce(plain, positions)
            for job, made in zip(jobs, reductions, strict=True):
                made.extend(self._code_reductions(job, [c for c in job[2] if c in code]))
        except Exception as error:
            if isinstance(error, OutOfBudgetError):
                logger.info("The search ends: %s", error)
            else:
                self.failure = error
            reductions = _cut_short(error, jobs, reductions)
        proposals = [to_proposal(made) for made in reductions]
        for job, proposal, made in zip(jobs, proposals, reductions, strict=True):
            if self.failure is not None:
                proposal.new_texts.clear()  # What is left of the run ends before it is evaluated.
            scores = getattr(job[1], "scores", None)
            repeated = self.recorder.repeat_of(scores, {**job[0], **proposal.new_texts}) if proposal.new_texts else None
            if repeated is not None:
                logger.info("Not evaluated, %s.", repeated)
                proposal.new_texts.clear()
            self.recorder.note_reductions(scores, job[0], proposal.new_texts, made, repeated)
        self._count_failures(proposals, reductions)
        return [(proposal, self) for proposal in proposals]

    def _code_reductions(self, job: Job, components: list[str]) -> list[Reduction]:
        """What the code proposer makes of code components: no tree, so no nodes."""
        if not components:
            return []
        candidate, dataset, _ = job
        logger.info("Code components %s go to the code proposer, in one plain call each.", components)
        proposed: Mapping[str, str] = {}
        reason = None
        try:
            proposed = self.guard.map(self._propose_code, [(candidate, dataset, components)])[0]
        except Exception as error:
            if isinstance(error, CombeeError):
                raise
            reason = f"{type(error).__name__}: {shorten(str(error))}"
            logger.warning("The code proposer failed on %s: %s", components, reason)
        new = {name: text for name, text in proposed.items() if text != candidate.get(name)}
        return [
            Reduction(name, new.get(name), (), num_groups=1, duplication_factor=1, error=reason) for name in components
        ]

    def _propose_code(self, job: Job) -> dict[str, str]:
        heard: list[Mapping[str, Any]] = []
        try:
            with dspy.context(**audible()), hearing(heard):
                return self.adapter.propose_code(*job)
        except Exception as error:
            raise_if_provider(error)  # Here, where the executor sees what may pass.
            raise
        finally:
            self.proposer.meter.add(usage_of(heard))

    def _count_failures(self, proposals: list[ReflectionProposal], reductions: list[list[Reduction]]) -> None:
        errors = [reduction.error for made in reductions for reduction in made if reduction.error]
        if any(proposal.new_texts for proposal in proposals):
            self._failed_steps = 0
        elif errors:
            self._failed_steps += 1
        if self._failed_steps >= FAILED_STEPS and self.failure is None:
            self.failure = ReflectionError(
                f"Reflection proposed nothing in {FAILED_STEPS} steps in a row. The last cause: {errors[-1]}"
            )


def _cut_short(error: Exception, jobs: Sequence[Job], made: list[list[Reduction]]) -> list[list[Reduction]]:
    """What each job had before the error, which has been paid for, and the error in place of the rest."""
    made = getattr(error, "reductions", made)
    for (_, _, names), own in zip(jobs, made, strict=True):
        done = {reduction.component for reduction in own}
        own.extend(Reduction(name, None, (), 0, 0, str(error)) for name in names if name not in done)
    return made
