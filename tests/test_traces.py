"""Traces in files: what is read, what is refused and how it is named, redaction, saving, memory."""

import json
import logging
import os
import pickle
import shutil
import sys
import threading
import tracemalloc
import types
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_combee import CombeeError, Trace, load_traces, save_traces
from dspy_combee.traces import (
    TraceCounts,
    TraceError,
    TraceMessage,
    all_readers,
    files,
    readers,
    redact_trace,
    register_reader,
)
from dspy_combee.traces.types import KINDS

SAMPLES = Path(__file__).parent / "data" / "traces"
HAS_ATIF = sys.version_info >= (3, 11)
GOOD = {"inputs": {"x": "é"}, "score": 1}

SOURCES = [
    "alone.json",
    "job/alpha__1/agent/trajectory.json",
    "job/beta__1/agent/trajectory.json",
    "job/delta__1/steps/first/agent/trajectory.json",
    "job/gamma/trajectory.json",
    "own.jsonl:1",
    "own.jsonl:3",
    "nightly run 12",
    "terminal_bench.jsonl:1",
    "terminal_bench.jsonl:2",
    "terminal_bench.jsonl:3",
]


@pytest.fixture(autouse=True)
def atif(monkeypatch):
    """Where the package cannot be installed, what follows its validation is tested without it."""
    if not HAS_ATIF:
        anything = types.SimpleNamespace(Trajectory=types.SimpleNamespace(model_validate=lambda value: value))
        monkeypatch.setitem(sys.modules, "atif", anything)


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def trajectory(*messages):
    steps = [{"step_id": i, "source": "user", "message": text} for i, text in enumerate(messages, 1)]
    return {"schema_version": "ATIF-v1.6", "agent": {"name": "a", "version": "1"}, "steps": steps}


def only(path, **options):
    (trace,) = load_traces(path, **options)
    return trace


def error_of(path, **options):
    with pytest.raises(TraceError) as caught:
        list(load_traces(path, **options))
    return str(caught.value)


# Collections --------------------------------------------------------------------------------------------------


def test_a_folder_is_read_in_sorted_order_counted_and_read_again_by_place(caplog):
    caplog.set_level(logging.INFO, "dspy_combee")
    traces = load_traces(SAMPLES)
    assert "not read yet" in repr(traces)
    assert not caplog.records  # Nothing is read before it is asked for.
    assert [trace.source for trace in traces] == SOURCES
    assert traces.counts == TraceCounts(read=11, bad=0, other=7)
    assert caplog.messages == [
        f"Read 11 traces from {SAMPLES}; skipped 0 bad ones and passed over 7 files that hold no traces."
    ]
    assert list(traces) == [traces[index] for index in range(11)]
    assert [traces[index].source for index in range(-11, 0)] == SOURCES
    assert [trace.source for trace in traces[5:8]] == SOURCES[5:8]
    with pytest.raises(IndexError, match="there are 11 traces, none at 11"):
        traces[11]
    assert traces
    assert len(traces) == 11
    assert "read=11" in repr(traces)
    assert len(caplog.messages) == 1


