"""The walk-forward loop: a learner goes through a trainset, through collected traces, or through both.

In each step a minibatch is drawn; examples are run with the state so far (Map), traces take the place of Map (paper,
section 4.2); the learner makes a proposal of it; with a valset the new state is validated. What comes of examples is
gone on with in any case, and the best state by validation is the outcome. What comes of traces, which nothing has
checked, is kept only if it validates better than the best so far; without a valset it is taken as it comes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

from dspy_combee.controller.batch_size import (
    FixedSize,
    MinibatchSizer,
    PowerLawBatchSize,
    SizeDecision,
    StepTiming,
    resolve_sizer,
)
from dspy_combee.controller.sampling import Budget, EpochSampler
from dspy_combee.learners.learner import Learner, Proposal, State, trace_id
from dspy_combee.records.checks import digest_of
from dspy_combee.records.types import ProposalNode, Reduction, Rollout, StepRecord, Usage
from dspy_combee.runs.scope import FAILED_STEPS, RunScope, answered_by_cache, mean, reflection_failed
from dspy_combee.runs.state import LoopState, StateFile

logger = logging.getLogger("dspy_combee")

PAPER_SIZE = 30
"""n of the paper's run on collected traces (section 4.2)."""

FEWEST_TO_TIME = 150
"""Below this many traces no sizes are timed."""

PROMPT_CHARACTERS = 8_000
"""What the record of a step on traces keeps of a prompt: its beginning and its end."""


