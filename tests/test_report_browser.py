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
SIZES = {3: steps_of(3), 30: steps_of(30, k=10)}


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
    """Opens a page in a tab of this size; afterwards nothing may have run, and only the file was asked for."""
    tabs = []

    def open_page(page, width=WIDE, scheme="light"):
        file = tmp_path / f"report{len(tabs)}.html"
        file.write_text(page, encoding="utf-8")
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=width < 600)
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
    """Whether the page, and every part of it that does not scroll by itself, is as wide as the window."""
    return tab.evaluate(
        "document.documentElement.scrollWidth <= window.innerWidth && [...document.querySelectorAll('section *')]"
        ".every(e => e.closest('svg, .cell') || e.getBoundingClientRect().right <= window.innerWidth)"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "count"), [(NARROW, 30), (MIDDLE, 3), (WIDE, 3)])
def test_it_draws_and_fits(show, width, count, scheme):
    tab = show(html_page(SIZES[count]), width, scheme)
    assert tab.locator(".step").count() == count
    charts = tab.locator(".chart > svg").all()
    assert len(charts) == 3
    assert all(chart.bounding_box()["height"] > 150 for chart in charts)
    assert fits(tab)
    open_all(tab)
    assert fits(tab)
    assert tab.locator(".diff:visible").count() == count
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 21, 27)") == (scheme == "dark")
    label = tab.evaluate("getComputedStyle(document.querySelector('.chart text')).fill")
    assert label == ("rgb(154, 164, 180)" if scheme == "dark" else "rgb(91, 100, 114)")


def test_a_click_opens_a_step_and_its_calls(show):
    steps = SIZES[3]
    step = show(html_page(steps)).locator(".step").nth(1)
    assert not step.locator(".call").first.is_visible()
    step.locator("summary").first.click()
    calls = step.locator(".call")
    assert calls.locator("> summary > b").all_inner_texts() == ["2.0", "1.1", "1.0"]
    calls.nth(1).locator("> summary").click()
    assert calls.nth(1).locator("pre").first.inner_text() == steps[1].nodes[1].output
    calls.nth(1).get_by_text("Its prompt").click()
    assert calls.nth(1).locator("pre:visible").nth(1).inner_text() == steps[1].nodes[1].prompt
    calls.nth(2).locator("> summary").click()
    assert "Error: the reply was cut short" in calls.nth(2).inner_text()


def test_the_keyboard_opens_a_step_and_its_calls(show):
    tab = show(html_page(SIZES[3]), NARROW)
    tab.locator(".step > summary").first.focus()
    tab.keyboard.press("Tab")
    tab.keyboard.press("Shift+Tab")
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for key in ("Enter", "Tab", "Space"):
        tab.keyboard.press(key)
    assert tab.evaluate("document.activeElement.parentElement.className").startswith("call")
    assert tab.locator(".step[open] .call[open] pre").first.is_visible()


def test_every_control_and_picture_has_a_name(show):
    tab = show(html_page(SIZES[3]))
    open_all(tab)
    unnamed = "summary, a, pre, [tabindex], [role=img]"
    assert (
        tab.locator(unnamed).evaluate_all(
            "all => all.filter(e => !(e.getAttribute('aria-label') || e.textContent).trim()).map(e => e.outerHTML)"
        )
        == []
    )
    assert tab.locator("pre").evaluate_all("all => all.every(e => e.tabIndex === 0 && e.getAttribute('aria-label'))")
    assert tab.evaluate("document.documentElement.lang") == "en"


def test_hostile_texts_show_as_they_are_and_do_nothing(show):
    tab = show(html_page(SIZES[3]))
    open_all(tab)
    shown = HOSTILE.replace("\ud800", "\ufffd")
    assert shown in tab.locator(".diff").nth(1).text_content()
    assert f"not better {shown}" in tab.locator("body").text_content()
    assert tab.locator("script, img").count() == 0


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
    page = html_page(steps_of(2000))
    assert len(page) < 40_000_000
    tab = show(page)
    assert tab.locator(".step").count() == 2000
    step = tab.locator(".step").nth(1500)
    step.locator("> summary").click()
    assert "Call 1.1 reads" in step.locator("pre").first.inner_text()
