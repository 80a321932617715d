"""A report in a browser: opened from disk, sorted, filtered, by the keyboard."""

from pathlib import Path

import pytest

from tests.support.report_cells import SKIP, SKIPLESS
from tests.support.report_pages import PAGES, SHEET_WIDTH, browsed_report, open_page

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return browsed_report(tmp_path_factory.mktemp("report # 100%"))


def find(browser, selector: str):
    return browser.find_element(By.CSS_SELECTOR, selector)


def column(browser, table: str, number: int) -> list[str]:
    script = (
        "return [...document.querySelector(arguments[0]).tBodies[0].rows]"
        ".map(row => row.cells[arguments[1]].textContent.trim())"
    )
    return browser.execute_script(script, table, number)


@pytest.mark.parametrize("pattern", PAGES)
def test_pages_open_from_disk_without_complaints_and_with_their_pictures(browser, report, pattern):
    open_page(browser, report, pattern)

    assert browser.get_log("browser") == []
    assert find(browser, "h1").text
    # Lazy pictures load when they are seen.
    browser.execute_script("document.querySelectorAll('img').forEach(i => { i.loading = 'eager' })")
    loaded = (
        "return Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth)))"
    )
    widths = browser.execute_script(loaded)
    assert set(widths) <= {60, SHEET_WIDTH}
    assert widths


def test_a_head_sorts_by_number_and_back(browser, report):
    open_page(browser, report, "index.html")
    table = "article[data-task=tokencut] table"
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")
    head = find(browser, f"{table} th:nth-child(2)")
    before = column(browser, table, 1)

    head.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    rising, sort = column(browser, table, 1), head.get_attribute("aria-sort")
    head.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)

    assert [value.split(" ")[0] for value in before] == ["75.0", "0.0", "83.3"]
    assert [value.split(" ")[0] for value in rising] == ["0.0", "75.0", "83.3"]
    assert column(browser, table, 1) == rising[::-1]
    assert (sort, head.get_attribute("aria-sort")) == ("ascending", "descending")
    find(browser, f"{table} th:first-child button").send_keys(Keys.ENTER)
    assert column(browser, table, 1) == before
    assert head.get_attribute("aria-sort") is None


def test_infinity_is_above_every_number(browser, report):
    open_page(browser, report, "index.html")
    table = "article[data-task=conditioning] table"
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")

    find(browser, f"{table} th:nth-child(2) button").send_keys(Keys.ENTER)

    assert column(browser, table, 1) == ["3 [1.5, ∞]", "2e+04 [1e+04, ∞]", "∞"]
    assert (
        browser.execute_script(
            "return document.querySelectorAll('article[data-task=conditioning] .endless').length"
        )
        == 3 * 2
    )


def test_a_choice_hides_what_does_not_match_and_show_all_brings_it_back(browser, report):
    open_page(browser, report, "index.html")

    def shown(selector):
        return [e for e in browser.find_elements(By.CSS_SELECTOR, selector) if e.is_displayed()]

    find(browser, "select[data-field=task] option[value=tokencut]").click()
    assert len(shown("#best tbody tr")) == len(shown("article")) == 1
    assert [e.text for e in shown("main section h2")] == [
        "In short",
        "Checkpoints",
        "Pictures",
        "tokencut",
        "All measurements",
    ]
    assert find(browser, "#shown").text == "1 of 5 panels shown"
    find(browser, "input[data-model='1']").click()
    assert len(shown("#best thead th")) == 2
    assert len(shown("article g[data-m='1']")) == 0
    find(browser, "button[type=reset]").click()
    assert browser.execute_async_script("setTimeout(arguments[0], 0)") is None
    assert (len(shown("#best tbody tr")), len(shown("#best thead th"))) == (2, 6)


def test_a_number_tells_its_provenance_to_the_keyboard(browser, report):
    open_page(browser, report, "index.html")
    number, dialog = find(browser, "#best button.from"), find(browser, "#provenance")

    number.send_keys(Keys.ENTER)
    opened = dialog.text
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)

    assert SKIP in opened or SKIPLESS in opened
    for words in ("torch", "2.15.0", "settings: ", "records/", "2026-01-02", "95 % interval"):
        assert words in opened
    assert not dialog.is_displayed()
    assert browser.switch_to.active_element == number


def test_the_slider_and_the_choice_of_an_image_change_both_sides(browser, report):
    open_page(browser, report, "compare-*.html")
    slider, image = find(browser, ".viewer input"), find(browser, ".viewer select")

    def files():
        pictures = browser.find_elements(By.CSS_SELECTOR, ".sides:not(.tall) img")
        return ["/".join(p.get_attribute("src").split("/")[-2:]) for p in pictures]

    assert files() == ["block02_key/cat.png"] * 2
    slider.send_keys(Keys.ARROW_LEFT)
    assert files() == ["block01_key/cat.png"] * 2
    assert slider.get_attribute("aria-valuetext") == "block 1"
    image.send_keys("dog")
    assert files() == ["block01_key/dog.png"] * 2
    find(browser, "button[data-step='1']").send_keys(Keys.ENTER)
    assert files() == ["block01_key/cat.png"] * 2
    assert "block 1, image cat" in find(browser, ".viewer img").get_attribute("alt")


@pytest.mark.parametrize("pattern", PAGES)
def test_the_keyboard_skips_to_the_content_and_every_link_leads_somewhere(browser, report, pattern):
    open_page(browser, report, pattern)

    assert find(browser, "html").get_attribute("lang") == "en"
    browser.switch_to.active_element.send_keys(Keys.TAB)
    first = browser.switch_to.active_element
    assert first.text == "Skip to the content"
    assert first.is_displayed()
    ids = browser.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(set(ids)) == len(ids)
    links = browser.execute_script("return [...document.links].map(l => l.getAttribute('href'))")
    for link in links:
        name, _, place = link.partition("#")
        assert not place or name or place in ids
        assert not name.endswith(".html") or (report / name).is_file()


def test_a_picture_is_never_larger_than_it_is(browser, report):
    browser.set_window_size(1280, 900)
    open_page(browser, report, "index.html")

    script = (
        "const all = [...document.querySelectorAll('.strip img')];"
        "all.forEach(one => { one.loading = 'eager'; });"
        "await Promise.all(all.map(one => one.decode()));"
        "return all.map(one => [one.clientWidth, one.naturalWidth]);"
    )
    sizes = browser.execute_async_script(
        f"const done = arguments[0]; (async () => {{ {script} }})().then(done)"
    )

    assert sizes
    assert [one for one in sizes if one[0] > one[1]] == []