def test_threads_may_share_a_collection():
    traces = load_traces(SAMPLES / "own.jsonl")
    seen = []
    threads = [
        threading.Thread(target=lambda: seen.append(([t.source for t in traces], len(traces)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(SOURCES[5:8], 3)] * 8


def test_memory_does_not_grow_with_the_number_of_traces(tmp_path):
    line = {"task_name": "t", "reward": 1, "steps": json.dumps([{"src": "agent", "msg": "x" * 2000}] * 5)}
    peaks = []
    for count in (100, 2000):
        write(tmp_path / "a.jsonl", *[line] * count)
        traces = load_traces(tmp_path, redact=False)
        tracemalloc.start()
        assert sum(1 for _ in traces) == len(traces) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 200_000  # The places of 1,900 traces; the traces themselves are 19 MB.


WRONG_ARGUMENTS = [
    (ValueError, "format must be one of 'auto', 'jsonl', 'atif', 'terminal_bench', .*, got 'csv'", {"format": "csv"}),
    (ValueError, "on_error must be one of 'raise', 'skip', got 'ignore'", {"on_error": "ignore"}),
    (FileNotFoundError, "no such file or folder", {"path": SAMPLES / "nothing"}),
    (TypeError, "extra_secrets must be several texts", {"extra_secrets": "secret"}),
]


@pytest.mark.parametrize(("error", "message", "arguments"), WRONG_ARGUMENTS)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        load_traces(**{"path": SAMPLES, **arguments})


# Forms --------------------------------------------------------------------------------------------------------


def test_our_own_form():
    solve, ja, tidy = load_traces(SAMPLES / "own.jsonl")
    assert solve == Trace(
        inputs={"question": "What is 12 % of 50?"},
        outputs={"answer": "0.6"},
        feedback="Expected 6. A percentage of a number is the number times the percentage over 100.",
        score=0.0,
        predictor="solve",
        metadata={"model": "small-model"},
    )
    assert ja == Trace({"question": "Ist 7 größer als 5?"}, {"answer": "ja"}, score=1.0)
    assert (solve.source, tidy.source) == ("own.jsonl:1", "nightly run 12")
    assert tidy.steps[1] == TraceMessage("call", "find . -name '*.tmp'", "bash", 1)


def test_rows_of_terminal_bench():
    counted, failed, never = load_traces(SAMPLES / "terminal_bench.jsonl", format="terminal_bench")
    assert counted.inputs == {
        "task_name": "count-lines",
        "task": "Count the lines of data.csv and write the number to out.txt.",
    }
    assert counted.outputs["final_message"].endswith("but the task says lines: 41.")
    assert (counted.score, counted.predictor) == (1.0, None)
    assert counted.metadata == {"agent": "terminus-2", "model": "small-model"}
    assert counted.steps[1:4] == (
        TraceMessage("agent", "I count them with wc.", None, 2),
        TraceMessage("call", "wc -l data.csv", "bash_command", 2),
        TraceMessage("output", "41 data.csv", "bash_command", 2),
    )
    assert failed.steps[2].text == "chmod: missing operand after 'run.sh'"
    assert (never.score, never.steps) == (None, ())


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ({"role": "assistant", "content": "x"}, [("agent", "x", None)]),
        ({"role": "tool", "name": "ls", "content": "x"}, [("output", "x", "ls")]),
        ({"src": "AGENT", "msg": [{"type": "text", "text": "x"}, {"type": "image", "source": {"path": "/etc"}}]},
         [("agent", "x\n[image]", None)]),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
         [("call", "{}", "f")]),
        ({"src": "agent", "tools": "ls", "obs": {"code": 0}},
         [("call", "ls", "tool"), ("output", '{"code": 0}', "tool")]),
        ({"src": "agent", "tools": [{"fn": "f", "cmd": "a"}, {"fn": "g", "cmd": "b"}], "obs": "x"},
         [("call", "a", "f"), ("call", "b", "g"), ("output", "x", None)]),
        ({"observation": {"results": [{"source_call_id": ["unhashable"], "content": "x"}, "y"]}},
         [("output", "x", None), ("output", "y", None)]),
        ({"src": 5, "msg": None}, []),
    ],
)  # fmt: skip
def test_steps_of_rows_may_use_the_usual_names(tmp_path, step, expected):
    trace = only(write(tmp_path / "a.jsonl", {"task_name": "t", "reward": "0.5", "steps": json.dumps([step])}))
    assert [(message.kind, message.text, message.tool) for message in trace.steps] == expected
    assert trace.score == 0.5


def test_an_atif_trajectory_alone():
    trace = only(SAMPLES / "alone.json")
    assert trace.inputs == {"task": "Restart the service web."}
    assert trace.outputs == {"final_message": "The service runs again."}
    assert (trace.score, trace.feedback, trace.source) == (None, "", "alone.json")
    assert trace.metadata == {"agent": "terminus-2", "model": "small-model"}
    assert [(message.kind, message.tool, message.step) for message in trace.steps[2:8]] == [
        ("reasoning", None, 3),
        ("agent", None, 3),
        ("call", "bash", 3),
        ("call", "read_file", 3),
        ("output", "read_file", 3),
        ("output", "bash", 3),
    ]
    # Of paths in a trace nothing is read, and nothing is said.
    assert trace.steps[8].text == "See the picture.\n[image]"
    assert trace.steps[10].text == "[the trajectory of a subagent, not shown]"


