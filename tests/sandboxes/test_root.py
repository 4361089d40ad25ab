"""Sandboxes with another workdir, as root, or with a root that commands may change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.errors import AuthoringError
from agentrl.hashing import canonical
from agentrl.sandboxes import Backend, Limits, Sandbox, SandboxSpec
from agentrl.sandboxes.pool import Pool

Make = Callable[..., Sandbox]
FILES = {"a/b.txt": "hello"}
WRITES = "for d in /etc /opt /usr/local /root /var; do mkdir -p $d/made && echo {word} > $d/made/file || exit 1; done"
LISTING = "find /etc /opt /usr/local /var -printf '%p %y %m %u %T@ %l\\n' | grep -v /etc/host | sort"
READS = "cat /etc/made/file /opt/made/file /usr/local/made/file /root/made/file /var/made/file 2>/dev/null; true"


@pytest.mark.parametrize(
    "path",
    ["/", "", "app", "/app/", "//app", "/a/../b", "/a/./b", "..", "/..", "/proc", "/proc/self", "/dev/shm", "/sys",
     "/usr/bin", "/bin", "/lib/x", "/etc", "/tmp", "/tmp/x", "/home", "/home/agent", "/home/agent/x", "/var", "/a b",
     "/a\nb", "/a,b", "/a:b", "/a\0b", "/.hidden", "/" + "a" * 250],
)  # fmt: skip
def test_a_workdir_that_would_hide_something_is_refused(path: str) -> None:
    with pytest.raises(AuthoringError, match="workdir"):
        SandboxSpec(workdir=path)


def test_the_defaults_leave_a_specs_hash_as_it_was() -> None:
    """Verdicts carry the hash of a verifier with its specs: fields that were added later must not change it."""
    assert "workdir" not in canonical(SandboxSpec()) and "writable_root" not in canonical(SandboxSpec())
    assert canonical(SandboxSpec(workdir="/app")) != canonical(SandboxSpec())


@pytest.mark.parametrize("asked", [{"workdir": "/app"}, {"user": 0}, {"writable_root": True}])
def test_the_process_backend_refuses_what_it_cannot_give(process: Backend, asked: dict[str, object]) -> None:
    with pytest.raises(AuthoringError, match=r"the process sandbox cannot give .*use the namespace or docker backend"):
        process.create(SandboxSpec(**asked))  # type: ignore[arg-type]


def test_a_root_that_commands_may_change_and_a_list_of_programs_exclude_each_other() -> None:
    with pytest.raises(AuthoringError, match="it could replace them"):
        SandboxSpec(tools=("sh",), writable_root=True)


@pytest.mark.parametrize("place", ["/app", "/srv/deep/place", "/root"])
def test_the_workspace_appears_where_the_spec_says(isolated: Make, place: str) -> None:
    """Everything that starts at the workspace starts there; what a digest and a collection hold is the same."""
    box, plain = isolated(files=FILES, workdir=place), isolated(files=FILES)
    assert box.exec(["pwd"]).stdout.decode() == box.shell().run("pwd").stdout.decode() == f"{place}\n"
    assert box.python("import os; print(os.getcwd())").stdout.decode() == f"{place}\n"
    assert box.exec(["pwd"], cwd="a").stdout.decode() == f"{place}/a\n"
    assert (box.list(), box.list("a"), box.read("a/b.txt"), box.read(f"{place}/a/b.txt")) == (
        ["a"], ["b.txt"], b"hello", b"hello",
    )  # fmt: skip
    assert box.digest() == plain.digest()
    box.write("new", b"x")
    twin = box.fork(box.snapshot())
    assert twin.exec(["cat", f"{place}/new"]).stdout == b"x" and twin.digest() == box.digest()
    twin.close()
    assert box.exec(["sh", "-c", "ls -d /box"]).exit_code != 0
    box.kill_all()
    assert sorted(box.collect()) == ["a", "a/b.txt", "new"]


def test_a_root_of_its_own_is_thrown_away_and_seen_by_nobody_else(isolated: Make) -> None:
    """What one sandbox writes outside its workspace is neither in the next of the same kind nor in a grading one."""
    spec = {"files": FILES, "workdir": "/app", "writable_root": True}
    first, beside, grading = isolated(**spec), isolated(**spec), isolated(files=FILES)
    fresh = first.exec(["sh", "-c", LISTING]).stdout
    before = first.digest()
    assert first.exec(["sh", "-c", WRITES.format(word="first")]).ok
    assert first.exec(["sh", "-c", READS]).stdout == b"first\n" * 5
    assert first.digest() == before == grading.digest()
    after = isolated(**spec)
    for other in (beside, grading, after):
        assert other.exec(["sh", "-c", READS]).stdout == b""
    assert len(fresh) > 500 and after.exec(["sh", "-c", LISTING]).stdout == fresh
    assert grading.exec(["sh", "-c", "echo x > /etc/x || echo x > /opt/x || echo x > /usr/local/x"]).exit_code != 0
    assert not os.path.exists("/etc/made") and not os.path.exists("/opt/made")


def test_a_fork_has_the_changed_root_too(isolated: Make) -> None:
    box = isolated(files=FILES, writable_root=True)
    changes = "; rm /etc/passwd; mkdir -p /opt/d/e; ln -s /opt/d /opt/l; chmod 700 /opt/d; mkfifo /opt/f"
    assert box.exec(["sh", "-c", WRITES.format(word="x") + changes]).ok
    twin = box.fork(box.snapshot())
    looks = "stat -c '%n %F %a %N' /opt/* /opt/d/*; ls /etc/passwd; " + READS
    assert twin.exec(["sh", "-c", looks]).stdout == box.exec(["sh", "-c", looks]).stdout
    assert twin.exec(["sh", "-c", "echo more > /opt/d/more"]).ok and box.list("/opt/d") == ["e"]
    twin.close()


def test_a_changed_root_counts_against_the_disk_limit(isolated: Make) -> None:
    """Neither one file nor many can use more of the machine than the limit, wherever they lie."""
    box = isolated(writable_root=True, limits=Limits(disk_mb=8, files=1000, memory_mb=256))
    filled = "for d in /etc /opt /usr/local; do head -c 30000000 /dev/zero > $d/big; done; du -cm /etc /opt /usr/local"
    total = int(box.exec(["sh", "-c", f"({filled} | tail -1) 2>/dev/null"]).stdout.split()[0])
    assert total <= 3 * 8 + 4
    many = (
        "rm -f /etc/big /opt/big /usr/local/big; i=0; while [ $i -lt 9000 ]; do : > /opt/$i || break; i=$((i+1)); done"
    )
    box.exec(["sh", "-c", f"({many}) 2>/dev/null"])
    assert len(box.list("/opt")) < 4000
    assert isolated(writable_root=True).exec(["sh", "-c", WRITES.format(word="x")]).ok


POWERS = """
import os, socket, stat
def tries(act):
    try: act(); return "done"
    except OSError as error: return type(error).__name__
