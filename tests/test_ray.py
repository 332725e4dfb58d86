"""Rollouts on Ray, a real one: what `test_executors.py` does not hold of every executor."""

import copy
import importlib.util
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path

import dspy
import pytest
from gepa.strategies.proposal_sampling import PxNSampling

from dspy_combee import ExecutorError, ProviderError, RayExecutor, ThreadExecutor
from dspy_combee.calls import resolve_executor
from dspy_combee.calls.executors import Backoff
from dspy_combee.calls.ray_executor import _Connection
from dspy_combee.calls.remote import dumps
from dspy_combee.rollouts.feedback import Scorer
from dspy_combee.rollouts.map import MapStage, ProgramCopier

from . import playbook_lessons, ray_helpers
from .conftest import RAY_ENVIRONMENT
from .lessons import Chain, examples, learn, learning_lm, make, metric
from .openai_server import OpenAIServer, Reply
from .ray_helpers import Remote, noted, ray_executor, wait_for

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
pytestmark = [needs_ray, pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[1]


@pytest.fixture
def on_ray(local_ray):
    return ray_executor


# How the items are spread, and what is lost -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 1000, None])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_items_run_in_other_processes_as_many_as_there_are_workers_in_shards_of_at_most_a_size(on_ray, workers, size):
    executor = on_ray(3, num_workers=workers, examples_per_task=size)
    received = Remote(lambda item: os.getpid())
    sizes = []
    received.receive_results = lambda items, sent: sizes.append(len(items)) or pickle.loads(sent)
    pids = executor.map(received, range(40))
    assert os.getpid() not in pids
    assert len(set(pids)) <= workers or size == 1, "a worker may be replaced"
    most = min(size or 1000, -(-40 // min(workers, 3)))
    assert len(sizes) == -(-40 // most)
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("times", "expected"), [(1, 1), (2, "lost 1: the Ray worker that ran it was lost, twice")])
def test_a_worker_that_dies_costs_at_most_the_item_that_kills_it_twice(on_ray, tmp_path, caplog, times, expected):
    executor = on_ray(4, num_workers=2, examples_per_task=4)
    results = executor.map(Remote(ray_helpers.die, tmp_path, times, [1]), range(8))
    assert [results[0], *results[2:]] == [0, 2, 3, 4, 5, 6, 7]
    assert str(results[1]).startswith(str(expected))
    assert noted(tmp_path, "run1") == 2
    assert "A Ray worker was lost" in caplog.text
    assert "Its 4 examples are run once more" in caplog.text


def test_all_items_lost_is_an_error(on_ray, tmp_path):
    with pytest.raises(ExecutorError, match="Every example was lost"):
        on_ray(2).map(Remote(ray_helpers.die, tmp_path, 9, range(3)), range(3))


def test_an_item_that_blocks_its_process_is_ended_and_lost_alone(on_ray):
    # It never lets go of the interpreter: nothing else in its process runs.
    function = Remote(lambda item: item if item != 1 else re.match(r"(a+)+$", "a" * 60 + "b"))
    results = on_ray(2, num_workers=1).map(function, range(4), timeout=0.5, on_timeout=function.on_timeout)
    assert [results[0], *results[2:]] == [0, 2, 3]
    assert results[1].startswith("lost 1")


def test_what_the_workers_cannot_import_is_named(on_ray, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def function(item):\n    return item\n")
    monkeypatch.syspath_prepend(tmp_path)
    only_here = importlib.import_module("only_here")
    with pytest.raises(ExecutorError, match=r"cannot run the rollouts.*only_here.*runtime_env"):
        on_ray(2).map(Remote(only_here.function), range(3))


# Rollouts ------------------------------------------------------------------------------------------------------


def roll_out(executor, program, batch, score=lambda *given: 1.0):
    with nullcontext() if dspy.settings.lm else dspy.context(lm=ray_helpers.right_lm()):
        return MapStage(ProgramCopier(program), Scorer(score), executor).run([(program, batch)])


def told(rollout):
    """All that matters in a rollout."""
    trace = [(step.name, dict(step.inputs), step.outputs and dict(step.outputs.items())) for step in rollout.trace]
    prediction = None if rollout.prediction is None else dict(rollout.prediction.items())
    return rollout.index, prediction, trace, rollout.score, rollout.error, rollout.usage.calls


@pytest.mark.parametrize("program", [Chain(), ray_helpers.Helper()], ids=["chain", "helper"])
def test_the_same_rollouts_as_on_threads(on_ray, program):
    batch = examples(9)
    here = roll_out(ThreadExecutor(4), program, batch, metric)
    there = roll_out(on_ray(4, num_workers=2, examples_per_task=2), program, batch, metric)
    assert [told(rollout) for rollout in there] == [told(rollout) for rollout in here]
    assert all(rollout.example is example for rollout, example in zip(there, batch, strict=True))
    names = [name for name, _ in program.named_predictors()]
    own = {id(step.predictor) for rollout in there for step in rollout.trace if step.name in names}
    assert len(own) == len(names), "one object for each predictor of the program, as on threads"
    assert there[0].result.feedback == here[0].result.feedback
    dumps(there)


def test_an_answer_that_cannot_travel_is_kept_as_text_with_a_warning_and_its_score_stands(on_ray, caplog):
    (rollout,) = roll_out(on_ray(2), ray_helpers.Unsendable(), examples(1))
    assert rollout.score == 1.0
    assert rollout.prediction.answer == "right"
    assert rollout.prediction.stream.startswith("<generator")
    assert rollout.prediction.pid != os.getpid()
    assert caplog.text.count("cannot pickle 'generator' object") == 1


def test_what_comes_back_changes_no_class_of_the_caller_and_what_goes_there_is_of_today(on_ray):
    class Note:
        kind = "old"

        def text(self):
            return "note"

    class Noting(dspy.Module):
        def forward(self, question):
            return dspy.Prediction(note=Note(), kind=Note.kind)

    before = Note.text, Noting.forward
    for kind in ("old", "new"):
        Note.kind = kind
        (rollout,) = roll_out(on_ray(1, num_workers=1), Noting(), examples(1))
        assert isinstance(rollout.prediction.note, Note)
        assert rollout.prediction.kind == kind
    assert (Note.text, Noting.forward) == before


def test_a_warning_about_the_metric_is_given_here_and_once(on_ray, caplog):
    def odd(gold, *given):
        return 1 / (1 - gold.number % 2)

    rollouts = roll_out(on_ray(4, num_workers=2, examples_per_task=2), Chain(), examples(8), odd)
    assert [rollout.score for rollout in rollouts] == [1.0, 0.0] * 4
    assert caplog.text.count("The metric raised ZeroDivisionError") == 1


def test_usage_is_tracked(on_ray):
    with dspy.track_usage() as tracker:
        roll_out(on_ray(4, num_workers=2), Chain(), examples(5))
    assert len(tracker.usage_data["scripted/lm"]) == 10
    with dspy.context(track_usage=True):
        (rollout,) = roll_out(on_ray(1), Chain(), examples(1))
    assert rollout.prediction.get_lm_usage()["scripted/lm"]["prompt_tokens"] > 0


def test_usage_of_aborted_attempts_is_counted(on_ray):
    answers = iter([Reply("too much", status=429)])
    with OpenAIServer(lambda request: next(answers, "[[ ## answer ## ]]\nright")) as server:
        lm = dspy.LM("openai/gpt-4o-mini", api_base=server.api_base, api_key=server.api_key, num_retries=0, cache=False)
        with dspy.context(lm=lm):
            executor = on_ray(1, Backoff(first_delay=0.01))
            (rollout,) = roll_out(executor, dspy.Predict("question -> answer"), examples(1))
    assert rollout.score == 1.0
    assert rollout.usage.calls == 1


@pytest.mark.parametrize("memory", [True, False])
def test_a_cache_that_is_off_here_is_off_there(on_ray, memory):
    requests = []

    def handler(request):
        requests.append(request)
        return "[[ ## answer ## ]]\nright"

    dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=memory)
    with OpenAIServer(handler) as server:
        lm = dspy.LM("openai/gpt-4o-mini", api_base=server.api_base, api_key=server.api_key)
        with dspy.context(lm=lm):
            roll_out(on_ray(1, num_workers=1), dspy.Predict("question -> answer"), [examples(1)[0]] * 4)
    assert len(requests) == (1 if memory else 4)


def test_large_records_go_there_and_back(on_ray):
    text = "x" * 100_000
    batch = [dspy.Example(question=text + str(i), number=i).with_inputs("question") for i in range(2000)]
    rollouts = roll_out(on_ray(8, num_workers=2), dspy.Predict("question -> answer"), batch)
    assert [rollout.index for rollout in rollouts] == list(range(2000))
    assert all(rollout.score == 1.0 for rollout in rollouts)
    assert rollouts[-1].trace[0].inputs["question"] == batch[-1].question


# What cannot travel --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["program", "metric", "example", "setting"])
def test_what_cannot_travel_is_named_before_anything_is_spent(part, local_ray):
    lm, trainset, held = learning_lm(), examples(12), {part: threading.Lock()}
    if part == "example":
        trainset[3] = trainset[3].copy(**held)
    options = {"metric": ray_helpers.Holder(**held).score} if part == "metric" else {}
    program = ray_helpers.Holder(**held) if part == "program" else Chain()
    named = {"example": r"the example .*question 3.*\['example'\]", "setting": r"dspy\.settings\.rm"}
    with (
        dspy.context(lm=lm, rm=held["setting"] if part == "setting" else None),
        pytest.raises(TypeError, match=named.get(part, f"the {part}")),
    ):
        make(lm, executor="ray", **options).compile(program, trainset, valset=examples(3))
    assert lm.calls == []


# Whole runs ----------------------------------------------------------------------------------------------------


def learned(executor):
    lm = learning_lm()
    results = learn(
        lm,
        Chain(),
        n_train=30,
        num_threads=4,
        executor=executor,
        reflection_minibatch_size=9,
        component_selector="all",
        max_metric_calls=150,
        gepa_kwargs={"sampling_strategy": PxNSampling(1, 2)},
    ).detailed_results
    trees = [[(node.inputs, node.output) for node in step.nodes] for step in results.steps]
    return [results.to_dict()["candidates"], trees, results.val_aggregate_scores, results.spent], len(lm.calls)


def test_the_same_program_on_threads_and_on_ray_with_1_2_and_4_workers(local_ray):
    here, calls_on_threads = learned("threads")
    for workers in (1, 2, 4):
        there, calls_here = learned(RayExecutor(num_workers=workers))
        assert there == here
        assert calls_here < calls_on_threads / 3, "only reflection calls are made here"
    assert learned("ray")[0] == here


def test_the_same_playbook_on_threads_and_on_ray(local_ray):
    def learned_playbook(executor):
        lm = playbook_lessons.playbook_lm()
        return playbook_lessons.all_text(playbook_lessons.learn(lm, Chain(), 20, examples(4), executor=executor))

    here = learned_playbook("threads")
    assert "rule-answer-7" in str(here)
    assert learned_playbook(RayExecutor(num_workers=2)) == here


def test_a_worker_that_dies_in_a_run_costs_one_failed_rollout(local_ray):
    lm = learning_lm()
    with dspy.context(lm=lm):
        optimizer = make(lm, executor="ray", max_metric_calls=30)
        learned = optimizer.compile(ray_helpers.Deadly(), examples(6), valset=examples(6))
    first = learned.detailed_results.steps[0]
    assert first.scores_before[first.minibatch_ids.index(2)] == 0.0
    assert "rule-answer-1" in learned.answer.signature.instructions
    assert "rule-answer-2" not in learned.answer.signature.instructions


def test_keys_stand_neither_in_the_name_of_a_task_nor_in_a_log_nor_in_an_error(local_ray, caplog, capfd):
    key = "sk-live-0123456789abcdef"

    def refuse(request):
        return Reply(f"Incorrect API key provided: {key}", status=401)

    with OpenAIServer(refuse) as server, caplog.at_level(logging.DEBUG, logger="dspy_combee"):
        lm = dspy.LM("openai/gpt-4o-mini", api_base=server.api_base, api_key=key, num_retries=0)
        executor = RayExecutor(runtime_env={"env_vars": {"OPENAI_API_KEY": key}})
        optimizer = make(learning_lm(), executor=executor)
        with dspy.context(lm=lm), pytest.raises(ProviderError) as caught:
            optimizer.compile(Chain(), examples(6), valset=examples(3))
    texts = [repr(executor), str(caught.value), caplog.text, *capfd.readouterr()]
    assert not any(key in text for text in texts)


# Options, and the life of Ray ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_workers": 0}, ValueError),
        ({"num_workers": 2.0}, TypeError),
        ({"examples_per_task": 0}, ValueError),
        ({"examples_per_task": True}, TypeError),
        ({"resources": {"CPU": -1}}, ValueError),
        ({"resources": {"CPU": "2"}}, TypeError),
        ({"resources": 3}, TypeError),
        ({"runtime_env": "env"}, TypeError),
        ({"address": 3}, TypeError),
        ({"address": " "}, ValueError),
        ({"resources": {1: 1.0}}, TypeError),
        ({"runtime_env": {None: "env"}}, TypeError),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused(options, error):
    with pytest.raises(error, match=next(iter(options))):
        RayExecutor(**options)


def test_a_missing_ray_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'dspy-combee\[ray\]'"):
        make(learning_lm(), executor="ray")


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda executor: pickle.loads(pickle.dumps(executor))])
def test_a_copy_has_the_same_options(copier):
    made = copier(RayExecutor("auto", 3, 5, {"CPU": 2}, {"env_vars": {"A": "b"}}).with_width(7))
    assert (made.width, made.address, made.num_workers, made.examples_per_task) == (7, "auto", 3, 5)
    assert (made.resources, made.runtime_env) == ({"CPU": 2}, {"env_vars": {"A": "b"}})


def test_num_threads_is_the_width():
    executor = RayExecutor(num_workers=2)
    assert resolve_executor(executor, 13).width == 13
    assert resolve_executor(executor) is executor
    with dspy.context(num_threads=21):
        assert resolve_executor("ray").width == 21


@pytest.mark.parametrize("others", [0, 1])
def test_resources_that_no_node_has_are_named_for_each_executor(on_ray, others):
    with on_ray(2) if others else nullcontext(), pytest.raises(ExecutorError, match="sandbox"):
        on_ray(2, resources={"sandbox": 1}).map(Remote(ray_helpers.square), [1])


def test_an_environment_of_the_workers(on_ray):
    executor = on_ray(2, runtime_env={"env_vars": {"COMBEE_TEST": "there"}})
    assert executor.map(Remote(os.getenv), ["COMBEE_TEST"]) == ["there"]


@pytest.mark.parametrize("failures", [1, 2])
def test_a_client_server_that_did_not_start_is_asked_for_once_more(monkeypatch, failures):
    import ray

    asked = []

    def init(**options):
        asked.append(options)
        if len(asked) <= failures:
            raise ConnectionAbortedError("the server did not start")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with nullcontext() if failures == 1 else pytest.raises(ExecutorError, match="did not start"):
        _Connection()._connect(RayExecutor("ray://127.0.0.1:1"))
    assert len(asked) == 2
    assert asked[0] == asked[1]


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.fixture
def cluster(tmp_path):
    """Start a Ray cluster of one node, and give the ports of its head and of its client server."""
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"]
    command += [f"--port={ports[0]}", f"--ray-client-server-port={ports[1]}", "--include-dashboard=false"]
    command += ["--object-store-memory=200000000", "--disable-usage-stats"]
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, open(tmp_path / "ray.log", "w") as log:
        head = subprocess.Popen([*command, f"--temp-dir={folder}"], env=environment(), stdout=log, stderr=log)
        assert wait_for(lambda: "Ray runtime started" in (tmp_path / "ray.log").read_text(), 120)
        yield ports
        assert head.poll() is None, "the cluster was there before, and stays"
        head.terminate()
        head.wait(60)


def environment(**variables):
    """The environment of a process that is told which Ray to join, if any, by `variables` or by its arguments."""
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**inherited, **RAY_ENVIRONMENT, "PYTHONPATH": str(ROOT), **variables}


