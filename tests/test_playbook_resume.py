"""A run that is killed and goes on: nothing is paid twice, and the playbook is the one of the unbroken run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import dspy
import pytest

from dspy_combee import PowerLawBatchSize

from .clocks import LookClock
from .lessons import Chain, examples
from .playbook_lessons import all_text, contents, learn, make, playbook_lm

STATE = "playbook_state.json"

# Kills itself in the given phase of the third step: when the model is asked, or while the state is written.
SCRIPT = """
import json, os, signal, sys
sys.path.insert(0, {root!r})
import dspy
from tests.lessons import Chain, examples
from tests.playbook_lessons import all_text, is_curator, is_reflector, learn, playbook_lm

phase, log_dir = sys.argv[1], sys.argv[2]
steps = []

def dies(prompt):
    asked = "curate" if is_curator(prompt) else "reflect" if is_reflector(prompt) else "map"
    if phase == asked and len(steps) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return False

if phase == "save":
    replace = os.replace
    def killed_replace(source, target):
        if str(target).endswith("playbook_state.json") and len(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
    os.replace = killed_replace

lm = playbook_lm((dies, ""))
program = learn(
    lm, Chain(), n_train=12, valset=examples(4), minibatch_size=4, num_epochs=2, log_dir=log_dir,
    step_callbacks=[steps.append], num_threads=3,
)
print(json.dumps([all_text(program), program.detailed_results.spent.to_dict(), len(lm.calls)]))
"""


def run_script(phase, log_dir, **env):
    root = str(Path(__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(root=root), phase, str(log_dir)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **env},
    )


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    run = run_script("never", tmp_path_factory.mktemp("unbroken"), PYTHONHASHSEED="1")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("phase", ["map", "reflect", "curate", "save"])
def test_a_killed_run_goes_on_as_if_unbroken(phase, unbroken, tmp_path):
    killed = run_script(phase, tmp_path)
    assert killed.returncode == -9, killed.stderr
    saved = json.loads((tmp_path / STATE).read_text(encoding="utf-8"))["state"]
    assert saved["step"] == 2
    lm = playbook_lm()
    program = learn(lm, Chain(), n_train=12, valset=examples(4), minibatch_size=4, num_epochs=2, log_dir=tmp_path)
    text, spent, calls = unbroken
    assert all_text(program) == text
    assert program.detailed_results.spent.to_dict() == spent
    assert [step.iteration for step in program.detailed_results.steps] == [1, 2, 3, 4, 5, 6]
    # What the steps before had asked is not asked again.
    assert len(lm.calls) == calls - saved["reflection"]["calls"] - sum(
        u["calls"] for u in saved["spent"]["usage_by_phase"].values()
    )


def test_a_finished_run_costs_nothing_more(tmp_path):
    first = learn(playbook_lm(), valset=examples(4), log_dir=tmp_path)
    lm = playbook_lm()
    again = learn(lm, valset=examples(4), log_dir=tmp_path)
    assert lm.calls == []
    assert all_text(again) == all_text(first)
    assert again.detailed_results.best_score == first.detailed_results.best_score
    assert again.detailed_results.batch_sizes == first.detailed_results.batch_sizes


def test_the_validation_of_the_start_is_not_paid_twice(tmp_path):
    class Stop(BaseException):
        pass

    def stops(prompt):
        if "question 0" not in prompt.question:
            raise Stop
        return False

    lm = playbook_lm((stops, ""))
    with pytest.raises(Stop):
        learn(lm, valset=examples(1), log_dir=tmp_path)
    program = learn(playbook_lm(), valset=examples(1), log_dir=tmp_path)
    steps = program.detailed_results.steps
    assert program.detailed_results.spent.metric_calls_in("validation") == 1 + sum(step.accepted for step in steps)


def test_the_controller_goes_on_with_what_it_measured(tmp_path):
    def options():
        return {"n_train": 40, "minibatch_size": PowerLawBatchSize(clock=LookClock()), "num_epochs": 3}

    class Stop(BaseException):
        pass

    def stop(step):
        if step.iteration == 4:
            raise Stop

    unbroken_run = learn(playbook_lm(), **options())
    with pytest.raises(Stop) as caught:
        learn(playbook_lm(), log_dir=tmp_path, step_callbacks=[stop], **options())
    assert contents(caught.value.best_program)
    resumed = learn(playbook_lm(), log_dir=tmp_path, **options())
    assert resumed.detailed_results.batch_sizes == unbroken_run.detailed_results.batch_sizes
    assert all_text(resumed) == all_text(unbroken_run)


def test_a_state_of_another_run_is_refused(tmp_path):
    learn(playbook_lm(), log_dir=tmp_path)
    with pytest.raises(ValueError, match="another run, which differs in \\['seed', 'trainset'\\]"):
        learn(playbook_lm(), log_dir=tmp_path, seed=5, n_train=8)
    with pytest.raises(ValueError, match="'program'"):
        learn(playbook_lm(), dspy.Predict(dspy.Signature("question -> answer", "Be brief.")), log_dir=tmp_path)


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '{"format": "x"}', '{"format": "dspy_combee.playbook_state"}'])
def test_a_file_that_is_no_state_is_refused(text, tmp_path):
    (tmp_path / STATE).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="no state of a PlaybookOptimizer run"):
        learn(playbook_lm(), log_dir=tmp_path)


def test_learn_leaves_the_log_dir_alone(tmp_path):
    lm = playbook_lm()
    with dspy.context(lm=lm):
        make(lm, log_dir=tmp_path).learn(dspy.Predict("question -> answer"), examples(3))
    assert list(tmp_path.iterdir()) == []
