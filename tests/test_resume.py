"""A run that was killed goes on with the same `log_dir` as if it had not been.

The killed runs die in processes of their own: this file, run as a module, imports the package once and forks one
child for each of them.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from gepa.strategies.eval_policy import FullEvaluationPolicy

from dspy_combee import PowerLawBatchSize

from .clocks import CallClock
from .lessons import instruction, learn, learning_lm, metric

N_TRAIN, N_VAL, BUDGET = 40, 6, 200
KINDS = ("fixed", "replayed", "auto")
HOWS = ("saved", "ended")
STEPS = (1, 2, 3, 4)


class Counting:
    """The metric, with a count of its scoring calls."""

    def __init__(self):
        self.calls = 0
        self._lock = threading.Lock()

    def __call__(self, gold, pred, trace=None, pred_name=None, pred_trace=None):
        with self._lock:
            self.calls += pred_name is None
        return metric(gold, pred, trace, pred_name, pred_trace)


class Dies:
    """A GEPA callback that ends the process, without any clean-up, at the k-th event of a kind."""

    def __init__(self, how, step):
        self.how = how
        self.left = step

    def _count(self, how):
        if how == self.how:
            self.left -= 1
            if self.left == 0:
                os._exit(0)

    def on_state_saved(self, event):
        self._count("saved")

    def on_iteration_end(self, event):
        self._count("ended")


def start(kind, log_dir, callbacks=(), counting=metric, clock=None, **options):
    clock = clock or CallClock(1, 20)
    sizes = {
        "fixed": 6,
        "replayed": [6, 9, 4, 12, 3, 7],
        "auto": PowerLawBatchSize(candidates=(2, 4, 8), clock=clock),
    }
    kept = {
        "reflection_minibatch_size": sizes[kind],
        "max_metric_calls": BUDGET,
        "gepa_kwargs": {"callbacks": list(callbacks)},
        **options,
    }
    lm = learning_lm(latency=clock.latency)
    return learn(lm, n_train=N_TRAIN, n_val=N_VAL, metric=counting, log_dir=log_dir, num_threads=3, **kept)


def die(kind, how, step, log_dir):
    """Run until the process ends; with `how` "map", SIGKILL comes at the step-th rollout."""
    if how != "map":
        start(kind, log_dir, [Dies(how, step)])
        return
    clock = CallClock(1, 20)
    latency = clock.latency

    def deadly(prompt, rng):
        if clock.rollouts >= step:
            os.kill(os.getpid(), signal.SIGKILL)
        return latency(prompt, rng)

    clock.latency = deadly
    start(kind, log_dir, clock=clock)


def main(cases):
    for *case, log_dir in cases:
        child = os.fork()
        if child == 0:
            die(*case, log_dir)
            os._exit(1)  # It was to die before.
        _, status = os.waitpid(child, 0)
        expected = -signal.SIGKILL if case[1] == "map" else 0
        assert os.waitstatus_to_exitcode(status) == expected, (case, status)


# --- the tests ---------------------------------------------------------------------------------------------

CASES = [(kind, how, step) for kind in KINDS for how in HOWS for step in STEPS]
IN_MAP = [("auto", "map", rollouts) for rollouts in (3, 8, 25)]  # in the seed's validation, step 1 and step 3


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The log folders of the killed runs."""
    root = tmp_path_factory.mktemp("killed")
    folders = {case: str(root / "-".join(map(str, case))) for case in [*CASES, *IN_MAP]}
    cases = [[*case, folder] for case, folder in folders.items()]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.test_resume", json.dumps(cases)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folders


@pytest.fixture
def folder(killed, tmp_path):
    """A copy of the log folder of a killed run."""
    return lambda *case: str(shutil.copytree(killed[case], tmp_path / "log"))


@pytest.fixture(scope="module")
def unbroken():
    """The same runs as they are when nothing happens to them."""
    runs: dict[str, Any] = {}

    def of(kind):
        if kind not in runs:
            counting = Counting()
            runs[kind] = start(kind, None, counting=counting), counting
        return runs[kind]

    return of


def assert_equal_runs(resumed, whole):
    """The same minibatches, sizes, programs and account."""
    a, b = resumed.detailed_results, whole.detailed_results
    assert instruction(resumed) == instruction(whole)
    assert [instruction(c) for c in a.candidates] == [instruction(c) for c in b.candidates]
    assert a.parents == b.parents
    assert a.batch_sizes == b.batch_sizes
    own = [(step.iteration, step.minibatch_ids, step.size_reason, step.parent) for step in a.steps]
    others = [(step.iteration, step.minibatch_ids, step.size_reason, step.parent) for step in b.steps]
    assert own == others
    assert a.spent == b.spent
    assert a.total_metric_calls == b.total_metric_calls


