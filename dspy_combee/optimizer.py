"""`CombeeOptimizer`: `dspy.GEPA` that learns from large minibatches.

It wires the parts into `gepa.optimize`; GEPA's engine runs the search.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import dspy
import gepa
from dspy.teleprompt.gepa.gepa import AUTO_RUN_SETTINGS
from dspy.teleprompt.gepa.gepa_utils import LoggerAdapter

from dspy_combee.adapter import CombeeAdapter
from dspy_combee.aggregation import Aggregator, resolve_aggregator
from dspy_combee.executors import Executor, ThreadExecutor
from dspy_combee.proposer import CombeeProposer
from dspy_combee.reflection import RunReflection
from dspy_combee.result import CombeeResult
from dspy_combee.rollout import Scorer
from dspy_combee.sampling import DEFAULT_MINIBATCH_SIZE, EpochSampler, resolve_selector
from dspy_combee.steps import StepRecorder

logger = logging.getLogger("dspy_combee")

NO_VALSET = (
    "No valset provided; using the trainset as valset. That finds the best program for the examples of the trainset "
    "and overfits to them. To do well on unseen examples give a valset of its own: the smallest that matches the "
    "task, and keep the trainset as large as possible."
)


class CombeeOptimizer(dspy.GEPA):
    """`dspy.GEPA` with the reflection of Combee: large minibatches, no lost lessons.

    In each step the program runs on n examples in a thread pool (Map), every reflection record is duplicated and
    dealt into k groups (Shuffle), one reflection-LM call per group proposes an instruction and the proposals are
    merged (Reduce; paper, section 3). GEPA's acceptance and Pareto pool decide as ever. Change the name in a
    `dspy.GEPA(...)` call: every keyword of `dspy.GEPA` keeps its meaning, default and errors, except the default
    of `reflection_minibatch_size`.

    The same seed and the same replies give the same program at any `num_threads`, in any process, with
    `use_merge=False`. GEPA's merge step draws while it walks over a set; with it, and with two or more components,
    PYTHONHASHSEED can change the program.

    Args:
        metric: `metric(gold, pred, trace, pred_name, pred_trace)`; a number or a `dspy.Prediction(score, feedback)`.
        auto: `"light"`, `"medium"` or `"heavy"`: a budget. Exactly one of the three budgets must be given.
        max_full_evals: Budget in passes over trainset and valset.
        max_metric_calls: Budget in scoring calls of the metric.
        reflection_minibatch_size: n, the examples of one step. Default 20; a smaller trainset gives all it has.
            None leaves the minibatches to `gepa_kwargs["batch_sampler"]`.
        candidate_selection_strategy: As in `dspy.GEPA`; draws are seeded by step.
        reflection_lm: The language model that reflects.
        skip_perfect_score: As in `dspy.GEPA`.
        add_format_failure_as_feedback: As in `dspy.GEPA`.
        instruction_proposer: The proposer of each level-1 call, or a `CombeeProposer`, which is used as it is.
        code_proposer: As in `dspy.GEPA`.
        component_selector: As in `dspy.GEPA`.
        use_merge: As in `dspy.GEPA`.
        max_merge_invocations: As in `dspy.GEPA`.
        num_threads: Rollouts plus reflection calls in flight at most. Default: DSPy's `num_threads` setting.
        failure_score: As in `dspy.GEPA`.
        perfect_score: As in `dspy.GEPA`.
        log_dir: Folder for GEPA's state; a run with the same folder goes on from there. It holds pickles: resume
            only from folders that you trust.
        track_stats: Whether the program carries `detailed_results`, a `CombeeResult`.
        use_wandb: As in `dspy.GEPA`.
        wandb_api_key: As in `dspy.GEPA`.
        wandb_init_kwargs: As in `dspy.GEPA`.
        track_best_outputs: As in `dspy.GEPA`.
        warn_on_score_mismatch: As in `dspy.GEPA`.
        use_mlflow: As in `dspy.GEPA`.
        seed: Seed of minibatches, parents and shuffles.
        gepa_kwargs: More keywords of `gepa.optimize`, as in `dspy.GEPA`.
        duplication_factor: p, in how many groups each record appears (paper, section 3.2).
        num_groups: k, the groups of level 1. Default: floor(sqrt(n)) (paper, section 3.1).
        aggregator: How records become one proposal: `"tree"` or an `Aggregator`.
        executor: What runs the rollouts and reflection calls: `"threads"` or an `Executor`.

    Raises:
        AssertionError: As in `dspy.GEPA`: not exactly one budget; no reflection LM; `track_best_outputs` alone.
        TypeError: If a keyword has the wrong type, or the metric does not take five arguments.
        ValueError: If a keyword is out of range, or an option's name is unknown.
    """

    def __init__(  # noqa: PLR0913 (the keywords of dspy.GEPA and ours)
        self,
        metric: Any,
        *,
        auto: Literal["light", "medium", "heavy"] | None = None,
        max_full_evals: int | None = None,
        max_metric_calls: int | None = None,
        reflection_minibatch_size: int | None = DEFAULT_MINIBATCH_SIZE,
        candidate_selection_strategy: Literal["pareto", "current_best"] = "pareto",
        reflection_lm: Any = None,
        skip_perfect_score: bool = True,
        add_format_failure_as_feedback: bool = False,
        instruction_proposer: Any = None,
        code_proposer: Any = None,
        component_selector: Any = "round_robin",
        use_merge: bool = True,
        max_merge_invocations: int | None = 5,
        num_threads: int | None = None,
        failure_score: float = 0.0,
        perfect_score: float = 1.0,
        log_dir: str | None = None,
        track_stats: bool = False,
        use_wandb: bool = False,
        wandb_api_key: str | None = None,
        wandb_init_kwargs: dict[str, Any] | None = None,
        track_best_outputs: bool = False,
        warn_on_score_mismatch: bool = True,
        use_mlflow: bool = False,
        seed: int | None = 0,
        gepa_kwargs: dict[str, Any] | None = None,
        duplication_factor: int = 2,
        num_groups: int | None = None,
        aggregator: str | Aggregator = "tree",
        executor: str | Executor = "threads",
    ) -> None:
        super().__init__(
            metric,
            auto=auto,
            max_full_evals=max_full_evals,
            max_metric_calls=max_metric_calls,
            reflection_minibatch_size=reflection_minibatch_size,  # type: ignore[arg-type]
            candidate_selection_strategy=candidate_selection_strategy,
            reflection_lm=reflection_lm,
            skip_perfect_score=skip_perfect_score,
            add_format_failure_as_feedback=add_format_failure_as_feedback,
            instruction_proposer=instruction_proposer,
            code_proposer=code_proposer,
            component_selector=component_selector,
            use_merge=use_merge,
            max_merge_invocations=max_merge_invocations,
            num_threads=num_threads,
            failure_score=failure_score,
            perfect_score=perfect_score,
            log_dir=log_dir,
            track_stats=track_stats,
            use_wandb=use_wandb,
            wandb_api_key=wandb_api_key,
            wandb_init_kwargs=wandb_init_kwargs,
            track_best_outputs=track_best_outputs,
            warn_on_score_mismatch=warn_on_score_mismatch,
            use_mlflow=use_mlflow,
            seed=seed,
            gepa_kwargs=gepa_kwargs,
        )
        _check_minibatch_size(reflection_minibatch_size)
        if "reflection_strategy" in self.gepa_kwargs:
            raise ValueError(
                "gepa_kwargs['reflection_strategy'] cannot be given: Combee is the reflection strategy. "
                "Give instruction_proposer to change its level-1 calls, or aggregator to change the tree."
            )
        self.duplication_factor = duplication_factor
        self.num_groups = num_groups
        self.aggregator = resolve_aggregator(aggregator)
        self.executor = _check_executor(executor)
        if num_threads is not None:
            ThreadExecutor(num_threads)
        self.proposer = (
            instruction_proposer
            if isinstance(instruction_proposer, CombeeProposer)
            else CombeeProposer(
                instruction_proposer,
                aggregator=self.aggregator,
                num_groups=num_groups,
                duplication_factor=duplication_factor,
            )
        )

    def compile(  # type: ignore[override]
        self,
        student: Any,
        trainset: list[Any] | None = None,
        *,
        teacher: Any = None,
        valset: list[Any] | None = None,
    ) -> Any:
        """Find better instructions for `student`.

        Args:
            student: The program; it stays as it is.
            trainset: Examples to learn from.
            teacher: Not supported, as in `dspy.GEPA`.
            valset: Examples that decide which candidate is best. Default: the trainset.

        Returns:
            A new program, with `detailed_results` (a `CombeeResult`) if `track_stats` is set.

        Raises:
            AssertionError: As in `dspy.GEPA`: no trainset, or a teacher.
            ReflectionError: If reflection fails in three steps in a row.
            ProviderError: If a language model's provider refuses a call for good or cannot be reached.

            Whatever is raised once the search has begun carries `best_program`.
        """
        if not trainset:
            raise AssertionError("Trainset must be provided and non-empty")
        if teacher is not None:
            raise AssertionError("Teacher is not supported in DspyGEPA yet.")
        if valset is None:
            logger.warning(NO_VALSET)
        return _Run(self, student, trainset, valset).execute()

    def budget_for(self, student: Any, trainset: Sequence[Any], valset: Sequence[Any] | None) -> int:
        """The budget of a run in metric calls, by `dspy.GEPA`'s rules.

        Args:
            student: The program, whose components the `auto` budget counts.
            trainset: The trainset.
            valset: The valset, or None.
        """
        if self.auto is not None:
            components = len(list(student.named_predictors())) + len(CombeeAdapter.flex_paths(student))
            budget: int = self.auto_budget(
                num_preds=max(components, 1),
                num_candidates=AUTO_RUN_SETTINGS[self.auto]["n"],
                valset_size=len(valset) if valset is not None else len(trainset),
            )
            return budget
        if self.max_full_evals is not None:
            return int(self.max_full_evals * (len(trainset) + (len(valset) if valset is not None else 0)))
        return int(self.max_metric_calls or 0)


class _Run:
    """One call of `compile`: its own parts, so that calls do not meet."""

    def __init__(self, optimizer: CombeeOptimizer, student: Any, trainset: list[Any], valset: list[Any] | None) -> None:
        self.optimizer = optimizer
        self.trainset = trainset
        self.valset = valset or trainset
        self.budget = optimizer.budget_for(student, trainset, valset)
        executor = optimizer.executor
        if isinstance(executor, str):
            executor = ThreadExecutor(optimizer.num_threads or dspy.settings.num_threads)
        self.adapter = CombeeAdapter(
            student,
            Scorer(optimizer.metric_fn, optimizer.failure_score, optimizer.perfect_score),
            executor,
            add_format_failure_as_feedback=optimizer.add_format_failure_as_feedback,
            warn_on_score_mismatch=optimizer.warn_on_score_mismatch,
            reflection_lm=optimizer.reflection_lm,
            code_proposer=optimizer.custom_code_proposer,
        )
        self.recorder = StepRecorder()
        proposer = optimizer.proposer.for_run(executor, optimizer.reflection_lm, optimizer.seed)
        self.reflection = RunReflection(proposer, self.adapter, self.recorder)
        self.seed_candidate = self.adapter.seed_candidate()

    def execute(self) -> Any:
        logger.info(
            "Running GEPA with Combee for about %d metric calls: %d training and %d validation examples.",
            self.budget,
            len(self.trainset),
            len(self.valset),
        )
        try:
            result = gepa.optimize(**self._gepa_arguments())
        except BaseException as error:
            error.best_program = self._best_program()  # type: ignore[attr-defined]
            raise
        program = self.adapter.build_program(result.candidates[result.best_idx])
        logger.info(
            "Combee ended after %d steps and %d metric calls; best validation score %.4g of %d candidates.",
            len(self.recorder.records),
            result.total_metric_calls,
            max(result.val_aggregate_scores),
            len(result.candidates),
        )
        if self.optimizer.track_stats:
            program.detailed_results = CombeeResult.from_run(result, self.adapter, self.recorder.records)
        return program

    def _gepa_arguments(self) -> dict[str, Any]:
        optimizer = self.optimizer
        extra = dict(optimizer.gepa_kwargs)
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
            "max_metric_calls": self.budget,
            "stop_callbacks": [self.reflection.check, *stoppers],
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
            **self._sampling(extra.pop("batch_sampler", "epoch_shuffled")),
        }
        extra.setdefault("use_cloudpickle", True)
        return _join(arguments, extra)

    def _sampling(self, batch_sampler: Any) -> dict[str, Any]:
        size = self.optimizer.reflection_minibatch_size
        if batch_sampler != "epoch_shuffled":
            # A sampler of the user's; gepa refuses a minibatch size beside it.
            return {"batch_sampler": batch_sampler, "reflection_minibatch_size": size}
        sampler = EpochSampler(size or DEFAULT_MINIBATCH_SIZE, self.optimizer.seed)
        self.adapter.saved_parts["sampler"] = sampler
        return {"batch_sampler": sampler}

    def _best_program(self) -> Any:
        state = self.recorder.state
        if state is None or not state.program_candidates:
            return self.adapter.build_program(self.seed_candidate)
        scores = state.program_full_scores_val_set
        best = max(range(len(scores)), key=lambda index: scores[index])
        return self.adapter.build_program(state.program_candidates[best])


def _join(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    twice = sorted(arguments.keys() & extra.keys())
    if twice:
        raise TypeError(f"gepa_kwargs repeats {twice}, which CombeeOptimizer passes itself; use its own keywords.")
    return {**arguments, **extra}


def _check_minibatch_size(size: object) -> None:
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"reflection_minibatch_size must be an int of at least 1, got {size!r}.")
    if size < 1:
        raise ValueError(f"reflection_minibatch_size must be at least 1, got {size}.")


def _check_executor(executor: str | Executor) -> str | Executor:
    if isinstance(executor, str):
        if executor != "threads":
            raise ValueError(f"Unknown executor {executor!r}; known are ['threads'].")
    elif not isinstance(executor, Executor):
        raise TypeError(f"executor must be a name or an Executor, got {type(executor).__name__}.")
    return executor
