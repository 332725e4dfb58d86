"""The text and JSON forms: whatever is legal comes back, whatever ACE wrote is read, nothing is dropped."""

import inspect
import random
import string

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dspy_combee.playbook import Bullet, Playbook, PlaybookError, TextLine, attach, detach
from dspy_combee.playbook.bullets import MAX_COUNT, SECTIONS
from dspy_combee.playbook.deltas import Add, Merge, Remove, Update
from dspy_combee.playbook.text import BEGIN, END

# What a content may hold that a reader could trip over. Joined at random with any characters between.
FRAGMENTS = [
    "\n",
    "\n\n",
    "\r",
    "\r\n",
    "\t",
    " ",
    "  ",
    "\\",
    "\\\\",
    "::",
    " :: ",
    "##",
    "## ",
    "## OTHERS",
    "\n## OTHERS\n",
    "[",
    "]",
    "[calc-00003]",
    "[calc-00003] x",
    "\n[calc-00003] helpful=1 harmful=0 :: x\n",
    "[calc-00003] helpful=1 harmful=0 ::",
    "helpful=1 harmful=2 :: ",
    "helpful=",
    "<!-- next-id 7 -->",
    '<!-- reflections calc-00003 ["r"] -->',
    BEGIN,
    END,
    f"\n{END}\n",
    f"\n{BEGIN}\n",
    "&#13;",
    "&#9;",
    "&#38;#13;",
    "&#38;",
    "&",
    "#13;",
    "#38;",
    "\x85",
    "\u2028",
    "\u2029",
    "\x0b\x0c\x1c\x00",
    "\ufeff",
    "\u200f",
    "שלום",
    "مرحبا",
    "हिन्दी",
    "数字",
    "🙂👩\u200d👩",
    "e\u0301",
    "word",
    "5 %",
]
mixed = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=8).map("".join)
contents = mixed.filter(lambda text: text.strip())
lines = mixed.map(lambda text: text.replace("\n", " ")).filter(lambda text: text.strip())
names = st.one_of(st.sampled_from(list(SECTIONS)), lines)
counts = st.integers(0, 10**12)
reflections = st.lists(contents, max_size=2).map(tuple)
slugs = st.sampled_from(["calc", "str", "my-api", "x_1", "été"])


@st.composite
def playbooks(draw):
    sections = draw(st.lists(names, max_size=3))
    places = st.sampled_from([*sections, ""])
    entries = []
    for number in draw(st.lists(st.integers(0, 10**6), unique=True, max_size=6)):
        entries += [TextLine(draw(places), draw(lines)) for _ in range(draw(st.integers(0, 2)))]
        entries.append(
            Bullet(
                f"{draw(slugs)}-{number:05d}",
                draw(places),
                draw(contents),
                draw(counts),
                draw(counts),
                draw(reflections),
            )
        )
    return Playbook(tuple(sections), tuple(entries), draw(st.integers(1, 10**7)))


quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(playbooks())
def test_both_forms_give_every_playbook_back(book):
    assert Playbook.from_json(book.to_json()) == book
    text = book.to_text()
    assert Playbook.from_text(text) == book
    assert Playbook.from_text(text.replace("\n", "\r\n")) == book
    assert Playbook.from_text(book.to_prompt(reflections=True)) == book
    without = Playbook.from_text(book.to_text(reflections=False))
    assert without.entries == tuple(
        Bullet(entry.id, entry.section, entry.content, entry.helpful, entry.harmful)
        if isinstance(entry, Bullet)
        else entry
        for entry in book.entries
    )


@quick
@given(playbooks())
def test_without_lines_of_text_strict_reading_does_the_same(book):
    bare = Playbook(book.sections, book.bullets, book.next_number)
    unsectioned_first = bare.to_text()
    assert Playbook.from_text(unsectioned_first, strict=True) == bare


@quick
@given(mixed, playbooks())
def test_a_block_is_found_behind_whatever_stands_before_it(base, book):
    text = attach(base, book, reflections=True)
    assert "\t" not in text[len(base) :]
    assert detach(text) == (base, book)
    assert detach(text + " \n") == (base, book)
    assert detach(attach(text, book, reflections=True)) == (text, book)


@quick
@given(mixed)
@example("\\  ")
@example("[a-1] x\n\\  &#13;")
@example("[a-1]\n  \n  &#13;\n  y")
def test_any_text_can_be_read_and_then_stays(text):
    book = Playbook.from_text(text)
    written = book.to_text()
    assert Playbook.from_text(written) == book
    assert Playbook.from_text(written).to_text() == written
    # Nothing is dropped: every visible character is in an entry, a name, or is part of what the form itself is.
    held = written + "".join(entry.text if isinstance(entry, TextLine) else entry.content for entry in book.entries)
    missing = {char for char in text if not char.isspace()} - set(held) - set("&#1398;\ufeff\\ud800[]:\ufffd")
    assert not {char for char in missing if not "\ud800" <= char <= "\udfff"}


