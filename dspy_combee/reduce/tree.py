"""Reduce: from the records of a minibatch to one proposal (paper, section 3.1).

An `Aggregator` decides which reflection-LM calls to make and in which order; how a call is made is a function
that it is given. It gets the tasks of a whole step at once (every component of every job), so that the calls of
one level run together whatever component they are for.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from dspy_combee.calls.executors import Executor
from dspy_combee.calls.guard import CallGuard, GuardedCalls
from dspy_combee.records.checks import check_int
from dspy_combee.records.errors import OutOfBudgetError
from dspy_combee.records.text import cut_to_fit, estimate_tokens
from dspy_combee.records.types import ProposalNode, Reduction
from dspy_combee.reduce.shuffle import augmented_shuffle, default_num_groups, effective_duplication, split_evenly

logger = logging.getLogger("dspy_combee")

SMALLEST_TREE = 4
"""Below this many records a tree has nothing to divide: one plain call."""


@dataclass(frozen=True)
class ReductionTask:
    """Hold the records of one component of one job."""

    component: str
    """The component."""
    current: str
    """Its text in the frozen candidate."""
    records: Sequence[Any]
    """The reflection records, n of them."""
    rng: random.Random
    """Source of the shuffle, this task's own."""
    num_groups: int | None = None
    """k; None is floor(sqrt(n))."""
    duplication_factor: int = 2
    """p."""
    sources: tuple[int, ...] = ()
    """Positions in the minibatch of the examples that the records came from; empty where each has its own."""
    candidate: Mapping[str, str] = field(default_factory=dict)
    """The whole frozen candidate."""

    def reduction(
        self,
        nodes: Sequence[ProposalNode],
        text: Any = None,
        error: str | None = None,
        num_groups: int = 1,
        duplication_factor: int = 1,
    ) -> Reduction:
        """Return the outcome of the task: a text, or the reason why there is none.

        Args:
            nodes: The calls that were made, in order.
            text: The proposal.
            error: Why there is none.
            num_groups: k, as it was.
            duplication_factor: p, as it was.
        """
        return Reduction(
            component=self.component,
            text=text,
            nodes=tuple(nodes),
            num_groups=num_groups,
            duplication_factor=duplication_factor,
            error=error,
            current=self.current,
            sources=self.sources or tuple(range(len(self.records))),
        )


@dataclass(frozen=True)
class NodeCall:
    """Ask for one reflection-LM call."""

    task: ReductionTask
    """The task it belongs to."""
    id: str
    """Id of the node: level and number."""
    kind: Literal["propose", "merge", "summarize"]
    """`"propose"` reads records (or summaries of them), `"merge"` reads proposals, `"summarize"` one record."""
    inputs: tuple[str, ...]
    """Ids of what it reads: of records (`r0`), or of nodes."""
    items: tuple[Any, ...]
    """What it reads."""


CallFunction = Callable[[NodeCall], ProposalNode]


@runtime_checkable
class Aggregator(Protocol):
    """Turn the records of each task into one proposal."""

    def aggregate(self, tasks: Sequence[ReductionTask], call: CallFunction, executor: Executor) -> list[Reduction]:
        """Reduce every task.

        Args:
            tasks: The tasks of a step, independent of each other.
            call: Makes one reflection-LM call. It never raises for a failed call: the node says why.
            executor: Runs the calls.

        Returns:
            One reduction for each task, in order.
        """
        ...


Plan = Generator[list[NodeCall], list[ProposalNode], Reduction]
"""How one task is reduced: it yields the calls of a level, is sent their nodes, and returns the reduction."""


def reduce_in_waves(plans: Sequence[Plan], call: CallFunction, executor: Executor) -> list[Reduction]:
    """Carry out plans side by side: the calls of a level of all of them run at once.

    Args:
        plans: One for each task.
        call: Makes one reflection-LM call.
        executor: Runs the calls.

    Returns:
        One reduction for each plan, in order.
    """
    reductions: dict[int, Reduction] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(plans)))
    while answers:
        wave: dict[int, list[NodeCall]] = {}
        for index, nodes in answers.items():
            try:
                wave[index] = plans[index].send(nodes)
            except StopIteration as end:
                reductions[index] = end.value
        made = iter(executor.map(call, [node_call for calls in wave.values() for node_call in calls]) if wave else ())
        answers = {index: [next(made) for _ in calls] for index, calls in wave.items()}
    return [reductions[index] for index in range(len(plans))]


