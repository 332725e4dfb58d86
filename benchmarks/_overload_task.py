"""The task of `context_overload`, and its simulated language models.

An invoice has three lines, each of a category. Half of the categories follow the chart of accounts, which the invoice
states; for each of the others there is a convention, which the feedback on a wrong line tells and a right line does
not. That makes a finite set of lessons, as many as one likes, and how often a category occurs is heavy-tailed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dspy

from dspy_combee.testing import (
    FeedbackMetric,
    Loss,
    PlaybookCurator,
    PlaybookMerge,
    PlaybookReflector,
    SimulatedLM,
    Student,
    Task,
)

LINES = 3
BASE_ABILITY = 0.5
NUM_TEST = 100
REFLECTION_TOKENS = 800
"""The paper's 100 and 125 reflections fit into 128k tokens with the rest (section 2.2), so one has at most about 1000.
With much less than 700 model (a) cannot be fitted: 264 bullets in the prompt would weigh as much as dozens of
reflections, and yet be read at batch 1 with little loss, when dozens of reflections are not."""
MAX_LESSONS = 10_000


def _words(text: str) -> list[str]:
    return text.split()


_MATERIALS = _words("""
BRASS STEEL COPPER RUBBER NYLON OAK GLASS CERAMIC LEATHER COTTON ZINC CARBON PAPER CORK FELT WOOL TIN
RESIN GRANITE LINEN TITANIUM VINYL BAMBOO SILICONE GRAPHITE JUTE LATEX MARBLE CHROME SLATE
""")
_PARTS = _words("""
FITTINGS VALVES BRACKETS HOSES GASKETS PANELS CRATES ROLLERS STRAPS FILTERS BOLTS HINGES CLAMPS SLEEVES
TRAYS PULLEYS SPACERS COVERS NOZZLES HANDLES WEDGES RAILS PLUGS LINERS CABLES GRIDS CHUTES SEALS DRUMS LATCHES
FLANGES BUSHINGS RIVETS LEVERS COUPLINGS SPRINGS BEARINGS DOWELS
""")
_PLACES = _words("""
GRAZ LYON PORTO GDYNIA BRISTOL AARHUS GHENT BILBAO MALMO TURKU BASEL TRENTO DELFT KOSICE CORK TARTU
SPLIT ARAD SEGOVIA LIMERICK
""")
_WHY = (
    "with the tax split out",
    "with the cost centre of whoever ordered",
    "because the auditors sample this group",
    "so that it stays out of the overhead rate",
    "as agreed with the group controller",
)
_CHARACTERS = "ABCDEFGHJKLMNPRSTUVWXYZ23456789"
_LINE = re.compile(r"Line \d: ([A-Z ]+), chart default (\d{4}-00)")
_CODE = re.compile(r"\b\d{4}-[A-Z0-9]{2}\b")

WORDINGS = (
    "{}",
    "Look at the category of the line first. {}",
    "{} The chart of accounts says something else, so go by this.",
    "House rule of the ledger desk, confirmed in an audit: {}",
)
"""How curators put a lesson: some pairs are near-duplicates to the rule for these, others are for the merge call."""

_NOTES = """
The assistant went by the chart default that stands on the invoice itself, which reads as if it were binding, and it had
no way to tell from the document that the ledger desk treats this group in another way. The first wrong step is that it
took the category at face value; everything that came after, the layout of the code and its length included, was done
as it should be. What would have avoided the mistake is to look the category up among the conventions before falling
back on the chart, line by line, since the lines of one invoice have nothing to do with each other and one of them being
right says nothing about the next. Amount, supplier and date play no part in it. It is not a matter of care or of
arithmetic: without the convention at hand no amount of checking would have brought the right code to light, and with
it the answer is plain. The assistant should also resist the temptation to derive the two final characters from the
code of a similar category, because these are assigned one by one.
"""


class PostLines(dspy.Signature):  # type: ignore[metaclass]
    """Give the posting code of each line of the invoice: four digits, a hyphen and two characters.

    The chart default holds unless a house convention for the category says otherwise.
    """

    invoice: str = dspy.InputField()
    codes: str = dspy.OutputField(desc="the posting codes, separated by commas, and nothing else")


@dataclass(frozen=True)
class Novelty:
    """What there is to learn.

    Attributes:
        num_lessons: Conventions.
        exponent: A category of rank r occurs in proportion to r ** -exponent.
    """

    num_lessons: int
    exponent: float = 1.0


def overload_task(seed: int, novelty: Novelty, num_train: int, num_test: int = NUM_TEST) -> Task:
    """Draw the conventions and the invoices."""
    rng = random.Random(seed)
    total = round(novelty.num_lessons / (1 - BASE_ABILITY))
    topics = [f"{one} {two} {three}" for one in _MATERIALS for two in _PARTS for three in _PLACES]
    topics = rng.sample(topics, total)
    weights = [(rank + 1) ** -novelty.exponent for rank in range(total)]
    # Every second rank has a convention, so that the base ability does not depend on chance.
    special = [int((rank + 1) * (1 - BASE_ABILITY)) > int(rank * (1 - BASE_ABILITY)) for rank in range(total)]
    codes = [
        f"{rng.randrange(1000, 10000)}-{''.join(rng.choices(_CHARACTERS, k=2)) if own else '00'}" for own in special
    ]
    statements = [f"post to {code} {rng.choice(_WHY)}" for code in codes]
    examples = []
    for number in range(num_train + num_test):
        lines = rng.choices(range(total), weights, k=LINES)
        text = "\n".join(f"Line {at + 1}: {topics[i]}, chart default {codes[i][:4]}-00" for at, i in enumerate(lines))
        example = dspy.Example(
            invoice=f"Invoice no. {number + 10_000} over {rng.randint(2_000, 900_000) / 100:.2f} EUR\n{text}",
            expected=[codes[i] for i in lines],
            told=[f"Convention {topics[i]}: {statements[i]}." for i in lines],
        )
        examples.append(example.with_inputs("invoice"))
    program = dspy.Predict(PostLines)
    return Task("overload", program, FeedbackMetric(_judge), examples[:num_train], [], examples[num_train:])


def _judge(gold: dspy.Example, pred: Any) -> tuple[float, str]:
    given = _CODE.findall(str(getattr(pred, "codes", None) or ""))
    given += [""] * (LINES - len(given))
    remarks = [
        f"Line {at + 1}: {answer or 'nothing'} is wrong. {lesson}"
        for at, (answer, code, lesson) in enumerate(zip(given, gold.expected, gold.told, strict=False))
        if answer != code
    ]
    return 1 - len(remarks) / LINES, " ".join(remarks) or "All lines are right."


def post_lines(question: str, lessons: Mapping[str, str]) -> str:
    """The code of each line: the one in the convention for its category, else the chart default."""
    found = [(_CODE.search(lessons.get(topic, "")), default) for topic, default in _LINE.findall(question)]
    return ", ".join(code.group() if code else default for code, default in found)


def overload_lm(loss: Loss, seed: int, reflection_tokens: int) -> SimulatedLM:
    """The simulated model; a reflection is about so many tokens long."""
    notes = " ".join(_NOTES.split())
    notes = (notes + " " + notes * (4 * reflection_tokens // len(notes) + 1))[: max(0, 4 * reflection_tokens - 300)]
    roles = (
        PlaybookReflector(loss, notes=notes.strip()),
        PlaybookCurator(loss, wordings=WORDINGS),
        PlaybookMerge(loss),
    )
    return SimulatedLM(seed, student=Student(post_lines), roles=roles)
