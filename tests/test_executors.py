"""What every `Executor` must do, one table for all; then what only `ThreadExecutor` does."""

import copy
import importlib.util
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from functools import partial

import dspy
import pytest

from dspy_combee import Executor, ExecutorError, ProviderError, ThreadExecutor
from dspy_combee.calls.executors import Backoff
from dspy_combee.calls.remote import TaskPayload, dumps, loads, pack, run_shard, sendable
from dspy_combee.testing import ScriptedLM

from . import ray_helpers
from .lessons import examples, learning_lm, make
from .ray_helpers import WAIT, Remote, most_at_once, note, noted, ray_executor, variable, wait_for

QUICK = Backoff(first_delay=0.001, incidents=100)


class Counting(Executor):
    """An executor as a user writes one: `width` and `map`, the rest by default."""

    def __init__(self, width, backoff=None):
        self.inner = ThreadExecutor(width, backoff)
        self.width = width
        self.count = 0

    def map(self, function, items, *, timeout=None, on_timeout=None):
        self.count += len(items)
        return self.inner.map(function, items, timeout=timeout, on_timeout=on_timeout)


EXECUTORS = {
    "threads": ThreadExecutor,
    "own": Counting,
    "ray": partial(ray_executor, num_workers=2, examples_per_task=7),
}
RAY = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


@pytest.fixture(params=["threads", "own", pytest.param("ray", marks=RAY)])
def make_executor(request):
    """Make an executor of some width; on Ray the functions of this file that are `Remote` run in its workers."""
    if request.param == "ray":
        request.getfixturevalue("local_ray")
    return EXECUTORS[request.param]


# The contract ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3, 50])
def test_results_come_in_the_order_of_the_items(make_executor, width):
    executor = make_executor(width)
    assert isinstance(executor, Executor)
    assert executor.width == width
    assert executor.map(Remote(ray_helpers.square), range(40)) == [i * i for i in range(40)]


@pytest.mark.parametrize("width", [1, 4])
def test_no_items_give_no_results_and_items_may_be_equal_or_none(make_executor, width):
    executor, text = make_executor(width), Remote(str)
    assert executor.map(text, []) == []
    assert executor.map(text, [], timeout=1, on_timeout=str) == []
    assert executor.map(text, [None, None, 1]) == ["None", "None", "1"]


@pytest.mark.parametrize("width", [1, 4])
def test_the_first_error_is_raised_items_that_wait_never_start_and_the_executor_works_on(
    make_executor, width, tmp_path
):
    executor = make_executor(width)
    for _ in range(2):
        with pytest.raises(KeyError, match="item 0"):
            executor.map(Remote(ray_helpers.fail_first, tmp_path), range(100))
    assert noted(tmp_path, "started") <= 2 * width
    note(tmp_path, "over")
    spans = executor.map(Remote(ray_helpers.meet, tmp_path, width), range(8))
    assert most_at_once(spans) == width, "what was in flight does not count any more"


@pytest.mark.parametrize("width", [1, 2])
def test_an_error_that_is_no_exception_is_raised_too(make_executor, width):
    with pytest.raises(SystemExit):
        make_executor(width).map(Remote(sys.exit), [1, 2])


@pytest.mark.parametrize("width", [1, 4])
def test_dspy_settings_hold_inside(make_executor, width):
    with dspy.context(lm="the caller's", num_threads=17, trace=[threading.Lock()]):
        seen = make_executor(width).map(Remote(lambda item: (dspy.settings.lm, dspy.settings.num_threads)), range(6))
    assert seen == [("the caller's", 17)] * 6


@pytest.mark.parametrize("width", [1, 4])
def test_each_item_here_runs_in_its_own_copy_of_the_callers_context(make_executor, width):
    def read_and_write(item):
        seen = variable.get()
        variable.set(f"item {item}")
        return seen, variable.get()

    token = variable.set("caller")
    try:
        results = make_executor(width).map(read_and_write, range(9))
        assert variable.get() == "caller"
    finally:
        variable.reset(token)
    assert results == [("caller", f"item {i}") for i in range(9)]