@dataclass(frozen=True)
class Source:
    """Draw minibatches from a trainset, or from collected traces, which are read as they are drawn."""

    items: Sequence[Any]
    """The examples or traces."""
    sampler: EpochSampler
    """Draws positions."""
    of_traces: bool = False
    """Whether the items are traces."""

    @property
    def name(self) -> str:
        """Return the name under which the state of the sampler is saved."""
        return "traces" if self.of_traces else "trainset"

    @property
    def num_draws(self) -> int:
        """Return how many items the run draws."""
        return int(self.sampler.budget.num_draws)

    @property
    def is_spent(self) -> bool:
        """Return whether the passes are over."""
        return self.sampler.budget.is_spent(0, self.sampler.drawn, merge_may_be_due=False)

    def draw(self, step: int) -> tuple[tuple[Any, ...], list[Any]]:
        """Return the ids and the items of a step's minibatch."""
        positions = self.sampler.draw(range(len(self.items)), step)
        items = [self.items[position] for position in positions]
        if not self.of_traces:
            return tuple(positions), items
        return tuple(trace_id(position, trace) for position, trace in zip(positions, items, strict=True)), items

    def identity(self) -> list[Any]:
        """Return what tells these items from others; of traces, which may be many, a few are read."""
        if not self.of_traces:
            return [len(self.items), digest_of(self.items)]
        places = sorted({0, len(self.items) // 3, len(self.items) // 2, len(self.items) - 1})
        read = [self.items[place] for place in places]
        return [len(self.items), digest_of(f"{trace.inputs} {trace.feedback}" for trace in read)]


class _PaperSize(FixedSize):
    """Take the paper's n for few traces, and say so."""

    def next_size(self, limit: int) -> SizeDecision:
        decision = super().next_size(limit)
        why = f"the paper's size: below {FEWEST_TO_TIME} traces no sizes are timed"
        return replace(decision, reason=f"n = {decision.n}, {why}")


def trace_source(
    traces: Sequence[Any], size: Any, num_epochs: float, seed: int | None, sizer: MinibatchSizer | None = None
) -> Source:
    """Return the source of collected traces.

    n is an int, a list, or the controller's, with d(n) the time to reflect and reduce. Below 150 traces timing sizes
    does not pay: `"auto"` and a `PowerLawBatchSize` then take the paper's 30.

    Args:
        traces: The checked traces.
        size: The minibatch size, as the optimizers take it; None is `"auto"`.
        num_epochs: Passes over the traces.
        seed: Seed of the order.
        sizer: Decides n in place of `size`.
    """
    budget = Budget(len(traces), 0, num_epochs=num_epochs)
    if sizer is None:
        controlled = size is None or isinstance(size, str | PowerLawBatchSize)
        if controlled and len(traces) < FEWEST_TO_TIME:
            policy = size if isinstance(size, PowerLawBatchSize) else PowerLawBatchSize()
            sizer = _PaperSize(min(PAPER_SIZE, int(policy.max_minibatch_size)))
        else:
            sizer = resolve_sizer("auto" if size is None else size, len(traces), budget.minibatch_rollouts, 1)
    return Source(traces, EpochSampler(sizer, budget, f"{seed}/traces"), of_traces=True)


class Loop(Generic[State]):
    """Walk a learner forward through its sources, one after the other.

    Args:
        scope: The run.
        learner: The learner.
        sources: What it learns from, in order.
        valset: Examples that decide; empty for none.
        state_path: File of the state; None for a run that is not resumed.
        max_metric_calls: What validation may take; None for no limit.
        search_follows: Whether a search starts from what is learned here.
    """

    def __init__(
        self,
        scope: RunScope,
        learner: Learner[State],
        sources: Sequence[Source],
        valset: Sequence[Any] = (),
        state_path: Path | None = None,
        max_metric_calls: int | None = None,
        search_follows: bool = False,
    ) -> None:
        self.scope = scope
        self.learner = learner
        self.sources = sources
        self.valset = list(valset)
        self.max_metric_calls = max_metric_calls
        self.search_follows = search_follows
        self.current: State = learner.start()
        self.best: State = self.current
        """The best state by validation; without a valset, the last."""
        self.state = LoopState(learner.dump(self.current))
        self.evidence: Sequence[Any] = ()
        """The rollouts or traces of the last step."""
        self.ids: tuple[Any, ...] = ()
        """Their ids."""
        self.state_file = None if state_path is None else StateFile(state_path, self._identity())
        self._failed_steps = 0
        self._last_reason = ""

    @property
    def best_step(self) -> int:
        """Return the step after which the best state stood; 0 for the start."""
        return self.state.step if self.state.best is None else self.state.best_step

    def build(self) -> Any:
        """Return the program with the best state."""
        return self.learner.build(self.best)

    def run(self, resume_steps: bool = True) -> None:
        """Learn; the outcome is in `best` and `state`.

        Args:
            resume_steps: Whether the step log is cut back to this run's state.

        Raises:
            ReflectionError: If reflection fails in three steps in a row.
            ProviderError: If a language model's provider refuses a call for good or cannot be reached.
            ValueError: If there is the state of another run, or it is damaged.

            Whatever is raised carries `best_program`.
        """
        with self.scope.running(self.build, self._how_to_resume):
            self._resume(resume_steps)
            if not self.state.done:
                self._learn()

    def _learn(self) -> None:
        self._log_plan()
        if self.valset and self.state.best_score is None and self._affords(2):
            scores, _ = self._validate(self.current)
            self._save(best=self.current, best_scores=scores, best_score=mean(scores))
        while (source := self._next_source()) is not None:
            self._step(source)
        # Spent money may be given more, as long as no search has begun from what was learned.
        self._save(done=self.search_follows or all(source.is_spent for source in self.sources))
        summary, score = self.learner.summary(self.best), self.state.best_score
        spent = self.scope.spent
        logger.info(
            "Learning ended after %d steps, of which %d changed the program: %s%d rollouts and %d reflection calls%s.",
            self.state.step,
            self.state.kept,
            f"{summary}, " if summary else "",
            spent.metric_calls,
            spent.usage_in("reflection").calls,
            "" if score is None else f", best validation score {score:.4g}",
        )

    def _log_plan(self) -> None:
        for source in self.sources:
            if source.is_spent:
                continue
            what = "traces" if source.of_traces else "examples"
            logger.info("Learning from %d %s: %s.", len(source.items), what, source.sampler.sizer.description)
            if source.of_traces and not self.valset:
                logger.warning(
                    "No valset: what each step on traces teaches is taken as it comes, and nothing checks it."
                )

    def _affords(self, passes: int) -> bool:
        """Return whether so many validation passes are left in the budget."""
        if not self.valset or self.max_metric_calls is None:
            return True
        return self.scope.spent.metric_calls + passes * len(self.valset) <= self.max_metric_calls

    def _next_source(self) -> Source | None:
        """Return the source of the next step; None when the run is over."""
        if self._failed_steps >= FAILED_STEPS:
            raise reflection_failed(self._last_reason)
        source = next((source for source in self.sources if not source.is_spent), None)
        if source is None:
            return None
        if self.scope.guard.is_spent:
            logger.info("Learning ends: max_reflection_cost=$%g is spent.", self.scope.guard.max_cost)
            return None
        if not self._affords(1) or (self.valset and self.state.best_score is None):
            logger.warning(
                "Stopping after %d traces: the %s metric calls allowed for traces do not cover another validation pass "
                "(%d).",
                source.sampler.drawn,
                self.max_metric_calls,
                len(self.valset),
            )
            return None
        return source

    # A step ----------------------------------------------------------------------------------------------------

    def _step(self, source: Source) -> None:
        scope, number = self.scope, self.state.step + 1
        started = scope.clock()
        before = self.num_drawn
        self.ids, items = source.draw(number)
        rollouts: list[Rollout] = []
        times: dict[str, float] = {}
        if not source.of_traces:
            rollouts = self._run(source, items)
            ran = scope.clock()
            times["rollouts"], started = ran - started, ran
        self.evidence = items if source.of_traces else rollouts
        scope.progress.advance(len(items), before)
        proposal = self.learner.learn(self.current, self.evidence, number)
        scope.note_feedback(proposal.feedback_calls, proposal.feedback_usage)
        times["reflection"] = scope.clock() - started
        used = sum((rollout.usage for rollout in rollouts), proposal.usage)
        invalid_reason = _invalid_reason(proposal, source, used)
        source.sampler.observe(StepTiming(len(items), 1, sum(times.values()), invalid_reason))
        self._failed_steps = self._failed_steps + 1 if proposal.failed else 0
        record = self._judged(proposal, source, rollouts, used, times)
        self._last_reason = record.reason
        if proposal.failed:
            logger.warning("Step %d taught nothing: %s", number, record.reason)
        self._log_step(record)
        scope.tell_listeners([record], self.learner.facts(record))

    def _run(self, source: Source, items: Sequence[Any]) -> list[Rollout]:
        decision = source.sampler.decision
        phase = "profiling" if decision is not None and decision.profiling else "rollouts"
        return self.scope.evaluate(self.learner.build(self.current), items, phase)

    @property
    def num_drawn(self) -> int:
        """Return how many examples and traces were drawn so far."""
        return sum(source.sampler.drawn for source in self.sources)

    def _judged(
        self,
        proposal: Proposal[State],
        source: Source,
        rollouts: Sequence[Rollout],
        used: Usage,
        times: dict[str, float],
    ) -> StepRecord:
        """Validate a proposal, keep it or not, and save the step and the state after it."""
        number, decision = self.state.step + 1, source.sampler.decision
        accepted = proposal.state != self.current
        reason = proposal.reason
        changes: dict[str, Any] = {}
        score, seconds = None, 0.0
        if accepted and self.valset:
            scores, seconds = self._validate(proposal.state)
            score, best_score = mean(scores), self.state.best_score
            if best_score is None or (score is not None and score > best_score):
                changes = {
                    "best": proposal.state,
                    "best_scores": scores,
                    "best_score": score,
                    "best_step": number,
                }
            elif source.of_traces:
                accepted = False
                rejection = f"validation score {score:.4g} is no better than {best_score:.4g}"
                reason = f"{rejection}; {reason}" if reason else rejection
                proposal = self.learner.rejected(self.current, proposal)
        elif accepted and source.of_traces:
            reason = f"taken unchecked: there is no valset{f'; {reason}' if reason else ''}"
        elif not accepted and not reason:
            reason = "the proposal changes nothing"
        kept = self.state.kept + accepted
        trees = (
            [_without_long_prompts(tree) for tree in proposal.reductions] if source.of_traces else proposal.reductions
        )
        record = self.learner.step_type(
            iteration=number,
            parent=self.state.kept,
            minibatch_ids=self.ids,
            n=len(self.ids),
            k=max((tree.num_groups for tree in trees), default=0),
            duplication_factor=min((tree.duplication_factor for tree in trees), default=0),
            scores_before=tuple(rollout.score for rollout in rollouts),
            scores_after=(),
            accepted=accepted,
            candidate=kept if accepted else None,
            reason=reason,
            reductions=tuple(trees),
            seconds=sum(times.values()),
            validation_seconds=seconds,
            profiling=decision is not None and decision.profiling,
            size_reason="" if decision is None else decision.reason,
            fit=None if decision is None else decision.fit,
            usage=used,
            phase_seconds=times if score is None else {**times, "validation": seconds},
            validation_score=score,
            best_score=changes.get("best_score", self.state.best_score),
            metric_calls=self.scope.spent.metric_calls,
            elapsed=self.scope.elapsed,
            from_traces=source.of_traces,
            **proposal.details,
        )
        self.current = proposal.state
        # Before the state: what the step log holds beyond that is taken off at a resume.
        self.scope.log_steps([record])
        self._save(current=self.current, kept=kept, step=number, batch_sizes=tuple(self.scope.batch_sizes), **changes)
        return record

    def _validate(self, state: State) -> tuple[tuple[float, ...], float]:
        """Return the scores on the validation examples, and the seconds they took."""
        started = self.scope.clock()
        rollouts = self.scope.evaluate(self.learner.build(state), self.valset, "validation")
        return tuple(rollout.score for rollout in rollouts), self.scope.clock() - started

    def _log_step(self, record: StepRecord) -> None:
        said = [f"n = {record.n}{' traces' if record.from_traces else ''}", self.learner.describe(record)]
        said += [f"{record.seconds:.3g} s", "kept" if record.accepted else "not kept"]
        said += [] if record.validation_score is None else [f"validation score {record.validation_score:.4g}"]
        reason = f" ({record.reason})" if record.reason else ""
        logger.info("Step %d: %s%s.", record.iteration, ", ".join(part for part in said if part), reason)

    # The state -------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        return {
            **self.learner.identity(),
            **{source.name: source.identity() for source in self.sources},
            "valset": [len(self.valset), digest_of(self.valset)],
            "seed": self.scope.options.seed,
        }

    def _save(self, **changes: Any) -> None:
        """Change the state, in this one place, and save it."""
        if "best" in changes:
            self.best = changes["best"]
        elif self.state.best is None:
            self.best = self.current
        for name in {"best", "current"} & changes.keys():
            changes[name] = self.learner.dump(changes[name])
        self.state = replace(
            self.state,
            spent=self.scope.spent_without_reflection,
            reflection=self.scope.guard.meter.usage,
            samplers={source.name: source.sampler.get_state() for source in self.sources},
            **changes,
        )
        if self.state_file is not None:
            self.state_file.write(self.state)

    def _resume(self, resume_steps: bool) -> None:
        saved = None if self.state_file is None else self.state_file.read()
        if resume_steps:
            self.scope.resume_steps(0 if saved is None else saved.step + 1)
        if saved is None or self.state_file is None:
            return
        try:
            self.current = self.learner.load(saved.current)
            self.best = self.current if saved.best is None else self.learner.load(saved.best)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self.state_file.damaged(error) from error
        if not saved.done:
            logger.info("Going on from step %d of %s.", saved.step, self.scope.log_dir)
        self.state = saved
        self.scope.batch_sizes = list(saved.batch_sizes)
        self.scope.restore(saved.spent, saved.reflection)
        for source in self.sources:
            if source.name in saved.samplers:
                source.sampler.set_state(dict(saved.samplers[source.name]))

    def _how_to_resume(self) -> str:
        if self.state_file is None:
            return "no state is saved: give a log_dir to be able to go on."
        return f"state saved in {self.scope.log_dir}: compile with the same log_dir goes on from there."


def _invalid_reason(proposal: Proposal[Any], source: Source, used: Usage) -> str:
    """Say why the step's time is no measurement of its size; empty when it is one."""
    if proposal.failed or not proposal.reductions:
        return proposal.reason or "there was nothing to reflect on"
    if source.sampler.decision is not None and source.sampler.decision.clamped:
        return f"the {source.name} that are left are fewer" if source.of_traces else "the budget cut it short"
    return answered_by_cache(used)


def _without_long_prompts(tree: Reduction) -> Reduction:
    """Cut the prompts of a tree, so that a long run does not hold all its traces in memory."""
    return replace(tree, nodes=tuple(_without_long_prompt(node) for node in tree.nodes))


def _without_long_prompt(node: ProposalNode) -> ProposalNode:
    half = PROMPT_CHARACTERS // 2
    over = len(node.prompt) - PROMPT_CHARACTERS
    if over <= 0:
        return node
    return replace(node, prompt=f"{node.prompt[:half]}\n[... {over:,} characters cut ...]\n{node.prompt[-half:]}")
