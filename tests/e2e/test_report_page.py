"""The report in a real browser: opened from disk, three hundred jobs, prompts that would like to be code."""

from __future__ import annotations

import importlib.util
import shutil
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from batchgen.report.html import write_report
from reportkit import as_a_night, finished_run

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="no Chromium with its driver on this machine")

PROMPTS = [
    "</script><script>window.hacked=1</script>",
    '"><img src=x onerror="window.hacked=1">',
    "<b>bold</b> & 'quoted'",
    "مرحبا بالعالم",
    "🦊 fox",
    "x" * 5000,
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    from selenium import webdriver

    folder = tmp_path_factory.mktemp("report")
    prompts = [PROMPTS[number] if number < len(PROMPTS) else f"picture {number} of a harbour" for number in range(300)]
    run = finished_run(folder / "run", prompts, failed=[10, 20], clips=[30])
    as_a_night(run)
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync", "--window-size=1280,1600", f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    try:
        driver.get(write_report(run).as_uri())
        yield driver
    finally:
        driver.quit()


def tiles(page):
    return page.find_elements("css selector", ".tile")


def find(page, words):
    page.execute_script(
        "const text = document.getElementById('text'); text.value = arguments[0]; text.dispatchEvent(new Event('input'))", words,
    )


def choose(page, state):
    page.execute_script(
        "const list = document.getElementById('state'); list.value = arguments[0]; list.dispatchEvent(new Event('change'))", state,
    )


def test_three_hundred_jobs_are_shown_by_paging(page):
    seen = 0
    while True:
        seen += len(tiles(page))
        after = page.find_element("id", "next")
        if not after.is_enabled():
            break
        after.click()
    assert seen == 300
    for _ in range(4):
        page.find_element("id", "back").click()
    assert not page.find_element("id", "back").is_enabled()


def test_thumbnails_are_drawn(page):
    time.sleep(0.3)  # decoding is the browser's own work; nothing is asserted about how long it takes
    wide = page.execute_script("return [...document.querySelectorAll('.tile img')].filter(i => i.complete && i.naturalWidth > 0).length")
    assert wide >= 12


def test_no_prompt_runs_as_script_or_becomes_an_element(page):
    assert page.execute_script("return window.hacked") is None
    texts = [element.text for element in page.find_elements("css selector", ".tile .text")]
    assert texts[0] == PROMPTS[0]
    assert page.execute_script("return document.querySelectorAll('.tile b, .tile script').length") == 0


def test_text_state_and_shape_filter(page):
    search = page.find_element("id", "text")
    search.send_keys("harbour 299")
    assert len(tiles(page)) == 1
    search.clear()
    search.send_keys(" ")
    choose(page, "failed")
    assert len(tiles(page)) == 2
    choose(page, "")


def test_a_click_opens_the_picture_with_its_settings_and_command(page):
    tiles(page)[3].click()
    dialog = page.find_element("id", "full")
    assert dialog.get_attribute("open") is not None
    facts = page.find_element("id", "facts").text
    assert PROMPTS[3] in facts
    assert "batchgen rerender" in facts
    assert str(2**64 - 4) in facts
    page.find_element("id", "close").click()
    assert dialog.get_attribute("open") is None


def test_a_clip_plays_in_its_place(page):
    from selenium.webdriver.support.ui import WebDriverWait

    find(page, "job-30")
    tiles(page)[0].click()
    clip = page.find_element("css selector", "#large video")
    if importlib.util.find_spec("av") is not None:
        WebDriverWait(page, 30).until(lambda _: page.execute_script("return arguments[0].readyState >= 2", clip))
        assert page.execute_script("return [arguments[0].videoWidth, arguments[0].controls]", clip) == [64, True]
    page.find_element("id", "close").click()
    find(page, "")


def test_a_reason_shows_its_jobs(page):
    page.find_element("css selector", "button.show").click()
    assert len(tiles(page)) == 2
    assert page.execute_script("return window.hacked") is None
    find(page, "")
    assert len(tiles(page)) == 60


def test_the_charts_are_drawn(page):
    sizes = page.execute_script("return [...document.querySelectorAll('.charts img')].map(image => image.complete && image.naturalWidth)")
    assert len(sizes) == 2
    assert all(size > 300 for size in sizes)


def test_nothing_was_asked_of_the_network_and_the_console_is_clean(page):
    import json

    sent = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    urls = [entry["params"]["request"]["url"] for entry in sent if entry["method"] == "Network.requestWillBeSent"]
    assert any(url.startswith("file:") for url in urls)
    # chrome: is the browser's own first page
    assert [url for url in urls if not url.startswith(("file:", "data:", "chrome:"))] == []
    severe = [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    if importlib.util.find_spec("av") is None:  # a clip that is none cannot be decoded; that is the test's own doing
        severe = [entry for entry in severe if ".mp4" not in entry["message"]]
    assert severe == []


def test_a_picture_that_lies_elsewhere_is_shown_small_and_the_rest_of_the_page_stays(page):
    from selenium.webdriver.support.ui import WebDriverWait

    (Path(unquote(urlsplit(page.current_url).path)).parent / "outputs/000040.png").unlink()
    find(page, "picture 40 of")
    tiles(page)[0].click()
    shown = "const image = document.querySelector('#large img'); return image.complete && image.naturalWidth > 0"
    WebDriverWait(page, 30).until(lambda _: page.execute_script(shown))
    assert page.execute_script("return document.querySelector('#large img').src").startswith("data:image/webp;base64,")
    page.find_element("id", "close").click()
    find(page, "")
