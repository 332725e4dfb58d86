"""The frozen records that pass between the stages, and their JSON.

A `Rollout` is what Map gives, a `ReflectionRecord` is what reflection reads, a `ProposalNode` is one call of the Reduce
tree, and a `StepRecord` is the account of one step. `to_plain` makes plain values of any record, `from_plain` reads
them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

import dspy
from pydantic import BeforeValidator, TypeAdapter, ValidationError

from dspy_combee.records.text import text_of

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Return `value` as JSON takes it: records become objects, and an object without a JSON form becomes its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dspy.Example):  # Predictions too.
        return to_plain(value.toDict())
    if isinstance(value, Mapping):
        return {key if isinstance(key, str | int) else text_of(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    return text_of(value)


def from_plain(kind: type[T], plain: Any) -> T:
    """Return the record of this kind that `to_plain` made `plain` of; fields that it does not know are ignored.

    Raises:
        ValueError: If `plain` lacks a field or has a value of another type; the message quotes no value.
    """
    try:
        made: T = _adapter_of(kind).validate_python(plain)  # type: ignore[arg-type]
        return made
    except ValidationError as error:
        first, *others = error.errors(include_input=False, include_url=False)
        where = ".".join(str(part) for part in first["loc"])
        more = f" (and {len(others)} more)" if others else ""
        raise ValueError(f"{where}: {first['msg']}{more}") from None


@cache
def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(item) for item in value) if isinstance(value, list) else value


Plain = Annotated[Any, BeforeValidator(_to_tuples)]
"""Any plain value. `from_plain` reads its lists as the tuples that they were written from."""


@dataclass(frozen=True)
class Usage:
    """Add up what language-model calls used."""

    calls: int = 0
    """Calls, cache hits included."""
    cache_hits: int = 0
    """Calls that DSPy's cache answered."""
    input_tokens: int = 0
    """Prompt tokens reported, cache hits not counted."""
    output_tokens: int = 0
    """Reply tokens reported, cache hits not counted."""
    cost: float | None = 0.0
    """US dollars, cache hits at zero; None if a call reported no cost.

    Where DSPy's `disable_history` is set, the calls of rollouts are counted, and report neither cost nor tokens nor
    whether they were cache hits.
    """

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
    """Add up what a run has spent, by phase.

    The phases: `profiling` (minibatch rollouts of the steps that time a size), `rollouts` (the other minibatch
    rollouts), `validation` (the seed's pass, those of accepted candidates, and merges), `feedback` (metric calls
    that ask for feedback on a predictor; they are not part of `metric_calls`) and `reflection`.
    """

    metric_calls_by_phase: Mapping[str, int] = field(default_factory=dict)
    """Metric calls by phase."""
    usage_by_phase: Mapping[str, Usage] = field(default_factory=dict)
    """Language-model usage by phase."""

    def plus(self, phase: str, metric_calls: int, usage: Usage) -> Spent:
        """Return this account with something more in one phase."""
        calls, usages = dict(self.metric_calls_by_phase), dict(self.usage_by_phase)
        calls[phase] = calls.get(phase, 0) + metric_calls
        usages[phase] = usages.get(phase, Usage()) + usage
        return Spent(calls, usages)

    def metric_calls_in(self, phase: str) -> int:
        """Return the metric calls of a phase."""
        return self.metric_calls_by_phase.get(phase, 0)

    def usage_in(self, phase: str) -> Usage:
        """Return the language-model usage of a phase."""
        return self.usage_by_phase.get(phase, Usage())

    @property
    def metric_calls(self) -> int:
        """Return the scoring calls, as GEPA counts them: all but those for feedback."""
        return sum(calls for phase, calls in self.metric_calls_by_phase.items() if phase != "feedback")

    @property
    def usage(self) -> Usage:
        """Return the language-model usage of all phases."""
        return sum(self.usage_by_phase.values(), Usage())

    def to_dict(self) -> dict[str, Any]:
        """Return the account as plain values, one entry for each phase."""
        phases = dict.fromkeys([*self.metric_calls_by_phase, *self.usage_by_phase])
        return {
            phase: {"metric_calls": self.metric_calls_in(phase), **to_plain(self.usage_in(phase))} for phase in phases
        }


@dataclass(frozen=True)
class TraceStep:
    """Record one predictor call inside a rollout."""

    name: str | None
    """The predictor's name in the program, as `named_predictors()` gives it; None for a predictor that the program
    does not name (made inside `forward`, or part of a frozen submodule)."""
    predictor: Any
    """The predictor that ran (a copy of the program's own)."""
    inputs: Mapping[str, Any]
    """Its inputs by field."""
    outputs: Any
    """Its prediction, or a `FailedPrediction` that holds the raw reply that could not be parsed."""


@dataclass(frozen=True)
class Rollout:
    """Record one run of a program on one example."""

    index: int
    """Position of the example in its batch."""
    example: Any
    prediction: Any
    """What the program returned; None if it failed."""
    trace: tuple[TraceStep, ...]
    """The predictor calls, in the order in which they ended."""
    score: float
    """The metric's score, or the failure score."""
    result: Any
    """What the metric returned: a number, or a prediction with `score` and `feedback`."""
    objective_scores: Mapping[str, float] = field(default_factory=dict)
    """Scores by objective, if the metric gives them."""
    error: str | None = None
    """Why the rollout failed; None if it did not."""
    seconds: float = 0.0
    """Wall time of the run and its scoring."""
    usage: Usage = Usage()
    """Usage of its language-model calls."""


