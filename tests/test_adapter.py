"""The adapter: candidates, batches for GEPA, and the same scores and records as `dspy.GEPA` where that works."""

import logging
import threading
from typing import Any

import dspy
import pydantic
import pytest
from dspy import lm15
from dspy.primitives import LocalInterpreter
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.teleprompt.gepa import InstructionProposer

from dspy_combee import CombeeOptimizer, ProviderError, ThreadExecutor
from dspy_combee.calls.executors import Backoff
from dspy_combee.testing import ScriptedLM

from . import run_parts

# dspy.GEPA's own doings.
gepa_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def examples(n: int, **more: Any) -> list[dspy.Example]:
    return [dspy.Example(question=f"q{i}", **more).with_inputs("question", *more) for i in range(n)]


def question_of(prompt) -> str:
    return prompt.question.split("[[ ## question ## ]]\n")[1].split()[0]


def reply(prompt):
    """Echoes the question; says what the instruction says about the version."""
    return {name: f"{name} of {question_of(prompt)}" for name in prompt.output_fields}


def by_number(gold, pred, trace=None, pred_name=None, pred_trace=None):
    return dspy.Prediction(score=int(gold.question[1:]) / 10, feedback=f"{pred_name} on {gold.question}: {pred.answer}")


def make_adapter(program, *, metric=by_number, num_threads=4):
    return run_parts.make_adapter(program, metric, num_threads)


