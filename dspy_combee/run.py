"""`Run`: one call of `CombeeOptimizer.compile`, with parts of its own, so that calls do not meet."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import dspy
import gepa
from dspy.teleprompt.gepa.gepa_utils import LoggerAdapter
from gepa.strategies.eval_policy import EvaluationPolicy, FullEvaluationPolicy

from dspy_combee.adapter import CombeeAdapter
from dspy_combee.batch_size import PowerLawBatchSize
from dspy_combee.budget import Budget, BudgetedSampling, CostGuard, tasks_per_step
from dspy_combee.calls import UsageMeter
from dspy_combee.executors import ThreadExecutor
from dspy_combee.records import Spent
from dspy_combee.reflection import RunReflection
from dspy_combee.result import CombeeResult
from dspy_combee.rollout import Scorer
from dspy_combee.sampling import EpochSampler, resolve_selector
from dspy_combee.shuffle import default_num_groups
from dspy_combee.sizes import resolve_sizer
from dspy_combee.steps import StepRecorder

logger = logging.getLogger("dspy_combee")


class Run:
    """One run of the optimizer.

    Args:
        optimizer: The `CombeeOptimizer`; it holds the options and is not changed.
        student: The program.
        trainset: Examples to learn from.
        valset: Examples that decide; None for the trainset.
    """

    def __init__(self, optimizer: Any, student: Any, trainset: list[Any], valset: list[Any] | None) -> None:
        self.optimizer = optimizer
        self.trainset = trainset
        self.valset = valset or trainset
        self.extra = dict(optimizer.gepa_kwargs)
        self.budget = Budget(
            num_examples=len(self.trainset),
            num_validation=len(self.valset),
            max_metric_calls=optimizer.budget_for(student, trainset, valset),
            num_epochs=optimizer.num_epochs,
            tasks_per_step=tasks_per_step(self.extra.get("sampling_strategy")),
        )
        executor = optimizer.executor
        if isinstance(executor, str):
            executor = ThreadExecutor(optimizer.num_threads or dspy.settings.num_threads)
        self.sampler = self._make_sampler()
        size = optimizer.reflection_minibatch_size
        clock = (size if isinstance(size, PowerLawBatchSize) else PowerLawBatchSize()).clock
        self.recorder = StepRecorder(self.sampler, clock)
        self.adapter = CombeeAdapter(
            student,
            Scorer(optimizer.metric_fn, optimizer.failure_score, optimizer.perfect_score),
            executor,
            add_format_failure_as_feedback=optimizer.add_format_failure_as_feedback,
            warn_on_score_mismatch=optimizer.warn_on_score_mismatch,
            reflection_lm=optimizer.reflection_lm,
            code_proposer=optimizer.custom_code_proposer,
            observer=self.recorder,
        )
        self.adapter.saved_parts["steps"] = self.recorder
        if self.sampler is not None:
            self.adapter.saved_parts["sampler"] = self.sampler
        meter = UsageMeter()
        guard = CostGuard(executor, optimizer.max_reflection_cost, meter)
        proposer = optimizer.proposer.for_run(guard, optimizer.reflection_lm, optimizer.seed, meter)
        self.adapter.saved_parts["reflection"] = meter
        self.reflection = RunReflection(proposer, self.adapter, self.recorder, guard)
        self.seed_candidate = self.adapter.seed_candidate()

    def execute(self) -> Any:
        """Search, and build the best program.

        Returns:
            The program, with `detailed_results` when the optimizer tracks stats.
        """
        self._log_plan()
        try:
            result = gepa.optimize(**self._gepa_arguments())
        except BaseException as error:
            error.best_program = self._best_program()  # type: ignore[attr-defined]
            raise
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

    @property
    def spent(self) -> Spent:
        """What was spent so far, by phase."""
        return self.recorder.ledger.spent.plus("reflection", 0, self.reflection.proposer.meter.usage)

    def is_spent(self, state: Any) -> bool:
        """A gepa stop callback: whether no further step fits the budget."""
        drawn = 0 if self.sampler is None else self.sampler.drawn
        merge = self.optimizer.use_merge and self.recorder.accepted_last
        return self.budget.is_spent(state.total_num_evals, drawn, merge)

    def _make_sampler(self) -> EpochSampler | None:
        """Our sampler; None where the user brings one."""
        if self.extra.get("batch_sampler", "epoch_shuffled") != "epoch_shuffled":
            if self.optimizer.num_epochs is not None:
                raise ValueError("num_epochs counts the draws of Combee's sampler; it cannot go with a batch_sampler.")
            return None
        sizer = resolve_sizer(
            self.optimizer.reflection_minibatch_size,
            len(self.trainset),
            self.budget.minibatch_rollouts,
            self.budget.tasks_per_step,
        )
        return EpochSampler(sizer, self.budget, self.optimizer.seed)

    def _gepa_arguments(self) -> dict[str, Any]:
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
            "use_merge": optimizer.use_merge,
            "max_merge_invocations": optimizer.max_merge_invocations,
            "max_metric_calls": self.budget.max_metric_calls,
            "stop_callbacks": [self.reflection.check, self.is_spent, *stoppers],
            "callbacks": callbacks,
            "logger": LoggerAdapter(logger),
            "run_dir": optimizer.log_dir,
            "use_wandb": optimizer.use_wandb,
            "wandb_api_key": optimizer.wandb_api_key,
            "wandb_init_kwargs": optimizer.wandb_init_kwargs,
            "use_mlflow": optimizer.use_mlflow,
            "track_best_outputs": optimizer.track_best_outputs,
            "display_progress_bar": False,
            "raise_on_exception": True,
            "seed": optimizer.seed,
            "sampling_strategy": BudgetedSampling(extra.pop("sampling_strategy", None), self.budget),
            "val_evaluation_policy": self._evaluation_policy(extra.pop("val_evaluation_policy", None)),
            **self._sampling(extra),
        }
        extra.setdefault("use_cloudpickle", True)
        return _join(arguments, extra)

    def _sampling(self, extra: dict[str, Any]) -> dict[str, Any]:
        batch_sampler = extra.pop("batch_sampler", None)
        if self.sampler is not None:
            return {"batch_sampler": self.sampler}
        # gepa refuses a minibatch size beside a sampler; "auto" is not one.
        size = self.optimizer.reflection_minibatch_size
        return {"batch_sampler": batch_sampler, "reflection_minibatch_size": size if isinstance(size, int) else None}

    def _evaluation_policy(self, policy: Any) -> Any:
        log_dir = self.optimizer.log_dir
        resumed = log_dir is not None and os.path.exists(os.path.join(log_dir, "gepa_state.bin"))
        if not resumed or not (policy is None or policy == "full_eval" or isinstance(policy, EvaluationPolicy)):
            return policy
        return _ResumedPolicy(policy if isinstance(policy, EvaluationPolicy) else FullEvaluationPolicy())

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
                budget.num_validation,
                budget.smallest_step,
            )
        size = self.optimizer.reflection_minibatch_size
        if isinstance(size, int):
            n = min(size, budget.num_examples)
            k = self.optimizer.num_groups or default_num_groups(n)
            steps = budget.minibatch_rollouts // (2 * n * budget.tasks_per_step)
            logger.info(
                "n = %d and k = %d: at most %d steps, each of %d rollouts and about %d reflection calls per component.",
                n,
                k,
                steps,
                2 * n,
                k + 1 if k > 1 else 1,
            )

    def _best_program(self) -> Any:
        state = self.recorder.state
        if state is None or not state.program_candidates:
            return self.adapter.build_program(self.seed_candidate)
        scores = state.program_full_scores_val_set
        best = max(range(len(scores)), key=lambda index: scores[index])
        return self.adapter.build_program(state.program_candidates[best])


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


def _join(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    twice = sorted(arguments.keys() & extra.keys())
    if twice:
        raise TypeError(f"gepa_kwargs repeats {twice}, which CombeeOptimizer passes itself; use its own keywords.")
    return {**arguments, **extra}
