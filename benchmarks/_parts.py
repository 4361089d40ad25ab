"""Benchmarks that have parts: which to run, and what they found as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def report(doc: str | None, parts: Mapping[str, Callable[[], Any]]) -> int:
    """Run the parts that the command line names, and print what they found."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(parts), help="comma-separated parts; all by default")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"no part {unknown[0]!r}; there are: {', '.join(parts)}")
    results: dict[str, Any] = {"load": os.getloadavg()[0], "cores": os.cpu_count()}
    for name in chosen:
        results[name] = parts[name]()
    if options.json:
        json.dump(results, sys.stdout, indent=2)
        print()
        return 0
    print(f"{results['cores']} cores, load {results['load']:.1f} when it began")
    for name in chosen:
        rows = results[name] if isinstance(results[name], list) else [results[name]]
        for row in rows:
            print(f"{name:10}", "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    return 0
