"""The simulated language model of `speed.py`: it takes its time, and logs every call."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import dspy

from dspy_combee.testing import SimulatedLM

_INVOICE = re.compile(r"Invoice no\. (\d+)")


@dataclass(frozen=True)
class Latency:
    """Seconds that a call takes, before they are divided.

    Attributes:
        factor: What they are divided by.
        shortest: The shortest rollout; rollouts are uniform.
        longest: The longest rollout.
        reflection: For each reflection call.
        per_token: For each token of its reply.
    """

    factor: float
    shortest: float = 0.2
    longest: float = 1.0
    reflection: float = 2.0
    per_token: float = 0.02

    def rollout_seconds(self, rng: random.Random) -> float:
        return rng.uniform(self.shortest, self.longest) / self.factor

    def reflection_seconds(self, output_tokens: int) -> float:
        return (self.reflection + self.per_token * output_tokens) / self.factor

    def __str__(self) -> str:
        return (
            f"rollout uniform in {self.shortest:g} to {self.longest:g} s, reflection {self.reflection:g} s + "
            f"{self.per_token:g} s per output token"
        )


@dataclass(frozen=True)
class LoggedCall:
    """One call: `rollout`, `propose`, `merge`, or `apart` (validation and held-out examples, which take no time).

    `drawn` is how long it was to take, without the work and the waiting of this process.
    """

    kind: str
    start: float
    end: float
    drawn: float


class TimedEngine:
    """An engine whose calls take the time that `latency` says, the work of the simulation included.

    Args:
        engine: Answers.
        latency: How long a call takes; None for no time at all, and no log.
        timed: The invoice numbers whose rollouts take time.
        seed: Seed of the rollouts' times.
    """

    def __init__(self, engine: Any, latency: Latency | None, timed: frozenset[str], seed: int) -> None:
        self.engine = engine
        self.latency = latency
        self.timed = timed
        self.rng = random.Random(seed)
        self.log: list[LoggedCall] = []
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> TimedEngine:
        return self

    def complete(self, request: Any) -> Any:
        start = time.monotonic()
        response = self.engine.complete(request)
        if self.latency is None:
            return response
        kind = _kind_of(request, self.timed)
        drawn = 0.0
        if kind == "rollout":
            with self.lock:
                drawn = self.latency.rollout_seconds(self.rng)
        elif kind != "apart":
            drawn = self.latency.reflection_seconds(response.usage.output_tokens)
        time.sleep(max(0.0, start + drawn - time.monotonic()))
        self.log.append(LoggedCall(kind, start, time.monotonic(), drawn))
        return response

    def stream(self, request: Any) -> Any:
        raise NotImplementedError("This engine does not stream.")

    def close(self) -> None:
        pass


def _kind_of(request: Any, timed: frozenset[str]) -> str:
    system = request.system if isinstance(request.system, str) else ""
    if "new_instruction" in system:
        return "merge" if "proposed_instructions" in system else "propose"
    text = request.messages[-1].parts[-1].text
    found = _INVOICE.search(text)
    return "rollout" if found is not None and found.group(1) in timed else "apart"


def invoice_numbers(examples: Iterable[Any]) -> frozenset[str]:
    return frozenset(found.group(1) for e in examples if (found := _INVOICE.search(e.invoice)) is not None)


def timed_lm(latency: Latency | None, trainset: Sequence[Any] = (), seed: int = 0) -> Any:
    """A simulated student and reflection model; `lm.engine.log` has the calls."""
    engine = TimedEngine(SimulatedLM(seed).engine, latency, invoice_numbers(trainset), seed)
    return dspy.LM("simulated/timed", engine=engine, cache=False, num_retries=0)
