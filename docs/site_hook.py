"""Brings what lies outside docs/ into the site: the README as its home page, the examples, and a list of the
measurements. Links between the pages work on the site as they do in the repository."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "SECURITY.md": "SECURITY.md", "CONTRIBUTING.md": "CONTRIBUTING.md",
         "CHANGELOG.md": "CHANGELOG.md"}  # fmt: skip
"""Pages of the repository's root, and what they are called on the site."""
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, before mkdocs looks at any."""
    from mkdocs.structure.files import File

    def add(name: str, **content: Any) -> None:
        files.append(File.generated(config, name, **content))

    for source, name in PAGES.items():
        add(name, content=(ROOT / source).read_text(encoding="utf-8"))
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            name = path.relative_to(ROOT).as_posix()
            if path.suffix == ".md":
                add(name, content=path.read_text(encoding="utf-8"))
            else:
                add(name, abs_src_path=str(path))
    evidence = sorted(path.relative_to(ROOT / "docs" / "evidence") for path in (ROOT / "docs" / "evidence").rglob("*")
                      if path.is_file())  # fmt: skip
    lines = [f"- [{path.as_posix()}]({path.as_posix()})" for path in evidence]
    text = "# Measurements\n\nWhat the figures on these pages come from, as the benchmarks wrote it.\n\n"
    add("evidence/README.md", content=text + "\n".join(lines) + "\n")
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at where their targets lie on the site."""
    here = PurePosixPath(page.file.src_uri)
    names = {v: k for k, v in PAGES.items()}
    folder = PurePosixPath("docs") / here.parent
    if here.as_posix() in names or here.parts[0] == "examples":
        folder = here.parent if here.parts[0] == "examples" else PurePosixPath(".")
    return LINK.sub(lambda link: _moved(link, folder, here), markdown)


def _moved(link: re.Match[str], folder: PurePosixPath, here: PurePosixPath) -> str:
    """Return a link with its path from the page to the target, both as the site has them."""
    start, target, anchor, end = link.groups()
    if "://" in target or target.startswith("mailto:"):
        return link[0]
    real = _normal(folder / target)
    path = ROOT / real
    if path.is_dir():
        real = real / "README.md"
    site = PAGES.get(real.as_posix(), real.as_posix().removeprefix("docs/"))
    if site.startswith("evidence/") and site.endswith("README.md"):
        site = "evidence/README.md"
    up = "../" * (len(here.parts) - 1)
    return f"{start}{up}{site}{anchor or ''}{end}"


def _normal(path: PurePosixPath) -> PurePosixPath:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        elif part not in (".", ".."):
            parts.append(part)
    return PurePosixPath(*parts)
