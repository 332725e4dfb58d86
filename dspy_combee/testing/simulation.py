"""A simulated student and a simulated reflection model: demonstrations and benchmarks without a provider."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from dspy_combee.testing.fake_engine import FakeEngine, FakeLM, Prompt, Reply, count_tokens

# A sentence in one line; full stops only inside numbers, so that its end is plain in prose and in JSON alike.
_LESSON = re.compile(
    r'(?:\b|(?<=\\n))Convention ([^\s:."\\](?:[^:.\n"\\]|\.(?=\S)){0,159}): ([^.\n"\\]+(?:\.\d[^.\n"\\]*)*)\.'
)
_CODE = re.compile(r"\b\d{4}-[A-Z0-9]{2}\b")
_CURRENT = re.compile(r"\[\[ ## current_instruction ## \]\]\n(.*?)(?:\n\n\[\[ ## \w+ ## \]\]\n|\Z)", re.DOTALL)
_RECORD = re.compile(r"^\[\[ ## (?:record|reflection) ## \]\]$", re.MULTILINE)
_HEADER = "Conventions learned so far:"


@dataclass(frozen=True)
class Lesson:
    """A specific rule, in the one textual form that the simulation knows."""

    topic: str
    statement: str

    def __str__(self) -> str:
        return f"Convention {self.topic}: {self.statement}."


def find_lessons(text: str) -> list[Lesson]:
    """The distinct lessons that a text states (`Convention TOPIC: statement.`), first appearance first."""
    return list(dict.fromkeys(Lesson(*(" ".join(part.split()) for part in found)) for found in _LESSON.findall(text)))


class Loss(Protocol):
    """What one reflection call keeps of the lessons in its prompt."""

    def keep(self, lessons: list[Lesson], prompt_tokens: int, rng: random.Random) -> list[Lesson]:
        """The lessons that survive, in the order given."""
        ...


@dataclass(frozen=True)
class PowerLoss:
    """Keep each lesson with probability min(1, (L0 / L) ** beta), L being the prompt's tokens.

    Fitted on the paper's *flat* Formula figures (section 2.2) and nothing else: 500 samples leave 264 bullets
    at batch 1 and 21 at batch 100. Every sample is read once either way, so the share that is kept differs by
    264 / 21 = 12.6 while the prompt differs by 100: beta = ln 12.6 / ln 100 = 0.55, with L0 a prompt of one
    record. That batch 1 leaves 264 bullets and not 500 is novelty, which a task has of itself.

    The factor 100 takes a prompt to be its material, so L counts the message with the current instruction and
    the records or proposals, and not the fixed system prompt.

    Attributes:
        beta: The exponent.
        one_record_tokens: L0. The default is the size of such a message in `tasks.conventions_task`.
    """

    beta: float = 0.55
    one_record_tokens: int = 250

    def keep(self, lessons: list[Lesson], prompt_tokens: int, rng: random.Random) -> list[Lesson]:
        """The lessons that survive, each drawn by itself."""
        chance = min(1.0, (self.one_record_tokens / max(1, prompt_tokens)) ** self.beta)
        return [lesson for lesson in lessons if rng.random() < chance]


@dataclass(frozen=True)
class CapacityLoss:
    """Keep at most `capacity` lessons, chosen at random.

    The paper's flat Formula figure at batch 100 is 21 bullets from 5 calls: 4.2 a call, hence 4.
    """

    capacity: int = 4

    def keep(self, lessons: list[Lesson], prompt_tokens: int, rng: random.Random) -> list[Lesson]:
        """The lessons that survive."""
        chosen = set(rng.sample(range(len(lessons)), min(self.capacity, len(lessons))))
        return [lesson for index, lesson in enumerate(lessons) if index in chosen]


Solver: TypeAlias = Callable[[str, Mapping[str, str]], str]


def read_code(question: str, lessons: Mapping[str, str]) -> str:
    """The code in the lesson whose topic the question names; without one, the code in the question itself.

    It knows no right answers: what the lesson says is what it answers.
    """
    topics = [topic for topic in lessons if topic in question and _CODE.search(lessons[topic])]
    text = lessons[max(topics, key=len)] if topics else question
    code = _CODE.search(text)
    return code.group() if code else "unknown"


class AnswerKey:
    """A solver for questions that a simulation cannot work out: it has the right answers.

    It gives one where the instruction states the lesson that goes with it, word for word as true feedback states
    it, else with the probability `base_ability`, drawn for each part of each question.

    Args:
        field: The input field that holds the question.
        known: For each question its parts: the topic of the lesson that it takes, and the right answer.
        true: The lessons that are right.
        base_ability: Probability of knowing a part anyway.
        seed: Seed of the draws.
    """

    def __init__(
        self,
        field: str,
        known: Mapping[str, Sequence[tuple[str, str]]],
        true: frozenset[Lesson],
        base_ability: float,
        seed: int = 0,
    ) -> None:
        self.marker = f"[[ ## {field} ## ]]\n"
        self.known = {question.strip(): parts for question, parts in known.items()}
        self.true = true
        self.base_ability = base_ability
        self.seed = seed

    def __call__(self, question: str, lessons: Mapping[str, str]) -> str:
        """Answer all parts of the question, separated by commas."""
        asked = question.partition(self.marker)[2].rpartition("\n\nRespond with ")[0].strip()
        rng = random.Random(f"{self.seed}/{asked}")
        answers = []
        for topic, answer in self.known.get(asked, ()):
            known_anyway = rng.random() < self.base_ability
            taught = Lesson(topic, lessons.get(topic, "")) in self.true
            answers.append(answer if taught or known_anyway else "unknown")
        return ", ".join(answers) or "unknown"


class Role(Protocol):
    """One of the things that a `SimulatedLM` is used for."""

    @property
    def name(self) -> str:
        """Under which its calls are counted."""
        ...

    def handles(self, prompt: Prompt) -> bool:
        """Whether this prompt asks for it."""
        ...

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """The output fields."""
        ...

    def seconds(self, output_tokens: int) -> float:
        """How long the reply takes."""
        ...


@dataclass(frozen=True)
class Reflector:
    """Writes a new instruction from whatever it reads: records or proposals, and the current instruction.

    Every lesson stated in the message counts the same, wherever it stands, and `loss` decides what is kept.
    Nothing here knows whether the call is a flat one, a group's or a merge.
    """

    loss: Loss = field(default_factory=PowerLoss)
    latency: float = 0.0
    latency_per_token: float = 0.0
    name: str = "reflection"

    def handles(self, prompt: Prompt) -> bool:
        """Reflection prompts ask for a `new_instruction`."""
        return "new_instruction" in prompt.output_fields

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """The instruction's own text without its lessons, then the lessons that were kept."""
        kept = self.loss.keep(find_lessons(prompt.question), count_tokens(prompt.question), rng)
        current = _CURRENT.search(prompt.question)
        lines = _LESSON.sub("", current.group(1) if current else "").splitlines()
        own_text = [line for line in lines if line.strip(" -") and line.strip() != _HEADER]
        listed = [_HEADER, *(f"- {lesson}" for lesson in kept)] if kept else []
        return {"new_instruction": "\n".join([*own_text, *listed]) or "Do the task as the fields describe it."}

    def seconds(self, output_tokens: int) -> float:
        """A base and so much per output token."""
        return self.latency + self.latency_per_token * output_tokens


