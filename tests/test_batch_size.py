"""The controller of section 3.3 as a pure piece (the fit, the profile plan), and what decides n for each step."""

import json
import logging
import math
import random
import statistics
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dspy_combee import PowerLawBatchSize
from dspy_combee.controller.batch_size import StepTiming, resolve_sizer

N = 500
FOUR, FIVE = (5, 10, 20, 40), (5, 10, 20, 40, 80)
TABLE_1 = {5: 1800, 10: 1140, 20: 600, 40: 300}  # of the paper
PLENTY = 10_000


def steps_for(epochs, num_examples=N):
    """The (n, seconds per step) pairs that give the epoch times {n: T}."""
    return [(n, seconds * n / num_examples) for n, seconds in epochs.items()]


def power(sizes, alpha, num_examples=N):
    return steps_for({n: 1000 * n**-alpha for n in sizes}, num_examples)


def tiny(num_examples):
    return [(n, 1.0) for n in sorted({min(n, num_examples) for n in FIVE})]


# --- the fit -----------------------------------------------------------------------------------------------

SPAN, UNDER, RISES = "spans under a factor of 4", "under 20%", "no faster"
MINIMUM, NOTHING, ZEROS = "the measured size with the shortest", "nothing was measured", "every measured size took 0 s"
FITS = [  # what was measured, N, options: the choice, alpha, the plateau, what the reason says
    (power(FOUR, 1), N, {}, 40, 1, 39.5, "n = 40: the plateau, 39.5, saves 88% of T(5) (alpha 1)"),
    (power(FIVE, 0.5), N, {}, 79, 0.5, 78.7, "the plateau"),
    (steps_for(TABLE_1), N, {}, 46, 0.868, 45.7, "the plateau"),
    ([(n, 3.0) for n in FIVE], N, {}, 40, 1, 39.5, "the plateau"),
    (power((10, 20, 40, 80), 1), N, {}, 79, 1, 79.1, "of T(10)"),
    (power((10, 40), 1), N, {}, 79, 1, 79.1, "of T(10)"),
    # clamped
    (power(FIVE, 0.5), N, {"max_minibatch_size": 60}, 60, 0.5, 78.7, "clamped by max_minibatch_size"),
    (power(FIVE, 0.5, 50), 50, {"max_minibatch_size": 60}, 50, 0.5, 78.7, "clamped by the trainset"),
    (power(FOUR, 1), N, {"max_minibatch_size": np.int64(30)}, 30, 1, 39.5, "clamped by max_minibatch_size"),
    (power(FOUR, 1), N, {"max_minibatch_size": 1}, 1, 1, 39.5, "the clamp"),
    (power(FOUR, 1), N, {"max_minibatch_size": 4}, 4, 1, 39.5, "the clamp"),
    # a fit that saves too little at its choice: the measured minimum, within the clamp
    (power(FOUR, 1), N, {"threshold": 1.0}, 40, 1, 5, UNDER),
    (power(FIVE, 0.05), N, {}, 80, 0.05, 256.64, UNDER),
    (power(FIVE, 0.1, 40), 40, {}, 40, 0.1, 214.6, UNDER),
    (power(FIVE, 0.1), N, {}, 100, 0.1, 214.6, "saves 26%"),
    (power(FIVE, 0.05), N, {"max_minibatch_size": 30}, 20, 0.05, 256.64, UNDER),
    (steps_for({5: 100, 10: 91, 20: 85, 40: 93, 80: 88}), N, {}, 20, 0.033, 273.04, MINIMUM),
    # epochs that get no faster
    (steps_for(dict.fromkeys(FIVE, 100.0)), N, {}, 5, 0, None, RISES),
    (power(FIVE, -0.3), N, {}, 5, -0.3, None, RISES),
    (power(FIVE, -2), N, {}, 5, -2, None, RISES),
    ([(n, (n / 80) ** 501) for n in (20, 40, 80)], N, {}, 20, -500, None, RISES),
    (steps_for({5: 100, 10: 80, 20: 150, 40: 200}), N, {}, 10, -0.39, None, RISES),
    # sizes that span too little
    (power((10,), 0.7), N, {}, 10, None, None, SPAN),
    (power((10, 20, 39), 0.7), N, {}, 39, None, None, SPAN),
    *((tiny(n), n, {}, n, None, None, SPAN) for n in (1, 2, 3, 4, 5, 7)),
    # several measurements of a size count by their median
    ([m for n, d in power(FOUR, 1) for m in ((n, d), (n, 40 * d), (n, d / 9))], N, {}, 40, 1, 39.5, "saves 88%"),
    ([(5, 0), (5, 2.0), (5, 3.0), *power((10, 20, 40), 1)], N, {}, 40, 1, 39.5, "saves 88%"),
    # nothing of use
    ([], 500, {}, 40, None, None, NOTHING),
    ([], 500, {"max_minibatch_size": 12}, 12, None, None, NOTHING),
    ([], 9, {}, 4, None, None, NOTHING),
    ([], 1, {}, 1, None, None, NOTHING),
    ([(5, 0.0), *power((10, 20, 40, 80), 1)], N, {}, 79, 1, 79.1, "(0 seconds, left out: [5])"),
    ([(n, 0.0) for n in FIVE], N, {}, 5, None, None, ZEROS),
    ([(n, 0.0) for n in FIVE], N, {"max_minibatch_size": 3}, 3, None, None, ZEROS),
]


