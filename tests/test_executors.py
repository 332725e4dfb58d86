"""What every `Executor` must do, then what only `ThreadExecutor` does."""

import contextvars
import copy
import importlib.util
import pickle
import signal
import subprocess
import sys
import threading
import time

import dspy
import pytest

from dspy_combee import Executor, ProviderError, RayExecutor, ThreadExecutor
from dspy_combee.calls.executors import Backoff

WITHOUT_RAY = importlib.util.find_spec("ray") is None


def ray_executor(width):
    """Functions that do not travel, as all of this file, run on its threads; `test_ray.py` has those that do."""
    return RayExecutor().with_width(width)


EXECUTORS = {"ray": ray_executor, "threads": ThreadExecutor}
WAIT = 30  # Seconds after which a test that hangs fails.

variable = contextvars.ContextVar("variable", default="unset")


@pytest.fixture(
    params=["threads", pytest.param("ray", marks=pytest.mark.skipif(WITHOUT_RAY, reason="ray is not installed"))]
)
def make_executor(request):
    return EXECUTORS[request.param]


class Gauge:
    """Counts the items that are inside it at once."""

    def __init__(self):
        self.lock = threading.Lock()
        self.inside = self.peak = 0

    def __enter__(self):
        with self.lock:
            self.inside += 1
            self.peak = max(self.peak, self.inside)

    def __exit__(self, *exc_info):
        with self.lock:
            self.inside -= 1