@quick
@given(st.sampled_from(["", "Answer it.", "Answer.\n\n    Briefly."]), playbooks())
def test_a_block_survives_what_dspy_does_to_instructions(base, book):
    found, playbook = detach(inspect.cleandoc(attach(base, book, reflections=True)))
    assert (found.split(), playbook) == (base.split(), book)


def test_detach_without_a_block():
    for text in ("", "plain", f"{BEGIN}\n", END, f"x\n{END}", f"{BEGIN}\n## A\n{END}\nmore"):
        assert detach(text) == (text, None)


def test_the_form_ace_users_know():
    book = Playbook(
        sections=("FORMULAS & CALCULATIONS", "OTHERS"),
        entries=(
            Bullet("calc-00003", "FORMULAS & CALCULATIONS", "NPV = sum\n\n  of it", 8, 0, ("r1", 'r"2')),
            Bullet("misc-00001", "OTHERS", "b"),
        ),
        next_number=9,
    )
    assert book.to_text() == (
        "## FORMULAS & CALCULATIONS\n"
        "[calc-00003] helpful=8 harmful=0 :: NPV = sum\n"
        "  \n"
        "    of it\n"
        "\n"
        "## OTHERS\n"
        "[misc-00001] helpful=0 harmful=0 :: b\n"
        "\n"
        "<!-- next-id 9 -->\n"
        '<!-- reflections calc-00003 ["r1", "r\\"2"] -->\n'
    )
    assert str(book) == book.to_text()
    assert "reflections" not in book.to_prompt()


ACE = """\
## STRATEGIES & INSIGHTS
[str-00001] helpful=5 harmful=0 :: Always verify data types
[str-00002]  helpful=3  harmful=1 ::Consider edge cases

## STRATEGIES AND HARD RULES
[shr-00009] Without counters
[shr-00010]
  Its content on the next line

[shr-00011] :: odd but clear


## OTHERS
"""


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_reads_ace_with_and_without_counters(line_end, mark):
    book = Playbook.from_text(mark + ACE.replace("\n", line_end), strict=True)
    assert book.sections == ("STRATEGIES & INSIGHTS", "STRATEGIES AND HARD RULES", "OTHERS")
    assert [(item.id, item.helpful, item.harmful, item.content) for item in book] == [
        ("str-00001", 5, 0, "Always verify data types"),
        ("str-00002", 3, 1, "Consider edge cases"),
        ("shr-00009", 0, 0, "Without counters"),
        ("shr-00010", 0, 0, "\nIts content on the next line"),
        ("shr-00011", 0, 0, ":: odd but clear"),
    ]
    made = book.apply([Add("strategies_and_insights", "new")]).playbook
    assert made.in_section("STRATEGIES & INSIGHTS")[-1].id == "sai-00012"


@pytest.mark.parametrize(
    "line",
    [
        "plain text",
        "[calc-00009]no space",
        "[calc] helpful=1 harmful=0 :: id without a number",
        "[calc-00009] helpful=1 :: one counter",
        "[calc-00009] helpful=x harmful=0 :: no number",
        "[calc-00009] helpful=-1 harmful=0 :: negative",
        "[calc-00009] helpful=1 harmful=0 no colons",
        "[calc-00009] helpful=1 harmful=0 ::",
        "[calc-00009]",
        "[calc-1234567890123456789] id too long",
        "[calc-00001] helpful=0 harmful=0 :: id that came before",
        "- [calc-00009] helpful=1 harmful=0 :: in a list",
        " [calc-00009] helpful=1 harmful=0 :: indented",
        "##",
        "##NAME",
        "### deeper",
        "# title",
        "<!-- next-id 0 -->",
        "<!-- next-id x -->",
        "<!-- reflections calc-00008 [] -->",
        '<!-- reflections calc-00008 ["r"] -->',
        "<!-- reflections calc-00001 [1] -->",
        f"<!-- reflections calc-00001 {'[' * 5000}] -->",
        BEGIN,
        "[link](https://example.org)",
        "\\[x\\] = y",
    ],
)
def test_a_malformed_line_is_an_error_or_kept(line):
    text = f"## A\n[calc-00001] a\n\n{line}\n[calc-00002] b\n"
    with pytest.raises(PlaybookError, match=r"line 4\b"):
        Playbook.from_text(text, strict=True)
    book = Playbook.from_text(text)
    assert [entry.text if isinstance(entry, TextLine) else entry.id for entry in book.entries] == [
        "calc-00001",
        line,
        "calc-00002",
    ]
    # It stays text, also when what stood before it is gone.
    less = book.apply([Remove("calc-00001")]).playbook
    assert Playbook.from_text(less.to_text()) == less


