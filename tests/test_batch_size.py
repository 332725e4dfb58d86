"""The controller of section 3.3 as a pure piece: the fit, the profile plan and the bounded move."""

import json
import math
import random
import statistics
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dspy_combee.controller.batch_size import PowerLawBatchSize, bounded_move, fixed_batch_size, plan_profile

N = 500
FOUR, FIVE = (5, 10, 20, 40), (5, 10, 20, 40, 80)


def steps_for(epochs, num_examples=N):
    """The (n, seconds per step) pairs that give the epoch times {n: T}."""
    return [(n, seconds * n / num_examples) for n, seconds in epochs.items()]


def power_law(sizes, alpha, a=1000.0, num_examples=N):
    return steps_for({n: a * n**-alpha for n in sizes}, num_examples)


# --- the fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "alpha", "plateau"),
    [
        pytest.param({n: 1000 / n for n in FOUR}, 1, 39.5, id="alpha 1"),
        pytest.param({n: 1000 * n**-0.5 for n in FIVE}, 0.5, 78.7, id="alpha 0.5"),
        pytest.param({5: 1800, 10: 1140, 20: 600, 40: 300}, 0.868, 45.7, id="table 1 of the paper"),
    ],
)
def test_the_plateau_of_known_curves(epochs, alpha, plateau):
    fit = PowerLawBatchSize().fit(steps_for(epochs), N)
    assert fit.alpha == pytest.approx(alpha, abs=5e-4)
    assert fit.plateau == pytest.approx(plateau, abs=0.05)
    assert abs(fit.choice - plateau) <= 1
    assert fit.plateau == pytest.approx(5 * 62.5 ** (1 / (1 + fit.alpha)))


def test_the_plateau_is_where_the_slope_falls_to_the_threshold():
    """The closed form with A cancelled equals the paper's (alpha A / tau)^(1/(alpha+1))."""
    fit = PowerLawBatchSize(threshold=0.05).fit(steps_for({5: 90, 10: 60, 20: 35, 40: 25}), N)
    tau = 0.05 * fit.alpha * fit.A * 5 ** -(fit.alpha + 1)
    assert fit.plateau == pytest.approx((fit.alpha * fit.A / tau) ** (1 / (fit.alpha + 1)))


def test_the_fit_is_least_squares_on_logarithms():
    np = pytest.importorskip("numpy")
    epochs = {5: 1800, 10: 1140, 20: 600, 40: 300}
    slope, intercept = np.polyfit(np.log(list(epochs)), np.log(list(epochs.values())), 1)
    fit = PowerLawBatchSize().fit(steps_for(epochs), N)
    assert fit.alpha == pytest.approx(-slope)
    assert pytest.approx(math.exp(intercept)) == fit.A


def test_a_fit_says_what_it_found():
    fit = PowerLawBatchSize().fit(power_law(FOUR, 1), N)
    assert fit.choice == 40
    assert pytest.approx(1000) == fit.A
    assert fit.epoch_seconds == pytest.approx(25)
    assert fit.first_epoch_seconds == pytest.approx(200)
    assert fit.medians == tuple((n, pytest.approx(1000 / N)) for n in FOUR)
    assert fit.reason == "n = 40: the plateau, 39.5, saves 88% of T(5) (alpha 1)"
    with pytest.raises(FrozenInstanceError):
        fit.choice = 1


def test_the_smallest_size_scales_the_plateau():
    small, large = (PowerLawBatchSize().fit(power_law(sizes, 1), N) for sizes in (FOUR, (10, 20, 40, 80)))
    assert large.plateau == pytest.approx(2 * small.plateau)


@pytest.mark.parametrize(("num_examples", "choice", "by"), [(500, 60, "max_minibatch_size"), (50, 50, "the trainset")])
def test_the_choice_is_clamped_and_says_by_what(num_examples, choice, by):
    law = PowerLawBatchSize(max_minibatch_size=60)
    fit = law.fit(power_law(FIVE, 0.5, num_examples=num_examples), num_examples)
    assert fit.choice == choice
    assert fit.plateau == pytest.approx(78.7, abs=0.05)
    assert f"clamped by {by}" in fit.reason


