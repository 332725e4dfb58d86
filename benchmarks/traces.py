"""Learning from collected traces: the paper's Table 2 in form, on made-up traces.

    python -m benchmarks.traces            # simulated, some minutes
    python -m benchmarks.traces --quick    # one seed, no latencies, some seconds

The paper trains on 60 released Terminal-Bench trajectories without running anything, and tests on 29 held-out tasks.
Here 60 logged runs of the task "house conventions" stand in their place, each with some steps of an agent at a
terminal around it; the feedback of a run that went wrong states the convention that it broke. A playbook is learned
from them in one pass, with n = 1, 5 and 30 traces a step, reduced by the tree (Combee) and by one flat call (ACE with
a larger batch), and judged on 80 held-out invoices. With n = 1 there is nothing to reduce: tree and flat are one.

The reflection model is simulated, by the two losses of `dspy_combee.testing`: (a) a lesson survives a call with a
probability that falls with the prompt's length, (b) a call passes on at most four. The same loss holds for the calls of
the tree and for the flat call; the "prompt of one record" of (a) is a trace for the reflector, and a reflection for the
curator and the merge, which read nothing else. Latencies are simulated inside the engine and divided
by a factor that is printed; minutes are wall time multiplied by it.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its price map is not worth a download

import dspy

from benchmarks._cells import judge, run_program, timed, versions
from benchmarks._options import above_zero
from benchmarks.tasks import LOSSES, Pace
from dspy_combee import Playbook, PlaybookOptimizer, Trace, traces_from
from dspy_combee.cli.common import quiet_logs
from dspy_combee.testing import (
    CapacityLoss,
    PowerLoss,
    Role,
    SimulatedLM,
    Student,
    Task,
    conventions_task,
    count_tokens,
    playbook_roles,
    read_code,
)
from dspy_combee.traces import TraceMessage, render_trace

NUM_TRACES, NUM_HELD_OUT = 60, 80
SIZES = (1, 5, 30)
SEEDS = (0, 1, 2)
NUM_STEPS = 12
FACTOR = 20.0
NUM_THREADS = 30
LOSS_TITLES = {"power": "(a) power law in prompt tokens", "capacity": "(b) at most 4 lessons a call"}
_TITLES = {"tree": "Combee, tree", "flat": "flat"}
_COMMANDS = ("ls -la", "cat invoice.txt", "grep -rn category books/", "head -40 ledger.csv", "python check.py --dry")


@dataclass(frozen=True)
class Cell:
    """One way to learn: n and what reduces; None for the program without a playbook."""

    size: int | None
    aggregator: str = "tree"

    @property
    def title(self) -> str:
        if self.size is None:
            return "no playbook"
        return "sequential (tree = flat)" if self.size == 1 else _TITLES[self.aggregator]


CELLS = (
    Cell(None),
    Cell(1),
    *(Cell(size, aggregator) for size in SIZES[1:] for aggregator in ("flat", "tree")),
)


@dataclass(frozen=True)
class Outcome:
    """What a run brought."""

    minutes: float
    tokens: int
    bullets: int
    accuracy: float


def make_traces(task: Task) -> list[Trace]:
    """The logged runs: the student's own, with the steps of an agent around each."""
    rng = random.Random(0)
    with dspy.context(lm=SimulatedLM(0, student=Student(read_code))):
        rollouts = run_program(task.program, task, task.trainset, NUM_THREADS)
    return [
        replace(trace, steps=_steps(rng, trace), source=f"run-{number:02}")
        for number, trace in enumerate(traces_from(rollouts))
    ]


def _steps(rng: random.Random, trace: Trace) -> tuple[TraceMessage, ...]:
    messages = []
    for step in range(1, NUM_STEPS + 1):
        command = rng.choice(_COMMANDS)
        lines = "\n".join(f"{rng.randrange(10**6):06} entry of account {rng.randrange(10**4):04}" for _ in range(5))
        messages += [
            TraceMessage("agent", "I look at what is there before I post the invoice.", step=step),
            TraceMessage("call", command, "terminal", step),
            TraceMessage("output", lines, "terminal", step),
        ]
    return (*messages, TraceMessage("agent", f"I post it to {trace.outputs.get('code')}.", step=NUM_STEPS + 1))


