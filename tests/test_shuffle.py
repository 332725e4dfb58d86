import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_combee.reduce.shuffle import augmented_shuffle, default_num_groups, effective_duplication, split_evenly


@st.composite
def deals(draw):
    n = draw(st.integers(1, 120))
    k = draw(st.integers(1, n))
    p = draw(st.integers(1, min(k, 6)))
    return n, k, p, draw(st.integers(0, 2**32))


def deal(n, k, p, seed=0):
    return augmented_shuffle([f"r{i}" for i in range(n)], k, p, random.Random(seed))


@given(deals())
def test_every_record_is_in_exactly_p_different_groups_of_nearly_equal_size(case):
    n, k, p, seed = case
    groups = deal(n, k, p, seed)
    assert len(groups) == k
    assert Counter(record for group in groups for record in group) == {f"r{i}": p for i in range(n)}
    assert all(len(set(group)) == len(group) for group in groups)
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1


@given(deals())
def test_the_deal_depends_on_the_random_source_alone_and_changes_no_input(case):
    n, k, p, seed = case
    records = [object() for _ in range(n)]
    before = list(records)
    first = augmented_shuffle(records, k, p, random.Random(seed))
    second = augmented_shuffle(records, k, p, random.Random(seed))
    assert records == before
    assert first == second
    assert {id(record) for group in first for record in group} == {id(record) for record in records}


@given(st.integers(0, 5000))
def test_split_evenly_keeps_order_and_differs_by_one_at_most(seed):
    rng = random.Random(seed)
    items = list(range(rng.randrange(0, 60)))
    parts = split_evenly(items, rng.randrange(1, 12))
    assert [item for part in parts for item in part] == items
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("n", [16, 40, 100, 1000])
def test_paper_sized_batches(n, p):
    k = default_num_groups(n)
    groups = deal(n, k, effective_duplication(p, k))
    homes = Counter(record for group in groups for record in set(group))
    assert set(homes.values()) == {p}
    assert {len(group) for group in groups} <= {n * p // k, n * p // k + 1}


@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (3, 1), (4, 2), (8, 2), (9, 3), (40, 6), (99, 9), (100, 10), (10_000, 100)]
)
def test_default_num_groups_is_the_floor_of_the_square_root(n, k):
    assert default_num_groups(n) == k


@pytest.mark.parametrize(
    ("p", "k", "expected"),
    [(2, 1, 1), (2, 2, 1), (2, 3, 2), (3, 3, 2), (3, 4, 3), (1, 10, 1), (50, 10, 9)],
)
def test_copies_never_fill_every_group(p, k, expected):
    assert effective_duplication(p, k) == expected


def test_different_seeds_deal_differently_and_groups_are_not_contiguous():
    assert deal(40, 6, 2, seed=1) != deal(40, 6, 2, seed=2)
    neighbours = sum(
        abs(int(a[1:]) - int(b[1:])) == 1 for group in deal(100, 10, 2) for a, b in itertools.pairwise(group)
    )
    assert neighbours < 20, "a random order leaves few neighbours side by side"


def test_records_meet_different_records_in_their_groups():
    groups = deal(100, 10, 2)
    companions = {f"r{i}": [set(group) for group in groups if f"r{i}" in group] for i in range(100)}
    assert all(first != second for first, second in companions.values())


def test_an_empty_batch_deals_into_one_empty_group():
    assert augmented_shuffle([], 1, 1, random.Random(0)) == [[]]


@pytest.mark.parametrize(
    ("k", "p", "name"), [(0, 1, "num_groups"), (5, 1, "num_groups"), (2, 3, "duplication"), (2, 0, "duplication")]
)
def test_numbers_out_of_range_are_refused_by_name(k, p, name):
    with pytest.raises(ValueError, match=name):
        augmented_shuffle(["a", "b", "c", "d"], k, p, random.Random(0))
