"""The tasks of `dspy_combee.tasks`, with rows made up here, and the real files where they are at hand."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import dspy
import pytest

from dspy_combee.testing import count_tokens, find_lessons
from dspy_combee.testing.finance import parse_number
from dspy_combee.testing.tasks import (
    FINER_FILE,
    FORMULA_FILE,
    Task,
    conventions_task,
    finer_task,
    formula_task,
    shuffled_feedback,
)

DATA = Path(os.environ.get("COMBEE_DATA") or Path(__file__).parents[2] / "shared" / "data")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the finance data is not here (COMBEE_DATA)")


def formula_row(number, name="Quick Ratio", places=2):
    context = (
        f"Use formula {name} to answer the question. Answer with a numerical answer with {places} decimal places and "
        f"with no explanations or other text. Formula: {name} = (Cash + Claims) / Debts, Explanation: Cash: money at "
        f'hand. Question: "A mill has {number} in cash, no claims and debts of 4. What is its quick ratio?". Answer:'
    )
    return {"context": context, "target": str(number / 4)}


TAGS = ["Goodwill", "LongTermDebt", "Revenues", "SharePrice"]


def finer_row(number, tags=TAGS):
    questions = "\n".join(
        f'{i + 1}. What is best tag for entity "{number}.{i}" in sentence: "The firm had $ {number}.{i} of item {i} .?"'
        for i in range(4)
    )
    return {"context": f"Options: ,{','.join(TAGS)}. Answer:\n{questions}\nOutput tags:", "target": ",".join(tags)}


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def formula_file(tmp_path):
    return write(tmp_path / "formula.jsonl", [formula_row(n) for n in range(1, 61)])


@pytest.fixture
def finer_file(tmp_path):
    rows = [finer_row(n, TAGS[n % 4 :] + TAGS[: n % 4]) for n in range(1, 61)]
    return write(tmp_path / "finer.jsonl", rows)


def feedback(task, example, **outputs):
    result = task.metric(example, dspy.Prediction(**outputs), None, "self", None)
    return result.score, result.feedback


class TestConventions:
    def test_sizes_and_disjoint_examples(self):
        task = conventions_task()
        assert [len(split) for split in (task.trainset, task.valset, task.testset)] == [120, 40, 80]
        invoices = [example.invoice for example in (*task.trainset, *task.valset, *task.testset)]
        assert len(set(invoices)) == 240
        assert all(set(example.inputs().keys()) == {"invoice"} for example in task.trainset)

    def test_the_seed_decides_conventions_and_examples(self):
        first, again, other = conventions_task(1), conventions_task(1), conventions_task(2)
        assert [e.toDict() for e in first.trainset] == [e.toDict() for e in again.trainset]
        assert {e.code for e in first.trainset} != {e.code for e in other.trainset}

    def test_heavy_tail(self):
        counts = Counter(example.statement for example in conventions_task().trainset)
        assert counts.most_common(1)[0][1] >= 15
        assert sum(count <= 2 for count in counts.values()) >= 8

    def test_most_answers_cannot_be_read_off_the_invoice(self):
        for seed in range(5):
            task = conventions_task(seed, sizes=(500, 1, 1))
            given = sum(example.code in example.invoice for example in task.trainset)
            assert 30 < given < 120

    def test_a_wrong_answer_is_told_its_convention_and_a_right_one_nothing(self):
        task = conventions_task()
        for example in task.trainset:
            score, told = feedback(task, example, code="1234-ZZ")
            (lesson,) = find_lessons(told)
            assert score == 0.0
            assert lesson.topic in example.invoice
            assert example.code in lesson.statement
            assert "1234-ZZ" in told
            score, told = feedback(task, example, code=f" {example.code.lower()}.")
            assert (score, find_lessons(told)) == (1.0, [])

    @pytest.mark.parametrize("answer", [None, "", "6120", "{code} or 1234-ZZ"])
    def test_no_code_or_several_is_wrong(self, answer):
        task = conventions_task()
        example = task.trainset[0]
        outputs = {} if answer is None else {"code": answer.format(code=example.code)}
        assert feedback(task, example, **outputs)[0] == 0.0

    def test_a_record_is_long_enough_to_drown_in(self):
        task = conventions_task()
        for example in task.trainset[:30]:
            record = {"Inputs": example.inputs().toDict(), "Feedback": feedback(task, example, code="1234-ZZ")[1]}
            assert count_tokens(json.dumps(record)) >= 100

    @pytest.mark.parametrize(
        "arguments", [{"num_lessons": 51}, {"num_lessons": -1}, {"sizes": (1, 0, 1)}, {"sizes": (1, 1)}]
    )
    def test_wrong_arguments(self, arguments):
        with pytest.raises(ValueError, match="must be"):
            conventions_task(**arguments)

    def test_all_or_none_may_have_a_convention(self):
        assert all(e.code.endswith("-00") for e in conventions_task(num_lessons=0).trainset)
        assert not any(e.code.endswith("-00") for e in conventions_task(num_lessons=50).trainset)


class TestShuffledFeedback:
    @pytest.fixture(params=["conventions", "formula", "finer"])
    def task(self, request, formula_file, finer_file):
        builders = {
            "conventions": conventions_task,
            "formula": lambda: formula_task(formula_file),
            "finer": lambda: finer_task(finer_file),
        }
        return builders[request.param]()

    def test_every_example_gets_another_one_s_labels_and_each_label_is_used(self, task):
        control = shuffled_feedback(task)
        for before, after in ((task.trainset, control.trainset), (task.testset, control.testset)):
            own = [example.labels().toDict() for example in before]
            other = [example.other_labels for example in after]
            assert all(a != b for a, b in zip(own, other, strict=True))
            assert Counter(map(str, own)) == Counter(map(str, other))

    def test_scores_stay_and_inputs_too(self, task):
        control = shuffled_feedback(task)
        field = "code" if task.name == "house conventions" else "answer"
        for plain, changed in zip(task.trainset, control.trainset, strict=True):
            assert plain.inputs().toDict() == changed.inputs().toDict()
            right = plain.get("code") or plain.target
            assert feedback(control, changed, **{field: right})[0] == 1.0
            assert feedback(control, changed, **{field: "nothing"})[0] == 0.0

    def test_the_lesson_is_about_the_wrong_thing(self):
        task = conventions_task()
        control = shuffled_feedback(task)
        true = {lesson for e in task.trainset for lesson in find_lessons(feedback(task, e, code="x")[1])}
        told = {lesson for e in control.trainset for lesson in find_lessons(feedback(control, e, code="x")[1])}
        assert told
        assert not told & true
        assert {lesson.topic for lesson in told} == {lesson.topic for lesson in true}

    def test_seeded(self):
        task = conventions_task()
        labels = [[e.other_labels for e in shuffled_feedback(task, seed).trainset] for seed in (0, 0, 1)]
        assert labels[0] == labels[1] != labels[2]

    def test_refuses_what_it_cannot_shuffle(self):
        task = conventions_task()
        same = [task.trainset[0]] * 4
        with pytest.raises(ValueError, match="more than half"):
            shuffled_feedback(Task("t", task.program, task.metric, same, same, same))
        with pytest.raises(TypeError, match="FeedbackMetric"):
            shuffled_feedback(Task("t", task.program, lambda *args: 1.0, same, same, same))


class TestParseNumber:
    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("2.0", 2.0),
            (" 27,432.79 ", 27432.79),
            ("$27,432.79", 27432.79),
            ("€ 5", 5.0),
            ("1,00,000", 100000.0),
            ("27432.79 USD", 27432.79),
            ("8.33 times (rounded to 2 decimal places)", 8.33),
            ("2.00x", 2.0),
            ("The ratio is **1.50**.", 1.5),
            ("5%", 5.0),
            ("-80,000,000.0", -80000000.0),
            ("\u22120.01", -0.01),
            ("-$5", -5.0),
            ("$-5", -5.0),
            ("(5,000.00)", -5000.0),
            ("($5,000)", -5000.0),
            ("(3.5%)", -3.5),
            (".5", 0.5),
            ("5.", 5.0),
            ("1e6", 1000000.0),
            ("9,000 / 1.09 = 8,256.88", 8256.88),
            ("5 million", 5.0),
        ],
    )
    def test_numbers(self, text, number):
        assert parse_number(text) == number

    @pytest.mark.parametrize(
        "text",
        [
            *("", "none", "nan", "inf", "1/2", "5 - 3", "3-5", "1.5 * 10^6", "2 000", "1,23", "1.2.3", "9" * 400),
            *("x2", "for 2023 it is 1.5", "__import__('os').getpid()", "2 ="),
        ],
    )
    def test_no_number(self, text):
        assert parse_number(text) is None


class TestFormula:
    def test_program_splits_and_inputs(self, formula_file):
        task = formula_task(formula_file)
        splits = [task.trainset, task.valset, task.testset]
        assert [len(split) for split in splits] == [30, 10, 20]  # 60 rows, in the proportion 120 : 40 : 80
        assert len({example.context for split in splits for example in split}) == 60
        assert list(task.program.predictors()[0].signature.input_fields) == ["context"]
        assert [e.context for e in formula_task(formula_file, seed=1).testset] != [e.context for e in task.testset]

    def test_validation_from_another_file_never_overlaps(self, formula_file, tmp_path):
        rows = [formula_row(n) for n in range(50, 100)]
        task = formula_task(formula_file, write(tmp_path / "val.jsonl", rows), sizes=(20, 30, 10))
        assert [len(split) for split in (task.trainset, task.valset, task.testset)] == [20, 30, 10]
        assert not {e.context for e in task.valset} & {formula_row(n)["context"] for n in range(1, 61)}

    @pytest.mark.parametrize(
        ("answer", "score"),
        [("0.25", 1), ("$0.25", 1), ("0.2512", 1), ("= 0.254", 1), ("25%", 0), ("0.26", 0), ("-0.25", 0), ("1/4", 0)],
    )
    def test_scored_on_the_number_as_rounded(self, formula_file, answer, score):
        example = dspy.Example(**formula_row(1), statement="x").with_inputs("context")
        assert feedback(formula_task(formula_file), example, answer=answer)[0] == score

    def test_the_question_s_rounding_counts(self, tmp_path):
        path = write(tmp_path / "f.jsonl", [formula_row(n, places=0) for n in range(1, 10)])
        task = formula_task(path)
        example = next(e for e in task.trainset if e.target == e.target.split(".")[0] + ".25")
        assert feedback(task, example, answer=example.target.split(".")[0])[0] == 1.0

    def test_feedback_says_what_was_right_and_why(self, formula_file):
        task = formula_task(formula_file)
        example = task.trainset[0]
        _, told = feedback(task, example, answer="about 12 or 13")
        (lesson,) = find_lessons(told)
        assert example.target in told
        assert "not one number" in told
        assert lesson.topic == "Quick Ratio"
        assert "(Cash + Claims) / Debts" in lesson.statement
        assert feedback(task, example)[0] == 0.0

    def test_rows_of_another_shape_still_work(self, tmp_path):
        rows = [{"context": f"What is {n} plus one?", "target": str(n + 1)} for n in range(9)]
        task = formula_task(write(tmp_path / "f.jsonl", rows))
        assert find_lessons(feedback(task, task.trainset[0], answer="?")[1])


class TestFiner:
    @pytest.mark.parametrize(
        ("answer", "score"),
        [
            ("{0},{1},{2},{3}", 1.0),
            ("{0}, {1}, {2}, {3}", 1.0),
            ("1. {0}\n2. {1}\n3. {2}\n4. {3}", 1.0),
            ("`{0}`,\n`{1}`,\n`{2}`,\n`{3}`", 1.0),
            ("{0},{1},{2},{3},{0}", 1.0),
            ("{0},{1},{2}", 0.75),
            ("{0},,{2},{3}", 0.75),
            ("{1},{0},{2},{3}", 0.5),
            ("{0}", 0.25),
            ("", 0.0),
        ],
    )
    def test_per_tag(self, finer_file, answer, score):
        task = finer_task(finer_file)
        example = task.trainset[0]
        assert feedback(task, example, answer=answer.format(*example.target.split(",")))[0] == score

    def test_feedback_names_what_is_wrong(self, finer_file):
        task = finer_task(finer_file)
        example = task.trainset[0]
        tags = example.target.split(",")
        _, told = feedback(task, example, answer=",".join([tags[0], "Wrong", tags[2]]))
        assert "Question 2: Wrong is wrong" in told
        assert "Question 4: nothing is wrong" in told
        assert [lesson.topic for lesson in find_lessons(told)] == [tags[1], tags[3]]
        assert "of item 1" in find_lessons(told)[0].statement
        assert feedback(task, example)[0] == 0.0
        assert find_lessons(feedback(task, example, answer=example.target)[1]) == []


class TestFiles:
    @pytest.mark.parametrize("build", [formula_task, finer_task])
    def test_a_missing_file_says_how_to_get_it(self, build, tmp_path, monkeypatch):
        monkeypatch.delenv("COMBEE_DATA", raising=False)
        with pytest.raises(FileNotFoundError, match=r"nowhere.*ace-agent/ace.*COMBEE_DATA"):
            build(tmp_path / "nowhere.jsonl")
        with pytest.raises(FileNotFoundError, match="COMBEE_DATA is not set"):
            build()
        with pytest.raises(FileNotFoundError, match="is a folder; expected a file of JSON lines"):
            build(tmp_path)

    def test_the_variable_names_the_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("COMBEE_DATA", str(tmp_path))
        write(tmp_path / FORMULA_FILE, [formula_row(n) for n in range(12)])
        write(tmp_path / FINER_FILE, [finer_row(n) for n in range(12)])
        assert len(formula_task().trainset) == len(finer_task().trainset) == 6

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ("{not json", "not JSON"),
            ("[1, 2]", "expected an object"),
            ({"context": "a"}, "'target' is missing"),
            ({"target": "1"}, "'context' is missing"),
            ({"context": "a", "target": 5}, "'target' must be a text"),
            ({"context": None, "target": "5"}, "'context' must be a text"),
            ({"context": "a", "target": " "}, "'target' must be a text"),
            ({"context": "a", "target": "five"}, "must be a number"),
        ],
    )
    def test_a_bad_row_is_named_by_file_and_line(self, row, message, tmp_path):
        path = write(tmp_path / "rows.jsonl", [formula_row(1), "", row, formula_row(2)])
        with pytest.raises(ValueError, match=rf"rows\.jsonl, line 3: .*{message}"):
            formula_task(path)

    def test_a_finer_row_needs_four_tags(self, tmp_path):
        path = write(tmp_path / "rows.jsonl", [finer_row(1, TAGS[:3])])
        with pytest.raises(ValueError, match=r"line 1: .*4 comma-separated tags"):
            finer_task(path)

    def test_bytes_that_are_no_utf8(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b'{"context": "\xff", "target": "1"}\n')
        with pytest.raises(ValueError, match="line 1: not JSON"):
            formula_task(path)

    def test_equal_rows_count_once_and_too_few_are_refused(self, tmp_path):
        path = write(tmp_path / "rows.jsonl", [formula_row(1)] * 5 + [formula_row(2)])
        with pytest.raises(ValueError, match="2 different rows are too few"):
            formula_task(path)


@needs_data
class TestRealFiles:
    def test_formula(self):
        task = formula_task(DATA / FORMULA_FILE)
        assert [len(split) for split in (task.trainset, task.valset, task.testset)] == [120, 40, 80]
        for example in task.trainset:
            assert feedback(task, example, answer=f"${example.target}")[0] == 1.0
            assert len(find_lessons(feedback(task, example, answer="")[1])) == 1

    def test_formula_with_its_own_validation_file(self):
        task = formula_task(DATA / FORMULA_FILE, DATA / "formula_val_subset_300.jsonl", sizes=(400, 300, 100))
        assert [len(split) for split in (task.trainset, task.valset, task.testset)] == [400, 300, 100]

    def test_finer(self):
        task = finer_task(DATA / FINER_FILE, sizes=(300, 100, 99))
        assert [len(split) for split in (task.trainset, task.valset, task.testset)] == [300, 100, 99]
        for example in task.trainset:
            assert feedback(task, example, answer=example.target)[0] == 1.0
            lessons = find_lessons(feedback(task, example, answer="")[1])
            assert {lesson.topic for lesson in lessons} == {tag.strip() for tag in example.target.split(",")}
