"""The page in a real browser: every view, filters, keys, live updates, a phone, and text that tries to be more."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from agentrl import records
from agentrl.codec import Note
from agentrl.report import html
from agentrl.rollout.store import Store
from agentrl.types import Message, ToolCall, Verdict
from benchmarks.viewer import Writer, make_run

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
MATRIX = '{"rows": [{"env": "files", "level": 1, "backend": "docker", "ok": true, "tried": 36, "succeeded": {}}]}'
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\'"><svg onload=window.hacked=1>'
BIDI = "safe \u202egnp.exe\u202c \u2066x\u2069 zero\u200bwidth \ud800 \x1b[31m end"
expect.set_options(timeout=40_000)


def beside(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run in a thread: Playwright's own event loop runs in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments, **options).result()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    beside(make_run, folder / "alpha", steps=8, groups=3, size=4)
    beside(make_run, folder / "beta", steps=8, groups=3, size=4, seed=1, shift=3, alarm=False)
    beside(make_run, folder / "<b>evil", steps=1, groups=1, size=2)
    hostile(folder / "<b>evil")
    return folder


def hostile(run: Path) -> None:
    """Add an episode of which every text is an attack, and one whose line is no UTF-8."""
    (first, *_) = records.read(run / "trajectories")
    long = "x" * 1_000_000
    item = replace(
        first.trajectory,
        task=replace(first.trajectory.task, id=f"evil/{EVIL}", prompt=EVIL + BIDI, tags=(EVIL,)),
        group=50,
        messages=(
            Message(role="user", content=EVIL + BIDI),
            Message(
                role="assistant", content=long, thinking=EVIL, tool_calls=(ToolCall(name=EVIL, arguments={EVIL: EVIL}),)
            ),
            Message(role="tool", content=BIDI + EVIL, name=EVIL),
        ),
        verdict=Verdict(score=1.0, evidence=(EVIL, BIDI), breakdown={EVIL: 1.0}, verifier=EVIL),
        ledger={EVIL: EVIL, "created": [EVIL, BIDI], "nested": {EVIL: [EVIL]}},
    )

    async def add() -> None:
        store = Store(run / "trajectories")
        await store.add(item, EVIL, Note())
        await store.close()

    beside(asyncio.run, add())
    part = records.parts(run / "trajectories")[-1]
    contents = [content for content, _ in records.scan(part)]
    broken = contents[-1].replace(b'"group":50', b'"group":51').replace(b"gnp.exe", b"\xff\xfe\xc3(")
    packer = zlib.compressobj(4, zlib.DEFLATED, 31)
    with part.open("ab") as file:
        file.write(packer.compress(broken) + packer.flush())


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command itself, as a user starts it."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "matrix.json").write_text(MATRIX)
    command = [sys.executable, "-m", "agentrl", "view", str(folder), "--no-browser", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--redteam", str(cache / "matrix.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    match = re.search(r"http://\S+/", line)
    assert match, line + process.stderr.read()
    yield match[0]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(browser: Browser, **options: Any) -> Page:
    """A page that remembers every complaint of the browser, and every address it asked for."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}, **options).new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.complaints, page.asked = complaints, asked  # type: ignore[attr-defined]
    return page


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    page = opened(browser)
    yield page
    assert page.complaints == []  # type: ignore[attr-defined]
    elsewhere = [url for url in page.asked if not url.startswith((address, "data:"))]  # type: ignore[attr-defined]
    assert elsewhere == []
    page.context.close()


