"""What decides n for each step: a fixed size, a list that is replayed, and the controller in a run."""

import itertools
import json
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_combee import PowerLawBatchSize
from dspy_combee.controller.batch_size import (
    ControlledSize,
    FixedSize,
    ReplayedSizes,
    StepTiming,
    check_minibatch_size,
    resolve_sizer,
)

PLENTY = 10_000


def controlled(num_examples=500, budget=PLENTY, num_tasks=1, **options):
    return ControlledSize(PowerLawBatchSize(**options), num_examples, budget, num_tasks)


def fixed_part(n):
    """Seconds of a step: mostly the same for any n, so that large minibatches pay."""
    return 100 + n


def run(sizer, steps, seconds=fixed_part, limit=PLENTY, flaws=(), num_tasks=1):
    """The decisions of `steps` steps; those numbered in `flaws` are no measurements."""
    decisions = []
    for index in range(steps):
        decision = sizer.next_size(limit)
        flaw = "made to fail" if index in flaws else ""
        sizer.observe(StepTiming(decision.n, num_tasks, seconds(decision.n) * num_tasks, flaw))
        decisions.append(decision)
    return decisions


def sizes(decisions):
    return [decision.n for decision in decisions]


# --- fixed and replayed ------------------------------------------------------------------------------------


def test_a_fixed_size_is_the_same_for_every_step_and_the_limit_wins():
    sizer = FixedSize(20)
    assert sizes(run(sizer, 3)) == [20, 20, 20]
    clamped = sizer.next_size(7)
    assert (clamped.n, clamped.clamped) == (7, True)
    assert "7" in clamped.reason
    assert "20" in clamped.reason


def test_replayed_sizes_come_step_by_step_and_the_last_one_stays():
    assert sizes(run(ReplayedSizes([5, 9, 2]), 5)) == [5, 9, 2, 2, 2]
    assert ReplayedSizes([5, 9]).next_size(3).n == 3


def test_a_step_of_several_proposals_takes_several_sizes_of_a_replayed_run():
    """`batch_sizes` has one entry for each proposal."""
    assert sizes(run(ReplayedSizes([5, 5, 9, 9, 2, 2]), 3, num_tasks=2)) == [5, 9, 2]


def test_a_replay_goes_on_where_it_was():
    first = ReplayedSizes([5, 9, 2])
    run(first, 1)
    second = ReplayedSizes([5, 9, 2])
    second.set_state(first.get_state())
    assert second.next_size(PLENTY).n == 9


# --- the controller ----------------------------------------------------------------------------------------


def test_the_first_step_is_cold_then_each_size_is_measured_and_then_the_fit_decides():
    sizer = controlled()
    profiling = run(sizer, 6)
    assert sizes(profiling) == [5, 5, 10, 20, 40, 80]
    assert all(decision.profiling for decision in profiling)
    assert "cold" in profiling[0].reason
    chosen = sizer.next_size(PLENTY)
    assert not chosen.profiling
    assert dict(chosen.fit.medians) == {n: fixed_part(n) for n in (5, 10, 20, 40, 80)}
    assert chosen.n == chosen.fit.choice
    assert chosen.reason == chosen.fit.reason


def test_the_cold_step_is_no_measurement():
    sizer = controlled(candidates=(5, 20))
    times = iter([1e6, 105.0, 120.0])
    run(sizer, 3, seconds=lambda n: next(times))
    assert sizer.next_size(PLENTY).fit.medians == ((5, 105.0), (20, 120.0))


@pytest.mark.parametrize("flawed", range(6))
def test_a_flawed_profiling_step_is_no_measurement_and_its_size_is_tried_again(flawed, caplog):
    sizer = controlled()
    with caplog.at_level(logging.INFO, "dspy_combee"):
        decisions = run(sizer, 7, flaws={flawed})
    plan = [5, 5, 10, 20, 40, 80]
    assert sizes(decisions) == [*plan[: flawed + 1], *plan[flawed:]]
    assert len(sizer.next_size(PLENTY).fit.medians) == 5
    assert f"A step with n = {plan[flawed]} is no measurement: made to fail." in caplog.messages


