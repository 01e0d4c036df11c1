"""The page in a headless Chromium: what it shows, its keys, and that nothing in a run's texts becomes markup."""

import json

import pytest

from miles_tools.report.report import compare
from miles_tools.watch import runs
from tests.browser import MISSING, open_browser
from tests.tools.watch.test_server import add_samples, make_run, serve

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

EVIL = "<img src=x onerror='document.title=1'><script>document.title=2</script>"


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "_PAUSE", 0)
    directory = make_run(tmp_path / "run", 5, **{"train/loss": 0.5, "mine/x": 1.0, "busy/engine-0": 2.0})
    columns = {
        "rollout_log_probs": [-1.0, -2.0, -3.0, 0.0],
        "train_log_probs": [-1.0, -2.5, -3.0, 0.0],
        "advantages": [0.5] * 4,
    }
    prompt = [{"role": "system", "content": EVIL}, {"role": "user", "content": "hi"}]
    for step in (1, 2, 3):
        more = {"prompt": prompt, "label": EVIL, "status": "completed", **columns}
        add_samples(
            directory, step, [0.1, 0.9, 0.5, 0.7], weight_versions=[[0, 1], [2, 2]], loss_mask=[1, 1, 0, 1], **more
        )
    return directory


def ready(browser, url):
    browser.open("about:blank")
    browser.open(url)
    browser.wait("document.documentElement.dataset.ready")


def test_a_reader_finds_plots_samples_and_the_plan(browser, run):
    with serve(run) as client:
        url = f"http://127.0.0.1:{client.server.server_address[1]}{client.base}"
        ready(browser, url)
        assert browser.wait("document.querySelectorAll('figure canvas').length") >= 1
        assert browser.run("return document.title") == "run · miles"
        browser.press("2")
        assert browser.wait("document.querySelectorAll('.list button').length") == 4
        assert browser.wait("document.querySelector('.one .turn')") and EVIL in browser.run(
            "return document.querySelector('.turn').innerText"
        )
        assert browser.run("return location.hash") == "#samples/0/train/3/0"
        browser.press("jjj")
        browser.wait("location.hash === '#samples/0/train/3/3'")
        answers = "[...document.querySelectorAll('.turn')].map(t => t.className)"
        assert browser.wait(f"({answers}).length === 6 && {answers}")[2:] == [
            "turn prompt",
            "turn answer",
            "turn fed",
            "turn answer",
        ]
        browser.run("const sort = document.querySelector('[aria-label=sort]'); sort.value = 'high'; sort.oninput();")
        browser.wait("location.hash === '#samples/0/train/3/1'")
        browser.run("const sort = document.querySelector('[aria-label=sort]'); sort.value = 'order'; sort.oninput();")
        browser.press("[")
        browser.wait("location.hash === '#samples/0/train/2/0'")
        browser.press("/")
        browser.press("answer 2")
        assert (
            browser.wait(
                "document.querySelectorAll('.list button').length === 1 && document.querySelector('.list .right').textContent"
            )
            == "0.5"
        )
        for view, text in (("workers", "engine-0"), ("metrics", "train/loss"), ("plan", "train.lr")):
            browser.run(f"location.hash = '{view}'")
            browser.wait(f"document.getElementById('main').innerText.includes('{text}')")
        assert browser.errors() == [] and not browser.run("return [...document.images].length")


def test_tokens_have_colours_and_numbers(browser, run):
    with serve(run) as client:
        ready(browser, f"http://127.0.0.1:{client.server.server_address[1]}{client.base}#samples/0/train/1/3")
        browser.wait("document.querySelectorAll('.token').length === 4")
        backgrounds = "[...document.querySelectorAll('.token')].map(t => t.style.background)"
        advantage = browser.run(f"return {backgrounds}")
        assert advantage[0] == advantage[1] == advantage[3] != "" and advantage[2] == ""
        browser.run("const c = document.querySelector('[aria-label=colour]'); c.value = 'gap'; c.onchange();")
        gap = browser.wait(f"{backgrounds}[0] === '' && {backgrounds}")
        assert gap[1] and gap[2] == gap[3] == ""
        browser.run("document.querySelectorAll('.token')[1].click()")
        about = browser.run("return document.querySelector('.about').textContent")
        assert about.startswith('token 2 "a" · engine -2 nats · trainer -2.5 · gap -0.5 · advantage 0.5 · version 1')


