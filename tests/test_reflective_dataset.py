"""Reflection records: one per rollout that reached the component, with the inputs, the outputs and the feedback."""

import asyncio
import itertools
import logging
import math
from typing import Any

import dspy
import numpy as np
import pytest
from dspy import lm15
from dspy.teleprompt.bootstrap_trace import FailedPrediction

from dspy_combee import ProviderError, ThreadExecutor
from dspy_combee.calls.executors import Backoff
from dspy_combee.records.text import as_data
from dspy_combee.records.types import Rollout, TraceStep
from dspy_combee.rollouts.feedback import RecordMaker, Scorer, feedback_of

PREDICTOR = dspy.Predict("question -> answer")


def step(inputs, outputs, name="solve") -> TraceStep:
    if isinstance(outputs, dict):
        outputs = dspy.Prediction(**outputs)
    return TraceStep(name, PREDICTOR, inputs, outputs)


def rollout(*steps, index=0, score=0.5, error=None) -> Rollout:
    example = dspy.Example(question=f"q{index}", answer="gold").with_inputs("question")
    prediction = None if error else dspy.Prediction(answer=f"a{index}")
    return Rollout(index, example, prediction, steps, score, score, error=error)


def call(index=0, name="solve") -> TraceStep:
    return step({"question": f"q{index}"}, {"answer": f"a{index}"}, name)


def records(rollouts, *, metric=None, component="solve", keep_unparsed=True, **scorer) -> list[Any]:
    maker = RecordMaker(Scorer(metric or half, **scorer), ThreadExecutor(4), keep_unparsed, warn_of_mismatch=True)
    return maker.records(rollouts, [component])[component]


def half(gold, pred, trace, pred_name, pred_trace):
    return dspy.Prediction(score=0.5, feedback=f"{pred_name}: {len(trace)} calls, want {gold.answer}")


# What a record holds ------------------------------------------------------------------------------------------


def test_one_record_for_each_rollout_that_reached_the_component():
    rollouts = [
        rollout(call(0), call(0, "other"), index=0),
        rollout(call(1, "other"), index=1),
        rollout(index=2),
        rollout(call(3), index=3),
    ]
    maker = RecordMaker(Scorer(half), ThreadExecutor(4), True, True)
    made = maker.records(rollouts, ["solve", "other", "nobody"])
    assert {name: [record.source for record in some] for name, some in made.items()} == {
        "solve": [0, 3],
        "other": [0, 1],
        "nobody": [],
    }
    assert made["solve"][0] == {
        "Inputs": {"question": "q0"},
        "Generated Outputs": {"answer": "a0"},
        "Feedback": "solve: 2 calls, want gold",
    }
    assert list(made["solve"][0]) == ["Inputs", "Generated Outputs", "Feedback"]
    assert maker.feedback_calls == 4


def test_inputs_and_outputs_keep_their_types_and_identity():
    image, array, history = dspy.Image("https://example.com/a.png"), np.zeros(2), dspy.History(messages=[])
    inputs = {"image": image, "images": [image], "array": array, "history": history}
    (record,) = records([rollout(step(inputs, {"array": array}))])
    assert record["Inputs"]["image"] is image
    assert record["Inputs"]["images"][0] is image
    assert record["Inputs"]["array"] is array
    assert record["Inputs"]["Context"] is history
    assert "history" not in record["Inputs"]
    assert record["Generated Outputs"]["array"] is array


def test_second_history_keeps_its_name_and_no_input_called_context_is_lost():
    first, second = dspy.History(messages=[{"a": 1}]), dspy.History(messages=[])
    (record,) = records([rollout(step({"one": first, "q": "x", "two": second}, {"answer": "a"}))])
    assert record["Inputs"] == {"Context": first, "q": "x", "two": second}
    (record,) = records([rollout(step({"one": first, "Context": "mine"}, {"answer": "a"}))])
    assert record["Inputs"] == {"one": first, "Context": "mine"}


