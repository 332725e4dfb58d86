"""The report's page in a real headless Chromium: it fits, opens by mouse and keyboard, and runs nothing."""

import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

from dspy_combee.report import html_page

from .report_samples import HOSTILE, playbook_steps, steps_of

pytestmark = pytest.mark.slow

REQUIRED = "REQUIRE_BROWSER"
NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
OPTIONS += ["--disable-component-update", "--disable-sync"]
NARROW, MIDDLE, WIDE = 390, 800, 1280
STEPS = steps_of(3)


@pytest.fixture(scope="module")
def browser():
    executable = next((path for path in map(shutil.which, NAMES) if path), None)
    if executable is None:
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1 is set and Chromium is not installed (Debian's package `chromium`)")
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=OPTIONS)
        yield started
        started.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page in a tab of this size; afterwards nothing may have run, and only the file was asked for."""
    tabs = []

    def open_page(page, width=WIDE, scheme="light"):
        file = tmp_path / f"report{len(tabs)}.html"
        file.write_text(page, encoding="utf-8")
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        requests, complaints = [], []
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(file.as_uri())
        tabs.append((tab, file, requests, complaints))
        return tab

    yield open_page
    for tab, file, requests, complaints in tabs:
        assert (requests, complaints) == ([file.as_uri()], [])
        assert tab.evaluate("window.hacked") is None
        tab.close()


def open_all(tab):
    tab.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")


def fits(tab):
    """Whether the page, and every part of it but those in pictures, is within the window's width."""
    return tab.evaluate(
        "document.documentElement.scrollWidth <= window.innerWidth && [...document.querySelectorAll('section *')]"
        ".every(e => e.closest('svg, .cell') || e.getBoundingClientRect().right <= window.innerWidth)"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "steps"), [(NARROW, steps_of(30, k=10)), (MIDDLE, STEPS), (WIDE, STEPS)])
def test_it_draws_and_fits_and_hostile_texts_show_as_they_are(show, width, steps, scheme):
    tab = show(html_page(steps), width, scheme)
    charts = tab.locator(".chart > svg").all()
    assert len(charts) == 3
    assert all(chart.bounding_box()["height"] > 150 for chart in charts)
    assert fits(tab)
    open_all(tab)
    assert fits(tab)
    assert tab.locator(".step").count() == tab.locator(".diff:visible").count() == len(steps)
    shown = HOSTILE.replace("\ud800", "\ufffd")
    assert shown in tab.locator(".diff").nth(1).text_content()
    assert f"not better {shown}" in tab.locator("body").text_content()
    assert tab.locator("script, img").count() == 0
    ground, label = (
        ("rgb(18, 21, 27)", "rgb(154, 164, 180)") if scheme == "dark" else ("rgb(246, 247, 249)", "rgb(91, 100, 114)")
    )
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == ground
    assert tab.evaluate("getComputedStyle(document.querySelector('.chart text')).fill") == label


def test_a_click_opens_a_step_and_its_calls(show):
    step = show(html_page(STEPS)).locator(".step").nth(1)
    calls = step.locator(".call")
    assert not calls.first.is_visible()
    step.locator("summary").first.click()
    assert calls.locator("> summary > b").all_inner_texts() == ["2.0", "1.1", "1.0"]
    for call in calls.all()[1:]:
        call.locator("> summary").click()
    calls.nth(1).get_by_text("Its prompt").click()
    node = STEPS[1].nodes[1]
    assert [text.inner_text() for text in calls.nth(1).locator("pre:visible").all()] == [node.output, node.prompt]
    assert "Error: the reply was cut short" in calls.nth(2).inner_text()


def test_the_keyboard_opens_a_step_and_its_calls(show):
    tab = show(html_page(STEPS), NARROW)
    tab.locator(".step > summary").first.focus()
    tab.keyboard.press("Tab")
    tab.keyboard.press("Shift+Tab")
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for key in ("Enter", "Tab", "Space"):
        tab.keyboard.press(key)
    assert tab.evaluate("document.activeElement.parentElement.className").startswith("call")
    assert tab.locator(".step[open] .call[open] pre").first.is_visible()


def test_every_control_and_picture_has_a_name(show):
    tab = show(html_page(STEPS))
    names = tab.locator("summary, a, pre, [tabindex], [role=img]").evaluate_all(
        "all => all.map(e => (e.getAttribute('aria-label') || e.textContent).trim())"
    )
    assert len(names) > 50
    assert all(names)
    assert tab.locator("pre").evaluate_all("all => all.every(e => e.tabIndex === 0 && e.getAttribute('aria-label'))")
    assert tab.evaluate("document.documentElement.lang") == "en"


def test_the_policy_stops_what_is_not_the_page_s_own(browser, tmp_path):
    foreign = "<script>window.hacked = 1</script><img src='https://example.invalid/a.png' onerror='window.hacked = 2'>"
    (tmp_path / "report.html").write_text(html_page(steps_of(1)).replace("</main>", f"</main>{foreign}"), "utf-8")
    tab = browser.new_page()
    complaints = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.goto((tmp_path / "report.html").as_uri())
    assert tab.evaluate("window.hacked") is None
    assert any("Content Security Policy" in complaint for complaint in complaints)
    tab.close()


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_a_playbook_shows_its_bullets(show, width):
    steps, playbook = playbook_steps(6)
    tab = show(html_page(steps), width)
    open_all(tab)
    text = tab.locator("body").inner_text()
    for bullet in playbook:
        assert bullet.content in text
        assert f"{bullet.id} helpful {bullet.helpful} harmful {bullet.harmful} " in text
    assert fits(tab)


def test_two_thousand_steps_open(show):
    page = html_page(steps_of(100) * 20)
    assert len(page) < 40_000_000
    tab = show(page)
    assert tab.locator(".step").count() == 2000
    step = tab.locator(".step").nth(1500)
    step.locator("> summary").click()
    assert "Call 1.1 reads" in step.locator("pre").first.inner_text()