def test_every_view_by_mouse(page: Page, address: str) -> None:
    """From the list of runs to a token, a group, two runs side by side and the red team; each has its own address."""
    page.goto(address)
    expect(page.locator("tbody tr")).to_have_count(3)
    page.get_by_role("link", name="alpha").click()
    expect(page.locator("h1")).to_have_text("alpha")
    expect(page.locator("figure.chart canvas").first).to_be_visible()
    assert page.locator("figure.chart").count() >= 15
    expect(page.locator(".alarm")).to_contain_text("entropy")
    expect(page.locator("svg.reliability circle").first).to_be_visible()
    expect(page.locator("table.levels i").first).to_be_visible()
    expect(page.locator(".bars .bar i").first).to_be_visible()
    expect(page.locator("h2").first).to_contain_text("better:")
    page.locator(".alarm a").click()
    expect(page.locator(".title small")).to_contain_text("12 match")
    assert page.url.endswith("#/run/alpha/rows?kind=train&from=4&to=4")
    page.locator("table.rows tbody a").first.click()
    expect(page.locator("article.turn.assistant").first).to_contain_text("I call")
    for title in ("Verdict", "What became of it", "Side effects", "Task"):
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    page.get_by_role("button", name="Tokens").click()
    token = page.locator(".tokens .s2").first
    token.hover()
    expect(page.locator(".status")).to_contain_text("logprob")
    expect(page.locator(".status")).to_contain_text("policy version 3")
    page.locator(".tokens .s1").first.hover()
    expect(page.locator(".status")).to_contain_text("observationnot in the loss")
    assert page.locator(".tokens").inner_text().replace("↵", "").startswith("<|system|>You work in a folder.")
    page.get_by_role("link", name="side by side").click()
    expect(page.locator(".columns > section article").first).to_be_visible()
    expect(page.locator(".columns > section")).to_have_count(4)
    page.goto(address)
    page.get_by_label("compare alpha").check()
    page.get_by_label("compare beta").check()
    page.get_by_role("link", name="compare the two").click()
    expect(page.locator("figure.chart .legend").first).to_contain_text("beta")
    page.locator("td.cut a").first.click()
    expect(page.locator(".sides > section article.assistant").nth(1)).to_be_visible()
    shared_link = page.url
    page.get_by_role("link", name="Red team").click()
    expect(page.locator(".heat")).to_contain_text("0 / 36")
    page.goto(shared_link)  # a link that can be shared
    expect(page.locator(".sides > section article.assistant").nth(1)).to_be_visible()


def test_filters(page: Page, address: str) -> None:
    page.goto(f"{address}#/run/alpha/rows")
    shown = page.locator(".title small")
    expect(shown).to_contain_text("276 match")
    page.locator("select[name=kind]").select_option("train")
    expect(shown).to_contain_text("96 match")
    page.locator("select[name=kept]").select_option("kept")
    page.locator("select[name=score]").select_option("pass")
    expect(page.locator("table.rows tbody tr .pill.good").first).to_be_visible()
    assert "kind=train&kept=kept&score=pass" in page.url
    page.locator("input[name=to]").fill("2")
    page.locator("input[name=to]").press("Enter")
    expect(page.locator("table.rows tbody tr td.num").first).to_have_text(re.compile("^[12]$"))
    page.get_by_role("link", name="clear all filters").click()
    expect(shown).to_contain_text("276 match")
    page.locator("#text").fill("folder level3")
    page.locator("#text").press("Enter")
    expect(shown).not_to_contain_text("276 match")
    expect(shown).not_to_contain_text("reading texts")
    page.get_by_role("button", name="tokens").click()
    expect(page.locator("th[aria-sort=descending]")).to_have_text("tokens ↓")
    task = page.locator("input[name=task]")
    task.fill("nothing like this")
    page.evaluate("go.refresh()")  # as when a live run goes on
    page.wait_for_load_state("networkidle")
    expect(task).to_have_value("nothing like this")
    task.press("Enter")
    expect(page.locator(".empty")).to_have_text("Nothing matches these filters.")


