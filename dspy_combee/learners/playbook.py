"""One step of playbook learning: from the rollouts of a minibatch to new playbooks (paper, section 3)."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dspy_combee.calls.executors import Executor, ThreadExecutor
from dspy_combee.calls.lm_calls import UsageMeter
from dspy_combee.calls.structured import TimedCalls
from dspy_combee.controller.budget import CostGuard
from dspy_combee.learners.curation import CuratorCalls, merge_rival_updates
from dspy_combee.learners.delta_merge import settle
from dspy_combee.learners.options import PlaybookOptions
from dspy_combee.learners.program import PlaybookProgram, Playbooks
from dspy_combee.learners.reflection import ReflectionJob, Reflector, curator_record
from dspy_combee.playbook import Playbook, TagReport
from dspy_combee.playbook.bullets import bare_id
from dspy_combee.playbook.deltas import Refused
from dspy_combee.playbook.records import PlaybookChange, Reflection
from dspy_combee.records.errors import OutOfBudgetError
from dspy_combee.records.text import as_text
from dspy_combee.records.types import Reduction, Rollout, Usage
from dspy_combee.reduce import resolve_aggregator
from dspy_combee.reduce.tree import ReductionTask, reduce_tasks
from dspy_combee.rollouts.feedback import RecordMaker, Scorer, feedback_of
from dspy_combee.rollouts.map import MapStage

logger = logging.getLogger("dspy_combee")

_REFLECTION_ID = re.compile(r"s([0-9]{1,9})\.r[0-9]+")


@dataclass(frozen=True)
class StepOutcome:
    """What a step made of its rollouts.

    Attributes:
        playbooks: The playbooks after it, by component.
        reflections: Every reflection, those that are not used included.
        reductions: The curators' tree of each component.
        changes: What happened to each playbook.
        feedback_calls: Metric calls that asked for feedback on a predictor.
        feedback_usage: What the metric's own language-model calls took in them.
        failed: Whether reflection failed: it proposed nothing, and not because there was nothing to say.
        reason: Why the step changed nothing, or less than it should; empty where all went well.
    """

    playbooks: dict[str, Playbook]
    reflections: tuple[Reflection, ...]
    reductions: tuple[Reduction, ...]
    changes: tuple[PlaybookChange, ...]
    feedback_calls: int = 0
    feedback_usage: Usage = field(default_factory=Usage)
    failed: bool = False
    reason: str = ""

    @property
    def reflection_usage(self) -> Usage:
        """What the reflection calls took."""
        used = [item.usage for item in self.reflections]
        return sum(used + [node.usage for made in self.reductions for node in made.nodes], Usage())

    @property
    def unused_reflections(self) -> tuple[str, ...]:
        """The ids of the reflections that fed no delta which survived."""
        used = {name for change in self.changes for name in change.used_reflections}
        return tuple(item.id for item in self.reflections if item.id not in used)


class KnownFeedback:
    """A metric that repeats what the real one said of each rollout, and asks it again only where it should.

    Args:
        metric: The real one.
        rollouts: Scored rollouts.
        ask: Whether the real metric is asked for feedback on each predictor: `"never"`, `"missing"` (where the
            score came without feedback) or `"always"`.
    """

    def __init__(self, metric: Any, rollouts: Iterable[Rollout], ask: Literal["never", "missing", "always"]) -> None:
        self.metric = metric
        self.ask = ask
        self._known = {
            (id(item.example), id(item.prediction)): item.score if item.result is None else item.result
            for item in rollouts
        }
        self._asked: list[None] = []

    @property
    def calls(self) -> int:
        """How often the real metric was asked."""
        return len(self._asked)

    def __call__(self, gold: Any, pred: Any, trace: Any, pred_name: Any, pred_trace: Any) -> Any:
        """The result for this predictor's call."""
        known = self._known[id(gold), id(pred)]
        if self.ask == "never" or (self.ask == "missing" and feedback_of(known) is not None):
            return known
        self._asked.append(None)
        return self.metric(gold, pred, trace, pred_name, pred_trace)


