"""Learning playbooks: Combee over ACE (paper, section 3), the learner that grows a `Playbook` of bullets.

Against one frozen playbook each rollout, or collected trace, is reflected on; the reflections are copied, shuffled and
curated into deltas, which are merged and applied once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import dspy

from dspy_combee.calls.executors import ThreadExecutor
from dspy_combee.learners.curation import CuratorCalls, merge_rival_updates
from dspy_combee.learners.delta_merge import settle
from dspy_combee.learners.learner import (
    Learner,
    LearnerTools,
    Proposal,
    are_traces,
    concerns,
    context_tokens,
    trace_record,
)
from dspy_combee.learners.reflection import ReflectionJob, Reflector, curator_record
from dspy_combee.playbook import EmbeddingCosine, Playbook, TagReport, attach, detach
from dspy_combee.playbook.bullets import bare_id
from dspy_combee.playbook.deltas import Refused
from dspy_combee.playbook.pruning import NearDuplicates, same_words
from dspy_combee.playbook.records import PlaybookChange, PlaybookStep, Reflection
from dspy_combee.records.checks import check_int, digest_of
from dspy_combee.records.errors import OutOfBudgetError
from dspy_combee.records.text import as_text, estimate_tokens
from dspy_combee.records.types import Reduction, Rollout, StepRecord, Usage
from dspy_combee.reduce import resolve_aggregator
from dspy_combee.reduce.tree import Aggregator, ReductionTask, reduce_tasks
from dspy_combee.rollouts.feedback import RecordMaker, Scorer, feedback_of
from dspy_combee.rollouts.map import ProgramCopier

if TYPE_CHECKING:
    from dspy_combee.traces import Trace

logger = logging.getLogger("dspy_combee")

REFLECT_ON = ("all", "failures")

_REFLECTION_ID = re.compile(r"s([0-9]{1,9})\.r[0-9]+")


@dataclass(frozen=True)
class PlaybookOptions:
    """Hold the options of `PlaybookOptimizer` that are about playbooks; its docstring says what each means.

    Raises:
        TypeError: If one has the wrong type.
        ValueError: If one is out of range, or a name is unknown.
    """

    duplication_factor: int
    num_groups: int | None
    aggregator: str | Aggregator
    reflect_on: str
    use_ground_truth: bool
    shared_playbook: bool
    playbook: Playbook | Mapping[str, Playbook] | None
    token_budget: int
    embedder: Callable[[list[str]], Any] | None

    def __post_init__(self) -> None:
        resolve_aggregator(self.aggregator)
        for name in ("duplication_factor", "token_budget"):
            check_int(name, getattr(self, name), 1)
        if self.num_groups is not None:
            check_int("num_groups", self.num_groups, 1)
        for name in ("use_ground_truth", "shared_playbook"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.reflect_on not in REFLECT_ON:
            raise ValueError(f"Unknown reflect_on {self.reflect_on!r}; known are {list(REFLECT_ON)}.")
        if self.embedder is not None and not callable(self.embedder):
            raise TypeError(f"embedder must be a dspy.Embedder or another callable, got {self.embedder!r}.")
        given = self.playbook.values() if isinstance(self.playbook, Mapping) else [self.playbook]
        for item in given:
            if item is not None and not isinstance(item, Playbook):
                raise TypeError(f"playbook must be a Playbook, or map predictors' names to them, got {item!r}.")


SHARED = "shared"
"""The component's name where all predictors share one playbook."""

Playbooks = Mapping[str, Playbook]


def named_predictors(program: Any) -> list[tuple[str, Any]]:
    """Return the predictors of a program by name.

    Raises:
        TypeError: If it is no DSPy program.
    """
    if not isinstance(program, dspy.Module):
        raise TypeError(f"the program must be a dspy.Module, got {type(program).__name__}.")
    return list(program.named_predictors())


