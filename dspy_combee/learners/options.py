"""The options of `PlaybookOptimizer`, checked when they are given."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspy_combee.calls import resolve_executor
from dspy_combee.calls.executors import Executor
from dspy_combee.controller.batch_size import PowerLawBatchSize, check_minibatch_size
from dspy_combee.playbook import EmbeddingCosine, Playbook
from dspy_combee.playbook.pruning import NearDuplicates, same_words
from dspy_combee.playbook.records import PlaybookStep
from dspy_combee.records.checks import check_callbacks, check_finite, check_int, check_lm, check_positive, check_priced
from dspy_combee.reduce import resolve_aggregator
from dspy_combee.reduce.tree import Aggregator

REFLECT_ON = ("all", "failures")


@dataclass(frozen=True)
class PlaybookOptions:
    """What `PlaybookOptimizer` was given; its docstring says what each means.

    Raises:
        TypeError: If one has the wrong type.
        ValueError: If one is out of range, or a name is unknown.
    """

    metric: Callable[..., Any]
    reflection_lm: Any
    minibatch_size: int | Sequence[int] | str | PowerLawBatchSize
    num_epochs: float
    num_threads: int | None
    seed: int
    duplication_factor: int
    num_groups: int | None
    aggregator: str | Aggregator
    executor: str | Executor
    reflect_on: str
    use_ground_truth: bool
    shared_playbook: bool
    playbook: Playbook | Mapping[str, Playbook] | None
    token_budget: int
    embedder: Callable[[list[str]], Any] | None
    log_dir: str | os.PathLike[str] | None
    step_callbacks: Sequence[Callable[[PlaybookStep], Any]]
    max_reflection_cost: float | None
    rollout_timeout: float | None
    reflection_timeout: float | None
    failure_score: float
    perfect_score: float
    track_stats: bool
    verbose: bool

    def __post_init__(self) -> None:
        _check_metric(self.metric)
        check_lm("reflection_lm", self.reflection_lm)
        _check_size(self.minibatch_size)
        resolve_executor(self.executor)
        _check_playbook(self.playbook)
        check_callbacks(self.step_callbacks)
        resolve_aggregator(self.aggregator)
        check_int("seed", self.seed, None)
        for name in ("duplication_factor", "token_budget"):
            check_int(name, getattr(self, name), 1)
        for name in ("num_groups", "num_threads"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_positive("num_epochs", self.num_epochs)
        for name in ("max_reflection_cost", "rollout_timeout", "reflection_timeout"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for name in ("use_ground_truth", "shared_playbook", "track_stats", "verbose"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        for name in ("failure_score", "perfect_score"):
            check_finite(name, getattr(self, name))
        if self.reflect_on not in REFLECT_ON:
            raise ValueError(f"Unknown reflect_on {self.reflect_on!r}; known are {list(REFLECT_ON)}.")
        if self.embedder is not None and not callable(self.embedder):
            raise TypeError(f"embedder must be a dspy.Embedder or another callable, got {self.embedder!r}.")
        if self.log_dir is not None and not isinstance(self.log_dir, str | os.PathLike):
            raise TypeError(f"log_dir must be a path, got {self.log_dir!r}.")
        if self.max_reflection_cost is not None:
            check_priced(self.reflection_lm)

    def make_executor(self) -> Executor:
        """Make the executor of one run's rollouts and reflection calls."""
        return resolve_executor(self.executor, self.num_threads)

    def make_near_duplicates(self) -> NearDuplicates:
        """What decides which bullets say the same."""
        return same_words if self.embedder is None else EmbeddingCosine(self.embedder)


def _check_metric(metric: Any) -> None:
    if not callable(metric):
        raise TypeError(f"metric must be callable, got {metric!r}.")
    try:
        inspect.signature(metric).bind(None, None, None, None, None)
    except TypeError as error:
        raise TypeError(
            "metric must take five arguments, as a dspy.GEPA metric does: (gold, pred, trace, pred_name, pred_trace); "
            f"{error}."
        ) from error
    except ValueError:
        return  # A callable that does not tell its signature.


def _check_size(size: Any) -> None:
    try:
        if size is None:
            raise TypeError("reflection_minibatch_size must be an int, a list of ints, 'auto' or a PowerLawBatchSize.")
        check_minibatch_size(size)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("reflection_minibatch_size", "minibatch_size")) from error


def _check_playbook(playbook: Any) -> None:
    playbooks = playbook.values() if isinstance(playbook, Mapping) else [playbook]
    for item in playbooks:
        if item is not None and not isinstance(item, Playbook):
            raise TypeError(f"playbook must be a Playbook, or map predictors' names to them, got {item!r}.")
