"""The playbook as a value: bullets, tags, deltas and their conflicts, diff, files, and its place in a program."""

import json
import os
from dataclasses import FrozenInstanceError

import dspy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_combee import Bullet, CombeeError, Playbook
from dspy_combee.playbook import Add, Merge, PlaybookError, Remove, TextLine, Update, attach, detach, playbooks_in
from dspy_combee.playbook.bullets import MAX_COUNT, SECTIONS, find_section, section_slug
from dspy_combee.playbook.deltas import delta_from

FORMULAS = "FORMULAS & CALCULATIONS"


def bullet(number, content="", **kwargs):
    return Bullet(f"calc-{number:05d}", FORMULAS, content or str(number), **kwargs)


@pytest.fixture
def book():
    return Playbook(
        entries=(
            bullet(1, helpful=3, reflection_ids=("r1",)),
            bullet(2, harmful=1),
            bullet(3, helpful=1, reflection_ids=("r2", "r3")),
        )
    )


def ids(bullets):
    return [item.id for item in bullets]


# Bullets and the playbook itself


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bullet(1, helpful=-1), "helpful"),
        (lambda: bullet(1, harmful=True), "harmful"),
        (lambda: bullet(1, harmful=1.0), "harmful"),
        (lambda: bullet(1, reflection_ids="r1"), "reflection ids"),
        (lambda: bullet(1, reflection_ids=(1,)), "reflection id"),
        (lambda: bullet(1, reflection_ids=(" ",)), "blank"),
        (lambda: bullet(1, " \n\t"), "blank"),
        (lambda: Bullet("calc-1", "A", None), "must be text"),
        (lambda: Bullet("calc-1", None, "x"), "must be text"),
        (lambda: Bullet("calc", "A", "x"), "looks like"),
        (lambda: Bullet("calc-", "A", "x"), "looks like"),
        (lambda: Bullet(3, "A", "x"), "looks like"),
        (lambda: TextLine("A", " "), "not blank"),
        (lambda: TextLine("A", "a\nb"), "one line"),
        (lambda: Playbook(entries=(bullet(1), bullet(1))), "more than once: calc-00001"),
        (lambda: Playbook(entries=("text",)), "not str"),
        (lambda: Playbook(next_number=0), "next_number"),
    ],
)
def test_what_is_malformed_is_an_error_that_says_so(make, message):
    with pytest.raises(PlaybookError, match=message) as caught:
        make()
    assert isinstance(caught.value, CombeeError)
    assert isinstance(caught.value, ValueError)


def test_a_bullet_is_cleaned():
    made = Bullet("calc-00001", " A\n\u2028 B ", "lone \ud800 surrogate", reflection_ids=("r1", "r2", "r1"))
    assert (made.section, made.content, made.reflection_ids) == ("A B", "lone \ufffd surrogate", ("r1", "r2"))


def test_everything_is_frozen(book):
    for value, name in ((book, "entries"), (book.bullets[0], "content")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, ())
    assert hash(book) == hash(Playbook(entries=book.entries))


def test_an_empty_playbook_has_the_seven_sections_of_ace():
    empty = Playbook()
    assert not empty
    assert empty.sections == tuple(SECTIONS)
    assert empty.to_text().count("## ") == 7


def test_entries_are_grouped_by_section_in_a_stable_order():
    bullets = (Bullet("x-1", "A", "1"), Bullet("x-2", "B", "2"), Bullet("x-3", "A", "3"), Bullet("x-4", "B", "4"))
    made = Playbook(("B",), (*bullets, TextLine("", "top")))
    assert made.sections == ("B", "A")
    assert made.entries == (TextLine("", "top"), bullets[1], bullets[3], bullets[0], bullets[2])
    assert made.next_number == 5


def test_sections_are_found_however_they_are_spelled(book):
    for name in (FORMULAS, "formulas_and_calculations", "Formulas and calculations", "formulas & calculations "):
        assert book.in_section(name) == book.bullets
    assert book.in_section("OTHERS") == book.in_section("not there") == ()
    assert find_section("my Section", ("My section",)) == "My section"
    assert find_section("", ()) == "OTHERS"
    # Marks that are no letters still tell sections apart.
    assert find_section("कि", ("का",)) == "कि"


