"""What a learner is, and the reflection records that learners read.

A learner turns what happened on a minibatch, rollouts or collected traces, into a better state: instructions, a
playbook, or an artifact of your own. The loop (`runs.loop`) draws the minibatches, runs the program, validates, saves
and resumes; the learner knows nothing of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from dspy_combee.calls.executors import Executor
from dspy_combee.calls.guard import CallGuard
from dspy_combee.records.types import Reduction, ReflectionRecord, Rollout, StepRecord, Usage
from dspy_combee.reduce.shuffle import default_num_groups, effective_duplication
from dspy_combee.reduce.tree import SMALLEST_TREE, TreeAggregator
from dspy_combee.rollouts.feedback import Scorer

if TYPE_CHECKING:
    from dspy_combee.traces import Trace

State = TypeVar("State")

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
class LearnerTools:
    """Hold what a learner uses of its run."""

    guard: CallGuard
    """Makes the reflection calls, within the limits of time and money."""
    executor: Executor
    """Runs the metric where it is asked for feedback."""
    scorer: Scorer
    """Holds the metric and judges what it returns."""
    reflection_lm: Any
    """The language model that reflects."""
    seed: int | None
    """Seeds whatever is drawn."""
    rollout_timeout: float | None
    """Seconds that one feedback call of the metric may take."""


@dataclass(frozen=True)
class Proposal(Generic[State]):
    """Hold what a learner made of a minibatch."""

    state: State
    """The new state; the old one where nothing was learned."""
    reductions: tuple[Reduction, ...] = ()
    """The trees of the reflection calls, by component."""
    usage: Usage = field(default_factory=Usage)
    """What the reflection calls used."""
    failed: bool = False
    """Whether reflection failed: it proposed nothing, and not because there was nothing to say."""
    reason: str = ""
    """Why the state stayed, or changed less than it should; empty where all went well."""
    feedback_calls: int = 0
    """Metric calls that asked for feedback on a predictor."""
    feedback_usage: Usage = field(default_factory=Usage)
    """What the metric's own language-model calls used in them."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the learner's `step_type`."""


class Learner(Protocol[State]):
    """Turn what happened on a minibatch into a better state.

    Subclass it to get the defaults below. A state is immutable; `dump` and `load` make JSON of it and read it back.
    """

    step_type: type[StepRecord] = StepRecord
    """The class of its step records."""

    def start(self) -> State:
        """Return the state that learning starts from."""
        ...

    def build(self, state: State) -> Any:
        """Return the program with a state in it, as a program of its own."""
        ...

    def learn(self, state: State, evidence: Sequence[Rollout] | Sequence[Trace], step: int) -> Proposal[State]:
        """Learn from one minibatch, all of it run with (or read against) one frozen state.

        Args:
            state: The frozen state.
            evidence: The rollouts, or the collected traces.
            step: Number of the step, from 1; it seeds whatever is drawn.

        Raises:
            ProviderError: If the provider of a language model refuses a call for good or cannot be reached.
        """
        ...

    def dump(self, state: State) -> Any:
        """Return the state as plain values that JSON takes."""
        return state

    def load(self, plain: Any) -> State:
        """Return the state that `dump` gave these values for.

        Raises:
            ValueError: If they are no state of this program.
        """
        return plain  # type: ignore[no-any-return]

    def identity(self) -> dict[str, Any]:
        """Return what tells this program and its start from others, as plain values."""
        return {}

    def rejected(self, state: State, proposal: Proposal[State]) -> Proposal[State]:
        """Return the proposal as it is recorded when the loop does not keep it: the state stays."""
        return replace(proposal, state=state)

    def describe(self, step: StepRecord) -> str:
        """Return what the log says of a step, beside what it says of every step."""
        return ""

    def summary(self, state: State) -> str:
        """Return what the log says of the state that a run ends with."""
        return ""

    def facts(self, step: StepRecord) -> dict[str, Any]:
        """Return what the progress line shows of a step, beside what it shows of every step."""
        return {}


# Collected traces as evidence ----------------------------------------------------------------------------------


def are_traces(evidence: Sequence[Any]) -> bool:
    """Return whether a minibatch is one of collected traces."""
    return bool(evidence) and not isinstance(evidence[0], Rollout)


def trace_id(position: int, trace: Trace) -> str:
    """Return what a trace is called in the records of a run: `trace 12: runs/a.jsonl:3`."""
    return f"trace {position}: {trace.source}" if trace.source else f"trace {position}"


def check_traces(traces: Any, predictors: Iterable[str]) -> Sequence[Trace]:
    """Return the traces as a sequence, each of them checked before anything is spent, in one pass over them.

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
    from dspy_combee.traces import Trace  # Readers load with the first traces.

    if isinstance(traces, str | bytes | Mapping | Trace) or not isinstance(traces, Iterable):
        hint = f": use load_traces({traces!r})" if isinstance(traces, str) else ""
        given = type(traces).__name__
        raise TypeError(f"traces must be several Trace objects, such as load_traces gives, got {given}{hint}.")
    checked: Sequence[Trace] = traces if isinstance(traces, Sequence) else list(traces)
    known = list(predictors)
    count = 0
    for position, trace in enumerate(checked):
        if not isinstance(trace, Trace):
            raise TypeError(f"traces[{position}] must be a Trace, got {type(trace).__name__}.")
        if trace.predictor is not None and trace.predictor not in known:
            raise ValueError(
                f"{trace_id(position, trace)} names the predictor {trace.predictor!r}; the program has {known}. Leave "
                "out traces of other programs, or give them predictor=None, the whole program."
            )
        count += 1
    if count == 0:
        raise ValueError("traces must hold at least one trace, got none.")
    return checked


def concerns(trace: Trace, name: str) -> bool:
    """Return whether a trace teaches this predictor: its own, or one of the whole program."""
    return trace.predictor is None or trace.predictor == name


def record_tokens(aggregator: Any, current: int, n: int, num_groups: int | None, duplication_factor: int) -> int:
    """Return the most tokens that each of n records may take so that the groups of level 1 hold them.

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
    """Return what is left of a call's context for records, at least a tenth of `LEAST_TOKENS`."""
    limit = getattr(aggregator, "max_context_tokens", None) or CONTEXT_TOKENS
    return max(LEAST_TOKENS // 10, int(limit) - taken)


def trace_record(trace: Trace, max_tokens: int, source: int, name: str, predictors: Sequence[str]) -> ReflectionRecord:
    """Return the reflection record of a trace for one predictor.

    A trace of the whole program, where that has several predictors, says so in its feedback.

    Args:
        trace: The trace.
        max_tokens: The most tokens that the record may have.
        source: Position of the trace in its minibatch.
        name: The predictor.
        predictors: All predictors of the program.
    """
    from dspy_combee.traces import to_record

    if trace.predictor is not None or len(predictors) < 2:
        return to_record(trace, max_tokens, source)
    record = to_record(trace, max(LEAST_TOKENS // 10, max_tokens - _NOTE_TOKENS), source)
    others = ", ".join(other for other in predictors if other != name)
    others = others if len(others) < 200 else f"{others[:200]} ..."
    record["Feedback"] = _NOTE.format(name=name, count=len(predictors), others=others) + record["Feedback"]
    return record
