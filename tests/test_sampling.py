"""What each step draws: minibatches of distinct examples epoch by epoch, within the budget; parents seeded by step."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
from gepa.core.data_loader import ListDataLoader
from gepa.strategies.proposal_sampling import (
    IndependentSampling,
    ProposalTask,
    PxNSampling,
    SameParentSampling,
    SingleMutationSampling,
)
from hypothesis import given
from hypothesis import strategies as st

from dspy_combee.controller.batch_size import StepTiming, resolve_sizer
from dspy_combee.controller.sampling import (
    Budget,
    BudgetedSampling,
    EpochSampler,
    StepSeededSelector,
    resolve_selector,
    tasks_per_step,
)


def sampler(num_examples, sizes, seed=0, num_validation=5, **limits):
    budget = Budget(num_examples, num_validation, **(limits or {"max_metric_calls": 10**6}))
    return EpochSampler(resolve_sizer(sizes, num_examples, 10**6, 1), budget, seed)


def draw(drawer, num_examples, steps, start=0):
    batches = []
    for step in range(start, start + steps):
        batches.append(drawer.draw(range(num_examples), step))
        drawer.observe(StepTiming(len(batches[-1]), 1, 1.0))
    return batches


# --- the budget --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "exact", "draws", "rollouts"),
    [
        (Budget(20, 5, max_metric_calls=12), True, math.inf, 7),
        (Budget(20, 5, max_metric_calls=11), False, math.inf, 6),
        (Budget(20, 5, max_metric_calls=3), False, math.inf, 0),
        (Budget(20, 5, max_metric_calls=9, num_seed_validation=2), True, math.inf, 7),
        (Budget(20, 5, num_epochs=1), True, 20, 40),
        (Budget(30, 5, num_epochs=0.1), True, 3, 6),  # and not 4, by the rounding of 0.1 * 30
        (Budget(7, 5, num_epochs=1.5), True, 11, 22),
    ],
)
def test_what_a_budget_covers(budget, exact, draws, rollouts):
    """It is exact where one whole step fits after the seed's validation."""
    assert (budget.is_exact, budget.num_draws, budget.minibatch_rollouts) == (exact, draws, rollouts)


@pytest.mark.parametrize(
    ("limits", "calls", "drawn", "largest"),
    [
        ({"max_metric_calls": 60}, 10, 0, 20),
        ({"max_metric_calls": 60}, 48, 0, 1),
        ({"max_metric_calls": 600}, 10, 0, 100),
        ({"max_metric_calls": 130, "tasks_per_step": 3}, 10, 0, 15),
        ({"max_metric_calls": 60, "tasks_per_step": 9}, 10, 0, 1),
        ({"num_epochs": 0.03}, 0, 1, 2),
        ({"num_epochs": 1, "tasks_per_step": 4}, 0, 90, 2),
    ],
)
def test_the_largest_minibatch_leaves_room_for_validation(limits, calls, drawn, largest):
    assert Budget(100, 10, **limits).largest_minibatch(calls, drawn) == largest


def test_a_budget_is_spent_when_no_step_fits_and_a_due_merge_reserves_its_worst_case():
    budget = Budget(100, 10, max_metric_calls=60)
    assert [budget.is_spent(calls, 0, merge_may_be_due=False) for calls in (47, 48, 49)] == [False, False, True]
    assert [budget.is_spent(calls, 0, merge_may_be_due=True) for calls in (45, 46)] == [False, True]
    assert [Budget(30, 5, num_epochs=0.1).is_spent(0, drawn, False) for drawn in (2, 3)] == [False, True]


@given(st.integers(1, 50), st.integers(1, 30), st.integers(0, 400), st.lists(st.integers(1, 50), min_size=1))
def test_expected_steps(num_examples, num_validation, spare, sizes):
    budget = Budget(num_examples, num_validation, max_metric_calls=num_validation + spare)
    fewest, most = (budget.steps_of(sizes, all_accepted=accepted) for accepted in (True, False))
    assert 0 <= fewest <= most
    done = [*sizes[:most], *[sizes[-1]] * (most - len(sizes))]
    assert sum(2 * n for n in done) <= spare


# --- the minibatches ---------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.lists(st.integers(1, 60), min_size=1, max_size=25), st.integers(0, 3))
def test_minibatches_are_distinct_full_and_without_replacement_whatever_n_does(num_examples, sizes, seed):
    counts = Counter(dict.fromkeys(range(num_examples), 0))
    for n, batch in zip(sizes, draw(sampler(num_examples, sizes, seed), num_examples, len(sizes)), strict=True):
        assert len(batch) == min(n, num_examples), "n is clamped to the trainset, and nothing is padded"
        assert len(set(batch)) == len(batch)
        counts.update(batch)
        assert max(counts.values()) - min(counts.values()) <= 1, "no example comes twice before another comes once"


def test_epochs_are_shuffled_anew_and_by_the_seed():
    first, second = draw(sampler(30, 30), 30, 2)
    assert first != second
    assert draw(sampler(30, 30), 30, 2) == [first, second]
    assert draw(sampler(30, 30, seed=1), 30, 2) != [first, second]


@given(st.integers(1, 20), st.lists(st.integers(1, 25), min_size=2, max_size=12), st.data())
def test_a_sampler_with_the_state_of_another_draws_what_it_would(num_examples, sizes, data):
    broken_after = data.draw(st.integers(1, len(sizes) - 1))
    whole = draw(sampler(num_examples, sizes), num_examples, len(sizes))
    first, second = sampler(num_examples, sizes), sampler(num_examples, sizes)
    draw(first, num_examples, broken_after)
    second.set_state(first.get_state())
    assert draw(second, num_examples, len(sizes) - broken_after, start=broken_after) == whole[broken_after:]