os.makedirs("/opt/x", exist_ok=True)
open("/opt/x/f", "w").close()
os.chmod("/opt/x/f", 0o4755)
print([tries(lambda: os.mknod("/opt/x/disk", stat.S_IFBLK | 0o666, os.makedev(8, 0))),
       tries(lambda: os.mknod("/opt/x/mem", stat.S_IFCHR | 0o666, os.makedev(1, 1))),
       tries(lambda: os.chown("/opt/x/f", 12, 12)), tries(lambda: os.setuid(os.getuid() + 1)),
       tries(lambda: os.chroot("/opt/x")), tries(lambda: open("/proc/1/mem", "rb")),
       tries(lambda: os.listdir("/proc/1/fd")), tries(lambda: os.rename("/proc", "/opt/p")),
       tries(lambda: open("/proc/sys/kernel/core_pattern", "w").write("x"))])
print([line.split()[1] for line in open("/proc/self/status") if line[:6] in ("CapEff", "CapPrm", "CapBnd")])
"""


def test_a_root_of_its_own_gives_no_powers(isolated: Make) -> None:
    """No device, no other user, no other root, no way to process 1; a set-user-id file means nothing."""
    box = isolated(writable_root=True)
    refused, capabilities = box.python(POWERS).stdout.decode().splitlines()
    assert "done" not in refused, refused
    assert capabilities == str(["0" * 16] * 3)
    shell = "cp /usr/bin/id /opt/id && chmod 6755 /opt/id && /opt/id -u; mount -t tmpfs x /opt; echo $?"
    assert box.exec(["sh", "-c", f"{shell} 2>/dev/null"]).stdout.split()[0] == b"1000"
    box.python("import os; os.kill(1, 9)")
    assert box.exec(["echo", "alive"]).stdout == b"alive\n"


def test_root_of_a_sandbox_is_not_the_machines(namespace: Backend) -> None:
    """It has every file of its sandbox's root, no capability, and another uid outside."""
    with namespace.create(SandboxSpec(user=0, workdir="/app", files=FILES, writable_root=True)) as box:
        assert box.exec(["id", "-u"]).stdout == b"0\n"
        assert (
            box.exec(["sh", "-c", "echo x >> /etc/hosts && rm /usr/bin/env && echo y > /usr/bin/ls && ls"]).ok is False
        )
        refused, capabilities = box.python(POWERS).stdout.decode().splitlines()
        assert capabilities == str(["0" * 16] * 3) and "done" not in refused, refused
        box.python("import os, resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (1, 1)); os.kill(1, 9)")
        assert box.read("a/b.txt") == b"hello"
        shell = box.shell()
        shell.run("sleep 77 & until grep -q sleep /proc/$!/comm; do :; done")
        found = subprocess.run(["pgrep", "-f", "^sleep 77$"], capture_output=True, text=True).stdout.split()
        assert found and {os.stat(f"/proc/{pid}").st_uid >= 1_000_000_000 for pid in found} == {os.geteuid() == 0}
        shell.close()
    assert os.path.exists("/usr/bin/env") and Path("/usr/bin/ls").stat().st_size > 1000
    with namespace.create(SandboxSpec(user=0)) as box:  # without a root of its own it may change nothing
        assert box.exec(["sh", "-c", "echo x > /etc/x || echo x > /opt/x || echo x > /usr/local/x"]).exit_code != 0