def test_metric_is_given_the_trace_and_the_call():
    given = []

    def metric(*arguments):
        given.append(arguments)
        return 0.5

    one = rollout(call(0, "first"), call(0))
    records([one], metric=metric)
    ((gold, pred, trace, name, own_trace),) = given
    assert gold is one.example
    assert pred is one.prediction
    assert name == "solve"
    assert [inputs for _, inputs, _ in trace] == [{"question": "q0"}] * 2
    assert own_trace == [(PREDICTOR, {"question": "q0"}, one.trace[1].outputs)]


# Feedback -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "feedback"),
    [
        (0.5, "This trajectory got a score of 0.5."),
        ({"score": 0.5}, "This trajectory got a score of 0.5."),
        ({"score": 0.5, "feedback": None}, "This trajectory got a score of 0.5."),
        ({"score": 0.5, "feedback": "do better"}, "do better"),
        ({"score": 0.5, "feedback": ""}, ""),
        (dspy.Prediction(score=0.5, feedback="do better"), "do better"),
        (dspy.Prediction(score=0.5, feedback=""), ""),
        (dspy.Prediction(score=0.5, feedback=["a", "b"]), "['a', 'b']"),
        (dspy.Prediction(score=0.5), "This trajectory got a score of 0.5."),
    ],
    ids=repr,
)
def test_feedback(result, feedback, caplog):
    (record,) = records([rollout(call())], metric=lambda *_: result)
    assert record["Feedback"] == feedback
    assert caplog.records == []


@pytest.mark.parametrize("zero", [0.0, 0, False])
def test_a_score_of_zero_is_a_score(zero):
    (record,) = records([rollout(call(), score=0.0)], metric=lambda *_: zero)
    assert record["Feedback"] == f"This trajectory got a score of {zero}."
    assert feedback_of(0.0) is None


class Unprintable:
    def __str__(self):
        raise RuntimeError("cannot be printed")


def test_feedback_that_cannot_be_printed():
    (record,) = records([rollout(call())], metric=lambda *_: {"score": 0.5, "feedback": Unprintable()})
    assert record["Feedback"] == "<Unprintable without a text: RuntimeError>"
    assert as_data({"value": Unprintable()}) == {"value": "<Unprintable without a text: RuntimeError>"}


def test_metric_that_disagrees_with_itself_is_warned_of_once_and_the_score_stands(caplog):
    numbers = itertools.count()
    made = records([rollout(call(i), index=i) for i in range(20)], metric=lambda *_: 1.0 + next(numbers))
    assert {record["Feedback"] for record in made} == {"This trajectory got a score of 0.5."}
    (record,) = caplog.records
    assert "The score that it gave to the whole rollout stands" in record.getMessage()
    assert "warn_on_score_mismatch=False" in record.getMessage()


def test_mismatch_warning_can_be_silenced(caplog):
    maker = RecordMaker(Scorer(lambda *_: 1.0), ThreadExecutor(1), True, warn_of_mismatch=False)
    maker.records([rollout(call())], ["solve"])
    assert caplog.records == []


@pytest.mark.parametrize("result", [None, math.nan, "great"], ids=repr)
def test_odd_metric_value_at_feedback_time(result, caplog):
    made = records([rollout(call(), score=0.0)], metric=lambda *_: result)
    assert made[0]["Feedback"] == "This trajectory got a score of 0.0."
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [LookupError, asyncio.CancelledError])
def test_metric_that_raises_at_feedback_time(error, caplog):
    def metric(gold, pred, trace, pred_name, pred_trace):
        if gold.question == "q1":
            raise error("no such word")
        return half(gold, pred, trace, pred_name, pred_trace)

    made = records([rollout(call(i), index=i) for i in range(3)], metric=metric)
    assert [record["Feedback"] for record in made] == [
        "solve: 1 calls, want gold",
        "This trajectory got a score of 0.5.",
        "solve: 1 calls, want gold",
    ]
    (record,) = caplog.records
    assert f"{error.__name__}: no such word" in record.getMessage()


