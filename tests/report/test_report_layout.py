"""How pages are laid out on a phone, on a desk and on a wall, by day and by night, in a browser."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from ssl_bench.cli.__main__ import main
from ssl_bench.results import ResultStore
from tests.support.report_cells import cell, folder_of, save_pictures
from tests.support.report_pages import PAGES, SHEET_WIDTH, browsed_report, open_page

pytest.importorskip("selenium", reason="selenium is not installed")

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
def axe() -> str:
    """The source of axe-core."""
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or not found.submodule_search_locations:
        pytest.skip("axe-playwright-python, which carries axe-core, is not installed")
    return Path(found.submodule_search_locations[0], "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return browsed_report(tmp_path_factory.mktemp("layout"))


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
def test_axe_finds_nothing_serious(browser, axe, report, unlabelled, over_epochs, width, dark):
    pages = [(report, pattern) for pattern in PAGES]
    pages += [(unlabelled, pattern) for pattern in PAGES[:2]]
    for folder, pattern in [*pages, (over_epochs, "epochs.html")]:
        open_page(browser, folder, pattern, width=width, dark=dark)
        browser.execute_cdp_cmd("Runtime.evaluate", {"expression": axe})
        unfold(browser)

        found = browser.execute_async_script(RUN_AXE)

        assert [one for one in found if one[0] in SERIOUS] == []


def test_axe_finds_what_is_wrong(browser, axe, report):
    open_page(browser, report, "index.html")
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": axe})
    browser.execute_script("document.images[0].removeAttribute('alt')")

    found = [one[:2] for one in browser.execute_async_script(RUN_AXE)]
    assert ["critical", "image-alt"] in found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("pattern", PAGES)
def test_no_page_scrolls_sideways(browser, report, pattern, width):
    open_page(browser, report, pattern, width=width)
    unfold(browser)

    assert sideways(browser) == 0


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
        board = browser.find_element("css selector", "#checkpoints .scroll")
        found.append(board.get_attribute("class").split())
        browser.execute_script("arguments[0].scrollLeft = 1e6", board)
        browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 50))")
        found.append(board.get_attribute("class").split())

    assert found == [["scroll", "cut", "more"], ["scroll", "cut"], ["scroll"], ["scroll"]]


@pytest.mark.parametrize("selector", [".groups", ".two"])
def test_a_phone_has_one_column(browser, report, selector):
    open_page(browser, report, "checkpoint-*.html", width=PHONE)
    on_phone = columns(browser, selector)
    open_page(browser, report, "checkpoint-*.html", width=DESK)

    assert on_phone == 1 < columns(browser, selector)


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


def test_a_sheet_on_a_phone_is_as_large_as_it_was_drawn(browser, report):
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