class Pair(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = dspy.Predict(dspy.Signature("question -> note", "Note it."))
        self.second = dspy.Predict(dspy.Signature("question, note -> answer", "Answer it."))

    def forward(self, question):
        return self.second(question=question, note=self.first(question=question).note)


# Candidates ---------------------------------------------------------------------------------------------------


def test_seed_candidate():
    assert make_adapter(Pair()).program.seed() == {"first": "Note it.", "second": "Answer it."}


def test_seed_candidate_holds_the_code_of_flex():
    program = dspy.Module()
    program.flex = dspy.Flex("question -> answer", interpreter_factory=LocalInterpreter)
    program.note = dspy.Predict(dspy.Signature("question -> note", "Note it."))
    adapter = make_adapter(program)
    assert adapter.program.code == {"flex"}
    assert adapter.program.seed() == {"note": "Note it.", "flex": program.flex.module_src}
    code = program.flex.module_src.replace("class ", "class Other")
    assert adapter.build_program({"flex": code, "note": "x"}).flex.module_src == code


def test_build_program_changes_a_copy():
    student = Pair()
    built = make_adapter(student).build_program({"second": "Be brief."})
    assert built.second.signature.instructions == "Be brief."
    assert built.first.signature.instructions == "Note it."
    assert built.second.signature.output_fields.keys() == {"answer"}
    assert student.second.signature.instructions == "Answer it."


def search(query: str) -> str:
    """Search.

    (1) Not a tool, and {braces}.
    """
    return query


def test_tool_list_is_put_back_only_where_it_is_missing():
    adapter = make_adapter(dspy.ReAct("question -> answer", tools=[search, dspy.Tool(len, name="count")]))
    seed = adapter.program.seed()
    assert adapter.build_program(seed).react.signature.instructions == seed["react"]
    built = adapter.build_program({**seed, "react": "Be brief."}).react.signature.instructions
    lines = built.split("\n")
    assert lines[0] == "Be brief."
    assert [line[:12] for line in lines[3:]] == ["(1) search, ", "(2) count, w", "(3) finish, "]
    assert "{braces}" in built
    part = "\n".join(line for line in seed["react"].split("\n") if not line.startswith("(2) "))
    rebuilt = adapter.build_program({**seed, "react": part}).react.signature.instructions
    assert "(2) count" in rebuilt


def test_attribute_called_tools_that_holds_no_tools():
    program = Pair()
    program.tools = {"hammer": "steel"}
    assert make_adapter(program).build_program({"first": "x"}).first.signature.instructions == "x"


# Batches ------------------------------------------------------------------------------------------------------


def test_evaluate_with_and_without_traces():
    adapter = make_adapter(Pair())
    seed = adapter.program.seed()
    with dspy.context(lm=ScriptedLM(default=reply)):
        plain = adapter.evaluate(examples(4), seed)
        traced = adapter.evaluate(examples(4), seed, capture_traces=True)
    assert plain.scores == traced.scores == [0.0, 0.1, 0.2, 0.3]
    assert plain.trajectories is None
    assert [output.answer for output in plain.outputs] == [f"answer of q{i}" for i in range(4)]
    assert [data["example_ind"] for data in traced.trajectories] == [0, 1, 2, 3]
    data = traced.trajectories[2]
    assert data["example"].question == "q2"
    assert data["prediction"] is traced.outputs[2]
    assert (data["score"].score, data["score"].feedback) == (0.2, "None on q2: answer of q2")
    assert [step[1] for step in data["trace"]] == [{"question": "q2"}, {"question": "q2", "note": "note of q2"}]


def test_batch_evaluate_runs_all_candidates_at_once():
    together = threading.Barrier(8, timeout=60)

    def wait(prompt):
        together.wait()
        return {"answer": prompt.system.strip()[-1]}

    program = dspy.Predict("question -> answer")
    adapter = make_adapter(program, num_threads=8, metric=lambda gold, pred, *_: float(pred.answer))
    items = [({"self": f"version {i}"}, examples(2)) for i in range(4)]
    with dspy.context(lm=ScriptedLM(default=wait)):
        batches = adapter.batch_evaluate(items, capture_traces=False)
    assert [batch.scores for batch in batches] == [[float(i)] * 2 for i in range(4)]


def test_code_that_cannot_be_built_fails_its_own_batch_only(caplog):
    program = dspy.Module()
    program.flex = dspy.Flex("question -> answer", interpreter_factory=LocalInterpreter)
    adapter = make_adapter(program)
    batches = adapter.batch_evaluate([({"flex": "def broken("}, examples(3)), ({"flex": "class"}, examples(1))])
    assert [batch.scores for batch in batches] == [[0.0] * 3, [0.0]]
    assert [batch.outputs for batch in batches] == [[None] * 3, [None]]
    assert [batch.trajectories for batch in batches] == [[], []]
    assert len(caplog.records) == 2


def failing(gold, pred, trace=None, pred_name=None, pred_trace=None):
    return {"score": 0.5, "feedback": f"good {gold.question}", "objective_scores": {"brief": 1}}


class FailsOnQ1(Pair):
    def forward(self, question):
        prediction = super().forward(question)
        if question == "q1":
            raise KeyError("no such city")
        return prediction


def test_failures_in_a_batch_and_in_its_records():
    adapter = make_adapter(FailsOnQ1(), metric=failing)
    seed = adapter.program.seed()
    with dspy.context(lm=ScriptedLM(default=reply)):
        batch = adapter.evaluate(examples(3), seed, capture_traces=True)
        dataset = adapter.make_reflective_dataset(seed, batch, ["second", "first"])
    assert batch.scores == [0.5, 0.0, 0.5]
    assert batch.outputs[1] is None
    assert batch.objective_scores == [{"brief": 1.0}, {}, {"brief": 1.0}]
    assert isinstance(batch.trajectories[1]["prediction"], FailedPrediction)
    first = batch.trajectories[0]["score"]  # As a prediction: DSPy's records of Flex code look for that.
    assert (first.score, first.feedback) == (0.5, "good q0")
    assert list(dataset) == ["second", "first"]
    assert dataset.scores is batch.scores
    assert [record["Feedback"] for record in dataset["first"]] == [
        "good q0",
        "The program failed on this example: KeyError: 'no such city'",
        "good q2",
    ]


def test_no_record_at_all_is_the_error_of_dspy_gepa():
    adapter = make_adapter(Pair())
    with dspy.context(lm=ScriptedLM(default=reply)):
        batch = adapter.evaluate(examples(2), adapter.program.seed(), capture_traces=True)
    with pytest.raises(Exception, match="No valid predictions found for any module"):
        adapter.make_reflective_dataset({}, batch, ["nobody"])


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]


def test_state_of_the_saved_parts():
    adapter = make_adapter(Pair())
    adapter.saved_parts["part"] = part = Counting()
    adapter.set_adapter_state({})
    assert part.count == 0
    adapter.set_adapter_state({"part": {"count": 3}, "unknown": {}})
    assert part.count == 3
    assert adapter.get_adapter_state() == {"part": {"count": 3}}


# Beside dspy.GEPA ---------------------------------------------------------------------------------------------


