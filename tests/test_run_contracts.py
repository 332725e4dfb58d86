"""What every run keeps to, whatever it learns from and whichever learner learns: one table of kinds, one row a promise.

Run as a module, this file is the process in which runs are killed.
"""

import contextvars
import gc
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy import lm15
from dspy.clients import base_lm

from dspy_combee import ProviderError, ReflectionError, UnknownCostError
from dspy_combee.calls.executors import Backoff, ThreadExecutor
from dspy_combee.records.step_log import read_steps
from dspy_combee.testing import ScriptedLM

from . import lessons, playbook_lessons
from .lessons import Chain, examples, metric, numbers_in
from .openai_server import OpenAIServer, Reply
from .test_tracking import mlflow, runs_of, series  # noqa: F401 (a fixture)
from .trace_samples import traces

N, STEP = 12, 4
STATES_0_1 = Path(__file__).parent / "data" / "states_0_1"


def is_rollout(prompt) -> bool:
    return set(prompt.output_fields) <= {"answer", "hint"}


def question_in(prompt) -> int:
    return int(re.findall(r"question (\d+)", prompt.question)[-1])


def is_reflection(prompt) -> bool:
    return not is_rollout(prompt)


@dataclass(frozen=True)
class Kind:
    """A kind of run: three steps of four items, after each of which the program does better on the valset."""

    name: str
    playbook: bool = False
    num_traces: int = 0
    num_examples: int = 0
    online: bool = False

    @property
    def task(self) -> Any:
        return playbook_lessons if self.playbook else lessons

    @property
    def state(self) -> str:
        """The file of the state that a run ends with."""
        if self.playbook:
            return "playbook_state.json"
        return "gepa_state.bin" if self.num_examples else "trace_state.json"

    def lm(self, *rules, **options) -> ScriptedLM:
        make = playbook_lessons.playbook_lm if self.playbook else lessons.learning_lm
        return make(*rules, **options)

    def run(self, lm, program=None, *, told=None, n=STEP, log_dir=None, **options) -> Any:
        """Run it, with `lm` as the program's model and the one that reflects."""
        program = program or dspy.Predict("question -> answer")
        size = {"minibatch_size" if self.playbook else "reflection_minibatch_size": n}
        options = {"verbose": False, "num_threads": 3, "log_dir": log_dir and str(log_dir), **size, **options}
        if not self.playbook:  # The validation of the start and three steps, each with one of its own.
            options = {"max_metric_calls": N + 3 * (2 * STEP + N), **options}
        optimizer = self.task.make(lm, **options)
        with dspy.context(lm=lm):
            if self.online:
                return optimizer.learn(program, examples(N))[1]
            given = traces(self.num_traces, **({} if told is None else {"feedback": told})) or None
            trainset = examples(self.num_examples, start=self.num_traces)
            return optimizer.compile(program, trainset, valset=examples(N), traces=given)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("search", num_examples=N),
        Kind("traces", num_traces=N),
        Kind("traces, then search", num_traces=8, num_examples=4),
        Kind("playbook", playbook=True, num_examples=N),
        Kind("playbook on traces", playbook=True, num_traces=N),
        Kind("playbook on traces, then a trainset", playbook=True, num_traces=8, num_examples=4),
        Kind("playbook online", playbook=True, num_examples=N, online=True),
    )
}
OFFLINE = {name: kind for name, kind in KINDS.items() if not kind.online}

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_offline_kind = pytest.mark.parametrize("kind", OFFLINE.values(), ids=OFFLINE)


def texts(program) -> dict[str, str]:
    return {name: predictor.signature.instructions for name, predictor in program.named_predictors()}


def known(program) -> set[int]:
    """The questions that a program knows the answer to."""
    return numbers_in(" ".join(texts(program).values()))


# Secrets -------------------------------------------------------------------------------------------------------

