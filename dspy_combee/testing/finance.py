"""The finance data of the Combee paper (section 4): reading the files, and judging an answer.

No text of a model or of a file is ever evaluated as code.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import dspy

DATA_VARIABLE = "COMBEE_DATA"
HOW_TO_GET = (
    "The files are part of the Agentic Context Engineering project (https://github.com/ace-agent/ace, its finance "
    f"data); give their path, or set {DATA_VARIABLE} to the folder that holds them."
)

AnyPath: TypeAlias = "str | os.PathLike[str]"


class DataFile:
    """Examples from a file of JSON lines, each context once.

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
    """A text without what would end a sentence or need an escape in JSON."""
    return re.sub(r"\.(?!\d)", "", re.sub(r"[\"\\]", "", " ".join(text.split()))).strip(" ,;:?")


# Formula: one number.

_NUMBER = re.compile(
    r"(?<![\w.])(?<!\d,)(?P<open>\(\s*)?(?P<sign>-[$€£¥]?|[$€£¥]-|\+|[$€£¥])?\s*"
    r"(?P<digits>\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?P<exponent>[eE][-+]?\d+)?"
    r"(?![\d_]|[.,]\d)\s*%?(?P<close>\s*\))?"
)
_OPERATORS = set("+-*/^\u00d7\u00f7\u00b7") | {""}


def parse_number(text: str) -> float | None:
    """The one number that an answer gives; None where it gives none, or cannot be pinned to one.

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
    """A Formula example; its labels are the target and the statement that feedback teaches."""
    if parse_number(target) is None:
        raise ValueError(f"'target' must be a number, got {target!r:.80}")
    formula = re.search(r"Formula: (.+?)(?:, Explanation:|\. Question:|$)", context, re.DOTALL)
    rule = f"compute {formula.group(1)}" if formula else "compute what is asked"
    statement = f"{_one_sentence(rule)} and give one plain number in full units, {_decimals(context)} decimal places"
    example = dspy.Example(context=context, target=target, statement=statement)
    return example.with_inputs("context")  # type: ignore[no-any-return]


def judge_formula(gold: dspy.Example, pred: Any) -> tuple[float, str]:
    """1 for the right number, else 0, and feedback; both numbers are rounded as the question asks."""
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
    """A FiNER example."""
    tags = _tags(target)
    if len(tags) != 4 or not all(tags):
        raise ValueError(f"'target' must be 4 comma-separated tags, got {target!r:.120}")
    return dspy.Example(context=context, target=target).with_inputs("context")  # type: ignore[no-any-return]


def judge_finer(gold: dspy.Example, pred: Any) -> tuple[float, str]:
    """The share of the four tags that is right, and feedback on each that is not."""
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
    """Some words to either side of the number, which is how one tells its tag."""
    before, number, after = f" {sentence} ".partition(f" {entity} ")
    near = [*before.split()[-words:], number.strip(), *after.split()[:words]]
    return _one_sentence(" ".join(near)) or "this sentence"