def test_examples_may_come_and_go_but_for_the_last():
    drawer = sampler(10, 4)
    draw(drawer, 10, 2)
    assert set(drawer.draw(range(3), 2)) == {0, 1, 2}
    assert max(max(batch) for batch in draw(drawer, 20, 5, start=3)) > 9
    with pytest.raises(ValueError, match="empty"):
        drawer.draw([], 9)


def test_the_size_is_decided_once_a_step():
    """All parallel proposals of a step have minibatches of one size, each its own."""
    drawer = sampler(100, [3, 9])
    first = [drawer.draw(range(100), 0) for _ in range(4)]
    assert [len(batch) for batch in first] == [3] * 4
    assert len({i for batch in first for i in batch}) == 12
    drawer.observe(StepTiming(3, 1, 1.0))
    assert len(drawer.draw(range(100), 1)) == 9


# --- the proposals of a step -------------------------------------------------------------------------------


class ThreeAtOnce:
    """A strategy that does not say how many proposals it makes."""

    def sample_tasks(self, *given):
        return SameParentSampling(3).sample_tasks(*given)


class Anyone:
    def select_candidate_idx(self, state):
        return 0


STRATEGIES = {None: 1, SingleMutationSampling(): 1, PxNSampling(2, 3): 6, IndependentSampling(3): 3, ThreeAtOnce(): 1}
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)


@each_strategy
def test_proposals_of_the_strategies_of_gepa(strategy):
    assert tasks_per_step(strategy) == STRATEGIES[strategy]


def state(i=0, spent=0):
    return SimpleNamespace(i=i, total_num_evals=spent, program_candidates=[{"self": "seed"}])


def loader(num_examples):
    return ListDataLoader(list(range(num_examples)))


def tasks_of(strategy, drawer, num_examples, i=0, spent=0):
    sampling = BudgetedSampling(strategy, drawer.budget)
    return sampling.sample_tasks(state(i, spent), Anyone(), drawer, loader(num_examples))


@each_strategy
@given(st.integers(1, 30), st.floats(0.05, 4), st.lists(st.integers(1, 9), min_size=1))
def test_num_epochs_is_that_many_draws(strategy, num_examples, num_epochs, sizes):
    drawer = sampler(num_examples, sizes, num_epochs=num_epochs, tasks_per_step=tasks_per_step(strategy))
    drawn, i = 0, 0
    while not drawer.budget.is_spent(0, drawer.drawn, merge_may_be_due=False):
        tasks = tasks_of(strategy, drawer, num_examples, i=i)
        assert tasks
        drawn += sum(len(task.minibatch_ids) for task in tasks)
        drawer.observe(StepTiming(len(tasks[0].minibatch_ids), len(tasks), 1.0))
        i += 1
    assert drawn == drawer.drawn == math.ceil(round(num_epochs * num_examples, 9))


def test_what_the_budget_cuts_off_is_drawn_next():
    """40 calls pay for two proposals from 7 examples; the third would have had the rest of the epoch."""
    drawer = sampler(21, 7, num_validation=6, max_metric_calls=46)
    first = tasks_of(ThreeAtOnce(), drawer, 21, spent=6)
    assert [len(task.minibatch_ids) for task in first] == [7, 7]
    second = tasks_of(None, drawer, 21, i=1, spent=6)
    seen = [i for task in [*first, *second] for i in task.minibatch_ids]
    assert sorted(seen) == list(range(21))


def test_a_minibatch_of_a_sampler_of_the_users_own_is_cut_to_fit():
    class Everything:
        def sample_tasks(self, state, candidate_selector, batch_sampler, trainset):
            ids = list(range(10))
            return [ProposalTask(0, state.program_candidates[0], ids, trainset.fetch(ids))]

    sampling = BudgetedSampling(Everything(), Budget(10, 5, max_metric_calls=20))
    (task,) = sampling.sample_tasks(state(spent=5), Anyone(), object(), loader(10))
    assert task.minibatch_ids == task.minibatch == [0, 1, 2, 3, 4]


def test_without_an_exact_budget_nothing_is_cut():
    drawer = sampler(10, 10, num_validation=5, max_metric_calls=8, tasks_per_step=4)
    assert [len(task.minibatch_ids) for task in tasks_of(PxNSampling(2, 2), drawer, 10, spent=5)] == [10] * 4


# --- the parents -------------------------------------------------------------------------------------------


class Numbered:
    """A selector that shows its random source."""

    def __init__(self, rng):
        self.rng = rng

    def select_candidate_idx(self, state):
        return self.rng.randrange(10**9)


def test_the_draw_of_a_parent_depends_on_seed_step_and_call_alone():
    def choices(selector, steps):
        return [[selector.select_candidate_idx(state(i)) for _ in range(2)] for i in steps]

    whole = choices(StepSeededSelector(Numbered, seed=3), range(4))
    assert choices(StepSeededSelector(Numbered, seed=3), range(2, 4)) == whole[2:], "after a resume"
    assert choices(StepSeededSelector(Numbered, seed=4), range(4)) != whole
    assert len({number for step in whole for number in step}) == 8


@pytest.mark.parametrize("name", ["pareto", "current_best", "epsilon_greedy", "top_k_pareto"])
def test_selectors_by_name_are_seeded_by_step(name):
    assert isinstance(resolve_selector(name, 0), StepSeededSelector)


@pytest.mark.parametrize("strategy", ["unheard of", Anyone()])
def test_other_selectors_are_left_to_gepa(strategy):
    assert resolve_selector(strategy, 0) is strategy