def test_trial_folders():
    alpha, beta = only(SAMPLES / "job/alpha__1"), only(SAMPLES / "job/beta__1")
    assert alpha.inputs == {"task_name": "sort-names", "task": "Sort names.txt."}
    assert alpha.score == 1.0  # The verifier's own file goes before the result.
    assert alpha.feedback == "Verifier (test-stdout.txt):\n1 passed in 0.02s"
    assert alpha.source == "agent/trajectory.json"
    assert alpha.metadata["trial_name"] == "alpha__1"
    assert beta.score == 0.5
    assert beta.feedback == (
        "Rewards: tests 0.25, style 0.75\n\n"
        "The run ended in AgentTimeoutError: the agent took longer than 900 seconds\n\n"
        "Verifier (test-stderr.txt):\nAssertionError: 3 != 4"
    )
    # What the continuation copied is there once.
    assert [message.text for message in beta.steps if message.kind in ("user", "agent")] == [
        "Write a parser.",
        "I begin.",
        "I go on and give up.",
    ]


REWARDS = [
    ({"verifier/reward.txt": "0.5\n"}, 0.5),
    ({"verifier/reward.json": '{"reward": 0.25, "other": 1}'}, 0.25),
    ({"verifier/reward.json": "0.75", "verifier/reward.txt": "0"}, 0.75),
    ({"verifier/reward.json": '{"a": 1, "b": 0, "c": null}'}, 0.5),
    ({"verifier/reward.json": "{}"}, None),
    ({"result.json": '{"verifier_result": {"rewards": {"reward": 1.0}}}'}, 1.0),
    ({"result.json": '{"verifier_result": {"reward": 0.5}}'}, 0.5),
    ({"result.json": '{"verifier_result": null, "reward": 0}'}, 0.0),
    ({"results.json": '{"is_resolved": false}'}, 0.0),
    ({"results.json": '{"is_resolved": null}'}, None),
    ({"results.json": "[]"}, None),
    ({"exception.txt": "Boom"}, None),
]


@pytest.mark.parametrize("place", ["agent/trajectory.json", "trajectory.json"])
@pytest.mark.parametrize(("parts", "score"), REWARDS)
def test_rewards(tmp_path, place, parts, score):
    write(tmp_path / place, trajectory("Do it."))
    for name, text in parts.items():
        write(tmp_path / name, text)
    assert only(tmp_path).score == score


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("verifier/reward.txt", "", "a score must be a finite number, not ''"),
        ("verifier/reward.txt", "nan", "a score must be a finite number"),
        ("verifier/reward.json", "{", "not JSON"),
        ("verifier/reward.json", '{"reward": [1]}', "a score must be a finite number"),
        ("verifier/reward.json", "1e999", "a score must be a finite number"),
        ("result.json", '{"reward": "much"}', "a score must be a finite number, not 'much'"),
        ("result.json", "\xff", "not UTF-8"),
        ("agent/trajectory.cont-1.json", "x", "not JSON"),
    ],
)
def test_a_bad_file_of_a_trial_is_named(tmp_path, name, text, message):
    write(tmp_path / "trial/agent/trajectory.json", trajectory("Do it."))
    path = tmp_path / "trial" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode("latin-1"))
    assert error_of(tmp_path).startswith(f"{path}: {message}")
    assert load_traces(tmp_path, on_error="skip").counts.bad == 1


def test_the_end_of_a_long_verifier_output(tmp_path):
    write(tmp_path / "agent/trajectory.json", trajectory("Do it."))
    write(tmp_path / "verifier/test-stdout.txt", "ä" * 50_000 + "\n1 failed\n")
    feedback = only(tmp_path).feedback
    assert feedback.startswith("Verifier (test-stdout.txt):\n[... 83,626 bytes cut ...]\n")
    assert feedback.endswith("ä\n1 failed")
    assert len(feedback) < 17_000


