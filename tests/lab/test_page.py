"""The page and the report in a real browser: every view, light, dark and at a phone's width."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser
from pagekit import EVIL, fill, served

import ckptstore
from ckptstore.pages.report_file import write_report

pytestmark = pytest.mark.lab

LOOKS = {"light": ((1280, 900), False), "dark": ((1280, 900), True), "phone": ((375, 812), False)}
VIEWS = {
    "runs": ("#runs", "versions in 3 runs", "gpt"),
    "run": ("#run?run=gpt", "gpt", "full: last 1, tagged"),
    "together": ("#run?run=gpt&run=lora", "gpt, lora", "from gpt@30"),
    "lineage": ("#lineage", "Lineage", "As a table"),
    "version": ("#version?ref={gpt}", "gpt@50", "optimizer.m"),
    "diff": ("#diff?first={gpt}&second={gpt}", "Compare", "Nothing differs"),
    "storage": ("#storage", "stored for", "optimizer"),
    "health": ("#health", "Health", "No replica has a name"),
}
"""Each view: address, what its title holds, a text that a reader sees."""

SHOWN = """new Promise((resolve, reject) => {
  const main = document.getElementById('main')
  const look = () => {
    const title = main.querySelector('h1')
    if (title && title.textContent.includes(TITLE) && !main.hasAttribute('aria-busy')) {
      resolve(document.body.innerText)
    }
  }
  new MutationObserver(look).observe(main, { childList: true, attributes: true })
  location.hash = HASH
  setTimeout(look, 50)
  setTimeout(() => reject(new Error(main.innerText.slice(0, 300))), 30000)
})"""
UNNAMED = """[
  ...[...document.querySelectorAll('input, select')]
    .filter(one => !one.labels.length && !one.hasAttribute('aria-label')),
  ...[...document.querySelectorAll('th')].filter(one => !one.scope),
  ...[...document.querySelectorAll('svg')]
    .filter(one => !one.hasAttribute('aria-label') && !one.closest('[aria-hidden]')
      && !one.hasAttribute('aria-hidden')),
  ...[...document.querySelectorAll('a, button')]
    .filter(one => !one.textContent.trim() && !one.hasAttribute('aria-label')),
].map(one => one.outerHTML.slice(0, 200))"""
FAINT = """(() => {
  const shade = text => {
    const [r, g, b] = text.match(/[0-9.]+/g).map(one => one / 255)
      .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const back = shade(getComputedStyle(document.body).backgroundColor)
  return [...document.querySelectorAll('main a, main p, main td, main th, main dt, main dd')]
    .filter(one => one.textContent && !one.closest('svg')).map(one => {
      const front = shade(getComputedStyle(one).color)
      const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05)
      return [ratio, one.outerHTML.slice(0, 100)]
    }).filter(([ratio]) => ratio < 4.5)
})()"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ckptstore.Store]:
    """Return a store with everything that the page shows."""
    with ckptstore.open(tmp_path_factory.mktemp("page") / "store", create=True) as made:
        fill(made)
        yield made


@pytest.fixture(params=["served", "report"])
def address(
    request: pytest.FixtureRequest, store: ckptstore.Store, tmp_path: Path
) -> Iterator[str]:
    """Return the address of the page: of a server, or of a file."""
    if request.param == "report":
        write_report(store, tmp_path / "report.html")
        yield (tmp_path / "report.html").as_uri()
    else:
        with served(store) as url:
            yield f"{url}/"


def _show(chromium: Browser, address: str, title: str) -> str:
    script = SHOWN.replace("TITLE", repr(title)).replace("HASH", repr(address))
    text: str = chromium.run(script)
    return text


@pytest.mark.parametrize("look", LOOKS)
def test_every_view(
    address: str, store: ckptstore.Store, chromium: Browser, pictures: Path, look: str
) -> None:
    """Each shows its text, fits the window, names its controls, and asks no other host."""
    (width, height), dark = LOOKS[look]
    chromium.show(width=width, height=height, dark=dark)
    chromium.open(address)
    kind = "report" if address.startswith("file:") else "served"
    for name, (view, title, text) in VIEWS.items():
        seen = _show(chromium, view.format(gpt=store.resolve("gpt").id), title)
        assert text in seen, name
        assert chromium.run("document.documentElement.scrollWidth") <= width, name
        assert chromium.run(UNNAMED) == [], name
        assert chromium.run(FAINT) == [], name
        assert chromium.run("document.scripts.length") == (2 if kind == "report" else 1), name
        chromium.picture(pictures / f"page-{kind}-{name}-{look}.png")
    shade = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)"
    assert (sum(chromium.run(shade)[:3]) < 3 * 128) == dark
    assert chromium.problems == []
    here = address.partition("#")[0]
    assert [url for url in chromium.requests if not url.startswith((here, "data:"))] == []