class PlaybookGuard(CostGuard):
    """A `CostGuard` for curators: what they proposed, and was paid for, is united even when the money is spent.

    Args:
        executor: Runs the calls.
        max_cost: US dollars; None for no limit.
        meter: Holds the reflection-LM usage so far.
    """

    def __init__(self, executor: Executor, max_cost: float | None, meter: UsageMeter) -> None:
        super().__init__(executor, max_cost, meter)
        self._warned = True  # That a wave makes no call is nothing to warn of: most merges need none.

    def map(self, function: Any, items: Sequence[Any], **options: Any) -> list[Any]:
        """See `CostGuard.map`."""
        if self.is_spent and isinstance(function, CuratorCalls) and all(item.kind == "merge" for item in items):
            error = OutOfBudgetError(f"max_reflection_cost=${self.max_cost:g} is spent.")
            return [function.refused(item, error) for item in items]
        return super().map(function, items, **options)


class PlaybookLearner:
    """Runs a program with its playbooks, and learns from the rollouts.

    Args:
        options: The options.
        program: The program.
        asks_for_feedback: Whether the metric may be called again for feedback on a predictor.

    Attributes:
        meter: What the reflection calls have used.
        guard: Watches `max_reflection_cost`.
        stage: Map.
    """

    def __init__(self, options: PlaybookOptions, program: PlaybookProgram, asks_for_feedback: bool) -> None:
        self.options = options
        self.program = program
        self.asks_for_feedback = asks_for_feedback
        self.meter = UsageMeter()
        self.executor: Executor = options.make_executor()
        timed = TimedCalls(self.executor, options.reflection_timeout)
        self.guard = PlaybookGuard(timed, options.max_reflection_cost, self.meter)
        self.scorer = Scorer(options.metric, options.failure_score, options.perfect_score)
        self.stage = MapStage(program.copier, self.scorer, self.executor, options.rollout_timeout)
        self.aggregator = resolve_aggregator(options.aggregator)
        self.near_duplicates = options.make_near_duplicates()

    def check(self, examples: Sequence[Any]) -> None:
        """Refuse rollouts that cannot go where they run; see `MapStage.check`."""
        self.stage.check(self.program.student, examples)

    def run(self, playbooks: Playbooks, examples: Sequence[Any]) -> list[Rollout]:
        """Map: run the program with these playbooks on the examples."""
        return self.stage.run([(self.program.build(playbooks), examples)])

    def learn(self, playbooks: Playbooks, rollouts: Sequence[Rollout], step: int) -> StepOutcome:
        """Reflect, tag, curate, merge and apply, all against the playbooks that the rollouts were made with.

        Args:
            playbooks: The frozen playbooks, by component.
            rollouts: What `run` gave.
            step: The number of the step, which opens the ids of its reflections and seeds its shuffles.

        Raises:
            ProviderError: If the reflection LM's provider refuses or cannot be reached.
            UnknownCostError: If `max_reflection_cost` is set and the LM reports no cost.
        """
        jobs, feedback_calls, feedback_usage = self._jobs(playbooks, rollouts, step)
        reflector = Reflector(self.options.reflection_lm, self.meter, self.options.reflection_timeout)
        outcome = self.learn_from(playbooks, jobs, step, reflector)
        return replace(outcome, feedback_calls=feedback_calls, feedback_usage=feedback_usage)

    def learn_from(
        self, playbooks: Playbooks, jobs: Sequence[ReflectionJob], step: int, reflector: Reflector
    ) -> StepOutcome:
        """Make these reflections, then tag, curate, merge and apply, all against the same playbooks.

        Args:
            playbooks: The frozen playbooks, by component.
            jobs: The reflections to make.
            step: As in `learn`.
            reflector: Makes them.

        Raises:
            ProviderError: As in `learn`; so `UnknownCostError`.
        """
        reflections: list[Reflection] = []
        reductions: list[Reduction] = []
        reason = ""
        tagged = {name: playbook.tag(()) for name, playbook in playbooks.items()}
        try:
            reflections = self.guard.map(reflector, jobs) if jobs else []
            tagged = {name: self._tag(name, playbook, reflections) for name, playbook in playbooks.items()}
            frozen = {name: report.playbook for name, report in tagged.items()}
            reductions = self._reduce(frozen, reflections, step)
        except OutOfBudgetError as error:
            reason = str(error)
        changes, after = self._apply(tagged, reductions)
        failure = "" if reason else _failure(reflections, reductions)
        return StepOutcome(
            playbooks=after,
            reflections=tuple(reflections),
            reductions=tuple(reductions),
            changes=tuple(changes),
            failed=bool(failure) and all(made.text is None for made in reductions),
            reason=reason or failure or _notes(reflections, reductions),
        )

    # Reflection ----------------------------------------------------------------------------------------------

    def _jobs(
        self, playbooks: Playbooks, rollouts: Sequence[Rollout], step: int
    ) -> tuple[list[ReflectionJob], int, Usage]:
        """The reflections to make, the metric calls for feedback, and what those took."""
        if self.options.reflect_on == "failures":
            perfect = self.options.perfect_score
            rollouts = [item for item in rollouts if item.error is not None or item.score < perfect]
        several = len(self.program.bases) > 1
        ask: Literal["never", "missing", "always"] = "always" if several else "missing"
        feedback = KnownFeedback(self.options.metric, rollouts, ask if self.asks_for_feedback else "never")
        # What is only looked up needs no slot of the executor.
        executor = self.executor if self.asks_for_feedback else ThreadExecutor(1)
        maker = RecordMaker(
            Scorer(feedback, self.options.failure_score), executor, keep_unparsed=True, warn_of_mismatch=False
        )
        records = maker.records(rollouts, list(self.program.bases))
        _, usage = maker.take_feedback_calls()
        expected = {item.index: self._expected(item.example) for item in rollouts}
        found = [(name, record) for name, made in records.items() for record in made]
        jobs = [
            ReflectionJob(
                id=f"s{step}.r{number}",
                predictor=name,
                source=record.source,
                instruction=self.program.bases[name],
                playbook=playbooks[self.program.component_of[name]].to_prompt(),
                record=record,
                expected=expected[record.source],
            )
            for number, (name, record) in enumerate(found)
        ]
        return jobs, feedback.calls, usage

    def _expected(self, example: Any) -> Mapping[str, Any] | None:
        if not self.options.use_ground_truth:
            return None
        return dict(example.labels()) or None

    def _of(self, component: str, reflections: Sequence[Reflection]) -> list[Reflection]:
        return [item for item in reflections if self.program.component_of[item.predictor] == component]

    def _tag(self, component: str, playbook: Playbook, reflections: Sequence[Reflection]) -> TagReport:
        """Count the tags: those of one reflection count once for each bullet, the first one that it gives."""
        tags: list[Any] = []
        repeated: list[Refused] = []
        for reflection in self._of(component, reflections):
            seen: set[str] = set()
            for tag in reflection.tags:
                name = _tagged_id(tag)
                if name in seen:
                    repeated.append(Refused(len(tags), tag, f"reflection {reflection.id} has tagged [{name}] already"))
                    continue
                seen.add(name)
                tags.append(tag)
        report = playbook.tag(tags)
        refused = (*report.refused, *repeated)
        return TagReport(report.playbook, report.helpful, report.harmful, report.neutral, refused)

    # Reduce --------------------------------------------------------------------------------------------------

    def _reduce(self, frozen: Playbooks, reflections: Sequence[Reflection], step: int) -> list[Reduction]:
        tasks = []
        for component, playbook in frozen.items():
            useful = [item for item in self._of(component, reflections) if item.error is None]
            if not useful:
                continue
            tasks.append(
                ReductionTask(
                    component=component,
                    current=as_text(playbook.to_prompt()),
                    records=[curator_record(item) for item in useful],
                    rng=random.Random(f"{self.options.seed}/{step}/{component}"),
                    num_groups=self.options.num_groups,
                    duplication_factor=self.options.duplication_factor,
                    sources=tuple(item.source for item in useful),
                )
            )
        calls = CuratorCalls(
            self.options.reflection_lm, self.meter, frozen, self.near_duplicates, self.options.reflection_timeout
        )
        reductions = reduce_tasks(self.aggregator, tasks, calls, self.guard)
        reductions = merge_rival_updates(tasks, reductions, calls, self.guard)
        for reduction in reductions:
            if reduction.error is not None:
                logger.warning("No deltas for the playbook of %r: %s", reduction.component, reduction.error)
        return reductions

    def _apply(
        self, tagged: Mapping[str, TagReport], reductions: Sequence[Reduction]
    ) -> tuple[list[PlaybookChange], dict[str, Playbook]]:
        proposed = {made.component: made.text for made in reductions if made.text is not None}
        changes: list[PlaybookChange] = []
        after: dict[str, Playbook] = {}
        for component, tags in tagged.items():
            deltas = settle(proposed.get(component, ()), tags.playbook, self.near_duplicates)
            report = tags.playbook.apply(deltas)
            held = report.playbook.enforce_budget(self.options.token_budget, near_duplicates=self.near_duplicates)
            after[component] = held.playbook
            changes.append(
                PlaybookChange(
                    component=component,
                    bullets=len(held.playbook),
                    tokens=held.tokens_after,
                    helpful=tags.helpful,
                    harmful=tags.harmful,
                    neutral=tags.neutral,
                    tags_refused=tags.refused,
                    deltas=tuple(deltas),
                    applied=report.applied,
                    refused=report.refused,
                    conflicts=report.conflicts,
                    pruned=held.pruned,
                    fits=held.fits,
                )
            )
        return changes, after


