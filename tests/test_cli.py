"""`python -m dspy_combee`: its commands in this process, and in one of their own where that is what matters."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import dspy
import pytest

from dspy_combee import Playbook, save_traces
from dspy_combee.cli import demo, main
from dspy_combee.testing import SimulatedLM

from .lessons import numbers_in, rules_in
from .openai_server import Reply, relay
from .playbook_lessons import playbook_lm
from .trace_samples import hostile_trace, trace, traces

ROOT = Path(__file__).parent.parent


def command(*arguments):
    """The exit status of a command; argparse leaves in its own way."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as error:
        return error.code


def assert_one_line(error, message):
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def process(*arguments, **environment):
    """Run a command in a process of its own, with no key but those given."""
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    return subprocess.run(
        [sys.executable, "-m", "dspy_combee", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
    )


# The demo -----------------------------------------------------------------------------------------------------


def accuracies(output):
    """{row title: [(before, after), ...]}, in the order printed."""
    found = {}
    for title, before, after in re.findall(r"^(\S.*?) {2,}(\d+\.\d) +(\d+\.\d) +\d", output, re.MULTILINE):
        found.setdefault(title.strip(), []).append((float(before), float(after)))
    return found


@pytest.fixture
def one_seed(monkeypatch):
    monkeypatch.setattr(demo, "SIMULATED_SEEDS", 1)


def test_the_simulated_demo_learns_and_its_control_does_not(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "SIMULATED_SEEDS", 2)
    path = tmp_path / "program.json"
    assert command("demo", "--save", path, "--budget", 360) == 0
    text = capsys.readouterr().out
    assert text.startswith("SIMULATED: no language model is called.")
    rows = accuracies(text)
    ((before, after), _) = rows["Combee"]
    assert after >= before + 20
    ((before, after),) = rows["control: Combee, shuffled feedback"]
    assert after <= before + 2
    assert len(rows["one flat reflection call"]) == 2  # once for each loss
    assert re.search(r"step 1: n=40, k=6, minibatch \d+% -> \d+%, (not )?accepted", text)
    assert re.search(r"rollouts: \d+ LM calls, [\d,]+ tokens in, [\d,]+ out", text)
    assert re.search(r"reflection: \d+ LM calls", text)
    assert re.search(r"Learned instruction of self:\n  Give the posting code(.|\n)*- Convention [A-Z ]+: post to", text)
    program = dspy.Predict("invoice -> code")
    program.load(path)
    assert all(f"  {line}" in text for line in program.signature.instructions.splitlines())


def test_the_demo_with_models_makes_one_run(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(demo, "reachable_lm", lambda *named: (asked.append(named), SimulatedLM(model=named[1]))[1])
    options = ("--model", "some/model", "--reflection-model", "other/model", "--api-base", "http://x/v1")
    assert command("demo", *options, "--budget", 200) == 0
    output = capsys.readouterr().out
    assert output.startswith("CombeeOptimizer with some/model. Calls may cost money.")
    assert "SIMULATED" not in output
    assert list(accuracies(output)) == ["Combee"]
    assert asked == [
        ("--model", "some/model", "http://x/v1"),
        ("--reflection-model", "other/model", "http://x/v1"),
    ]


@pytest.fixture
def served(openai_server, monkeypatch):
    """Options of the demo for the simulated LM behind a real server, reached as any provider is."""
    monkeypatch.setenv("OPENAI_API_KEY", openai_server.api_key)
    return ["--model", "openai/m", "--api-base", openai_server.api_base, "--budget", 200]


def test_the_demo_over_http(served, openai_server, capsys):
    engine = SimulatedLM().engine
    openai_server.handler = lambda body: relay(body, engine)
    assert command("demo", *served) == 0
    ((before, after),) = accuracies(capsys.readouterr().out)["Combee"]
    assert after > before


@pytest.mark.parametrize("healthy_calls", [0, 60, 150])
def test_a_key_that_is_refused_is_one_line(healthy_calls, served, openai_server, capsys):
    engine = SimulatedLM().engine

    def handler(body):
        if len(openai_server.requests) > healthy_calls:
            return Reply("this key is no longer valid", status=401)
        return relay(body, engine)

    openai_server.handler = handler
    assert command("demo", *served) == 1
    assert_one_line(capsys.readouterr().err, "no longer valid")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["demo", "--minibatch-size", "0"], "at least 1"),
        (["demo", "--minibatch-size", "many"], "at least 1"),
        (["demo", "--num-threads", "-3"], "at least 1"),
        (["demo", "--seed", "x"], "--seed"),
        (["demo", "--nonsense"], "unrecognized"),
        (["demo", "--minibatch-size", "121"], "there are 120 examples"),
        (["demo", "--budget", "159"], "a step takes 160 metric calls"),
        (["demo", "--api-base", "http://x"], "--api-base needs --model"),
        (["demo", "--reflection-model", "x/y"], "--reflection-model needs --model"),
        (["demo", "--model", "openai/"], "no model id"),
        (["demo", "--save", "program.pkl"], "expected a .json file"),
        (["demo", "--save", "nowhere/program.json"], "there is no folder nowhere"),
        (["demo", "--save", "folder.json"], "is a folder"),
        (["demo", "--save", "/proc/program.json"], "/proc/program.json cannot be written"),
        (["report", "nowhere"], "expected the log_dir of a run"),
    ],
)
def test_options_that_are_no_good(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder.json").mkdir()
    assert command(*arguments) == 2
    captured = capsys.readouterr()
    assert_one_line(captured.err, message)
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--model", "openai/gpt-4o-mini"], {}, "OPENAI_API_KEY"),
        (["--model", "openai/m", "--api-base", "http://127.0.0.1:9/v1"], {"OPENAI_API_KEY": "none"}, "127.0.0.1:9"),
    ],
    ids=["no key", "no server"],
)
def test_models_that_cannot_be_reached(arguments, environment, message):
    run = process("demo", *arguments, **environment)
    assert run.returncode == 1
    assert run.stdout == ""
    assert_one_line(run.stderr, message)