def test_keyboard_alone(page: Page, address: str) -> None:
    """From the list to a token and back without a mouse; the list of keys, dark and light."""
    page.goto(address)
    expect(page.locator("tbody tr")).to_have_count(3)
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "alpha":
            break
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("alpha")
    page.keyboard.press("b")
    expect(page.locator("tr.current")).to_have_count(1)
    page.keyboard.press("/")
    page.keyboard.type("heather")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(page.get_by_text("clear all filters")).to_be_visible()
    expect(page.locator("table.rows")).to_have_attribute("aria-busy", "false")
    expect(page.locator("table.rows tbody tr").first).to_be_visible()
    for key in "jjk":  # faster than the page draws
        page.keyboard.press(key)
    expect(page.locator("tr#row1")).to_have_class("current")
    page.keyboard.press("]")
    expect(page.locator(".pager")).to_contain_text("page 2 of 3")
    page.keyboard.press("[")
    expect(page.locator(".pager")).to_contain_text("page 1 of 3")
    page.goto(f"{address}#/run/alpha/one/train.4.1")
    expect(page.locator("article").first).to_be_visible()
    expect(page.locator(".squares a").first).to_be_visible()
    page.keyboard.press("j")
    expect(page.locator(".squares a[aria-current]")).to_have_attribute("href", "#/run/alpha/one/train.4.2")
    page.keyboard.press("t")
    expect(page.locator(".tokens")).to_be_visible()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".status")).to_contain_text("token 2")
    page.keyboard.press("g")
    expect(page.locator(".columns > section article").first).to_be_visible()
    page.keyboard.press("?")
    expect(page.locator("dialog[open]")).to_contain_text("search the transcripts")
    page.keyboard.press("Escape")
    page.keyboard.press("d")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.keyboard.press("r")
    expect(page.locator("h1")).to_have_text("Runs")


def test_a_running_run_updates_by_itself(page: Page, address: str, folder: Path) -> None:
    """Steps, alarms and trajectories appear while the page is open; a run that begins appears in the list."""
    page.goto(address)
    expect(page.locator("tbody tr")).to_have_count(3)
    writer = Writer(folder / "live", steps=20)
    try:
        beside(asyncio.run, writer.round(1, 1, 2))
        expect(page.locator("tbody tr")).to_have_count(4)
        held: list[Route] = []
        page.route("**/events", lambda route: held.append(route))
        page.goto(f"{address}#/run/live")
        expect(page.locator(".tile b").first).to_have_text("1")
        while not held:
            page.wait_for_timeout(10)
        beside(asyncio.run, writer.round(2, 1, 2))  # before the server hears that somebody listens
        held[0].continue_()
        page.unroute("**/events")
        expect(page.locator(".tile b").first).to_have_text("2")
        expect(page.locator(".live")).to_have_class("live on")
        beside(asyncio.run, writer.round(3, 1, 2))
        expect(page.locator(".tile b").first).to_have_text("3")
        writer.metrics.log("alarm", 3, {"name": "signal", "text": "nothing was learnt"})
        expect(page.locator(".alarm")).to_contain_text("nothing was learnt")
        page.goto(f"{address}#/run/live/rows")
        expect(page.locator(".title small")).to_contain_text("6 match")
        beside(asyncio.run, writer.round(4, 1, 2))
        expect(page.locator(".title small")).to_contain_text("8 match")
    finally:
        beside(asyncio.run, writer.close())
        shutil.rmtree(folder / "live")