def last_step_of(playbooks: Iterable[Playbook]) -> int:
    """The last step whose reflections the playbooks name; 0 where they name none."""
    ids = (name for playbook in playbooks for bullet in playbook for name in bullet.reflection_ids)
    return max((int(match[1]) for name in ids if (match := _REFLECTION_ID.fullmatch(name))), default=0)


def _tagged_id(tag: Any) -> str:
    name = tag.get("id", tag.get("bullet_id")) if isinstance(tag, Mapping) else tag
    return bare_id(name) or repr(name)


def _failure(reflections: Sequence[Reflection], reductions: Sequence[Reduction]) -> str:
    """Why reflection proposed nothing; empty where it did, or where there was nothing to say."""
    errors = [f"{made.component}: {made.error}" for made in reductions if made.error is not None]
    if errors:
        return "; ".join(errors)
    failed = [item.error for item in reflections if item.error is not None and not item.lesson]
    if failed and len(failed) == len(reflections):
        return f"all {len(failed)} reflection calls failed; last: {failed[-1]}"
    return ""


def _notes(reflections: Sequence[Reflection], reductions: Sequence[Reduction]) -> str:
    """What went wrong without keeping the step from learning."""
    failed = [item.error for item in reflections if item.error is not None and not item.lesson]
    empty = sum(item.error is not None and bool(item.lesson) for item in reflections)
    nodes = [node.error for made in reductions for node in made.nodes if node.error is not None]
    notes = [f"{len(failed)} of {len(reflections)} reflection calls failed; last: {failed[-1]}"] if failed else []
    notes += [f"{empty} of {len(reflections)} reflections teach nothing"] if empty else []
    notes += [f"{len(nodes)} curator calls failed; last: {nodes[-1]}"] if nodes else []
    return "; ".join(notes)
