"""Map: rollouts in order whatever the program does, and a score of whatever the metric returns."""

import asyncio
import copy
import decimal
import fractions
import logging
import math
import random
import threading
import weakref
from typing import Any

import dspy
import numpy as np
import pytest
from dspy import lm15
from dspy.teleprompt.bootstrap_trace import FailedPrediction

from dspy_combee import ProviderError, ThreadExecutor
from dspy_combee.calls.executors import Backoff
from dspy_combee.rollouts.feedback import Scorer
from dspy_combee.rollouts.map import MapStage, ProgramCopier
from dspy_combee.testing import ScriptedLM

QUICK = Backoff(incidents=2, attempts=2, first_delay=0.001)


def examples(n: int, **more: Any) -> list[dspy.Example]:
    return [dspy.Example(question=f"q{i}", **more).with_inputs("question", *more) for i in range(n)]


def question_of(prompt) -> str:
    return prompt.question.split("[[ ## question ## ]]\n")[1].split()[0]


def echo() -> ScriptedLM:
    """Answers with the question."""
    return ScriptedLM(default=lambda prompt: dict.fromkeys(prompt.output_fields, question_of(prompt)))


def one(gold, pred, trace=None, pred_name=None, pred_trace=None):
    return 1.0


def run(program, batch, *, metric=one, lm=None, num_threads=4, timeout=None, **scorer):
    executor = ThreadExecutor(num_threads, QUICK)
    stage = MapStage(ProgramCopier(program), Scorer(metric, **scorer), executor, timeout)
    with dspy.context(lm=lm or echo()):
        return stage.run([(program, batch)])


# Programs -----------------------------------------------------------------------------------------------------


class Misbehaving(dspy.Module):
    """Does to q2 what it is told; answers the others."""

    def __init__(self, misdeed) -> None:
        super().__init__()
        self.solve = dspy.Predict("question -> answer")
        self.misdeed = misdeed

    def forward(self, question, **more):
        prediction = self.solve(question=question)
        return self.misdeed(self, **more) if question == "q2" else prediction


def raise_key_error(program, **more):
    raise KeyError("no such city")


def raise_what_cannot_be_printed(program, **more):
    raise UnprintableError


def raise_cancelled(program, **more):
    raise asyncio.CancelledError("by a tool")


def return_nothing(program, **more):
    return None


def fail_inside_a_predictor(program, **more):
    return program.solve(question=object.__new__(Unprintable))


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("cannot be printed")

    __repr__ = __str__


class UnprintableError(Unprintable, Exception):
    pass


@pytest.mark.parametrize("num_threads", [1, 8])
@pytest.mark.parametrize(
    ("misdeed", "reason", "steps"),
    [
        (raise_key_error, "KeyError: 'no such city'", 1),
        (raise_what_cannot_be_printed, "UnprintableError: <UnprintableError without a text: RuntimeError>", 1),
        (raise_cancelled, "CancelledError: by a tool", 1),
        (return_nothing, "the program returned nothing", 1),
        (fail_inside_a_predictor, "RuntimeError: cannot be printed", 2),
    ],
)
def test_misbehaving_program_gives_five_results_in_order(misdeed, reason, steps, num_threads):
    scored = []

    def metric(gold, pred, *_):
        scored.append(gold.question)
        return 1.0

    rollouts = run(Misbehaving(misdeed), examples(5), metric=metric, num_threads=num_threads, failure_score=-1.0)
    assert [rollout.index for rollout in rollouts] == [0, 1, 2, 3, 4]
    assert [rollout.example.question for rollout in rollouts] == ["q0", "q1", "q2", "q3", "q4"]
    assert [rollout.score for rollout in rollouts] == [1.0, 1.0, -1.0, 1.0, 1.0]
    assert [rollout.error for rollout in rollouts] == [None, None, reason, None, None]
    assert rollouts[2].prediction is None
    assert rollouts[2].result is None
    assert len(rollouts[2].trace) == steps
    assert {step.name for step in rollouts[2].trace} == {"solve"}
    assert sorted(scored) == ["q0", "q1", "q3", "q4"], "a failed rollout is not scored by the metric"


@pytest.mark.parametrize("num_threads", [1, 8])
def test_a_program_that_exits_ends_the_run(num_threads):
    def leave(program, **more):
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        run(Misbehaving(leave), examples(5), num_threads=num_threads)


