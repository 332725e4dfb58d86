"""Map: rollouts in order whatever the program does, a score of whatever the metric returns, and reflection records."""

import asyncio
import contextvars
import copy
import decimal
import fractions
import itertools
import math
import threading
import weakref
from typing import Any

import dspy
import numpy as np
import pytest
from dspy import lm15
from dspy.teleprompt.bootstrap_trace import FailedPrediction

from dspy_combee import ProviderError, Rollout, ThreadExecutor
from dspy_combee.calls.executors import Backoff
from dspy_combee.records.types import TraceStep
from dspy_combee.rollouts.feedback import RecordMaker, Scorer
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


def run(program, batch, *, metric=one, lm=None, num_threads=4, executor=None, timeout=None, **scorer):
    executor = executor or ThreadExecutor(num_threads, QUICK)
    stage = MapStage(ProgramCopier(program), Scorer(metric, **scorer), executor, timeout)
    with dspy.context(lm=lm or echo()):
        return stage.run([(program, batch)])


def solver() -> Any:
    return dspy.Predict("question -> answer")


class Program(dspy.Module):
    """Runs a function of itself and the inputs; its predictors are given by their signatures."""

    def __init__(self, run, **attributes) -> None:
        super().__init__()
        self.run = run
        for name, value in attributes.items():
            setattr(self, name, dspy.Predict(value) if isinstance(value, str) else value)

    def forward(self, **inputs):
        return self.run(self, **inputs)


def doing(deed, only=None) -> Program:
    """Asks its predictor, then does the deed."""

    def run(self, question, **more):
        prediction = self.solve(question=question)
        return prediction if only not in (None, question) else deed(self, question=question, **more)

    return Program(run, solve="question -> answer")


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("cannot be printed")

    __repr__ = __str__


class UnprintableError(Unprintable, Exception):
    pass


def raising(error):
    def raise_it(*given, **more):
        raise error

    return raise_it


# Programs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 8])
@pytest.mark.parametrize(
    ("misdeed", "reason", "steps"),
    [
        (raising(KeyError("no such city")), "KeyError: 'no such city'", 1),
        (raising(UnprintableError()), "UnprintableError: <UnprintableError without a text: RuntimeError>", 1),
        (raising(asyncio.CancelledError("by a tool")), "CancelledError: by a tool", 1),
        (lambda program, question: None, "the program returned nothing", 1),
        (lambda program, question: program.solve(question=Unprintable()), "RuntimeError: cannot be printed", 2),
    ],
    ids=["raises", "unprintable", "cancelled", "nothing", "in a predictor"],
)
def test_misbehaving_program_gives_five_results_in_order(misdeed, reason, steps, num_threads):
    scored = []

    def metric(gold, pred, *_):
        scored.append(gold.question)
        return 1.0

    program = doing(misdeed, only="q2")
    rollouts = run(program, examples(5), metric=metric, num_threads=num_threads, failure_score=-1.0)
    assert [rollout.index for rollout in rollouts] == [0, 1, 2, 3, 4]
    assert [rollout.example.question for rollout in rollouts] == ["q0", "q1", "q2", "q3", "q4"]
    assert [rollout.score for rollout in rollouts] == [1.0, 1.0, -1.0, 1.0, 1.0]
    assert [rollout.error for rollout in rollouts] == [None, None, reason, None, None]
    assert (rollouts[2].prediction, rollouts[2].result) == (None, None)
    assert [step.name for step in rollouts[2].trace] == ["solve"] * steps
    assert sorted(scored) == ["q0", "q1", "q3", "q4"], "a failed rollout is not scored by the metric"
    if steps == 2:  # The call that failed stands in the trace with its own inputs.
        failed = rollouts[2].trace[1]
        assert failed.outputs is None
        assert isinstance(failed.inputs["question"], Unprintable)


@pytest.mark.parametrize("num_threads", [1, 8])
def test_a_program_that_exits_ends_the_run(num_threads):
    with pytest.raises(SystemExit, match="3"):
        run(doing(raising(SystemExit(3)), only="q2"), examples(5), num_threads=num_threads)


