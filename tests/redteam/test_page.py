"""The page and the terminal, given text that attackers wrote: all of it shown, none of it obeyed."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

from rich.console import Console

from agentrl.redteam.formats import junit, screen
from agentrl.redteam.page import html_page
from agentrl.redteam.report import Control, Finding, Report, together
from agentrl.types import Message, ToolCall

EVIL = "</pre><script>alert(1)</script>\x1b]0;owned\x07\x1b[2J<img src=x onerror=alert(1)>\"'&amp;"
QUALITY = {
    "mutation": {"score": 0.9, "killed": 9, "survived": 1, "equivalent": 2, "survivors": ["line 1: <b>"]},
    "alternatives": {"tried": 3, "false_negatives": 1, "missed": ["task #0: no"]},
    "flakes": {"tried": 200, "failed": 1, "upper_95": 0.0277, "busy_processes": 2},
    "cost_ms": {"p50": 1.5, "max": 3.0},
    "discrimination": 1.0,
}


def report() -> Report:
    call = ToolCall(name="run", arguments={"command": EVIL})
    opening = (Message(role="system", content=""), Message(role="user", content=""))
    gained = Finding(
        id="I.denied",
        family="I",
        title="The right answer mentioned, and denied",
        result="gained",
        score=1.0,
        task="my/1",
        evidence=(EVIL,),
        fix="Demand one answer.",
        transcript=(*opening, Message(role="assistant", content=EVIL, tool_calls=(call,))),
    )
    others = (
        Finding(id="A.nan", family="A", title="Not a number", result="held", score=0.0),
        Finding(id="A.bool", family="A", title="A bool", result="not applicable", evidence=("needs python",)),
        Finding(id="B.exit", family="B", title="Leaves early", result="gained", score=0.5, accepted=True),
        Finding(id="H.hang", family="H", title="Hangs", result="hung"),
    )
    controls = (
        Control(name="oracle", expected=1.0, score=1.0, task="my/1"),
        Control(name="no-op", expected=0.0, score=0.5, task="my/1", evidence=(EVIL,)),
    )
    return Report(target="my_env", backend="namespace", controls=controls, findings=(gained, *others), quality=QUALITY)


class Tags(HTMLParser):
    """Every tag with its attributes, and whether each was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_obeys_nobody() -> None:
    page = html_page(report())
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not {"script", "img", "link", "iframe", "a"} & {tag for tag, _ in tags.seen}
    assert not [name for _, attributes in tags.seen for name in attributes if name.startswith("on")]
    policy = [attributes["content"] for tag, attributes in tags.seen if "http-equiv" in attributes]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert "\x1b" not in page and "&lt;script&gt;alert(1)" in page


def test_the_page_says_what_happened() -> None:
    text = re.sub(r"<[^>]+>", " ", html_page(report()).partition("</style>")[2])
    words = " ".join(text.split())
    assert "2 of 4 attacks succeeded, 1 of 2 controls failed." in words
    assert "I.denied The right answer mentioned, and denied outcome gained, score 1 where wrong work earns 0" in words
    assert "fix Demand one answer." in words and "no-op 0 1 my/1: 0.5" in words
    assert "A Comparison and types 1 · · · · · 1" in words and "B Forging the outcome · · · · 1 · ·" in words
    assert "falls short: mutation score 0.900 is below 0.95" in words
    assert "C The test framework" not in words  # nothing of that family was asked for


def test_the_terminal_is_not_moved_by_what_attackers_write() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(screen(report()))
    shown = console.export_text(styles=False)
    assert "\x1b" not in shown and "\x07" not in shown and "\\x1b[2J" in shown
    assert "mutants killed: 9 of 10, 2 more are equivalent" in shown
    assert "falls short: 1 right solutions were refused" in shown
    assert "\x1b" not in junit(report())


def test_several_reports_become_one_of_the_same_form() -> None:
    fine = Report(target="b", backend="namespace", controls=(), findings=(report().findings[1],))
    data = together("both", [report(), fine])
    assert (data["target"], data["tried"], data["succeeded"], data["ok"]) == ("both", 4, 2, False)
    assert [t["target"] for t in data["targets"]] == ["my_env", "b"]
    assert {a["id"]: a["result"] for a in data["attacks"]} == {
        "I.denied": "gained",
        "A.nan": "held",
        "A.bool": "not applicable",
        "B.exit": "gained",
        "H.hang": "hung",
    }
