"""The report of a run: what the page says, that a run's texts stay texts in it, the command and the plots."""

import base64
import hashlib
import html
import json
import re
import sys
from dataclasses import replace

import matplotlib as mpl
import pytest
from matplotlib import pyplot

from dspy_combee import ProposalNode, Reduction, Usage
from dspy_combee.__main__ import main
from dspy_combee.records.step_log import StepLog
from dspy_combee.report import html_page, report_main
from dspy_combee.report.diff import CONTEXT_LINES, diff_lines
from dspy_combee.report.playbook import playbook_histories
from dspy_combee.report.summary import spent_by_phase, tree_of

from .lessons import learn, learning_lm
from .report_samples import EXAMPLES, HOSTILE, playbook_steps, reduction, steps_of

SHOWN = " ".join(HOSTILE.replace("\ud800", "\ufffd").split())
STEPS = steps_of(30)
FIRST, SECOND = STEPS[:2]
BOOK, _ = playbook_steps(3)


@pytest.fixture
def no_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def text_of(steps) -> str:
    """The page as it reads: no markup, white space as single spaces."""
    page = re.sub(r"<(style|svg).*?</\1>", " ", html_page(steps), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def with_reduction(step, **changes):
    return replace(step, reductions=(replace(step.reductions[0], **changes),))


def with_prompts(step, prompt):
    return with_reduction(step, nodes=tuple(replace(node, prompt=prompt) for node in step.nodes))


# The page ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [STEPS[:9], BOOK], ids=["instruction", "playbook"])
def test_texts_of_the_run_are_no_markup_and_the_policy_allows_the_page_s_own_style_alone(steps):
    page = html_page(steps)
    assert SHOWN in text_of(steps)
    for foreign in ("<script", "<img", "<!--", "http:", "https:", "style="):
        assert foreign not in page
    assert page.count("<svg role") == 3
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in page


def test_texts_stand_in_the_page_as_they_are(no_matplotlib):
    leading = "\n\n  a line break and blanks come first\n"
    page = html.unescape(html_page([with_prompts(SECOND, leading)]))
    for text in (f">\n{leading}</pre>", "It was cut", "Error: the reply was cut short", SECOND.nodes[1].output):
        assert text in page


@pytest.mark.parametrize(
    ("steps", "texts"),
    [
        ((), ["This run has made no step yet."]),
        (
            STEPS[:4],
            ["Best score 0.46 after the first step 0.43", "Steps 4 2 accepted", "Metric calls 600", "Time 50 s"],
        ),
        (STEPS[:4], ["Reflection calls 16", "Tokens 108,000", "Cost $0.464", "Step 4 n 20 k 4 p 2 before 0.5 after 1"]),
        ([replace(FIRST, usage=Usage(cost=None))], ["Cost unknown some calls told none"]),
        ([*STEPS[:4], FIRST], ["Time 62.5 s"]),  # resumed: its seconds start anew
        ([FIRST, replace(SECOND, iteration=1)], ["validation shared calls 4 tokens shared cost shared"]),
        ([replace(FIRST, scores_before=(float("nan"), 1.0))], ["before – after 1", "example 0: – to 1, example 1: 1"]),
        ([with_reduction(FIRST, text=None, nodes=(), error="late")], ["Component answer No proposal: late"]),
        ([with_reduction(FIRST, current=FIRST.reductions[0].text)], ["the parent's instruction, word for word"]),
        ([replace(FIRST, reductions=())], ["No reflection calls."]),
        ([FIRST], ["Every record reached a call that the proposal was made of."]),
        ([SECOND], ["Records that reached no surviving call (3 of 5): r2 (example 2), r3 (example 3), r4"]),
        ([SECOND], ["1.0 reads 3 records, 1.5 s, failed 2 LM calls, 1,800 tokens in, 200 out, cost $0.008"]),
        (STEPS, ["Final text of answer", "Step 28 changed candidate 9 into candidate 10", "from 55 examples"]),
        (BOOK, ["4 reflections, 1 of them fed no delta that survived", "s1.r0 example 0 unused", '"type": "ADD"']),
        (BOOK[:2], ["Playbook of answer", "form-00002 helpful 1 harmful 0 Formulas", "step 1: ADD; step 2: UPDATE"]),
        (STEPS[:9], ["The charts need matplotlib: pip install 'dspy-combee[report]'"]),
    ],
)
def test_the_page_says(steps, texts, no_matplotlib):
    page = text_of(steps)
    assert [text for text in texts if text not in page] == []


def test_the_final_text_is_that_of_the_best_candidate_if_a_step_made_it(no_matplotlib):
    unscored = [replace(step, best_score=None, validation_score=None) for step in STEPS[:4]]
    for steps in (STEPS[:4], unscored, [replace(step, from_traces=True) for step in unscored]):
        assert "Step 4 changed candidate 1" in text_of(steps)
    student_or_merge = [*STEPS[:3], replace(STEPS[3], best_score=0.99)]
    assert "Final text" not in text_of(student_or_merge)


def test_long_texts_are_cut_and_say_so(no_matplotlib):
    page = html_page([with_prompts(FIRST, "x" * 25_000)])
    assert max(map(len, re.findall("x+", page))) == 20_000
    assert "5,000 more characters in the step record" in page


def test_a_run_of_thousands_of_calls_stays_small(no_matplotlib):
    page = html_page([with_prompts(step, "x" * 30_000) for step in STEPS[6:] * 20])
    assert len(page) < 40_000_000
    assert page.count("<details") < 4 * 480
    assert (
        "Call 1.0 reads 13 records, 1.5 s, failed, 2 LM calls, 1,800 tokens in, 200 out, cost $0.008\nRead: r" in page
    )
    assert "more characters in the step record" in page


# Numbers -----------------------------------------------------------------------------------------------------


def test_phases_add_up():
    steps = STEPS[:8]
    spent = spent_by_phase(steps)
    assert list(spent) == ["profiling", "rollouts", "reflection", "validation"]
    seconds = sum(second for step in steps for second in step.phase_seconds.values())
    assert sum(seconds for seconds, _ in spent.values()) == pytest.approx(seconds)
    assert spent["reflection"][1].calls == sum(node.usage.calls for step in steps for node in step.nodes)
    assert spent["profiling"][1].input_tokens == 6 * 20_000
    assert spent["rollouts"][1].cost == pytest.approx(0.2)
    assert spent["validation"][1] is None
    assert spent_by_phase([steps[0], steps[0]])["profiling"][0] == spent_by_phase(steps[:1])["profiling"][0]


def test_a_tree_from_its_root_down():
    made = reduction(1, n=6, k=3, failed=1)
    tree = tree_of(made)
    assert [(node.id, tree.levels[node.id]) for node in tree.rows] == [("2.0", 2), ("1.1", 1), ("1.2", 1), ("1.0", 1)]
    assert tree.survivors == {"1.1", "1.2", "2.0"}
    read = {name for node in made.nodes[1:] for name in node.inputs}
    assert set(tree.lost) == {f"r{position}" for position in range(6)} - read
    assert len(tree_of(replace(made, text=None)).lost) == 6
    nodes = (ProposalNode("left", "answer", ("r0",), "a"), ProposalNode("top", "answer", ("left", "r1"), "b"))
    other = tree_of(Reduction("answer", "b", nodes, 1, 1, sources=(0, 1)))
    assert ([node.id for node in other.rows], other.lost) == (["top", "left"], ())


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
        ("\n".join(f"Lesson {i}." for i in range(2000)), "\n".join(f"Lesson {i}!" for i in range(2000))),
    ],
)
def test_a_diff_holds_both_texts(old, new):
    lines = diff_lines(old, new)
    for text, sign in ((old, "-"), (new, "+")):
        assert "\n".join("".join(part for _, part in parts) for op, parts in lines if op in (" ", sign)) == text