def test_half_the_fields_is_a_failed_rollout_with_the_raw_reply():
    whole = {"first": "a", "second": "b"}
    lm = ScriptedLM(default=lambda prompt: {"first": "half"} if question_of(prompt) == "q2" else whole)
    rollouts = run(dspy.Predict("question -> first, second"), examples(5), lm=lm)
    assert [rollout.score for rollout in rollouts] == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert rollouts[2].error.startswith("AdapterParseError: ")
    (step,) = rollouts[2].trace
    assert (step.name, step.inputs) == ("self", {"question": "q2"})
    assert "half" in step.outputs.completion_text


def calling(how):
    """Calls its predictor, and hides where an error came from."""

    def run(self, question):
        try:
            return self.solve(question=question)
        except Exception as error:
            if how == "from":
                raise LookupError("it went wrong") from error
            if how == "during":
                raise LookupError("it went wrong")  # noqa: B904 (that is what is tested)
            raise

    return run


@pytest.mark.parametrize("how", ["from", "during"])
def test_call_that_failed_is_found_behind_another_error(how):
    twin = dspy.Predict("question -> first, second")
    program = Program(calling(how), twin=twin, solve=copy.deepcopy(twin))
    (rollout,) = run(program, examples(1), lm=ScriptedLM(default={"first": "half"}))
    assert rollout.error == "LookupError: it went wrong"
    (step,) = rollout.trace
    assert step.name == "solve", "not its twin"
    assert isinstance(step.outputs, FailedPrediction)


def test_program_that_mutates_its_inputs():
    """Each run has its own, but for images and what cannot be copied."""
    image, lock = dspy.Image("https://example.com/a.png"), threading.Lock()

    def mutate(program, question, tags, nested, history, lock):
        tags.append("mine")
        nested["list"].append(len(nested["list"]))
        seen = (tags[0], history.messages[0]["image"], lock)
        history.messages.append({"question": "mine", "answer": "mine"})
        return dspy.Prediction(tags=len(tags), seen=seen)

    history = dspy.History(messages=[{"image": image}])
    batch = examples(5, tags=[image], nested={"list": []}, history=history, lock=lock)
    for _ in range(2):
        rollouts = run(doing(mutate), batch)
        assert [rollout.prediction.tags for rollout in rollouts] == [2] * 5
        for rollout in rollouts:
            assert [id(value) for value in rollout.prediction.seen] == [id(image), id(image), id(lock)]
    for example in batch:
        assert (example.tags, example.nested) == ([image], {"list": []})
        assert len(example.history.messages) == 1


def test_example_without_inputs_is_an_error_not_a_score():
    with pytest.raises(ValueError, match="Inputs have not been set"):
        run(solver(), [dspy.Example(question="q0")])


@pytest.mark.parametrize("value", ["a text", 7, {"answer": "x"}])
def test_program_may_return_what_it_likes(value):
    (rollout,) = run(doing(lambda *_, **__: value), examples(1), metric=lambda gold, pred, *_: float(pred == value))
    assert (rollout.prediction, rollout.score) == (value, 1.0)


# Traces and contexts ------------------------------------------------------------------------------------------


def nested() -> Program:
    def run(self, question):
        for predictor in (*self.parts, self.by_name["last"], self.holder.inner, solver()):
            prediction = predictor(question=question)
        return prediction

    holder = Program(None, inner=solver())
    holder._compiled = True
    parts = [solver(), dspy.ChainOfThought("question -> answer")]
    return Program(run, parts=parts, by_name={"last": solver()}, holder=holder)


