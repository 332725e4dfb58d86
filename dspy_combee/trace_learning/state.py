"""The state of a run on collected traces on disk: one JSON file, no pickles, written whole after each step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dspy_combee.playbook.files import read_whole, write_whole
from dspy_combee.records import Spent, Usage

FILE_NAME = "trace_state.json"

_FORMAT = "dspy_combee.trace_state"
_VERSION = 1


@dataclass(frozen=True)
class TraceState:
    """A run on traces between two steps.

    Attributes:
        candidate: The texts that the traces have made so far.
        kept: How many proposals were kept.
        step: The number of steps so far.
        scores: The candidate's scores on the validation examples; None before the first validation, or without any.
        batch_sizes: n of each step.
        sampler: The sampler's state; None before the first step.
        spent: What the run has spent, reflection not counted.
        reflection: What reflection has spent.
        done: Whether the passes over the traces are over.
    """

    candidate: Mapping[str, str]
    kept: int = 0
    step: int = 0
    scores: tuple[float, ...] | None = None
    batch_sizes: tuple[int, ...] = ()
    sampler: Mapping[str, Any] | None = None
    spent: Spent = field(default_factory=Spent)
    reflection: Usage = field(default_factory=Usage)
    done: bool = False

    @property
    def score(self) -> float | None:
        """The candidate's mean score on the validation examples."""
        return sum(self.scores) / len(self.scores) if self.scores else None


class TraceStateFile:
    """Saves and loads the state of a run on traces.

    Args:
        log_dir: The folder; it is made when it is not there.
        run: What tells this run from others: a state that was saved for another is refused.
    """

    def __init__(self, log_dir: str | os.PathLike[str], run: Mapping[str, Any]) -> None:
        self.path = Path(log_dir) / FILE_NAME
        self.run = dict(run)

    def save(self, state: TraceState) -> None:
        """Write the state; the one before stays until this one is on disk.

        Raises:
            OSError: If it cannot be written.
        """
        plain = {
            **asdict(replace(state, spent=Spent())),
            "metric_calls": dict(state.spent.metric_calls_by_phase),
            "usage": {phase: asdict(usage) for phase, usage in state.spent.usage_by_phase.items()},
        }
        plain.pop("spent")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = {"format": _FORMAT, "version": _VERSION, "run": self.run, "state": plain}
        write_whole(self.path, json.dumps(data) + "\n")

    def load(self) -> TraceState | None:
        """The state that was saved; None where there is none.

        Raises:
            ValueError: If the file holds something else, or the state of another run.
            OSError: If it cannot be read.
        """
        if not self.path.exists():
            return None
        try:
            data = json.loads(read_whole(self.path))
            if data["format"] != _FORMAT or data["version"] != _VERSION:
                raise ValueError(f"format {data['format']!r}, version {data['version']!r}")
            saved, state = data["run"], _state_in(data["state"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self.path} is no state of a run on traces: {error}") from error
        differing = sorted(name for name in {*saved, *self.run} if saved.get(name) != self.run.get(name))
        if differing:
            raise ValueError(
                f"{self.path} holds the state of another run, which differs in {differing}: "
                f"{[saved.get(name) for name in differing]} there, {[self.run.get(name) for name in differing]} here. "
                "Give another log_dir to start anew."
            )
        return state


def _state_in(plain: Mapping[str, Any]) -> TraceState:
    usage = {phase: Usage(**used) for phase, used in plain["usage"].items()}
    return TraceState(
        candidate={str(name): str(text) for name, text in plain["candidate"].items()},
        kept=int(plain["kept"]),
        step=int(plain["step"]),
        scores=None if plain["scores"] is None else tuple(plain["scores"]),
        batch_sizes=tuple(plain["batch_sizes"]),
        sampler=plain["sampler"],
        spent=Spent(dict(plain["metric_calls"]), usage),
        reflection=Usage(**plain["reflection"]),
        done=bool(plain["done"]),
    )


def refuse_trace_state(log_dir: str | os.PathLike[str] | None) -> None:
    """Refuse to go on without traces in a folder where a run began with them.

    Raises:
        ValueError: If there is the state of such a run.
    """
    if log_dir is not None and (Path(log_dir) / FILE_NAME).exists():
        raise ValueError(f"{log_dir} holds the state of a run on traces. Give them again, or another log_dir.")
