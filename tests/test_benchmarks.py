"""The benchmarks on a few rows made up here: splits, the grid and how it resumes, its table, and the ablations."""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter

import pytest
from dspy import lm15

from benchmarks import _cells, ablations, run, tasks
from benchmarks._cells import OPTIMIZERS, Cell, Outcome, Settings, Store
from benchmarks.run import Row, Table
from dspy_combee.testing import Prompt
from dspy_combee.testing.tasks import FINER_FILE, FORMULA_FILE

from .test_tasks import DATA, finer_row, formula_row, needs_data, write

NAMES = ("Quick Ratio", "Gross Margin", "Asset Turnover", "Debt Ratio", "Cash Ratio", "Payout Ratio")
SIZES = (12, 4, 8)


@pytest.fixture
def data(tmp_path):
    """A folder with files in the form of the real ones."""
    rows = [formula_row(number, NAMES[number % len(NAMES)]) for number in range(1, 61)]
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / FORMULA_FILE, rows[:40])
    write(folder / tasks.FORMULA_VALIDATION_FILE, rows[40:])
    write(folder / FINER_FILE, [finer_row(number) for number in range(1, 41)])
    return folder


def contexts(examples):
    return {str(example.inputs().toDict()) for example in examples}


# Tasks --------------------------------------------------------------------------------------------------------


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


@needs_data
@pytest.mark.parametrize("name", ["formula", "finer"])
def test_splits_of_the_real_files(name):
    task = tasks.load_task(name, DATA)
    splits = [contexts(split) for split in (task.trainset, task.valset, task.testset)]
    assert tuple(map(len, splits)) == tasks.SIZES[name]
    assert len(set.union(*splits)) == sum(tasks.SIZES[name])


