"""`CombeeAdapter`: GEPA's adapter for DSPy programs, whose evaluation is Map."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import dspy
from dspy.primitives.code_interpreter import CodeInterpreterError
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.teleprompt.gepa.gepa_flex_utils import (
    code_reflective_records,
    enumerate_flex_submodules,
    rebind_flex_code,
)
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from gepa import EvaluationBatch

from dspy_combee.calls.executors import Executor
from dspy_combee.records.errors import CombeeError
from dspy_combee.records.secrecy import hide_own_secrets, holds_own_secret, shorten
from dspy_combee.records.text import text_of
from dspy_combee.records.types import Rollout, Usage
from dspy_combee.rollouts.feedback import RecordMaker, ReflectiveDataset, Scorer, feedback_of, program_trace
from dspy_combee.rollouts.map import MapStage, ProgramCopier

logger = logging.getLogger("dspy_combee")

Candidate = dict[str, str]


class RolloutObserver(Protocol):
    """Is told of the rollouts and feedback calls that were made."""

    def note_rollouts(self, rollouts: Sequence[Rollout], traced: bool, cut_short: Usage) -> None:
        """These rollouts were made, with traces or without; others that were cut short had used something too."""
        ...

    def note_feedback(self, metric_calls: int, usage: Usage) -> None:
        """The metric was asked for feedback this many times; its language-model calls took this."""
        ...


class CombeeAdapter(DspyAdapter):
    """Evaluates candidates with Map and makes one reflection record for each rollout and component.

    The search is GEPA's; proposals come from the reflection strategy, so `propose_new_texts` is None here.

    Attributes:
        saved_parts: Parts of the run whose state gepa saves and restores.
        dumps: Gives what gepa saves of an output, or raises if it cannot; None where it saves none.
        failure: The error that ended a feedback call and should end the run; gepa goes on without the records.

    Args:
        student: The program; it is never changed.
        scorer: Scores the predictions.
        executor: Runs the rollouts and the feedback calls.
        add_format_failure_as_feedback: Whether an answer that could not be parsed gives a record.
        warn_on_score_mismatch: Whether to warn (once) when the metric scores differently at feedback time.
        reflection_lm: For the code components of `dspy.Flex`.
        code_proposer: Replaces DSPy's proposer of Flex code.
        observer: Is told of the rollouts that were made.
        rollout_timeout: Seconds that one rollout, or the feedback on one, may take; None for no limit.
    """

    propose_new_texts: Any = None

    def __init__(  # noqa: PLR0913
        self,
        student: Any,
        scorer: Scorer,
        executor: Executor,
        *,
        add_format_failure_as_feedback: bool = False,
        warn_on_score_mismatch: bool = True,
        reflection_lm: Any = None,
        code_proposer: Any = None,
        observer: RolloutObserver | None = None,
        rollout_timeout: float | None = None,
    ) -> None:
        super().__init__(
            student_module=student,
            metric_fn=scorer.metric,
            feedback_map={},
            failure_score=scorer.failure_score,
            num_threads=executor.width,
            add_format_failure_as_feedback=add_format_failure_as_feedback,
            reflection_lm=reflection_lm,
            custom_code_proposer=code_proposer,
            warn_on_score_mismatch=warn_on_score_mismatch,
        )
        self.scorer = scorer
        scorer.wants_program_trace = bool(self._flex_paths) and _declares(scorer.metric, "program_trace")
        self.executor = executor
        self.copier = ProgramCopier(student)
        self.map_stage = MapStage(self.copier, scorer, executor, rollout_timeout)
        self.record_maker = RecordMaker(
            scorer, executor, add_format_failure_as_feedback, warn_on_score_mismatch, rollout_timeout
        )
        self._tool_lines = _tool_lines(student)
        self.observer = observer
        self.saved_parts: dict[str, Any] = {}
        self.dumps: Callable[[Any], bytes] | None = None
        self.failure: CombeeError | None = None

    # Candidates ----------------------------------------------------------------------------------------------

    def seed_candidate(self) -> Candidate:
        """The student's components: instructions by predictor, source by `dspy.Flex` submodule."""
        candidate = {name: predictor.signature.instructions for name, predictor in self.student.named_predictors()}
        for path in self.code_components:
            candidate[path] = _parameter(self.student, path).module_src
        return candidate

    @staticmethod
    def flex_paths(student: Any) -> list[str]:
        """The paths of the `dspy.Flex` submodules of a program."""
        return list(enumerate_flex_submodules(student))

    @property
    def code_components(self) -> set[str]:
        """The components that are code."""
        return set(self._flex_paths)

    def propose_code(self, candidate: Candidate, dataset: Any, components: list[str]) -> Candidate:
        """New source for code components, from the code proposer in one plain call each."""
        texts: Candidate = DspyAdapter.propose_new_texts(self, candidate, dataset, components)
        return texts

    def build_program(self, candidate: Candidate) -> Any:
        """The student with the candidate's texts, as a program of its own.

        An agent's instruction lists its tools, and nothing else does; where a new instruction has lost a line
        of that list, the list is put back.
        """
        program = self.copier.copy(self.student)
        rebind_flex_code(program, candidate)
        for name, predictor in program.named_predictors():
            if name in candidate:
                text = _with_lines(candidate[name], self._tool_lines.get(name, ()))
                if text != predictor.signature.instructions:  # A new signature takes a millisecond to make.
                    predictor.signature = predictor.signature.with_instructions(text)
        return program

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
        made = self.map_stage.run(batches)
        if self.observer is not None:
            self.observer.note_rollouts(made, capture_traces, self.map_stage.aborted_usage.take())
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
        """The output as gepa can save it; its fields as text where that fails or it holds a secret."""
        try:
            if not holds_own_secret(dumps(output)):
                return output
        except Exception as error:
            what = f"A prediction cannot be saved ({type(error).__name__}: {shorten(error, 100)})"
            self.scorer.warn_once("savable", what, "What is saved of such predictions is their fields as text.")
        if not isinstance(output, dspy.Prediction):
            return hide_own_secrets(text_of(output))
        return dspy.Prediction(**{name: hide_own_secrets(text_of(value)) for name, value in output.items()})

    # Reflection records --------------------------------------------------------------------------------------

    def make_reflective_dataset(
        self, candidate: Candidate, eval_batch: EvaluationBatch[Any, Any], components_to_update: list[str]
    ) -> ReflectiveDataset:
        """The reflection records of each component, one for each rollout that reached it.

        Code components of `dspy.Flex` get DSPy's own records, of the whole program.

        Raises:
            Exception: As `dspy.GEPA` does, when no component has a record.
            CombeeError: If a feedback call fails for a reason that should end the run; `failure` holds it too.
        """
        rollouts: list[Rollout] = [data["rollout"] for data in eval_batch.trajectories or []]
        code = [component for component in components_to_update if component in self._flex_paths]
        plain = [component for component in components_to_update if component not in self._flex_paths]
        try:
            records = self.record_maker.records(rollouts, plain)
        except CombeeError as error:
            self.failure = error
            raise
        if self.observer is not None:
            self.observer.note_feedback(*self.record_maker.take_feedback_calls())
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
        """The state of `saved_parts`, the parts of the run that a resumed run needs."""
        return {name: part.get_state() for name, part in self.saved_parts.items()}

    def set_adapter_state(self, state: dict[str, Any]) -> None:
        """Give each of `saved_parts` its state back; gepa calls this with `{}` for a fresh run."""
        for name, part in self.saved_parts.items():
            if name in state:
                part.set_state(state[name])


def _trajectory(rollout: Rollout) -> dict[str, Any]:
    """DSPy's `TraceData` for a rollout, with the rollout itself beside."""
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


def _parameter(program: Any, path: str) -> Any:
    return dict(program.named_parameters())[path]


def _tool_lines(student: Any) -> dict[str, tuple[str, ...]]:
    """For each predictor whose instruction lists tools of its module (`dspy.ReAct`): the lines of that list."""
    names = {id(predictor): name for name, predictor in student.named_predictors()}
    lines: dict[str, tuple[str, ...]] = {}
    for _, module in student.named_sub_modules(dspy.Module):
        tools = getattr(module, "tools", None)
        if not isinstance(tools, Mapping):
            continue
        described = [str(tool) for tool in tools.values() if isinstance(tool, dspy.Tool)]
        for predictor in vars(module).values():
            if id(predictor) in names:
                text = predictor.signature.instructions
                found = tuple(line for line in text.split("\n") if any(tool in line for tool in described))
                lines[names[id(predictor)]] = found
    return lines


def _with_lines(text: str, lines: Sequence[str]) -> str:
    if all(line in text for line in lines):
        return text
    return "\n".join([text, "", "The tools you can use:", *lines])
