"""Chores: what is asked, what lies in the box before, the command that does it, and what it leaves behind.

A chore's effect is computed on a tree in this process, so the expected state never depends on what a box says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agentrl.sandboxes.base import Entry

from .names import Names

Tree = dict[str, Entry | str]
"""Path → text of a file whose permissions do not matter, or an entry compared in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chore:
    """One thing to do."""

    tag: str
    text: str
    """The sentence that asks for it."""
    command: str
    """How an expert does it."""
    needs: Mapping[str, Entry | str | Callable[[], Entry | str]] = field(default_factory=dict)
    """What lies in the box before. Costly contents are functions, called once the task is settled on."""
    effect: Callable[[Tree], None]
    """What it does to the tree."""


def line(text: str) -> Entry:
    """A file with one line."""
    return Entry(content=f"{text}\n".encode())


def text_of(tree: Tree, path: str) -> str:
    """A file's text."""
    value = tree[path]
    return value.content.decode() if isinstance(value, Entry) else value


def rewrite(path: str, change: Callable[[str], str]) -> Callable[[Tree], None]:
    """The effect of changing a file's text in place, its permissions kept."""

    def effect(tree: Tree) -> None:
        old = tree[path]
        mode = old.mode if isinstance(old, Entry) else 0o644
        tree[path] = Entry(content=change(text_of(tree, path)).encode(), mode=mode)

    return effect


def makes(path: str, result: Callable[[Tree], str]) -> Callable[[Tree], None]:
    """The effect of writing a new file."""

    def effect(tree: Tree) -> None:
        tree[path] = result(tree)

    return effect


# One name or two: level 1 numbers all of these ------------------------------------------------------------------


def move(a: str, b: str, content: str) -> Chore:
    def effect(tree: Tree) -> None:
        tree[b] = tree.pop(a)

    return Chore(tag="move", text=f"Move {a} to {b}.", command=f"mv {a} {b}", needs={a: line(content)}, effect=effect)


def copy(a: str, b: str, content: str) -> Chore:
    return Chore(
        tag="copy",
        text=f"Copy {a} to {b}.",
        command=f"cp {a} {b}",
        needs={a: line(content)},
        effect=makes(b, lambda tree: text_of(tree, a)),
    )


def delete(a: str, b: str, content: str) -> Chore:
    def effect(tree: Tree) -> None:
        del tree[a], tree[b]

    return Chore(
        tag="delete",
        text=f"Delete {a} and {b}.",
        command=f"rm {a} {b}",
        needs={a: line(content), b: line(content)},
        effect=effect,
    )


def write(word: str, a: str, content: str) -> Chore:
    return Chore(
        tag="write",
        text=f"Write {word} to {a}.",
        command=f"echo {word} > {a}",
        needs={a: line(content)},
        effect=makes(a, lambda tree: f"{word}\n"),
    )


def append(word: str, a: str, content: str) -> Chore:
    return Chore(
        tag="append",
        text=f"Append {word} to {a}.",
        command=f"echo {word} >> {a}",
        needs={a: line(content)},
        effect=rewrite(a, lambda text: f"{text}{word}\n"),
    )


def simple(names: Names) -> Chore:
    """Any of the five above, with fresh names."""
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

    def effect(tree: Tree) -> None:
        tree[f"{folder}/{a}"] = tree.pop(a)

    return Chore(
        tag="shelve",
        text=f"Make a folder {folder} and move {a} into it.",
        command=f"mkdir {folder}; mv {a} {folder}",
        needs={a: line(content)},
        effect=effect,
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

    def effect(tree: Tree) -> None:
        tree[a] = Entry(content=f"{content}\n".encode(), mode=mode)

    return Chore(
        tag="permit",
        text=f"Set the mode of {a} to {mode:o}.",
        command=f"chmod {mode:o} {a}",
        needs={a: line(content)},
        effect=effect,
    )


def link(names: Names) -> Chore:
    """Make a symbolic link."""
    a, b, content = names.file(), names.file(), names.word()

    def effect(tree: Tree) -> None:
        tree[b] = Entry("link", content=a.encode(), mode=0o777)

    return Chore(
        tag="link",
        text=f"Make {b} a symbolic link to {a}.",
        command=f"ln -s {a} {b}",
        needs={a: line(content)},
        effect=effect,
    )


def sweep(names: Names) -> Chore:
    """Remove a folder with everything in it."""
    folder, a, b, content = names.folder(), names.file(), names.file(), names.word()

    def effect(tree: Tree) -> None:
        del tree[f"{folder}/{a}"], tree[f"{folder}/{b}"]

    return Chore(
        tag="sweep",
        text=f"Remove the folder {folder} and all that is in it.",
        command=f"rm -r {folder}",
        needs={f"{folder}/{a}": line(content), f"{folder}/{b}": line(content)},
        effect=effect,
    )


def rename(names: Names) -> Chore:
    """Change a file's ending."""
    a, content = names.file("txt"), names.word()
    b = names.take(a.removesuffix("txt") + "bak")

    def effect(tree: Tree) -> None:
        tree[b] = tree.pop(a)

    return Chore(
        tag="rename",
        text=f"Change the ending of {a} to .bak.",
        command=f"mv {a} {b}",
        needs={a: line(content)},
        effect=effect,
    )


FOLDER_CHORES = (shelve, fetch, permit, link, sweep, rename)
