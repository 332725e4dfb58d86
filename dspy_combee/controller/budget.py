"""The budget of a run: what a step may still spend, what was spent, and when to stop."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspy_combee.calls.executors import Executor
from dspy_combee.calls.lm_calls import UsageMeter
from dspy_combee.records.errors import OutOfBudgetError, UnknownCostError
from dspy_combee.records.types import Rollout, Spent, Usage

logger = logging.getLogger("dspy_combee")

NOTHING = Usage()

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


class Ledger:
    """What a run has spent, by phase."""

    def __init__(self) -> None:
        self.spent = Spent()

    def add_rollouts(self, phase: str, rollouts: Sequence[Rollout], cut_short: Usage = NOTHING) -> None:
        """Account for rollouts of a phase: `"profiling"`, `"rollouts"` or `"validation"`.

        Args:
            phase: The phase.
            rollouts: The rollouts, each one metric call.
            cut_short: What others had used that were cut short and made again.
        """
        usage = sum((rollout.usage for rollout in rollouts), cut_short)
        self.spent = self.spent.plus(phase, len(rollouts), usage)

    def add_feedback(self, metric_calls: int, usage: Usage = NOTHING) -> None:
        """Account for metric calls that asked for feedback, and what their language-model calls took."""
        self.spent = self.spent.plus("feedback", metric_calls, usage)

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
        self._warned = False

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
        calls = self.meter.usage.calls
        results: list[Any] = self.executor.map(function, items, **options)
        if self.max_cost is not None and self.meter.usage.cost is None:
            raise UnknownCostError(
                "max_reflection_cost cannot be enforced: the reflection LM reports no cost for its calls (its model "
                "has no known price). Use a model with a known price, or remove max_reflection_cost."
            )
        if self.max_cost is not None and self.meter.usage.calls == calls and not self._warned:
            self._warned = True
            logger.warning(
                "max_reflection_cost sees only calls made through DSPy, and a wave of reflection made none: if the "
                "proposer asks a language model in another way, that is not counted."
            )
        return results