def make_roles(loss: str, traces: Sequence[Trace], pace: Pace) -> tuple[Role, ...]:
    """The roles of the reflection model; the rest of a reflector's message takes about 100 tokens."""
    times = (pace.scaled(pace.reflection), pace.scaled(pace.per_token))
    if loss == "capacity":
        return playbook_roles(CapacityLoss(), *times)
    of_trace = PowerLoss(one_record_tokens=trace_tokens(traces) + 100)
    return (playbook_roles(of_trace, *times)[0], *playbook_roles(PowerLoss(), *times)[1:])


def trace_tokens(traces: Sequence[Trace]) -> int:
    """Tokens of an average trace."""
    return round(mean(count_tokens(render_trace(trace)) for trace in traces))


def run_cell(cell: Cell, loss: str, seed: int, task: Task, traces: Sequence[Trace], factor: float | None) -> Outcome:
    """Learn, and judge on the held-out examples."""
    pace = Pace(factor)
    program: Any = task.program
    seconds, tokens, bullets = 0.0, 0, 0
    if cell.size is not None:
        optimizer = PlaybookOptimizer(
            task.metric,
            reflection_lm=SimulatedLM(seed, roles=make_roles(loss, traces, pace), model="simulated/reflection"),
            minibatch_size=cell.size,
            aggregator=cell.aggregator,
            num_threads=NUM_THREADS,
            seed=seed,
            track_stats=True,
            verbose=False,
        )
        program, seconds = timed(optimizer.compile, task.program, traces=traces)
        last = program.detailed_results.steps[-1]
        tokens, bullets = last.tokens, len(Playbook.from_program(program))
    with dspy.context(lm=SimulatedLM(seed, student=Student(read_code))):
        accuracy, _ = judge(program, task, NUM_THREADS)
    return Outcome(seconds * (factor or 1) / 60, tokens, bullets, accuracy)


def print_table(loss: str, seeds: Sequence[int], factor: float | None) -> None:
    """Run all cells of a loss, and print a row for each."""
    task = conventions_task(0, (NUM_TRACES, 1, NUM_HELD_OUT))
    traces = make_traces(task)
    wrong = sum(trace.score == 0.0 for trace in traces)
    what = f"{len(traces)} traces of about {trace_tokens(traces)} tokens, {wrong} of them wrong"
    print(f"\nReflection model {LOSS_TITLES[loss]}; {what}.\n")
    print("| method | n | minutes | playbook tokens | bullets | held-out accuracy | by seed |")
    print("|---|---:|---:|---:|---:|---:|---|", flush=True)
    for cell in CELLS:
        outcomes = [run_cell(cell, loss, seed, task, traces, factor) for seed in seeds]
        names = ("minutes", "tokens", "bullets", "accuracy")
        means = {name: mean(getattr(outcome, name) for outcome in outcomes) for name in names}
        minutes = "–" if cell.size is None or factor is None else f"{means['minutes']:.1f}"
        by_seed = ", ".join(f"{outcome.accuracy:.1f}" for outcome in outcomes)
        print(
            f"| {cell.title} | {cell.size or '–'} | {minutes} | {means['tokens']:,.0f} | {means['bullets']:.0f} | "
            f"{means['accuracy']:.1f} | {by_seed} |",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed and no latencies")
    parser.add_argument("--factor", type=above_zero, default=FACTOR, help="what simulated latencies are divided by")
    parser.add_argument("--loss", choices=LOSSES, action="append", help="of the reflection model (default: both)")
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    factor = None if options.quick else options.factor
    names = ", ".join(f"{name} {number}" for name, number in versions().items())
    print(f"SIMULATED: no language model is called. {names}.\n{Pace(factor)}")
    with quiet_logs():
        for loss in options.loss or LOSSES:
            print_table(loss, SEEDS[:1] if options.quick else SEEDS, factor)
    print(
        "\nThe paper's Table 2 (Terminal-Bench 2.0, DeepSeek, 60 trajectories): sequential 42 minutes, a playbook of "
        "9,067 tokens\nand the best accuracy; Combee at n = 30 over 17 times faster with 8,023 tokens and most of that "
        "accuracy; flat batches\nlower, n = 5 below no playbook at all."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
