"""The paper's ablations (figures 6 and 7): the batch-size controller, and the shuffle over the number of groups.

    python -m benchmarks.ablations             # simulated, some minutes
    python -m benchmarks.ablations --quick     # a coarse look, half a minute
    python -m benchmarks.ablations --task formula --data FOLDER --model openai/gpt-4o-mini

Figure 6: one epoch at a fixed n in {5, 10, 20, 40, 80} and at `"auto"`; held-out accuracy and minutes. Simulated
latencies pass inside the engine of the language model, divided by a factor that is printed; all the rest is real.

Figure 7: minibatches of 50 in k in {1, 2, 5, 7, 10, 25, 50} groups with p in {1, 2}; held-out accuracy, and how many
different lessons are in what was learned. The paper takes k = floor(sqrt(50)) = 7. Where the best
k is another, the table says so. (At k = 1 and 2 every p is 1: p = 2 would put a record into every group.)

Without `--model` both are run on the two simulated reflection models of `dspy_combee.testing`: (a) keeps each
lesson with a probability that falls with the prompt's length, (b) keeps at most a fixed number per call.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its price map is not worth a download

import dspy
from dspy.utils.exceptions import LMError

from benchmarks._cells import Models, Settings, judge, machine, run_program, timed, versions
from benchmarks._options import above_zero, whole
from benchmarks.run import SIMULATED, spread
from benchmarks.tasks import LOSSES, SIZES, Pace, Task, load_task
from dspy_combee import CombeeError, CombeeOptimizer, PlaybookOptimizer
from dspy_combee.cli.common import quiet_logs
from dspy_combee.records.text import estimate_tokens
from dspy_combee.testing import find_lessons

FIXED = (5, 10, 20, 40, 80)
MINIBATCH = 50
GROUPS = (1, 2, 5, 7, 10, 25, 50)
FACTORS = (1, 2)
QUICK_SIZES = (80, 20, 40)
LOSS_TITLES = {"power": "(a) power law in prompt tokens", "capacity": "(b) a number of lessons per call"}


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        task: Its name.
        data: The folder with its files.
        sizes: Training, validation and held-out examples.
        settings: Models, threads and latencies; `epochs` is the length of the run, for either optimizer.
        optimizer: `"combee"` or `"playbook"`.
        size: n, or `"auto"`.
        seed: Seed of the run.
        num_groups: k; None for the default.
        duplication_factor: p.
    """

    task: str
    data: Path | None
    sizes: tuple[int, int, int]
    settings: Settings
    optimizer: str
    size: int | str
    seed: int
    num_groups: int | None = None
    duplication_factor: int = 2


@dataclass(frozen=True)
class Finding:
    """What a run brought: accuracy in percent, minutes, true lessons kept, prompt tokens, and n of its steps."""

    accuracy: float
    minutes: float
    kept: int
    prompt_tokens: int
    batch_sizes: tuple[int, ...]


def run_trial(trial: Trial) -> Finding:
    """Learn, and judge on the held-out examples. (A function of the module, so that other processes can run it.)"""
    settings = trial.settings
    task = load_task(trial.task, trial.data, trial.sizes)
    models = settings.models(task, trial.seed)
    with quiet_logs(), dspy.context(lm=models.task_lm):
        program, seconds = timed(_learner(trial, task, models))
        accuracy, _ = judge(program, task, settings.num_threads)
    text = "\n".join(predictor.signature.instructions for _, predictor in program.named_predictors())
    true = {lesson for e in task.trainset for lesson in find_lessons(task.metric(e, dspy.Prediction()).feedback)}
    return Finding(
        accuracy=accuracy,
        minutes=settings.minutes(seconds),
        kept=len(true.intersection(find_lessons(text))),
        prompt_tokens=estimate_tokens(text),
        batch_sizes=program.detailed_results.batch_sizes,
    )


