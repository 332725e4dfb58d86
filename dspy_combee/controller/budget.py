"""The budget of a run: what a step may still spend, what was spent, and when to stop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from dspy_combee.calls.executors import Executor
from dspy_combee.calls.lm_calls import UsageMeter
from dspy_combee.records.errors import OutOfBudgetError, UnknownCostError
from dspy_combee.records.types import Rollout, Spent, Usage

logger = logging.getLogger("dspy_combee")

NOTHING = Usage()


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


class CostGuard(Executor):
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
