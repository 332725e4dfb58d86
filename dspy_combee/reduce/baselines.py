"""The paper's baselines, as aggregators: a flat call, Top-K retrieval, and summaries (paper, section 4.1)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from dspy_combee.calls.executors import Executor
from dspy_combee.records.checks import check_int
from dspy_combee.records.types import Reduction
from dspy_combee.reduce.tree import CallFunction, NodeCall, Plan, ReductionTask, reduce_in_waves

Embed = Callable[[list[str]], Any]


class FlatAggregator:
    """Put all records in one call: the naive large batch, which loses lessons to context overload (section 2.2)."""

    def __repr__(self) -> str:
        return "FlatAggregator()"

    def aggregate(self, tasks: Sequence[ReductionTask], call: CallFunction, executor: Executor) -> list[Reduction]:
        """See `Aggregator.aggregate`."""
        return reduce_in_waves([_one_call(task, range(len(task.records))) for task in tasks], call, executor)


class TopKAggregator:
    """Put one record per cluster in one call (paper, section 4.1).

    The records are embedded and clustered by k-means; from each cluster the record nearest to its centre is kept.
    It needs scikit-learn: `pip install dspy-combee[top-k]`.

    Args:
        num_clusters: K, at least 1; the paper's is 5.
        embedder: Takes texts and gives one vector each, such as a `dspy.Embedder` (what it costs is not part of
            the account). Default: TF-IDF, which is ours and not the paper's.

    Raises:
        TypeError: If `num_clusters` is no int, or `embedder` cannot be called.
        ValueError: If `num_clusters` is below 1.
        ImportError: If scikit-learn is not installed.
    """

    def __init__(self, num_clusters: int = 5, embedder: Embed | None = None) -> None:
        self.num_clusters = check_int("num_clusters", num_clusters)
        if embedder is not None and not callable(embedder):
            raise TypeError(f"embedder must take a list of texts, got {type(embedder).__name__}.")
        if find_spec("sklearn") is None:  # Said here, so that no run fails after its rollouts.
            raise ImportError("Top-K retrieval clusters records with scikit-learn: pip install 'dspy-combee[top-k]'.")
        self.embedder = embedder

    def __repr__(self) -> str:
        return f"TopKAggregator(num_clusters={self.num_clusters}, embedder={self.embedder!r})"

    def aggregate(self, tasks: Sequence[ReductionTask], call: CallFunction, executor: Executor) -> list[Reduction]:
        """See `Aggregator.aggregate`."""
        return reduce_in_waves([_one_call(task, self._chosen(task)) for task in tasks], call, executor)

    def _chosen(self, task: ReductionTask) -> Sequence[int]:
        """Return the positions of the records that are kept, in order."""
        texts = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False, default=str) for r in task.records]
        if len(texts) <= self.num_clusters:
            return range(len(texts))
        vectors = (self.embedder or _tfidf)(texts)
        if len(vectors) != len(texts):
            raise ValueError(f"The embedder gave {len(vectors)} vectors for {len(texts)} texts.")
        return nearest_to_centres(vectors, self.num_clusters, task.rng)


class SummarizeAggregator:
    """Summarize each record, all at once, then make one call over the summaries (paper, section 4.1).

    At least half of the summaries must succeed.
    """

    def __repr__(self) -> str:
        return "SummarizeAggregator()"

    def aggregate(self, tasks: Sequence[ReductionTask], call: CallFunction, executor: Executor) -> list[Reduction]:
        """See `Aggregator.aggregate`."""
        return reduce_in_waves([_summarize(task) for task in tasks], call, executor)


def _one_call(task: ReductionTask, positions: Iterable[int]) -> Plan:
    chosen = [(f"r{position}", task.records[position]) for position in positions]
    if not chosen:
        return task.reduction([], error="there are no records")
    ids, records = zip(*chosen, strict=True)
    (node,) = yield [NodeCall(task, "1.0", "propose", ids, records)]
    return task.reduction([node], node.output, _failure(node.error))


def _summarize(task: ReductionTask) -> Plan:
    if not task.records:
        return task.reduction([], error="there are no records")
    summaries = yield [
        NodeCall(task, f"1.{position}", "summarize", (f"r{position}",), (record,))
        for position, record in enumerate(task.records)
    ]
    failures = [node.error for node in summaries if node.output is None]
    if 2 * len(failures) > len(summaries):
        error = f"{len(failures)} of {len(summaries)} summaries failed; last: {failures[-1]}"
        return task.reduction(summaries, error=error)
    ids, texts = zip(*((node.id, node.output) for node in summaries if node.output is not None), strict=True)
    (root,) = yield [NodeCall(task, "2.0", "propose", ids, texts)]
    return task.reduction([*summaries, root], root.output, _failure(root.error))


def _failure(error: str | None) -> str | None:
    return None if error is None else f"the reflection call failed: {error}"


def nearest_to_centres(vectors: Any, num_clusters: int, rng: random.Random) -> tuple[int, ...]:
    """Cluster vectors by k-means, and give the position of the one nearest to the centre of each cluster.

    Args:
        vectors: One row for each record.
        num_clusters: K.
        rng: Source of the first centres.

    Returns:
        The positions in order: K of them, or as many as there are different vectors if that is fewer.

    Raises:
        ValueError: If the vectors are no matrix of finite numbers.
    """
    import numpy as np
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    rows = np.asarray(vectors, dtype=float)
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise ValueError(f"The embedder must give one vector of finite numbers for each text, got shape {rows.shape}.")
    k = min(num_clusters, len(np.unique(rows, axis=0)))
    with threadpool_limits(1):  # Several threads add up in any order, and rounding would change the choice.
        found = KMeans(k, n_init=5, max_iter=20, random_state=rng.randrange(2**32)).fit(rows)
    distances = ((rows - found.cluster_centers_[found.labels_]) ** 2).sum(axis=1)
    order = np.lexsort((np.arange(len(rows)), distances, found.labels_))
    _, first = np.unique(found.labels_[order], return_index=True)
    return tuple(sorted(int(position) for position in order[first]))


def _tfidf(texts: list[str]) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(token_pattern=r"(?u)\S+").fit_transform(texts).toarray()
