"""Near-duplicates, which unite and which must not, and the token budget."""

import numpy as np
import pytest

from dspy_combee import Bullet, Playbook
from dspy_combee.playbook import EmbeddingCosine, TextLine
from dspy_combee.playbook.pruning import same_words
from dspy_combee.records.text import estimate_tokens

UNITE = [
    ("Check the units.", "check the units"),
    ("Check the units before adding", "Check units before adding."),
    ("Check the units before adding", "Always check the units before adding!"),
    ("Verify the sign of the cash flow", "check the sign of the cash flow"),
    ("Check the unit of each amount", "Checked the units of each amount"),
    ("Report revenue in millions of dollars", "Report the revenue in millions of dollars"),
    ("Use a rate of 5 % for the discount", "Use the rate of 5% for the discount"),
    (
        "Read the table's header row to find the reporting currency and scale",
        "Read the table's header row carefully to find the reporting currency and its scale",
    ),
    (
        "Read the header row of the table to find the currency and the scale of the amounts",
        "Read the header row of the table to find the currency and the scale of the reported amounts",
    ),
    ("Don't round the EPS figure", "Don\u2019t round the EPS figure."),
    ("Take EBIT from the income statement", "take ebit from the income statement"),
    ("NPV = sum(CF / (1 + r) ^ t)", "NPV = sum( CF / (1 + r) ^ t );"),
    ("数字を確認する", "数字を確認する!"),
    ("***", "***"),
    ("...", "..."),
]
LONG = "When the filing states amounts for several years, find the column for the year that the question names and {}"
APART = [
    ("rate of 5 %", "rate of 6 %"),
    ("Use a discount rate of 5 %", "Use a discount rate of 6 %"),
    (LONG.format("discount them at a rate of 5 %"), LONG.format("discount them at a rate of 6 %")),
    (LONG.format("discount them at 5 %"), LONG.format("discount them at 5")),
    (LONG.format("discount them at 5 %"), LONG.format("discount them at 0.5 %")),
    (LONG.format("report it in 1,000 dollars"), LONG.format("report it in 1000000 dollars")),
    (LONG.format("report it in millions"), LONG.format("report it in billions")),
    (LONG.format("round it"), LONG.format("do not round it")),
    (LONG.format("do round it"), LONG.format("don't round it")),
    (LONG.format("never round it"), LONG.format("always round it")),
    (LONG.format("round it up"), LONG.format("round it down")),
    (LONG.format("round it up"), LONG.format("round it")),
    (LONG.format("round it"), LONG.format("only round it if asked")),
    (LONG.format("round before adding"), LONG.format("round after adding")),
    (LONG.format("include leases"), LONG.format("exclude leases")),
    (LONG.format("add the tax"), LONG.format("subtract the tax")),
    (LONG.format("take the maximum"), LONG.format("take the minimum")),
    (LONG.format("take the first one"), LONG.format("take the last one")),
    (LONG.format("raise it by 5"), LONG.format("raise it to 5")),
    (LONG.format("take the revenue"), LONG.format("take the expenses")),
    (LONG.format("take numerator"), LONG.format("take denominator")),
    (LONG.format("use GAAP figures"), LONG.format("use IFRS figures")),
    (LONG.format("use the figures"), LONG.format("use the GAAP figures")),
    (LONG.format("use the figures"), LONG.format("use the figures of Germany")),
    (LONG.format("call show_login"), LONG.format("call show_logout")),
    (LONG.format("call api.login"), LONG.format("call api.logout")),
    (LONG.format("divide income by equity"), LONG.format("divide equity by income")),
    (LONG.format("test if x < y"), LONG.format("test if x > y")),
    (LONG.format("test if x == y"), LONG.format("test if x != y")),
    (LONG.format("return (a + b) * c"), LONG.format("return a + (b * c)")),
    (LONG.format("return a - b"), LONG.format("return a b")),
    (LONG.format("use -v"), LONG.format("use v")),
    (LONG.format("note the sign"), LONG.format("not the sign")),
    (LONG.format("5 €"), LONG.format("5 £")),
    (LONG.format("x²"), LONG.format("x2")),
    (LONG.format("नहीं"), LONG.format("हाँ")),
    (
        "Immer zuerst die Einheiten der Tabelle lesen und die Summe der Werte dann runden",
        "Immer zuerst die Einheiten der Tabelle lesen und die Summe der Werte dann nicht runden",
    ),
    ("Round the result", "Round the result up"),
    ("Check units", "Check signs"),
    ("Check the units", "Check the units and the currency"),
    ("Ask", "Answer"),
    ("数字を確認する", "数字を確認しない"),
    ("***", "**"),
    ("...", "??"),
    ("🙂 smile", "🙁 smile"),
]