def test_filters_search_every_step(browser, run):
    add_samples(run, 1, [0.1, 0.95])
    with serve(run) as client:
        ready(browser, f"http://127.0.0.1:{client.server.server_address[1]}{client.base}#samples")
        browser.wait("document.querySelectorAll('.list button').length === 4")
        browser.run(
            "const least = document.querySelector(\"[aria-label='reward ≥']\"); least.value = '0.8'; least.oninput();"
        )
        assert browser.run("return document.querySelectorAll('.list button').length") == 1
        browser.run("[...document.querySelectorAll('button')].find(b => b.textContent === 'search all steps').click()")
        browser.wait("document.querySelector('.count').textContent.includes('found in 3 of 3')")
        found = browser.run("return [...document.querySelectorAll('.list .right')].map(r => r.textContent)")
        assert [text for text in found if text and not text.startswith("gap")] == ["0.9", "0.9", "0.95"]


def test_the_page_follows_a_run(browser, run):
    with serve(run) as client:
        ready(browser, f"http://127.0.0.1:{client.server.server_address[1]}{client.base}#samples")
        browser.wait("document.querySelectorAll('.list button').length === 4")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 6, "time": 6, "reward/mean": 0.5}) + "\n")
        add_samples(run, 6, [0.25])
        assert (
            browser.wait("document.querySelectorAll('.list button').length === 1 && location.hash")
            == "#samples/0/train/6/0"
        )
        assert "6 of 9 steps" in browser.run("return document.getElementById('runs').innerText")
        browser.run("document.querySelector('.list button').click()")  # somebody reads this sample
        add_samples(run, 7, [0.5])
        browser.wait("[...document.querySelectorAll('[aria-label=step] option')].some(o => o.value === '7')")
        assert browser.run("return location.hash") == "#samples/0/train/6/0"


def test_a_report_is_the_same_page_without_a_server(browser, run, tmp_path):
    other = make_run(tmp_path / "other", 5, seed=2)
    page = compare([run, other], tmp_path / "both.html")
    ready(browser, f"{page.resolve().as_uri()}#samples/0/train/2/1")
    browser.wait(
        "document.querySelectorAll('.list button').length === 4 && document.querySelectorAll('.token').length === 2"
    )
    browser.run("location.hash = 'overview'")
    assert browser.wait("document.querySelectorAll('figure canvas').length") >= 1
    assert browser.errors() == [] and EVIL not in browser.run("return document.title")


def test_a_grid_of_a_plugin_is_a_heat_map(browser, run):
    grid = {"rows": "layer", "columns": "expert", "names": ["a", "b"], "values": [[0.0, 1.0, None], [0.5, 0.5, 0.5]]}
    (run / "expert_loads.json").write_text(json.dumps(grid))
    with serve(run) as client:
        ready(browser, f"http://127.0.0.1:{client.server.server_address[1]}{client.base}#overview")
        browser.run("document.querySelector('[data-key^=\"Plugin Experts\"]').scrollIntoView()")
        pixels = browser.wait(
            "(c => c && [...c.getContext('2d').getImageData(0, 0, 3, 2).data])(document.querySelector('.heat canvas'))"
        )
    assert [pixels[i : i + 4] for i in (0, 4, 8)] == [[0, 32, 77, 255], [255, 234, 70, 255], [0, 0, 0, 0]]


def test_it_fits_a_phone(browser, run):
    browser.devtools("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
    try:
        with serve(run) as client:
            for view in ("overview", "samples", "workers", "metrics", "plan"):
                ready(browser, f"http://127.0.0.1:{client.server.server_address[1]}{client.base}#{view}")
                assert browser.run("return document.documentElement.scrollWidth") <= 390, view
    finally:
        browser.devtools("Emulation.clearDeviceMetricsOverride")