def test_a_path_that_cannot_be_written_after_the_run(capsys, monkeypatch, tmp_path, one_seed):
    path = tmp_path / "folder" / "program.json"
    path.parent.mkdir()
    monkeypatch.setattr(demo, "_ARMS", {"Combee": (None, False)})
    monkeypatch.setattr(demo, "_explain", lambda program, seed: path.parent.rmdir())
    assert command("demo", "--save", path, "--budget", 160) == 2
    assert_one_line(capsys.readouterr().err, f"--save {path} cannot be written: [Errno 2] No such file or directory")


def test_an_interrupt_is_one_line_and_leaves_files_and_logging_as_they_were(capsys, monkeypatch, tmp_path):
    def interrupt(*arguments):
        logging.getLogger("dspy_combee").error("hidden")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_learn", interrupt)
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    for path in (kept, tmp_path / "new.json"):
        assert command("demo", "--save", path) == 130
        assert capsys.readouterr().err == "error: interrupted\n"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept.json", "{}")]
    assert logging.root.manager.disable == logging.NOTSET


@pytest.mark.parametrize("name", ["demo", "learn", "report"])
def test_every_option_says_what_it_is(name, capsys):
    assert command(name, "--help") == 0
    options = re.findall(r"^  (--[\w-]+)(.*?)(?=^  -|\Z)", capsys.readouterr().out, re.MULTILINE | re.DOTALL)
    assert options
    assert all(re.search(r"( {2,})\w", told) for _, told in options), options


# Learning from traces -----------------------------------------------------------------------------------------

SIMULATE = ("--simulate",)
NAMED = ("--reflection-model", "x/y")


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
def use_lm(monkeypatch):
    """Put an LM in the place of the one that is named."""

    def use(lm):
        monkeypatch.setattr("dspy_combee.cli.learn._lm", lambda options: lm)
        return lm

    return use


@pytest.fixture
def scripted(use_lm):
    return use_lm(playbook_lm())