@pytest.mark.parametrize(("measured", "num_examples", "options", "choice", "alpha", "plateau", "says"), FITS)
def test_the_choice_and_why(measured, num_examples, options, choice, alpha, plateau, says):
    fit = PowerLawBatchSize(**options).fit(measured, num_examples)
    assert fit.choice == choice
    assert says in fit.reason
    assert fit.alpha == (None if alpha is None else pytest.approx(alpha, abs=5e-3))
    assert fit.plateau == (None if plateau is None else pytest.approx(plateau, abs=0.05))
    assert (fit.A is None) == (alpha is None)
    if plateau is not None:
        first = fit.medians[0][0]
        assert fit.plateau == pytest.approx(first * (1 / options.get("threshold", 0.016)) ** (1 / (1 + fit.alpha)))


def test_the_fit_is_least_squares_on_logarithms_and_the_plateau_is_where_the_slope_falls_to_the_threshold():
    """The closed form with A cancelled equals the paper's (alpha A / tau)^(1/(alpha+1))."""
    slope, intercept = np.polyfit(np.log(list(TABLE_1)), np.log(list(TABLE_1.values())), 1)
    fit = PowerLawBatchSize(threshold=0.05).fit(steps_for(TABLE_1), N)
    assert (fit.alpha, fit.A) == (pytest.approx(-slope), pytest.approx(math.exp(intercept)))
    tau = 0.05 * fit.alpha * fit.A * 5 ** -(fit.alpha + 1)
    assert fit.plateau == pytest.approx((fit.alpha * fit.A / tau) ** (1 / (fit.alpha + 1)))


def test_the_times_are_those_of_the_curve_where_the_plateau_decides_and_else_the_measured_ones():
    fit = PowerLawBatchSize().fit(power(FOUR, 1), N)
    assert (fit.A, fit.epoch_seconds, fit.first_epoch_seconds) == tuple(map(pytest.approx, (1000, 25, 200)))
    assert fit.medians == tuple((n, pytest.approx(1000 / N)) for n in FOUR)
    assert PowerLawBatchSize().fit([(5, 1.0), (5, 3.0)], N).medians == ((5, 2.0),)
    fit = PowerLawBatchSize().fit(steps_for({5: 100, 10: 91, 20: 85, 40: 93, 80: 88}), N)
    assert (fit.epoch_seconds, fit.first_epoch_seconds) == tuple(map(pytest.approx, (85, 100)))
    fit = PowerLawBatchSize(max_minibatch_size=4).fit(power(FOUR, 1), N)
    assert (fit.epoch_seconds, fit.first_epoch_seconds) == (None, pytest.approx(200))
    with pytest.raises(FrozenInstanceError):
        fit.choice = 1


@pytest.mark.parametrize("alpha", [1.0, 0.868])
def test_noise_of_20_percent_moves_the_choice_by_less_than_15_percent(alpha):
    law = PowerLawBatchSize()
    truth = law.fit(power(FOUR, alpha), N).choice
    moves = []
    for seed in range(200):
        rng = random.Random(seed)
        noisy = [(n, d * max(0.01, rng.gauss(1, 0.2))) for n, d in power(FOUR, alpha)]
        moves.append(abs(law.fit(noisy, N).choice - truth) / truth)
    assert statistics.median(moves) < 0.15