def test_a_flawed_step_is_paid_for_and_the_middle_goes_first(caplog):
    """The plan takes all of the quarter, 2 * (5 + 5 + 10 + 20 + 40 + 80) = 320 rollouts."""
    sizer = controlled(budget=4 * 320)
    with caplog.at_level(logging.INFO, "dspy_combee"):
        decisions = run(sizer, 7, flaws={1, 2})
    assert sizes([decision for decision in decisions if decision.profiling]) == [5, 5, 5, 5, 10, 40, 80]
    assert any(message.startswith("Profiling cannot go on as planned") for message in caplog.messages)


def test_when_the_quarter_is_spent_on_flawed_steps_profiling_ends():
    sizer = controlled(budget=4 * 320)
    decisions = run(sizer, 60, flaws=range(60))
    profiled = [decision.n for decision in decisions if decision.profiling]
    assert 2 * sum(profiled) <= 320
    assert not decisions[-1].profiling
    assert decisions[-1].n == 40  # Nothing was measured.


@given(
    budget=st.integers(0, 5000),
    num_examples=st.integers(1, 200),
    num_tasks=st.integers(1, 5),
    flaws=st.sets(st.integers(0, 20)),
    surprise=st.integers(1, 2),
)
def test_profiling_takes_at_most_a_quarter(budget, num_examples, num_tasks, flaws, surprise):
    """Also when a step makes more proposals than was known: what has been seen is what the next one is held to."""
    sizer = controlled(num_examples, budget, num_tasks)
    made = num_tasks * surprise
    decisions = run(sizer, 30, flaws=flaws, num_tasks=made, limit=num_examples)
    profiling = [decision.n for decision in decisions if decision.profiling]
    rollouts = 2 * made * sum(profiling)
    first = 2 * (made - num_tasks) * sum(profiling[:1])
    assert 4 * (rollouts - first) <= budget
    assert all(1 <= n <= num_examples for n in sizes(decisions))


def test_a_budget_or_trainset_too_small_for_profiling_fixes_n_and_says_so():
    for sizer, n in [(controlled(budget=100), 40), (controlled(num_examples=7), 3), (controlled(num_examples=1), 1)]:
        decisions = run(sizer, 3)
        assert sizes(decisions) == [n] * 3
        assert not any(decision.profiling for decision in decisions)
        assert "not profiled" in decisions[0].reason


def test_a_size_that_the_limit_forbids_ends_profiling():
    sizer = controlled()
    run(sizer, 3)
    decision = sizer.next_size(limit=4)
    assert (decision.n, decision.profiling, decision.clamped) == (4, False, True)


def test_every_step_refines_the_fit():
    """The machine gets slower with n after profiling: the choice follows."""
    sizer = controlled()
    run(sizer, 6)
    before = sizer.next_size(PLENTY)
    run(sizer, 8, seconds=lambda n: 20.0 * n)
    after = sizer.next_size(PLENTY)
    assert sum(seconds for _, seconds in after.fit.medians) > sum(seconds for _, seconds in before.fit.medians)
    assert after.fit.alpha < before.fit.alpha


@given(st.lists(st.floats(0.01, 1e4), min_size=30, max_size=30), st.sets(st.integers(0, 29)))
def test_after_profiling_n_moves_by_at_most_a_factor_of_2(times, flaws):
    sizer = controlled()
    seconds = iter(times)
    decisions = run(sizer, 30, seconds=lambda n: next(seconds), flaws=flaws)
    for last, decision in itertools.pairwise(decisions):
        if not decision.profiling:
            assert (last.n + 1) // 2 <= decision.n <= 2 * last.n
            assert decision.n == decision.fit.choice or "at most a factor of 2" in decision.reason


