"""How fast is an epoch, against `dspy.GEPA` and against what its calls need at least? Simulated latency, real clock.

    python -m benchmarks.speed            # about ten minutes
    python -m benchmarks.speed --quick    # a coarse look, under half a minute
    python -m benchmarks.speed --full     # dspy.GEPA at minibatch 1 and 3 on every trainset too: over half an hour

The language model is simulated, and so are its times: its engine waits, and logs each call. All the rest is real:
both optimizers, their threads, GEPA's loop, and the clock. Times are divided by a factor that is printed.

The critical path of a run is the time that its calls need on 64 lines with no work in between: the durations that
the engine logged, wave by wave (the calls that could run at once), the longest first. No optimizer can keep to it
quite, as nobody knows beforehand which call will be long; `in order` says what the same calls need in the order in
which they began. A busy processor makes the logged durations longer; `drawn` takes them as they were drawn.

Validation is apart: its calls take no time, and the time between the first and the last of them is subtracted.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import statistics
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from benchmarks._speed_costs import TreeCost, growth, import_seconds, programs, rollout_cost, tree_cost
from benchmarks._speed_lm import Latency
from benchmarks._speed_run import WIDTH, Timing, timed_run
from dspy_combee.testing import Task, conventions_task

PATH_TARGET = 1.10
CPU_TARGET = 1.2
IMPORT_TARGET = 0.1
DESIGN = {10_000: (100, 4, 1)}
GROWTH_LIMIT = 1.3
"""The exponent up to which a cost counts as linear; quadratic is 2."""
PAPER = "the paper's AppWorld row: 86 to 7 minutes, 12 times"


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        gate: (n, examples) of the runs that are held against the critical path.
        gate_factor: What their times are divided by.
        gate_repeats: How often.
        epochs: For each number of examples the runs: (optimizer, minibatch size).
        epoch_factor: What their times are divided by.
        quality_seeds: Seeds of the smallest of them.
        rollouts: Examples of the measurement of processor time.
        rounds: Its rounds, and those of the reduce trees.
        imports: Processes of each import.
        records: Records of the reduce trees.
    """

    gate: tuple[tuple[int, int], ...] = ((40, 120), (100, 200), (1000, 1000))
    gate_factor: float = 1
    gate_repeats: int = 3
    epochs: dict[int, tuple[tuple[str, Any], ...]] = field(default_factory=dict)
    epoch_factor: float = 20
    quality_seeds: int = 3
    rollouts: int = 200
    rounds: int = 7
    imports: int = 7
    records: tuple[int, ...] = (1250, 2500, 5000, 10_000)


ALL = (("gepa", 1), ("gepa", 3), ("gepa", 40), ("combee", 40), ("combee", "auto"))
LARGE = ALL[2:]
DEFAULT = Plan(epochs={90: ALL, 500: LARGE, 1000: LARGE})
FULL = Plan(epochs={90: ALL, 500: ALL, 1000: ALL})
QUICK = Plan(
    gate=((40, 40), (100, 100)),
    gate_factor=8,
    gate_repeats=1,
    epochs={30: (("gepa", 1), ("combee", 40))},
    epoch_factor=40,
    quality_seeds=1,
    rollouts=60,
    rounds=3,
    imports=1,
    records=(625, 1250, 2500),
)


