"""A simulated student and a simulated reflection model: demonstrations and benchmarks without a provider.

What is taught are lessons of one textual form, `Convention TOPIC: statement.` Every call of the reflection model loses
some of those it reads, by one law for all calls: nothing here knows whether a call is a flat one, a group's or a merge,
nor whether a group is all of a minibatch or a part of it.

The roles of playbook learning (`playbook_roles`) apply that law to the length of the whole message, playbook
included, and to the lessons that the call has to pass on: for the reflector what the feedback tells, and the bullets
that bear on it; for the curator the lessons in the reflections that the playbook lacks; for the merge the lessons that
more than one text states. A call that writes deltas does not write the playbook's other bullets out again, so those are
no items: if they were, a model of "at most C items a call" could not grow a playbook past a few times C bullets, one
reflection at a time (ACE grows 264 from 500 samples; paper, section 2.2).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

from dspy_combee.testing.engine import FakeEngine, FakeLM, Prompt, Reply, count_tokens

# A sentence in one line; full stops only inside numbers, so that its end is plain in prose and in JSON alike.
_LESSON = re.compile(
    r'(?:\b|(?<=\\n))Convention ([^\s:."\\](?:[^:.\n"\\]|\.(?=\S)){0,159}): ([^.\n"\\]+(?:\.\d[^.\n"\\]*)*)\.'
)
_CODE = re.compile(r"\b\d{4}-[A-Z0-9]{2}\b")
_BULLET = re.compile(r"^\[([^\]\s]+)\] helpful=\d+ harmful=\d+ :: (.*)$", re.MULTILINE)
_HEADER = "Conventions learned so far:"


@dataclass(frozen=True)
class Lesson:
    """Hold a specific rule, in the one textual form that the simulation knows."""

    topic: str
    statement: str

    def __str__(self) -> str:
        return f"Convention {self.topic}: {self.statement}."


def find_lessons(text: str) -> list[Lesson]:
    """Return the distinct lessons that a text states (`Convention TOPIC: statement.`), first appearance first."""
    return list(dict.fromkeys(Lesson(*(" ".join(part.split()) for part in found)) for found in _LESSON.findall(text)))


class Loss(Protocol):
    """Decide what one reflection call keeps of the lessons in its prompt."""

    def keep(self, lessons: list[Lesson], prompt_tokens: int, rng: random.Random) -> list[Lesson]:
        """Return the lessons that survive, in the order given."""
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
    """

    beta: float = 0.55
    """The exponent."""
    one_record_tokens: int = 250
    """L0. The default is the size of such a message in `conventions_task`."""

    def keep(self, lessons: list[Lesson], prompt_tokens: int, rng: random.Random) -> list[Lesson]:
        """Return the lessons that survive, each drawn by itself."""
        chance = min(1.0, (self.one_record_tokens / max(1, prompt_tokens)) ** self.beta)
        return [lesson for lesson in lessons if rng.random() < chance]


@dataclass(frozen=True)
class CapacityLoss:
    """Keep at most `capacity` lessons, chosen at random.

    The paper's flat Formula figure at batch 100 is 21 bullets from 5 calls: 4.2 a call, hence 4.
    """

    capacity: int = 4

    def keep(self, lessons: list[Lesson], prompt_tokens: int, rng: random.Random) -> list[Lesson]:
        """Return the lessons that survive."""
        chosen = set(rng.sample(range(len(lessons)), min(self.capacity, len(lessons))))
        return [lesson for index, lesson in enumerate(lessons) if index in chosen]


# Roles ------------------------------------------------------------------------------------------------------


class Role(Protocol):
    """Answer the prompts of one kind that a `SimulatedLM` gets."""

    @property
    def name(self) -> str:
        """Return the name that its calls are counted under."""
        ...

    def handles(self, prompt: Prompt) -> bool:
        """Tell whether it answers this prompt."""
        ...

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """Return the output fields."""
        ...

    def seconds(self, output_tokens: int) -> float:
        """Return how long the reply takes."""
        ...


Solver: TypeAlias = Callable[[str, Mapping[str, str]], str]
"""Gives the answer to a question, from the question and from the lessons' statements by topic."""


def read_code(question: str, lessons: Mapping[str, str]) -> str:
    """Return the code in the lesson whose topic the question names; without one, the code in the question itself.

    It knows no right answers: what the lesson says is what it answers.
    """
    topics = [topic for topic in lessons if topic in question and _CODE.search(lessons[topic])]
    code = _CODE.search(lessons[max(topics, key=len)] if topics else question)
    return code.group() if code else "unknown"


