"""The report of a run: its numbers, its escaping, its command and the plots."""

import base64
import builtins
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import matplotlib as mpl
import pytest
from matplotlib import pyplot

from dspy_combee import ProposalNode, Reduction
from dspy_combee.__main__ import main
from dspy_combee.report import html_page, report_main, save_html
from dspy_combee.report.data import as_text, delay_curve, page_data, phase_rows, score_points, tree_of
from dspy_combee.report.diff import CONTEXT_LINES, diff_lines
from dspy_combee.report.step_log import StepLog, read_steps

from .lessons import learn, learning_lm
from .report_samples import EXAMPLES, HOSTILE, playbook_steps, reduction, steps_of

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def data_in(page: str):
    return json.loads(DATA.search(page).group(1))


# The page ----------------------------------------------------------------------------------------------------


def test_texts_of_the_run_are_no_markup_in_the_page():
    page = html_page(steps_of(3))
    assert "hacked" in page
    assert "<img" not in page
    assert "<!--" not in page
    assert page.count("<script") == page.count("</script") == 2  # The data and the page's own.
    assert not set("<>&") & set(DATA.search(page).group(1))


def test_texts_come_back_from_the_page_as_they_were():
    steps = steps_of(3)
    (component,) = data_in(html_page(steps))["steps"][1]["components"]
    assert component["text"] == steps[1].reductions[0].text
    assert component["nodes"][0]["reply"] == "It was cut"
    assert component["nodes"][1]["output"] == steps[1].nodes[1].output
    assert component["nodes"][1]["prompt"] == steps[1].nodes[1].prompt


def test_the_policy_names_the_page_s_own_style_and_script_and_nothing_else():
    page = html_page(steps_of(1))
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page).group(1)
    assert policy.startswith("default-src 'none'; ")
    for tag, part in (("style", re.search(r"<style>(.*?)</style>", page, re.DOTALL)),):
        assert f"{tag}-src '{_digest(part.group(1))}'" in policy
    assert f"script-src '{_digest(page.rpartition('<script>')[2].partition('</script>')[0])}'" in policy
    assert "unsafe" not in policy
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_nothing_in_the_script_parses_html():
    script = html_page(()).rpartition("<script>")[2]
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert name not in script


def test_numbers_that_json_does_not_know_are_left_out():
    step = replace(steps_of(1)[0], scores_before=(math.nan, 1.0), scores_after=(math.inf,), best_score=math.nan)
    (shown,) = data_in(html_page([step]))["steps"]
    assert shown["scores_before"] == [None, 1.0]
    assert (shown["before"], shown["after"]) == (None, None)


def test_a_run_without_steps_has_a_page():
    assert data_in(html_page(()))["steps"] == []


def test_a_step_without_reflection_has_a_page():
    failed = Reduction("answer", None, (), 0, 0, "the budget is spent")
    step = replace(steps_of(1)[0], reductions=(failed,), scores_after=(), accepted=False, candidate=None)
    (component,) = data_in(html_page([step]))["steps"][0]["components"]
    assert (component["error"], component["levels"], component["diff"]) == ("the budget is spent", [], None)


def test_long_prompts_are_cut_and_say_so():
    steps = steps_of(1)
    (made,) = steps[0].reductions
    long = replace(made, nodes=(replace(made.nodes[0], prompt="x" * 25_000), *made.nodes[1:]))
    node = page_data([replace(steps[0], reductions=(long,))])["steps"][0]["components"][0]["nodes"][0]
    assert (len(node["prompt"]), node["prompt_left_out"]) == (20_000, 5_000)


# Numbers -----------------------------------------------------------------------------------------------------


def test_totals():
    totals = page_data(steps_of(4))["totals"]
    assert (totals["steps"], totals["accepted"], totals["metric_calls"], totals["seconds"]) == (4, 2, 600, 50.0)
    assert (totals["first"], totals["best"]) == (pytest.approx(0.43), pytest.approx(0.46))
    calls = sum(node.usage.calls for step in steps_of(4) for node in step.nodes)
    assert totals["reflection_calls"] == calls
    assert totals["tokens"] == 4 * 23_000 + 1000 * calls
    assert totals["cost"] == pytest.approx(4 * 0.1 + 0.004 * calls)


