"""The simulated reflection model's roles in playbook learning: reflector, curator and merge.

`SimulatedLM(roles=playbook_roles())` answers the prompts of `PlaybookOptimizer`. One loss serves every role. What it
gets is every lesson that the message states, those of the playbook included, and the length of the whole message:
nothing here knows whether a group is all of a minibatch or a part of it.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

from dspy_combee.fake_engine import Prompt, count_tokens
from dspy_combee.simulation import Lesson, Loss, PowerLoss, Role, find_lessons

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
    """Passes on the lessons of one attempt that the playbook lacks, and tags the bullets on its topic as helpful."""

    loss: Loss = field(default_factory=PowerLoss)
    speed: _Speed = field(default_factory=_Speed)
    name: str = "reflection"

    def handles(self, prompt: Prompt) -> bool:
        """Reflection prompts ask for `bullet_tags`."""
        return "bullet_tags" in prompt.output_fields

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """The lessons that were kept, as the key insight."""
        attempt, bullets = _input(prompt, "attempt"), _bullets(prompt)
        kept = _kept(self.loss, prompt, rng)
        standing = {lesson: name for name, lessons in bullets.items() for lesson in lessons}
        told = [lesson for lesson in find_lessons(attempt) if lesson in kept and lesson not in standing]
        tags = [name for lesson, name in standing.items() if lesson in kept and lesson.topic in attempt]
        return {
            "what_went_wrong": "A convention was not followed." if told else "Nothing.",
            "root_cause": "It was not known." if told else "",
            "correct_approach": "",
            "key_insight": " ".join(map(str, told)),
            "bullet_tags": [{"id": name, "tag": "helpful"} for name in dict.fromkeys(tags)],
        }

    def seconds(self, output_tokens: int) -> float:
        """A base and so much per output token."""
        return self.speed.seconds(output_tokens)


@dataclass(frozen=True)
class PlaybookCurator:
    """Adds a bullet for each lesson of the reflections that was kept and that the playbook lacks."""

    loss: Loss = field(default_factory=PowerLoss)
    speed: _Speed = field(default_factory=_Speed)
    name: str = "curator"

    def handles(self, prompt: Prompt) -> bool:
        """Curator prompts ask for `operations`."""
        return "operations" in prompt.output_fields

    def fields(self, prompt: Prompt, rng: random.Random) -> dict[str, Any]:
        """One ADD for each lesson."""
        standing = {lesson for lessons in _bullets(prompt).values() for lesson in lessons}
        kept = _kept(self.loss, prompt, rng)
        sources: dict[Lesson, list[str]] = {}
        for reflection in _json(prompt, "reflections", []):
            for lesson in find_lessons(json.dumps(reflection, ensure_ascii=False)):
                sources.setdefault(lesson, []).append(str(reflection.get("id")))
        return {
            "operations": [
                {"type": "ADD", "section": "OTHERS", "content": str(lesson), "reflection_ids": names}
                for lesson, names in sources.items()
                if lesson in kept and lesson not in standing
            ]
        }

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
        kept = _kept(self.loss, prompt, rng)
        covers = {lesson: name for name, lessons in _bullets(prompt).items() for lesson in lessons}
        decisions = []
        for key, delta in _json(prompt, "deltas", {}).items():
            lessons = find_lessons(json.dumps(delta, ensure_ascii=False))
            names = {covers.setdefault(lesson, key) for lesson in lessons}
            if delta.get("type") == "ADD" and len(names) == 1 and key not in names and set(lessons) <= kept:
                decisions.append({"type": "COVERED", "deltas": [key], "by": names.pop(), "content": ""})
        return {"decisions": decisions}

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


def _kept(loss: Loss, prompt: Prompt, rng: random.Random) -> set[Lesson]:
    return set(loss.keep(find_lessons(prompt.question), count_tokens(prompt.question), rng))


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