@dataclass(frozen=True)
class Student:
    """Do the task by what the instruction and the demos state; it answers whatever no other role does.

    Where they say two things about a topic, the later one holds.
    """

    solver: Solver = read_code
    latency: float = 0.0
    """Seconds of a call."""
    name: ClassVar[str] = "student"

    def handles(self, prompt: Prompt) -> bool:
        """Tell that it answers everything."""
        return True

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """Return the solver's answer in every field, the reasoning apart."""
        lessons = {lesson.topic: lesson.statement for lesson in find_lessons(f"{prompt.system}\n{prompt.demos}")}
        answer = self.solver(prompt.question, lessons)
        names = prompt.output_fields or ("answer",)
        return {name: answer if name != "reasoning" else "By the instruction." for name in names}

    def seconds(self, output_tokens: int) -> float:
        """Return the latency."""
        return self.latency


@dataclass(frozen=True)
class _LossyRole:
    """Hold what the roles of the reflection model share."""

    loss: Loss = field(default_factory=PowerLoss)
    """What one call keeps of the lessons in its prompt."""
    latency: float = 0.0
    """Seconds of a call."""
    latency_per_token: float = 0.0
    """Seconds more for each output token."""

    def seconds(self, output_tokens: int) -> float:
        """Return the latency of a reply of so many tokens."""
        return self.latency + self.latency_per_token * output_tokens

    def _kept(self, lessons: list[Lesson], prompt: Prompt, rng: random.Random) -> list[Lesson]:
        return self.loss.keep(lessons, count_tokens(prompt.question), rng)


@dataclass(frozen=True)
class Reflector(_LossyRole):
    """Write a new instruction from whatever it reads: records or proposals, and the current instruction.

    Every lesson stated in the message counts the same, wherever it stands.
    """

    name: ClassVar[str] = "reflection"

    def handles(self, prompt: Prompt) -> bool:
        """Tell whether the prompt asks for a `new_instruction`."""
        return "new_instruction" in prompt.output_fields

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """Return the instruction's own text without its lessons, then the lessons that were kept."""
        kept = self._kept(find_lessons(prompt.question), prompt, rng)
        lines = _LESSON.sub("", prompt.input("current_instruction")).splitlines()
        own_text = [line for line in lines if line.strip(" -") and line.strip() != _HEADER]
        listed = [_HEADER, *(f"- {lesson}" for lesson in kept)] if kept else []
        return {"new_instruction": "\n".join([*own_text, *listed]) or "Do the task as the fields describe it."}


@dataclass(frozen=True)
class Summarizer(_LossyRole):
    """Summarize one record or reflection (`aggregator="summarize"`) as the lessons of it that were kept."""

    name: ClassVar[str] = "summary"

    def handles(self, prompt: Prompt) -> bool:
        """Tell whether the prompt shows a record or a reflection, and asks for a `summary`."""
        return prompt.output_fields == ("summary",) and bool(self._source(prompt))

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """Return the record's lessons that were kept; those of the instruction are read too, and not passed on."""
        told = find_lessons(self._source(prompt))
        kept = self._kept(find_lessons(prompt.question), prompt, rng)
        return {"summary": " ".join(str(lesson) for lesson in kept if lesson in told) or "Nothing to add."}

    def _source(self, prompt: Prompt) -> str:
        return prompt.input("record") or prompt.input("reflection")


@dataclass(frozen=True)
class PlaybookReflector(_LossyRole):
    """Pass on the lessons of one attempt that the playbook lacks, and tag the bullets on its topic as helpful."""

    notes: str = ""
    """What else every reflection says; it makes them as long as real ones are."""
    name: ClassVar[str] = "reflection"

    def handles(self, prompt: Prompt) -> bool:
        """Tell whether the prompt asks for `bullet_tags`."""
        return "bullet_tags" in prompt.output_fields

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """Return the lessons that were kept, as the key insight."""
        attempt = prompt.input("attempt")
        standing = {lesson: name for name, lessons in _bullets(prompt).items() for lesson in lessons}
        used = [lesson for lesson in standing if lesson.topic in attempt]
        new = [lesson for lesson in find_lessons(attempt) if lesson not in standing]
        kept = set(self._kept([*used, *new], prompt, rng))
        told = [lesson for lesson in new if lesson in kept]
        tags = [standing[lesson] for lesson in used if lesson in kept]
        return {
            "what_went_wrong": "A convention was not followed." if told else "Nothing.",
            "root_cause": f"It was not known. {self.notes}".strip() if told else "",
            "correct_approach": "",
            "key_insight": " ".join(map(str, told)),
            "bullet_tags": [{"id": name, "tag": "helpful"} for name in dict.fromkeys(tags)],
        }


