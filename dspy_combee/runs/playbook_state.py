"""The state of a run of `PlaybookOptimizer` on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from dspy_combee.playbook import Playbook
from dspy_combee.records.types import Spent, Usage
from dspy_combee.runs.state_file import (
    Count,
    SavedSampler,
    SavedSpending,
    Size,
    StateFile,
    check_components,
    spending_in,
    spending_out,
)

FILE_NAME = "playbook_state.json"


@dataclass(frozen=True)
class RunState:
    """A run between two steps.

    Attributes:
        playbooks: The playbooks after the last step, by component.
        step: The number of steps so far.
        best: The best playbooks by validation; None before the first validation, or without a valset.
        best_score: Their mean score on the validation examples.
        batch_sizes: n of each step.
        sampler: The sampler's state; None before the first step.
        spent: What the run has spent, reflection not counted.
        reflection: What reflection has spent.
        trace_sampler: The state of the sampler of traces; None before the first step, or without traces.
        best_step: The step after which the best playbooks stood; 0 for the start.
    """

    playbooks: Mapping[str, Playbook]
    step: int = 0
    best: Mapping[str, Playbook] | None = None
    best_score: float | None = None
    batch_sizes: tuple[int, ...] = ()
    sampler: Mapping[str, Any] | None = None
    spent: Spent = field(default_factory=Spent)
    reflection: Usage = field(default_factory=Usage)
    best_step: int = 0
    trace_sampler: Mapping[str, Any] | None = None


class _Saved(SavedSpending):
    playbooks: dict[str, Any] = Field(min_length=1)
    step: Count
    best: dict[str, Any] | None
    best_score: float | None
    best_step: Count = 0
    batch_sizes: list[Size]
    sampler: SavedSampler | None
    trace_sampler: SavedSampler | None = None


class RunStateFile:
    """Saves and loads the state of a run.

    Args:
        log_dir: The folder; it is made when it is not there.
        run: What tells this run from others: a state that was saved for another is refused.
    """

    def __init__(self, log_dir: str | os.PathLike[str], run: Mapping[str, Any]) -> None:
        self.file = StateFile(Path(log_dir) / FILE_NAME, "a PlaybookOptimizer run", run)

    def save(self, state: RunState) -> None:
        """See `StateFile.write`."""
        fields = {
            "playbooks": _playbooks_out(state.playbooks),
            "step": state.step,
            "best": None if state.best is None else _playbooks_out(state.best),
            "best_score": state.best_score,
            "best_step": state.best_step,
            "batch_sizes": list(state.batch_sizes),
            "sampler": state.sampler,
            "trace_sampler": state.trace_sampler,
            **spending_out(state.spent, state.reflection),
        }
        self.file.write(fields, ensure_ascii=False, indent=1)

    def load(self, components: Collection[str] | None = None) -> RunState | None:
        """See `StateFile.read`.

        Args:
            components: The names of the playbooks that it must hold; None for any.
        """
        return self.file.read(partial(_state_in, components))


def _state_in(components: Collection[str] | None, data: Mapping[str, Any]) -> RunState:
    _Saved.model_validate(data)
    for playbooks in (data["playbooks"], data["best"]):
        if playbooks is not None:
            check_components(playbooks, components)
    return RunState(
        playbooks=_playbooks_in(data["playbooks"]),
        step=data["step"],
        best=None if data["best"] is None else _playbooks_in(data["best"]),
        best_score=data["best_score"],
        batch_sizes=tuple(data["batch_sizes"]),
        sampler=data["sampler"],
        best_step=data.get("best_step", data["step"]),
        trace_sampler=data.get("trace_sampler"),
        **spending_in(data),
    )


def _playbooks_out(playbooks: Mapping[str, Playbook]) -> dict[str, Any]:
    return {name: json.loads(playbook.to_json()) for name, playbook in playbooks.items()}


def _playbooks_in(plain: Mapping[str, Any]) -> dict[str, Playbook]:
    return {name: Playbook.from_json(json.dumps(playbook)) for name, playbook in plain.items()}
