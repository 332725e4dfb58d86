"""`CombeeProposer`: GEPA's proposal seams onto an aggregator (paper, section 3)."""

from __future__ import annotations

import copy
import logging
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import dspy
from dspy.adapters.types import History
from dspy.adapters.types.base_type import Type
from dspy.teleprompt.gepa import InstructionProposer
from dspy.teleprompt.gepa.gepa_utils import format_history_for_reflection
from gepa.proposer.reflective_mutation.reflection_lm import ReflectionProposal

from dspy_combee.calls.executors import Executor, ThreadExecutor
from dspy_combee.calls.lm_calls import UsageMeter
from dspy_combee.learners.instruction_calls import InstructionCalls
from dspy_combee.records.checks import check_int, check_lm
from dspy_combee.records.errors import ProviderError, UnknownCostError
from dspy_combee.records.secrecy import hide_own_secrets
from dspy_combee.records.text import as_data, as_text, text_of
from dspy_combee.records.types import Reduction
from dspy_combee.reduce import resolve_aggregator
from dspy_combee.reduce.tree import Aggregator, ReductionTask, reduce_tasks

logger = logging.getLogger("dspy_combee")

_COUNTING = threading.Lock()

Job = tuple[dict[str, str], Mapping[str, Sequence[Mapping[str, Any]]], list[str]]


