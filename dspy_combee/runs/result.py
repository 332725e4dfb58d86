"""`CombeeResult`: what a run leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dspy
from dspy.teleprompt.gepa.gepa import DspyGEPAResult

from dspy_combee.records.provenance import Provenance, trace_back
from dspy_combee.records.types import Spent, StepRecord
from dspy_combee.report import RunReport
from dspy_combee.runs.events import REPEATED, StepRecorder

if TYPE_CHECKING:
    from dspy_combee.runs.trace_run import TraceRun


@dataclass(frozen=True)
class CombeeResult(RunReport, DspyGEPAResult):
    """`dspy.GEPA`'s detailed results, with an account of each step.

    Attributes:
        steps: The steps of the run, in order; after a resume without `log_dir`'s `steps.jsonl`, those since.
        batch_sizes: n of each step of the run, those before a resume included. Given as
            `reflection_minibatch_size` it replays the run.
        spent: What the run has spent, by phase.

    Steps on collected traces come first (`StepRecord.from_traces`). Candidate 0 is then what they have taught, and
    where there was no search it is the only one: without a valset it has no score, `val_aggregate_scores` is empty.
    """

    steps: tuple[StepRecord, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    spent: Spent = field(default_factory=Spent)

    def provenance(self, component: str) -> list[Provenance]:
        """The rewrites that led to a component's text in the best candidate, the last one first.

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
        """Proposals that were not evaluated, because they had been before."""
        return sum(step.reason.startswith(REPEATED) for step in self.steps)

    @staticmethod
    def from_run(gepa_result: Any, adapter: Any, recorder: StepRecorder, spent: Spent) -> CombeeResult:
        """The result of a run: gepa's own, the adapter that builds its candidates, and the account of the steps."""
        base = DspyGEPAResult.from_gepa_result(gepa_result, adapter)
        return CombeeResult(
            **vars(base), steps=tuple(recorder.steps), batch_sizes=tuple(recorder.batch_sizes), spent=spent
        )

    @staticmethod
    def from_traces(learned: TraceRun) -> CombeeResult:
        """The result of a run on traces that no search followed."""
        state, scores = learned.state, learned.state.scores
        metric_calls = learned.spent.metric_calls
        return CombeeResult(
            candidates=[learned.build_program()],
            parents=[[None]],
            val_aggregate_scores=[] if state.score is None else [state.score],
            val_subscores=[dict(enumerate(scores or ()))],
            per_val_instance_best_candidates={index: {0} for index in range(len(scores or ()))},
            discovery_eval_counts=[metric_calls],
            total_metric_calls=metric_calls,
            num_full_val_evals=metric_calls // len(learned.valset) if learned.valset else 0,
            log_dir=learned.optimizer.log_dir,
            seed=learned.optimizer.seed,
            steps=tuple(learned.recorder.steps),
            batch_sizes=tuple(learned.recorder.batch_sizes),
            spent=learned.spent,
        )

    def to_dict(self) -> dict[str, Any]:
        """`dspy.GEPA`'s fields and ours as plain values that JSON takes."""
        plain: dict[str, Any] = _plain(super().to_dict())
        plain["steps"] = _plain([step.to_dict() for step in self.steps])
        plain["batch_sizes"] = list(self.batch_sizes)
        plain["batch_size_fit"] = None if self.batch_size_fit is None else self.batch_size_fit.to_dict()
        plain["spent"] = self.spent.to_dict()
        return plain


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dspy.Example):  # predictions too
        return _plain(value.toDict())
    if isinstance(value, dict):
        return {key if isinstance(key, str | int) else str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
