"""The paper's baselines, as aggregators: a flat call, Top-K retrieval, and summaries (paper, section 4.1)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from dspy_combee.calls.executors import Executor
from dspy_combee.records.types import ProposalNode, Reduction
from dspy_combee.reduce.tree import CallFunction, NodeCall, ReductionTask

Embed = Callable[[list[str]], Any]

_STARTS = 5
_ITERATIONS = 20


class FlatAggregator:
    """All records in one call: the naive large batch that loses lessons to context overload (paper, section 2.2)."""

    def __repr__(self) -> str:
        return "FlatAggregator()"

    def aggregate(self, tasks: Sequence[ReductionTask], call: CallFunction, executor: Executor) -> list[Reduction]:
        """See `Aggregator.aggregate`."""
        return _one_call_each([(task, tuple(range(len(task.records)))) for task in tasks], call, executor)


class TopKAggregator:
    """One record per cluster goes into one call (paper, section 4.1).

    The records are embedded and clustered by k-means; from each cluster the record nearest to its centre is kept.

    Args:
        num_clusters: K, at least 1; the paper's is 5.
        embedder: Takes texts and gives one vector each, such as a `dspy.Embedder` (what it costs is not part of
            the account). Default: TF-IDF from scikit-learn (`pip install dspy-combee[tfidf]`), which is ours and
            not the paper's.

    Raises:
        TypeError: If `num_clusters` is no int, or `embedder` cannot be called.
        ValueError: If `num_clusters` is below 1.
        ImportError: If there is no embedder and scikit-learn is not installed.
    """

    def __init__(self, num_clusters: int = 5, embedder: Embed | None = None) -> None:
        if isinstance(num_clusters, bool) or not isinstance(num_clusters, int):
            raise TypeError(f"num_clusters must be an int of at least 1, got {num_clusters!r}.")
        if num_clusters < 1:
            raise ValueError(f"num_clusters must be at least 1, got {num_clusters}.")
        if embedder is not None and not callable(embedder):
            raise TypeError(f"embedder must take a list of texts, got {type(embedder).__name__}.")
        self.num_clusters = num_clusters
        self.embedder: Embed = _tfidf() if embedder is None else embedder

    def __repr__(self) -> str:
        return f"TopKAggregator(num_clusters={self.num_clusters}, embedder={self.embedder!r})"

    def aggregate(self, tasks: Sequence[ReductionTask], call: CallFunction, executor: Executor) -> list[Reduction]:
        """See `Aggregator.aggregate`."""
        return _one_call_each([(task, self._chosen(task)) for task in tasks], call, executor)

    def _chosen(self, task: ReductionTask) -> tuple[int, ...]:
        """Positions of the records that are kept, in order."""
        texts = [_text(record) for record in task.records]
        if len(texts) <= self.num_clusters:
            return tuple(range(len(texts)))
        vectors = self.embedder(texts)
        if len(vectors) != len(texts):
            raise ValueError(f"The embedder gave {len(vectors)} vectors for {len(texts)} texts.")
        return nearest_to_centres(vectors, self.num_clusters, task.rng)


class SummarizeAggregator:
    """One summary for each record, all at once, then one call over the summaries (paper, section 4.1).

    At least half of the summaries must succeed.
    """

    def __repr__(self) -> str:
        return "SummarizeAggregator()"

    def aggregate(self, tasks: Sequence[ReductionTask], call: CallFunction, executor: Executor) -> list[Reduction]:
        """See `Aggregator.aggregate`."""
        calls = [_summary_calls(task) for task in tasks]
        nodes = iter(executor.map(call, [node_call for wave in calls for node_call in wave]))
        summaries = [[next(nodes) for _ in wave] for wave in calls]
        finals = [_final_call(task, made) for task, made in zip(tasks, summaries, strict=True)]
        roots = iter(executor.map(call, [final for final in finals if final is not None]))
        return [
            _reduction(task, [*made, next(roots)]) if final is not None else _failed(task, made)
            for task, made, final in zip(tasks, summaries, finals, strict=True)
        ]


def _summary_calls(task: ReductionTask) -> list[NodeCall]:
    return [
        NodeCall(task, f"1.{position}", "summarize", (f"r{position}",), (record,))
        for position, record in enumerate(task.records)
    ]


def _final_call(task: ReductionTask, summaries: Sequence[ProposalNode]) -> NodeCall | None:
    good = [node for node in summaries if node.output is not None]
    if not good or 2 * len(good) < len(summaries):
        return None
    return NodeCall(task, "2.0", "propose", tuple(node.id for node in good), tuple(node.output for node in good))


def _failed(task: ReductionTask, summaries: Sequence[ProposalNode]) -> Reduction:
    failures = [node.error for node in summaries if node.output is None]
    error = "there are no records"
    if failures:
        error = f"{len(failures)} of {len(summaries)} summaries failed; last: {failures[-1]}"
    return _reduction(task, list(summaries), error)


def _one_call_each(
    chosen: Sequence[tuple[ReductionTask, tuple[int, ...]]], call: CallFunction, executor: Executor
) -> list[Reduction]:
    """One plain call for each task, over the records at the chosen positions."""
    calls = [
        NodeCall(task, "1.0", "propose", tuple(f"r{p}" for p in positions), tuple(task.records[p] for p in positions))
        for task, positions in chosen
        if positions
    ]
    nodes = iter(executor.map(call, calls))
    return [
        _reduction(task, [next(nodes)]) if positions else _reduction(task, [], "there are no records")
        for task, positions in chosen
    ]


def _reduction(task: ReductionTask, nodes: list[ProposalNode], error: str | None = None) -> Reduction:
    text = nodes[-1].output if nodes and error is None else None
    if text is None and error is None:
        error = f"the reflection call failed: {nodes[-1].error}"
    return Reduction(
        component=task.component,
        text=text,
        nodes=tuple(nodes),
        num_groups=1,
        duplication_factor=1,
        error=error,
        current=task.current,
        sources=task.sources or tuple(range(len(task.records))),
    )


def nearest_to_centres(vectors: Any, num_clusters: int, rng: random.Random) -> tuple[int, ...]:
    """Cluster vectors by k-means, and give the position of the one nearest to the centre of each cluster.

    The best of several starts is taken (k-means++ each, drawn from `rng`).

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

    rows = np.asarray(vectors, dtype=float)
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise ValueError(f"The embedder must give one vector of finite numbers for each text, got shape {rows.shape}.")
    clusterings = [found for _ in range(_STARTS) if (found := _k_means(rows, num_clusters, rng)) is not None]
    if not clusterings:  # Each start lost a cluster on the way, which takes vectors in very odd places.
        return nearest_to_centres(rows, num_clusters - 1, rng)
    labels, distances = min(clusterings, key=lambda found: float((found[1] ** 2).sum()))
    order = np.lexsort((np.arange(len(rows)), distances, labels))
    _, first = np.unique(labels[order], return_index=True)
    return tuple(sorted(int(position) for position in order[first]))