# They look like no keys, so that only a run that knows them can hide them.
SECRETS = {
    "reflection LM": "paper-boat-harbour",
    "configured LM": "velvet-lamp-orchard",
    "predictor's LM": "copper-kite-meadow",
    "nested LM": "amber-flute-glacier",
    "environment": "cedar-wheel-lagoon",
}
ECHO = " and ".join(SECRETS.values())


class Secretive(dspy.Module):
    """Its answers say all keys, and so does its error."""

    def __init__(self, lm, nested):
        super().__init__()
        self.self = dspy.Predict("question -> answer")
        self.self.lm = lm
        self.judges = {"strict": [nested]}  # `predictors()` does not show it.

    def forward(self, question):
        if question == "question 5":
            raise RuntimeError(f"403 for {ECHO}")
        return dspy.Prediction(answer=self.self(question=question).answer.split()[0], note=ECHO)


def echoing_metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
    made = metric(gold, pred)
    return dspy.Prediction(score=made.score, feedback=f"{made.feedback} {ECHO}")


def echoed(reply):
    """What a model says that repeats all keys in each of its texts."""
    if isinstance(reply, dict):
        return {name: item if name in KEPT else echoed(item) for name, item in reply.items()}
    return [echoed(item) for item in reply] if isinstance(reply, list) else f"{reply} {ECHO}"


KEPT = ("type", "id", "section", "tag", "reflection_ids")


@contextmanager
def served(lm, api_key="test-key", model="openai/gpt-4o-mini", change=lambda reply: reply, usage=None):
    """A real `dspy.LM`, whose server answers as the scripted `lm` does."""

    def answers(request):
        system, *messages = request["messages"]
        made = [getattr(lm15.Message, message["role"])(message["content"]) for message in messages]
        response = lm.engine.complete(lm15.Request(lm.model, made, system=system["content"]))
        fields = json.loads(response.text)
        return Reply(json.dumps(change(fields)), usage=usage)

    with OpenAIServer(answers, api_key) as server:
        options = {"api_base": server.api_base, "api_key": api_key, "cache": False, "num_retries": 0}
        yield dspy.LM(model, engine="lm15", **options)
    assert not server.handler_errors


@every_kind
def test_no_secret_of_the_run_reaches_a_prompt_a_program_a_file_a_log_or_a_listener(
    kind, tmp_path, caplog, monkeypatch
):
    """Models, tools and the metric echo the keys of all language models of the run, and one in the environment."""
    monkeypatch.setenv("SOME_SERVICE_TOKEN", SECRETS["environment"])
    scripts = {name: kind.lm() for name in SECRETS}
    steps, told = [], f"rule-answer-1 {ECHO}"
    with ExitStack() as stack:
        lms = {of: stack.enter_context(served(scripts[of], key, change=echoed)) for of, key in SECRETS.items()}
        options = {"metric": echoing_metric, "step_callbacks": [steps.append], "reflection_lm": lms["reflection LM"]}
        program = Secretive(lms["predictor's LM"], lms["nested LM"])
        stack.enter_context(caplog.at_level(logging.DEBUG, "dspy_combee"))
        stack.enter_context(dspy.context(adapter=dspy.JSONAdapter()))
        learned = kind.run(lms["configured LM"], program, told=told, log_dir=tmp_path, **options)
    files = {path: path.read_bytes().decode("utf-8", "replace") for path in tmp_path.rglob("*") if path.is_file()}
    prompts = [call.prompt for lm in scripts.values() for call in lm.calls]
    said = {
        "prompts": "".join(prompts),
        "program": "".join(texts(learned).values()),
        "log": caplog.text + "".join(repr(record.__dict__) for record in caplog.records),
        "listeners": repr(steps),
        "results": repr(learned.detailed_results) + json.dumps(learned.detailed_results.to_dict(), default=str),
        **{path.name: text for path, text in files.items()},
    }
    assert [(what, of) for what, text in said.items() for of, secret in SECRETS.items() if secret in text] == []
    assert any("[redacted]" in prompt for prompt in prompts if is_reflection(prompt)), "the rest is there"
    assert kind.online or kind.state in {path.name for path in files}


