"""A task to learn on: a program, a metric with feedback, and disjoint training, validation and test examples.

Feedback on a wrong answer states what would have helped in one sentence, `Convention TOPIC: statement.`; feedback on a
right one teaches nothing.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dspy


@dataclass(frozen=True)
class Task:
    """Hold something to learn."""

    name: str
    program: dspy.Module
    """The program before learning."""
    metric: Callable[..., Any]
    """A GEPA metric that gives a `dspy.Prediction` with `score` (0 to 1) and `feedback`."""
    trainset: list[dspy.Example]
    valset: list[dspy.Example]
    """Examples to choose candidates by."""
    testset: list[dspy.Example]
    """Held-out examples."""


@dataclass(frozen=True)
class FeedbackMetric:
    """Make a GEPA metric of a judge of one example."""

    judge: Callable[[dspy.Example, Any], tuple[float, str]]
    """Gives score and feedback from the example and the prediction."""
    shuffled: bool = False
    """Whether to give the feedback that the example would get if it had the labels in its `other_labels`."""

    def __call__(
        self, gold: dspy.Example, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
    ) -> dspy.Prediction:
        """Score a prediction and say what was wrong with it."""
        score, feedback = self.judge(gold, pred)
        if self.shuffled:
            _, feedback = self.judge(gold.copy(**gold.other_labels), pred)
        return dspy.Prediction(score=score, feedback=feedback)


def shuffled_feedback(task: Task, seed: int = 0) -> Task:
    """Return the control: the same task, with the feedback shuffled between the examples of each split.

    Each example is told, about its own question, the answer and the convention of another example with a
    different answer. Scores are unchanged, so whoever gains here gained from something else than the feedback.

    Args:
        task: The task; its metric is a `FeedbackMetric`.
        seed: Seed of the shuffle.

    Raises:
        TypeError: If the metric is not a `FeedbackMetric`.
        ValueError: If more than half of the examples of a split have the same labels.
    """
    if not isinstance(task.metric, FeedbackMetric):
        raise TypeError(f"task.metric must be a FeedbackMetric, got {type(task.metric).__name__}")
    rng = random.Random(seed)
    splits = [_with_other_labels(split, rng) for split in (task.trainset, task.valset, task.testset)]
    return Task(f"{task.name}, feedback shuffled", task.program, replace(task.metric, shuffled=True), *splits)


def _with_other_labels(examples: Sequence[dspy.Example], rng: random.Random) -> list[dspy.Example]:
    labels = [example.labels().toDict() for example in examples]
    # Sorted by label and turned by half, no example meets its own label unless most of them share it.
    order = rng.sample(range(len(examples)), len(examples))
    order.sort(key=lambda index: json.dumps(labels[index], sort_keys=True))
    half = len(order) // 2
    partner = dict(zip(order, order[half:] + order[:half], strict=True))
    if any(labels[index] == labels[other] for index, other in partner.items()):
        raise ValueError("more than half of the examples have the same labels: their feedback cannot be shuffled")
    return [example.copy(other_labels=labels[partner[index]]) for index, example in enumerate(examples)]


# Spend categories with their account in the chart. The house conventions on top of it are drawn by seed.
_CATEGORIES = """
COURIER SERVICES 6120, OFFICE CLEANING 6310, INBOUND FREIGHT 5110, CLOUD HOSTING 6440, STAFF CATERING 6520,
LEGAL COUNSEL 6610, FLEET FUEL 6210, PACKAGING MATERIAL 5130, TEMPORARY STAFF 6015, TRADE FAIR STANDS 6710,
TRANSLATION WORK 6630, MACHINE SPARE PARTS 5220, ELECTRIC POWER 6330, WASTE COLLECTION 6340, RAIL TRAVEL 6810,
HOTEL NIGHTS 6820, SOFTWARE LICENCES 6430, CUSTOMS DUTIES 5150, OUTBOUND FREIGHT 5120, LABORATORY TESTS 6640,
SECURITY GUARDS 6350, PRINTED MATTER 6720, FORKLIFT RENTAL 6230, BANK CHARGES 6910, MOBILE TELEPHONY 6450,
TRAINING COURSES 6050, PROTECTIVE CLOTHING 6060, PALLET POOLING 5140, PATENT FEES 6650, ROOF REPAIRS 6360,
AUDIT FEES 6620, WATER SUPPLY 6320, CAR LEASING 6220, RECRUITMENT AGENCIES 6020, WEB ADVERTISING 6730,
TOOL GRINDING 5230, PLANT INSURANCE 6930, GARDEN CARE 6370, FLIGHTS 6830, COFFEE MACHINES 6530,
CALIBRATION 5240, TAXI RIDES 6840, ARCHIVE STORAGE 6380, MARKET RESEARCH 6740, PHOTOGRAPHY 6750,
FIRE PROTECTION 6390, INDUSTRIAL GASES 5160, CHARITY DONATIONS 6940, PARKING FEES 6240, NEWSPAPERS 6540
"""
_SUPPLIERS = "Brandt Ostermann Lindqvist Moreau Castellano Hughes Novak Farrow Takeda Okafor Brennan Szabo"
_FORMS = "GmbH Ltd SARL AB Partners BV"
_BRANCHES = "Lyon Graz Malmö Bristol Gdynia Porto"
_WHY = (
    "with the tax split out",
    "with the cost centre of whoever ordered",
    "because the auditors sample this group",
    "so that it stays out of the overhead rate",
    "as agreed with the group controller",
)
_REMARKS = (
    "Sent back by the ledger desk. {given} was refused in the month-end check, and it is an easy mistake: nothing on "
    "the invoice itself could have told you, because this supplier group has a rule of its own here. {lesson} Please "
    "hold to it from now on, whatever the amount is and whichever branch has placed the order.",
    "This one had to be reversed. You gave {given}; the chart of accounts alone is no guide for this group, since we "
    "settled on something else two years ago and never printed it on the order form. {lesson} I have corrected the "
    "entry by hand, but the next invoice of the kind should be right the first time.",
    "Not as we do it in this house. {given} will not reconcile with the group's report, and the difference only "
    "shows up weeks later, when nobody remembers the invoice. {lesson} Amount, supplier and branch make no difference "
    "to this; only the category does.",
)
_CODE_CHARACTERS = "ABCDEFGHJKLMNPRSTUVWXYZ23456789"
_CODE = re.compile(r"\b\d{4}-[A-Z0-9]{2}\b")


class PostInvoice(dspy.Signature):  # type: ignore[metaclass]
    """Give the posting code of the supplier invoice: four digits, a hyphen and two characters.

    The chart default holds unless a house convention for the category says otherwise.
    """

    invoice: str = dspy.InputField()
    code: str = dspy.OutputField(desc="the posting code and nothing else")


def conventions_task(seed: int = 0, sizes: tuple[int, int, int] = (120, 40, 80), num_lessons: int = 40) -> Task:
    """Make the task of posting codes by house conventions, which no model can guess and feedback reveals one by one.

    There are 50 spend categories. `num_lessons` of them have a convention of their own, drawn by seed; for the
    others the chart default, which the invoice states, is right. How often a category occurs is heavy-tailed
    (1 / rank), so that a good part of the conventions shows up once or twice in the training examples.

    Args:
        seed: Seed of the conventions and of the examples.
        sizes: Training, validation and test examples.
        num_lessons: Categories with a convention, 0 to 50.

    Raises:
        ValueError: If `num_lessons` is out of range or a size is not positive.
    """
    chart = [tuple(entry.strip().rsplit(" ", 1)) for entry in _CATEGORIES.split(",")]
    if not 0 <= num_lessons <= len(chart):
        raise ValueError(f"num_lessons must be between 0 and {len(chart)}, got {num_lessons}")
    if len(sizes) != 3 or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"sizes must be three positive numbers (train, validation, test), got {sizes!r}")
    rng = random.Random(seed)
    rng.shuffle(chart)
    codes = []
    for index, (_, account) in enumerate(chart):
        # Spread over the ranks, so that the share of invoices that the chart default gets right hardly varies.
        special = math.ceil((index + 1) * num_lessons / len(chart)) > math.ceil(index * num_lessons / len(chart))
        codes.append(f"{account}-{''.join(rng.choices(_CODE_CHARACTERS, k=2)) if special else '00'}")
    statements = [f"post to {code} {rng.choice(_WHY)}" for code in codes]
    weights = [1 / (rank + 1) for rank in range(len(chart))]
    examples = []
    for number in rng.sample(range(10_000, 100_000), sum(sizes)):
        index = rng.choices(range(len(chart)), weights)[0]
        topic, account = chart[index]
        invoice = _invoice(topic, account, number, rng)
        labels = {"code": codes[index], "statement": statements[index]}
        examples.append(dspy.Example(invoice=invoice, **labels).with_inputs("invoice"))
    train, val, _ = sizes
    splits = examples[:train], examples[train : train + val], examples[train + val :]
    return Task("house conventions", dspy.Predict(PostInvoice), FeedbackMetric(_judge_code), *splits)


def _invoice(topic: str, account: str, number: int, rng: random.Random) -> str:
    supplier = f"{rng.choice(_SUPPLIERS.split())} {rng.choice(_FORMS.split())}"
    return (
        f"Invoice no. {number} from {supplier}, {rng.randint(1, 28):02}.{rng.randint(1, 12):02}.2024, for the "
        f"{rng.choice(_BRANCHES.split())} branch. Category: {topic}. Net amount: "
        f"{rng.randint(2_000, 900_000) / 100:.2f} EUR. Chart default: {account}-00."
    )


def _judge_code(gold: dspy.Example, pred: Any) -> tuple[float, str]:
    answer = str(getattr(pred, "code", None) or "")
    if set(_CODE.findall(answer.upper())) == {gold.code}:
        return 1.0, f"Right, {gold.code} is what the ledger desk expects here."
    topic = gold.invoice.split("Category: ")[1].split(".")[0]
    remark = _REMARKS[int(gold.invoice.split()[2]) % len(_REMARKS)]
    given = f"The code {answer.strip()[:40]}" if answer.strip() else "An empty code"
    return 0.0, remark.format(given=given, lesson=f"Convention {topic}: {gold.statement}.")
