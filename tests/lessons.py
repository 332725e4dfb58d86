"""A task that is learned rule by rule: what the tests of the optimizer run on.

The answer to question 7 is right once the instruction says `rule-answer-7`, which the metric's feedback tells, one
example at a time. The reflection model writes down every rule that it reads. All replies depend on the prompt alone.
"""

import re
from typing import Any

import dspy

from dspy_combee import CombeeOptimizer
from dspy_combee.testing import ScriptedLM

RULE = re.compile(r"rule-[a-z]+-\d+")
CHAIN = {"first": "hint", "second": "answer"}


class Chain(dspy.Module):
    """Two predictors, each with rules of its own."""

    def __init__(self):
        super().__init__()
        self.first = dspy.Predict("question -> hint")
        self.second = dspy.Predict("question, hint -> answer")

    def forward(self, question):
        hint = self.first(question=question).hint
        return dspy.Prediction(hint=hint, answer=self.second(question=question, hint=hint).answer)


def examples(n: int, start: int = 0) -> list[Any]:
    return [dspy.Example(question=f"question {i}", number=i).with_inputs("question") for i in range(start, start + n)]


def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
    """The share of right fields; feedback is the rule of the predictor in question."""
    fields = {name: float(pred[name] == "right") for name in ("hint", "answer") if name in pred}
    told = f"rule-{CHAIN.get(pred_name, 'answer')}-{gold.number}"
    return dspy.Prediction(score=sum(fields.values()) / len(fields), feedback=f"You should know {told}.")


def rules_in(text: str) -> set[str]:
    return set(RULE.findall(text))


def numbers_in(text: str) -> set[int]:
    return {int(rule.rsplit("-", 1)[1]) for rule in rules_in(text)}


def is_reflection(prompt) -> bool:
    return "new_instruction" in prompt.output_fields


def is_merge(prompt) -> bool:
    return is_reflection(prompt) and "[[ ## proposed_instructions ## ]]" in prompt


def is_level_1(prompt) -> bool:
    return is_reflection(prompt) and not is_merge(prompt)


def write_down(prompt) -> dict[str, str]:
    """The reflection model: every rule of the prompt's message, in order."""
    return {"new_instruction": "Rules: " + " ".join(sorted(rules_in(prompt.question)))}


def answer(prompt) -> dict[str, str]:
    """The student: right where the instruction states the rule."""
    number = re.findall(r"question (\d+)", prompt.question)[-1]
    return {
        field: "right" if f"rule-{field}-{number}" in rules_in(prompt.system) else "wrong"
        for field in prompt.output_fields
    }


def learning_lm(*first_rules, reflect=write_down, **options) -> ScriptedLM:
    """The language model of the task; `first_rules` answer before it does."""
    return ScriptedLM([*first_rules, (is_reflection, reflect)], default=answer, **options)


def make(lm, cls: Any = CombeeOptimizer, **options) -> Any:
    """An optimizer with a small budget, whose options are the caller's."""
    defaults = {"metric": metric, "reflection_lm": lm, "reflection_minibatch_size": 6, "num_threads": 4}
    if not options.keys() & {"auto", "max_full_evals", "max_metric_calls"}:
        defaults["max_metric_calls"] = 50
    if cls is CombeeOptimizer:
        defaults |= {"use_merge": False, "track_stats": True, "verbose": False}
    return cls(**{**defaults, **options})


def learn(lm, program=None, n_train: int = 12, n_val: int = 6, **options) -> Any:
    """Compile a program on the task, with `lm` as its model and the one that reflects."""
    with dspy.context(lm=lm):
        return make(lm, **options).compile(
            program or dspy.Predict("question -> answer"), examples(n_train), valset=examples(n_val)
        )


def instruction(program, name: str = "self") -> str:
    return dict(program.named_predictors())[name].signature.instructions