def _learner(trial: Trial, task: Task, models: Models) -> Callable[[], Any]:
    shared: dict[str, Any] = {
        "reflection_lm": models.reflection_lm,
        "num_epochs": trial.settings.epochs,
        "num_threads": trial.settings.num_threads,
        "seed": trial.seed,
        "num_groups": trial.num_groups,
        "duplication_factor": trial.duplication_factor,
        "track_stats": True,
    }
    if trial.optimizer == "playbook":
        playbook = PlaybookOptimizer(task.metric, minibatch_size=trial.size, **shared)
        return lambda: playbook.compile(task.program, task.trainset)
    combee = CombeeOptimizer(
        task.metric, reflection_minibatch_size=trial.size, use_merge=False, verbose=False, **shared
    )
    return lambda: combee.compile(task.program, task.trainset, valset=task.valset)


class Workers:
    """Runs trials in some processes, which are started once.

    Args:
        number: How many; with one, this process runs them.
    """

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")  # Threads of this process do not survive a fork.
        self.pool = ProcessPoolExecutor(number, mp_context=context) if number > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def run(self, trials: Sequence[Trial]) -> list[Finding]:
        """Run the trials, in order."""
        return list(map(run_trial, trials) if self.pool is None else self.pool.map(run_trial, trials))


# Figure 6 ---------------------------------------------------------------------------------------------------


def figure_6(base: Trial, sizes: Sequence[int | str], seeds: int, workers: Workers) -> None:
    """Fixed sizes against the controller."""
    trials = [replace(base, size=size, seed=seed) for size in sizes for seed in range(seeds)]
    found = workers.run(trials)
    print("\n| n | accuracy % | minutes | minutes / best fixed | n of the steps (first seed) |")
    print("| --- | --: | --: | --: | --- |")
    rows = {size: found[place * seeds : (place + 1) * seeds] for place, size in enumerate(sizes)}
    minutes = {size: mean(finding.minutes for finding in row) for size, row in rows.items()}
    fixed = {size: time for size, time in minutes.items() if size != "auto"}
    for size, row in rows.items():
        over = minutes[size] / min(fixed.values()) if fixed else math.nan
        steps = _runs(row[0].batch_sizes)
        accuracy, spent = (spread([getattr(f, name) for f in row], 1) for name in ("accuracy", "minutes"))
        print(f"| {size} | {accuracy} | {spent} | {over:.2f} | {steps} |")


def _runs(sizes: Sequence[int]) -> str:
    """Sizes in order, repeated ones once with their number."""
    told: list[tuple[int, int]] = []
    for size in sizes:
        if told and told[-1][0] == size:
            told[-1] = (size, told[-1][1] + 1)
        else:
            told.append((size, 1))
    return ", ".join(str(size) if count == 1 else f"{count} x {size}" for size, count in told)


# Figure 7 ---------------------------------------------------------------------------------------------------


def lessons_told(base: Trial) -> int:
    """Different lessons in the feedback on what the program gets wrong before learning."""
    task = load_task(base.task, base.data, base.sizes)
    with dspy.context(lm=base.settings.models(task, base.seed).task_lm):
        rollouts = run_program(task.program, task, task.trainset, base.settings.num_threads)
    return len({lesson for rollout in rollouts for lesson in find_lessons(rollout.result.feedback)})


def figure_7(base: Trial, groups: Sequence[int], seeds: int, workers: Workers) -> None:
    """The number of groups, with and without duplicated records."""
    places = [(k, p) for k in groups for p in FACTORS]
    trials = [replace(base, num_groups=k, duplication_factor=p, seed=seed) for k, p in places for seed in range(seeds)]
    found = workers.run(trials)
    rows = {place: found[index * seeds : (index + 1) * seeds] for index, place in enumerate(places)}
    measure, title = ("kept", "lessons kept") if base.settings.simulated else ("prompt_tokens", "prompt tokens")
    if base.settings.simulated:
        print(f"\nWhat the program gets wrong before learning (seed {base.seed}) tells {lessons_told(base)} lessons.")
    print(f"\n| k | {title}, p = 1 | {title}, p = 2 | accuracy %, p = 1 | accuracy %, p = 2 |")
    print("| --: | --: | --: | --: | --: |")
    for k in groups:
        cells = [
            spread([getattr(finding, name) for finding in rows[k, p]], 1)
            for name in (measure, "accuracy")
            for p in FACTORS
        ]
        print(f"| {k} | {' | '.join(cells)} |")
    print()
    for p in FACTORS:
        for name, heading in ((measure, title), ("accuracy", "accuracy")):
            means = {k: mean(getattr(finding, name) for finding in rows[k, p]) for k in groups}
            print(peak(means, f"{heading} at p = {p}", base.size))


