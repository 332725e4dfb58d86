"""LMs that need no network and no key: `ScriptedLM` for tests, `SimulatedLM` for demonstrations.

Both are `dspy.LM`s over an engine of their own. A program's copies share them: `copy.deepcopy` gives the same
object and `lm.copy(...)` one with the same engine, so there is one record of the calls. Neither caches nor
retries unless told to.
"""

from dspy_combee.testing.fake_engine import Call, Prompt, Reply, Tally, count_tokens
from dspy_combee.testing.scripted import ScriptedLM, UnmatchedPromptError
from dspy_combee.testing.simulation import (
    AnswerKey,
    CapacityLoss,
    Lesson,
    Loss,
    PowerLoss,
    Reflector,
    Role,
    SimulatedLM,
    Solver,
    Student,
    Summarizer,
    find_lessons,
    read_code,
)

__all__ = [
    "AnswerKey",
    "Call",
    "CapacityLoss",
    "Lesson",
    "Loss",
    "PowerLoss",
    "Prompt",
    "Reflector",
    "Reply",
    "Role",
    "ScriptedLM",
    "SimulatedLM",
    "Solver",
    "Student",
    "Summarizer",
    "Tally",
    "UnmatchedPromptError",
    "count_tokens",
    "find_lessons",
    "read_code",
]
