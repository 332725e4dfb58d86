"""The frozen records that pass between the stages.

A `Rollout` is what Map gives, a `ReflectionRecord` is what reflection reads, a `ProposalNode` is one call of
the Reduce tree and a `StepRecord` is the account of one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Usage:
    """What language-model calls took.

    Attributes:
        calls: Calls, cache hits included.
        cache_hits: Calls that DSPy's cache answered.
        input_tokens: Prompt tokens reported, cache hits not counted.
        output_tokens: Reply tokens reported, cache hits not counted.
        cost: US dollars, cache hits at zero; None when a call reported no cost. (Where DSPy's `disable_history` is set,
            the calls of rollouts are counted, and report neither cost nor tokens nor whether they were cache hits.)
    """

    calls: int = 0
    cache_hits: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = 0.0

    def __add__(self, other: Usage) -> Usage:
        unknown = self.cost is None or other.cost is None
        return Usage(
            self.calls + other.calls,
            self.cache_hits + other.cache_hits,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            None if unknown else (self.cost or 0.0) + (other.cost or 0.0),
        )


@dataclass(frozen=True)
class Spent:
    """What a run has spent, by phase.

    The phases: `profiling` (minibatch rollouts of the steps that time a size), `rollouts` (the other minibatch
    rollouts), `validation` (the seed's pass, those of accepted candidates, and merges), `feedback` (metric calls
    that ask for feedback on a predictor; they are not part of `metric_calls`) and `reflection`.

    Attributes:
        metric_calls_by_phase: Metric calls by phase.
        usage_by_phase: Language-model usage by phase.
    """

    metric_calls_by_phase: Mapping[str, int] = field(default_factory=dict)
    usage_by_phase: Mapping[str, Usage] = field(default_factory=dict)

    def plus(self, phase: str, metric_calls: int, usage: Usage) -> Spent:
        """This account with something more in one phase."""
        calls, usages = dict(self.metric_calls_by_phase), dict(self.usage_by_phase)
        calls[phase] = calls.get(phase, 0) + metric_calls
        usages[phase] = usages.get(phase, Usage()) + usage
        return Spent(calls, usages)

    def metric_calls_in(self, phase: str) -> int:
        """Metric calls of a phase."""
        return self.metric_calls_by_phase.get(phase, 0)

    def usage_in(self, phase: str) -> Usage:
        """Language-model usage of a phase."""
        return self.usage_by_phase.get(phase, Usage())

    @property
    def metric_calls(self) -> int:
        """Scoring calls, as GEPA counts them: all but those for feedback."""
        return sum(calls for phase, calls in self.metric_calls_by_phase.items() if phase != "feedback")

    @property
    def usage(self) -> Usage:
        """Language-model usage of all phases."""
        return sum(self.usage_by_phase.values(), Usage())

    def to_dict(self) -> dict[str, Any]:
        """The account as plain values, one entry for each phase."""
        phases = {**dict.fromkeys(self.metric_calls_by_phase), **dict.fromkeys(self.usage_by_phase)}
        return {
            phase: {"metric_calls": self.metric_calls_in(phase), **asdict(self.usage_in(phase))} for phase in phases
        }


@dataclass(frozen=True)
class TraceStep:
    """One predictor call inside a rollout.

    Attributes:
        name: The predictor's name in the program, as `named_predictors()` gives it; None for a predictor that
            the program does not name (made inside `forward`, or part of a frozen submodule).
        predictor: The predictor that ran (a copy of the program's own).
        inputs: Its inputs by field.
        outputs: Its prediction, or a `FailedPrediction` that holds the raw reply that could not be parsed.
    """

    name: str | None
    predictor: Any
    inputs: Mapping[str, Any]
    outputs: Any


@dataclass(frozen=True)
class Rollout:
    """One run of a program on one example.

    Attributes:
        index: Position of the example in its batch.
        example: The example.
        prediction: What the program returned; None when it failed.
        trace: The predictor calls, in the order in which they ended.
        score: The metric's score, or the failure score.
        result: What the metric returned, as it came (a number or a prediction with `score` and `feedback`).
        objective_scores: Scores by objective, where the metric gives them.
        error: Why the rollout failed; None when it did not.
        seconds: Wall time of the run and its scoring.
        usage: What its language-model calls took.
    """

    index: int
    example: Any
    prediction: Any
    trace: tuple[TraceStep, ...]
    score: float
    result: Any
    objective_scores: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    usage: Usage = Usage()


class ReflectionRecord(dict[str, Any]):
    """One entry of a reflective dataset: `Inputs`, `Generated Outputs`, `Feedback`, as in `dspy.GEPA`.

    `Earlier Calls` is there too when the predictor ran several times in the rollout.

    Attributes:
        source: Position in the minibatch of the example that it came from.
    """

    def __init__(self, fields: Mapping[str, Any], source: int) -> None:
        super().__init__(fields)
        self.source = source


@dataclass(frozen=True)
class ProposalNode:
    """One reflection-LM call of the Reduce tree.

    Attributes:
        id: Name of the node, unique in its component's tree: `1.0` is the first call of level 1.
        component: The component that the call rewrites.
        inputs: Ids of what it read: `r7` is the record at position 7 of the reflective dataset, `1.2` a node.
        output: The proposal; None when the call failed.
        prompt: The chat messages of the call, rendered as text.
        raw_output: The reply as it came.
        seconds: Wall time, both attempts together.
        usage: What its LM calls took: its tokens and cost; two calls when the first was of no use.
        error: Why the call gave no proposal; None when it did.
    """

    id: str
    component: str
    inputs: tuple[str, ...]
    output: Any = None
    prompt: str = ""
    raw_output: str = ""
    seconds: float = 0.0
    usage: Usage = Usage()
    error: str | None = None


@dataclass(frozen=True)
class Reduction:
    """What Reduce made of the records of one component.

    Attributes:
        component: The component.
        text: The proposal; None when there is none.
        nodes: Every call of the tree, level by level.
        num_groups: The groups of level 1 (k).
        duplication_factor: How often each record was used (the effective p).
        error: Why there is no proposal.
        current: The component's text before.
        sources: For each record, the position in the minibatch of the example that it came from.
    """

    component: str
    text: Any
    nodes: tuple[ProposalNode, ...]
    num_groups: int
    duplication_factor: int
    error: str | None = None
    current: str = ""
    sources: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepRecord:
    """The account of one step (one proposal) of a run.

    Attributes:
        iteration: GEPA's iteration, counted from 1.
        parent: Index of the candidate that was changed.
        minibatch_ids: Ids of the examples, in order.
        n: Size of the minibatch.
        k: Groups of level 1, the largest over the components.
        duplication_factor: The effective p, the smallest over the components.
        scores_before: The parent's scores on the minibatch.
        scores_after: The child's scores on the minibatch; empty when there was no child.
        accepted: Whether the child entered the pool.
        candidate: Index of the child in the pool; None when it is not there.
        reason: Why the child was not accepted, or why there was none.
        reductions: The tree of each component.
        seconds: d(n), the time of the step without the full-validation pass, on the controller's clock.
        validation_seconds: The time of the full-validation pass.
        profiling: Whether the step timed a size for the controller.
        size_reason: Why the minibatch has this size.
        fit: The controller's fit that chose the size; None where none did.
        usage: What the step's language-model calls took, validation not counted.
        num_tasks: Proposals that were made in the same iteration, which share its time.
        phase_seconds: The time of the step by phase: `rollouts`, `reflection`, `validation`.
        metric_calls: Scoring calls of the run, this step's included.
        elapsed: Seconds from the start of the run (of this process) to the end of the step.
        validation_score: The child's mean score on the validation examples; None when it is not in the pool.
        best_score: The best such score of the pool after the step.
        from_traces: Whether the step learned from collected traces: nothing was run on the minibatch, whose ids are
            those of the traces. The candidates of these steps are numbered on their own, from 0, the student; what the
            last of them made is candidate 0 of the search that follows.
    """

    iteration: int
    parent: int
    minibatch_ids: tuple[Any, ...]
    n: int
    k: int
    duplication_factor: int
    scores_before: tuple[float, ...]
    scores_after: tuple[float, ...]
    accepted: bool
    candidate: int | None
    reason: str
    reductions: tuple[Reduction, ...]
    seconds: float
    validation_seconds: float
    profiling: bool = False
    size_reason: str = ""
    fit: Any = None
    usage: Usage = Usage()
    num_tasks: int = 1
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    metric_calls: int = 0
    elapsed: float = 0.0
    validation_score: float | None = None
    best_score: float | None = None
    from_traces: bool = False

    def epoch_seconds(self, num_examples: int, with_validation: bool = False) -> float:
        """T_epoch(n) = d(n) * N / n at this step's speed (paper, section 3.3).

        Args:
            num_examples: N, the size of the trainset.
            with_validation: Whether d(n) is to hold the full-validation pass.
        """
        seconds = self.seconds + (self.validation_seconds if with_validation else 0.0)
        return seconds * num_examples / (self.n * self.num_tasks)

    @property
    def nodes(self) -> tuple[ProposalNode, ...]:
        """Every reflection-LM call of the step."""
        return tuple(node for reduction in self.reductions for node in reduction.nodes)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values that JSON takes (ids that JSON does not know become text)."""
        plain = asdict(self)
        plain["minibatch_ids"] = [i if isinstance(i, int | str) else str(i) for i in self.minibatch_ids]
        return plain