JOIN = """
import os, sys
import dspy, ray
from dspy_combee import RayExecutor
from tests import ray_helpers
from tests.lessons import learning_lm, examples, make
lm = learning_lm()
executor = RayExecutor(sys.argv[1], runtime_env={"env_vars": {"COMBEE_TEST": "there"}})
with dspy.context(lm=lm):
    program = make(lm, executor=executor).compile(dspy.Predict("question -> answer"), examples(6), valset=examples(6))
print(program.detailed_results.val_aggregate_scores[-1], len(lm.calls) < 10, ray.is_initialized(), flush=True)
with executor:
    print(executor.map(ray_helpers.Remote(os.getenv), ["COMBEE_TEST"]))
"""


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}"], ids=["driver", "client"])
def test_a_cluster_is_joined_and_stays(cluster, address):
    joined = subprocess.run(
        [sys.executable, "-c", JOIN, address.format(cluster[address.startswith("ray://")])],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert joined.stdout == "1.0 True False\n['there']\n", joined.stderr


SCRIPT = """
import signal, sys
import dspy, ray
from tests import ray_helpers
from tests.lessons import learning_lm, examples, make
def main(folder, end):
    if end != "itself":
        signal.signal(signal.SIGTERM, lambda *received: print("told", flush=True))
    before = signal.getsignal(signal.SIGTERM)
    lm = learning_lm()
    optimizer = make(lm, executor="ray", max_metric_calls=24)
    program = ray_helpers.Slow(folder, 0 if end == "itself" else 600)
    with dspy.context(lm=lm):
        try:
            optimizer.compile(program, examples(6), valset=examples(6))
        except KeyboardInterrupt as error:
            print("interrupted", type(error.best_program).__name__, flush=True)
    print("initialized", ray.is_initialized(), signal.getsignal(signal.SIGTERM) == before, flush=True)
if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def processes_of(folder):
    """Processes with the folder in their environment: those of the script and of the Ray that it started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")
@pytest.mark.parametrize("end", ["itself", "Ctrl-C", "Ctrl-C in a terminal"])
def test_a_ray_that_compile_started_is_gone_after_it_however_it_ends(tmp_path, end):
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path), end],
        env=environment(RAY_ADDRESS="local", COMBEE_MARK=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    if end != "itself":
        assert wait_for(lambda: noted(tmp_path, "rollout"), 150)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "told\n", "the program's own handler"
        send = os.killpg if end == "Ctrl-C in a terminal" else os.kill
        send(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=200)
    interrupted = "" if end == "itself" else "interrupted Slow\n"
    assert (process.returncode, out) == (0, interrupted + "initialized False True\n"), err
    assert wait_for(lambda: not processes_of(tmp_path), 60), processes_of(tmp_path)