def test_hostile_text_does_nothing(page: Page, address: str) -> None:
    """Scripts, marks that turn or hide text, a megabyte on one line, broken bytes, in every place a text can stand."""
    run = "%3Cb%3Eevil"
    page.goto(f"{address}#/run/{run}/one/train.50.0")
    expect(page.locator("h1")).to_contain_text("<script>window.hacked=1</script>")
    first = page.locator("article.turn").first
    expect(first).to_contain_text("<img src=x onerror=")
    expect(first).to_contain_text("safe U+202Egnp.exeU+202C")
    expect(first).to_contain_text("zeroU+200Bwidth")
    expect(first).to_contain_text("U+001B[31m")
    long = page.locator("article.turn.assistant pre.text").nth(1)
    assert 10_000 < len(long.inner_text()) < 50_000
    page.get_by_role("button", name=re.compile("show more")).first.click()
    page.get_by_role("link", name="load all").click()
    expect(page.get_by_role("button", name="show more (1,000,000 characters in all)")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.goto(f"{address}#/run/{run}/one/train.51.0")
    expect(page.locator("article.turn").first).to_contain_text("U+202E\ufffd\ufffd\ufffd(")
    for view in ("", "/rows", "/one/train.50.0?tokens=1", "/group/train.50.0"):
        page.goto(f"{address}#/run/{run}{view}")
        expect(page.locator("h1")).to_be_visible()
        expect(page.locator("body")).not_to_contain_text("Loading …")
    page.goto(f"{address}#/compare/{run}/{run}?task=evil%2F%3Cimg")
    expect(page.locator("body")).to_contain_text("has no trajectory of this task")
    page.goto(f"{address}#/%3Cimg%20src=x%3E/%E0%A4%A")
    expect(page.locator("body")).to_contain_text("There is no such page")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, iframe, object, embed").count() == 0


def test_a_run_that_is_not_there_is_said(browser: Browser, address: str) -> None:
    page = opened(browser)
    page.goto(f"{address}#/run/nobody")
    expect(page.locator(".error")).to_have_text("there is no nobody")
    page.context.close()


def test_a_phone(browser: Browser, address: str) -> None:
    """Nothing is wider than the screen, in either theme; filters fold away and come back."""
    page = opened(browser, device_scale_factor=2, has_touch=True, color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 800})
    for view in ("/", "/run/alpha", "/run/alpha/rows", "/run/alpha/one/train.4.1", "/run/alpha/one/train.4.1?tokens=1",
                 "/run/alpha/group/train.4.1", "/compare/alpha/beta", "/redteam"):  # fmt: skip
        page.goto(f"{address}#{view}")
        expect(page.locator("h1")).to_be_visible()
        expect(page.locator("body")).not_to_contain_text("Loading …")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    page.goto(f"{address}#/run/alpha/rows")
    expect(page.locator("select[name=kind]")).to_be_hidden()
    page.locator("summary").tap()
    expect(page.locator("select[name=kind]")).to_be_visible()
    assert page.complaints == []  # type: ignore[attr-defined]
    page.context.close()


def test_a_report_opens_from_a_file_without_a_request(browser: Browser, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    said = html.report(folder / "alpha", compare=folder / "beta", md=False, out=target)
    assert said.startswith(f"written: {target}") and target.stat().st_size < 5_000_000
    page = opened(browser, offline=True)
    page.goto(target.as_uri())
    expect(page.locator("h1")).to_have_text("alpha against beta")
    expect(page.locator("figure.chart canvas").first).to_be_visible()
    page.get_by_role("link", name="Runs").click()
    page.get_by_role("link", name="alpha").click()
    expect(page.locator("svg.reliability circle").first).to_be_visible()
    page.get_by_role("link", name="Trajectories", exact=True).click()
    page.locator("table.rows tbody a").first.click()
    expect(page.locator("article.turn.assistant").first).to_contain_text("I call")
    page.get_by_role("button", name="Tokens").click()
    expect(page.locator(".tokens .s2").first).to_be_visible()
    assert page.complaints == []  # type: ignore[attr-defined]
    assert [url for url in page.asked if not url.startswith("data:")] == [target.as_uri()]  # type: ignore[attr-defined]
    page.context.close()


def test_a_report_of_a_hostile_run(browser: Browser, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    html.report(folder / "<b>evil", compare=None, md=False, out=target)
    assert target.stat().st_size < 5_000_000
    page = opened(browser, offline=True)
    page.goto(target.as_uri() + "#/run/%3Cb%3Eevil/one/train.51.0")
    expect(page.locator("h1")).to_contain_text("<script>window.hacked=1</script>")
    assert page.evaluate("window.hacked") is None and page.complaints == []  # type: ignore[attr-defined]
    page.context.close()
