"""Trial directories of Harbor: the trajectory of one run, and what the verifier said of it.

A trial directory is a folder that holds `agent/trajectory.json`, or `trajectory.json` beside `verifier/`, `result.json`
or `results.json`. The trajectory, with its continuations (`trajectory.cont-1.json` and so on), is one trace. Its score
and its feedback come from what is there of

- `verifier/reward.json`, a number or an object of numbers, else `verifier/reward.txt`, else `result.json`, else
  `results.json` (`verifier_result.rewards`, `rewards`, `reward`, `is_resolved`). Of several rewards the score is the
  one called `reward`, else their mean; all of them stand in the feedback;
- the ends of `verifier/test-stdout.txt` and `verifier/test-stderr.txt`;
- `exception_info` of the result, else `exception.txt`.

A step of a trial that has several (`steps/NAME/`) is a trial directory of its own.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspy_combee.traces.formats import agent_of, conversation_trace, validate_atif
from dspy_combee.traces.io import has_file, has_folder, open_file, read_json
from dspy_combee.traces.types import Trace, TraceError, as_score

_END_BYTES = 16 * 2**10
_TRAJECTORY = "trajectory.json"
_CONTINUATION = re.compile(r"trajectory\.cont-([0-9]{1,6})\.json")
_RESULTS = ("result.json", "results.json")
_FILES = frozenset({_TRAJECTORY, *_RESULTS, "config.json", "lock.json"})
_FOLDERS = frozenset({"agent", "user-agent", "verifier", "artifacts"})


def trajectory_of(folder: Path) -> str | None:
    """The trajectory's path in a trial directory, with `/`; None for a folder that is none."""
    if has_file(folder, "agent", _TRAJECTORY):
        return f"agent/{_TRAJECTORY}"
    judged = has_folder(folder, "verifier") or any(has_file(folder, name) for name in _RESULTS)
    return _TRAJECTORY if judged and has_file(folder, _TRAJECTORY) else None


def is_part(name: str, is_folder: bool) -> bool:
    """Whether what is called so in a trial directory belongs to the trial and is no trace of its own."""
    return name in _FOLDERS if is_folder else name in _FILES or bool(_CONTINUATION.fullmatch(name))


def read_trial(folder: Path) -> Trace:
    """The trace of a trial directory.

    Raises:
        OSError: If a file cannot be read.
        TraceError: If one is not what it should be; the error names it.
        ImportError: If `atif` is not installed.
    """
    steps: list[Any] = []
    metadata: dict[str, str] = {}
    for path in _parts(folder):
        value = read_json(path)
        try:
            validate_atif(value)
        except TraceError as error:
            raise TraceError(str(error), path) from None
        steps += value["steps"]
        metadata = metadata or agent_of(value)
    result = _result(folder)
    rewards = _rewards(folder, result)
    names = {name: result[name] for name in ("task_name", "trial_name") if isinstance(result.get(name), str)}
    trace = conversation_trace(steps, names.get("task_name"), _score(rewards), metadata | names)
    return replace(trace, feedback=_feedback(folder, result, rewards))


def _parts(folder: Path) -> list[Path]:
    """The trajectory's file and its continuations, found by their names, in order."""
    first = folder / (trajectory_of(folder) or _TRAJECTORY)
    found = [match for name in os.listdir(first.parent) if (match := _CONTINUATION.fullmatch(name))]
    found.sort(key=lambda match: (int(match[1]), match[0]))
    return [first, *(first.parent / match[0] for match in found if has_file(first.parent, match[0]))]


def _result(folder: Path) -> dict[str, Any]:
    for name in _RESULTS:
        if has_file(folder, name):
            value = read_json(folder / name)
            return value if isinstance(value, dict) else {}
    return {}


def _rewards(folder: Path, result: Mapping[str, Any]) -> dict[str, float]:
    """The rewards by name; empty where there are none."""
    verifier = folder / "verifier"
    if has_file(folder, "verifier", "reward.json"):
        return _named(read_json(verifier / "reward.json"), verifier / "reward.json")
    if has_file(folder, "verifier", "reward.txt"):
        with open_file(verifier / "reward.txt") as file:
            text = file.read(_END_BYTES).decode("utf-8-sig", "replace").strip()
        return _named(text, verifier / "reward.txt")
    judged = result.get("verifier_result")
    for value in (judged if isinstance(judged, dict) else {}, result):
        for key in ("rewards", "reward", "is_resolved"):
            if value.get(key) not in (None, {}):
                return _named(value[key], folder / next(name for name in _RESULTS if has_file(folder, name)))
    return {}


def _named(value: Any, place: Path) -> dict[str, float]:
    named = value if isinstance(value, dict) else {"reward": value}
    try:
        return {str(name): as_score(reward) for name, reward in named.items() if reward is not None}
    except TraceError as error:
        raise TraceError(str(error), place) from None


def _score(rewards: Mapping[str, float]) -> float | None:
    if not rewards:
        return None
    return rewards.get("reward", math.fsum(rewards.values()) / len(rewards))


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
    """The last 16 KiB of a text file."""
    with open_file(path) as stream:
        stream.seek(0, os.SEEK_END)
        size = stream.tell()
        stream.seek(max(0, size - _END_BYTES))
        text = stream.read(_END_BYTES).decode("utf-8", "replace").strip()
    return f"[... {size - _END_BYTES:,} bytes cut ...]\n{text}" if size > _END_BYTES else text
