"""Minibatches of collected traces: which traces a step learns from, and how much of each reflection gets to see.

The traces stand in the place of Map; what follows is the same as for rollouts. A pass goes over all traces without
replacement, in an order drawn by seed, n at a time. One pass is what a run makes by default.

n is an int, a list, or the controller's, as for rollouts, with d(n) the time to reflect and reduce. Below 150 traces
timing sizes does not pay: `"auto"` and a `PowerLawBatchSize` then take the paper's 30 (section 4.2: 60 traces).

How much of a trace is shown: the records of one call share `max_context_tokens` of the aggregator, less the current
text, so that the groups are as large as the method wants them. Without that limit it is `CONTEXT_TOKENS`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dspy_combee.controller.batch_size import FixedSize, MinibatchSizer, PowerLawBatchSize, SizeDecision, resolve_sizer
from dspy_combee.controller.sampling import Budget, EpochSampler
from dspy_combee.records.checks import digest_of
from dspy_combee.records.types import ReflectionRecord
from dspy_combee.reduce.shuffle import default_num_groups, effective_duplication
from dspy_combee.reduce.tree import SMALLEST_TREE, TreeAggregator
from dspy_combee.traces import Trace, to_record

logger = logging.getLogger("dspy_combee")

PAPER_SIZE = 30
"""n of the paper's run on collected traces."""

FEWEST_TO_TIME = 150
"""Below this many traces no sizes are timed."""

CONTEXT_TOKENS = 96_000
"""What the records of one call may take where the aggregator has no limit: it fits the paper's model, 128k."""

LEAST_TOKENS = 1_000
"""A record gets this much if it can: a group that is then too large is split."""

_NOTE_TOKENS = 120
_NOTE = (
    "This is a run of the whole program, of which {name} is one of {count} predictors ({others}). Take it as the "
    "context in which {name} works, and learn from it what {name} should do.\n"
)


@dataclass(frozen=True)
class TraceBatch:
    """The traces of one step.

    Attributes:
        ids: What each is called in the records of the run: its position in the traces, and its source.
        traces: The traces.
        decision: Why there are so many.
    """

    ids: tuple[str, ...]
    traces: tuple[Trace, ...]
    decision: SizeDecision


class _PaperSize(FixedSize):
    """The paper's n for few traces."""

    def next_size(self, limit: int) -> SizeDecision:
        decision = super().next_size(limit)
        why = f"the paper's size: below {FEWEST_TO_TIME} traces no sizes are timed"
        return replace(decision, reason=f"n = {decision.n}, {why}")


