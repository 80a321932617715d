"""A report in a browser: opened from disk, sorted, filtered, by keyboard, on any screen."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from tests.support.report_cells import SKIP, SKIPLESS, cell, folder_of, save_pictures
from tests.support.report_pages import PAGES, SHEET_WIDTH, browsed_report, open_page

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.browser
WIDTHS = (390, 1280, 1920)
PHONE, DESK, _ = WIDTHS
SERIOUS = ("serious", "critical")
# The size of what is pressed is of WCAG 2.2 and not among the rules that are tried by default.
RUN_AXE = """
const done = arguments[arguments.length - 1];
axe.run(document, { resultTypes: ["violations"], rules: { "target-size": { enabled: true } } })
  .then((found) => done(found.violations.map((v) => [v.impact, v.id, v.nodes[0].html])));
"""

# Its width is known once it is loaded, which a picture that is decoded may not yet be.
ENLARGED = """
const [image, done] = arguments;
const look = () => (image.width === 3 * image.naturalWidth && image.complete && image.naturalWidth)
  ? done() : setTimeout(look, 20);
look();
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


def test_a_head_sorts_by_number_and_back(browser, report):
    open_page(browser, report, "index.html")
    table = "article[data-task=tokencut] table"
    unfold(browser)
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
    unfold(browser)

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
    assert len(shown("article[data-task]")) == 1
    assert [e.text for e in shown("main section h2")] == [
        "Summary",
        "Leaderboard",
        "Pictures",
        "tokencut",
    ]
    assert find(browser, "#shown").text == "1 of 5 panels shown"
    find(browser, "input[data-model='1']").click()
    assert len(shown("article g[data-m='1']")) == 0
    find(browser, "button[type=reset]").click()
    assert browser.execute_async_script("setTimeout(arguments[0], 0)") is None
    assert len(shown("article[data-task] g[data-m='1']")) > 0