PUNCTUATION = [
    ("Return n!", "Return n"),
    ("Give names as Last, First", "Give names as Last First"),
    ("return !done", "return done"),
    ('print("x")', "print(x)"),
    ("Choose option A", "Choose option"),
    ("Use the WHO table", "Use the table"),
    ("Read the news table", "Read the new table"),
]


def unites(first, second, rule=same_words):
    found = [rule([first, second]), rule([second, first])]
    assert found in ([[0, 0]] * 2, [[0, 1]] * 2)
    return found[0] == [0, 0]


def alike(texts):
    """Embed every text the same: what stays apart does so by its words."""
    return np.ones((len(texts), 2))


@pytest.mark.parametrize(
    ("rule", "united", "apart"), [(same_words, 13, 45), (EmbeddingCosine(alike), 14, 40)], ids=["words", "embedder"]
)
def test_how_many_of_the_corpora_are_judged_rightly(rule, united, apart):
    missed = [pair for pair in UNITE if not unites(*pair, rule)]
    lost = [pair for pair in APART if unites(*pair, rule)]
    print(
        f"{len(UNITE) - len(missed)} of {len(UNITE)} pairs unite, {len(APART) - len(lost)} of {len(APART)} stay apart"
    )
    assert (len(UNITE) - len(missed), len(APART) - len(lost)) == (united, apart), (missed, lost)


@pytest.mark.parametrize("pair", PUNCTUATION, ids=lambda pair: pair[0])
def test_a_mark_a_name_or_an_ending_may_be_the_lesson(pair):
    assert not unites(*pair)


def test_each_text_goes_to_the_first_that_says_the_same():
    texts = ["Sum the rows.", "sum 5 rows", "Sum rows", "", "***", "Always sum 5 rows!", "***", "."]
    assert same_words(texts) == [0, 1, 0, 3, 4, 1, 4, 7]
    assert same_words([]) == []


# By an embedder

VECTORS = {"a": [1, 0], "b": [0.99, 0.1], "c": [0, 1], "a 5": [1, 0], "a 6": [1, 0], "a not": [1, 0], "z": [0, 0]}


def embed(texts):
    return [VECTORS[text] for text in texts]


