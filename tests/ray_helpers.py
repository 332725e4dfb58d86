"""What the tests of executors send to the workers of Ray, which import this module; most of it runs on threads too."""

import contextvars
import os
import signal
import time
from pathlib import Path

import cloudpickle
import dspy

from dspy_combee import ProviderError, RayExecutor, ThreadExecutor
from dspy_combee.testing import ScriptedLM

WAIT = 30  # Seconds after which a test that hangs fails.

variable = contextvars.ContextVar("variable", default="unset")


class Remote:
    """A function of an item, and of what is fixed, that can run in other processes."""

    def __init__(self, function, *fixed):
        self.function, self.fixed = function, fixed

    def __call__(self, item):
        return self.function(item, *self.fixed)

    def on_timeout(self, item):
        return f"late {item}"

    def parts(self):
        return {"the function": self.function}

    def send_items(self, items):
        return cloudpickle.dumps(list(items))

    def receive_items(self, sent):
        return cloudpickle.loads(sent)

    send_results = send_items

    def receive_results(self, items, sent):
        return cloudpickle.loads(sent)

    def lost_result(self, item, reason):
        return f"lost {item}: {reason}"


def ray_executor(width, backoff=None, **options):
    """An executor whose tasks run on the session's Ray (fixture `local_ray`)."""
    executor = RayExecutor(**options).with_width(width)
    executor.local = ThreadExecutor(width, backoff)
    return executor


def square(item):
    return item * item


def note(folder, name):
    """Leave one file for each thing that happened."""
    Path(folder, f"{name}-{os.getpid()}-{time.monotonic_ns()}").touch()


def noted(folder, name):
    return len(list(Path(folder).glob(f"{name}-*")))


def wait_for(condition, seconds=WAIT):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def span(item, seconds):
    """When the item ran; this machine's processes share the clock."""
    started = time.monotonic()
    time.sleep(seconds)
    return started, time.monotonic()


def most_at_once(spans):
    events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    inside = peak = 0
    for _, change in events:
        inside += change
        peak = max(peak, inside)
    return peak


def meet(item, folder, size):
    """Go on once `size` items have come, and return when the item ran."""
    started = time.monotonic()
    note(folder, "here")
    assert wait_for(lambda: noted(folder, "here") >= size)
    return started, span(item, 0.01)[1]


def fail_first(item, folder):
    note(folder, "started")
    if item == 0:
        raise KeyError("item 0")
    wait_for(lambda: noted(folder, "over"))


def stall(item, folder):
    """Items 0 and 1 take too long, until the folder says that all is over."""
    if item < 2:
        wait_for(lambda: noted(folder, "over"))
        note(folder, "late")
        raise RuntimeError("too late to matter")
    return item


def turned_away(item, folder, times, transient):
    note(folder, f"try{item}")
    seen = variable.get()
    variable.set("touched")
    if noted(folder, f"try{item}") <= times:
        raise ProviderError("no connection", transient=transient, retry_after=None if transient else 3.0)
    return item, seen


def die(item, folder, times, who):
    note(folder, f"run{item}")
    if item in who and noted(folder, f"run{item}") <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


# Programs


class Answering(dspy.Module):
    def __init__(self, folder=None, seconds=0):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")
        self.folder, self.seconds = folder, seconds


class Holder(Answering):
    def __init__(self, **held):
        super().__init__()
        self.tools = held

    def score(self, *given):
        return 1.0


class Deadly(Answering):
    """Kills its process at question 2."""

    def forward(self, question):
        if question == "question 2":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.answer(question=question)


class Unsendable(Answering):
    """Answers with what cannot be pickled."""

    def forward(self, question):
        made = self.answer(question=question)
        return dspy.Prediction(answer=made.answer, stream=(i for i in range(3)), pid=os.getpid())


class Helper(Answering):
    """Calls a predictor that it makes as it runs, besides its own."""

    def forward(self, question):
        helper = dspy.Predict("question -> hint")
        return self.answer(question=f"{question} ({helper(question=question).hint})")


class Slow(Answering):
    """Notes that it runs, and takes its time."""

    def forward(self, question):
        note(self.folder, "rollout")
        time.sleep(self.seconds)
        return self.answer(question=question)


def right_lm():
    return ScriptedLM(default={"answer": "right", "hint": "look"})