@pytest.mark.parametrize(
    "measurements",
    [
        [],
        [(5, 0.0)],
        [(5, 1e308), (80, 1e308)],
        [(5, 5e-324), (80, 1e308)],
        [(5, 1e308), (80, 5e-324)],
        [(n, 1e-300 if n < 50 else 1e300) for n in range(40, 161)],
        [(np.int64(n), np.float64(d)) for n, d in power(FIVE, 0.5)],
    ],
)
@pytest.mark.parametrize("largest", [100, 3])
def test_to_dict_is_json(measurements, largest):
    fit = PowerLawBatchSize(threshold=5e-324, max_minibatch_size=largest).fit(measurements, np.int64(N))
    data = fit.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert set(data) == {
        "A", "alpha", "plateau", "choice", "reason", "medians", "epoch_seconds", "first_epoch_seconds",
    }  # fmt: skip


sizes = st.integers(1, 120)
measured_lists = st.lists(st.tuples(sizes, st.floats(1e-3, 1e4)), min_size=1, max_size=12)
caps = st.integers(1, 150)


@given(measured_lists, st.integers(1, 1000), caps)
@example([(5, 1.0), (40, 1.0)], 3, 100)
def test_the_choice_is_between_the_smallest_size_and_the_clamp(measurements, num_examples, largest):
    fit = PowerLawBatchSize(max_minibatch_size=largest).fit(measurements, num_examples)
    clamp = min(largest, num_examples)
    assert min(clamp, min(n for n, _ in measurements)) <= fit.choice <= clamp
    json.dumps(fit.to_dict(), allow_nan=False)


@given(measured_lists, st.integers(-20, 20), caps)
def test_the_unit_of_time_changes_nothing(measurements, exponent, largest):
    law = PowerLawBatchSize(max_minibatch_size=largest)
    fit = law.fit(measurements, N)
    # within rounding of a boundary of the rules either side is right
    if fit.plateau is not None:
        top = min(largest, N)
        first = fit.medians[0][0]
        saved = 1 - (max(first, min(round(fit.plateau), top)) / first) ** -fit.alpha
        assume(abs(fit.plateau % 1 - 0.5) > 1e-6 and abs(saved - 0.2) > 1e-6)
    assume(fit.alpha is None or abs(fit.alpha) < 1e-12 or abs(fit.alpha) > 1e-6)
    scaled = law.fit([(n, d * 3.7**exponent) for n, d in measurements], N)
    assert scaled.choice == fit.choice
    assert scaled.alpha == (None if fit.alpha is None else pytest.approx(fit.alpha, abs=1e-9))


@given(measured_lists, caps, st.randoms(use_true_random=False))
def test_the_order_changes_nothing_and_the_fit_is_deterministic(measurements, largest, rng):
    law = PowerLawBatchSize(max_minibatch_size=largest)
    fit = law.fit(measurements, N)
    assert law.fit(iter(measurements), N) == fit
    rng.shuffle(measurements)
    assert law.fit(measurements, N) == fit


# --- the options -------------------------------------------------------------------------------------------


def test_defaults():
    law = PowerLawBatchSize()
    assert (law.candidates, law.threshold, law.max_minibatch_size) == (FIVE, 0.016, 100)
    assert law.clock is time.monotonic
    assert PowerLawBatchSize([40, 5, 5, 10]).candidates == (5, 10, 40)
    with pytest.raises(FrozenInstanceError):
        law.threshold = 1


def fitting(measurement):
    return lambda: PowerLawBatchSize().fit([(5, 1.0), measurement], N)


