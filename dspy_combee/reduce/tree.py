"""Reduce: from the records of a minibatch to one proposal (paper, section 3.1).

An `Aggregator` decides which reflection-LM calls to make and in which order; how a call is made is a function
that it is given. It gets the tasks of a whole step at once (every component of every job), so that the calls of
one level run together whatever component they are for.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from dspy_combee.calls.executors import Executor
from dspy_combee.calls.guard import CallGuard, late_reason
from dspy_combee.records.checks import check_int
from dspy_combee.records.errors import OutOfBudgetError
from dspy_combee.records.lengths import cut_to_fit, estimate_tokens
from dspy_combee.records.types import ProposalNode, Reduction
from dspy_combee.reduce.shuffle import augmented_shuffle, default_num_groups, effective_duplication, split_evenly

logger = logging.getLogger("dspy_combee")

SMALLEST_TREE = 4
"""Below this many records a tree has nothing to divide: one plain call."""


@dataclass(frozen=True)
class ReductionTask:
    """The records of one component of one job.

    Attributes:
        component: The component.
        current: Its text in the frozen candidate.
        records: The reflection records, n of them.
        rng: Source of the shuffle, this task's own.
        num_groups: k; None is floor(sqrt(n)).
        duplication_factor: p.
        sources: For each record, the position in the minibatch of the example that it came from; empty where each
            record has an example of its own.
        candidate: The whole frozen candidate.
    """

    component: str
    current: str
    records: Sequence[Any]
    rng: random.Random
    num_groups: int | None = None
    duplication_factor: int = 2
    sources: tuple[int, ...] = ()
    candidate: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeCall:
    """One call that an aggregator wants made.

    Attributes:
        task: The task it belongs to.
        id: Id of the node.
        kind: `"propose"` reads records (or summaries of them), `"merge"` reads proposals, `"summarize"` one record.
        inputs: Ids of what it reads.
        items: What it reads.
    """

    task: ReductionTask
    id: str
    kind: Literal["propose", "merge", "summarize"]
    inputs: tuple[str, ...]
    items: tuple[Any, ...]


CallFunction = Callable[[NodeCall], ProposalNode]


@runtime_checkable
class Aggregator(Protocol):
    """Turns the records of each task into one proposal."""

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


class NodeCalls(Protocol):
    """Make the calls of a tree, and say what stands in the place of one that is late or refused."""

    def __call__(self, node_call: NodeCall, /) -> ProposalNode:
        """Make one call; a call that fails gives a node that says why."""
        ...

    def late(self, node_call: NodeCall, seconds: float) -> ProposalNode:
        """Return the node of a call that took longer than `seconds`."""
        ...

    def refused(self, node_call: NodeCall, error: OutOfBudgetError) -> ProposalNode:
        """Return the node of a call that is not made because the money is spent, or raise `error`."""
        ...


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
        return Reduction(
            component=task.component,
            text=None,
            nodes=tuple(node for _, node in made),
            num_groups=len(groups),
            duplication_factor=sum(map(len, groups)) // max(1, len(task.records)),
            error=error,
            current=task.current,
            sources=task.sources or tuple(range(len(task.records))),
        )


@dataclass(frozen=True)
class _AggregatorCalls:
    """Call what the aggregator asked for: the run's own calls, or a function that it put around them."""

    function: Callable[[Any], Any]
    calls: NodeCalls

    def __call__(self, item: Any) -> Any:
        return self.function(item)

    def late(self, item: Any, seconds: float) -> Any:
        if isinstance(item, NodeCall):
            return self.calls.late(item, seconds)
        raise TimeoutError(late_reason(seconds))

    def refused(self, item: Any, error: OutOfBudgetError) -> Any:
        if isinstance(item, NodeCall):
            return self.calls.refused(item, error)
        raise error


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
    """The paper's two-level scan, with more levels where one merge would read too much.

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
        trees = [_Tree(task, self.max_fan_in, self.max_context_tokens) for task in tasks]
        wave = [(tree, tree.first_level()) for tree in trees]
        while any(calls for _, calls in wave):
            nodes = iter(executor.map(call, [node_call for _, calls in wave for node_call in calls]))
            wave = [(tree, tree.next_level([next(nodes) for _ in calls])) for tree, calls in wave if calls]
        return [tree.reduction() for tree in trees]


class _Tree:
    """The tree of one task while it grows."""

    def __init__(self, task: ReductionTask, max_fan_in: int, max_context_tokens: int | None) -> None:
        self.task = task
        self.max_fan_in = max_fan_in
        self.room: int | None = None
        if max_context_tokens is not None:
            self.room = max(1, max_context_tokens - estimate_tokens(task.current))
        n = len(task.records)
        k = default_num_groups(n) if task.num_groups is None else min(task.num_groups, max(1, n))
        self.k = 1 if n < SMALLEST_TREE else k
        self.p = effective_duplication(task.duplication_factor, self.k)
        self.level = 0
        self.nodes: list[ProposalNode] = []
        self.waiting: list[tuple[Any, list[str]]] = []  # Proposals that had none to be merged with.
        self.text: Any = None
        self.error: str | None = None

    def first_level(self) -> list[NodeCall]:
        n = len(self.task.records)
        if n == 0:
            self.error = "there are no records"
            return []
        if self.k == 1:
            logger.info("%s: %d records go into one plain reflection call.", self.task.component, n)
        numbered = list(enumerate(self.task.records))
        groups = augmented_shuffle(numbered, self.k, self.p, self.task.rng) if self.k > 1 else [numbered]
        groups = [part for group in groups for part in self._fitting(group)]
        self.k = len(groups)
        return [
            self._call(index, "propose", tuple(f"r{position}" for position, _ in group), [r for _, r in group])
            for index, group in enumerate(groups)
        ]

    def next_level(self, nodes: list[ProposalNode]) -> list[NodeCall]:
        self.nodes.extend(nodes)
        self.level += 1
        failures = [node for node in nodes if node.output is None]
        if 2 * len(failures) > len(nodes):
            cause = failures[-1].error
            self.error = f"{len(failures)} of {len(nodes)} reflection calls of level {self.level} failed; last: {cause}"
            return []
        made = [(node.output, [node.id]) for node in nodes if node.output is not None]
        proposals = _distinct([*self.waiting, *made])
        if len(proposals) == 1:
            self.text = proposals[0][0]
            return []
        parts = split_evenly(proposals, self._num_merges([text for text, _ in proposals]))
        self.waiting = [part[0] for part in parts if len(part) == 1]
        return [
            self._call(index, "merge", tuple(i for _, ids in part for i in ids), [text for text, _ in part])
            for index, part in enumerate(part for part in parts if len(part) > 1)
        ]

    def reduction(self) -> Reduction:
        return Reduction(
            component=self.task.component,
            text=self.text,
            nodes=tuple(self.nodes),
            num_groups=self.k,
            duplication_factor=self.p,
            error=self.error,
            current=self.task.current,
            sources=self.task.sources or tuple(range(len(self.task.records))),
        )

    def _call(
        self, index: int, kind: Literal["propose", "merge"], inputs: tuple[str, ...], items: list[Any]
    ) -> NodeCall:
        return NodeCall(self.task, f"{self.level + 1}.{index}", kind, inputs, tuple(items))

    def _fitting(self, group: list[tuple[int, Any]]) -> list[list[tuple[int, Any]]]:
        """Split a group until the records of each part fit the token limit; one that does not fit alone is cut."""
        if self.room is None:
            return [group]
        parts = math.ceil(sum(estimate_tokens(record) for _, record in group) / self.room)
        if parts <= 1:
            return [group]
        if len(group) == 1:
            position, record = group[0]
            return [[(position, cut_to_fit(record, self.room))]]
        return [fit for part in split_evenly(group, min(parts, len(group))) for fit in self._fitting(part)]

    def _num_merges(self, proposals: list[Any]) -> int:
        """Merges of a level: as few as fan-in and token limit allow, each of at least two proposals."""
        merges = math.ceil(len(proposals) / self.max_fan_in)
        if self.room is not None:
            tokens = sum(estimate_tokens(proposal) for proposal in proposals)
            merges = max(merges, min(math.ceil(tokens / self.room), len(proposals) // 2))
        return merges


def _distinct(proposals: Sequence[tuple[Any, list[str]]]) -> list[tuple[Any, list[str]]]:
    """The proposals, equal ones as one with the ids of all."""
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
