"""Decide which datasets may be trained on: attack their scorers in a limited process, and write allowed.json.

    python -m benchmarks.reasoning_vet            examine all datasets and compare with allowed.json
    python -m benchmarks.reasoning_vet --write    write allowed.json

A scorer is judged as it is used: on a cleaned answer, for full marks. Marks for raw attacks are noted as well.
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

from agentrl.envs.reasoning import datasets
from agentrl.envs.reasoning.datasets import LEVELS, dataset, entry, installed, size
from agentrl.envs.reasoning.scorers import CHOSEN, full_marks
from agentrl.redteam.target import perturb
from agentrl.seeds import derive
from agentrl.verifiers.answer.text import Unclear, clean

TASKS = 4
"""The number of entries to attack, at the lowest and at the highest level."""
SURVEYED = 100
"""The number of entries of the same levels to check for repeats and for answers one can guess."""
SURVEY_S = 3.0
"""CPU time for those of one level. Guessing is not checked where fewer than `ENOUGH` are made in it."""
ENOUGH = 20
SECONDS = 15
MEMORY = 4 << 30
GUESSABLE = 0.1
"""The share of entries that one constant answer may solve."""
QUICK_MS, SLOW_MS = 1.0, 250.0
"""A level is kept if an entry takes less than QUICK_MS. If level 1 takes longer, the limit is SLOW_MS and the dataset
is not in the mix."""
LONGEST = 2_000
"""The most characters of a question of the mix."""
_RUNS_CODE = re.compile(r"\b(eval|exec|parse_expr|sympify|literal_eval|compile|parse_latex)\s*\(")
_MARK = "executed"
TOO_SLOW = "takes too long, or too much memory"
UNCLEAR = "a right answer is too long, or holds characters that we refuse"
CONSTANT = "one constant answer solves too many"
RARE = (UNCLEAR, CONSTANT)
"""Reasons that only show in many entries: a slow machine makes fewer of them and may miss these."""


def attacks(gold: str, wrong: str, question: str) -> Iterator[tuple[str, str]]:
    """Yield answers that are not the right one, each with the name of its idea."""
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
    """Return the verdict on one dataset, in this process: call it through `limited`. `measured`: levels and speed."""
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
    """Return how many levels can be used, and whether their entries are made quickly."""
    quick, last = True, 0
    for level in LEVELS:
        try:
            dataset(name, level)
            began = time.thread_time()
            for count, number in enumerate(numbers, 1):
                entry(name, level, number)
                took = (time.thread_time() - began) * 1000 / count
                if count == 10 or took * count > 500:
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
    entries = {level: [entry(name, level, n) for n in numbers[:TASKS]] for level in levels}
    if any(not isinstance(e["answer"], str) or not e["answer"].strip() for some in entries.values() for e in some):
        return {"refused": "no right answer is given, so no expert"}
    if "np.random.seed" in inspect.getsource(inspect.getmodule(type(dataset(name, 1))) or dataset):
        return {"refused": "draws from numpy's global source"}
    for level, some in entries.items():
        if [entry(name, level, n)["question"] for n in numbers[:TASKS][::-1]] != [e["question"] for e in some[::-1]]:
            return {"refused": "an entry depends on those made before it"}
    survey = {level: _survey(name, level, numbers) for level in levels}
    verdict = _scoring(name, entries, survey)
    if "refused" in verdict:
        return verdict
    share = max(Counter(e["answer"] for e in some).most_common(1)[0][1] / len(some) for some in survey.values())
    if share > GUESSABLE and min(map(len, survey.values())) >= ENOUGH:
        return {"refused": CONSTANT}
    repeats = max(1 - len({e["question"] for e in some}) / len(some) for some in survey.values())
    longest = max(len(e["question"]) for some in survey.values() for e in some)
    return {**verdict, "levels": levels[-1], "mix": quick and repeats <= 0.01 and longest <= LONGEST}


def _survey(name: str, level: int, numbers: list[int]) -> list[dict[str, Any]]:
    """Return as many entries as can be made in a few seconds, and at least those that are attacked."""
    began, entries = time.thread_time(), []
    for at, number in enumerate(numbers):
        if at >= TASKS and time.thread_time() - began > SURVEY_S:
            break
        entries.append(entry(name, level, number))
    return entries


def _scoring(
    name: str, entries: Mapping[int, list[dict[str, Any]]], survey: Mapping[int, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return which scorer to use, after attacking the package's own."""
    from reasoning_gym.dataset import ProceduralDataset

    kind = type(dataset(name, 1))
    runs = bool(_RUNS_CODE.search(inspect.getsource(kind.score_answer)))
    if not all(_clear(e["answer"]) for some in survey.values() for e in some):
        return {"refused": UNCLEAR}
    if name in CHOSEN:
        return {"scorer": CHOSEN[name], "package": "runs eval" if runs else "not used"}
    if runs:
        return {"refused": "its scorer runs eval"}
    raw, gained = set(), set()
    sound = all(
        full_marks(dataset(name, level).score_answer, e["answer"], e) for level in survey for e in survey[level]
    )
    for level, some in entries.items():
        score = dataset(name, level).score_answer
        for at, one in enumerate(some):
            wrong = next((e["answer"] for e in some[at + 1 :] + some[:at] if e["answer"] != one["answer"]), "wrong")
            floor = _raw(score, "wrong", one)
            for idea, text in attacks(one["answer"], wrong, one["question"]):
                if text.strip() == one["answer"].strip():
                    continue  # this is the right answer, hence no attack
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