def test_text_is_written_as_it_came_where_it_can_be():
    text = "Title\n  - indented\n\n## A\nNote:\n  - one\n  - two\n[a-00001] helpful=0 harmful=0 :: x\nend\n"
    assert Playbook.from_text(text).to_text() == text


def test_sections_that_come_twice_are_joined():
    book = Playbook.from_text("## A\n[a-1] 1\n## B\n[b-2] 2\n## A\n[a-3] 3\ntext\n")
    assert book.sections == ("A", "B")
    assert [entry.id for entry in book.in_section("A")] == ["a-1", "a-3"]


def test_a_large_foreign_number_does_not_move_the_counter():
    book = Playbook.from_text("## A\n[a-999999999999999] far\n[a-00004] near\n")
    assert book.next_number == 5
    assert Playbook.from_text(book.to_text()) == book


@pytest.mark.parametrize(
    "line",
    [
        "[calc-00012] helpful=x harmful=0 :: broken",
        "[calc-00012] helpful=3 :: broken",
        "[calc-00012]",
        "[calc-00012]: broken",
        "- [calc-00012] helpful=0 harmful=0 :: a list",
        "\\[calc-00012] escaped",
    ],
)
def test_the_id_of_a_line_that_is_kept_as_text_is_not_given_again(line):
    book = Playbook.from_text(f"## FORMULAS & CALCULATIONS\n[calc-00003] ok\n{line}\n")
    assert len(book) == 1
    for read in (
        book,
        Playbook.from_text(book.to_text()),
        Playbook.from_json(book.to_json()),
        Playbook((), book.entries),
    ):
        grown = read.apply([Add("FORMULAS & CALCULATIONS", "new")]).playbook
        assert [bullet.id for bullet in grown] == ["calc-00003", "calc-00013"]
        assert Playbook.from_text(grown.to_text()) == grown


def test_an_id_that_a_line_of_text_only_mentions_is_free():
    assert Playbook.from_text("## A\n[a-00003] ok\nsee [a-00012]\n[a-12] [b\n").next_number == 13
    assert Playbook.from_text("## A\n[a-00003] ok\nsee [a-00012]\n").next_number == 4


@pytest.mark.parametrize("digits", ["9" * 15, "1" + "0" * 15, "9" * 5_000, "0" * 20 + "7"])
def test_counters_of_any_length_are_read_and_end_at_their_bound(digits):
    book = Playbook.from_text(f"## A\n[a-00001] helpful={digits} harmful={digits} :: x\n", strict=True)
    expected = 7 if digits.endswith("7") else MAX_COUNT
    assert [(bullet.helpful, bullet.harmful) for bullet in book] == [(expected, expected)]
    more = book.tag([("a-00001", "helpful")] * 3).playbook.apply([Add("A", "y")]).playbook
    assert more.get("a-00001").helpful == min(expected + 3, MAX_COUNT)
    assert Playbook.from_text(more.to_text()) == more == Playbook.from_json(more.to_json())


def test_counters_end_at_their_bound_where_bullets_unite():
    full = [Bullet(f"a-{number}", "A", "the same", MAX_COUNT, 10**40) for number in (1, 2)]
    book = Playbook(("A",), tuple(full))
    assert [bullet.harmful for bullet in book.unite().playbook] == [MAX_COUNT]
    merged = book.apply([Merge(("a-1", "a-2"), "one")]).playbook
    assert merged.bullets == (Bullet("a-1", "A", "one", MAX_COUNT, MAX_COUNT),)


# Playbooks as ACE writes them, of a few hundred bullets, edited


def ace_text(rng):
    words = [
        "revenue",
        "margin",
        "total",
        "filing",
        "tag",
        "decimal",
        "share",
        "debt",
        "cash",
        "flow",
        "[units]",
        "::",
        "##",
        "5",
        "%",
        "€",
        "数字",
        "ערך",
    ]
    out, number = [], 0
    counted = rng.random() < 0.5
    for section, slug in SECTIONS.items():
        out.append(f"## {section}")
        for _ in range(rng.randrange(30, 60)):
            number += rng.randrange(1, 3)
            content = " ".join(rng.choice(words) for _ in range(rng.randrange(3, 25)))
            if rng.random() < 0.1:
                content += "\n  " + rng.choice(words)
            counters = f" helpful={rng.randrange(30)} harmful={rng.randrange(9)} ::" if counted else ""
            out.append(f"[{slug}-{number:05d}]{counters} {content}")
            if rng.random() < 0.05:
                out.append("a note: " + "".join(rng.choices(string.printable.replace("\n", ""), k=9)))
        out.append("")
    return "\n".join(out)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.data())