class NodeCalls(GuardedCalls[NodeCall, ProposalNode], Protocol):
    """Make the calls of a tree; a call that fails gives a node that says why."""


class _TreeExecutor(Executor):
    """Run an aggregator's calls through the guard of the run, and keep the nodes they gave."""

    def __init__(self, calls: NodeCalls, guard: CallGuard) -> None:
        self.calls = calls
        self.guard = guard
        self.width = guard.executor.width
        self.made: list[tuple[NodeCall, ProposalNode]] = []

    def map(self, function: Callable[[Any], Any], items: Sequence[Any], **options: Any) -> list[Any]:
        """Apply `function` to every item; the limits are those of the run, whatever `options` say."""
        items = list(items)
        results = self.guard.map(_AggregatorCalls(function, self.calls), items)
        for item, node in zip(items, results, strict=True):
            if isinstance(item, NodeCall) and isinstance(node, ProposalNode):
                self.made.append((item, node))
        return results

    def partial_tree(self, task: ReductionTask, error: str) -> Reduction:
        """Return the tree of a task that an error ended, as far as it had grown."""
        made = [(call, node) for call, node in self.made if call.task is task]
        groups = [call.items for call, _ in made if call.kind == "propose"]
        nodes = [node for _, node in made]
        used = sum(map(len, groups)) // max(1, len(task.records))
        return task.reduction(nodes, error=error, num_groups=len(groups), duplication_factor=used)


@dataclass(frozen=True)
class _AggregatorCalls(GuardedCalls[Any, Any]):
    """Call what the aggregator asked for: the run's own calls, or a function that it put around them."""

    function: Callable[[Any], Any]
    calls: NodeCalls

    def __call__(self, item: Any, /) -> Any:
        return self.function(item)

    def late(self, item: Any, seconds: float, /) -> Any:
        return self.calls.late(item, seconds) if isinstance(item, NodeCall) else super().late(item, seconds)

    def refused(self, item: Any, error: OutOfBudgetError, /) -> Any:
        return self.calls.refused(item, error) if isinstance(item, NodeCall) else super().refused(item, error)


def reduce_tasks(
    aggregator: Aggregator, tasks: Sequence[ReductionTask], calls: NodeCalls, guard: CallGuard
) -> list[Reduction]:
    """Return what the aggregator makes of the tasks.

    Raises:
        TypeError: If it gives no reductions.
        ValueError: If it does not give one for each task.

            Whatever is raised, by a call too, carries `reductions`: the trees as far as they had grown, so that what
            was paid for is not lost.
    """
    executor = _TreeExecutor(calls, guard)
    try:
        made = aggregator.aggregate(tasks, calls, executor) if tasks else []
        _check_reductions(made, len(tasks), type(aggregator).__name__)
    except Exception as error:
        error.reductions = [executor.partial_tree(task, str(error)) for task in tasks]  # type: ignore[attr-defined]
        raise
    return made


def _check_reductions(made: Any, expected: int, name: str) -> None:
    if not isinstance(made, list | tuple) or not all(isinstance(reduction, Reduction) for reduction in made):
        raise TypeError(f"{name}.aggregate must return a list of Reductions, one for each task, got {made!r:.200}.")
    if len(made) != expected:
        raise ValueError(
            f"{name}.aggregate must return one Reduction for each task, in order, got {len(made)} for {expected} tasks."
        )


