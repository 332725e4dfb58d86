"""Context overload, and what the tree does about it: SIMULATED, on two fitted models of one reflection call.

    python -m benchmarks.context_overload            # two seeds, some minutes
    python -m benchmarks.context_overload --full     # five seeds, and what the result depends on
    python -m benchmarks.context_overload --quick    # few examples, a minute at most
    python -m benchmarks.context_overload --fit      # fits the models anew and stops

The language model is simulated; `PlaybookOptimizer`, its groups, its union of deltas and its prompts are real. The
paper (section 2.2) shows that one call over many reflections loses most of them. Two models of such a call:

- power: each item is kept with probability min(1, (L0 / L) ** beta), L being the tokens of the whole message;
- capacity: at most C items are kept.

Both are fitted on the flat Formula figures: 264 bullets from 500 samples at batch 1, 21 at batch 100. What happens in
a tree, on FiNER and on AppWorld is predicted. One function serves every call: reflector, curator and merge. It is told
the message's length, the playbook's tokens included, and the items that the call has to pass on. A curator writes
deltas, so its items are the lessons of its reflections that the playbook lacks; bullets that stay where they are need
not be written again. Nothing in it knows flat from tree. What is new is another matter: a finite set of lessons,
heavy-tailed, of which only wrong answers teach one.

Wall time is computed, not waited for: see `_overload_runs.simulated_seconds`.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from statistics import mean

from benchmarks._options import whole
from benchmarks._overload_fit import FORMULA, Lengths, Model, fit_capacity, fit_power, sketches
from benchmarks._overload_runs import (
    CALL_SECONDS,
    ROLLOUT_SECONDS,
    TOKEN_SECONDS,
    WIDTH,
    Arm,
    Flow,
    Outcome,
    average,
    run_all,
)
from benchmarks._overload_task import BASE_ABILITY, LINES, REFLECTION_TOKENS, Novelty
from dspy_combee.testing import CapacityLoss, PowerLoss

MODELS = (
    Model("power", PowerLoss(beta=1.39, one_record_tokens=7150), Novelty(8000)),
    Model("capacity", CapacityLoss(4), Novelty(1000)),
)
"""What `--fit` finds, rounded."""
SIZES = (1, 5, 10, 20, 40, 100)
LARGE, TARGET_SIZE, TARGET = 20, 40, 2.5
ARMS = (("flat", 1), ("tree", 1), ("tree", 2))
FINER = {"samples": 1000, 1: 246, 125: 11}
"""Paper, section 2.2: bullets by batch size."""
APPWORLD = {1: 1578, 5: 4697, 10: 2329, 20: 954, 40: 526}
APPWORLD_SAMPLES, APPWORLD_COMBEE = 90, 6887
"""Paper, Table 1: tokens of the playbook by batch size of flat ACE; of Combee at batch 40."""


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    sizes: tuple[int, ...]
    seeds: int
    num_train: int
    num_test: int
    predict: bool
    sensitivity: bool


QUICK = Plan((1, 20, 40), 1, 120, 20, predict=False, sensitivity=False)
DEFAULT = Plan(SIZES, 2, FORMULA["samples"], 60, predict=True, sensitivity=False)
FULL = Plan(SIZES, 5, FORMULA["samples"], 100, predict=True, sensitivity=True)

Key = tuple[str, int, int]  # aggregator, n, p
Grid = dict[Key, Outcome]


def keys(sizes: Sequence[int]) -> Iterator[Key]:
    """The arms of the grid; below four reflections a tree is one flat call."""
    for n in sizes:
        for aggregator, p in ARMS:
            if n >= 4 or aggregator == "flat":
                yield aggregator, n, p


def run_grid(
    model: Model, wanted: Sequence[Key], num_train: int, seeds: int, workers: int | None, num_test: int
) -> Grid:
    """The mean over the seeds of each arm."""
    arms = [
        Arm(model.loss, model.novelty, num_train, n, aggregator, p, seed, num_test=num_test)
        for aggregator, n, p in wanted
        for seed in range(seeds)
    ]
    outcomes = run_all(arms, workers)
    return {key: average(outcomes[at * seeds : (at + 1) * seeds]) for at, key in enumerate(wanted)}


# Tables -----------------------------------------------------------------------------------------------------


def print_grid(grid: Grid) -> None:
    print("  n    how       lessons  bullets  duplicates  tokens  accuracy  minutes  reflection tokens")
    for (aggregator, n, p), item in grid.items():
        how = "flat" if aggregator == "flat" else f"tree p={p}"
        print(
            f"  {n:<4} {how:<9} {item.lessons:7.1f}  {item.bullets:7.1f}  {item.duplicates:10.1f}  {item.tokens:6.0f}  "
            f"{item.accuracy:8.3f}  {item.minutes:7.1f}  {item.reflection_tokens / 1e6:15.2f}M"
        )


def print_flow(grid: Grid, n: int) -> None:
    names = [field.name for field in fields(Flow)]
    print(f"\n  Where lessons go at n = {n}: distinct ones, summed over the steps (one that is lost may be told again)")
    print("  how       " + "  ".join(f"{name:>9}" for name in names))
    for (aggregator, size, p), item in grid.items():
        if size == n:
            how = "flat" if aggregator == "flat" else f"tree p={p}"
            print(f"  {how:<9} " + "  ".join(f"{getattr(item.flow, name):9.1f}" for name in names))


def verdicts(model: Model, grid: Grid) -> list[str]:
    """What was expected, and what came."""
    lines = []
    for n in sorted({size for _, size, _ in grid if size >= LARGE}):
        ratios = {p: grid["tree", n, p].lessons / max(1, grid["flat", n, 1].lessons) for p in (1, 2)}
        least = TARGET if n == TARGET_SIZE else 1.0
        met = "met" if ratios[2] >= least and ratios[2] > 1 else "MISSED"
        said = ", ".join(f"{ratio:.2f} with p = {p}" for p, ratio in ratios.items())
        wanted = f"at least {least:g}" if least > 1 else "more than 1"
        lines.append(f"  {model.name}, n = {n}: tree / flat lessons {said}; expected {wanted} (p = 2): {met}")
    return lines


def _off(predicted: float, real: float) -> str:
    factor = predicted / real if predicted >= real else real / max(predicted, 1e-9)
    return f"x{factor:.1f} too {'many' if predicted >= real else 'few'}" if factor >= 1.05 else "right"


def print_fit(model: Model, grid: Grid) -> None:
    for n, target in ((1, FORMULA["bullets at batch 1"]), (FORMULA["large batch"], FORMULA["bullets at large batch"])):
        print(f"  Formula, batch {n}: {grid['flat', n, 1].bullets:.0f} bullets, paper {target} (fitted)")


def print_finer(model: Model, workers: int | None) -> None:
    """FiNER with nothing changed, and with the number of lessons set so that its batch 1 comes out."""
    sizes = (1, 125)
    grid = run_grid(model, [("flat", n, 1) for n in sizes], FINER["samples"], 1, workers, num_test=1)
    for n in sizes:
        found = grid["flat", n, 1].bullets
        print(f"  FiNER, batch {n}: predicted {found:.0f} bullets, paper {FINER[n]}: {_off(found, FINER[n])}")
    fewer = _novelty_for(model, FINER["samples"], FINER[1])
    found = sketches(model.loss, fewer, 125, FINER["samples"]).lessons
    print(
        f"  (With {fewer.num_lessons} lessons instead of {model.novelty.num_lessons}, so that its batch 1 comes out, "
        f"batch 125 gives {found:.0f}: {_off(found, FINER[125])}.)"
    )


def _novelty_for(model: Model, samples: int, bullets: int) -> Novelty:
    low, high = math.log(20), math.log(model.novelty.num_lessons)
    for _ in range(7):
        middle = (low + high) / 2
        found = sketches(model.loss, Novelty(round(math.exp(middle))), 1, samples).lessons
        low, high = (middle, high) if found < bullets else (low, middle)
    return Novelty(round(math.exp(low)))


def print_appworld(model: Model, seeds: int, workers: int | None) -> None:
    """Table 1: the shape of the flat column, and Combee beside it. What a bullet weighs there is not known."""
    wanted: list[Key] = [*(("flat", n, 1) for n in APPWORLD), ("tree", 40, 2)]
    grid = run_grid(model, wanted, APPWORLD_SAMPLES, seeds, workers, num_test=1)
    scale = math.exp(mean(math.log(tokens / grid["flat", n, 1].tokens) for n, tokens in APPWORLD.items()))
    print(f"  AppWorld, tokens of the playbook (predicted ones times {scale:.2f}, the factor that suits the flat rows)")
    for (aggregator, n, _), item in grid.items():
        real = APPWORLD[n] if aggregator == "flat" else APPWORLD_COMBEE
        name = "flat" if aggregator == "flat" else "tree"
        found = item.tokens * scale
        print(f"    {name} batch {n:<3} {item.bullets:5.0f} bullets  {found:6.0f}  paper {real:5}: {_off(found, real)}")
    ratio = grid["tree", 40, 2].tokens / grid["flat", 40, 1].tokens
    print(f"    tree / flat at 40: predicted {ratio:.1f}, paper {APPWORLD_COMBEE / APPWORLD[40]:.1f}")


NOT_EXPLAINED = """
What neither model can explain: on AppWorld batch 1 leaves fewer tokens than batches 5 and 10 (a call that loses
less never leaves less); that FiNER loses more per call than Formula; and accuracy that falls where a playbook grows.
What the flat figures leave open: L0 of the power model. With twice the L0 they fit as well, and the tree's ratio at
n = 40 is below the one expected (--full shows it)."""


def print_sensitivity() -> None:
    """By the sketch: other lengths of a reflection, and other L0."""
    print(
        f"\nWhat the power model's ratio at n = {TARGET_SIZE} depends on (a sketch of the loop, fitted anew each time)"
    )
    print("  reflection  L0 is     beta    L0    lessons  batch 1 / 100   flat   tree p=2  ratio")
    for tokens, factor in ((300, 1.0), (500, 1.0), (800, 0.5), (800, 1.0), (800, 2.0), (1000, 1.0)):
        lengths = Lengths(reflection=tokens - 40)
        model = fit_power(lengths, factor)
        assert isinstance(model.loss, PowerLoss)
        samples = FORMULA["samples"]
        found = [
            sketches(model.loss, model.novelty, n, samples, p, lengths=lengths).lessons
            for n, p in ((1, None), (100, None), (TARGET_SIZE, None), (TARGET_SIZE, 2))
        ]
        print(
            f"  {tokens:<11} x{factor:<8g} {model.loss.beta:5.2f}  {model.loss.one_record_tokens:5.0f}  "
            f"{model.novelty.num_lessons:7.0f}  {found[0]:7.0f} / {found[1]:<5.0f} {found[2]:5.0f}  {found[3]:8.0f}  "
            f"{found[3] / found[2]:5.2f}" + ("" if abs(found[0] - 264) < 14 else "   (does not fit)")
        )


# ------------------------------------------------------------------------------------------------------------


def report(plan: Plan, workers: int | None) -> None:
    """Run the plan, and print."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("dspy", "gepa"))
    print(
        f"Context overload, SIMULATED. {plan.num_train} examples, seen once, of {LINES} lines each, {BASE_ABILITY:.0%} "
        f"of which are right before learning. A reflection takes about {REFLECTION_TOKENS} tokens. Means over seeds: "
        f"{plan.seeds}.\nMinutes are computed from simulated latencies (not scaled, nothing waited): a rollout "
        f"{ROLLOUT_SECONDS:g} s, any other call {CALL_SECONDS:g} s and {TOKEN_SECONDS:g} s a token of its reply, "
        f"{WIDTH} at once.\nAccuracy: held-out lines. Versions: {packages}, Python {platform.python_version()}."
    )
    lines: list[str] = []
    for model in MODELS:
        print(f"\nModel {model.name}: {model.loss}, {model.novelty.num_lessons} lessons")
        grid = run_grid(model, list(keys(plan.sizes)), plan.num_train, plan.seeds, workers, plan.num_test)
        print_grid(grid)
        print_flow(grid, TARGET_SIZE)
        lines += verdicts(model, grid)
        if plan.predict:
            print("\n  Fit and predictions")
            print_fit(model, grid)
            print_finer(model, workers)
            print_appworld(model, max(3, plan.seeds), workers)
    if plan.predict:
        print(NOT_EXPLAINED)
    if plan.sensitivity:
        print_sensitivity()
    print("\nExpected (SIMULATED)")
    print("\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="few examples and sizes, no predictions")
    size.add_argument("--full", action="store_true", help="five seeds, and what the result depends on")
    size.add_argument("--fit", action="store_true", help="fit the models anew, print them, and stop")
    parser.add_argument("--workers", type=whole, default=os.cpu_count(), help="processes (default: one for each core)")
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    started = time.monotonic()
    if options.fit:
        for model in (fit_power(), fit_capacity()):
            print(model)
    else:
        report(QUICK if options.quick else FULL if options.full else DEFAULT, options.workers)
    print(f"\n{(time.monotonic() - started) / 60:.1f} minutes.")


if __name__ == "__main__":
    main()