# Time ----------------------------------------------------------------------------------------------------------

LIMIT: Any = contextvars.ContextVar("LIMIT", default=None)
GIVE_UP: Any = contextvars.ContextVar("GIVE_UP")


class GivenUpError(BaseException):
    """Ends a call that was given up; it holds what stands in its place."""


def hang():
    """Stand for a call that never returns: `Hurried` gives it up at once, while it is under way."""
    raise GivenUpError(GIVE_UP.get()())


class Hurried(ThreadExecutor):
    """Gives up what hangs as if its time had passed, and shows each call the time limit that it is made under."""

    def map(self, function, items, *, timeout=None, on_timeout=None):
        def limited(item):
            LIMIT.set(timeout)
            GIVE_UP.set(lambda: on_timeout(item))
            try:
                return function(item)
            except GivenUpError as error:
                return error.args[0]

        return super().map(limited, items, timeout=timeout, on_timeout=on_timeout)


ROLLOUT_LIMIT, REFLECTION_LIMIT = 1000.0, 2000.0


@every_kind
def test_every_rollout_feedback_and_reflection_call_has_its_time_limit(kind):
    """A rollout, a feedback call and a reflection call hang; all calls are made under the limit of their kind."""
    limits: dict[str, set] = {"rollout": set(), "feedback": set(), "reflection": set()}

    def judge(gold, pred, trace=None, pred_name=None, pred_trace=None):
        limits["rollout" if pred_name is None else "feedback"].add(LIMIT.get())
        if pred_name is None:
            return metric(gold, pred).score  # The feedback comes from another call.
        if gold.number in (2, 10):
            hang()
        return metric(gold, pred, trace, pred_name, pred_trace)

    def hangs(prompt):
        limits["rollout" if is_rollout(prompt) else "reflection"].add(LIMIT.get())
        hung = question_in(prompt) in (1, 11) if is_rollout(prompt) else not reflected
        reflected.extend([prompt] * is_reflection(prompt))
        if hung:
            hang()
        return False

    reflected, steps = [], []
    lm = kind.lm((hangs, ""))
    program = kind.run(
        lm,
        metric=judge,
        executor=Hurried(3),
        rollout_timeout=ROLLOUT_LIMIT,
        reflection_timeout=REFLECTION_LIMIT,
        step_callbacks=[steps.append],
    )
    asks = kind.num_examples and not kind.online
    assert limits == {
        "rollout": {ROLLOUT_LIMIT},
        "feedback": {ROLLOUT_LIMIT} if asks else set(),
        "reflection": {REFLECTION_LIMIT},
    }
    assert "took longer than 2000 seconds" in repr(steps)
    assert kind.num_examples == 0 or any("took longer than 1000 seconds" in prompt for prompt in reflected)
    assert len(known(program)) > STEP or kind.online


# Money ---------------------------------------------------------------------------------------------------------

MILLION = {"prompt_tokens": 1_000_000, "completion_tokens": 0, "total_tokens": 1_000_000}  # It costs 0.15 dollars.


@every_kind
@pytest.mark.parametrize("limit", [0.5, 1.0])
def test_max_reflection_cost_ends_the_run_and_what_was_paid_for_is_kept(kind, limit, tmp_path, caplog):
    script, steps = kind.lm(), []
    with served(script, usage=MILLION) as lm, caplog.at_level(logging.INFO, "dspy_combee"):
        options = {"reflection_lm": lm, "max_reflection_cost": limit, "step_callbacks": [steps.append]}
        program = kind.run(kind.lm(), log_dir=tmp_path, **options)
    calls = [call for call in script.calls if is_reflection(call.prompt)]
    spent = program.detailed_results.spent.usage_in("reflection")
    assert spent.calls == len(calls)
    assert limit <= spent.cost == pytest.approx(0.15 * len(calls))
    in_steps = [node.usage for step in steps for node in step.nodes]
    in_steps += [reflection.usage for step in steps for reflection in getattr(step, "reflections", ())]
    assert sum(usage.cost for usage in in_steps) == pytest.approx(spent.cost), "of a step that was cut short too"
    kept = [str(name).split(":")[0].split()[-1] for step in steps if step.accepted for name in step.minibatch_ids]
    assert known(program) <= {int(name) for name in kept}
    assert any("max_reflection_cost" in step.reason for step in steps) or "max_reflection_cost" in caplog.text
    whole = kind.run(kind.lm()).detailed_results
    assert kind.online or len(steps) <= len(whole.steps)
    assert len(known(program)) < N


