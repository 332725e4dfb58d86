"""One run of a benchmark grid: what is learned, what it takes, and how it is kept on disk. `run.py` is the command."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import Any

import dspy

from benchmarks.tasks import Models, Pace, Task, fingerprint, real_models, simulated_models
from dspy_combee import CombeeOptimizer, PlaybookOptimizer, Rollout, Spent, ThreadExecutor
from dspy_combee.calls.lm_calls import usage_of
from dspy_combee.records.text import estimate_tokens
from dspy_combee.reduce import resolve_aggregator
from dspy_combee.reduce.baselines import TopKAggregator
from dspy_combee.rollouts.feedback import Scorer
from dspy_combee.rollouts.map import MapStage, ProgramCopier

Size = int | str
"""n, or `"auto"`."""

AGGREGATORS = ("tree", "flat", "top_k", "summarize")
OPTIMIZERS: dict[str, tuple[str, str]] = {
    "gepa": ("gepa", ""),
    "combee": ("combee", "tree"),
    **{name: ("combee", name) for name in AGGREGATORS[1:]},
    "playbook": ("playbook", "tree"),
    **{f"playbook_{name}": ("playbook", name) for name in AGGREGATORS[1:]},
}
"""The front door and the aggregator of each name; `gepa` is `dspy.GEPA` itself."""

BEFORE = "before"
"""The program before learning, a row of its own."""


@dataclass(frozen=True)
class Settings:
    """What all cells of a grid share.

    Attributes:
        model: The model that does the task; None for the simulated one.
        reflection_model: The model that reflects; None for the same.
        api_base: Address of their server.
        embedder: The embedding model of Top-K; None for TF-IDF.
        budget: Metric calls of a run of `dspy.GEPA` or `CombeeOptimizer`.
        epochs: Passes of a run of `PlaybookOptimizer` over the training examples.
        num_threads: Calls in flight at most.
        loss: What the simulated reflection model keeps.
        factor: What simulated latencies are divided by; None for no latencies.
    """

    model: str | None = None
    reflection_model: str | None = None
    api_base: str | None = None
    embedder: str | None = None
    budget: int = 600
    epochs: float = 1
    num_threads: int = 32
    loss: str = "power"
    factor: float | None = None

    @property
    def simulated(self) -> bool:
        return self.model is None

    def models(self, task: Task, seed: int) -> Models:
        if self.model is None:
            return simulated_models(task, seed, self.loss, Pace(self.factor))
        return real_models(self.model, self.reflection_model, self.api_base)

    def minutes(self, seconds: float) -> float:
        """Minutes of training; simulated ones are scaled back."""
        return seconds / 60 * (self.factor or 1 if self.simulated else 1)


@dataclass(frozen=True)
class Cell:
    """One run: a task, a way to learn it, n, and a seed."""

    task: str
    optimizer: str
    size: Size
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.optimizer}-{self.size}-seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What a run brought and took.

    Attributes:
        accuracy: On the held-out examples, in percent.
        failed: Held-out runs that gave no answer; they count as wrong.
        minutes: Training time, by the clock, scaled back where latencies are simulated.
        prompt_tokens: Tokens of the learned instructions.
        batch_sizes: n of each step, where it is known.
        choice: The n that the controller chose; None where it had no say, or not the time to choose.
        spent: Calls, tokens and dollars by phase. `dspy.GEPA` does not tell validation from minibatches: all its
            rollouts are under `rollouts`.
    """

    accuracy: float
    failed: int = 0
    minutes: float = 0.0
    prompt_tokens: int = 0
    batch_sizes: tuple[int, ...] = ()
    choice: int | None = None
    spent: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def tokens(self, *phases: str) -> int:
        """Tokens in and out of the phases named, else of all."""
        chosen = [self.spent[phase] for phase in phases or self.spent if phase in self.spent]
        return sum(phase["input_tokens"] + phase["output_tokens"] for phase in chosen)

    def dollars(self, *phases: str) -> float | None:
        """Dollars of the phases named, else of all; None where one is not known, or nothing was paid for."""
        costs = [self.spent[phase]["cost"] for phase in phases or self.spent if phase in self.spent]
        return sum(costs) if costs and None not in costs else None


# Running ----------------------------------------------------------------------------------------------------


def run_cell(cell: Cell, task: Task, settings: Settings) -> tuple[Outcome, Any]:
    """Learn, and judge on the held-out examples.

    Returns:
        The outcome, and the program.
    """
    models = settings.models(task, cell.seed)
    program, learned = task.program, Outcome(0.0)
    # The account of dspy.GEPA is the models' own history.
    with dspy.context(lm=models.task_lm, disable_history=False, max_history_size=1_000_000):
        if cell.optimizer != BEFORE:
            door, aggregator = OPTIMIZERS[cell.optimizer]
            program, learned = _DOORS[door](cell, task, settings, models, aggregator)
        accuracy, failed = judge(program, task, settings.num_threads)
    instructions = [predictor.signature.instructions for _, predictor in program.named_predictors()]
    tokens = sum(map(estimate_tokens, instructions))
    return replace(learned, accuracy=accuracy, failed=failed, prompt_tokens=tokens), program


def judge(program: Any, task: Task, num_threads: int) -> tuple[float, int]:
    """Accuracy on the held-out examples in percent, and how many of them gave no answer."""
    rollouts = run_program(program, task, task.testset, num_threads)
    return 100 * mean(rollout.score for rollout in rollouts), sum(rollout.error is not None for rollout in rollouts)