@pytest.mark.parametrize(
    ("section", "slug"),
    [
        *SECTIONS.items(),
        ("problem_solving_heuristics", "prob"),
        ("STRATEGIES AND HARD RULES", "shr"),
        ("VERIFICATION CHECKLIST", "vc"),
        ("Meta", "meta"),
        ("Été 2024", "ete"),
        ("数字", "misc"),
        ("### $", "misc"),
    ],
)
def test_slugs(section, slug):
    assert section_slug(section) == slug


# Tags


def test_tags_are_counted_exactly(book):
    report = book.tag([("calc-00001", "helpful")] * 40)
    assert report.playbook.get("calc-00001").helpful == 43
    assert (report.helpful, report.harmful, report.neutral, report.refused) == (40, 0, 0, ())
    tagged = book.tag([("calc-00002", "helpful")] * 39 + [("calc-00002", "harmful")]).playbook.get("calc-00002")
    assert (tagged.helpful, tagged.harmful) == (39, 2)
    assert book.get("calc-00002").harmful == 1


def test_tags_that_cannot_be_counted_are_recorded(book):
    bad = [("calc-00009", "helpful"), ("calc-00001", "great"), "calc-00001", (1, 2), None, {"tag": "helpful"}]
    report = book.tag([*bad, ("[calc-00001]", " Helpful "), {"id": "calc-00001", "tag": "neutral"}])
    assert [(item.index, item.given) for item in report.refused] == list(enumerate(bad))
    assert "unknown id 'calc-00009'" in report.refused[0].reason
    assert "unknown tag 'great'" in report.refused[1].reason
    assert (report.helpful, report.neutral) == (1, 1)
    assert report.playbook.get("calc-00001").helpful == 4


# Deltas


def test_each_operation(book):
    report = book.apply(
        [
            Add("Formulas & Calculations", "new", ("r9",)),
            Update("calc-00001", "better", ("r4",)),
            Merge(("calc-00002", "calc-00003"), "both", ("r5",)),
        ]
    )
    assert [item.bullet_id for item in report.applied] == ["calc-00004", "calc-00001", "calc-00003"]
    assert report.refused == report.conflicts == ()
    assert list(report.playbook) == [
        bullet(1, "better", helpful=3, reflection_ids=("r1", "r4")),
        bullet(3, "both", helpful=1, harmful=1, reflection_ids=("r2", "r3", "r5")),
        bullet(4, "new", reflection_ids=("r9",)),
    ]
    assert ids(book.apply([Remove("[calc-00002]", "wrong")]).playbook) == ["calc-00001", "calc-00003"]
    assert len(book) == 3


def test_new_sections_and_default_section(book):
    made = book.apply([Add("Hard Rules", "a"), Add("hard rules", "b"), Add("", "c")]).playbook
    assert made.sections == (*SECTIONS, "Hard Rules")
    assert ids(made.in_section("Hard Rules")) == ["hr-00004", "hr-00005"]
    assert ids(made.in_section("OTHERS")) == ["misc-00006"]


@pytest.mark.parametrize(
    "reload",
    [
        lambda made: made,
        lambda made: Playbook.from_json(made.to_json()),
        lambda made: Playbook.from_text(made.to_text()),
        lambda made: detach(attach("base", made))[1],
    ],
)
def test_a_removed_id_is_never_given_again(book, reload):
    made = reload(book.apply([Remove("calc-00003")]).playbook)
    made = reload(made.apply([Remove("calc-00002"), Remove("calc-00001")]).playbook)
    assert ids(made.apply([Add(FORMULAS, "new")]).playbook) == ["calc-00004"]


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        (Update("calc-00009", "x"), "unknown id 'calc-00009'"),
        (Remove("calc-00009"), "unknown id"),
        (Remove(None), "unknown id"),
        (Remove(["calc-00001"]), "unknown id"),
        (Merge(("calc-00001", "calc-00009"), "x"), "unknown id 'calc-00009'"),
        (Merge(("calc-00001", "calc-00001"), "x"), "two different ids"),
        (Merge("calc-00001", "x"), "list"),
        (Add("A", " \n"), "empty"),
        (Update("calc-00001", ""), "empty"),
        (Merge(("calc-00001", "calc-00002"), "\t"), "empty"),
        (Add("A", None), "must be text"),
        (Add(7, "x"), "must be text"),
        (Add("A", "x", "r1"), "reflection ids"),
        ({"type": "RENAME", "id": "calc-00001"}, "unknown operation 'RENAME'"),
        ({"content": "x"}, "unknown operation None"),
        ({"type": ["ADD"]}, "unknown operation"),
        ({"type": "ADD"}, "empty"),
        ({"type": "MERGE", "ids": 3, "content": "x"}, "list"),
        ("ADD something", "not str"),
        (None, "not NoneType"),
    ],
)
def test_what_is_not_valid_is_refused_and_recorded(book, delta, reason):
    report = book.apply([delta, Add("A", "fine")])
    assert [(item.index, item.given) for item in report.refused] == [(0, delta)]
    assert reason in report.refused[0].reason
    assert len(report.playbook) == 4


