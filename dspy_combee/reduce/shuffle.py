"""Shuffle: duplicate the records and deal them into groups (paper, section 3.2)."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def default_num_groups(n: int) -> int:
    """Return the paper's k = floor(sqrt(n)) (section 3.1); 1 where n < 4."""
    return max(1, math.isqrt(n))


def effective_duplication(duplication_factor: int, num_groups: int) -> int:
    """Return the p that k groups can carry: the copies of a record go to different groups, never to all."""
    return max(1, min(duplication_factor, num_groups - 1))


def augmented_shuffle(
    records: Sequence[T], num_groups: int, duplication_factor: int, rng: random.Random
) -> list[list[T]]:
    """Deal p copies of every record into k groups at random (paper, section 3.2).

    Every record appears exactly p times, in p different groups, and the sizes of the groups differ by at most
    one. Pure: nothing but `rng` is advanced.

    Args:
        records: The n records.
        num_groups: k, from 1 to n.
        duplication_factor: p, from 1 to k; see `effective_duplication`.
        rng: Source of the deal.

    Returns:
        k lists of records (the records themselves, not copies of them).

    Raises:
        ValueError: If k or p is out of range.
    """
    n = len(records)
    if not 1 <= num_groups <= max(1, n):
        raise ValueError(f"num_groups must be from 1 to the number of records ({n}), got {num_groups}.")
    if not 1 <= duplication_factor <= num_groups:
        raise ValueError(f"duplication_factor must be from 1 to num_groups ({num_groups}), got {duplication_factor}.")
    groups: list[list[T]] = [[] for _ in range(num_groups)]
    # The least filled groups take the next record: sizes can then never differ by more than one.
    emptiest = [(0, rng.random(), index) for index in range(num_groups)]
    heapq.heapify(emptiest)
    for position in rng.sample(range(n), n):
        taken = [heapq.heappop(emptiest) for _ in range(duplication_factor)]
        for size, _, index in taken:
            groups[index].append(records[position])
            heapq.heappush(emptiest, (size + 1, rng.random(), index))
    for group in groups:
        rng.shuffle(group)
    rng.shuffle(groups)
    return groups


def split_evenly(items: Sequence[T], parts: int) -> list[list[T]]:
    """Cut `items` into `parts` runs, in order, whose lengths differ by at most one."""
    size, larger = divmod(len(items), parts)
    bounds = [index * size + min(index, larger) for index in range(parts + 1)]
    return [list(items[start:end]) for start, end in itertools.pairwise(bounds)]
