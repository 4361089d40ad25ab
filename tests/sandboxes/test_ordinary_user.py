"""The namespace backend without root: the same box from a single user id."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, os, sys
if os.geteuid() == 0:
    os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
from agentrl import sandboxes
from agentrl.errors import SandboxDied
from agentrl.sandboxes import Limits, SandboxSpec
backend = sandboxes.load("namespace")()
seen = backend.available()
if not seen.works:
    print(json.dumps({"skip": [list(seen.missing), seen.fix]})); sys.exit()
out = {"isolates": list(seen.isolates)}
with backend.create(SandboxSpec(files={"a": "b"})) as box:
    out["digest"] = box.digest()
    out["id"] = box.exec(["id"]).stdout.decode()
    out["python"] = box.python("import os; os.write(4, os.read(3, 9))", b"m").reply.decode()
    status = box.exec(["grep", "-E", "^(CapEff|CapBnd|NoNewPrivs|Seccomp):", "/proc/self/status"])
    out["caps"] = status.stdout.decode().split()
    out["init"] = box.python('''
import os
attempts = [lambda: os.kill(1, 9), lambda: open("/proc/1/mem"), lambda: open("/proc/1/environ").read()]
for act in attempts + [lambda: os.listdir("/proc/1/fd")]:
    try: act(); print("done")
    except OSError as error: print(type(error).__name__)
''').stdout.decode().split()
    out["alive"] = box.exec(["echo", "alive"]).stdout.decode()
    touch = "for d in / /usr /etc /dev; do touch $d/x 2>/dev/null && echo $d; done; true"
    out["writes"] = box.exec(["sh", "-c", touch]).stdout.decode()
    box.exec(["sh", "-c", "echo x > hidden; chmod 000 hidden; mkdir shut; touch shut/in; chmod 000 shut"])
    out["list"] = box.list("/")
    twin = box.fork(box.snapshot())
    out["twin"] = twin.digest() == box.digest()
    twin.close()
    box.kill_all()
    out["collected"] = {k: [e.kind, e.mode] for k, e in box.collect().items()}
with backend.create(SandboxSpec(limits=Limits(memory_mb=64, processes=12))) as box:
    try: out["memory"] = box.python("x = bytearray(400 << 20)\\nfor i in range(0, len(x), 4096): x[i] = 1").ok
    except SandboxDied: out["memory"] = False
    forks = "import os, time\\nfor _ in range(50):\\n  if os.fork() == 0: time.sleep(2); os._exit(0)"
    try: out["forks"] = box.python(forks).ok
    except SandboxDied: out["forks"] = False
backend.close()
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What an ordinary user finds. Without root we are one; with root the program becomes one."""
    python = "/usr/bin/python3" if os.geteuid() == 0 else sys.executable
    checkout = str(Path(__file__).resolve().parents[2])
    environment = {"PYTHONPATH": checkout, "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    version = subprocess.run([python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True)
    if version.stdout.strip() != b"True":
        pytest.skip(f"{python}, the only interpreter that another user can surely read, is older than 3.11")
    done = subprocess.run(
        [python, "-c", PROGRAM], capture_output=True, text=True, env=environment, cwd="/", timeout=100
    )
    if "PermissionError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip("another user cannot read this checkout")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    if "skip" in report:
        pytest.skip(f"an ordinary user gets no namespaces here: {report['skip']}")
    return report


def test_the_box_is_the_same(seen: dict[str, Any]) -> None:
    assert seen["digest"] == "812c11cb3572e5c8d78329695240cab8114ada8c8643b989bcd8d899da841076"
    assert seen["id"] == "uid=1000(agent) gid=1000(agent) groups=1000(agent)\n" or "65534" in seen["id"]
    assert (seen["python"], seen["twin"]) == ("m", True)
    assert "users (one id, shared with init)" in seen["isolates"]


def test_init_is_out_of_reach_although_it_has_the_same_id(seen: dict[str, Any]) -> None:
    assert "done" not in seen["init"][1:]
    assert seen["alive"] == "alive\n"
    none = "0000000000000000"
    assert seen["caps"] == ["CapEff:", none, "CapBnd:", none, "NoNewPrivs:", "1", "Seccomp:", "2"]


def test_the_root_is_read_only(seen: dict[str, Any]) -> None:
    assert seen["writes"] == ""


def test_artifacts_with_closed_modes_are_collected(seen: dict[str, Any]) -> None:
    expected = {"a": ["file", 0o644], "hidden": ["file", 0], "shut": ["dir", 0], "shut/in": ["file", 0o644]}
    assert seen["collected"] == expected


def test_limits_hold_by_rlimit(seen: dict[str, Any]) -> None:
    assert (seen["memory"], seen["forks"]) == (False, False)


NOWHERE = """
echo 0 > /proc/sys/user/max_user_namespaces || exit 77
exec "$0" -c '
from agentrl import sandboxes
from agentrl.errors import SandboxError
backend = sandboxes.load("namespace")()
seen = backend.available()
print(seen.works, seen.isolates, len(seen.missing), seen.fix)
try: backend.create(sandboxes.SandboxSpec())
except SandboxError as error: print(type(error).__name__)
backend.close()
'
"""


def test_where_nothing_works_it_says_what_is_missing() -> None:
    """In a user namespace that may have none below it, as on a machine that forbids them."""
    checkout = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", NOWHERE, sys.executable],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": checkout},
    )
    if done.returncode in (1, 77) and done.stdout == "":
        pytest.skip(f"no user namespace to forbid others in: {done.stderr}")
    assert done.stdout.splitlines() == ["False () 1 sysctl -w user.max_user_namespaces=15000", "SandboxError"], done
