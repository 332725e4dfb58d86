"""The task of `lessons.py` for a playbook: a bullet for each rule, which a metric tells one example at a time.

The reflector writes down the rules in the feedback and tags the bullets that hold a rule of the question; the curator
adds a bullet for each rule that the playbook lacks. All replies depend on the prompt alone.
"""

import json
import re
from typing import Any

import dspy

from dspy_combee import PlaybookOptimizer
from dspy_combee.playbook import Playbook, playbooks_in
from dspy_combee.testing import ScriptedLM

from .lessons import answer, examples, metric, rules_in

BULLET = re.compile(r"\[([a-z]+-\d+)\] helpful=\d+ harmful=\d+ :: (.*)")


def is_reflector(prompt) -> bool:
    return "bullet_tags" in prompt.output_fields


def is_curator(prompt) -> bool:
    return "operations" in prompt.output_fields


def is_merge(prompt) -> bool:
    return "decisions" in prompt.output_fields


def field(prompt, name: str) -> Any:
    """An input of a prompt, read as JSON where it is that."""
    text = re.search(
        rf"\[\[ ## {name} ## \]\]\n(.*?)(?=\n\n\[\[ ## |\n\nRespond with |\Z)", prompt.question, re.DOTALL
    )[1]
    try:
        return json.loads(text)
    except ValueError:
        return text


def bullets_in(prompt) -> dict[str, str]:
    return dict(BULLET.findall(field(prompt, "playbook")))


def lesson(insight: str = "", tags=(), **fields) -> dict[str, Any]:
    """A reflector's reply."""
    return {
        "what_went_wrong": "",
        "root_cause": "",
        "correct_approach": "",
        "key_insight": insight,
        "bullet_tags": [{"id": name, "tag": tag} for name, tag in tags],
        **fields,
    }


def reflect(prompt) -> dict[str, Any]:
    attempt = field(prompt, "attempt")
    told = sorted(rules_in(attempt["Feedback"]))
    known = bullets_in(prompt)
    tags = [(name, "helpful") for name, content in known.items() if rules_in(content) & set(told)]
    return lesson(" ".join(rule for rule in told if rule not in rules_in(" ".join(known.values()))), tags)


def add(content: str, *reflections: str, section: str = "OTHERS") -> dict[str, Any]:
    return {"type": "ADD", "section": section, "content": content, "reflection_ids": list(reflections)}


def curate(prompt) -> dict[str, Any]:
    known = rules_in(" ".join(bullets_in(prompt).values()))
    found = [(rule, item["id"]) for item in field(prompt, "reflections") for rule in rules_in(json.dumps(item))]
    return {"operations": [add(f"State {rule}.", name) for rule, name in sorted(found) if rule not in known]}


def playbook_lm(*first_rules, reflector=reflect, curator=curate, merge=None, **options) -> ScriptedLM:
    """The language model of the task; `first_rules` answer before it does."""
    rules = [
        *first_rules,
        (is_reflector, reflector),
        (is_curator, curator),
        (is_merge, merge or {"decisions": []}),
    ]
    return ScriptedLM(rules, default=answer, **options)


def make(lm, **options) -> PlaybookOptimizer:
    defaults = {"metric": metric, "reflection_lm": lm, "minibatch_size": 6, "num_threads": 4, "track_stats": True}
    return PlaybookOptimizer(**{**defaults, **options})


def learn(lm, program=None, n_train: int = 12, valset=None, **options) -> Any:
    """Compile a program on the task, with `lm` as its model and the one that reflects."""
    with dspy.context(lm=lm):
        program = program or dspy.Predict("question -> answer")
        return make(lm, **options).compile(program, examples(n_train), valset=valset)


def contents(program, predictor: str | None = None) -> list[str]:
    return [bullet.content for bullet in Playbook.from_program(program, predictor)]


def all_text(program) -> dict[str, str]:
    return {name: playbook.to_text() for name, playbook in playbooks_in(program).items()}