def test_one_call_of_unknown_cost_makes_the_sum_unknown():
    first, second = steps_of(2)
    data = page_data([first, replace(second, usage=replace(second.usage, cost=None))])
    assert data["totals"]["cost"] is None
    assert [step["cost"] is None for step in data["steps"]] == [False, True]


def test_time_goes_on_after_a_resume():
    steps = steps_of(4)
    resumed = [*steps[:2], *(replace(step, elapsed=step.elapsed - 25.0) for step in steps[2:])]
    assert [point.seconds for point in score_points(resumed)] == [12.5, 25.0, 37.5, 50.0]


def test_phases_add_up():
    steps = steps_of(8)
    rows = {row.name: row for row in phase_rows(steps)}
    assert list(rows) == ["profiling", "rollouts", "reflection", "validation"]
    assert sum(row.seconds for row in rows.values()) == pytest.approx(
        sum(second for step in steps for second in step.phase_seconds.values())
    )
    assert rows["reflection"].usage.calls == sum(node.usage.calls for step in steps for node in step.nodes)
    assert rows["profiling"].usage.input_tokens == 6 * 20_000
    assert rows["rollouts"].usage.cost == pytest.approx(0.2)
    assert rows["validation"].usage is None


def test_proposals_of_one_iteration_share_their_time_once():
    step = replace(steps_of(1)[0], num_tasks=2)
    data = page_data([step, step])
    assert [shown["shares"] for shown in data["steps"]] == [False, True]
    once = {row.name: row.seconds for row in phase_rows([replace(step, num_tasks=1)])}
    assert {row.name: row.seconds for row in phase_rows([step, step])} == once
    assert data["totals"]["tokens"] == step.usage.input_tokens + step.usage.output_tokens


def test_the_delay_curve_is_the_fit_s_own():
    steps = steps_of(9)
    fit = steps[-1].fit
    curve = delay_curve(steps)
    assert curve.num_examples == EXAMPLES
    assert (curve.choice, curve.reason) == (fit.choice, fit.reason)
    assert [n for n, _ in curve.medians] == [5, 10, 20, 40, 55, 80]
    assert curve.medians[0][1] == pytest.approx(4.5 * EXAMPLES / 5)
    assert curve.line[0] == pytest.approx((5, fit.A * 5**-fit.alpha))
    assert len(curve.steps) == 9


def test_without_a_fit_there_are_seconds_per_example():
    curve = delay_curve(steps_of(3))
    assert (curve.num_examples, curve.line, curve.choice) == (None, (), None)
    assert curve.steps[0] == (5, pytest.approx(4.5 / 5))


def test_a_fit_that_only_measured_shows_its_measurements():
    steps = steps_of(9)
    fit = replace(steps[-1].fit, A=None, alpha=None, first_epoch_seconds=4.5 * EXAMPLES / 5)
    curve = delay_curve([replace(steps[-1], fit=fit)])
    assert (curve.num_examples, curve.line, len(curve.medians)) == (EXAMPLES, (), 6)
    nothing = replace(fit, medians=(), first_epoch_seconds=None)
    assert delay_curve([replace(steps[-1], fit=nothing)]).choice is None


def test_levels_survivors_and_lost_records():
    made = reduction(1, n=6, k=2, failed=1)
    tree = tree_of(made)
    assert [[node.id for node in level] for level in tree.levels] == [["1.0", "1.1"], ["2.0"]]
    assert tree.survivors == {"1.1", "2.0"}
    read = {int(name[1:]) for name in made.nodes[1].inputs}
    assert set(tree.lost) == set(range(6)) - read
    assert tree_of(replace(made, text=None)).lost == tuple(range(6))


def test_ids_of_another_aggregator_will_do():
    nodes = (ProposalNode("left", "answer", ("r0",), "a"), ProposalNode("top", "answer", ("left", "r1"), "b"))
    tree = tree_of(Reduction("answer", "b", nodes, 1, 1, sources=(0, 1)))
    assert [len(level) for level in tree.levels] == [1, 1]
    assert tree.lost == ()


