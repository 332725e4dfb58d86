"""The batch-size controller in real runs of `CombeeOptimizer`, on clocks that the tests move."""

import itertools
import logging
import math
import re
from typing import Any

import dspy
import pytest
from gepa.strategies.proposal_sampling import PxNSampling

from dspy_combee import PowerLawBatchSize

from .clocks import CallClock
from .lessons import instruction, is_level_1, learn, learning_lm, metric

STUDENT, REFLECTION = 1, 50


def step_seconds(n):
    """d(n) on that clock: parent and child on n examples, k groups and one merge."""
    k = max(1, math.isqrt(n))
    return 2 * n * STUDENT + (k + (k > 1 and n >= 4)) * REFLECTION


def controlled(lm=None, clock=None, n_train=400, n_val=5, candidates=(5, 10, 20), **options):
    clock = clock or CallClock(STUDENT, REFLECTION)
    lm = lm or learning_lm(latency=clock.latency)
    size = PowerLawBatchSize(candidates=candidates, clock=clock)
    return learn(lm, n_train=n_train, n_val=n_val, **{"reflection_minibatch_size": size, **options}).detailed_results


def profiled(result):
    return [step.n for step in result.steps if step.profiling]


def stop_after(steps, **more):
    """Arguments for gepa that let the search make so many steps."""
    looks = itertools.count()
    return {"stop_callbacks": [lambda state: next(looks) >= steps], **more}


# --- profiling ---------------------------------------------------------------------------------------------


def test_the_first_step_is_cold_and_the_sizes_are_timed_in_turn(caplog):
    with caplog.at_level(logging.INFO, "dspy_combee"):
        result = controlled(max_metric_calls=500, n_val=7, gepa_kwargs=stop_after(6))
    first, *_, fifth = result.steps[:5]
    assert profiled(result) == [5, 5, 10, 20]
    assert result.spent.metric_calls_in("profiling") == 2 * sum(profiled(result)) <= (500 - 7) / 4
    assert [step.seconds for step in result.steps[:4]] == [step_seconds(n) for n in (5, 5, 10, 20)]
    assert fifth.fit.medians == tuple((n, step_seconds(n)) for n in (5, 10, 20))
    assert fifth.n == 40
    assert fifth.size_reason.startswith("n = 40, at most a factor of 2 from 20; n = 70: the plateau")
    assert all(step.fit is None for step in result.steps[:4])
    # Their proposals are kept when accepted.
    assert [(step.accepted, step.candidate) for step in result.steps[:4]] == [(True, n) for n in (1, 2, 3, 4)]
    # The time of a step leaves validation out.
    assert first.validation_seconds == 7 * STUDENT
    assert first.epoch_seconds(400) == step_seconds(5) * 400 / 5
    assert first.epoch_seconds(400, with_validation=True) == (step_seconds(5) + 7) * 400 / 5
    line = next(message for message in caplog.messages if message.startswith("Step 1: n = 5 took"))
    assert f"{first.epoch_seconds(400):.3g} s" in line
    assert f"{first.epoch_seconds(400, with_validation=True):.3g} s with validation" in line


def test_a_budget_too_small_to_profile_fixes_n_and_the_log_says_so(caplog):
    with caplog.at_level(logging.INFO, "dspy_combee"):
        result = controlled(max_metric_calls=200, n_train=30)
    assert profiled(result) == []
    assert result.batch_sizes[0] == 15
    assert result.batch_size_fit is None
    assert any("n = 15, not profiled" in message for message in caplog.messages)
    assert "not profiled" in result.steps[0].size_reason


def test_the_time_is_shared_by_parallel_proposals():
    strategy = {"sampling_strategy": PxNSampling(1, 2)}
    result = controlled(max_metric_calls=900, gepa_kwargs=stop_after(5, **strategy))
    steps = {step.iteration: step for step in result.steps}
    assert [step.n for step in result.steps[:8]] == [5, 5, 5, 5, 10, 10, 20, 20]
    assert steps[2].seconds == 2 * step_seconds(5)
    assert steps[2].epoch_seconds(400) == step_seconds(5) * 400 / 5
    assert steps[5].fit.medians == tuple((n, step_seconds(n)) for n in (5, 10, 20))


# --- what is no measurement --------------------------------------------------------------------------------


def test_a_skipped_step_is_no_measurement(caplog):
    """The first minibatches are perfect already, so GEPA skips them: nothing is timed."""
    seen: list[int] = []

    def first_ten_are_right(gold, pred, trace=None, pred_name=None, pred_trace=None):
        if pred_name is None:
            seen.append(gold.number)
        if 5 < len(seen) <= 5 + 10:  # after the seed's validation
            return dspy.Prediction(score=1.0, feedback="")
        return metric(gold, pred, trace, pred_name, pred_trace)

    with caplog.at_level(logging.INFO, "dspy_combee"):
        result = controlled(max_metric_calls=700, metric=first_ten_are_right, num_threads=1, gepa_kwargs=stop_after(7))
    assert [step.reason for step in result.steps[:2]] == ["all_scores_perfect"] * 2
    assert profiled(result) == [5, 5, 5, 5, 10, 20]
    assert caplog.messages.count("A step with n = 5 is no measurement: all_scores_perfect.") == 2


def test_a_failed_step_is_no_measurement(caplog):
    clock = CallClock(STUDENT, REFLECTION)
    lm = learning_lm((is_level_1, ["of no use"] * 4), latency=clock.latency)  # two groups, two attempts each
    with caplog.at_level(logging.INFO, "dspy_combee"):
        result = controlled(lm, clock, max_metric_calls=700, gepa_kwargs=stop_after(6))
    assert "JSON" in result.steps[0].reason
    assert profiled(result) == [5, 5, 5, 10, 20]
    assert any(message.startswith("A step with n = 5 is no measurement: self: ") for message in caplog.messages)