@pytest.mark.parametrize(
    ("plain", "delta"),
    [
        ({"type": "add", "section": "A", "content": "x"}, Add("A", "x")),
        ({"op": "UPDATE", "bullet_id": "b-1", "content": "x", "reflection_ids": ["r"]}, Update("b-1", "x", ("r",))),
        ({"operation": "Merge", "bullet_ids": ["b-1", "b-2"], "content": "x"}, Merge(("b-1", "b-2"), "x")),
        ({"type": "REMOVE", "id": "b-1", "reason": "old", "why": 1}, Remove("b-1", "old")),
    ],
)
def test_deltas_are_read_from_json(plain, delta):
    assert delta_from(plain) == delta


def test_equal_adds_join_each_other_and_what_stands(book):
    report = book.apply(
        [
            Add("A", "same  thing", ("r7",)),
            Add("B", "same thing", ("r8",)),
            Add("A", "3", ("r9",)),
            Add("A", "1"),  # This twin goes, the next one changes.
            Add("A", "2"),
            Remove(ONE),
            Update(TWO, "other"),
        ]
    )
    made = [item.bullet_id for item in report.applied[:5]]
    assert made == ["a-00004", "a-00004", THREE, "a-00005", "a-00006"]
    assert report.playbook.get("a-00004").reflection_ids == ("r7", "r8")
    assert report.playbook.get(THREE).reflection_ids == ("r2", "r3", "r9")
    assert report.conflicts == ()


ONE, TWO, THREE = "calc-00001", "calc-00002", "calc-00003"
CONFLICTS = [
    ([Remove(ONE), Update(ONE, "a"), Remove(ONE)], "a 2 3", [("update_over_remove", ONE, (1,), (0, 2))]),
    # Of UPDATEs those with more reflections win, then the longer one, then the later in text order.
    ([Update(ONE, "long", ("r4",)), Update(ONE, "a", ("r5", "r6"))], "a 2 3", [("updates", ONE, (1,), (0,))]),
    (
        [Update(ONE, "a", ("r5", "r6")), *(Update(ONE, "b", (r,)) for r in "xyz")],
        "b 2 3",
        [("updates", ONE, (1, 2, 3), (0,))],
    ),
    ([Update(ONE, text) for text in ("bb", "aa", "c", "ab")], "bb 2 3", [("updates", ONE, (0,), (3, 1, 2))]),
    ([Update(ONE, "a"), Update(ONE, "a")], "a 2 3", []),
    # A MERGE drops an id that is removed, and rewrites what is left.
    ([Merge((ONE, TWO, THREE), "m"), Remove(THREE)], "m", [("merge_over_removed", THREE, (1, 0), ())]),
    ([Merge((ONE, THREE), "m"), Remove(THREE)], "m 2", [("merge_over_removed", THREE, (1, 0), ())]),
    (
        [Merge((ONE, THREE), "m"), Remove(THREE), Remove(ONE)],
        "2",
        [("merge_over_removed", ONE, (2,), (0,)), ("merge_over_removed", THREE, (1,), (0,))],
    ),
    # It does nothing where the bullets live on elsewhere.
    ([Merge((ONE, THREE), "m"), Update(ONE, "a")], "a 2 3", [("merge_over_updated", ONE, (1,), (0,))]),
    ([Merge((ONE, TWO), "m"), Merge((TWO, THREE), "n", ("r8",))], "1 n", [("merges", TWO, (1,), (0,))]),
    ([Merge((ONE, TWO), "m"), Merge((TWO, ONE), "m")], "m 3", []),
]


