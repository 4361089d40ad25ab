"""The documentation: a site without a dead link, commands that exist, code that runs."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from agentrl.catalogue import CHECKOUT
from agentrl.cli.base import app

PAGES = sorted([*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md"), *CHECKOUT.glob("examples/**/*.md"),
                *CHECKOUT.glob("envs/*/README.md")])  # fmt: skip
COMMANDS = typer.main.get_command(app)
RUN_ELSEWHERE = {"docs/api.md", "docs/authoring.md", "docs/verifiers.md", "docs/sandbox_api.md", "docs/extending.md"}
RUN_ELSEWHERE |= {"docs/agents.md", "docs/trackers.md"}
"""Their code needs more than itself: tests/envs/test_authoring_doc.py, tests/verifiers/test_docs.py,
tests/interop and tests/test_sdk.py run it; api.md
shows signatures."""


def build(root: Path, out: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-d", str(out)],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_site_has_no_dead_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install 'agentrl[docs]'")
    code, said = build(CHECKOUT, tmp_path / "site")
    assert code == 0, said
    home = (tmp_path / "site" / "index.html").read_text()
    assert 'href="install.html"' in home and 'src="images/viewer-run.png"' in home
    assert "fonts.googleapis" not in home  # it can be read without a network
    assert (tmp_path / "site" / "examples" / "own-environment" / "index.html").is_file()


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install 'agentrl[docs]'")
    config = yaml.safe_load((CHECKOUT / "mkdocs.yml").read_text())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n[a](nowhere.md) [b](#nothing)\n")
    small = {key: value for key, value in config.items() if key not in ("hooks", "nav")}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(small))
    code, said = build(tmp_path, tmp_path / "site")
    assert code == 1
    assert "link 'nowhere.md'" in said and "link '#nothing'" in said


def commands(text: str) -> Iterator[str]:
    """Yield the lines of a page's blocks of code that call agentrl."""
    for block in re.findall(r"```(?:console|bash|sh|)\n(.*?)```|((?:^    .*\n)+)", text, re.S | re.M):
        for line in "".join(block).replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ")
            if line.startswith("agentrl ") and not line.startswith("agentrl: "):
                yield line


def wrong(line: str) -> str:
    """Say what is wrong with a command; nothing where it exists with these options."""
    command: Any = COMMANDS
    try:
        words = shlex.split(re.split(r"\s[|;&>]|\s2>|\.\.\.", line)[0], comments=True)[1:]
    except ValueError:
        return ""  # a quotation that goes on in the next line
    while words and hasattr(command, "commands"):
        if words[0].startswith("-"):
            break
        if words[0] not in command.commands:
            return f"no command {words[0]!r}"
        command = command.commands[words.pop(0)]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [w.partition("=")[0] for w in words if re.match(r"--?[a-z]", w) and w.partition("=")[0] not in known]
    return f"no option {unknown[0]}" if unknown else ""


def test_every_command_on_the_pages_exists() -> None:
    found = {(str(page.relative_to(CHECKOUT)), line) for page in PAGES for line in commands(page.read_text())}
    assert len(found) > 60
    assert [(page, line, said) for page, line in sorted(found) if (said := wrong(line))] == []
    assert wrong("agentrl env chek files") == "no command 'chek'"
    assert wrong("agentrl train x --stepps 3") == "no option --stepps"


@pytest.mark.parametrize("page", [str(p.relative_to(CHECKOUT)) for p in PAGES if "```python\n" in p.read_text()])
def test_code_on_the_pages_runs(page: str, tmp_path: Path) -> None:
    """The blocks of a page, one after another, in one process."""
    if page in RUN_ELSEWHERE:
        pytest.skip("run by tests of its own")
    blocks = re.findall(r"```python\n(.*?)```", (CHECKOUT / page).read_text(), re.S)
    (tmp_path / "page.py").write_text("\n\n".join(blocks))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
