"""The state of a run on collected traces on disk."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dspy_combee.records.types import Spent, Usage
from dspy_combee.runs.state_file import (
    Count,
    Saved,
    SavedSampler,
    SavedSpending,
    Size,
    StateFile,
    check_components,
    spending_in,
    spending_out,
)

FILE_NAME = "trace_state.json"


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


class _SavedState(SavedSpending):
    candidate: dict[str, str]
    kept: Count
    step: Count
    scores: list[float] | None
    batch_sizes: list[Size]
    sampler: SavedSampler | None
    done: bool


class _Saved(Saved):
    state: _SavedState


class TraceStateFile:
    """Saves and loads the state of a run on traces.

    Args:
        log_dir: The folder; it is made when it is not there.
        run: What tells this run from others: a state that was saved for another is refused.
    """

    def __init__(self, log_dir: str | os.PathLike[str], run: Mapping[str, Any]) -> None:
        self.file = StateFile(Path(log_dir) / FILE_NAME, "a run on traces", run)

    def save(self, state: TraceState) -> None:
        """See `StateFile.write`."""
        plain = asdict(replace(state, spent=Spent())) | spending_out(state.spent, state.reflection)
        plain.pop("spent")
        self.file.write({"state": plain})

    def load(self, components: Collection[str] | None = None) -> TraceState | None:
        """See `StateFile.read`.

        Args:
            components: The names of the texts that it must hold; None for any.
        """
        return self.file.read(partial(_state_in, components))


def _state_in(components: Collection[str] | None, data: Mapping[str, Any]) -> TraceState:
    _Saved.model_validate(data)
    plain = data["state"]
    check_components(plain["candidate"], components)
    return TraceState(
        candidate=plain["candidate"],
        kept=plain["kept"],
        step=plain["step"],
        scores=None if plain["scores"] is None else tuple(plain["scores"]),
        batch_sizes=tuple(plain["batch_sizes"]),
        sampler=plain["sampler"],
        done=plain["done"],
        **spending_in(plain),
    )


def refuse_trace_state(log_dir: str | os.PathLike[str] | None) -> None:
    """Refuse to go on without traces in a folder where a run began with them.

    Raises:
        ValueError: If there is the state of such a run.
    """
    if log_dir is not None and (Path(log_dir) / FILE_NAME).exists():
        raise ValueError(f"{log_dir} holds the state of a run on traces. Give them again, or another log_dir.")
