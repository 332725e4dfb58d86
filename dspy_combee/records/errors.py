"""Errors of this package, drawn as a tree.

    CombeeError
    ├── ExecutorError      what runs the rollouts (Ray) cannot be reached, cannot run them, or loses them all
    ├── ProviderError      the LM provider refuses or cannot be reached: the run stops, no candidate is blamed
    ├── ReflectionError    reflection proposed nothing, three steps in a row
    ├── UnknownCostError   a budget in dollars was set, and the reflection LM reports no cost
    └── OutOfBudgetError   the reflection money is spent; inside a run this ends the search, it is not raised

Wrong arguments raise `TypeError` or `ValueError`, and the checks inherited from `dspy.GEPA` raise what they
raise there. Whatever leaves `CombeeOptimizer.compile` carries `best_program`, the best program so far.
"""

from __future__ import annotations

from typing import Any


class CombeeError(Exception):
    """Stand for every error that this package defines.

    Attributes:
        best_program: The best program found before the error, ready to use; None where no run was under way.
    """

    best_program: Any = None


class ExecutorError(CombeeError):
    """Report that Ray cannot be reached, cannot run the rollouts, or loses every one with its worker."""


class ProviderError(CombeeError):
    """Report that the provider of a language model refused a call for good (key, quota, outage).

    It says nothing about the candidate that was being evaluated, so no score is given for it.

    Attributes:
        transient: Whether it may pass (rate limit, timeout, connection): executors then try again, with back-off.
        retry_after: Seconds to wait that the provider asks for; None where it does not.
        usage: What the work that the error cut short had used already (a `Usage`); None for nothing.
    """

    usage: Any = None

    def __init__(self, message: str, *, transient: bool = False, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.transient = transient
        self.retry_after = retry_after


class ReflectionError(CombeeError):
    """Report that reflection failed in three steps in a row, so that the run could only go on spending."""


class UnknownCostError(CombeeError):
    """Report that `max_reflection_cost` was set and the reflection LM does not report what its calls cost."""


class OutOfBudgetError(CombeeError):
    """Report that `max_reflection_cost` is spent, so no further reflection call is made."""
