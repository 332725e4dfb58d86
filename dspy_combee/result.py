"""`CombeeResult`: what a run leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspy.teleprompt.gepa.gepa import DspyGEPAResult

from dspy_combee.records import StepRecord


@dataclass(frozen=True)
class CombeeResult(DspyGEPAResult):
    """`dspy.GEPA`'s detailed results, with an account of each step.

    Attributes:
        steps: The steps that this process ran, in order.
    """

    steps: tuple[StepRecord, ...] = ()

    @property
    def batch_sizes(self) -> list[int]:
        """N of each step, in order."""
        return [step.n for step in self.steps]

    @staticmethod
    def from_run(gepa_result: Any, adapter: Any, steps: list[StepRecord]) -> CombeeResult:
        """The result of a run: gepa's own, the adapter that builds its candidates, and the steps."""
        base = DspyGEPAResult.from_gepa_result(gepa_result, adapter)
        return CombeeResult(**vars(base), steps=tuple(steps))

    def to_dict(self) -> dict[str, Any]:
        """`dspy.GEPA`'s fields and ours as plain values that JSON takes."""
        plain: dict[str, Any] = _plain(super().to_dict())
        plain["steps"] = [step.to_dict() for step in self.steps]
        plain["batch_sizes"] = self.batch_sizes
        return plain


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {key if isinstance(key, str | int) else str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
