"""The benchmarks on a few rows made up here: the finance data, the grid and how it resumes, and what each prints."""

import csv
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import dspy
import pytest

from benchmarks import _cells, ablations, context_overload, run, tasks
from benchmarks._cells import OPTIMIZERS, Cell, Outcome, Settings, Store
from benchmarks._finance import (
    FINER_FILE,
    FORMULA_FILE,
    AnswerKey,
    finer_task,
    formula_task,
    parse_number,
)
from benchmarks._overload_fit import FORMULA, sketches
from benchmarks._overload_runs import CALL_SECONDS, WIDTH, Arm, simulated_seconds
from benchmarks._overload_runs import run as run_arm
from benchmarks._overload_task import WORDINGS, Novelty, overload_lm, overload_task, post_lines
from benchmarks._speed_costs import growth, tree_cost
from benchmarks._speed_lm import Latency, LoggedCall
from benchmarks._speed_run import list_schedule, longest_first, seconds_apart, timed_run, waves
from benchmarks.run import Row, Table
from benchmarks.speed import Verdicts
from dspy_combee.testing import (
    Lesson,
    PowerLoss,
    SimulatedLM,
    Student,
    conventions_task,
    find_lessons,
    shuffled_feedback,
)

from .openai_server import relay

REAL = Path(os.environ.get("COMBEE_DATA") or Path(__file__).parents[2] / "shared" / "data")
NAMES = ("Quick Ratio", "Gross Margin", "Asset Turnover", "Debt Ratio", "Cash Ratio", "Payout Ratio")
TAGS = ["Goodwill", "LongTermDebt", "Revenues", "SharePrice"]
SIZES = (12, 4, 8)


def formula_row(number, places=2):
    name = NAMES[number % len(NAMES)]
    context = (
        f"Use formula {name} to answer the question. Answer with a numerical answer with {places} decimal places and "
        f"with no explanations or other text. Formula: {name} = (Cash + Claims) / Debts, Explanation: Cash: money at "
        f'hand. Question: "A mill has {number} in cash, no claims and debts of 4. What is its quick ratio?". Answer:'
    )
    return {"context": context, "target": str(number / 4)}