@pytest.mark.parametrize(("deltas", "contents", "conflicts"), CONFLICTS)
def test_conflicts_of_a_batch(book, deltas, contents, conflicts):
    report = book.apply(deltas)
    assert " ".join(item.content for item in report.playbook) == contents
    assert [(item.kind, item.bullet_id, item.kept, item.dropped) for item in report.conflicts] == conflicts
    assert " ".join(item.content for item in book.apply(deltas[::-1]).playbook) == contents


def test_reflections_follow_what_took_effect(book):
    deltas = [Update(ONE, "one", ("r4",)), Update(ONE, "two", ("r5", "r6"))]
    assert book.apply(deltas).playbook.get(ONE).reflection_ids == ("r1", "r5", "r6")
    merged = book.apply([Merge((ONE, TWO), "m", ("r8",)), Merge((TWO, ONE), "m", ("r9",))])
    assert [(item.index, item.bullet_id) for item in merged.applied] == [(0, ONE), (1, ONE)]
    assert merged.playbook.get(ONE) == bullet(1, "m", helpful=3, harmful=1, reflection_ids=("r1", "r8", "r9"))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_delta_ends_in_one_place_whatever_the_order(data):
    book = Playbook(entries=tuple(Bullet(f"a-{number}", "A", f"c{number}") for number in range(1, 6)))
    some = st.sampled_from(["a-1", "a-2", "a-3", "a-4", "a-9"])
    support = st.lists(st.sampled_from(["r1", "r2", "r3"]), max_size=3).map(tuple)
    text = st.sampled_from(["x", "y", "c1", " "])
    operation = st.one_of(
        st.builds(Add, st.just("A"), text, support),
        st.builds(Update, some, text, support),
        st.builds(Merge, st.lists(some, max_size=4).map(tuple), text, support),
        st.builds(Remove, some),
    )
    deltas = data.draw(st.lists(operation, max_size=10))
    report = book.apply(deltas)
    dropped = {index for item in report.conflicts for index in item.dropped}
    places = [item.index for item in (*report.applied, *report.refused)]
    assert sorted([*places, *dropped]) == list(range(len(deltas)))

    def seen(playbook):  # The numbers of new ids follow the order of the batch.
        return sorted(
            (item.id * (book.get(item.id) is not None), item.content, sorted(item.reflection_ids)) for item in playbook
        )

    other = book.apply(data.draw(st.permutations(deltas)))
    assert seen(other.playbook) == seen(report.playbook)


def test_counters_end_at_their_bound():
    full = [Bullet(f"a-{number}", "A", "the same", MAX_COUNT, 10**40) for number in (1, 2)]
    merged = Playbook(("A",), tuple(full)).apply([Merge(("a-1", "a-2"), "one")]).playbook
    assert merged.bullets == (Bullet("a-1", "A", "one", MAX_COUNT, MAX_COUNT),)
    assert merged.tag([("a-1", "helpful")]).playbook == merged


def test_diff(book):
    old = Playbook(entries=(*book.entries, TextLine("", "a"), TextLine("", "a")))
    new = book.apply([Add("A", "new"), Update(ONE, "better"), Remove(TWO)]).playbook
    change = old.diff(new)
    assert ids(change.added) == ["a-00004"]
    assert change.removed == (book.get(TWO), TextLine("", "a"), TextLine("", "a"))
    assert [(before.content, after.content) for before, after in change.changed] == [("1", "better")]
    assert str(change).splitlines() == [
        "- [calc-00002] helpful=0 harmful=1 :: 2",
        "- a",
        "- a",
        "- [calc-00001] helpful=3 harmful=0 :: 1",
        "+ [calc-00001] helpful=3 harmful=0 :: better",
        "+ [a-00004] helpful=0 harmful=0 :: new",
    ]
    assert new.diff(old).added == change.removed
    assert change
    assert not old.diff(old)