@dataclass(frozen=True)
class PlaybookCurator(_LossyRole):
    """Add a bullet for each lesson of the reflections that was kept and that the playbook lacks."""

    wordings: tuple[str, ...] = ("{}",)
    """How a bullet may put a lesson, which stands for `{}`; one is drawn for each bullet. With several, two calls that
    keep the same lesson may write it down in different words, as real ones do."""
    name: ClassVar[str] = "curator"

    def handles(self, prompt: Prompt) -> bool:
        """Tell whether the prompt asks for `operations`."""
        return "operations" in prompt.output_fields

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """Return one ADD for each lesson."""
        standing = {lesson for lessons in _bullets(prompt).values() for lesson in lessons}
        sources: dict[Lesson, list[str]] = {}
        for reflection in json.loads(prompt.input("reflections") or "[]"):
            for lesson in find_lessons(json.dumps(reflection, ensure_ascii=False)):
                if lesson not in standing:
                    sources.setdefault(lesson, []).append(str(reflection.get("id")))
        kept = set(self._kept(list(sources), prompt, rng))
        return {"operations": [self._add(lesson, names, rng) for lesson, names in sources.items() if lesson in kept]}

    def _add(self, lesson: Lesson, reflection_ids: list[str], rng: random.Random) -> dict[str, Any]:
        wording = rng.choice(self.wordings) if len(self.wordings) > 1 else self.wordings[0]
        content = wording.replace("{}", str(lesson))
        return {"type": "ADD", "section": "OTHERS", "content": content, "reflection_ids": reflection_ids}


@dataclass(frozen=True)
class PlaybookMerge(_LossyRole):
    """Name what covers an ADD, where it kept the lesson: a bullet or another ADD that states it too.

    A lesson that it does not keep it does not mention either: a model cannot name what it has overlooked.
    """

    name: ClassVar[str] = "merge"

    def handles(self, prompt: Prompt) -> bool:
        """Tell whether the prompt asks for `decisions`."""
        return "decisions" in prompt.output_fields

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """Return one decision for each ADD that is covered."""
        covers = {lesson: name for name, lessons in _bullets(prompt).items() for lesson in lessons}
        covered: dict[str, tuple[list[Lesson], str]] = {}
        for key, delta in json.loads(prompt.input("deltas") or "{}").items():
            lessons = find_lessons(json.dumps(delta, ensure_ascii=False))
            names = {covers.setdefault(lesson, key) for lesson in lessons}
            if delta.get("type") == "ADD" and len(names) == 1 and key not in names:
                covered[key] = lessons, names.pop()
        items = list(dict.fromkeys(lesson for lessons, _ in covered.values() for lesson in lessons))
        kept = set(self._kept(items, prompt, rng))
        return {
            "decisions": [
                {"type": "COVERED", "deltas": [key], "by": by, "content": ""}
                for key, (lessons, by) in covered.items()
                if kept.issuperset(lessons)
            ]
        }


def _bullets(prompt: Prompt) -> dict[str, list[Lesson]]:
    return {name: find_lessons(content) for name, content in _BULLET.findall(prompt.input("playbook"))}


def playbook_roles(loss: Loss | None = None, latency: float = 0.0, latency_per_token: float = 0.0) -> tuple[Role, ...]:
    """Return the reflector, curator and merge of playbook learning: `SimulatedLM(roles=playbook_roles())`.

    Args:
        loss: What one call keeps of the lessons in its prompt; `PowerLoss()` by default.
        latency: Seconds of a call.
        latency_per_token: Seconds more for each output token.
    """
    shared = loss or PowerLoss(), latency, latency_per_token
    return PlaybookReflector(*shared), PlaybookCurator(*shared), PlaybookMerge(*shared)


# The LM -----------------------------------------------------------------------------------------------------


class SimulatedLM(FakeLM):
    """Play a student and a reflection model for tasks whose feedback states lessons.

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


class _Simulation(FakeEngine):
    def __init__(self, seed: int, roles: tuple[Role, ...]) -> None:
        super().__init__(keep_calls=False)
        self.seed, self.roles = seed, roles

    def play(self, prompt: Prompt) -> tuple[str, Reply, float]:
        role = next(role for role in self.roles if role.handles(prompt))
        digest = hashlib.sha256(f"{self.seed}/{prompt}".encode(errors="surrogatepass")).digest()
        text = prompt.render(role.fields(prompt, random.Random(digest)))
        return role.name, Reply(text), role.seconds(count_tokens(text))
