"""Chores on text (filters, counts, sorting, columns, sums), and on many files and archives at once."""

from __future__ import annotations

import io
import tarfile
from collections import Counter

from agentrl.sandboxes.base import MTIME, Entry

from .chores import Chore, Tree, makes, removes, rewrite, text_of
from .names import Names


def _body(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _lines(tree: Tree, path: str) -> list[str]:
    return text_of(tree, path).splitlines()


def _prose(names: Names, few: list[str], least: int = 6, most: int = 14) -> str:
    """Return lines of three words; each line contains at most one of `few`, and each of `few` occurs."""
    rng = names.rng
    rest = [word for word in names.words(24) if not any(word in other or other in word for other in few)]
    marked = [*few, *(rng.choice(few) for _ in range(rng.randint(1, 4)))]
    lines = [" ".join(rng.sample([word, *rng.sample(rest, 2)], 3)) for word in marked]
    lines += [" ".join(rng.sample(rest, 3)) for _ in range(rng.randint(least, most) - len(lines))]
    rng.shuffle(lines)
    return _body(lines)


def _table(names: Names, keys: list[str]) -> str:
    """Return CSV rows without a header: name, key, number."""
    rng = names.rng
    owners = names.words(8)
    rows = [f"{rng.choice(owners)},{key},{rng.randint(1, 99)}" for key in keys for _ in range(rng.randint(2, 4))]
    rng.shuffle(rows)
    return _body(rows)


def _rows(tree: Tree, path: str) -> list[list[str]]:
    return [row.split(",") for row in _lines(tree, path)]


# One file in, one file out --------------------------------------------------------------------------------------


def keep(names: Names) -> Chore:
    a, b, (word,) = names.file("log"), names.file("txt"), names.words(1)
    return Chore(
        tag="keep",
        text=f"Write the lines of {a} that contain {word} to {b}.",
        command=f"grep {word} {a} > {b}",
        needs={a: lambda: _prose(names, [word])},
        effect=makes(b, lambda tree: _body([x for x in _lines(tree, a) if word in x])),
    )


def strip(names: Names) -> Chore:
    a, (word,) = names.file("log"), names.words(1)
    return Chore(
        tag="strip",
        text=f"Delete the lines that contain {word} from {a}.",
        command=f"sed -i /{word}/d {a}",
        needs={a: lambda: _prose(names, [word])},
        effect=rewrite(a, lambda text: _body([x for x in text.splitlines() if word not in x])),
    )


def count(names: Names) -> Chore:
    a, b, (word,) = names.file("log"), names.file("txt"), names.words(1)
    return Chore(
        tag="count",
        text=f"Write how many lines of {a} contain {word} to {b}.",
        command=f"grep -c {word} {a} > {b}",
        needs={a: lambda: _prose(names, [word])},
        effect=makes(b, lambda tree: f"{sum(word in x for x in _lines(tree, a))}\n"),
    )


def order(names: Names) -> Chore:
    a, b = names.file("txt"), names.file("txt")
    words = names.words(names.rng.randint(6, 12))
    words += names.rng.sample(words, 3)
    names.rng.shuffle(words)
    flag, wish = names.rng.choice((("", "sorted"), ("-r ", "sorted backwards"), ("-u ", "sorted, each once,")))

    def result(tree: Tree) -> str:
        lines = _lines(tree, a)
        return _body(sorted(set(lines) if "u" in flag else lines, reverse="r" in flag))

    return Chore(
        tag="order",
        text=f"Write the lines of {a} {wish} to {b}.",
        command=f"sort {flag}{a} > {b}",
        needs={a: _body(words)},
        effect=makes(b, result),
    )


def part(names: Names) -> Chore:
    a, b, n = names.file("log"), names.file("txt"), names.rng.randint(2, 5)
    side, tool = names.rng.choice((("first", "head"), ("last", "tail")))
    return Chore(
        tag="part",
        text=f"Write the {side} {n} lines of {a} to {b}.",
        command=f"{tool} -n {n} {a} > {b}",
        needs={a: lambda: _prose(names, names.words(2))},
        effect=makes(b, lambda tree: _body(_lines(tree, a)[:n] if tool == "head" else _lines(tree, a)[-n:])),
    )


def replace(names: Names) -> Chore:
    a, (old, new) = names.file("md"), names.words(2)
    return Chore(
        tag="replace",
        text=f"Replace every {old} in {a} by {new}.",
        command=f"sed -i s/{old}/{new}/g {a}",
        needs={a: lambda: _prose(names, [old])},
        effect=rewrite(a, lambda text: text.replace(old, new)),
    )


def column(names: Names) -> Chore:
    a, b, n = names.file("csv"), names.file("txt"), names.rng.randint(1, 3)
    return Chore(
        tag="column",
        text=f"Write column {n} of {a} to {b}.",
        command=f"cut -d, -f{n} {a} > {b}",
        needs={a: lambda: _table(names, names.words(3))},
        effect=makes(b, lambda tree: _body([row[n - 1] for row in _rows(tree, a)])),
    )


# Aggregation ----------------------------------------------------------------------------------------------------


def total(names: Names) -> Chore:
    a, b, keys = names.file("csv"), names.file("txt"), names.words(3)
    return Chore(
        tag="total",
        text=f"The rows of {a} are name,kind,number. Write the sum of the numbers of kind {keys[0]} to {b}.",
        command=f"awk -F, '$2==\"{keys[0]}\"{{s+=$3}}END{{print s}}' {a} > {b}",
        needs={a: lambda: _table(names, keys)},
        effect=makes(b, lambda tree: f"{sum(int(row[2]) for row in _rows(tree, a) if row[1] == keys[0])}\n"),
    )


def tally(names: Names) -> Chore:
    a, b, keys = names.file("csv"), names.file("csv"), names.words(3)

    def result(tree: Tree) -> str:
        counts = Counter(row[1] for row in _rows(tree, a))
        return _body([f"{key},{counts[key]}" for key in sorted(counts)])

    return Chore(
        tag="tally",
        text=f"The rows of {a} are name,kind,number. Write a row kind,rows for each kind to {b}, sorted by kind.",
        command=f"cut -d, -f2 {a} | sort | uniq -c | awk '{{print $2\",\"$1}}' > {b}",
        needs={a: lambda: _table(names, keys)},
        effect=makes(b, result),
    )


def best(names: Names) -> Chore:
    a, b, keys = names.file("csv"), names.file("txt"), names.words(3)
    rows = [f"{owner},{key},{number}" for owner, key, number in zip(
        names.words(9), keys * 3, names.rng.sample(range(1, 100), 9), strict=True
    )]  # fmt: skip
    return Chore(
        tag="best",
        text=f"The rows of {a} are name,kind,number. Write the name in the row with the largest number to {b}.",
        command=f"sort -t, -k3 -n {a} | tail -n 1 | cut -d, -f1 > {b}",
        needs={a: _body(rows)},
        effect=makes(b, lambda tree: max(_rows(tree, a), key=lambda row: int(row[2]))[0] + "\n"),
    )


def merge(names: Names) -> Chore:
    folder, b = names.folder(), names.file("txt")
    parts = [f"{folder}/{names.file('log')}" for _ in range(3)]
    return Chore(
        tag="merge",
        text=f"Write all lines of the .log files in {folder} to {b}, sorted.",
        command=f"cat {folder}/*.log | sort > {b}",
        needs={
            **{path: lambda: _prose(names, names.words(1), 3, 5) for path in parts},
            f"{folder}/{names.file('md')}": f"{names.word()}\n",
        },
        effect=makes(b, lambda tree: _body(sorted(x for path in parts for x in _lines(tree, path)))),
    )


def gather(names: Names) -> Chore:
    folder, ending, gone = names.folder(), names.rng.choice(("dat", "ini", "cfg")), names.file("txt")
    moved = [names.file(ending) for _ in range(3)]

    def effect(tree: Tree) -> None:
        del tree[gone]
        for path in [p for p in tree if p.endswith("." + ending) and "/" not in p]:
            tree[f"{folder}/{path}"] = tree.pop(path)

    return Chore(
        tag="gather",
        text=f"Delete {gone}. Make a folder {folder} and move every .{ending} file of this folder into it.",
        command=f"rm {gone}; mkdir {folder}; mv *.{ending} {folder}",
        needs={path: f"{names.word()}\n" for path in (*moved, gone)},
        effect=effect,
    )


# Nested folders and archives ------------------------------------------------------------------------------------


def prune(names: Names) -> Chore:
    top, inner, ending = names.folder(), names.folder(), names.rng.choice(("log", "md", "tmp", "bak"))
    paths = [
        f"{top}/{names.file(ending)}",
        f"{top}/{inner}/{names.file(ending)}",
        f"{top}/{inner}/{names.file(ending)}",
    ]
    stay = [f"{top}/{names.file('txt')}", f"{top}/{inner}/{names.file('csv')}"]

    return Chore(
        tag="prune",
        text=f"Delete every .{ending} file in {top} and in its subfolders, and nothing else.",
        command=f"find {top} -name '*.{ending}' -delete",
        needs={path: f"{names.word()}\n" for path in (*paths, *stay)},
        effect=removes(*paths),
    )


def lock(names: Names) -> Chore:
    top, inner, mode = names.folder(), names.folder(), names.rng.choice((0o600, 0o640, 0o444, 0o664, 0o660))
    paths = [f"{top}/{names.file()}", f"{top}/{inner}/{names.file()}", f"{top}/{inner}/{names.file()}"]
    texts = {path: f"{names.word()}\n" for path in paths}

    def effect(tree: Tree) -> None:
        for path in paths:
            tree[path] = Entry(content=texts[path].encode(), mode=mode)
        for folder in (top, f"{top}/{inner}"):
            tree[folder] = Entry("dir", mode=0o755)

    return Chore(
        tag="lock",
        text=f"Set the mode of every file in {top} and its subfolders to {mode:o}; leave the folders as they are.",
        command=f"find {top} -type f -exec chmod {mode:o} {{}} +",
        needs=texts,
        effect=effect,
    )


def unpack(names: Names) -> Chore:
    archive, folder = names.file("tar"), names.folder()
    inside = {names.file(): f"{names.word()} {names.word()}\n" for _ in range(3)}

    def effect(tree: Tree) -> None:
        del tree[archive]
        tree.update({f"{folder}/{path}": text for path, text in inside.items()})

    return Chore(
        tag="unpack",
        text=f"Extract {archive} into a new folder {folder}, then delete {archive}.",
        command=f"mkdir {folder}; tar -xf {archive} -C {folder}; rm {archive}",
        needs={archive: lambda: Entry(content=tar(inside))},
        effect=effect,
    )


def survey(names: Names) -> Chore:
    top, inner, b, (word,) = names.folder(), names.folder(), names.file("txt"), names.words(1)
    hits = names.rng.randint(1, 3)
    paths = [f"{top}/{names.file()}" for _ in range(2)] + [f"{top}/{inner}/{names.file()}" for _ in range(3)]
    names.rng.shuffle(paths)

    def other() -> str:
        return _body(names.rng.sample([w for w in names.words(20) if word not in w and w not in word], 3))

    return Chore(
        tag="survey",
        text=f"Write the paths of the files in {top} and its subfolders that contain {word} to {b}, sorted, "
        f"one a line, each beginning with {top}/.",
        command=f"grep -rl {word} {top} | sort > {b}",
        needs={path: (lambda: _prose(names, [word], 3, 5)) if at < hits else other for at, path in enumerate(paths)},
        effect=makes(b, lambda tree: _body(sorted(paths[:hits]))),
    )


def report(names: Names) -> Chore:
    archive, b, keys = names.file("tar"), names.file("csv"), names.words(3)
    tables = [names.file("csv") for _ in range(2)]

    def result(tree: Tree) -> str:
        sums: Counter[str] = Counter()
        for row in untar(tree[archive]).splitlines():
            sums[row.split(",")[1]] += int(row.split(",")[2])
        return _body([f"{key},{sums[key]}" for key in sorted(sums)])

    return Chore(
        tag="report",
        text=f"The .csv files inside {archive} have rows name,kind,number. Write a row kind,sum of the numbers over "
        f"all of them for each kind to {b}, sorted by kind. Leave nothing else behind.",
        command=f"tar -xOf {archive} | awk -F, '{{s[$2]+=$3}}END{{for(k in s)print k\",\"s[k]}}' | sort > {b}",
        needs={archive: lambda: Entry(content=tar({path: _table(names, keys) for path in tables}))},
        effect=makes(b, result),
    )


def tar(inside: dict[str, str]) -> bytes:
    """Return an archive whose bytes depend on its files alone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, text in sorted(inside.items()):
            info = tarfile.TarInfo(path)
            info.size, info.mtime, info.mode = len(text.encode()), MTIME, 0o644
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def untar(entry: Entry | str) -> str:
    """Return the joined text of all files in an archive that `tar` made."""
    assert isinstance(entry, Entry)
    with tarfile.open(fileobj=io.BytesIO(entry.content)) as archive:
        return "".join(archive.extractfile(info).read().decode() for info in archive)  # type: ignore[union-attr]


TEXT_CHORES = (keep, strip, count, order, part, replace, column)
MANY_CHORES = (total, tally, best, merge, gather)
DEEP_CHORES = (prune, lock, unpack, survey, report)
