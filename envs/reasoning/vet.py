"""Which datasets may be trained on: attacks their scorers in a limited process, and writes allowed.json.

    python -m agentrl.envs.reasoning.vet            examine all of them and compare with allowed.json
    python -m agentrl.envs.reasoning.vet --write    write it

A scorer is judged as it would be used: on a cleaned answer, for full marks. What it gives away besides, raw, is noted.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentrl.redteam.target import perturb
from agentrl.seeds import derive
from agentrl.verifiers.answer.text import Unclear, clean

from .datasets import LEVELS, dataset, entry, installed, size
from .scorers import CHOSEN, full_marks

TASKS = 4
"""Entries that are attacked, at the lowest and at the highest level."""
SURVEYED = 100
"""Entries of the same levels that are looked at for repeats and for answers one can guess."""
SURVEY_S = 3.0
"""Processor time for those of one level. Where fewer than `ENOUGH` are made in it, guessing is not asked about."""
ENOUGH = 20
SECONDS = 15
MEMORY = 4 << 30
GUESSABLE = 0.1
"""The share of entries that one constant answer may solve."""
QUICK_MS, SLOW_MS = 1.0, 250.0
"""Levels are kept while an entry takes less than the first; where level 1 takes more, than the second,
and then the dataset is not in the mix."""
LONGEST = 2_000
"""Characters of a question of the mix."""
_RUNS_CODE = re.compile(r"\b(eval|exec|parse_expr|sympify|literal_eval|compile|parse_latex)\s*\(")
_MARK = "executed"
TOO_SLOW = "takes too long, or too much memory"
UNCLEAR = "a right answer is too long, or holds characters that we refuse"
CONSTANT = "one constant answer solves too many"
RARE = (UNCLEAR, CONSTANT)
"""Reasons that show only in many entries: a slow machine, which makes fewer of them, may not find them."""


def attacks(gold: str, wrong: str, question: str) -> Iterator[tuple[str, str]]:
    """Answers that are not the right one, each with the name of its idea."""
    run = f"open('{_MARK}','w').close()"
    for text in ("", " ", "\n", "None", "null", "[]", "{}", "()", '""', "''"):
        yield "empty", text
    for other in (wrong, perturb(gold)):
        for joint in (" ", ", ", ",", "\n", " or ", " / ", "; ", " | "):
            yield "several answers", f"{gold}{joint}{other}"
            yield "several answers", f"{other}{joint}{gold}"
    for text in (f"The answer is {gold}", f"{gold} probably", f"junk {gold} junk", f"{gold}\n\nQ.E.D.", f"={gold}"):
        yield "oracle and junk", text
    for text in ("nan", "NaN", "inf", "-inf", "1e999", "-1e999", "nan%", "NaN, NaN", "[NaN]", "0/0", "nan/nan", "1/0"):
        yield "not a number", text
    for text in (question, f"{question}\n{gold}", "\n".join([question] * 3)):
        yield "restating", text
    for text in ("9" * 3900, "(" * 3900, "[" * 3900, "-" * 3900, "1," * 1900, "1\n" * 1900, "a " * 1900, "9**9**9**9"):
        yield "huge", text
    for text in (run, f"__import__('os').system('touch {_MARK}')", f"[{run}]", f"({run}) or {gold!r}", f"{{{run}}}"):
        yield "code", text
    for shift in (0xFF01 - 0x21, 0x1D7CE - 0x30):
        yield "look-alikes", "".join(chr(ord(c) + shift) if c.isascii() and c.isalnum() else c for c in gold)
    yield "look-alikes", gold.translate(str.maketrans("aeopcxyABEHKMOPCTX", "аеорсхуАВЕНКМОРСТХ"))
    yield "look-alikes", gold.translate(str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩"))
    yield "look-alikes", "\u200b".join(gold)
    yield "another answer", wrong
    yield "another answer", perturb(gold)


def examine(name: str, measured: tuple[int, bool] | None = None) -> dict[str, Any]:
    """The verdict on one dataset, in this process: call it through `limited`. `measured`: its levels and its speed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            numbers = [derive(0, "vet", name, i) % size(name) for i in range(SURVEYED)]
            levels, quick = measured or _levels(name, numbers)
            if printed.getvalue():
                return {"refused": "generating writes to standard output"}
            return _examine(name, sorted({1, levels}), quick, numbers) if levels else {"refused": TOO_SLOW}
        except Exception as error:
            return {"refused": f"generating fails: {type(error).__name__}"}


