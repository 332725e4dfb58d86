"""The batch-size controller of section 3.3 of the Combee paper, and the other ways to size a step's minibatches.

Let d(n) be the seconds that a step takes with n examples, and N the size of the trainset, so that an epoch
takes ``T(n) = d(n) * N / n``. The controller times a few sizes, fits ``T(n) = A * n**-alpha`` (least squares
on logarithms, one point per size: its median) and stops where one more example saves less than tau seconds::

    |dT/dn| = alpha * A * n**-(alpha + 1) = tau   =>   plateau = (alpha * A / tau) ** (1 / (alpha + 1))

The paper sets tau to "1.6% of the peak slope". The slope of a power law has no peak (it grows without bound
as n goes to 0), so this needs a reading. Ours: the peak is the fitted slope at the smallest profiled size
n_1, ``tau = threshold * alpha * A * n_1**-(alpha + 1)``. Then A cancels::

    plateau = n_1 * (1 / threshold) ** (1 / (1 + alpha))   (n_1 * 62.5 ** (1 / (1 + alpha)) at 1.6%)

So neither N nor the speed of the machine moves the plateau, only how steeply T falls; and n_1 scales it:
profiling from 10 instead of 5 doubles the plateau of the same curve. The candidate sizes, the smallest above
all, are part of the method and belong in any report of it.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Protocol

from dspy_combee.records.checks import check_finite, check_int
from dspy_combee.records.types import BatchSizeFit

logger = logging.getLogger("dspy_combee")

MIN_SPAN = 4  # the largest size over the smallest: below it the slope says more about noise than about n
MIN_SAVING = 0.2  # the share of T(n_1) that the fit must save at its choice
PROFILE_SHARE = 4  # profiling takes at most 1 / PROFILE_SHARE of the rollouts
ROUNDING = 1e-9  # slopes and differences of log T up to this are rounding


@dataclass(frozen=True)
class ProfilePlan:
    """List the sizes to time, or give the size to use where timing is not worth it."""

    sizes: tuple[int, ...]
    """The sizes to measure, in examples, in this order (smallest first); empty with a `fixed_size`."""
    fixed_size: int | None
    """The size to use unprofiled, in examples; `None` if `sizes` is not empty."""
    num_rollouts: int
    """Minibatch rollouts that profiling takes, including the cold step."""
    reason: str
    """Why, in one sentence for people."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the size of each profiling step; the first one is cold, of the smallest size and not measured."""
        return self.sizes[:1] + self.sizes


