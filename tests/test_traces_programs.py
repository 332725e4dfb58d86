import dspy
import pytest
from dspy.teleprompt.bootstrap_trace import FailedPrediction

from dspy_combee.records.types import Rollout, TraceStep
from dspy_combee.traces import Trace, TraceError, TraceMessage, load_traces, save_traces, to_record, traces_from


class Twice(dspy.Module):
    def __init__(self):
        super().__init__()
        self.draft = dspy.Predict("question -> answer")
        self.check = dspy.Predict("question, answer -> verdict")


@pytest.fixture
def program():
    return Twice()


@pytest.fixture
def trace(program):
    return [
        (program.draft, {"question": "q"}, dspy.Prediction(answer="a")),
        (program.check, {"question": "q", "answer": "a"}, dspy.Prediction(verdict="no")),
        (program.draft, {"question": "q again"}, dspy.Prediction(answer="b")),
    ]


EXAMPLE = dspy.Example(question="q", gold="b").with_inputs("question")
PREDICTION = dspy.Prediction(answer="b")


def test_a_run_of_a_whole_program(trace):
    (made,) = traces_from([(EXAMPLE, PREDICTION, trace, 0.5, "Better.")])
    assert made == Trace({"question": "q"}, {"answer": "b"}, "Better.", 0.5, steps=made.steps)
    assert made.source == "run 0"
    assert made.steps[:2] == (
        TraceMessage("input", '{"question": "q"}', "StringSignature", 1),
        TraceMessage("agent", '{"answer": "a"}', "StringSignature", 1),
    )
    assert [message.step for message in made.steps] == [1, 1, 2, 2, 3, 3]


def test_a_run_by_predictor(program, trace):
    draft, check = traces_from([(EXAMPLE, PREDICTION, trace, 1)], program)
    assert (draft.predictor, draft.inputs, draft.outputs) == ("draft", {"question": "q again"}, {"answer": "b"})
    assert [message.text for message in draft.steps] == ['{"question": "q"}', '{"answer": "a"}']
    assert (check.predictor, check.outputs, check.steps) == ("check", {"verdict": "no"}, ())
    assert draft.score == check.score == 1.0


def test_predictors_that_are_not_the_programs_own(program, trace):
    run = (EXAMPLE, PREDICTION, [(call[0].deepcopy(), *call[1:]) for call in trace])
    assert [made.predictor for made in traces_from([run], program)] == ["draft", "check"]
    other = [(dspy.Predict("x -> y"), {"x": 1}, dspy.Prediction(y=2))]
    assert traces_from([(EXAMPLE, PREDICTION, other)], program) == []
    like_draft = [(dspy.Predict("question -> answer"), *trace[0][1:])]
    assert [made.predictor for made in traces_from([(EXAMPLE, PREDICTION, like_draft)], program)] == ["draft"]
    program.check = dspy.Predict("question -> answer")  # Two like it now: it could be either.
    assert traces_from([(EXAMPLE, PREDICTION, like_draft)], program) == []


def test_other_forms_of_a_run(program, trace):
    judged = dspy.Prediction(score=0.25, feedback="Meh.")
    expected = traces_from([(EXAMPLE, PREDICTION, trace, 0.25, "Meh.")])
    assert traces_from([(EXAMPLE, PREDICTION, trace, judged)]) == expected
    assert traces_from([[EXAMPLE, PREDICTION, trace, {"score": 0.25, "feedback": "Meh."}]]) == expected
    data = {"example": EXAMPLE, "prediction": PREDICTION, "trace": trace, "example_ind": 3, "score": judged}
    assert traces_from([data]) == expected
    steps = tuple(TraceStep(n, *call) for n, call in zip(("draft", "check", "draft"), trace, strict=True))
    rollout = Rollout(0, EXAMPLE, PREDICTION, steps, 0.25, judged)
    (whole,) = traces_from([rollout])
    assert (whole.score, whole.feedback, whole.steps[0].tool) == (0.25, "Meh.", "draft")
    assert [made.predictor for made in traces_from([rollout], program)] == ["draft", "check"]
    failed = Rollout(0, EXAMPLE, None, (), 0.0, None, error="it took too long")
    (made,) = traces_from([failed])
    assert (made.outputs, made.feedback) == ({}, "The program failed on this example: it took too long")


def test_odd_examples_and_predictions(trace):
    (made,) = traces_from([({"q": 1}, FailedPrediction(completion_text="<<"), trace)])
    assert made.inputs == {"q": 1}
    assert made.outputs == {"reply that could not be parsed": "<<"}
    (made,) = traces_from([(dspy.Example(a=1, b=2), "plain", None)])
    assert (made.inputs, made.outputs, made.steps) == ({"a": 1, "b": 2}, {"output": "plain"}, ())


def test_images_and_histories_stay_what_they_are(tmp_path):
    image = dspy.Image("data:image/png;base64," + "A" * 1000)
    history = dspy.History(messages=[{"question": "x", "answer": "y"}])
    predictor = dspy.Predict("image: dspy.Image, history: dspy.History -> answer")
    inputs = {"image": image, "history": history}
    run = (dspy.Example(**inputs).with_inputs("image", "history"), PREDICTION, [(predictor, inputs, PREDICTION)])
    (made,) = traces_from([run])
    assert made.inputs["image"] is image
    assert "AAAA" not in made.steps[0].text
    assert '"question": "x"' in made.steps[0].text
    assert to_record(made, 2000)["Inputs"]["image"] is image
    save_traces([made], tmp_path / "a.jsonl")
    assert set(load_traces(tmp_path)[0].inputs) == {"image", "history"}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ((EXAMPLE, PREDICTION), "run 1: a run has 3 to 5 parts"),
        (5, "run 1: a run is (example, prediction, trace, ...), not int"),
        ((EXAMPLE, PREDICTION, [1]), "run 1: its trace is no list of (predictor, inputs, prediction)"),
        ((EXAMPLE, PREDICTION, [(1, 2)]), "run 1: its trace is no list"),
        ((EXAMPLE, PREDICTION, [], float("nan")), "run 1: a score must be a finite number, not nan"),
    ],
)
def test_a_wrong_run_is_named(run, message):
    with pytest.raises(TraceError) as caught:
        traces_from([(EXAMPLE, PREDICTION, []), run])
    assert str(caught.value).startswith(message)
