"""Programs of every kind through `CombeeOptimizer.compile`: the right component changes, from its own records."""

import asyncio
import copy
import logging
import threading
from collections import Counter
from typing import Any

import dspy
import pydantic
import pytest
from dspy.primitives import LocalInterpreter
from dspy.teleprompt.gepa import InstructionProposer

from dspy_combee import CombeeOptimizer
from dspy_combee.testing import ScriptedLM

from .test_rollout import Program, question_of, solver

LEARNED = "LEARNED"


class Capture(InstructionProposer):
    """Gives each component a marked instruction, and keeps the records that it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[tuple[str, list[Any]]] = []

    def __call__(self, candidate, reflective_dataset, components_to_update):
        self.groups += [(name, reflective_dataset[name]) for name in components_to_update]
        return {name: f"{LEARNED} {name}" for name in components_to_update}

    @property
    def components(self) -> set[str]:
        return {name for name, _ in self.groups}

    def records(self, component: str) -> list[Any]:
        """The distinct records of a component, in the order of the examples."""
        found = {id(record): record for name, records in self.groups if name == component for record in records}
        return sorted(found.values(), key=lambda record: str(record["Inputs"]))

    def inputs(self, component: str, field: str = "question") -> list[Any]:
        return [record["Inputs"][field] for record in self.records(component)]


def student_lm(**replies: Any) -> ScriptedLM:
    """Answers "right" once the instruction has been learned; `replies` are other output fields."""

    def reply(prompt):
        fields = {"answer": "right" if LEARNED in prompt.system else "wrong", "reasoning": "because", **replies}
        return {name: fields[name](prompt) if callable(fields[name]) else fields[name] for name in prompt.output_fields}

    return ScriptedLM(default=reply)


def feedback_metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
    return dspy.Prediction(score=float(pred.answer == "right"), feedback=f"feedback for {pred_name}")


def learn(program, trainset, *, lm=None, metric=feedback_metric, **keywords):
    """Make one step over the trainset (so many questions, or examples), of every component: program and records."""
    if isinstance(trainset, int):
        trainset = [dspy.Example(question=f"q{i}").with_inputs("question") for i in range(trainset)]
    capture = Capture()
    options = {
        "max_metric_calls": 2 + 2 * len(trainset),
        "reflection_minibatch_size": len(trainset),
        "reflection_lm": ScriptedLM(default={"new_instruction": f"{LEARNED} merged"}),
        "instruction_proposer": capture,
        "component_selector": "all",
        "use_merge": False,
        "track_stats": True,
        "num_threads": 4,
        **keywords,
    }
    with dspy.context(lm=lm or student_lm()):
        return CombeeOptimizer(metric, **options).compile(program, trainset, valset=trainset[-1:]), capture


def instructions_of(program) -> dict[str, str]:
    return {name: predictor.signature.instructions for name, predictor in program.named_predictors()}


# One predictor, several, twins --------------------------------------------------------------------------------


def test_one_predictor():
    better, capture = learn(solver(), 9)
    assert instructions_of(better) == {"self": "LEARNED self"}
    assert capture.inputs("self") == [f"q{i}" for i in range(9)]
    shown = {"Inputs": {"question": "q0"}, "Generated Outputs": {"answer": "wrong"}, "Feedback": "feedback for self"}
    assert capture.records("self")[0] == shown
    uses = Counter(id(record) for _, records in capture.groups for record in records)
    assert set(uses.values()) == {2}, "every record is in two groups"
    (step,) = better.detailed_results.steps
    assert (step.n, step.k, step.duplication_factor, step.accepted) == (9, 3, 2, True)
    assert (step.scores_before, step.scores_after) == ((0.0,) * 9, (1.0,) * 9)


def twins() -> Program:
    """Two predictors of one signature, each for its own kind of question; neither for q0."""

    def run(self, question):
        kind = self.kind(question=question).kind
        return dspy.Prediction(answer="none") if kind == "none" else getattr(self, kind)(question=question)

    odd = solver()
    return Program(run, kind="question -> kind", odd=odd, even=copy.deepcopy(odd))


def kind_of(prompt):
    number = int(question_of(prompt).removeprefix("q"))
    return "none" if number == 0 else ("odd" if number % 2 else "even")


@pytest.mark.parametrize("num_threads", [1, 8])
def test_several_predictors_and_twins(num_threads):
    better, capture = learn(twins(), 9, lm=student_lm(kind=kind_of), num_threads=num_threads)
    assert capture.inputs("kind") == [f"q{i}" for i in range(9)]
    assert capture.inputs("odd") == ["q1", "q3", "q5", "q7"]
    assert capture.inputs("even") == ["q2", "q4", "q6", "q8"]
    assert {record["Feedback"] for record in capture.records("even")} == {"feedback for even"}
    assert [set(record["Generated Outputs"]) for record in capture.records("kind")] == [{"kind"}] * 9
    assert instructions_of(better) == {name: f"LEARNED {name}" for name in ("kind", "odd", "even")}


@pytest.mark.parametrize(
    ("kind", "selector", "changed"),
    [(kind_of, lambda *given: ["even"], {"even"}), (lambda prompt: "odd", "all", {"kind", "odd"})],
    ids=["not selected", "not reached"],
)
def test_other_components_are_left_alone(kind, selector, changed):
    student = twins()
    better, capture = learn(student, 9, lm=student_lm(kind=kind), component_selector=selector)
    assert capture.components == changed
    assert instructions_of(better) == {**instructions_of(student), **{name: f"LEARNED {name}" for name in changed}}


def copying() -> Program:
    """Copies its predictor during the call, as `BestOfN` does."""
    run = lambda self, question: [copy.deepcopy(self.solve)(question=question) for _ in range(2)][-1]  # noqa: E731
    return Program(run, solve="question -> answer", unused="question -> answer")


def thinker() -> Any:
    return dspy.ChainOfThought("question -> answer")


def best_of_two() -> Any:
    return dspy.BestOfN(thinker(), N=2, reward_fn=lambda args, pred: float(pred.answer == "right"), threshold=1.0)


@pytest.mark.parametrize(
    ("make", "component", "num_earlier"),
    [(copying, "solve", 1), (best_of_two, "module.predict", 0), (thinker, "predict", 0)],
)
def test_copies_made_during_the_call_count_as_their_original(make, component, num_earlier):
    student = make()
    better, capture = learn(student, 4)
    assert capture.components == {component}
    assert capture.inputs(component) == ["q0", "q1", "q2", "q3"]
    outputs = {"answer": "wrong"} if make is copying else {"reasoning": "because", "answer": "wrong"}
    for record in capture.records(component):
        assert record["Generated Outputs"] == outputs
        assert len(record.get("Earlier Calls", [])) == num_earlier
    assert instructions_of(better) == {**instructions_of(student), component: f"LEARNED {component}"}


# Agents -------------------------------------------------------------------------------------------------------


def search(query: str, limit: int = 3) -> str:
    """Look something up.

    Takes a query of several words.
    """
    return f"found {query}"


def agent_lm(turns: int = 2, tool_name: str = "search") -> ScriptedLM:
    """Calls a tool so many times, then finishes; in the words of `dspy.ReAct` and of `dspy.ReActV2`."""

    def turn_of(prompt):
        return max(prompt.question.count("tool_name_"), prompt.count("found words"))

    def arguments(prompt):
        return {"query": f"words of turn {turn_of(prompt)}"} if turn_of(prompt) < turns else {}

    def calls(prompt):
        last = {"name": "submit", "args": {"answer": "right" if LEARNED in prompt.system else "wrong"}}
        return {"tool_calls": [{"name": tool_name, "args": arguments(prompt)} if turn_of(prompt) < turns else last]}

    return student_lm(
        next_thought=lambda prompt: f"thought number {turn_of(prompt)}",
        next_tool_name=lambda prompt: tool_name if turn_of(prompt) < turns else "finish",
        next_tool_args=arguments,
        tool_calls=calls,
    )


def test_react_keeps_its_tools_in_the_prompt(tmp_path):
    lm, student = agent_lm(), dspy.ReAct("question -> answer", tools=[search])
    better, capture = learn(student, 4, lm=lm)
    assert capture.components == {"react", "extract.predict"}
    assert capture.inputs("react") == ["q0", "q1", "q2", "q3"]
    fields = {name: set(capture.records(name)[0]["Generated Outputs"]) for name in capture.components}
    called = {"next_thought", "next_tool_name", "next_tool_args"}
    assert fields == {"react": called, "extract.predict": {"reasoning", "answer"}}
    assert better.react.signature.instructions.startswith("LEARNED react\n")
    assert better.extract.predict.signature.instructions == "LEARNED extract.predict"

    better.save(tmp_path / "agent.json")
    loaded = dspy.ReAct("question -> answer", tools=[search])
    loaded.load(tmp_path / "agent.json")
    for program in (better, loaded):
        before = len(lm.calls)
        with dspy.context(lm=lm):
            assert program(question="q9").answer == "right"
        prompt = lm.calls[before].prompt.system
        assert [prompt.count(str(tool)) for tool in student.tools.values()] == [1, 1]


def test_react_keeps_an_instruction_that_still_lists_the_tools():
    student = dspy.ReAct("question -> answer", tools=[search])
    texts = {"react": f"Be quick.\n{student.react.signature.instructions}", "extract.predict": LEARNED}

    def propose(candidate, reflective_dataset, components_to_update):
        return {name: texts[name] for name in components_to_update}

    better, _ = learn(student, 4, lm=agent_lm(), instruction_proposer=propose)
    assert instructions_of(better) == texts


@pytest.mark.parametrize(("make", "field"), [(dspy.ReAct, "trajectory"), (dspy.ReActV2, "Context")])
def test_record_of_an_agent_shows_a_growing_transcript_once(make, field):
    better, capture = learn(make("question -> answer", tools=[search]), 4, lm=agent_lm(5))
    assert better.react.signature.instructions.startswith("LEARNED react")
    assert len(capture.records("react")) == 4
    for record in capture.records("react"):
        assert "Earlier Calls" not in record
        assert str(record["Inputs"][field]).count("found words of turn") == 5


class Client:
    """Something with a lock in it, as clients and connections have."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0

    def find(self, query: str) -> str:
        """Find it."""
        with self.lock:
            self.calls += 1
        return f"found {query}"