def test_a_folder_becomes_a_playbook_and_the_simulation_says_so(folder, tmp_path, capsys):
    out = tmp_path / "playbook.txt"
    assert command("learn", folder, "--out", out, *SIMULATE, "--minibatch-size", 4) == 0
    playbook = Playbook.load(out)
    assert len(playbook) >= 3
    assert all("Convention topic" in bullet.content for bullet in playbook)
    shown, errors = capsys.readouterr()
    assert errors == ""
    assert shown.startswith("SIMULATED: no language model is called.")
    assert "10 traces.\n" in shown
    assert re.findall(r"^(step .*?),", shown, re.MULTILINE) == [
        "step 1: 4 of 10 traces",
        "step 2: 8 of 10 traces",
        "step 3: 10 of 10 traces",
    ]
    assert f"The playbook is in {out}: {len(playbook)} bullets." in shown


def test_all_traces_teach_the_one_playbook_which_another_run_goes_on_from(tmp_path, scripted, capsys):
    save_traces([*traces(2), trace(7, predictor="some.other.program")], tmp_path / "first.jsonl")
    save_traces(traces(3, start=3), tmp_path / "second.jsonl")
    out, other = tmp_path / "playbook.json", tmp_path / "other.txt"
    assert command("learn", tmp_path / "first.jsonl", "--out", out, *NAMED) == 0
    assert numbers_in(" ".join(bullet.content for bullet in Playbook.load(out))) == {0, 1, 7}
    assert json.loads(out.read_text(encoding="utf-8"))
    assert "Reflection by x/y: calls cost money." in capsys.readouterr().out
    for target in (other, out):  # to another file, then in place
        assert command("learn", tmp_path / "second.jsonl", "--out", target, "--playbook", out, *NAMED) == 0
    assert len(Playbook.load(out)) == len(Playbook.load(other)) == 6


def test_a_limit_reads_the_first_traces_only(folder, tmp_path, scripted, capsys):
    # The replies are of no use for these traces: nothing is learned, which the status says.
    assert command("learn", folder, "--out", tmp_path / "p", *NAMED, "--limit", 4, "--epochs", 2) == 1
    assert not (tmp_path / "p").exists()
    shown, error = capsys.readouterr()
    assert_one_line(error, "nothing was learned")
    assert "4 traces.\n" in shown
    assert "of 8 traces" in shown


