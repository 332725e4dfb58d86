"""`steps.jsonl`: written as steps happen, readable after a kill, taken back to where a resumed run starts."""

import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dspy_combee import Playbook, StepRecord
from dspy_combee.playbook.records import PlaybookStep
from dspy_combee.records.step_log import FILE_NAME, StepLog, read_steps, step_from_dict
from dspy_combee.report import html_page, report_main
from dspy_combee.report.playbook import playbook_histories

from . import playbook_lessons
from .lessons import Chain, examples, learn, learning_lm
from .playbook_lessons import add, lesson, playbook_lm
from .report_samples import HOSTILE, playbook_steps, steps_of

ROOT = str(Path(__file__).parent.parent)
KINDS = {"steps": lambda: steps_of(9), "playbook steps": lambda: playbook_steps(6)[0]}


@pytest.fixture(params=KINDS)
def steps(request):
    return list(KINDS[request.param]())


@pytest.fixture
def log(tmp_path, steps):
    made = StepLog(tmp_path)
    for step in steps:
        made.append(step)
    return made


# Writing and reading -----------------------------------------------------------------------------------------


def test_steps_come_back_equal(log, steps, tmp_path):
    assert read_steps(tmp_path) == read_steps(log.path) == read_steps(os.fspath(log.path)) == steps


def test_each_line_is_a_json_object_that_holds_a_step(log, steps):
    lines = log.path.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    assert [json.loads(line)["iteration"] for line in lines] == [step.iteration for step in steps]


def test_hostile_texts_come_back_as_they_were(log):
    texts = [reduction.current + str(reduction.text) for step in read_steps(log.path) for reduction in step.reductions]
    texts += [item.text for step in read_steps(log.path) for item in getattr(step, "reflections", ())]
    assert "\ud800" in HOSTILE
    assert "\u2028" in HOSTILE
    assert any(HOSTILE in text for text in texts)


