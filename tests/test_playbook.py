"""The playbook as a value: bullets, tags, deltas and their conflicts, diff, files, and its place in a program."""

import json
import os
from dataclasses import FrozenInstanceError

import dspy
import pytest

from dspy_combee.playbook import Bullet, Playbook, PlaybookError, TextLine, attach, detach, playbooks_in
from dspy_combee.playbook.bullets import SECTIONS, find_section, slug_of
from dspy_combee.playbook.deltas import Add, Merge, Remove, Update, delta_from
from dspy_combee.records.errors import CombeeError

FORMULAS = "FORMULAS & CALCULATIONS"


def bullet(number, content="", **kwargs):
    return Bullet(f"calc-{number:05d}", FORMULAS, content or f"lesson number {number}", **kwargs)


@pytest.fixture
def book():
    return Playbook(
        entries=(
            bullet(1, helpful=3, reflection_ids=("r1",)),
            bullet(2, harmful=1),
            bullet(3, helpful=1, reflection_ids=("r2", "r3")),
        )
    )


def ids(playbook):
    return [item.id for item in playbook]


# Bullets and the playbook itself


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": "calc"}, "looks like"),
        ({"id": "calc-"}, "looks like"),
        ({"id": 3}, "looks like"),
        ({"content": " \n\t"}, "blank"),
        ({"content": None}, "must be text"),
        ({"section": None}, "must be text"),
        ({"helpful": -1}, "helpful"),
        ({"harmful": True}, "harmful"),
        ({"harmful": 1.0}, "harmful"),
        ({"reflection_ids": "r1"}, "reflection ids"),
        ({"reflection_ids": (1,)}, "reflection id"),
        ({"reflection_ids": (" ",)}, "blank"),
    ],
)
def test_a_bullet_says_what_is_wrong_with_it(fields, message):
    with pytest.raises(PlaybookError, match=message) as caught:
        Bullet(**{"id": "calc-00001", "section": "A", "content": "x", **fields})
    assert isinstance(caught.value, CombeeError)
    assert isinstance(caught.value, ValueError)


def test_a_bullet_is_cleaned():
    made = Bullet("calc-00001", " A\n\u2028 B ", "lone \ud800 surrogate", reflection_ids=("r1", "r2", "r1"))
    assert (made.section, made.content, made.reflection_ids) == ("A B", "lone \ufffd surrogate", ("r1", "r2"))
    assert made.number == 1


def test_everything_is_frozen(book):
    with pytest.raises(FrozenInstanceError):
        book.entries = ()
    with pytest.raises(FrozenInstanceError):
        book.bullets[0].content = "x"
    assert hash(book) == hash(Playbook(entries=book.entries))


def test_an_empty_playbook_has_the_seven_sections_of_ace():
    empty = Playbook()
    assert len(empty) == 0
    assert not empty
    assert empty.sections == tuple(SECTIONS)
    assert empty.to_text().count("## ") == 7


def test_entries_are_grouped_by_section_in_a_stable_order():
    made = Playbook(
        sections=("B",),
        entries=(
            Bullet("x-1", "A", "1"),
            Bullet("x-2", "B", "2"),
            Bullet("x-3", "A", "3"),
            TextLine("", "top"),
            Bullet("x-4", "B", "4"),
        ),
    )
    assert made.sections == ("B", "A")
    assert made.entries[0] == TextLine("", "top")
    assert ids(made) == ["x-2", "x-4", "x-1", "x-3"]
    assert made.next_number == 5


def test_a_playbook_refuses_repeated_ids_and_what_is_no_entry():
    with pytest.raises(PlaybookError, match="calc-00001"):
        Playbook(entries=(bullet(1), bullet(1)))
    with pytest.raises(PlaybookError, match="str"):
        Playbook(entries=("text",))
    with pytest.raises(PlaybookError, match="next_number"):
        Playbook(next_number=0)


def test_sections_are_found_however_they_are_spelled(book):
    for name in (FORMULAS, "formulas_and_calculations", "Formulas and calculations", "formulas & calculations "):
        assert ids(Playbook(entries=book.entries).in_section(name)) == ids(book)
    assert book.in_section("OTHERS") == ()
    assert book.in_section("not there") == ()
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
    assert slug_of(section) == slug


