"""`Search`: GEPA's engine over a trainset, with Map, Shuffle and Reduce in its seams."""

from __future__ import annotations

import json
import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import gepa
from gepa.core.data_loader import ensure_loader
from gepa.core.state import GEPAState
from gepa.gepa_utils import json_default
from gepa.proposer.reflective_mutation.reflection_lm import ReflectionProposal
from gepa.strategies.eval_policy import EvaluationPolicy, FullEvaluationPolicy

from dspy_combee.calls.guard import GuardedCalls
from dspy_combee.calls.lm_calls import collect_history, usage_of
from dspy_combee.controller.batch_size import resolve_sizer
from dspy_combee.controller.sampling import Budget, BudgetedSampling, EpochSampler, resolve_selector, tasks_per_step
from dspy_combee.learners.instruction import Candidate, CombeeProposer, InstructionLearner, Job, to_proposal
from dspy_combee.records.errors import CombeeError, OutOfBudgetError
from dspy_combee.records.secrets import hide_secrets, shorten
from dspy_combee.records.types import Reduction, Rollout
from dspy_combee.reduce.shuffle import default_num_groups
from dspy_combee.rollouts.feedback import raise_if_provider
from dspy_combee.runs.adapter import CombeeAdapter
from dspy_combee.runs.events import StepRecorder
from dspy_combee.runs.scope import FAILED_STEPS, RunScope, reflection_failed
from dspy_combee.runs.state import TRACE_STATE

logger = logging.getLogger("dspy_combee")

GEPA_STATE = "gepa_state.bin"


