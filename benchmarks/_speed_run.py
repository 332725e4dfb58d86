"""One timed run of an optimizer, and the critical path of its calls."""

from __future__ import annotations

import contextlib
import heapq
import io
import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspy

from benchmarks._speed_lm import Latency, LoggedCall, timed_lm
from dspy_combee import CombeeOptimizer
from dspy_combee.testing import Task

WIDTH = 64


def list_schedule(durations: Iterable[float], width: int = WIDTH) -> float:
    """How long the calls take on `width` lines, each call on the first line that is free."""
    lines = [0.0] * width
    for duration in durations:
        heapq.heapreplace(lines, lines[0] + duration)
    return max(lines)


def longest_first(durations: Iterable[float], width: int = WIDTH) -> float:
    """The same with the longest calls first: the critical path of a wave."""
    return list_schedule(sorted(durations, reverse=True), width)


@dataclass
class Clock:
    """A GEPA callback and stop callback: it notes when evaluations begin, and ends the run after so many steps."""

    num_steps: int | None
    steps: int = 0
    marks: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def __call__(self, state: Any) -> bool:
        return self.num_steps is not None and self.steps >= self.num_steps

    def on_minibatch_sampled(self, event: Any) -> None:
        self.steps += 1
        self.sizes.append(len(event["minibatch_ids"]))

    def on_evaluation_start(self, event: Any) -> None:
        self.marks.append(time.monotonic())


def waves(calls: Sequence[LoggedCall], marks: Sequence[float]) -> list[list[LoggedCall]]:
    """The calls that could run at once: those of one kind between two evaluations' beginnings."""
    ordered = sorted((call for call in calls if call.kind != "apart"), key=lambda call: call.start)
    numbered: dict[tuple[int, str], list[LoggedCall]] = {}
    mark = 0
    for call in ordered:
        while mark < len(marks) and marks[mark] <= call.start:
            mark += 1
        numbered.setdefault((mark, call.kind), []).append(call)
    return list(numbered.values())


def seconds_apart(calls: Sequence[LoggedCall]) -> float:
    """The time from the first to the last call of each unbroken row of validation calls."""
    ordered = sorted(calls, key=lambda call: call.start)
    rows = itertools.groupby(ordered, key=lambda call: call.kind == "apart")
    spans = [list(row) for apart, row in rows if apart]
    return sum(max(call.end for call in span) - span[0].start for span in spans)


@dataclass(frozen=True)
class Timing:
    """What one run took.

    Attributes:
        seconds: Wall time of `compile` without that of validation.
        path: The critical path: the durations that the engine logged, wave by wave, the longest first.
        drawn_path: The same with the durations as they were drawn, without what a busy processor added.
        in_order: The same as drawn, in the order in which the calls began: what not knowing their durations costs.
        sizes: n of each step.
        num_rollouts: Rollouts, validation not counted.
        num_reflections: Reflection calls.
        score: Mean score of the learned program on the held-out examples; NaN where it was not asked for.
    """

    seconds: float
    path: float
    drawn_path: float
    in_order: float
    sizes: tuple[int, ...]
    num_rollouts: int
    num_reflections: int
    score: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.path


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log lines and no progress bars."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def timed_run(optimizer: str, size: Any, task: Task, latency: Latency, seed: int = 0, held_out: bool = False) -> Timing:
    """One epoch of `optimizer`, which is "gepa" or "combee", at a minibatch size."""
    lm = timed_lm(latency, task.trainset, seed)
    clock = Clock(math.ceil(len(task.trainset) / size) if isinstance(size, int) else None)
    options: dict[str, Any] = {
        "metric": task.metric,
        "reflection_lm": lm,
        "reflection_minibatch_size": size,
        "skip_perfect_score": False,
        "use_merge": False,
        "num_threads": WIDTH,
        "seed": seed,
        "gepa_kwargs": {"callbacks": [clock], "stop_callbacks": [clock]},
    }
    made: Any
    if optimizer == "gepa":
        made = dspy.GEPA(max_metric_calls=10**9, **options)
    else:
        made = CombeeOptimizer(num_epochs=1, verbose=False, **options)
    with quiet(), dspy.context(lm=lm):
        start = time.monotonic()
        program = made.compile(task.program, trainset=task.trainset, valset=task.valset)
        seconds = time.monotonic() - start
        calls = list(lm.engine.log)
        score = _score(program, task) if held_out else math.nan
    groups = waves(calls, clock.marks)
    return Timing(
        seconds=seconds - seconds_apart(calls),
        path=sum(longest_first(call.end - call.start for call in wave) for wave in groups),
        drawn_path=sum(longest_first(call.drawn for call in wave) for wave in groups),
        in_order=sum(list_schedule(call.drawn for call in wave) for wave in groups),
        sizes=tuple(clock.sizes),
        num_rollouts=sum(call.kind == "rollout" for call in calls),
        num_reflections=sum(call.kind in ("propose", "merge") for call in calls),
        score=score,
    )


def _score(program: Any, task: Task) -> float:
    evaluate = dspy.Evaluate(devset=task.testset, metric=task.metric, num_threads=8, display_progress=False)
    return float(evaluate(program).score) / 100
