"""`CombeeAdapter`: GEPA's adapter for DSPy programs, whose evaluation is Map."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import dspy
from dspy.primitives.code_interpreter import CodeInterpreterError
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.teleprompt.gepa.gepa_flex_utils import code_reflective_records
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from gepa import EvaluationBatch

from dspy_combee.learners.instruction import Candidate, InstructionLearner
from dspy_combee.records.errors import CombeeError
from dspy_combee.records.secrets import hide_own_secrets, holds_own_secret, shorten
from dspy_combee.records.text import text_of
from dspy_combee.records.types import Rollout
from dspy_combee.rollouts.feedback import ReflectiveDataset, feedback_of, program_trace
from dspy_combee.runs.scope import RunScope

logger = logging.getLogger("dspy_combee")


class CombeeAdapter(DspyAdapter):
    """Evaluate candidates with Map and make one reflection record for each rollout and component.

    The search is GEPA's; proposals come from the reflection strategy, so `propose_new_texts` is None here.

    Args:
        scope: The run.
        learner: Puts candidates into the student, and makes the reflection records.
        note_rollouts: Is told of the rollouts that were made, and whether with traces.
        code_proposer: Replaces DSPy's proposer of Flex code.
    """

    propose_new_texts: Any = None

    def __init__(
        self,
        scope: RunScope,
        learner: InstructionLearner,
        note_rollouts: Callable[[Sequence[Rollout], bool], None],
        code_proposer: Any = None,
    ) -> None:
        scorer, program, maker = scope.scorer, learner.program, learner.maker
        super().__init__(
            student_module=program.student,
            metric_fn=scorer.metric,
            feedback_map={},
            failure_score=scorer.failure_score,
            num_threads=scope.executor.width,
            add_format_failure_as_feedback=maker.keep_unparsed,
            reflection_lm=scope.reflection_lm,
            custom_code_proposer=code_proposer,
            warn_on_score_mismatch=maker.warn_of_mismatch,
        )
        self.scope = scope
        self.program = program
        self.maker = maker
        self.note_rollouts = note_rollouts
        scorer.wants_program_trace = bool(program.code) and _declares(scorer.metric, "program_trace")
        self.saved_parts: dict[str, Any] = {}
        """The parts of the run whose state gepa saves and restores."""
        self.dumps: Callable[[Any], bytes] | None = None
        """Gives what gepa saves of an output, or raises if it cannot; None where it saves none."""
        self.failure: CombeeError | None = None
        """The error of a feedback call that should end the run; gepa goes on without the records."""

    def propose_code(self, candidate: Candidate, dataset: Any, components: list[str]) -> Candidate:
        """Return new source for code components, from the code proposer in one plain call each."""
        texts: Candidate = DspyAdapter.propose_new_texts(self, candidate, dataset, components)
        return texts

    def build_program(self, candidate: Candidate) -> Any:
        """See `CandidateProgram.build`."""
        return self.program.build(candidate)

    # Map -----------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        batch: list[Any],
        candidate: Candidate,
        capture_traces: bool = False,
        num_threads: int | None = None,
    ) -> EvaluationBatch[Any, Any]:
        """Evaluate one candidate; see `batch_evaluate`. `num_threads` is the executor's."""
        batches: list[EvaluationBatch[Any, Any]] = self.batch_evaluate(
            [(candidate, batch)], capture_traces=capture_traces
        )
        return batches[0]

    def batch_evaluate(
        self, items: Sequence[tuple[Candidate, list[Any]]], *, capture_traces: bool = True
    ) -> list[EvaluationBatch[Any, Any]]:
        """Evaluate several candidates on a batch each, as one flat map over all their examples.

        Returns:
            One `EvaluationBatch` for each item, whose outputs, scores and trajectories follow its batch.

        Raises:
            ProviderError: If a language model's provider refuses or cannot be reached.
        """
        batches: list[tuple[Any, list[Any]]] = []
        broken: dict[int, str] = {}
        for position, (candidate, batch) in enumerate(items):
            try:
                program = self.build_program(candidate)
            except (SyntaxError, CodeInterpreterError) as error:
                logger.warning("A code candidate cannot be built (%s); its batch scores as failures.", error)
                broken[position] = str(error)
                continue
            batches.append((program, batch))
        made = self.scope.stage.run(batches)
        self.note_rollouts(made, capture_traces)
        rollouts = iter(made)
        return [
            _failed_batch(batch, self.failure_score, capture_traces)
            if position in broken
            else self._evaluation_batch([next(rollouts) for _ in batch], capture_traces)
            for position, (_, batch) in enumerate(items)
        ]

    def _evaluation_batch(self, rollouts: list[Rollout], capture_traces: bool) -> EvaluationBatch[Any, Any]:
        objectives = [dict(rollout.objective_scores) for rollout in rollouts]
        outputs = [rollout.prediction for rollout in rollouts]
        return EvaluationBatch(
            outputs=outputs if self.dumps is None else [self._savable(output, self.dumps) for output in outputs],
            scores=[rollout.score for rollout in rollouts],
            trajectories=[_trajectory(rollout) for rollout in rollouts] if capture_traces else None,
            objective_scores=objectives if any(objectives) else None,
        )

    def _savable(self, output: Any, dumps: Callable[[Any], bytes]) -> Any:
        """Return the output as gepa can save it; its fields as text where that fails or it holds a secret."""
        try:
            if not holds_own_secret(dumps(output)):
                return output
        except Exception as error:
            what = f"A prediction cannot be saved ({type(error).__name__}: {shorten(error, 100)})"
            self.scope.scorer.warn_once("savable", what, "What is saved of such predictions is their fields as text.")
        if not isinstance(output, dspy.Prediction):
            return hide_own_secrets(text_of(output))
        return dspy.Prediction(**{name: hide_own_secrets(text_of(value)) for name, value in output.items()})

    # Reflection records --------------------------------------------------------------------------------------

    def make_reflective_dataset(
        self, candidate: Candidate, eval_batch: EvaluationBatch[Any, Any], components_to_update: list[str]
    ) -> ReflectiveDataset:
        """Return the reflection records of each component, one for each rollout that reached it.

        Code components of `dspy.Flex` get DSPy's own records, of the whole program.

        Raises:
            Exception: As `dspy.GEPA` does, when no component has a record.
            CombeeError: If a feedback call fails for a reason that should end the run; `failure` holds it too.
        """
        rollouts: list[Rollout] = [data["rollout"] for data in eval_batch.trajectories or []]
        code = [component for component in components_to_update if component in self.program.code]
        plain = [component for component in components_to_update if component not in self.program.code]
        try:
            records = self.maker.records(rollouts, plain)
        except CombeeError as error:
            self.failure = error
            raise
        self.scope.note_feedback(*self.maker.take_feedback_calls())
        records.update({component: code_reflective_records(eval_batch) for component in code})
        for component in components_to_update:
            if not records[component]:
                logger.warning("No reflection records for %r in this minibatch.", component)
        ordered = {component: records[component] for component in components_to_update if records[component]}
        if not ordered:
            raise Exception("No valid predictions found for any module.")
        return ReflectiveDataset(ordered, eval_batch.scores)

    # State that gepa saves and restores ------------------------------------------------------------------------

    def get_adapter_state(self) -> dict[str, Any]:
        """Return the state of `saved_parts`."""
        return {name: part.get_state() for name, part in self.saved_parts.items()}

    def set_adapter_state(self, state: dict[str, Any]) -> None:
        """Give each of `saved_parts` its state back; gepa calls this with `{}` for a fresh run."""
        for name, part in self.saved_parts.items():
            if name in state:
                part.set_state(state[name])


def _trajectory(rollout: Rollout) -> dict[str, Any]:
    """Return DSPy's `TraceData` for a rollout, with the rollout itself beside."""
    feedback = feedback_of(rollout.result)
    failed = FailedPrediction(completion_text=rollout.error) if rollout.error is not None else None
    return {
        "example_ind": rollout.index,
        "example": rollout.example,
        "prediction": rollout.prediction if failed is None else failed,
        "trace": program_trace(rollout),
        "score": rollout.score if feedback is None else dspy.Prediction(score=rollout.score, feedback=feedback),
        "rollout": rollout,
    }


def _failed_batch(batch: list[Any], failure_score: float, capture_traces: bool) -> EvaluationBatch[Any, Any]:
    return EvaluationBatch(
        outputs=[None] * len(batch),
        scores=[failure_score] * len(batch),
        trajectories=[] if capture_traces else None,
    )


def _declares(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