def test_a_plateau_below_the_smallest_size_is_clamped_to_it():
    fit = PowerLawBatchSize(threshold=1.0).fit(power_law(FOUR, 1), N)
    assert fit.plateau == pytest.approx(5)
    assert fit.choice == 40  # staying at n_1 saves nothing, so the fastest measured size is taken
    assert "under 20%" in fit.reason


@pytest.mark.parametrize("largest", [1, 4])
def test_the_clamp_wins_over_the_smallest_size(largest):
    fit = PowerLawBatchSize(max_minibatch_size=largest).fit(power_law(FOUR, 1), N)
    assert fit.choice == largest
    assert "the clamp" in fit.reason
    assert fit.epoch_seconds is None
    assert fit.first_epoch_seconds == pytest.approx(200)


@pytest.mark.parametrize("num_examples", [1, 2, 3, 4, 5, 7])
def test_tiny_trainsets(num_examples):
    sizes = sorted({min(n, num_examples) for n in FIVE})
    fit = PowerLawBatchSize().fit([(n, 1.0) for n in sizes], num_examples)
    assert fit.choice == sizes[-1]
    assert "spans under a factor of 4" in fit.reason


@pytest.mark.parametrize(
    ("alpha", "num_examples", "choice"),
    [
        pytest.param(0.05, 500, 80, id="0.05 saves 14% at the cap of 100"),
        pytest.param(0.1, 500, 100, id="0.1 saves 26% at the cap of 100"),
        pytest.param(0.1, 40, 40, id="0.1 saves 19% at a cap of 40"),
    ],
)
def test_the_20_percent_rule(alpha, num_examples, choice):
    fit = PowerLawBatchSize().fit(power_law(FIVE, alpha, num_examples=num_examples), num_examples)
    assert fit.choice == choice
    assert fit.alpha == pytest.approx(alpha)
    assert ("under 20%" in fit.reason) == (choice != 100)


def test_the_20_percent_rule_takes_the_measured_minimum_not_the_largest_size():
    fit = PowerLawBatchSize().fit(steps_for({5: 100, 10: 91, 20: 85, 40: 93, 80: 88}), N)
    assert 0 < fit.alpha < 0.06
    assert fit.choice == 20
    assert fit.epoch_seconds == pytest.approx(85)
    assert fit.first_epoch_seconds == pytest.approx(100)
    assert "the measured size with the shortest epoch" in fit.reason


def test_the_measured_minimum_is_sought_within_the_clamp():
    fit = PowerLawBatchSize(max_minibatch_size=30).fit(power_law(FIVE, 0.05), N)
    assert fit.choice == 20


def test_equal_epochs_take_the_smallest_size():
    fit = PowerLawBatchSize().fit(steps_for(dict.fromkeys(FIVE, 100.0)), N)
    assert fit.choice == 5
    assert fit.alpha == pytest.approx(0, abs=1e-9)
    assert fit.plateau is None
    assert "no faster" in fit.reason


def test_equal_step_times_are_alpha_1():
    fit = PowerLawBatchSize().fit([(n, 3.0) for n in FIVE], N)
    assert fit.alpha == pytest.approx(1)
    assert fit.choice == 40


@pytest.mark.parametrize("alpha", [-0.3, -1, -2, -500])
def test_rising_epochs_take_the_smallest_size(alpha):
    fit = PowerLawBatchSize().fit([(n, (n / 80) ** (1 - alpha)) for n in FIVE if (n / 80) ** (1 - alpha)], N)
    assert fit.choice == (5 if alpha > -500 else 20)  # what underflows to 0 is not measured here
    assert fit.alpha == pytest.approx(alpha)
    assert fit.plateau is None
    assert "no faster" in fit.reason


def test_a_rising_fit_still_takes_the_measured_minimum():
    fit = PowerLawBatchSize().fit(steps_for({5: 100, 10: 80, 20: 150, 40: 200}), N)
    assert fit.alpha < 0
    assert fit.choice == 10


