"""`python -m dspy_combee learn`: a playbook from a folder of traces, without a program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspy_combee import Playbook, save_traces
from dspy_combee.__main__ import main

from .lessons import numbers_in, rules_in
from .openai_server import Reply
from .playbook_lessons import playbook_lm
from .trace_samples import hostile_trace, trace, traces

ROOT = Path(__file__).parent.parent


def lesson_traces(n):
    """Traces whose feedback states what the simulated model knows."""
    return [
        trace(i, feedback=f"Not so. Convention topic {i}: say {i} and no more. Please hold to it.") for i in range(n)
    ]


@pytest.fixture
def folder(tmp_path):
    runs = tmp_path / "runs"
    (runs / "deep").mkdir(parents=True)
    save_traces(lesson_traces(6), runs / "a.jsonl")
    save_traces([trace(9, predictor="plan.step"), *lesson_traces(3)], runs / "deep" / "b.jsonl")
    (runs / "notes.txt").write_text("no trace", encoding="utf-8")
    return runs


@pytest.fixture
def scripted(monkeypatch):
    """The task's own model in the place of the one that is named."""
    lm = playbook_lm()
    monkeypatch.setattr("dspy_combee.cli.learn._lm", lambda options: lm)
    return lm


def learn(*arguments):
    return main(["learn", *map(str, arguments)])


def test_a_folder_becomes_a_playbook_and_the_simulation_says_so(folder, tmp_path, capsys):
    out = tmp_path / "playbook.txt"
    assert learn(folder, "--out", out, "--simulate", "--minibatch-size", 4) == 0
    playbook = Playbook.load(out)
    assert len(playbook) >= 3
    assert all("Convention topic" in bullet.content for bullet in playbook)
    shown, errors = capsys.readouterr()
    assert errors == ""
    assert shown.startswith("SIMULATED: no language model is called.")
    assert "10 traces.\n" in shown
    lines = [line for line in shown.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in lines] == [
        "step 1: 4 of 10 traces",
        "step 2: 8 of 10 traces",
        "step 3: 10 of 10 traces",
    ]
    assert f"The playbook is in {out}: {len(playbook)} bullets." in shown


def test_all_traces_teach_the_one_playbook(tmp_path, scripted, capsys):
    save_traces([*traces(3), trace(7, predictor="some.other.program")], tmp_path / "runs.jsonl")
    out = tmp_path / "playbook.json"
    assert learn(tmp_path / "runs.jsonl", "--out", out, "--reflection-model", "x/y") == 0
    assert numbers_in(" ".join(bullet.content for bullet in Playbook.load(out))) == {0, 1, 2, 7}
    assert "Reflection by x/y: calls cost money." in capsys.readouterr().out
    assert json.loads(out.read_text(encoding="utf-8"))


def test_it_goes_on_from_a_playbook(tmp_path, scripted):
    save_traces(traces(3), tmp_path / "first.jsonl")
    save_traces(traces(3, start=3), tmp_path / "second.jsonl")
    out, other = tmp_path / "playbook.txt", tmp_path / "other.txt"
    model = ("--reflection-model", "x/y")
    assert learn(tmp_path / "first.jsonl", "--out", out, *model) == 0
    assert learn(tmp_path / "second.jsonl", "--out", other, "--playbook", out, *model) == 0
    assert len(Playbook.load(out)) == 3
    assert learn(tmp_path / "second.jsonl", "--out", out, "--playbook", out, *model) == 0
    assert len(Playbook.load(out)) == len(Playbook.load(other)) == 6


def test_a_limit_reads_the_first_traces_only(folder, tmp_path, scripted, capsys):
    # The replies are of no use for these traces: nothing is learned, which the status says.
    assert learn(folder, "--out", tmp_path / "p", "--reflection-model", "x/y", "--limit", 4, "--epochs", 2) == 1
    assert not (tmp_path / "p").exists()
    assert "4 traces.\n" in (shown := capsys.readouterr().out)
    assert "of 8 traces" in shown


def test_a_log_dir_holds_the_steps_and_the_run_goes_on(tmp_path, scripted, capsys):
    save_traces(traces(8), tmp_path / "runs.jsonl")
    arguments = [tmp_path / "runs.jsonl", "--reflection-model", "x/y", "--minibatch-size", 4, "--log-dir"]
    assert learn(*arguments, tmp_path / "log", "--out", tmp_path / "p") == 0
    calls = len(scripted.calls)
    assert learn(*arguments, tmp_path / "log", "--out", tmp_path / "again") == 0
    assert len(scripted.calls) == calls
    assert (tmp_path / "again").read_text(encoding="utf-8") == (tmp_path / "p").read_text(encoding="utf-8")
    assert main(["report", str(tmp_path / "log")]) == 0
    assert "runs.jsonl:3" in (tmp_path / "log" / "report.html").read_text(encoding="utf-8")


# What goes wrong ends in one line -----------------------------------------------------------------------------


def failing(capsys, status, *arguments):
    """The one line of the error."""
    try:
        code = learn(*arguments)
    except SystemExit as error:
        code = error.code
    assert code == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


SIMULATE = ("--simulate",)