def test_failed_call_stands_in_the_trace_with_its_own_inputs():
    (*_, rollout), broken = run(Misbehaving(fail_inside_a_predictor), examples(3)), Unprintable
    *_, failed = rollout.trace
    assert failed.outputs is None
    assert isinstance(failed.inputs["question"], broken)


def test_half_the_fields_is_a_failed_rollout_with_the_raw_reply():
    lm = ScriptedLM(
        default=lambda prompt: {"first": "half"} if question_of(prompt) == "q2" else {"first": "a", "second": "b"}
    )
    rollouts = run(dspy.Predict("question -> first, second"), examples(5), lm=lm)
    assert [rollout.score for rollout in rollouts] == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert rollouts[2].error.startswith("AdapterParseError: ")
    (step,) = rollouts[2].trace
    assert step.name == "self"
    assert step.inputs == {"question": "q2"}
    assert isinstance(step.outputs, FailedPrediction)
    assert "half" in step.outputs.completion_text


class Wrapping(dspy.Module):
    """Hides where an error came from."""

    def __init__(self, chained: bool) -> None:
        super().__init__()
        self.twin = dspy.Predict("question -> first, second")
        self.solve = copy.deepcopy(self.twin)
        self.chained = chained

    def forward(self, question):
        try:
            return self.solve(question=question)
        except Exception as error:
            if self.chained:
                raise LookupError("it went wrong") from error
            raise LookupError("it went wrong")  # noqa: B904 (that is what is tested)


@pytest.mark.parametrize("chained", [True, False])
def test_call_that_failed_is_found_behind_another_error(chained):
    lm = ScriptedLM(default={"first": "half"})
    (rollout,) = run(Wrapping(chained), examples(1), lm=lm)
    assert rollout.error == "LookupError: it went wrong"
    (step,) = rollout.trace
    assert step.name == "solve", "not its twin"
    assert isinstance(step.outputs, FailedPrediction)


