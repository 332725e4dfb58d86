"""The frozen records of playbook learning: reflections, curator calls, and the account of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from dspy_combee.playbook.deltas import Applied, Conflict, Delta, Refused, delta_from
from dspy_combee.playbook.pruning import Pruned
from dspy_combee.records.types import Plain, ProposalNode, Reduction, StepRecord, Usage, from_plain, to_plain

LESSON_FIELDS = ("what_went_wrong", "root_cause", "correct_approach", "key_insight")


def _read_deltas(value: Any) -> Any:
    """Read a list of deltas from plain values; the output of an aggregator may be a text as well."""
    return tuple(delta_from(item) for item in value) if isinstance(value, list) else value


def _read_given(refused: tuple[Refused, ...]) -> tuple[Refused, ...]:
    """Read what was given as a delta if it is written as one, for a batch holds deltas and plain values."""
    return tuple(replace(item, given=_delta_or_plain(item.given)) for item in refused)


def _delta_or_plain(value: Any) -> Any:
    try:
        delta = delta_from(value)
    except (AttributeError, TypeError, ValueError):
        return value
    return delta if to_plain(delta) == value else value


def _read_reductions(reductions: Any) -> Any:
    return [
        {
            **reduction,
            "text": _read_deltas(reduction["text"]),
            "nodes": [
                from_plain(CuratorNode if "refused" in node else ProposalNode, node) for node in reduction["nodes"]
            ],
        }
        for reduction in reductions
    ]


@dataclass(frozen=True)
class Reflection:
    """Record what one rollout teaches about one predictor."""

    id: str
    """`s3.r7` is number 7 of step 3; unique for the life of a playbook, over all predictors."""
    predictor: str
    """The predictor's name."""
    source: int
    """Position in the minibatch of the example."""
    lesson: Mapping[str, str]
    """The fields that the reflection LM wrote, by name; empty if the call failed."""
    tags: tuple[Plain, ...] = ()
    """(bullet id, tag) pairs, as they were given."""
    error: str | None = None
    """Why it is not used: the call failed, or it has nothing to teach. None if it is used."""
    seconds: float = 0.0
    """Wall time of the call."""
    usage: Usage = field(default_factory=Usage)
    """Usage of the call."""

    @property
    def text(self) -> str:
        """Return the lesson as text, one paragraph for each field that says something."""
        said = ((name, self.lesson.get(name, "")) for name in LESSON_FIELDS)
        return "\n".join(f"{name.replace('_', ' ').capitalize()}: {value}" for name, value in said if value.strip())


@dataclass(frozen=True)
class CuratorNode(ProposalNode):
    """Record one curator or merge call; its output is a tuple of deltas, which may be empty.

    A merge whose language-model call failed has an output (the deltas united without it) and an `error`.
    """

    output: Annotated[Any, BeforeValidator(_read_deltas)] = None
    refused: tuple[Refused, ...] = ()
    """Deltas, decisions or reflection ids of the reply that were not valid, and why."""


@dataclass(frozen=True)
class PlaybookChange:
    """Record what a step did to one playbook."""

    component: str
    """The predictor's name, or `shared` if all share one playbook."""
    bullets: int
    """Bullets after the step."""
    tokens: int
    """Tokens of its text in a prompt after the step (estimated)."""
    helpful: int = 0
    """Tags of this kind that were counted; so `harmful` and `neutral`."""
    harmful: int = 0
    neutral: int = 0
    tags_refused: tuple[Refused, ...] = ()
    """Tags that were not counted, and why."""
    deltas: tuple[Delta, ...] = ()
    """The batch of deltas, to whose places `applied`, `refused` and `conflicts` point."""
    applied: tuple[Applied, ...] = ()
    """Those that took effect."""
    refused: Annotated[tuple[Refused, ...], AfterValidator(_read_given)] = ()
    """Those that were not valid."""
    conflicts: tuple[Conflict, ...] = ()
    """Those of one batch that touched the same bullet."""
    pruned: tuple[Pruned, ...] = ()
    """The bullets that were removed to keep within the token budget."""
    fits: bool = True
    """Whether the playbook is within the token budget."""

    @property
    def used_reflections(self) -> set[str]:
        """Return the ids of the reflections that fed a delta which took effect and was not pruned at once."""
        lost = {item.bullet.id for item in self.pruned if item.into is None}
        return {name for item in self.applied if item.bullet_id not in lost for name in item.delta.reflection_ids}


@dataclass(frozen=True)
class PlaybookStep(StepRecord):
    """Record one step of playbook learning.

    In the inherited fields a candidate is the set of playbooks after a step: number 0 is the start, `candidate` that
    after this step. `accepted` says whether the step changed a playbook, `reason` why it changed nothing, or less
    than it should. A playbook is not run again on its own minibatch: `scores_after` is empty.
    """

    reductions: Annotated[tuple[Reduction, ...], BeforeValidator(_read_reductions)]
    changes: tuple[PlaybookChange, ...] = ()
    """What happened to each playbook."""
    reflections: tuple[Reflection, ...] = ()
    """Every reflection of the step, those that are not used included."""
    unused_reflections: tuple[str, ...] = ()
    """The ids of those that fed no delta which survived."""

    @property
    def bullets(self) -> int:
        """Return the number of bullets of all playbooks after the step."""
        return sum(change.bullets for change in self.changes)

    @property
    def tokens(self) -> int:
        """Return the tokens of all playbooks after the step (estimated)."""
        return sum(change.tokens for change in self.changes)

    @property
    def helpful(self) -> int:
        """Return how many tags `helpful` were counted."""
        return sum(change.helpful for change in self.changes)

    @property
    def harmful(self) -> int:
        """Return how many tags `harmful` were counted."""
        return sum(change.harmful for change in self.changes)

    @property
    def neutral(self) -> int:
        """Return how many tags were `neutral`."""
        return sum(change.neutral for change in self.changes)

    @property
    def applied(self) -> tuple[Applied, ...]:
        """Return the deltas that took effect."""
        return tuple(item for change in self.changes for item in change.applied)

    @property
    def refused(self) -> tuple[Refused, ...]:
        """Return what was not valid: deltas and decisions of the calls, deltas of the batch, tags."""
        of_calls = [item for node in self.nodes if isinstance(node, CuratorNode) for item in node.refused]
        of_batches = [item for change in self.changes for item in (*change.refused, *change.tags_refused)]
        return (*of_calls, *of_batches)

    @property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Return the conflicts of the batches."""
        return tuple(item for change in self.changes for item in change.conflicts)

    @property
    def pruned(self) -> tuple[Pruned, ...]:
        """Return the bullets that were removed to keep within the token budget."""
        return tuple(item for change in self.changes for item in change.pruned)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values that JSON takes; a delta is written as a curator writes it."""
        totals = ("bullets", "tokens", "helpful", "harmful", "neutral")
        return {**super().to_dict(), **{name: getattr(self, name) for name in totals}}
