"""Programs of every kind through `CombeeOptimizer.compile`: the right component changes, from its own records."""

import asyncio
import copy
import logging
import random
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

LEARNED = "LEARNED"


class Capture(InstructionProposer):
    """Gives each component a marked instruction, and keeps the records that it was shown."""

    def __init__(self, text: str = LEARNED) -> None:
        super().__init__()
        self.text = text
        self.groups: list[tuple[str, list[Any]]] = []

    def __call__(self, candidate, reflective_dataset, components_to_update):
        self.groups += [(name, reflective_dataset[name]) for name in components_to_update]
        return {name: f"{self.text} {name}" for name in components_to_update}

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


def questions(n: int, **more: Any) -> list[dspy.Example]:
    return [dspy.Example(question=f"q{i}", **more).with_inputs("question", *more) for i in range(n)]


def learn(program, trainset, *, lm=None, metric=feedback_metric, capture=None, steps=1, **keywords):
    """Run so many steps over the whole trainset, every component in each."""
    options = {
        "max_metric_calls": 1 + steps * (2 * len(trainset) + 1),
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
        return CombeeOptimizer(metric, **options).compile(program, trainset, valset=trainset[-1:])


def instructions_of(program) -> dict[str, str]:
    return {name: predictor.signature.instructions for name, predictor in program.named_predictors()}


# One predictor, several, twins --------------------------------------------------------------------------------


def test_one_predictor():
    capture = Capture()
    student = dspy.Predict("question -> answer")
    better = learn(student, questions(9), capture=capture)
    assert instructions_of(better) == {"self": "LEARNED self"}
    assert capture.inputs("self") == [f"q{i}" for i in range(9)]
    first = capture.records("self")[0]
    assert first == {
        "Inputs": {"question": "q0"},
        "Generated Outputs": {"answer": "wrong"},
        "Feedback": "feedback for self",
    }
    uses = Counter(id(record) for _, records in capture.groups for record in records)
    assert set(uses.values()) == {2}, "every record is in two groups"
    (step,) = better.detailed_results.steps
    assert (step.n, step.k, step.duplication_factor, step.accepted) == (9, 3, 2, True)
    assert (step.scores_before, step.scores_after) == ((0.0,) * 9, (1.0,) * 9)


class Twins(dspy.Module):
    """Two predictors of one signature, each for its own kind of question; neither for q0."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = dspy.Predict("question -> kind")
        self.odd = dspy.Predict("question -> answer")
        self.even = copy.deepcopy(self.odd)

    def forward(self, question):
        kind = self.kind(question=question).kind
        return dspy.Prediction(answer="none") if kind == "none" else getattr(self, kind)(question=question)


def question_of(prompt) -> str:
    return prompt.question.split("[[ ## question ## ]]\n")[1].split()[0]


def kind_of(prompt):
    number = int(question_of(prompt).removeprefix("q"))
    return "none" if number == 0 else ("odd" if number % 2 else "even")


@pytest.mark.parametrize("num_threads", [1, 8])
def test_several_predictors_and_twins(num_threads):
    capture = Capture()
    better = learn(Twins(), questions(9), lm=student_lm(kind=kind_of), capture=capture, num_threads=num_threads)
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
    capture, student = Capture(), Twins()
    better = learn(student, questions(9), lm=student_lm(kind=kind), capture=capture, component_selector=selector)
    assert capture.components == changed
    assert instructions_of(better) == {**instructions_of(student), **{name: f"LEARNED {name}" for name in changed}}


class TwinsInside(dspy.Module):
    """Copies its predictor during the call, as `BestOfN` does."""

    def __init__(self) -> None:
        super().__init__()
        self.solve = dspy.Predict("question -> answer")
        self.unused = dspy.Predict("question -> answer")

    def forward(self, question):
        return [copy.deepcopy(self.solve)(question=question) for _ in range(2)][-1]


def best_of_two() -> Any:
    inner = dspy.ChainOfThought("question -> answer")
    return dspy.BestOfN(module=inner, N=2, reward_fn=lambda args, pred: float(pred.answer == "right"), threshold=1.0)


@pytest.mark.parametrize(
    ("make", "component", "outputs", "num_earlier"),
    [
        (TwinsInside, "solve", {"answer": "wrong"}, 1),
        (best_of_two, "module.predict", {"reasoning": "because", "answer": "wrong"}, 0),
        (lambda: dspy.ChainOfThought("question -> answer"), "predict", {"reasoning": "because", "answer": "wrong"}, 0),
    ],
    ids=["own copies", "BestOfN", "ChainOfThought"],
)
def test_copies_made_during_the_call_count_as_their_original(make, component, outputs, num_earlier):
    capture, student = Capture(), make()
    better = learn(student, questions(4), capture=capture)
    assert capture.components == {component}
    assert capture.inputs(component) == ["q0", "q1", "q2", "q3"]
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
    capture = Capture()
    lm = agent_lm()
    student = dspy.ReAct("question -> answer", tools=[search])
    better = learn(student, questions(4), lm=lm, capture=capture)
    assert capture.components == {"react", "extract.predict"}
    assert capture.inputs("react") == ["q0", "q1", "q2", "q3"]
    assert set(capture.records("react")[0]["Generated Outputs"]) == {
        "next_thought",
        "next_tool_name",
        "next_tool_args",
    }
    assert set(capture.records("extract.predict")[0]["Generated Outputs"]) == {"reasoning", "answer"}
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
        for tool in student.tools.values():
            assert prompt.count(str(tool)) == 1


def test_react_keeps_an_instruction_that_still_lists_the_tools():
    student = dspy.ReAct("question -> answer", tools=[search])
    texts = {"react": f"Be quick.\n{student.react.signature.instructions}", "extract.predict": LEARNED}

    def propose(candidate, reflective_dataset, components_to_update):
        return {name: texts[name] for name in components_to_update}

    better = learn(student, questions(4), lm=agent_lm(), instruction_proposer=propose)
    assert instructions_of(better) == texts


@pytest.mark.parametrize(("make", "field"), [(dspy.ReAct, "trajectory"), (dspy.ReActV2, "Context")])
def test_record_of_an_agent_shows_a_growing_transcript_once(make, field):
    capture = Capture()
    better = learn(make("question -> answer", tools=[search]), questions(4), lm=agent_lm(5), capture=capture)
    assert better.react.signature.instructions.startswith("LEARNED react")
    assert len(capture.records("react")) == 4
    for record in capture.records("react"):
        assert "Earlier Calls" not in record
        assert str(record["Inputs"][field]).count("found words of turn") == 5


# Tools that hold what cannot be copied ------------------------------------------------------------------------


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
    better = learn(student, questions(4), lm=agent_lm(1, "find"), capture=Capture(), num_threads=num_threads)
    assert better.react.signature.instructions.startswith("LEARNED react")
    assert client.calls == 1 + 4 + 4 + 1, "one client for all rollouts: seed, parent, child, validation"
    assert not root_warnings(caplog)


def root_warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "root" and r.levelno >= logging.WARNING]


class Locked(dspy.Module):
    """Holds a lock, beside its predictors and in a list, and a tool that is a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.parts = [dspy.Predict("question -> answer"), threading.Lock()]
        self.agent = dspy.ReAct("question -> answer", tools=[self.look])
        self.looked: list[str] = []

    def look(self, query: str) -> str:
        """Look around."""
        with self.lock:
            self.looked.append(query)
        return f"seen {len(self.looked)}"

    def forward(self, question):
        with self.lock:
            first = self.parts[0](question=question)
        return dspy.Prediction(answer=first.answer, looked=[self.agent(question=question), *self.looked][1:])


def test_program_with_a_lock_shares_it_quietly(caplog):
    looked = []

    def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
        looked.append(len(pred.looked))
        return feedback_metric(gold, pred, trace, pred_name)

    student = Locked()
    better = learn(student, questions(8), lm=agent_lm(1, "look"), metric=metric, capture=Capture(), num_threads=8)
    assert better.lock is student.lock
    assert better.parts[1] is student.parts[1]
    assert better.parts[0] is not student.parts[0]
    assert better.agent.tools["look"].func.__self__ is better, "the copy's tool is the copy's method"
    assert set(looked) == {1}, "every rollout has a list of its own"
    assert student.looked == []
    assert instructions_of(better)["parts[0]"] == "LEARNED parts[0]"
    assert not root_warnings(caplog)


# What stays as it is ------------------------------------------------------------------------------------------


class Pipeline(dspy.Module):
    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.frozen = dspy.ChainOfThought("question -> hint")
        self.frozen._compiled = True
        self.solve = dspy.Predict("question, hint -> answer")
        self.solve.demos = [dspy.Example(question="demo", hint="h", answer="right").with_inputs("question", "hint")]
        self.solve.lm = lm
        self.config = {"depth": 2}

    def forward(self, question):
        return self.solve(question=question, hint=self.frozen(question=question).hint)


def test_frozen_submodules_demos_and_lms_are_kept():
    own_lm = student_lm()
    capture = Capture()
    student = Pipeline(own_lm)
    better = learn(student, questions(4), lm=student_lm(hint="a hint"), capture=capture)
    assert capture.components == {"solve"}
    assert better.frozen._compiled
    assert better.frozen.predict.signature.instructions == student.frozen.predict.signature.instructions
    assert better.solve.lm is own_lm
    assert better.solve.demos == student.solve.demos
    assert capture.records("solve")[0]["Inputs"] == {"question": "q0", "hint": "a hint"}
    assert len(own_lm.calls) == 1 + 4 + 4 + 1


def everything_in(program) -> dict[str, Any]:
    """Every attribute of every module in it, the very objects, and copies of what is changed in place."""
    return {
        f"{path}.{name}": (id(value), str(value))
        for path, module in program.named_sub_modules()
        for name, value in vars(module).items()
    }


def test_student_is_unchanged():
    student = Pipeline(student_lm())
    before = everything_in(student)
    better = learn(student, questions(4), lm=student_lm(hint="a hint"), capture=Capture())
    assert better is not student
    assert instructions_of(better) != instructions_of(student)
    assert everything_in(student) == before


class Corpus:
    def __init__(self) -> None:
        self.passages = [f"passage {i}" for i in range(150_000)]


def test_big_attributes_are_shared_and_small_ones_are_not():
    seen = []

    class Retrieving(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.corpus = Corpus()
            self.small = ["a"]
            self.solve = dspy.Predict("question -> answer")

        def forward(self, question):
            seen.append((self.corpus, self.small))
            return self.solve(question=question)

    student = Retrieving()
    learn(student, questions(4), capture=Capture())
    assert all(corpus is student.corpus for corpus, _ in seen)
    assert len({id(small) for _, small in seen}) == len(seen)


# Inputs and outputs with types --------------------------------------------------------------------------------


def test_images_are_passed_by_reference_and_reach_the_reflection_lm_as_images():
    trainset = [dspy.Example(picture=dspy.Image(f"https://x.com/{i}.png")).with_inputs("picture") for i in range(9)]
    capture, reflection_lm = Capture(), ScriptedLM(default={"new_instruction": LEARNED})
    student = dspy.Predict("picture: dspy.Image -> answer")
    learn(student, trainset, capture=capture)
    uses = Counter(id(record["Inputs"]["picture"]) for _, records in capture.groups for record in records)
    assert uses == {id(example.picture): 2 for example in trainset}

    learn(student, trainset, reflection_lm=reflection_lm)
    assert len(reflection_lm.calls) == 3, "three equal proposals need no merge"
    assert not any("CUSTOM-TYPE" in call.prompt for call in reflection_lm.calls)
    prompts = [call.prompt for call in reflection_lm.calls]
    shown = [sum(f"<image image/png https://x.com/{i}.png>" in prompt for prompt in prompts) for i in range(9)]
    assert shown == [2] * 9


@pytest.mark.parametrize("num_histories", [1, 2])
def test_histories(num_histories):
    names = ["history", "others"][:num_histories]
    trainset = [
        dspy.Example(
            question=f"q{i}",
            **{name: dspy.History(messages=[{"question": f"{name} {i}", "answer": "a"}]) for name in names},
        ).with_inputs("question", *names)
        for i in range(4)
    ]
    fields = ", ".join(f"{name}: dspy.History" for name in names)
    capture = Capture()
    better = learn(dspy.Predict(f"question, {fields} -> answer"), trainset, capture=capture)
    assert instructions_of(better) == {"self": "LEARNED self"}
    assert len(capture.records("self")) == 4
    for record in capture.records("self"):
        number = record["Inputs"]["question"].removeprefix("q")
        assert record["Inputs"].keys() == {"Context", "question", *names[1:]}
        assert record["Inputs"]["Context"].messages == [{"question": f"history {number}", "answer": "a"}]
        if num_histories == 2:
            assert record["Inputs"]["others"].messages == [{"question": f"others {number}", "answer": "a"}]


class Place(pydantic.BaseModel):
    name: str
    floors: int


class Locate(dspy.Signature):
    """Locate it."""

    place: Place = dspy.InputField()
    tags: list[str] = dspy.InputField()
    answer: str = dspy.OutputField()
    nearest: Place = dspy.OutputField()
    distance: float = dspy.OutputField()


def test_typed_and_pydantic_fields():
    trainset = [
        dspy.Example(place=Place(name=f"tower {i}", floors=i), tags=["a", "b"]).with_inputs("place", "tags")
        for i in range(4)
    ]
    types = []

    def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
        types.append((type(pred.nearest), type(pred.distance)))
        return feedback_metric(gold, pred, trace, pred_name)

    capture = Capture()
    lm = student_lm(nearest={"name": "hall", "floors": 2}, distance=1.5)
    better = learn(dspy.Predict(Locate), trainset, lm=lm, metric=metric, capture=capture)
    assert instructions_of(better) == {"self": "LEARNED self"}
    assert set(types) == {(Place, float)}
    assert capture.records("self")[3] == {
        "Inputs": {"place": {"name": "tower 3", "floors": 3}, "tags": ["a", "b"]},
        "Generated Outputs": {"answer": "wrong", "nearest": {"name": "hall", "floors": 2}, "distance": 1.5},
        "Feedback": "feedback for self",
    }
    assert better.signature.output_fields["nearest"].annotation is Place


# State, threads, event loops ----------------------------------------------------------------------------------


class Stateful(dspy.Module):
    """Keeps what it does on `self`, in new attributes and in containers that it was made with."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dspy.Predict("question -> note")
        self.second = dspy.Predict("question, note -> answer")
        self.log: list[str] = []
        self.count = 0

    def forward(self, question):
        self.question = question
        self.log.append(question)
        self.note = self.first(question=question).note
        self.count += 1
        answer = self.second(question=self.question, note=self.note).answer
        return dspy.Prediction(answer=answer, seen=[*self.log, self.question, self.note], count=self.count)


@pytest.mark.parametrize("num_threads", [1, 32])
def test_state_on_self_does_not_mix(num_threads):
    def note(prompt):
        return f"note on {question_of(prompt)}"

    def latency(prompt, rng: random.Random):
        return rng.uniform(0.0, 0.004)

    def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
        mixed.extend([pred.seen] if pred.seen != [gold.question, gold.question, f"note on {gold.question}"] else [])
        mixed.extend([pred.count] if pred.count != 1 else [])
        if pred_trace is not None:
            mixed.extend([pred_trace] if pred_trace[0][1]["question"] != gold.question else [])
            mixed.extend([trace] if [step[1]["question"] for step in trace] != [gold.question] * 2 else [])
        return feedback_metric(gold, pred, trace, pred_name)

    mixed: list[Any] = []
    lm = student_lm(note=note)
    lm.engine.latency = latency
    capture = Capture()
    student = Stateful()
    learn(student, questions(64), lm=lm, metric=metric, capture=capture, num_threads=num_threads)
    assert mixed == []
    assert (student.log, student.count) == ([], 0)
    assert not hasattr(student, "note")
    notes = {record["Inputs"]["question"]: record["Inputs"]["note"] for record in capture.records("second")}
    assert notes == {f"q{i}": f"note on q{i}" for i in range(64)}


class OnlyAsync(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.solve = dspy.Predict("question -> answer")

    async def aforward(self, question):
        await asyncio.sleep(0)
        return await self.solve.acall(question=question)


async def learn_in_a_loop(**keywords):
    return learn(OnlyAsync(), questions(9), **keywords)


@pytest.mark.parametrize("in_a_loop", [False, True])
@pytest.mark.parametrize("num_threads", [1, 8])
def test_program_with_only_aforward(num_threads, in_a_loop):
    capture = Capture()
    keywords = {"capture": capture, "num_threads": num_threads}
    better = asyncio.run(learn_in_a_loop(**keywords)) if in_a_loop else learn(OnlyAsync(), questions(9), **keywords)
    assert instructions_of(better) == {"solve": "LEARNED solve"}
    assert capture.inputs("solve") == [f"q{i}" for i in range(9)]
    assert better.detailed_results.steps[0].scores_after == (1.0,) * 9


class InContext(dspy.Module):
    """Chooses an LM for one of its calls with `dspy.context`."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.first = dspy.Predict("question -> note")
        self.second = dspy.Predict("question, note -> answer")
        self.inner_lm = lm

    def forward(self, question):
        with dspy.context(lm=self.inner_lm):
            note = self.first(question=question).note
        return self.second(question=question, note=note)


@pytest.mark.parametrize("num_threads", [1, 32])
def test_context_inside_the_program_and_around_compile(num_threads):
    inner, outer = student_lm(note="inner"), student_lm(note="outer")
    capture = Capture()
    learn(InContext(inner), questions(32), lm=outer, capture=capture, num_threads=num_threads)
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


class WithFlex(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.note = dspy.Predict("question -> note")
        self.flex = dspy.Flex("question -> answer", interpreter_factory=LocalInterpreter)

    def forward(self, question):
        self.note(question=question)
        return self.flex(question=question)


# DSPy's own call from inside Flex warns.
flex_warns = pytest.mark.filterwarnings("ignore:Passing OpenAI-style message:DeprecationWarning")


def metric_of_traces(gold, pred, trace=None, pred_name=None, pred_trace=None, program_trace=None):
    calls = [list(step[1]) for step in program_trace or []]
    return dspy.Prediction(score=float(pred.answer == "right"), feedback=f"{pred_name} saw {calls}")


@flex_warns
def test_flex_code_goes_to_the_code_proposer():
    capture = Capture()
    reflection_lm = ScriptedLM([("revised_source", {"revised_source": BETTER_CODE})])
    student = WithFlex()
    source = student.flex.module_src
    better = learn(
        student,
        questions(2),
        lm=student_lm(note="n"),
        metric=metric_of_traces,
        capture=capture,
        reflection_lm=reflection_lm,
    )
    assert better.flex.module_src == BETTER_CODE
    assert student.flex.module_src == source
    assert instructions_of(better) == {"note": "LEARNED note"}
    assert capture.components == {"note"}
    (call,) = reflection_lm.calls
    assert "q0" in call.prompt.question
    assert "q1" in call.prompt.question
    # The metric was given the trace when it scored.
    assert "None saw [['question'], ['question']]" in call.prompt.question
    assert better.detailed_results.steps[0].scores_after == (1.0, 1.0)


@flex_warns
def test_custom_code_proposer():
    asked = []

    def code_proposer(candidate, reflective_dataset, components_to_update, task_descriptions, context_blurbs):
        asked.append((components_to_update, [record["Inputs"] for record in reflective_dataset["flex"]]))
        assert candidate["flex"].startswith("class ")
        assert "question" in task_descriptions["flex"]
        return {"flex": BETTER_CODE}

    better = learn(WithFlex(), questions(2), lm=student_lm(note="n"), capture=Capture(), code_proposer=code_proposer)
    assert asked == [(["flex"], [{"question": "q0"}, {"question": "q1"}])]
    assert better.flex.module_src == BETTER_CODE


@flex_warns
def test_code_that_does_not_parse_scores_as_a_failure():
    better = learn(
        WithFlex(),
        questions(2),
        lm=student_lm(note="n"),
        capture=Capture(),
        code_proposer=lambda **_: {"flex": "def broken("},
    )
    (step,) = better.detailed_results.steps
    assert step.scores_after == (0.0, 0.0)
    assert not step.accepted
    assert better.flex.module_src.startswith("class ")
