"""How many examples the next step gets: a fixed n, a list that is replayed, or the controller."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dspy_combee.batch_size import PROFILE_SHARE, BatchSizeFit, PowerLawBatchSize, bounded_move

logger = logging.getLogger("dspy_combee")


@dataclass(frozen=True)
class SizeDecision:
    """The size of a step's minibatches.

    Attributes:
        n: Examples.
        reason: Why, in one sentence.
        profiling: Whether the step is there to be timed.
        fit: The controller's fit, where one decided.
        clamped: Whether the trainset or the budget allowed less than was wanted.
    """

    n: int
    reason: str
    profiling: bool = False
    fit: BatchSizeFit | None = None
    clamped: bool = False


@dataclass(frozen=True)
class StepTiming:
    """What a step shows of its size.

    Attributes:
        n: Examples of each of its minibatches.
        num_tasks: Its proposals, each from a minibatch of its own.
        seconds: d(n), without the full-validation pass.
        flaw: Why the time is no measurement (skipped, failed, cached, cut short); empty when it is one.
    """

    n: int
    num_tasks: int
    seconds: float
    flaw: str = ""


class MinibatchSizer(Protocol):
    """Decides the size of each step's minibatches, and is told how long the step took."""

    def next_size(self, limit: int) -> SizeDecision:
        """The size of the next step, at most `limit`, what the budget still allows."""
        ...

    def observe(self, timing: StepTiming) -> None:
        """The step that was decided last has ended."""
        ...

    def get_state(self) -> Any:
        """What a resumed run needs."""
        ...

    def set_state(self, state: Any) -> None:
        """Go on from the state of another run."""
        ...


class FixedSize:
    """The same n for every step.

    Args:
        n: Examples, at least 1.
    """

    def __init__(self, n: int) -> None:
        self.n = n

    def next_size(self, limit: int) -> SizeDecision:
        """See `MinibatchSizer.next_size`."""
        return _clamped(SizeDecision(self.n, f"n = {self.n}, as given"), limit)

    def observe(self, timing: StepTiming) -> None:
        """Nothing is learned from a step."""

    def get_state(self) -> None:
        """There is no state."""

    def set_state(self, state: None) -> None:
        """There is no state."""