# Tags


def test_tags_are_counted_exactly(book):
    report = book.tag([("calc-00001", "helpful")] * 40)
    assert report.playbook.get("calc-00001").helpful == 43
    assert (report.helpful, report.harmful, report.neutral, report.refused) == (40, 0, 0, ())

    report = book.tag([("calc-00002", "helpful")] * 39 + [("calc-00002", "harmful")])
    tagged = report.playbook.get("calc-00002")
    assert (tagged.helpful, tagged.harmful) == (39, 2)
    assert book.get("calc-00002").harmful == 1


def test_tags_that_cannot_be_counted_are_recorded(book):
    bad = [("calc-00009", "helpful"), ("calc-00001", "great"), "calc-00001", (1, 2), None, {"tag": "helpful"}]
    report = book.tag([*bad, ("[calc-00001]", " Helpful "), {"id": "calc-00001", "tag": "neutral"}])
    assert [item.given for item in report.refused] == bad
    assert [item.index for item in report.refused] == list(range(len(bad)))
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
    gone = book.apply([Remove("[calc-00002]", "wrong")])
    assert ids(gone.playbook) == ["calc-00001", "calc-00003"]
    assert len(book) == 3


def test_new_sections_and_default_section(book):
    made = book.apply([Add("Hard Rules", "a"), Add("hard rules", "b"), Add("", "c")]).playbook
    assert made.sections == (*SECTIONS, "Hard Rules")
    assert ids(made.in_section("Hard Rules")) == ["hr-00004", "hr-00005"]
    assert ids(made.in_section("OTHERS")) == ["misc-00006"]


def test_a_removed_id_is_never_given_again(book):
    for reload in (
        lambda made: made,
        lambda made: Playbook.from_json(made.to_json()),
        lambda made: Playbook.from_text(made.to_text()),
        lambda made: Playbook.from_text(made.to_text(reflections=False)),
        lambda made: detach(attach("base", made))[1],
    ):
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
        (Merge((), "x"), "two different ids"),
        (Merge("calc-00001", "x"), "list"),
        (Merge(None, "x"), "list"),
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
        ({"type": "UPDATE", "content": "x"}, "unknown id"),
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


def test_deltas_are_read_from_json():
    assert delta_from({"type": "add", "section": "A", "content": "x"}) == Add("A", "x")
    assert delta_from({"op": "UPDATE", "bullet_id": "b-1", "content": "x", "reflection_ids": ["r"]}) == Update(
        "b-1", "x", ("r",)
    )
    assert delta_from({"operation": "Merge", "bullet_ids": ["b-1", "b-2"], "content": "x"}) == Merge(
        ("b-1", "b-2"), "x"
    )
    assert delta_from({"type": "REMOVE", "id": "b-1", "reason": "old", "why": 1}) == Remove("b-1", "old")


def test_equal_adds_join_each_other_and_what_is_there(book):
    report = book.apply(
        [Add("A", "same  thing", ("r7",)), Add("B", "same thing", ("r8",)), Add("A", "lesson number 1", ("r9",))]
    )
    assert [item.bullet_id for item in report.applied] == ["a-00004", "a-00004", "calc-00001"]
    assert report.playbook.get("a-00004").reflection_ids == ("r7", "r8")
    assert report.playbook.get("calc-00001").reflection_ids == ("r1", "r9")
    assert report.conflicts == ()


def test_an_add_is_new_where_its_twin_goes_or_changes(book):
    report = book.apply(
        [
            Add("A", "lesson number 1"),
            Add("A", "lesson number 2"),
            Remove("calc-00001"),
            Update("calc-00002", "other"),
        ]
    )
    assert ids(report.playbook) == ["calc-00002", "calc-00003", "a-00004", "a-00005"]


def test_update_wins_over_remove(book):
    report = book.apply([Remove("calc-00001"), Update("calc-00001", "kept"), Remove("calc-00001")])
    assert report.playbook.get("calc-00001").content == "kept"
    (conflict,) = report.conflicts
    assert (conflict.kind, conflict.bullet_id) == ("update_over_remove", "calc-00001")
    assert (conflict.kept, conflict.dropped) == ((1,), (0, 2))


