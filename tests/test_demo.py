"""`python -m dspy_combee demo`: in this process where it works, in one of its own where it fails."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import socket
import subprocess
import sys

import dspy
import pytest
from dspy import lm15

from dspy_combee.__main__ import main
from dspy_combee.cli import demo
from dspy_combee.testing import SimulatedLM

from .openai_server import Reply
from .test_tasks import DATA, finer_row, formula_row, needs_data, write


def accuracies(output):
    """{row title: [(before, after), ...]}, in the order printed."""
    rows = re.findall(r"^(\S.*?) {2,}(\d+\.\d) +(\d+\.\d) +\d", output, re.MULTILINE)
    found = {}
    for title, before, after in rows:
        found.setdefault(title.strip(), []).append((float(before), float(after)))
    return found


@pytest.fixture
def two_seeds(monkeypatch):
    monkeypatch.setattr(demo, "SIMULATED_SEEDS", 2)


@pytest.fixture(scope="module")
def simulated_run(tmp_path_factory):
    """What the default demo prints, and the file it saves to."""
    path = tmp_path_factory.mktemp("demo") / "program.json"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(demo, "SIMULATED_SEEDS", 2)
        assert main(["demo", "--save", str(path)]) == 0
    return printed.getvalue(), path


class TestSimulated:
    def test_says_so_first(self, simulated_run):
        assert simulated_run[0].startswith("SIMULATED: no language model is called.")

    def test_learns_and_the_control_does_not(self, simulated_run):
        rows = accuracies(simulated_run[0])
        ((before, after), _) = rows["Combee"]
        assert after >= before + 20
        ((before, after),) = rows["control: Combee, shuffled feedback"]
        assert after <= before + 2
        assert len(rows["one flat reflection call"]) == 2  # once for each loss

    def test_shows_instruction_steps_calls_and_tokens(self, simulated_run):
        text = simulated_run[0]
        assert re.search(r"step 1: n=40, k=6, minibatch \d+% -> \d+%, (not )?accepted", text)
        assert re.search(r"simulated/student: \d+ calls, [\d,]+ tokens in, [\d,]+ out", text)
        assert re.search(r"simulated/reflection: \d+ calls", text)
        assert re.search(
            r"Learned instruction of self:\n  Give the posting code(.|\n)*- Convention [A-Z ]+: post to", text
        )

    def test_the_saved_program_is_the_one_shown(self, simulated_run):
        text, path = simulated_run
        program = dspy.Predict("invoice -> code")
        program.load(path)
        for line in program.signature.instructions.splitlines():
            assert f"  {line}" in text

    @pytest.mark.parametrize("task", ["formula", "finer"])
    def test_runs_on_a_file(self, task, tmp_path, capsys, two_seeds):
        row = formula_row if task == "formula" else finer_row
        path = write(tmp_path / "rows.jsonl", [row(n) for n in range(1, 61)])
        options = ["--minibatch-size", "9", "--budget", "60", "--num-threads", "2"]
        if task == "finer":  # all rows have the same tags, so there is nothing to shuffle
            tags = ["Goodwill", "LongTermDebt", "Revenues", "SharePrice"]
            write(path, [finer_row(n, tags[n % 4 :] + tags[: n % 4]) for n in range(1, 61)])
        assert main(["demo", "--data", str(path), "--task", task, *options]) == 0
        output = capsys.readouterr().out
        assert output.startswith("SIMULATED")
        assert "holds the answers of the file" in output
        assert f"Task: {task}; 30 training, 10 validation and 20 held-out" in output

    @needs_data
    def test_the_control_does_not_gain_on_the_real_file(self, capsys, two_seeds):
        name = "formula_train_subset_500.jsonl"
        assert (
            main(["demo", "--data", str(DATA / name), "--task", "formula", "--minibatch-size", "20", "--budget", "200"])
            == 0
        )
        ((before, after),) = accuracies(capsys.readouterr().out)["control: Combee, shuffled feedback"]
        assert after <= before

    def test_logging_is_as_before_afterwards(self, capsys, two_seeds):
        before = [logging.getLogger(name).level for name in ("dspy", "dspy_combee")]
        main(["demo", "--budget", "160"])
        assert [logging.getLogger(name).level for name in ("dspy", "dspy_combee")] == before


class TestRealModel:
    @pytest.fixture(autouse=True)
    def reachable(self, monkeypatch):
        self.asked = []

        def reachable_lm(option, model, api_base):
            self.asked.append((model, api_base))
            return SimulatedLM(model=model)

        monkeypatch.setattr(demo, "reachable_lm", reachable_lm)

    def test_only_the_main_run_by_default(self, capsys):
        assert main(["demo", "--model", "some/model", "--api-base", "http://x/v1", "--budget", "200"]) == 0
        output = capsys.readouterr().out
        assert "SIMULATED" not in output
        assert "some/model, reflection by some/model" in output
        assert list(accuracies(output)) == ["Combee"]
        assert "--compare" in output
        assert self.asked == [("some/model", "http://x/v1")]

    def test_all_three_on_request_with_a_reflection_model(self, capsys):
        options = ["--reflection-model", "other/model", "--compare", "--budget", "200"]
        assert main(["demo", "--model", "some/model", *options]) == 0
        output = capsys.readouterr().out
        assert len(accuracies(output)) == 3
        assert self.asked == [("some/model", None), ("other/model", None)]
        assert re.search(r"other/model: \d+ calls", output)


class TestOverHTTP:
    """The simulated LM behind a real server, reached as any provider is."""

    @pytest.fixture(autouse=True)
    def key(self, openai_server, monkeypatch):
        monkeypatch.setenv("OPENAI_API_KEY", openai_server.api_key)
        self.options = ["--model", "openai/m", "--api-base", openai_server.api_base, "--budget", "200"]

    def test_a_run(self, openai_server, capsys):
        openai_server.handler = Relay()
        assert main(["demo", *self.options]) == 0
        output = capsys.readouterr().out
        ((before, after),) = accuracies(output)["Combee"]
        assert after > before
        assert re.search(r"openai/m: \d+ calls, [\d,]+ tokens in", output)

    @pytest.mark.parametrize("healthy_calls", [0, 60, 150])
    def test_a_key_that_is_refused_is_one_line(self, healthy_calls, openai_server, capsys):
        openai_server.handler = Relay(healthy_calls)
        assert main(["demo", *self.options]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert "no longer valid" in error


class Relay:
    """Answers with a simulated LM; after `healthy_calls` the key is refused."""

    def __init__(self, healthy_calls=10_000):
        self.engine = SimulatedLM().engine
        self.left = healthy_calls

    def __call__(self, body):
        self.left -= 1
        if self.left < 0:
            return Reply("this key is no longer valid", status=401)
        texts = [message["content"] for message in body["messages"]]
        messages = tuple(lm15.Message.user(text) for text in texts[1:] or texts)
        request = lm15.Request("m", messages, system=texts[0] if texts[1:] else None)
        return self.engine.complete(request).text


@pytest.fixture(scope="module")
def closed_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def command(*arguments, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY") and k != "COMBEE_DATA"}
    run = subprocess.run(
        [sys.executable, "-m", "dspy_combee", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**clean, **environment},
        check=False,
    )
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("error: ")
    assert run.stdout == ""
    return run.returncode, lines[0]


class TestErrorsInAProcessOfItsOwn:
    def test_a_missing_key(self):
        status, line = command("demo", "--model", "openai/gpt-4o-mini")
        assert status == 1
        assert "OPENAI_API_KEY" in line

    def test_a_server_that_is_down(self, closed_port):
        url = f"http://127.0.0.1:{closed_port}/v1"
        status, line = command("demo", "--model", "openai/m", "--api-base", url, OPENAI_API_KEY="none")
        assert status == 1
        assert str(closed_port) in line

    def test_a_wrong_path(self):
        status, line = command("demo", "--data", "nowhere.jsonl", "--task", "formula")
        assert status == 2
        assert "nowhere.jsonl" in line

    def test_a_bad_row(self, tmp_path):
        path = write(tmp_path / "rows.jsonl", [formula_row(1), json.dumps({"context": "a"})])
        status, line = command("demo", "--data", str(path), "--task", "formula")
        assert status == 2
        assert "rows.jsonl, line 2: the key 'target' is missing" in line


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--minibatch-size", "0"], "at least 1"),
            (["--minibatch-size", "many"], "at least 1"),
            (["--num-threads", "-3"], "at least 1"),
            (["--seed", "x"], "--seed"),
            (["--task", "poetry"], "invalid choice"),
            (["--nonsense"], "unrecognized"),
        ],
    )
    def test_options_that_argparse_refuses(self, arguments, message, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["demo", *arguments])
        assert caught.value.code == 2
        assert_one_line(capsys, message)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--minibatch-size", "121"], "there are 120 examples"),
            (["--budget", "159"], "takes 160 metric calls"),
            (["--data", "rows.jsonl"], "--data needs --task"),
            (["--task", "formula"], "COMBEE_DATA"),
            (["--compare"], "needs --model"),
            (["--api-base", "http://x"], "--api-base needs --model"),
            (["--reflection-model", "x/y"], "--reflection-model needs --model"),
            (["--model", "openai/"], "no model id"),
            (["--save", "program.pkl"], "expected a .json file"),
            (["--save", "nowhere/program.json"], "expected a .json file"),
        ],
    )
    def test_options_that_the_demo_refuses(self, arguments, message, capsys, monkeypatch):
        monkeypatch.delenv("COMBEE_DATA", raising=False)
        assert main(["demo", *arguments]) == 2
        assert_one_line(capsys, message)

    def test_a_path_that_cannot_be_written_is_refused_before_the_run(self, capsys, tmp_path):
        (tmp_path / "folder.json").mkdir()
        for path in (tmp_path / "folder.json", "/proc/program.json"):
            assert main(["demo", "--save", str(path)]) == 2
            assert_one_line(capsys, f"{path}: it cannot be written")

    def test_a_path_that_cannot_be_written_after_the_run(self, capsys, monkeypatch, tmp_path, two_seeds):
        path = tmp_path / "folder" / "program.json"
        path.parent.mkdir()
        monkeypatch.setattr(demo, "_explain", lambda outcome, seed: path.parent.rmdir())
        assert main(["demo", "--save", str(path)]) == 2
        assert capsys.readouterr().err == (
            f"error: --save {path}: it cannot be written: [Errno 2] No such file or directory: '{path}'\n"
        )

    def test_a_file_to_save_to_is_not_made_before_there_is_something_to_save(self, capsys, monkeypatch, tmp_path):
        def interrupt(trial, arm, options):
            raise KeyboardInterrupt

        monkeypatch.setattr(demo, "_learn", interrupt)
        kept = tmp_path / "kept.json"
        kept.write_text("{}")
        for path in (kept, tmp_path / "new.json"):
            assert main(["demo", "--save", str(path)]) == 130
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept.json", "{}")]

    @pytest.mark.parametrize("task", ["formula", "finer"])
    def test_a_folder_in_place_of_the_data(self, task, capsys, tmp_path):
        assert main(["demo", "--data", str(tmp_path), "--task", task]) == 2
        assert_one_line(capsys, f"{tmp_path} is a folder; expected a file of JSON lines with context and target")

    def test_no_command(self, capsys):
        with pytest.raises(SystemExit):
            main([])
        assert_one_line(capsys, "COMMAND")

    def test_an_interrupt_is_no_traceback(self, capsys, monkeypatch):
        def interrupt(trial, arm, options):
            raise KeyboardInterrupt

        monkeypatch.setattr(demo, "_learn", interrupt)
        assert main(["demo"]) == 130
        assert capsys.readouterr().err == "error: interrupted\n"

    def test_every_option_says_what_it_is(self, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["demo", "--help"])
        assert caught.value.code == 0
        text = capsys.readouterr().out
        for option in (
            "data",
            "task",
            "model",
            "reflection-model",
            "api-base",
            "num-threads",
            "minibatch-size",
            "save",
        ):
            assert re.search(rf"^  --{option}\b.*?(\n {{10,}}| {{2,}})\w", text, re.MULTILINE), option


def assert_one_line(capsys, message):
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""