class PlaybookProgram:
    """Take the playbooks off a program and build programs with others.

    A component is a playbook: one for each predictor, under its name, or one for all.

    Args:
        student: The program; it stays as it is.
        shared: Whether all predictors share one playbook.

    Raises:
        TypeError: If the student is no DSPy program.
        ValueError: If it has no predictor.
    """

    def __init__(self, student: Any, shared: bool) -> None:
        self.student = student
        self.copier = ProgramCopier(student)
        self._found: dict[str, Playbook | None] = {}
        self.bases: dict[str, str] = {}
        """Each predictor's instruction without its playbook."""
        for name, predictor in named_predictors(student):
            self.bases[name], self._found[name] = detach(predictor.signature.instructions)
        if not self.bases:
            raise ValueError("the program has no predictor, so there is nothing that a playbook could stand in.")
        # Each predictor's component, and the components in the order of the predictors.
        self.component_of = {name: SHARED if shared else name for name in self.bases}
        self.components = tuple(dict.fromkeys(self.component_of.values()))

    def start(self, given: Playbook | Playbooks | None, *, own_first: bool = False) -> dict[str, Playbook]:
        """Return the playbooks to start from, by component: the ones given, else the program's own, else empty ones.

        Args:
            given: One for all predictors, or some by predictor.
            own_first: Whether those that stand in the program come before those given.

        Raises:
            ValueError: If a name is unknown, or predictors that share a playbook start from different ones.
        """
        named = {} if given is None else given if isinstance(given, Mapping) else dict.fromkeys(self.bases, given)
        unknown = sorted(set(named) - set(self.bases))
        if unknown:
            raise ValueError(f"playbook names predictors {unknown}; the program has {sorted(self.bases)}.")
        start: dict[str, Playbook] = {}
        for name, component in self.component_of.items():
            own = self._found[name]
            playbook = own if own_first and own is not None else named.get(name, own)
            if playbook is None:
                continue
            if start.setdefault(component, playbook) != playbook:
                raise ValueError(
                    "the predictors are to share a playbook and start from different ones: give one as playbook=..."
                )
        return {component: start.get(component, Playbook()) for component in self.components}

    def build(self, playbooks: Playbooks) -> Any:
        """Return the program with these playbooks (by component) at the end of its instructions."""
        program = self.copier.copy(self.student)
        for name, predictor in program.named_predictors():
            text = attach(self.bases[name], playbooks[self.component_of[name]])
            predictor.signature = predictor.signature.with_instructions(text)
        return program

    def by_predictor(self, playbooks: Playbooks) -> dict[str, Playbook]:
        """Return the playbook of each predictor."""
        return {name: playbooks[component] for name, component in self.component_of.items()}

    def fingerprint(self) -> str:
        """Return a digest of the predictors' names and instructions, which tells this program from others."""
        text = repr(sorted(self.bases.items())) + repr(self.components)
        return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


class KnownFeedback:
    """Repeat what the metric said of each rollout, and ask it again only where that is wanted.

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
        """Count how often the real metric was asked."""
        return len(self._asked)

    def __call__(self, gold: Any, pred: Any, trace: Any, pred_name: Any, pred_trace: Any) -> Any:
        """Return the result for this predictor's call."""
        known = self._known[id(gold), id(pred)]
        if self.ask == "never" or (self.ask == "missing" and feedback_of(known) is not None):
            return known
        self._asked.append(None)
        return self.metric(gold, pred, trace, pred_name, pred_trace)