def closing_over(client: Client):
    def find(query: str) -> str:
        """Find it."""
        return client.find(query)

    return find


@pytest.mark.parametrize("make_tool", [closing_over, lambda client: client.find], ids=["closure", "method"])
@pytest.mark.parametrize("num_threads", [1, 32])
def test_tool_with_a_client(make_tool, num_threads, caplog):
    client = Client()
    student = dspy.ReAct("question -> answer", tools=[make_tool(client)])
    better, _ = learn(student, 4, lm=agent_lm(1, "find"), num_threads=num_threads)
    assert better.react.signature.instructions.startswith("LEARNED react")
    assert client.calls == 1 + 4 + 4 + 1, "one client for all rollouts: seed, parent, child, validation"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# What stays as it is ------------------------------------------------------------------------------------------


def everything_in(program) -> dict[str, Any]:
    """Every attribute of every module in it, the very objects, and copies of what is changed in place."""
    return {
        f"{path}.{name}": (id(value), str(value))
        for path, module in program.named_sub_modules()
        for name, value in vars(module).items()
    }


def test_frozen_submodules_demos_lms_and_the_student_are_kept():
    own_lm, frozen = student_lm(), dspy.ChainOfThought("question -> hint")
    frozen._compiled = True
    run = lambda self, question: self.solve(question=question, hint=self.frozen(question=question).hint)  # noqa: E731
    student = Program(run, frozen=frozen, solve="question, hint -> answer", config={"depth": 2})
    student.solve.demos = [dspy.Example(question="demo", hint="h", answer="right").with_inputs("question", "hint")]
    student.solve.lm = own_lm
    before = everything_in(student)
    better, capture = learn(student, 4, lm=student_lm(hint="a hint"))
    assert everything_in(student) == before
    assert better is not student
    assert capture.components == {"solve"}
    assert instructions_of(better) == {**instructions_of(student), "solve": "LEARNED solve"}
    assert better.frozen._compiled
    assert better.frozen.predict.signature.instructions == frozen.predict.signature.instructions
    assert better.solve.lm is own_lm
    assert better.solve.demos == student.solve.demos
    assert capture.records("solve")[0]["Inputs"] == {"question": "q0", "hint": "a hint"}
    assert len(own_lm.calls) == 1 + 4 + 4 + 1