def test_the_limit_wins_over_the_factor_of_2():
    sizer = controlled()
    run(sizer, 7)
    decision = sizer.next_size(limit=3)
    assert (decision.n, decision.clamped) == (3, True)
    sizer.observe(StepTiming(3, 1, 1.0, "the budget cut it short"))
    assert sizer.next_size(PLENTY).n == 6


def test_the_time_of_a_step_is_shared_by_its_proposals():
    sizer = controlled(num_tasks=4)
    run(sizer, 6, num_tasks=4)
    assert dict(sizer.next_size(PLENTY).fit.medians)[80] == fixed_part(80)


@given(st.integers(0, 12), st.sets(st.integers(0, 11), max_size=4))
def test_a_controller_with_the_state_of_another_decides_as_it_would(steps, flaws):
    whole, first, second = controlled(), controlled(), controlled()
    run(first, steps, flaws=flaws)
    run(whole, steps, flaws=flaws)
    second.set_state(first.get_state())
    later = {index - steps for index in flaws}
    assert run(second, 12, flaws=later) == run(whole, 12, flaws=later)


def test_the_state_is_a_snapshot():
    sizer = controlled()
    state = sizer.get_state()
    json.dumps(state)
    run(sizer, 3)
    assert state["todo"] == [5, 5, 10, 20, 40, 80]
    assert state["measurements"] == []


def test_two_proposals_a_step_halve_what_profiling_can_afford():
    assert 80 in controlled(budget=4 * 320).plan.sizes
    assert controlled(budget=4 * 320, num_tasks=2).plan.num_rollouts * 2 <= 320


# --- choosing one ------------------------------------------------------------------------------------------


def test_each_kind_of_size_has_its_sizer():
    policy = PowerLawBatchSize(candidates=(3, 12))
    assert isinstance(resolve_sizer(7, 100, 1000, 1), FixedSize)
    assert isinstance(resolve_sizer([7, 8], 100, 1000, 1), ReplayedSizes)
    assert isinstance(resolve_sizer((7, 8), 100, 1000, 1), ReplayedSizes)
    assert isinstance(resolve_sizer("auto", 100, 1000, 1), ControlledSize)
    assert resolve_sizer(policy, 100, 1000, 1).plan.sizes == (3, 12)


@pytest.mark.parametrize("size", [None, 1, 40, [3], (3, 4), "auto", PowerLawBatchSize()])
def test_known_sizes_pass(size):
    assert check_minibatch_size(size) == (list(size) if isinstance(size, tuple) else size)


def test_ints_of_numpy_are_ints():
    assert type(check_minibatch_size(np.int64(8))) is int
    assert resolve_sizer(np.int64(8), 100, 1000, 1).expected == (8,)
    assert resolve_sizer([np.int32(7), 8], 100, 1000, 1).expected == (7, 8)


@pytest.mark.parametrize(
    ("size", "error"),
    [
        (0, ValueError),
        (-3, ValueError),
        ([], ValueError),
        ([4, 0], ValueError),
        ("automatic", ValueError),
        (True, TypeError),
        (3.0, TypeError),
        ([3.5], TypeError),
        ({3}, TypeError),
        (range(1, 4), TypeError),
        (np.array([3, 4]), TypeError),
        (np.float64(3), TypeError),
        (object(), TypeError),
    ],
)
def test_other_sizes_are_refused(size, error):
    with pytest.raises(error, match=r"reflection_minibatch_size.* (got|list)"):
        check_minibatch_size(size)


@pytest.mark.parametrize(("size", "expected"), [(7, (7,)), ([7, 8], (7, 8)), ("auto", (5, 5, 10, 20, 40, 80))], ids=str)
def test_what_is_known_before_the_run(size, expected):
    sizer = resolve_sizer(size, 500, PLENTY, 1)
    assert sizer.expected == expected
    assert sizer.outlook