class PlaybookLearner(Learner[Playbooks]):
    """Grow the playbooks of a program.

    - A trace with a predictor's name gives one reflection, for that predictor. A trace of the whole program gives one
      for each playbook: for each predictor, or a single one where all share a playbook.
    - `reflect_on="failures"` leaves out what scores `perfect_score` or more, and no trace without a score.
    - `use_ground_truth` means nothing for traces, which have no labels.

    Args:
        options: The options.
        student: The program; it stays as it is.
        tools: What it uses of its run.
        online: Whether the metric is never asked again for feedback, and the program's own playbook comes before the
            one in the options.
    """

    step_type = PlaybookStep

    def __init__(self, options: PlaybookOptions, student: Any, tools: LearnerTools, online: bool = False) -> None:
        self.options = options
        self.tools = tools
        self.online = online
        self.program = PlaybookProgram(student, options.shared_playbook)
        self.aggregator = resolve_aggregator(options.aggregator)
        embedder = options.embedder
        self.near_duplicates: NearDuplicates = same_words if embedder is None else EmbeddingCosine(embedder)
        self._start = self.program.start(options.playbook, own_first=online)
        self._steps_before = last_step_of(self._start.values())

    def start(self) -> Playbooks:
        """See `Learner.start`."""
        return self._start

    def build(self, state: Playbooks) -> Any:
        """See `Learner.build`."""
        return self.program.build(state)

    def learn(self, state: Playbooks, evidence: Sequence[Rollout] | Sequence[Trace], step: int) -> Proposal[Playbooks]:
        """Reflect, tag, curate, merge and apply; see `Learner.learn`."""
        number = self._steps_before + step
        feedback_calls, feedback_usage = 0, Usage()
        on_traces = are_traces(evidence)
        if on_traces:
            jobs = self._trace_jobs(state, evidence, number)
        else:
            jobs, feedback_calls, feedback_usage = self._rollout_jobs(state, evidence, number)
        reflections: list[Reflection] = []
        reductions: list[Reduction] = []
        reason = ""
        tagged = {name: playbook.tag(()) for name, playbook in state.items()}
        reflector = Reflector(self.tools.reflection_lm, self.tools.guard.meter, on_traces)
        try:
            with dspy.context(trace=None):  # DSPy's trace would hold the records of many steps.
                reflections = self.tools.guard.map(reflector, jobs)
                tagged = {name: self._tag(name, playbook, reflections) for name, playbook in state.items()}
                frozen = {name: report.playbook for name, report in tagged.items()}
                reductions = self._reduce(frozen, reflections, number)
        except OutOfBudgetError as error:
            reason = str(error)
            reductions = list(getattr(error, "reductions", reductions))
        changes, after = self._apply(tagged, reductions)
        failure = "" if reason else _failure(reflections, reductions)
        used = {name for change in changes for name in change.used_reflections}
        calls = [item.usage for item in reflections] + [node.usage for made in reductions for node in made.nodes]
        return Proposal(
            state=after,
            reductions=tuple(reductions),
            usage=sum(calls, Usage()),
            failed=bool(failure) and all(made.text is None for made in reductions),
            reason=reason or failure or _notes(reflections, reductions),
            feedback_calls=feedback_calls,
            feedback_usage=feedback_usage,
            details={
                "changes": tuple(changes),
                "reflections": tuple(reflections),
                "unused_reflections": tuple(item.id for item in reflections if item.id not in used),
            },
        )

    def rejected(self, state: Playbooks, proposal: Proposal[Playbooks]) -> Proposal[Playbooks]:
        """See `Learner.rejected`: the playbooks are as they were, the trees tell the rest."""
        changes = tuple(
            PlaybookChange(name, len(playbook), playbook.enforce_budget(sys.maxsize).tokens_after)
            for name, playbook in state.items()
        )
        unused = tuple(item.id for item in proposal.details["reflections"])
        details = {**proposal.details, "changes": changes, "unused_reflections": unused}
        return replace(proposal, state=state, details=details)

    def dump(self, state: Playbooks) -> Any:
        """See `Learner.dump`."""
        return {name: json.loads(playbook.to_json()) for name, playbook in state.items()}

    def load(self, plain: Any) -> Playbooks:
        """See `Learner.load`."""
        if not isinstance(plain, dict) or not plain:
            raise ValueError("the state holds no playbooks by component")
        if plain.keys() != self._start.keys():
            raise ValueError(f"it is of {sorted(plain)}, and the program has {sorted(self._start)}")
        return {name: Playbook.from_json(json.dumps(playbook)) for name, playbook in plain.items()}

    def identity(self) -> dict[str, Any]:
        """See `Learner.identity`."""
        start = digest_of([playbook.to_text() for _, playbook in sorted(self._start.items())])
        return {"program": self.program.fingerprint(), "start": start}

    def describe(self, step: StepRecord) -> str:
        """See `Learner.describe`."""
        if not isinstance(step, PlaybookStep):
            return ""
        used = len(step.reflections) - len(step.unused_reflections)
        return f"{used} of {len(step.reflections)} reflections used, {step.bullets} bullets, {step.tokens} tokens"

    def summary(self, state: Playbooks) -> str:
        """See `Learner.summary`."""
        return f"{sum(len(playbook) for playbook in state.values())} bullets"

    def facts(self, step: StepRecord) -> dict[str, Any]:
        """See `Learner.facts`."""
        return {"bullets": step.bullets} if isinstance(step, PlaybookStep) else {}

    # Reflection ----------------------------------------------------------------------------------------------

    def _rollout_jobs(
        self, playbooks: Playbooks, rollouts: Sequence[Any], step: int
    ) -> tuple[list[ReflectionJob], int, Usage]:
        """Return the reflections to make, the metric calls for feedback, and what those used."""
        scorer = self.tools.scorer
        if self.options.reflect_on == "failures":
            perfect = scorer.perfect_score
            rollouts = [item for item in rollouts if item.error is not None or item.score < perfect]
        several = len(self.program.bases) > 1
        ask: Literal["never", "missing", "always"] = "always" if several else "missing"
        feedback = KnownFeedback(scorer.metric, rollouts, "never" if self.online else ask)
        # What is only looked up needs no slot of the executor.
        maker = RecordMaker(
            Scorer(feedback, scorer.failure_score),
            ThreadExecutor(1) if self.online else self.tools.executor,
            keep_unparsed=True,
            warn_of_mismatch=False,
            timeout=None if self.online else self.tools.rollout_timeout,
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

    def _trace_jobs(self, playbooks: Playbooks, traces: Sequence[Any], step: int) -> list[ReflectionJob]:
        jobs: list[ReflectionJob] = []
        for source, trace in enumerate(traces):
            perfect = self.tools.scorer.perfect_score
            if self.options.reflect_on == "failures" and trace.score is not None and trace.score >= perfect:
                continue
            components: set[str] = set()
            for name, component in self.program.component_of.items():
                if concerns(trace, name) and component not in components:
                    components.add(component)
                    playbook = playbooks[component].to_prompt()
                    jobs.append(self._trace_job(f"s{step}.r{len(jobs)}", playbook, source, trace, name))
        return jobs

    def _trace_job(self, job_id: str, playbook: str, source: int, trace: Trace, name: str) -> ReflectionJob:
        names: Sequence[str] = list(self.program.bases)
        instruction = self.program.bases[name]
        if trace.predictor is None and self.program.component_of[name] == SHARED and len(names) > 1:
            instruction = "\n\n".join(f"{name}: {self.program.bases[name]}" for name in names)
            names = [name]  # The reflection is for the whole program, which needs no note.
        room = context_tokens(self.aggregator, estimate_tokens(playbook) + estimate_tokens(instruction))
        record = trace_record(trace, room, source, name, names)
        return ReflectionJob(job_id, name, source, instruction, playbook, record)

    def _expected(self, example: Any) -> Mapping[str, Any] | None:
        if not self.options.use_ground_truth:
            return None
        return dict(example.labels()) or None

    def _of(self, component: str, reflections: Sequence[Reflection]) -> list[Reflection]:
        return [item for item in reflections if self.program.component_of[item.predictor] == component]

    def _tag(self, component: str, playbook: Playbook, reflections: Sequence[Reflection]) -> TagReport:
        """Count the tags; of one reflection the first tag of each bullet counts."""
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
                    rng=random.Random(f"{self.tools.seed}/{step}/{component}"),
                    num_groups=self.options.num_groups,
                    duplication_factor=self.options.duplication_factor,
                    sources=tuple(item.source for item in useful),
                )
            )
        guard = self.tools.guard
        calls = CuratorCalls(self.tools.reflection_lm, guard.meter, frozen, self.near_duplicates)
        reductions = reduce_tasks(self.aggregator, tasks, calls, guard)
        reductions = merge_rival_updates(tasks, reductions, calls, guard)
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
    """Return the last step whose reflections the playbooks name; 0 where they name none."""
    ids = (name for playbook in playbooks for bullet in playbook for name in bullet.reflection_ids)
    return max((int(match[1]) for name in ids if (match := _REFLECTION_ID.fullmatch(name))), default=0)