@pytest.mark.parametrize("width", [1, 4, 5])
def test_width_is_reached_and_never_exceeded(make_executor, width, tmp_path):
    spans = make_executor(width).map(Remote(ray_helpers.meet, tmp_path, width), range(40))
    assert most_at_once(spans) == width


def test_width_holds_over_maps_at_once_wherever_their_items_run(make_executor):
    executor = make_executor(3)
    spans = []

    def run(function):
        spans.extend(executor.map(function, range(12)))

    def here(item):
        return ray_helpers.span(item, 0.01)

    functions = [Remote(ray_helpers.span, 0.01), Remote(ray_helpers.span, 0.01), here]
    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    assert len(spans) == 36
    assert most_at_once(spans) <= 3


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"timeout": WAIT, "on_timeout": str}], ids=["plain", "timeout"])
def test_an_item_may_map_too(make_executor, width, options):
    executor, leaf = make_executor(width), Remote(ray_helpers.span, 0.001)
    nested = executor.map(lambda item: executor.map(leaf, [item] * 3, **options), range(8), **options)
    assert [len(spans) for spans in nested] == [3] * 8
    assert most_at_once([item for spans in nested for item in spans]) <= width


@pytest.mark.parametrize("width", [1, 3])
def test_an_item_that_takes_too_long_gets_the_result_of_on_timeout_and_gives_its_slot_away(
    make_executor, width, tmp_path, caplog
):
    function = Remote(ray_helpers.stall, tmp_path)
    results = make_executor(width).map(function, range(6), timeout=0.5, on_timeout=function.on_timeout)
    expected = ["late 0", "late 1", 2, 3, 4, 5]
    assert results == expected
    note(tmp_path, "over")
    assert wait_for(lambda: noted(tmp_path, "late") == 2)
    assert results == expected, "a late error is dropped, like a late result"


@pytest.mark.parametrize(
    "options", [{"timeout": 1}, {"timeout": 0, "on_timeout": str}, {"timeout": -1, "on_timeout": str}]
)
def test_a_timeout_is_checked(make_executor, options):
    for function in (str, Remote(ray_helpers.square)):
        with pytest.raises(ValueError, match="timeout"):
            make_executor(2).map(function, [1, 2], **options)


@pytest.mark.parametrize("width", [1, 4])
def test_a_transient_error_is_retried_in_a_fresh_context(make_executor, width, tmp_path):
    function = Remote(ray_helpers.turned_away, tmp_path, 1, True)
    assert make_executor(width, QUICK).map(function, range(6)) == [(i, "unset") for i in range(6)]
    assert noted(tmp_path, "try*") == 12


@pytest.mark.parametrize("transient", [True, False])
@pytest.mark.parametrize("width", [1, 4])
def test_an_error_of_the_provider_that_stays_is_raised_and_the_executor_works_on(
    make_executor, width, transient, tmp_path
):
    executor = make_executor(width, Backoff(first_delay=0.001, incidents=3))
    with pytest.raises(ProviderError, match="no connection") as caught:
        executor.map(Remote(ray_helpers.turned_away, tmp_path, 100, transient), range(50))
    assert (caught.value.transient, caught.value.retry_after) == (transient, None if transient else 3.0)
    assert noted(tmp_path, "try*") <= (3 if transient else 1) * width
    assert executor.map(Remote(ray_helpers.square), range(3)) == [0, 1, 4]


@pytest.mark.parametrize("width", [0, -3, True, 2.0, "4", None])
def test_a_width_must_be_an_int_of_at_least_one(make_executor, width):
    error = ValueError if type(width) is int else TypeError
    with pytest.raises(error, match="num_threads must be a"):
        make_executor(width)


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda executor: pickle.loads(pickle.dumps(executor))])
def test_a_copy_has_the_same_width(make_executor, copier):
    made = copier(make_executor(5))
    assert made.width == 5
    assert made.map(str, range(3)) == ["0", "1", "2"]