def finer_row(number, tags=None):
    questions = "\n".join(
        f'{i + 1}. What is best tag for entity "{number}.{i}" in sentence: "The firm had $ {number}.{i} of item {i} .?"'
        for i in range(4)
    )
    context = f"Options: ,{','.join(TAGS)}. Answer:\n{questions}\nOutput tags:"
    return {"context": context, "target": ",".join(tags or TAGS[number % 4 :] + TAGS[: number % 4])}


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder with files in the form of the real ones."""
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / FORMULA_FILE, map(formula_row, range(1, 61)))
    write(folder / tasks.FORMULA_VALIDATION_FILE, map(formula_row, range(50, 90)))
    write(folder / FINER_FILE, map(finer_row, range(1, 61)))
    return folder


def feedback(task, example, **outputs):
    result = task.metric(example, dspy.Prediction(**outputs), None, "self", None)
    return result.score, result.feedback


def contexts(examples):
    return {str(example.inputs().toDict()) for example in examples}


# The finance data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *[("2.0", 2.0), (" 27,432.79 ", 27432.79), ("$27,432.79", 27432.79), ("€ 5", 5.0), ("1,00,000", 100000.0)],
        *[("27432.79 USD", 27432.79), ("8.33 times (rounded to 2 decimal places)", 8.33), ("2.00x", 2.0)],
        *[("The ratio is **1.50**.", 1.5), ("5%", 5.0), ("-80,000,000.0", -80000000.0), ("\u22120.01", -0.01)],
        *[("-$5", -5.0), ("$-5", -5.0), ("(5,000.00)", -5000.0), ("($5,000)", -5000.0), ("(3.5%)", -3.5)],
        *[(".5", 0.5), ("5.", 5.0), ("1e6", 1000000.0), ("9,000 / 1.09 = 8,256.88", 8256.88), ("5 million", 5.0)],
        *[(text, None) for text in ("", "none", "nan", "inf", "1/2", "5 - 3", "3-5", "1.5 * 10^6", "2 000", "1,23")],
        *[
            (text, None)
            for text in ("1.2.3", "9" * 400, "x2", "for 2023 it is 1.5", "__import__('os').getpid()", "2 =")
        ],
    ],
)
def test_the_number_of_an_answer(text, number):
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("answer", "score"),
    [("0.25", 1), ("$0.25", 1), ("0.2512", 1), ("= 0.254", 1), ("25%", 0), ("0.26", 0), ("-0.25", 0), ("1/4", 0)],
)
def test_formula_is_scored_on_the_number_as_rounded(data, answer, score):
    example = dspy.Example(**formula_row(1), statement="x").with_inputs("context")
    assert feedback(formula_task(data / FORMULA_FILE), example, answer=answer)[0] == score


def test_feedback_of_formula_says_what_was_right_and_why(data):
    task = formula_task(data / FORMULA_FILE)
    example = task.trainset[0]
    _, told = feedback(task, example, answer="about 12 or 13")
    (lesson,) = find_lessons(told)
    assert example.target in told
    assert "not one number" in told
    assert lesson.topic in NAMES
    assert "(Cash + Claims) / Debts" in lesson.statement
    assert feedback(task, example)[0] == 0.0
    task = formula_task(write(data / "whole.jsonl", [formula_row(n, places=0) for n in range(1, 10)]))
    example = next(e for e in task.trainset if e.target.endswith(".25"))
    assert feedback(task, example, answer=example.target.split(".")[0])[0] == 1.0
    rows = [{"context": f"What is {n} plus one?", "target": str(n + 1)} for n in range(9)]
    task = formula_task(write(data / "other_shape.jsonl", rows))
    assert find_lessons(feedback(task, task.trainset[0], answer="?")[1])


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        *[("{0},{1},{2},{3}", 1.0), ("{0}, {1}, {2}, {3}", 1.0), ("1. {0}\n2. {1}\n3. {2}\n4. {3}", 1.0)],
        *[("`{0}`,\n`{1}`,\n`{2}`,\n`{3}`", 1.0), ("{0},{1},{2},{3},{0}", 1.0), ("{0},{1},{2}", 0.75)],
        *[("{0},,{2},{3}", 0.75), ("{1},{0},{2},{3}", 0.5), ("{0}", 0.25), ("", 0.0)],
    ],
)
def test_finer_is_scored_per_tag(data, answer, score):
    task = finer_task(data / FINER_FILE)
    example = task.trainset[0]
    assert feedback(task, example, answer=answer.format(*example.target.split(",")))[0] == score


def test_feedback_of_finer_names_what_is_wrong(data):
    task = finer_task(data / FINER_FILE)
    example = task.trainset[0]
    tags = example.target.split(",")
    _, told = feedback(task, example, answer=",".join([tags[0], "Wrong", tags[2]]))
    assert "Question 2: Wrong is wrong" in told
    assert "Question 4: nothing is wrong" in told
    assert [lesson.topic for lesson in find_lessons(told)] == [tags[1], tags[3]]
    assert "of item 1" in find_lessons(told)[0].statement
    assert feedback(task, example)[0] == 0.0
    assert find_lessons(feedback(task, example, answer=example.target)[1]) == []


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
def test_a_bad_row_is_named_by_file_and_line(row, message, tmp_path):
    path = write(tmp_path / "rows.jsonl", [formula_row(1), "", row, formula_row(2)])
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 3: .*{message}"):
        formula_task(path)


def test_files_that_make_no_task(tmp_path):
    with pytest.raises(FileNotFoundError, match="is a folder; expected a file of JSON lines"):
        formula_task(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"context": "\xff", "target": "1"}\n')
    with pytest.raises(ValueError, match="line 1: not JSON"):
        formula_task(path)
    with pytest.raises(ValueError, match=r"line 1: .*4 comma-separated tags"):
        finer_task(write(path, [finer_row(1, TAGS[:3])]))
    with pytest.raises(ValueError, match="2 different rows are too few"):
        formula_task(write(path, [formula_row(1)] * 5 + [formula_row(2)]))


@pytest.mark.parametrize("build", [formula_task, finer_task])
def test_the_control_of_a_finance_task(build, data):
    task = build(data / (FORMULA_FILE if build is formula_task else FINER_FILE))
    assert [len(split) for split in (task.trainset, task.valset, task.testset)] == [30, 10, 20]  # 60 rows as 120:40:80
    control = shuffled_feedback(task)
    for plain, changed in zip(task.trainset, control.trainset, strict=True):
        assert plain.labels().toDict() != changed.other_labels
        assert feedback(control, changed, answer=plain.target)[0] == 1.0
        assert feedback(control, changed, answer="nothing")[0] == 0.0


def test_an_answer_key_answers_what_is_taught_and_its_share_of_the_rest():
    lessons = [Lesson(f"TOPIC {i}", f"say a{i}") for i in range(40)]
    known = {f"Q{i}?": [(f"TOPIC {i}", f"a{i}"), ("TOPIC 0", "b")] for i in range(200)}
    lm = SimulatedLM(student=Student(AnswerKey("question", known, frozenset(lessons), 0.3)))
    program = dspy.Predict(
        dspy.Signature("question -> answer", f"Answer. {lessons[0]} Convention TOPIC 1: say another.")
    )
    with dspy.context(lm=lm):
        answers, again = ([program(question=question).answer.split(", ") for question in known] for _ in range(2))
        assert program(question="Q?").answer == "unknown"
    assert answers == again
    assert all(second == "b" for _, second in answers)
    assert answers[0][0] == "a0"
    assert sum(first != "unknown" for first, _ in answers) / 200 == pytest.approx(0.3, abs=0.1)


# Tasks and models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(tasks.SIZES))
def test_splits_are_fixed_and_disjoint(name, data):
    one, two = (tasks.load_task(name, data, SIZES) for _ in range(2))
    splits = [contexts(split) for split in (one.trainset, one.valset, one.testset)]
    assert tuple(map(len, splits)) == SIZES
    assert len(set.union(*splits)) == sum(SIZES)
    assert splits == [contexts(split) for split in (two.trainset, two.valset, two.testset)]
    prints = [tasks.fingerprint(split) for split in (one.trainset, one.valset, one.testset)]
    assert len(set(prints)) == 3
    assert prints[0] == tasks.fingerprint(two.trainset)


@pytest.mark.skipif(not REAL.is_dir(), reason="the finance data is not here (COMBEE_DATA)")
@pytest.mark.parametrize(("name", "dressed"), [("formula", "${}"), ("finer", "{}")])
def test_the_real_files(name, dressed):
    task = tasks.load_task(name, REAL)
    splits = [contexts(split) for split in (task.trainset, task.valset, task.testset)]
    assert tuple(map(len, splits)) == tasks.SIZES[name]
    assert len(set.union(*splits)) == sum(tasks.SIZES[name])
    for example in task.trainset:
        assert feedback(task, example, answer=dressed.format(example.target))[0] == 1.0
        lessons = find_lessons(feedback(task, example, answer="")[1])
        assert len(lessons) == 1 or {one.topic for one in lessons} == {t.strip() for t in example.target.split(",")}


def test_files_are_asked_for_and_the_variable_names_their_folder(data, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COMBEE_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="COMBEE_DATA is not set"):
        tasks.load_task("formula")
    with pytest.raises(FileNotFoundError, match=r"There is no file .*ace-agent/ace.*COMBEE_DATA"):
        tasks.load_task("finer", tmp_path)
    with pytest.raises(ValueError, match="known are"):
        tasks.load_task("appworld")
    tasks.main([])
    output = capsys.readouterr().out
    assert "conventions: 200 training" in output
    assert output.count("COMBEE_DATA is not set") == 2
    assert run.main(["--task", "formula"]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    monkeypatch.setenv("COMBEE_DATA", str(data))
    assert len(tasks.load_task("formula", sizes=SIZES).trainset) == 12
    tasks.main([])
    assert "finer: " in capsys.readouterr().out


def test_latencies_are_divided_by_the_factor():
    task, pace = tasks.load_task("conventions", sizes=SIZES), tasks.Pace(10)
    models = tasks.simulated_models(task, pace=pace)
    seconds = {role.name: role.seconds(100) for role in models.reflection_lm.engine.roles if role.name != "student"}
    assert seconds == dict.fromkeys(["reflection", "curator", "merge", "summary"], pytest.approx(0.4))
    (student,) = [role for role in models.task_lm.engine.roles if role.name == "student"]
    times = [student.seconds(100) for _ in range(200)]
    assert 0.02 <= min(times) < max(times) <= 0.1
    assert "divided by 10" in str(pace)
    assert tasks.Pace().scaled(9) == 0
    with pytest.raises(ValueError, match="known are"):
        tasks.simulated_loss(task, "forgetful")


# The grid -----------------------------------------------------------------------------------------------------


def command(*arguments):
    fixed = ("--sizes", "12,4,8", "--budget", "40", "--num-threads", "8", "--seeds", "1")
    return run.main([str(argument) for argument in (*fixed, *arguments)])


def table_of(folder):
    with (folder / "table.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_grid_on_the_simulated_model(tmp_path, capsys):
    options = ["--optimizer", "gepa,combee,playbook", "--minibatch-size", "1,6,auto", "--factor", 2000]
    assert command(*options, "--out", tmp_path) == 0
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert "SIMULATED" in text
    assert "divided by 2000" in text
    assert "in tokens, as no price is known" in text
    rows = table_of(tmp_path)
    assert [(row["optimizer"], row["n"]) for row in rows] == [
        ("before", "-"),
        *[("gepa", n) for n in ("1", "6")],
        *[(name, n) for name in ("combee", "playbook") for n in ("1", "6", "auto")],
    ]
    assert {row["simulated"] for row in rows} == {"True"}
    assert all(float(row["tokens"]) > 0 and float(row["minutes"]) > 0 for row in rows[1:])
    assert {row["dollars"] for row in rows[1:]} == {""}  # A simulated model has no price.
    assert (tmp_path / "quality-conventions.png").read_bytes().startswith(b"\x89PNG")


def test_a_grid_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    made, real = [], run.run_cell

    def counted(cell, task, settings):
        made.append(cell.name)
        if len(made) == 3:
            raise RuntimeError("the lights went out")
        return real(cell, task, settings)

    monkeypatch.setattr(run, "run_cell", counted)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    options = ["--optimizer", "combee,flat", "--minibatch-size", "6,12", "--out", tmp_path]
    assert command(*options) == 1
    printed, error = capsys.readouterr()
    assert "1 of 5 runs failed" in error
    assert "No plot: matplotlib is not installed" in printed
    assert len(table_of(tmp_path)) == 4
    assert command(*options) == 0
    assert Counter(made) == {**dict.fromkeys(made, 1), made[2]: 2}
    assert "read back" in capsys.readouterr().out
    before = (tmp_path / "table.csv").read_text()
    monkeypatch.setattr(run, "run_cell", None)
    assert command(*options) == 0
    assert (tmp_path / "table.csv").read_text() == before
    assert all(path.suffix == ".json" and path.name[0] != "." for path in (tmp_path / "cells").iterdir())
    for change in (["--budget", "44"], ["--sizes", "13,4,8"], ["--loss", "capacity"], ["--model", "m"]):
        assert command(*options, *change) == 1
        assert re.search(r"error: .* was run with .*; give another --out", capsys.readouterr().err)


def test_an_unfinished_write_leaves_nothing_to_read_back(tmp_path, monkeypatch):
    task, cell = tasks.load_task("conventions", sizes=SIZES), Cell("conventions", "combee", 6, 0)
    store = Store(tmp_path, Settings())
    monkeypatch.setattr(_cells.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        store.keep(cell, task, Outcome(50.0))
    assert store.load(cell, task) is None
    monkeypatch.undo()
    kept = Outcome(50.0, batch_sizes=(6, 6), choice=6, spent={"rollouts": {"input_tokens": 1}})
    store.keep(cell, task, kept)
    assert store.load(cell, task) == kept


@pytest.mark.parametrize(
    "arguments",
    [["--task", "appworld"], ["--optimizer", "miprov3"], ["--minibatch-size", "0"], ["--sizes", "1,2"]],
)
def test_options_that_are_no_good(arguments, capsys):
    with pytest.raises(SystemExit):
        run.main(arguments)
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # LiteLLM drops clients without closing them.
@pytest.mark.parametrize("name", ["formula", "finer"])
def test_every_optimizer_over_http(name, data, openai_server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", openai_server.api_key)
    models = tasks.simulated_models(tasks.load_task(name, data, SIZES))
    (*reflecting, _), student = models.reflection_lm.engine.roles, models.task_lm.engine
    fields = ("new_instruction", "bullet_tags", "operations", "decisions", "summary")
    assert len(reflecting) == len(fields)

    def handler(body):
        reflects = any(f"[[ ## {field} ## ]]" in str(body) or f"`{field}`" in str(body) for field in fields)
        return relay(body, models.reflection_lm.engine if reflects else student)

    openai_server.handler = handler
    out = tmp_path / "out"
    optimizers = [o for o in OPTIMIZERS if name == "formula" or o in ("gepa", "combee", "flat")]
    options = ["--task", name, "--data", data, "--model", "openai/gpt-4o-mini", "--api-base", openai_server.api_base]
    options += ["--optimizer", ",".join(optimizers), "--minibatch-size", 8, "--out", out]
    assert command(*options) == 0
    printed = capsys.readouterr().out
    assert "SIMULATED" not in printed
    assert "Model openai/gpt-4o-mini" in printed
    assert "Cost ratios are in dollars." in printed
    rows = {row["optimizer"]: row for row in table_of(out)}
    assert list(rows) == ["before", *optimizers]
    assert all(float(rows[o][cost]) > 0 for o in optimizers for cost in ("dollars", "dollars_reflection"))
    assert float(rows["flat"]["cost_over_flat"]) == 1
    assert float(rows["combee"]["cost_over_flat"]) > 1
    before, *after = (float(row["accuracy"]) for row in rows.values())
    assert min(after) >= before
    assert name == "finer" or max(after) > before
    # Figures only: neither rows of the data nor what was made of them.
    kept = "".join(path.read_text(encoding="utf-8") for path in out.rglob("*.[jmc]*"))
    assert "mill" not in kept
    assert "best tag" not in kept
    asked = len(openai_server.requests)
    assert command(*options) == 0
    assert len(openai_server.requests) == asked


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_key_that_is_refused_ends_the_grid(openai_server, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    options = ["--model", "openai/gpt-4o-mini", "--api-base", openai_server.api_base, "--out", tmp_path / "out"]
    assert command("--minibatch-size", 6, *options) == 1
    assert "Incorrect API key" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


def outcome(tokens, dollars=None):
    phase = {"input_tokens": tokens, "output_tokens": 0, "cost": dollars}
    free = {**phase, "input_tokens": 0, "cost": 0.0}
    return Outcome(50.0, minutes=1.0, spent={"rollouts": phase, "feedback": free})


def test_costs_are_compared_within_a_front_door_and_in_dollars_where_all_have_a_price():
    rows = [
        Row("t", "before", "-", (Outcome(10.0),)),
        Row("t", "gepa", 1, (outcome(50),)),
        Row("t", "flat", 20, (outcome(100), outcome(300))),
        Row("t", "combee", 20, (outcome(300), outcome(500))),
        Row("t", "playbook", 20, (outcome(900),)),
        Row("t", "playbook_flat", 20, (outcome(600),)),
        Row("t", "playbook", 1, (outcome(300),)),
        Row("u", "combee", 20, (outcome(1),)),
    ]
    table = Table(rows)
    assert not table.priced
    assert [table.over_flat(row) for row in rows] == [None, None, 1.0, 2.0, 1.5, 1.0, None, None]
    assert [table.over_sequential(row) for row in rows] == [None, 1.0, 4.0, 8.0, 3.0, 2.0, 1.0, None]
    assert "| t | combee | 20 | 50.0 ± 0.0 | 1.0 | 400 | 0 | 0 | 400 |" in table.markdown()
    rows = [Row("t", "flat", 20, (outcome(100, 2.0),)), Row("t", "combee", 20, (outcome(400, 3.0),))]
    table = Table(rows)
    assert table.priced
    assert table.over_flat(rows[1]) == 1.5
    assert "$ reflection" in table.markdown()
    assert not Table([*rows, Row("t", "gepa", 20, (outcome(1),))]).priced
    assert Row("t", "combee", "auto", (Outcome(1.0, choice=40), Outcome(1.0))).title == "auto (40, –)"


# Ablations ----------------------------------------------------------------------------------------------------


def test_the_ablations_print_both_figures(monkeypatch, capsys):
    monkeypatch.setattr(ablations, "run_trial", lambda trial: ablations.Finding(50.0, 1.0, trial.num_groups, 9, (5, 5)))
    options = ["--quick", "--workers", "1", "--optimizer", "playbook", "--seeds", "1", "--factor", "1000"]
    assert ablations.main(options) == 0
    output = capsys.readouterr().out
    assert "SIMULATED" in output
    assert "divided by 1000" in output
    assert re.findall(r"## (Figure \d): playbook, simulated model (\(.\))", output) == [
        ("Figure 6", "(a)"),
        ("Figure 7", "(a)"),
        ("Figure 6", "(b)"),
        ("Figure 7", "(b)"),
    ]
    assert len(re.findall(r"^\| (?:10|40|auto) \|", output, re.MULTILINE)) == 6
    assert len(re.findall(r"^\| (?:1|7|50) \|", output, re.MULTILINE)) == 6
    assert output.count("Highest mean of") == 8
    assert output.count("| 50.0 | 1.0 | 1.00 | 2 x 5 |") == 6
    assert output.count("Highest mean of lessons kept at p = 1: 50.0 with k = 50.") == 2


def test_a_real_model_is_not_called_simulated(monkeypatch, capsys):
    asked = []

    def models(*named):
        asked.append(named)
        return tasks.simulated_models(tasks.load_task("conventions", sizes=SIZES))

    monkeypatch.setattr(_cells, "real_models", models)
    monkeypatch.setattr(ablations, "QUICK_SIZES", (50, 5, 10))
    options = ["--model", "some/model", "--api-base", "http://x/v1", "--quick", "--seeds", "1", "--optimizer", "combee"]
    assert ablations.main([*options, "--figure", "7"]) == 0
    output = capsys.readouterr().out
    assert "SIMULATED" not in output
    assert "## Figure 7: combee, some/model" in output
    assert "| k | prompt tokens, p = 1 | prompt tokens, p = 2 |" in output
    assert set(asked) == {("some/model", None, "http://x/v1")}
    assert command("--model", "some/model", "--optimizer", "flat", "--minibatch-size", "6") == 0
    assert "Model some/model, reflection by some/model." in capsys.readouterr().out


@pytest.mark.slow
def test_the_quick_ablations_in_processes(capsys):
    assert ablations.main(["--quick"]) == 0
    assert capsys.readouterr().out.count("## Figure") == 8


def test_no_duplication_below_three_groups_and_the_seed_decides():
    trial = ablations.Trial("conventions", None, (30, 5, 10), Settings(), "playbook", 30, seed=1, num_groups=2)
    one, two, three = (ablations.run_trial(t) for t in (trial, trial, ablations.replace(trial, duplication_factor=1)))
    assert one.kept == two.kept == three.kept > 0
    assert one.accuracy == two.accuracy == three.accuracy


def test_a_peak_is_reported_where_it_is():
    peak = ablations.peak({1: 3.0, 7: 5.0, 10: 4.0}, "lessons", 50)
    assert peak == "Highest mean of lessons: 5.0 with k = 7. The paper's k = floor(sqrt(50)) is 7."
    elsewhere = ablations.peak({1: 3.0, 7: 5.0, 10: 6.0, 25: 6.0}, "lessons", 50)
    assert "6.0 with k = 10, 25" in elsewhere
    assert elsewhere.endswith("= 7 has 5.0: the peak is NOT there.")
    assert ablations.peak({1: 3.0}, "lessons", 50) == "Highest mean of lessons: 3.0 with k = 1."


# Context overload ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", context_overload.MODELS, ids=lambda model: model.name)
def test_the_models_fit_the_flat_figures_and_the_tree_loses_nothing_after_level_1(model):
    samples, large = FORMULA["samples"], FORMULA["large batch"]
    assert sketches(model.loss, model.novelty, 1, samples).lessons == pytest.approx(264, rel=0.1)
    assert sketches(model.loss, model.novelty, large, samples).lessons == pytest.approx(21, rel=0.1)
    arms = [Arm(model.loss, model.novelty, 40, 40, how, 2, 0, num_test=5) for how in ("flat", "tree")]
    flat, tree = map(run_arm, arms)
    assert tree.lessons >= 2 * flat.lessons
    for one in (flat, tree):
        assert one.flow.told >= one.flow.reflected >= one.flow.proposed
        assert one.flow.proposed == one.flow.merged == one.flow.applied == one.lessons
        assert one.duplicates >= 0
    assert tree.reflection_tokens > flat.reflection_tokens
    short = Arm(PowerLoss(1, 1000), Novelty(100), 20, 20, "tree", 2, 3, num_test=2)
    assert run_arm(short) == run_arm(short)


def test_the_overload_task_teaches_what_it_asks_and_right_lines_teach_nothing():
    task = overload_task(0, Novelty(50), 30, 30)
    told = {}
    for example in task.trainset + task.testset:
        before = task.metric(example, SimpleNamespace(codes=post_lines(example.invoice, {})))
        lessons = {found.topic: found.statement for found in find_lessons(before.feedback)}
        assert (before.score == 1) == (not lessons)
        assert task.metric(example, SimpleNamespace(codes=post_lines(example.invoice, lessons))).score == 1
        told.update(lessons)
    assert 10 < len(told) <= 50
    # A long list with a long tail.
    assert len(find_lessons(" ".join(" ".join(item.told) for item in task.trainset))) < 3 * len(task.trainset)
    lesson = Lesson("GROUP 1", "post to 1001-AB with the tax split out")
    assert [find_lessons(wording.replace("{}", str(lesson))) for wording in WORDINGS] == [[lesson]] * len(WORDINGS)
    for tokens in (100, 800):
        role = next(role for role in overload_lm(PowerLoss(), 0, tokens).engine.roles if role.name == "reflection")
        assert len(role.notes) // 4 + 75 == pytest.approx(tokens, abs=5)


def test_simulated_time_goes_wave_by_wave():
    usage = SimpleNamespace(calls=1, output_tokens=0)
    for ids in (["1.0", "1.1", "2.0"], [f"1.{index}" for index in range(WIDTH + 1)]):
        nodes = [SimpleNamespace(id=name, usage=usage) for name in ids]
        assert simulated_seconds(SimpleNamespace(n=0, reflections=[], nodes=nodes)) == 2 * CALL_SECONDS


def test_context_overload_says_that_it_is_simulated(capsys, monkeypatch):
    plan = context_overload.Plan((40,), 1, 16, 1, predict=False, sensitivity=False)
    monkeypatch.setattr(context_overload, "QUICK", plan)
    context_overload.main(["--quick", "--workers", "1"])
    printed = capsys.readouterr().out
    assert printed.startswith("Context overload, SIMULATED.")
    assert all(f"{name}, n = 40: tree / flat lessons" in printed for name in ("power", "capacity"))
    assert "tree p=2" in printed


# Speed --------------------------------------------------------------------------------------------------------


def call(kind, start, end):
    return LoggedCall(kind, start, end, end - start)


def test_a_schedule_of_calls():
    assert longest_first([1, 1, 1, 3], 2) == 3
    assert list_schedule([1, 1, 1, 3], 2) == 4
    assert longest_first([], 2) == 0
    calls = [
        *(call("rollout", 1, 2), call("rollout", 1.5, 3), call("propose", 3, 4), call("merge", 4, 5)),
        *(call("rollout", 6, 7), call("apart", 7, 8), call("rollout", 9, 10)),
    ]
    # A wave ends with the kind of call, and where an evaluation begins.
    kinds = [[item.kind for item in wave] for wave in waves(calls, marks=[0.5, 5.5, 8.5])]
    assert kinds == [["rollout"] * 2, ["propose"], ["merge"], ["rollout"], ["rollout"]]
    calls = [call("apart", 0, 1), call("apart", 0.5, 2), call("rollout", 3, 4), call("apart", 5, 5.5)]
    assert seconds_apart(calls) == 2.5


def test_a_missed_target_is_said_and_kept():
    verdicts = Verdicts()
    assert verdicts.at_most("x", 1.0, 1.1) == "met"
    assert verdicts.at_most("y", 1.25, 1.1) == "MISSED by 0.15"
    assert verdicts.missed == ["y: 1.25 instead of 1.1"]
    assert (growth(1, 8, 8), growth(1, 64, 8)) == (pytest.approx(1), pytest.approx(2))


@pytest.mark.parametrize(("optimizer", "calls"), [("gepa", 1), ("combee", 4)])
def test_a_run_takes_as_long_as_its_calls_at_least(optimizer, calls):
    timing = timed_run(optimizer, 10, conventions_task(0, (10, 2, 4)), Latency(100), held_out=True)
    assert timing.sizes == (10,)
    assert (timing.num_rollouts, timing.num_reflections) == (20, calls)
    assert 0 < timing.drawn_path <= timing.in_order
    assert timing.drawn_path <= timing.path < timing.seconds
    assert 0 <= timing.score <= 1


def test_the_tree_of_the_benchmark_is_the_one_that_the_design_asks_for():
    assert tree_cost(1250, 10**7, repeats=1).calls == (35, 2, 1)
