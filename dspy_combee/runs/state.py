"""The state of a walk-forward run on disk: one JSON file, no pickles, written whole after each step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError

from dspy_combee.records.files import replacing
from dspy_combee.records.types import Spent, Usage

VERSION = 2

TRACE_STATE = "trace_state.json"
"""The file of a `CombeeOptimizer` on traces, in its `log_dir`."""

PLAYBOOK_STATE = "playbook_state.json"
"""The file of a `PlaybookOptimizer`."""

_RUN_KINDS = {TRACE_STATE: "a run on traces", PLAYBOOK_STATE: "a PlaybookOptimizer run"}

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class _Profile:
    """Check the state of a `ControlledSize`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    todo: list[Size]
    num_tasks: Size
    cold: bool
    rollouts: Count
    current: Count
    measurements: list[Annotated[tuple[Size, Annotated[float, Field(ge=0, allow_inf_nan=False)]], Strict(False)]]


@dataclass(frozen=True)
class _Sampler:
    """Check the state of an `EpochSampler` over positions."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    epoch: Count
    queue: list[Count]
    drawn: Count
    kind: str
    sizer: _Profile | Count | None

    def __post_init__(self) -> None:
        expected = {"ControlledSize": _Profile, "ReplayedSizes": int}.get(self.kind, type(None))
        if not isinstance(self.sizer, expected):
            raise ValueError(f"a {self.kind} has another state")


@dataclass(frozen=True)
class LoopState:
    """Hold a walk-forward run between two steps; `current` and `best` are what the learner's `dump` gave."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    current: Any
    """The state after the last step."""
    step: Count = 0
    """The number of steps so far."""
    kept: Count = 0
    """How many proposals were kept."""
    best: Any = None
    """The best state by validation; None before the first validation, or without a valset."""
    best_score: float | None = None
    """Its mean score on the validation examples."""
    best_scores: tuple[float, ...] | None = None
    """Its scores on them."""
    best_step: Count = 0
    """The step after which it stood; 0 for the start."""
    batch_sizes: tuple[Size, ...] = ()
    """n of each step."""
    samplers: dict[str, Any] = field(default_factory=dict)
    """The state of each source's sampler, by the name of the source."""
    spent: Spent = field(default_factory=Spent)
    """What the run has spent, reflection not counted."""
    reflection: Usage = field(default_factory=Usage)
    """What reflection has spent."""
    done: bool = False
    """Whether the run is over."""


_STATE = TypeAdapter(LoopState)
_SAMPLERS = TypeAdapter(dict[str, _Sampler])


class StateFile:
    """Save and load the state of a run.

    Args:
        path: The file; its folder is made when it is not there.
        run: What tells this run from others: a state that was saved for another is refused.
    """

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self.path = path
        self.run = dict(run)

    def write(self, state: LoopState) -> None:
        """Write the state; the one before stays until this one is on disk.

        Raises:
            OSError: If it cannot be written.
        """
        plain = _STATE.dump_python(state, mode="json")
        data = {"format": self._format, "version": VERSION, "run": self.run, "state": plain}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(json.dumps(data, ensure_ascii=False, indent=1) + "\n")

    def read(self) -> LoopState | None:
        """Return the state that was saved; None where there is none.

        Raises:
            ValueError: If the file is damaged or holds something else, or the state of another run.
            OSError: If it cannot be read.
        """
        if not self.path.exists():
            return None
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or not isinstance(data.get("run"), dict):
                raise ValueError("it is no JSON object with the fields of a run")
            kind, version, saved = (data.pop(name, None) for name in ("format", "version", "run"))
            if kind != self._format or version not in (1, VERSION):
                raise ValueError(f"format {kind!r}, version {version!r}")
            # The state of another run need not fit this one, which is the first thing to say of it.
            differing = self._differing(saved, version)
            state = None if differing else _load(_from_version_1(data) if version == 1 else data.get("state"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self.damaged(error) from error
        if differing:
            raise ValueError(
                f"{self.path} holds the state of another run, which differs in {differing}: "
                f"{[saved.get(name) for name in differing]} there, {[self.run.get(name) for name in differing]} here. "
                "Give another log_dir to start anew."
            )
        return state

    def damaged(self, error: Exception) -> ValueError:
        """Return the error to raise for a file that cannot be used."""
        kind = _RUN_KINDS.get(self.path.name, "this run")
        return ValueError(
            f"{self.path} is no state of {kind}, or it is damaged: {_one_line(error)}. Put the right file there, or "
            "give another log_dir to start anew."
        )

    def _differing(self, saved: Mapping[str, Any], version: int) -> list[str]:
        """Return the names in which the saved run differs; version 1 said less of a run."""
        names = saved.keys() if version == 1 else {*saved, *self.run}
        pairs = {name: (saved.get(name), self.run.get(name)) for name in names}
        # Of examples that a run had not, version 1 said None in one place and that they are 0 in another.
        absent = {name for name, pair in pairs.items() if version == 1 and all(map(_are_none, pair))}
        return sorted(name for name, (there, here) in pairs.items() if there != here and name not in absent)

    @property
    def _format(self) -> str:
        return f"dspy_combee.{self.path.stem}"


def _are_none(examples: Any) -> bool:
    return examples is None or (isinstance(examples, list) and examples[:1] == [0])


def _load(plain: Any) -> LoopState:
    text = json.dumps(plain)  # Strict reading takes lists for tuples in JSON only.
    state = _STATE.validate_json(text, strict=True)
    _SAMPLERS.validate_json(json.dumps(state.samplers), strict=True)
    return state


def _from_version_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state as version 2 writes it; version 1 had one form for playbooks and one for traces."""
    old = dict(data.get("state", data))
    old["spent"] = {"metric_calls_by_phase": old.pop("metric_calls"), "usage_by_phase": old.pop("usage")}
    samplers = {"trainset": old.pop("sampler"), "traces": old.pop("trace_sampler", None)}
    if "candidate" in old:  # Of `CombeeOptimizer` on traces.
        scores = old.pop("scores")
        samplers = {"traces": samplers["trainset"]}
        new = {"current": old.pop("candidate"), "best": None, "best_scores": scores}
        new |= {"best": new["current"] if scores else None, "best_score": sum(scores) / len(scores) if scores else None}
        new["best_step"] = old["step"]
    else:
        new = {"current": old.pop("playbooks"), "kept": old["step"], "best_scores": None, "done": False}
        new["best_step"] = old.pop("best_step", old["step"])
    return {**old, **new, "samplers": {name: saved for name, saved in samplers.items() if saved is not None}}


def _one_line(error: Exception) -> str:
    """Return the error on one line, without the values that a file holds."""
    if not isinstance(error, ValidationError):
        return str(error)
    first, *others = error.errors(include_input=False, include_url=False)
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" + (f" (and {len(others)} more)" if others else "")
