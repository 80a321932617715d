"""Row 67 of the catalogue of faults, in a browser: what gets into a page can do nothing there."""

import pytest

from ssl_bench.cli.__main__ import main
from tests.support.hostile import hostile_store

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.webdriver.common.keys import Keys

from tests.report.test_report_browser import find
from tests.support.report_pages import PAGES, open_page

pytestmark = pytest.mark.browser
# What a page could be made to hold; ends when all of it had the time to act.
INTRUDERS = """
const [address, done] = arguments;
const add = (tag, given) => document.body.append(Object.assign(document.createElement(tag), given));
add("img", { src: address + ".png" });
add("script", { src: address + ".js" });
add("script", { textContent: "window.ran = 1" });
add("div", { innerHTML: "<img src=nowhere.png onerror='window.ran = 1'>" });
add("link", { rel: "stylesheet", href: address + ".css" });
add("iframe", { src: address });
add("object", { data: address });
add("video", { src: address });
const form = Object.assign(document.createElement("form"), { action: address, method: "get" });
document.body.append(form);
form.submit();
navigator.sendBeacon(address);
const late = () => setTimeout(done, 400);
fetch(address).then(late, late);
"""


def test_fault_67_a_page_fetches_nothing_from_elsewhere_whatever_is_put_into_it(
    browser, tmp_path, server
):
    assert main(["report", "--out", str(hostile_store(tmp_path).root)]) == 0
    server.content = b"window.ran = 1"
    open_page(browser, tmp_path / "report", "index.html")

    browser.execute_async_script(INTRUDERS, f"http://127.0.0.1:{server.server_port}/x")

    assert server.ranges == []
    assert browser.execute_script("return window.ran") is None
    messages = " ".join(entry["message"] for entry in browser.get_log("browser"))
    for directive in ("img-src", "script-src", "style-src", "default-src", "form-action"):
        assert directive in messages


def test_fault_67_hostile_records_run_nothing_and_hide_nothing(browser, tmp_path):
    store = hostile_store(tmp_path)
    assert main(["report", "--out", str(store.root)]) == 0

    for pattern in PAGES:
        open_page(browser, tmp_path / "report", pattern)
        assert browser.get_log("browser") == []
        assert browser.execute_script("return document.querySelectorAll('iframe, style')") == []
    open_page(browser, tmp_path / "report", "index.html")
    find(browser, "#leaderboard button.from").send_keys(Keys.ENTER)
    opened = find(browser, "#provenance").text
    # A literal of the language would have made this the prototype, which is not listed.
    assert "settings: __proto__" in opened
    assert all(line.isprintable() for line in opened.splitlines())