def in_order(record) -> tuple[str, str]:
    return str(record["Inputs"]), record["Feedback"]


class Capture(InstructionProposer):
    """Keeps the first records that it was shown of each component, and changes nothing of worth."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, list[Any]] = {}

    def __call__(self, candidate, reflective_dataset, components_to_update):
        for name in components_to_update:
            found = sorted((dict(r) for r in reflective_dataset[name]), key=in_order)
            self.records.setdefault(name, found)
        return dict.fromkeys(components_to_update, "New.")


class Scores:
    """Keeps the scores of the first minibatch, by example."""

    def __init__(self) -> None:
        self.seed: dict[Any, float] = {}
        self.minibatch: list[float] = []

    def on_valset_evaluated(self, event):
        self.seed = self.seed or dict(event["scores_by_val_id"])

    def on_evaluation_end(self, event):
        self.minibatch = self.minibatch or sorted(event["scores"])


def both(program, trainset, *, lm, metric=by_number, **options) -> list[tuple[Capture, Scores]]:
    """One step of `dspy.GEPA` and of `CombeeOptimizer`: three examples, so that one call reads all records."""
    seen = []
    for optimizer_class in (dspy.GEPA, CombeeOptimizer):
        capture, scores = Capture(), Scores()
        optimizer = optimizer_class(
            metric,
            max_metric_calls=6 + 3 * len(trainset),
            reflection_minibatch_size=len(trainset),
            reflection_lm=ScriptedLM(default={"new_instruction": "unused"}),
            instruction_proposer=capture,
            component_selector="all",
            num_threads=4,
            perfect_score=10.0,
            gepa_kwargs={"callbacks": [scores]},
            **options,
        )
        with dspy.context(lm=lm):
            optimizer.compile(program, trainset=trainset, valset=trainset)
        seen.append((capture, scores))
    return seen


def assert_same(seen) -> dict[str, list[Any]]:
    (theirs, their_scores), (ours, our_scores) = seen
    assert ours.records == theirs.records
    assert our_scores.seed == their_scores.seed
    assert our_scores.minibatch == their_scores.minibatch
    return ours.records


class Verdict(pydantic.BaseModel):
    text: str
    grade: int


class Rich(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.think = dspy.ChainOfThought("question, history: dspy.History, tags: list[str] -> note")
        self.judge = dspy.Predict("note -> answer, grades: dict[str, int]")

    def forward(self, question, history, tags):
        return self.judge(note=self.think(question=question, history=history, tags=tags).note)


@gepa_warns
def test_same_scores_and_records_as_dspy_gepa():
    trainset = examples(3, history=dspy.History(messages=[{"question": "a", "note": "b"}]), tags=["x", "y"])
    lm = ScriptedLM(
        default=lambda prompt: {
            name: {"clarity": 3} if name == "grades" else f"{name} of it" for name in prompt.output_fields
        }
    )
    records = assert_same(both(Rich(), trainset, lm=lm))
    assert set(records) == {"think.predict", "judge"}
    assert all(list(record) == ["Inputs", "Generated Outputs", "Feedback"] for record in records["judge"])
    first = records["think.predict"][0]["Inputs"]
    assert list(first) == ["Context", "question", "tags"]
    assert isinstance(first["Context"], dspy.History)
    assert records["judge"][1]["Generated Outputs"] == {"answer": "answer of it", "grades": {"clarity": 3}}
    assert records["judge"][1]["Feedback"] == "judge on q1: answer of it"


@gepa_warns
@pytest.mark.parametrize("value", [0, 1, 0.0, 0.5, True, False])
def test_same_feedback_as_dspy_gepa_where_the_metric_gives_a_number(value):
    def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
        return value

    records = assert_same(both(Pair(), examples(3), lm=ScriptedLM(default=reply), metric=metric))
    assert records["first"][0]["Feedback"] == f"This trajectory got a score of {value}."


@gepa_warns
@pytest.mark.parametrize("keep", [True, False])
def test_same_treatment_of_unparsed_answers_as_dspy_gepa(keep):
    lm = ScriptedLM(default=lambda prompt: "gibberish" if question_of(prompt) == "q1" else reply(prompt))
    seen = both(dspy.Predict("question -> answer"), examples(3), lm=lm, add_format_failure_as_feedback=keep)
    records = assert_same(seen)
    assert [record["Inputs"]["question"] for record in records["self"]] == (
        ["q0", "q1", "q2"] if keep else ["q0", "q2"]
    )
    if keep:
        assert "gibberish" in records["self"][1]["Generated Outputs"]
        assert records["self"][1]["Feedback"].startswith("Your output failed to parse.")


# Runs ---------------------------------------------------------------------------------------------------------


def compile_pair(*, metric=by_number, steps=2, **options):
    return CombeeOptimizer(
        metric,
        max_metric_calls=2 + steps * (2 * 9 + 2),
        reflection_minibatch_size=9,
        reflection_lm=ScriptedLM(default=lambda prompt: {"new_instruction": "Better."}),
        use_merge=False,
        track_stats=True,
        num_threads=4,
        **options,
    ).compile(Pair(), examples(9), valset=examples(2))


class Callback(dspy.utils.callback.BaseCallback):
    def __init__(self) -> None:
        self.modules: list[str] = []
        self.calls = 0

    def on_module_start(self, call_id, instance, inputs):
        self.modules.append(type(instance).__name__)

    def on_lm_end(self, call_id, outputs, exception):
        self.calls += 1


def test_configured_callbacks_and_usage_tracking():
    lm, callback, usages = ScriptedLM(default=reply), Callback(), []

    def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
        usages.append(pred.get_lm_usage())
        return by_number(gold, pred, trace, pred_name)

    dspy.configure(lm=lm, callbacks=[callback], track_usage=True)
    compile_pair(metric=metric)
    assert callback.modules.count("Pair") == len(lm.calls) / 2
    assert callback.calls > len(lm.calls), "the reflection calls are seen too"
    assert all(usage["scripted/lm"]["prompt_tokens"] > 0 for usage in usages)


def test_track_usage_around_compile_sees_all():
    lm = ScriptedLM(default=reply)
    with dspy.context(lm=lm), dspy.track_usage() as tracker:
        better = compile_pair()
    total = tracker.get_total_tokens()["scripted/lm"]
    assert total["prompt_tokens"] == better.detailed_results.spent.usage.input_tokens
    assert total["prompt_tokens"] > lm.usage["scripted"].input_tokens


def test_random_metric_and_odd_values_do_not_stop_a_run(caplog):
    values = [0.3, None, float("nan"), True, {"score": 0.5, "feedback": ""}, "x", -4.0, 7]
    lock, position = threading.Lock(), [0]

    def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
        with lock:
            position[0] += 1
            return values[position[0] % len(values)]

    with dspy.context(lm=ScriptedLM(default=reply)):
        better = compile_pair(metric=metric)
    assert len(better.detailed_results.steps) == 2
    for step in better.detailed_results.steps:
        assert set(step.scores_before) <= {0.3, 0.0, 1.0, 0.5, -4.0, 7.0}
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "(Said once.)" in r.message]
    assert len(messages) == len(set(messages)) >= 3


def test_dict_metric_reaches_reflection():
    def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
        return {"score": 0.0, "feedback": f"the rule for {gold.question}"}

    with dspy.context(lm=ScriptedLM(default=reply)):
        better = compile_pair(metric=metric, steps=1)
    prompts = "".join(node.prompt for node in better.detailed_results.steps[0].nodes)
    assert all(f"the rule for q{i}" in prompts for i in range(9))


@pytest.mark.parametrize(
    "kind", [lm15.AuthError, lm15.BillingError, lm15.RateLimitError, lm15.TransportError, ConnectionError]
)
def test_provider_that_refuses_or_is_gone_stops_the_run_with_the_best_program(kind):
    """It answers the old instruction, and the first three runs of the new one."""
    count = [0]
    lock = threading.Lock()

    def answer(prompt):
        if "Better." in prompt.system:
            with lock:
                count[0] += 1
                if count[0] > 3:
                    return kind("no")
        return reply(prompt)

    executor = ThreadExecutor(4, Backoff(incidents=3, attempts=3, first_delay=0.001))
    with dspy.context(lm=ScriptedLM(default=answer)), pytest.raises(ProviderError) as caught:
        compile_pair(executor=executor)
    best = caught.value.best_program
    assert [predictor.signature.instructions for predictor in best.predictors()] == ["Note it.", "Answer it."]
    with dspy.context(lm=ScriptedLM(default=reply)):
        assert best(question="q7").answer == "answer of q7"
