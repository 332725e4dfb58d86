"""What the tests of both optimizers on collected traces share: how they compile, stop, pay, and meet hostile text."""

import contextlib

import dspy

from dspy_combee.report import html_page

from .trace_samples import hostile_trace

PROGRAM = "question -> answer"
MILLION = {"prompt_tokens": 1_000_000, "completion_tokens": 0, "total_tokens": 1_000_000}


def compile_on(optimizer, lm, given, program=None, trainset=(), valset=None):
    """Compile on traces, with `lm` as the program's model."""
    with dspy.context(lm=lm):
        return optimizer.compile(program or dspy.Predict(PROGRAM), list(trainset), valset=valset, traces=given)


def steps_of(program):
    return program.detailed_results.steps


class Stop(BaseException):
    """What ends a run from outside."""


def stop_at(iteration):
    """A step callback that ends the run after this step."""

    def callback(step):
        if step.iteration == iteration:
            raise Stop

    return callback


def priced_lm(server, answers):
    """A model whose calls cost 0.15 dollars each, as a million tokens do; `answers` gives a reply to a request."""
    server.handler = answers
    return dspy.LM("openai/gpt-4o-mini", api_base=server.api_base, api_key=server.api_key, cache=False, num_retries=0)


@contextlib.contextmanager
def hostile_traces(folder, monkeypatch):
    """Nine traces whose texts try something with a file in `folder`, which must be as it was in the end."""
    canary = folder / "canary.txt"
    canary.write_text("the canary's own text", encoding="utf-8")
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    yield [hostile_trace(number, str(canary)) for number in range(9)]
    assert canary.read_text(encoding="utf-8") == "the canary's own text"
    assert sorted(folder.iterdir()) == before


def check_hostile_run(lm, steps):
    """Nothing was read from the file that the traces name, and the page shows their text as text."""
    assert not any("the canary's own text" in call.prompt for call in lm.calls)
    page = html_page(steps)
    assert "hacked" in page
    assert "<img" not in page
    assert page.count("<script") == 0
