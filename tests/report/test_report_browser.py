"""Test the HTML report in a browser."""

import importlib.util
import re
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from tests.support.report_cells import SKIP, SKIPLESS, build_record
from tests.support.report_pages import PAGES, SHEET_WIDTH, browsed_report, open_page

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.browser
PHONE, DESK = 390, 1280
# The minimum size of click targets (WCAG 2.2) is not checked by default.
RUN_AXE = """
const done = arguments[arguments.length - 1];
axe.run(document, { resultTypes: ["violations"], rules: { "target-size": { enabled: true } } })
  .then((found) => done(found.violations.map((v) => [v.impact, v.id, v.nodes[0].html])));
"""
# The natural width of a picture is known after it is loaded, which may be after it is decoded.
ENLARGED = """
const [image, done] = arguments;
const look = () => (image.width === 3 * image.naturalWidth && image.complete && image.naturalWidth)
  ? done() : setTimeout(look, 20);
look();
"""
# Pictures are otherwise loaded when they are scrolled into view.
LOAD_PICTURES = """
const images = [...document.images];
images.forEach((image) => { image.loading = "eager"; });
return Promise.all(images.map((image) => image.decode().then(() => image.naturalWidth)));
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return browsed_report(tmp_path_factory.mktemp("report # 100%"))


def find(browser, selector: str):
    return browser.find_element(By.CSS_SELECTOR, selector)


def visible(browser, selector: str) -> list:
    return [e for e in browser.find_elements(By.CSS_SELECTOR, selector) if e.is_displayed()]


def column_texts(browser, table: str, number: int) -> list[str]:
    script = (
        "return [...document.querySelector(arguments[0]).tBodies[0].rows]"
        ".map(row => row.cells[arguments[1]].textContent.trim())"
    )
    return browser.execute_script(script, table, number)


def unfold(browser) -> None:
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")


def horizontal_overflow(browser) -> int:
    root = "document.documentElement"
    return browser.execute_script(f"return {root}.scrollWidth - {root}.clientWidth")


def test_a_column_head_sorts_by_number_and_back(browser, report):
    open_page(browser, report, "index.html")
    unfold(browser)
    table = "article[data-task=tokencut] table"
    head = find(browser, f"{table} th:nth-child(2)")
    before = column_texts(browser, table, 1)

    head.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    rising, sort = column_texts(browser, table, 1), head.get_attribute("aria-sort")
    head.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)

    assert [value.split(" ")[0] for value in before] == ["75.0", "0.0", "83.3"]
    assert [value.split(" ")[0] for value in rising] == ["0.0", "75.0", "83.3"]
    assert column_texts(browser, table, 1) == rising[::-1]
    assert (sort, head.get_attribute("aria-sort")) == ("ascending", "descending")
    find(browser, f"{table} th:first-child button").send_keys(Keys.ENTER)
    assert column_texts(browser, table, 1) == before
    assert head.get_attribute("aria-sort") is None
    # Infinity is sorted after every number.
    table = "article[data-task=conditioning] table"
    find(browser, f"{table} th:nth-child(2) button").send_keys(Keys.ENTER)
    assert column_texts(browser, table, 1) == ["3 [1.5, ∞]", "2e+04 [1e+04, ∞]", "∞"]
    endless = browser.find_elements(By.CSS_SELECTOR, "article[data-task=conditioning] .endless")
    assert len(endless) == 3 * 2


def test_filters_hide_other_panels_and_curves_and_unfold_matches(browser, report):
    open_page(browser, report, "index.html")
    assert not visible(browser, "article[data-task], #filters")
    find(browser, "#all > summary").click()
    panel = find(browser, "#all details.fold article")
    assert not panel.is_displayed()
    task = panel.get_attribute("data-task")
    find(browser, f"select[data-field=task] option[value='{task}']").click()
    assert panel.is_displayed()

    # A link to a folded panel also unfolds it.
    browser.get(f"{browser.current_url.partition('#')[0]}#{panel.get_attribute('id')}")
    browser.refresh()
    assert find(browser, "#all details.fold article").is_displayed()

    open_page(browser, report, "index.html")
    find(browser, "#all > summary").click()
    find(browser, "select[data-field=task] option[value=tokencut]").click()
    assert len(visible(browser, "article[data-task]")) == 1
    heads = [e.text for e in visible(browser, "main section[id^=task] h2")]
    assert heads == ["tokencut"]
    assert find(browser, "#shown").text == "1 of 5 panels shown"
    find(browser, "input[data-model='1']").click()
    assert not visible(browser, "article g[data-m='1']")
    find(browser, "button[type=reset]").click()
    assert browser.execute_async_script("setTimeout(arguments[0], 0)") is None
    assert visible(browser, "article[data-task] g[data-m='1']")


def test_the_keyboard_opens_the_provenance_of_a_number(browser, report):
    open_page(browser, report, "index.html")
    number, dialog = find(browser, "#leaderboard button.from"), find(browser, "#provenance")

    number.send_keys(Keys.ENTER)
    opened = dialog.text
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)

    assert SKIP in opened or SKIPLESS in opened
    for text in ("torch", "2.15.0", "settings: ", "records/", "2026-01-02", "95 % interval"):
        assert text in opened
    assert not dialog.is_displayed()
    assert browser.switch_to.active_element == number


def test_the_slider_and_the_image_choice_change_both_sides(browser, report):
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


@pytest.fixture(scope="module")
def axe() -> str:
    """Return the source code of axe-core, a library that checks the accessibility of web pages."""
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or not found.submodule_search_locations:
        pytest.skip("axe-playwright-python, which carries axe-core, is not installed")
    return Path(found.submodule_search_locations[0], "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def over_epochs(tmp_path_factory, pretrained_runs) -> Path:
    store = ResultStore(tmp_path_factory.mktemp("epochs"))
    for epoch in (1.0, 2.0):
        for layer in (0, 11):
            sha = f"{epoch:064.0f}"
            one = build_record(model=f"run@{epoch:g}", checkpoint_sha256=sha, layer=layer)
            store.save(replace(one, details={"epoch": epoch}))
    assert main(["report", "--out", str(store.root), "--runs", str(pretrained_runs)]) == 0
    return store.root / "report"


@pytest.mark.parametrize(("width", "dark"), [(PHONE, True), (DESK, False)])
@pytest.mark.parametrize("pattern", [*PAGES, "epochs.html"])
def test_pages_open_from_disk_and_axe_finds_nothing_serious(
    browser, axe, report, over_epochs, pattern, width, dark
):
    folder = over_epochs if pattern == "epochs.html" else report
    browser.get_log("browser")
    open_page(browser, folder, pattern, width=width, dark=dark)

    assert browser.get_log("browser") == []
    assert find(browser, "h1").text
    assert find(browser, "html").get_attribute("lang") == "en"
    # Every picture reserves its space.
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('main img, .strip svg')]"
        ".map((e) => [e.getAttribute('width'), e.getAttribute('height')])"
    )
    assert bool(sizes) == (pattern != "epochs.html")
    assert all(int(length) > 0 for size in sizes for length in size)
    assert set(browser.execute_script(LOAD_PICTURES)) <= {60, SHEET_WIDTH}
    browser.switch_to.active_element.send_keys(Keys.TAB)
    first = browser.switch_to.active_element
    assert (first.text, first.is_displayed()) == ("Skip to the content", True)
    ids = browser.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(set(ids)) == len(ids)
    links = browser.execute_script("return [...document.links].map(l => l.getAttribute('href'))")
    for link in links:
        name, _, place = link.partition("#")
        assert not place or name or place in ids
        assert not name.endswith(".html") or (folder / name).is_file()
    unfold(browser)
    assert horizontal_overflow(browser) == 0
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": axe})
    found = browser.execute_async_script(RUN_AXE)
    assert [one for one in found if one[0] in ("serious", "critical")] == []
    browser.execute_script("document.body.append(document.createElement('img'))")
    found = [one[:2] for one in browser.execute_async_script(RUN_AXE)]
    assert ["critical", "image-alt"] in found, "axe does not work"


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_checkpoint_pages_fit_their_width_and_enlarge_figures(browser, report, width):
    browser.set_window_size(1280, 900)
    open_page(browser, report, "checkpoint-*.html", width=width)

    hidden = browser.execute_script(
        "return [...document.querySelectorAll('main .scroll, main table')].filter((e) =>"
        " e.scrollWidth > e.clientWidth + 1).map((e) => e.outerHTML.slice(0, 99))"
    )
    assert hidden == []
    children = "return [...document.querySelector('.groups').children]"
    left = ".map((e) => Math.round(e.getBoundingClientRect().left))"
    edges = browser.execute_script(children + left)
    assert (len(set(edges)) == 1) == (width == PHONE)
    browser.execute_script(LOAD_PICTURES)
    sheet = find(browser, ".sides.tall img")
    assert width != PHONE or sheet.size["width"] >= SHEET_WIDTH

    link, dialog, address = find(browser, "a.zoom"), find(browser, "#picture"), browser.current_url
    small = link.find_element(By.TAG_NAME, "img")
    link.click()
    large = dialog.find_element(By.TAG_NAME, "img")
    browser.execute_async_script(ENLARGED, large)

    assert browser.current_url == address
    assert large.size["width"] == 3 * int(small.get_attribute("naturalWidth"))
    assert large.get_attribute("alt") == small.get_attribute("alt")
    assert horizontal_overflow(browser) == 0
    dialog.find_element(By.TAG_NAME, "button").click()
    assert not dialog.is_displayed()
    open_page(browser, report, "index.html", width=width)
    browser.execute_script(LOAD_PICTURES)
    for image in browser.find_elements(By.CSS_SELECTOR, ".strip img"):
        assert image.get_property("clientWidth") <= image.get_property("naturalWidth")


def test_a_table_wider_than_the_page_shows_that_it_scrolls(browser, tmp_path):
    store = ResultStore(tmp_path)
    for letter in "abcdefghijklmn":
        store.save(build_record(dataset=f"benchmark_{letter}"))
    assert main(["report", "--out", str(tmp_path)]) == 0
    found = []
    for width in (1300, 4000):
        open_page(browser, tmp_path / "report", "index.html", width=width)
        browser.execute_script("document.querySelector('main').style.maxWidth = 'none'")
        browser.execute_script("window.dispatchEvent(new Event('resize'))")
        board = find(browser, "#leaderboard .scroll")
        found.append(board.get_attribute("class").split())
        browser.execute_script("arguments[0].scrollLeft = 1e6", board)
        browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 50))")
        found.append(board.get_attribute("class").split())

    assert found == [["scroll", "cut", "more"], ["scroll", "cut"], ["scroll"], ["scroll"]]


@pytest.mark.parametrize(
    ("page", "curves", "choice"),
    [
        ("epochs.html", ".chart .line", "input[data-model='11']"),
        ("runs.html", "#metric-loss .chart .line", "input[data-model='1']"),
    ],
)
def test_curves_of_a_block_or_a_run_can_be_hidden(browser, over_epochs, page, curves, choice):
    # Empty the log of earlier tests.
    browser.get_log("browser")
    open_page(browser, over_epochs, page, width=PHONE)
    unfold(browser)

    lines = visible(browser, curves)
    assert len(lines) == 2
    assert len({line.value_of_css_property("stroke") for line in lines} - {"none"}) == 2
    cells = len(visible(browser, "tbody td"))
    find(browser, choice).click()
    assert len(visible(browser, curves)) == 1
    assert len(visible(browser, "tbody td")) < cells
    assert horizontal_overflow(browser) == 0
    assert browser.get_log("browser") == []


def test_clicked_names_are_highlighted_in_all_charts_of_the_overview(browser, report):
    open_page(browser, report, "index.html", width=PHONE)
    name = find(browser, "#overview button[data-m='1']")
    other, own = (find(browser, f"#overview g[data-m='{number}']") for number in (0, 1))

    for is_pressed in (True, False):
        name.send_keys(Keys.ENTER)
        assert name.get_attribute("aria-pressed") == str(is_pressed).lower()
        opacities = [float(curve.value_of_css_property("opacity")) for curve in (other, own)]
        assert (opacities[0] < 1) == is_pressed
        assert opacities[1] == 1


def test_a_printed_report_includes_unfolded_sections(browser, report):
    open_page(browser, report, "index.html")

    def count_pages():
        return len(re.findall(rb"/Type\s*/Page\b", b64decode(browser.print_page())))

    folded = count_pages()
    browser.execute_script("for (const e of document.querySelectorAll('details')) e.open = true")

    assert folded < count_pages()
