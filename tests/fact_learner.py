"""A third learner, as a user would write one: a plain list of facts that stands at the end of the instruction."""

from collections.abc import Sequence

import dspy

from dspy_combee.calls.guard import GuardedCalls
from dspy_combee.calls.lm_calls import ask
from dspy_combee.learners.learner import Learner, LearnerTools, Proposal
from dspy_combee.records.errors import OutOfBudgetError
from dspy_combee.records.types import Usage
from dspy_combee.rollouts.feedback import feedback_of


class NoteFact(dspy.Signature):
    """Note the one fact that a feedback states."""

    feedback: str = dspy.InputField()
    fact: str = dspy.OutputField()


class FactCalls(GuardedCalls):
    def __init__(self, tools: LearnerTools) -> None:
        self.tools = tools

    def __call__(self, feedback):
        return ask(
            dspy.Predict(NoteFact),
            {"feedback": feedback},
            self.tools.reflection_lm,
            {"fact": str},
            self.tools.guard.meter,
        )


class FactLearner(Learner[tuple[str, ...]]):
    def __init__(self, student, tools: LearnerTools) -> None:
        self.student, self.tools = student, tools

    def start(self):
        return ()

    def build(self, state):
        program = self.student.deepcopy()
        for _, predictor in program.named_predictors():
            text = "\n".join([predictor.signature.instructions, *state])
            predictor.signature = predictor.signature.with_instructions(text)
        return program

    def learn(self, state, evidence: Sequence, step):
        told = [getattr(item, "feedback", None) or feedback_of(item.result) or "" for item in evidence]
        try:
            replies = self.tools.guard.map(FactCalls(self.tools), told)
        except (OutOfBudgetError, TimeoutError) as error:
            return Proposal(state, failed=isinstance(error, TimeoutError), reason=str(error))
        facts = [reply.value.fact for reply in replies if reply.error is None]
        errors = [reply.error for reply in replies if reply.error is not None]
        usage = sum((reply.usage for reply in replies), Usage())
        new = tuple(dict.fromkeys([*state, *facts]))
        return Proposal(new, (), usage, failed=not facts, reason=errors[-1] if errors else "")

    def load(self, plain):
        return tuple(plain)
