"""The frozen records of playbook learning: reflections, curator calls, and the account of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from dspy_combee.playbook.deltas import Add, Applied, Conflict, Delta, Merge, Refused, Remove, Update
from dspy_combee.playbook.pruning import Pruned
from dspy_combee.records.types import ProposalNode, StepRecord, Usage

LESSON_FIELDS = ("what_went_wrong", "root_cause", "correct_approach", "key_insight")


@dataclass(frozen=True)
class Reflection:
    """What one rollout teaches about one predictor.

    Attributes:
        id: `s3.r7` is number 7 of step 3; unique for the life of a playbook, over all predictors.
        predictor: The predictor's name.
        source: Position in the minibatch of the example.
        lesson: The fields that the reflection LM wrote, by name; empty when the call failed.
        tags: (bullet id, tag) pairs, as they were given.
        error: Why it is not used: the call failed, or it has nothing to teach. None when it is.
        seconds: Wall time of the call.
        usage: What the call took.
    """

    id: str
    predictor: str
    source: int
    lesson: Mapping[str, str]
    tags: tuple[Any, ...] = ()
    error: str | None = None
    seconds: float = 0.0
    usage: Usage = field(default_factory=Usage)

    @property
    def text(self) -> str:
        """The lesson as text, one paragraph for each field that says something."""
        said = ((name, self.lesson.get(name, "")) for name in LESSON_FIELDS)
        return "\n".join(f"{name.replace('_', ' ').capitalize()}: {value}" for name, value in said if value.strip())


@dataclass(frozen=True)
class CuratorNode(ProposalNode):
    """One curator or merge call; its output is a tuple of deltas, which may be empty.

    A merge whose language-model call failed has an output (the deltas united without it) and an `error`.

    Attributes:
        refused: Deltas, decisions or reflection ids of the reply that were not valid, and why.
    """

    refused: tuple[Refused, ...] = ()


@dataclass(frozen=True)
class PlaybookChange:
    """What a step did to one playbook.

    Attributes:
        component: The predictor's name, or `shared` where all share one playbook.
        bullets: Bullets after the step.
        tokens: Tokens of its text in a prompt after the step (estimated).
        helpful: Tags of this kind that were counted; so `harmful` and `neutral`.
        harmful: See `helpful`.
        neutral: See `helpful`.
        tags_refused: Tags that were not counted, and why.
        deltas: The batch of deltas, to whose places `applied`, `refused` and `conflicts` point.
        applied: Those that took effect.
        refused: Those that were not valid.
        conflicts: Those of one batch that touched the same bullet.
        pruned: The bullets that went to hold the token budget.
        fits: Whether the playbook holds the token budget.
    """

    component: str
    bullets: int
    tokens: int
    helpful: int = 0
    harmful: int = 0
    neutral: int = 0
    tags_refused: tuple[Refused, ...] = ()
    deltas: tuple[Delta, ...] = ()
    applied: tuple[Applied, ...] = ()
    refused: tuple[Refused, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    pruned: tuple[Pruned, ...] = ()
    fits: bool = True

    @property
    def used_reflections(self) -> set[str]:
        """The ids of the reflections that fed a delta which took effect and was not pruned away at once."""
        lost = {item.bullet.id for item in self.pruned if item.into is None}
        return {name for item in self.applied if item.bullet_id not in lost for name in item.delta.reflection_ids}


@dataclass(frozen=True)
class PlaybookStep(StepRecord):
    """The account of one step of playbook learning.

    In the inherited fields a candidate is the set of playbooks after a step: number 0 is the start, `candidate` that
    after this step. `accepted` says whether the step changed a playbook, `reason` why it changed nothing, or less
    than it should. A playbook is not run again on its own minibatch: `scores_after` is empty.

    Attributes:
        changes: What happened to each playbook.
        reflections: Every reflection of the step, those that are not used included.
        unused_reflections: The ids of those that fed no delta which survived.
    """

    changes: tuple[PlaybookChange, ...] = ()
    reflections: tuple[Reflection, ...] = ()
    unused_reflections: tuple[str, ...] = ()

    @property
    def bullets(self) -> int:
        """Bullets of all playbooks after the step."""
        return sum(change.bullets for change in self.changes)

    @property
    def tokens(self) -> int:
        """Tokens of all playbooks after the step (estimated)."""
        return sum(change.tokens for change in self.changes)

    @property
    def helpful(self) -> int:
        """The tags `helpful` that were counted."""
        return sum(change.helpful for change in self.changes)

    @property
    def harmful(self) -> int:
        """The tags `harmful` that were counted."""
        return sum(change.harmful for change in self.changes)

    @property
    def neutral(self) -> int:
        """The tags `neutral`."""
        return sum(change.neutral for change in self.changes)

    @property
    def applied(self) -> tuple[Applied, ...]:
        """The deltas that took effect."""
        return tuple(item for change in self.changes for item in change.applied)

    @property
    def refused(self) -> tuple[Refused, ...]:
        """What was not valid: deltas and decisions of the calls, deltas of the batch, tags."""
        of_calls = [item for node in self.nodes if isinstance(node, CuratorNode) for item in node.refused]
        of_batches = [item for change in self.changes for item in (*change.refused, *change.tags_refused)]
        return (*of_calls, *of_batches)

    @property
    def conflicts(self) -> tuple[Conflict, ...]:
        """The conflicts of the batches."""
        return tuple(item for change in self.changes for item in change.conflicts)

    @property
    def pruned(self) -> tuple[Pruned, ...]:
        """The bullets that went to hold the token budget."""
        return tuple(item for change in self.changes for item in change.pruned)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values that JSON takes; a delta is written as a curator writes it."""
        plain: dict[str, Any] = plain_values(self)
        totals = ("bullets", "tokens", "helpful", "harmful", "neutral")
        return {**plain, **{name: getattr(self, name) for name in totals}}


def describe(delta: Delta) -> dict[str, Any]:
    """A delta as plain values, as a curator writes it: `{"type": "ADD", "section": ..., ...}`."""
    plain: dict[str, Any] = {"type": type(delta).__name__.upper(), **vars(delta)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def plain_values(value: Any) -> Any:
    """`value` as JSON takes it: records become objects, deltas name their type, and what has no form its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Add | Update | Merge | Remove):
        return describe(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain_values(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {name if isinstance(name, str) else str(name): plain_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_values(item) for item in value]
    return str(value)