@every_kind
def test_a_limit_of_money_that_cannot_be_kept_is_an_error(kind):
    unpriced = served(kind.lm(), model="openai/of-no-known-price", usage=MILLION)
    with unpriced as lm, pytest.raises(UnknownCostError) as caught:
        kind.run(kind.lm(), reflection_lm=lm, max_reflection_cost=1.0)
    assert known(caught.value.best_program) == set()


# A full disk ---------------------------------------------------------------------------------------------------


@contextmanager
def file_size_limit():
    """Set how large files may become, which is as near as a test comes to a full disk; undone at the end."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (before[1] if size is None else size, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@every_offline_kind
@pytest.mark.parametrize("until", [3, None], ids=["until step 3", "to the end"])
def test_a_full_disk_at_the_step_log_costs_no_step(kind, until, tmp_path, caplog):
    log, seen = tmp_path / "steps.jsonl", []
    with file_size_limit() as limit:

        def fill(step):
            seen.append(step.to_dict())
            if step.iteration == 1:
                limit(log.stat().st_size + 100)  # The state is smaller.
            elif step.iteration == (until or 0) - 1:
                limit(None)

        program = kind.run(kind.lm(), log_dir=tmp_path, step_callbacks=[fill])
    assert len(seen) == 3
    assert "Step 2 is not in" in caplog.text
    assert [step.to_dict() for step in program.detailed_results.steps] == seen
    assert [step.to_dict() for step in read_steps(log)] == (seen if until else seen[:1]), "whole lines"
    assert texts(kind.run(kind.lm(), log_dir=tmp_path)) == texts(program)


@every_offline_kind
def test_a_full_disk_at_the_state_ends_the_run_and_the_state_before_stays(kind, tmp_path):
    whole = kind.run(kind.lm())
    with file_size_limit() as limit, pytest.raises(OSError, match="too large") as caught:
        kind.run(kind.lm(), log_dir=tmp_path, step_callbacks=[lambda step: limit(500)])
    assert known(caught.value.best_program)
    resumed = kind.run(kind.lm(), log_dir=tmp_path)
    assert texts(resumed) == texts(whole)
    assert resumed.detailed_results.spent == whole.detailed_results.spent


# Memory --------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("with_log_dir", [True, False])
def test_past_steps_are_not_kept_in_memory_where_nobody_wants_them(kind, with_log_dir, tmp_path):
    refs, alive = [], []

    def note(step):
        gc.collect()
        alive.append(sum(ref() is not None for ref in refs))
        refs.extend(weakref.ref(part) for part in (step, *step.reductions, *step.nodes))

    program = kind.run(
        kind.lm(), track_stats=False, log_dir=tmp_path if with_log_dir else None, n=2, step_callbacks=[note]
    )
    assert not hasattr(program, "detailed_results")
    assert len(alive) == 1 if kind.online else len(alive) >= 3
    assert max(alive) < 12, "the last step at most"


@every_kind
def test_dspys_histories_stay_empty_where_the_user_wants_none(kind):
    lm = kind.lm()
    judge = dspy.Predict("question -> answer")

    def judged(gold, pred, trace=None, pred_name=None, pred_trace=None):
        judge(question=f"question {gold.number}")
        return metric(gold, pred, trace, pred_name, pred_trace)

    trace = []
    with dspy.context(disable_history=True, max_history_size=0, trace=trace):
        program = kind.run(lm, metric=judged)
    assert known(program) == set(range(N))
    assert (base_lm.GLOBAL_HISTORY, lm.history, judge.history, trace) == ([], [], [], [])


# Killed, and going on ------------------------------------------------------------------------------------------


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(kind, wanted, number, log_dir):
    """SIGKILL at this rollout or reflection call."""
    left = [number]

    def deadly(prompt):
        left[0] -= wanted(prompt)
        return left[0] == 0 and kill()

    kind.run(kind.lm((deadly, "")), log_dir=log_dir)


def after_step(kind, number, log_dir):
    kind.run(kind.lm(), log_dir=log_dir, step_callbacks=[lambda step: step.iteration == number and kill()])


def at_state(kind, number, log_dir):
    """The n-th state is written, and not yet in its place."""
    replace, left = os.replace, [number]

    def deadly(source, target):
        left[0] -= Path(target).name in (kind.state, "trace_state.json")
        return kill() if left[0] == 0 else replace(source, target)

    os.replace = deadly
    kind.run(kind.lm(), log_dir=log_dir)


MOMENTS = {
    "in a rollout": lambda kind, log_dir: at_call(kind, is_rollout, 40, log_dir),
    "in a reflection call": lambda kind, log_dir: at_call(kind, is_reflection, 8, log_dir),
    "between two steps": lambda kind, log_dir: after_step(kind, 2, log_dir),
    "while the state is written": lambda kind, log_dir: at_state(kind, 3, log_dir),
}


def main(root):
    for name, kind in OFFLINE.items():
        for moment, die in MOMENTS.items():
            child = os.fork()
            if child == 0:
                die(kind, str(Path(root) / name / moment))
                os._exit(1)  # It was to die before.
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (name, moment, status)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder that holds the log folders of the killed runs."""
    root = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-W", "ignore", "-m", "tests.test_run_contracts", str(root)]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    here = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def account(program) -> dict[str, Any]:
    """What two equal runs have in common."""
    result = program.detailed_results
    told = ("iteration", "minibatch_ids", "n", "accepted", "candidate", "parent", "scores_before", "scores_after")
    return {
        "program": texts(program),
        "steps": [[getattr(step, name) for name in (*told, "reason", "validation_score")] for step in result.steps],
        "batch_sizes": result.batch_sizes,
        "spent": result.spent,
    }


