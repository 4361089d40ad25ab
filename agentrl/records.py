"""Reads what a run stored of its trajectories, and tells which of them count. rollout/store.py writes the files.

    trajectories-000000.jsonl.gz   gzip members of JSON lines, one line per trajectory (codec.py says what is in it)
    trajectories-000000.index      one line per trajectory of that file, written after it: where it lies, key columns
    rounds.index                   one line per learner step (what was kept, advantages), one per resume

An index is JSON lines: a header that names the columns, then one array per trajectory. A file without an index, or the
part of it that the index does not reach (a crash between the two writes), is read itself. A resume takes back the
groups that its checkpoint had not seen: their rows of earlier attempts no longer count.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from agentrl import codec
from agentrl.codec import Decision, Stored

PATTERN = "trajectories-*.jsonl.gz"
ROUNDS = "rounds.index"
EVALUATION = "evaluation.json"
"""In the folder of an evaluation of its own (eval/folder.py)."""
CHUNK = 1 << 20
COLUMNS = (
    "offset", "length", "line", "attempt", "time", "kind", "stage", "step", "env", "task", "split", "level", "grp",
    "idx", "predicted", "score", "ending", "grade", "alarm", "trust", "turns", "tokens", "version", "oldest",
    "tool_errors", "created", "changed", "deleted", "seconds", "tools", "note",
)  # fmt: skip
"""Of an index. `offset` and `length` are those of the gzip member, `line` is the row's place in it."""
BATCH = 2 << 20
"""Bytes of an index that are parsed at once."""
NOTE = 160
"""Characters of the first line of evidence, or of the fault, that an index holds."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Resume:
    """A resume: what it took back of the attempts before it."""

    attempt: int
    """The attempt that began with it, counted from 0 for the run's first."""
    step: int
    """The step of its checkpoint; -1: there was none."""
    next: int
    """Groups from this number on were drawn after the checkpoint."""
    pending: frozenset[int]
    """Earlier groups whose rounds came after it."""

    def takes_back(self, entry: Mapping[str, Any]) -> bool:
        """Return whether a trajectory of an earlier attempt no longer counts; evaluations as metrics.py does it."""
        if (entry["attempt"] or 0) >= self.attempt:
            return False
        if entry["kind"] == "eval":
            return bool(entry["step"] > self.step and entry["stage"] != "start")
        return bool(entry["grp"] >= self.next or entry["grp"] in self.pending)


@dataclass(slots=True)
class Rounds:
    """What became of the groups, read from rounds.index as far as it is written."""

    path: Path
    resumes: list[Resume] = field(default_factory=list)
    groups: dict[int, tuple[int, int, bool, str, dict[int, tuple[float, float]]]] = field(default_factory=dict)
    """By group: attempt, step, whether it was kept, why not, and advantage and weight by index."""
    end: int = 0

    def grow(self) -> tuple[list[Resume], list[int]]:
        """Read what was written since; return the new resumes, and the groups that were decided."""
        if not self.path.exists():
            return [], []
        if self.path.stat().st_size < self.end:
            self.resumes, self.groups, self.end = [], {}, 0
        resumes, decided = len(self.resumes), []
        for line, end in whole_lines(self.path, self.end):
            self.end = end
            row = json.loads(line)
            if "next" in row:
                self.resumes.append(Resume(row["attempt"], row["step"], row["next"], frozenset(row["pending"])))
                continue
            for number, kept, reason, samples in row["groups"]:
                advantages = {index: (advantage, weight) for index, advantage, weight in samples}
                self.groups[number] = (row["attempt"], row["step"], bool(kept), reason, advantages)
                decided.append(number)
        return self.resumes[resumes:], decided

    def counts(self, entry: Mapping[str, Any]) -> bool:
        """Return whether no resume took a trajectory back."""
        return not any(resume.takes_back(entry) for resume in self.resumes)

    def decision(self, entry: Mapping[str, Any]) -> Decision | None:
        """Return what became of a trajectory; None where nothing has (yet), and for evaluations."""
        decided = self.groups.get(entry["grp"]) if entry["kind"] != "eval" else None
        # A group that was trained on before a resume keeps its rows and its decision; both are of one attempt.
        if decided is None or decided[0] != (entry["attempt"] or 0):
            return None
        _, step, kept, reason, samples = decided
        advantage, weight = samples.get(entry["idx"], (None, None))
        return Decision(step=step, kept=kept, reason=reason, advantage=advantage, weight=weight)


