"""The frozen records that pass between the stages.

A `Rollout` is what Map gives, a `ReflectionRecord` is what reflection reads, a `ProposalNode` is one call of
the Reduce tree and a `StepRecord` is the account of one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


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
        input_tokens: Prompt tokens that the LM reported, cache hits not counted.
        output_tokens: Reply tokens that the LM reported, cache hits not counted.
        cost: US dollars, cache hits at zero; None when the LM reports none.
        calls: How often the LM was called.
        error: Why the call gave no proposal; None when it did.
    """

    id: str
    component: str
    inputs: tuple[str, ...]
    output: Any = None
    prompt: str = ""
    raw_output: str = ""
    seconds: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = None
    calls: int = 0
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
    """

    component: str
    text: Any
    nodes: tuple[ProposalNode, ...]
    num_groups: int
    duplication_factor: int
    error: str | None = None


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
        seconds: Wall time of the step without the full-validation pass.
        validation_seconds: Wall time of the full-validation pass.
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

    @property
    def nodes(self) -> tuple[ProposalNode, ...]:
        """Every reflection-LM call of the step."""
        return tuple(node for reduction in self.reductions for node in reduction.nodes)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values that JSON takes (ids that JSON does not know become text)."""
        plain = asdict(self)
        plain["minibatch_ids"] = [i if isinstance(i, int | str) else str(i) for i in self.minibatch_ids]
        return plain