def test_a_step_is_on_disk_when_append_returns(tmp_path):
    script = (
        f"import os, signal, sys; sys.path.insert(0, {ROOT!r})\n"
        "from dspy_combee.records.step_log import StepLog\n"
        "from tests.report_samples import steps_of\n"
        "log = StepLog(sys.argv[1])\n"
        "for step in steps_of(3): log.append(step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60)
    assert run.returncode == -signal.SIGKILL
    assert read_steps(tmp_path) == list(steps_of(3))


def test_a_folder_without_steps_has_none(tmp_path):
    assert read_steps(tmp_path) == []
    assert read_steps(tmp_path / "missing") == []
    assert StepLog(tmp_path / "new" / "folder").resume(3) == []


def test_fields_of_a_later_version_are_left_out(steps):
    plain = json.loads(json.dumps(steps[0].to_dict(), default=str))
    plain["new"] = plain["usage"]["new"] = plain["reductions"][0]["nodes"][0]["new"] = 1
    assert step_from_dict(plain) == steps[0]


def test_ids_that_json_does_not_know_become_text(tmp_path):
    step = replace(steps_of(1)[0], minibatch_ids=(("a", 1), 2, "x"))
    StepLog(tmp_path).append(step)
    assert read_steps(tmp_path)[0].minibatch_ids == ("('a', 1)", 2, "x")


# After a kill ------------------------------------------------------------------------------------------------


def cut(log, *, left: int):
    data = log.path.read_bytes()
    log.path.write_bytes(data[: data.rindex(b"\n", 0, -1) + 1 + left])


@pytest.mark.parametrize("left", [0, 1, 10, 500])
def test_a_line_that_is_cut_short_is_left_out(log, steps, caplog, left):
    cut(log, left=left)
    with caplog.at_level(logging.WARNING, "dspy_combee"):
        assert read_steps(log.path) == steps[:-1]
    assert ("is incomplete" in caplog.text) == (left > 0)


def test_a_character_that_is_cut_in_two_is_left_out(log, steps):
    with log.path.open("ab") as file:
        file.write('{"iteration": 10, "text": "é'.encode()[:-1])
    assert read_steps(log.path) == steps


@pytest.mark.parametrize("line", [b"{", b"[]", b"1", b'"text"', b"null", b"{}", b"\xff\xfe", b'{"changes": []}'])
def test_another_line_that_is_no_step_is_an_error_that_says_where(log, steps, line):
    lines = log.path.read_bytes().split(b"\n")
    log.path.write_bytes(b"\n".join([lines[0], line, *lines[1:]]))
    before = log.path.read_bytes()
    with pytest.raises(ValueError, match=rf"{FILE_NAME}:2 is no step record"):
        read_steps(log.path)
    with pytest.raises(ValueError, match=rf"{FILE_NAME}:2 is no step record"):
        log.resume(2)
    assert log.path.read_bytes() == before


@pytest.mark.parametrize("damage", [None, 0, 40])
def test_resume_takes_off_what_is_done_again(log, steps, damage):
    if damage is not None:
        cut(log, left=damage)
    kept = log.path.read_bytes().split(b"\n")[:3]
    assert log.resume(4) == steps[:3]
    assert log.path.read_bytes().split(b"\n") == [*kept, b""]
    again = replace(steps[3], reason="again")
    log.append(again)
    assert read_steps(log.path) == [*steps[:3], again]
    assert list(log.path.parent.iterdir()) == [log.path]


def test_a_run_that_starts_anew_leaves_none(log):
    assert log.resume(0) == []
    assert read_steps(log.path) == []


# Runs --------------------------------------------------------------------------------------------------------


def test_a_run_writes_its_steps_as_they_happen(tmp_path):
    seen = []

    def look(step):
        seen.append(step)
        assert read_steps(tmp_path) == seen

    result = learn(learning_lm(), n_train=20, log_dir=str(tmp_path), step_callbacks=[look]).detailed_results
    assert [step.iteration for step in seen] == [step.iteration for step in result.steps] != []
    assert tuple(read_steps(tmp_path)) == result.steps


def rich_curator(prompt):
    """Adds, updates, merges and removes, and names what it may not."""
    known = list(playbook_lessons.bullets_in(prompt))
    made = playbook_lessons.curate(prompt)["operations"]
    made.append(add(f"{HOSTILE[:-6]} {len(known)}", "s99.r99"))
    made.append({"type": "REMOVE", "id": "misc-99999", "reason": "gone"})
    if len(known) > 3:
        made.append({"type": "MERGE", "ids": known[:2], "content": f"Both of {known[:2]}."})
        made.append({"type": "UPDATE", "id": known[2], "content": f"A newer {known[2]}."})
        made += [{"type": "REMOVE", "id": name, "reason": "wrong"} for name in known[2:4]]
    return {"operations": made}


def rich_reflector(prompt):
    known = list(playbook_lessons.bullets_in(prompt))
    told = playbook_lessons.reflect(prompt)["key_insight"]
    tags = [(name, tag) for name, tag in zip(known, ("helpful", "harmful", "neutral", "odd"), strict=False)]
    return lesson(told, [*tags, *tags[:1], ("none-00001", "helpful")])


def test_a_playbook_run_writes_its_steps_with_all_their_fields(tmp_path):
    lm = playbook_lm(reflector=rich_reflector, curator=rich_curator)
    options = {"n_train": 12, "num_epochs": 3, "token_budget": 150, "valset": examples(3), "log_dir": tmp_path}
    program = playbook_lessons.learn(lm, Chain(), **options)
    steps = program.detailed_results.steps
    read = read_steps(tmp_path)
    assert {type(step) for step in read} == {PlaybookStep}
    assert {kind for step in steps for kind in (type(item.delta).__name__ for item in step.applied)} >= {
        "Add",
        "Merge",
        "Update",
        "Remove",
    }
    for name in ("refused", "conflicts", "pruned", "reflections", "unused_reflections"):
        assert any(getattr(step, name) for step in steps), name
    assert [step.to_dict() for step in read] == [step.to_dict() for step in steps]
    assert [step.changes for step in read] == [step.changes for step in steps]
    assert [step.applied for step in read] == [step.applied for step in steps]
    assert [step.reductions for step in read] == [step.reductions for step in steps]
    assert html_page(read) == html_page(steps)
    file, count = report_main(tmp_path)
    assert count == len(steps)
    program.detailed_results.save_html(tmp_path / "other.html")
    assert file.read_bytes() == (tmp_path / "other.html").read_bytes()


@pytest.mark.parametrize("aggregator", ["tree", "flat", "top_k", "summarize"])
def test_the_steps_of_any_aggregator_come_back(aggregator, tmp_path):
    program = playbook_lessons.learn(playbook_lm(), aggregator=aggregator, log_dir=tmp_path)
    assert [step.to_dict() for step in read_steps(tmp_path)] == [
        step.to_dict() for step in program.detailed_results.steps
    ]


class Stop(BaseException):
    pass


def stop_at(iteration):
    def stop(step: StepRecord):
        if step.iteration == iteration:
            raise Stop

    return stop


def test_a_resumed_playbook_run_has_the_steps_of_the_whole_run(tmp_path):
    options = {"n_train": 12, "minibatch_size": 4, "num_epochs": 2}
    unbroken = playbook_lessons.learn(playbook_lm(), **options).detailed_results
    with pytest.raises(Stop):
        playbook_lessons.learn(playbook_lm(), log_dir=tmp_path, step_callbacks=[stop_at(3)], **options)
    log = StepLog(tmp_path)
    log.append(replace(read_steps(tmp_path)[-1], iteration=4, reason="its state was not saved"))
    with log.path.open("a") as file:
        file.write('{"iteration": 5, "par')
    resumed = playbook_lessons.learn(playbook_lm(), log_dir=tmp_path, **options).detailed_results
    assert [step.iteration for step in resumed.steps] == [1, 2, 3, 4, 5, 6]
    assert [step.changes for step in resumed.steps] == [step.changes for step in unbroken.steps]
    assert [step.iteration for step in read_steps(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert "not saved" not in log.path.read_text(encoding="utf-8")


def test_a_state_of_another_run_leaves_the_steps_alone(tmp_path):
    playbook_lessons.learn(playbook_lm(), log_dir=tmp_path)
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(ValueError, match="another run"):
        playbook_lessons.learn(playbook_lm(), log_dir=tmp_path, seed=5)
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_secrets_do_not_reach_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "very-secret-value")

    def refuses(prompt):
        raise ValueError("refused: very-secret-value")

    lm = playbook_lm((lambda prompt: playbook_lessons.is_curator(prompt), refuses))
    with pytest.raises(Exception, match="in a row"):
        playbook_lessons.learn(lm, log_dir=tmp_path, num_epochs=3)
    text = (tmp_path / FILE_NAME).read_text(encoding="utf-8")
    assert "refused" in text
    assert "very-secret-value" not in text


def test_playbooks_read_back_are_those_of_the_report(tmp_path):
    program = playbook_lessons.learn(playbook_lm(), n_train=12, num_epochs=2, log_dir=tmp_path)
    (history,) = playbook_histories(read_steps(tmp_path))
    alive = {bullet.id for bullet in history.bullets.values() if not bullet.gone}
    assert alive == {bullet.id for bullet in Playbook.from_program(program)}
