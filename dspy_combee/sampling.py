"""What each step draws: its minibatch and its parent candidate.

Both depend on the seed and on the place in the run alone, so that a resumed run draws what the unbroken one drew.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from gepa.proposer.reflective_mutation.base import CandidateSelector
from gepa.strategies.batch_sampler import BatchSampler
from gepa.strategies.candidate_selector import (
    CurrentBestCandidateSelector,
    EpsilonGreedyCandidateSelector,
    ParetoCandidateSelector,
    TopKParetoCandidateSelector,
)

from dspy_combee.budget import Budget
from dspy_combee.sizes import MinibatchSizer, SizeDecision, StepTiming


class EpochSampler(BatchSampler[Any, Any]):
    """Draws minibatches of distinct examples, epoch after epoch, without padding.

    Every example comes once an epoch. A minibatch may straddle two epochs; what it took from the end of one it
    does not take again from the start of the next. Each call gives the next minibatch, also within a step.

    Args:
        sizer: Decides n for each step.
        budget: What a step may still spend.
        seed: Seed of the order of each epoch.

    Attributes:
        decision: The size of the step under way; None before the first.
        limit: What the budget allowed for it.
        drawn: Examples drawn so far.
    """

    def __init__(self, sizer: MinibatchSizer, budget: Budget, seed: int | None = 0) -> None:
        self.sizer = sizer
        self.budget = budget
        self.seed = seed
        self.decision: SizeDecision | None = None
        self.limit = 0
        self.drawn = 0
        self._iteration: int | None = None
        self._epoch = 0
        self._queue: list[Any] = []

    def next_minibatch_ids(self, loader: Any, state: Any) -> list[Any]:
        """The ids of the next minibatch.

        Raises:
            ValueError: If the trainset is empty.
        """
        ids = list(loader.all_ids())
        if not ids:
            raise ValueError("Cannot draw a minibatch from an empty trainset.")
        if self.decision is None or state.i != self._iteration:
            self._iteration = state.i
            self.limit = min(len(ids), self.budget.largest_minibatch(state.total_num_evals, self.drawn))
            self.decision = self.sizer.next_size(self.limit)
        batch = self._draw(ids, self.decision.n)
        self.drawn += len(batch)
        return batch

    def _draw(self, ids: list[Any], n: int) -> list[Any]:
        known = set(ids)
        batch = [i for i in self._queue if i in known][:n]
        taken = set(batch)
        self._queue = [i for i in self._queue if i in known and i not in taken]
        while len(batch) < n:
            epoch = random.Random(f"{self.seed}/epoch/{self._epoch}").sample(ids, len(ids))
            self._epoch += 1
            fresh = [i for i in epoch if i not in taken][: n - len(batch)]
            batch += fresh
            used = set(fresh)
            self._queue = [i for i in epoch if i not in used]
        return batch

    def observe(self, timing: StepTiming) -> None:
        """A step has ended; a size that the budget cut short is no measurement of the sizer's choice."""
        self.sizer.observe(timing)

    def get_state(self) -> dict[str, Any]:
        """What a resumed run needs to go on drawing."""
        return {
            "epoch": self._epoch,
            "queue": list(self._queue),
            "drawn": self.drawn,
            "sizer": self.sizer.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from the state of another sampler."""
        self._epoch = state["epoch"]
        self._queue = list(state["queue"])
        self.drawn = state["drawn"]
        self.sizer.set_state(state["sizer"])


class StepSeededSelector(CandidateSelector):
    """One of gepa's candidate selectors with a fresh random source for each call.

    Args:
        make_selector: Makes the selector from a random source.
        seed: Seed; the source of a call depends on it, the iteration and the number of the call in it.
    """

    def __init__(self, make_selector: Callable[[random.Random], Any], seed: int | None = 0) -> None:
        self.make_selector = make_selector
        self.seed = seed
        self._iteration: int | None = None
        self._calls = 0

    def select_candidate_idx(self, state: Any) -> int:
        """Index of the candidate to change."""
        self._calls = self._calls + 1 if state.i == self._iteration else 0
        self._iteration = state.i
        rng = random.Random(f"{self.seed}/select/{state.i}/{self._calls}")
        index: int = self.make_selector(rng).select_candidate_idx(state)
        return index


def _current_best(rng: random.Random) -> Any:
    return CurrentBestCandidateSelector()


def _epsilon_greedy(rng: random.Random) -> Any:
    return EpsilonGreedyCandidateSelector(epsilon=0.1, rng=rng)


def _top_k_pareto(rng: random.Random) -> Any:
    return TopKParetoCandidateSelector(k=5, rng=rng)


SELECTORS: dict[str, Callable[[random.Random], Any]] = {
    "pareto": ParetoCandidateSelector,
    "current_best": _current_best,
    "epsilon_greedy": _epsilon_greedy,
    "top_k_pareto": _top_k_pareto,
}


def resolve_selector(strategy: Any, seed: int | None) -> Any:
    """Gepa's selector of that name, seeded by step; anything else goes to gepa as it is (which checks it)."""
    if isinstance(strategy, str) and strategy in SELECTORS:
        return StepSeededSelector(SELECTORS[strategy], seed)
    return strategy