BROKEN_ATIF = [
    ({"steps": [{"step_id": 2, "source": "user", "message": "x"}]}, "step_id=2 is not sequential"),
    ({"agent": {"name": "a"}}, "agent.version: Field required"),
    ({"surprise": "sk-" + "a1" * 20}, "surprise: Extra inputs are not permitted"),
    ({"steps": [{"step_id": 1, "source": "user", "message": "x", "timestamp": "password=hunter2"}]}, "ISO 8601"),
]

if HAS_ATIF:

    @pytest.mark.parametrize(("change", "message"), BROKEN_ATIF)
    def test_atif_is_validated(tmp_path, change, message):
        path = write(tmp_path / "a.json", trajectory("Do it.") | change)
        error = error_of(tmp_path)
        assert error.startswith(f"{path}: not an ATIF trajectory: ")
        assert message in error
        assert "a1a1" not in error
        assert "hunter2" not in error


def test_without_atif_the_message_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "atif", None)
    for on_error in ("raise", "skip"):
        with pytest.raises(ImportError, match=r"'dspy-combee\[traces\]'"):
            list(load_traces(SAMPLES / "job", on_error=on_error))
    assert len(load_traces(SAMPLES / "own.jsonl")) == 3


def test_a_form_can_be_asked_for(tmp_path):
    assert [trace.source for trace in load_traces(SAMPLES, "atif")] == SOURCES[:5]
    assert len(load_traces(SAMPLES / "own.jsonl", "jsonl")) == 3
    assert load_traces(SAMPLES / "job", "jsonl").counts.read == 0
    assert "a trace has no field 'agent'" in error_of(SAMPLES / "terminal_bench.jsonl", format="jsonl")
    assert "a trace has no field 'agent'" in error_of(SAMPLES / "alone.json", format="jsonl")
    single = write(tmp_path / "one.json", '{\n "inputs": {"q": "x"},\n "score": 1}')
    assert only(single) == only(tmp_path) == Trace({"q": "x"}, score=1)


# Readers ------------------------------------------------------------------------------------------------------


class LabLogs:
    """The reader of the documentation, and what it may do wrong."""

    def sniff(self, path, head):
        return path.suffix == ".lab" and (path.is_dir() or head.startswith(b"LAB 1"))

    def read(self, path):
        for block in (path / "log" if path.is_dir() else path).read_text("utf-8").split("\n\n")[1:]:
            if block == "bad":
                yield TraceError("no block")
            else:
                question, answer, verdict = block.splitlines()
                yield Trace({"question": question}, {"answer": answer}, score=verdict == "right", source=path.stem)