class Mutating(dspy.Module):
    """Changes in place whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.solve = dspy.Predict("question -> answer")

    def forward(self, question, tags, nested, history):
        tags.append("mine")
        nested["list"].append(len(nested["list"]))
        history.messages.append({"question": "mine", "answer": "mine"})
        return dspy.Prediction(answer=self.solve(question=question).answer, tags=len(tags))


def test_program_that_mutates_its_inputs():
    history = dspy.History(messages=[{"question": "old", "answer": "old"}])
    batch = examples(5, tags=["a"], nested={"list": []}, history=history)
    for _ in range(2):
        rollouts = run(Mutating(), batch)
        assert [rollout.prediction.tags for rollout in rollouts] == [2] * 5
    for example in batch:
        assert (example.tags, example.nested) == (["a"], {"list": []})
        assert len(example.history.messages) == 1


def test_images_are_the_example_s_own_also_inside_containers():
    image = dspy.Image("https://example.com/a.png")
    seen = []

    class Looking(dspy.Module):
        def forward(self, question, images, history):
            seen.append((images, images[0], history.messages[0]["image"]))
            return dspy.Prediction(answer="x")

    history = dspy.History(messages=[{"image": image}])
    batch = examples(2, images=[image], history=history)
    assert [rollout.error for rollout in run(Looking(), batch)] == [None, None]
    for images, first, in_history in seen:
        assert images is not batch[0].images
        assert first is image
        assert in_history is image


def test_input_that_cannot_be_copied_is_shared():
    lock = threading.Lock()

    class Using(dspy.Module):
        def forward(self, question, lock):
            return dspy.Prediction(lock=lock)

    (rollout,) = run(Using(), examples(1, lock=lock))
    assert rollout.prediction.lock is lock


def test_example_without_inputs_is_an_error_not_a_score():
    with pytest.raises(ValueError, match="Inputs have not been set"):
        run(dspy.Predict("question -> answer"), [dspy.Example(question="q0")])


@pytest.mark.parametrize("value", ["a text", 7, {"answer": "x"}])
def test_program_may_return_what_it_likes(value):
    class Returning(dspy.Module):
        def forward(self, question):
            return value

    (rollout,) = run(Returning(), examples(1), metric=lambda gold, pred, *_: float(pred == value))
    assert (rollout.prediction, rollout.score) == (value, 1.0)


# Traces -------------------------------------------------------------------------------------------------------


class Nested(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [dspy.Predict("question -> answer"), dspy.ChainOfThought("question -> answer")]
        self.by_name = {"last": dspy.Predict("question -> answer")}
        self.frozen = dspy.Predict("question -> answer")
        holder = dspy.Module()
        holder.inner = self.frozen
        holder._compiled = True
        self.frozen = None
        self.holder = holder

    def forward(self, question):
        fresh = dspy.Predict("question -> answer")
        for predictor in (*self.parts, self.by_name["last"], self.holder.inner, fresh):
            prediction = predictor(question=question)
        return prediction


@pytest.mark.parametrize("num_threads", [1, 16])
def test_steps_carry_names(num_threads):
    program = Nested()
    rollouts = run(program, examples(16), num_threads=num_threads)
    for rollout in rollouts:
        names = [step.name for step in rollout.trace]
        assert names == ["parts[0]", "parts[1].predict", "by_name['last']", None, None]
        assert {step.inputs["question"] for step in rollout.trace} == {rollout.example.question}
        assert {step.outputs.answer for step in rollout.trace} == {rollout.example.question}
    named = [{id(step.predictor) for step in rollout.trace[:3]} for rollout in rollouts]
    assert all(ids == named[0] for ids in named), "a named step does not keep the copy that ran"
    assert not any(str(predictor.stage).startswith("dspy_combee") for predictor in program.predictors())


def test_trace_is_whole_whatever_the_user_configured():
    with dspy.context(max_trace_size=0):
        (rollout,) = run(Nested(), examples(1))
    assert len(rollout.trace) == 5


def test_trace_of_the_caller_is_left_alone():
    trace: list[Any] = []
    with dspy.context(trace=trace):
        run(Nested(), examples(2), num_threads=1)
    assert trace == []


def test_calls_made_in_threads_of_the_program_are_in_its_trace():
    class Parallel(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.solve = dspy.Predict("question -> answer")

        def forward(self, question):
            pairs = [(self.solve, {"question": f"{question}-{i}"}) for i in range(3)]
            dspy.Parallel(num_threads=3, disable_progress_bar=True)(pairs)
            return dspy.Prediction(answer=question)

    for rollout in run(Parallel(), examples(4)):
        assert [step.name for step in rollout.trace] == ["solve"] * 3
        asked = sorted(step.inputs["question"] for step in rollout.trace)
        assert asked == [f"{rollout.example.question}-{i}" for i in range(3)]


def test_timed_out_rollout_keeps_the_calls_that_ended():
    go_on = threading.Event()

    class Stalling(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.solve = dspy.Predict("question -> answer")

        def forward(self, question):
            prediction = self.solve(question=question)
            if question == "q1":
                go_on.wait(60)
            return prediction

    try:
        rollouts = run(Stalling(), examples(3), timeout=2.0, failure_score=-1.0)
    finally:
        go_on.set()
    assert [rollout.score for rollout in rollouts] == [1.0, -1.0, 1.0]
    assert rollouts[1].error == "the rollout took longer than 2 seconds"
    assert [step.name for step in rollouts[1].trace] == ["solve"]
    assert rollouts[1].prediction is None


# Copies -------------------------------------------------------------------------------------------------------


def test_copies_share_lms_and_what_cannot_be_copied():
    class Holding(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.solve = dspy.Predict("question -> answer")
            self.solve.lm = dspy.LM("openai/some-model", api_key="none")
            self.lms = {"judges": [dspy.LM("openai/judge", api_key="none")]}
            self.lock = threading.Lock()
            self.mixed = [dspy.Predict("question -> answer"), threading.Lock(), {"state": []}]
            self.array = np.zeros(3)
            self.index = np.zeros(2_000_000)

    program = Holding()
    new = ProgramCopier(program).copy(program)
    assert new.solve is not program.solve
    assert new.solve.lm is program.solve.lm
    assert new.lms["judges"][0] is program.lms["judges"][0]
    assert new.lms is not program.lms
    assert new.lock is program.lock
    assert new.mixed[0] is not program.mixed[0]
    assert new.mixed[1] is program.mixed[1]
    assert new.mixed[2]["state"] is not program.mixed[2]["state"]
    assert new.array is not program.array
    assert new.index is program.index, "an array of 16 MB is not copied for each run"


def test_copying_what_changed_since(caplog):
    program = Misbehaving(return_nothing)
    program.again = program.solve
    copier = ProgramCopier(program)
    program.lock = threading.Lock()
    new = copier.copy(program)
    assert new.lock is program.lock
    assert new.solve is not program.solve
    assert new.again is new.solve, "what was one object is one object"
    assert caplog.records == []


def test_long_history_is_not_copied():
    copies = []

    class Entry:
        def __deepcopy__(self, memo):
            copies.append(self)
            return self

    program = dspy.Predict("question -> answer")
    program.history = [Entry()]
    new = ProgramCopier(program).copy(program)
    assert new.history == []
    assert copies == []


def test_copies_are_freed_when_their_rollout_ends():
    made: list[Any] = []
    alive: list[int] = []

    class Watched(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.solve = dspy.Predict("question -> answer")

        def forward(self, question):
            alive.append(sum(reference() is not None for reference in made))
            made.append(weakref.ref(self.solve))
            return self.solve(question=question)

    rollouts = run(Watched(), examples(8), num_threads=1)
    assert [rollout.error for rollout in rollouts] == [None] * 8
    assert alive == [0] * 8


# Scores -------------------------------------------------------------------------------------------------------


def score(result, caplog, **options):
    """The score of a metric's result, and the warnings."""
    caplog.clear()
    rollouts = run(
        dspy.Predict("question -> answer"), examples(3), metric=lambda *_: result, failure_score=-9.0, **options
    )
    (value,) = {rollout.score for rollout in rollouts}
    assert type(value) is float
    return value, [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (0.0, 0.0),
        (0, 0.0),
        (7, 7.0),
        (-3.5, -3.5),
        (True, 1.0),
        (False, 0.0),
        (np.float32(0.5), 0.5),
        (np.int64(1), 1.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (fractions.Fraction(1, 4), 0.25),
        (decimal.Decimal("0.5"), 0.5),
        ({"score": 0.5, "feedback": "f"}, 0.5),
        ({"score": 0.0, "feedback": ""}, 0.0),
        (dspy.Prediction(score=0.5, feedback="f"), 0.5),
        (dspy.Prediction(score=True), 1.0),
    ],
    ids=repr,
)
def test_metric_values_with_a_plain_meaning(result, expected, caplog):
    assert score(result, caplog) == (expected, [])


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "returned None instead of a number"),
        (math.nan, "nan, which is not a finite number"),
        (math.inf, "inf, which is not a finite number"),
        (-math.inf, "-inf, which is not a finite number"),
        (np.float64("nan"), "which is not a finite number"),
        ("1.0", "returned '1.0' instead of a number"),
        (b"1", "returned b'1' instead of a number"),
        ([1.0], "returned [1.0] instead of a number"),
        (np.zeros(3), "which is not a finite number"),
        (1j, "1j, which is not a finite number"),
        (10**400, "which is not a finite number"),
        ({}, "returned None instead of a number"),
        ({"feedback": "f"}, "returned None instead of a number"),
        (dspy.Prediction(score=None), "returned None instead of a number"),
        (dspy.Prediction(answer="x"), "returned None instead of a number"),
        ({"score": "high"}, "returned 'high' instead of a number"),
        pytest.param(
            Unprintable(), "returned <Unprintable without a text: RuntimeError> instead of a number", id="unprintable"
        ),
    ],
    ids=repr,
)
def test_metric_values_without_one_get_the_failure_score_and_one_warning(result, said, caplog):
    value, (warning,) = score(result, caplog, num_threads=8)
    assert value == -9.0
    assert said in warning
    assert "failure_score=-9" in warning


