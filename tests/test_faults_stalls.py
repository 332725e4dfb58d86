"""What never returns, and Ctrl-C: rollouts, reflection calls and metrics that stall.

Run as a module, this file is the process that is interrupted, or that has to end beside what it has given up.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import dspy
import pytest

from .lessons import (
    Chain,
    answer,
    instruction,
    is_level_1,
    is_reflection,
    learn,
    learning_lm,
    metric,
    numbers_in,
    write_down,
)

FOREVER = 100.0
HANG = 60.0
TIMEOUT = 3


@pytest.fixture
def released():
    """An event that what stalls waits for; it comes with the end of the test."""
    learn(learning_lm(), max_metric_calls=24)  # What is imported at first use takes no rollout's time.
    event = threading.Event()
    yield event
    event.set()


class Counting:
    """The metric, with the questions that it scored."""

    def __init__(self):
        self.scored = []

    def __call__(self, gold, pred, trace=None, pred_name=None, pred_trace=None):
        if pred_name is None:
            self.scored.append(gold.number)
        return metric(gold, pred, trace, pred_name, pred_trace)


def asks(number):
    """Whether a prompt is a rollout on this question."""
    return lambda prompt: (
        not is_reflection(prompt) and prompt.question.rstrip().startswith(f"[[ ## question ## ]]\nquestion {number}\n")
    )


def test_a_slow_rollout_is_waited_for_and_run_once():
    """It takes 10 times as long as the others."""
    counting, asked = Counting(), Counter()

    def slow(prompt):
        asked["slow"] += 1
        time.sleep(0.2)
        return answer(prompt)

    def quick(prompt):
        time.sleep(0.02)
        return answer(prompt)

    lm = learning_lm((asks(3), slow), (lambda prompt: not is_reflection(prompt), quick))
    program = learn(lm, n_train=6, n_val=4, metric=counting)
    whole = learn(learning_lm(), n_train=6, n_val=4)
    assert instruction(program) == instruction(whole)
    assert program.detailed_results.spent == whole.detailed_results.spent
    assert asked["slow"] == Counter(counting.scored)[3]
    assert len(counting.scored) == program.detailed_results.total_metric_calls


def test_a_rollout_that_never_returns_has_failed_and_its_record_says_so(released, caplog):
    counting = Counting()

    def never(prompt):
        released.wait(FOREVER)
        return answer(prompt)

    lm = learning_lm((asks(3), never))
    options = {"n_train": 6, "n_val": 2, "max_metric_calls": 16, "failure_score": -1.0, "num_threads": 3}
    program = learn(lm, metric=counting, rollout_timeout=TIMEOUT, **options)
    results = program.detailed_results
    assert results.total_metric_calls == 16
    # Each rollout is scored once, and this one never.
    assert Counter(counting.scored) == {0: 4, 1: 4, 2: 2, 4: 2, 5: 2}
    (step,) = results.steps
    failed = [score for i, score in zip(step.minibatch_ids, step.scores_before, strict=True) if i == 3]
    assert failed == [-1.0]
    prompts = [node.prompt for node in step.nodes]
    assert any("question 3" in prompt and "took longer than 3 seconds" in prompt for prompt in prompts)
    assert numbers_in(instruction(program)) == {0, 1, 2, 4, 5}

    released.set()
    deadline = time.monotonic() + HANG
    while len(lm.calls) < 16 + len(step.nodes) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # A call is counted before its rollout would be scored.
    assert 3 not in counting.scored, "what ends late is not scored"


def test_the_call_that_a_rollout_hangs_in_is_its_last_step(released):
    """The second predictor of a chain hangs; it gets the record, with its own inputs."""

    def never(prompt):
        released.wait(FOREVER)
        return answer(prompt)

    hangs = (lambda prompt: "answer" in prompt.output_fields and "question 2" in prompt.question, never)
    sizes = {"n_train": 4, "n_val": 1, "reflection_minibatch_size": 4, "max_metric_calls": 10}
    program = learn(learning_lm(hangs), Chain(), component_selector="all", rollout_timeout=TIMEOUT, **sizes)
    (step,) = program.detailed_results.steps
    second = [node.prompt for node in step.nodes if node.component == "second"]
    told = [prompt for prompt in second if "took longer" in prompt]
    assert told
    assert all("question 2" in prompt and "the call did not end" in prompt for prompt in told)


def test_a_reflection_call_that_never_returns_is_left_out(released, caplog):
    hung = []

    def never(prompt):
        if not hung:
            hung.append(prompt)
            released.wait(FOREVER)
        return write_down(prompt)

    lm = learning_lm((is_level_1, never))
    options = {"n_train": 9, "n_val": 2, "reflection_minibatch_size": 9, "num_groups": 3, "max_metric_calls": 22}
    program = learn(lm, reflection_timeout=TIMEOUT, **options)
    (step,) = program.detailed_results.steps
    assert [node.error for node in step.nodes if node.error] == ["the reflection call took longer than 3 seconds"]
    assert step.accepted
    assert len(hung) == 1, "it is not made again"


def test_feedback_that_never_comes_is_the_score_alone(released, caplog):
    def judge(gold, pred, trace=None, pred_name=None, pred_trace=None):
        if pred_name is not None and gold.number == 3:
            released.wait(FOREVER)
        return metric(gold, pred, trace, pred_name, pred_trace)

    options = {"n_train": 6, "n_val": 2, "max_metric_calls": 16}
    program = learn(learning_lm(), metric=judge, rollout_timeout=TIMEOUT, **options)
    assert numbers_in(instruction(program)) == {0, 1, 2, 4, 5}
    assert caplog.text.count("took longer than 3 seconds for its feedback") == 1
    (step,) = program.detailed_results.steps
    assert any("This trajectory got a score of 0.0." in node.prompt for node in step.nodes)


# In a process of their own -----------------------------------------------------------------------------------


def stalls(log_dir):
    """A rollout and a reflection call sleep for an hour; the run ends without them, and then the process."""

    def never(prompt):
        time.sleep(3600)

    once = iter([3600])
    lm = learning_lm(
        (asks(3), never),
        (is_level_1, lambda prompt: time.sleep(next(once, 0)) or write_down(prompt)),
    )
    learn(lm, n_train=6, n_val=2, max_metric_calls=16, rollout_timeout=TIMEOUT, reflection_timeout=TIMEOUT)
    print("ended", flush=True)


INTERRUPTED = {"n_train": 12, "n_val": 4, "max_metric_calls": 40}


def interrupted(log_dir):
    """From the second step on each rollout takes 3 seconds; the caller sends SIGINT while they are in flight."""
    logging.basicConfig(level=logging.WARNING, format="LOG %(message)s", stream=sys.stdout)
    ended = []
    waiting = threading.Semaphore(0)

    def rollout(prompt):
        if second_step.is_set():
            waiting.release()
            time.sleep(3)
            ended.append(prompt)
        return answer(prompt)

    second_step = threading.Event()

    def tell():
        for _ in range(4):
            waiting.acquire()
        print("in flight", flush=True)

    threading.Thread(target=tell, daemon=True).start()
    lm = learning_lm((lambda prompt: not is_reflection(prompt), rollout))
    try:
        learn(lm, log_dir=log_dir, step_callbacks=[lambda step: second_step.set()], **INTERRUPTED)
    except KeyboardInterrupt as error:
        print(f"back after {len(ended)} rollouts", flush=True)
        print(f"best {instruction(error.best_program)}", flush=True)


def start(case, *arguments):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.test_faults_stalls", case, *arguments],
        cwd=Path(__file__).parent.parent,
        env=os.environ.copy(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_what_was_given_up_does_not_keep_the_process_from_ending():
    process = start("stalls", "")
    told, error = process.communicate(timeout=HANG)
    assert (process.returncode, told) == (0, "ended\n"), error[-2000:]


def test_ctrl_c_comes_back_while_rollouts_are_in_flight_and_the_run_can_go_on(tmp_path):
    process = start("interrupted", str(tmp_path))
    assert process.stdout.readline() == "in flight\n", process.stderr.read()[-2000:]
    process.send_signal(signal.SIGINT)
    told, error = process.communicate(timeout=HANG)
    assert process.returncode == 0, error[-2000:]
    lines = told.splitlines()
    assert [line for line in lines if "Interrupted" in line] == [
        f"LOG Interrupted; state saved in {tmp_path}: compile with the same log_dir goes on from there."
    ]
    assert "back after 0 rollouts" in lines, "the rollouts in flight take three seconds, and none was waited for"
    best = next(line.removeprefix("best ") for line in lines if line.startswith("best"))
    assert len(numbers_in(best)) == 6, "what the first step learned"

    resumed, whole = learn(learning_lm(), log_dir=str(tmp_path), **INTERRUPTED), learn(learning_lm(), **INTERRUPTED)
    assert instruction(resumed) == instruction(whole)
    assert resumed.detailed_results.spent == whole.detailed_results.spent


def test_without_a_log_dir_the_line_says_what_would_help(caplog):
    def interrupt(gold, pred, trace=None, pred_name=None, pred_trace=None):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        learn(learning_lm(), metric=interrupt)
    assert isinstance(caught.value.best_program, dspy.Predict)
    (line,) = [record.message for record in caplog.records if "Interrupted" in record.message]
    assert "log_dir" in line


def test_an_interrupt_before_anything_is_saved_says_so(tmp_path, caplog):
    def interrupt(gold, pred, trace=None, pred_name=None, pred_trace=None):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(learning_lm(), metric=interrupt, log_dir=str(tmp_path))
    (line,) = [record.message for record in caplog.records if "Interrupted" in record.message]
    assert "state saved" not in line


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