FINITE = r"measurement 1, \(20, .*\): seconds must be finite and not negative"
BAD_OPTIONS = [
    ("candidates", (), ValueError, "hold at least one size, got none"),
    ("candidates", 40, TypeError, "be a sequence of ints, got 40"),
    ("each of candidates", "5", TypeError, "be an int .*, got '5'"),
    ("each of candidates", (5, 10.0), TypeError, "be an int .*, got 10.0"),
    ("each of candidates", (5, True), TypeError, "be an int .*, got True"),
    ("each of candidates", (0, 5), ValueError, "be at least 1, got 0"),
    ("threshold", "1.6%", TypeError, "be a number, got '1.6%'"),
    ("threshold", True, TypeError, "be a number, got True"),
    ("threshold", 0, ValueError, "be over 0 and at most 1, got 0"),
    ("threshold", 1.6, ValueError, "be over 0 and at most 1, got 1.6"),
    ("threshold", math.nan, ValueError, "be finite, got nan"),
    ("max_minibatch_size", 0, ValueError, "be at least 1, got 0"),
    ("max_minibatch_size", None, TypeError, "be an int .*, got None"),
    ("clock", 0.0, TypeError, "be a callable that returns seconds, got 0.0"),
]
REFUSED = [
    *((partial(PowerLawBatchSize, **{n.split()[-1]: value}), e, f"{n} must {m}") for n, value, e, m in BAD_OPTIONS),
    *((fitting((20, seconds)), ValueError, FINITE) for seconds in (math.nan, math.inf, -math.inf, -1.0, -1e-12)),
    *((fitting((20, other)), TypeError, "measurement 1, .*: seconds must be a num") for other in ("1 s", None, True)),
    *((fitting((n, 1.0)), TypeError, f"measurement 1, .*: the size must be an int .*, got {n}") for n in (20.0, True)),
    (fitting((0, 1.0)), ValueError, "measurement 1, .*: the size must be at least 1, got 0"),
    *((fitting(other), TypeError, "measurement 1, .*: expected a .* pair") for other in ((20, 1.0, 2.0), 20)),
    (lambda: PowerLawBatchSize().plan(0, 10), ValueError, "num_examples must be at least 1, got 0"),
    (lambda: PowerLawBatchSize().plan(10, -1), ValueError, "budget_rollouts must be at least 0, got -1"),
    (lambda: PowerLawBatchSize().plan(10, 10.5), TypeError, "budget_rollouts must be an int .*, got 10.5"),
    (lambda: PowerLawBatchSize().fit([], 0), ValueError, "num_examples must be at least 1, got 0"),
    (lambda: PowerLawBatchSize().fit([], "5"), TypeError, "num_examples must be an int .*, got '5'"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_arguments_are_validated(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_fit_loads_nothing():
    code = (
        "import sys; from dspy_combee import PowerLawBatchSize as P; before = set(sys.modules);"
        "P().fit([(5, 1.0), (40, 2.0)], 100); assert set(sys.modules) == before; assert 'scipy' not in before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the profile plan --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_examples", "budget", "options", "sizes", "rollouts"),
    [
        (N, 10_000, {}, (5, 10, 20, 40, 80), 320),
        (N, 1280, {}, (5, 10, 20, 40, 80), 320),
        (N, 1279, {}, (5, 10, 40, 80), 280),
        (N, 1119, {}, (5, 10, 80), 200),
        (N, 799, {}, (5, 80), 180),
        (N, 719, {}, (5, 10, 20, 40), 160),
        (N, 639, {}, (5, 10, 40), 120),
        (N, 479, {}, (5, 40), 100),
        (N, 399, {}, (5, 10, 20), 80),
        (N, 319, {}, (5, 20), 60),
        (N, 240, {}, (5, 20), 60),
        (30, 10_000, {}, (5, 10, 20, 30), 140),
        (N, 10_000, {"max_minibatch_size": 50}, (5, 10, 20, 40, 50), 260),
        (N, 10_000, {"candidates": (8, 2)}, (2, 8), 24),
    ],
)
def test_the_plan_keeps_the_ends_and_drops_the_middle_first(num_examples, budget, options, sizes, rollouts):
    plan = PowerLawBatchSize(**options).plan(num_examples, budget)
    assert (plan.sizes, plan.fixed_size) == (sizes, None)
    assert plan.num_rollouts == rollouts == 2 * sum(plan.steps)
    assert plan.steps == (sizes[0], *sizes)  # the cold step, then smallest first
    assert f"takes {rollouts} of {budget} rollouts" in plan.reason


SMALL = "span less than a factor of 4"
POOR = "does not pay for sizes that span a factor of 4"


@pytest.mark.parametrize(
    ("num_examples", "budget", "options", "fixed", "why"),
    [
        *((N, budget, {}, n, POOR) for budget, n in ((239, 40), (79, 39), (7, 3), (1, 1), (0, 1))),
        *((n, 100_000, {}, fixed, SMALL) for n, fixed in ((1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (7, 3), (19, 9))),
        (30, 200, {}, 15, POOR),
        (9, 100, {}, 4, "sizes 5 to 9 span"),
        (N, 10_000, {"max_minibatch_size": 8}, 8, "sizes 5 to 8 span"),
    ],
)
def test_a_budget_or_trainset_too_small_to_profile_fixes_the_size(num_examples, budget, options, fixed, why):
    plan = PowerLawBatchSize(**options).plan(num_examples, budget)
    assert (plan.sizes, plan.steps, plan.fixed_size, plan.num_rollouts) == ((), (), fixed, 0)
    assert plan.reason.startswith(f"n = {fixed}, not profiled: ")
    assert why in plan.reason


@given(st.lists(sizes, min_size=1, max_size=8), st.integers(1, 600), st.integers(0, 6000))
def test_a_plan_costs_at_most_a_quarter(candidates, num_examples, budget):
    plan = PowerLawBatchSize(candidates, max_minibatch_size=1000).plan(num_examples, budget)
    assert plan.num_rollouts == 2 * sum(plan.steps)
    assert 4 * plan.num_rollouts <= budget
    assert (plan.fixed_size is None) == bool(plan.sizes)
    if plan.sizes:
        wanted = {min(n, num_examples) for n in candidates}
        assert list(plan.sizes) == sorted(set(plan.sizes) & wanted)
        assert plan.sizes[0] == min(wanted)
        assert plan.sizes[-1] >= 4 * plan.sizes[0]
        larger = [n for n in wanted if n > plan.sizes[-1]]
        assert all(8 * (2 * plan.sizes[0] + n) > budget for n in larger)
    else:
        assert 1 <= plan.fixed_size <= min(40, num_examples, max(1, budget // 2))


# --- the size of each step ---------------------------------------------------------------------------------


def controlled(num_examples=N, budget=PLENTY, num_tasks=1, **options):
    return resolve_sizer(PowerLawBatchSize(**options), num_examples, budget, num_tasks)


def fixed_part(n):
    """Seconds of a step: mostly the same for any n, so that large minibatches pay."""
    return 100 + n


def run(sizer, steps, seconds=fixed_part, limit=PLENTY, invalid=(), num_tasks=1):
    """The decisions of `steps` steps; those numbered in `invalid` are no measurements."""
    decisions = []
    for index in range(steps):
        decision = sizer.next_size(limit)
        reason = "made to fail" if index in invalid else ""
        sizer.observe(StepTiming(decision.n, num_tasks, seconds(decision.n) * num_tasks, reason))
        decisions.append(decision)
    return decisions


def sizes_of(decisions):
    return [decision.n for decision in decisions]


@pytest.mark.parametrize(
    ("size", "num_tasks", "expected", "steps"),
    [
        (7, 1, (7,), [7, 7, 7]),
        (np.int64(7), 2, (7,), [7, 7]),
        ([5, 9, 2], 1, (5, 9, 2), [5, 9, 2, 2, 2]),
        ((np.int32(5), 9), 1, (5, 9), [5, 9, 9]),
        ([5, 5, 9, 9, 2, 2], 2, (5, 5, 9, 9, 2, 2), [5, 9, 2]),  # batch_sizes has one entry for each proposal
        ("auto", 1, (5, *FIVE), [5, *FIVE]),
        (PowerLawBatchSize(candidates=(3, 12)), 1, (3, 3, 12), [3, 3, 12]),
    ],
    ids=repr,
)
def test_each_kind_of_size(size, num_tasks, expected, steps):
    sizer = resolve_sizer(size, N, PLENTY, num_tasks)
    assert sizer.expected == expected
    assert sizer.description
    assert sizes_of(run(sizer, len(steps), num_tasks=num_tasks)) == steps


@pytest.mark.parametrize("size", [20, [5, 20], "auto"], ids=str)
def test_the_limit_wins_and_the_reason_says_so(size):
    sizer = resolve_sizer(size, N, PLENTY, 1)
    run(sizer, 1)
    clamped = sizer.next_size(4)
    assert (clamped.n, clamped.clamped, clamped.profiling) == (4, True, False)
    assert clamped.reason.startswith("n = 4, all that the trainset and the budget allow instead of ")


def test_a_replay_goes_on_where_it_was():
    first, second = (resolve_sizer([5, 9, 2], N, PLENTY, 1) for _ in range(2))
    run(first, 1)
    second.set_state(first.get_state())
    assert second.next_size(PLENTY).n == 9


@pytest.mark.parametrize(
    ("size", "error"),
    [
        *((size, ValueError) for size in (0, -3, [], [4, 0], "automatic")),
        *((size, TypeError) for size in (True, 3.0, [3.5], {3}, range(1, 4), np.array([3, 4]), np.float64(3))),
    ],
    ids=repr,
)
def test_other_sizes_are_refused(size, error):
    with pytest.raises(error, match=r"reflection_minibatch_size.* (got|list)"):
        resolve_sizer(size, N, PLENTY, 1)


# --- the controller ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tasks", [1, 4])
def test_the_first_step_is_cold_then_each_size_is_measured_and_then_the_fit_decides(num_tasks):
    sizer = controlled(num_tasks=num_tasks)
    times = iter([1e6, *map(fixed_part, FIVE)])
    profiling = run(sizer, 6, lambda n: next(times), num_tasks=num_tasks)
    assert sizes_of(profiling) == [5, *FIVE]
    assert all(decision.profiling for decision in profiling)
    assert "cold" in profiling[0].reason
    chosen = sizer.next_size(PLENTY)
    assert not chosen.profiling
    assert dict(chosen.fit.medians) == {n: fixed_part(n) for n in FIVE}, "the time is shared by a step's proposals"
    assert (chosen.n, chosen.reason) == (chosen.fit.choice, chosen.fit.reason)


@pytest.mark.parametrize("invalid", range(6))
def test_an_invalid_profiling_step_is_no_measurement_and_its_size_is_tried_again(invalid, caplog):
    sizer, plan = controlled(), [5, *FIVE]
    with caplog.at_level(logging.INFO, "dspy_combee"):
        decisions = run(sizer, 7, invalid={invalid})
    assert sizes_of(decisions) == [*plan[: invalid + 1], *plan[invalid:]]
    assert len(sizer.next_size(PLENTY).fit.medians) == 5
    assert f"A step with n = {plan[invalid]} is no measurement: made to fail." in caplog.messages


def test_an_invalid_step_is_paid_for_and_the_middle_goes_first(caplog):
    """The plan takes all of the quarter, 2 * (5 + 5 + 10 + 20 + 40 + 80) = 320 rollouts."""
    sizer = controlled(budget=4 * 320)
    with caplog.at_level(logging.INFO, "dspy_combee"):
        decisions = run(sizer, 7, invalid={1, 2})
    assert sizes_of(decision for decision in decisions if decision.profiling) == [5, 5, 5, 5, 10, 40, 80]
    assert any(message.startswith("Profiling cannot go on as planned") for message in caplog.messages)


@given(
    budget=st.integers(0, 5000),
    num_examples=st.integers(1, 200),
    num_tasks=st.integers(1, 5),
    invalid=st.sets(st.integers(0, 20)),
    surprise=st.integers(1, 2),
)
@example(budget=4 * 320, num_examples=N, num_tasks=1, invalid=set(range(60)), surprise=1)
def test_profiling_takes_at_most_a_quarter_and_ends(budget, num_examples, num_tasks, invalid, surprise):
    """Also when a step makes more proposals than was known: what has been seen is what the next one is held to."""
    sizer = controlled(num_examples, budget, num_tasks)
    made = num_tasks * surprise
    decisions = run(sizer, 60, invalid=invalid, num_tasks=made, limit=num_examples)
    profiling = [decision.n for decision in decisions if decision.profiling]
    rollouts = 2 * made * sum(profiling)
    first = 2 * (made - num_tasks) * sum(profiling[:1])
    assert 4 * (rollouts - first) <= budget
    assert all(1 <= n <= num_examples for n in sizes_of(decisions))
    assert not decisions[-1].profiling


limits = st.sampled_from([3, 30, PLENTY, PLENTY])


@given(st.lists(st.tuples(st.floats(0.01, 1e4), st.booleans(), limits), min_size=30, max_size=30))
def test_after_profiling_n_moves_by_at_most_a_factor_of_2_and_the_limit_wins(steps):
    sizer, last = controlled(), 0
    for seconds, valid, limit in steps:
        decision = sizer.next_size(limit)
        sizer.observe(StepTiming(decision.n, 1, seconds, "" if valid else "made to fail"))
        assert decision.n <= limit
        if not decision.profiling:
            wanted = min(max(decision.fit.choice, (last + 1) // 2), 2 * last) if last else decision.fit.choice
            assert decision.n == min(wanted, limit)
            assert decision.clamped == (wanted > limit)
            assert decision.n in (decision.fit.choice, limit) or "at most a factor of 2" in decision.reason
        last = decision.n


@given(st.integers(0, 12), st.sets(st.integers(0, 11), max_size=4))
def test_a_controller_with_the_state_of_another_decides_as_it_would(steps, invalid):
    whole, first, second = controlled(), controlled(), controlled()
    run(first, steps, invalid=invalid)
    run(whole, steps, invalid=invalid)
    state = first.get_state()
    before = json.dumps(state)
    second.set_state(state)
    later = {index - steps for index in invalid}
    assert run(second, 12, invalid=later) == run(whole, 12, invalid=later)
    run(first, 3)
    assert json.dumps(state) == before, "the state is a snapshot"