def test_scores_above_the_perfect_one_stand_and_are_warned_of_once(caplog):
    rollouts = run(
        dspy.Predict("question -> answer"),
        examples(11),
        metric=lambda gold, *_: int(gold.question[1:]),
        perfect_score=1.0,
    )
    assert [rollout.score for rollout in rollouts] == list(range(11))
    (record,) = caplog.records
    assert "above perfect_score=1" in record.getMessage()
    assert score(10, caplog, perfect_score=10.0) == (10.0, [])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ZeroDivisionError("no words"), "ZeroDivisionError: no words"),
        (asyncio.CancelledError("by a tool"), "CancelledError: by a tool"),
        pytest.param(UnprintableError(), "UnprintableError: <UnprintableError without a text", id="unprintable"),
    ],
)
def test_metric_that_raises_on_one_example(error, said, caplog):
    def metric(gold, pred, *_):
        if gold.question == "q2":
            raise error
        return -1.0

    rollouts = run(dspy.Predict("question -> answer"), examples(5), metric=metric, failure_score=-7.0)
    assert [rollout.score for rollout in rollouts] == [-1.0, -1.0, -7.0, -1.0, -1.0]
    assert [rollout.error for rollout in rollouts] == [None] * 5, "the program did nothing wrong"
    (record,) = caplog.records
    assert said in record.getMessage()


