"""What each step draws: minibatches of distinct examples epoch by epoch, and parents seeded by step."""

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

from dspy_combee.controller.batch_size import FixedSize, ReplayedSizes, StepTiming
from dspy_combee.controller.sampling import (
    Budget,
    BudgetedSampling,
    EpochSampler,
    StepSeededSelector,
    resolve_selector,
    tasks_per_step,
)


def loader(num_examples):
    return ListDataLoader(list(range(num_examples)))


def budget(num_examples, num_validation=5, **limits):
    return Budget(num_examples, num_validation, **(limits or {"max_metric_calls": 10**6}))


def sampler(num_examples, sizes, seed=0, **limits):
    sizer = FixedSize(sizes) if isinstance(sizes, int) else ReplayedSizes(sizes)
    return EpochSampler(sizer, budget(num_examples, **limits), seed)


def state(i=0, spent=0):
    return SimpleNamespace(i=i, total_num_evals=spent, program_candidates=[{"self": "seed"}])


def draw(drawer, num_examples, steps, start=0):
    batches = []
    for i in range(start, start + steps):
        batches.append(drawer.next_minibatch_ids(loader(num_examples), state(i)))
        drawer.observe(StepTiming(len(batches[-1]), 1, 1.0))
    return batches


# --- the minibatches ---------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.lists(st.integers(1, 60), min_size=1, max_size=25), st.integers(0, 3))
def test_minibatches_are_distinct_full_and_without_replacement_whatever_n_does(num_examples, sizes, seed):
    counts = Counter(dict.fromkeys(range(num_examples), 0))
    for n, batch in zip(sizes, draw(sampler(num_examples, sizes, seed), num_examples, len(sizes)), strict=True):
        assert len(batch) == min(n, num_examples), "n is clamped to the trainset, and nothing is padded"
        assert len(set(batch)) == len(batch)
        counts.update(batch)
        assert max(counts.values()) - min(counts.values()) <= 1, "no example comes twice before another comes once"


@given(st.integers(1, 30), st.integers(1, 30))
def test_each_epoch_holds_every_example_once_when_n_divides_it(n, batches_per_epoch):
    num_examples = n * batches_per_epoch
    batches = draw(sampler(num_examples, n), num_examples, 2 * batches_per_epoch)
    for epoch in (batches[:batches_per_epoch], batches[batches_per_epoch:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(num_examples))


def test_minibatches_straddle_epochs():
    first, second, third = draw(sampler(5, 3), 5, 3)
    assert len({*first, *second}) == 5, "the second takes the two that were left, and one of the next epoch"
    assert len(second) == len(third) == 3
    assert len({*second[2:], *third}) == 4


def test_epochs_are_shuffled_anew_and_by_the_seed():
    first, second = draw(sampler(30, 30), 30, 2)
    assert first != second
    assert draw(sampler(30, 30), 30, 2) == [first, second]
    assert draw(sampler(30, 30, seed=1), 30, 2) != [first, second]


@given(st.integers(1, 20), st.lists(st.integers(1, 25), min_size=2, max_size=12), st.data())
def test_a_sampler_with_the_state_of_another_draws_what_it_would(num_examples, sizes, data):
    broken_after = data.draw(st.integers(1, len(sizes) - 1))
    whole = draw(sampler(num_examples, sizes), num_examples, len(sizes))
    first = sampler(num_examples, sizes)
    draw(first, num_examples, broken_after)
    second = sampler(num_examples, sizes)
    second.set_state(first.get_state())
    assert draw(second, num_examples, len(sizes) - broken_after, start=broken_after) == whole[broken_after:]


def test_a_resumed_run_may_change_the_kind_of_its_size():
    first = sampler(10, 3)
    draw(first, 10, 2)
    second = sampler(10, [4, 2])
    second.set_state(first.get_state())
    assert [len(batch) for batch in draw(second, 10, 2, start=2)] == [4, 2]


def test_examples_may_come_and_go():
    drawer = sampler(10, 4)
    draw(drawer, 10, 2)
    assert set(drawer.next_minibatch_ids(loader(3), state(2))) == {0, 1, 2}
    assert max(max(batch) for batch in draw(drawer, 20, 5, start=3)) > 9


def test_an_empty_trainset_is_refused():
    with pytest.raises(ValueError, match="empty"):
        sampler(1, 3).next_minibatch_ids(loader(0), state())


def test_the_size_is_decided_once_a_step():
    """All parallel proposals of a step have minibatches of one size, each its own."""
    drawer = sampler(100, [3, 9])
    first = [drawer.next_minibatch_ids(loader(100), state(0)) for _ in range(4)]
    assert [len(batch) for batch in first] == [3] * 4
    assert len({i for batch in first for i in batch}) == 12
    drawer.observe(StepTiming(3, 1, 1.0))
    assert len(drawer.next_minibatch_ids(loader(100), state(1))) == 9


# --- the budget of a step ----------------------------------------------------------------------------------


class ThreeAtOnce:
    """A strategy that does not say how many proposals it makes."""

    def sample_tasks(self, state, candidate_selector, batch_sampler, trainset):
        return SameParentSampling(3).sample_tasks(state, candidate_selector, batch_sampler, trainset)


STRATEGIES = [None, SingleMutationSampling(), PxNSampling(2, 2), IndependentSampling(3), ThreeAtOnce()]


class Anyone:
    def select_candidate_idx(self, state):
        return 0


def tasks_of(strategy, drawer, num_examples, i=0, spent=0):
    sampling = BudgetedSampling(strategy, drawer.budget)
    return sampling.sample_tasks(state(i, spent), Anyone(), drawer, loader(num_examples))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
@given(
    num_examples=st.integers(1, 30),
    num_validation=st.integers(1, 20),
    n=st.integers(1, 30),
    left=st.integers(0, 200),
)
def test_a_step_costs_no_more_than_is_left_and_makes_at_least_one_proposal(
    strategy, num_examples, num_validation, n, left
):
    smallest = 2 + num_validation
    spent = num_validation
    limits = {"max_metric_calls": spent + smallest + left, "tasks_per_step": tasks_per_step(strategy)}
    drawer = sampler(num_examples, n, num_validation=num_validation, **limits)
    tasks = tasks_of(strategy, drawer, num_examples, spent=spent)
    assert tasks
    assert all(task.minibatch_ids for task in tasks)
    cost = sum(2 * len(task.minibatch_ids) + num_validation for task in tasks)
    assert spent + cost <= limits["max_metric_calls"]
    assert drawer.drawn == sum(len(task.minibatch_ids) for task in tasks)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
@given(num_examples=st.integers(1, 30), num_epochs=st.floats(0.05, 4), sizes=st.lists(st.integers(1, 9), min_size=1))
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

    sampling = BudgetedSampling(Everything(), budget(10, 5, max_metric_calls=20))
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