def test_files_that_are_missing_are_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COMBEE_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="COMBEE_DATA is not set"):
        tasks.load_task("formula")
    with pytest.raises(FileNotFoundError, match="There is no file"):
        tasks.load_task("finer", tmp_path)
    with pytest.raises(ValueError, match="known are"):
        tasks.load_task("appworld")
    tasks.main([])
    output = capsys.readouterr().out
    assert "conventions: 200 training" in output
    assert output.count("COMBEE_DATA is not set") == 2
    assert run.main(["--task", "formula"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_variable_names_the_folder(data, monkeypatch, capsys):
    monkeypatch.setenv("COMBEE_DATA", str(data))
    assert len(tasks.load_task("formula", sizes=SIZES).trainset) == 12
    tasks.main([])
    assert "finer: " in capsys.readouterr().out


# The simulated models -------------------------------------------------------------------------------------------


def test_latencies_are_divided_by_the_factor(data):
    task = tasks.load_task("conventions", sizes=SIZES)
    pace = tasks.Pace(10)
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


# The grid -------------------------------------------------------------------------------------------------------

SMALL = ["--sizes", "12,4,8", "--budget", "40", "--num-threads", "8", "--seeds", "1"]


def command(*arguments):
    return run.main([*SMALL, *map(str, arguments)])


def table_of(folder):
    with (folder / "table.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_grid_on_the_simulated_model(tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        command("--optimizer", "gepa,combee,playbook", "--minibatch-size", "1,6,auto", "--factor", 2000, "--out", out)
        == 0
    )
    printed = capsys.readouterr().out
    text = (out / "table.md").read_text(encoding="utf-8")
    assert text in printed
    assert "SIMULATED" in text
    assert "divided by 2000" in text
    rows = table_of(out)
    assert {row["simulated"] for row in rows} == {"True"}
    places = [(row["optimizer"], row["n"]) for row in rows]
    assert ("gepa", "auto") not in places
    assert places == [
        ("before", "-"),
        *[("gepa", n) for n in ("1", "6")],
        *[(name, n) for name in ("combee", "playbook") for n in ("1", "6", "auto")],
    ]
    assert all(float(row["tokens"]) > 0 and float(row["minutes"]) > 0 for row in rows[1:])
    assert {row["dollars"] for row in rows[1:]} == {""}  # A simulated model has no price.
    assert "in tokens, as no price is known" in text
    assert (out / "quality-conventions.png").read_bytes().startswith(b"\x89PNG")


def test_a_grid_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    out, made = tmp_path / "out", []
    real = run.run_cell

    def counted(cell, task, settings):
        made.append(cell.name)
        if len(made) == 3:
            raise RuntimeError("the lights went out")
        return real(cell, task, settings)

    monkeypatch.setattr(run, "run_cell", counted)
    options = ["--optimizer", "combee,flat", "--minibatch-size", "6,12", "--out", out]
    assert command(*options) == 1
    assert "1 of 5 runs failed" in capsys.readouterr().err
    assert len(table_of(out)) == 4
    assert command(*options) == 0
    assert Counter(made) == {**dict.fromkeys(made, 1), made[2]: 2}
    assert "read back" in capsys.readouterr().out
    before = (out / "table.csv").read_text()
    monkeypatch.setattr(run, "run_cell", None)
    assert command(*options) == 0
    assert (out / "table.csv").read_text() == before
    assert all(path.suffix == ".json" and path.name[0] != "." for path in (out / "cells").iterdir())


@pytest.mark.parametrize(
    "change", [["--budget", "44"], ["--sizes", "13,4,8"], ["--loss", "capacity"], ["--model", "m"]]
)
def test_cells_of_other_settings_are_refused(change, tmp_path, capsys):
    options = ["--optimizer", "combee", "--minibatch-size", "6", "--out", tmp_path]
    assert command(*options) == 0
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
    outcome = Outcome(50.0, batch_sizes=(6, 6), choice=6, spent={"rollouts": {"input_tokens": 1}})
    store.keep(cell, task, outcome)
    assert store.load(cell, task) == outcome


@pytest.mark.parametrize(
    "arguments",
    [["--task", "appworld"], ["--optimizer", "miprov3"], ["--minibatch-size", "0"], ["--sizes", "1,2"]],
)
def test_options_that_are_no_good(arguments, capsys):
    with pytest.raises(SystemExit):
        run.main(arguments)
    assert arguments[0] in capsys.readouterr().err


# Over HTTP ------------------------------------------------------------------------------------------------------


class Relay:
    """The simulated models of a task behind one address."""

    def __init__(self, task):
        models = tasks.simulated_models(task)
        self.task_engine, self.reflection_engine = models.task_lm.engine, models.reflection_lm.engine

    def __call__(self, body):
        texts = [message["content"] for message in body["messages"]]
        messages = tuple(lm15.Message.user(text) for text in texts[1:] or texts)
        request = lm15.Request("m", messages, system=texts[0] if texts[1:] else None)
        *reflecting, _ = self.reflection_engine.roles
        reflects = any(role.handles(Prompt.of(request)) for role in reflecting)
        return (self.reflection_engine if reflects else self.task_engine).complete(request).text


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # LiteLLM drops clients without closing them.
@pytest.mark.parametrize("name", ["formula", "finer"])
def test_every_optimizer_over_http(name, data, openai_server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", openai_server.api_key)
    openai_server.handler = Relay(tasks.load_task(name, data, SIZES))
    out = tmp_path / "out"
    optimizers = [o for o in OPTIMIZERS if name == "formula" or o in ("gepa", "combee", "flat")]
    options = ["--task", name, "--data", data, "--model", "openai/gpt-4o-mini", "--api-base", openai_server.api_base]
    options += ["--optimizer", ",".join(optimizers), "--minibatch-size", 8, "--out", out]
    assert command(*options) == 0
    printed = capsys.readouterr().out
    assert "SIMULATED" not in printed
    assert "Model openai/gpt-4o-mini" in printed
    rows = {row["optimizer"]: row for row in table_of(out)}
    assert list(rows) == ["before", *optimizers]
    assert all(float(rows[o]["dollars"]) > 0 for o in optimizers)
    assert all(float(rows[o]["dollars_reflection"]) > 0 for o in optimizers)
    assert float(rows["flat"]["cost_over_flat"]) == 1
    assert float(rows["combee"]["cost_over_flat"]) > 1
    before, *after = (float(row["accuracy"]) for row in rows.values())
    assert min(after) >= before
    assert name == "finer" or max(after) > before
    assert "Cost ratios are in dollars." in printed
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


# The table ------------------------------------------------------------------------------------------------------


def outcome(tokens, dollars=None, accuracy=50.0):
    phase = {"input_tokens": tokens, "output_tokens": 0, "cost": dollars}
    return Outcome(
        accuracy, minutes=1.0, spent={"rollouts": phase, "feedback": {**phase, "input_tokens": 0, "cost": 0.0}}
    )


def test_costs_are_compared_within_a_front_door():
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


def test_dollars_are_used_where_all_have_a_price():
    rows = [Row("t", "flat", 20, (outcome(100, 2.0),)), Row("t", "combee", 20, (outcome(400, 3.0),))]
    table = Table(rows)
    assert table.priced
    assert table.over_flat(rows[1]) == 1.5
    assert "$ reflection" in table.markdown()
    assert not Table([*rows, Row("t", "gepa", 20, (outcome(1),))]).priced


def test_auto_tells_what_was_chosen():
    assert Row("t", "combee", "auto", (Outcome(1.0, choice=40), Outcome(1.0))).title == "auto (40, –)"


def test_without_matplotlib_there_is_a_table_and_a_word(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert command("--optimizer", "combee", "--minibatch-size", "6", "--out", tmp_path) == 0
    assert "No plot: matplotlib is not installed" in capsys.readouterr().out
    assert (tmp_path / "table.md").is_file()


# Ablations ------------------------------------------------------------------------------------------------------


def test_the_ablations_print_both_figures(monkeypatch, capsys):
    monkeypatch.setattr(ablations, "QUICK_SIZES", (50, 5, 10))
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


def test_a_real_model_is_not_called_simulated(monkeypatch, capsys):
    asked = []

    def models(model, reflection_model, api_base):
        asked.append((model, reflection_model, api_base))
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
    assert run.main([*SMALL, "--model", "some/model", "--optimizer", "flat", "--minibatch-size", "6"]) == 0
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
