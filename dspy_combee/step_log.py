"""`steps.jsonl`: the steps of a run on disk, one JSON object a line, readable after a kill."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dspy_combee.batch_size import BatchSizeFit
from dspy_combee.records import ProposalNode, Reduction, StepRecord, Usage

logger = logging.getLogger("dspy_combee")

FILE_NAME = "steps.jsonl"


class StepLog:
    """Appends the steps of a run to `steps.jsonl` in its `log_dir`.

    Args:
        log_dir: The folder; it is made when it is not there.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self.path = Path(log_dir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, record: StepRecord) -> None:
        """Add a step; it is on disk when this returns."""
        line = json.dumps(record.to_dict(), ensure_ascii=False, default=str)
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line + "\n")
            file.flush()

    def resume(self, iteration: int) -> list[StepRecord]:
        """The steps before `iteration`; later ones, which the run makes again, are taken off the file."""
        kept = [record for record in read_steps(self.path) if record.iteration < iteration]
        temporary = self.path.with_suffix(".tmp")
        lines = [json.dumps(record.to_dict(), ensure_ascii=False, default=str) + "\n" for record in kept]
        temporary.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, self.path)
        return kept


def read_steps(path: str | os.PathLike[str]) -> list[StepRecord]:
    """The steps in a `steps.jsonl` file, or in the `log_dir` that holds one.

    A last line that a kill cut short is left out.

    Args:
        path: The file or the folder.

    Returns:
        The steps in order; none when there is no file.

    Raises:
        ValueError: If another line is no step; the message names the file and the line.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            records.append(step_from_dict(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # Each whole line ends in a newline, so this one is not whole.
                logger.warning("%s:%d is cut short and is left out.", file, number)
                continue
            raise ValueError(f"{file}:{number} is no step record: {error}") from error
    return records


def step_from_dict(plain: Mapping[str, Any]) -> StepRecord:
    """The step that `StepRecord.to_dict` made these values of.

    Raises:
        TypeError: If a field is missing.
    """
    values = _known(StepRecord, plain)
    values["minibatch_ids"] = tuple(values["minibatch_ids"])
    values["scores_before"] = tuple(values["scores_before"])
    values["scores_after"] = tuple(values["scores_after"])
    values["reductions"] = tuple(_reduction(reduction) for reduction in values["reductions"])
    values["usage"] = Usage(**_known(Usage, values.get("usage") or {}))
    if values.get("fit") is not None:
        fit = _known(BatchSizeFit, values["fit"])
        values["fit"] = BatchSizeFit(**{**fit, "medians": _pairs(fit["medians"])})
    return StepRecord(**values)


def _reduction(plain: Mapping[str, Any]) -> Reduction:
    values = _known(Reduction, plain)
    values["nodes"] = tuple(_node(node) for node in values["nodes"])
    values["sources"] = tuple(values.get("sources") or ())
    return Reduction(**values)


def _node(plain: Mapping[str, Any]) -> ProposalNode:
    values = _known(ProposalNode, plain)
    values["inputs"] = tuple(values["inputs"])
    values["usage"] = Usage(**_known(Usage, values.get("usage") or {}))
    return ProposalNode(**values)


def _pairs(pairs: Sequence[Sequence[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(n), float(seconds)) for n, seconds in pairs)


def _known(kind: Any, plain: Mapping[str, Any]) -> dict[str, Any]:
    """The values for the fields that this version knows."""
    return {field.name: plain[field.name] for field in fields(kind) if field.name in plain}