@pytest.mark.parametrize("num_threads", [1, 16])
def test_steps_carry_names_and_the_trace_is_whole_whatever_the_caller_configured(num_threads, caplog):
    program, trace = nested(), []
    with dspy.context(max_trace_size=0, trace=trace):
        rollouts = run(program, examples(16), num_threads=num_threads)
    for rollout in rollouts:
        names = [step.name for step in rollout.trace]
        assert names == ["parts[0]", "parts[1].predict", "by_name['last']", None, None]
        assert {step.inputs["question"] for step in rollout.trace} == {rollout.example.question}
        assert {step.outputs.answer for step in rollout.trace} == {rollout.example.question}
    named = [{id(step.predictor) for step in rollout.trace[:3]} for rollout in rollouts]
    assert all(ids == named[0] for ids in named), "a named step does not keep the copy that ran"
    assert not any(str(predictor.stage).startswith("dspy_combee") for predictor in program.predictors())
    assert (trace, caplog.records) == ([], [])


def test_calls_made_in_threads_of_the_program_are_in_its_trace():
    def ask_three(program, question):
        pairs = [(program.solve, {"question": f"{question}-{i}"}) for i in range(3)]
        dspy.Parallel(num_threads=3, disable_progress_bar=True)(pairs)
        return dspy.Prediction(answer=question)

    for rollout in run(doing(ask_three), examples(4)):
        assert [step.name for step in rollout.trace] == ["solve"] * 4
        asked = sorted(step.inputs["question"] for step in rollout.trace)
        question = rollout.example.question
        assert asked == [question, *(f"{question}-{i}" for i in range(3))]


class OutOfPatience(ThreadExecutor):
    """Gives up an item as soon as it stalls, and waits for its late end."""

    def __init__(self) -> None:
        super().__init__(1)
        self.stalls, self.go_on = threading.Event(), threading.Event()

    def stall(self, *given, **inputs):
        self.stalls.set()
        assert self.go_on.wait(60)
        return {"answer": "late"}

    def map(self, function, items, *, timeout=None, on_timeout=None):
        (item,) = items
        thread = threading.Thread(target=contextvars.copy_context().run, args=(function, item))
        thread.start()
        assert self.stalls.wait(60)
        given_up = on_timeout(item)
        self.go_on.set()
        thread.join()
        return [given_up]


@pytest.mark.parametrize("inside", ["the program", "the model"])
def test_timed_out_rollout_keeps_its_calls_and_is_not_scored(inside):
    executor, scored = OutOfPatience(), []
    program = doing(executor.stall) if inside == "the program" else doing(lambda *_, **__: 1)
    lm = ScriptedLM(default=executor.stall) if inside == "the model" else None
    options = {"timeout": 2, "failure_score": -1.0, "metric": lambda *given: scored.append(given)}
    (rollout,) = run(program, examples(1), executor=executor, lm=lm, **options)
    assert (rollout.score, rollout.prediction, rollout.seconds) == (-1.0, None, 2)
    assert rollout.error == "the rollout took longer than 2 seconds"
    (step,) = rollout.trace
    assert (step.name, step.inputs, step.outputs is None) == ("solve", {"question": "q0"}, inside == "the model")
    assert rollout.usage.calls == (inside == "the program")
    assert scored == []


# Copies -------------------------------------------------------------------------------------------------------


class Corpus:
    def __init__(self) -> None:
        self.passages = [f"passage {i}" for i in range(150_000)]


class Locked(Program):
    """Holds what can be copied and what cannot, and a tool that is a method of its own."""

    def __init__(self, **attributes) -> None:
        super().__init__(None, solve="question -> answer", lock=threading.Lock(), **attributes)
        self.again = self.solve
        self.agent = dspy.ReAct("question -> answer", tools=[self.look])

    def look(self, query: str) -> str:
        """Look around."""
        return query