@pytest.mark.parametrize("sizes", [(10,), (10, 20), (10, 20, 39)])
def test_a_span_under_4_takes_the_measured_minimum(sizes):
    fit = PowerLawBatchSize().fit(power_law(sizes, 0.7), N)
    assert fit.choice == sizes[-1]
    assert (fit.A, fit.alpha, fit.plateau) == (None, None, None)
    assert "spans under a factor of 4" in fit.reason


def test_a_span_of_exactly_4_is_fitted():
    assert PowerLawBatchSize().fit(power_law((10, 40), 1), N).alpha == pytest.approx(1)


def test_several_measurements_of_a_size_count_by_their_median():
    noisy = [m for n, d in power_law(FOUR, 1) for m in ((n, d), (n, 40 * d), (n, d / 9))]
    fit = PowerLawBatchSize().fit(noisy, N)
    assert fit == PowerLawBatchSize().fit(power_law(FOUR, 1), N)
    assert PowerLawBatchSize().fit([(5, 1.0), (5, 3.0)], N).medians == ((5, 2.0),)


@pytest.mark.parametrize(("num_examples", "largest", "choice"), [(500, 100, 40), (500, 12, 12), (9, 100, 4), (1, 1, 1)])
def test_without_measurements_the_size_is_fixed(num_examples, largest, choice):
    fit = PowerLawBatchSize(max_minibatch_size=largest).fit([], num_examples)
    assert fit.choice == choice
    assert "nothing was measured" in fit.reason
    assert (fit.A, fit.alpha, fit.plateau, fit.epoch_seconds, fit.medians) == (None, None, None, None, ())


def test_a_size_at_zero_seconds_is_left_out_and_said_so():
    measured = power_law(FIVE, 1)
    fit = PowerLawBatchSize().fit([(5, 0.0), *measured[1:]], N)
    assert fit.plateau == pytest.approx(10 * 62.5**0.5)  # n_1 is now 10
    assert [n for n, _ in fit.medians] == [10, 20, 40, 80]
    assert "left out: [5]" in fit.reason


def test_one_zero_among_several_measurements_counts():
    fit = PowerLawBatchSize().fit([(5, 0), (5, 1.0), (5, 2.0), *power_law((10, 20, 40), 1)], N)
    assert fit.medians[0] == (5, 1.0)


@pytest.mark.parametrize(("largest", "choice"), [(100, 5), (3, 3)])
def test_only_zeros_take_the_smallest_size(largest, choice):
    fit = PowerLawBatchSize(max_minibatch_size=largest).fit([(n, 0.0) for n in FIVE], N)
    assert fit.choice == choice
    assert "0 seconds" in fit.reason


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, -1e-12])
def test_impossible_seconds_are_refused_by_name(seconds):
    measured = power_law(FOUR, 1)
    measured[2] = (20, seconds)
    with pytest.raises(ValueError, match=r"measurement 2, \(20, .*\): seconds must be finite and not negative"):
        PowerLawBatchSize().fit(measured, N)


@pytest.mark.parametrize(
    ("measurement", "error", "message"),
    [
        ((20, "1 s"), TypeError, "measurement 1, .*: seconds must be a number"),
        ((20, None), TypeError, "measurement 1, .*: seconds must be a number"),
        ((20, True), TypeError, "measurement 1, .*: seconds must be a number"),
        ((20.0, 1.0), TypeError, "measurement 1, .*: the size must be an int, got 20.0"),
        ((True, 1.0), TypeError, "measurement 1, .*: the size must be an int, got True"),
        ((0, 1.0), ValueError, "measurement 1, .*: the size must be at least 1, got 0"),
        ((20, 1.0, 2.0), TypeError, "measurement 1, .*: expected a .* pair"),
        (20, TypeError, "measurement 1, 20: expected a .* pair"),
    ],
)
def test_malformed_measurements_are_refused_by_name(measurement, error, message):
    with pytest.raises(error, match=message):
        PowerLawBatchSize().fit([(5, 1.0), measurement], N)


@pytest.mark.parametrize("num_examples", [0, -1])
def test_sizes_out_of_range_are_refused(num_examples):
    with pytest.raises(ValueError, match="must be at least 1"):
        PowerLawBatchSize().fit([(5, 1.0)], num_examples)


