"""Fitting the two models of a reflection call on the paper's flat Formula figures.

A fit asks for many runs, so it is made on a sketch of the loop: the same losses and the same shuffle, but the lengths
of prompts are added up from their parts (`Lengths`, measured on real prompts) and no prompt is written. It knows no
duplicates. `context_overload` prints what the real optimizer makes of the fitted models.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from statistics import mean

from benchmarks._overload_task import BASE_ABILITY, LINES, MAX_LESSONS, REFLECTION_TOKENS, Novelty
from dspy_combee.reduce.shuffle import augmented_shuffle, default_num_groups, effective_duplication
from dspy_combee.testing import CapacityLoss, Loss, PowerLoss

FORMULA = {"samples": 500, "large batch": 100, "bullets at batch 1": 264, "bullets at large batch": 21}
"""Paper, section 2.2."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the parts of a message."""

    curator: int = 65
    reflector: int = 265
    bullet: int = 40
    lesson: int = 22
    reflection: int = REFLECTION_TOKENS - 40


@dataclass(frozen=True)
class Sketch:
    """What came of a run: lessons in the playbook, and the mean length of the curators' messages."""

    lessons: float
    curator_tokens: float


@dataclass(frozen=True)
class Model:
    """A fitted model.

    Attributes:
        name: What to call it.
        loss: What a call keeps.
        novelty: What there is to learn; fitted with it.
    """

    name: str
    loss: Loss
    novelty: Novelty


def sketch(
    loss: Loss, novelty: Novelty, n: int, num_train: int, p: int | None, seed: int, lengths: Lengths = Lengths()
) -> Sketch:
    """One run of the loop; `p` is None for a flat one."""
    rng = random.Random(seed)
    total = round(novelty.num_lessons / (1 - BASE_ABILITY))
    cumulative = _cumulative(total, novelty.exponent)
    known: set[int] = set()
    read: list[int] = []
    for start in range(0, num_train, n):
        size = min(n, num_train - start)
        playbook = lengths.bullet * len(known)
        reflections = []
        for _ in range(size):
            lines = rng.choices(range(total), cum_weights=cumulative, k=LINES)
            new = list(dict.fromkeys(line for line in lines if line % 2 and line not in known))
            kept = loss.keep(new, lengths.reflector + playbook + lengths.lesson * len(new), rng)  # type: ignore
            if kept:
                reflections.append(kept)
        for group in _groups(reflections, p, rng):
            items = list(dict.fromkeys(line for kept in group for line in kept))
            told = lengths.lesson * sum(map(len, group))
            read.append(lengths.curator + playbook + lengths.reflection * len(group) + told)
            known |= set(loss.keep(items, read[-1], rng))  # type: ignore
    return Sketch(len(known), mean(read or [0]))


@lru_cache(maxsize=4)
def _cumulative(total: int, exponent: float) -> list[float]:
    return list(accumulate((rank + 1) ** -exponent for rank in range(total)))


def _groups(reflections: list[list[int]], p: int | None, rng: random.Random) -> list[list[list[int]]]:
    if not reflections:
        return []
    if p is None or len(reflections) < 4:
        return [reflections]
    k = default_num_groups(len(reflections))
    return augmented_shuffle(reflections, k, effective_duplication(p, k), rng)


def sketches(loss: Loss, novelty: Novelty, n: int, num_train: int, p: int | None = None, **options: object) -> Sketch:
    """The mean of some runs."""
    runs = 60 if n > 20 else 6
    made = [sketch(loss, novelty, n, num_train, p, seed, **options) for seed in range(runs)]  # type: ignore
    return Sketch(mean(item.lessons for item in made), mean(item.curator_tokens for item in made))


def fit_capacity(lengths: Lengths = Lengths()) -> Model:
    """C from the large batch alone: bullets over calls. The number of lessons so that batch 1 leaves what it leaves."""
    calls = FORMULA["samples"] / FORMULA["large batch"]
    loss = CapacityLoss(round(FORMULA["bullets at large batch"] / calls))
    return Model("capacity", loss, _fit_novelty(loss, lengths))


def fit_power(lengths: Lengths = Lengths(), factor: float = 1.0) -> Model:
    """L0, beta and the number of lessons.

    Two figures cannot fix three numbers. L0 is set to the mean length of a message that reads one record, which is
    what curators read at batch 1, playbook included, times `factor`; beta follows from the large batch, the number of
    lessons from batch 1.
    """
    novelty, one_record, beta = Novelty(1200), 4000.0, 1.0
    target = FORMULA["bullets at large batch"]
    for _ in range(4):
        size = round(factor * one_record)
        beta = _bisect(partial(_large_batch, size, novelty, lengths), 0.2, 12, target)
        loss = PowerLoss(beta, size)
        novelty = _fit_novelty(loss, lengths)
        one_record = sketches(loss, novelty, 1, FORMULA["samples"], lengths=lengths).curator_tokens
    return Model("power", PowerLoss(round(beta, 2), round(factor * one_record, -1)), novelty)  # type: ignore


def _large_batch(size: int, novelty: Novelty, lengths: Lengths, beta: float) -> float:
    loss = PowerLoss(beta, size)
    return sketches(loss, novelty, FORMULA["large batch"], FORMULA["samples"], lengths=lengths).lessons


def _fit_novelty(loss: Loss, lengths: Lengths) -> Novelty:
    def batch_1(log_lessons: float) -> float:
        novelty = Novelty(round(math.exp(log_lessons)))
        return sketches(loss, novelty, 1, FORMULA["samples"], lengths=lengths).lessons

    found = _bisect(batch_1, math.log(300), math.log(MAX_LESSONS), FORMULA["bullets at batch 1"])
    return Novelty(round(math.exp(found), -1))  # type: ignore


def _bisect(function: Callable[[float], float], low: float, high: float, target: float) -> float:
    """Where a monotonic function, noisy but seeded, crosses the target; an end of the range where it does not."""
    rising = function(low) < function(high)
    for _ in range(9):
        middle = (low + high) / 2
        if (function(middle) < target) == rising:
            low = middle
        else:
            high = middle
    return (low + high) / 2