def _tagged_id(tag: Any) -> str:
    name = tag.get("id", tag.get("bullet_id")) if isinstance(tag, Mapping) else tag
    return bare_id(name) or repr(name)


def _failure(reflections: Sequence[Reflection], reductions: Sequence[Reduction]) -> str:
    """Say why reflection proposed nothing; empty where it did, or where there was nothing to say."""
    errors = [f"{made.component}: {made.error}" for made in reductions if made.error is not None]
    if errors:
        return "; ".join(errors)
    failed = [item.error for item in reflections if item.error is not None and not item.lesson]
    if failed and len(failed) == len(reflections):
        return f"all {len(failed)} reflection calls failed; last: {failed[-1]}"
    return ""


def _notes(reflections: Sequence[Reflection], reductions: Sequence[Reduction]) -> str:
    """Say what went wrong without keeping the step from learning."""
    failed = [item.error for item in reflections if item.error is not None and not item.lesson]
    empty = sum(item.error is not None and bool(item.lesson) for item in reflections)
    nodes = [node.error for made in reductions for node in made.nodes if node.error is not None]
    notes = [f"{len(failed)} of {len(reflections)} reflection calls failed; last: {failed[-1]}"] if failed else []
    notes += [f"{empty} of {len(reflections)} reflections teach nothing"] if empty else []
    notes += [f"{len(nodes)} curator calls failed; last: {nodes[-1]}"] if nodes else []
    return "; ".join(notes)