@pytest.mark.parametrize("error", [lm15.AuthError("bad key"), lm15.TransportError("no network")], ids=repr)
def test_provider_error_of_a_judge_stops_the_run(error):
    def metric(*_):
        raise dspy.LMAuthError("bad key") if isinstance(error, lm15.AuthError) else dspy.LMTransportError("gone")

    maker = RecordMaker(Scorer(metric), ThreadExecutor(1, Backoff(first_delay=0.001, attempts=2)), True, True)
    with pytest.raises(ProviderError):
        maker.records([rollout(call())], ["solve"])


# Failures -----------------------------------------------------------------------------------------------------


def test_record_of_a_failed_program_says_why():
    asked = []
    (record,) = records(
        [rollout(call(), error="KeyError: 'no such city'", score=0.0)], metric=lambda *_: asked.append(1)
    )
    assert record["Feedback"] == "The program failed on this example: KeyError: 'no such city'"
    assert record["Generated Outputs"] == {"answer": "a0"}
    assert asked == []


def test_record_of_a_call_that_raised():
    (record,) = records([rollout(step({"question": "q"}, None), error="RuntimeError: lost", score=0.0)])
    assert record == {
        "Inputs": {"question": "q"},
        "Generated Outputs": "None: the call did not end.",
        "Feedback": "The program failed on this example: RuntimeError: lost",
    }


def test_unparsed_answer():
    failed = rollout(
        call(0), step({"question": "q0"}, FailedPrediction("gibberish")), error="AdapterParseError: x", score=0.0
    )
    (record,) = records([failed], keep_unparsed=True)
    assert record["Inputs"] == {"question": "q0"}
    assert "```\ngibberish\n```" in record["Generated Outputs"]
    assert record["Feedback"].startswith("Your output failed to parse. Follow this structure:\nsystem: ")
    assert "[[ ## answer ## ]]" in record["Feedback"]
    assert record["Earlier Calls"] == [{"Inputs": {"question": "q0"}, "Generated Outputs": {"answer": "a0"}}]
    assert records([failed], keep_unparsed=False) == []


def test_unparsed_answer_of_another_predictor():
    failed = rollout(call(0), step({}, FailedPrediction("gibberish"), "other"), error="AdapterParseError: x")
    assert records([failed], keep_unparsed=False) == []
    (record,) = records([failed], keep_unparsed=True)
    assert record["Feedback"] == "The program failed on this example: AdapterParseError: x"


def test_arrays_and_their_like_in_inputs_are_no_obstacle():
    first = step({"array": np.zeros(3), "text": "a"}, {"answer": "x"})
    last = step({"array": np.ones(3), "text": "ab"}, {"answer": "y"})
    failed = step({"array": np.ones(3), "text": "abc"}, FailedPrediction("gibberish"))
    assert len(records([rollout(first, last)])[0]["Earlier Calls"]) == 1
    assert len(records([rollout(first, last, failed, error="x")])[0]["Earlier Calls"]) == 2


# Several calls in one rollout ---------------------------------------------------------------------------------


def earlier(*steps) -> list[Any]:
    """The inputs of the calls that stand beside the last one."""
    (record,) = records([rollout(*steps)])
    last = steps[-1].inputs
    assert all(any(value is other for other in last.values()) for value in record["Inputs"].values())
    return [entry["Inputs"] for entry in record.get("Earlier Calls", [])]


def test_independent_repeats_stay():
    steps = [step({"question": "q"}, {"answer": f"sample {i}"}) for i in range(3)]
    assert earlier(*steps) == [{"question": "q"}] * 2


def test_repeats_over_the_same_passages_stay():
    passages = ["The capital is Paris.", "Paris"]
    steps = [step({"question": "q", "passages": passages}, {"answer": "Paris"}) for _ in range(3)]
    assert len(earlier(*steps)) == 2


