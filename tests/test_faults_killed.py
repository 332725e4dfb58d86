"""Runs that are killed by SIGKILL in the middle of Reduce and of a write go on with the same `log_dir`.

`test_resume.py` kills them in Map and between steps. Run as a module, this file starts and kills one child for each
case.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import cloudpickle
import dspy
import pytest

from dspy_combee.records.step_log import FILE_NAME, StepLog, read_steps

from .lessons import instruction, is_level_1, is_merge, learn, learning_lm, write_down
from .test_resume import Counting, assert_equal_runs

OPTIONS = {"n_train": 12, "n_val": 4, "max_metric_calls": 70, "num_threads": 3, "reflection_minibatch_size": 6}


def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
    """Its feedback takes several bytes a character."""
    return dspy.Prediction(score=float(pred.answer == "right"), feedback=f"覚えてください: rule-answer-{gold.number}.")


class CountingFeedback(Counting):
    def __call__(self, gold, pred, trace=None, pred_name=None, pred_trace=None):
        super().__call__(gold, pred, trace, pred_name, pred_trace)
        return metric(gold, pred, trace, pred_name, pred_trace)


def run(log_dir, lm=None, counting=metric):
    return learn(lm or learning_lm(), metric=counting, log_dir=log_dir, **OPTIONS)


# --- the process that is killed ----------------------------------------------------------------------------------


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def in_reduce(matches, n, log_dir):
    """At the n-th such call."""
    seen = []

    def deadly(prompt):
        seen.append(prompt)
        if len(seen) == n:
            kill()
        return write_down(prompt)

    run(log_dir, learning_lm((matches, deadly)))


def in_state_write(n, log_dir):
    """Half of the n-th state is in the temporary file."""
    whole, left = cloudpickle.dump, [n]

    def dump(value, file):
        left[0] -= 1
        if left[0]:
            whole(value, file)
            return
        data = cloudpickle.dumps(value)
        file.write(data[: len(data) // 2])
        file.flush()
        kill()

    cloudpickle.dump = dump
    run(log_dir)


def in_step_write(n, log_dir):
    """Of the n-th line a part is in the file that ends within a character."""
    whole, left = StepLog.append, [n]

    def append(log, record):
        left[0] -= 1
        if left[0]:
            whole(log, record)
            return
        line = json.dumps(record.to_dict(), ensure_ascii=False, default=str).encode()
        with log.path.open("ab") as file:
            file.write(line[: line.index("覚".encode()) + 1])
        kill()

    StepLog.append = append
    run(log_dir)


CASES = {
    "level 1 of step 1": lambda log_dir: in_reduce(is_level_1, 2, log_dir),
    "merge of step 2": lambda log_dir: in_reduce(is_merge, 2, log_dir),
    "first state": lambda log_dir: in_state_write(1, log_dir),
    "state after step 2": lambda log_dir: in_state_write(3, log_dir),
    "line of step 1": lambda log_dir: in_step_write(1, log_dir),
    "line of step 2": lambda log_dir: in_step_write(2, log_dir),
}


def main(root):
    for name, die in CASES.items():
        child = os.fork()
        if child == 0:
            die(str(Path(root) / name))
            os._exit(1)  # It was to die before.
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (name, status)


# --- the tests ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    root = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-W", "ignore", "-m", "tests.test_faults_killed", str(root)]
    here = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=here, env=os.environ.copy(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.fixture(scope="module")
def whole():
    counting = CountingFeedback()
    program = run(None, counting=counting)
    assert len(program.detailed_results.steps) >= 3
    return program, counting.calls


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_killed_in_the_middle_goes_on(case, killed, whole, caplog):
    log_dir = killed / case
    program, calls = whole
    steps = program.detailed_results.steps
    leftover = {path.name for path in log_dir.glob("*.tmp")}
    assert leftover == ({"gepa_state.bin.tmp"} if "state" in case else set())

    counting = CountingFeedback()
    resumed = run(str(log_dir), counting=counting)
    assert_equal_runs(resumed, program)
    ended = {"level 1 of step 1": 0, "merge of step 2": 1, "state after step 2": 1, "line of step 2": 1}.get(case, 0)
    paid = 0 if case == "first state" else 4 + sum(cost(step) for step in steps[:ended])
    assert counting.calls == calls - paid
    told = [step.to_dict() for step in read_steps(log_dir)]
    assert [step["iteration"] for step in told] == [step.iteration for step in steps]
    assert "�" not in (log_dir / FILE_NAME).read_text(encoding="utf-8")
    assert ("is incomplete" in caplog.text) == ("line" in case)


def cost(step):
    return len(step.scores_before) + len(step.scores_after) + 4 * step.accepted


@pytest.mark.parametrize("junk", [b"", b"\x80\x05", b'{"iteration": 1, "parent', "覚".encode()[:2]], ids=repr)
def test_remains_of_writes_that_were_cut_short_do_no_harm(junk, tmp_path, whole):
    run(str(tmp_path))
    for name in ("gepa_state.bin.tmp", "steps.tmp", "run_log.json.tmp"):
        (tmp_path / name).write_bytes(junk)
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(junk)
    again = run(str(tmp_path))
    assert instruction(again) == instruction(whole[0])
    assert_equal_runs(again, whole[0])


def test_a_line_in_the_middle_that_is_no_step_is_named(tmp_path):
    run(str(tmp_path))
    path = tmp_path / FILE_NAME
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text(lines[0] + "{}\n" + "".join(lines[1:]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"steps\.jsonl:2 is no step record"):
        run(str(tmp_path))


if __name__ == "__main__":
    main(sys.argv[1])
