"""`CombeeResult` and `PlaybookResult`: what a run leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dspy.teleprompt.gepa.gepa import DspyGEPAResult

from dspy_combee.records.provenance import Provenance, trace_back
from dspy_combee.records.types import Spent, StepRecord, to_plain
from dspy_combee.report import RunReport
from dspy_combee.runs.events import REPEATED

if TYPE_CHECKING:
    from dspy_combee.learners.provenance import BulletProvenance
    from dspy_combee.playbook import Playbook
    from dspy_combee.playbook.records import PlaybookStep
    from dspy_combee.runs.loop import Loop
    from dspy_combee.runs.scope import RunScope
    from dspy_combee.runs.search import Search


@dataclass(frozen=True)
class CombeeResult(RunReport, DspyGEPAResult):
    """Hold `dspy.GEPA`'s detailed results, with an account of each step.

    Steps on collected traces come first (`StepRecord.from_traces`). Candidate 0 is then what they have taught, and
    where there was no search it is the only one: without a valset it has no score, `val_aggregate_scores` is empty.
    """

    steps: tuple[StepRecord, ...] = ()
    """The steps of the run, in order; after a resume without `log_dir`'s `steps.jsonl`, those since."""
    batch_sizes: tuple[int, ...] = ()
    """n of each step of the run, those before a resume included. Given as `reflection_minibatch_size` it replays the
    run."""
    spent: Spent = field(default_factory=Spent)
    """What the run has spent, by phase."""

    def provenance(self, component: str) -> list[Provenance]:
        """Return the rewrites that led to a component's text in the best candidate, the last one first.

        Each says which examples' records fed it, and which reached no call that led to it.

        Args:
            component: Name of a component.

        Raises:
            ValueError: If the program has no component of that name.
        """
        components = self._candidate_components(self.best_candidate)
        if component not in components:
            raise ValueError(f"There is no component {component!r}; there are {sorted(components)}.")
        return trace_back(self.steps, self.best_idx, component)

    @property
    def best_idx(self) -> int:
        """Index of the candidate with the highest score on the validation examples."""
        return super().best_idx if self.val_aggregate_scores else 0

    @property
    def repeated_proposals(self) -> int:
        """Count the proposals that were not evaluated, because they had been before."""
        return sum(step.reason.startswith(REPEATED) for step in self.steps)

    @staticmethod
    def from_search(search: Search, gepa_result: Any) -> CombeeResult:
        """Return the result of a search: gepa's own, and the account of the steps."""
        base = DspyGEPAResult.from_gepa_result(gepa_result, search.adapter)
        return CombeeResult(**vars(base), **_account(search.scope))

    @staticmethod
    def from_traces(loop: Loop[Any]) -> CombeeResult:
        """Return the result of a run on traces that no search followed."""
        state, scope = loop.state, loop.scope
        scores = state.best_scores or ()
        metric_calls = scope.spent.metric_calls
        return CombeeResult(
            candidates=[loop.build()],
            parents=[[None]],
            val_aggregate_scores=[] if state.best_score is None else [state.best_score],
            val_subscores=[dict(enumerate(scores))],
            per_val_instance_best_candidates={index: {0} for index in range(len(scores))},
            discovery_eval_counts=[metric_calls],
            total_metric_calls=metric_calls,
            num_full_val_evals=metric_calls // len(loop.valset) if loop.valset else 0,
            log_dir=None if scope.log_dir is None else str(scope.log_dir),
            seed=scope.options.seed,
            **_account(scope),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return `dspy.GEPA`'s fields and ours as plain values that JSON takes."""
        plain: dict[str, Any] = to_plain(super().to_dict())
        plain["steps"] = [step.to_dict() for step in self.steps]
        plain["batch_sizes"] = list(self.batch_sizes)
        plain["batch_size_fit"] = None if self.batch_size_fit is None else self.batch_size_fit.to_dict()
        plain["spent"] = self.spent.to_dict()
        return plain


@dataclass(frozen=True)
class PlaybookResult(RunReport):
    """Hold what a run of `PlaybookOptimizer` leaves behind."""

    playbooks: Mapping[str, Playbook]
    """The playbook of each predictor in the program that was returned, with its reflection ids."""
    best_score: float | None
    """Its mean score on the validation examples; None without a valset."""
    steps: tuple[PlaybookStep, ...]
    """The steps of the run, in order; after a resume without `log_dir`'s `steps.jsonl`, those since."""
    batch_sizes: tuple[int, ...]
    """n of each step of the run, those before a resume included. Given as `minibatch_size` it replays the run."""
    spent: Spent
    """What the run has spent, by phase."""
    best_step: int | None = None
    """The step after which the playbooks stood so; 0 for the start, None where that is not known."""

    def provenance(self, bullet_id: str, predictor: str | None = None) -> list[BulletProvenance]:
        """Return the changes that led to a bullet, the last one first.

        Each says which reflections fed it, from which examples, and which examples of its step were lost.

        Args:
            bullet_id: Id of a bullet, such as `calc-00003`; one that had left the playbook by then will do.
            predictor: The predictor whose playbook it is; may be left out where one playbook alone has such a bullet.

        Raises:
            ValueError: If there is no such bullet, or there are several.
        """
        from dspy_combee.learners.provenance import bullet_ids, trace_bullet  # Playbooks load when one is learned.

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
        """Return the result as plain values that JSON takes; playbooks in their text form."""
        return {
            "playbooks": {name: playbook.to_text() for name, playbook in self.playbooks.items()},
            "best_score": self.best_score,
            "steps": [step.to_dict() for step in self.steps],
            "batch_sizes": list(self.batch_sizes),
            "spent": self.spent.to_dict(),
        }

    @staticmethod
    def from_loop(loop: Loop[Any], playbooks: Mapping[str, Playbook]) -> PlaybookResult:
        """Return the result of a run with these playbooks, by predictor."""
        return PlaybookResult(
            playbooks=playbooks, best_score=loop.state.best_score, best_step=loop.best_step, **_account(loop.scope)
        )


def _account(scope: RunScope) -> dict[str, Any]:
    return {"steps": tuple(scope.steps), "batch_sizes": tuple(scope.batch_sizes), "spent": scope.spent}