def test_copies_share_lms_and_what_cannot_be_copied(caplog):
    lm, judge = (dspy.LM(f"openai/{name}", api_key="none") for name in ("some-model", "judge"))
    mixed = [solver(), threading.Lock(), {"state": []}]
    shared = {"index": np.zeros(2_000_000), "corpus": Corpus()}
    program = Locked(lms={"judges": [judge]}, mixed=mixed, array=np.zeros(3), small=["a"], **shared)
    program.solve.lm = lm
    copier = ProgramCopier(program)
    program.new_lock = threading.Lock()
    new = copier.copy(program)
    assert new.again is new.solve, "what was one object is one object"
    assert new.agent.tools["look"].func.__self__ is new, "the copy's tool is the copy's method"
    assert (new.solve.lm, new.lms["judges"][0]) == (lm, judge)
    assert (new.lock, new.new_lock, new.mixed[1]) == (program.lock, program.new_lock, mixed[1])
    assert new.index is program.index, "an array of 16 MB is not copied for each run"
    assert new.corpus is program.corpus
    for name in ("solve", "lms", "mixed", "array", "small", "agent"):
        assert getattr(new, name) is not getattr(program, name)
    assert new.mixed[0] is not mixed[0]
    assert new.mixed[2]["state"] is not mixed[2]["state"]
    assert caplog.records == []


def test_long_history_is_not_copied():
    class Entry:
        def __deepcopy__(self, memo):
            copies.append(self)

    copies, program = [], solver()
    program.history = [Entry()]
    assert ProgramCopier(program).copy(program).history == []
    assert copies == []


def test_copies_are_freed_when_their_rollout_ends():
    made: list[Any] = []
    alive: list[int] = []

    def watch(program, question):
        alive.append(sum(reference() is not None for reference in made))
        made.append(weakref.ref(program.solve))
        return dspy.Prediction(answer=question)

    rollouts = run(doing(watch), examples(8), num_threads=1)
    assert [rollout.error for rollout in rollouts] == [None] * 8
    assert alive == [0] * 8


# Scores -------------------------------------------------------------------------------------------------------


def score(result, caplog, count=3, **options):
    """The score of a metric's result, and the warnings."""
    caplog.clear()
    rollouts = run(solver(), examples(count), metric=lambda *_: result, failure_score=-9.0, **options)
    (value,) = {rollout.score for rollout in rollouts}
    assert type(value) is float
    return value, [record.getMessage() for record in caplog.records]


NUMBERS = [0.0, 0, 7, -3.5, True, False, np.float32(0.5), np.int64(1), np.bool_(True), np.array(0.25)]
NUMBERS += [fractions.Fraction(1, 4), decimal.Decimal("0.5")]
RESULTS = [
    {"score": 0.5, "feedback": "f"},
    {"score": 0.0},
    *(dspy.Prediction(score=x, feedback="") for x in (0.5, True)),
]


@pytest.mark.parametrize("result", [*NUMBERS, *RESULTS], ids=repr)
def test_metric_values_with_a_plain_meaning(result, caplog):
    assert score(result, caplog) == (float(result["score"] if result in RESULTS else result), [])


NOT_FINITE = "which is not a finite number"
NO_SCORE = [None, {}, {"feedback": "f"}, dspy.Prediction(score=None), dspy.Prediction(answer="x")]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        *((value, f"returned {value}, {NOT_FINITE}") for value in (math.nan, math.inf, -math.inf, 1j)),
        *((value, NOT_FINITE) for value in (np.float64("nan"), np.zeros(3), 10**400)),
        *((value, f"returned {value!r} instead of a number") for value in ("1.0", b"1", [1.0])),
        *((value, "returned None instead of a number") for value in NO_SCORE),
        ({"score": "high"}, "returned 'high' instead of a number"),
        pytest.param(Unprintable(), "returned <Unprintable without a text: RuntimeError> instead", id="unprintable"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_metric_values_without_one_get_the_failure_score_and_one_warning(result, said, caplog):
    value, (warning,) = score(result, caplog, count=50, num_threads=32)
    assert value == -9.0
    assert said in warning
    assert "failure_score=-9" in warning


def test_scores_above_the_perfect_one_stand_and_are_warned_of_once(caplog):
    rollouts = run(solver(), examples(11), metric=lambda gold, *_: int(gold.question[1:]), perfect_score=1.0)
    assert [rollout.score for rollout in rollouts] == list(range(11))
    (record,) = caplog.records
    assert "above perfect_score=1" in record.getMessage()
    assert score(10, caplog, perfect_score=10.0) == (10.0, [])


@pytest.mark.parametrize("kind", [ZeroDivisionError, asyncio.CancelledError, UnprintableError])
def test_metric_that_raises_on_one_example(kind, caplog):
    def metric(gold, pred, *_):
        return raising(kind("no words"))() if gold.question == "q2" else -1.0

    rollouts = run(solver(), examples(5), metric=metric, failure_score=-7.0)
    assert [rollout.score for rollout in rollouts] == [-1.0, -1.0, -7.0, -1.0, -1.0]
    assert [rollout.error for rollout in rollouts] == [None] * 5, "the program did nothing wrong"
    (record,) = caplog.records
    text = "<UnprintableError without a text" if kind is UnprintableError else "no words"
    assert f"The metric raised {kind.__name__}: {text}" in record.getMessage()


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"brief": np.float32(0.5), "kind": None}, {"brief": 0.5, "kind": 0.0}), ([1, 2], {}), (None, {})],
)
def test_objective_scores(given, expected):
    rollouts = run(solver(), examples(2), metric=lambda *_: {"score": 1.0, "objective_scores": given})
    assert [rollout.objective_scores for rollout in rollouts] == [expected] * 2