def test_programs_that_an_agent_replaced_are_not_those_that_a_verifier_runs(namespace: Backend) -> None:
    """The whole root may be changed in a namespace sandbox; the pool hands none of it to anybody."""
    fake = "printf '#!/bin/sh\\necho fake\\n' > /usr/bin/sort && chmod 755 /usr/bin/sort && sort /dev/null"
    spec = SandboxSpec(writable_root=True)
    with Pool(namespace, limit=4, ahead=1) as pool:
        for _ in range(3):
            with pool.take(spec) as agent:
                assert agent.exec(["sort", "/dev/null"]).stdout == b""
                assert agent.exec(["sh", "-c", fake]).stdout == b"fake\n"
            with pool.take(SandboxSpec()) as grading:
                assert grading.exec(["sort", "/dev/null"]).stdout == b""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An unpacked image of a few programs, with files of root's own, and a link where the workspace is to appear."""
    root = tmp_path / "image"
    for folder in ("usr/bin", "etc", "opt", "data"):
        (root / folder).mkdir(parents=True)
    wanted = {str(Path(shutil.which(name) or name).resolve()): f"/usr/bin/{name}" for name in ("sh", "cat", "ls", "rm")}
    listed = subprocess.run(["ldd", *wanted], capture_output=True, text=True, check=True).stdout
    wanted |= {path: path for path in re.findall(r"(/\S+) \(0x", listed)}
    for source, target in wanted.items():
        (root / target[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, root / target[1:])
    (root / "etc/motd").write_text("welcome\n")
    (root / "opt/secret").write_text("root's\n")
    (root / "opt/secret").chmod(0o600)
    (root / "app").symlink_to("/etc")
    for above in (root, *root.parents):
        if str(above).startswith(tempfile.gettempdir() + "/"):
            above.chmod(0o755)  # pytest closes them, and the sandbox's user is nobody here
    return root


def test_an_image_can_be_changed_and_stays_as_it_is(namespace: Backend, image: Path) -> None:
    """The user of the sandbox owns what root owns in the image; a link at the workdir leads nowhere."""
    spec = SandboxSpec(image=str(image), workdir="/app", files=FILES, user=0, writable_root=True)
    with namespace.create(spec) as box:
        assert box.exec(["sh", "-c", "cat a/b.txt /etc/motd /opt/secret"]).stdout == b"hellowelcome\nroot's\n"
        assert box.exec(["sh", "-c", "echo more >> /etc/motd; rm /usr/bin/ls; echo x > /data/x; cat /etc/motd"]).ok
        with box.fork(box.snapshot()) as twin:
            assert (
                twin.exec(["sh", "-c", "cat /etc/motd /data/x; [ -e /usr/bin/ls ] && echo there"]).stdout
                == b"welcome\nmore\nx\n"
            )
    assert (image / "etc/motd").read_text() == "welcome\n" and (image / "usr/bin/ls").exists()
    with namespace.create(spec) as box:
        assert box.exec(["sh", "-c", "cat /etc/motd; ls /data"]).stdout == b"welcome\n"
