"""One run of `context_overload`: the real `PlaybookOptimizer`, and what came of it."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import mean
from typing import Any

import dspy

from benchmarks._overload_task import REFLECTION_TOKENS, Novelty, overload_lm, overload_task
from dspy_combee import Playbook, PlaybookOptimizer
from dspy_combee.records.text import estimate_tokens
from dspy_combee.records.types import ProposalNode
from dspy_combee.testing import Loss, find_lessons

WIDTH = 32
ROLLOUT_SECONDS, CALL_SECONDS, TOKEN_SECONDS = 0.6, 2.0, 0.02


@dataclass(frozen=True)
class Arm:
    """What is run.

    Attributes:
        loss: What a call keeps.
        novelty: What there is to learn.
        num_train: N, the training examples, seen once.
        n: The minibatch size.
        aggregator: `"flat"` or `"tree"`.
        p: The duplication factor.
        seed: Seed of the task, of the draws and of the optimizer.
        reflection_tokens: About how long a reflection is.
        num_test: Held-out examples.
    """

    loss: Loss
    novelty: Novelty
    num_train: int
    n: int
    aggregator: str
    p: int
    seed: int
    reflection_tokens: int = REFLECTION_TOKENS
    num_test: int = 100


@dataclass(frozen=True)
class Flow:
    """How far the lessons of a run came, summed over its steps: the distinct ones that stood at each point.

    Attributes:
        told: In the feedback.
        reflected: In a reflection.
        proposed: In an ADD of a level-1 call.
        merged: In the merged deltas.
        applied: In the playbook after the step.
    """

    told: float = 0
    reflected: float = 0
    proposed: float = 0
    merged: float = 0
    applied: float = 0


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        lessons: Distinct lessons in the playbook.
        bullets: Its bullets; those beyond the distinct lessons are duplicates.
        tokens: Its tokens in a prompt (estimated).
        accuracy: Share of the held-out lines that are right, with the playbook.
        minutes: Simulated wall time.
        reflection_tokens: Tokens of the reflection model, input and output.
        flow: How far the lessons came.
    """

    lessons: float
    bullets: float
    tokens: float
    accuracy: float
    minutes: float
    reflection_tokens: float
    flow: Flow

    @property
    def duplicates(self) -> float:
        """Bullets that repeat a lesson."""
        return self.bullets - self.lessons


def run(arm: Arm) -> Outcome:
    """Learn, and judge."""
    task = overload_task(arm.seed, arm.novelty, arm.num_train, arm.num_test)
    lm = overload_lm(arm.loss, arm.seed, arm.reflection_tokens)
    with dspy.context(lm=lm, disable_history=True):
        optimizer = PlaybookOptimizer(
            task.metric,
            reflection_lm=lm,
            minibatch_size=arm.n,
            aggregator=arm.aggregator,
            duplication_factor=arm.p,
            num_threads=1,  # Nothing waits: the seconds are computed. Replies are the same at any thread count.
            seed=arm.seed,
            track_stats=True,
        )
        program = optimizer.compile(task.program, task.trainset)
        accuracy = _accuracy(program, task)
    result = program.detailed_results
    playbook = Playbook.from_program(program)
    used = result.spent.usage_in("reflection")
    return Outcome(
        lessons=len(_lessons(bullet.content for bullet in playbook)),
        bullets=len(playbook),
        tokens=estimate_tokens(playbook.to_prompt()),
        accuracy=accuracy,
        minutes=sum(map(simulated_seconds, result.steps)) / 60,
        reflection_tokens=used.input_tokens + used.output_tokens,
        flow=_flow(result.steps, task),
    )


def _accuracy(program: Any, task: Any) -> float:
    return mean(task.metric(example, program(**example.inputs())).score for example in task.testset)


def _lessons(texts: Iterable[str]) -> set[Any]:
    return set(find_lessons("\n".join(texts)))


def _flow(steps: Sequence[Any], task: Any) -> Flow:
    """Count the lessons of each step at each point."""
    counts = []
    known: set[Any] = set()
    for step in steps:
        lines = (line for index in step.minibatch_ids for line in zip(*_labels(task.trainset[index]), strict=True))
        told = _lessons(lesson for code, lesson in lines if not code.endswith("-00")) - known
        firsts = [node for node in step.nodes if node.id.startswith("1.") and node.output]
        counts.append(
            (
                len(told),
                len(_lessons(reflection.text for reflection in step.reflections)),
                len(_lessons(delta.content for node in firsts for delta in node.output)),
                len(_lessons(delta.content for made in step.reductions for delta in made.text or ())),
                len(_lessons(item.delta.content for item in step.applied)),
            )
        )
        known |= _lessons(item.delta.content for item in step.applied)
    return Flow(*(float(sum(column)) for column in zip(*counts, strict=True)))


def _labels(example: Any) -> tuple[list[str], list[str]]:
    return example.expected, example.told


# Simulated time ---------------------------------------------------------------------------------------------


def simulated_seconds(step: Any) -> float:
    """How long a step would take: its calls, wave by wave, at most `WIDTH` at once."""
    waves: dict[str, list[float]] = {}
    for node in step.nodes:
        waves.setdefault(node.id.partition(".")[0], []).append(_node_seconds(node))
    reflections = [CALL_SECONDS + TOKEN_SECONDS * item.usage.output_tokens for item in step.reflections]
    return sum(map(_makespan, [[ROLLOUT_SECONDS] * step.n, reflections, *waves.values()]))


def _node_seconds(node: ProposalNode) -> float:
    return node.usage.calls * CALL_SECONDS + TOKEN_SECONDS * node.usage.output_tokens


def _makespan(seconds: Sequence[float]) -> float:
    free = [0.0] * WIDTH
    for duration in seconds:
        heapq.heappush(free, heapq.heappop(free) + duration)
    return max(free)


# Many runs --------------------------------------------------------------------------------------------------


def run_all(arms: Sequence[Arm], workers: int | None = None) -> list[Outcome]:
    """Run all, in processes of their own; the slow ones first."""
    workers = workers or os.cpu_count() or 1
    if workers == 1 or len(arms) == 1:
        return list(map(run, arms))
    order = sorted(range(len(arms)), key=lambda at: (arms[at].n, -arms[at].num_train))
    with ProcessPoolExecutor(min(workers, len(arms)), mp_context=get_context("spawn")) as pool:
        outcomes = dict(zip(order, pool.map(run, [arms[at] for at in order]), strict=True))
    return [outcomes[at] for at in range(len(arms))]


def average(outcomes: Sequence[Outcome]) -> Outcome:
    """The mean of each figure."""
    names = [name for name in Outcome.__dataclass_fields__ if name != "flow"]
    flow = Flow(*(mean(getattr(item.flow, name) for item in outcomes) for name in Flow.__dataclass_fields__))
    return Outcome(flow=flow, **{name: mean(getattr(item, name) for item in outcomes) for name in names})