# Providers ----------------------------------------------------------------------------------------------------


REFUSALS = [lm15.AuthError("bad key"), lm15.BillingError("no money")]
OUTAGES = [lm15.RateLimitError("slow down"), lm15.TransportError("no network"), lm15.ServerError("503")]
OUTAGES += [ConnectionError("refused"), TimeoutError("too slow")]


@pytest.mark.parametrize("error", [*REFUSALS, *OUTAGES], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("how", ["plain", "from", "during"])
def test_provider_error_is_no_score(error, how):
    lm = ScriptedLM(default=lambda prompt: error if question_of(prompt) == "q2" else {"answer": "x"})
    program, scored = Program(calling(how), solve="question -> answer"), []
    with pytest.raises(ProviderError, match="A language model call failed") as caught:
        run(program, examples(5), lm=lm, metric=lambda *_: scored.append(1), num_threads=1)
    assert caught.value.transient is (error in OUTAGES)
    asked = [question_of(call.prompt) for call in lm.calls if question_of(call.prompt) == "q2"]
    assert len(asked) == (QUICK.attempts if error in OUTAGES else 1)
    assert len(scored) == 2


def test_a_missing_lm_stops_the_run_with_what_dspy_says():
    with pytest.raises(ProviderError, match="No LM is loaded"):
        MapStage(ProgramCopier(solver()), Scorer(one), ThreadExecutor(1)).run([(solver(), examples(1))])


@pytest.mark.parametrize("kind", [lm15.InvalidRequestError, lm15.ContextLengthError])
def test_refused_request_is_the_program_s_failure(kind):
    (rollout,) = run(solver(), examples(1), lm=ScriptedLM(default=kind("this cannot be done")))
    assert rollout.score == 0.0
    assert "this cannot be done" in rollout.error
    assert [(step.name, step.outputs) for step in rollout.trace] == [("self", None)]


def test_trouble_that_the_program_got_over_is_none():
    def run_it(self, question):
        try:
            return self.first(question=question)
        except Exception:
            return self.second(question=question)

    lm = ScriptedLM([("`rare`", lm15.RateLimitError("slow down"))], default={"answer": "half of it"})
    program = Program(run_it, first="question -> rare", second="question -> answer, more")
    (rollout,) = run(program, examples(1), lm=lm)
    assert rollout.error.startswith("AdapterParseError"), "a reply came: the provider is not to blame"


# Reflection records -------------------------------------------------------------------------------------------

PREDICTOR = solver()


def step(inputs, outputs, name="solve") -> TraceStep:
    return TraceStep(name, PREDICTOR, inputs, dspy.Prediction(**outputs) if isinstance(outputs, dict) else outputs)


def rollout_of(*steps, index=0, score=0.5, error=None) -> Rollout:
    example = dspy.Example(question=f"q{index}", answer="gold").with_inputs("question")
    prediction = None if error else dspy.Prediction(answer=f"a{index}")
    return Rollout(index, example, prediction, steps, score, score, error=error)


def call(index=0, name="solve") -> TraceStep:
    return step({"question": f"q{index}"}, {"answer": f"a{index}"}, name)


def half(gold, pred, trace, pred_name, pred_trace):
    return dspy.Prediction(score=0.5, feedback=f"{pred_name}: {len(trace)} calls, want {gold.answer}")


def maker_of(metric=half, keep_unparsed=True, warn_of_mismatch=True):
    return RecordMaker(Scorer(metric), ThreadExecutor(4, QUICK), keep_unparsed, warn_of_mismatch)


def records(*rollouts, **options) -> list[Any]:
    return maker_of(**options).records(rollouts, ["solve"])["solve"]


def test_one_record_for_each_rollout_that_reached_the_component(caplog):
    both = rollout_of(call(0), call(0, "other"), index=0)
    rollouts = [both, rollout_of(call(1, "other"), index=1), rollout_of(index=2), rollout_of(call(3), index=3)]
    maker = maker_of()
    made = maker.records(rollouts, ["solve", "other", "nobody"])
    sources = {name: [record.source for record in some] for name, some in made.items()}
    assert sources == {"solve": [0, 3], "other": [0, 1], "nobody": []}
    feedback = "solve: 2 calls, want gold"
    shown = {"Inputs": {"question": "q0"}, "Generated Outputs": {"answer": "a0"}, "Feedback": feedback}
    assert made["solve"][0] == shown
    assert list(made["solve"][0]) == list(shown)
    assert maker.take_feedback_calls()[0] == 4
    assert maker.take_feedback_calls()[0] == 0
    assert caplog.records == []


def test_inputs_and_outputs_keep_their_types_and_identity_and_the_first_history_is_the_context():
    image, array = dspy.Image("https://example.com/a.png"), np.zeros(2)
    first, second = dspy.History(messages=[{"a": 1}]), dspy.History(messages=[])
    inputs = {"image": image, "images": [image], "array": array, "one": first, "two": second}
    (record,) = records(rollout_of(step(inputs, {"array": array})))
    assert list(record["Inputs"]) == ["Context", "image", "images", "array", "two"]
    assert record["Inputs"]["Context"] is first
    assert all(record["Inputs"][name] is inputs[name] for name in ("image", "images", "array", "two"))
    assert record["Generated Outputs"]["array"] is array
    (record,) = records(rollout_of(step({"one": first, "Context": "mine"}, {"answer": "a"})))
    assert record["Inputs"] == {"one": first, "Context": "mine"}, "no input of that name is lost"


def test_metric_is_given_the_trace_and_the_call():
    given = []
    made = rollout_of(call(0, "first"), call(0))
    records(made, metric=lambda *arguments: given.append(arguments) or 0.5)
    ((gold, pred, trace, name, own_trace),) = given
    assert (gold, pred, name) == (made.example, made.prediction, "solve")
    assert [inputs for _, inputs, _ in trace] == [{"question": "q0"}] * 2
    assert own_trace == [(PREDICTOR, {"question": "q0"}, made.trace[1].outputs)]


@pytest.mark.parametrize(
    ("result", "feedback"),
    [
        *((score, f"This trajectory got a score of {score}.") for score in (0.5, 0.0, 0, False)),
        *((made, "This trajectory got a score of 0.5.") for made in ({"score": 0.5}, dspy.Prediction(score=0.5))),
        *(({"score": 0.5, "feedback": text}, text) for text in ("do better", "")),
        *((dspy.Prediction(score=0.5, feedback=text), text) for text in ("do better", "")),
        ({"score": 0.5, "feedback": None}, "This trajectory got a score of 0.5."),
        (dspy.Prediction(score=0.5, feedback=["a", "b"]), "['a', 'b']"),
        pytest.param({"score": 0.5, "feedback": Unprintable()}, "<Unprintable without a text: RuntimeError>", id="odd"),
    ],
    ids=repr,
)
def test_feedback(result, feedback, caplog):
    score = result if isinstance(result, int | float) else 0.5
    (record,) = records(rollout_of(call(), score=score), metric=lambda *_: result)
    assert record["Feedback"] == feedback
    assert caplog.records == []


def test_metric_that_disagrees_with_itself_is_warned_of_once_and_the_score_stands(caplog):
    numbers = itertools.count()
    rollouts = [rollout_of(call(i), index=i) for i in range(20)]
    for warns in (False, True):
        assert caplog.records == []
        made = records(*rollouts, metric=lambda *_: 1.0 + next(numbers), warn_of_mismatch=warns)
        assert {record["Feedback"] for record in made} == {"This trajectory got a score of 0.5."}
    (record,) = caplog.records
    assert "The score that it gave to the whole rollout stands" in record.getMessage()
    assert "warn_on_score_mismatch=False" in record.getMessage()


@pytest.mark.parametrize("result", [None, math.nan, "great", LookupError("no such word"), asyncio.CancelledError("x")])
def test_metric_that_fails_at_feedback_time_is_warned_of_once(result, caplog):
    def metric(gold, *given):
        if gold.question not in ("q1", "q2"):
            return half(gold, *given)
        return raising(result)() if isinstance(result, BaseException) else result

    made = records(*(rollout_of(call(i), index=i, score=0.0 if i in (1, 2) else 0.5) for i in range(4)), metric=metric)
    fine, alone = "solve: 1 calls, want gold", "This trajectory got a score of 0.0."
    assert [record["Feedback"] for record in made] == [fine, alone, alone, fine]
    (record,) = caplog.records
    if isinstance(result, BaseException):
        assert f"The metric raised {type(result).__name__}: {result}" in record.getMessage()


@pytest.mark.parametrize("error", [dspy.LMAuthError("bad key"), dspy.LMTransportError("gone")], ids=repr)
def test_provider_error_of_a_judge_stops_the_run(error):
    with pytest.raises(ProviderError):
        records(rollout_of(call()), metric=raising(error))
    with pytest.raises(ProviderError):
        run(solver(), examples(2), metric=raising(error))


UNPARSED, FAILED = FailedPrediction("gibberish"), "The program failed on this example: "


@pytest.mark.parametrize(
    ("steps", "error", "outputs", "feedback", "num_earlier", "kept"),
    [
        ([call()], "KeyError: x", {"answer": "a0"}, f"{FAILED}KeyError: x", 0, True),
        ([step({}, None)], "Lost: x", "None: the call did not end.", f"{FAILED}Lost: x", 0, True),
        ([call(), step({}, UNPARSED)], "x", "```\ngibberish\n```", "Your output failed to parse. Follow th", 1, False),
        (
            [step({}, UNPARSED), step({}, FailedPrediction("x"))],
            "x",
            "\ngibberish\n",
            "Your output failed to pars",
            0,
            False,
        ),
        ([call(), step({}, UNPARSED, "other")], "x", {"answer": "a0"}, f"{FAILED}x", 0, False),
    ],
    ids=["raised", "call raised", "unparsed", "twice unparsed", "other unparsed"],
)
def test_record_of_a_failed_program_says_why(steps, error, outputs, feedback, num_earlier, kept):
    failed = rollout_of(*steps, error=error, score=0.0)
    maker = maker_of(raising(AssertionError("asked")))
    (record,) = maker.records([failed], ["solve"])["solve"]
    assert maker.take_feedback_calls()[0] == 0
    shown = record["Generated Outputs"]
    assert outputs in shown if isinstance(outputs, str) else outputs == shown
    assert record["Feedback"].startswith(feedback)
    assert ("[[ ## answer ## ]]" in record["Feedback"]) == feedback.startswith("Your")
    assert len(record.get("Earlier Calls", [])) == num_earlier
    assert len(records(failed, keep_unparsed=False)) == kept


# Several calls in one rollout ---------------------------------------------------------------------------------


def agent_steps(turns: int, first: str = ""):
    transcript = first
    for turn in range(turns):
        said = {"thought": f"I think\nof {turn}", "tool": "search", "arguments": {"query": turn}}
        yield step({"question": "q", "trajectory": transcript}, said)
        entry = f"[[ ## thought ## ]]\n{said['thought']}\n\n[[ ## tool ## ]]\nsearch\n\n[[ ## found ## ]]\nit"
        transcript += f"\n\n{entry}" if transcript else entry


def drafts(critique):
    judged = step({"topic": "t", "draft": "draft 1"}, {"critique": critique}, "critic")
    last = step({"topic": "t", "critique": critique}, {"draft": "draft 2"})
    return [step({"topic": "t", "critique": ""}, {"draft": "draft 1"}), judged, last]


def history(*messages):
    return dspy.History(messages=list(messages))


def conversation(turns):
    said = [{"question": f"question {turn}", "answer": f"answer {turn}"} for turn in range(turns)]
    asked = [{"question": one["question"], "history": history(*said[:i])} for i, one in enumerate(said)]
    return [step(inputs, {"answer": one["answer"]}) for inputs, one in zip(asked, said, strict=True)]


def history_in_place(turns):
    grown = history()
    for turn in range(turns):
        first = {"question": "q"} if turn == 0 else {}
        grown.messages.append({**first, "thought": f"thought {turn}", "seen": "it"})
        yield step({**first, "history": grown}, {"thought": f"thought {turn}"})


LINES = ["Thought: start"] + [line for turn in range(4) for line in (f"Thought: turn {turn}", "Seen: it")]
EVENTS = [event for turn in range(4) for event in ({"action": f"go {turn}", "seen": "it"}, "a remark")]
FINAL = step({"topic": "t", "draft": "draft 1", "critique": "too long"}, {"draft": "draft 2"})
FORGETFUL = step({"question": "x", "history": history({"question": "question 0", "answer": "edited"})}, {})
ONES = {"array": np.ones(3), "text": "ab"}


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        # They stay: nothing repeats them.
        ([step({"question": "q"}, {"answer": f"sample {i}"}) for i in range(3)], 2),
        ([step({"question": "q", "passages": ["It is Paris.", "Paris"]}, {"answer": "Paris"}) for _ in range(3)], 2),
        *((drafts(critique), 1) for critique in ("too long", "draft 1 is too long", "critique of draft 1")),
        ([step({"topic": "t"}, {"draft": "draft 1"}), FINAL], 1),
        ([step({"topic": "t", "draft": "", "critique": ""}, {"draft": "draft 1"}), FINAL], 1),
        ([*conversation(1), FORGETFUL], 1),
        ([step({"array": np.zeros(3), "text": "a"}, {"answer": "x"}), step(ONES, {"answer": "y"})], 1),
        # A transcript that grows is shown once.
        (list(agent_steps(5)), 0),
        (list(agent_steps(5, "Earlier: nothing.")), 0),
        ([*agent_steps(3, "Task one."), *agent_steps(3, "Task two.")], 1),
        ([step({"q": "q", "log": "\n".join(LINES[: 1 + 2 * i])}, {"thought": f"turn {i}"}) for i in range(4)], 0),
        ([step({"question": "q", "events": EVENTS[: 2 * i]}, {"action": f"go {i}"}) for i in range(4)], 0),
        (conversation(4), 0),
        (list(history_in_place(3)), 0),
    ],
)
def test_calls_that_a_later_one_repeats_are_shown_once(steps, shown):
    (record,) = records(rollout_of(*steps))
    own = [step for step in steps if step.name == "solve"]
    assert set(map(id, record["Inputs"].values())) == set(map(id, own[-1].inputs.values()))
    earlier = record.get("Earlier Calls", [])
    assert len(earlier) == shown
    if any("Task one." in str(step.inputs) for step in steps):
        assert earlier[0]["Generated Outputs"]["thought"] == "I think\nof 2", "the last call of the first task"