def test_the_curve_is_read_by_mouse_and_by_keyboard(address: str, chromium: Browser) -> None:
    """A point tells its version; drag and wheel zoom; Enter opens what an arrow reached."""
    chromium.show(width=1280, height=900, dark=False)
    chromium.open(address)
    _show(chromium, "#run?run=gpt", "gpt")
    chromium.run("document.querySelector('figure svg').focus()")
    chromium.run("window.before = document.querySelector('figure svg').innerHTML")
    _key(chromium, "ArrowRight")
    said = chromium.run("document.getElementById('said').textContent")
    assert said.startswith("gpt@0")
    assert "pinned" in said
    tip = "document.querySelector('.tip').textContent"
    assert said.split(", ")[0] in chromium.run(tip)
    box = chromium.run("document.querySelector('figure').getBoundingClientRect().toJSON()")
    middle, low = box["x"] + box["width"] / 2, box["y"] + 200
    ticks = "[...document.querySelectorAll('figure text')].map(one => one.textContent).join()"
    before = chromium.run(ticks)
    _mouse(chromium, "mousePressed", middle - 100, low)
    _mouse(chromium, "mouseMoved", middle + 100, low, buttons=1)
    _mouse(chromium, "mouseReleased", middle + 100, low)
    zoomed = chromium.run(ticks)
    assert zoomed != before
    _mouse(chromium, "mouseWheel", middle, low, deltaX=0, deltaY=-100)
    assert chromium.run(ticks) != zoomed
    _key(chromium, "0")
    assert chromium.run(ticks) == before
    _key(chromium, "ArrowRight")
    _key(chromium, "Enter")
    assert "#version" in chromium.run("location.hash")
    _wait(chromium, "document.querySelector('h1').textContent.startsWith('gpt@0')")
    assert chromium.run("document.activeElement.id") == "main"


def test_a_run_is_chosen_and_a_tensor_searched(address: str, chromium: Browser) -> None:
    """Filters narrow tables; chosen runs open together; odd texts stay texts."""
    chromium.show(width=1280, height=900, dark=False)
    chromium.open(address)
    _show(chromium, "#runs", "versions in 3 runs")
    _type(chromium, "input[type=search]", "or")
    assert chromium.run("document.querySelectorAll('tbody tr').length") == 1
    _type(chromium, "input[type=search]", "")
    for name in ("gpt", "lora"):
        chromium.run(f"document.querySelector('input[aria-label=\"Choose {name}\"]').click()")
    chromium.run("document.querySelector('.tools button').click()")
    _wait(chromium, "document.querySelector('h1').textContent === 'gpt, lora'")
    ref = chromium.run("document.querySelector('tbody a[href*=\"version\"]').hash")
    _show(chromium, ref, "lora@35")
    version = chromium.run("get('overview').then(d => d.runs.find(r => r.name === 'gpt').head.id)")
    seen = _show(chromium, f"#version?ref={version}", "gpt@50")
    assert EVIL in seen
    _type(chromium, ".tools input[type=search]", "OPTIM")
    _wait(chromium, "document.querySelectorAll('.mono[scope=row]').length === 1")
    _show(chromium, "#version?ref=" + "0" * 32, "Not shown")
    assert chromium.run("document.querySelector('[role=alert]').textContent")


def test_a_histogram_on_demand(store: ckptstore.Store, chromium: Browser) -> None:
    """The served page counts the values of a tensor; the report has no such button."""
    chromium.show(width=1280, height=900, dark=False)
    version = store.resolve("gpt").id
    with served(store) as url:
        chromium.open(url + "/page")
        _show(chromium, f"#version?ref={version}", "gpt@50")
        chromium.run(
            "document.querySelector('button[aria-label=\"Histogram of model.w\"]').click()"
        )
        _wait(chromium, "document.querySelectorAll('.histogram rect').length === 60")
        _type(chromium, "#find input", "lora")
        chromium.run("document.querySelector('#find').requestSubmit()")
        _wait(chromium, "document.querySelector('h1').textContent.startsWith('lora@35')")
    assert chromium.problems == []


def _wait(chromium: Browser, condition: str) -> None:
    deadline = time.monotonic() + 30
    while not chromium.run(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)


def _type(chromium: Browser, where: str, text: str) -> None:
    chromium.run(
        f"(() => {{ const one = document.querySelector({where!r}); one.value = {text!r};"
        " one.dispatchEvent(new InputEvent('input')) })()"
    )


def _key(chromium: Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        chromium.call("Input.dispatchKeyEvent", type=kind, key=key)


def _mouse(chromium: Browser, kind: str, x: float, y: float, **more: Any) -> None:  # noqa: ANN401
    button = {"button": "left", "clickCount": 1} if kind != "mouseWheel" else {}
    chromium.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button, **more)