def test_resources_stay_open_for_a_run_and_what_can_go_there_is_not_refused(make_executor):
    executor, function = make_executor(2), Remote(ray_helpers.square)
    executor.check(function, iter([1, 2]))
    executor.check(str, iter([threading.Lock()]))  # It runs here.
    with executor.opened(), executor.opened():
        assert executor.map(function, [3]) == [9]
    assert executor.map(function, [3]) == [9]


# The option ``executor`` ---------------------------------------------------------------------------------------


def test_an_executor_of_ones_own_keeps_its_width_and_runs_everything():
    executor, lm = Counting(3), learning_lm()
    with dspy.context(lm=lm):
        program = make(lm, executor=executor, num_threads=8).compile(
            dspy.Predict("question -> answer"), examples(12), valset=examples(3)
        )
    assert executor.count >= len(lm.calls), "rollouts and reflection calls"
    assert program.detailed_results.steps
    with pytest.raises(TypeError, match="abstract"):
        type("Nothing", (Executor,), {})()


class OnlyWidthAndMap:
    width = 2

    def map(self, function, items, **options):
        return [function(item) for item in items]


@pytest.mark.parametrize("executor", [3, ThreadExecutor, OnlyWidthAndMap()])
def test_what_is_no_executor_is_refused(executor):
    with pytest.raises(TypeError, match=r"must be a name or an Executor.*should subclass dspy_combee\.Executor"):
        make(learning_lm(), executor=executor)


# Threads -----------------------------------------------------------------------------------------------------


def test_width_one_stays_in_the_callers_thread():
    assert set(ThreadExecutor(1).map(lambda item: threading.get_ident(), range(5))) == {threading.get_ident()}


def test_wider_executors_leave_no_threads_behind():
    before = threading.active_count()
    ThreadExecutor(16).map(str, range(100))
    assert wait_for(lambda: threading.active_count() == before)


def test_a_stalled_item_is_run_once_and_its_late_error_stops_nothing():
    release, raised = threading.Event(), threading.Event()
    calls = []

    def work(item):
        calls.append(item)
        if item == 0:
            release.wait(WAIT)
            raised.set()
            raise ProviderError("too late to matter", transient=True)
        if item == 2:  # By now item 0 has been given up; let it end while others wait.
            release.set()
            raised.wait(WAIT)
        return item

    executor = ThreadExecutor(1)
    assert executor.map(work, range(6), timeout=0.5, on_timeout=lambda item: "late") == ["late", 1, 2, 3, 4, 5]
    assert calls == list(range(6))
    assert executor.slots.limit == 1


def test_an_error_of_on_timeout_is_raised():
    never = threading.Event()

    def refuse(item):
        raise LookupError("no result")

    with pytest.raises(LookupError, match="no result"):
        ThreadExecutor(2).map(lambda item: never.wait(WAIT), [1], timeout=0.1, on_timeout=refuse)
    never.set()


def run_script(script):
    source = "from dspy_combee import ThreadExecutor\nimport signal, threading, time\n" + script
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_stalled_item_does_not_block_the_interpreters_exit():
    process = run_script(
        "print(ThreadExecutor(2).map(lambda i: time.sleep(3600) if i == 1 else i, range(4), timeout=0.8,"
        " on_timeout=lambda i: 'late'), flush=True)"
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "[0, 'late', 2, 3]\n", "")


