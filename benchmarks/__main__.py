"""`python -m benchmarks`: runs every benchmark one after another and keeps what each measured as JSON.

python -m benchmarks [--out docs/evidence] [--only sandboxes,curriculum]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
APART = {"ablations", "agent_learning", "long_run", "throughput_pair"}
"""Three take an hour or more, one needs a second checkout: they run where `--only` names them, or by themselves."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence"))
    parser.add_argument(
        "--only", default="", help=f"comma-separated names; all by default, but {', '.join(sorted(APART))}"
    )
    arguments = parser.parse_args()
    names = sorted(p.stem for p in HERE.glob("*.py") if not p.stem.startswith("_"))
    wanted = [n for n in names if (n in arguments.only.split(",") if arguments.only else n not in APART)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in wanted:
        began = time.monotonic()
        print(f"== {name}", flush=True)
        done = subprocess.run([sys.executable, str(HERE / f"{name}.py"), "--json"], stdout=subprocess.PIPE, check=False)
        if done.returncode:
            failed.append(name)
        else:
            (arguments.out / f"{name}.json").write_bytes(done.stdout)
        print(f"   {time.monotonic() - began:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