def test_a_number_tells_its_provenance_to_the_keyboard(browser, report):
    open_page(browser, report, "index.html")
    number, dialog = find(browser, "#leaderboard button.from"), find(browser, "#provenance")

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


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core."""
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or not found.submodule_search_locations:
        pytest.skip("axe-playwright-python, which carries axe-core, is not installed")
    return Path(found.submodule_search_locations[0], "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory) -> Path:
    """A report that begins with its pictures."""
    root = tmp_path_factory.mktemp("unlabelled")
    record = cell(dataset="folder", metric="degenerate")
    ResultStore(root).save(record)
    save_pictures(root, f"tokencut/folder/{folder_of(record)}/reference/block00_key/dog")
    assert main(["report", "--out", str(root)]) == 0
    return root / "report"


@pytest.fixture(scope="module")
def over_epochs(tmp_path_factory) -> Path:
    store = ResultStore(tmp_path_factory.mktemp("epochs"))
    for epoch in (1.0, 2.0):
        one = cell(model=f"run@{epoch:g}", checkpoint_sha256=f"{epoch:064.0f}")
        store.save(replace(one, details={"epoch": epoch}))
    assert main(["report", "--out", str(store.root)]) == 0
    return store.root / "report"


def unfold(browser) -> None:
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")


def sideways(browser) -> int:
    root = "document.documentElement"
    return browser.execute_script(f"return {root}.scrollWidth - {root}.clientWidth")


def columns(browser, selector: str) -> int:
    """At how many different left edges the children of the first such element begin."""
    script = (
        "return new Set([...document.querySelector(arguments[0]).children]"
        ".map((e) => Math.round(e.getBoundingClientRect().left))).size"
    )
    return browser.execute_script(script, selector)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_nothing_serious_and_no_page_scrolls_sideways(
    browser, axe, report, unlabelled, over_epochs, width, dark
):
    pages = [(report, pattern) for pattern in PAGES]
    pages += [(unlabelled, pattern) for pattern in PAGES[:2]]
    for folder, pattern in [*pages, (over_epochs, "epochs.html")]:
        open_page(browser, folder, pattern, width=width, dark=dark)
        browser.execute_cdp_cmd("Runtime.evaluate", {"expression": axe})
        unfold(browser)
        assert sideways(browser) == 0

        found = browser.execute_async_script(RUN_AXE)

        assert [one for one in found if one[0] in SERIOUS] == []


def test_axe_finds_what_is_wrong(browser, axe, report):
    open_page(browser, report, "index.html")
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": axe})
    browser.execute_script("document.images[0].removeAttribute('alt')")

    found = [one[:2] for one in browser.execute_async_script(RUN_AXE)]
    assert ["critical", "image-alt"] in found


@pytest.mark.parametrize("width", WIDTHS)
def test_all_of_the_page_of_a_checkpoint_fits_its_width(browser, report, width):
    open_page(browser, report, "checkpoint-*.html", width=width)

    hidden = browser.execute_script(
        "return [...document.querySelectorAll('main .scroll, main table')].filter((e) =>"
        " e.scrollWidth > e.clientWidth + 1).map((e) => e.outerHTML.slice(0, 99))"
    )
    assert hidden == []


def test_a_table_wider_than_the_page_says_that_it_scrolls(browser, tmp_path):
    names = [f"benchmark_{letter}" for letter in "abcdefghijklmn"]
    store = ResultStore(tmp_path)
    for name in names:
        store.save(cell(dataset=name))
    assert main(["report", "--out", str(tmp_path)]) == 0
    found = []
    for width in (1300, 4000):
        open_page(browser, tmp_path / "report", "index.html", width=width)
        browser.execute_script("document.querySelector('main').style.maxWidth = 'none'")
        browser.execute_script("window.dispatchEvent(new Event('resize'))")
        board = browser.find_element("css selector", "#leaderboard .scroll")
        found.append(board.get_attribute("class").split())
        browser.execute_script("arguments[0].scrollLeft = 1e6", board)
        browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 50))")
        found.append(board.get_attribute("class").split())

    assert found == [["scroll", "cut", "more"], ["scroll", "cut"], ["scroll"], ["scroll"]]


def test_a_phone_has_one_column(browser, report):
    open_page(browser, report, "checkpoint-*.html", width=PHONE)
    on_phone = columns(browser, ".groups")
    open_page(browser, report, "checkpoint-*.html", width=DESK)

    assert on_phone == 1 < columns(browser, ".groups")


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_a_pressed_picture_is_enlarged_and_closed_again(browser, report, width):
    open_page(browser, report, "checkpoint-*.html", width=width)
    link = browser.find_element("css selector", "a.zoom")
    dialog = browser.find_element("css selector", "#picture")
    small, address = link.find_element("css selector", "img"), browser.current_url

    link.click()
    large = dialog.find_element("css selector", "img")
    browser.execute_async_script(ENLARGED, large)

    assert browser.current_url == address
    assert large.size["width"] == 3 * int(small.get_attribute("naturalWidth"))
    assert large.get_attribute("alt") == small.get_attribute("alt")
    assert sideways(browser) == 0
    dialog.find_element("css selector", "button").click()
    assert not dialog.is_displayed()


def test_a_wide_picture_keeps_its_size_on_a_phone(browser, report):
    open_page(browser, report, "checkpoint-*.html", width=PHONE)
    sheet = browser.find_element("css selector", ".sides.tall img")
    browser.execute_async_script(
        "arguments[0].loading = 'eager'; arguments[0].decode().then(arguments[1])", sheet
    )

    assert sheet.size["width"] >= SHEET_WIDTH
    assert sideways(browser) == 0


def test_a_folded_panel_opens_when_it_is_linked_to_or_asked_for(browser, report):
    open_page(browser, report, "index.html")
    panel = browser.find_element("css selector", "details.fold article")
    assert not panel.is_displayed()

    browser.execute_script("location.hash = arguments[0]", panel.get_attribute("id"))
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    assert panel.is_displayed()

    open_page(browser, report, "index.html")
    browser.get(browser.current_url.partition("#")[0])
    panel = browser.find_element("css selector", "details.fold article")
    field = "select[data-field=task]"
    chosen = f"{field} option[value='{panel.get_attribute('data-task')}']"
    browser.find_element("css selector", chosen).click()
    assert panel.is_displayed()
