"""What the tests of executors send to the workers of Ray, which import this module; most of it runs on threads too."""

import contextvars
import os
import re
import signal
import time
from pathlib import Path

import cloudpickle
import dspy

from dspy_combee import ProviderError
from dspy_combee.testing import ScriptedLM

WAIT = 30  # Seconds after which a test that hangs fails.

variable = contextvars.ContextVar("variable", default="unset")


class Remote:
    """A function that can run in other processes, made of a function of this module."""

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


def most_at_once(spans):
    events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    inside = peak = 0
    for _, change in events:
        inside += change
        peak = max(peak, inside)
    return peak


def square(item):
    return item * item


def where(item):
    return os.getpid()


def environment(name):
    return os.environ.get(name)


def settings(item):
    return dspy.settings.lm, dspy.settings.num_threads


def span(item, seconds):
    """When the item ran; this machine's processes share the clock."""
    started = time.monotonic()
    time.sleep(seconds)
    return started, time.monotonic()


def meet(item, folder, size):
    """Go on once `size` items have come, and return when the item ran."""
    started = time.monotonic()
    note(folder, "here")
    assert wait_for(lambda: noted(folder, "here") >= size)
    return started, span(item, 0.01)[1]


def fail_first(item, folder):
    note(folder, f"started{item}")
    if item == 0:
        raise KeyError("item 0")
    wait_for(lambda: noted(folder, "over"))


def leave(item):
    raise SystemExit(3)


def turned_away_once(item, folder):
    note(folder, f"try{item}")
    seen = variable.get()
    variable.set("touched")
    if noted(folder, f"try{item}") == 1:
        raise ProviderError("slow down", transient=True)
    return item, seen


def turned_away(item, folder, transient):
    note(folder, "try")
    raise ProviderError("no connection", transient=transient, retry_after=None if transient else 3.0)


def stall(item, folder):
    """Items 0 and 1 take too long, until the folder says that all is over."""
    if item < 2:
        wait_for(lambda: noted(folder, "over"))
        note(folder, "late")
        raise RuntimeError("too late to matter")
    return item


def block(item):
    """Item 1 never lets go of the interpreter: nothing else in its process runs."""
    if item == 1:
        re.match(r"(a+)+$", "a" * 60 + "b")
    return item


def die(item, folder, times, who=(1,)):
    note(folder, f"run{item}")
    if item in who and noted(folder, f"run{item}") <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


# Programs and metrics


class Answering(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")


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

    def __init__(self, folder, seconds):
        super().__init__()
        self.folder, self.seconds = folder, seconds

    def forward(self, question):
        note(self.folder, "rollout")
        time.sleep(self.seconds)
        return self.answer(question=question)


def one(gold, pred, trace=None, pred_name=None, pred_trace=None):
    return 1.0


def odd(gold, pred, trace=None, pred_name=None, pred_trace=None):
    """Raises on every second example."""
    if gold.number % 2:
        raise ArithmeticError(f"no number for {gold.number}")
    return 1.0


def right_lm(**options):
    return ScriptedLM(default={"answer": "right", "hint": "look"}, **options)