def test_a_diff_marks_words_and_leaves_out_what_is_far_from_a_change():
    (removed, added) = diff_lines("Answer in two words.", "Answer in one word.")
    assert [text for changed, text in removed[1] if changed] == ["two", "words"]
    assert [text for changed, text in added[1] if changed] == ["one", "word"]
    assert diff_lines("alpha beta", "gamma, delta!") == [
        ("-", [(False, "alpha beta")]),
        ("+", [(False, "gamma, delta!")]),
    ]
    assert diff_lines("same", "same") == []
    old = [f"line {i}" for i in range(30)]
    lines = diff_lines("\n".join(old), "\n".join(["first", *old[1:], "last"]))
    assert [parts for sign, parts in lines if sign == "skip"] == [[(False, str(29 - 2 * CONTEXT_LINES))]]
    assert len(lines) == 3 + 2 * CONTEXT_LINES + 1
    assert diff_lines("\n".join(old), "\n".join([*old[:-1], "last"]))[0] == ("skip", [(False, "26")])
    assert diff_lines("\n".join(old), "\n".join(["first", *old[1:]]))[-1] == ("skip", [(False, "26")])


@pytest.mark.parametrize("seed", range(8))
def test_bullets_are_replayed_from_the_steps(seed):
    steps, playbook = playbook_steps(12, seed)
    (history,) = playbook_histories(steps)
    alive = {bullet.id: (bullet.content, *bullet.counts) for bullet in history.bullets.values() if not bullet.gone}
    assert alive == {bullet.id: (bullet.content, bullet.helpful, bullet.harmful) for bullet in playbook}
    assert [change.bullets for _, change, _ in history.changes] == [step.bullets for step in steps]


# From a run, and the command ---------------------------------------------------------------------------------