# Files


@pytest.mark.parametrize("name", ["book.json", "book.JSON", "book.md", "book"])
def test_save_and_load(tmp_path, book, name):
    book = Playbook(entries=(*book.entries, Bullet("o-9", "OTHERS", "tab\t cr\r\n nel\x85 \u2028 \ufeff 🙂")))
    book.save(tmp_path / name)
    book.save(str(tmp_path / name))
    assert Playbook.load(tmp_path / name) == book
    assert os.listdir(tmp_path) == [name]


def test_a_failed_save_leaves_the_old_file(tmp_path, book, monkeypatch):
    path = tmp_path / "book.md"
    book.save(path)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        Playbook().save(path)
    assert Playbook.load(path) == book
    assert os.listdir(tmp_path) == ["book.md"]


def test_a_link_stays_a_link(tmp_path, book):
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real" / "book.md", tmp_path / "link.md")
    book.save(tmp_path / "link.md")
    assert (tmp_path / "link.md").is_symlink()
    assert Playbook.load(tmp_path / "real" / "book.md") == book


def test_load_says_what_is_wrong(tmp_path):
    (tmp_path / "a.md").write_bytes(b"\xff\xfe")
    (tmp_path / "b.md").write_text("## A\nno bullet\n")
    with pytest.raises(PlaybookError, match="UTF-8"):
        Playbook.load(tmp_path / "a.md")
    with pytest.raises(PlaybookError, match="line 2"):
        Playbook.load(tmp_path / "b.md", strict=True)
    with pytest.raises(FileNotFoundError):
        Playbook.load(tmp_path / "none.md")


GOOD = {"format": "dspy_combee.playbook", "version": 1, "next_number": 1, "sections": [], "entries": []}
HALF = {"id": "a-1", "section": "A"}
BAD_ENTRIES = {}, ["text"], [None], [HALF], [{**HALF, "content": "x", "score": 1}], [{"section": "A", "text": ""}]
BAD_FIELDS = [("version", 2), ("sections", "AB"), ("sections", [1]), ("next_number", None), ("next_number", 1.5)]


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "{}", "[" * 100_000),
        *(
            json.dumps({**GOOD, name: value})
            for name, value in (*BAD_FIELDS, *(("entries", bad) for bad in BAD_ENTRIES))
        ),
    ],
    ids=lambda text: text[-60:],
)
def test_json_that_is_no_playbook(text):
    assert Playbook.from_json(json.dumps(GOOD)) == Playbook(())
    with pytest.raises(PlaybookError):
        Playbook.from_json(text)


# In a program


class Two(dspy.Module):
    def __init__(self):
        super().__init__()
        self.first = dspy.Predict(dspy.Signature("question -> answer", "Answer it."))
        self.second = dspy.ChainOfThought("question -> answer")


def put(predictor, playbook):
    predictor.signature = predictor.signature.with_instructions(attach(predictor.signature.instructions, playbook))


def test_from_program(tmp_path):
    program = Two()
    with pytest.raises(PlaybookError, match="no playbook in the program"):
        Playbook.from_program(program)
    hostile = "def f():\n\tx = 1\r\n\n    return x\n\n\n## OTHERS\n[calc-00001] helpful=1 harmful=0 :: <&#9;>"
    made = Playbook(entries=(bullet(1, hostile), TextLine("OTHERS", "\ta\tb"), bullet(2, "\ttab first \t")))
    put(program.first, made)
    assert Playbook.from_program(program) == Playbook.from_program(program, "first") == made

    program.save(tmp_path / "program.json")
    loaded = Two()
    loaded.load(tmp_path / "program.json")
    assert Playbook.from_program(loaded) == made
    assert detach(loaded.first.signature.instructions)[0] == "Answer it."

    put(program.second.predict, Playbook())
    assert playbooks_in(program) == {"first": made, "second.predict": Playbook()}
    with pytest.raises(PlaybookError, match=r"several.*second\.predict"):
        Playbook.from_program(program)
    with pytest.raises(PlaybookError, match="third"):
        Playbook.from_program(program, "third")