class TraceBatches:
    """Draws the minibatches of a run from its traces; only the traces of the step under way are held.

    Args:
        traces: The traces, as `check_traces` gives them.
        size: The minibatch size, as the optimizers take it; None is `"auto"`.
        num_epochs: Passes over the traces.
        seed: Seed of the order.
        sizer: Decides n in place of `size`.

    Attributes:
        sampler: Draws positions.
        budget: The draws that there are.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        size: Any,
        num_epochs: float,
        seed: int | None,
        sizer: MinibatchSizer | None = None,
    ) -> None:
        self.traces = traces
        self.budget = Budget(len(traces), 0, num_epochs=num_epochs)
        self.sizer = sizer or trace_sizer(size, len(traces), self.budget.minibatch_rollouts)
        self.sampler = EpochSampler(self.sizer, self.budget, f"{seed}/traces")

    def __len__(self) -> int:
        return len(self.traces)

    @property
    def digest(self) -> str:
        """A digest of a few of the traces, by which a resumed run knows that they are the same."""
        places = sorted({0, len(self.traces) // 3, len(self.traces) // 2, len(self.traces) - 1})
        return digest_of(f"{trace.inputs} {trace.feedback}" for trace in (self.traces[place] for place in places))

    @property
    def is_spent(self) -> bool:
        """Whether the passes are over."""
        return self.budget.is_spent(0, self.sampler.drawn, merge_may_be_due=False)

    def draw(self, step: int) -> TraceBatch:
        """The traces of a step, by its number."""
        positions = self.sampler.draw(range(len(self.traces)), step)
        traces = tuple(self.traces[position] for position in positions)
        ids = tuple(trace_id(position, trace) for position, trace in zip(positions, traces, strict=True))
        decision = self.sampler.decision
        return TraceBatch(ids, traces, decision or SizeDecision(len(ids), ""))


def trace_id(position: int, trace: Trace) -> str:
    """What a trace is called in the records of a run: `trace 12: runs/a.jsonl:3`."""
    return f"trace {position}: {trace.source}" if trace.source else f"trace {position}"


def trace_sizer(size: Any, num_traces: int, budget_rollouts: int) -> MinibatchSizer:
    """The sizer for the minibatch size of a run on traces; None is `"auto"`."""
    policy = size if isinstance(size, PowerLawBatchSize) else PowerLawBatchSize()
    if (size is None or isinstance(size, str | PowerLawBatchSize)) and num_traces < FEWEST_TO_TIME:
        return _PaperSize(min(PAPER_SIZE, int(policy.max_minibatch_size)))
    return resolve_sizer("auto" if size is None else size, num_traces, budget_rollouts, 1)


def check_traces(traces: Any, predictors: Iterable[str]) -> Sequence[Trace]:
    """The traces as a sequence, each of them checked before anything is spent; that takes one pass over them.

    A sequence, such as a `TraceCollection`, is used as it is and read when it is needed; any other iterable is held
    in memory.

    Args:
        traces: The traces.
        predictors: Names of the program's predictors.

    Raises:
        TypeError: If they are no iterable, or one is no `Trace`.
        ValueError: If there is none, or one names a predictor that the program does not have.
        TraceError: If a file holds a bad one.
    """
    if isinstance(traces, str | bytes | Mapping | Trace) or not isinstance(traces, Iterable):
        hint = f": use load_traces({traces!r})" if isinstance(traces, str) else ""
        raise TypeError(f"traces must be several Trace objects, such as load_traces gives, got {_kind(traces)}{hint}.")
    given: Sequence[Trace] = traces if isinstance(traces, Sequence) else list(traces)
    known = list(predictors)
    count = 0
    for position, trace in enumerate(given):
        if not isinstance(trace, Trace):
            raise TypeError(f"traces[{position}] must be a Trace, got {_kind(trace)}.")
        if trace.predictor is not None and trace.predictor not in known:
            raise ValueError(
                f"{trace_id(position, trace)} names the predictor {trace.predictor!r}; the program has {known}. Leave "
                "out traces of other programs, or give them predictor=None, the whole program."
            )
        count += 1
    if count == 0:
        raise ValueError("traces must hold at least one trace, got none.")
    return given


def _kind(value: Any) -> str:
    return type(value).__name__


# How much of a trace is shown ---------------------------------------------------------------------------------


def group_tokens(aggregator: Any, current: int, n: int, num_groups: int | None, duplication_factor: int) -> int:
    """The most tokens that each of n records may take so that the groups of level 1 hold them.

    Args:
        aggregator: The aggregator; one that is no tree is taken to read all records in one call.
        current: Tokens of the current text.
        n: Records.
        num_groups: k, as it was given.
        duplication_factor: p, as it was given.
    """
    room = context_tokens(aggregator, current)
    if not isinstance(aggregator, TreeAggregator):
        return max(LEAST_TOKENS // 10, room // max(1, n))
    k = default_num_groups(n) if num_groups is None else min(num_groups, max(1, n))
    k = 1 if n < SMALLEST_TREE else k
    largest = math.ceil(n * effective_duplication(duplication_factor, k) / k)
    return max(room // max(1, largest), min(LEAST_TOKENS, room))


def context_tokens(aggregator: Any, taken: int) -> int:
    """What is left of a call's context for records, at least a tenth of `LEAST_TOKENS`."""
    limit = getattr(aggregator, "max_context_tokens", None) or CONTEXT_TOKENS
    return max(LEAST_TOKENS // 10, int(limit) - taken)


def trace_record(trace: Trace, max_tokens: int, source: int, name: str, predictors: Sequence[str]) -> ReflectionRecord:
    """The reflection record of a trace for one predictor.

    A trace of the whole program, where that has several predictors, says so in its feedback.

    Args:
        trace: The trace.
        max_tokens: The most tokens that the record may have.
        source: Position of the trace in its minibatch.
        name: The predictor.
        predictors: All predictors of the program.
    """
    if trace.predictor is not None or len(predictors) < 2:
        return to_record(trace, max_tokens, source)
    record = to_record(trace, max(LEAST_TOKENS // 10, max_tokens - _NOTE_TOKENS), source)
    others = ", ".join(other for other in predictors if other != name)
    others = others if len(others) < 200 else f"{others[:200]} ..."
    record["Feedback"] = _NOTE.format(name=name, count=len(predictors), others=others) + record["Feedback"]
    return record


def concerns(trace: Trace, name: str) -> bool:
    """Whether a trace is one of this predictor: its own, or one of the whole program."""
    return trace.predictor is None or trace.predictor == name