@pytest.mark.parametrize(("kind", "how", "step"), CASES)
def test_a_killed_run_goes_on_as_if_it_had_not_been(kind, how, step, folder, unbroken):
    whole, whole_counting = unbroken(kind)
    counting = Counting()
    resumed = start(kind, folder(kind, how, step), counting=counting)
    assert_equal_runs(resumed, whole)

    # The k-th save comes before step k, and the k-th end after it but before the next save.
    assert whole_counting.calls == whole.detailed_results.spent.metric_calls
    before = whole.detailed_results.steps[: step - 1]
    paid = N_VAL + sum(len(s.scores_before) + len(s.scores_after) + N_VAL * s.accepted for s in before)
    assert counting.calls == whole_counting.calls - paid, "the seed's validation is not run again"


@pytest.mark.parametrize(("kind", "how", "rollouts"), IN_MAP)
def test_a_run_killed_in_the_middle_of_map(kind, how, rollouts, folder, unbroken):
    assert_equal_runs(start(kind, folder(kind, how, rollouts)), unbroken(kind)[0])


@pytest.mark.parametrize("step", STEPS)
def test_nothing_is_profiled_twice(step, folder, unbroken):
    """(2, 4, 8) and a cold step; each is run once, in one process or the other."""
    profiled: list[int] = []

    class Watch:
        def on_minibatch_sampled(self, event):
            profiled.append(len(event["minibatch_ids"]))

    whole = unbroken("auto")[0].detailed_results
    assert [s.n for s in whole.steps if s.profiling] == [2, 2, 4, 8]
    resumed = start("auto", folder("auto", "saved", step), [Watch()]).detailed_results
    assert profiled == list(whole.batch_sizes[step - 1 :])
    assert [s.n for s in resumed.steps if s.profiling] == [2, 2, 4, 8]
    assert resumed.spent.metric_calls_in("profiling") == whole.spent.metric_calls_in("profiling")


def test_a_finished_run_has_nothing_to_do_again(tmp_path, unbroken):
    start("auto", str(tmp_path))
    counting = Counting()
    again = start("auto", str(tmp_path), counting=counting)
    assert counting.calls == 0
    whole = unbroken("auto")[0]
    assert instruction(again) == instruction(whole)
    assert again.detailed_results.spent == whole.detailed_results.spent
    assert again.detailed_results.batch_sizes == whole.detailed_results.batch_sizes
    assert again.detailed_results.batch_size_fit == whole.detailed_results.batch_size_fit


def test_a_resumed_run_may_have_a_larger_budget(tmp_path):
    start("fixed", str(tmp_path), max_metric_calls=100)
    counting = Counting()
    more = start("fixed", str(tmp_path), counting=counting).detailed_results
    assert 100 < more.total_metric_calls == more.spent.metric_calls <= BUDGET
    assert counting.calls > 0


@pytest.mark.parametrize("kinds", [("fixed", "auto"), ("auto", "fixed"), ("auto", "replayed"), ("replayed", "auto")])
def test_a_resumed_run_may_have_another_kind_of_size(kinds, tmp_path):
    start(kinds[0], str(tmp_path), max_metric_calls=100)
    more = start(kinds[1], str(tmp_path)).detailed_results
    assert more.steps
    assert more.total_metric_calls <= BUDGET


def test_a_resumed_run_with_an_evaluation_policy_of_its_own(tmp_path):
    class Own(FullEvaluationPolicy):
        def get_seed_eval_batch(self, loader):
            return list(loader.all_ids())[:2]

    def run(log_dir, budget, counting):
        options = {"max_metric_calls": budget, "gepa_kwargs": {"val_evaluation_policy": Own()}}
        return start("fixed", log_dir, counting=counting, **options).detailed_results

    whole, first, second = Counting(), Counting(), Counting()
    result = run(None, BUDGET, whole)
    run(str(tmp_path), 80, first)
    resumed = run(str(tmp_path), BUDGET, second)
    assert result.total_metric_calls == whole.calls
    assert resumed.total_metric_calls == first.calls + second.calls
    assert resumed.spent.metric_calls == first.calls + second.calls


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
