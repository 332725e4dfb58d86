"""`CombeeOptimizer`: `dspy.GEPA` that learns from large minibatches.

It wires the parts into `gepa.optimize`; GEPA's engine runs the search.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import dspy
from dspy.teleprompt.gepa.gepa import AUTO_RUN_SETTINGS
from dspy.teleprompt.gepa.gepa_flex_utils import enumerate_flex_submodules

from dspy_combee.calls.executors import Executor
from dspy_combee.controller.batch_size import PowerLawBatchSize, check_minibatch_size
from dspy_combee.learners.instruction import CandidateProgram, CombeeProposer, InstructionLearner
from dspy_combee.learners.learner import check_traces
from dspy_combee.records.checks import (
    check_callbacks,
    check_examples,
    check_finite,
    check_positive,
    check_sampling_strategy,
)
from dspy_combee.records.types import StepRecord
from dspy_combee.reduce import resolve_aggregator
from dspy_combee.reduce.tree import Aggregator
from dspy_combee.rollouts.feedback import RecordMaker
from dspy_combee.runs.loop import Loop, trace_source
from dspy_combee.runs.result import CombeeResult
from dspy_combee.runs.scope import RunOptions, RunScope
from dspy_combee.runs.search import Search, has_gepa_state, items_of, refuse_other_state, search_budget
from dspy_combee.runs.state import TRACE_STATE
from dspy_combee.runs.tracking import TRACKER_KEYWORDS, TrackingOptions

if TYPE_CHECKING:
    from dspy_combee.traces import Trace

logger = logging.getLogger("dspy_combee")

NO_VALSET = (
    "No valset provided; using the trainset as valset. That finds the best program for the examples of the trainset "
    "and overfits to them. To do well on unseen examples give a valset of its own: the smallest that matches the "
    "task, and keep the trainset as large as possible."
)


class CombeeOptimizer(dspy.GEPA):
    """Optimize as `dspy.GEPA` does, with the reflection of Combee: lessons from large minibatches.

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
        auto: `"light"`, `"medium"` or `"heavy"`: a budget. Exactly one of the four budgets must be given.
        max_full_evals: Budget in passes over trainset and valset.
        max_metric_calls: Budget in scoring calls of the metric.
        reflection_minibatch_size: n, the examples of one step: an int; `"auto"`, the dynamic controller of the
            paper's section 3.3, which times a few sizes in the first steps; a `PowerLawBatchSize`, the controller
            with options; or a list, size by size, such as `detailed_results.batch_sizes`, which replays a run. A
            smaller trainset gives all it has. None leaves the minibatches to `gepa_kwargs["batch_sampler"]`.
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
        aggregator: How records become one proposal: `"tree"`, the paper's baselines `"flat"`, `"top_k"` and
            `"summarize"`, or an `Aggregator`.
        executor: What runs the rollouts and reflection calls: `"threads"`, `"ray"` (rollouts on Ray, see
            `RayExecutor`; reflection calls on threads here) or an `Executor`.
        num_epochs: Budget in passes over the trainset by minibatches: a fourth way to say it.
        max_reflection_cost: US dollars of reflection-LM spend. Checked before each wave of calls, so a wave that
            has begun is finished. The LM must report what its calls cost.
        rollout_timeout: Seconds that one rollout may take; one that takes longer has failed. Default: no limit.
        reflection_timeout: Seconds that one reflection call may take; one that takes longer has failed, and is not
            made again. Default: no limit.
        step_callbacks: Callables that take each `StepRecord` as its step ends. One that raises is logged, and the
            run goes on. (GEPA's own callback objects go through `gepa_kwargs["callbacks"]`.)
        verbose: Whether to show the progress line, in a terminal or a notebook.

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
        reflection_minibatch_size: int | Sequence[int] | str | PowerLawBatchSize | None = "auto",
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
        num_epochs: float | None = None,
        max_reflection_cost: float | None = None,
        rollout_timeout: float | None = None,
        reflection_timeout: float | None = None,
        step_callbacks: Sequence[Callable[[StepRecord], Any]] = (),
        verbose: bool = True,
    ) -> None:
        if num_epochs is not None:
            check_positive("num_epochs", num_epochs)
        _check_one_budget(max_metric_calls, max_full_evals, auto, num_epochs)
        super().__init__(
            metric,
            auto=auto,
            max_full_evals=max_full_evals,
            # dspy.GEPA knows three budgets and wants one of them; compile goes by num_epochs.
            max_metric_calls=max_metric_calls if num_epochs is None else 1,
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
        self.reflection_minibatch_size = check_minibatch_size(reflection_minibatch_size)
        for name, value in (("max_metric_calls", max_metric_calls), ("max_full_evals", max_full_evals)):
            if value is not None:
                check_finite(name, value)
        if not isinstance(self.gepa_kwargs, dict):
            raise TypeError(f"gepa_kwargs must be a dict, got {type(self.gepa_kwargs).__name__}.")
        check_sampling_strategy(self.gepa_kwargs.get("sampling_strategy"))
        if "reflection_strategy" in self.gepa_kwargs:
            raise ValueError(
                "gepa_kwargs['reflection_strategy'] cannot be given: Combee is the reflection strategy. "
                "Give instruction_proposer to change its level-1 calls, or aggregator to change the tree."
            )
        if num_epochs is not None:
            self.max_metric_calls = None
        self.num_epochs = num_epochs
        self.max_reflection_cost = max_reflection_cost
        self.step_callbacks = check_callbacks(step_callbacks)
        self.verbose = verbose
        self.rollout_timeout = rollout_timeout
        self.reflection_timeout = reflection_timeout
        self.duplication_factor = duplication_factor
        self.num_groups = num_groups
        self.aggregator = resolve_aggregator(aggregator)
        self.executor = executor
        if isinstance(instruction_proposer, CombeeProposer):
            _refuse_double_options(duplication_factor, num_groups, aggregator)
            self.proposer = instruction_proposer
        else:
            self.proposer = CombeeProposer(
                instruction_proposer,
                aggregator=self.aggregator,
                num_groups=num_groups,
                duplication_factor=duplication_factor,
            )
        self._run_options()

    def _run_options(self) -> RunOptions:
        """Return the options of a run, checked."""
        more = {name: self.gepa_kwargs[name] for name in TRACKER_KEYWORDS if name in self.gepa_kwargs}
        return RunOptions(
            metric=self.metric_fn,
            reflection_lm=self.proposer.reflection_lm or self.reflection_lm,
            executor=self.executor,
            num_threads=self.num_threads,
            seed=self.seed,
            log_dir=self.log_dir,
            step_callbacks=self.step_callbacks,
            max_reflection_cost=self.max_reflection_cost,
            rollout_timeout=self.rollout_timeout,
            reflection_timeout=self.reflection_timeout,
            failure_score=self.failure_score,
            perfect_score=self.perfect_score,
            track_stats=self.track_stats,
            verbose=self.verbose,
            tracking=TrackingOptions(self.use_mlflow, self.use_wandb, self.wandb_api_key, self.wandb_init_kwargs, more),
        )

    def compile(  # type: ignore[override]
        self,
        student: Any,
        trainset: list[Any] | None = None,
        *,
        teacher: Any = None,
        valset: list[Any] | None = None,
        traces: Iterable[Trace] | None = None,
    ) -> Any:
        """Find better instructions for `student`.

        Traces come first: in steps that run nothing, their reflection records take the place of Map. What they teach
        is where the search on the trainset starts, and is returned where there is no trainset.

        Args:
            student: The program; it stays as it is.
            trainset: Examples to learn from; may be empty if there are traces.
            teacher: Not supported, as in `dspy.GEPA`.
            valset: Examples that decide which candidate is best. Default: the trainset. What traces teach is kept
                only if it is better here; if no valset is given it is taken unchecked.
            traces: Collected traces to learn from, such as `load_traces` gives. One pass over them, or `num_epochs`;
                where a search follows, their validation takes at most half of the metric calls. A trace with a
                predictor's name teaches that predictor, one without teaches all. Below 150 traces n = 30, where no
                number is given. Long ones are cut to the aggregator's `max_context_tokens`.

        Returns:
            A new program, with `detailed_results` (a `CombeeResult`) if `track_stats` is set.

        Raises:
            AssertionError: As in `dspy.GEPA`: no trainset (and no traces), or a teacher.
            TypeError, ValueError: If `traces` are no traces, are empty, name a predictor that the program does not
                have, or `log_dir` holds the state of another run or is in use by one.
            ReflectionError: If reflection fails in three steps in a row.
            ProviderError: If a language model's provider refuses a call for good or cannot be reached.

            Whatever is raised once the search has begun carries `best_program`.
        """
        trainset = _examples("trainset", trainset)
        valset = None if valset is None else _examples("valset", valset)
        if not isinstance(student, dspy.Module):
            raise TypeError(f"student must be a dspy.Module, got {type(student).__name__}.")
        if (trainset is None or len(trainset) == 0) and traces is None:
            raise AssertionError("Trainset must be provided and non-empty")
        if teacher is not None:
            raise AssertionError("Teacher is not supported in DspyGEPA yet.")
        if valset is None and trainset:
            logger.warning(NO_VALSET)
        return self._compile(student, trainset or [], valset, traces)

    def _compile(self, student: Any, trainset: list[Any], valset: list[Any] | None, traces: Any) -> Any:
        options, size = self._run_options(), self.reflection_minibatch_size
        source = None
        if traces is not None:
            checked = check_traces(traces, [name for name, _ in student.named_predictors()])
            source = trace_source(checked, size, self.num_epochs or 1, self.seed)
        total = 0 if source is None else source.num_draws
        if trainset:
            budget = search_budget(self, student, trainset, valset)
            limit = budget.max_metric_calls
            total += budget.minibatch_rollouts if limit is None else limit
        num_items = len(trainset) or (0 if source is None else len(source.items))
        scope = RunScope(options, student, options.reflection_lm, num_items, total, size)
        learner = self._make_learner(scope)
        refuse_other_state(self.log_dir, learner.start(), with_traces=source is not None)
        examples = chain(items_of(valset or []), items_of(trainset))
        with scope.opened(examples, bool(valset or trainset), tracked=source is not None):
            loop = None
            if source is not None:
                loop = Loop(
                    scope,
                    learner,
                    [source],
                    valset or (),
                    None if self.log_dir is None else Path(self.log_dir) / TRACE_STATE,
                    self._trace_budget(student, trainset, valset),
                    search_follows=bool(trainset),
                )
                loop.run(resume_steps=not has_gepa_state(self.log_dir))
            if loop is not None and not trainset:
                program = loop.build()
                result = CombeeResult.from_traces(loop) if self.track_stats else None
            else:
                start, drawn = (None, 0) if loop is None else (loop.best, loop.num_drawn)
                search = Search(self, scope, learner, trainset, valset, start, drawn)
                found = search.run()
                program = learner.build(found.candidates[found.best_idx])
                result = CombeeResult.from_search(search, found) if self.track_stats else None
        if result is not None:
            program.detailed_results = result
        return program

    def _make_learner(self, scope: RunScope) -> InstructionLearner:
        maker = RecordMaker(
            scope.scorer,
            scope.executor,
            self.add_format_failure_as_feedback,
            self.warn_on_score_mismatch,
            self.rollout_timeout,
        )
        proposer = self.proposer.for_run(scope.guard, scope.reflection_lm, self.seed)
        return InstructionLearner(CandidateProgram(scope.student), proposer, maker)

    def _trace_budget(self, student: Any, trainset: Sequence[Any], valset: Sequence[Any] | None) -> int | None:
        """Return the metric calls that validation may take in steps on traces: half, where a search follows."""
        total = self.budget_for(student, trainset, valset) if valset else None
        return total // 2 if total is not None and trainset else total

    def budget_for(self, student: Any, trainset: Sequence[Any], valset: Sequence[Any] | None) -> int | None:
        """Return the budget of a run in metric calls, by `dspy.GEPA`'s rules; None when it is `num_epochs`.

        Args:
            student: The program, whose components the `auto` budget counts.
            trainset: The trainset.
            valset: The valset, or None.
        """
        if self.auto is not None:
            components = len(list(student.named_predictors())) + len(list(enumerate_flex_submodules(student)))
            budget: int = self.auto_budget(
                num_preds=max(components, 1),
                num_candidates=AUTO_RUN_SETTINGS[self.auto]["n"],
                valset_size=len(valset) if valset is not None else len(trainset),
            )
            return budget
        if self.max_full_evals is not None:
            return int(self.max_full_evals * (len(trainset) + (len(valset) if valset is not None else 0)))
        return None if self.max_metric_calls is None else int(self.max_metric_calls)


def _check_one_budget(max_metric_calls: Any, max_full_evals: Any, auto: Any, num_epochs: Any) -> None:
    if sum(budget is not None for budget in (max_metric_calls, max_full_evals, auto, num_epochs)) != 1:
        raise AssertionError(  # dspy.GEPA's words, and one budget more.
            "Exactly one of max_metric_calls, max_full_evals, auto must be set. You set "
            f"max_metric_calls={max_metric_calls}, max_full_evals={max_full_evals}, auto={auto}. "
            f"CombeeOptimizer takes num_epochs as a fourth; you set num_epochs={num_epochs}."
        )


def _refuse_double_options(duplication_factor: int, num_groups: int | None, aggregator: Any) -> None:
    if duplication_factor != 2 or num_groups is not None or aggregator != "tree":
        raise ValueError(
            "duplication_factor, num_groups and aggregator belong to the CombeeProposer that is given as "
            "instruction_proposer: set them there."
        )


def _examples(name: str, examples: Any) -> Any:
    """Return the examples as a list; one of gepa's data loaders as it is."""
    if examples is None or hasattr(examples, "all_ids"):
        return examples
    return [] if hasattr(examples, "__len__") and len(examples) == 0 else check_examples(name, examples)
