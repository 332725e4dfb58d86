"""`Run`: one call of `CombeeOptimizer.compile`, with parts of its own, so that calls do not meet."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gepa
from gepa.core.data_loader import ensure_loader
from gepa.strategies.eval_policy import EvaluationPolicy, FullEvaluationPolicy

from dspy_combee.controller.batch_size import PowerLawBatchSize, resolve_sizer
from dspy_combee.controller.sampling import Budget, BudgetedSampling, EpochSampler, resolve_selector, tasks_per_step
from dspy_combee.records.secrecy import hide_secrets, keeping_secret
from dspy_combee.records.types import Rollout, Spent, StepRecord, Usage
from dspy_combee.reduce.shuffle import default_num_groups
from dspy_combee.report.step_log import StepLog, alone_in
from dspy_combee.runs.events import StepRecorder
from dspy_combee.runs.parts import (
    has_gepa_state,
    make_adapter,
    make_executor,
    make_reflection,
    output_saver,
    ready_to_run,
    refuse_other_state,
    secrets_in_run,
)
from dspy_combee.runs.progress import ProgressLine
from dspy_combee.runs.reflection import RunReflection
from dspy_combee.runs.result import CombeeResult
from dspy_combee.runs.tracking import StepTracking, has_wandb_run

if TYPE_CHECKING:
    from dspy_combee.runs.trace_run import TraceRun

logger = logging.getLogger("dspy_combee")


class Run:
    """One run of the optimizer.

    Args:
        optimizer: The `CombeeOptimizer`; it holds the options and is not changed.
        student: The program.
        trainset: Examples to learn from.
        valset: Examples that decide; None for the trainset.
        learned: What was learned from traces before, where the search starts; None for the student.
    """

    def __init__(
        self,
        optimizer: Any,
        student: Any,
        trainset: list[Any],
        valset: list[Any] | None,
        learned: TraceRun | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.trainset = trainset
        self.valset = valset or trainset
        self.extra = dict(optimizer.gepa_kwargs)
        self.use_merge = optimizer.use_merge
        self.steps_before = 0 if learned is None else learned.state.step
        self.metric_calls_before = 0 if learned is None else learned.recorder.ledger.spent.metric_calls
        max_metric_calls = optimizer.budget_for(student, trainset, valset)
        self.budget = Budget(
            num_examples=len(self.trainset),
            num_validation=len(self.valset),
            max_metric_calls=None if max_metric_calls is None else max_metric_calls - self.metric_calls_before,
            num_epochs=optimizer.num_epochs,
            tasks_per_step=tasks_per_step(self.extra.get("sampling_strategy")),
            num_seed_validation=_seed_validation(self.extra.get("val_evaluation_policy"), self.valset),
        )
        executor = make_executor(optimizer)
        self.sampler = self._make_sampler()
        size = optimizer.reflection_minibatch_size
        clock = (size if isinstance(size, PowerLawBatchSize) else PowerLawBatchSize()).clock
        self.step_log = StepLog(optimizer.log_dir) if optimizer.log_dir is not None else None
        self.progress = ProgressLine(self._total_rollouts(), optimizer.verbose)
        # GEPA would end a W&B run of the host's that it is not told to join.
        self.joins_wandb = optimizer.use_wandb and self.extra.get("wandb_attach_existing", has_wandb_run())
        tracking = StepTracking(optimizer.use_mlflow, optimizer.use_wandb, self.joins_wandb, len(trainset))
        listeners = [self._show, tracking, *optimizer.step_callbacks]
        self.recorder = StepRecorder(self.sampler, clock, listeners, self.step_log, kept=optimizer.track_stats)
        self.adapter = make_adapter(optimizer, student, executor, self)
        self.adapter.saved_parts["steps"] = self.recorder
        if self.sampler is not None:
            self.adapter.saved_parts["sampler"] = self.sampler
        parts = make_reflection(optimizer, executor)
        self.adapter.saved_parts["reflection"] = parts.meter
        self.reflection = RunReflection(parts.proposer, self.adapter, self.recorder, parts.guard)
        self.seed_candidate = self.adapter.seed_candidate()
        if learned is not None:
            self.seed_candidate.update(learned.state.candidate)
            self.recorder.follow(learned.recorder)
            parts.meter.set_state(learned.meter.get_state())

    def execute(self) -> Any:
        """Search, and build the best program.

        Returns:
            The program, with `detailed_results` when the optimizer tracks stats.

        Raises:
            ValueError: If `log_dir` holds a search that cannot go on here.
        """
        refuse_other_state(self.optimizer.log_dir, self.seed_candidate)
        secrets = secrets_in_run(self.adapter.student, self.reflection.proposer.reflection_lm)
        log_dir = self.optimizer.log_dir
        with alone_in(log_dir), keeping_secret(secrets), ready_to_run(self.adapter, self.valset, later=self.trainset):
            return self._execute()

    def _execute(self) -> Any:
        self._log_plan()
        if self.step_log is not None and not has_gepa_state(self.optimizer.log_dir):
            self.step_log.resume(self.steps_before + 1)
        try:
            result = self._search()
        except BaseException as error:
            self.progress.close(finished=False)
            error.best_program = self._best_program()  # type: ignore[attr-defined]
            if isinstance(error, KeyboardInterrupt):
                self._log_interrupt()
            raise
        self.progress.close(finished=True)
        program = self.adapter.build_program(result.candidates[result.best_idx])
        spent = self.spent
        logger.info(
            "Combee ended: best validation score %.4g of %d candidates, after %d steps, %d metric calls, "
            "%d feedback calls and %d reflection calls.",
            max(result.val_aggregate_scores),
            len(result.candidates),
            len(self.recorder.batch_sizes),
            spent.metric_calls,
            spent.metric_calls_in("feedback"),
            spent.usage_in("reflection").calls,
        )
        if self.optimizer.track_stats:
            program.detailed_results = CombeeResult.from_run(result, self.adapter, self.recorder, spent)
        return program

    def note_rollouts(self, rollouts: Sequence[Rollout], traced: bool, cut_short: Usage) -> None:
        """See `RolloutObserver`."""
        before = self._rollouts_done
        self.recorder.note_rollouts(rollouts, traced, cut_short)
        self.progress.advance(self._rollouts_done - before, before)

    def note_feedback(self, metric_calls: int, usage: Usage) -> None:
        """See `RolloutObserver`."""
        self.recorder.ledger.add_feedback(metric_calls, usage)

    def _total_rollouts(self) -> int | None:
        budget = self.budget
        if budget.max_metric_calls is None:
            return budget.minibatch_rollouts
        return budget.max_metric_calls + self.metric_calls_before

    @property
    def _rollouts_done(self) -> int:
        """Those that the budget counts: of minibatches alone where it is in epochs."""
        spent = self.recorder.ledger.spent
        if self.budget.max_metric_calls is not None:
            return spent.metric_calls
        return spent.metric_calls_in("profiling") + spent.metric_calls_in("rollouts")

    def _show(self, step: StepRecord) -> None:
        usage = self.reflection.proposer.meter.usage
        self.progress.show(
            step=len(self.recorder.batch_sizes),
            n=step.n,
            best=step.best_score,
            reflections=usage.calls,
            dollars=usage.cost or None,
        )

    def _search(self) -> Any:
        """Run gepa's search; where gepa's merge fails, it goes on without merge from the last saved step."""
        log_dir = self.optimizer.log_dir
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
        return replace(result, run_dir=log_dir)

    @property
    def spent(self) -> Spent:
        """What was spent so far, by phase."""
        return self.recorder.ledger.spent.plus("reflection", 0, self.reflection.proposer.meter.usage)

    def is_spent(self, state: Any) -> bool:
        """A gepa stop callback: whether no further step fits the budget."""
        drawn = 0 if self.sampler is None else self.sampler.drawn
        merge = self.use_merge and self.recorder.accepted_last
        return self.budget.is_spent(state.total_num_evals, drawn, merge)

    def _make_sampler(self) -> EpochSampler | None:
        """Our sampler; None where the user brings one."""
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

    def _gepa_arguments(self, run_dir: str | None) -> dict[str, Any]:
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
            "run_dir": run_dir,
            "use_wandb": optimizer.use_wandb,
            "wandb_api_key": optimizer.wandb_api_key,
            "wandb_init_kwargs": optimizer.wandb_init_kwargs,
            "use_mlflow": optimizer.use_mlflow,
            "track_best_outputs": optimizer.track_best_outputs,
            "display_progress_bar": False,
            "raise_on_exception": True,
            "seed": optimizer.seed,
            "sampling_strategy": BudgetedSampling(extra.pop("sampling_strategy", None), self.budget),
            "val_evaluation_policy": _evaluation_policy(extra.pop("val_evaluation_policy", None), run_dir),
            **self._sampling(extra),
        }
        extra.setdefault("use_cloudpickle", True)
        if self.joins_wandb:
            extra["wandb_attach_existing"] = True
        return _join(arguments, extra)

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

    def _log_interrupt(self) -> None:
        log_dir = self.optimizer.log_dir
        if has_gepa_state(log_dir):
            logger.warning("Interrupted; state saved in %s: compile with the same log_dir goes on from there.", log_dir)
        elif log_dir is not None:
            logger.warning("Interrupted before the seed was validated: compile with the same log_dir starts anew.")
        else:
            logger.warning("Interrupted; no state is saved: give a log_dir to be able to go on.")

    def _best_program(self) -> Any:
        state = self.recorder.state
        if state is None or not state.program_candidates:
            return self.adapter.build_program(self.seed_candidate)
        scores = state.program_full_scores_val_set
        best = max(range(len(scores)), key=lambda index: scores[index])
        return self.adapter.build_program(state.program_candidates[best])


class _GepaLogger:
    """gepa's logger: its lines, without secrets, to this package's logger."""

    def log(self, message: Any) -> None:
        logger.info("%s", hide_secrets(str(message)))


class _ResumedPolicy(EvaluationPolicy[Any, Any]):
    """An evaluation policy for a run that goes on: the seed was validated and paid for when it began.

    Args:
        policy: Decides everything else.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def get_seed_eval_batch(self, loader: Any) -> list[Any]:
        """Nothing: gepa takes the seed's scores from the saved state."""
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


def _evaluation_policy(policy: Any, run_dir: str | None) -> Any:
    if not has_gepa_state(run_dir) or not (
        policy is None or policy == "full_eval" or isinstance(policy, EvaluationPolicy)
    ):
        return policy
    return _ResumedPolicy(policy if isinstance(policy, EvaluationPolicy) else FullEvaluationPolicy())


def _seed_validation(policy: Any, valset: Sequence[Any]) -> int | None:
    """What the seed's validation costs, where the policy says so."""
    seed_batch = getattr(policy, "get_seed_eval_batch", None)
    return None if seed_batch is None else len(list(seed_batch(ensure_loader(valset))))


def _span(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def _comes_from_merge(error: BaseException) -> bool:
    """Whether an error was raised in gepa's merge."""
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
