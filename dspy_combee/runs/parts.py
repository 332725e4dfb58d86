"""The parts that a run of `CombeeOptimizer` is made of, each run with its own."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import cloudpickle
import dspy
from gepa.core.data_loader import ensure_loader
from gepa.core.state import GEPAState
from gepa.gepa_utils import json_default

from dspy_combee import calls
from dspy_combee.calls.executors import Executor
from dspy_combee.calls.lm_calls import UsageMeter
from dspy_combee.controller.budget import CostGuard
from dspy_combee.learners.proposer import CombeeProposer
from dspy_combee.records.secrecy import secrets_of, shorten
from dspy_combee.reduce.tree import TimeLimited
from dspy_combee.rollouts.feedback import Scorer
from dspy_combee.rollouts.map import lms_in
from dspy_combee.runs.adapter import CombeeAdapter, RolloutObserver

GEPA_STATE = "gepa_state.bin"


@dataclass(frozen=True)
class ReflectionParts:
    """What reflects: the proposer, what watches its spending, and what counts its usage."""

    proposer: CombeeProposer
    guard: CostGuard
    meter: UsageMeter


def make_executor(optimizer: Any) -> Executor:
    """Make the executor of one run's rollouts and reflection calls."""
    return calls.resolve_executor(optimizer.executor, optimizer.num_threads)


@contextmanager
def ready_to_run(adapter: CombeeAdapter, examples: Sequence[Any], later: Sequence[Any] = ()) -> Iterator[None]:
    """The length of a run.

    Args:
        adapter: Runs the rollouts.
        examples: What they are made on.
        later: What the rollouts of a run that follows are made on.

    Raises:
        TypeError: If the executor cannot take the program, the metric or an example where it runs them.
        ExecutorError: If it cannot be reached.
    """
    adapter.map_stage.check(adapter.student, chain(_items(examples), _items(later)))
    with adapter.executor.opened() if examples else nullcontext():
        yield


def make_adapter(optimizer: Any, student: Any, executor: Executor, observer: RolloutObserver) -> CombeeAdapter:
    """The adapter of a run, for the options of its optimizer."""
    return CombeeAdapter(
        student,
        Scorer(optimizer.metric_fn, optimizer.failure_score, optimizer.perfect_score),
        executor,
        add_format_failure_as_feedback=optimizer.add_format_failure_as_feedback,
        warn_on_score_mismatch=optimizer.warn_on_score_mismatch,
        reflection_lm=optimizer.reflection_lm,
        code_proposer=optimizer.custom_code_proposer,
        observer=observer,
        rollout_timeout=optimizer.rollout_timeout,
    )


def make_reflection(optimizer: Any, executor: Executor) -> ReflectionParts:
    """The proposer of a run, its calls limited in time and cost as the optimizer says."""
    meter = UsageMeter()
    guard = CostGuard(TimeLimited(executor, optimizer.reflection_timeout), optimizer.max_reflection_cost, meter)
    proposer = optimizer.proposer.for_run(guard, optimizer.reflection_lm, optimizer.seed, meter)
    return ReflectionParts(proposer, guard, meter)


def has_gepa_state(run_dir: str | None) -> bool:
    """Whether GEPA has saved a search there."""
    return run_dir is not None and os.path.exists(os.path.join(run_dir, GEPA_STATE))


def refuse_other_state(run_dir: str | None, components: Iterable[str]) -> None:
    """Refuse to go on from a search that GEPA has saved there if that cannot be done.

    Raises:
        ValueError: If its file cannot be read, or it was for a program with other components.
    """
    if run_dir is None or not has_gepa_state(run_dir):
        return
    path = os.path.join(run_dir, GEPA_STATE)
    try:
        saved = sorted(GEPAState.load(run_dir).program_candidates[0])
    except Exception as error:
        raise ValueError(
            f"{path} is damaged, or no saved state of GEPA: {type(error).__name__}: {shorten(str(error))}. Put back a "
            "whole copy of it, or give another log_dir to start anew."
        ) from error
    if saved != sorted(components):
        raise ValueError(
            f"{run_dir} holds the run of another program, whose components are {saved}; those of this one are "
            f"{sorted(components)}. Give another log_dir."
        )


def output_saver(optimizer: Any) -> Callable[[Any], bytes]:
    """Gives all that gepa saves of an output: JSON, and a pickle where its state keeps outputs."""
    options = optimizer.gepa_kwargs
    keeps_outputs = optimizer.track_best_outputs or options.get("cache_evaluation")
    pickler: Any = cloudpickle if options.get("use_cloudpickle", True) else pickle
    return partial(_saved_forms, pickler.dumps if keeps_outputs else None)


def _saved_forms(pickled: Callable[[Any], bytes] | None, output: Any) -> bytes:
    return json.dumps(output, default=json_default).encode() + (b"" if pickled is None else pickled(output))


def secrets_in_run(student: Any, reflection_lm: Any) -> set[str]:
    """The secrets of the language models of a run."""
    lms = [reflection_lm, dspy.settings.lm, *lms_in(student)]
    return secrets_of(lm for lm in lms if lm is not None)


def _items(examples: Any) -> Iterator[Any]:
    """Yield the examples of a list, or of one of gepa's data loaders, which is asked only when they are used."""
    loader: Any = ensure_loader(examples)
    yield from loader.fetch(list(loader.all_ids()))