def test_an_embedder_judges_but_telling_words_must_be_the_same():
    rule = EmbeddingCosine(embed)
    assert rule(["a", "b", "c", "a 5", "a 6", "a not", "z", "z"]) == [0, 0, 2, 3, 4, 5, 6, 7]
    assert rule([]) == []
    assert EmbeddingCosine(embed, 0.999)(["a", "b"]) == [0, 1]
    assert EmbeddingCosine(alike)(["x"] * 600) == [0] * 600
    apart = ["divide x by y", "divide y by x"], ["Round it in GAAP", "Round it in IFRS"], ["Ask Ann", "Ask Bob"]
    for texts in apart:
        assert EmbeddingCosine(alike)(texts) == [0, 1]
    book = Playbook(entries=tuple(Bullet(f"a-{place}", "A", text) for place, text in enumerate("abc")))
    kept = book.enforce_budget(estimate_tokens(book.to_prompt()) - 1, near_duplicates=rule).playbook
    assert [item.content for item in kept] == ["a", "c"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([[1, 2]], "expected 2 vectors of finite numbers"),
        ([1, 2], "expected 2 vectors of finite numbers"),
        ([[[1]], [[2]]], "expected 2 vectors of finite numbers"),
        ([[], []], "expected 2 vectors of finite numbers"),
        ([[1, float("nan")], [1, 2]], "expected 2 vectors of finite numbers"),
        (np.array([[1, np.inf], [1, 2]], dtype=np.float32), "expected 2 vectors of finite numbers"),
        (np.array([[np.longdouble("1e4000")], [1]]), "expected 2 vectors of finite numbers"),
        (None, "expected 2 vectors of finite numbers"),
        ([[1], [1, 2]], "ValueError"),
        (np.array([np.ones(1), np.ones(2)], dtype=object), "ValueError"),
        ("text", "ValueError"),
        ([["a"], ["b"]], "ValueError"),
        ([[10**400], [1]], "OverflowError"),
        (ConnectionError("no route"), "ConnectionError: no route"),
    ],
)
def test_where_the_embedder_fails_the_words_decide(given, reason, caplog):
    def embedder(_):
        if isinstance(given, Exception):
            raise given
        return given

    rule = EmbeddingCosine(embedder)
    for _ in range(2):
        assert rule(["Check the units.", "check units"]) == [0, 0]
    assert caplog.text.count("The embedder failed") == 1
    assert reason in caplog.text


@pytest.mark.parametrize("threshold", [0, -1, 1.1, True, "0.8", None, float("nan")])
def test_options_are_checked(threshold):
    with pytest.raises(ValueError, match="threshold"):
        EmbeddingCosine(len, threshold)
    with pytest.raises(TypeError, match="callable"):
        EmbeddingCosine(None)
    with pytest.raises(ValueError, match="token_budget"):
        Playbook().enforce_budget(threshold)


# The budget


def test_the_better_supported_content_is_kept():
    bullets = [
        Bullet("a-1", "A", "Check the units before adding", 5, 1, ("r1",)),
        Bullet("a-2", "A", "other"),
        Bullet("b-3", "B", "Check units before adding.", 1, 2, ("r2", "r1")),
    ]
    book = Playbook(entries=tuple(bullets))
    report = book.enforce_budget(estimate_tokens(book.to_prompt()) - 1)
    assert list(report.playbook) == [bullets[1], Bullet("b-3", "B", bullets[2].content, 6, 3, ("r2", "r1"))]
    assert [(item.bullet, item.reason, item.into) for item in report.pruned] == [(bullets[0], "near-duplicate", "b-3")]
    assert len(book) == 3


STEPS = Playbook(
    sections=(),
    entries=(
        Bullet("a-1", "A", "alpha bravo charlie delta", 9),
        Bullet("a-2", "A", "Alpha bravo charlie delta.", 1),
        Bullet("a-3", "A", "echo foxtrot golf", 4, 5),
        Bullet("a-4", "A", "hotel india juliet", 0, 0),
        Bullet("a-5", "A", "kilo lima mike", 1, 1),
        Bullet("a-6", "A", "november oscar papa", 0, 0),
        TextLine("A", "a note"),
    ),
)


def test_the_steps_come_in_order_and_stop_when_it_fits():
    full = [("a-2", "near-duplicate"), ("a-3", "harmful")]
    full += [(name, "least used") for name in ("a-4", "a-6", "a-5", "a-1")]
    tokens = estimate_tokens(STEPS.to_prompt())
    seen = set()
    for budget in (80_000, *range(tokens, 0, -1)):
        report = STEPS.enforce_budget(budget)
        gone = [(item.bullet.id, item.reason) for item in report.pruned]
        assert gone == full[: len(gone)]
        assert report.tokens_after == estimate_tokens(report.playbook.to_prompt())
        assert report.fits == (report.tokens_after <= budget)
        assert report.fits or not report.playbook
        assert TextLine("A", "a note") in report.playbook.entries
        assert report.playbook.next_number == 7
        seen.add(len(gone))
    assert seen == set(range(7))
    assert not report.fits