def test_objective_scores(caplog):
    result = {"score": 1.0, "objective_scores": {"brief": np.float32(0.5), "kind": None}}
    rollouts = run(dspy.Predict("question -> answer"), examples(2), metric=lambda *_: result)
    assert [rollout.objective_scores for rollout in rollouts] == [{"brief": 0.5, "kind": 0.0}] * 2
    odd = {"score": 1.0, "objective_scores": [1, 2]}
    assert run(dspy.Predict("question -> answer"), examples(1), metric=lambda *_: odd)[0].objective_scores == {}


def test_warnings_of_many_threads_come_once(caplog):
    batch = examples(200)
    run(dspy.Predict("question -> answer"), batch, metric=lambda *_: None, num_threads=32)
    assert len(caplog.records) == 1


# Providers ----------------------------------------------------------------------------------------------------


class Judging(dspy.Module):
    """Wraps what it calls, as programs do."""

    def __init__(self, wrap: str) -> None:
        super().__init__()
        self.solve = dspy.Predict("question -> answer")
        self.wrap = wrap

    def forward(self, question):
        try:
            return self.solve(question=question)
        except Exception as error:
            if self.wrap == "from":
                raise RuntimeError("my own") from error
            if self.wrap == "during":
                raise RuntimeError("my own")  # noqa: B904 (that is what is tested)
            raise


PROVIDER_ERRORS = [
    (lm15.AuthError("bad key"), False),
    (lm15.BillingError("no money"), False),
    (lm15.RateLimitError("slow down"), True),
    (lm15.TransportError("no network"), True),
    (ConnectionError("refused"), True),
    (TimeoutError("too slow"), True),
    (lm15.ServerError("503"), True),
]