def _k_means(rows: Any, num_clusters: int, rng: random.Random) -> tuple[Any, Any] | None:
    """One start of k-means: the cluster of each row, and how far it is from the centre; None if one stays empty."""
    import numpy as np
    from scipy.cluster.vq import ClusterError, kmeans2

    chosen = [rng.randrange(len(rows))]
    nearest = _squared_distances(rows, rows[chosen[0]])
    while len(chosen) < num_clusters and nearest.any():
        chosen += rng.choices(range(len(rows)), nearest.tolist())
        nearest = np.minimum(nearest, _squared_distances(rows, rows[chosen[-1]]))
    try:
        centres, labels = kmeans2(rows, rows[chosen], iter=_ITERATIONS, minit="matrix", missing="raise")
    except ClusterError:
        return None
    return labels, np.sqrt(_squared_distances(rows, centres[labels]))


def _squared_distances(rows: Any, others: Any) -> Any:
    return ((rows - others) ** 2).sum(axis=1)


def _text(record: Any) -> str:
    return record if isinstance(record, str) else json.dumps(record, ensure_ascii=False, default=str)


def _tfidf() -> Embed:
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError as error:
        raise ImportError(
            "Top-K retrieval needs an embedder. Give one, TopKAggregator(embedder=dspy.Embedder(...)), or install "
            "scikit-learn for TF-IDF: pip install 'dspy-combee[tfidf]'."
        ) from error
    return _TfIdf(TfidfVectorizer)


class _TfIdf:
    """TF-IDF vectors of texts, fitted on those texts."""

    def __init__(self, vectorizer: Any) -> None:
        self.vectorizer = vectorizer

    def __repr__(self) -> str:
        return "TF-IDF"

    def __call__(self, texts: list[str]) -> Any:
        return self.vectorizer(token_pattern=r"(?u)\S+").fit_transform(texts).toarray()