def test_a_model_or_the_simulation_must_be_named(folder, tmp_path, capsys):
    assert "--reflection-model --simulate is required" in failing(capsys, 2, folder, "--out", tmp_path / "p")
    both = ("--simulate", "--reflection-model", "x")
    assert "not allowed with" in failing(capsys, 2, folder, "--out", tmp_path / "p", *both)
    assert "--out" in failing(capsys, 2, folder, *SIMULATE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing", "--out", "p"], "there are no traces at 'missing'"),
        (["runs", "--out", "no/such/p"], "there is no folder"),
        (["runs", "--out", "runs"], "is a folder"),
        (
            ["runs", "--out", "there"],
            "--out there is there already: give another one, or go on from it with --playbook",
        ),
        (["runs", "--out", "p", "--playbook", "missing"], "--playbook missing: "),
        (["runs", "--out", "p", "--minibatch-size", "0"], "expected a whole number"),
        (["runs", "--out", "p", "--format", "xml"], "invalid choice"),
        (["runs", "--out", "p", "--max-cost", "1"], "need --reflection-model"),
        (["empty", "--out", "p"], "empty holds no traces"),
        (["bad.jsonl", "--out", "p"], "bad.jsonl:2: not JSON"),
    ],
)
def test_options_and_files_that_are_no_good(arguments, message, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("there").write_text("kept", encoding="utf-8")
    save_traces(lesson_traces(1), "bad.jsonl")
    with open("bad.jsonl", "a", encoding="utf-8") as file:
        file.write("{\n")
    assert message in failing(capsys, 2, *arguments, *SIMULATE)
    assert not Path("p").exists()
    assert Path("there").read_text(encoding="utf-8") == "kept"


def test_bad_traces_are_left_out_where_that_is_wanted(tmp_path, capsys):
    save_traces(lesson_traces(4), tmp_path / "bad.jsonl")
    with (tmp_path / "bad.jsonl").open("a", encoding="utf-8") as file:
        file.write("{\n")
    assert learn(tmp_path, "--out", tmp_path / "p", *SIMULATE, "--on-error", "skip") == 0
    assert "4 traces; 1 bad ones are left out.\n" in capsys.readouterr().out


def test_a_provider_that_refuses_the_key_is_one_line_and_no_playbook(
    folder, tmp_path, openai_server, monkeypatch, capsys
):
    openai_server.handler = lambda request: Reply("no such key", status=401)
    model = ("--reflection-model", "openai/x", "--api-base", openai_server.api_base)
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-that-nobody-has")
    line = failing(capsys, 1, folder, "--out", tmp_path / "p", *model)
    assert "a-key-that-nobody-has" not in line
    assert not (tmp_path / "p").exists()


def test_what_was_learned_before_an_error_is_kept(tmp_path, monkeypatch, capsys):
    count = [0]

    def breaks(prompt):
        count[0] += "bullet_tags" in prompt.output_fields
        return "bullet_tags" in prompt.output_fields and count[0] > 4

    lm = playbook_lm((breaks, "nothing of use"))
    monkeypatch.setattr("dspy_combee.cli.learn._lm", lambda options: lm)
    save_traces(traces(40), tmp_path / "runs.jsonl")
    arguments = ("--reflection-model", "x/y", "--minibatch-size", 4, "--num-threads", 1)
    assert learn(tmp_path / "runs.jsonl", "--out", tmp_path / "p", *arguments) == 1
    shown, errors = capsys.readouterr()
    assert errors.startswith("error: Reflection proposed nothing in 3 steps in a row")
    assert f"What was learned until then is in {tmp_path / 'p'}: 4 bullets." in shown
    assert len(Playbook.load(tmp_path / "p")) == 4


def test_ctrl_c_keeps_what_was_learned(tmp_path, monkeypatch, capsys):
    lm = playbook_lm()
    monkeypatch.setattr("dspy_combee.cli.learn._lm", lambda options: lm)

    def interrupted(self, step):
        raise KeyboardInterrupt

    monkeypatch.setattr("dspy_combee.cli.learn._Progress.__call__", interrupted)
    save_traces(traces(8), tmp_path / "runs.jsonl")
    assert (
        learn(tmp_path / "runs.jsonl", "--out", tmp_path / "p", "--reflection-model", "x", "--minibatch-size", 4) == 130
    )
    assert capsys.readouterr().err == "error: interrupted\n"
    assert len(Playbook.load(tmp_path / "p")) == 4


# From outside -------------------------------------------------------------------------------------------------


def test_the_command_runs_as_a_process_against_a_server(tmp_path, openai_server):
    def answers(request):
        text = request["messages"][-1]["content"]
        if len(text) < 100:
            return "OK"
        rules = sorted(rules_in(text))
        if "reflections ##" in text:
            return json.dumps({"operations": [{"type": "ADD", "content": f"State {rule}."} for rule in rules]})
        if "deltas ##" in text:
            return json.dumps({"decisions": []})
        said = {"what_went_wrong": "x", "root_cause": "", "correct_approach": "", "key_insight": " ".join(rules)}
        return json.dumps({**said, "bullet_tags": []})

    openai_server.handler = answers
    save_traces([*traces(3), hostile_trace(3, "/etc/hostname")], tmp_path / "runs.jsonl")
    environment = {
        **os.environ,
        "OPENAI_API_KEY": openai_server.api_key,
        "DSPY_CACHEDIR": str(tmp_path / "cache"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    model = ["--reflection-model", "openai/gpt-4o-mini", "--api-base", openai_server.api_base]
    run = subprocess.run(
        [sys.executable, "-m", "dspy_combee", "learn", "runs.jsonl", "--out", "p.json", *model],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    assert "step 1: 4 of 4 traces, 4 bullets" in run.stdout
    assert "calls, " in run.stdout
    assert numbers_in((tmp_path / "p.json").read_text(encoding="utf-8")) == {0, 1, 2, 3}
