"""The report's page in a real headless Chromium: it draws, opens by mouse and keyboard, fits and runs nothing else."""

import os

import pytest

from dspy_combee.report import html_page, save_html

from .browser import Browser, find_chromium
from .report_samples import HOSTILE, playbook_steps, steps_of

pytestmark = pytest.mark.slow

REQUIRED = "REQUIRE_BROWSER"
NARROW, WIDE = 390, 1280
ENTER, SPACE, TAB, RIGHT = ("Enter", 13, "\r"), (" ", 32, " "), ("Tab", 9), ("ArrowRight", 39)
SIZES = {3: steps_of(3), 30: steps_of(30, k=10)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    executable = find_chromium()
    if executable is None:
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1 is set and Chromium is not installed (Debian's package `chromium`)")
        pytest.skip("Chromium is not installed")
    with Browser(executable, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of these steps; afterwards nothing may be on the console, and only the file was asked for."""
    opened = []

    def open_page(steps, width=WIDE, **options):
        page = browser.open(save_html(steps, tmp_path / "report.html"), width, **options)
        opened.append(page)
        return page

    yield open_page
    for page in opened:
        assert page.complaints() == []
        assert page.requests() == [(tmp_path / "report.html").as_uri()]
        assert page.run("window.hacked") is None


def fits(page):
    return page.run("document.documentElement.scrollWidth <= window.innerWidth && window.innerWidth")


def open_step(page, number):
    """Open a step by the mouse and wait until its tree is drawn."""
    page.run(f"[...document.querySelectorAll('button.open')][{number - 1}].id = 'wanted'")
    page.click("#wanted")
    page.run("document.getElementById('wanted').id = ''")
    page.settle()


@pytest.mark.parametrize("count", [3, 30])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_it_draws_and_fits(show, count, scheme, width):
    page = show(SIZES[count], width, scheme=scheme)
    assert page.run("document.querySelectorAll('button.open').length") == count
    assert page.run("document.querySelectorAll('.chart > svg').length") >= 3
    assert fits(page) == width
    for number in range(1, count + 1, 7):
        open_step(page, number)
    page.run("document.querySelectorAll('[data-node]').forEach(node => node.dispatchEvent(new MouseEvent('click')))")
    page.run("document.querySelectorAll('summary').forEach(summary => summary.click())")
    page.settle()
    assert page.run("document.querySelectorAll('.diff').length") == len(range(1, count + 1, 7))
    assert fits(page) == width
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 21, 27)") == (scheme == "dark")


def test_a_click_opens_a_node(show):
    steps = SIZES[3]
    page = show(steps)
    open_step(page, 2)
    page.click("[data-node='1.1']")
    assert page.run("document.querySelector('[aria-pressed=true]').dataset.node") == "1.1"
    panel = page.run("document.querySelector('[aria-label=\"Selected call\"]').textContent")
    assert steps[1].nodes[1].output in panel
    read = page.run("[...document.querySelectorAll('.record.on')].map(dot => dot.dataset.record)")
    assert read == sorted(steps[1].nodes[1].inputs, key=lambda name: int(name[1:]))
    page.click("[data-node='1.0']")
    panel = page.run("document.querySelector('[aria-label=\"Selected call\"]').textContent")
    assert "Error: the reply was cut short" in panel
    assert "2 LM calls" in panel
    assert "$0.008" in panel


def test_the_keyboard_opens_a_step_and_its_nodes(show):
    steps = SIZES[3]
    page = show(steps, NARROW)
    page.press(*TAB)
    assert page.run("document.activeElement.textContent") == "Step 1"
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press(*ENTER)
    assert page.run("document.activeElement.getAttribute('aria-expanded')") == "true"
    page.wait_for("document.querySelector('[data-node]') !== null")
    page.press(*TAB)
    first = page.run("document.activeElement.dataset.node")
    assert page.run("getComputedStyle(document.activeElement.querySelector('rect')).strokeWidth") == "3.5px"
    page.press(*ENTER)
    assert page.run("document.querySelector('[aria-pressed=true]').dataset.node") == first == "2.0"
    page.press(*RIGHT)
    page.press(*SPACE)
    assert page.run("document.querySelector('[aria-pressed=true]').dataset.node") == "1.0"
    panel = page.run("document.querySelector('[aria-label=\"Selected call\"]').textContent")
    assert steps[0].nodes[0].output in panel


def test_every_control_has_a_role_and_a_name(show):
    page = show(SIZES[3])
    open_step(page, 1)
    unnamed = page.run(
        "[...document.querySelectorAll('button, summary, [tabindex], [role=img]')].filter("
        "e => !(e.getAttribute('aria-label') || e.textContent).trim()).map(e => e.outerHTML)"
    )
    assert unnamed == []
    assert page.run("document.querySelector('[data-node]').getAttribute('role')") == "button"
    assert page.run("document.documentElement.lang") == "en"


def test_hostile_texts_show_as_they_are_and_do_nothing(show):
    page = show(SIZES[3])
    open_step(page, 2)
    assert HOSTILE in page.run("document.querySelector('.diff').textContent")
    assert f"not better {HOSTILE}" in page.run("document.body.textContent")
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.scripts.length") == 2


def test_the_policy_stops_what_is_not_the_page_s_own(browser, tmp_path):
    file = tmp_path / "report.html"
    foreign = "<script>window.hacked = 1</script><img src='https://example.invalid/a.png' onerror='window.hacked = 2'>"
    file.write_text(html_page(steps_of(1)).replace("</main>", f"</main>{foreign}"), encoding="utf-8")
    page = browser.open(file, WIDE)
    assert page.run("window.hacked") is None
    assert page.run("document.querySelectorAll('button.open').length") == 1
    assert any("Content Security Policy" in complaint for complaint in page.complaints())


def test_thirty_steps_of_ten_nodes_open_at_once(show):
    page = show(SIZES[30], NARROW)
    page.run("document.querySelectorAll('button.open').forEach(button => button.click())")
    page.settle()
    page.wait_for("document.querySelectorAll('[data-node]').length >= 200")


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_a_playbook_shows_its_bullets(show, width):
    steps, playbook = playbook_steps(6)
    page = show(steps, width)
    page.run("document.querySelectorAll('summary').forEach(summary => summary.click())")
    open_step(page, 3)
    page.settle()
    text = page.run("document.body.textContent")
    for bullet in playbook:
        assert bullet.content in text
        assert f"{bullet.id} helpful {bullet.helpful} harmful {bullet.harmful} " in text
    assert fits(page) == width


def test_a_run_without_steps_says_so(show):
    assert "no step yet" in show(()).run("document.body.textContent")