class ReflectionRecord(dict[str, Any]):
    """Hold one entry of a reflective dataset: `Inputs`, `Generated Outputs`, `Feedback`, as in `dspy.GEPA`.

    `Earlier Calls` is there too if the predictor ran several times in the rollout.
    """

    def __init__(self, fields: Mapping[str, Any], source: int) -> None:
        super().__init__(fields)
        self.source = source
        """Position in the minibatch of the example that it came from."""


@dataclass(frozen=True)
class ProposalNode:
    """Record one reflection-LM call of the Reduce tree."""

    id: str
    """Name of the node, unique in its component's tree: `1.0` is the first call of level 1."""
    component: str
    """The component that the call rewrites."""
    inputs: tuple[str, ...]
    """Ids of what it read: `r7` is the record at position 7 of the reflective dataset, `1.2` a node."""
    output: Any = None
    """The proposal; None if the call failed."""
    prompt: str = ""
    """The chat messages of the call, rendered as text."""
    raw_output: str = ""
    """The raw reply."""
    seconds: float = 0.0
    """Wall time of both attempts."""
    usage: Usage = Usage()
    """Usage of its LM calls; two calls if the first reply was unusable."""
    error: str | None = None
    """Why the call gave no proposal; None if it did."""


@dataclass(frozen=True)
class Reduction:
    """Record what Reduce made of the records of one component."""

    component: str
    text: Any
    """The proposal; None if there is none."""
    nodes: tuple[ProposalNode, ...]
    """Every call of the tree, level by level."""
    num_groups: int
    """The groups of level 1 (k)."""
    duplication_factor: int
    """How often each record was used (the effective p)."""
    error: str | None = None
    """Why there is no proposal."""
    current: str = ""
    """The component's text before."""
    sources: tuple[int, ...] = ()
    """For each record, the position in the minibatch of the example that it came from."""


@dataclass(frozen=True)
class BatchSizeFit:
    """Hold what `PowerLawBatchSize.fit` found."""

    A: float | None
    """Seconds per epoch at n = 1 on the fitted curve; None without a fit."""
    alpha: float | None
    """The exponent of ``T(n) = A * n**-alpha``; None without a fit."""
    plateau: float | None
    """The size that the rule gives, before rounding and clamping; None unless alpha is positive."""
    choice: int
    """The minibatch size to use, in examples."""
    reason: str
    """Why, in one sentence for people."""
    medians: tuple[tuple[int, float], ...]
    """(n, median seconds per step) of each size used, from n_1 up."""
    epoch_seconds: float | None
    """T(choice), on the curve if the plateau decided, else measured; None if it was not."""
    first_epoch_seconds: float | None
    """T(n_1), from the same source."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, all numbers finite, `medians` as ``[n, seconds]`` lists."""
        plain: dict[str, Any] = to_plain(self)
        return plain


@dataclass(frozen=True)
class StepRecord:
    """Record one step (one proposal) of a run."""

    iteration: int
    """GEPA's iteration, counted from 1."""
    parent: int
    """Index of the candidate that was changed."""
    minibatch_ids: tuple[Any, ...]
    """Ids of the examples, in order."""
    n: int
    """Size of the minibatch."""
    k: int
    """Groups of level 1, the largest over the components."""
    duplication_factor: int
    """The effective p, the smallest over the components."""
    scores_before: tuple[float, ...]
    """The parent's scores on the minibatch."""
    scores_after: tuple[float, ...]
    """The child's scores on the minibatch; empty if there was no child."""
    accepted: bool
    """Whether the child entered the pool."""
    candidate: int | None
    """Index of the child in the pool; None if it is not there."""
    reason: str
    """Why the child was not accepted, or why there was none."""
    reductions: tuple[Reduction, ...]
    """The tree of each component."""
    seconds: float
    """d(n), the time of the step without the full-validation pass, on the controller's clock."""
    validation_seconds: float
    """The time of the full-validation pass."""
    profiling: bool = False
    """Whether the step timed a size for the controller."""
    size_reason: str = ""
    """Why the minibatch has this size."""
    fit: BatchSizeFit | None = None
    """The controller's fit that chose the size; None if none did."""
    usage: Usage = Usage()
    """Usage of the step's language-model calls, validation not counted."""
    num_tasks: int = 1
    """Proposals that were made in the same iteration, which share its time."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """The time of the step by phase: `rollouts`, `reflection`, `validation`."""
    metric_calls: int = 0
    """Scoring calls of the run, this step's included."""
    elapsed: float = 0.0
    """Seconds from the start of the run (of this process) to the end of the step."""
    validation_score: float | None = None
    """The child's mean score on the validation examples; None if it is not in the pool."""
    best_score: float | None = None
    """The best such score of the pool after the step."""
    from_traces: bool = False
    """Whether the step learned from collected traces: nothing was run on the minibatch, whose ids are those of the
    traces. The candidates of these steps are numbered on their own, from 0, the student; what the last of them made is
    candidate 0 of the search that follows."""

    def epoch_seconds(self, num_examples: int, with_validation: bool = False) -> float:
        """Return T_epoch(n) = d(n) * N / n at this step's speed (paper, section 3.3).

        Args:
            num_examples: N, the size of the trainset.
            with_validation: Whether d(n) includes the full-validation pass.
        """
        seconds = self.seconds + (self.validation_seconds if with_validation else 0.0)
        return seconds * num_examples / (self.n * self.num_tasks)

    @property
    def nodes(self) -> tuple[ProposalNode, ...]:
        """Return every reflection-LM call of the step."""
        return tuple(node for reduction in self.reductions for node in reduction.nodes)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values that JSON takes (ids that JSON does not know become text)."""
        ids = [i if isinstance(i, int | str) else str(i) for i in self.minibatch_ids]
        return {**to_plain(self), "minibatch_ids": ids}