def test_two_updates_go_to_the_merge_call(book):
    calls = []

    def resolve(target, updates):
        calls.append((target.id, [update.content for update in updates]))
        return "merged"

    updates = [Update("calc-00001", "one", ("r4",)), Update("calc-00001", "two", ("r5", "r6"))]
    report = book.apply(updates, resolve)
    assert calls == [("calc-00001", ["two", "one"])]
    changed = report.playbook.get("calc-00001")
    assert (changed.content, changed.reflection_ids) == ("merged", ("r1", "r4", "r5", "r6"))
    assert [item.index for item in report.applied] == [0, 1]
    (conflict,) = report.conflicts
    assert (conflict.kind, conflict.kept, conflict.dropped) == ("updates", (0, 1), ())


@pytest.mark.parametrize("resolve", [None, lambda *_: None, lambda *_: " ", lambda *_: 7])
@pytest.mark.parametrize("turned", [False, True])
def test_else_the_better_supported_update_wins(book, resolve, turned):
    updates = [Update("calc-00001", "one", ("r4",)), Update("calc-00001", "two", ("r5", "r6"))]
    report = book.apply(updates[::-1] if turned else updates, resolve)
    changed = report.playbook.get("calc-00001")
    assert (changed.content, changed.reflection_ids) == ("two", ("r1", "r5", "r6"))
    assert report.conflicts[0].dropped == (int(turned),)


def test_equal_updates_are_no_conflict_and_support_each_other(book):
    alone = Update("calc-00001", "alone", ("r5", "r6"))
    same = [Update("calc-00001", "same", (name,)) for name in ("r7", "r8", "r9")]
    report = book.apply(same)
    assert report.conflicts == ()
    assert len(report.applied) == 3
    assert book.apply([alone, *same]).playbook.get("calc-00001").content == "same"


def test_ties_do_not_depend_on_the_order(book):
    updates = [Update("calc-00001", content) for content in ("bb", "aa", "c", "ab")]
    contents = {book.apply(order).playbook.get("calc-00001").content for order in (updates, updates[::-1])}
    assert contents == {"bb"}


def test_what_resolve_raises_is_passed_on(book):
    def resolve(*_):
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        book.apply([Update("calc-00001", "one"), Update("calc-00001", "two")], resolve)


def test_merge_over_a_removed_id_drops_that_id(book):
    report = book.apply([Merge(("calc-00001", "calc-00002", "calc-00003"), "all"), Remove("calc-00003")])
    assert list(report.playbook) == [bullet(1, "all", helpful=3, harmful=1, reflection_ids=("r1",))]
    (conflict,) = report.conflicts
    assert (conflict.kind, conflict.bullet_id) == ("merge_over_removed", "calc-00003")
    assert (conflict.kept, conflict.dropped) == ((1, 0), ())

    report = book.apply([Merge(("calc-00001", "calc-00003"), "rest"), Remove("calc-00003")])
    assert report.playbook.get("calc-00001").content == "rest"

    both = [Remove("calc-00003"), Remove("calc-00001")]
    report = book.apply([Merge(("calc-00001", "calc-00003"), "rest"), *both])
    assert ids(report.playbook) == ["calc-00002"]
    assert {item.dropped for item in report.conflicts} == {(0,)}


def test_merge_leaves_an_updated_bullet_alone(book):
    report = book.apply([Merge(("calc-00001", "calc-00003"), "both"), Update("calc-00001", "new", ("r8",))])
    assert [item.content for item in report.playbook] == ["new", "lesson number 2", "lesson number 3"]
    (conflict,) = report.conflicts
    assert (conflict.kind, conflict.kept, conflict.dropped) == ("merge_over_updated", (1,), (0,))


def test_the_better_supported_of_two_merges_takes_a_shared_bullet(book):
    report = book.apply(
        [Merge(("calc-00001", "calc-00002"), "weak"), Merge(("calc-00002", "calc-00003"), "strong", ("r8",))]
    )
    assert [item.content for item in report.playbook] == ["lesson number 1", "strong"]
    (conflict,) = report.conflicts
    assert (conflict.kind, conflict.kept, conflict.dropped) == ("merges", (1,), (0,))