def run_program(program: Any, task: Task, examples: Sequence[dspy.Example], num_threads: int) -> list[Rollout]:
    """Run a program on examples. A provider that fails stops it; any other failure is a wrong answer."""
    stage = MapStage(ProgramCopier(program), Scorer(task.metric), ThreadExecutor(num_threads))
    return stage.run([(program, examples)])


def make_aggregator(name: str, settings: Settings) -> Any:
    """The aggregator of that name; Top-K with the embedder of the settings."""
    if name == "top_k" and settings.embedder is not None:
        return TopKAggregator(embedder=dspy.Embedder(settings.embedder))
    return resolve_aggregator(name)


def _run_gepa(cell: Cell, task: Task, settings: Settings, models: Models, aggregator: str) -> tuple[Any, Outcome]:
    optimizer = dspy.GEPA(
        task.metric,
        max_metric_calls=settings.budget,
        reflection_minibatch_size=int(cell.size),
        reflection_lm=models.reflection_lm,
        num_threads=settings.num_threads,
        use_merge=False,
        seed=cell.seed,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # progress bars
        program, seconds = timed(optimizer.compile, task.program, trainset=task.trainset, valset=task.valset)
    spent = Spent().plus("rollouts", 0, usage_of(models.task_lm.history))
    spent = spent.plus("reflection", 0, usage_of(models.reflection_lm.history))
    return program, Outcome(0.0, minutes=settings.minutes(seconds), spent=spent.to_dict())


def _run_combee(cell: Cell, task: Task, settings: Settings, models: Models, aggregator: str) -> tuple[Any, Outcome]:
    optimizer = CombeeOptimizer(
        task.metric,
        max_metric_calls=settings.budget,
        reflection_minibatch_size=cell.size,
        reflection_lm=models.reflection_lm,
        num_threads=settings.num_threads,
        use_merge=False,
        seed=cell.seed,
        aggregator=make_aggregator(aggregator, settings),
        track_stats=True,
        verbose=False,
    )
    program, seconds = timed(optimizer.compile, task.program, task.trainset, valset=task.valset)
    return program, _outcome_of(program.detailed_results, settings.minutes(seconds))


def _run_playbook(cell: Cell, task: Task, settings: Settings, models: Models, aggregator: str) -> tuple[Any, Outcome]:
    optimizer = PlaybookOptimizer(
        task.metric,
        reflection_lm=models.reflection_lm,
        minibatch_size=cell.size,
        num_epochs=settings.epochs,
        num_threads=settings.num_threads,
        seed=cell.seed,
        aggregator=make_aggregator(aggregator, settings),
        track_stats=True,
    )
    program, seconds = timed(optimizer.compile, task.program, task.trainset)
    return program, _outcome_of(program.detailed_results, settings.minutes(seconds))


_DOORS: dict[str, Callable[[Cell, Task, Settings, Models, str], tuple[Any, Outcome]]] = {
    "gepa": _run_gepa,
    "combee": _run_combee,
    "playbook": _run_playbook,
}


def timed(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    return function(*arguments, **options), time.perf_counter() - started


def _outcome_of(result: Any, minutes: float) -> Outcome:
    fits = [step.fit for step in result.steps if step.fit is not None]
    return Outcome(
        accuracy=0.0,
        minutes=minutes,
        batch_sizes=result.batch_sizes,
        choice=fits[-1].choice if fits else None,
        spent=result.spent.to_dict(),
    )


# On disk ----------------------------------------------------------------------------------------------------


class OtherGridError(Exception):
    """A folder holds cells that were run with other settings."""


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for name in ("dspy-combee", "dspy", "gepa"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            from dspy_combee import __version__

            found[name] = __version__
    return found


def machine() -> str:
    """How many processors there are and how busy, which is what measured minutes depend on."""
    text = f"{os.cpu_count()} CPUs"
    try:
        return f"{text}, load average {os.getloadavg()[0]:.1f}"
    except (AttributeError, OSError):  # Windows knows none.
        return text


class Store:
    """Finished cells in a folder, one JSON file each, written whole or not at all.

    A file holds figures and settings. No text of the data or of a model is in it.

    Args:
        folder: The folder; made when the first cell is kept.
        settings: Those of the grid. A cell that was run with others is refused.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder / "cells"
        self.settings = settings

    def load(self, cell: Cell, task: Task) -> Outcome | None:
        """The outcome of a finished cell; None where there is none.

        Raises:
            OtherGridError: If it was run with other settings or data.
        """
        path = self._path(cell)
        if not path.is_file():
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        now = json.loads(json.dumps(self._identity(task)))
        for name in now.keys() | kept["identity"].keys():
            before = kept["identity"].get(name)
            if before != now.get(name):
                raise OtherGridError(
                    f"{path} was run with {name}={before!r}, not {now.get(name)!r}; give another --out"
                )
        outcome = kept["outcome"]
        return Outcome(**{**outcome, "batch_sizes": tuple(outcome["batch_sizes"])})

    def keep(self, cell: Cell, task: Task, outcome: Outcome) -> None:
        """Write the outcome of a cell."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {
            "cell": asdict(cell),
            "simulated": self.settings.simulated,
            "identity": self._identity(task),
            "versions": versions(),
            "outcome": asdict(outcome),
        }
        path = self._path(cell)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        unfinished.replace(path)

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json"

    def _identity(self, task: Task) -> dict[str, Any]:
        splits: Sequence[Any] = (task.trainset, task.valset, task.testset)
        shared = asdict(self.settings)
        shared.pop("api_base")  # Where a model is served does not change what it is.
        return {**shared, "splits": [f"{len(split)}/{fingerprint(split)}" for split in splits]}
