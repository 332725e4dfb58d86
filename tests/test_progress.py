"""The progress line: at 100 % when and only when the run ends, in a terminal or a notebook, else silent."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from dspy_combee.runs import scope
from dspy_combee.runs.scope import ProgressLine

from . import playbook_lessons
from .lessons import learn, learning_lm

ROOT = str(Path(__file__).parent.parent)

# Runs with standard error on a terminal; what a run tells goes to standard output.
SCRIPT = """
import json, sys
sys.path.insert(0, {root!r})
from tests import lessons, playbook_lessons
from tests.lessons import learning_lm
from tests.playbook_lessons import playbook_lm

def broken(prompt):
    raise KeyboardInterrupt

seen = []
options = dict(verbose=True, step_callbacks=[seen.append])
try:
    {run}
except KeyboardInterrupt:
    pass
print(json.dumps(len(seen)))
"""


def in_terminal(run: str) -> tuple[str, int]:
    """What a run writes to a terminal of 200 columns, and its number of steps."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(root=ROOT, run=run)], stdout=subprocess.PIPE, stderr=terminal
    )
    os.close(terminal)
    written = b""
    while True:
        try:
            chunk = os.read(controller, 1 << 16)
        except OSError:  # The other end is closed.
            break
        if not chunk:
            break
        written += chunk
    os.close(controller)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0, written.decode()
    return written.decode(), json.loads(out)


def states(written: str) -> list[str]:
    """What the line showed, one state after the other."""
    return [state for state in re.split(r"[\r\n]+", written) if state.startswith("Combee")]


def percents(written: str) -> list[int]:
    return [int(found) for state in states(written) if (found := "".join(re.findall(r"(\d+)%", state)))]


@pytest.mark.parametrize(
    ("run", "facts"),
    [
        ("lessons.learn(learning_lm(), n_train=20, max_metric_calls=100, **options)", {"best"}),
        ("lessons.learn(learning_lm(), max_metric_calls=None, num_epochs=2, **options)", {"best"}),
        ("playbook_lessons.learn(playbook_lm(), n_train=12, num_epochs=2, **options)", {"bullets"}),
    ],
    ids=["instructions", "epochs", "playbook"],
)
def test_in_a_terminal_it_is_one_line_that_ends_at_100_percent(run, facts):
    written, steps = in_terminal(run)
    shown = percents(written)
    assert steps > 1
    assert shown[-1] == 100
    assert shown == sorted(shown)
    assert written.count("\n") == 1  # The one after the line, when it is done.
    last = states(written)[-1]
    assert re.search(r"(\d+)/\1 \[", last)  # All of all.
    for fact in {"step", "n", "reflections"} | facts:
        assert f"{fact}=" in last, last
    first_full = next(number for number, state in enumerate(states(written)) if "100%" in state)
    assert all("100%" in state for state in states(written)[first_full:])


def test_a_run_that_is_interrupted_never_shows_100_percent():
    run = "lessons.learn(learning_lm((lessons.is_reflection, broken)), **options)"
    written, _ = in_terminal(run)
    assert states(written)
    assert 100 not in percents(written)


def test_without_a_terminal_it_is_silent(capfd):
    learn(learning_lm(), verbose=True)
    playbook_lessons.learn(playbook_lessons.playbook_lm(), verbose=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "run",
    [
        "lessons.learn(learning_lm(), **{**options, 'verbose': False})",
        "playbook_lessons.learn(playbook_lm(), **{**options, 'verbose': False})",
        "playbook_lessons.make(playbook_lm(), verbose=True)",
    ],
    ids=["instructions", "playbook", "no run"],
)
def test_not_verbose_is_silent_in_a_terminal(run):
    assert in_terminal(run)[0] == ""


def test_learning_online_shows_no_line():
    run = (
        "import dspy; lm = playbook_lm(); dspy.configure(lm=lm);"
        "playbook_lessons.make(lm).learn(dspy.Predict('question -> answer'), lessons.examples(3))"
    )
    assert in_terminal(run)[0] == ""


# The line alone ----------------------------------------------------------------------------------------------


class Bar:
    """Stands in for tqdm's, and notes what would be seen."""

    def __init__(self, total, disable, **options):
        self.total, self.disable, self.n, self.initial, self.options = total, disable, 0, 0, options
        self.postfix, self.closed = {}, False

    def update(self, n):
        self.n += n

    def set_postfix(self, facts):
        self.postfix = facts

    def refresh(self):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def bars(monkeypatch):
    made = []

    def make(**options):
        made.append(Bar(**options))
        return made[-1]

    monkeypatch.setattr(scope, "tqdm", make)
    return made


@pytest.mark.parametrize("total", [1, 2, 3, 7, 99, 100, 199, 200, 201, 1000, 99_999])
def test_nothing_rounds_to_100_before_the_end(bars, total):
    line = ProgressLine(total)
    for done in {0, 1, total // 2, total - 1, total, total + 5} - {-1}:
        line.advance(0, done)
        assert f"{100 * bars[0].n / total:.0f}" != "100"
    line.close(finished=True)
    assert bars[0].n == bars[0].total > 0
    assert bars[0].closed


def test_what_a_run_before_has_done_counts_but_not_as_speed(bars):
    line = ProgressLine(100)
    line.advance(5, before=40)
    line.advance(5, before=45)
    assert (bars[0].initial, bars[0].n) == (40, 50)


def test_a_budget_that_is_not_used_up_ends_at_what_was_done(bars):
    line = ProgressLine(100)
    line.advance(30, before=0)
    line.close(finished=True)
    assert (bars[0].n, bars[0].total) == (30, 30)


def test_a_failed_run_stays_where_it_is(bars):
    line = ProgressLine(100)
    line.advance(30, before=0)
    line.close(finished=False)
    assert (bars[0].n, bars[0].total, bars[0].closed) == (30, 100, True)


def test_a_run_with_nothing_left_to_do_ends_too(bars):
    ProgressLine(100).close(finished=True)
    assert bars[0].n == bars[0].total == 1


def test_facts_are_short_and_the_unknown_is_left_out(bars):
    ProgressLine(10).show(best=0.123456789, n=20, dollars=None)
    assert bars[0].postfix == {"best": "0.1235", "n": "20"}


class ZMQInteractiveShell:
    """As IPython's, in a notebook."""


class TerminalInteractiveShell:
    """As IPython's, in a terminal."""


@pytest.mark.parametrize(
    ("shell", "verbose", "shown"),
    [
        (ZMQInteractiveShell, True, True),
        (ZMQInteractiveShell, False, False),
        (TerminalInteractiveShell, True, False),
        (None, True, False),
    ],
)
def test_a_notebook_is_no_terminal_and_shows_it_all_the_same(bars, monkeypatch, shell, verbose, shown):
    module = None
    if shell is not None:
        module = type(sys)("IPython")
        module.get_ipython = shell
    monkeypatch.setitem(sys.modules, "IPython", module)
    ProgressLine(10, verbose)
    assert bars[0].disable is not shown


def test_the_bar_is_the_one_that_knows_notebooks():
    import tqdm.auto

    assert scope.tqdm is tqdm.auto.tqdm