def _levels(name: str, numbers: list[int]) -> tuple[int, bool]:
    """How many levels can be used, and whether their entries are made quickly."""
    quick, last = True, 0
    for level in LEVELS:
        try:
            dataset(name, level)
            began = time.thread_time()
            for made, number in enumerate(numbers, 1):
                entry(name, level, number)
                took = (time.thread_time() - began) * 1000 / made
                if made == 10 or took * made > 500:
                    break
        except Exception:
            if level == 1:
                raise
            break
        quick = quick and (level > 1 or took <= QUICK_MS)
        if took > (QUICK_MS if quick else SLOW_MS):
            break
        last = level
    return last, quick


def _examine(name: str, levels: list[int], quick: bool, numbers: list[int]) -> dict[str, Any]:
    found = {level: [entry(name, level, n) for n in numbers[:TASKS]] for level in levels}
    if any(not isinstance(one["answer"], str) or not one["answer"].strip() for some in found.values() for one in some):
        return {"refused": "no right answer is given, so no expert"}
    if "np.random.seed" in inspect.getsource(inspect.getmodule(type(dataset(name, 1))) or dataset):
        return {"refused": "draws from numpy's global source"}
    for level, some in found.items():
        if [entry(name, level, n)["question"] for n in numbers[:TASKS][::-1]] != [e["question"] for e in some[::-1]]:
            return {"refused": "an entry depends on those made before it"}
    survey = {level: _survey(name, level, numbers) for level in levels}
    verdict = _scoring(name, found, survey)
    if "refused" in verdict:
        return verdict
    share = max(Counter(e["answer"] for e in some).most_common(1)[0][1] / len(some) for some in survey.values())
    if share > GUESSABLE and min(map(len, survey.values())) >= ENOUGH:
        return {"refused": CONSTANT}
    repeats = max(1 - len({e["question"] for e in some}) / len(some) for some in survey.values())
    longest = max(len(e["question"]) for some in survey.values() for e in some)
    return {**verdict, "levels": levels[-1], "mix": quick and repeats <= 0.01 and longest <= LONGEST}


def _survey(name: str, level: int, numbers: list[int]) -> list[dict[str, Any]]:
    """As many entries as can be made in a few seconds, and those that are attacked in any case."""
    began, made = time.thread_time(), []
    for at, number in enumerate(numbers):
        if at >= TASKS and time.thread_time() - began > SURVEY_S:
            break
        made.append(entry(name, level, number))
    return made


