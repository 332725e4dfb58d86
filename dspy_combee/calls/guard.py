"""The one guard of time and money: every reflection call of a run is made through it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from dspy_combee.calls.executors import Executor
from dspy_combee.calls.lm_calls import UsageMeter
from dspy_combee.records.errors import OutOfBudgetError, UnknownCostError

Item = TypeVar("Item", contravariant=True)
Result = TypeVar("Result", covariant=True)


class GuardedCalls(Protocol[Item, Result]):
    """Make one call for an item, and say what stands in its place where it is late or refused.

    Subclass it to get the defaults, which raise.
    """

    def __call__(self, item: Item, /) -> Result:
        """Make the call."""
        ...

    def late(self, item: Item, seconds: float, /) -> Result:
        """Return the result of a call that took longer than `seconds`, or raise `TimeoutError`."""
        raise TimeoutError(late_reason(seconds))

    def refused(self, item: Item, error: OutOfBudgetError, /) -> Result:
        """Return the result of a call that is not made because the money is spent, or raise `error`."""
        raise error


class CallGuard:
    """Make reflection calls on an executor, within a run's limits of time and money.

    The money is checked before each wave of calls. A wave that has begun is finished, so the limit can be passed by
    the cost of one wave.

    Args:
        executor: Runs the calls.
        timeout: Seconds that one call may take; None for no limit.
        max_cost: US dollars; None for no limit.
    """

    def __init__(self, executor: Executor, timeout: float | None = None, max_cost: float | None = None) -> None:
        self.executor = executor
        self.timeout = timeout
        self.max_cost = max_cost
        self.meter = UsageMeter()
        """Counts what the calls used; whoever makes a call adds to it."""
        self.warned_of_unmetered_calls = False

    @property
    def is_spent(self) -> bool:
        """Return whether the money is spent."""
        return self.max_cost is not None and (self.meter.usage.cost or 0.0) >= self.max_cost

    def map(self, calls: GuardedCalls[Any, Any], items: Sequence[Any]) -> list[Any]:
        """Make one wave of calls.

        Returns:
            The results, in the order of the items.

        Raises:
            OutOfBudgetError: If the money is spent and `calls` has nothing to put in a call's place.
            UnknownCostError: If there is a limit of money and the LM reports no cost for its calls.
        """
        if self.is_spent:
            error = OutOfBudgetError(f"max_reflection_cost=${self.max_cost:g} is spent.")
            return [calls.refused(item, error) for item in items]
        on_timeout = None if self.timeout is None else partial(_late, calls, self.timeout)
        results = self.executor.map(calls, items, timeout=self.timeout, on_timeout=on_timeout)
        if self.max_cost is not None and self.meter.usage.cost is None:
            raise UnknownCostError(
                "max_reflection_cost cannot be enforced: the reflection LM reports no cost for its calls (its model "
                "has no known price). Use a model with a known price, or remove max_reflection_cost."
            )
        return results


def _late(calls: GuardedCalls[Any, Any], seconds: float, item: Any) -> Any:
    return calls.late(item, seconds)


def late_reason(seconds: float) -> str:
    """Return the reason that stands in the record of a call that was given up."""
    return f"the reflection call took longer than {seconds:g} seconds"