def parts(folder: Path) -> list[Path]:
    """Return a store's files, oldest first."""
    return sorted(folder.glob(PATTERN), key=number_of)


def number_of(part: Path) -> int:
    """Return a file's number."""
    return int(part.name.split("-")[1].split(".")[0])


def index_of(part: Path) -> Path:
    """Return the index beside a file of trajectories."""
    return part.with_name(part.name.removesuffix(".jsonl.gz") + ".index")


def header() -> bytes:
    """Return the first line of an index."""
    return json.dumps({"format": 1, "columns": COLUMNS}, separators=(",", ":")).encode() + b"\n"


def entry(row: Mapping[str, Any], offset: int, length: int, line: int) -> Row:
    """Return the index columns of a trajectory's row."""
    task, messages, ledger = row["task"], row["messages"], json.loads(row["ledger"])
    verdict = json.loads(row["verdict"]) if row["verdict"] else {}
    outcome = json.loads(row["outcome"])
    versions = [v for segment in row["segments"] for v in set(segment["versions"]) if v >= 0]
    evidence = verdict.get("evidence") or [(outcome["fault"] or {}).get("cause", "")]
    calls = dict.fromkeys(call["name"] for message in messages for call in message["tool_calls"] if call["name"])
    errors = sum(m["role"] == "tool" and m["content"].startswith("error:") for m in messages)
    return {
        "offset": offset,
        "length": length,
        "line": line,
        "attempt": row.get("attempt", 0),
        "time": row.get("time"),
        "kind": row.get("kind", "train"),
        "stage": row.get("stage", ""),
        "step": row.get("step"),
        "env": row["env"],
        "task": task["id"],
        "split": task["split"],
        "level": task["level"],
        "grp": row["group"],
        "idx": row["index"],
        "predicted": row.get("predicted"),
        "score": row["score"],
        "ending": row["ending"],
        "grade": row["grade"],
        "alarm": int(outcome["alarm"]),
        "trust": verdict.get("trust", ""),
        "turns": sum(message["role"] == "assistant" for message in messages),
        "tokens": sum(segment["sources"].count(2) for segment in row["segments"]),  # Source.SAMPLED
        "version": max(versions, default=-1),
        "oldest": min(versions, default=-1),
        "tool_errors": errors,
        "created": ledger.get("created_count", 0),
        "changed": ledger.get("changed_count", 0),
        "deleted": ledger.get("deleted_count", 0),
        "seconds": json.loads(row["timings"]).get("total", 0.0),
        "tools": [name[:64] for name in calls][:32],
        "note": str(evidence[0])[:NOTE],
    }


def entries(part: Path, offset: int = 0, index_end: int = 0) -> Iterator[tuple[list[Row], int, int]]:
    """Yield the index columns of a file's trajectories as `values` does, under their names."""
    for batch, end, place in values(part, offset, index_end):
        yield [dict(zip(COLUMNS, row, strict=True)) for row in batch], end, place


def values(part: Path, offset: int = 0, index_end: int = 0) -> Iterator[tuple[list[list[Any]], int, int]]:
    """Yield the index columns of a file's trajectories from `offset` on, in batches, each with where it ends.

    That is the place in the file, and in its index (from `index_end` on). What the index does not reach is read from
    the file itself.
    """
    if index_of(part).exists():
        for batch, place in _indexed(part, index_end):
            index_end = place
            rows = [row for row in batch if row[0] >= offset]  # others were read before the index reached them
            if rows:
                offset = rows[-1][0] + rows[-1][1]
                yield rows, offset, index_end
    for content, end in scan(part, offset):
        lines = content.split(b"\n")[:-1]
        columns = (entry(parse(text), offset, end - offset, n) for n, text in enumerate(lines))
        yield [[row[name] for name in COLUMNS] for row in columns], end, index_end
        offset = end


def _indexed(part: Path, index_end: int) -> Iterator[tuple[list[list[Any]], int]]:
    """Yield the whole lines of an index from a place on, in batches, each with where it ends; stop where it is torn or
    ahead."""
    size = part.stat().st_size
    with index_of(part).open("rb") as file:
        order = _order_at(file, index_end)
        while lines := _whole_lines(file):
            rows: list[list[Any]] = []
            count = 0
            for line, row in zip(lines, _parsed(lines), strict=False):
                if isinstance(row, dict):
                    order = _order(row)
                elif row[0] + row[1] > size:
                    break
                else:
                    rows.append(row if order is None else [row[place] if place >= 0 else None for place in order])
                index_end += len(line)
                count += 1
            yield rows, index_end
            if count < len(lines):
                return


