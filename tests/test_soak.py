"""A run of 2,000 steps in which one call in twenty fails: memory, threads and open files stay what they were."""

import gc
import json
import os
import random
import re
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import dspy
import pytest
from dspy import lm15
from dspy.clients import base_lm

from dspy_combee import CombeeOptimizer
from dspy_combee.calls.executors import Backoff, ThreadExecutor
from dspy_combee.testing import FakeEngine, FakeLM, Reply

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc"),
]

STEPS, EARLY = 2000, 200
N_TRAIN, N_VAL, N = 40, 4, 4
FAULTS = 0.05


def digest(text):
    return zlib.crc32(text.encode()) / 2**32


class Unsteady(FakeEngine):
    """Answers at random by the prompt; one call in twenty is turned away, breaks off, or cannot be read."""

    def __init__(self):
        super().__init__(keep_calls=False)
        self.lock = threading.Lock()
        self.rng = random.Random(0)
        self.calls = self.faults = 0

    def play(self, prompt):
        with self.lock:
            self.calls += 1
            fault = self.rng.random() < FAULTS
            kind = self.rng.randrange(6)
            self.faults += fault
        if fault:
            return "fault", self.fail(kind), 0.0
        if "new_instruction" in prompt.output_fields:
            known = sorted(set(re.findall(r"rule-\d+", prompt.question)))
            return "reflector", Reply({"new_instruction": f"Variant {digest(prompt)} of {known}"}), 0.0
        # An instruction is as good as it is, so that ever fewer are better than what there is.
        good = digest(prompt.system) > digest(prompt.question)
        return "student", Reply({"answer": "yes" if good else "no"}), 0.0

    def fail(self, kind):
        if kind == 0:
            raise lm15.RateLimitError("slow down")
        if kind == 1:
            raise lm15.TransportError("connection reset")
        if kind == 2:
            raise lm15.TimeoutError("no reply")
        if kind == 3:
            raise lm15.InvalidRequestError("not this prompt")
        return Reply("", reasoning="Hm.") if kind == 4 else Reply("half of a", finish_reason="length")


def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
    if digest(f"{gold.question}{pred_name}") < FAULTS:
        raise RuntimeError("no score for this one")
    return dspy.Prediction(score=float(pred.answer == "yes"), feedback=f"Remember rule-{gold.number}. " + "x" * 500)


class Gauge:
    """Resident memory in MB, threads and open files after some of the steps."""

    def __init__(self):
        self.steps = 0
        self.readings = {}

    def __call__(self, step):
        self.steps += 1
        if self.steps % EARLY:
            return
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.readings[self.steps] = {
            "memory": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
        }


def main(log_dir):
    """The run; what it prints is read by the test."""
    engine, gauge = Unsteady(), Gauge()
    lm = FakeLM("soak/lm", engine, {})
    optimizer = CombeeOptimizer(
        metric=metric,
        reflection_lm=lm,
        num_epochs=(STEPS + 10) * N / N_TRAIN,
        reflection_minibatch_size=N,
        executor=ThreadExecutor(4, Backoff(first_delay=0.0005)),
        use_merge=False,
        skip_perfect_score=False,
        rollout_timeout=60,
        reflection_timeout=60,
        step_callbacks=[gauge],
        log_dir=log_dir or None,
        track_stats=bool(log_dir),
        verbose=False,
    )
    examples = [dspy.Example(question=f"question {i}", number=i).with_inputs("question") for i in range(N_TRAIN)]
    # DSPy keeps the last 10,000 calls of the process, whatever max_history_size says.
    base_lm.MAX_HISTORY_SIZE = 100
    with dspy.context(lm=lm, max_history_size=100):
        optimizer.compile(dspy.Predict("question -> answer"), trainset=examples, valset=examples[:N_VAL])
    print(json.dumps({"calls": engine.calls, "faults": engine.faults, "readings": gauge.readings}))


@pytest.mark.parametrize("with_log_dir", [True, False])
def test_memory_threads_and_files_do_not_grow(with_log_dir, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.test_soak", str(tmp_path) if with_log_dir else ""]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["faults"] / told["calls"] == pytest.approx(FAULTS, rel=0.2)
    early, late = (told["readings"][str(step)] for step in (EARLY, STEPS))
    assert late["memory"] <= 1.1 * early["memory"], told["readings"]
    assert (late["threads"], late["files"]) == (early["threads"], early["files"]), told["readings"]


if __name__ == "__main__":
    main(sys.argv[1])