class CombeeProposer(InstructionProposer):
    """The Map-Shuffle-Reduce reflector: one instruction from many reflection records (paper, section 3).

    The records of a component are duplicated, shuffled and dealt into k groups, each group gets one
    reflection-LM call, and the k proposals are merged. It fits three seams:

    - `dspy.GEPA(instruction_proposer=CombeeProposer(), reflection_minibatch_size=40)`,
    - `gepa.optimize(reflection_strategy=CombeeProposer(reflection_lm=lm))`, with `reflect` and `reflect_many`,
    - `CombeeOptimizer(instruction_proposer=CombeeProposer(...))`, which uses it with the options it has.

    Shuffles are seeded by (seed, position of the job, component). On the first two seams the position is the
    number of jobs that this object has seen; so two runs are equal when each starts with a new object.

    Args:
        base: The proposer of each level-1 call, any `ProposalFn`. Default: `InstructionProposer()`. The `skills`,
            `additional_instructions`, `max_chars` and adapter of an `InstructionProposer` hold for it; the merge
            follows its `additional_instructions`, `max_chars` and adapter too.
        reflection_lm: The language model that reflects. Default: the one in force (`dspy.context`).
        aggregator: `"tree"`, `"flat"`, `"top_k"`, `"summarize"`, or an `Aggregator`.
        num_groups: k, the groups of level 1. Default: floor(sqrt(n)) for n records.
        duplication_factor: p, in how many groups each record appears.
        num_threads: Reflection calls in flight at most. Default: DSPy's `num_threads` setting.
        seed: Seed of the shuffles.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or an aggregator's name is unknown.
    """

    def __init__(
        self,
        base: Any = None,
        *,
        reflection_lm: Any = None,
        aggregator: str | Aggregator = "tree",
        num_groups: int | None = None,
        duplication_factor: int = 2,
        num_threads: int | None = None,
        seed: int | None = 0,
    ) -> None:
        super().__init__()
        if base is not None and (isinstance(base, type) or not callable(base)):
            raise TypeError(f"base must be a proposal function, or a proposer (an object, no class), got {base!r}.")
        if isinstance(base, CombeeProposer):
            raise TypeError("base is a CombeeProposer already; give the proposer that its level-1 calls should use.")
        if reflection_lm is not None:
            check_lm("reflection_lm", reflection_lm)
        self.base = InstructionProposer() if base is None else base
        self.reflection_lm = reflection_lm
        self.aggregator = resolve_aggregator(aggregator)
        self.num_groups = None if num_groups is None else check_int("num_groups", num_groups)
        self.duplication_factor = check_int("duplication_factor", duplication_factor)
        self.executor: Executor | None = None if num_threads is None else ThreadExecutor(num_threads)
        self.seed = seed
        self._reset()

    def _reset(self) -> None:
        self._jobs_seen = 0
        self.meter = UsageMeter()

    def for_run(self, executor: Executor, reflection_lm: Any, seed: int | None, meter: UsageMeter) -> CombeeProposer:
        """A copy for one run: its executor, seed and meter, and its LM where this proposer names none."""
        own = copy.copy(self)
        own._reset()
        own.executor = executor
        own.reflection_lm = self.reflection_lm or reflection_lm
        own.seed = seed
        own.meter = meter
        return own

    @property
    def total_cost(self) -> float:
        """US dollars of reflection so far.

        Raises:
            UnknownCostError: If the LM has made calls and does not report their cost.
        """
        cost = self.meter.usage.cost
        if cost is None:
            raise UnknownCostError("The reflection LM reports no cost for its calls, so there is no total cost.")
        return cost

    # The seams -----------------------------------------------------------------------------------------------

    def __call__(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """Propose new texts, as a `ProposalFn` does. A component without a usable proposal is left out."""
        proposal, _ = self.reflect(candidate, reflective_dataset, components_to_update)
        return proposal.new_texts

    def reflect(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> tuple[ReflectionProposal, CombeeProposer]:
        """Propose new texts for one job, as gepa's `ReflectionLM` does."""
        return self.reflect_many([(candidate, reflective_dataset, components_to_update)])[0]

    def reflect_many(self, jobs: list[Job]) -> list[tuple[ReflectionProposal, CombeeProposer]]:
        """Propose new texts for several independent jobs, all their calls of one level at once."""
        with _COUNTING:
            first = self._jobs_seen
            self._jobs_seen += len(jobs)
        try:
            reductions = self.reduce(jobs, [str(first + index) for index in range(len(jobs))])
        except ProviderError as error:
            logger.error("No proposal: %s", error)
            return [(ReflectionProposal({}, metadata={"combee:error": str(error)}), self) for _ in jobs]
        return [(to_proposal(job_reductions), self) for job_reductions in reductions]

    def reduce(self, jobs: Sequence[Job], positions: Sequence[str]) -> list[list[Reduction]]:
        """Reduce the records of every component of every job.

        Args:
            jobs: (candidate, reflective dataset, components to update), as in gepa.
            positions: The position of each job in the run, which seeds its shuffles.

        Returns:
            For each job the reductions of the components that have records.

        Raises:
            ProviderError: If the LM's provider refuses for good.
            TypeError: If the aggregator or `base` gives something else than it must.
            ValueError: If there is no reflection LM, or the aggregator does not give a reduction for each task.

            What is raised once calls were made carries `reductions`: for each job the trees as far as they had grown.
        """
        tasks: list[ReductionTask] = []
        owners: list[int] = []
        for index, (candidate, dataset, components) in enumerate(jobs):
            for component in components:
                if component not in candidate or not dataset.get(component):
                    logger.info("Component %r has no reflection records in this step.", component)
                    continue
                rng = random.Random(f"{self.seed}/{positions[index]}/{component}")
                tasks.append(self._task(component, candidate, dataset[component], rng))
                owners.append(index)
        lm = self.reflection_lm or dspy.settings.lm
        if tasks and lm is None:
            raise ValueError("No reflection LM: give reflection_lm, or set one with dspy.configure(lm=...).")
        executor = self.executor or ThreadExecutor(dspy.settings.num_threads)
        calls = InstructionCalls(self.base, lm, self.meter)
        try:
            reductions = reduce_tasks(self.aggregator, tasks, calls, executor)
        except Exception as error:
            error.reductions = _by_job(error.reductions, owners, len(jobs))  # type: ignore[attr-defined]
            raise
        self._account(reductions)
        return _by_job(reductions, owners, len(jobs))

    def _task(
        self, component: str, candidate: Mapping[str, str], records: Sequence[Mapping[str, Any]], rng: random.Random
    ) -> ReductionTask:
        stringify = not isinstance(self.base, InstructionProposer)
        prepared = [_stringified(record) if stringify else record for record in records]
        texts = {name: as_text(text) for name, text in candidate.items()}
        return ReductionTask(
            component=component,
            current=texts[component],
            records=[hide_own_secrets(as_data(record)) for record in prepared],
            rng=rng,
            num_groups=self.num_groups,
            duplication_factor=self.duplication_factor,
            candidate=texts,
            sources=tuple(getattr(record, "source", index) for index, record in enumerate(records)),
        )

    def _account(self, reductions: Sequence[Reduction]) -> None:
        for reduction in reductions:
            if reduction.error is not None:
                logger.warning("No proposal for %r: %s", reduction.component, reduction.error)


def _by_job(reductions: Sequence[Reduction], owners: Sequence[int], num_jobs: int) -> list[list[Reduction]]:
    results: list[list[Reduction]] = [[] for _ in range(num_jobs)]
    for owner, reduction in zip(owners, reductions, strict=True):
        results[owner].append(reduction)
    return results


def to_proposal(reductions: Sequence[Reduction]) -> ReflectionProposal:
    """The reductions of a job in gepa's form: the final calls as `prompts` and `raw_lm_outputs`, all in `metadata`."""
    done = [reduction for reduction in reductions if reduction.text is not None]
    # The call that gave the text is not always the last one, which may have failed.
    final = {r.component: node for r in done for node in r.nodes if node.output == r.text}
    return ReflectionProposal(
        new_texts={reduction.component: reduction.text for reduction in done},
        prompts={component: node.prompt for component, node in final.items()},
        raw_lm_outputs={component: node.raw_output for component, node in final.items()},
        metadata={
            "combee:nodes": {reduction.component: reduction.nodes for reduction in reductions},
            "combee:errors": {r.component: r.error for r in reductions if r.error is not None},
        },
    )


def _stringified(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record as `dspy.GEPA` hands it to a proposer that is no `InstructionProposer`."""
    plain = dict(record)
    for part in ("Inputs", "Generated Outputs"):
        fields = record.get(part)
        if isinstance(fields, Mapping):
            plain[part] = {name: _stringified_value(value) for name, value in fields.items()}
    return plain


def _stringified_value(value: Any) -> Any:
    if isinstance(value, History):
        return format_history_for_reflection(value)
    return value if isinstance(value, Type) else text_of(value)