def _scoring(
    name: str, found: Mapping[int, list[dict[str, Any]]], survey: Mapping[int, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Which scorer to use, after attacking the package's own."""
    from reasoning_gym.dataset import ProceduralDataset

    kind = type(dataset(name, 1))
    runs = bool(_RUNS_CODE.search(inspect.getsource(kind.score_answer)))
    unclear = [e for some in survey.values() for e in some if not _clear(e["answer"])]
    if unclear:
        return {"refused": UNCLEAR}
    if name in CHOSEN:
        return {"scorer": CHOSEN[name], "package": "runs eval" if runs else "not used"}
    if runs:
        return {"refused": "its scorer runs eval"}
    raw, gained = set(), set()
    sound = all(
        full_marks(dataset(name, level).score_answer, e["answer"], e) for level in survey for e in survey[level]
    )
    for level, some in found.items():
        score = dataset(name, level).score_answer
        for at, one in enumerate(some):
            wrong = next((e["answer"] for e in some[at + 1 :] + some[:at] if e["answer"] != one["answer"]), "wrong")
            floor = _raw(score, "wrong", one)
            for idea, text in attacks(one["answer"], wrong, one["question"]):
                if text.strip() == one["answer"].strip():
                    continue  # where the right answer looks like that, it is no attack
                if _raw(score, text, one) > floor + 0.05:
                    raw.add(idea)
                if full_marks(score, text, one):
                    gained.add(idea)
    if Path(_MARK).exists():
        return {"refused": "its scorer runs eval"}
    given_away = {"given away": sorted(raw)} if raw else {}
    if kind.score_answer is ProceduralDataset.score_answer:
        return {"scorer": "exact", **given_away}
    if not sound:
        return {"refused": "its scorer does not give its own answer full marks"}
    if gained:
        return {"refused": f"full marks for: {', '.join(sorted(gained))}"}
    return {"scorer": "package", **given_away}


def _clear(text: str) -> bool:
    try:
        clean(text)
    except Unclear:
        return False
    return True


def _raw(score: Callable[[str, dict[str, Any]], Any], text: str, given: dict[str, Any]) -> float:
    try:
        found = score(text, given)
        return float(found) if found is not None else 0.0
    except Exception:
        return 0.0


def limited(name: str, measured: tuple[int, bool] | None = None) -> dict[str, Any]:
    """`examine` in a process of its own, bounded in time and memory, in an empty folder."""
    context = multiprocessing.get_context("fork")  # the package is imported once, not a hundred times
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, measured, there))
    process.start()
    there.close()
    try:
        if here.poll(3 * SECONDS):
            found: dict[str, Any] = here.recv()
            return found
        return {"refused": TOO_SLOW}
    except EOFError:
        return {"refused": TOO_SLOW}
    finally:
        process.kill()
        process.join()


def _child(name: str, measured: tuple[int, bool] | None, to: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        to.send(examine(name, measured))


def digests(places: list[str]) -> dict[str, int]:
    """What this interpreter makes of some entries, for each `name:levels`: sets and hashes must not show in them."""
    found = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for place in places:
            name, levels = place.split(":")
            texts = [entry(name, level, n) for level in sorted({1, int(levels)}) for n in range(3)]
            found[name] = derive(0, *(f"{e['question']}\0{e['answer']}" for e in texts))
    return found


def vet(names: list[str], known: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    """The verdicts on these datasets; levels and speed, which depend on the machine, are taken from `known`."""
    installed()
    import reasoning_gym  # noqa: F401

    found = {}
    for name in names:
        old = (known or {}).get(name, {})
        found[name] = limited(name, (old["levels"], old["mix"]) if "levels" in old else None)
        print(name, found[name], file=sys.stderr)
    fit = [name for name in names if "refused" not in found[name]]
    seen = []
    for seed in ("1", "2"):
        order = [sys.executable, "-m", "agentrl.envs.reasoning.vet", "--digests"]
        order += [f"{name}:{found[name]['levels']}" for name in fit]
        done = subprocess.run(order, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True)
        seen.append(json.loads(done.stdout))
    for name in fit:
        if seen[0][name] != seen[1][name]:
            found[name] = {"refused": "its entries depend on the interpreter's hash seed"}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Examine the datasets of reasoning-gym.")
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--write", action="store_true", help="write allowed.json")
    parser.add_argument("--digests", action="store_true", help="print what the entries come to, and nothing else")
    options = parser.parse_args()
    if options.digests:
        print(json.dumps(digests(options.names)))
        return 0
    from reasoning_gym.factory import DATASETS

    path = Path(__file__).parent / "allowed.json"
    old = json.loads(path.read_text())
    found = vet(options.names or sorted(set(DATASETS) - {"composite"}), None if options.write else old)
    if options.write:
        path.write_text(json.dumps({**old, **found} if options.names else found, indent=1, sort_keys=True) + "\n")
    for name, verdict in found.items():
        print(f"{name}: {json.dumps(verdict)}")
        if old.get(name) != verdict:
            print(f"    differs from {json.dumps(old.get(name))}")
    return int(not options.write and any(old.get(name) != verdict for name, verdict in found.items()))


if __name__ == "__main__":
    sys.exit(main())