def test_proposals_that_are_no_text():
    steps, _ = playbook_steps(1)
    text = as_text(steps[0].reductions[0].text)
    assert json.loads(text)[0]["type"] == "Add"
    assert page_data(steps)["steps"][0]["components"][0]["diff"] is None
    assert (as_text(None), as_text("a")) == (None, "a")


# The diff ----------------------------------------------------------------------------------------------------


def _side(lines, sign):
    return "\n".join("".join(text for _, text in parts) for op, parts in lines if op in (" ", sign))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a\nb\nc", "a\nB\nc"),
        ("", "a\n\nb"),
        ("a", ""),
        ("Answer in two words.", "Answer in one word, please."),
        ("one\ntwo words here", "one\ntwo words there\nand more"),
        (HOSTILE, f"{HOSTILE}\n{HOSTILE}"),
        (" \n", "\n "),
    ],
)
def test_a_diff_holds_both_texts(old, new):
    lines = diff_lines(old, new)
    assert _side(lines, "-") == old
    assert _side(lines, "+") == new


def test_a_diff_marks_the_words_that_changed():
    (removed, added) = diff_lines("Answer in two words.", "Answer in one word.")
    assert [text for changed, text in removed[1] if changed] == ["two", "words"]
    assert [text for changed, text in added[1] if changed] == ["one", "word"]


def test_texts_without_words_in_common_are_not_marked():
    assert diff_lines("alpha beta", "gamma, delta!") == [
        ("-", [(False, "alpha beta")]),
        ("+", [(False, "gamma, delta!")]),
    ]


def test_a_diff_leaves_out_what_is_far_from_a_change():
    old = [f"line {i}" for i in range(30)]
    lines = diff_lines("\n".join(old), "\n".join(["first", *old[1:], "last"]))
    (skip,) = [parts for sign, parts in lines if sign == "skip"]
    assert skip == [(False, str(29 - 2 * CONTEXT_LINES))]
    assert len(lines) == 3 + 2 * CONTEXT_LINES + 1
    assert diff_lines("same", "same") == []


def test_a_diff_of_long_texts_is_quick():
    old = "\n".join(f"Lesson {i}: do {i * i}, not {i + 1}." for i in range(2000))
    assert len(diff_lines(old, old.replace("not", "never"))) == 4000


# Playbooks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_bullets_are_replayed_from_the_steps(seed):
    steps, playbook = playbook_steps(12, seed)
    (book,) = page_data(steps)["playbooks"]
    alive = {bullet["id"]: bullet for bullet in book["bullets"] if bullet["gone"] is None}
    assert set(alive) == {bullet.id for bullet in playbook}
    for bullet in playbook:
        shown = alive[bullet.id]
        counters = shown["counters"][-1][1:] if shown["counters"] else [0, 0]
        assert (shown["content"], counters) == (bullet.content, [bullet.helpful, bullet.harmful])
    assert [size["bullets"] for size in book["sizes"]] == [step.bullets for step in steps]


def test_reflections_are_shown_with_their_use():
    steps, _ = playbook_steps(2)
    shown = page_data(steps)["steps"][0]["reflections"]
    assert [item["unused"] for item in shown] == [True, False, False, False]
    assert shown[0]["text"].endswith(HOSTILE)


def test_a_run_without_playbooks_has_none():
    assert page_data(steps_of(1))["playbooks"] == []


# From a run, and the command ---------------------------------------------------------------------------------


def test_the_report_of_a_run_from_its_result_and_from_its_folder(tmp_path):
    result = learn(learning_lm(), n_train=20, max_metric_calls=100, log_dir=str(tmp_path / "log")).detailed_results
    result.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(data_in(page)["steps"]) == len(result.steps) > 1
    file, count = report_main(tmp_path / "log")
    assert (file, count) == (tmp_path / "log" / "report.html", len(result.steps))
    assert file.read_text(encoding="utf-8") == page


def test_the_page_of_a_log_is_that_of_the_records(tmp_path):
    steps = steps_of(4)
    log = StepLog(tmp_path)
    for step in steps:
        log.append(step)
    assert len(read_steps(tmp_path)) == 4
    again = page_data(read_steps(tmp_path))
    assert [step["seconds"] for step in again["steps"]] == [step["seconds"] for step in page_data(steps)["steps"]]