# Inputs and outputs with types --------------------------------------------------------------------------------


def test_images_are_passed_by_reference_and_reach_the_reflection_lm_as_images():
    trainset = [dspy.Example(picture=dspy.Image(f"https://x.com/{i}.png")).with_inputs("picture") for i in range(9)]
    student, reflection_lm = dspy.Predict("picture: dspy.Image -> answer"), ScriptedLM(default={"new_instruction": "x"})
    _, capture = learn(student, trainset)
    uses = Counter(id(record["Inputs"]["picture"]) for _, records in capture.groups for record in records)
    assert uses == {id(example.picture): 2 for example in trainset}

    learn(student, trainset, reflection_lm=reflection_lm, instruction_proposer=None)
    prompts = [call.prompt for call in reflection_lm.calls]
    assert len(prompts) == 3, "three equal proposals need no merge"
    assert not any("CUSTOM-TYPE" in prompt for prompt in prompts)
    shown = [sum(f"<image image/png https://x.com/{i}.png>" in prompt for prompt in prompts) for i in range(9)]
    assert shown == [2] * 9


def test_histories():
    def history(text):
        return dspy.History(messages=[{"question": text, "answer": "a"}])

    trainset = [
        dspy.Example(question=f"q{i}", one=history(f"one {i}"), two=history(f"two {i}")).with_inputs(
            "question", "one", "two"
        )
        for i in range(4)
    ]
    better, capture = learn(dspy.Predict("question, one: dspy.History, two: dspy.History -> answer"), trainset)
    assert instructions_of(better) == {"self": "LEARNED self"}
    shown = sorted((record["Inputs"] for record in capture.records("self")), key=lambda inputs: inputs["question"])
    assert shown == [
        {"Context": history(f"one {i}"), "question": f"q{i}", "two": history(f"two {i}")} for i in range(4)
    ]