@pytest.mark.parametrize(("error", "transient"), PROVIDER_ERRORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("wrap", ["no", "from", "during"])
def test_provider_error_is_no_score(error, transient, wrap):
    lm = ScriptedLM(default=lambda prompt: error if question_of(prompt) == "q2" else {"answer": "x"})
    scored = []
    with pytest.raises(ProviderError, match="A language model call failed") as caught:
        run(Judging(wrap), examples(5), lm=lm, metric=lambda *_: scored.append(1), num_threads=1)
    assert caught.value.transient is transient
    asked = [question_of(call.prompt) for call in lm.calls if question_of(call.prompt) == "q2"]
    assert len(asked) == (QUICK.attempts if transient else 1)
    assert len(scored) == 2


def test_provider_error_of_a_metric_is_no_score():
    judge = ScriptedLM(default=lm15.AuthError("bad key"))

    def metric(gold, pred, *_):
        with dspy.context(lm=judge):
            dspy.Predict("question -> verdict")(question="fine?")

    with pytest.raises(ProviderError, match="bad key"):
        run(dspy.Predict("question -> answer"), examples(2), metric=metric)


@pytest.mark.parametrize("kind", [lm15.InvalidRequestError, lm15.ContextLengthError])
def test_refused_request_is_the_program_s_failure(kind):
    lm = ScriptedLM(default=kind("this cannot be done"))
    (rollout,) = run(dspy.Predict("question -> answer"), examples(1), lm=lm)
    assert rollout.score == 0.0
    assert "this cannot be done" in rollout.error
    assert [(step.name, step.outputs) for step in rollout.trace] == [("self", None)]


def test_trouble_that_the_program_got_over_is_none():
    class FallingBack(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = dspy.Predict("question -> rare")
            self.second = dspy.Predict("question -> answer, more")

        def forward(self, question):
            try:
                return self.first(question=question)
            except Exception:
                return self.second(question=question)

    lm = ScriptedLM([("`rare`", lm15.RateLimitError("slow down"))], default={"answer": "half of it"})
    (rollout,) = run(FallingBack(), examples(1), lm=lm)
    assert rollout.error.startswith("AdapterParseError"), "a reply came: the provider is not to blame"


# Contexts -----------------------------------------------------------------------------------------------------


def test_caller_s_context_holds_inside():
    lms = {name: echo() for name in ("inner", "outer")}

    class Asking(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.solve = dspy.Predict("question -> answer")

        def forward(self, question):
            return dspy.Prediction(lm=dspy.settings.lm, answer=self.solve(question=question).answer)

    for name, lm in lms.items():
        with dspy.context(lm=lms["outer"]):
            rollouts = run(Asking(), examples(64), lm=lm, num_threads=32)
        assert {id(rollout.prediction.lm) for rollout in rollouts} == {id(lms[name])}
    assert {name: len(lm.calls) for name, lm in lms.items()} == {"inner": 64, "outer": 64}


class Callback(dspy.utils.callback.BaseCallback):
    def __init__(self) -> None:
        self.started: list[str] = []

    def on_module_start(self, call_id, instance, inputs):
        self.started.append(type(instance).__name__)

    def on_lm_start(self, call_id, instance, inputs):
        self.started.append("LM")


def test_callbacks_fire():
    callback = Callback()
    with dspy.context(callbacks=[callback]):
        run(dspy.ChainOfThought("question -> answer"), examples(8))
    assert sorted(callback.started) == ["ChainOfThought"] * 8 + ["LM"] * 8 + ["Predict"] * 8


def test_usage_of_each_prediction():
    with dspy.context(track_usage=True):
        rollouts = run(dspy.ChainOfThought("question -> answer"), examples(4))
    for rollout in rollouts:
        (usage,) = rollout.prediction.get_lm_usage().values()
        assert usage["prompt_tokens"] == rollout.usage.input_tokens > 0
        assert rollout.usage.calls == 1


@pytest.mark.parametrize("num_threads", [1, 16])
def test_track_usage_around_it_sees_every_rollout(num_threads):
    with dspy.track_usage() as tracker:
        rollouts = run(dspy.ChainOfThought("question -> answer"), examples(32), num_threads=num_threads)
    (usage,) = tracker.get_total_tokens().values()
    assert usage["prompt_tokens"] == sum(rollout.usage.input_tokens for rollout in rollouts)


def test_async_program_in_a_running_loop_keeps_the_context():
    class OnlyAsync(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.solve = dspy.Predict("question -> answer")

        async def aforward(self, question):
            await asyncio.sleep(0)
            return await self.solve.acall(question=question)

    async def main(num_threads):
        return run(OnlyAsync(), examples(9), num_threads=num_threads)

    for num_threads in (1, 8):
        rollouts = asyncio.run(main(num_threads))
        assert [rollout.prediction.answer for rollout in rollouts] == [f"q{i}" for i in range(9)]
        assert [[step.name for step in rollout.trace] for rollout in rollouts] == [["solve"]] * 9


def test_tool_with_a_lock():
    lock, order = threading.Lock(), []

    def tool(word: str) -> str:
        """Note a word."""
        with lock:
            order.append(("in", word))
            order.append(("out", word))
        return word

    class Using(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tools = [dspy.Tool(tool)]

        def forward(self, question):
            return dspy.Prediction(answer=self.tools[0](word=question))

    for num_threads in (1, 32):
        order.clear()
        rollouts = run(Using(), examples(64), num_threads=num_threads)
        assert [rollout.prediction.answer for rollout in rollouts] == [f"q{i}" for i in range(64)]
        assert all(order[i][1] == order[i + 1][1] for i in range(0, len(order), 2))


def test_several_programs_are_one_map():
    lm = ScriptedLM(default={"answer": "x"}, latency=lambda prompt, rng: random.uniform(0, 0.002))
    programs = [dspy.Predict(dspy.Signature("question -> answer", f"version {i}")) for i in range(3)]
    stage = MapStage(ProgramCopier(programs[0]), Scorer(one), ThreadExecutor(16))
    with dspy.context(lm=lm):
        rollouts = stage.run([(program, examples(8)) for program in programs])
    versions = [rollout.trace[0].predictor.signature.instructions for rollout in rollouts]
    assert versions == [f"version {i}" for i in range(3) for _ in range(8)]
    assert [rollout.index for rollout in rollouts] == [*range(8)] * 3


def test_nothing_is_logged_when_all_is_well(caplog):
    caplog.set_level(logging.WARNING)
    run(Nested(), examples(8))
    assert caplog.records == []
