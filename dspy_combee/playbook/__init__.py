"""Playbooks: sections of short bullets with counters, grown by deltas. Pure data, text and JSON; no LM call."""

from dspy_combee.playbook.bullets import Bullet, PlaybookError, TextLine
from dspy_combee.playbook.deltas import (
    Add,
    Applied,
    Batch,
    Conflict,
    Merge,
    Refused,
    Remove,
    Update,
    delta_from,
)
from dspy_combee.playbook.diff import PlaybookDiff
from dspy_combee.playbook.near_duplicates import EmbeddingCosine, NearDuplicates, TokenJaccard
from dspy_combee.playbook.playbook import (
    DeltaReport,
    Playbook,
    PruneReport,
    TagReport,
    attach,
    detach,
    playbooks_in,
)
from dspy_combee.playbook.pruning import Pruned

__all__ = [
    "Add",
    "Applied",
    "Batch",
    "Bullet",
    "Conflict",
    "DeltaReport",
    "EmbeddingCosine",
    "Merge",
    "NearDuplicates",
    "Playbook",
    "PlaybookDiff",
    "PlaybookError",
    "PruneReport",
    "Pruned",
    "Refused",
    "Remove",
    "TagReport",
    "TextLine",
    "TokenJaccard",
    "Update",
    "attach",
    "delta_from",
    "detach",
    "playbooks_in",
]