class ReplayedSizes:
    """The sizes of another run, step by step; the last one holds for the steps beyond the list.

    Args:
        sizes: Examples of each step, such as `detailed_results.batch_sizes`.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._steps = 0

    def next_size(self, limit: int) -> SizeDecision:
        """See `MinibatchSizer.next_size`."""
        index = min(self._steps, len(self.sizes) - 1)
        n = self.sizes[index]
        return _clamped(SizeDecision(n, f"n = {n}, size {index + 1} of the {len(self.sizes)} given"), limit)

    def observe(self, timing: StepTiming) -> None:
        """The next step gets the next size."""
        self._steps += timing.num_tasks

    def get_state(self) -> int:
        """The proposals made so far."""
        return self._steps

    def set_state(self, state: int) -> None:
        """Go on after that many proposals."""
        self._steps = state


@dataclass
class _Profile:
    """What the controller knows: its progress through the plan, and the measurements."""

    done: int = 0
    rollouts: int = 0
    current: int = 0
    measurements: list[tuple[int, float]] = field(default_factory=list)


class ControlledSize:
    """The dynamic batch-size controller in a run (paper, section 3.3).

    The first steps time the planned sizes, within a quarter of the budget: the first one is cold and is not
    measured, the others are measured in turn. They are ordinary steps, whose proposals count. Then every step
    refines the fit, and n moves towards its choice by at most a factor of 2 between steps. A step that was
    skipped, failed, answered from a cache or cut short by the budget is no measurement.

    Args:
        policy: The candidates and the rule.
        num_examples: N, the size of the trainset.
        budget_rollouts: The budget of the run in minibatch rollouts, 2n for a proposal.
        num_tasks: Proposals that a step makes.
    """

    def __init__(self, policy: PowerLawBatchSize, num_examples: int, budget_rollouts: int, num_tasks: int = 1) -> None:
        self.policy = policy
        self.num_examples = num_examples
        self.budget_rollouts = budget_rollouts
        self.plan = policy.plan(num_examples, budget_rollouts // num_tasks)
        self._profile = _Profile()
        self._decision: SizeDecision | None = None
        logger.info("Minibatch size: %s.", self.plan.reason)

    def next_size(self, limit: int) -> SizeDecision:
        """See `MinibatchSizer.next_size`."""
        decision = self._planned(limit) or self._chosen(limit)
        if decision.profiling or self._decision is None or decision.reason != self._decision.reason:
            logger.info("Minibatch size: %s.", decision.reason)
        self._decision = decision
        return decision

    def observe(self, timing: StepTiming) -> None:
        """See `MinibatchSizer.observe`."""
        profiling = self._decision is not None and self._decision.profiling
        self._profile.current = timing.n
        if profiling:
            self._profile.rollouts += 2 * timing.n * timing.num_tasks
        if timing.flaw:
            logger.info("A step with n = %d is no measurement: %s.", timing.n, timing.flaw)
            return
        cold = profiling and self._profile.done == 0
        if profiling:
            self._profile.done += 1
        if not cold and self.plan.fixed_size is None:
            self._profile.measurements.append((timing.n, timing.seconds / timing.num_tasks))

    def _planned(self, limit: int) -> SizeDecision | None:
        """The next size to profile; None once the plan is done, or can no longer be paid for."""
        steps = self.plan.steps
        done = self._profile.done
        if done >= len(steps):
            return None
        n = steps[done]
        affordable = PROFILE_SHARE * (self._profile.rollouts + 2 * n) <= self.budget_rollouts
        if n > limit or not affordable:
            self._profile.done = len(steps)
            return None
        what = "cold, not measured" if done == 0 else f"measurement {done} of {len(steps) - 1}"
        return SizeDecision(n, f"n = {n}, profiling ({what})", profiling=True)

    def _chosen(self, limit: int) -> SizeDecision:
        if self.plan.fixed_size is not None:
            return _clamped(SizeDecision(self.plan.fixed_size, self.plan.reason), limit)
        fit = self.policy.fit(self._profile.measurements, self.num_examples)
        current = self._profile.current or fit.choice
        n = bounded_move(current, fit.choice)
        reason = fit.reason if n == fit.choice else f"n = {n}, at most a factor of 2 from {current}; {fit.reason}"
        return _clamped(SizeDecision(n, reason, fit=fit), limit)

    def get_state(self) -> dict[str, Any]:
        """Progress and measurements."""
        return {**vars(self._profile), "measurements": list(self._profile.measurements)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from the progress and measurements of another run: nothing is profiled twice."""
        self._profile = _Profile(**{**state, "measurements": list(state["measurements"])})


def _clamped(decision: SizeDecision, limit: int) -> SizeDecision:
    if decision.n <= limit:
        return decision
    reason = f"n = {limit}, all that the trainset and the budget allow instead of {decision.n}"
    logger.info("Minibatch size: %s.", reason)
    return replace(decision, n=limit, reason=reason, clamped=True)


def resolve_sizer(size: Any, num_examples: int, budget_rollouts: int, num_tasks: int) -> MinibatchSizer:
    """The sizer for a `reflection_minibatch_size`.

    Args:
        size: An int, a list of ints, `"auto"` or a `PowerLawBatchSize`; checked by `check_minibatch_size`.
        num_examples: N, the size of the trainset.
        budget_rollouts: The budget of the run in minibatch rollouts.
        num_tasks: Proposals that a step makes.
    """
    if isinstance(size, int):
        return FixedSize(size)
    if isinstance(size, list | tuple):
        return ReplayedSizes(size)
    policy = size if isinstance(size, PowerLawBatchSize) else PowerLawBatchSize()
    return ControlledSize(policy, num_examples, budget_rollouts, num_tasks)


def check_minibatch_size(size: Any) -> None:
    """Refuse what is no `reflection_minibatch_size`.

    Raises:
        TypeError: If it is of no kind that is known.
        ValueError: If a size is below 1, a list is empty, or a name is not `"auto"`.
    """
    if size is None or isinstance(size, PowerLawBatchSize):
        return
    if isinstance(size, str):
        if size != "auto":
            raise ValueError(f"reflection_minibatch_size must be an int, a list of ints or 'auto', got {size!r}.")
        return
    sizes = list(size) if isinstance(size, list | tuple) else [size]
    if not sizes:
        raise ValueError("reflection_minibatch_size is an empty list: give one size for each step to replay.")
    for n in sizes:
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(
                "reflection_minibatch_size must be an int, a list of ints, 'auto' or a PowerLawBatchSize, "
                f"got {size!r}."
            )
        if n < 1:
            raise ValueError(f"reflection_minibatch_size must be at least 1, got {n}.")