@pytest.mark.parametrize("moment", MOMENTS)
@every_offline_kind
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(kind, moment, killed, caplog):
    whole_lm, made = kind.lm(), []
    whole = kind.run(whole_lm, step_callbacks=[lambda step: made.append(len(whole_lm.calls))])
    log_dir, lm = killed / kind.name / moment, kind.lm()
    if moment == "between two steps":  # A line that a kill cut short, within a character.
        with (log_dir / "steps.jsonl").open("ab") as file:
            file.write('{"iteration": 3, "reason": "覚'.encode()[:-1])
    resumed = kind.run(lm, log_dir=log_dir)
    assert account(resumed) == account(whole)
    assert [step.iteration for step in read_steps(log_dir)] == [1, 2, 3]
    assert ("is incomplete and is left out" in caplog.text) == (moment == "between two steps")
    paid = len(whole_lm.calls) - len(lm.calls)
    assert made[0] <= paid, "nothing that had ended is paid for again, and the validation of the start is not"
    if moment == "between two steps":
        assert paid in made[:2], "GEPA saves a step when the next one begins"


@every_offline_kind
def test_a_finished_run_has_nothing_to_do_again_and_its_log_dir_is_for_no_other(kind, tmp_path):
    whole = kind.run(kind.lm(), log_dir=tmp_path)
    lm = kind.lm()
    assert account(kind.run(lm, log_dir=tmp_path)) == account(whole)
    with pytest.raises(ValueError, match=r"another (run|program)[\s\S]*another log_dir"):
        kind.run(lm, Chain(), log_dir=tmp_path)
    assert lm.calls == []