class Search:
    """Search for better instructions on a trainset, in one run of a `CombeeOptimizer`.

    Args:
        optimizer: The `CombeeOptimizer`; it holds the options and is not changed.
        scope: The run.
        learner: The program, and what rewrites its instructions.
        trainset: Examples to learn from.
        valset: Examples that decide; None for the trainset.
        start: What was learned from traces before, where the search starts; None for the student's own texts.
        drawn_before: How many traces were read before.
    """

    def __init__(
        self,
        optimizer: Any,
        scope: RunScope,
        learner: InstructionLearner,
        trainset: list[Any],
        valset: list[Any] | None,
        start: Candidate | None = None,
        drawn_before: int = 0,
    ) -> None:
        self.optimizer = optimizer
        self.scope = scope
        self.trainset = trainset
        self.valset = valset or trainset
        self.extra = dict(optimizer.gepa_kwargs)
        self.use_merge = optimizer.use_merge
        self.drawn_before = drawn_before
        self.steps_before = len(scope.batch_sizes)
        self.metric_calls_before = scope.spent.metric_calls
        self.budget = search_budget(optimizer, scope.student, trainset, valset, self.metric_calls_before)
        self.sampler = self._make_sampler()
        self.seed_candidate = {**learner.start(), **(start or {})}
        self.recorder = StepRecorder(scope, self.sampler, self.steps_before)
        self.adapter = CombeeAdapter(scope, learner, self._note_rollouts, optimizer.custom_code_proposer)
        self.reflection = RunReflection(learner.proposer, self.adapter, self.recorder)
        self.adapter.saved_parts = {"steps": self.recorder, "reflection": scope.guard.meter}
        if self.sampler is not None:
            self.adapter.saved_parts["sampler"] = self.sampler

    def run(self) -> Any:
        """Search, and return gepa's result.

        Raises:
            ValueError: If `log_dir` holds a search that cannot go on here.

            Whatever is raised carries `best_program`.
        """
        self._log_plan()
        if not has_gepa_state(self.scope.log_dir):
            self.scope.resume_steps(self.steps_before + 1)
        with self.scope.running(self._best_program, self._how_to_resume):
            result = self._search()
        spent = self.scope.spent
        logger.info(
            "Combee ended: best validation score %.4g of %d candidates, after %d steps, %d metric calls, "
            "%d feedback calls and %d reflection calls.",
            max(result.val_aggregate_scores),
            len(result.candidates),
            len(self.scope.batch_sizes),
            spent.metric_calls,
            spent.metric_calls_in("feedback"),
            spent.usage_in("reflection").calls,
        )
        return result

    def _note_rollouts(self, rollouts: Sequence[Rollout], traced: bool) -> None:
        before = self._num_done
        self.recorder.note_rollouts(rollouts, traced)
        self.scope.progress.advance(self._num_done - before, before)

    @property
    def _num_done(self) -> int:
        """Count the rollouts that the budget counts (of minibatches alone where it is in epochs), and the traces."""
        spent = self.scope.spent_without_reflection
        if self.budget.max_metric_calls is not None:
            return self.drawn_before + spent.metric_calls
        return self.drawn_before + spent.metric_calls_in("profiling") + spent.metric_calls_in("rollouts")

    def _search(self) -> Any:
        """Run gepa's search; where gepa's merge fails, it goes on without merge from the last saved step."""
        log_dir = self.scope.log_dir
        may_fail = self.use_merge and len(self.seed_candidate) > 1
        with tempfile.TemporaryDirectory(prefix="dspy_combee_") as own_dir:
            run_dir = log_dir or (own_dir if may_fail else None)
            self.adapter.dumps = None if run_dir is None else output_saver(self.optimizer)
            try:
                result = gepa.optimize(**self._gepa_arguments(run_dir))
            except ValueError as error:
                if not (may_fail and _comes_from_merge(error)):
                    raise
                logger.warning("GEPA's merge failed (%s). The search goes on without merge.", error)
                self.use_merge = False
                result = gepa.optimize(**self._gepa_arguments(run_dir))
        return replace(result, run_dir=None if log_dir is None else str(log_dir))

    def is_spent(self, state: Any) -> bool:
        """Return whether no further step fits the budget, as a gepa stop callback."""
        drawn = 0 if self.sampler is None else self.sampler.drawn
        merge = self.use_merge and self.recorder.accepted_last
        return self.budget.is_spent(state.total_num_evals, drawn, merge)

    def _make_sampler(self) -> EpochSampler | None:
        """Return our sampler; None where the user brings one."""
        if self.extra.get("batch_sampler", "epoch_shuffled") != "epoch_shuffled":
            if self.optimizer.num_epochs is not None:
                raise ValueError("num_epochs counts the draws of Combee's sampler; it cannot go with a batch_sampler.")
            return None
        size = self.optimizer.reflection_minibatch_size
        sizer = resolve_sizer(
            # A list replays a whole run, the steps on traces included.
            size[self.steps_before :] or size[-1:] if isinstance(size, list | tuple) else size,
            len(self.trainset),
            self.budget.minibatch_rollouts,
            self.budget.tasks_per_step,
        )
        return EpochSampler(sizer, self.budget, self.optimizer.seed)

    def _gepa_arguments(self, run_dir: str | os.PathLike[str] | None) -> dict[str, Any]:
        optimizer, extra = self.optimizer, dict(self.extra)
        callbacks = [self.recorder, *(extra.pop("callbacks", None) or [])]
        stoppers = extra.pop("stop_callbacks", None) or []
        stoppers = list(stoppers) if isinstance(stoppers, Sequence) else [stoppers]
        arguments: dict[str, Any] = {
            "seed_candidate": self.seed_candidate,
            "trainset": self.trainset,
            "valset": self.valset,
            "adapter": self.adapter,
            "reflection_strategy": self.reflection,
            "candidate_selection_strategy": resolve_selector(optimizer.candidate_selection_strategy, optimizer.seed),
            "skip_perfect_score": optimizer.skip_perfect_score,
            "module_selector": optimizer.component_selector,
            "perfect_score": optimizer.perfect_score,
            "use_merge": self.use_merge,
            "max_merge_invocations": optimizer.max_merge_invocations,
            "max_metric_calls": self.budget.max_metric_calls,
            "stop_callbacks": [self.reflection.check, self.is_spent, *stoppers],
            "callbacks": callbacks,
            "logger": _GepaLogger(),
            "run_dir": None if run_dir is None else str(run_dir),
            "track_best_outputs": optimizer.track_best_outputs,
            "display_progress_bar": False,
            "raise_on_exception": True,
            "seed": optimizer.seed,
            "sampling_strategy": BudgetedSampling(extra.pop("sampling_strategy", None), self.budget),
            "val_evaluation_policy": _evaluation_policy(extra.pop("val_evaluation_policy", None), run_dir),
            **self._sampling(extra),
        }
        extra.setdefault("use_cloudpickle", True)
        tracking = self.scope.tracking.gepa_arguments()
        extra = {
            name: value for name, value in extra.items() if name != "wandb_attach_existing" or name not in tracking
        }
        return _join({**arguments, **tracking}, extra)

    def _sampling(self, extra: dict[str, Any]) -> dict[str, Any]:
        batch_sampler = extra.pop("batch_sampler", None)
        if self.sampler is not None:
            return {"batch_sampler": self.sampler}
        # gepa refuses a minibatch size beside a sampler; "auto" is not one.
        size = self.optimizer.reflection_minibatch_size
        return {"batch_sampler": batch_sampler, "reflection_minibatch_size": size if isinstance(size, int) else None}

    def _log_plan(self) -> None:
        budget = self.budget
        limit = (
            f"{budget.max_metric_calls} metric calls" if budget.num_epochs is None else f"{budget.num_epochs} epochs"
        )
        logger.info(
            "Running GEPA with Combee for about %s: %d training and %d validation examples.",
            limit,
            budget.num_examples,
            budget.num_validation,
        )
        if not budget.is_exact:
            logger.warning(
                "The budget of %s metric calls does not cover the seed's validation (%d) and one step (%d): as in "
                "dspy.GEPA it can be exceeded, or no step is made.",
                budget.max_metric_calls,
                budget.seed_cost,
                budget.smallest_step,
            )
        if self.sampler is None:
            logger.info("The minibatches are those of the given batch_sampler.")
            return
        sizes = [min(n, budget.num_examples) for n in self.sampler.sizer.expected]
        groups = [self.reflection.proposer.num_groups or default_num_groups(n) for n in sizes]
        calls = [k + 1 if k > 1 else 1 for k in groups]
        logger.info(
            "The plan: %s; k = %s; %s steps expected. A step takes %s rollouts and about %s reflection calls per "
            "component, and %d rollouts more if its proposal is accepted.",
            self.sampler.sizer.description,
            _span(groups),
            _span([budget.steps_of(sizes, all_accepted=True), budget.steps_of(sizes, all_accepted=False)]),
            _span([2 * n * budget.tasks_per_step for n in sizes]),
            _span([number * budget.tasks_per_step for number in calls]),
            budget.num_validation,
        )

    def _how_to_resume(self) -> str:
        log_dir = self.scope.log_dir
        if has_gepa_state(log_dir):
            return f"state saved in {log_dir}: compile with the same log_dir goes on from there."
        if log_dir is not None:
            return "nothing is saved before the seed is validated: compile with the same log_dir starts anew."
        return "no state is saved: give a log_dir to be able to go on."

    def _best_program(self) -> Any:
        state = self.recorder.state
        if state is None or not state.program_candidates:
            return self.adapter.build_program(self.seed_candidate)
        scores = state.program_full_scores_val_set
        best = max(range(len(scores)), key=lambda index: scores[index])
        return self.adapter.build_program(state.program_candidates[best])