def _raw(score: Callable[[str, dict[str, Any]], Any], text: str, entry: dict[str, Any]) -> float:
    try:
        marks = score(text, entry)
        return float(marks) if marks is not None else 0.0
    except Exception:
        return 0.0


def limited(name: str, measured: tuple[int, bool] | None = None) -> dict[str, Any]:
    """Run `examine` in its own process with limits on time and memory, in an empty folder."""
    context = multiprocessing.get_context("fork")  # the package is imported once, not a hundred times
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, measured, sender))
    process.start()
    sender.close()
    try:
        verdict: dict[str, Any] = receiver.recv() if receiver.poll(3 * SECONDS) else {"refused": TOO_SLOW}
        return verdict
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
    """Return hashes of some entries for each `name:levels`; the interpreter's hash seed must not change them."""
    hashes = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for place in places:
            name, levels = place.split(":")
            texts = [entry(name, level, n) for level in sorted({1, int(levels)}) for n in range(3)]
            hashes[name] = derive(0, *(f"{e['question']}\0{e['answer']}" for e in texts))
    return hashes


def vet(names: list[str], known: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    """Return the verdicts on these datasets; levels and speed depend on the machine and come from `known`."""
    installed()
    import reasoning_gym  # noqa: F401

    verdicts = {}
    for name in names:
        old = (known or {}).get(name, {})
        verdicts[name] = limited(name, (old["levels"], old["mix"]) if "levels" in old else None)
        print(name, verdicts[name], file=sys.stderr)
    fit = [name for name in names if "refused" not in verdicts[name]]
    hashes = []
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "benchmarks.reasoning_vet", "--digests"]
        command += [f"{name}:{verdicts[name]['levels']}" for name in fit]
        run = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True)
        hashes.append(json.loads(run.stdout))
    for name in fit:
        if hashes[0][name] != hashes[1][name]:
            verdicts[name] = {"refused": "its entries depend on the interpreter's hash seed"}
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description="Examine the datasets of reasoning-gym.")
    parser.add_argument("names", nargs="*", help="examine only these")
    parser.add_argument("--write", action="store_true", help="write allowed.json")
    parser.add_argument("--digests", action="store_true", help="print only the hashes of some entries")
    options = parser.parse_args()
    if options.digests:
        print(json.dumps(digests(options.names)))
        return 0
    from reasoning_gym.factory import DATASETS

    path = Path(datasets.__file__).parent / "allowed.json"
    old = json.loads(path.read_text())
    verdicts = vet(options.names or sorted(set(DATASETS) - {"composite"}), None if options.write else old)
    if options.write:
        path.write_text(json.dumps({**old, **verdicts} if options.names else verdicts, indent=1, sort_keys=True) + "\n")
    for name, verdict in verdicts.items():
        print(f"{name}: {json.dumps(verdict)}")
        if old.get(name) != verdict:
            print(f"    differs from {json.dumps(old.get(name))}")
    return int(not options.write and any(old.get(name) != verdict for name, verdict in verdicts.items()))


if __name__ == "__main__":
    sys.exit(main())