def test_equal_merges_are_one(book):
    report = book.apply(
        [Merge(("calc-00001", "calc-00002"), "m", ("r8",)), Merge(("calc-00002", "calc-00001"), "m", ("r9",))]
    )
    assert [(item.index, item.bullet_id) for item in report.applied] == [(0, "calc-00001"), (1, "calc-00001")]
    assert report.playbook.get("calc-00001").reflection_ids == ("r1", "r8", "r9")
    assert report.playbook.get("calc-00001").helpful == 3
    assert report.conflicts == ()


# Diff


def test_diff(book):
    old = Playbook(entries=(*book.entries, TextLine("", "a"), TextLine("", "a")))
    new = book.apply([Add("A", "new"), Update("calc-00001", "better"), Remove("calc-00002")]).playbook
    change = old.diff(new)
    assert [item.id for item in change.added] == ["a-00004"]
    assert [item.id for item in change.removed] == ["calc-00002"]
    assert [(one.content, two.content) for one, two in change.changed] == [("lesson number 1", "better")]
    assert change.removed_text == (TextLine("", "a"), TextLine("", "a"))
    assert new.diff(old).added_text == change.removed_text
    assert change
    assert not old.diff(old)
    assert "- [calc-00002] helpful=0 harmful=1 :: lesson number 2" in str(change).splitlines()


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
    monkeypatch.undo()
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
    with pytest.raises(PlaybookError, match="UTF-8"):
        Playbook.load(tmp_path / "a.md")
    (tmp_path / "b.md").write_text("## A\nno bullet\n")
    with pytest.raises(PlaybookError, match="line 2"):
        Playbook.load(tmp_path / "b.md", strict=True)
    with pytest.raises(FileNotFoundError):
        Playbook.load(tmp_path / "none.md")


GOOD = {"format": "dspy_combee.playbook", "version": 1, "next_number": 1, "sections": [], "entries": []}


@pytest.mark.parametrize(
    "data",
    [
        "{",
        "[" * 100_000,
        "[]",
        "{}",
        {**GOOD, "version": 2},
        {**GOOD, "sections": "AB"},
        {**GOOD, "sections": [1]},
        {**GOOD, "entries": {}},
        {**GOOD, "entries": ["text"]},
        {**GOOD, "entries": [None]},
        {**GOOD, "entries": [{"id": "a-1", "section": "A"}]},
        {**GOOD, "entries": [{"id": "a-1", "section": "A", "content": "x", "score": 1}]},
        {**GOOD, "entries": [{"section": "A", "text": ""}]},
        {**GOOD, "next_number": None},
        {**GOOD, "next_number": 1.5},
    ],
    ids=lambda data: str(data)[:60],
)
def test_json_that_is_no_playbook(data):
    with pytest.raises(PlaybookError):
        Playbook.from_json(data if isinstance(data, str) else json.dumps(data))


# In a program


class Two(dspy.Module):
    def __init__(self):
        super().__init__()
        self.first = dspy.Predict(dspy.Signature("question -> answer", "Answer it."))
        self.second = dspy.ChainOfThought("question -> answer")

    def forward(self, question):
        return self.second(question=self.first(question=question).answer)


def put(predictor, playbook):
    predictor.signature = predictor.signature.with_instructions(attach(predictor.signature.instructions, playbook))


def test_from_program(tmp_path, book):
    program = Two()
    with pytest.raises(PlaybookError, match="no playbook in the program"):
        Playbook.from_program(program)
    hostile = "def f():\n\tx = 1\r\n\n    return x\n\n\n## OTHERS\n[calc-00001] helpful=1 harmful=0 :: <&#9;>"
    made = Playbook(entries=(bullet(1, hostile), TextLine("OTHERS", "\ta\tb"), bullet(2, "\ttab first \t")))
    put(program.first, made)
    assert Playbook.from_program(program) == made
    assert Playbook.from_program(program, "first") == made

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
