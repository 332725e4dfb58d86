"""What each step draws: its minibatch and its parent candidate.

Both depend on the seed and on the place in the run alone, so that a resumed run draws what the unbroken one drew.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
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
    """The limits of a run.

    Attributes:
        num_examples: N, the size of the trainset.
        num_validation: |val|, which every accepted proposal costs (at most, where a policy evaluates fewer).
        max_metric_calls: Scoring calls; None where the budget is in epochs.
        num_epochs: Passes over the trainset; None where the budget is in metric calls.
        tasks_per_step: Proposals that a step makes, as far as that is known.
        num_seed_validation: What the seed's validation costs; None for |val|.
    """

    num_examples: int
    num_validation: int
    max_metric_calls: int | None = None
    num_epochs: float | None = None
    tasks_per_step: int = 1
    num_seed_validation: int | None = None

    @property
    def seed_cost(self) -> int:
        """Metric calls of the seed's validation."""
        return self.num_validation if self.num_seed_validation is None else self.num_seed_validation

    @property
    def is_exact(self) -> bool:
        """Whether one whole step fits in what the seed's validation leaves, so that nothing is ever overspent."""
        if self.max_metric_calls is None:
            return True
        return self.max_metric_calls - self.seed_cost >= self.smallest_step

    @property
    def smallest_step(self) -> int:
        """Metric calls of one proposal from one example, accepted."""
        return 2 + self.num_validation

    @property
    def num_draws(self) -> float:
        """Examples that the run may draw for minibatches: the epochs' worth, or no limit."""
        # Rounded first: 0.1 * 30 is a little over 3.
        return math.inf if self.num_epochs is None else math.ceil(round(self.num_epochs * self.num_examples, 9))

    @property
    def minibatch_rollouts(self) -> int:
        """The budget counted in minibatch rollouts (2n for a proposal), before any step."""
        if self.max_metric_calls is None:
            return int(2 * self.num_draws)
        return max(0, self.max_metric_calls - self.seed_cost)

    def left(self, metric_calls: int) -> float:
        """Metric calls that a step may still take after `metric_calls`; no limit where the budget is not exact."""
        if self.max_metric_calls is None or not self.is_exact:
            return math.inf
        return self.max_metric_calls - metric_calls

    def largest_minibatch(self, metric_calls: int, drawn: int) -> int:
        """The largest n that the next step can pay for, each of its proposals accepted; at least 1.

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
        """How many steps the budget covers, if all of their proposals are accepted or none is.

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
        """Whether no further step fits."""
        if drawn >= self.num_draws:
            return True
        needed = self.smallest_step
        if merge_may_be_due:
            needed = max(needed, MERGE_SUBSAMPLE + self.num_validation)
        return self.left(metric_calls) < needed


def tasks_per_step(strategy: Any) -> int:
    """Proposals that one of gepa's sampling strategies makes in a step; 1 where it does not say."""
    parents, mutations = getattr(strategy, "p", 1), getattr(strategy, "n", 1)
    known = isinstance(parents, int) and isinstance(mutations, int)
    return max(1, parents * mutations) if known else 1


@dataclass(frozen=True)
class Place:
    """Where a run without GEPA is, as its sampler asks for it.

    Attributes:
        i: The step.
        total_num_evals: Metric calls, which do not limit it.
    """

    i: int
    total_num_evals: int = 0


@dataclass(frozen=True)
class Positions:
    """The ids of so many examples or traces: their positions."""

    number: int

    def all_ids(self) -> range:
        """The ids."""
        return range(self.number)


