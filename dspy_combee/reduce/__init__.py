"""Shuffle and Reduce: from reflection records to one proposal (paper, sections 3.1 and 3.2)."""

from __future__ import annotations

from collections.abc import Callable

from dspy_combee.reduce.baselines import FlatAggregator, SummarizeAggregator, TopKAggregator
from dspy_combee.reduce.tree import Aggregator, TreeAggregator

AGGREGATORS: dict[str, Callable[[], Aggregator]] = {
    "tree": TreeAggregator,
    "flat": FlatAggregator,
    "top_k": TopKAggregator,
    "summarize": SummarizeAggregator,
}


def resolve_aggregator(aggregator: str | Aggregator) -> Aggregator:
    """Return the aggregator of that name, or the one given.

    Raises:
        ValueError: If no aggregator has that name.
        TypeError: If it is neither a name nor an `Aggregator`.
        ImportError: If `"top_k"` lacks scikit-learn.
    """
    if isinstance(aggregator, str):
        if aggregator not in AGGREGATORS:
            raise ValueError(f"Unknown aggregator {aggregator!r}; known are {sorted(AGGREGATORS)}.")
        return AGGREGATORS[aggregator]()
    if isinstance(aggregator, type) or not isinstance(aggregator, Aggregator):
        raise TypeError(f"aggregator must be a name or an Aggregator, got {aggregator!r}.")
    return aggregator