def test_a_step_that_the_cache_answered_is_no_measurement(caplog):
    clock = CallClock(STUDENT, REFLECTION)
    lm = learning_lm(latency=clock.latency, cache=True)
    options = {"lm": lm, "clock": clock, "max_metric_calls": 500, "gepa_kwargs": stop_after(3)}
    first = controlled(**options)
    assert profiled(first) == [5, 5, 10]
    calls = len(lm.calls)
    options["gepa_kwargs"] = stop_after(6)
    with caplog.at_level(logging.INFO, "dspy_combee"):
        second = controlled(**options)
    assert second.steps[0].minibatch_ids == first.steps[0].minibatch_ids
    assert [step.seconds for step in second.steps[:2]] == [0, 0]
    assert len(lm.calls) > calls, "the third step has a size of its own"
    assert profiled(second)[:4] == [5, 5, 5, 5]
    cached = [message for message in caplog.messages if "is no measurement: the cache answered" in message]
    assert len(cached) == 2
    assert re.search(r"the cache answered (\d+) of its \1 LM calls", cached[0])


def test_a_step_that_the_budget_cut_short_is_no_measurement(caplog):
    with caplog.at_level(logging.INFO, "dspy_combee"):
        result = controlled(max_metric_calls=450)
    last = result.steps[-1]
    assert "all that the trainset and the budget allow" in last.size_reason
    assert f"A step with n = {last.n} is no measurement: the budget cut it short." in caplog.messages
    assert any(message.startswith(f"Minibatch size: n = {last.n}, all that") for message in caplog.messages)
    assert last.n not in dict(result.batch_size_fit.medians)


# --- the choice --------------------------------------------------------------------------------------------


def test_every_step_refines_the_fit_and_says_why_n_is_what_it_is(caplog):
    with caplog.at_level(logging.INFO, "dspy_combee"):
        result = controlled(max_metric_calls=1500, gepa_kwargs=stop_after(10))
    chosen = [step for step in result.steps if step.fit is not None]
    assert len(chosen) > 4
    measured = {5, 10, 20}
    for step in chosen:
        assert {n for n, _ in step.fit.medians} == measured
        if step.n == step.fit.choice:
            assert step.size_reason == step.fit.reason
        assert f"Minibatch size: {step.size_reason}." in caplog.messages
        if step.scores_after and "budget" not in step.size_reason:
            measured = measured | {step.n}
    assert result.batch_size_fit == chosen[-1].fit


def test_an_int_is_clamped_by_the_budget_too_and_the_log_says_so(caplog):
    with caplog.at_level(logging.INFO, "dspy_combee"):
        result = controlled(n_train=40, reflection_minibatch_size=20, max_metric_calls=110)
    assert result.batch_sizes[:3] == (20, 20, 5), "5 + 45 + 45 are spent then, and 5 of the 15 left are reserved"
    assert any("the budget allow instead of 20" in message for message in caplog.messages)


def test_an_injected_clock_makes_runs_equal():
    def account(result):
        return [(step.minibatch_ids, step.size_reason, step.seconds, step.accepted) for step in result.steps]

    one, two = (controlled(max_metric_calls=400, num_threads=n, candidates=(3, 6, 12)) for n in (1, 8))
    assert profiled(one) == [3, 3, 6, 12]
    assert account(one) == account(two)
    assert instruction(one.candidates[one.best_idx]) == instruction(two.candidates[two.best_idx])


@pytest.mark.parametrize("strategy", [None, PxNSampling(2, 2)], ids=["one", "four"])
def test_batch_sizes_given_back_replay_the_run(strategy):
    options: dict[str, Any] = {"max_metric_calls": 700, "gepa_kwargs": {"sampling_strategy": strategy}}
    first = controlled(candidates=(2, 4, 8), **options)
    second = controlled(learning_lm(), reflection_minibatch_size=list(first.batch_sizes), **options)
    assert len(set(first.batch_sizes)) > 3
    assert profiled(first)[-1] == 8
    assert second.batch_sizes == first.batch_sizes
    assert [step.minibatch_ids for step in second.steps] == [step.minibatch_ids for step in first.steps]
    assert [instruction(c) for c in second.candidates] == [instruction(c) for c in first.candidates]


def test_auto_is_the_default_and_runs_on_the_real_clock():
    lm = learning_lm(latency=lambda prompt, rng: 0.002)
    options = {"reflection_minibatch_size": "auto", "max_metric_calls": 1400, "num_threads": 8}
    result = learn(lm, n_train=300, n_val=5, gepa_kwargs=stop_after(7), **options).detailed_results
    assert profiled(result) == [5, 5, 10, 20, 40, 80]
    assert result.batch_size_fit is not None
    assert result.to_dict()["batch_size_fit"]["alpha"] is not None


# --- small trainsets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["auto", 40, [3, 9]], ids=str)
@pytest.mark.parametrize("num_examples", [1, 2, 3, 4, 5, 7])
def test_small_trainsets(num_examples, size):
    lm = learning_lm()
    result = controlled(lm, n_train=num_examples, n_val=3, reflection_minibatch_size=size, max_metric_calls=60)
    assert result.steps
    assert max(result.batch_sizes) <= num_examples
    for step in result.steps:
        assert len(set(step.minibatch_ids)) == step.n
        if step.reductions:
            assert step.k == (math.isqrt(step.n) if step.n >= 4 else 1)
    assert len(lm.calls) > 3
    best = result.candidates[result.best_idx]
    assert set(re.findall(r"rule-answer-(\d+)", instruction(best))) <= {str(i) for i in range(num_examples)}
    assert result.val_aggregate_scores[result.best_idx] > 0
