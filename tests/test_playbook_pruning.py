"""Near-duplicates, which unite and which must not, and the token budget."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_combee.playbook import Bullet, Playbook, PlaybookError, TextLine
from dspy_combee.playbook.deltas import Add
from dspy_combee.playbook.near_duplicates import EmbeddingCosine, TokenJaccard, profile
from dspy_combee.playbook.pruning import estimate_tokens, unite_adds

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


def united(first, second, rule=None):
    return (rule or TokenJaccard()).leaders([first, second]) == [0, 0]


@pytest.mark.parametrize(("first", "second"), UNITE)
def test_near_duplicates_unite(first, second):
    assert united(first, second)
    assert united(second, first)


@pytest.mark.parametrize(("first", "second"), APART)
def test_different_lessons_stay_apart(first, second):
    assert not united(first, second)
    assert not united(second, first)


def test_a_swap_is_no_near_duplicate_however_long_the_text():
    words = [f"word{chr(97 + number // 26)}{chr(97 + number % 26)}" for number in range(200)]
    assert united(" ".join(words), " ".join([*words, "tail"]))
    assert not united(" ".join([*words, "left"]), " ".join([*words, "right"]))


def test_texts_are_not_chained():
    words = [chr(97 + number) * 5 for number in range(12)]
    # Each is near the one before it; the last is too far from the first.
    chain = [" ".join(words[: 8 + number]) for number in range(5)]
    assert TokenJaccard().leaders(chain) == [0, 0, 0, 3, 3]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_index_finds_what_comparing_all_pairs_finds(data):
    words = ["the", "net", "rate", "rates", "5", "6", "not", "check", "units", "sum", "of", "Table", "x_1", "cell"]
    text = st.lists(st.sampled_from(words), max_size=9).map(" ".join)
    texts = data.draw(st.lists(text, max_size=12))
    rule = TokenJaccard(data.draw(st.sampled_from([0.3, 0.5, 0.8, 1.0])))
    expected = []
    for place, text in enumerate(texts):
        earlier = [at for at in range(place) if expected[at] == at and united(texts[at], text, rule)]
        expected.append(earlier[0] if earlier else place)
    assert rule.leaders(texts) == expected


def test_profile_of_a_text():
    found = profile("Check the EBIT, not 5 % of Sales.")
    assert found.content == ("check", "ebit", "not", "5", "%", "sale")
    assert found.keys == ("%", "5", "not")
    assert found.names == {"ebit", "sale"}


@pytest.mark.parametrize("threshold", [0, -1, 1.1, True, "0.8", None, float("nan")])
def test_thresholds_are_checked(threshold):
    with pytest.raises(ValueError, match="threshold"):
        TokenJaccard(threshold)
    with pytest.raises(ValueError, match="threshold"):
        EmbeddingCosine(len, threshold)


# By an embedder

VECTORS = {"a": [1, 0], "b": [0.99, 0.1], "c": [0, 1], "a 5": [1, 0], "a 6": [1, 0], "a not": [1, 0], "z": [0, 0]}


def embed(texts):
    return [VECTORS.get(text, [1, 1]) for text in texts]


def test_an_embedder_judges_but_key_tokens_must_be_the_same():
    rule = EmbeddingCosine(embed)
    assert rule.leaders(["a", "b", "c", "a 5", "a 6", "a not", "z", "z"]) == [0, 0, 2, 3, 4, 5, 6, 7]
    assert rule.leaders(["divide x by y", "divide y by x", "Use Revenue", "x uses revenue"])[:2] == [0, 1]
    assert rule.leaders([]) == []
    assert EmbeddingCosine(lambda texts: np.ones((len(texts), 3))).leaders(["x"] * 600) == [0] * 600
    book = Playbook(entries=(Bullet("a-1", "A", "a"), Bullet("a-2", "A", "b"), Bullet("a-3", "A", "c")))
    assert [item.id for item in book.unite(rule).playbook] == ["a-1", "a-3"]


NO_EMBEDDINGS = {
    "too few": [[1, 2]],
    "one vector": [1, 2],
    "matrices": [[[1]], [[2]]],
    "empty": [[], []],
    "nan": [[1, float("nan")], [1, 2]],
    "infinite": np.array([[1, np.inf], [1, 2]], dtype=np.float32),
    "none": None,
    "text": "text",
    "texts": [["a"], ["b"]],
    "numbers as text": [["1"], ["2"]],
    "ragged": [[1], [1, 2]],
    "ragged arrays": np.array([np.ones(1), np.ones(2)], dtype=object),
    "no float": [[10**400], [1]],
    "complex": np.ones((2, 2), dtype=complex),
    "longer than a float": np.array([[np.longdouble("1e4000")], [1]]),
}


@pytest.mark.parametrize("result", NO_EMBEDDINGS.values(), ids=NO_EMBEDDINGS)
def test_what_is_no_embedding_is_an_error(result):
    with pytest.raises(PlaybookError, match="the embedder must give 2 vectors of finite numbers, all of one length"):
        EmbeddingCosine(lambda _: result).leaders(["x", "y"])


@pytest.mark.parametrize(
    ("scale", "type_"),
    [(1.7e308, np.float64), (1e200, np.float64), (3e38, np.float32), (1e-40, np.float32), (1e-310, np.float64)],
)
def test_the_length_of_a_vector_is_of_no_account(scale, type_):
    vectors = (np.array([[1, 1, 0], [1, 0.99, 0], [-1, 1, 0], [0, 0, 0]]) * scale).astype(type_)
    vectors[1] /= 3
    given = vectors.copy()
    assert EmbeddingCosine(lambda _: vectors).leaders(["w", "x", "y", "z"]) == [0, 0, 2, 3]
    assert (vectors == given).all()


def test_what_the_embedder_raises_is_passed_on():
    def broken(_):
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        EmbeddingCosine(broken).leaders(["x", "y"])
    with pytest.raises(TypeError, match="callable"):
        EmbeddingCosine(None)


# Uniting


def test_the_better_supported_content_is_kept():
    book = Playbook(
        entries=(
            Bullet("a-1", "A", "Check the units before adding", 5, 1, ("r1",)),
            Bullet("a-2", "A", "other"),
            Bullet("b-3", "B", "Check units before adding.", 1, 2, ("r2", "r1")),
        )
    )
    report = book.unite()
    assert list(report.playbook) == [
        Bullet("a-2", "A", "other"),
        Bullet("b-3", "B", "Check units before adding.", 6, 3, ("r2", "r1")),
    ]
    assert [(item.bullet.id, item.reason, item.into) for item in report.pruned] == [("a-1", "near-duplicate", "b-3")]
    assert report.tokens_after < report.tokens_before
    assert len(book) == 3


def test_adds_of_a_batch_unite():
    adds = [
        Add("A", "Check the units before adding", ("r1",)),
        Add("A", "other", ("r2",)),
        Add("B", "Always check the units before adding", ("r3", "r1")),
        Add("A", "Check units before adding 5", ("r4",)),
    ]
    found = unite_adds(adds, TokenJaccard())
    assert [(item.indices, item.add.reflection_ids) for item in found] == [
        ((2, 0), ("r1", "r3")),
        ((1,), ("r2",)),
        ((3,), ("r4",)),
    ]
    assert found[0].add.content == adds[2].content
    assert unite_adds([], TokenJaccard()) == []


# The budget


def test_estimate():
    assert [estimate_tokens(text) for text in ("", "a", "abcd", "abcde", "数字")] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, None])
def test_budget_is_checked(budget):
    with pytest.raises(ValueError, match="token_budget"):
        Playbook().enforce_budget(budget)


def steps():
    return Playbook(
        sections=(),
        entries=(
            Bullet("a-1", "A", "alpha bravo charlie delta", 9),
            Bullet("a-2", "A", "Alpha, bravo, charlie, delta.", 1),
            Bullet("a-3", "A", "echo foxtrot golf", 4, 5),
            Bullet("a-4", "A", "hotel india juliet", 0, 0),
            Bullet("a-5", "A", "kilo lima mike", 1, 1),
            Bullet("a-6", "A", "november oscar papa", 0, 0),
            TextLine("A", "a note"),
        ),
    )


def test_a_playbook_that_fits_stays_as_it_is():
    report = steps().enforce_budget()
    assert (report.playbook, report.pruned, report.fits) == (steps(), (), True)
    assert report.tokens_before == report.tokens_after == estimate_tokens(steps().to_prompt())


def test_the_steps_come_in_order_and_stop_when_it_fits():
    full = [("a-2", "near-duplicate"), ("a-3", "harmful")]
    full += [(name, "least used") for name in ("a-4", "a-6", "a-5", "a-1")]
    seen = set()
    for budget in range(steps().enforce_budget().tokens_before, 0, -1):
        report = steps().enforce_budget(budget)
        gone = [(item.bullet.id, item.reason) for item in report.pruned]
        assert gone == full[: len(gone)]
        assert report.fits == (report.tokens_after <= budget)
        assert report.fits or not report.playbook
        assert TextLine("A", "a note") in report.playbook.entries
        assert report.playbook.next_number == 7
        seen.add(len(gone))
    assert seen == set(range(7))
    assert not report.fits


def test_the_counter_of_tokens_can_be_replaced():
    words = lambda text: len(text.split())  # noqa: E731
    report = steps().enforce_budget(30, count_tokens=words)
    assert words(report.playbook.to_prompt()) == report.tokens_after <= 30
    assert report.tokens_before == words(steps().to_prompt()) > 30


def word(rng):
    return "".join(rng.choices("abcdefghijklmnop", k=rng.randrange(4, 9)))


def random_text(rng, words):
    return " ".join(rng.choices(words, k=25))


def template(rng, words):
    return " ".join([*words[:20], word(rng) + word(rng), "in any case"])


@pytest.mark.parametrize("make", [random_text, template])
def test_comparisons_grow_little_faster_than_the_bullets(make, monkeypatch):
    compared = []
    similar = TokenJaccard._similar
    monkeypatch.setattr(TokenJaccard, "_similar", lambda *given: compared.append(given) or similar(*given))
    numbers = []
    for count in (500, 2_000):
        rng = random.Random(0)
        words = [word(rng) for _ in range(2 * count)]
        texts = [make(rng, words) for _ in range(count)]
        texts[1::10] = [f"The {text}." for text in texts[::10]]
        book = Playbook(entries=tuple(Bullet(f"a-{place}", "A", text, place % 7) for place, text in enumerate(texts)))
        compared.clear()
        report = book.enforce_budget(10 * count)
        assert report.fits
        assert sum(item.reason == "near-duplicate" for item in report.pruned) == count // 10
        numbers.append(len(compared))
    assert 0 < numbers[1] < 6 * numbers[0], "16 times as many pairs"
    assert numbers[1] < 2_000**2 / 100