def test_a_reader_can_be_registered(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_registered", {})
    register_reader("lab", LabLogs())
    text = "LAB 1\n\n1+1\n2\nright\n\nbad\n\n1+2\n4\nwrong"
    write(tmp_path / "a.lab", text)
    write(tmp_path / "b.lab", "something else")
    write(tmp_path / "c.lab/log", text)
    write(tmp_path / "d.jsonl", GOOD)
    traces = load_traces(tmp_path, on_error="skip")
    assert [(trace.source, trace.score) for trace in traces] == [
        *(("a", 1.0), ("a", 0.0)), *(("c.lab/c", 1.0), ("c.lab/c", 0.0)), ("d.jsonl:1", 1.0)
    ]  # fmt: skip
    assert traces.counts == TraceCounts(read=5, bad=2, other=1)
    assert [traces[index].outputs.get("answer") for index in (3, 0, 1)] == ["4", "2", "4"]
    assert error_of(tmp_path) == f"{tmp_path / 'a.lab'}: no block"
    assert len(load_traces(tmp_path, "lab", "skip")) == 4
    (tmp_path / "a.lab").unlink()
    with pytest.raises(TraceError, match=r"a\.lab: cannot be read"):
        traces[0]


def test_an_installed_package_brings_its_readers(monkeypatch):
    entry = types.SimpleNamespace(name="lab", load=lambda: LabLogs)
    monkeypatch.setattr(readers, "entry_points", lambda group: [entry] if group == "dspy_combee.trace_readers" else [])
    readers._installed.cache_clear()
    try:
        assert list(all_readers()) == ["lab", "jsonl", "atif", "terminal_bench", "harbor"]
    finally:
        readers._installed.cache_clear()


CONTRACT = [("jsonl", "own.jsonl", 3), ("atif", "alone.json", 1), ("terminal_bench", "terminal_bench.jsonl", 3)]


@pytest.mark.parametrize(("name", "place", "count"), [*CONTRACT, ("harbor", "job/alpha__1", 1)])
def test_every_reader_knows_its_own_form_and_no_other(name, place, count):
    path = SAMPLES / place
    head = b"" if path.is_dir() else path.read_bytes()
    assert [known for known, reader in all_readers().items() if reader.sniff(path, head)] == [name]
    traces = list(all_readers()[name].read(path))
    assert traces == list(load_traces(path, redact=False))
    assert len(traces) == count


# What is bad --------------------------------------------------------------------------------------------------

BAD_LINES = [
    ("{", "not JSON: Expecting property name"),
    ("[1]", "no trace in a known form"),
    ('{"x": 1}', "no trace in a known form"),
    ('{"inputs": {}, "ouputs": {}, "score": 1}', "a trace has no field 'ouputs'; known are format, version, inputs"),
    ('{"inputs": [], "score": 1}', "inputs must be a mapping of field names to values, not list"),
    ('{"inputs": null, "score": 1}', "a trace has 'inputs'"),
    ('{"inputs": {}, "score": "1"}', "a score must be a number, not '1'"),
    ('{"inputs": {}, "score": NaN}', "a score must be a finite number, not nan"),
    ('{"inputs": {}, "feedback": 5}', "feedback must be text, not int"),
    ('{"inputs": {}, "steps": {}}', "'steps' must be a list of objects"),
    ('{"inputs": {}, "steps": [{"kind": "agent"}]}', "a step has 'kind' and 'text'"),
    ('{"inputs": {}, "steps": [{"kind": "agent", "text": "", "x": 1}]}', "a step has no field 'x'"),
    ('{"inputs": {}, "steps": [{"kind": "robot", "text": ""}]}', "a message's kind is one of system, user"),
    ('{"inputs": {}, "steps": [{"kind": "agent", "text": "", "step": -1}]}', "a message's step must be an int >= 0"),
    ('{"format": "dspy_combee.trace", "version": 2, "inputs": {}}', "'format' 'dspy_combee.trace' and 'version' 1"),
    ('{"task_name": 5, "steps": []}', "'task_name' must be text, not int"),
    ('{"task_name": "t", "steps": "{"}', "'steps' is not JSON"),
    ('{"task_name": "t", "steps": "[1]"}', "'steps' must be a JSON text of a list of objects"),
    ('{"task_name": "t", "reward": "much", "steps": []}', "a score must be a finite number, not 'much'"),
    ('{"task_name": "t", "reward": "password=hunter2", "steps": []}', "a score must be a finite number, not 'passw"),
    ('{"inputs": {"x": ' + "[" * 100_000 + "]" * 100_000 + '}, "score": 1}', "nested too deeply"),
    ('{"inputs": {"x": 1' + "0" * 5000 + "1e999}, nope", "not JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_or_skipped(tmp_path, caplog, line, message):
    path = write(tmp_path / "inside" / "a.jsonl", GOOD, "\n", line + "\n", GOOD)
    with pytest.raises(TraceError) as caught:
        list(load_traces(tmp_path))
    assert isinstance(caught.value, CombeeError | ValueError)
    assert caught.value.place == f"{path}:3"
    assert str(caught.value).startswith(f"{path}:3: {message}")
    assert "hunter2" not in str(caught.value)
    traces = load_traces(tmp_path, on_error="skip")
    assert [trace.source for trace in traces] == ["inside/a.jsonl:1", "inside/a.jsonl:4"]
    assert traces.counts == TraceCounts(2, 1, 0)
    assert str(caught.value) in caplog.text
    assert traces[1].inputs == {"x": "é"}


def test_a_line_that_is_not_utf8_or_too_long(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    good = b'{"inputs": {}, "score": 1}\n'
    path.write_bytes(b"\xef\xbb\xbf" + good + b'{"inputs": {"x": "\xff"}, "score": 1}\n' + good)
    assert error_of(path).startswith(f"{path}:2: not UTF-8: invalid start byte at byte 18")
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    path.write_bytes(good + b"x" * 1000 + b"\n" + good + b"y" * 101)
    traces = load_traces(path, on_error="skip")
    assert [trace.source for trace in traces] == ["a.jsonl:1", "a.jsonl:3"]
    assert traces.counts.bad == 2
    assert error_of(path) == f"{path}:2: longer than 100 bytes"
    write(tmp_path / "b.json", trajectory("x" * 200))
    assert "longer than 100 bytes" in error_of(tmp_path / "b.json")


def test_only_the_first_skipped_ones_are_logged(tmp_path, caplog):
    write(tmp_path / "a.jsonl", *["{\n"] * 30)
    traces = load_traces(tmp_path, on_error="skip")
    assert not traces
    assert len(traces) == 0
    assert list(traces) == []
    assert sum("Skipped a bad trace" in message for message in caplog.messages) <= 20
    assert "further ones are only counted" in caplog.text
    assert "skipped 30 bad ones" in caplog.messages[-1]


def test_files_that_are_no_traces(tmp_path):
    write(tmp_path / "config.json", {"a": 1})
    write(tmp_path / "list.json", "[1, 2]")
    write(tmp_path / "log.jsonl", {"level": "info"}, "not even JSON")
    write(tmp_path / "empty.jsonl")
    write(tmp_path / "run.py", "import os")
    write(tmp_path / "data.pkl", "x")
    write(tmp_path / ".hidden.jsonl", "{")
    write(tmp_path / ".git/x.jsonl", "{")
    assert load_traces(tmp_path).counts == TraceCounts(0, 0, 5)
    # The same file given by its own name must hold traces.
    assert error_of(tmp_path / "config.json") == f"{tmp_path / 'config.json'}: no trace in a known form"
    assert "no trace in a known form" in error_of(tmp_path / "log.jsonl")
    assert "not JSON" in error_of(tmp_path / "run.py")


def test_a_pickle_is_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Bomb()))
    shutil.copy(tmp_path / "a.pkl", tmp_path / "b.jsonl")
    assert load_traces(tmp_path, on_error="skip").counts.read == 0
    assert "not UTF-8" in error_of(tmp_path / "a.pkl")
    assert not (tmp_path / "exploded").exists()


def test_links_and_pipes_are_not_followed(tmp_path):
    outside = write(tmp_path / "outside/a.jsonl", GOOD)
    write(tmp_path / "outside/reward.txt", "1")
    folder = tmp_path / "folder"
    write(folder / "trial/agent/trajectory.json", trajectory("Do it."))
    (folder / "trial/verifier").mkdir()
    (folder / "trial/verifier/reward.txt").symlink_to(tmp_path / "outside/reward.txt")
    (folder / "linked/agent").mkdir(parents=True)
    (folder / "linked/agent/trajectory.json").symlink_to(SAMPLES / "alone.json")
    (folder / "b.jsonl").symlink_to(outside)
    (folder / "c").symlink_to(tmp_path / "outside")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "d.jsonl")
    traces = load_traces(folder)
    assert [(trace.source, trace.score) for trace in traces] == [("trial/agent/trajectory.json", None)]
    assert traces.counts == TraceCounts(1, 0, 5)
    # What the user names is the user's own choice.
    assert len(load_traces(folder / "b.jsonl")) == len(load_traces(folder / "c")) == 1
    assert "not a regular file" in error_of(folder / "d.jsonl")


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", GOOD)
    write(tmp_path / "b/c.jsonl", GOOD)
    traces = load_traces(path)
    assert len(traces) == 1
    path.write_text("x" * 100, "utf-8")
    with pytest.raises(TraceError, match=r"a\.jsonl:1: not JSON"):
        traces[0]
    path.unlink()
    with pytest.raises(TraceError, match=r"a\.jsonl: cannot be read: No such file"):
        traces[0]
    real = os.scandir

    def refusing(folder):
        if Path(folder).name == "b":
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(os, "scandir", refusing)
    assert error_of(tmp_path) == f"{tmp_path / 'b'}: cannot be read: Permission denied"
    assert load_traces(tmp_path, on_error="skip").counts.bad == 1
    monkeypatch.setattr(readers, "MAX_DEPTH", 0)
    assert error_of(tmp_path) == f"{tmp_path / 'b'}: nested too deeply"


# Redaction and saving -----------------------------------------------------------------------------------------


def test_secrets_are_redacted_on_load(tmp_path):
    key = "sk-" + "a1B2c3" * 8
    trace = Trace(
        {"api_key": "abc", "text": f"use {key}"},
        {"answer": [key]},
        f"password=hunter2 and {key}",
        steps=(TraceMessage("call", f"export K={key}", "bash", 1),),
        metadata={"env": {"DB_PASSWORD": "x y"}, "dog": "Rexona"},
    )
    save_traces([trace], tmp_path / "a.jsonl")
    read = only(tmp_path / "a.jsonl", extra_secrets=["Rexona"])
    assert read == Trace(
        {"api_key": "[redacted]", "text": "use [redacted]"},
        {"answer": ["[redacted]"]},
        "password=[redacted] and [redacted]",
        steps=(TraceMessage("call", "export K=[redacted]", "bash", 1),),
        metadata={"env": {"DB_PASSWORD": "[redacted]"}, "dog": "[redacted]"},
    )
    assert load_traces(tmp_path, extra_secrets=["Rexona"])[0] == read
    assert redact_trace(trace, ["Rexona"]) == read
    assert only(tmp_path / "a.jsonl", redact=False) == trace


text = st.text(st.one_of(st.characters(), st.characters(categories=["Cs"])))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), text),
    lambda values: st.one_of(st.lists(values), st.tuples(values), st.dictionaries(text, values)),
    max_leaves=5,
)
fields = st.dictionaries(text, json_values, max_size=3)
messages = st.builds(TraceMessage, st.sampled_from(KINDS), text, st.none() | text, st.integers(0))
scores = st.none() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False)
steps_ = st.lists(messages, max_size=3).map(tuple)
traces_ = st.builds(Trace, fields, fields, text, scores, st.none() | text, steps_, text, fields)