class RunReflection:
    """Reflect for one run as gepa's `ReflectionLM`; `dspy.Flex` code goes to the code proposer.

    gepa swallows what a strategy raises and asks again, so failures are kept here and `check` raises them where
    gepa lets them through (it is one of the run's stop callbacks).

    Args:
        proposer: The proposer, made for this run.
        adapter: The run's adapter.
        recorder: Takes the trees of each step.
    """

    def __init__(self, proposer: CombeeProposer, adapter: CombeeAdapter, recorder: StepRecorder) -> None:
        self.proposer = proposer
        self.adapter = adapter
        self.recorder = recorder
        self.guard = adapter.scope.guard
        self.failure: Exception | None = None
        self._failed_steps = 0

    @property
    def total_cost(self) -> float:
        """Return the US dollars of reflection so far, as far as the LM reports them."""
        return self.proposer.total_cost

    def check(self, state: Any) -> bool:
        """Raise the failure that should end the run, or stop it when its money is spent, as a gepa stop callback."""
        failure = self.failure or self.adapter.failure
        if failure is not None:
            raise failure
        return self.guard.is_spent

    def reflect(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> tuple[ReflectionProposal, RunReflection]:
        """Propose new texts for one job."""
        return self.reflect_many([(candidate, reflective_dataset, components_to_update)])[0]

    def reflect_many(self, jobs: list[Job]) -> list[tuple[ReflectionProposal, RunReflection]]:
        """Propose new texts for the jobs of a step; a job without a usable proposal gets none."""
        code = self.adapter.program.code
        plain = [(candidate, dataset, [c for c in names if c not in code]) for candidate, dataset, names in jobs]
        positions = [f"{self.recorder.iteration}.{index}" for index in range(len(jobs))]
        reductions: list[list[Reduction]] = [[] for _ in jobs]
        try:
            if self.adapter.failure is not None:  # Of another job of this step: it ends the run.
                raise self.adapter.failure
            reductions = self.proposer.reduce(plain, positions)
            for job, made in zip(jobs, reductions, strict=True):
                made.extend(self._code_reductions(job, [c for c in job[2] if c in code]))
        except Exception as error:
            if isinstance(error, OutOfBudgetError):
                logger.info("The search ends: %s", error)
            else:
                self.failure = error
            reductions = _completed(error, jobs, reductions)
        proposals = [to_proposal(made) for made in reductions]
        for job, proposal, made in zip(jobs, proposals, reductions, strict=True):
            if self.failure is not None:
                proposal.new_texts.clear()  # What is left of the run ends before it is evaluated.
            scores = getattr(job[1], "scores", None)
            repeated = self.recorder.repeat_of(scores, {**job[0], **proposal.new_texts}) if proposal.new_texts else None
            if repeated is not None:
                logger.info("Not evaluated, %s.", repeated)
                proposal.new_texts.clear()
            self.recorder.note_reductions(scores, job[0], proposal.new_texts, made, repeated)
        self._count_failures(proposals, reductions)
        return [(proposal, self) for proposal in proposals]

    def _code_reductions(self, job: Job, components: list[str]) -> list[Reduction]:
        """Return what the code proposer makes of code components: no tree, so no nodes."""
        if not components:
            return []
        candidate, dataset, _ = job
        logger.info("Code components %s go to the code proposer, in one plain call each.", components)
        proposed: Mapping[str, str] = {}
        reason = None
        try:
            proposed = self.guard.map(_CodeCalls(self.adapter), [(candidate, dataset, components)])[0]
        except Exception as error:
            if isinstance(error, CombeeError):
                raise
            reason = f"{type(error).__name__}: {shorten(str(error))}"
            logger.warning("The code proposer failed on %s: %s", components, reason)
        new = {name: text for name, text in proposed.items() if text != candidate.get(name)}
        return [
            Reduction(name, new.get(name), (), num_groups=1, duplication_factor=1, error=reason) for name in components
        ]

    def _count_failures(self, proposals: list[ReflectionProposal], reductions: list[list[Reduction]]) -> None:
        errors = [reduction.error for made in reductions for reduction in made if reduction.error]
        if any(proposal.new_texts for proposal in proposals):
            self._failed_steps = 0
        elif errors:
            self._failed_steps += 1
        if self._failed_steps >= FAILED_STEPS and self.failure is None:
            self.failure = reflection_failed(errors[-1])


def _completed(error: Exception, jobs: Sequence[Job], made: list[list[Reduction]]) -> list[list[Reduction]]:
    """Return what each job had before the error, which has been paid for, and the error in place of the rest."""
    made = getattr(error, "reductions", made)
    for (_, _, names), own in zip(jobs, made, strict=True):
        done = {reduction.component for reduction in own}
        own.extend(Reduction(name, None, (), 0, 0, str(error)) for name in names if name not in done)
    return made


class _CodeCalls(GuardedCalls[Job, dict[str, str]]):
    """Ask the code proposer of `dspy.Flex` components for new source."""

    def __init__(self, adapter: CombeeAdapter) -> None:
        self.adapter = adapter

    def __call__(self, job: Job, /) -> dict[str, str]:
        entries: list[Mapping[str, Any]] = []
        try:
            with collect_history(entries, force=True):
                return self.adapter.propose_code(*job)
        except Exception as error:
            raise_if_provider(error)  # Here, where the executor sees what may pass.
            raise
        finally:
            self.adapter.scope.guard.meter.add(usage_of(entries))


def search_budget(
    optimizer: Any, student: Any, trainset: Sequence[Any], valset: Sequence[Any] | None, metric_calls_before: int = 0
) -> Budget:
    """Return the budget of a search, of which so many metric calls are spent already."""
    max_metric_calls = optimizer.budget_for(student, trainset, valset)
    validation = valset or trainset
    return Budget(
        num_examples=len(trainset),
        num_validation=len(validation),
        max_metric_calls=None if max_metric_calls is None else max_metric_calls - metric_calls_before,
        num_epochs=optimizer.num_epochs,
        tasks_per_step=tasks_per_step(optimizer.gepa_kwargs.get("sampling_strategy")),
        num_seed_validation=_seed_validation(optimizer.gepa_kwargs.get("val_evaluation_policy"), validation),
    )


def has_gepa_state(run_dir: str | os.PathLike[str] | None) -> bool:
    """Return whether GEPA has saved a search there."""
    return run_dir is not None and os.path.exists(os.path.join(run_dir, GEPA_STATE))


def refuse_other_state(
    run_dir: str | os.PathLike[str] | None, components: Iterable[str], with_traces: bool = False
) -> None:
    """Refuse to go on from a run that was saved there if that cannot be done.

    Raises:
        ValueError: If GEPA's file cannot be read or was for a program with other components, or the run began with
            traces and goes on without, or the other way around.
    """
    if run_dir is None:
        return
    began_with_traces = (Path(run_dir) / TRACE_STATE).exists()
    if began_with_traces and not with_traces:
        raise ValueError(f"{run_dir} holds the state of a run on traces. Give them again, or another log_dir.")
    if not has_gepa_state(run_dir):
        return
    if with_traces and not began_with_traces:
        raise ValueError(f"{run_dir} holds the state of a run without traces. Give another log_dir.")
    path = os.path.join(run_dir, GEPA_STATE)
    try:
        saved = sorted(GEPAState.load(str(run_dir)).program_candidates[0])
    except Exception as error:
        raise ValueError(
            f"{path} is damaged, or no saved state of GEPA: {type(error).__name__}: {shorten(str(error))}. Put back a "
            "whole copy of it, or give another log_dir to start anew."
        ) from error
    if saved != sorted(components):
        raise ValueError(
            f"{run_dir} holds the run of another program, whose components are {saved}; those of this one are "
            f"{sorted(components)}. Give another log_dir."
        )


def items_of(examples: Any) -> Iterator[Any]:
    """Yield the examples of a list, or of one of gepa's data loaders, which is asked only when they are used."""
    loader: Any = ensure_loader(examples)
    yield from loader.fetch(list(loader.all_ids()))


def output_saver(optimizer: Any) -> Callable[[Any], bytes]:
    """Return what gives all that gepa saves of an output: JSON, and a pickle where its state keeps outputs."""
    options = optimizer.gepa_kwargs
    keeps_outputs = optimizer.track_best_outputs or options.get("cache_evaluation")
    pickler: Any = cloudpickle if options.get("use_cloudpickle", True) else pickle
    return partial(_saved_forms, pickler.dumps if keeps_outputs else None)


def _saved_forms(pickled: Callable[[Any], bytes] | None, output: Any) -> bytes:
    return json.dumps(output, default=json_default).encode() + (b"" if pickled is None else pickled(output))


class _GepaLogger:
    """Hand gepa's log lines, without secrets, to this package's logger."""

    def log(self, message: Any) -> None:
        logger.info("%s", hide_secrets(str(message)))


class _ResumedPolicy(EvaluationPolicy[Any, Any]):
    """Leave the seed out of a run that goes on: it was validated and paid for when the run began.

    Args:
        policy: Decides everything else.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def get_seed_eval_batch(self, loader: Any) -> list[Any]:
        """Return nothing: gepa takes the seed's scores from the saved state."""
        return []

    def get_eval_batch(self, loader: Any, state: Any, target_program_idx: int | None = None) -> list[Any]:
        """See `EvaluationPolicy.get_eval_batch`."""
        return list(self.policy.get_eval_batch(loader, state, target_program_idx))

    def get_best_program(self, state: Any) -> Any:
        """See `EvaluationPolicy.get_best_program`."""
        return self.policy.get_best_program(state)

    def get_valset_score(self, program_idx: Any, state: Any) -> float:
        """See `EvaluationPolicy.get_valset_score`."""
        return float(self.policy.get_valset_score(program_idx, state))


def _evaluation_policy(policy: Any, run_dir: str | os.PathLike[str] | None) -> Any:
    if not has_gepa_state(run_dir) or not (
        policy is None or policy == "full_eval" or isinstance(policy, EvaluationPolicy)
    ):
        return policy
    return _ResumedPolicy(policy if isinstance(policy, EvaluationPolicy) else FullEvaluationPolicy())


def _seed_validation(policy: Any, valset: Sequence[Any]) -> int | None:
    """Return what the seed's validation costs, where the policy says so."""
    seed_batch = getattr(policy, "get_seed_eval_batch", None)
    return None if seed_batch is None else len(list(seed_batch(ensure_loader(valset))))


def _span(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def _comes_from_merge(error: BaseException) -> bool:
    """Return whether an error was raised in gepa's merge."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == "gepa.proposer.merge":
            return True
        trace = trace.tb_next
    return False


def _join(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    # The last two are not passed on, but they are keywords of this optimizer as they are of dspy.GEPA.
    own = arguments.keys() | {"reflection_lm", "reflection_minibatch_size"}
    for name in sorted(own & extra.keys()):
        raise TypeError(
            f"gepa.api.optimize() got multiple values for keyword argument {name!r}: it stands in gepa_kwargs, and "
            "is a keyword of CombeeOptimizer itself."
        )
    return {**arguments, **extra}
