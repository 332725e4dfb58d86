"""The state of a run on disk: one JSON file, no pickles, written whole after each step and checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator

from dspy_combee.records.files import replacing
from dspy_combee.records.types import Spent, Usage

State = TypeVar("State")
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]

_VERSION = 1


class Saved(BaseModel):
    """Fields that a state file must hold; nothing is converted."""

    model_config = ConfigDict(strict=True, extra="forbid")


class SavedUsage(Saved):
    """A `Usage`."""

    calls: Count
    cache_hits: Count
    input_tokens: Count
    output_tokens: Count
    cost: float | None


class SavedSpending(Saved):
    """What `spending_out` writes."""

    metric_calls: dict[str, Count]
    usage: dict[str, SavedUsage]
    reflection: SavedUsage


class SavedProfile(Saved):
    """The state of a `ControlledSize`."""

    todo: list[Size]
    num_tasks: Size
    cold: bool
    rollouts: Count
    current: Count
    measurements: list[Annotated[tuple[Size, Annotated[float, Field(ge=0, allow_inf_nan=False)]], Strict(False)]]


class SavedSampler(Saved):
    """The state of an `EpochSampler` over positions."""

    epoch: Count
    queue: list[Count]
    drawn: Count
    kind: str
    sizer: SavedProfile | Count | None

    @model_validator(mode="after")
    def _sizer_is_of_its_kind(self) -> SavedSampler:
        expected = {"ControlledSize": SavedProfile, "ReplayedSizes": int}.get(self.kind, type(None))
        if not isinstance(self.sizer, expected):
            raise ValueError(f"a {self.kind} has another state")
        return self


class StateFile:
    """Saves and loads the state of one kind of run.

    Args:
        path: The file; its folder is made when it is not there.
        what: The kind of run.
        run: What tells this run from others: a state that was saved for another is refused.
    """

    def __init__(self, path: Path, what: str, run: Mapping[str, Any]) -> None:
        self.path = path
        self.what = what
        self.run = dict(run)

    def write(self, fields: Mapping[str, Any], **layout: Any) -> None:
        """Write the state; the one before stays until this one is on disk.

        Args:
            fields: The state as plain values.
            layout: Options of `json.dumps`.

        Raises:
            OSError: If it cannot be written.
        """
        data = {"format": self._format, "version": _VERSION, "run": self.run, **fields}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(json.dumps(data, **layout) + "\n")

    def read(self, build: Callable[[Any], State]) -> State | None:
        """The state that was saved; None where there is none.

        Args:
            build: Makes the state of the fields, or raises a `ValueError`.

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
            if (kind, version) != (self._format, _VERSION):
                raise ValueError(f"format {kind!r}, version {version!r}")
            # The state of another run need not fit this one, which is the first thing to say of it.
            state = build(data) if saved == self.run else None
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.path} is no state of {self.what}, or it is damaged: {_told(error)}. Put the right file there, "
                "or give another log_dir to start anew."
            ) from error
        differing = sorted(name for name in {*saved, *self.run} if saved.get(name) != self.run.get(name))
        if differing:
            raise ValueError(
                f"{self.path} holds the state of another run, which differs in {differing}: "
                f"{[saved.get(name) for name in differing]} there, {[self.run.get(name) for name in differing]} here. "
                "Give another log_dir to start anew."
            )
        return state

    @property
    def _format(self) -> str:
        return f"dspy_combee.{self.path.stem}"


def spending_out(spent: Spent, reflection: Usage) -> dict[str, Any]:
    """What a run has spent, as plain values."""
    return {
        "metric_calls": dict(spent.metric_calls_by_phase),
        "usage": {phase: asdict(usage) for phase, usage in spent.usage_by_phase.items()},
        "reflection": asdict(reflection),
    }


def spending_in(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What `spending_out` wrote: `spent` and `reflection`."""
    usage = {phase: Usage(**used) for phase, used in plain["usage"].items()}
    return {"spent": Spent(dict(plain["metric_calls"]), usage), "reflection": Usage(**plain["reflection"])}


def check_components(found: Collection[str], expected: Collection[str] | None) -> None:
    """Refuse a state of other components than the program has; None expects any.

    Raises:
        ValueError: If they differ.
    """
    if expected is not None and set(found) != set(expected):
        raise ValueError(f"it is of {sorted(found)}, and the program has {sorted(expected)}")


def _told(error: Exception) -> str:
    """The error on one line, without the values that a file holds."""
    if not isinstance(error, ValidationError):
        return str(error)
    first, *others = error.errors(include_input=False, include_url=False)
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" + (f" (and {len(others)} more)" if others else "")