def _whole_lines(file: BinaryIO) -> list[bytes]:
    """Return the next whole lines of an index, some megabytes at a time; none where the next one is still written."""
    start = file.tell()
    data = file.read(BATCH)
    data += file.readline()
    data = data[: data.rfind(b"\n") + 1]
    file.seek(start + len(data))
    return data.splitlines(keepends=True)


def _order_at(file: BinaryIO, place: int) -> list[int] | None:
    """Go to a place of an index, and return the order of columns there: as the last line says that names them."""
    order = _order_of(file.readline()) if place else None
    if order is not None:  # it began with an earlier version, and another one may have gone on
        file.seek(0)
        order = _order_of([line for line in file.read(place).splitlines() if line.startswith(b"{")][-1])
    file.seek(place)
    return order


def _order_of(line: bytes) -> list[int] | None:
    parsed = _parsed([line])
    return _order(parsed[0]) if parsed and isinstance(parsed[0], dict) else None


def _order(header: Row) -> list[int] | None:
    """Return where a row of an index has each column, as the line above it says; None where it has today's order."""
    if tuple(header["columns"]) == COLUMNS:
        return None
    columns = {name: place for place, name in enumerate(header["columns"])}
    return [columns.get(name, -1) for name in COLUMNS]


def _parsed(lines: Sequence[bytes]) -> list[Any]:
    """Return what the lines say, up to the first that says nothing."""
    parsed: list[Any]
    try:
        parsed = json.loads(b"[%s]" % b",".join(lines))  # at once: four times as fast as one by one
    except ValueError:
        parsed = []
        for line in lines:
            try:
                parsed.append(json.loads(line))
            except ValueError:
                break
    return parsed


def read(folder: Path) -> Iterator[Stored]:
    """Yield every trajectory of a store that counts, oldest first; a torn end of a file is left out."""
    rounds = Rounds(folder / ROUNDS)
    rounds.grow()
    for path in parts(folder):
        for content, _ in scan(path):
            for text in content.split(b"\n")[:-1]:
                row = parse(text)
                stored = codec.from_row(row)
                columns = {
                    "attempt": row.get("attempt", 0),
                    "kind": row.get("kind", "train"),
                    "stage": stored.note.stage,
                }
                columns |= {"step": stored.note.step, "grp": row["group"], "idx": row["index"]}
                if rounds.counts(columns):
                    yield codec.with_decision(stored, rounds.decision(columns))


def member_at(part: Path, offset: int, length: int) -> list[bytes]:
    """Return the lines of one gzip member; one seek."""
    with part.open("rb") as file:
        file.seek(offset)
        return zlib.decompress(file.read(length), 31).split(b"\n")


def parse(line: bytes) -> Row:
    """Read a line of a file of trajectories; bytes that are no text are replaced."""
    row: Row = json.loads(line.decode("utf-8", "replace"))
    return row


def whole_lines(path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """Yield each whole line of a file from `offset` on, and where it ends; a line that is being written is left."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield line, offset


def scan(path: Path, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield each whole gzip member's content, and where it ends in the file; stop before a torn one."""
    with path.open("rb") as file:
        file.seek(offset)
        end = offset
        buffer = file.read(CHUNK)
        while buffer:
            unpacker = zlib.decompressobj(31)
            content: list[bytes] = []
            used = 0
            while True:
                try:
                    content.append(unpacker.decompress(buffer))
                except zlib.error:
                    return
                used += len(buffer) - len(unpacker.unused_data)
                if unpacker.eof:
                    break
                buffer = file.read(CHUNK)
                if not buffer:
                    return
            end += used
            yield b"".join(content), end
            buffer = unpacker.unused_data or file.read(CHUNK)


def round_line(
    attempt: int, step: int, groups: Iterable[tuple[int, bool, str, list[tuple[int, float, float]]]]
) -> bytes:
    """Return the line of a learner step: of each group its number, whether it was kept, why not, and its samples."""
    return _line({"attempt": attempt, "step": step, "groups": [[n, int(k), r, s] for n, k, r, s in groups]})


def resume_line(resume: Resume) -> bytes:
    """Return the line of a resume."""
    row = {"attempt": resume.attempt, "step": resume.step, "next": resume.next, "pending": sorted(resume.pending)}
    return _line(row)


def entry_line(columns: Mapping[str, Any]) -> bytes:
    """Return the line of a trajectory."""
    return _line([columns[name] for name in COLUMNS])


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
