"""What `speed.py` measures without latency: processor time of a rollout, imports, and a large reduce tree."""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dspy

from benchmarks._speed_run import quiet
from dspy_combee import StepRecord, ThreadExecutor, TreeAggregator
from dspy_combee.records.provenance import trace_back
from dspy_combee.records.step_log import StepLog
from dspy_combee.records.text import as_data
from dspy_combee.records.types import ProposalNode, Reduction, ReflectionRecord
from dspy_combee.reduce.tree import NodeCall, ReductionTask
from dspy_combee.rollouts.feedback import Scorer
from dspy_combee.rollouts.map import MapStage, ProgramCopier
from dspy_combee.testing import Prompt, ScriptedLM

# Processor time of a rollout --------------------------------------------------------------------------------


class Chain(dspy.Module):
    """Two predictors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dspy.Predict("question -> hint")
        self.second = dspy.Predict("question, hint -> answer")

    def forward(self, question: str) -> Any:
        return self.second(question=question, hint=self.first(question=question).hint)


class Router(dspy.Module):
    """Eight predictors, one of which answers: dear to copy, cheap to run."""

    def __init__(self) -> None:
        super().__init__()
        self.routes = [dspy.ChainOfThought("question -> answer") for _ in range(8)]

    def forward(self, question: str) -> Any:
        return self.routes[len(question) % 8](question=question)


def look_up(word: str) -> str:
    """Look a word up."""
    return f"Nothing is known of {word}."


def programs() -> dict[str, Any]:
    return {
        "Predict": dspy.Predict("question -> answer"),
        "ChainOfThought": dspy.ChainOfThought("question -> answer"),
        "two predictors": Chain(),
        "ReAct": dspy.ReAct("question -> answer", tools=[look_up]),
        "one of eight": Router(),
    }


def _reply(prompt: Prompt) -> dict[str, Any]:
    special = {"next_tool_name": "finish", "next_tool_args": {}}
    return {name: special.get(name, "right") for name in prompt.output_fields}


def _metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    return dspy.Prediction(score=1.0, feedback="Right.")


@dataclass(frozen=True)
class RolloutCost:
    """Milliseconds of processor time for a rollout, ours with its trace, and the ratio: medians of the rounds."""

    ours: float
    evaluate: float
    ratio: float


def rollout_cost(program: Any, num_examples: int, rounds: int, num_threads: int = 8) -> RolloutCost:
    """Map against `dspy.Evaluate` at zero latency, in turn."""
    examples = [
        dspy.Example(question=f"question {i}: {'word ' * 100}").with_inputs("question") for i in range(num_examples)
    ]
    stage = MapStage(ProgramCopier(program), Scorer(_metric), ThreadExecutor(num_threads))
    evaluate = dspy.Evaluate(devset=examples, metric=_metric, num_threads=num_threads, display_progress=False)
    lm = ScriptedLM([], default=_reply)

    def timed(function: Callable[[], Any]) -> float:
        gc.collect()
        started = time.process_time()
        function()
        return (time.process_time() - started) / num_examples * 1000

    pairs = []
    with quiet(), dspy.context(lm=lm):
        for _ in range(rounds + 1):
            ours = timed(lambda: stage.run([(program, examples)]))
            pairs.append((ours, timed(lambda: evaluate(program))))
    warm = pairs[1:]
    return RolloutCost(
        statistics.median(ours for ours, _ in warm),
        statistics.median(theirs for _, theirs in warm),
        statistics.median(ours / theirs for ours, theirs in warm),
    )


# Imports ----------------------------------------------------------------------------------------------------


def import_seconds(statement: str, repeats: int) -> tuple[float, float]:
    """The least processor and wall seconds of a statement after `import dspy`, each time in a new process."""
    code = (
        f"import time, dspy\nc, w = time.process_time(), time.perf_counter()\n{statement}\n"
        "print(time.process_time() - c, time.perf_counter() - w)"
    )
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    taken = []
    for _ in range(repeats + 1):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        taken.append([float(number) for number in run.stdout.split()])
    # The first one may have had to compile the files.
    return min(cpu for cpu, _ in taken[1:]), min(wall for _, wall in taken[1:])


# A large reduce tree ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeCost:
    """The tree over some records.

    Attributes:
        calls: Calls by level.
        text: Characters of the records.
        peak: The most bytes in use at once, all steps together.
        seconds: Processor time by step.
    """

    calls: tuple[int, ...]
    text: int
    peak: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def _records(count: int) -> list[ReflectionRecord]:
    return [
        ReflectionRecord(
            {
                "Inputs": {"question": f"question {i}: {'word ' * 200}"},
                "Generated Outputs": {"answer": f"answer {i}"},
                "Feedback": f"Lesson {i}: {'because ' * 40}",
            },
            source=i,
        )
        for i in range(count)
    ]


def _call(call: NodeCall) -> ProposalNode:
    """A reflection call that takes no time: its prompt is what it reads."""
    prompt = "".join(map(str, call.items))
    output = f"proposal {call.id} of {len(prompt)}"
    return ProposalNode(call.id, call.task.component, call.inputs, output=output, prompt=prompt, raw_output=output)


def _pass(records: list[ReflectionRecord], max_context_tokens: int) -> tuple[Reduction, dict[str, float]]:
    """From the records to the step on disk and back to the examples."""
    seconds: dict[str, float] = {}
    n = len(records)

    def timed(name: str, function: Callable[[], Any]) -> Any:
        started = time.process_time()
        made = function()
        seconds[name] = time.process_time() - started
        return made

    data = timed("as_data", lambda: [as_data(record) for record in records])
    task = ReductionTask("self", "Answer.", data, random.Random(0), candidate={"self": "Answer."})
    aggregator = TreeAggregator(max_context_tokens=max_context_tokens)
    reduction: Reduction = timed("tree", lambda: aggregator.aggregate([task], _call, ThreadExecutor(64))[0])
    scores = (0.0,) * n
    step = StepRecord(1, 0, tuple(range(n)), n, 1, 2, scores, scores, True, 1, "", (reduction,), 1.0, 1.0)
    found = timed("trace_back", lambda: trace_back([step], 1, "self"))
    if len(found[0].fed) != n:
        raise RuntimeError(f"Only {len(found[0].fed)} of {n} records reached the root.")
    timed("to_dict", step.to_dict)
    with tempfile.TemporaryDirectory() as folder:
        timed("append", lambda: StepLog(folder).append(step))
    return reduction, seconds


def tree_cost(num_records: int, max_context_tokens: int, repeats: int) -> TreeCost:
    """The tree over so many records: the least processor time of the repeats, and the peak of one more pass."""
    records = _records(num_records)
    passes = []
    for _ in range(repeats):
        gc.collect()
        passes.append(_pass(records, max_context_tokens))
    gc.collect()
    tracemalloc.start()
    reduction, _ = _pass(records, max_context_tokens)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    levels = Counter(int(node.id.split(".")[0]) for node in reduction.nodes)
    names = passes[0][1]
    return TreeCost(
        calls=tuple(levels[level] for level in sorted(levels)),
        text=sum(len(str(record)) for record in records),
        peak=peak,
        seconds={name: min(seconds[name] for _, seconds in passes) for name in names},
    )


def growth(small: float, large: float, times: float) -> float:
    """The exponent with which a cost grows: 1 is linear, 2 is quadratic."""
    return math.log(large / small) / math.log(times)
