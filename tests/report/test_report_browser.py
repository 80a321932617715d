"""A report in a browser: opened from disk, sorted, filtered, in the dark and on a phone."""

from pathlib import Path

import pytest

from tests.support.report_cells import SKIP, SKIPLESS
from tests.support.report_pages import NAME, PAGES, SHEET_WIDTH, browsed_report, open_page

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.browser
# Of WCAG 2.2, level AA, for text of usual size.
LEAST_CONTRAST = 4.5

# Ratio of the luminances of a text and of what lies behind it.
CONTRAST = """
const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => {
  const linear = [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const behind = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = parse(getComputedStyle(e).backgroundColor);
    if (colour.length < 4 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const ratios = {};
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || element.closest("svg, script, dialog, option")) continue;
  const [one, other] = [parse(getComputedStyle(element).color), behind(element)].map(luminance);
  const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  const name = `${element.tagName} ${element.className}`;
  ratios[name] = Math.min(ratios[name] ?? 99, ratio);
}
return ratios;
"""


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


def test_nothing_is_fetched_from_elsewhere_and_scripts_in_the_page_do_not_run(browser, report):
    open_page(browser, report, "index.html")

    fetched = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    assert all(name.startswith("file:") for name in fetched)
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
        "document.body.append(s)"
    )
    assert browser.execute_script("return window.ran") is None
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]


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
def test_a_name_with_markup_is_text(browser, report, pattern):
    open_page(browser, report, pattern)

    assert NAME in find(browser, "body").text
    scripts = browser.find_elements(By.CSS_SELECTOR, "script:not([src]):not([type])")
    assert scripts == []


@pytest.mark.parametrize("dark", [False, True])
def test_all_words_can_be_read_by_day_and_by_night(browser, report, dark):
    for pattern in PAGES:
        open_page(browser, report, pattern, dark=dark)
        browser.execute_script(
            "document.querySelectorAll('details').forEach(d => { d.open = true })"
        )

        ratios = browser.execute_script(CONTRAST)

        assert len(ratios) > 10
        assert {name: ratio for name, ratio in ratios.items() if ratio < LEAST_CONTRAST} == {}
    page = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert page == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")


@pytest.mark.parametrize("pattern", PAGES)
def test_a_phone_shows_every_page_without_scrolling_sideways(browser, report, pattern):
    open_page(browser, report, pattern, width=400)
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")

    wide = browser.execute_script(
        "return [...document.querySelectorAll('body *')]"
        ".filter(e => !e.closest('.scroll, .skip, .tall')"
        " && e.getBoundingClientRect().right > 400.5).map(e => e.outerHTML.slice(0, 99))"
    )
    assert wide == []
    root = "document.documentElement"
    assert browser.execute_script(f"return {root}.scrollWidth - {root}.clientWidth") == 0


@pytest.mark.parametrize("pattern", PAGES)
def test_everything_has_a_name_for_those_who_listen(browser, report, pattern):
    open_page(browser, report, pattern)

    unnamed = """
      const names = (e) => e.getAttribute('alt') || e.getAttribute('aria-label')
        || e.getAttribute('aria-hidden') || e.closest('label') || e.textContent.trim();
      return [...document.querySelectorAll('img, svg, button, select, input, table')]
        .filter(e => !names(e)).map(e => e.outerHTML.slice(0, 99));
    """
    assert browser.execute_script(unnamed) == []
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
