"""The simulated reflection model's roles in playbook learning: reflector, curator and merge.

`SimulatedLM(roles=playbook_roles())` answers the prompts of `PlaybookOptimizer`. One loss serves every role, and
nothing here knows whether a group is all of a minibatch or a part of it.

The loss gets the length of the whole message, playbook included: it is read like the rest. And it gets the items that
the call has to pass on: for the reflector what the feedback tells, and the bullets that bear on it; for the curator the
lessons in the reflections that the playbook lacks; for the merge the lessons that more than one text states. A call
that writes deltas does not write the playbook's other bullets out again, so those are no items: if they were, a model
of "at most C items a call" could not grow a playbook past a few times C bullets, one reflection at a time (ACE grows
264 from 500 samples; paper, section 2.2).
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

from dspy_combee.testing.fake_engine import Prompt, count_tokens
from dspy_combee.testing.simulation import Lesson, Loss, PowerLoss, Role, find_lessons

_BULLET = re.compile(r"^\[([^\]\s]+)\] helpful=\d+ harmful=\d+ :: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class _Speed:
    """How long a reply takes.

    Attributes:
        latency: Seconds of a call.
        per_token: Seconds more for each output token.
    """

    latency: float = 0.0
    per_token: float = 0.0

    def seconds(self, output_tokens: int) -> float:
        return self.latency + self.per_token * output_tokens


@dataclass(frozen=True)
class PlaybookReflector:
    """Passes on the lessons of one attempt that the playbook lacks, and tags the bullets on its topic as helpful.

    Attributes:
        loss: What a call keeps.
        speed: How long a reply takes.
        notes: What else a reflection says, in every one the same; it makes them as long as real ones are.
        name: Under which its calls are counted.
    """

    loss: Loss = field(default_factory=PowerLoss)
    speed: _Speed = field(default_factory=_Speed)
    notes: str = ""
    name: str = "reflection"

    def handles(self, prompt: Prompt) -> bool:
        """Reflection prompts ask for `bullet_tags`."""
        return "bullet_tags" in prompt.output_fields

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """The lessons that were kept, as the key insight."""
        attempt, bullets = _input(prompt, "attempt"), _bullets(prompt)
        standing = {lesson: name for name, lessons in bullets.items() for lesson in lessons}
        used = [lesson for lesson in standing if lesson.topic in attempt]
        new = [lesson for lesson in find_lessons(attempt) if lesson not in standing]
        kept = _kept(self.loss, [*used, *new], prompt, rng)
        told = [lesson for lesson in new if lesson in kept]
        tags = [standing[lesson] for lesson in used if lesson in kept]
        return {
            "what_went_wrong": "A convention was not followed." if told else "Nothing.",
            "root_cause": f"It was not known. {self.notes}".strip() if told else "",
            "correct_approach": "",
            "key_insight": " ".join(map(str, told)),
            "bullet_tags": [{"id": name, "tag": "helpful"} for name in dict.fromkeys(tags)],
        }

    def seconds(self, output_tokens: int) -> float:
        """A base and so much per output token."""
        return self.speed.seconds(output_tokens)


@dataclass(frozen=True)
class PlaybookCurator:
    """Adds a bullet for each lesson of the reflections that was kept and that the playbook lacks.

    Attributes:
        loss: What a call keeps.
        speed: How long a reply takes.
        wordings: How a bullet may put a lesson, which stands for `{}`; one is drawn for each bullet. With several, two
            calls that keep the same lesson may write it down in different words, as real ones do.
        name: Under which its calls are counted.
    """

    loss: Loss = field(default_factory=PowerLoss)
    speed: _Speed = field(default_factory=_Speed)
    wordings: tuple[str, ...] = ("{}",)
    name: str = "curator"

    def handles(self, prompt: Prompt) -> bool:
        """Curator prompts ask for `operations`."""
        return "operations" in prompt.output_fields

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """One ADD for each lesson."""
        standing = {lesson for lessons in _bullets(prompt).values() for lesson in lessons}
        sources: dict[Lesson, list[str]] = {}
        for reflection in _json(prompt, "reflections", []):
            for lesson in find_lessons(json.dumps(reflection, ensure_ascii=False)):
                if lesson not in standing:
                    sources.setdefault(lesson, []).append(str(reflection.get("id")))
        kept = _kept(self.loss, list(sources), prompt, rng)
        return {"operations": [self._add(lesson, names, rng) for lesson, names in sources.items() if lesson in kept]}

    def _add(self, lesson: Lesson, reflection_ids: list[str], rng: random.Random) -> dict[str, Any]:
        wording = rng.choice(self.wordings) if len(self.wordings) > 1 else self.wordings[0]
        content = wording.replace("{}", str(lesson))
        return {"type": "ADD", "section": "OTHERS", "content": content, "reflection_ids": reflection_ids}

    def seconds(self, output_tokens: int) -> float:
        """A base and so much per output token."""
        return self.speed.seconds(output_tokens)


@dataclass(frozen=True)
class PlaybookMerge:
    """Names what covers an ADD, where it kept the lesson: a bullet or another ADD that states it too.

    A lesson that it does not keep it does not mention either: a model cannot name what it has overlooked.
    """

    loss: Loss = field(default_factory=PowerLoss)
    speed: _Speed = field(default_factory=_Speed)
    name: str = "merge"

    def handles(self, prompt: Prompt) -> bool:
        """Merge prompts ask for `decisions`."""
        return "decisions" in prompt.output_fields

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """One decision for each ADD that is covered."""
        covers = {lesson: name for name, lessons in _bullets(prompt).items() for lesson in lessons}
        covered: dict[str, tuple[list[Lesson], str]] = {}
        for key, delta in _json(prompt, "deltas", {}).items():
            lessons = find_lessons(json.dumps(delta, ensure_ascii=False))
            names = {covers.setdefault(lesson, key) for lesson in lessons}
            if delta.get("type") == "ADD" and len(names) == 1 and key not in names:
                covered[key] = lessons, names.pop()
        items = list(dict.fromkeys(lesson for lessons, _ in covered.values() for lesson in lessons))
        kept = _kept(self.loss, items, prompt, rng)
        return {
            "decisions": [
                {"type": "COVERED", "deltas": [key], "by": by, "content": ""}
                for key, (lessons, by) in covered.items()
                if kept.issuperset(lessons)
            ]
        }

    def seconds(self, output_tokens: int) -> float:
        """A base and so much per output token."""
        return self.speed.seconds(output_tokens)


def playbook_roles(loss: Loss | None = None, latency: float = 0.0, latency_per_token: float = 0.0) -> tuple[Role, ...]:
    """The roles of playbook learning, with one loss and one speed for all.

    Args:
        loss: What one call keeps of the lessons in its prompt; `PowerLoss()` by default.
        latency: Seconds of a call.
        latency_per_token: Seconds more for each output token.
    """
    loss, speed = loss or PowerLoss(), _Speed(latency, latency_per_token)
    return PlaybookReflector(loss, speed), PlaybookCurator(loss, speed), PlaybookMerge(loss, speed)


def _kept(loss: Loss, items: list[Lesson], prompt: Prompt, rng: random.Random) -> set[Lesson]:
    """Those of the items that a call keeps, which reads the whole message."""
    return set(loss.keep(items, count_tokens(prompt.question), rng))


def _input(prompt: Prompt, name: str) -> str:
    pattern = rf"\[\[ ## {name} ## \]\]\n(.*?)(?=\n\n\[\[ ## |\n\nRespond with |\Z)"
    found = re.search(pattern, prompt.question, re.DOTALL)
    return found[1] if found else ""


def _json(prompt: Prompt, name: str, default: Any) -> Any:
    try:
        return json.loads(_input(prompt, name))
    except ValueError:
        return default


def _bullets(prompt: Prompt) -> dict[str, list[Lesson]]:
    """The lessons that each bullet of the playbook states."""
    return {name: find_lessons(content) for name, content in _BULLET.findall(_input(prompt, "playbook"))}
