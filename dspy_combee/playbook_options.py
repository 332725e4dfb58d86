"""The options of `PlaybookOptimizer`, checked when they are given."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dspy
from dspy.clients.base_lm import BaseLM

from dspy_combee.aggregation import Aggregator
from dspy_combee.aggregators import resolve_aggregator
from dspy_combee.batch_size import PowerLawBatchSize
from dspy_combee.delta_merge import EmbedderOrTokens
from dspy_combee.executors import Executor, ThreadExecutor
from dspy_combee.near_duplicates import NearDuplicates, TokenJaccard
from dspy_combee.playbook import Playbook
from dspy_combee.playbook_records import PlaybookStep
from dspy_combee.sizes import check_minibatch_size

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
        _check_lm(self.reflection_lm)
        _check_size(self.minibatch_size)
        _check_executor(self.executor)
        _check_playbook(self.playbook)
        _check_callbacks(self.step_callbacks)
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
            _check_finite(name, getattr(self, name))
        if self.reflect_on not in REFLECT_ON:
            raise ValueError(f"Unknown reflect_on {self.reflect_on!r}; known are {list(REFLECT_ON)}.")
        if self.embedder is not None and not callable(self.embedder):
            raise TypeError(f"embedder must be a dspy.Embedder or another callable, got {self.embedder!r}.")
        if self.log_dir is not None and not isinstance(self.log_dir, str | os.PathLike):
            raise TypeError(f"log_dir must be a path, got {self.log_dir!r}.")
        if self.max_reflection_cost is not None:
            _check_priced(self.reflection_lm)

    def make_executor(self) -> Executor:
        """What runs the rollouts and the reflection calls of one run."""
        if isinstance(self.executor, str):
            return ThreadExecutor(self.num_threads or dspy.settings.num_threads)
        return self.executor

    def make_near_duplicates(self) -> NearDuplicates:
        """What decides which bullets say the same."""
        return TokenJaccard() if self.embedder is None else EmbedderOrTokens(self.embedder)


def check_int(name: str, value: object, smallest: int | None) -> None:
    """Refuse what is no int, or below `smallest`."""
    if isinstance(value, bool) or not isinstance(value, int):
        expected = "an int" if smallest is None else f"an int of at least {smallest}"
        raise TypeError(f"{name} must be {expected}, got {value!r}.")
    if smallest is not None and value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {value}.")


def check_positive(name: str, value: object) -> None:
    """Refuse what is no finite number above 0."""
    _check_finite(name, value)
    if not value > 0:  # type: ignore[operator]
        raise ValueError(f"{name} must be above 0, got {value!r}.")


def check_examples(name: str, examples: Any) -> list[Any]:
    """The examples as a list.

    Raises:
        TypeError: If they are no sequence, or one is no example.
        ValueError: If there is none, or one does not say which of its fields are inputs.
    """
    if isinstance(examples, str | Mapping | dspy.Example) or not hasattr(examples, "__iter__"):
        raise TypeError(f"{name} must be a list of dspy.Example, got {type(examples).__name__}.")
    made = list(examples)
    if not made:
        raise ValueError(f"{name} must hold at least one example, got none.")
    for position, example in enumerate(made):
        if not hasattr(example, "inputs"):
            raise TypeError(f"{name}[{position}] must be a dspy.Example, got {type(example).__name__}.")
        try:
            example.inputs()
        except ValueError as error:
            raise ValueError(f"{name}[{position}] does not say what its inputs are: use with_inputs(...).") from error
    return made


def _check_finite(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}.")


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


def _check_lm(lm: Any) -> None:
    if isinstance(lm, str):
        raise TypeError(f"reflection_lm must be a dspy.LM, got the text {lm!r}: use dspy.LM({lm!r}).")
    if not isinstance(lm, BaseLM):
        raise TypeError(f"reflection_lm must be a dspy.LM, got {type(lm).__name__}.")


def _check_size(size: Any) -> None:
    try:
        if size is None:
            raise TypeError("reflection_minibatch_size must be an int, a list of ints, 'auto' or a PowerLawBatchSize.")
        check_minibatch_size(size)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("reflection_minibatch_size", "minibatch_size")) from error


def _check_executor(executor: Any) -> None:
    if isinstance(executor, str):
        if executor != "threads":
            raise ValueError(f"Unknown executor {executor!r}; known are ['threads'].")
    elif not isinstance(executor, Executor):
        raise TypeError(f"executor must be a name or an Executor, got {type(executor).__name__}.")


def _check_playbook(playbook: Any) -> None:
    playbooks = playbook.values() if isinstance(playbook, Mapping) else [playbook]
    for item in playbooks:
        if item is not None and not isinstance(item, Playbook):
            raise TypeError(f"playbook must be a Playbook, or map predictors' names to them, got {item!r}.")


def _check_callbacks(callbacks: Any) -> None:
    if callable(callbacks) or isinstance(callbacks, str) or not hasattr(callbacks, "__iter__"):
        raise TypeError(f"step_callbacks must be a sequence of callables, got {callbacks!r}.")
    for callback in callbacks:
        if not callable(callback):
            raise TypeError(f"step_callbacks must hold callables that take a PlaybookStep, got {callback!r}.")


def _check_priced(lm: Any) -> None:
    engine = getattr(lm, "_engine_spec", "auto")
    if not isinstance(engine, str):
        raise ValueError(
            "max_reflection_cost cannot be enforced: the reflection LM runs on a custom engine "
            f"({type(engine).__name__}), for which DSPy reports no cost."
        )