class EpochSampler(BatchSampler[Any, Any]):
    """Draws minibatches of distinct examples, epoch after epoch, without padding.

    Every example comes once an epoch. A minibatch may straddle two epochs; what it took from the end of one it
    does not take again from the start of the next. Each call gives the next minibatch, also within a step.

    Args:
        sizer: Decides n for each step.
        budget: What a step may still spend.
        seed: Seed of the order of each epoch.

    Attributes:
        decision: The size of the step under way; None before the first.
        drawn: Examples drawn so far.
    """

    def __init__(self, sizer: MinibatchSizer, budget: Budget, seed: int | None = 0) -> None:
        self.sizer = sizer
        self.budget = budget
        self.seed = seed
        self.decision: SizeDecision | None = None
        self.drawn = 0
        self._iteration: int | None = None
        self._epoch = 0
        self._queue: list[Any] = []

    def next_minibatch_ids(self, loader: Any, state: Any) -> list[Any]:
        """The ids of the next minibatch; none where the step has used up what `num_epochs` allows.

        Raises:
            ValueError: If the trainset is empty.
        """
        ids = list(loader.all_ids())
        if not ids:
            raise ValueError("Cannot draw a minibatch from an empty trainset.")
        decision = self.decision
        if decision is None or state.i != self._iteration:
            self._iteration = state.i
            limit = min(len(ids), self.budget.largest_minibatch(state.total_num_evals, self.drawn))
            decision = self._decide(limit)
        batch = self._draw(ids, int(min(decision.n, self.budget.num_draws - self.drawn)))
        self.drawn += len(batch)
        return batch

    def _decide(self, limit: int) -> SizeDecision:
        last, self.decision = self.decision, self.sizer.next_size(limit)
        if last is None or self.decision.reason != last.reason:
            logger.info("Minibatch size: %s.", self.decision.reason)
        return self.decision

    def _draw(self, ids: list[Any], n: int) -> list[Any]:
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
        """A step has ended."""
        self.sizer.observe(timing)

    def get_state(self) -> dict[str, Any]:
        """What a resumed run needs to go on drawing."""
        return {
            "epoch": self._epoch,
            "queue": list(self._queue),
            "drawn": self.drawn,
            "kind": type(self.sizer).__name__,
            "sizer": self.sizer.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from the state of another sampler."""
        self._epoch = state["epoch"]
        self._queue = list(state["queue"])
        self.drawn = state["drawn"]
        self._iteration = None
        if state["kind"] == type(self.sizer).__name__:
            self.sizer.set_state(state["sizer"])
        else:
            logger.info("The run goes on with another kind of reflection_minibatch_size, which starts anew.")


class BudgetedSampling:
    """A gepa `SamplingStrategy` that cuts the proposals of a step down to what the budget covers.

    Args:
        strategy: The strategy; None for gepa's default of one proposal.
        budget: The budget.
    """

    def __init__(self, strategy: Any, budget: Budget) -> None:
        self.strategy = strategy or SingleMutationSampling()
        self.budget = budget

    def sample_tasks(self, state: Any, candidate_selector: Any, batch_sampler: Any, trainset: Any) -> list[Any]:
        """The tasks of the step that fit, each of them accepted; the last one with a smaller minibatch if need be."""
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
    """One of gepa's candidate selectors with a fresh random source for each call.

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
        """Index of the candidate to change."""
        self._calls = self._calls + 1 if state.i == self._iteration else 0
        self._iteration = state.i
        rng = random.Random(f"{self.seed}/select/{state.i}/{self._calls}")
        index: int = self.make_selector(rng).select_candidate_idx(state)
        return index


def _current_best(rng: random.Random) -> Any:
    return CurrentBestCandidateSelector()


def _epsilon_greedy(rng: random.Random) -> Any:
    return EpsilonGreedyCandidateSelector(epsilon=0.1, rng=rng)


def _top_k_pareto(rng: random.Random) -> Any:
    return TopKParetoCandidateSelector(k=5, rng=rng)


SELECTORS: dict[str, Callable[[random.Random], Any]] = {
    "pareto": ParetoCandidateSelector,
    "current_best": _current_best,
    "epsilon_greedy": _epsilon_greedy,
    "top_k_pareto": _top_k_pareto,
}


def resolve_selector(strategy: Any, seed: int | None) -> Any:
    """Gepa's selector of that name, seeded by step; anything else goes to gepa as it is (which checks it)."""
    if isinstance(strategy, str) and strategy in SELECTORS:
        return StepSeededSelector(SELECTORS[strategy], seed)
    return strategy
