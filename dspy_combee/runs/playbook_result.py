"""`PlaybookResult`: what a run of `PlaybookOptimizer` leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspy_combee.learners.provenance import BulletProvenance, bullet_ids, trace_bullet
from dspy_combee.playbook import Playbook
from dspy_combee.playbook.records import PlaybookStep
from dspy_combee.records.types import Spent
from dspy_combee.report import RunReport


@dataclass(frozen=True)
class PlaybookResult(RunReport):
    """What a run of `PlaybookOptimizer` leaves behind.

    Attributes:
        playbooks: The playbook of each predictor in the program that was returned, with its reflection ids.
        best_score: Its mean score on the validation examples; None without a valset.
        steps: The steps of the run, in order; after a resume without `log_dir`'s `steps.jsonl`, those since.
        batch_sizes: n of each step of the run, those before a resume included. Given as `minibatch_size` it
            replays the run.
        spent: What the run has spent, by phase.
        best_step: The step after which the playbooks stood so; 0 for the start, None where that is not known.
    """

    playbooks: Mapping[str, Playbook]
    best_score: float | None
    steps: tuple[PlaybookStep, ...]
    batch_sizes: tuple[int, ...]
    spent: Spent
    best_step: int | None = None

    def provenance(self, bullet_id: str, predictor: str | None = None) -> list[BulletProvenance]:
        """The changes that led to a bullet, the last one first.

        Each says which reflections fed it, from which examples, and which examples of its step were lost.

        Args:
            bullet_id: Id of a bullet, such as `calc-00003`; one that had left the playbook by then will do.
            predictor: The predictor whose playbook it is; may be left out where one playbook alone has such a bullet.

        Raises:
            ValueError: If there is no such bullet, or there are several.
        """
        steps = [step for step in self.steps if self.best_step is None or step.iteration <= self.best_step]
        components = {change.component for step in self.steps for change in step.changes}
        found: dict[str, str] = {}
        for name, playbook in self.playbooks.items():
            component = name if name in components else next(iter(components), name)
            known = {bullet.id for bullet in playbook} | bullet_ids(steps, component)
            if predictor in (None, name) and bullet_id in known:
                found.setdefault(component, name)
        if len(found) != 1:
            what = f"several bullets {bullet_id!r}: give the predictor" if found else f"no bullet {bullet_id!r}"
            where = "" if predictor is None else f" of {predictor!r}"
            raise ValueError(f"There is {what} in the playbooks{where}; predictors: {sorted(self.playbooks)}.")
        return trace_bullet(steps, next(iter(found)), bullet_id)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values that JSON takes; playbooks in their text form."""
        return {
            "playbooks": {name: playbook.to_text() for name, playbook in self.playbooks.items()},
            "best_score": self.best_score,
            "steps": [step.to_dict() for step in self.steps],
            "batch_sizes": list(self.batch_sizes),
            "spent": self.spent.to_dict(),
        }
