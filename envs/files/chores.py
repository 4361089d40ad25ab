"""Chores: what is asked, which files exist before, the command that does it, and its effect on the files.

A chore's effect is computed on a tree in this process, so the expected state never depends on what a sandbox reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl.sandboxes.base import Entry

from .names import Names

Tree = dict[str, Entry | str]
"""Path → text of a file whose permissions do not matter, or an entry compared in full."""


@dataclass(frozen=True, slots=True)
class Chore:
    """One thing to do."""

    tag: str
    text: str
    """The sentence that asks for it."""
    command: str
    """How an expert does it."""
    needs: Mapping[str, Entry | str | Callable[[], Entry | str]]
    """Files that exist before. Costly contents are functions, called once the task has been chosen."""
    effect: Callable[[Tree], None]
    """Applies the chore to a tree."""


def line(text: str) -> Entry:
    """Return a file with one line."""
    return Entry(content=f"{text}\n".encode())


def text_of(tree: Tree, path: str) -> str:
    """Return a file's text."""
    value = tree[path]
    return value.content.decode() if isinstance(value, Entry) else value


def rewrite(path: str, change: Callable[[str], str]) -> Callable[[Tree], None]:
    """Return the effect of changing a file's text in place, keeping its permissions."""

    def effect(tree: Tree) -> None:
        old = tree[path]
        mode = old.mode if isinstance(old, Entry) else 0o644
        tree[path] = Entry(content=change(text_of(tree, path)).encode(), mode=mode)

    return effect


def makes(path: str, result: Callable[[Tree], Entry | str]) -> Callable[[Tree], None]:
    """Return the effect of writing a new file."""
    return lambda tree: tree.update({path: result(tree)})


def moves(a: str, b: str) -> Callable[[Tree], None]:
    """Return the effect of moving a file."""
    return lambda tree: tree.update({b: tree.pop(a)})


def removes(*paths: str) -> Callable[[Tree], None]:
    """Return the effect of deleting files."""

    def effect(tree: Tree) -> None:
        for path in paths:
            del tree[path]

    return effect


# One name or two: level 1 numbers all of these ------------------------------------------------------------------


def move(a: str, b: str, content: str) -> Chore:
    return Chore("move", f"Move {a} to {b}.", f"mv {a} {b}", {a: line(content)}, moves(a, b))


def copy(a: str, b: str, content: str) -> Chore:
    effect = makes(b, lambda tree: text_of(tree, a))
    return Chore("copy", f"Copy {a} to {b}.", f"cp {a} {b}", {a: line(content)}, effect)


def delete(a: str, b: str, content: str) -> Chore:
    needs = {a: line(content), b: line(content)}
    return Chore("delete", f"Delete {a} and {b}.", f"rm {a} {b}", needs, removes(a, b))


def write(word: str, a: str, content: str) -> Chore:
    effect = makes(a, lambda tree: f"{word}\n")
    return Chore("write", f"Write {word} to {a}.", f"echo {word} > {a}", {a: line(content)}, effect)


def append(word: str, a: str, content: str) -> Chore:
    effect = rewrite(a, lambda text: f"{text}{word}\n")
    return Chore("append", f"Append {word} to {a}.", f"echo {word} >> {a}", {a: line(content)}, effect)


def simple(names: Names) -> Chore:
    """Return any of the five above, with fresh names."""
    kind = names.rng.choice(("move", "copy", "delete", "write", "append"))
    a, content, word = names.file(), names.word(), names.word()
    if kind == "write":
        return write(word, a, content if content != word else f"{content} {content}")
    if kind == "append":
        return append(word, a, content)
    return {"move": move, "copy": copy, "delete": delete}[kind](a, names.file(), content)


# Folders, permissions, links ------------------------------------------------------------------------------------


def shelve(names: Names) -> Chore:
    """Make a folder and move a file into it."""
    folder, a, content = names.folder(), names.file(), names.word()
    return Chore(
        tag="shelve",
        text=f"Make a folder {folder} and move {a} into it.",
        command=f"mkdir {folder}; mv {a} {folder}",
        needs={a: line(content)},
        effect=moves(a, f"{folder}/{a}"),
    )


def fetch(names: Names) -> Chore:
    """Copy a file out of a folder."""
    folder, a, content = names.folder(), names.file(), names.word()
    return Chore(
        tag="fetch",
        text=f"Copy {a} out of the folder {folder} to here.",
        command=f"cp {folder}/{a} .",
        needs={f"{folder}/{a}": line(content)},
        effect=makes(a, lambda tree: f"{content}\n"),
    )


def permit(names: Names) -> Chore:
    """Set a file's mode."""
    a, content = names.file(), names.word()
    mode = names.rng.choice((0o600, 0o640, 0o444, 0o755, 0o700, 0o400))
    return Chore(
        tag="permit",
        text=f"Set the mode of {a} to {mode:o}.",
        command=f"chmod {mode:o} {a}",
        needs={a: line(content)},
        effect=makes(a, lambda tree: Entry(content=f"{content}\n".encode(), mode=mode)),
    )


def link(names: Names) -> Chore:
    """Make a symbolic link."""
    a, b, content = names.file(), names.file(), names.word()
    return Chore(
        tag="link",
        text=f"Make {b} a symbolic link to {a}.",
        command=f"ln -s {a} {b}",
        needs={a: line(content)},
        effect=makes(b, lambda tree: Entry("link", content=a.encode(), mode=0o777)),
    )


def sweep(names: Names) -> Chore:
    """Remove a folder with everything in it."""
    folder, first, second, content = names.folder(), names.file(), names.file(), names.word()
    a, b = f"{folder}/{first}", f"{folder}/{second}"
    return Chore(
        tag="sweep",
        text=f"Remove the folder {folder} and all that is in it.",
        command=f"rm -r {folder}",
        needs={a: line(content), b: line(content)},
        effect=removes(a, b),
    )


def rename(names: Names) -> Chore:
    """Change a file's ending."""
    a, content = names.file("txt"), names.word()
    b = names.take(a.removesuffix("txt") + "bak")
    return Chore("rename", f"Change the ending of {a} to .bak.", f"mv {a} {b}", {a: line(content)}, moves(a, b))


FOLDER_CHORES = (shelve, fetch, permit, link, sweep, rename)
