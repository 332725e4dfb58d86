"""The tasks of the benchmarks with their fixed splits, and the language models that do them.

    python -m benchmarks.tasks                  # prints the splits; files come from the folder COMBEE_DATA
    python -m benchmarks.tasks --data FOLDER

`conventions` is made up and needs no files. `formula` and `finer` are read from files of yours (`benchmarks._finance`
says which, and where they come from). The splits are drawn once, by `SPLIT_SEED`: every run of every benchmark learns
from the same training examples and is judged by the same held-out ones. The seed of a run is for all the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dspy

from benchmarks._finance import DATA_VARIABLE, FINER_FILE, FORMULA_FILE, answer_key, finer_task, formula_task
from dspy_combee.testing import (
    CapacityLoss,
    Loss,
    PowerLoss,
    Reflector,
    SimulatedLM,
    Student,
    Task,
    conventions_task,
    count_tokens,
    playbook_roles,
    read_code,
)

SPLIT_SEED = 0
FORMULA_VALIDATION_FILE = "formula_val_subset_300.jsonl"
SIZES = {"conventions": (200, 40, 80), "formula": (300, 60, 200), "finer": (250, 50, 199)}
"""Training, validation and held-out examples. Formula's validation examples come from its second file."""
LOSSES = ("power", "capacity")


def load_task(name: str, data: Path | None = None, sizes: tuple[int, int, int] | None = None) -> Task:
    """A task with its fixed splits.

    Args:
        name: `"conventions"`, `"formula"` or `"finer"`.
        data: The folder with the files. Default: the one that `COMBEE_DATA` names.
        sizes: Training, validation and held-out examples. Default: `SIZES`.

    Raises:
        FileNotFoundError: If a file is not there; the message says how to get it.
        ValueError: If the name is unknown, or a file is no good.
    """
    if name not in SIZES:
        raise ValueError(f"Unknown task {name!r}; known are {sorted(SIZES)}.")
    sizes = sizes or SIZES[name]
    if name == "conventions":
        return conventions_task(SPLIT_SEED, sizes)
    folder = data or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    if name == "finer":
        return finer_task(folder and folder / FINER_FILE, seed=SPLIT_SEED, sizes=sizes)
    files = [folder and folder / file for file in (FORMULA_FILE, FORMULA_VALIDATION_FILE)]
    return formula_task(*files, seed=SPLIT_SEED, sizes=sizes)


def fingerprint(examples: Sequence[dspy.Example]) -> str:
    """Some letters that tell one list of examples from another."""
    text = "\n".join(repr(sorted(example.toDict().items())) for example in examples)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


# The language models ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Models:
    """The model that does the task, and the one that reflects; two objects, so that each keeps its own account."""

    task_lm: dspy.LM
    reflection_lm: dspy.LM


def real_models(model: str, reflection_model: str | None = None, api_base: str | None = None) -> Models:
    """Models by name. DSPy's cache is off: a reply from it would cost no time and no money."""
    options: dict[str, Any] = {"cache": False} if api_base is None else {"cache": False, "api_base": api_base}
    return Models(dspy.LM(model, **options), dspy.LM(reflection_model or model, **options))


@dataclass(frozen=True)
class Pace:
    """Simulated latencies in seconds, all divided by `factor`; no waiting at all where that is None.

    Attributes:
        factor: What they are divided by.
        rollout: The range from which the time of one call that does the task is drawn.
        reflection: A reflection call takes this long,
        per_token: and so much more for each token of its reply.
    """

    factor: float | None = None
    rollout: tuple[float, float] = (0.2, 1.0)
    reflection: float = 2.0
    per_token: float = 0.02

    def __str__(self) -> str:
        if self.factor is None:
            return "Replies take no time."
        return (
            f"Latencies are simulated too: a rollout takes {self.rollout[0]:g} to {self.rollout[1]:g} s, a reflection "
            f"call {self.reflection:g} s and {self.per_token:g} s for each token of its reply, all divided by "
            f"{self.factor:g}; minutes are measured wall time multiplied by {self.factor:g}."
        )

    def scaled(self, seconds: float) -> float:
        """Seconds that are waited."""
        return 0.0 if self.factor is None else seconds / self.factor


@dataclass(frozen=True)
class PacedStudent(Student):
    """A `Student` whose replies take times drawn from a range."""

    pace: Pace = field(default_factory=Pace)
    rng: random.Random = field(default_factory=random.Random)

    def seconds(self, output_tokens: int) -> float:
        return self.pace.scaled(self.rng.uniform(*self.pace.rollout))


def simulated_models(task: Task, seed: int = 0, loss: str = "power", pace: Pace | None = None) -> Models:
    """The simulated student and reflection model for a task.

    Args:
        task: A task of this module.
        seed: Seed of the draws.
        loss: What one reflection call keeps: `"power"`, model (a) of the README, with its one record the
            first of the task; or `"capacity"`, model (b).
        pace: How long replies take. Default: no time.
    """
    pace = pace or Pace()
    lossy = simulated_loss(task, loss)
    solver = read_code if "code" in task.trainset[0] else answer_key(task, seed)
    student = PacedStudent(solver, pace=pace, rng=random.Random(seed))
    fixed, per_token = pace.scaled(pace.reflection), pace.scaled(pace.per_token)
    return Models(
        SimulatedLM(seed, student=student, model="simulated/student"),
        SimulatedLM(
            seed,
            reflector=Reflector(lossy, fixed, per_token),
            roles=playbook_roles(lossy, fixed, per_token),
            model="simulated/reflection",
        ),
    )


def simulated_loss(task: Task, loss: str) -> Loss:
    """The loss of that name, fitted to the size of the task's records."""
    if loss == "capacity":
        return CapacityLoss()
    if loss != "power":
        raise ValueError(f"Unknown loss {loss!r}; known are {list(LOSSES)}.")
    example = task.trainset[0]
    record = f"{example.inputs().toDict()}{task.metric(example, dspy.Prediction()).feedback}"
    return PowerLoss(one_record_tokens=count_tokens(record) + 100)  # The rest of the message: about 100 tokens.


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="FOLDER", help=f"the files (default: {DATA_VARIABLE})")
    options = parser.parse_args(arguments)
    for name in SIZES:
        try:
            task = load_task(name, options.data)
        except (FileNotFoundError, ValueError) as error:
            print(f"{name}: {error}")
            continue
        splits = {"training": task.trainset, "validation": task.valset, "held-out": task.testset}
        print(f"{name}: " + ", ".join(f"{len(s)} {title} ({fingerprint(s)})" for title, s in splits.items()))


if __name__ == "__main__":
    main()