class Spot(pydantic.BaseModel):
    name: str
    floors: int


class Locate(dspy.Signature):
    """Locate it."""

    spot: Spot = dspy.InputField()
    tags: list[str] = dspy.InputField()
    answer: str = dspy.OutputField()
    nearest: Spot = dspy.OutputField()
    distance: float = dspy.OutputField()


def test_typed_and_pydantic_fields():
    spots = [Spot(name=f"tower {i}", floors=i) for i in range(4)]
    trainset = [dspy.Example(spot=spot, tags=["a", "b"]).with_inputs("spot", "tags") for spot in spots]
    types = set()

    def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
        types.add((type(pred.nearest), type(pred.distance)))
        return feedback_metric(gold, pred, trace, pred_name)

    lm = student_lm(nearest={"name": "hall", "floors": 2}, distance=1.5)
    better, capture = learn(dspy.Predict(Locate), trainset, lm=lm, metric=metric)
    assert instructions_of(better) == {"self": "LEARNED self"}
    assert types == {(Spot, float)}
    assert capture.records("self")[3] == {
        "Inputs": {"spot": {"name": "tower 3", "floors": 3}, "tags": ["a", "b"]},
        "Generated Outputs": {"answer": "wrong", "nearest": {"name": "hall", "floors": 2}, "distance": 1.5},
        "Feedback": "feedback for self",
    }
    assert better.signature.output_fields["nearest"].annotation is Spot


# State, threads, event loops ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 32])
def test_state_on_self_does_not_mix(num_threads):
    def run(self, question):
        """Keep what it does on `self`, in new attributes and in containers that it was made with."""
        self.question = question
        self.log.append(question)
        self.note = self.first(question=question).note
        self.count += 1
        answer = self.second(question=self.question, note=self.note).answer
        return dspy.Prediction(answer=answer, seen=[*self.log, self.question, self.note], count=self.count)

    def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
        own = gold.question
        seen.add((*(text.replace(own, "own") for text in pred.seen), pred.count))
        if pred_trace is not None:
            seen.add(tuple(step[1]["question"] == own for step in (*pred_trace, *trace)))
        return feedback_metric(gold, pred, trace, pred_name)

    seen: set[Any] = set()
    lm = student_lm(note=lambda prompt: f"note on {question_of(prompt)}")
    lm.engine.latency = lambda prompt, rng: rng.uniform(0.0, 0.004)
    student = Program(run, first="question -> note", second="question, note -> answer", log=[], count=0)
    _, capture = learn(student, 64, lm=lm, metric=metric, num_threads=num_threads)
    assert seen == {("own", "own", "note on own", 1), (True, True, True)}
    assert (student.log, student.count, hasattr(student, "note")) == ([], 0, False)
    notes = {record["Inputs"]["question"]: record["Inputs"]["note"] for record in capture.records("second")}
    assert notes == {f"q{i}": f"note on q{i}" for i in range(64)}


