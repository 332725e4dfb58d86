"""`RunReflection`: the reflection strategy of a `CombeeOptimizer` run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from dspy.utils.exceptions import LMError
from gepa.proposer.reflective_mutation.reflection_lm import ReflectionProposal

from dspy_combee.adapter import CombeeAdapter
from dspy_combee.errors import CombeeError, ProviderError, ReflectionError
from dspy_combee.proposer import CombeeProposer, Job, to_proposal
from dspy_combee.records import Reduction
from dspy_combee.steps import StepRecorder
from dspy_combee.text import shorten

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
    """

    def __init__(self, proposer: CombeeProposer, adapter: CombeeAdapter, recorder: StepRecorder) -> None:
        self.proposer = proposer
        self.adapter = adapter
        self.recorder = recorder
        self.failure: CombeeError | None = None
        self._failed_steps = 0

    @property
    def total_cost(self) -> float:
        """US dollars of reflection so far, as far as the LM reports them."""
        return self.proposer.total_cost

    def check(self, state: Any) -> bool:
        """A stop callback that raises the failure that should end the run; it never stops one quietly."""
        if self.failure is not None:
            raise self.failure
        return False

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
        texts = [self._code_texts(job, [c for c in job[2] if c in code]) for job in jobs]
        plain = [(candidate, dataset, [c for c in names if c not in code]) for candidate, dataset, names in jobs]
        positions = [f"{self.recorder.iteration}.{index}" for index in range(len(jobs))]
        try:
            reductions = self.proposer.reduce(plain, positions)
        except CombeeError as error:
            self.failure = error
            reductions = [[] for _ in jobs]
        proposals = [to_proposal(made) for made in reductions]
        for job, proposal, code_texts, made in zip(jobs, proposals, texts, reductions, strict=True):
            proposal.new_texts.update(code_texts)
            scores = getattr(job[1], "scores", None)
            self.recorder.note_reductions(scores, job[0], proposal.new_texts, made)
        self._count_failures(proposals, reductions)
        return [(proposal, self) for proposal in proposals]

    def _code_texts(self, job: Job, components: list[str]) -> dict[str, str]:
        if not components:
            return {}
        candidate, dataset, _ = job
        logger.info("Code components %s go to the code proposer, in one plain call each.", components)
        try:
            proposed = self.adapter.propose_code(candidate, dataset, components)
        except LMError as error:
            self.failure = ProviderError(f"The reflection LM failed on code: {shorten(str(error))}")
            self.failure.__cause__ = error
            return {}
        except Exception as error:
            logger.warning("The code proposer failed on %s: %s", components, shorten(str(error)))
            return {}
        return {name: text for name, text in proposed.items() if text != candidate[name]}

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
