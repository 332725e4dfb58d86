"""The account of the steps that learn from collected traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dspy_combee.controller.batch_size import SizeDecision
from dspy_combee.learners.trace_batches import TraceBatch
from dspy_combee.records.types import ProposalNode, Reduction, StepRecord, Usage

PROMPT_CHARACTERS = 8_000
"""What a step record keeps of a prompt: its beginning and its end."""


def step_record(
    number: int, parent: int, batch: TraceBatch, reductions: Sequence[Reduction], usage: Usage
) -> StepRecord:
    """The account of a step, as far as it does not depend on the verdict."""
    decision: SizeDecision = batch.decision
    return StepRecord(
        iteration=number,
        parent=parent,
        minibatch_ids=batch.ids,
        n=len(batch.ids),
        k=max((made.num_groups for made in reductions), default=0),
        duplication_factor=min((made.duplication_factor for made in reductions), default=0),
        scores_before=(),
        scores_after=(),
        accepted=False,
        candidate=None,
        reason="",
        reductions=tuple(reductions),
        seconds=0.0,
        validation_seconds=0.0,
        profiling=decision.profiling,
        size_reason=decision.reason,
        fit=decision.fit,
        usage=usage,
        from_traces=True,
    )


def failure_of(reductions: Sequence[Reduction]) -> str:
    """Which components have no proposal, and why."""
    return "; ".join(f"{made.component}: {made.error}" for made in reductions if made.error is not None)


def flaw_of(reductions: Sequence[Reduction], batch: TraceBatch, usage: Usage) -> str:
    """Why a step's time is no measurement of its size; empty when it is one."""
    if not any(made.text is not None for made in reductions):
        return failure_of(reductions) or "it made no proposal"
    if batch.decision.clamped:
        return "the traces left are fewer"
    if 2 * usage.cache_hits > usage.calls:
        return f"the cache answered {usage.cache_hits} of its {usage.calls} LM calls"
    return ""


def without_long_prompt(node: ProposalNode) -> ProposalNode:
    """The account of a call with its prompt cut, so that a long run does not hold all its traces in memory."""
    half = PROMPT_CHARACTERS // 2
    over = len(node.prompt) - PROMPT_CHARACTERS
    if over <= 0:
        return node
    return replace(node, prompt=f"{node.prompt[:half]}\n[... {over:,} characters cut ...]\n{node.prompt[-half:]}")