def peak(means: dict[int, float], heading: str, n: int | str) -> str:
    """Where the best k lies, and how the paper's does."""
    highest = max(means.values())
    best = [k for k in means if means[k] == highest]
    text = f"Highest mean of {heading}: {highest:.1f} with k = {', '.join(map(str, best))}."
    root = math.isqrt(int(n))
    if root not in means:
        return text
    if root in best:
        return f"{text} The paper's k = floor(sqrt({n})) is {root}."
    return f"{text} The paper's k = floor(sqrt({n})) = {root} has {means[root]:.1f}: the peak is NOT there."


# The command ------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = made.add_argument
    add("--quick", action="store_true", help="fewer examples, sizes and seeds")
    add("--figure", type=int, choices=(6, 7), help="only this one")
    add("--optimizer", choices=("combee", "playbook"), help="only this one")
    add("--task", choices=sorted(SIZES), default="conventions", help="what to learn (default: conventions)")
    add("--data", type=Path, metavar="FOLDER", help="the files of formula and finer (default: COMBEE_DATA)")
    add("--seeds", type=whole, help="runs of each cell (default: 3 for figure 6, 5 for figure 7)")
    add("--model", help="the model that does the task, as dspy.LM takes it; without it all is simulated")
    add("--reflection-model", help="the model that reflects (default: the same)")
    add("--api-base", metavar="URL", help="address of the models' server")
    add("--num-threads", type=whole, default=64, help="calls in flight at most (default: 64)")
    add("--factor", type=above_zero, default=50, help="what simulated latencies are divided by (default: 50)")
    add("--workers", type=whole, help="processes (default: 2; 1 with --model)")
    return made


def run(options: argparse.Namespace, loss: str, optimizer: str, workers: Workers) -> None:
    """Both figures for one optimizer and one simulated model."""
    settings = Settings(
        model=options.model,
        reflection_model=options.reflection_model,
        api_base=options.api_base,
        num_threads=options.num_threads,
        loss=loss,
    )
    simulated = settings.simulated
    sizes = QUICK_SIZES if options.quick else SIZES[options.task]
    base = Trial(options.task, options.data, sizes, settings, optimizer, "auto", 0)
    title = f"{optimizer}" + (f", simulated model {LOSS_TITLES[loss]}" if simulated else f", {options.model}")
    if options.figure != 7:
        seeds = options.seeds or (1 if options.quick else 3)
        fixed = (10, 40) if options.quick else FIXED
        timed_base = replace(base, settings=replace(settings, factor=options.factor if simulated else None))
        print(f"\n## Figure 6: {title}\n\nOne epoch over {sizes[0]} examples, {seeds} seeds.")
        figure_6(timed_base, [*(n for n in fixed if n <= sizes[0]), "auto"], seeds, workers)
    if options.figure != 6:
        seeds = options.seeds or (2 if options.quick else 5)
        groups = (1, 7, 50) if options.quick else GROUPS
        shorter = (min(sizes[0], MINIBATCH if options.quick else 2 * MINIBATCH), *sizes[1:])
        print(
            f"\n## Figure 7: {title}\n\nOne epoch over {shorter[0]} examples in minibatches of {MINIBATCH}, "
            f"{seeds} seeds."
        )
        figure_7(replace(base, sizes=shorter, size=MINIBATCH), groups, seeds, workers)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    print("# Ablations\n")
    if options.model is None:
        print(f"{SIMULATED}\nFigure 6: {Pace(options.factor)} Figure 7 waits for nothing.")
    print(", ".join(f"{name} {number}" for name, number in versions().items()) + ".")
    optimizers = [options.optimizer] if options.optimizer else ["combee", "playbook"]
    losses = LOSSES if options.model is None else LOSSES[:1]
    try:
        with Workers(options.workers or (2 if options.model is None else 1)) as workers:
            for optimizer, loss in itertools.product(optimizers, losses):
                run(options, loss, optimizer, workers)
    except (OSError, ValueError, CombeeError, LMError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{datetime.now(timezone.utc):%Y-%m-%d}; {machine()} at the end.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