def test_edited_ace_playbooks_lose_nothing(seed, data):
    rng = random.Random(seed)
    text = ace_text(rng)
    book = Playbook.from_text(text)
    assert len(book) >= 210
    expected = {item.id: (item.content, item.helpful, item.harmful) for item in book}
    notes = [entry for entry in book.entries if isinstance(entry, TextLine)]
    given_out = set(expected)
    for turn in range(3):
        chosen = rng.sample(sorted(expected), 9)
        new = data.draw(st.lists(contents, min_size=3, max_size=3))
        deltas = [Update(chosen[0], new[0]), Update(chosen[1], new[1]), Remove(chosen[2])]
        deltas += [Merge(tuple(chosen[3:6]), new[2]), Remove(chosen[6])]
        deltas += [
            Add("context_clues_and_indicators", f"turn {turn}, lesson {number}: {new[0]}") for number in range(2)
        ]
        tags = [(chosen[7], "helpful")] * 40 + [(chosen[8], "harmful")] * 3
        report = book.tag(tags).playbook.apply(deltas)
        assert report.refused == report.conflicts == ()

        expected[chosen[7]] = (expected[chosen[7]][0], expected[chosen[7]][1] + 40, expected[chosen[7]][2])
        expected[chosen[8]] = (*expected[chosen[8]][:2], expected[chosen[8]][2] + 3)
        expected[chosen[0]] = (new[0], *expected[chosen[0]][1:])
        expected[chosen[1]] = (new[1], *expected[chosen[1]][1:])
        merged = [expected.pop(name) for name in chosen[3:6]]
        kept = report.applied[3].bullet_id
        assert kept in chosen[3:6]
        expected[kept] = (new[2], sum(item[1] for item in merged), sum(item[2] for item in merged))
        del expected[chosen[2]], expected[chosen[6]]
        for item, delta in zip(report.applied[5:], deltas[5:], strict=True):
            assert item.bullet_id not in given_out
            given_out.add(item.bullet_id)
            expected[item.bullet_id] = (delta.content, 0, 0)

        form = data.draw(st.sampled_from(["text", "json", "block"]))
        if form == "text":
            book = Playbook.from_text(report.playbook.to_text())
        elif form == "json":
            book = Playbook.from_json(report.playbook.to_json())
        else:
            book = detach(attach("Answer.", report.playbook))[1]
        assert {item.id: (item.content, item.helpful, item.harmful) for item in book} == expected
        assert [entry for entry in book.entries if isinstance(entry, TextLine)] == notes
    assert {item.id for item in Playbook.from_text(text)} <= given_out


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_delta_ends_in_one_place(data):
    book = Playbook(entries=tuple(Bullet(f"a-{number}", "A", f"c{number}") for number in range(1, 6)))
    some = st.sampled_from(["a-1", "a-2", "a-3", "a-4", "a-9"])
    support = st.lists(st.sampled_from(["r1", "r2", "r3"]), max_size=3).map(tuple)
    text = st.sampled_from(["x", "y", "c1", " "])
    deltas = data.draw(
        st.lists(
            st.one_of(
                st.builds(Add, st.just("A"), text, support),
                st.builds(Update, some, text, support),
                st.builds(Merge, st.lists(some, max_size=4).map(tuple), text, support),
                st.builds(Remove, some),
            ),
            max_size=10,
        )
    )
    resolve = data.draw(st.sampled_from([None, lambda _, updates: " + ".join(item.content for item in updates)]))
    report = book.apply(deltas, resolve)
    applied = [item.index for item in report.applied]
    refused = [item.index for item in report.refused]
    dropped = {index for item in report.conflicts for index in item.dropped}
    assert sorted([*applied, *refused, *dropped]) == list(range(len(deltas)))
    assert not {"a-5"} - {item.id for item in report.playbook}

    # But for the numbers of new ids, the order of a batch does not matter.
    order = data.draw(st.permutations(range(len(deltas))))
    other = book.apply([deltas[index] for index in order], resolve)

    def seen(playbook):
        old = {item.id for item in book}
        return sorted((item.id * (item.id in old), item.content, sorted(item.reflection_ids)) for item in playbook)

    assert seen(other.playbook) == seen(report.playbook)
