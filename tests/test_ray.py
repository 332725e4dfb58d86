"""Rollouts on Ray: a real one, started once for the session."""

import copy
import importlib.util
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import dspy
import pytest
from gepa.strategies.proposal_sampling import PxNSampling

from dspy_combee import CombeeOptimizer, Executor, ExecutorError, ProviderError, RayExecutor, ThreadExecutor
from dspy_combee.calls import make_executor
from dspy_combee.calls.executors import Backoff
from dspy_combee.calls.ray_executor import _Connection
from dspy_combee.calls.travel import Surroundings, dumps, pack, sendable, shards
from dspy_combee.rollouts.feedback import Scorer
from dspy_combee.rollouts.map import MapStage, ProgramCopier

from . import playbook_lessons, ray_helpers
from .lessons import Chain, examples, learn, learning_lm, make, metric
from .openai_server import OpenAIServer, Reply
from .ray_helpers import Traveller, most_at_once, noted

WITHOUT_RAY = "ray is not installed"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=WITHOUT_RAY)
pytestmark = [needs_ray, pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[1]
# A Ray of its own for a process that a test starts: no token in the home directory, and none that is there already.
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@pytest.fixture(scope="session")
def local_ray():
    import ray

    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # A short path: Ray's sockets are in it.
        ray.init(
            address="local",
            num_cpus=4,
            object_store_memory=800_000_000,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        yield ray
        ray.shutdown()
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def on_ray(local_ray):
    """Make an executor of a width; its tasks run on the session's Ray."""

    def make_executor(width, backoff=None, **options):
        executor = RayExecutor(**options).with_width(width)
        if backoff is not None:
            executor._threads.backoff = backoff
        return executor

    return make_executor


# The contract of Executor, for functions that travel -----------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 3, 50])
def test_results_come_in_the_order_of_the_items(on_ray, width, workers):
    executor = on_ray(width, num_workers=workers, examples_per_task=7)
    assert executor.map(Traveller(ray_helpers.square), range(40)) == [i * i for i in range(40)]


def test_items_run_in_other_processes_as_many_as_there_are_workers(on_ray):
    executor = on_ray(4, num_workers=2)
    assert isinstance(executor, Executor)
    pids = executor.map(Traveller(ray_helpers.where), range(8))
    assert os.getpid() not in pids
    assert len(set(pids)) <= 2


def test_no_items_give_no_results_and_items_may_be_equal_or_none(on_ray):
    executor = on_ray(4)
    assert executor.map(Traveller(ray_helpers.text_of), []) == []
    assert executor.map(Traveller(ray_helpers.text_of), [None, None, 1]) == ["None", "None", "1"]


def test_the_first_error_is_raised_items_that_wait_never_start_and_the_executor_works_on(on_ray, tmp_path):
    executor = on_ray(4, num_workers=2, examples_per_task=5)
    with pytest.raises(KeyError, match="item 0"):
        executor.map(Traveller(ray_helpers.fail_first, tmp_path), range(100))
    assert noted(tmp_path, "started*") <= 4
    assert executor.map(Traveller(ray_helpers.square), range(6)) == [0, 1, 4, 9, 16, 25]


def test_an_error_that_is_no_exception_is_raised_too(on_ray):
    with pytest.raises(SystemExit):
        on_ray(2).map(Traveller(ray_helpers.leave), [1, 2])


def test_dspy_settings_hold_inside(on_ray):
    with dspy.context(lm="the caller's", num_threads=17, trace=[threading.Lock()]):
        seen = on_ray(4).map(Traveller(ray_helpers.setting), range(6))
    assert seen == [("the caller's", 17)] * 6


@pytest.mark.parametrize(
    ("width", "workers", "size"), [(4, 2, None), (4, 2, 1000), (5, 2, 20), (3, 4, None), (6, 1, None)]
)
def test_width_is_reached_and_never_exceeded(on_ray, width, workers, size):
    executor = on_ray(width, num_workers=workers, examples_per_task=size)

    def peak():
        return most_at_once(executor.map(Traveller(ray_helpers.span, 0.1), range(40)))

    peaks = [peak()]
    while len(peaks) < 10 and peaks[-1] < width:  # Until all the workers have come up.
        peaks.append(peak())
    assert max(peaks) == width


def test_width_holds_over_two_maps_at_once_and_over_calls_here(on_ray):
    executor = on_ray(3, num_workers=2)
    spans = []

    def run(function):
        spans.extend(executor.map(function, range(12)))

    functions = [Traveller(ray_helpers.span, 0.03), Traveller(ray_helpers.span, 0.03)]
    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    threads.append(threading.Thread(target=run, args=(lambda item: ray_helpers.span(item, 0.03),)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    assert len(spans) == 36
    assert most_at_once(spans) <= 3


def test_an_item_here_may_map_what_travels(on_ray):
    executor = on_ray(2)
    travels = Traveller(ray_helpers.square)
    assert executor.map(lambda item: executor.map(travels, [item]), range(5)) == [[i * i] for i in range(5)]


@pytest.mark.parametrize("width", [1, 3])
def test_an_item_that_takes_too_long_gets_the_result_of_on_timeout(on_ray, width):
    function = Traveller(ray_helpers.stall)
    executor = on_ray(width, num_workers=1)
    assert executor.map(function, range(6), timeout=0.5, on_timeout=function.on_timeout) == [0, "late 1", 2, 3, 4, 5]


@pytest.mark.parametrize(
    "options", [{"timeout": 1}, {"timeout": 0, "on_timeout": str}, {"timeout": -1, "on_timeout": str}]
)
def test_a_timeout_is_checked(on_ray, options):
    with pytest.raises(ValueError, match="timeout"):
        on_ray(2).map(Traveller(ray_helpers.square), [1, 2], **options)


def test_a_transient_error_is_tried_again_in_the_worker(on_ray, tmp_path):
    executor = on_ray(2, Backoff(first_delay=0.001, incidents=100))
    assert executor.map(Traveller(ray_helpers.turned_away_once, tmp_path), range(6)) == list(range(6))
    assert noted(tmp_path, "try*") == 12


def test_a_provider_that_refuses_ends_the_map_with_its_error(on_ray):
    with pytest.raises(ProviderError, match="no such key") as caught:
        on_ray(4).map(Traveller(ray_helpers.turned_away), range(20))
    assert (caught.value.transient, caught.value.retry_after) == (False, 3.0)


# What is lost --------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_in_the_middle_of_a_shard_costs_no_result(on_ray, tmp_path, caplog):
    executor = on_ray(4, num_workers=2, examples_per_task=4)
    assert executor.map(Traveller(ray_helpers.die_once, tmp_path), range(8)) == list(range(8))
    assert "A Ray worker was lost" in caplog.text
    assert "Its 4 examples are run once more" in caplog.text


def test_an_item_that_kills_its_worker_twice_is_lost_alone(on_ray, tmp_path):
    results = on_ray(4, num_workers=2).map(Traveller(ray_helpers.die, tmp_path), range(8))
    assert [results[0], *results[2:]] == [0, 2, 3, 4, 5, 6, 7]
    assert results[1].startswith("lost 1: the Ray worker that ran it was lost, twice")
    assert noted(tmp_path, "run1") == 2


def test_all_items_lost_is_an_error(on_ray, tmp_path):
    with pytest.raises(ExecutorError, match="Every example was lost"):
        on_ray(2).map(Traveller(ray_helpers.die, tmp_path, range(3)), range(3))


def test_an_item_that_blocks_its_process_is_ended_and_lost_alone(on_ray, monkeypatch):
    function = Traveller(ray_helpers.block)
    results = on_ray(2, num_workers=1).map(function, range(4), timeout=1.0, on_timeout=function.on_timeout)
    assert [results[0], *results[2:]] == [0, 2, 3]
    assert results[1].startswith("lost 1")


def test_what_the_workers_cannot_import_is_named(on_ray, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def function(item):\n    return item\n")
    monkeypatch.syspath_prepend(tmp_path)
    only_here = importlib.import_module("only_here")
    with pytest.raises(ExecutorError, match=r"cannot run the rollouts.*only_here.*runtime_env"):
        on_ray(2).map(Traveller(only_here.function), range(3))


# Rollouts ------------------------------------------------------------------------------------------------------


def stage(executor, program, score=ray_helpers.one, **options):
    return MapStage(ProgramCopier(program), Scorer(score), executor, **options)


def roll_out(executor, program, batch, score=ray_helpers.one, **options):
    return stage(executor, program, score, **options).run([(program, batch)])


def told(rollout):
    """All that matters in a rollout."""
    trace = [(step.name, dict(step.inputs), step.outputs and dict(step.outputs.items())) for step in rollout.trace]
    prediction = None if rollout.prediction is None else dict(rollout.prediction.items())
    return rollout.index, prediction, trace, rollout.score, rollout.error, rollout.usage.calls


@pytest.mark.parametrize("program", [Chain(), ray_helpers.Helper()], ids=["chain", "helper"])
def test_the_same_rollouts_as_on_threads(on_ray, program):
    batch = examples(9)
    with dspy.context(lm=ray_helpers.right_lm()):
        here = roll_out(ThreadExecutor(4), program, batch, metric)
        there = roll_out(on_ray(4, num_workers=2, examples_per_task=2), program, batch, metric)
    assert [told(rollout) for rollout in there] == [told(rollout) for rollout in here]
    assert all(rollout.example is example for rollout, example in zip(there, batch, strict=True))
    names = [name for name, _ in program.named_predictors()]
    own = {id(step.predictor) for rollout in there for step in rollout.trace if step.name in names}
    assert len(own) == len(names), "one object for each predictor of the program, as on threads"
    assert there[0].result.feedback == here[0].result.feedback
    dumps(there)


def test_an_example_that_kills_its_worker_is_a_failed_rollout(on_ray):
    program = ray_helpers.Deadly("question 2")
    with dspy.context(lm=ray_helpers.right_lm()):
        rollouts = roll_out(on_ray(4, num_workers=2), program, examples(6))
    assert [rollout.score for rollout in rollouts] == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    assert "Ray worker that ran it was lost" in rollouts[2].error
    assert rollouts[2].prediction is None


def test_a_rollout_that_stalls_is_a_failed_rollout_that_says_where(on_ray, tmp_path):
    program = ray_helpers.Slow(str(tmp_path), 60)
    rollouts = roll_out(on_ray(2), program, examples(2), timeout=0.3)
    assert [rollout.error for rollout in rollouts] == ["the rollout took longer than 0.3 seconds"] * 2


def test_an_answer_that_cannot_travel_is_kept_as_text_with_a_warning_and_its_score_stands(on_ray, caplog):
    with dspy.context(lm=ray_helpers.right_lm()):
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
    with dspy.context(lm=ray_helpers.right_lm()):
        rollouts = roll_out(on_ray(4, num_workers=2, examples_per_task=2), Chain(), examples(8), ray_helpers.odd)
    assert [rollout.score for rollout in rollouts] == [1.0, 0.0] * 4
    assert caplog.text.count("The metric raised ArithmeticError") == 1


def test_usage_is_tracked(on_ray):
    lm = ray_helpers.right_lm()
    with dspy.context(lm=lm), dspy.track_usage() as tracker:
        roll_out(on_ray(4, num_workers=2), Chain(), examples(5))
    assert len(tracker.usage_data["scripted/lm"]) == 10
    with dspy.context(lm=lm, track_usage=True):
        (rollout,) = roll_out(on_ray(1), Chain(), examples(1))
    assert rollout.prediction.get_lm_usage()["scripted/lm"]["prompt_tokens"] > 0


def test_usage_of_attempts_that_were_cut_short_is_counted(on_ray):
    answers = iter([Reply("too much", status=429)])
    with OpenAIServer(lambda request: next(answers, "[[ ## answer ## ]]\nright")) as server:
        lm = dspy.LM("openai/gpt-4o-mini", api_base=server.api_base, api_key=server.api_key, num_retries=0, cache=False)
        made = stage(on_ray(1, Backoff(first_delay=0.01)), dspy.Predict("question -> answer"))
        program = dspy.Predict("question -> answer")
        with dspy.context(lm=lm):
            (rollout,) = made.run([(program, examples(1))])
    assert rollout.score == 1.0
    assert rollout.usage.calls == 1


def test_the_history_of_a_language_model_does_not_travel():
    lm = ray_helpers.right_lm()
    lm("hello")
    with dspy.context(lm=lm):
        sent = pack(Surroundings.here(), dict)
    assert len(lm.history) == 1
    assert pickle.loads(sent).settings["lm"].history == []


def test_a_cache_that_is_off_here_is_off_there(on_ray):
    requests = []

    def handler(request):
        requests.append(request)
        return "[[ ## answer ## ]]\nright"

    with OpenAIServer(handler) as server:
        lm = dspy.LM("openai/gpt-4o-mini", api_base=server.api_base, api_key=server.api_key)
        program = dspy.Predict("question -> answer")
        for memory in (True, False):
            dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=memory)
            requests.clear()
            with dspy.context(lm=lm):
                roll_out(on_ray(1, num_workers=1), program, [examples(1)[0]] * 4)
            assert len(requests) == (1 if memory else 4)


def test_large_records_go_there_and_back(on_ray):
    text = "x" * 100_000
    batch = [dspy.Example(question=text + str(i), number=i).with_inputs("question") for i in range(2000)]
    with dspy.context(lm=ray_helpers.right_lm()):
        rollouts = roll_out(on_ray(8, num_workers=2), dspy.Predict("question -> answer"), batch)
    assert [rollout.index for rollout in rollouts] == list(range(2000))
    assert all(rollout.score == 1.0 for rollout in rollouts)
    assert rollouts[-1].trace[0].inputs["question"] == batch[-1].question


# What cannot travel --------------------------------------------------------------------------------------------


class Holder(dspy.Module):
    def __init__(self, **held):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")
        self.tools = held


def locked_metric():
    guard = threading.Lock()

    def score(gold, pred, trace=None, pred_name=None, pred_trace=None):
        with guard:
            return 1.0

    return score


def guarded_program():
    guard = threading.Lock()

    class Guarded(Chain):
        def forward(self, question):
            with guard:
                return super().forward(question)

    return Guarded()


GUARD = threading.Lock()


def score_with_default(gold, pred, trace=None, pred_name=None, pred_trace=None, guard=GUARD):
    return 1.0


score_with_default.__module__ = "__main__"  # Of a script: it travels as a whole.


@pytest.mark.parametrize(
    ("options", "program", "extra", "named"),
    [
        ({}, guarded_program, {}, r"the program: Guarded\.forward with 'guard', a lock"),
        ({"metric": score_with_default}, Chain, {}, r"the metric with a default\[0\]\[3\], a lock"),
        ({}, lambda: Holder(client=threading.Lock()), {}, r"the program\.tools\['client'\], a lock"),
        ({"metric": locked_metric()}, Chain, {}, r"the metric with 'guard', a lock"),
        ({}, Chain, {"notes": [1, threading.Lock()]}, r"the example .*question 3.*\.notes\[1\], a lock"),
    ],
    ids=["class", "default", "program", "metric", "example"],
)
def test_what_cannot_travel_is_named_before_anything_is_spent(options, program, extra, named, on_ray):
    lm = learning_lm()
    trainset = examples(12)
    trainset[3] = trainset[3].copy(**extra)
    with dspy.context(lm=lm), pytest.raises(TypeError, match=named):
        make(lm, executor="ray", **options).compile(program(), trainset, valset=examples(3))
    assert lm.calls == []


def test_a_setting_that_cannot_travel_is_named(on_ray):
    with dspy.context(lm=ray_helpers.right_lm(), rm=threading.Lock()), pytest.raises(TypeError, match=r"settings\.rm"):
        roll_out(on_ray(2), Chain(), examples(2))


def test_what_can_be_sent_in_the_place_of_what_cannot():
    lock = threading.Lock()
    assert sendable({"a": [1, lock], "b": "text"}) == {"a": [1, repr(lock)], "b": "text"}
    assert sendable(dspy.Prediction(answer=lock)).answer == repr(lock)


@pytest.mark.parametrize(("number", "size"), [(1, 1), (7, 3), (64, 32), (65, 32), (5, 100)])
def test_shards_are_few_and_even(number, size):
    made = shards(range(number), size)
    assert [item for shard in made for item in shard] == list(range(number))
    assert len(made) == -(-number // size)
    assert max(map(len, made)) - min(map(len, made)) <= 1
    assert max(map(len, made)) <= size


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
    spent = {phase: (entry["metric_calls"], entry["calls"]) for phase, entry in results.spent.to_dict().items()}
    texts = json.dumps([results.to_dict()["candidates"], trees, results.val_aggregate_scores, spent])
    return texts, len(lm.calls)


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
    program = ray_helpers.Deadly("question 2")
    with dspy.context(lm=lm):
        learned = make(lm, executor="ray", max_metric_calls=30).compile(program, examples(6), valset=examples(6))
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
    optimizer = make(learning_lm(), executor=RayExecutor(num_workers=2), num_threads=13)
    assert isinstance(optimizer, CombeeOptimizer)
    assert make_executor(optimizer.executor, optimizer.num_threads).width == 13
    with dspy.context(num_threads=21):
        assert make_executor("ray", None).width == 21


def test_resources_that_no_node_has_are_named(on_ray):
    with pytest.raises(ExecutorError, match="sandbox"):
        on_ray(2, resources={"sandbox": 1}).map(Traveller(ray_helpers.square), [1])


def test_resources_are_looked_at_for_each_executor(on_ray):
    with on_ray(2), pytest.raises(ExecutorError, match="sandbox"):
        on_ray(2, resources={"sandbox": 1}).map(Traveller(ray_helpers.square), [1])


def test_an_environment_of_the_workers(on_ray):
    executor = on_ray(2, runtime_env={"env_vars": {"COMBEE_TEST": "there"}})
    assert executor.map(Traveller(ray_helpers.variable), ["COMBEE_TEST"]) == ["there"]


SCRIPT = """
import os, signal, sys, time
import dspy, ray
from tests import ray_helpers
from tests.lessons import learning_lm, examples, make
def main(folder, seconds):
    if float(seconds):
        signal.signal(signal.SIGTERM, lambda *received: print("told", flush=True))
    before = signal.getsignal(signal.SIGTERM)
    lm = learning_lm()
    optimizer = make(lm, executor="ray", max_metric_calls=24)
    program = ray_helpers.Slow(folder, float(seconds))
    with dspy.context(lm=lm):
        try:
            optimizer.compile(program, examples(6), valset=examples(6))
        except KeyboardInterrupt as error:
            print("interrupted", type(error.best_program).__name__, flush=True)
    print("initialized", ray.is_initialized(), signal.getsignal(signal.SIGTERM) == before, flush=True)
if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def processes_of(temp_dir):
    """Processes with the folder in their environment: those of the script and of the Ray that it started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(temp_dir).encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def start(tmp_path, seconds):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "COMBEE_MARK": str(tmp_path)}
    return subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path), str(seconds)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")


@pytest.fixture
def cluster(tmp_path):
    """Start a Ray cluster of one node, and give the ports of its head and of its client server."""
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"]
    command += [f"--port={ports[0]}", f"--ray-client-server-port={ports[1]}", "--include-dashboard=false"]
    command += ["--object-store-memory=200000000", "--disable-usage-stats"]
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, open(tmp_path / "ray.log", "w") as log:
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        environment.pop("RAY_ADDRESS")
        head = subprocess.Popen([*command, f"--temp-dir={folder}"], env=environment, stdout=log, stderr=log)
        assert wait_for(lambda: "Ray runtime started" in (tmp_path / "ray.log").read_text(), 120)
        yield ports
        assert head.poll() is None, "the cluster was there before, and stays"
        head.terminate()
        head.wait(60)


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


JOIN = """
import sys
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
    print(executor.map(ray_helpers.Traveller(ray_helpers.variable), ["COMBEE_TEST"]))
"""


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
    connection = _Connection()
    with nullcontext() if failures == 1 else pytest.raises(ExecutorError, match="did not start"):
        connection._connect(RayExecutor("ray://127.0.0.1:1"))
    assert len(asked) == 2
    assert asked[0] == asked[1]


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}"], ids=["driver", "client"])
def test_a_cluster_is_joined_and_stays(cluster, address):
    port = cluster[address.startswith("ray://")]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS")
    joined = subprocess.run(
        [sys.executable, "-c", JOIN, address.format(port)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert joined.stdout == "1.0 True False\n['there']\n", joined.stderr


@needs_proc
def test_a_ray_that_compile_started_is_gone_after_it(tmp_path):
    process = start(tmp_path, 0.0)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out) == (0, "initialized False True\n"), err
    assert wait_for(lambda: not processes_of(tmp_path)), processes_of(tmp_path)


@needs_proc
@pytest.mark.parametrize("whole_group", [False, True], ids=["process", "terminal"])
def test_ctrl_c_ends_the_run_and_its_ray(tmp_path, whole_group):
    process = start(tmp_path, 600.0)
    assert wait_for(lambda: noted(tmp_path, "rollout"), 150)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "told\n", "the program's own handler"
    if whole_group:  # What a terminal does.
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert out == "interrupted Slow\ninitialized False True\n", err
    assert process.returncode == 0
    assert wait_for(lambda: not processes_of(tmp_path)), processes_of(tmp_path)