@every_offline_kind
def test_a_log_dir_that_a_run_uses_is_refused(kind, tmp_path):
    refused = []

    def start_another(step):
        lm = kind.lm()
        with pytest.raises(ValueError, match="is in use by a run that has not ended"):
            kind.run(lm, log_dir=tmp_path)
        refused.append(lm.calls)

    kind.run(kind.lm(), log_dir=tmp_path, step_callbacks=[start_another])
    assert refused == [[], [], []], "nothing is spent"


@every_offline_kind
def test_a_run_of_version_0_1_goes_on(kind, tmp_path):
    """`data/states_0_1` holds what it left after two steps, or three, of which gepa makes the third again."""
    whole_lm, lm = kind.lm(), kind.lm()
    whole = kind.run(whole_lm)
    shutil.copytree(STATES_0_1 / kind.name.replace(",", "").replace(" ", "_"), tmp_path, dirs_exist_ok=True)
    assert account(kind.run(lm, log_dir=tmp_path)) == account(whole)
    assert 0 < len(lm.calls) < 0.7 * len(whole_lm.calls)


# What ends a run, and what does not ----------------------------------------------------------------------------


class Terminal(StringIO):
    """A standard error that is a terminal."""

    def isatty(self):
        return True


@contextmanager
def terminal():
    """Put a terminal in the place of standard error, and give what is written to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", Terminal())
        yield sys.stderr


def after_first_step(kind, error, *, of=is_reflection):
    """A language model that gives this, or raises it, once a step has ended; and the callback that tells it so."""
    ended = []
    return kind.lm((lambda prompt: of(prompt) and (ended or kind.online), error)), ended.append


def learned_in_the_first_step(kind, error) -> bool:
    return len(known(error.best_program)) == (0 if kind.online else STEP)


@every_kind
@pytest.mark.parametrize("with_log_dir", [True, False])
@pytest.mark.parametrize("of", [is_rollout, is_reflection])
def test_an_interrupt_carries_the_best_program_and_says_how_to_go_on(kind, of, with_log_dir, tmp_path, caplog):
    lm, note = after_first_step(kind, KeyboardInterrupt(), of=of)
    log_dir = tmp_path if with_log_dir else None
    with pytest.raises(KeyboardInterrupt) as caught, terminal() as written:
        kind.run(lm, log_dir=log_dir, step_callbacks=[note], verbose=True)
    assert learned_in_the_first_step(kind, caught.value)
    assert ("Combee:" in written.getvalue()) != kind.online
    assert "100%" not in written.getvalue()
    (line,) = [record.getMessage() for record in caplog.records if "Interrupted" in record.message]
    goes_on = with_log_dir and not kind.online
    assert ("same log_dir goes on from there" in line) == goes_on
    if goes_on:
        assert account(kind.run(kind.lm(), log_dir=log_dir)) == account(kind.run(kind.lm()))


@every_kind
def test_three_failed_steps_in_a_row_end_a_run(kind):
    lm, note = after_first_step(kind, "I would rather not.")
    if kind.online:
        assert known(kind.run(lm, n=2)) == set(), "a window in which reflection fails changes nothing"
        return
    steps = []
    with pytest.raises(ReflectionError, match=r"in 3 steps in a row\. The last cause: .*no JSON object") as caught:
        kind.run(lm, n=2, step_callbacks=[note, steps.append])
    assert len(known(caught.value.best_program)) == 2
    assert [step.accepted for step in steps] == [True, False, False, False]
    assert all("no JSON object" in step.reason for step in steps[1:])


@every_kind
@pytest.mark.parametrize("of", [is_rollout, is_reflection])
@pytest.mark.parametrize("error", [lm15.AuthError("bad key"), lm15.TransportError("no route")], ids=["auth", "outage"])
def test_a_provider_that_refuses_or_is_gone_ends_a_run_with_the_best_program(kind, error, of, tmp_path):
    lm, note = after_first_step(kind, error, of=of)
    executor = ThreadExecutor(3, Backoff(incidents=2, first_delay=0.001))
    with pytest.raises(ProviderError, match=r"bad key|no route") as caught:
        kind.run(lm, executor=executor, log_dir=tmp_path, step_callbacks=[note])
    assert caught.value.transient == isinstance(error, lm15.TransportError)
    assert learned_in_the_first_step(kind, caught.value)
    if not kind.online:
        assert account(kind.run(kind.lm(), log_dir=tmp_path)) == account(kind.run(kind.lm()))


@every_kind
def test_calls_that_a_provider_turns_away_are_made_again(kind):
    failures = [lm15.RateLimitError("slow down"), ConnectionError("reset"), TimeoutError("late")]
    lm = kind.lm((is_rollout, failures), (is_reflection, list(failures)))
    program = kind.run(lm, executor=ThreadExecutor(3, Backoff(first_delay=0.001)))
    assert account(program) == account(kind.run(kind.lm()))
    assert len(lm.calls) == program.detailed_results.spent.usage.calls + 6


@every_kind
def test_a_step_callback_that_raises_ends_no_run(kind, caplog):
    def report(step):
        raise RuntimeError("the dashboard is away")

    steps = []
    assert known(kind.run(kind.lm(), step_callbacks=[report, steps.append])) == set(range(N))
    assert len(steps) == (1 if kind.online else 3)
    assert caplog.text.count("A step callback raised an error; the run goes on.") == len(steps)
    assert "RuntimeError: the dashboard is away" in caplog.text


# Seeing it -----------------------------------------------------------------------------------------------------


@every_offline_kind
def test_each_step_is_in_mlflow_in_one_run(kind, mlflow, monkeypatch):  # noqa: F811
    result = kind.run(kind.lm(), use_mlflow=True).detailed_results
    (run,) = runs_of(mlflow)
    assert run.info.status == "FINISHED"
    assert mlflow.active_run() is None
    steps = result.steps
    assert series(mlflow, run.info.run_id, "combee/n") == [(step.iteration, STEP) for step in steps]
    assert series(mlflow, run.info.run_id, "combee/score/best") == [(s.iteration, s.best_score) for s in steps]
    assert run.data.metrics["combee/metric_calls"] == steps[-1].metric_calls


@every_kind
def test_a_run_shows_one_line_and_sums_itself_up(kind, capsys, caplog):
    full = []
    with caplog.at_level(logging.INFO, "dspy_combee"), terminal() as shown:
        kind.run(kind.lm(), verbose=True, step_callbacks=[lambda step: full.append("100%" in shown.getvalue())])
    written = shown.getvalue()
    assert capsys.readouterr() == ("", "")
    if kind.online:
        assert written == ""
        return
    states = [state for state in re.split(r"[\r\n]+", written) if state.startswith("Combee")]
    percents = [int(re.search(r"(\d+)%", state)[1]) for state in states]
    assert percents == sorted(percents)
    assert percents[-1] == 100
    assert full == [False] * 3, "never before the end"
    assert written.count("\n") == 1, "the one after the line, when it is done"
    assert all(f"{fact}=" in states[-1] for fact in ("step", "n", "best", "reflections"))
    (line,) = [text for text in caplog.messages if text.startswith(("Combee ended", "Learning ended after 3"))]
    assert re.search(r"3 steps.*reflection calls", line)


@every_kind
@pytest.mark.parametrize("num_threads", [1, 3])
def test_no_more_calls_are_in_flight_than_num_threads(kind, num_threads):
    lm = kind.lm(latency=0.0005)
    kind.run(lm, num_threads=num_threads)
    assert lm.peak_concurrency == num_threads


if __name__ == "__main__":
    main(sys.argv[1])