@pytest.mark.parametrize("num_examples", [5.0, "5"])
def test_sizes_of_another_type_are_refused(num_examples):
    with pytest.raises(TypeError, match="must be an int"):
        PowerLawBatchSize().fit([(5, 1.0)], num_examples)


@pytest.mark.parametrize("alpha", [1.0, 0.868])
def test_noise_of_20_percent_moves_the_choice_by_less_than_15_percent(alpha):
    law = PowerLawBatchSize()
    truth = law.fit(power_law(FOUR, alpha), N).choice
    moves = []
    for seed in range(200):
        rng = random.Random(seed)
        noisy = [(n, d * max(0.01, rng.gauss(1, 0.2))) for n, d in power_law(FOUR, alpha)]
        moves.append(abs(law.fit(noisy, N).choice - truth) / truth)
    assert statistics.median(moves) < 0.15


@pytest.mark.parametrize(
    "measurements",
    [
        [],
        [(5, 0.0)],
        [(5, 1.0)],
        [(5, 1e308), (80, 1e308)],
        [(5, 5e-324), (80, 1e308)],
        [(5, 1e308), (80, 5e-324)],
        [(n, 1e-300 if n < 50 else 1e300) for n in range(40, 161)],
        power_law(FIVE, 0.5),
    ],
)
@pytest.mark.parametrize("largest", [100, 3])
def test_to_dict_is_json(measurements, largest):
    fit = PowerLawBatchSize(threshold=5e-324, max_minibatch_size=largest).fit(measurements, N)
    data = fit.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert set(data) == {
        "A", "alpha", "plateau", "choice", "reason", "medians", "epoch_seconds", "first_epoch_seconds",
    }  # fmt: skip


def test_numpy_numbers_are_numbers():
    np = pytest.importorskip("numpy")
    measured = power_law(FOUR, 1)
    fit = PowerLawBatchSize(max_minibatch_size=np.int64(30)).fit(
        [(np.int64(n), np.float64(d)) for n, d in measured], np.int64(N)
    )
    assert fit.choice == 30
    json.dumps(fit.to_dict(), allow_nan=False)


times = st.floats(1e-3, 1e4)
sizes = st.integers(1, 120)
measured_lists = st.lists(st.tuples(sizes, times), min_size=1, max_size=12)
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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"candidates": ()}, ValueError, "at least one size, got none"),
        ({"candidates": 40}, TypeError, "sequence of ints, got 40"),
        ({"candidates": "5"}, TypeError, "each of candidates must be an int, got '5'"),
        ({"candidates": (5, 10.0)}, TypeError, "each of candidates must be an int, got 10.0"),
        ({"candidates": (5, True)}, TypeError, "each of candidates must be an int, got True"),
        ({"candidates": (0, 5)}, ValueError, "each of candidates must be at least 1, got 0"),
        ({"threshold": "1.6%"}, TypeError, "threshold must be a number, got '1.6%'"),
        ({"threshold": True}, TypeError, "threshold must be a number, got True"),
        ({"threshold": 0}, ValueError, "over 0 and at most 1, got 0"),
        ({"threshold": 1.6}, ValueError, "over 0 and at most 1, got 1.6"),
        ({"threshold": math.nan}, ValueError, "over 0 and at most 1, got nan"),
        ({"max_minibatch_size": 0}, ValueError, "max_minibatch_size must be at least 1, got 0"),
        ({"max_minibatch_size": None}, TypeError, "max_minibatch_size must be an int, got None"),
        ({"clock": 0.0}, TypeError, "clock must be a callable that returns seconds, got 0.0"),
    ],
)
def test_options_are_validated(options, error, message):
    with pytest.raises(error, match=message):
        PowerLawBatchSize(**options)


