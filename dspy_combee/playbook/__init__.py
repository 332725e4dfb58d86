"""Playbooks: sections of short bullets with counters, grown by deltas. Pure data, text and JSON; no LM call."""

from dspy_combee.playbook.bullets import Bullet, PlaybookError, TextLine
from dspy_combee.playbook.deltas import Add, Applied, Conflict, Merge, Refused, Remove, Update
from dspy_combee.playbook.playbook import (
    DeltaReport,
    Playbook,
    PlaybookDiff,
    PruneReport,
    TagReport,
    attach,
    detach,
    playbooks_in,
)
from dspy_combee.playbook.pruning import EmbeddingCosine, Pruned

__all__ = [
    "Add",
    "Applied",
    "Bullet",
    "Conflict",
    "DeltaReport",
    "EmbeddingCosine",
    "Merge",
    "Playbook",
    "PlaybookDiff",
    "PlaybookError",
    "PruneReport",
    "Pruned",
    "Refused",
    "Remove",
    "TagReport",
    "TextLine",
    "Update",
    "attach",
    "detach",
    "playbooks_in",
]