@pytest.mark.parametrize("critique", ["too long", "draft 1 is too long", "critique of draft 1"])
def test_draft_critique_draft_stays(critique):
    first = step({"topic": "t", "critique": ""}, {"draft": "draft 1"})
    judged = step({"topic": "t", "draft": "draft 1"}, {"critique": critique}, "critic")
    last = step({"topic": "t", "critique": critique}, {"draft": "draft 2"})
    assert earlier(first, judged, last) == [{"topic": "t", "critique": ""}]


def test_draft_that_is_an_input_of_the_next_stays_with_its_critique():
    first = step({"topic": "t"}, {"draft": "draft 1"})
    last = step({"topic": "t", "draft": "draft 1", "critique": "too long"}, {"draft": "draft 2"})
    assert earlier(first, last) == [{"topic": "t"}]
    first = step({"topic": "t", "draft": "", "critique": ""}, {"draft": "draft 1"})
    assert len(earlier(first, last)) == 1


def agent_steps(turns: int, first: str = ""):
    transcript = first
    for turn in range(turns):
        said = {"thought": f"I think\nof {turn}", "tool": "search", "arguments": {"query": turn}}
        yield step({"question": "q", "trajectory": transcript}, said)
        entry = f"[[ ## thought ## ]]\n{said['thought']}\n\n[[ ## tool ## ]]\nsearch\n\n[[ ## found ## ]]\nit"
        transcript += f"\n\n{entry}" if transcript else entry


@pytest.mark.parametrize("first", ["", "Earlier: nothing."])
def test_growing_transcript_is_shown_once(first):
    assert earlier(*agent_steps(5, first)) == []


def test_transcript_in_another_form_is_shown_once():
    lines = ["Thought: start"]
    steps = []
    for turn in range(4):
        steps.append(step({"question": "q", "log": "\n".join(lines)}, {"thought": f"turn {turn}"}))
        lines += [f"Thought: turn {turn}", "Seen: it"]
    assert earlier(*steps) == []


def test_transcript_as_a_list_is_shown_once():
    events: list[Any] = []
    steps = []
    for turn in range(4):
        steps.append(step({"question": "q", "events": list(events)}, {"action": f"go {turn}"}))
        events += [{"action": f"go {turn}", "seen": "it"}, "a remark"]
    assert earlier(*steps) == []


def test_conversation_is_shown_once():
    history = dspy.History(messages=[])
    steps = []
    for turn in range(4):
        said = {"question": f"question {turn}", "answer": f"answer {turn}"}
        inputs = {"question": said["question"], "history": dspy.History(messages=list(history.messages))}
        steps.append(step(inputs, {"answer": said["answer"]}))
        history.messages.append(said)
    assert earlier(*steps) == []


def test_conversation_that_forgot_an_answer_keeps_its_call():
    first = step({"question": "one", "history": dspy.History(messages=[])}, {"answer": "forgotten"})
    later = dspy.History(messages=[{"question": "one", "answer": "edited"}])
    last = step({"question": "two", "history": later}, {"answer": "b"})
    assert len(earlier(first, last)) == 1


def test_history_that_grows_in_place_is_shown_once():
    history = dspy.History(messages=[])
    steps = []
    for turn in range(3):
        first = {"question": "q"} if turn == 0 else {}
        steps.append(step({**first, "history": history}, {"thought": f"thought {turn}"}))
        history.messages.append({**first, "thought": f"thought {turn}", "seen": "it"})
    assert earlier(*steps) == []


def test_two_transcripts_in_one_rollout_are_each_shown_once():
    (record,) = records([rollout(*agent_steps(3, "Task one."), *agent_steps(3, "Task two."))])
    (first,) = record["Earlier Calls"]
    for task, shown in (("Task one.", first), ("Task two.", record)):
        assert shown["Inputs"]["trajectory"].startswith(task)
        assert shown["Generated Outputs"]["thought"] == "I think\nof 2"


def test_nothing_is_logged_when_all_is_well(caplog):
    caplog.set_level(logging.WARNING)
    records([rollout(call())])
    assert caplog.records == []
