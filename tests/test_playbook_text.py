"""The text and JSON forms: whatever is legal comes back, whatever ACE wrote is read, nothing is dropped."""

import inspect
import random
import string
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dspy_combee import Bullet, Playbook
from dspy_combee.playbook import Add, Merge, PlaybookError, Remove, TextLine, Update, attach, detach
from dspy_combee.playbook.bullets import MAX_COUNT, SECTIONS
from dspy_combee.playbook.text import BEGIN, END

# What a content may hold that a reader could trip over. Joined at random with any characters between.
MARKS = "\n\r\t \\[]&:#\x85\u2028\u2029\x0b\x0c\x1c\x00\ufeff\u200f🙂"
LINES = f"""
  indented
::
##
## OTHERS
[calc-00003]
[calc-00003] x
[calc-00003] helpful=1 harmful=0 ::
[calc-00003] helpful=1 harmful=0 :: x
helpful=1 harmful=2 ::
helpful=
<!-- next-id 7 -->
<!-- reflections calc-00003 ["r"] -->
{BEGIN}
{END}
&#13;
&#9;
&#38;#13;
&#38;
#13;
e\u0301 שלום हिन्दी 数字 5 %""".splitlines()
FRAGMENTS = [*MARKS, *LINES, *(f"\n{line}\n" for line in LINES), "\r\n", "  "]
mixed = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=8).map("".join)
contents = mixed.filter(lambda text: text.strip())
lines = mixed.map(lambda text: text.replace("\n", " ")).filter(lambda text: text.strip())
counts = st.integers(0, 10**12)


@st.composite
def playbooks(draw):
    sections = draw(st.lists(st.one_of(st.sampled_from(list(SECTIONS)), lines), max_size=3))
    places = st.sampled_from([*sections, ""])
    slugs = st.sampled_from(["calc", "str", "my-api", "x_1", "été"])
    entries = []
    for number in draw(st.lists(st.integers(0, 10**6), unique=True, max_size=6)):
        entries += [TextLine(draw(places), draw(lines)) for _ in range(draw(st.integers(0, 2)))]
        reflections = tuple(draw(st.lists(contents, max_size=2)))
        fields = draw(places), draw(contents), draw(counts), draw(counts), reflections
        entries.append(Bullet(f"{draw(slugs)}-{number:05d}", *fields))
    return Playbook(tuple(sections), tuple(entries), draw(st.integers(1, 10**7)))


def without_reflections(book):
    entries = (replace(item, reflection_ids=()) if isinstance(item, Bullet) else item for item in book.entries)
    return replace(book, entries=tuple(entries))


quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(playbooks())
def test_every_form_gives_every_playbook_back(book):
    text = book.to_text()
    assert str(book) == text
    assert Playbook.from_text(text) == Playbook.from_text(text.replace("\n", "\r\n")) == book
    assert Playbook.from_json(book.to_json()) == book
    assert Playbook.from_text(book.to_prompt()) == without_reflections(book)
    bare = Playbook(book.sections, book.bullets, book.next_number)
    assert Playbook.from_text(bare.to_text(), strict=True) == bare


@quick
@given(mixed, playbooks())
def test_a_block_is_found_behind_whatever_stands_before_it(base, book):
    text = attach(base, book)
    assert "\t" not in text[len(base) :]
    book = without_reflections(book)
    assert detach(text) == detach(text + " \n") == (base, book)
    assert detach(attach(text, book)) == (text, book)


@quick
@given(st.sampled_from(["", "Answer it.", "Answer.\n\n    Briefly."]), playbooks())
def test_a_block_survives_what_dspy_does_to_instructions(base, book):
    found, playbook = detach(inspect.cleandoc(attach(base, book)))
    assert (found.split(), playbook) == (base.split(), without_reflections(book))


@pytest.mark.parametrize("text", ["", "plain", f"{BEGIN}\n", END, f"x\n{END}", f"{BEGIN}\n## A\n{END}\nmore"])
def test_detach_without_a_block(text):
    assert detach(text) == (text, None)


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


