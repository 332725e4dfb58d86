"""Trial folders of Harbor: the trajectory of one run, and what the verifier said of it.

A trial folder holds `agent/trajectory.json`, or `trajectory.json` beside `verifier/`, `result.json` or `results.json`.
The trajectory, with its continuations (`trajectory.cont-1.json` and so on), is one trace. Its score and its feedback
come from what is there of

- `verifier/reward.json`, a number or an object of numbers, else `verifier/reward.txt`, else `result.json`, else
  `results.json` (`verifier_result.rewards`, `rewards`, `reward`, `is_resolved`). Of several rewards the score is the
  one called `reward`, else their mean; all of them stand in the feedback;
- the ends of `verifier/test-stdout.txt` and `verifier/test-stderr.txt`;
- `exception_info` of the result, else `exception.txt`.

A step of a trial that has several (`steps/NAME/`) is a trial folder of its own.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspy_combee.traces.files import has_file, open_file, read_json
from dspy_combee.traces.forms import agent_of, conversation, validate_atif
from dspy_combee.traces.types import Trace, TraceError, as_score

_END_BYTES = 16 * 2**10
_TRAJECTORY = "trajectory.json"
_CONTINUATION = re.compile(r"trajectory\.cont-([0-9]{1,6})\.json")
_RESULTS = ("result.json", "results.json")
_FILES = frozenset({_TRAJECTORY, *_RESULTS, "config.json", "lock.json"})
_FOLDERS = frozenset({"agent", "user-agent", "verifier", "artifacts"})


class HarborTrials:
    """Read trial folders."""

    def sniff(self, path: Path, head: bytes) -> bool:
        """Tell whether a folder is a trial's."""
        return _trajectory_of(path) is not None

    def is_part(self, name: str, is_folder: bool) -> bool:
        """Tell whether an entry of a trial folder belongs to the trial, so that it is no trace of its own."""
        return name in _FOLDERS if is_folder else name in _FILES or bool(_CONTINUATION.fullmatch(name))

    def read(self, path: Path) -> Iterator[Trace]:
        """Yield the trace of a trial folder.

        Raises:
            OSError: If a file cannot be read.
            TraceError: If one is not what it should be; the error names it.
            ImportError: If `atif` is not installed.
        """
        trajectory = _trajectory_of(path) or _TRAJECTORY
        steps: list[Any] = []
        metadata: dict[str, str] = {}
        for part in _parts(path / trajectory):
            value = read_json(part)
            try:
                validate_atif(value)
            except TraceError as error:
                raise error.at(part) from None
            steps += value["steps"]
            metadata = metadata or agent_of(value)
        result = _result(path)
        rewards = _rewards(path, result)
        names = {name: result[name] for name in ("task_name", "trial_name") if isinstance(result.get(name), str)}
        score = rewards.get("reward", math.fsum(rewards.values()) / len(rewards)) if rewards else None
        trace = conversation(steps, names.get("task_name"), score, metadata | names)
        yield replace(trace, feedback=_feedback(path, result, rewards), source=trajectory)


def _trajectory_of(folder: Path) -> str | None:
    """Return the path of the trajectory in a trial folder; None for a folder that is none."""
    if has_file(folder, "agent", _TRAJECTORY):
        return f"agent/{_TRAJECTORY}"
    if not has_file(folder, _TRAJECTORY):
        return None
    verifier = folder / "verifier"
    is_judged = verifier.is_dir() and not verifier.is_symlink()
    return _TRAJECTORY if is_judged or any(has_file(folder, name) for name in _RESULTS) else None


def _parts(first: Path) -> list[Path]:
    """Return the trajectory's file and its continuations, in order."""
    found = [match for name in os.listdir(first.parent) if (match := _CONTINUATION.fullmatch(name))]
    found.sort(key=lambda match: (int(match[1]), match[0]))
    return [first, *(first.parent / match[0] for match in found if has_file(first.parent, match[0]))]


def _result(folder: Path) -> dict[str, Any]:
    name = next((name for name in _RESULTS if has_file(folder, name)), None)
    value = read_json(folder / name) if name else {}
    return value if isinstance(value, dict) else {}


def _rewards(folder: Path, result: Mapping[str, Any]) -> dict[str, float]:
    """Return the rewards by name; empty where there are none."""
    place = folder / "verifier" / "reward.json"
    if has_file(folder, "verifier", "reward.json"):
        return _by_name(read_json(place), place)
    place = place.with_name("reward.txt")
    if has_file(folder, "verifier", "reward.txt"):
        with open_file(place) as file:
            return _by_name(file.read(_END_BYTES).decode("utf-8-sig", "replace").strip(), place)
    judged = result.get("verifier_result")
    for value in (judged if isinstance(judged, dict) else {}, result):
        for key in ("rewards", "reward", "is_resolved"):
            if value.get(key) not in (None, {}):
                return _by_name(value[key], folder / next(name for name in _RESULTS if has_file(folder, name)))
    return {}


def _by_name(value: Any, place: Path) -> dict[str, float]:
    by_name = value if isinstance(value, dict) else {"reward": value}
    try:
        return {str(name): as_score(reward) for name, reward in by_name.items() if reward is not None}
    except TraceError as error:
        raise error.at(place) from None


def _feedback(folder: Path, result: dict[str, Any], rewards: dict[str, float]) -> str:
    parts = []
    if len(rewards) > 1 or (rewards and "reward" not in rewards):
        parts.append("Rewards: " + ", ".join(f"{name} {reward:g}" for name, reward in rewards.items()))
    info = result.get("exception_info")
    if isinstance(info, dict) and (info.get("exception_type") or info.get("exception_message")):
        parts.append(f"The run ended in {info.get('exception_type')}: {info.get('exception_message')}")
    elif has_file(folder, "exception.txt") and (text := _end_of(folder / "exception.txt")):
        parts.append(f"The run ended in an error:\n{text}")
    outputs = [name for name in ("test-stdout.txt", "test-stderr.txt") if has_file(folder, "verifier", name)]
    parts += [f"Verifier ({name}):\n{text}" for name in outputs if (text := _end_of(folder / "verifier" / name))]
    return "\n\n".join(parts)


def _end_of(path: Path) -> str:
    """Return the last 16 KiB of a text file."""
    with open_file(path) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _END_BYTES))
        text = stream.read(_END_BYTES).decode("utf-8", "replace").strip()
    return f"[... {size - _END_BYTES:,} bytes cut ...]\n{text}" if size > _END_BYTES else text