def test_the_report_of_a_run_from_its_result_and_from_its_folder(tmp_path, capsys):
    result = learn(learning_lm(), n_train=20, max_metric_calls=100, log_dir=str(tmp_path / "log")).detailed_results
    result.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count('<details class="step"') == len(result.steps) > 1
    assert report_main(tmp_path / "log") == (tmp_path / "log" / "report.html", len(result.steps))
    assert (tmp_path / "log" / "report.html").read_text(encoding="utf-8") == page
    assert main(["report", str(tmp_path / "log"), "--out", str(tmp_path / "out.html")]) == 0
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'out.html'} ({len(result.steps)} steps).\n"
    assert (tmp_path / "out.html").read_text(encoding="utf-8") == page


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "expected the log_dir of a run"),
        ("", None, "expected the log_dir of a run"),
        ("", b"", "holds no steps yet"),
        ("", b'{"a": 1}\n{"b": 2}\n', "steps.jsonl:1 is no step record"),
        ("", b"\xff\xfe\n\n", "steps.jsonl:1 is no step record"),
        ("", json.dumps({**FIRST.to_dict(), "scores_before": ["a"]}).encode() + b"\n", "steps.jsonl"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(name, content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "steps.jsonl").write_bytes(content)
    assert main(["report", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", err)
    assert not (tmp_path / "report.html").exists()


def test_the_command_says_when_it_cannot_write(tmp_path, capsys):
    StepLog(tmp_path).append(FIRST)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "no" / "out.html")]) == 2
    assert re.fullmatch(r"error: [^\n]+\n", capsys.readouterr().err)


# Plots -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned():
    return learn(learning_lm(), n_train=20, max_metric_calls=100).detailed_results


@pytest.fixture
def result(learned):
    mpl.use("Agg")
    yield learned
    pyplot.close("all")


def lines_of(axes):
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def test_plots_are_axes_and_draw_where_they_are_told(result):
    _, panels = pyplot.subplots(1, 3)
    for name, panel in zip(("plot_scores", "plot_delay", "plot_tree"), panels, strict=True):
        assert getattr(result, name)(ax=panel) is panel
        axes = getattr(result, name)()
        assert isinstance(axes, mpl.axes.Axes)
        axes.figure.canvas.draw()
    assert result.plot_scores().get_xlabel() == "metric calls"
    assert result.plot_delay().get_xscale() == result.plot_delay().get_yscale() == "log"
    assert replace(result, steps=BOOK).plot_scores().get_ylabel() == "mean minibatch score"


def test_the_plot_of_the_delay_is_the_fit_s_own(result):
    steps = STEPS[:9]
    fit = steps[-1].fit
    axes = replace(result, steps=steps).plot_delay()
    lines = lines_of(axes)
    assert list(lines) == ["a step", "median of a size", "fit", f"chosen n = {fit.choice}"]
    assert axes.get_ylabel() == f"seconds per epoch of {EXAMPLES} examples"
    assert [n for n, _ in lines["median of a size"]] == [5, 10, 20, 40, 55, 80]
    assert lines["median of a size"][0][1] == pytest.approx(4.5 * EXAMPLES / 5)
    assert lines["fit"][0] == pytest.approx((5, fit.A * 5**-fit.alpha))
    assert len(lines["a step"]) == 9
    measured = replace(fit, A=None, alpha=None)
    axes = replace(result, steps=(replace(steps[-1], fit=measured),)).plot_delay()
    assert len(lines_of(axes)["median of a size"]) == 6
    axes = replace(result, steps=steps[:3]).plot_delay()
    assert (axes.get_ylabel(), list(lines_of(axes))) == ("seconds per example", ["a step"])
    assert lines_of(axes)["a step"][0] == (5, pytest.approx(4.5 / 5))


def test_the_plot_of_a_tree(result):
    shown = replace(result, steps=STEPS[:5])
    assert shown.plot_tree().get_title().startswith("step 4, answer: n = 20, ")
    axes = shown.plot_tree(iteration=2, component="answer")
    assert [text.get_text() for text in axes.texts] == ["1.0", "1.1", "2.0"]
    with pytest.raises(ValueError, match=r"no tree in step 9 for component 'other'"):
        shown.plot_tree(iteration=9, component="other")


@pytest.mark.parametrize("name", ["plot_scores", "plot_delay", "plot_tree"])
def test_what_a_plot_needs(result, name, monkeypatch):
    with pytest.raises(ValueError, match="There is n"):
        getattr(replace(result, steps=()), name)()
    assert not pyplot.get_fignums()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"dspy-combee\[report\]"):
        getattr(result, name)()


def test_the_charts_take_nothing_from_the_user_s_style():
    page = html_page(STEPS[:9])
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert html_page(STEPS[:9]) == page
        assert mpl.rcParams["font.size"] == 30


def test_a_chart_with_nothing_to_show_is_left_out():
    page = html_page([replace(FIRST, best_score=None, scores_before=())])
    assert "<svg role" not in page
    assert "Score over" not in page