class Meeting:
    """An item that goes on once `size` items have come; more than that at once break the gauge's peak."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size)
        self.gauge = Gauge()

    def __call__(self, item):
        with self.gauge:
            self.barrier.wait(WAIT)
            return item


# The contract ------------------------------------------------------------------------------------------------


def test_is_an_executor(make_executor):
    executor = make_executor(3)
    assert isinstance(executor, Executor)
    assert executor.width == 3


@pytest.mark.parametrize("width", [1, 3, 50])
def test_results_come_in_the_order_of_the_items(make_executor, width):
    def slow_start(item):
        time.sleep(0.02 if item == 0 else 0)
        return item * item

    assert make_executor(width).map(slow_start, range(40)) == [i * i for i in range(40)]


@pytest.mark.parametrize("width", [1, 4])
def test_no_items_give_no_results_and_items_may_be_equal_or_none(make_executor, width):
    assert make_executor(width).map(str, []) == []
    assert make_executor(width).map(str, [], timeout=1, on_timeout=str) == []
    assert make_executor(width).map(str, [None, None, 1]) == ["None", "None", "1"]


@pytest.mark.parametrize("width", [1, 4])
def test_the_first_error_is_raised_and_items_that_wait_never_start(make_executor, width):
    started = []

    def fail_first(item):
        started.append(item)
        if item == 0:
            raise KeyError("item 0")
        raised.wait(WAIT)

    raised = threading.Event()
    with pytest.raises(KeyError, match="item 0"):
        make_executor(width).map(fail_first, range(100))
    raised.set()
    assert set(started) <= set(range(width))


def test_an_error_that_is_no_exception_is_raised_too(make_executor):
    def leave(item):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        make_executor(2).map(leave, [1, 2])


@pytest.mark.parametrize("width", [1, 4])
def test_each_item_runs_in_its_own_copy_of_the_callers_context(make_executor, width):
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


@pytest.mark.parametrize("width", [1, 4])
def test_dspy_settings_hold_inside(make_executor, width):
    with dspy.context(lm="the caller's", trace=[]):
        seen = make_executor(width).map(lambda item: dspy.settings.lm, range(6))
    assert seen == ["the caller's"] * 6


def test_width_is_reached_and_never_exceeded(make_executor):
    meeting = Meeting(4)  # Opens only when 4 are in flight together: with fewer it would break.
    assert make_executor(4).map(meeting, range(40)) == list(range(40))
    assert meeting.gauge.peak == 4


def test_width_holds_over_two_maps_at_once(make_executor):
    executor = make_executor(3)
    gauge = Gauge()

    def work(item):
        with gauge:
            time.sleep(0.003)
        return item

    threads = [threading.Thread(target=executor.map, args=(work, range(20))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    assert gauge.peak <= 3


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"timeout": WAIT, "on_timeout": str}], ids=["plain", "timeout"])
def test_an_item_may_map_too(make_executor, width, options):
    executor = make_executor(width)
    gauge = Gauge()

    def leaf(item):
        with gauge:
            time.sleep(0.001)
            return item + 1

    def branch(item):
        return sum(executor.map(leaf, [item] * 3, **options))

    assert executor.map(branch, range(8), **options) == [3 * (i + 1) for i in range(8)]
    assert gauge.peak <= width


def test_an_executor_works_again_after_an_error(make_executor):
    executor = make_executor(2)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            executor.map(lambda item: 1 // item, [1, 0, 1, 0, 1])
    meeting = Meeting(2)
    assert executor.map(meeting, range(6)) == list(range(6))
    assert meeting.gauge.peak == 2


@pytest.mark.parametrize("width", [1, 3])
def test_an_item_that_takes_too_long_gets_the_result_of_on_timeout(make_executor, width):
    never = threading.Event()

    def work(item):
        if item == 1:
            never.wait(WAIT)
        return item

    try:
        results = make_executor(width).map(work, range(6), timeout=0.8, on_timeout=lambda item: f"late {item}")
    finally:
        never.set()
    assert results == [0, "late 1", 2, 3, 4, 5]


def test_a_stalled_item_gives_its_place_to_another_and_its_late_result_is_dropped(make_executor):
    release, late = threading.Event(), threading.Event()
    calls = []

    def work(item):
        calls.append(item)
        if item < 2:
            release.wait(WAIT)
            late.set()
            return "late result"
        return meeting(item)

    meeting = Meeting(2)  # Both places must be taken again, or this never opens.
    results = make_executor(2).map(work, range(6), timeout=2.0, on_timeout=lambda item: "timed out")
    assert results == ["timed out", "timed out", 2, 3, 4, 5]
    release.set()
    assert late.wait(WAIT)
    assert results[:2] == ["timed out", "timed out"]
    assert sorted(calls) == list(range(6)), "no item is run twice"
    assert meeting.gauge.peak == 2


def test_the_error_of_a_stalled_item_is_dropped_and_stops_nothing(make_executor):
    release, raised = threading.Event(), threading.Event()

    def work(item):
        if item == 0:
            release.wait(WAIT)
            raised.set()
            raise RuntimeError("too late to matter")
        if item == 2:  # By now item 0 has been given up; let it end while others wait.
            release.set()
            raised.wait(WAIT)
            time.sleep(0.02)
        return item

    results = make_executor(1).map(work, range(6), timeout=1.0, on_timeout=lambda item: "late")
    assert results == ["late", 1, 2, 3, 4, 5]


def test_an_error_of_on_timeout_is_raised(make_executor):
    never = threading.Event()

    def refuse(item):
        raise LookupError("no result")

    with pytest.raises(LookupError, match="no result"):
        make_executor(2).map(lambda item: never.wait(WAIT), [1], timeout=0.1, on_timeout=refuse)
    never.set()


@pytest.mark.parametrize(
    "options", [{"timeout": 1}, {"timeout": 0, "on_timeout": str}, {"timeout": -1, "on_timeout": str}]
)
def test_a_timeout_is_checked(make_executor, options):
    with pytest.raises(ValueError, match="timeout"):
        make_executor(2).map(str, [1, 2], **options)


@pytest.mark.parametrize("width", [0, -3])
def test_a_width_below_one_is_refused(make_executor, width):
    with pytest.raises(ValueError, match=f"num_threads must be at least 1, got {width}"):
        make_executor(width)


@pytest.mark.parametrize("width", [True, 2.0, "4", None])
def test_a_width_that_is_no_int_is_refused(make_executor, width):
    with pytest.raises(TypeError, match="num_threads must be an int"):
        make_executor(width)


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda executor: pickle.loads(pickle.dumps(executor))])
def test_a_copy_has_the_same_width(make_executor, copier):
    made = copier(make_executor(5))
    assert made.width == 5
    assert made.map(str, range(3)) == ["0", "1", "2"]


# Threads -----------------------------------------------------------------------------------------------------


def test_width_one_stays_in_the_callers_thread():
    assert set(ThreadExecutor(1).map(lambda item: threading.get_ident(), range(5))) == {threading.get_ident()}


def test_wider_executors_leave_no_threads_behind():
    before = threading.active_count()
    ThreadExecutor(16).map(str, range(100))
    deadline = time.monotonic() + WAIT
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_items_in_flight_after_an_error_do_not_take_the_places_of_the_next_map():
    executor = ThreadExecutor(2)
    never, stuck = threading.Event(), threading.Event()

    def stall_or_fail(item):
        if item == 0:
            stuck.set()
            never.wait(WAIT)
        stuck.wait(WAIT)
        raise OSError("failed")

    with pytest.raises(OSError, match="failed"):
        executor.map(stall_or_fail, [0, 1])
    meeting = Meeting(2)
    assert executor.map(meeting, range(4)) == list(range(4))
    never.set()


@pytest.mark.parametrize("width", [1, 4])
def test_a_transient_error_is_tried_again_in_a_fresh_context(width):
    tries = []

    def turned_away_once(item):
        tries.append(item)
        seen = variable.get()
        variable.set("touched")
        if tries.count(item) == 1:
            raise ProviderError("slow down", transient=True)
        return item, seen

    executor = ThreadExecutor(width, Backoff(first_delay=0.001, incidents=100))
    assert executor.map(turned_away_once, range(6)) == [(i, "unset") for i in range(6)]
    assert sorted(tries) == sorted([*range(6)] * 2)


@pytest.mark.parametrize("width", [1, 4])
def test_a_transient_error_that_stays_is_raised_and_the_executor_works_on(width):
    tries = []

    def turned_away(item):
        tries.append(item)
        raise ProviderError("no connection", transient=True)

    executor = ThreadExecutor(width, Backoff(first_delay=0.001, incidents=3))
    with pytest.raises(ProviderError, match="no connection"):
        executor.map(turned_away, range(50))
    assert len(tries) <= 3 * width
    assert executor.map(str, range(6)) == [str(i) for i in range(6)]


def run_script(script, **options):
    source = "from dspy_combee.calls.executors import ThreadExecutor\nimport threading, time, sys\n" + script
    return subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_a_stalled_item_does_not_block_the_interpreters_exit():
    process = run_script(
        "print(ThreadExecutor(2).map(lambda i: time.sleep(3600) if i == 1 else i, range(4), timeout=0.8,"
        " on_timeout=lambda i: 'late'), flush=True)"
    )
    out, err = process.communicate(timeout=60)
    assert out.strip() == "[0, 'late', 2, 3]"
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("options", ["", ", timeout=3000, on_timeout=str"], ids=["plain", "timeout"])
def test_ctrl_c_returns_while_items_are_in_flight(options):
    process = run_script(
        f"""
def work(item):
    if item == 0:
        print("working", flush=True)
    time.sleep(600)
    return item
try:
    ThreadExecutor(4).map(work, range(400){options})
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    )
    assert process.stdout.readline() == "working\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert out == "interrupted\n"
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("options", ["", ", timeout=3000, on_timeout=str"], ids=["plain", "timeout"])
def test_ctrl_c_that_another_thread_receives_is_not_slept_through(options):
    process = run_script(
        f"""
import signal
def work(item):
    if item == 3:
        time.sleep(0.5)  # The main thread waits by now.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    time.sleep(600)
try:
    ThreadExecutor(4).map(work, range(400){options})
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    )
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (0, "interrupted\n", "")
