"""The finance data of the Combee paper (section 4): tasks made of its files, how an answer is judged, and a student.

`formula_task` and `finer_task` read files of yours. Feedback on a wrong answer states what would have helped in one
sentence, `Convention TOPIC: statement.`; feedback on a right one teaches nothing. No text of a model or of a file is
ever evaluated as code.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import dspy

from dspy_combee.testing import FeedbackMetric, Lesson, Task, find_lessons

FORMULA_FILE = "formula_train_subset_500.jsonl"
FINER_FILE = "finer_val_batched_500_samples.jsonl"
BASE_ABILITY = 0.5
"""The probability that the simulated student knows an answer anyway."""

DATA_VARIABLE = "COMBEE_DATA"
HOW_TO_GET = (
    "The files are part of the Agentic Context Engineering project (https://github.com/ace-agent/ace, its finance "
    f"data); give their path, or set {DATA_VARIABLE} to the folder that holds them."
)

AnyPath: TypeAlias = "str | os.PathLike[str]"


class DataFile:
    """Read examples from a file of JSON lines, each context once.

    Args:
        path: The file. Default: `name` in the folder that `COMBEE_DATA` names.
        name: The name of the original file.
        build: Makes an example from context and target; a `ValueError` of its own is reported with the line.

    Raises:
        FileNotFoundError: If the file is not there.
        ValueError: If a row is bad.
    """

    def __init__(self, path: AnyPath | None, name: str, build: Callable[[str, str], dspy.Example]) -> None:
        folder = os.environ.get(DATA_VARIABLE)
        if path is None and not folder:
            raise FileNotFoundError(f"No path to {name}, and {DATA_VARIABLE} is not set. {HOW_TO_GET}")
        self.path = Path(path) if path is not None else Path(folder or "", name)
        self.build = build
        if self.path.is_dir():
            raise FileNotFoundError(
                f"{self.path} is a folder; expected a file of JSON lines with context and target, such as {name} in it."
            )
        if not self.path.is_file():
            raise FileNotFoundError(f"There is no file {self.path}. {HOW_TO_GET}")
        found: dict[str, dspy.Example] = {}
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    example = self._example(line, number)
                    found.setdefault(example.context, example)
        self.examples = list(found.values())

    def _example(self, line: bytes, number: int) -> dspy.Example:
        where = f"{self.path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:  # covers what is no UTF-8 either
            raise ValueError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object with context and target, got {type(row).__name__}")
        for key in ("context", "target"):
            if key not in row:
                raise ValueError(f"{where}: the key {key!r} is missing")
            if not isinstance(row[key], str) or not row[key].strip():
                raise ValueError(f"{where}: {key!r} must be a text that is not blank, got {row[key]!r:.80}")
        try:
            return self.build(row["context"], row["target"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def _one_sentence(text: str) -> str:
    """Return a text without what would end a sentence or need an escape in JSON."""
    return re.sub(r"\.(?!\d)", "", re.sub(r"[\"\\]", "", " ".join(text.split()))).strip(" ,;:?")


# Formula: one number.

_NUMBER = re.compile(
    r"(?<![\w.])(?<!\d,)(?P<open>\(\s*)?(?P<sign>-[$€£¥]?|[$€£¥]-|\+|[$€£¥])?\s*"
    r"(?P<digits>\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?P<exponent>[eE][-+]?\d+)?"
    r"(?![\d_]|[.,]\d)\s*%?(?P<close>\s*\))?"
)
_OPERATORS = set("+-*/^\u00d7\u00f7\u00b7") | {""}


def parse_number(text: str) -> float | None:
    """Return the one number that an answer gives; None where it gives none, or cannot be pinned to one.

    Thousands separators, a currency or percent sign and words around it are passed over; parentheses mean minus.
    After an equals sign only what follows counts. Nothing is scaled and nothing is computed: 5% is 5, and an
    expression such as 1/2 is no number.
    """
    spoken = text.replace("\u2212", "-").replace("**", "").rpartition("=")[2].strip()
    found = list(_NUMBER.finditer(spoken))
    gaps = [spoken[one.end() : other.start()].strip() for one, other in pairwise(found)]
    if not found or _OPERATORS.intersection(gaps):
        return None
    values = [_value(match) for match in found]
    alone = found[0].start() == 0 or len(set(values)) == 1
    return values[0] if alone and math.isfinite(values[0]) else None


def _value(found: re.Match[str]) -> float:
    value = float(found["digits"].replace(",", "") + (found["exponent"] or ""))
    negative = "-" in (found["sign"] or "") or bool(found["open"] and found["close"])
    return -value if negative else value


def _decimals(context: str) -> int:
    asked = re.search(r"(\d{1,2}) decimal place", context)
    return int(asked.group(1)) if asked else 2


def formula_example(context: str, target: str) -> dspy.Example:
    """Make a Formula example; its labels are the target and the statement that feedback teaches."""
    if parse_number(target) is None:
        raise ValueError(f"'target' must be a number, got {target!r:.80}")
    formula = re.search(r"Formula: (.+?)(?:, Explanation:|\. Question:|$)", context, re.DOTALL)
    rule = f"compute {formula.group(1)}" if formula else "compute what is asked"
    statement = f"{_one_sentence(rule)} and give one plain number in full units, {_decimals(context)} decimal places"
    example = dspy.Example(context=context, target=target, statement=statement)
    return example.with_inputs("context")  # type: ignore[no-any-return]


def judge_formula(gold: dspy.Example, pred: Any) -> tuple[float, str]:
    """Return 1 for the right number, else 0, and feedback; both numbers are rounded as the question asks."""
    answer = str(getattr(pred, "answer", None) or "").strip()
    given, right, places = parse_number(answer), parse_number(gold.target), _decimals(gold.context)
    if given is not None and right is not None and round(given, places) == round(right, places):
        return 1.0, f"Right: {gold.target}."
    name = re.search(r"Use formula (.+?) to answer", gold.context)
    lesson = f"Convention {_one_sentence(name.group(1)) if name else 'this formula'}: {gold.statement}."
    what = "is not one number" if given is None else "is not the right number"
    return 0.0, f"The answer {answer[:80]!r} {what}; the right answer is {gold.target}. {lesson}"


# FiNER: four tags.

_QUESTION = re.compile(r'^\s*\d+\. What is best tag for entity "(.*?)" in sentence: "(.*)"\s*$', re.MULTILINE)


def _tags(text: str) -> list[str]:
    parts = re.split(r"\s*(?:,\s*\n|,|\n+)\s*", text.strip())
    return [re.sub(r"^\d+[.)]\s+", "", part).strip(" .`'\"") for part in parts]


def finer_example(context: str, target: str) -> dspy.Example:
    """Make a FiNER example."""
    tags = _tags(target)
    if len(tags) != 4 or not all(tags):
        raise ValueError(f"'target' must be 4 comma-separated tags, got {target!r:.120}")
    return dspy.Example(context=context, target=target).with_inputs("context")  # type: ignore[no-any-return]


def judge_finer(gold: dspy.Example, pred: Any) -> tuple[float, str]:
    """Return the share of the four tags that is right, and feedback on each that is not."""
    right = _tags(gold.target)
    given = (_tags(str(getattr(pred, "answer", None) or "")) + [""] * len(right))[: len(right)]
    questions = _QUESTION.findall(gold.context) + [("this number", "")] * len(right)
    remarks = [
        f"Question {number}: {answer[:120] or 'nothing'} is wrong, {tag} is right. "
        f"Convention {tag}: the tag for {_one_sentence(entity)} in {_around(entity, sentence)}."
        for number, (answer, tag, (entity, sentence)) in enumerate(zip(given, right, questions, strict=False), start=1)
        if answer != tag
    ]
    score = 1 - len(remarks) / len(right)
    return score, "\n".join(remarks) or "Right, all of the tags."


def _around(entity: str, sentence: str, words: int = 8) -> str:
    """Return some words to either side of the number, which is how one tells its tag."""
    before, number, after = f" {sentence} ".partition(f" {entity} ")
    near = [*before.split()[-words:], number.strip(), *after.split()[:words]]
    return _one_sentence(" ".join(near)) or "this sentence"


# The tasks --------------------------------------------------------------------------------------------------


class AnswerFormula(dspy.Signature):  # type: ignore[metaclass]
    """Answer the question with the named financial formula, as one number."""

    context: str = dspy.InputField()
    answer: str = dspy.OutputField(desc="the number and nothing else")


class TagEntities(dspy.Signature):  # type: ignore[metaclass]
    """Give the best US GAAP tag for each of the numbers, in the order of the questions."""

    context: str = dspy.InputField()
    answer: str = dspy.OutputField(desc="the tags, separated by commas, and nothing else")


def formula_task(
    path: AnyPath | None = None,
    val_path: AnyPath | None = None,
    seed: int = 0,
    sizes: tuple[int, int, int] = (120, 40, 80),
) -> Task:
    """Make Formula: numerical questions over 50 financial formulas. Right is the target number, as rounded.

    Args:
        path: JSON lines with `context` and `target`. Default: the training file in the folder `COMBEE_DATA`.
        val_path: A file for the validation examples; without one they come from `path` too.
        seed: Seed of the split.
        sizes: Training, validation and test examples; shrunk in proportion where there are fewer rows.

    Raises:
        FileNotFoundError: If a file is not there; the message says how to get it.
        ValueError: If a row is bad, with the file and the line, or there are too few rows.
    """
    splits = _splits(DataFile(path, FORMULA_FILE, formula_example), val_path, seed, sizes)
    return Task("formula", dspy.ChainOfThought(AnswerFormula), FeedbackMetric(judge_formula), *splits)


def finer_task(
    path: AnyPath | None = None,
    val_path: AnyPath | None = None,
    seed: int = 0,
    sizes: tuple[int, int, int] = (120, 40, 80),
) -> Task:
    """Make FiNER: four US-GAAP tags per example, scored as the share of them that is right.

    Missing tags are wrong and extra ones are ignored. The arguments and errors are those of `formula_task`.
    """
    splits = _splits(DataFile(path, FINER_FILE, finer_example), val_path, seed, sizes)
    return Task("finer", dspy.Predict(TagEntities), FeedbackMetric(judge_finer), *splits)


def _splits(
    rows: DataFile, val_path: AnyPath | None, seed: int, sizes: tuple[int, int, int]
) -> tuple[list[dspy.Example], ...]:
    rng = random.Random(seed)
    if val_path is None:
        train, val, test = _shrunk(sizes, len(rows.examples), rows.path)
        drawn = rng.sample(rows.examples, len(rows.examples))
        return drawn[:train], drawn[train : train + val], drawn[train + val : train + val + test]
    other = DataFile(val_path, "", rows.build)
    seen = {example.context for example in rows.examples}
    valset = [example for example in other.examples if example.context not in seen]
    size = _shrunk((sizes[1],), len(valset), other.path)[0]
    train, test = _shrunk((sizes[0], sizes[2]), len(rows.examples), rows.path)
    drawn = rng.sample(rows.examples, train + test)
    return drawn[:train], rng.sample(valset, size), drawn[train:]


def _shrunk(sizes: tuple[int, ...], available: int, path: Path) -> tuple[int, ...]:
    if available < len(sizes):
        raise ValueError(f"{path}: {available} different rows are too few to split into {len(sizes)} parts")
    share = min(1.0, available / sum(sizes))
    return tuple(max(1, int(size * share)) for size in sizes)


# The simulated student --------------------------------------------------------------------------------------


class AnswerKey:
    """Solve questions that a simulation cannot work out, holding the right answers.

    It gives an answer where the instruction states the lesson that goes with it, word for word as true feedback states
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


def answer_key(task: Task, seed: int) -> AnswerKey:
    """Return the solver that holds the answers of a task of this module."""
    known: dict[str, list[tuple[str, str]]] = {}
    true: set[Lesson] = set()
    for example in (*task.trainset, *task.valset, *task.testset):
        lessons = find_lessons(task.metric(example, dspy.Prediction(answer="")).feedback)
        answers = [answer.strip() for answer in example.target.split(",")]
        topics = answers if len(answers) > 1 else [lesson.topic for lesson in lessons]
        known[example.context] = list(zip(topics, answers, strict=True))
        true.update(lessons)
    return AnswerKey("context", known, frozenset(true), BASE_ABILITY, seed)