class Verdicts:
    """Says of each target whether it is met, and counts."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def at_most(self, what: str, value: float, target: float) -> str:
        if value <= target:
            return "met"
        self.missed.append(f"{what}: {value:.3g} instead of {target:g}")
        return f"MISSED by {value - target:.3g}"


def _task(num_examples: int, seed: int) -> Task:
    return conventions_task(seed, (num_examples, 20, 200))


def show_gate(plan: Plan, verdicts: Verdicts) -> None:
    print(f"\nWall time against the critical path: CombeeOptimizer, one epoch, times divided by {plan.gate_factor:g}")
    print("  n     steps  wall      critical path  wall / path  (runs)              drawn  in order  target")
    for n, num_examples in plan.gate:
        runs = [
            timed_run("combee", n, _task(num_examples, seed), Latency(plan.gate_factor), seed)
            for seed in range(plan.gate_repeats)
        ]
        ratio = statistics.median(run.ratio for run in runs)
        drawn = statistics.median(run.seconds / run.drawn_path for run in runs)
        in_order = statistics.median(run.in_order / run.drawn_path for run in runs)
        wall = statistics.median(run.seconds for run in runs)
        each = " ".join(f"{run.ratio:.3f}" for run in runs)
        verdict = verdicts.at_most(f"wall / critical path at n = {n}", ratio, PATH_TARGET)
        print(
            f"  {n:<5} {len(runs[0].sizes):<6} {wall:6.2f} s  {wall / ratio:10.2f} s  {ratio:11.3f}  "
            f"({each}){'':<{max(0, 18 - len(each))}}{drawn:5.3f}  {in_order:8.3f}  {PATH_TARGET:.2f}: {verdict}"
        )


def show_epochs(plan: Plan) -> None:
    names = {"gepa": "dspy.GEPA", "combee": "CombeeOptimizer"}
    for num_examples, arms in plan.epochs.items():
        seeds = plan.quality_seeds if num_examples == min(plan.epochs) else 1
        print(
            f"\nOne epoch over {num_examples} examples, times divided by {plan.epoch_factor:g}, "
            + ("1 seed" if seeds == 1 else f"medians of {seeds} seeds, quality is their mean")
        )
        print("  optimizer        minibatch  steps  rollouts  reflections  wall       speed-up  wall / path  held-out")
        base: float | None = None
        for optimizer, size in arms:
            runs = [
                timed_run(optimizer, size, _task(num_examples, s), Latency(plan.epoch_factor), s, held_out=True)
                for s in range(seeds)
            ]
            wall = statistics.median(run.seconds for run in runs)
            base = wall if (optimizer, size) == ("gepa", 1) else base
            print(_epoch_row(names[optimizer], size, runs, wall, base))
        if base is not None:
            print(f"  Speed-up is against dspy.GEPA at minibatch 1 ({PAPER}).")
        left_out = [f"{names[optimizer]} at {size}" for optimizer, size in ALL if (optimizer, size) not in arms]
        if left_out:
            print(f"  Left out here (--full has them over 90, 500 and 1,000 examples): {', '.join(left_out)}.")


def _epoch_row(name: str, size: Any, runs: list[Timing], wall: float, base: float | None) -> str:
    ratio = statistics.median(run.ratio for run in runs)
    score = statistics.mean(run.score for run in runs)
    run = runs[0]
    speedup = "-" if base is None else f"{base / wall:.1f}x"
    return (
        f"  {name:<16} {size!s:<10} {len(run.sizes):<6} {run.num_rollouts:<9} {run.num_reflections:<12} "
        f"{wall:7.2f} s  {speedup:>8}  {ratio:11.3f}  {100 * score:7.1f}%"
    )


def show_cpu(plan: Plan, verdicts: Verdicts) -> None:
    print(
        f"\nProcessor time of a rollout at zero latency, {plan.rollouts} examples, 8 threads, traces kept on our side"
    )
    print("  program         Map        dspy.Evaluate  ratio  target")
    for name, program in programs().items():
        cost = rollout_cost(program, plan.rollouts, plan.rounds)
        verdict = verdicts.at_most(f"processor time of a rollout of {name}", cost.ratio, CPU_TARGET)
        print(
            f"  {name:<15} {cost.ours:6.3f} ms  {cost.evaluate:10.3f} ms  {cost.ratio:5.2f}  {CPU_TARGET:g}: {verdict}"
        )


def show_imports(plan: Plan, verdicts: Verdicts) -> None:
    print("\nImports after `import dspy`: the least processor time of some processes (and wall time)")
    for statement in ("import dspy_combee", "from dspy_combee import CombeeOptimizer", "from dspy_combee import *"):
        cpu, wall = import_seconds(statement, plan.imports)
        verdict = "no target"
        if "*" not in statement:
            verdict = f"{IMPORT_TARGET:g} s: {verdicts.at_most(statement, cpu, IMPORT_TARGET)}"
        print(f"  {statement:<40} {cpu:.3f} s  (wall {wall:.3f} s)  {verdict}")


def show_trees(plan: Plan, verdicts: Verdicts) -> None:
    for title, limit in (("no group over the token limit", 10**7), ("groups cut to 4,000 tokens", 4000)):
        print(f"\nThe reduce tree without latency, {title}: processor seconds, and the peak of memory")
        costs = {n: tree_cost(n, limit, plan.rounds) for n in plan.records}
        parts = list(costs[plan.records[0]].seconds)
        print(f"  records  calls by level     {''.join(f'{part:>11}' for part in parts)}      total       peak / text")
        for n, cost in costs.items():
            numbers = "".join(f"{seconds:11.4f}" for seconds in cost.seconds.values())
            peak = f"{cost.peak / 1e6:.0f} MB / {cost.text / 1e6:.1f} MB"
            print(f"  {n:<8} {'+'.join(map(str, cost.calls)):<18} {numbers}{cost.total:11.4f}   {peak}")
            if n in DESIGN and limit == 10**7:
                asked = "+".join(map(str, DESIGN[n]))
                unlike = verdicts.at_most(f"levels of {n} records unlike {asked}", float(cost.calls != DESIGN[n]), 0)
                print(f"           calls by level as designed ({asked}): {unlike}")
        _show_growth(costs, parts, title, verdicts)


def _show_growth(costs: dict[int, TreeCost], parts: list[str], title: str, verdicts: Verdicts) -> None:
    first, last = min(costs), max(costs)
    small, large, times = costs[first], costs[last], last / first
    # What takes less than a millisecond is the clock's grain.
    measured = {part: (small.seconds[part], large.seconds[part]) for part in parts if small.seconds[part] > 0.001}
    measured |= {"total": (small.total, large.total), "memory": (float(small.peak), float(large.peak))}
    exponents = {name: growth(*pair, times) for name, pair in measured.items()}
    worst = max(exponents, key=exponents.__getitem__)
    shown = ", ".join(f"{name} {exponent:.2f}" for name, exponent in exponents.items())
    verdict = verdicts.at_most(f"growth of {worst} ({title})", exponents[worst], GROWTH_LIMIT)
    print(f"  grows with the power (1 linear, 2 quadratic): {shown}; at most {GROWTH_LIMIT:g}: {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="few and short runs; a missed target does not fail")
    mode.add_argument("--full", action="store_true", help="dspy.GEPA at minibatch 1 and 3 on every trainset too")
    parser.add_argument(
        "--parts", nargs="+", default=[*PARTS], choices=[*PARTS], metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    options = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    plan = QUICK if options.quick else FULL if options.full else DEFAULT
    packages = ", ".join(f"{name} {version(name)}" for name in ("dspy", "gepa"))
    print(
        f"Speed on a SIMULATED language model. Python {platform.python_version()}, {packages}, {os.cpu_count()} cores."
    )
    print(f"Before division: {Latency(1)}. {WIDTH} threads, skip_perfect_score=False, no merge, on both sides.")
    verdicts = Verdicts()
    for part in options.parts:
        PARTS[part](plan, verdicts)
    missed = "".join(f"\n  {miss}" for miss in verdicts.missed)
    print(f"\nMISSED:{missed}" if missed else "\nEvery target that was measured is met.")
    return 1 if missed and not options.quick else 0


PARTS: dict[str, Any] = {
    "cpu": show_cpu,
    "imports": show_imports,
    "tree": show_trees,
    "gate": show_gate,
    "epochs": lambda plan, verdicts: show_epochs(plan),
}


if __name__ == "__main__":
    sys.exit(main())