@dataclass(frozen=True)
class PowerLawBatchSize:
    """Pick the minibatch size beyond which larger ones stop paying (paper, section 3.3).

    ``plateau = n_1 * (1 / threshold) ** (1 / (1 + alpha))``, n_1 being the smallest profiled size and alpha
    the fitted exponent; the module docstring derives it from our reading of the paper's threshold.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `candidates` is empty, a size is below 1, or `threshold` is out of range.
    """

    candidates: Sequence[int] = (5, 10, 20, 40, 80)
    """The sizes to profile, in examples; kept sorted, without repeats."""
    threshold: float = 0.016
    """The share of the slope at n_1 below which one more example is not worth it, in (0, 1]."""
    max_minibatch_size: int = 100
    """The largest size to use, in examples."""
    clock: Callable[[], float] = time.monotonic
    """Returns seconds. The run times its steps by it; nothing here calls it."""

    def __post_init__(self) -> None:
        if not isinstance(self.candidates, Iterable):
            raise TypeError(f"candidates must be a sequence of ints, got {self.candidates!r}")
        sizes = tuple(sorted({check_int("each of candidates", n) for n in self.candidates}))
        if not sizes:
            raise ValueError("candidates must hold at least one size, got none")
        object.__setattr__(self, "candidates", sizes)
        check_finite("threshold", self.threshold)
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold must be over 0 and at most 1, got {self.threshold!r}")
        object.__setattr__(self, "max_minibatch_size", check_int("max_minibatch_size", self.max_minibatch_size))
        if not callable(self.clock):
            raise TypeError(f"clock must be a callable that returns seconds, got {self.clock!r}")

    def plan(self, num_examples: int, budget_rollouts: int) -> ProfilePlan:
        """Choose the sizes to profile, at the price of at most a quarter of the budget.

        A step of size n takes 2n minibatch rollouts (the parent's and the proposal's). The first step is cold: an
        ordinary step of the smallest size, paid for but not measured. So n_1 .. n_k take
        ``2 * (n_1 + n_1 + n_2 + ... + n_k)``. Sizes are clamped to N and `max_minibatch_size`; the smallest and the
        largest affordable one stay, and the middle of the list goes until the rest is affordable. If what is
        affordable spans less than a factor of 4, n is half of the trainset, at most 40, what the budget allows and
        `max_minibatch_size`, and at least 1.

        Args:
            num_examples: N, the size of the trainset.
            budget_rollouts: The budget, in rollouts.

        Raises:
            TypeError: A number is no int.
            ValueError: N is below 1 or the budget is negative.
        """
        cap = min(check_int("num_examples", num_examples), self.max_minibatch_size)
        budget = check_int("budget_rollouts", budget_rollouts, 0)
        wanted = sorted({min(n, cap) for n in self.candidates})
        first = wanted[0]
        sizes = [n for n in wanted if PROFILE_SHARE * _profile_cost([first, n]) <= budget]
        if sizes and sizes[-1] >= MIN_SPAN * first:
            while PROFILE_SHARE * (cost := _profile_cost(sizes)) > budget:
                del sizes[len(sizes) // 2]
            left_out = f" (not {sorted({*wanted} - {*sizes})})" if sizes != wanted else ""
            why = f"profiling n = {sizes}{left_out} after one cold step takes {cost} of {budget} rollouts"
            return ProfilePlan(tuple(sizes), None, cost, why)
        why = f"a quarter of {budget} rollouts does not pay for sizes that span a factor of {MIN_SPAN}"
        if wanted[-1] < MIN_SPAN * first:
            why = f"sizes {first} to {wanted[-1]} span less than a factor of {MIN_SPAN}"
        size = max(1, min(_unmeasured_size(num_examples), cap, budget // 2))
        return ProfilePlan((), size, 0, f"n = {size}, not profiled: {why}")

    def fit(self, measurements: Iterable[tuple[int, float]], num_examples: int) -> BatchSizeFit:
        """Fit the power law and choose a minibatch size; the order of the measurements does not matter.

        The choice is the rounded plateau, at least n_1 and at most `max_minibatch_size` and N, which win over
        n_1. If the sizes span less than a factor of 4, alpha is not positive, or the fit saves under 20% of
        T(n_1) at that choice, it is the measured size with the smallest T within these two (the smaller one of
        a tie). If nothing was measured, it is half of the trainset, at most 40. What the budget still allows
        clamps the size of a step, not the fit.

        A size whose median is 0 seconds has no logarithm (the clock is too coarse for it): it is left out and
        the reason says so. If that leaves none, the smallest measured size is taken.

        Args:
            measurements: (n in examples, seconds per step without the full-validation pass) pairs.
            num_examples: N, the size of the trainset.

        Raises:
            TypeError: A measurement (named in the message) is no pair of an int and a number.
            ValueError: One has NaN, infinite or negative seconds, or a size below 1.
        """
        caps = {"the trainset": check_int("num_examples", num_examples), "max_minibatch_size": self.max_minibatch_size}
        medians = _medians(measurements)
        used = {n: seconds for n, seconds in medians.items() if seconds > 0}
        if used:
            fit = self._fit_curve(used, num_examples, caps)
            zeros = [n for n in medians if n not in used]
            return replace(fit, reason=f"{fit.reason} (0 seconds, left out: {zeros})") if zeros else fit
        size, why = _unmeasured_size(num_examples), "nothing was measured"
        if medians:
            size, why = min(medians), "every measured size took 0 seconds"
        choice = min(size, *caps.values())
        return BatchSizeFit(None, None, None, choice, f"n = {choice}: {why}", (), None, None)

    def _fit_curve(self, used: dict[int, float], num_examples: int, caps: dict[str, int]) -> BatchSizeFit:
        """Fit the medians `used` (none empty, none 0) and choose within `caps`."""
        first, last, cap = min(used), max(used), min(caps.values())
        log_epochs = {n: math.log(seconds) + math.log(num_examples / n) for n, seconds in used.items()}
        measured = _fastest_measured(used, log_epochs, cap)
        what = measured.reason
        if last < MIN_SPAN * first:
            return replace(measured, reason=f"{what}: {first} to {last} spans under a factor of {MIN_SPAN}")

        slope, log_a = statistics.linear_regression([math.log(n) for n in used], list(log_epochs.values()))
        alpha = -slope
        measured = replace(measured, A=_exp(log_a), alpha=alpha)
        if alpha <= ROUNDING:
            return replace(measured, reason=f"{what}: epochs get no faster with n (alpha {alpha:.3g})")

        plateau = _exp(math.log(first) - math.log(self.threshold) / (1 + alpha))
        measured = replace(measured, plateau=plateau)
        choice = min(max(round(plateau), first), cap)
        saving = -math.expm1(-alpha * math.log(max(choice, first) / first))
        saves = f"saves {saving:.0%} of T({first}) (alpha {alpha:.3g})"
        if saving < MIN_SAVING:
            return replace(measured, reason=f"{what}: the fit's {choice} {saves}, under {MIN_SAVING:.0%}")

        clamp = f", clamped by {min(caps, key=caps.__getitem__)}" if choice < round(plateau) else ""
        return replace(
            measured,
            choice=choice,
            reason=f"n = {choice}: the plateau, {plateau:.1f}{clamp}, {saves}",
            epoch_seconds=_exp(log_a - alpha * math.log(choice)),
            first_epoch_seconds=_exp(log_a - alpha * math.log(first)),
        )


def _profile_cost(sizes: list[int]) -> int:
    return 2 * (sizes[0] + sum(sizes))  # the smallest size twice: its cold step


def _unmeasured_size(num_examples: int) -> int:
    return max(1, min(40, num_examples // 2))


def _medians(measurements: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the median seconds of each measured size, smallest size first."""
    by_size: dict[int, list[float]] = {}
    for index, measurement in enumerate(measurements):
        name = f"measurement {index}, {measurement!r}"
        if not isinstance(measurement, Sequence) or len(measurement) != 2:
            raise TypeError(f"{name}: expected a (minibatch size, seconds) pair")
        n, seconds = measurement
        if isinstance(seconds, bool) or not isinstance(seconds, Real):
            raise TypeError(f"{name}: seconds must be a number")
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{name}: seconds must be finite and not negative")
        by_size.setdefault(check_int(f"{name}: the size", n), []).append(float(seconds))
    return {n: statistics.median(by_size[n]) for n in sorted(by_size)}


def _fastest_measured(used: dict[int, float], log_epochs: dict[int, float], cap: int) -> BatchSizeFit:
    """Return the choice of the measured size with the smallest T within `cap`; of `cap` if none is."""
    within = [n for n in used if n <= cap]
    fastest = min((log_epochs[n] for n in within), default=0.0)
    choice = min((n for n in within if log_epochs[n] <= fastest + ROUNDING), default=cap)
    reason = f"n = {choice}, the {'measured size with the shortest epoch' if within else 'clamp'}"
    seconds, first_seconds = _exp(log_epochs[choice]) if within else None, _exp(log_epochs[min(used)])
    return BatchSizeFit(None, None, None, choice, reason, tuple(used.items()), seconds, first_seconds)


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))  # huge times saturate: no overflow, no infinity in JSON


# The size of each step ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SizeDecision:
    """Give the size of a step's minibatches, and why."""

    n: int
    """Examples."""
    reason: str
    """Why, in one sentence."""
    profiling: bool = False
    """Whether the step is there to be timed."""
    fit: BatchSizeFit | None = None
    """The controller's fit, where one decided."""
    clamped: bool = False
    """Whether the trainset or the budget allowed less than was wanted."""

    def within(self, limit: int) -> SizeDecision:
        """Return the decision, clamped to at most `limit` examples."""
        if self.n <= limit:
            return self
        reason = f"n = {limit}, all that the trainset and the budget allow instead of {self.n}"
        return replace(self, n=limit, reason=reason, clamped=True)


@dataclass(frozen=True)
class StepTiming:
    """Report how long a step took, to the sizer that decided its size."""

    n: int
    """Examples of each of its minibatches."""
    num_tasks: int
    """Its proposals, each from a minibatch of its own."""
    seconds: float
    """d(n), without the full-validation pass."""
    invalid_reason: str = ""
    """Why the time is no measurement (skipped, failed, cached, cut short); empty when it is one."""


class MinibatchSizer(Protocol):
    """Decide the size of each step's minibatches, and learn how long the step took."""

    expected: tuple[int, ...]
    """The sizes of the first steps, as far as known before the run; the last one holds for the steps beyond."""
    description: str
    """The same for people."""

    def next_size(self, limit: int) -> SizeDecision:
        """Decide the size of the next step, at most `limit`, which is what the budget still allows."""
        ...

    def observe(self, timing: StepTiming) -> None:
        """Take note of the end of the step decided last."""
        ...

    def get_state(self) -> Any:
        """Return what a resumed run needs."""
        ...

    def set_state(self, state: Any) -> None:
        """Continue from the state of an earlier run."""
        ...


class FixedSize:
    """Give every step the same n.

    Args:
        n: Examples, at least 1.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.expected: tuple[int, ...] = (n,)
        self.description = f"n = {n}"

    def next_size(self, limit: int) -> SizeDecision:
        """Return n, clamped to `limit`."""
        return SizeDecision(self.n, f"n = {self.n}, as given").within(limit)

    def observe(self, timing: StepTiming) -> None:
        """Ignore the timing."""

    def get_state(self) -> None:
        """Return nothing: there is no state."""

    def set_state(self, state: None) -> None:
        """Ignore the state."""


class ReplayedSizes:
    """Replay the sizes of another run, step by step; the last one holds for the steps beyond the list.

    Args:
        sizes: Examples of each proposal, such as `detailed_results.batch_sizes`.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.expected = tuple(sizes)
        self.description = f"n from a list of {len(sizes)} sizes ({min(sizes)} to {max(sizes)})"
        self._proposals = 0

    def next_size(self, limit: int) -> SizeDecision:
        """Return the next size of the list, clamped to `limit`."""
        count = len(self.expected)
        index = min(self._proposals, count - 1)
        n = self.expected[index]
        return SizeDecision(n, f"n = {n}, size {index + 1} of the {count} given").within(limit)

    def observe(self, timing: StepTiming) -> None:
        """Advance by the step's proposals, each of which has an entry in the list."""
        self._proposals += timing.num_tasks

    def get_state(self) -> int:
        """Return the number of proposals so far."""
        return self._proposals

    def set_state(self, state: int) -> None:
        """Continue after that many proposals."""
        self._proposals = state


@dataclass
class _Profile:
    """Hold what the controller knows: the state of a `ControlledSize`."""

    todo: list[int]
    """The sizes of the profiling steps to come."""
    num_tasks: int
    """The most proposals that a step has made."""
    cold: bool = True
    """Whether no step has been of use yet: the first one that is, is not measured."""
    rollouts: int = 0
    """Rollouts spent on profiling."""
    current: int = 0
    """n of the last step; 0 before the first."""
    measurements: list[tuple[int, float]] = field(default_factory=list)
    """(n, seconds for each proposal of a step)."""


class ControlledSize:
    """Choose n by timing steps: the dynamic batch-size controller in a run (paper, section 3.3).

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
        self.expected = self.plan.steps or (self.plan.fixed_size or 1,)
        self.description = self.plan.reason
        if self.plan.sizes:
            largest = min(policy.max_minibatch_size, num_examples)
            self.description += f", then n is chosen, from {self.plan.sizes[0]} to {largest}"
        self._profile = _Profile(list(self.plan.steps), num_tasks)
        self._decision: SizeDecision | None = None

    def next_size(self, limit: int) -> SizeDecision:
        """Return the next size to profile, or else the size that the fit chooses, clamped to `limit`."""
        self._decision = self._next_to_profile(limit) or self._chosen().within(limit)
        return self._decision

    def observe(self, timing: StepTiming) -> None:
        """Add a measurement, unless the step is none or was the first one of use."""
        profile = self._profile
        profiling = self._decision is not None and self._decision.profiling
        profile.current = timing.n
        profile.num_tasks = max(profile.num_tasks, timing.num_tasks)
        if profiling:
            profile.rollouts += 2 * timing.n * timing.num_tasks
        if timing.invalid_reason:
            logger.info("A step with n = %d is no measurement: %s.", timing.n, timing.invalid_reason)
            return
        if profiling:
            profile.todo.pop(0)
        if not profile.cold and self.plan.fixed_size is None:
            profile.measurements.append((timing.n, timing.seconds / timing.num_tasks))
        profile.cold = False

    def _next_to_profile(self, limit: int) -> SizeDecision | None:
        """Return None once the plan is done, or can no longer be paid for."""
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

    def _chosen(self) -> SizeDecision:
        if self.plan.fixed_size is not None:
            return SizeDecision(self.plan.fixed_size, self.plan.reason)
        fit = self.policy.fit(self._profile.measurements, self.num_examples)
        current = self._profile.current or fit.choice
        n = min(max(fit.choice, (current + 1) // 2), 2 * current)
        reason = fit.reason if n == fit.choice else f"n = {n}, at most a factor of 2 from {current}; {fit.reason}"
        return SizeDecision(n, reason, fit=fit)

    def get_state(self) -> dict[str, Any]:
        """Return progress and measurements."""
        return asdict(self._profile)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the progress and measurements of an earlier run: nothing is profiled twice."""
        self._profile = _Profile(**{**state, "todo": list(state["todo"]), "measurements": list(state["measurements"])})


def _affordable(todo: list[int], smallest: int, examples: int, limit: int) -> list[int]:
    """Return the sizes that `examples` still pay for: the smallest and the largest such stay, the middle goes first."""
    first = [n for n in todo if n == smallest]
    others = [n for n in todo if n > smallest and n <= limit and sum(first) + n <= examples]
    while others and sum(first) + sum(others) > examples:
        del others[(len(others) - 1) // 2]
    return first + others if others and smallest <= limit else []


def resolve_sizer(size: Any, num_examples: int, budget_rollouts: int, num_tasks: int) -> MinibatchSizer:
    """Return the sizer for a `reflection_minibatch_size`.

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


def check_minibatch_size(size: Any, name: str = "reflection_minibatch_size") -> Any:
    """Refuse what is no `reflection_minibatch_size`.

    Returns:
        The size: numpy's ints made plain ones, several of them as a list.

    Raises:
        TypeError: If it is of no kind that is known.
        ValueError: If a size is below 1, a list is empty, or a name is not `"auto"`.
    """
    if isinstance(size, PowerLawBatchSize) or (size is None and name == "reflection_minibatch_size"):
        return size  # None leaves the minibatches to a batch_sampler of GEPA's.
    expected = f"{name} must be an int, a list or tuple of ints, 'auto' or a PowerLawBatchSize"
    if isinstance(size, str):
        if size != "auto":
            raise ValueError(f"{expected}, got {size!r}.")
        return size
    sizes = size if isinstance(size, list | tuple) else [size]
    if any(isinstance(n, bool) or not isinstance(n, Integral) for n in sizes):
        raise TypeError(f"{expected}, got {size!r}.")
    if not sizes:
        raise ValueError(f"{name} is an empty list: give one size for each step to replay.")
    made = [check_int(name, n) for n in sizes]
    return made if sizes is size else made[0]