def test_the_fit_needs_no_scipy():
    code = (
        "import sys; from dspy_combee.controller.batch_size import PowerLawBatchSize as P; before = set(sys.modules);"
        "P().fit([(5, 1.0), (40, 2.0)], 100); assert set(sys.modules) == before; assert 'scipy' not in before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the profile plan --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "sizes", "rollouts"),
    [
        (10_000, (5, 10, 20, 40, 80), 320),
        (1280, (5, 10, 20, 40, 80), 320),
        (1279, (5, 10, 40, 80), 280),
        (1119, (5, 10, 80), 200),
        (799, (5, 80), 180),
        (719, (5, 10, 20, 40), 160),
        (639, (5, 10, 40), 120),
        (479, (5, 40), 100),
        (399, (5, 10, 20), 80),
        (319, (5, 20), 60),
        (240, (5, 20), 60),
    ],
)
def test_the_plan_keeps_the_ends_and_drops_the_middle_first(budget, sizes, rollouts):
    plan = plan_profile(FIVE, N, budget)
    assert plan.sizes == sizes
    assert plan.fixed_size is None
    assert plan.num_rollouts == rollouts == 2 * sum(plan.steps)
    assert plan.steps == (5, *sizes)  # the cold step, then smallest first
    assert f"takes {rollouts} of {budget} rollouts" in plan.reason


@pytest.mark.parametrize(
    ("num_examples", "budget", "fixed"),
    [(500, 239, 40), (500, 79, 39), (500, 7, 3), (500, 1, 1), (500, 0, 1), (30, 200, 15), (9, 100, 4)],
)
def test_a_budget_too_small_to_profile_fixes_the_size(num_examples, budget, fixed):
    plan = plan_profile(FIVE, num_examples, budget)
    assert (plan.sizes, plan.steps, plan.fixed_size, plan.num_rollouts) == ((), (), fixed, 0)
    assert plan.reason.startswith(f"n = {fixed}, not profiled: ")


@pytest.mark.parametrize(("num_examples", "fixed"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (7, 3), (19, 9)])
def test_a_small_trainset_fixes_the_size(num_examples, fixed):
    plan = plan_profile(FIVE, num_examples, 100_000)
    assert plan.fixed_size == fixed == fixed_batch_size(num_examples)
    assert f"sizes {min(5, num_examples)} to {num_examples} span less than a factor of 4" in plan.reason


def test_sizes_are_clamped_to_the_trainset_and_to_the_largest_minibatch():
    assert plan_profile(FIVE, 30, 10_000).sizes == (5, 10, 20, 30)
    assert PowerLawBatchSize(max_minibatch_size=50).plan(N, 10_000).sizes == (5, 10, 20, 40, 50)
    assert PowerLawBatchSize(max_minibatch_size=8).plan(N, 10_000).fixed_size == 8
    assert PowerLawBatchSize(candidates=(8, 2)).plan(N, 10_000).sizes == (2, 8)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (((), 10, 10), ValueError, "at least one size"),
        ((FIVE, 0, 10), ValueError, "num_examples must be at least 1, got 0"),
        ((FIVE, 10, -1), ValueError, "budget_rollouts must be at least 0, got -1"),
        ((FIVE, 10, 10.5), TypeError, "budget_rollouts must be an int, got 10.5"),
        ((FIVE, 10, 10, 0), ValueError, "max_minibatch_size must be at least 1, got 0"),
    ],
)
def test_the_plan_validates(args, error, message):
    with pytest.raises(error, match=message):
        plan_profile(*args)


@given(st.lists(sizes, min_size=1, max_size=8), st.integers(1, 600), st.integers(0, 6000))
def test_a_plan_costs_at_most_a_quarter(candidates, num_examples, budget):
    plan = plan_profile(candidates, num_examples, budget)
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


# --- the bounded move --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("current", "target", "size"), [(10, 15, 15), (10, 80, 20), (80, 10, 40), (5, 1, 3), (1, 1, 1), (1, 100, 2)]
)
def test_a_move_is_at_most_a_factor_of_2(current, target, size):
    assert bounded_move(current, target) == size


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_moves_are_bounded_and_arrive(current, target):
    size = bounded_move(current, target)
    assert current <= 2 * size <= 4 * current
    for _ in range(12):
        current = bounded_move(current, target)
    assert current == target


@pytest.mark.parametrize("args", [(0, 1), (1, 0)])
def test_moves_validate(args):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        bounded_move(*args)