@dataclass(frozen=True)
class Summarizer:
    """Summarizes one record, or reflection (`aggregator="summarize"`): the lessons of it that `loss` keeps."""

    loss: Loss = field(default_factory=PowerLoss)
    latency: float = 0.0
    latency_per_token: float = 0.0
    name: str = "summary"

    def handles(self, prompt: Prompt) -> bool:
        """Summary prompts show a record, or a reflection, and ask for a `summary`."""
        return prompt.output_fields == ("summary",) and _RECORD.search(prompt.question) is not None

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """The lessons of the record that were kept; those of the instruction are read too, and not passed on."""
        kept = self.loss.keep(find_lessons(prompt.question), count_tokens(prompt.question), rng)
        # The record, or reflection, is the last field; what stands before it is the instruction.
        told = set(find_lessons(prompt.question.rpartition("\n\n[[ ## ")[2]))
        return {"summary": " ".join(str(lesson) for lesson in kept if lesson in told) or "Nothing to add."}

    def seconds(self, output_tokens: int) -> float:
        """A base and so much per output token."""
        return self.latency + self.latency_per_token * output_tokens


@dataclass(frozen=True)
class Student:
    """Does the task by what its instruction and demos state: `solver` gets the question and those lessons.

    Where the instruction says two things about a topic, the later one holds.
    """

    solver: Solver = read_code
    latency: float = 0.0
    name: str = "student"

    def handles(self, prompt: Prompt) -> bool:
        """Everything that no role before it took."""
        return True

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """The solver's answer in every field, the reasoning apart."""
        lessons = {lesson.topic: lesson.statement for lesson in find_lessons(f"{prompt.system}\n{prompt.demos}")}
        answer = self.solver(prompt.question, lessons)
        names = prompt.output_fields or ("answer",)
        return {name: answer if name != "reasoning" else "By the instruction." for name in names}

    def seconds(self, output_tokens: int) -> float:
        """The same for every call."""
        return self.latency


class _Simulation(FakeEngine):
    def __init__(self, seed: int, roles: tuple[Role, ...]) -> None:
        super().__init__(keep_calls=False)
        self.seed, self.roles = seed, roles

    def play(self, prompt: Prompt) -> tuple[str, Reply, float]:
        role = next(role for role in self.roles if role.handles(prompt))
        digest = hashlib.sha256(f"{self.seed}/{prompt}".encode(errors="surrogatepass")).digest()
        text = prompt.render(role.fields(prompt, random.Random(digest)))
        return role.name, Reply(text), role.seconds(count_tokens(text))


class SimulatedLM(FakeLM):
    """A simulated student and a simulated reflection model for tasks whose feedback states lessons.

    It shows how a learner behaves, not how good a language model is. The student answers right only what its
    instruction teaches or the question gives away; the reflection model loses lessons as its prompt grows.
    Random draws depend on the seed and the prompt alone, so replies are the same at any thread count, and a
    prompt asked twice gets the same answer.

    Args:
        seed: Seed of the draws.
        reflector: The reflection model, with its loss and latency, which hold for its summaries of records too.
        student: The student, with its solver and latency.
        roles: Further roles, asked before these.
        model: The model's name; it should say that it is simulated.
        **lm_kwargs: For `dspy.LM`.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        reflector: Reflector | None = None,
        student: Student | None = None,
        roles: Iterable[Role] = (),
        model: str = "simulated/lessons",
        **lm_kwargs: Any,
    ) -> None:
        reflector = reflector or Reflector()
        summarizer = Summarizer(reflector.loss, reflector.latency, reflector.latency_per_token)
        built_in: tuple[Role, ...] = (reflector, summarizer, student or Student())
        super().__init__(model, _Simulation(seed, (*roles, *built_in)), lm_kwargs)