@given(st.lists(traces_, max_size=3))
def test_every_trace_comes_back_as_it_was_saved(tmp_path_factory, traces):
    path = tmp_path_factory.mktemp("saved") / "a.jsonl"
    assert save_traces(iter(traces), path) == len(traces)
    read = load_traces(path, redact=False)
    assert list(read) == traces
    assert [t.source for t in read] == [t.source or f"a.jsonl:{i}" for i, t in enumerate(traces, 1)]
    assert save_traces(read, path) == len(traces)  # Over its own file.
    assert list(load_traces(path, redact=False)) == traces


def test_saving_is_whole_or_not_at_all(tmp_path):
    path = write(tmp_path / "a.jsonl", "old")

    def traces():
        yield Trace({"x": 1})
        raise KeyError("stop")

    with pytest.raises(KeyError):
        save_traces(traces(), path)
    with pytest.raises(TypeError, match="traces must be Trace objects, not dict"):
        save_traces([{"inputs": {}}], path)
    assert path.read_text("utf-8") == "old"
    assert os.listdir(tmp_path) == ["a.jsonl"]
    save_traces([Trace({"when": Path("a/b"), 5: {1}})], path)  # What JSON has no form for is saved as text.
    assert only(path).inputs == {"when": "a/b", "5": "{1}"}


def test_traces_are_frozen_and_clean():
    given_inputs = {"a": ("x\ud800", {1: "y"})}
    trace = Trace(given_inputs, feedback="\udfff", score=True)
    assert trace.inputs == {"a": ["x\ufffd", {"1": "y"}]}
    assert (trace.feedback, trace.score) == ("\ufffd", 1.0)
    assert given_inputs == {"a": ("x\ud800", {1: "y"})}
    for target, name in ((trace, "score"), (TraceMessage("agent", "x"), "text")):
        with pytest.raises(FrozenInstanceError):
            setattr(target, name, "y")
    assert replace(trace, source="elsewhere") == trace
    with pytest.raises(TraceError, match="steps must be TraceMessage objects"):
        Trace({}, steps=({"kind": "agent"},))
