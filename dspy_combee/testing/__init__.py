"""LMs that need no network and no key: `ScriptedLM` for tests, `SimulatedLM` for demonstrations, and a task for these.

A program's copies share them, so there is one record of the calls.
"""

from dspy_combee.testing.engine import (
    Call,
    FakeEngine,
    FakeLM,
    Prompt,
    Reply,
    ScriptedLM,
    Tally,
    UnmatchedPromptError,
    count_tokens,
)
from dspy_combee.testing.simulation import (
    CapacityLoss,
    Lesson,
    Loss,
    PlaybookCurator,
    PlaybookMerge,
    PlaybookReflector,
    PowerLoss,
    Reflector,
    Role,
    SimulatedLM,
    Solver,
    Student,
    Summarizer,
    find_lessons,
    playbook_roles,
    read_code,
)
from dspy_combee.testing.tasks import FeedbackMetric, Task, conventions_task, shuffled_feedback

__all__ = [
    "Call",
    "CapacityLoss",
    "FakeEngine",
    "FakeLM",
    "FeedbackMetric",
    "Lesson",
    "Loss",
    "PlaybookCurator",
    "PlaybookMerge",
    "PlaybookReflector",
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
    "Task",
    "UnmatchedPromptError",
    "conventions_task",
    "count_tokens",
    "find_lessons",
    "playbook_roles",
    "read_code",
    "shuffled_feedback",
]
