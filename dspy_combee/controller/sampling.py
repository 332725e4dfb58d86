"""The budget of a run, and what each step draws within it: its minibatch and its parent candidate.

What is drawn depends on the seed and on the position in the run alone, so that a resumed run draws what an unbroken
one would have drawn.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gepa.proposer.reflective_mutation.base import CandidateSelector
from gepa.strategies.batch_sampler import BatchSampler
from gepa.strategies.candidate_selector import (
    CurrentBestCandidateSelector,
    EpsilonGreedyCandidateSelector,
    ParetoCandidateSelector,
    TopKParetoCandidateSelector,
)
from gepa.strategies.proposal_sampling import SingleMutationSampling

from dspy_combee.controller.batch_size import MinibatchSizer, SizeDecision, StepTiming

logger = logging.getLogger("dspy_combee")

MERGE_SUBSAMPLE = 5
"""Validation examples on which gepa's merge compares a merged candidate with its parents."""


@dataclass(frozen=True)
class Budget:
    """Limit a run, in metric calls or in epochs."""

    num_examples: int
    """N, the size of the trainset."""
    num_validation: int
    """|val|, which every accepted proposal costs (at most, where a policy evaluates fewer)."""
    max_metric_calls: int | None = None
    """Scoring calls; None where the budget is in epochs."""
    num_epochs: float | None = None
    """Passes over the trainset; None where the budget is in metric calls."""
    tasks_per_step: int = 1
    """Proposals that a step makes, as far as that is known."""
    num_seed_validation: int | None = None
    """What the seed's validation costs; None for |val|."""

    @property
    def seed_cost(self) -> int:
        """Return the metric calls of the seed's validation."""
        return self.num_validation if self.num_seed_validation is None else self.num_seed_validation

    @property
    def smallest_step(self) -> int:
        """Return the metric calls of one proposal from one example, accepted."""
        return 2 + self.num_validation

    @property
    def is_exact(self) -> bool:
        """Return whether a whole step fits in what the seed's validation leaves, so that nothing is ever overspent."""
        return self.max_metric_calls is None or self.max_metric_calls - self.seed_cost >= self.smallest_step

    @property
    def num_draws(self) -> float:
        """Return how many examples the run may draw for minibatches: the epochs' worth, or infinitely many."""
        # Rounded first: 0.1 * 30 is a little over 3.
        return math.inf if self.num_epochs is None else math.ceil(round(self.num_epochs * self.num_examples, 9))

    @property
    def minibatch_rollouts(self) -> int:
        """Return the budget in minibatch rollouts (2n for a proposal), before any step."""
        if self.max_metric_calls is None:
            return int(2 * self.num_draws)
        return max(0, self.max_metric_calls - self.seed_cost)

    def left(self, metric_calls: int) -> float:
        """Return what a step may still take after `metric_calls`; infinitely many where the budget is not exact."""
        if self.max_metric_calls is None or not self.is_exact:
            return math.inf
        return self.max_metric_calls - metric_calls

    def largest_minibatch(self, metric_calls: int, drawn: int) -> int:
        """Return the largest n that the next step can pay for, each of its proposals accepted; at least 1.

        Args:
            metric_calls: Scoring calls so far.
            drawn: Examples drawn for minibatches so far.
        """
        limit: float = self.num_examples
        left = self.left(metric_calls)
        if left < math.inf:
            tasks = max(1, min(self.tasks_per_step, left // self.smallest_step))
            limit = min(limit, (left // tasks - self.num_validation) // 2)
        draws = self.num_draws - drawn
        if draws < math.inf:
            limit = min(limit, draws // max(1, min(self.tasks_per_step, draws)))
        return max(1, int(limit))

    def steps_of(self, sizes: Sequence[int], all_accepted: bool) -> int:
        """Return how many steps the budget covers, if all of their proposals are accepted or none is.

        Args:
            sizes: n of the first steps; the last one is that of the steps beyond, too.
            all_accepted: Whether each proposal costs a validation pass.
        """
        in_epochs = self.max_metric_calls is None
        extra = self.num_validation if all_accepted and not in_epochs else 0
        left, steps = self.minibatch_rollouts, 0
        for n in sizes:
            cost = self.tasks_per_step * (2 * n + extra)
            if cost > left:
                break
            left -= cost
            steps += 1
        else:
            steps += left // cost
        return steps

    def is_spent(self, metric_calls: int, drawn: int, merge_may_be_due: bool) -> bool:
        """Return whether no further step fits."""
        if drawn >= self.num_draws:
            return True
        needed = self.smallest_step
        if merge_may_be_due:
            needed = max(needed, MERGE_SUBSAMPLE + self.num_validation)
        return self.left(metric_calls) < needed


def tasks_per_step(strategy: Any) -> int:
    """Return how many proposals one of gepa's sampling strategies makes in a step; 1 where it does not say."""
    parents, mutations = getattr(strategy, "p", 1), getattr(strategy, "n", 1)
    known = isinstance(parents, int) and isinstance(mutations, int)
    return max(1, parents * mutations) if known else 1


class EpochSampler(BatchSampler[Any, Any]):
    """Draw minibatches of distinct examples, epoch after epoch, without padding.

    Every example comes once an epoch. A minibatch may straddle two epochs; what it took from the end of one it
    does not take again from the start of the next. Each call gives the next minibatch, also within a step.

    Args:
        sizer: Decides n for each step.
        budget: What a step may still spend.
        seed: Seed of the order of each epoch.
    """

    def __init__(self, sizer: MinibatchSizer, budget: Budget, seed: int | str | None = 0) -> None:
        self.sizer = sizer
        self.budget = budget
        self.seed = seed
        self.decision: SizeDecision | None = None
        """The size of the step under way; None before the first."""
        self.drawn = 0
        """Examples drawn so far."""
        self._step: int | None = None
        self._epoch = 0
        self._queue: list[Any] = []

    def next_minibatch_ids(self, loader: Any, state: Any) -> list[Any]:
        """Draw as gepa's engine asks for it; see `draw`."""
        return self.draw(loader.all_ids(), state.i, state.total_num_evals)

    def draw(self, ids: Iterable[Any], step: int, metric_calls: int = 0) -> list[Any]:
        """Draw the next minibatch; it is empty where the step has used up what `num_epochs` allows.

        Args:
            ids: The ids of all examples.
            step: The step's number; n is decided once a step.
            metric_calls: Scoring calls so far.

        Raises:
            ValueError: If the trainset is empty.
        """
        ids = list(ids)
        if not ids:
            raise ValueError("Cannot draw a minibatch from an empty trainset.")
        decision = self.decision
        if decision is None or step != self._step:
            self._step = step
            decision = self._decide(min(len(ids), self.budget.largest_minibatch(metric_calls, self.drawn)))
        batch = self._take(ids, int(min(decision.n, self.budget.num_draws - self.drawn)))
        self.drawn += len(batch)
        return batch

    def _decide(self, limit: int) -> SizeDecision:
        last, self.decision = self.decision, self.sizer.next_size(limit)
        if last is None or self.decision.reason != last.reason:
            logger.info("Minibatch size: %s.", self.decision.reason)
        return self.decision

    def _take(self, ids: list[Any], n: int) -> list[Any]:
        known = set(ids)
        queue = [i for i in self._queue if i in known]
        waiting = len(set(queue))
        while waiting < n:
            queue += random.Random(f"{self.seed}/epoch/{self._epoch}").sample(ids, len(ids))
            self._epoch += 1
            waiting = len(ids)
        batch: dict[Any, None] = {}
        self._queue = []
        for i in queue:
            if len(batch) < n and i not in batch:
                batch[i] = None
            else:
                self._queue.append(i)
        return list(batch)

    def put_back(self, ids: Sequence[Any]) -> None:
        """Take back what was drawn last and is not used: it comes first in the next minibatch."""
        self._queue = [*ids, *self._queue]
        self.drawn -= len(ids)

    def observe(self, timing: StepTiming) -> None:
        """Tell the sizer that a step has ended."""
        self.sizer.observe(timing)

    def get_state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on drawing."""
        return {
            "epoch": self._epoch,
            "queue": list(self._queue),
            "drawn": self.drawn,
            "kind": type(self.sizer).__name__,
            "sizer": self.sizer.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the state of another sampler."""
        self._epoch = state["epoch"]
        self._queue = list(state["queue"])
        self.drawn = state["drawn"]
        self._step = None
        if state["kind"] == type(self.sizer).__name__:
            self.sizer.set_state(state["sizer"])
        else:
            logger.info("reflection_minibatch_size is of another kind than before: its state starts afresh.")


class BudgetedSampling:
    """Cut the proposals of a step down to what the budget covers, as a gepa `SamplingStrategy`.

    Args:
        strategy: The strategy that samples them; None for gepa's default of one proposal.
        budget: The budget.
    """

    def __init__(self, strategy: Any, budget: Budget) -> None:
        self.strategy = strategy or SingleMutationSampling()
        self.budget = budget

    def sample_tasks(self, state: Any, candidate_selector: Any, batch_sampler: Any, trainset: Any) -> list[Any]:
        """Return the tasks that fit if each is accepted, the last one with a smaller minibatch if need be."""
        left = self.budget.left(state.total_num_evals)
        fitting: list[Any] = []
        unused: list[Any] = []
        for task in self.strategy.sample_tasks(state, candidate_selector, batch_sampler, trainset):
            ids = list(task.minibatch_ids)
            size = int(max(0, min(len(ids), (left - self.budget.num_validation) // 2)))
            unused += ids[size:]
            if size:
                left -= 2 * size + self.budget.num_validation
                cut = {"minibatch_ids": ids[:size], "minibatch": list(task.minibatch)[:size]}
                fitting.append(task if size == len(ids) else replace(task, **cut))
        if unused:
            logger.info("The budget does not cover %d examples of this step: they wait for the next.", len(unused))
            if isinstance(batch_sampler, EpochSampler):
                batch_sampler.put_back(unused)
        return fitting


class StepSeededSelector(CandidateSelector):
    """Seed one of gepa's candidate selectors anew for each call, since gepa does not save its random state.

    Args:
        make_selector: Makes the selector from a random source.
        seed: Seed; the source of a call depends on it, the iteration and the number of the call in it.
    """

    def __init__(self, make_selector: Callable[[random.Random], Any], seed: int | None = 0) -> None:
        self.make_selector = make_selector
        self.seed = seed
        self._iteration: int | None = None
        self._calls = 0

    def select_candidate_idx(self, state: Any) -> int:
        """Return the index of the candidate to change."""
        self._calls = self._calls + 1 if state.i == self._iteration else 0
        self._iteration = state.i
        rng = random.Random(f"{self.seed}/select/{state.i}/{self._calls}")
        index: int = self.make_selector(rng).select_candidate_idx(state)
        return index


SELECTORS: dict[str, Callable[[random.Random], Any]] = {
    "pareto": ParetoCandidateSelector,
    "current_best": lambda rng: CurrentBestCandidateSelector(),
    "epsilon_greedy": lambda rng: EpsilonGreedyCandidateSelector(epsilon=0.1, rng=rng),
    "top_k_pareto": lambda rng: TopKParetoCandidateSelector(k=5, rng=rng),
}


def resolve_selector(strategy: Any, seed: int | None) -> Any:
    """Return gepa's selector of that name, seeded by step; anything else as it is, for gepa to check."""
    if isinstance(strategy, str) and strategy in SELECTORS:
        return StepSeededSelector(SELECTORS[strategy], seed)
    return strategy