@pytest.mark.parametrize("options", ["", ", timeout=3000, on_timeout=str"], ids=["plain", "timeout"])
@pytest.mark.parametrize("thread", ["main", "other"])
def test_ctrl_c_returns_while_items_are_in_flight_whichever_thread_receives_it(options, thread):
    process = run_script(
        f"""
def work(item):
    if item == 3:
        print("working", flush=True)
        while not waits():  # The main thread waits by now.
            time.sleep(0.01)
        if {thread == "other"}:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    time.sleep(600)
def waits():
    import sys
    frame = sys._current_frames()[threading.main_thread().ident]
    return frame.f_code.co_name == "collect"
try:
    ThreadExecutor(4).map(work, range(400){options})
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    )
    assert process.stdout.readline() == "working\n"
    if thread == "main":
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (0, "interrupted\n", "")


# The worker's side of a task, without Ray --------------------------------------------------------------------------


def shard(function, items, timeout=None):
    """Run a shard in this process, and return what comes back."""
    payload = TaskPayload(Remote(function), timeout, str, QUICK).pack()
    sent_back, failure, usage = loads(run_shard(payload, Remote(function).send_items(items), 2))
    return sent_back and loads(sent_back), failure, usage


def ask(item):
    return len(dspy.settings.lm.history), dspy.settings.lm(f"question {item}")[0], dspy.cache.enable_memory_cache


@pytest.mark.parametrize("timeout", [None, WAIT])
@pytest.mark.parametrize("tracks", [True, False])
def test_dspys_state_goes_to_the_worker_but_the_history_of_a_language_model_stays(timeout, tracks):
    lm = ScriptedLM(default="told")
    lm("before")
    with dspy.context(lm=lm), dspy.track_usage() if tracks else nullcontext():
        dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)
        ((asked, reply, cached),), failure, usage = shard(ask, [1], timeout)
    assert (asked, reply, cached, failure) == (0, "told", False, None)
    assert (len(lm.history), len(lm.calls)) == (1, 1), "the worker's is a copy"
    assert [len(entries) for entries in usage.values()] == ([1] if tracks else [])


def test_an_error_that_cannot_be_pickled_comes_back_as_text():
    def fail(item):
        raise LookupError("no such tool", threading.Lock())

    results, failure, _ = shard(fail, [1, 2])
    assert results is None
    assert type(failure) is ExecutorError
    assert "LookupError: ('no such tool'" in str(failure)


def test_a_disk_cache_that_the_worker_cannot_use_is_turned_off_with_a_warning(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setattr(dspy.cache, "enable_disk_cache", True)
    monkeypatch.setattr(dspy.cache, "disk_cache_dir", str(tmp_path / "file" / "folder"))
    payload = TaskPayload(Remote(str), None, None, QUICK).pack()
    dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=True)
    run_shard(payload, Remote(str).send_items([1]), 1)
    assert "DSPy's disk cache cannot be used in this process" in caplog.text
    assert not dspy.cache.enable_disk_cache


def locked(wrap=lambda function: function):
    guard = threading.Lock()

    def score(*given):
        with guard:
            return 1.0

    return type("Guarded", (), {"forward": wrap(score), "__module__": "__main__"})() if wrap else score


def with_default(gold, guard=threading.Lock()):  # noqa: B008
    return 1.0


with_default.__module__ = "__main__"  # Of a script: it travels as a whole.


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (locked(), r"it: Guarded\.forward with 'guard', a lock"),
        (locked(classmethod), r"it: Guarded\.forward with 'guard', a lock"),
        (locked(None), r"it with 'guard', a lock"),
        (with_default, r"it with a default\[0\]\[0\], a lock"),
        (ray_helpers.Holder(client=threading.Lock()), r"it\.tools\['client'\], a lock"),
        (ray_helpers.Holder(client=threading.Lock()).score, r"it: Holder\.tools\['client'\], a lock"),
        (dspy.Example(notes=[1, {threading.Lock()}]), r"it\['notes'\]\[1\]\[0\], a lock"),
        ((item for item in ()), r"it, a generator"),
    ],
)
def test_what_cannot_travel_is_named(value, named):
    with pytest.raises(TypeError, match=rf"cannot be sent to other processes: {named}, cannot be pickled"):
        pack([value], lambda: {"that": 3, "it": value})


def test_text_goes_in_the_place_of_what_cannot_travel():
    lock = threading.Lock()
    assert sendable({"a": [1, lock], "b": "text"}) == {"a": [1, repr(lock)], "b": "text"}
    assert sendable(dspy.Prediction(answer=lock)).answer == repr(lock)


def test_what_comes_back_changes_no_class_of_the_sender():
    class Note:
        text = "old"

    sent = dumps(Note)
    Note.text = "new"
    there = loads(sent)  # Where the class is known it is brought up to date with what was sent.
    assert (there, Note.text) == (Note, "old")
    reply = dumps(Note(), reply=True)
    Note.text = "new"
    assert type(loads(reply)) is Note
    assert Note.text == "new"
