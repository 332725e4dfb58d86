"""What do rollouts on Ray gain where they need CPU, and what do they cost where they only wait?

    python -m benchmarks.ray_scaling            # two to four minutes; needs the extra `ray`
    python -m benchmarks.ray_scaling --quick    # a coarse look

Both tables run the real Map stage, on threads and on a Ray that is started here, in turns, `ROUNDS` times. The
language model answers by itself, in the second table after a wait.

1. CPU: a rollout computes in Python for a fixed amount of work beside its LM call, which holds the interpreter, so
   threads of one process take turns. Ray's workers are processes. The gain over threads is at most the number of
   workers, and of free cores; the figures are those of the fastest round. The last line is a yardstick: the same
   work in two bare processes instead of one, in the same rounds, which is all that the machine has to give.
2. Overhead: a rollout waits for its LM call (I/O) and does nothing else, 32 examples per task. What Ray takes longer
   than threads of the same width, divided by the number of rollouts; medians. The target is under 2 ms.

Ray's start, its workers' first import of the program's libraries and each program's first journey are not in the
figures; the start is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray's workers give way to other processes (15); here other load shall hit threads and workers alike.
os.environ.setdefault("RAY_worker_niceness", "0")

import dspy

from dspy_combee import Executor, RayExecutor, ThreadExecutor
from dspy_combee.rollouts.feedback import Scorer
from dspy_combee.rollouts.map import MapStage, ProgramCopier
from dspy_combee.testing import ScriptedLM

TARGET_MS = 2.0
EXAMPLES_PER_TASK = 32
WIDTH = 16
ROUNDS = 5


class Computing(dspy.Module):
    """Works so many turns of a loop beside its LM call, as a parser, a simulator or a checker does."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.answer = dspy.Predict("question -> answer")
        self.turns = turns

    def forward(self, question: str) -> Any:
        return self.answer(question=f"{question} {compute(self.turns)}")


def right(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
    """The metric: every answer is right."""
    return 1.0


@dataclass(frozen=True)
class Case:
    """One line of a table."""

    name: str
    executor: Executor
    program: Any
    wait: float
    number: int


def seconds(case: Case) -> float:
    """Wall time of the rollouts, by the Map stage."""
    batch = [dspy.Example(question=f"question {i}").with_inputs("question") for i in range(case.number)]
    stage = MapStage(ProgramCopier(case.program), Scorer(right), case.executor)
    lm = ScriptedLM(default={"answer": "right"}, latency=case.wait)
    with dspy.context(lm=lm):
        started = time.perf_counter()
        rollouts = stage.run([(case.program, batch)])
        taken = time.perf_counter() - started
    assert all(rollout.score == 1.0 for rollout in rollouts), "a rollout failed"
    return taken


def medians(cases: list[Case], rounds: int) -> list[float]:
    """The median wall time of each case, measured in turns, after one turn that is not counted."""
    times = [[seconds(case) for case in cases] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def compute(turns: int) -> int:
    """Hold the interpreter for so many turns."""
    total = 0
    for number in range(turns):
        total = (total * 31 + number) % 1_000_003
    return total


def turns_for(milliseconds: float) -> int:
    """Turns that take so much CPU time on this machine."""
    times = []
    for _ in range(5):
        started = time.thread_time()
        compute(200_000)
        times.append(time.thread_time() - started)
    return int(200_000 * milliseconds / 1000 / min(times))


def bare(pool: ProcessPoolExecutor, turns: int, number: int) -> float:
    """Wall time of the same work without rollouts."""
    started = time.perf_counter()
    list(pool.map(compute, [turns] * number))
    return time.perf_counter() - started


def cpu_table(rounds: int, number: int) -> None:
    program = Computing(turns_for(40.0))
    cases = [Case("threads", ThreadExecutor(4), program, 0.0, number)]
    for workers, name in ((1, "Ray, 1 worker"), (2, "Ray, 2 workers")):
        cases.append(Case(name, RayExecutor(num_workers=workers).with_width(4), program, 0.0, number))
    load = os.getloadavg()[0]  # Of the last minute.
    times: list[list[float]] = []
    with ProcessPoolExecutor(1) as one, ProcessPoolExecutor(2) as two:
        for _ in range(rounds + 1):  # In turns, so that other work on the machine hits all alike.
            alone, together = (bare(pool, program.turns, number) for pool in (one, two))
            times.append([*map(seconds, cases), alone, together])
    *taken, alone, together = (min(column) for column in zip(*times[1:], strict=True))
    print(f"\n1. CPU: {number} rollouts of about 40 ms of CPU each, width 4, {os.cpu_count()} cores, load {load:.1f}")
    print(f"{'':<16}{'seconds':>10}{'rollouts/s':>12}{'gain':>8}")
    for case, value in zip(cases, taken, strict=True):
        print(f"{case.name:<16}{value:>10.2f}{number / value:>12.1f}{taken[0] / value:>8.2f}")
    print(f"{'Yardstick: 2 bare processes, over 1':<38}{alone / together:>8.2f}")
    if alone / together < 1.7:
        print("The machine had no whole second core to give: the gain of 2 workers says little.")


def overhead_table(rounds: int, number: int) -> bool:
    program = dspy.Predict("question -> answer")
    options = {"examples_per_task": EXAMPLES_PER_TASK}
    cases = [
        Case("threads", ThreadExecutor(WIDTH), program, 0.05, number),
        Case("Ray, 1 worker", RayExecutor(num_workers=1, **options).with_width(WIDTH), program, 0.05, number),
        Case("Ray, 2 workers", RayExecutor(num_workers=2, **options).with_width(WIDTH), program, 0.05, number),
    ]
    taken = medians(cases, rounds)
    print(
        f"\n2. Overhead: {number} rollouts that wait 50 ms each, width {WIDTH}, {EXAMPLES_PER_TASK} examples per task"
    )
    print(f"{'':<16}{'seconds':>10}{'ms per rollout':>16}{'over threads':>14}")
    met = True
    for case, value in zip(cases, taken, strict=True):
        over = (value - taken[0]) / number * 1000
        met = met and over < TARGET_MS
        print(f"{case.name:<16}{value:>10.2f}{value / number * 1000:>16.2f}{over:>14.2f}")
    print(f"Target: under {TARGET_MS:g} ms per rollout over threads: {'met' if met else 'MISSED'}.")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rollouts, fewer rounds")
    quick = parser.parse_args().quick
    if importlib.util.find_spec("ray") is None:
        print("Skipped: ray is not installed (pip install 'dspy-combee[ray]').")
        return 0
    logging.getLogger("dspy_combee").setLevel(logging.WARNING)
    started = time.perf_counter()
    with RayExecutor(num_workers=2):
        niceness = os.environ["RAY_worker_niceness"]  # noqa: SIM112 - Ray's own spelling.
        print(f"Ray was up after {time.perf_counter() - started:.1f} s; its workers have niceness {niceness}.")
        cpu_table(1 if quick else ROUNDS, 40 if quick else 120)
        met = overhead_table(1 if quick else ROUNDS, 128 if quick else 512)
    return 0 if met or quick else 1


if __name__ == "__main__":
    sys.exit(main())
