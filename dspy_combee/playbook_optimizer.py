"""`PlaybookOptimizer`: Combee over ACE. A program learns a playbook from large minibatches."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dspy.teleprompt.teleprompt import Teleprompter

from dspy_combee.calls.executors import Executor
from dspy_combee.controller.batch_size import (
    FixedSize,
    PowerLawBatchSize,
    ReplayedSizes,
    check_minibatch_size,
    resolve_sizer,
)
from dspy_combee.controller.sampling import Budget, EpochSampler
from dspy_combee.learners.learner import check_traces
from dspy_combee.learners.playbook import PlaybookLearner, PlaybookOptions, named_predictors
from dspy_combee.playbook import Playbook
from dspy_combee.playbook.records import PlaybookStep
from dspy_combee.records.checks import check_examples, check_int, check_lm, check_positive
from dspy_combee.reduce.tree import Aggregator
from dspy_combee.runs.loop import Loop, Source, trace_source
from dspy_combee.runs.result import PlaybookResult
from dspy_combee.runs.scope import RunOptions, RunScope
from dspy_combee.runs.state import PLAYBOOK_STATE
from dspy_combee.runs.tracking import TrackingOptions

if TYPE_CHECKING:
    from dspy_combee.traces import Trace


class PlaybookOptimizer(Teleprompter):
    """Grow a playbook of short bullets at the end of a program's instructions, from large minibatches.

    The base framework is ACE; its steps are made parallel as in Combee (paper, section 3). In each step, against one
    frozen playbook: the program runs on n examples in a thread pool (Map); one call per rollout and predictor reflects
    on it, and tags the bullets that mattered as helpful or harmful; the reflections are copied p times and dealt into k
    groups (Shuffle); a curator call per group proposes deltas (ADD, UPDATE, MERGE, REMOVE), and the k lists of deltas
    are merged into one (Reduce): equal and near-identical ones without a call, and by a call only where they get in
    each other's way. An ADD is lost only if that call names the bullet or ADD that covers it. Then the deltas are
    applied, once.

    The program that comes back is a plain DSPy program: each predictor's instruction, then a delimited playbook.
    `save` and `load` work, and `Playbook.from_program` reads the playbook back. A playbook that stands in the
    student's instructions already is the one that learning starts from.

    The same seed and the same replies give the same playbook at any `num_threads`, in any process, with n fixed or
    replayed.

    Departures from ACE:

    - A rollout is reflected on once. ACE can let the assistant answer again with the reflection in hand, and reflect on
      that, for several rounds. Each round costs another rollout, metric call and reflection call per example, one after
      the other: with r rounds a step takes r times the calls and r times the time, and its length is set by the
      slowest example. In a large minibatch other examples, and the later steps, show whether a lesson helps.
    - Reflections see the whole playbook, not only the bullets that the assistant says it used, so that programs need
      no output field for that. It costs the playbook's tokens once more for each reflection.
    - Curators work side by side on one frozen playbook and may UPDATE, MERGE and REMOVE too; what several of them do
      to one bullet is settled by rules (`dspy_combee.deltas`) and by the merge call.
    - The token budget is enforced by pruning after each step, near-duplicates first, not stated as a wish in a prompt.
    - Ids never come twice, and a bullet knows the reflections that it came from.

    Args:
        metric: `metric(gold, pred, trace, pred_name, pred_trace)`, as in `dspy.GEPA`: a number or a
            `dspy.Prediction(score, feedback)`. Feedback that comes with the score is used for a program with one
            predictor; else the metric is asked once more for each predictor.
        reflection_lm: The language model that reflects, curates and merges.
        minibatch_size: n, the examples of one step: an int; `"auto"`, the controller of the paper's section 3.3;
            a `PowerLawBatchSize`; or a list, such as `detailed_results.batch_sizes`, which replays a run.
        num_epochs: Passes over the trainset.
        num_threads: Rollouts or reflection calls in flight at most. Default: DSPy's `num_threads` setting.
        seed: Seed of minibatches and shuffles.
        duplication_factor: p, in how many groups each reflection appears (paper, section 3.2).
        num_groups: k, the groups of level 1. Default: floor(sqrt(n)) for n reflections (paper, section 3.1).
        aggregator: How reflections become one list of deltas: `"tree"` or an `Aggregator`.
        executor: What runs the rollouts and reflection calls: `"threads"`, `"ray"` (rollouts on Ray, see
            `RayExecutor`; reflection calls on threads here) or an `Executor`.
        reflect_on: `"all"` rollouts, or only `"failures"`, those that score below `perfect_score`.
        use_ground_truth: Whether reflections see the example's labels.
        shared_playbook: Whether all predictors share one playbook instead of having one each.
        playbook: The playbook to start from, or a mapping from predictors' names to theirs. It replaces the one in
            the student.
        token_budget: Tokens that a playbook may take in a prompt (estimated).
        embedder: A `dspy.Embedder`, or a callable from texts to vectors: near-duplicates are then told by cosine.
        log_dir: Folder for the state, one JSON file without pickles, written after each step; `compile` with the
            same folder goes on from there. `steps.jsonl` in it holds the steps, for `python -m dspy_combee report`.
        step_callbacks: Callables that take each `PlaybookStep` as its step ends, its state saved. One that raises is
            logged, and the run goes on.
        max_reflection_cost: US dollars of reflection-LM spend for one `compile` or `learn`. Checked before each wave of
            calls, so a wave that has begun is finished. The LM must report what its calls cost.
        rollout_timeout: Seconds that one rollout may take; one that takes longer has failed.
        reflection_timeout: Seconds that one reflection or curator call may take; one that takes longer has failed.
        failure_score: The score of a rollout that failed.
        perfect_score: The highest score of the metric.
        track_stats: Whether the program carries `detailed_results`, a `PlaybookResult`.
        use_wandb: As in `dspy.GEPA`: whether the steps of `compile` are logged to W&B.
        wandb_api_key: As in `dspy.GEPA`.
        wandb_init_kwargs: As in `dspy.GEPA`.
        use_mlflow: As in `dspy.GEPA`: whether the steps of `compile` are logged to MLflow.
        verbose: Whether `compile` shows the progress line, in a terminal or a notebook.

    Raises:
        TypeError: If an argument has the wrong type, or the metric does not take five arguments.
        ValueError: If an argument is out of range, or a name is unknown.
    """

    def __init__(  # noqa: PLR0913 (the options of a front door)
        self,
        metric: Callable[..., Any],
        *,
        reflection_lm: Any,
        minibatch_size: int | Sequence[int] | str | PowerLawBatchSize = "auto",
        num_epochs: float = 1,
        num_threads: int | None = None,
        seed: int = 0,
        duplication_factor: int = 2,
        num_groups: int | None = None,
        aggregator: str | Aggregator = "tree",
        executor: str | Executor = "threads",
        reflect_on: Literal["all", "failures"] = "all",
        use_ground_truth: bool = True,
        shared_playbook: bool = False,
        playbook: Playbook | Mapping[str, Playbook] | None = None,
        token_budget: int = 80_000,
        embedder: Callable[[list[str]], Any] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        step_callbacks: Sequence[Callable[[PlaybookStep], Any]] = (),
        max_reflection_cost: float | None = None,
        rollout_timeout: float | None = None,
        reflection_timeout: float | None = None,
        failure_score: float = 0.0,
        perfect_score: float = 1.0,
        track_stats: bool = False,
        use_wandb: bool = False,
        wandb_api_key: str | None = None,
        wandb_init_kwargs: dict[str, Any] | None = None,
        use_mlflow: bool = False,
        verbose: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        check_lm("reflection_lm", reflection_lm)
        self.minibatch_size = check_minibatch_size(minibatch_size, "minibatch_size")
        check_positive("num_epochs", num_epochs)
        self.num_epochs = num_epochs
        for name, value in (("track_stats", track_stats), ("verbose", verbose)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}.")
        self.options = PlaybookOptions(
            duplication_factor=duplication_factor,
            num_groups=num_groups,
            aggregator=aggregator,
            reflect_on=reflect_on,
            use_ground_truth=use_ground_truth,
            shared_playbook=shared_playbook,
            playbook=playbook,
            token_budget=token_budget,
            embedder=embedder,
        )
        self.run_options = RunOptions(
            metric=metric,
            reflection_lm=reflection_lm,
            executor=executor,
            num_threads=num_threads,
            seed=check_int("seed", seed, None),
            log_dir=log_dir,
            step_callbacks=step_callbacks,
            max_reflection_cost=max_reflection_cost,
            rollout_timeout=rollout_timeout,
            reflection_timeout=reflection_timeout,
            failure_score=failure_score,
            perfect_score=perfect_score,
            track_stats=track_stats,
            verbose=verbose,
            tracking=TrackingOptions(use_mlflow, use_wandb, wandb_api_key, wandb_init_kwargs),
        )

    def get_params(self) -> dict[str, Any]:
        """Return the options, by keyword."""
        given = {**vars(self.run_options), **vars(self.run_options.tracking), **vars(self.options), **vars(self)}
        return {name: given[name] for name in inspect.signature(type(self)).parameters}

    def compile(  # type: ignore[override]
        self,
        student: Any,
        trainset: Sequence[Any] | None = None,
        *,
        teacher: Any = None,
        valset: Sequence[Any] | None = None,
        traces: Iterable[Trace] | None = None,
    ) -> Any:
        """Learn a playbook for `student`, offline.

        Traces come first: in steps that run nothing, they take the place of the rollouts. The playbook then goes on
        with the trainset.

        Args:
            student: The program; it stays as it is.
            trainset: Examples to learn from; may be empty if there are traces.
            teacher: Not supported.
            valset: Examples on which the playbook is validated at the start and after each step: the best one is
                returned, the start's included, while learning goes on from the last. Without them the last is returned.
                What a step on traces makes is kept only if it is better than what was there, and is taken unchecked
                without a valset.
            traces: Collected traces to learn from, such as `load_traces` gives: `num_epochs` passes over them. A trace
                with a predictor's name teaches that predictor, one without teaches all. Below 150 traces n = 30, where
                no number is given. A long one is cut to the aggregator's `max_context_tokens`.

        Returns:
            A new program, with `detailed_results` (a `PlaybookResult`) if `track_stats` is set.

        Raises:
            ReflectionError: If reflection fails in three steps in a row.
            ProviderError: If a language model's provider refuses a call for good or cannot be reached.
            UnknownCostError: If `max_reflection_cost` is set and the reflection LM reports no cost.
            TypeError: If the student or an example is of the wrong type.
            ValueError: If there is no trainset and no trace, a teacher is given, the program has no predictor, a trace
                is of a predictor that is not there, or `log_dir` holds the state of another run or is in use by one.

            Whatever is raised once learning has begun carries `best_program`.
        """
        if teacher is not None:
            raise ValueError("teacher is not supported: a playbook is learned from the student's own rollouts.")
        nothing = trainset is None or (isinstance(trainset, Sequence) and not trainset)
        examples = [] if nothing and traces is not None else check_examples("trainset", trainset or ())
        validation = None if valset is None else check_examples("valset", valset)
        options, size = self.run_options, self.minibatch_size
        predictors = [name for name, _ in named_predictors(student)]
        budget = Budget(len(examples), 0, num_epochs=self.num_epochs)
        # A list replays a whole run, the steps on traces included: both sources draw from one.
        replayed = ReplayedSizes(size) if isinstance(size, list) else None
        sources = []
        if traces is not None:
            sources.append(
                trace_source(check_traces(traces, predictors), size, self.num_epochs, options.seed, replayed)
            )
        if examples:
            sizer = replayed or resolve_sizer(size, len(examples), budget.minibatch_rollouts, 1)
            sources.append(Source(examples, EpochSampler(sizer, budget, options.seed)))
        total = sum(source.num_draws for source in sources)
        num_items = len(examples) or len(sources[0].items)
        scope = RunScope(options, student, options.reflection_lm, num_items, total, size)
        learner = PlaybookLearner(self.options, student, scope.tools())
        state_path = None if options.log_dir is None else Path(options.log_dir) / PLAYBOOK_STATE
        loop = Loop(scope, learner, sources, validation or (), state_path)
        with scope.opened([*examples, *(validation or ())], bool(examples or validation)):
            loop.run()
        program = loop.build()
        if options.track_stats:
            program.detailed_results = PlaybookResult.from_loop(loop, learner.program.by_predictor(loop.best))
        return program

    def learn(self, program: Any, examples: Sequence[Any]) -> tuple[list[Any], Any]:
        """Predict a window of examples, then learn from it, online.

        The window is one minibatch, whatever `minibatch_size` is. The metric is called exactly once per example, so
        that is where its feedback has to come from. A window in which reflection fails changes nothing, and is
        logged. `log_dir` and `num_epochs` are for `compile`.

        Args:
            program: The program; it stays as it is. Its playbook is where learning starts; if it has none,
                the one that was given to the optimizer.
            examples: The window.

        Returns:
            The predictions, in order, None for each rollout that failed; and the program with the playbook after
            the window, for the next one.

        Raises:
            ProviderError: If a language model's provider refuses a call for good or cannot be reached; it carries
                `best_program`.
            TypeError: If the program or an example is of the wrong type.
            ValueError: If there are no examples.
        """
        window = check_examples("examples", examples)
        named_predictors(program)
        size = FixedSize(len(window))
        # Nothing is saved and nothing shown of a window: the next one goes on from the program.
        options = replace(self.run_options, log_dir=None, verbose=False, track_stats=True, tracking=TrackingOptions())
        scope = RunScope(options, program, options.reflection_lm, len(window), len(window))
        learner = PlaybookLearner(self.options, program, scope.tools(), online=True)
        sampler = EpochSampler(size, Budget(len(window), 0, num_epochs=1), options.seed)
        loop = Loop(scope, learner, [Source(window, sampler)])
        with scope.opened(window):
            loop.run()
        learned = loop.build()
        if self.run_options.track_stats:
            learned.detailed_results = PlaybookResult.from_loop(loop, learner.program.by_predictor(loop.best))
        by_position = dict(zip(loop.ids, loop.evidence, strict=True))
        return [by_position[position].prediction for position in range(len(window))], learned