class TreeAggregator:
    """Reduce by the paper's two-level scan, with more levels where one merge would read too much.

    Level 1 makes one call per group, all at once. Level 2 merges the k proposals in one call when k is at most
    `max_fan_in`; else they are dealt into ceil(k / max_fan_in) even groups and merged, level by level. Equal
    proposals are merged without a call. At least half of the calls of a level must succeed.

    Args:
        max_fan_in: Proposals that one merge reads at most, at least 2.
        max_context_tokens: Tokens that the current instruction and the records, or proposals, of one call may take
            (estimated; leave room for the fixed prompt and the reply); None for no limit. A group over it is split,
            and a record that is over it alone is cut in its middle, with a mark.

    Raises:
        TypeError: If an argument is no int.
        ValueError: If an argument is out of range.
    """

    def __init__(self, max_fan_in: int = 32, max_context_tokens: int | None = None) -> None:
        check_int("max_fan_in", max_fan_in, 2)
        if max_context_tokens is not None:
            check_int("max_context_tokens", max_context_tokens, 1)
        self.max_fan_in = max_fan_in
        self.max_context_tokens = max_context_tokens

    def __repr__(self) -> str:
        return f"TreeAggregator(max_fan_in={self.max_fan_in}, max_context_tokens={self.max_context_tokens})"

    def aggregate(self, tasks: Sequence[ReductionTask], call: CallFunction, executor: Executor) -> list[Reduction]:
        """See `Aggregator.aggregate`."""
        return reduce_in_waves([self._plan(task) for task in tasks], call, executor)

    def _plan(self, task: ReductionTask) -> Plan:
        room = None
        if self.max_context_tokens is not None:
            room = max(1, self.max_context_tokens - estimate_tokens(task.current))
        groups, p = _deal(task)
        if not groups:
            return task.reduction([], error="there are no records")
        groups = [part for group in groups for part in _fitting(group, room)]
        k = len(groups)
        kind: Literal["propose", "merge"] = "propose"
        parts = [([f"r{position}" for position, _ in group], [record for _, record in group]) for group in groups]
        nodes: list[ProposalNode] = []
        waiting: list[tuple[Any, list[str]]] = []  # Proposals that had none to be merged with.
        level = 0
        while True:
            level += 1
            made = yield [
                NodeCall(task, f"{level}.{index}", kind, tuple(ids), tuple(items))
                for index, (ids, items) in enumerate(parts)
            ]
            nodes += made
            failures = [node.error for node in made if node.output is None]
            if 2 * len(failures) > len(made):
                error = f"{len(failures)} of {len(made)} reflection calls of level {level} failed; last: {failures[-1]}"
                return task.reduction(nodes, error=error, num_groups=k, duplication_factor=p)
            proposals = _distinct([*waiting, *((node.output, [node.id]) for node in made if node.output is not None)])
            if len(proposals) == 1:
                return task.reduction(nodes, text=proposals[0][0], num_groups=k, duplication_factor=p)
            split = split_evenly(proposals, self._num_merges([text for text, _ in proposals], room))
            waiting = [part[0] for part in split if len(part) == 1]
            kind = "merge"
            parts = [
                ([i for _, ids in part for i in ids], [text for text, _ in part]) for part in split if len(part) > 1
            ]

    def _num_merges(self, proposals: list[Any], room: int | None) -> int:
        """Return the merges of a level: as few as fan-in and token limit allow, each of at least two proposals."""
        merges = math.ceil(len(proposals) / self.max_fan_in)
        if room is not None:
            tokens = sum(estimate_tokens(proposal) for proposal in proposals)
            merges = max(merges, min(math.ceil(tokens / room), len(proposals) // 2))
        return merges


def _deal(task: ReductionTask) -> tuple[list[list[tuple[int, Any]]], int]:
    """Return the groups of numbered records, none where there are no records, and p."""
    n = len(task.records)
    k = default_num_groups(n) if task.num_groups is None else min(task.num_groups, max(1, n))
    k = 1 if n < SMALLEST_TREE else k
    p = effective_duplication(task.duplication_factor, k)
    numbered = list(enumerate(task.records))
    if k > 1:
        return augmented_shuffle(numbered, k, p, task.rng), p
    if numbered:
        logger.info("%s: %d records go into one plain reflection call.", task.component, n)
    return [numbered] if numbered else [], p


def _fitting(group: list[tuple[int, Any]], room: int | None) -> list[list[tuple[int, Any]]]:
    """Split a group until the records of each part fit the token limit; one that does not fit alone is cut."""
    parts = 1 if room is None else math.ceil(sum(estimate_tokens(record) for _, record in group) / room)
    if room is None or parts <= 1:
        return [group]
    if len(group) == 1:
        position, record = group[0]
        return [[(position, cut_to_fit(record, room))]]
    return [fit for part in split_evenly(group, min(parts, len(group))) for fit in _fitting(part, room)]


def _distinct(proposals: Sequence[tuple[Any, list[str]]]) -> list[tuple[Any, list[str]]]:
    """Return the proposals, equal ones as one with the ids of all."""
    texts: dict[str, list[str]] = {}
    distinct: list[tuple[Any, list[str]]] = []
    for proposal, ids in proposals:
        if isinstance(proposal, str):
            known = texts.setdefault(proposal, [])
        else:  # It may have no hash.
            known = next((own for other, own in distinct if other == proposal), [])
        if not known:
            distinct.append((proposal, known))
        known.extend(ids)
    return distinct
