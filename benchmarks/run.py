"""The paper's comparison (section 4.3, figures 4 and 5) on any language model: quality against training time.

    python -m benchmarks.run                                   # simulated, some minutes
    python -m benchmarks.run --task formula --data FOLDER --model openai/gpt-4o-mini --out DIR \\
        --optimizer gepa,combee,playbook,flat,top_k,summarize --minibatch-size 1,5,20,50,auto --seeds 3

It runs every optimizer at every minibatch size with every seed, one run after the other, and writes one table
(`table.md`, `table.csv`) and one plot per task (`quality-TASK.png`, by matplotlib, extra `report`) to DIR. Stopped and
started again with the same DIR, it goes on with the first run that is not finished. The provider's key is read from
the environment. Without `--model` the language model is simulated, and every output says so.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its price map is not worth a download

from benchmarks._cells import (
    BEFORE,
    OPTIMIZERS,
    Cell,
    OtherGridError,
    Outcome,
    Settings,
    Size,
    Store,
    machine,
    run_cell,
    versions,
)
from benchmarks._options import above_zero, whole
from benchmarks.tasks import LOSSES, SIZES, Pace, Task, load_task
from dspy_combee.calls.provider_errors import FATAL_ERRORS
from dspy_combee.cli.common import quiet_logs
from dspy_combee.records.errors import ProviderError

PHASES = ("profiling", "rollouts", "validation", "feedback", "reflection")
SHOWN = {
    "minibatch": ("profiling", "rollouts", "feedback"),
    "validation": ("validation",),
    "reflection": ("reflection",),
}
SIMULATED = (
    "SIMULATED: no language model was called. The figures show how the methods treat lessons, not a model's skill."
)


@dataclass(frozen=True)
class Row:
    """One line of the table: the outcomes of all seeds."""

    task: str
    optimizer: str
    size: Size
    outcomes: tuple[Outcome, ...]

    @property
    def title(self) -> str:
        choices = [str(outcome.choice or "–") for outcome in self.outcomes]
        return f"auto ({', '.join(choices)})" if self.size == "auto" else str(self.size)

    def accuracies(self) -> list[float]:
        return [outcome.accuracy for outcome in self.outcomes]

    def minutes(self) -> float:
        return mean(outcome.minutes for outcome in self.outcomes)

    def tokens(self, *phases: str) -> float:
        return mean(outcome.tokens(*phases) for outcome in self.outcomes)

    def dollars(self, *phases: str) -> float | None:
        costs = [cost for outcome in self.outcomes if (cost := outcome.dollars(*phases)) is not None]
        return mean(costs) if len(costs) == len(self.outcomes) else None


class Table:
    """The rows of a grid, with their costs beside those of the flat call and of minibatches of one."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.by_place = {(row.task, row.optimizer, row.size): row for row in rows}
        learned = [row for row in rows if row.optimizer != BEFORE]
        self.priced = bool(learned) and all(row.dollars() is not None for row in learned)

    def over_flat(self, row: Row) -> float | None:
        """The row's cost over that of the flat call at the same n, in the same front door."""
        playbook = OPTIMIZERS.get(row.optimizer, ("", ""))[0] == "playbook"
        return self._ratio(row, self.by_place.get((row.task, "playbook_flat" if playbook else "flat", row.size)))

    def over_sequential(self, row: Row) -> float | None:
        """The row's cost over that of minibatches of one, which no aggregator changes, in the same front door."""
        playbook = OPTIMIZERS.get(row.optimizer, ("", ""))[0] == "playbook"
        names = ("playbook_flat", "playbook") if playbook else ("flat", "combee", "gepa")
        found = (self.by_place.get((row.task, name, 1)) for name in names)
        return self._ratio(row, next((other for other in found if other is not None), None))

    def _ratio(self, row: Row, other: Row | None) -> float | None:
        if other is None or row.optimizer == BEFORE:
            return None
        cost, reference = ((item.dollars() or 0.0) if self.priced else float(item.tokens()) for item in (row, other))
        return cost / reference if reference else None

    def markdown(self) -> str:
        head = ["task", "optimizer", "n", "accuracy %", "minutes"]
        head += [f"tokens, {name}" for name in SHOWN] + ["tokens"]
        head += ([f"$ {name}" for name in SHOWN] + ["$"]) if self.priced else []
        head += ["prompt tokens", "cost / flat", "cost / sequential"]
        lines = [head, ["---"] * 3 + ["--:"] * (len(head) - 3)]
        return "\n".join("| " + " | ".join(line) + " |" for line in [*lines, *map(self._cells, self.rows)])

    def _cells(self, row: Row) -> list[str]:
        name, ratios = row.optimizer, [self.over_flat(row), self.over_sequential(row)]
        cells = [row.task, name, row.title, spread(row.accuracies(), 1)]
        cells += [_number(row.minutes(), 1) if name != BEFORE else "–"]
        cells += [f"{row.tokens(*phases):,.0f}" for phases in SHOWN.values()] + [f"{row.tokens():,.0f}"]
        if self.priced:
            cells += [_number(row.dollars(*phases), 4) for phases in SHOWN.values()] + [_number(row.dollars(), 4)]
        prompt = mean(outcome.prompt_tokens for outcome in row.outcomes)
        return [*cells, f"{prompt:,.0f}", *(_number(ratio, 2) for ratio in ratios)]

    def write_csv(self, path: Path, simulated: bool) -> None:
        """The same figures, each phase by itself."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(self._record(self.rows[0], simulated)))
            writer.writeheader()
            writer.writerows(self._record(row, simulated) for row in self.rows)

    def _record(self, row: Row, simulated: bool) -> dict[str, Any]:
        accuracies = row.accuracies()
        return {
            "simulated": simulated,
            "task": row.task,
            "optimizer": row.optimizer,
            "n": row.size,
            "seeds": len(accuracies),
            "accuracy": mean(accuracies),
            "accuracy_sd": stdev(accuracies) if len(accuracies) > 1 else "",
            "minutes": row.minutes(),
            **{f"tokens_{phase}": row.tokens(phase) for phase in PHASES},
            "tokens": row.tokens(),
            **{f"dollars_{phase}": _or_blank(row.dollars(phase)) for phase in PHASES},
            "dollars": _or_blank(row.dollars()),
            "prompt_tokens": mean(outcome.prompt_tokens for outcome in row.outcomes),
            "cost_over_flat": _or_blank(self.over_flat(row)),
            "cost_over_sequential": _or_blank(self.over_sequential(row)),
        }


def spread(values: Sequence[float], digits: int) -> str:
    """Mean, and standard deviation where there are several."""
    text = f"{mean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {stdev(values):.{digits}f}"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _or_blank(value: float | None) -> Any:
    return "" if value is None else value


def plot(table: Table, task: str, path: Path, note: str) -> bool:
    """Plot accuracy over training minutes; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    axes = Figure(figsize=(9, 6), layout="constrained").subplots()
    rows = [row for row in table.rows if row.task == task]
    names = list(dict.fromkeys(row.optimizer for row in rows if row.optimizer != BEFORE))
    for name, marker in zip(names, "osD^vP*X<>", strict=False):
        own = [row for row in rows if row.optimizer == name]
        minutes, accuracy = [row.minutes() for row in own], [mean(row.accuracies()) for row in own]
        errors = [stdev(row.accuracies()) if len(row.outcomes) > 1 else 0.0 for row in own]
        axes.errorbar(minutes, accuracy, errors, fmt=marker, capsize=3, label=name)
        for row, x, y in zip(own, minutes, accuracy, strict=True):
            axes.annotate(str(row.size), (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8)
    for row in rows:
        if row.optimizer == BEFORE:
            axes.axhline(mean(row.accuracies()), linestyle="--", color="grey", label="before learning")
    axes.set(xlabel="training minutes", ylabel="held-out accuracy in %", title=f"{task}{note}")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.legend()
    axes.figure.savefig(path, dpi=120)  # type: ignore[union-attr]
    return True


# The grid ---------------------------------------------------------------------------------------------------


def grid(tasks: Iterable[str], optimizers: Sequence[str], sizes: Sequence[Size], seeds: int) -> list[Cell]:
    """Every cell. `dspy.GEPA` has no controller, and so none at `"auto"`."""
    cells = []
    for task in tasks:
        cells += [Cell(task, BEFORE, "-", seed) for seed in range(seeds)]
        cells += [
            Cell(task, optimizer, size, seed)
            for optimizer in optimizers
            for size in sizes
            if (optimizer, size) != ("gepa", "auto")
            for seed in range(seeds)
        ]
    return cells


def run_grid(cells: Sequence[Cell], tasks: dict[str, Task], settings: Settings, store: Store) -> tuple[Table, int]:
    """Run what is not finished.

    Returns:
        The table of what is, and how many cells failed.
    """
    done: dict[tuple[str, str, Size], list[Outcome]] = {}
    failed = 0
    for number, cell in enumerate(cells, start=1):
        task = tasks[cell.task]
        outcome, origin = store.load(cell, task), "read back"
        if outcome is None:
            try:
                outcome, origin = run_cell(cell, task, settings)[0], "done"
            except Exception as error:
                if isinstance(error, FATAL_ERRORS) or (isinstance(error, ProviderError) and not error.transient):
                    raise  # It would meet every cell.
                failed += 1
                print(f"[{number}/{len(cells)}] {cell.name}: failed: {type(error).__name__}: {error}"[:300], flush=True)
                continue
            store.keep(cell, task, outcome)
        minutes = f", {outcome.minutes:.1f} minutes" if cell.optimizer != BEFORE else ""
        print(f"[{number}/{len(cells)}] {cell.name}: {origin}, {outcome.accuracy:.1f} %{minutes}", flush=True)
        done.setdefault((cell.task, cell.optimizer, cell.size), []).append(outcome)
    return Table([Row(*place, tuple(outcomes)) for place, outcomes in done.items()]), failed


def heading(settings: Settings, tasks: dict[str, Task], seeds: int) -> str:
    """What the figures are of."""
    made = ", ".join(f"{name} {number}" for name, number in versions().items())
    lines = [f"{datetime.now(timezone.utc):%Y-%m-%d}; {made}; {machine()} at the end."]
    if settings.simulated:
        loss = {"power": "(a) power law in prompt tokens", "capacity": "(b) a number of lessons per call"}
        lines = [SIMULATED, f"What a reflection call keeps: {loss[settings.loss]}. {Pace(settings.factor)}", *lines]
    else:
        lines.append(f"Model {settings.model}, reflection by {settings.reflection_model or settings.model}.")
    for name, task in tasks.items():
        sizes = f"{len(task.trainset)} training, {len(task.valset)} validation, {len(task.testset)} held-out examples"
        lines.append(f"{name}: {sizes}; {seeds} seeds.")
    lines.append(
        f"A run of gepa, combee, flat, top_k or summarize has {settings.budget} metric calls, a playbook "
        f"{settings.epochs:g} epochs; {settings.num_threads} threads. Of gepa, minibatch tokens include validation."
    )
    return "\n".join(lines)


def write_report(table: Table, settings: Settings, tasks: dict[str, Task], seeds: int, folder: Path) -> None:
    """Print the table, and write it and the plots."""
    unit = "dollars" if table.priced else "tokens, as no price is known"
    text = f"{heading(settings, tasks, seeds)}\nCost ratios are in {unit}.\n\n{table.markdown()}\n"
    print(f"\n{text}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(text, encoding="utf-8")
    table.write_csv(folder / "table.csv", settings.simulated)
    note = " (SIMULATED)" if settings.simulated else f" ({settings.model})"
    plotted = [plot(table, task, folder / f"quality-{task}.png", note) for task in tasks]
    if not all(plotted):
        print("No plot: matplotlib is not installed (pip install 'dspy-combee[report]').")


# The command ------------------------------------------------------------------------------------------------


def _names(known: Iterable[str]) -> Any:
    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {name!r}; known are {', '.join(known)}")
        return text.split(",")

    return parse


def _sizes(text: str) -> list[Size]:
    sizes: list[Size] = []
    for item in text.split(","):
        if item != "auto" and not (item.isdecimal() and int(item) > 0):
            raise argparse.ArgumentTypeError(f"expected numbers of at least 1, or auto, got {item!r}")
        sizes.append(item if item == "auto" else int(item))
    return sizes


def _split(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected three numbers such as 300,60,200, got {text!r}")
    train, val, test = map(int, parts)
    return train, val, test


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = made.add_argument
    add("--task", type=_names(SIZES), default=["conventions"], help=f"of {', '.join(SIZES)} (default: conventions)")
    add("--data", type=Path, metavar="FOLDER", help="the files of formula and finer (default: COMBEE_DATA)")
    add("--sizes", type=_split, metavar="T,V,H", help="training, validation and held-out examples")
    default = ["gepa", "combee", "flat", "top_k", "summarize", "playbook", "playbook_flat"]
    add("--optimizer", type=_names(OPTIMIZERS), default=default, help=f"of {', '.join(OPTIMIZERS)}")
    add("--minibatch-size", type=_sizes, default=[1, 5, 20, 50, "auto"], help="default: 1,5,20,50,auto")
    add("--seeds", type=whole, default=2, help="runs of each cell (default: 2)")
    add("--model", help="the model that does the task, as dspy.LM takes it; without it all is simulated")
    add("--reflection-model", help="the model that reflects (default: the same)")
    add("--api-base", metavar="URL", help="address of the models' server")
    add("--embedder", help="embedding model of top_k, as dspy.Embedder takes it (default: TF-IDF)")
    add("--budget", type=whole, default=600, help="metric calls of a run (default: 600)")
    add("--epochs", type=above_zero, default=1, help="passes of a playbook run (default: 1)")
    add("--num-threads", type=whole, default=32, help="calls in flight at most (default: 32)")
    add("--loss", choices=LOSSES, default="power", help="what the simulated reflection model loses (default: power)")
    add("--factor", type=above_zero, default=50, help="what simulated latencies are divided by (default: 50)")
    add("--out", type=Path, metavar="DIR", help="where finished runs, table and plots are kept (default: nowhere)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    settings = Settings(
        model=options.model,
        reflection_model=options.reflection_model,
        api_base=options.api_base,
        embedder=options.embedder,
        budget=options.budget,
        epochs=options.epochs,
        num_threads=options.num_threads,
        loss=options.loss,
        factor=options.factor if options.model is None else None,
    )
    cells = grid(options.task, options.optimizer, options.minibatch_size, options.seeds)
    with tempfile.TemporaryDirectory() as temporary, quiet_logs():
        folder = options.out or Path(temporary)
        try:
            tasks = {name: load_task(name, options.data, options.sizes) for name in options.task}
            if settings.simulated:
                print(SIMULATED)
            table, failed = run_grid(cells, tasks, settings, Store(folder, settings))
        except (OSError, ValueError, OtherGridError, ProviderError, *FATAL_ERRORS) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        if table.rows:
            write_report(table, settings, tasks, options.seeds, folder)
    if failed:
        print(f"{failed} of {len(cells)} runs failed; the same command tries them again.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