def test_the_form_ace_users_know():
    book = Playbook(
        sections=("FORMULAS & CALCULATIONS", "OTHERS"),
        entries=(
            Bullet("calc-00003", "FORMULAS & CALCULATIONS", "NPV = sum\n\n  of it", 8, 0, ("r1", 'r"2')),
            Bullet("misc-00001", "OTHERS", "a\tb"),
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
        "[misc-00001] helpful=0 harmful=0 :: a\tb\n"
        "\n"
        "<!-- next-id 9 -->\n"
        '<!-- reflections calc-00003 ["r1", "r\\"2"] -->\n'
    )
    assert "reflections" not in book.to_prompt()
    assert "a&#9;b" in book.to_prompt()


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
    kept = [entry.text if isinstance(entry, TextLine) else entry.id for entry in book.entries]
    assert kept == ["calc-00001", line, "calc-00002"]
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


@pytest.mark.parametrize(
    ("line", "following"),
    [
        ("[calc-00012] helpful=x harmful=0 :: broken", 13),
        ("[calc-00012] helpful=3 :: broken", 13),
        ("[calc-00012]", 13),
        ("[calc-00012]: broken", 13),
        ("- [calc-00012] helpful=0 harmful=0 :: a list", 13),
        ("\\[calc-00012] escaped", 13),
        ("see [calc-00012]", 4),
        ("[calc-999999999999999] a number that came from elsewhere", 4),
    ],
)
def test_the_id_of_a_line_that_is_kept_as_text_is_not_given_again(line, following):
    book = Playbook.from_text(f"## FORMULAS & CALCULATIONS\n[calc-00003] ok\n{line}\n")
    assert book.next_number == following
    for read in (
        book,
        Playbook.from_text(book.to_text()),
        Playbook.from_json(book.to_json()),
        Playbook((), book.entries),
    ):
        grown = read.apply([Add("FORMULAS & CALCULATIONS", "new")]).playbook
        assert grown.bullets[-1].id == f"calc-{following:05d}"
        assert Playbook.from_text(grown.to_text()) == grown


@pytest.mark.parametrize("digits", ["9" * 15, "1" + "0" * 15, "9" * 5_000, "0" * 20 + "7"])
def test_counters_of_any_length_are_read_and_end_at_their_bound(digits):
    book = Playbook.from_text(f"## A\n[a-00001] helpful={digits} harmful={digits} :: x\n", strict=True)
    expected = 7 if digits.endswith("7") else MAX_COUNT
    assert [(bullet.helpful, bullet.harmful) for bullet in book] == [(expected, expected)]
    more = book.tag([("a-00001", "helpful")] * 3).playbook
    assert more.get("a-00001").helpful == min(expected + 3, MAX_COUNT)
    assert Playbook.from_text(more.to_text()) == more == Playbook.from_json(more.to_json())


# Playbooks as ACE writes them, of a few hundred bullets, edited


def ace_text(rng):
    words = ["revenue", "margin", "total", "filing", "decimal", "[units]", "::", "##", "5", "%", "€", "数字", "ערך"]
    out, number = [], 0
    counted = rng.random() < 0.5
    for section, slug in SECTIONS.items():
        out.append(f"## {section}")
        for _ in range(rng.randrange(30, 60)):
            number += rng.randrange(1, 3)
            content = " ".join(rng.choices(words, k=rng.randrange(3, 25)))
            if rng.random() < 0.1:
                content += "\n  " + rng.choice(words)
            counters = f" helpful={rng.randrange(30)} harmful={rng.randrange(9)} ::" if counted else ""
            out.append(f"[{slug}-{number:05d}]{counters} {content}")
            if rng.random() < 0.05:
                out.append("a note: " + "".join(rng.choices(string.printable.replace("\n", ""), k=9)))
        out.append("")
    return "\n".join(out)


FORMS = {
    "text": lambda book: Playbook.from_text(book.to_text()),
    "json": lambda book: Playbook.from_json(book.to_json()),
    "block": lambda book: detach(attach("Answer.", book))[1],
}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.data())
def test_edited_ace_playbooks_lose_nothing(seed, data):
    rng = random.Random(seed)
    book = Playbook.from_text(ace_text(rng))
    assert len(book) >= 210
    expected = {item.id: (item.content, item.helpful, item.harmful) for item in book}
    notes = [entry for entry in book.entries if isinstance(entry, TextLine)]
    given_out = set(expected)
    for turn in range(3):
        up1, up2, gone1, gone2, good, bad, *merged = rng.sample(sorted(expected), 9)
        new = data.draw(st.lists(contents, min_size=3, max_size=3))
        added = [Add("context_clues_and_indicators", f"{turn}, {number}: {new[0]}") for number in range(2)]
        deltas = [Update(up1, new[0]), Update(up2, new[1]), Remove(gone1), Remove(gone2), Merge(tuple(merged), new[2])]
        report = book.tag([(good, "helpful")] * 40 + [(bad, "harmful")] * 3).playbook.apply([*deltas, *added])
        assert report.refused == report.conflicts == ()

        def change(name, content=None, helpful=0, harmful=0):
            was = expected[name]
            expected[name] = (content or was[0], was[1] + helpful, was[2] + harmful)

        change(good, helpful=40)
        change(bad, harmful=3)
        change(up1, new[0])
        change(up2, new[1])
        del expected[gone1], expected[gone2]
        kept = report.applied[4].bullet_id
        for name in set(merged) - {kept}:
            change(kept, new[2], *expected.pop(name)[1:])
        for item, delta in zip(report.applied[5:], added, strict=True):
            assert item.bullet_id not in given_out
            given_out.add(item.bullet_id)
            expected[item.bullet_id] = (delta.content, 0, 0)

        book = FORMS[data.draw(st.sampled_from(sorted(FORMS)))](report.playbook)
        assert {item.id: (item.content, item.helpful, item.harmful) for item in book} == expected
        assert [entry for entry in book.entries if isinstance(entry, TextLine)] == notes