class OnlyAsync(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.solve = solver()

    async def aforward(self, question):
        await asyncio.sleep(0)
        return await self.solve.acall(question=question)


@pytest.mark.parametrize("in_a_loop", [False, True])
@pytest.mark.parametrize("num_threads", [1, 8])
def test_program_with_only_aforward(num_threads, in_a_loop):
    async def learn_in_a_loop():
        return learn(OnlyAsync(), 9, num_threads=num_threads)

    better, capture = asyncio.run(learn_in_a_loop()) if in_a_loop else learn(OnlyAsync(), 9, num_threads=num_threads)
    assert instructions_of(better) == {"solve": "LEARNED solve"}
    assert capture.inputs("solve") == [f"q{i}" for i in range(9)]
    assert better.detailed_results.steps[0].scores_after == (1.0,) * 9


@pytest.mark.parametrize("num_threads", [1, 32])
def test_context_inside_the_program_and_around_compile(num_threads):
    inner, outer = student_lm(note="inner"), student_lm(note="outer")

    def run(self, question):
        with dspy.context(lm=inner):
            note = self.first(question=question).note
        return self.second(question=question, note=note)

    student = Program(run, first="question -> note", second="question, note -> answer")
    _, capture = learn(student, 32, lm=outer, num_threads=num_threads)
    assert {record["Inputs"]["note"] for record in capture.records("second")} == {"inner"}
    assert len(inner.calls) == len(outer.calls) == 1 + 32 + 32 + 1
    assert all("`note`" in call.prompt.system for call in inner.calls)


# dspy.Flex ----------------------------------------------------------------------------------------------------


BETTER_CODE = """class AnswerModule(dspy.Module):
    def __init__(self):
        super().__init__()
        self.predict = dspy.Predict(dspy.Signature("question -> answer", "LEARNED code"))

    def forward(self, **inputs):
        return dspy.Prediction(answer=self.predict(**inputs).answer)"""


def metric_of_traces(gold, pred, trace=None, pred_name=None, pred_trace=None, program_trace=None):
    calls = [list(step[1]) for step in program_trace or []]
    return dspy.Prediction(score=float(pred.answer == "right"), feedback=f"{pred_name} saw {calls}")


@pytest.mark.parametrize(
    ("code", "whose"),
    [(BETTER_CODE, "DSPy's"), (BETTER_CODE, "own"), ("def broken(", "own")],
    ids=["", "own", "broken"],
)
# DSPy's own call from inside Flex warns.
@pytest.mark.filterwarnings("ignore:Passing OpenAI-style message:DeprecationWarning")
def test_flex_code_goes_to_the_code_proposer(code, whose):
    asked = []

    def code_proposer(candidate, reflective_dataset, components_to_update, task_descriptions, context_blurbs):
        asked.append((components_to_update, [record["Inputs"] for record in reflective_dataset["flex"]]))
        assert candidate["flex"].startswith("class ")
        assert "question" in task_descriptions["flex"]
        return {"flex": code}

    reflection_lm = ScriptedLM([("revised_source", {"revised_source": code})])
    flex = dspy.Flex("question -> answer", interpreter_factory=LocalInterpreter)
    student = Program(lambda self, question: self.note(question=question) and self.flex(question=question))
    student.note, student.flex = dspy.Predict("question -> note"), flex
    source = flex.module_src
    options = {"metric": metric_of_traces, "reflection_lm": reflection_lm, "lm": student_lm(note="n")}
    better, capture = learn(student, 2, code_proposer=code_proposer if whose == "own" else None, **options)
    assert student.flex.module_src == source
    assert capture.components == {"note"}
    fine = code == BETTER_CODE
    (step,) = better.detailed_results.steps
    assert (step.accepted, step.scores_after) == (fine, (float(fine),) * 2)
    assert better.flex.module_src == (code if fine else source)
    assert instructions_of(better)["note"].startswith("LEARNED note" if fine else "Given the fields")
    if whose == "own":
        assert asked == [(["flex"], [{"question": "q0"}, {"question": "q1"}])]
    else:
        (call,) = reflection_lm.calls
        assert all(question in call.prompt.question for question in ("q0", "q1"))
        # The metric was given the trace when it scored.
        assert "None saw [['question'], ['question']]" in call.prompt.question
