"""What the tests of rollouts on Ray send to its workers, which import this module."""

import os
import re
import signal
import time
from pathlib import Path

import cloudpickle
import dspy

from dspy_combee import ProviderError
from dspy_combee.testing import ScriptedLM


class Traveller:
    """A function that can travel, made of a function of this module."""

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

    def send_results(self, results):
        return cloudpickle.dumps(list(results))

    def receive_results(self, items, sent):
        return cloudpickle.loads(sent)

    def lost_result(self, item, reason):
        return f"lost {item}: {reason}"


def square(item):
    return item * item


def where(item):
    return os.getpid()


def text_of(item):
    return str(item)


def variable(name):
    return os.environ.get(name)


def setting(item):
    return dspy.settings.lm, dspy.settings.num_threads


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


def note(folder, name):
    """One file for each thing that happened."""
    Path(folder, f"{name}-{os.getpid()}-{time.monotonic_ns()}").touch()


def noted(folder, name):
    return len(list(Path(folder).glob(f"{name}-*")))


def fail_first(item, folder):
    note(folder, f"started{item}")
    if item == 0:
        time.sleep(0.2)
        raise KeyError("item 0")
    time.sleep(60)


def leave(item):
    raise SystemExit(3)


def turned_away_once(item, folder):
    note(folder, f"try{item}")
    if noted(folder, f"try{item}") == 1:
        raise ProviderError("slow down", transient=True)
    return item


def turned_away(item):
    raise ProviderError("no such key", transient=False, retry_after=3.0)


def stall(item):
    if item == 1:
        time.sleep(300)
    return item


def block(item):
    """Item 1 never lets go of the interpreter: nothing else in its process runs."""
    if item == 1:
        re.match(r"(a+)+$", "a" * 60 + "b")
    return item


def die_once(item, folder):
    note(folder, f"run{item}")
    if item == 1 and noted(folder, "run1") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def die(item, folder, who=(1,)):
    note(folder, f"run{item}")
    if item in who:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


# Programs and metrics


class Deadly(dspy.Module):
    """Kills its process at one question."""

    def __init__(self, question=None, blocks=False):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")
        self.question = question
        self.blocks = blocks

    def forward(self, question):
        if question == self.question and self.blocks:
            re.match(r"(a+)+$", "a" * 60 + "b")
        if question == self.question:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.answer(question=question)


class Unsendable(dspy.Module):
    """Answers with what cannot be pickled."""

    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        made = self.answer(question=question)
        return dspy.Prediction(answer=made.answer, stream=(i for i in range(3)), pid=os.getpid())


class Helper(dspy.Module):
    """Calls a predictor that it makes as it runs, besides its own."""

    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        helper = dspy.Predict("question -> hint")
        hint = helper(question=question).hint
        return self.answer(question=f"{question} ({hint})")


class Slow(dspy.Module):
    """Notes that it runs, and takes its time."""

    def __init__(self, folder, seconds):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")
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
