"""One timed run of an optimizer, and the critical path of its calls."""

from __future__ import annotations

import contextlib
import heapq
import io
import itertools
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspy

from benchmarks._speed_lm import Latency, LoggedCall, timed_lm
from dspy_combee import CombeeOptimizer
from dspy_combee.tasks import Task

WIDTH = 64


def list_schedule(durations: Iterable[float], width: int) -> float:
    """How long the calls take on `width` lines, the longest first."""
    lines = [0.0] * width
    for duration in sorted(durations, reverse=True):
        heapq.heapreplace(lines, lines[0] + duration)
    return max(lines)


@dataclass
class Clock:
    """A GEPA callback and stop callback: it notes when evaluations begin, and ends the run after so many steps."""

    num_steps: int
    steps: int = 0
    marks: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def __call__(self, state: Any) -> bool:
        return self.steps >= self.num_steps

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
        seconds: Wall time of `compile` without the time of validation.
        drawn_path: The critical path of the durations as they were drawn.
        logged_path: The critical path of the durations as the engine logged them, which hold the time that
            a call waited for the processor.
        sizes: n of each step.
        calls: Calls by kind.
        cpu: Processor seconds of the process, without... all of compile.
        score: Mean score of the learned program on the held-out examples.
    """

    seconds: float
    drawn_path: float
    logged_path: float
    sizes: tuple[int, ...]
    num_rollouts: int
    num_reflections: int
    cpu: float
    score: float


@contextlib.contextmanager
def quiet() -> Any:
    """No log lines and no progress bars."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def timed_run(optimizer: str, size: Any, task: Task, latency: Latency, seed: int = 0, held_out: bool = True) -> Timing:
    """One epoch. `optimizer` is "gepa" or "combee"."""
    lm = timed_lm(latency, task.trainset, seed)
    clock = Clock(math.ceil(len(task.trainset) / size) if isinstance(size, int) else 10**9)
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
    if optimizer == "gepa":
        made: Any = dspy.GEPA(max_metric_calls=10**9, **options)
    else:
        made = CombeeOptimizer(num_epochs=1, verbose=False, **options)
    with quiet(), dspy.context(lm=lm):
        start, cpu = time.monotonic(), time.process_time()
        program = made.compile(task.program, trainset=task.trainset, valset=task.valset)
        seconds, cpu = time.monotonic() - start, time.process_time() - cpu
        calls = list(lm.engine.log)
        score = _score(program, task) if held_out else math.nan
    groups = waves(calls, clock.marks)
    return Timing(
        seconds=seconds - seconds_apart(calls),
        drawn_path=sum(list_schedule((call.drawn for call in wave), WIDTH) for wave in groups),
        logged_path=sum(list_schedule((call.end - call.start for call in wave), WIDTH) for wave in groups),
        sizes=tuple(clock.sizes),
        num_rollouts=sum(call.kind == "rollout" for call in calls),
        num_reflections=sum(call.kind in ("propose", "merge") for call in calls),
        cpu=cpu,
        score=score,
    )


def _score(program: Any, task: Task) -> float:
    evaluate = dspy.Evaluate(devset=task.testset, metric=task.metric, num_threads=8, display_progress=False)
    return evaluate(program).score / 100