def test_a_log_dir_holds_the_steps_and_the_run_goes_on(tmp_path, scripted):
    save_traces(traces(8), tmp_path / "runs.jsonl")
    arguments = ["learn", tmp_path / "runs.jsonl", *NAMED, "--minibatch-size", 4, "--log-dir", tmp_path / "log"]
    assert command(*arguments, "--out", tmp_path / "p") == 0
    calls = len(scripted.calls)
    assert command(*arguments, "--out", tmp_path / "again") == 0
    assert len(scripted.calls) == calls
    assert (tmp_path / "again").read_text(encoding="utf-8") == (tmp_path / "p").read_text(encoding="utf-8")
    assert command("report", tmp_path / "log") == 0
    assert "runs.jsonl:3" in (tmp_path / "log" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs", "--out", "p"], "--reflection-model --simulate is required"),
        (["runs", "--out", "p", *SIMULATE, *NAMED], "not allowed with"),
        (["runs", *SIMULATE], "--out"),
        (["missing", "--out", "p", *SIMULATE], "there are no traces at 'missing'"),
        (["runs", "--out", "no/such/p", *SIMULATE], "there is no folder"),
        (["runs", "--out", "runs", *SIMULATE], "is a folder"),
        (
            ["runs", "--out", "there", *SIMULATE],
            "--out there is there already: give another one, or go on from it with --playbook",
        ),
        (["runs", "--out", "p", "--playbook", "missing", *SIMULATE], "--playbook missing: "),
        (["runs", "--out", "p", "--playbook", "broken.json", *SIMULATE], "--playbook broken.json: not JSON"),
        (["runs", "--out", "p", "--minibatch-size", "0", *SIMULATE], "expected a whole number"),
        (["runs", "--out", "p", "--format", "xml", *SIMULATE], "invalid choice"),
        (["runs", "--out", "p", "--max-cost", "1", *SIMULATE], "need --reflection-model"),
        (["empty", "--out", "p", *SIMULATE], "empty holds no traces"),
        (["bad.jsonl", "--out", "p", *SIMULATE], "bad.jsonl:2: not JSON"),
    ],
)
def test_options_and_files_that_are_no_good(arguments, message, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("there").write_text("kept", encoding="utf-8")
    Path("broken.json").write_text("{", encoding="utf-8")
    save_traces(lesson_traces(1), "bad.jsonl")
    with open("bad.jsonl", "a", encoding="utf-8") as file:
        file.write("{\n")
    assert command("learn", *arguments) == 2
    assert_one_line(capsys.readouterr().err, message)
    assert not Path("p").exists()
    assert Path("there").read_text(encoding="utf-8") == "kept"


def test_bad_traces_are_left_out_where_that_is_wanted(tmp_path, capsys):
    save_traces(lesson_traces(4), tmp_path / "bad.jsonl")
    with (tmp_path / "bad.jsonl").open("a", encoding="utf-8") as file:
        file.write("{\n")
    assert command("learn", tmp_path, "--out", tmp_path / "p", *SIMULATE, "--on-error", "skip") == 0
    assert "4 traces; 1 bad ones are left out.\n" in capsys.readouterr().out


def test_what_was_learned_before_an_error_is_kept(tmp_path, use_lm, capsys):
    count = [0]

    def breaks(prompt):
        count[0] += "bullet_tags" in prompt.output_fields
        return "bullet_tags" in prompt.output_fields and count[0] > 4

    use_lm(playbook_lm((breaks, "nothing of use")))
    save_traces(traces(40), tmp_path / "runs.jsonl")
    arguments = ("--minibatch-size", 4, "--num-threads", 1)
    assert command("learn", tmp_path / "runs.jsonl", "--out", tmp_path / "p", *NAMED, *arguments) == 1
    shown, error = capsys.readouterr()
    assert_one_line(error, "Reflection proposed nothing in 3 steps in a row")
    assert f"What was learned until then is in {tmp_path / 'p'}: 4 bullets." in shown
    assert len(Playbook.load(tmp_path / "p")) == 4


def test_ctrl_c_keeps_what_was_learned(tmp_path, use_lm, monkeypatch, capsys):
    use_lm(playbook_lm())
    monkeypatch.setattr("dspy_combee.cli.learn.print", Interrupting(), raising=False)
    save_traces(traces(8), tmp_path / "runs.jsonl")
    assert command("learn", tmp_path / "runs.jsonl", "--out", tmp_path / "p", *NAMED, "--minibatch-size", 4) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    assert len(Playbook.load(tmp_path / "p")) == 4


class Interrupting:
    """A `print` at which Ctrl-C is pressed when it prints a step."""

    def __call__(self, text, **options):
        if text.startswith("step"):
            raise KeyboardInterrupt


def test_a_provider_that_refuses_the_key_is_one_line_and_no_playbook(
    folder, tmp_path, openai_server, monkeypatch, capsys
):
    openai_server.handler = lambda request: Reply("no such key", status=401)
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-that-nobody-has")
    model = ("--reflection-model", "openai/x", "--api-base", openai_server.api_base)
    assert command("learn", folder, "--out", tmp_path / "p", *model) == 1
    error = capsys.readouterr().err
    assert_one_line(error, "")
    assert "a-key-that-nobody-has" not in error
    assert not (tmp_path / "p").exists()


def test_learn_runs_as_a_process_against_a_server(tmp_path, openai_server):
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
    run = process(
        *("learn", tmp_path / "runs.jsonl", "--out", tmp_path / "p.json"),
        *("--reflection-model", "openai/gpt-4o-mini", "--api-base", openai_server.api_base),
        OPENAI_API_KEY=openai_server.api_key,
        DSPY_CACHEDIR=str(tmp_path / "cache"),
    )
    assert run.returncode == 0, run.stderr
    assert "step 1: 4 of 4 traces, 4 bullets" in run.stdout
    assert "calls, " in run.stdout
    assert numbers_in((tmp_path / "p.json").read_text(encoding="utf-8")) == {0, 1, 2, 3}