def test_the_command_writes_the_page(tmp_path, capsys):
    StepLog(tmp_path).append(steps_of(1)[0])
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out.html")]) == 0
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'out.html'} (1 step).\n"
    assert len(data_in((tmp_path / "out.html").read_text(encoding="utf-8"))["steps"]) == 1


def _nothing(folder):
    return folder / "missing"


def _no_steps_file(folder):
    return folder


def _empty(folder):
    (folder / "steps.jsonl").write_text("")
    return folder


def _other(folder):
    (folder / "steps.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    return folder


def _binary(folder):
    (folder / "steps.jsonl").write_bytes(b"\xff\xfe\n\n")
    return folder


@pytest.mark.parametrize("make", [_nothing, _no_steps_file, _empty, _other, _binary])
def test_the_command_says_in_one_line_what_is_wrong(make, tmp_path, capsys):
    assert main(["report", str(make(tmp_path))]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert not (tmp_path / "report.html").exists()


def test_the_command_says_when_it_cannot_write(tmp_path, capsys):
    StepLog(tmp_path).append(steps_of(1)[0])
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "no" / "out.html")]) == 2
    assert re.fullmatch(r"error: [^\n]+\n", capsys.readouterr().err)


# Plots -------------------------------------------------------------------------------------------------------


@pytest.fixture
def result():
    mpl.use("Agg")
    yield learn(learning_lm(), n_train=20, max_metric_calls=100).detailed_results
    pyplot.close("all")


def test_plots_are_axes(result):
    for axes in (result.plot_scores(), result.plot_delay(), result.plot_tree()):
        assert isinstance(axes, mpl.axes.Axes)
        axes.figure.canvas.draw()
    assert result.plot_scores().get_xlabel() == "metric calls"
    assert result.plot_delay().get_xscale() == result.plot_delay().get_yscale() == "log"


def test_plots_draw_where_they_are_told(result):
    _, panels = pyplot.subplots(1, 3)
    assert result.plot_scores(panels[0]) is panels[0]
    assert result.plot_delay(panels[1]) is panels[1]
    assert result.plot_tree(ax=panels[2]) is panels[2]


def test_the_plot_of_the_delay_shows_fit_and_choice(result):
    axes = replace(result, steps=steps_of(9)).plot_delay()
    assert {line.get_label() for line in axes.lines} == {
        "a step",
        "median of a size",
        "fit",
        f"chosen n = {steps_of(9)[-1].fit.choice}",
    }


def test_the_plot_of_a_tree(result):
    shown = replace(result, steps=steps_of(5))
    assert shown.plot_tree().get_title().startswith("step 4, answer: n = 20, ")
    axes = shown.plot_tree(iteration=2, component="answer")
    assert [text.get_text() for text in axes.texts] == ["1.0", "1.1", "2.0"]
    with pytest.raises(ValueError, match=r"no tree in step 9 for component 'other'"):
        shown.plot_tree(iteration=9, component="other")


def test_playbook_steps_are_plotted_by_their_minibatch_scores(result):
    axes = replace(result, steps=playbook_steps(3)[0]).plot_scores()
    assert axes.get_ylabel() == "mean minibatch score"


@pytest.mark.parametrize("name", ["plot_scores", "plot_delay", "plot_tree"])
def test_there_is_nothing_to_plot_without_steps(result, name):
    with pytest.raises(ValueError, match="There is n"):
        getattr(replace(result, steps=()), name)()


@pytest.mark.parametrize("name", ["plot_scores", "plot_delay", "plot_tree"])
def test_a_missing_matplotlib_is_named_with_its_extra(result, name, monkeypatch):
    real = builtins.__import__

    def without(module, *args, **kwargs):
        if module.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {module!r}")
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"dspy-combee\[report\]"):
        getattr(result, name)()


def test_the_page_needs_no_matplotlib(tmp_path):
    StepLog(tmp_path).append(steps_of(1)[0])
    code = (
        "import sys; from dspy_combee.__main__ import main; status = main(sys.argv[1:]);"
        "sys.exit(status or 'matplotlib' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "report", os.fspath(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr


def test_saving_gives_the_path(tmp_path):
    assert save_html(steps_of(1), os.fspath(tmp_path / "a.html")) == tmp_path / "a.html"
