"""How many examples the next step gets: a fixed n, a list that is replayed, or the controller."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral
from typing import Any, Protocol

from dspy_combee.controller.batch_size import PROFILE_SHARE, BatchSizeFit, PowerLawBatchSize, bounded_move
from dspy_combee.records.checks import check_int

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
    """Decides the size of each step's minibatches, and is told how long the step took.

    Attributes:
        expected: The sizes of the first steps, as far as they are known before the run; the last one stands for
            the steps beyond.
        outlook: The same for people.
    """

    expected: tuple[int, ...]
    outlook: str

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
        self.expected: tuple[int, ...] = (n,)
        self.outlook = f"n = {n}"

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
        self.expected = tuple(sizes)
        self.outlook = f"n from a list of {len(self.sizes)} sizes ({min(sizes)} to {max(sizes)})"
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
    """What the controller knows.

    Attributes:
        todo: The sizes of the profiling steps to come.
        cold: Whether no step has been of use yet: the first one that is, is not measured.
        num_tasks: The most proposals that a step has made.
        rollouts: What profiling has taken.
        current: n of the last step; 0 before the first.
        measurements: (n, seconds for each proposal of a step).
    """

    todo: list[int]
    num_tasks: int
    cold: bool = True
    rollouts: int = 0
    current: int = 0
    measurements: list[tuple[int, float]] = field(default_factory=list)


class ControlledSize:
    """The dynamic batch-size controller in a run (paper, section 3.3).

    The first steps time the planned sizes, within a quarter of the budget: the first one is cold and is not
    measured, the others are measured in turn. They are ordinary steps, whose proposals count. Then every step
    refines the fit, and n moves towards its choice by at most a factor of 2 between steps. A step that was
    skipped, failed, answered from a cache or cut short by the budget is no measurement; in profiling its size is
    tried again, and sizes in the middle are given up where that takes too much.

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
        self._profile = _Profile(list(self.plan.steps), num_tasks)
        self._decision: SizeDecision | None = None
        self.expected = self.plan.steps or (self.plan.fixed_size or 1,)
        self.outlook = self.plan.reason
        if self.plan.sizes:
            largest = min(policy.max_minibatch_size, num_examples)
            self.outlook += f", then n is chosen, from {self.plan.sizes[0]} to {largest}"

    def next_size(self, limit: int) -> SizeDecision:
        """See `MinibatchSizer.next_size`."""
        self._decision = self._planned(limit) or self._chosen(limit)
        return self._decision

    def observe(self, timing: StepTiming) -> None:
        """See `MinibatchSizer.observe`."""
        profile = self._profile
        profiling = self._decision is not None and self._decision.profiling
        profile.current = timing.n
        profile.num_tasks = max(profile.num_tasks, timing.num_tasks)
        if profiling:
            profile.rollouts += 2 * timing.n * timing.num_tasks
        if timing.flaw:
            logger.info("A step with n = %d is no measurement: %s.", timing.n, timing.flaw)
            return
        if profiling:
            profile.todo.pop(0)
        if not profile.cold and self.plan.fixed_size is None:
            profile.measurements.append((timing.n, timing.seconds / timing.num_tasks))
        profile.cold = False

    def _planned(self, limit: int) -> SizeDecision | None:
        """The next size to profile; None once the plan is done, or can no longer be paid for."""
        profile = self._profile
        left = self.budget_rollouts // PROFILE_SHARE - profile.rollouts
        todo = _affordable(profile.todo, self.expected[0], left // (2 * profile.num_tasks), limit)
        if todo != profile.todo:
            logger.info("Profiling cannot go on as planned; sizes to come: %s instead of %s.", todo, profile.todo)
            profile.todo = todo
        if not todo:
            return None
        done = len(profile.measurements)
        what = "cold, not measured" if profile.cold else f"measurement {done + 1} of {done + len(todo)}"
        return SizeDecision(todo[0], f"n = {todo[0]}, profiling ({what})", profiling=True)

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
        return asdict(self._profile)

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from the progress and measurements of another run: nothing is profiled twice."""
        self._profile = _Profile(**{**state, "todo": list(state["todo"]), "measurements": list(state["measurements"])})


def _affordable(todo: list[int], smallest: int, examples: int, limit: int) -> list[int]:
    """The sizes to come that `examples` pay for: the smallest and the largest such stay, the middle goes first."""
    first = [n for n in todo if n == smallest]
    others = [n for n in todo if n > smallest and n <= limit and sum(first) + n <= examples]
    while others and sum(first) + sum(others) > examples:
        del others[(len(others) - 1) // 2]
    return first + others if others and smallest <= limit else []


def _clamped(decision: SizeDecision, limit: int) -> SizeDecision:
    if decision.n <= limit:
        return decision
    reason = f"n = {limit}, all that the trainset and the budget allow instead of {decision.n}"
    return replace(decision, n=limit, reason=reason, clamped=True)


def resolve_sizer(size: Any, num_examples: int, budget_rollouts: int, num_tasks: int) -> MinibatchSizer:
    """The sizer for a `reflection_minibatch_size`.

    Args:
        size: An int, a list of ints, `"auto"` or a `PowerLawBatchSize`.
        num_examples: N, the size of the trainset.
        budget_rollouts: The budget of the run in minibatch rollouts.
        num_tasks: Proposals that a step makes.
    """
    size = check_minibatch_size(size)
    if isinstance(size, int):
        return FixedSize(size)
    if isinstance(size, list):
        return ReplayedSizes(size)
    policy = size if isinstance(size, PowerLawBatchSize) else PowerLawBatchSize()
    return ControlledSize(policy, num_examples, budget_rollouts, num_tasks)


def check_minibatch_size(size: Any) -> Any:
    """Refuse what is no `reflection_minibatch_size`.

    Returns:
        The size: numpy's ints made plain ones, several of them as a list.

    Raises:
        TypeError: If it is of no kind that is known.
        ValueError: If a size is below 1, a list is empty, or a name is not `"auto"`.
    """
    if size is None or isinstance(size, PowerLawBatchSize):
        return size
    expected = "reflection_minibatch_size must be an int, a list or tuple of ints, 'auto' or a PowerLawBatchSize"
    if isinstance(size, str):
        if size != "auto":
            raise ValueError(f"{expected}, got {size!r}.")
        return size
    sizes = size if isinstance(size, list | tuple) else [size]
    if any(isinstance(n, bool) or not isinstance(n, Integral) for n in sizes):
        raise TypeError(f"{expected}, got {size!r}.")
    if not sizes:
        raise ValueError("reflection_minibatch_size is an empty list: give one size for each step to replay.")
    made = [check_int("reflection_minibatch_size", n) for n in sizes]
    return made if sizes is size else made[0]
