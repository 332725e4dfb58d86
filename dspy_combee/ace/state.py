"""The state of a run on disk: one JSON file, no pickles, written whole after each step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dspy_combee.playbook import Playbook
from dspy_combee.playbook.files import read_whole, write_whole
from dspy_combee.records import Spent, Usage

FILE_NAME = "playbook_state.json"

_FORMAT = "dspy_combee.playbook_state"
_VERSION = 1


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


class StateFile:
    """Saves and loads the state of a run.

    Args:
        log_dir: The folder; it is made when it is not there.
        run: What tells this run from others: a state that was saved for another is refused.
    """

    def __init__(self, log_dir: str | os.PathLike[str], run: Mapping[str, Any]) -> None:
        self.path = os.path.join(os.fspath(log_dir), FILE_NAME)
        self.run = dict(run)

    def save(self, state: RunState) -> None:
        """Write the state; the one before stays until this one is on disk.

        Raises:
            OSError: If it cannot be written.
        """
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "run": self.run,
            "playbooks": _playbooks_out(state.playbooks),
            "step": state.step,
            "best": None if state.best is None else _playbooks_out(state.best),
            "best_score": state.best_score,
            "best_step": state.best_step,
            "batch_sizes": list(state.batch_sizes),
            "sampler": state.sampler,
            "trace_sampler": state.trace_sampler,
            "metric_calls": dict(state.spent.metric_calls_by_phase),
            "usage": {phase: asdict(usage) for phase, usage in state.spent.usage_by_phase.items()},
            "reflection": asdict(state.reflection),
        }
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        write_whole(self.path, json.dumps(data, ensure_ascii=False, indent=1) + "\n")

    def load(self) -> RunState | None:
        """The state that was saved; None where there is none.

        Raises:
            ValueError: If the file holds something else, or the state of another run.
            OSError: If it cannot be read.
        """
        if not os.path.exists(self.path):
            return None
        try:
            data = json.loads(read_whole(self.path))
            if data["format"] != _FORMAT or data["version"] != _VERSION:
                raise ValueError(f"format {data['format']!r}, version {data['version']!r}")
            saved = dict(data["run"])
            state = _state_in(data)
            if not state.playbooks or type(state.step) is not int:
                raise ValueError("it has no playbooks, or its step is no number")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self.path} is no state of a PlaybookOptimizer run: {error}") from error
        differing = sorted(name for name in {*saved, *self.run} if saved.get(name) != self.run.get(name))
        if differing:
            raise ValueError(
                f"{self.path} holds the state of another run, which differs in {differing}: "
                f"{[saved.get(name) for name in differing]} there, {[self.run.get(name) for name in differing]} here. "
                "Give another log_dir to start anew."
            )
        return state


def _state_in(data: Mapping[str, Any]) -> RunState:
    return RunState(
        playbooks=_playbooks_in(data["playbooks"]),
        step=data["step"],
        best=None if data["best"] is None else _playbooks_in(data["best"]),
        best_score=data["best_score"],
        batch_sizes=tuple(data["batch_sizes"]),
        sampler=data["sampler"],
        spent=Spent(data["metric_calls"], {phase: Usage(**usage) for phase, usage in data["usage"].items()}),
        reflection=Usage(**data["reflection"]),
        best_step=data.get("best_step", data["step"]),
        trace_sampler=data.get("trace_sampler"),
    )


def _playbooks_out(playbooks: Mapping[str, Playbook]) -> dict[str, Any]:
    return {name: json.loads(playbook.to_json()) for name, playbook in playbooks.items()}


def _playbooks_in(plain: Mapping[str, Any]) -> dict[str, Playbook]:
    return {name: Playbook.from_json(json.dumps(playbook)) for name, playbook in plain.items()}
