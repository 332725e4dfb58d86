"""The budget of a run: what a step may still spend, what was spent, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gepa.strategies.proposal_sampling import SingleMutationSampling

from dspy_combee.calls import UsageMeter
from dspy_combee.errors import OutOfBudgetError, UnknownCostError
from dspy_combee.executors import Executor
from dspy_combee.records import Rollout, Spent, Usage

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
    """

    num_examples: int
    num_validation: int
    max_metric_calls: int | None = None
    num_epochs: float | None = None
    tasks_per_step: int = 1

    @property
    def is_exact(self) -> bool:
        """Whether one whole step fits in what the seed's validation leaves, so that nothing is ever overspent."""
        if self.max_metric_calls is None:
            return True
        return self.max_metric_calls - self.num_validation >= self.smallest_step

    @property
    def smallest_step(self) -> int:
        """Metric calls of one proposal from one example, accepted."""
        return 2 + self.num_validation

    @property
    def num_draws(self) -> float:
        """Examples that the run may draw for minibatches: the epochs' worth, or no limit."""
        return math.inf if self.num_epochs is None else math.ceil(self.num_epochs * self.num_examples)

    @property
    def minibatch_rollouts(self) -> int:
        """The budget counted in minibatch rollouts (2n for a proposal), before any step."""
        if self.max_metric_calls is None:
            return int(2 * self.num_draws)
        return max(0, self.max_metric_calls - self.num_validation)

    def tasks_that_fit(self, metric_calls: int, wanted: int) -> int:
        """How many of `wanted` proposals the next step can make, at least 1.

        Args:
            metric_calls: Scoring calls so far.
            wanted: Proposals that the sampling strategy asks for.
        """
        if self.max_metric_calls is None or not self.is_exact:
            return wanted
        return max(1, min(wanted, (self.max_metric_calls - metric_calls) // self.smallest_step))

    def largest_minibatch(self, metric_calls: int, drawn: int) -> int:
        """The largest n that the next step can pay for, each of its proposals accepted; at least 1.

        Args:
            metric_calls: Scoring calls so far.
            drawn: Examples drawn for minibatches so far.
        """
        limit = self.num_examples
        if self.max_metric_calls is not None and self.is_exact:
            tasks = self.tasks_that_fit(metric_calls, self.tasks_per_step)
            share = (self.max_metric_calls - metric_calls) // tasks
            limit = min(limit, (share - self.num_validation) // 2)
        if self.num_epochs is not None:
            limit = min(limit, int(self.num_draws - drawn))
        return max(1, limit)

    def is_spent(self, metric_calls: int, drawn: int, merge_may_be_due: bool) -> bool:
        """Whether no further step fits."""
        if drawn >= self.num_draws:
            return True
        if self.max_metric_calls is None or not self.is_exact:
            return False
        needed = self.smallest_step
        if merge_may_be_due:
            needed = max(needed, MERGE_SUBSAMPLE + self.num_validation)
        return self.max_metric_calls - metric_calls < needed


class BudgetedSampling:
    """A gepa `SamplingStrategy` that drops the proposals of a step that the budget does not cover.

    Args:
        strategy: The strategy; None for gepa's default of one proposal.
        budget: The budget.
    """

    def __init__(self, strategy: Any, budget: Budget) -> None:
        self.strategy = strategy or SingleMutationSampling()
        self.budget = budget

    def sample_tasks(self, state: Any, candidate_selector: Any, batch_sampler: Any, trainset: Any) -> list[Any]:
        """The tasks of the step that fit."""
        tasks = list(self.strategy.sample_tasks(state, candidate_selector, batch_sampler, trainset))
        if self.budget.max_metric_calls is None or not self.budget.is_exact:
            return tasks
        left = self.budget.max_metric_calls - state.total_num_evals
        costs = [2 * len(task.minibatch_ids) + self.budget.num_validation for task in tasks]
        fitting = [task for index, task in enumerate(tasks) if sum(costs[: index + 1]) <= left]
        return fitting or tasks[:1]


def tasks_per_step(strategy: Any) -> int:
    """Proposals that one of gepa's sampling strategies makes in a step; 1 where it does not say."""
    parents, mutations = getattr(strategy, "p", 1), getattr(strategy, "n", 1)
    known = isinstance(parents, int) and isinstance(mutations, int)
    return max(1, parents * mutations) if known else 1


class Ledger:
    """What a run has spent, by phase."""

    def __init__(self) -> None:
        self.spent = Spent()

    def add_rollouts(self, phase: str, rollouts: Sequence[Rollout]) -> None:
        """Account for rollouts of a phase: `"profiling"`, `"rollouts"` or `"validation"`."""
        usage = sum((rollout.usage for rollout in rollouts), Usage())
        self.spent = self.spent.plus(phase, len(rollouts), usage)

    def add_feedback(self, metric_calls: int) -> None:
        """Account for metric calls that asked for feedback."""
        self.spent = self.spent.plus("feedback", metric_calls, Usage())

    def get_state(self) -> Spent:
        """What a resumed run needs to go on counting."""
        return self.spent

    def set_state(self, state: Spent) -> None:
        """Go on from the account of another run."""
        self.spent = state


class CostGuard:
    """An executor that refuses a wave of reflection calls once the money is spent.

    A wave that has begun is finished, so the limit can be passed by the cost of one wave.

    Args:
        executor: Runs the calls.
        max_cost: US dollars; None for no limit.
        meter: Holds the reflection-LM usage so far.
    """

    def __init__(self, executor: Executor, max_cost: float | None, meter: UsageMeter) -> None:
        self.executor = executor
        self.max_cost = max_cost
        self.meter = meter
        self.width: int = executor.width

    @property
    def is_spent(self) -> bool:
        """Whether the money is spent."""
        return self.max_cost is not None and (self.meter.usage.cost or 0.0) >= self.max_cost

    def map(self, function: Any, items: Sequence[Any], **options: Any) -> list[Any]:
        """See `Executor.map`.

        Raises:
            OutOfBudgetError: If the money is spent.
            UnknownCostError: If the LM has made calls and reports no cost for them.
        """
        if self.is_spent:
            raise OutOfBudgetError(f"max_reflection_cost=${self.max_cost:g} is spent.")
        results: list[Any] = self.executor.map(function, items, **options)
        if self.max_cost is not None and self.meter.usage.cost is None:
            raise UnknownCostError(
                "max_reflection_cost cannot be enforced: the reflection LM reports no cost for its calls (its model "
                "has no known price). Use a model with a known price, or remove max_reflection_cost."
            )
        return results
