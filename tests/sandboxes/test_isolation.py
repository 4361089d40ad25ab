"""Real attempts to get out of a box, for each backend that keeps boxes apart.

Each must fail, and the host and a neighbour must go on working.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.sandboxes import Backend, Sandbox, SandboxSpec

Make = Callable[..., Sandbox]
SYSCALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return os.strerror(ctypes.get_errno()) if result < 0 else "done"
x86 = os.uname().machine == "x86_64"
"""


@pytest.fixture(scope="module")
def neighbour(isolating: Backend) -> Iterator[Sandbox]:
    """A bystander of all the attempts."""
    with isolating.create(SandboxSpec(files={"secret": "neighbour"})) as box:
        yield box


@pytest.fixture
def pair(isolated: Make, neighbour: Sandbox) -> Iterator[tuple[Sandbox, Sandbox]]:
    """The box that attacks, and its neighbour, which must be found unharmed afterwards."""
    before = neighbour.digest()
    yield isolated(files={"mine": "attacker"}), neighbour
    unharmed(neighbour, before)


@pytest.fixture(scope="module")
def lasting(isolating: Backend, neighbour: Sandbox) -> Iterator[tuple[Sandbox, Sandbox]]:
    """The same for many small attempts in a row, from one box."""
    before = neighbour.digest()
    with isolating.create(SandboxSpec(files={"mine": "attacker"})) as attacker:
        yield attacker, neighbour
    unharmed(neighbour, before)


def unharmed(neighbour: Sandbox, before: str) -> None:
    assert neighbour.digest() == before
    assert neighbour.python("print(open('secret').read())").stdout == b"neighbour\n"
    assert neighbour.exec(["sh", "-c", "echo still here"]).stdout == b"still here\n"
    assert subprocess.run(["true"], check=True).returncode == 0


def attempt(pair: tuple[Sandbox, Sandbox], source: str) -> list[str]:
    """What a program in the attacking box printed."""
    result = pair[0].python(source, timeout=20)
    assert result.exit_code == 0, result.text
    return result.stdout.decode().splitlines()


def test_host_files_cannot_be_seen(pair: tuple[Sandbox, Sandbox], isolating: Backend) -> None:
    with tempfile.NamedTemporaryFile(prefix="agentrl-host-") as secret:
        os.chmod(secret.name, 0o644)
        places = [secret.name, str(Path(__file__)), sys.executable, "/etc/shadow", "/root/.bashrc", "/etc/ssh"]
        places += ["/sys", "/boot", "/usr/local/bin", "/var/lib", "/var/log", "/srv", "/opt", "/mnt", "/home/agent/.."]
        if isolating.name == "docker":  # an image has these of its own
            places = [place for place in places if place not in ("/etc/shadow", "/var/lib", "/var/log")]
        look = "print(os.listdir(p) if os.path.isdir(p) else os.path.exists(p))"
        printed = attempt(pair, f"import os\nfor p in {places!r}: {look}")
    seen = [line for line in printed if line not in ("False", "[]")]
    inside = sys.executable.startswith("/usr/bin") and isolating.name == "namespace"
    assert seen == (["True"] if inside else []) + ["['agent']"]


def test_nothing_of_agentrl_or_any_package_can_be_imported(pair: tuple[Sandbox, Sandbox]) -> None:
    source = """
import importlib.util, os, sys
print([n for n in ("agentrl", "numpy", "yaml", "apt", "pip", "inner") if importlib.util.find_spec(n)])
hits = []
for top, folders, files in os.walk("/"):
    folders[:] = [f for f in folders if os.path.join(top, f) not in ("/proc", "/usr/share/doc")]
    if os.path.basename(top) in ("site-packages", "dist-packages") and (folders or files): hits.append(top)
    hits += [os.path.join(top, n) for n in folders + files if "agentrl" in n]
print(hits)
"""
    assert attempt(pair, source) == ["[]", "[]"]


def test_nothing_outside_its_own_folders_can_be_written(pair: tuple[Sandbox, Sandbox]) -> None:
    source = """
import os
done = []
places = "/ /usr /usr/bin /etc /dev /proc /proc/sys/kernel /run /var/tmp /home /lib".split()
for place in places:
    try:
        os.close(os.open(place + "/agentrl-escape", os.O_CREAT | os.O_WRONLY)); done.append(place)
    except OSError: pass
for path in ("/etc/passwd", "/usr/bin/true", "/etc/ld.so.cache", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger",
             "/proc/1/oom_score_adj", "/proc/1/mem", "/dev/kmsg", "/proc/sys/kernel/hostname"):
    try:
        os.close(os.open(path, os.O_WRONLY)); done.append(path)
    except OSError: pass
print(done)
"""
    assert attempt(pair, source) == ["[]"]
    assert not os.path.exists("/var/tmp/agentrl-escape") and not os.path.exists("/usr/bin/agentrl-escape")


def test_every_namespace_is_its_own(pair: tuple[Sandbox, Sandbox], isolating: Backend) -> None:
    kinds = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"]
    if isolating.name == "docker":  # users only where the daemon remaps them, cgroups only on version 2
        kinds = [kind for kind in kinds if kind not in ("user", "cgroup")]
    source = f"import os\nfor kind in {kinds!r}: print(os.readlink('/proc/self/ns/' + kind))"
    inside, beside = attempt(pair, source), attempt((pair[1], pair[0]), source)
    here = [os.readlink(f"/proc/self/ns/{kind}") for kind in kinds]
    assert len({*inside, *beside, *here}) == 3 * len(kinds)


def test_only_its_own_processes_can_be_seen(pair: tuple[Sandbox, Sandbox], isolating: Backend) -> None:
    source = """
import os
pids = sorted(int(n) for n in os.listdir("/proc") if n.isdigit())
print([pid for pid in pids if pid != os.getpid()], os.getppid())
for name in "environ maps mem fd root cwd".split():
    path = "/proc/1/" + name
    try: print(os.listdir(path) if path.endswith(("fd", "root", "cwd")) else open(path, "rb").read(10))
    except OSError as error: print(type(error).__name__)
"""
    lines = attempt(pair, source)
    assert lines[0] == ("[] 1" if isolating.name == "namespace" else "[1] 1")  # Docker's /proc cannot hide process 1
    assert set(lines[1:]) <= {"FileNotFoundError", "PermissionError"}


def test_init_and_the_host_cannot_be_signalled(pair: tuple[Sandbox, Sandbox], isolating: Backend) -> None:
    source = f"""
import os, signal
for target in (1, 0x7fff, {os.getpid()}):
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
        try: os.kill(target, number); print("sent")
        except OSError as error: print(type(error).__name__)
"""
    lines = attempt(pair, source)
    if isolating.name == "docker":  # one user: the call succeeds, and the kernel throws the signal away
        lines = ["PermissionError" if line == "sent" else line for line in lines[:3]] + lines[3:]
    assert set(lines) <= {"PermissionError", "ProcessLookupError"}
    assert pair[0].exec(["kill", "-9", "-1"]).exit_code in (0, 1, -9)
    assert pair[0].exec(["echo", "alive"]).stdout == b"alive\n"


def test_environment_arguments_and_memory_hold_nothing_of_the_host(
    pair: tuple[Sandbox, Sandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_TEST_CANARY", "cafe" * 8)
    here = str(Path(__file__).resolve().parents[2])
    source = f"""
import gc, os, sys
needles = [{here!r}, {os.path.expanduser("~")!r} + "/", "AGENTRL_TEST_CANARY", "cafe" * 8]
needles[3] = "cafe" * 8
blob = repr(dict(os.environ)) + open("/proc/self/environ").read() + open("/proc/self/cmdline").read() + repr(sys.argv)
blob += open("/proc/self/mountinfo").read() + open("/proc/self/maps").read() + open("/proc/mounts").read()
print([n for n in needles[:3] if n in blob])
frame, depth = sys._getframe(), 0
while frame.f_back: frame, depth = frame.f_back, depth + 1
print(depth <= 1, sorted(set(frame.f_globals) - {{"__builtins__"}})[:20])
codes = [getattr(f, "__code__", None) for f in gc.get_objects() if callable(f)]
names = [getattr(c, "co_filename", "") for c in codes if c]
print([n for n in set(names) if {here!r} in n])
print(sorted(os.listdir("/proc/self/fd")))
"""
    lines = attempt(pair, source)
    assert lines[0] == "[]" and lines[1].startswith("True ") and lines[2] == "[]"
    assert lines[3] in ("['0', '1', '2', '3', '4', '5']", "['0', '1', '2', '3', '4']")


def test_no_socket_leads_anywhere(pair: tuple[Sandbox, Sandbox]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"""
import socket
def attempt(family, kind, address):
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(1); s.connect(address); return "connected"
    except OSError as error: return type(error).__name__
print(attempt(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {port})))
print(attempt(socket.AF_INET, socket.SOCK_STREAM, ("1.1.1.1", 53)))
print(attempt(socket.AF_INET, socket.SOCK_DGRAM, ("8.8.8.8", 53)))
print(attempt(socket.AF_INET6, socket.SOCK_STREAM, ("2606:4700:4700::1111", 53)))
for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/systemd/private", "/run/dbus/system_bus_socket"):
    print(attempt(socket.AF_UNIX, socket.SOCK_STREAM, path))
for family, kind in ((socket.AF_NETLINK, 3), (socket.AF_PACKET, 3), (socket.AF_INET, socket.SOCK_RAW), (40, 1)):
    try: socket.socket(family, kind); print("opened")
    except OSError as error: print(type(error).__name__)
with socket.create_server(("127.0.0.1", 0)) as s, socket.create_connection(s.getsockname()): print("own loopback works")
"""
        lines = attempt(pair, source)
    assert lines[:4] == ["ConnectionRefusedError", "OSError", "OSError", "OSError"]
    assert lines[4:8] == ["FileNotFoundError"] * 4
    assert lines[8:12] == ["PermissionError"] * 4
    assert lines[12] == "own loopback works"


def test_abstract_sockets_of_the_host_are_out_of_reach(pair: tuple[Sandbox, Sandbox]) -> None:
    name = f"\0agentrl-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        lines = attempt(
            pair,
            f"import socket\ntry: socket.socket(socket.AF_UNIX).connect({name!r}); print('in')\n"
            "except OSError as e: print(type(e).__name__)",
        )
    assert lines == ["ConnectionRefusedError"]


def test_capabilities_are_gone_and_do_not_come_back(pair: tuple[Sandbox, Sandbox], isolating: Backend) -> None:
    source = """
import os
for line in open("/proc/self/status"):
    if line.startswith(("Cap", "NoNewPrivs", "Seccomp:", "Uid", "Groups")): print(*line.split())
attempts = [lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.chroot("/box")]
for act in attempts + [lambda: os.chown("/box/mine", 0, 0)]:
    try: act(); print("done")
    except OSError as error: print(type(error).__name__)
"""
    lines = attempt(pair, source)
    none = "0000000000000000"
    groups = "Groups:" if isolating.name == "namespace" else "Groups: 1000"
    expected = ["Uid: 1000 1000 1000 1000", groups] + [f"Cap{k}: {none}" for k in ("Inh", "Prm", "Eff", "Bnd", "Amb")]
    assert [line for line in lines if line.startswith(("Uid", "Groups", "Cap"))] == expected
    assert "NoNewPrivs: 1" in lines and "Seccomp: 2" in lines
    assert lines[-5:] == ["PermissionError"] * 5


def test_setuid_programs_give_nothing(pair: tuple[Sandbox, Sandbox], isolating: Backend) -> None:
    source = """
import os, shutil, subprocess
shutil.copy("/usr/bin/id", "/box/id"); os.chmod("/box/id", 0o6755)
print(subprocess.run(["/box/id", "-u"], capture_output=True, text=True).stdout.strip())
mounts = [m.split() for m in open("/proc/mounts")]
print([m[1] for m in mounts if m[2] != "devtmpfs" and not {"nosuid", "ro"} & set(m[3].split(","))])
setuid = [p for p in ("/usr/bin/su", "/bin/su") if os.path.exists(p)]
print([subprocess.run([p, "-c", "id -u"], stdin=subprocess.DEVNULL, capture_output=True).stdout for p in setuid[:1]])
"""
    lines = attempt(pair, source)
    assert lines[0] == "1000" and lines[2] in ("[]", "[b'']")
    assert lines[1] == "[]"


@pytest.mark.parametrize(
    ("name", "x86", "arm", "arguments"),
    [
        ("ptrace", 101, 117, "16, 1, 0, 0"),
        ("ptrace traceme", 101, 117, "0, 0, 0, 0"),
        ("mount", 165, 40, "b'none', b'/tmp', b'tmpfs', 0, 0"),
        ("bind mount", 165, 40, "b'/box', b'/tmp', 0, 4096, 0"),
        ("umount2", 166, 39, "b'/proc', 2"),
        ("unshare user", 272, 97, "0x10000000"),
        ("unshare mount", 272, 97, "0x20000"),
        ("clone new user namespace", 56, 220, "0x10000000 | 17, 0, 0, 0, 0"),
        ("setns", 308, 268, "0, 0"),
        ("pivot_root", 155, 41, "b'/box', b'/box'"),
        ("bpf", 321, 280, "0, 0, 0"),
        ("perf_event_open", 298, 241, "0, 0, -1, -1, 0"),
        ("userfaultfd", 323, 282, "0"),
        ("io_uring_setup", 425, 425, "1, 0"),
        ("keyctl", 250, 219, "0, -3, 0"),
        ("add_key", 248, 217, "b'user', b'a', b'b', 1, -3"),
        ("init_module", 175, 105, "0, 0, b''"),
        ("finit_module", 313, 273, "0, b'', 0"),
        ("kexec_load", 246, 104, "0, 0, 0, 0"),
        ("reboot", 169, 142, "0xfee1dead, 672274793, 0"),
        ("open_by_handle_at", 304, 265, "0, 0, 0"),
        ("process_vm_readv", 310, 270, "1, 0, 0, 0, 0, 0"),
        ("sethostname", 170, 161, "b'x', 1"),
        ("settimeofday", 164, 170, "0, 0"),
        ("clock_settime", 227, 112, "0, 0"),
        ("fsopen", 430, 430, "b'tmpfs', 0"),
        ("open_tree", 428, 428, "-100, b'/', 1"),
        ("mount_setattr", 442, 442, "-100, b'/', 0, 0, 0"),
        ("swapon", 167, 224, "b'/box/mine', 0"),
        ("acct", 163, 89, "b'/box/mine'"),
        ("syslog", 103, 116, "3, 0, 0"),
        ("pidfd_getfd", 438, 438, "0, 0, 0"),
    ],
)
def test_forbidden_system_calls(
    lasting: tuple[Sandbox, Sandbox], name: str, x86: int, arm: int, arguments: str
) -> None:
    lines = attempt(lasting, f"{SYSCALL}\nprint(call({x86} if x86 else {arm}, {arguments}))")
    assert lines == ["Operation not permitted"], name


def test_clone3_and_unknown_calls_do_not_exist(pair: tuple[Sandbox, Sandbox]) -> None:
    lines = attempt(pair, f"{SYSCALL}\nprint([call(n, 0, 0) for n in (435, 457, 467, 999)])")
    assert lines == [str(["Function not implemented"] * 4)]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the i386 and x32 entries exist on x86_64 only")
def test_foreign_system_call_tables_are_closed(pair: tuple[Sandbox, Sandbox]) -> None:
    assert attempt(pair, f"{SYSCALL}\nprint(call(0x40000000 | 39))") == ["Function not implemented"]
    # mov eax, 20 (i386 getpid); int 0x80; ret
    source = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
    result = pair[0].python(source)
    assert (result.exit_code, result.stdout) == (-31, b"")  # SIGSYS


def test_links_and_dots_lead_nowhere(pair: tuple[Sandbox, Sandbox]) -> None:
    source = """
import os
here = os.path.realpath("/box/" + "../" * 50 + "etc/hostname")
print(here, open(here).read().strip())
for path in ("/proc/self/root/../../..", "/proc/self/cwd/../../.."):
    print(sorted(os.listdir(path)) == sorted(os.listdir("/")))
for number in range(3, 256):
    try:
        target = os.readlink(f"/proc/self/fd/{number}")
        if not target.startswith("pipe:"): print(number, target)
    except OSError: pass
"""
    assert attempt(pair, source) == ["/etc/hostname box", "True", "True"]


def test_a_double_chroot_trick_has_no_chroot(pair: tuple[Sandbox, Sandbox]) -> None:
    source = "import os\ntry: os.mkdir('x'); os.chroot('x'); print('in')\nexcept OSError as e: print(type(e).__name__)"
    assert attempt(pair, source) == ["PermissionError"]


def test_neighbours_share_no_memory_ipc_or_temporary_files(pair: tuple[Sandbox, Sandbox]) -> None:
    leave = """
import os
from multiprocessing import shared_memory
shared_memory.SharedMemory("agentrl_leak", create=True, size=16)
for place in ("/tmp/leak", "/dev/shm/leak", os.path.expanduser("~/leak")): open(place, "w").write("x")
"""
    assert pair[0].python(leave).exit_code == 0
    look = "import os; print(os.listdir('/tmp'), os.listdir('/dev/shm'), os.listdir(os.path.expanduser('~')))"
    assert pair[1].python(look).stdout == b"[] [] []\n"
    assert not os.path.exists("/dev/shm/agentrl_leak") and not os.path.exists("/dev/shm/leak")


LOOK = """
import hashlib, json, os
seen = {}
for top, folders, files in os.walk("/proc"):
    if top == "/proc": folders[:] = [f for f in folders if not f.isdigit() and not os.path.islink("/proc/" + f)]
    for name in files:
        path = os.path.join(top, name)
        if os.path.islink(path): continue
        try:
            with open(path, "rb", 0) as file: seen[path] = file.read(1 << 16).hex()
        except OSError: pass
print(json.dumps(seen))
"""


def test_two_sandboxes_cannot_talk_through_counters_of_the_machine(namespace: Backend) -> None:
    """Nothing below /proc that is not about the sandbox's own processes changes with what others do."""
    busy = """
import os, time
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(200)]
for n in range(300): open(f"/tmp/{n}", "w").close()
memory = bytearray(64 << 20)
end = time.monotonic() + 0.5
while time.monotonic() < end: os.path.exists("/tmp/missing")
print(len(files))
"""
    with namespace.create(SandboxSpec()) as listener, namespace.create(SandboxSpec()) as speaker:
        before = json.loads(listener.python(LOOK).stdout)
        with ThreadPoolExecutor(1) as threads:
            speaking = threads.submit(speaker.python, busy)
            during = json.loads(listener.python(LOOK).stdout)
            assert speaking.result().stdout == b"200\n"
        after = json.loads(listener.python(LOOK).stdout)
    assert {path for path in before if not before[path] == during[path] == after[path]} == set()
    assert before["/proc/loadavg"] and before["/proc/meminfo"] and before["/proc/stat"], "programs need these"
    assert not {path for path in before if path.startswith(("/proc/sys/fs/file-nr", "/proc/pressure"))}


def test_ordinary_programs_find_what_they_need_below_proc(namespace: Backend) -> None:
    """Interpreters, shells and tools that ask /proc about the machine get an answer."""
    source = """
import multiprocessing, os, resource, sqlite3, ssl, subprocess, tempfile, uuid
print(os.cpu_count() >= 1, len(os.getloadavg()), os.sysconf("SC_NPROCESSORS_CONF") >= 1)
print(multiprocessing.get_context("spawn").cpu_count() >= 1, uuid.uuid4().version)
print(os.uname().release == open("/proc/sys/kernel/osrelease").read().strip())
print(open("/proc/sys/kernel/hostname").read().strip(), int(open("/proc/sys/kernel/pid_max").read()) > 1000)
print(any(line.startswith("MemTotal:") for line in open("/proc/meminfo")))
"""
    with namespace.create(SandboxSpec()) as box:
        assert box.python(source).stdout.decode().splitlines() == [
            "True 3 True",
            "True 4",
            "True",
            "box True",
            "True",
        ]
        script = (
            "ps -e --no-headers | wc -l; nproc > n; [ $(cat n) -ge 1 ] && echo cores; sort /etc/passwd > /dev/null && "
            "echo sorted; bash -c 'echo $((1 + 1))'; mount > mounts && df /tmp > free && echo mounted; "
            "if command -v uptime > /dev/null; then uptime > up || echo no uptime; fi; "
            "if command -v free > /dev/null; then free > up || echo no free; fi; "
            "if command -v git > /dev/null; then git init -q r && git -C r gc -q || echo no git; fi"
        )
        result = box.exec(["sh", "-c", script])
    assert result.stdout.decode().split() == ["3", "cores", "sorted", "2", "mounted"], result.text


def test_the_reply_cannot_speak_for_init(pair: tuple[Sandbox, Sandbox]) -> None:
    """A program that writes what init would write, on every descriptor it has, changes nothing but its own output."""
    source = """
import os, struct
forged = struct.pack("<iidd", 0, 0, 0.0, 0.0)
for number in range(1, 64):
    try: os.write(number, forged)
    except OSError: pass
os._exit(9)
"""
    result = pair[0].python(source)
    assert result.exit_code == 9


def test_hundreds_at_once(namespace: Backend) -> None:
    """All of them alive in the same moment, each with a command that runs."""
    count = 200
    meeting = threading.Barrier(count)

    def live(n: int) -> tuple[bytes, str]:
        with namespace.create(SandboxSpec(files={"n": str(n)})) as box:
            meeting.wait(120)
            out = box.exec(["sh", "-c", "cat n; echo; ls /proc | grep -c '^[0-9]'"], timeout=120).stdout
            meeting.wait(120)
            return out, box.digest()

    with ThreadPoolExecutor(count) as threads:
        seen = list(threads.map(live, range(count)))
    assert [out.split()[0] for out, _ in seen] == [b"%d" % n for n in range(count)]
    assert {out.split()[1] for out, _ in seen} <= {b"2", b"3"}  # a shell, ls, and grep if it was there already
    assert len({digest for _, digest in seen}) == count


def test_many_boxes_at_once_do_not_meet(isolated: Make, isolating: Backend) -> None:
    boxes = [isolated(files={"n": str(n)}) for n in range(12)]
    seen: dict[int, bytes] = {}

    def look(n: int) -> None:
        seen[n] = boxes[n].exec(["sh", "-c", "cat n; ps -e --no-headers > list; wc -l < list"]).stdout

    threads = [threading.Thread(target=look, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    processes = 2 if isolating.name == "namespace" else 3  # a shell and ps; and process 1 where it can be seen
    assert {n: out.split()[0] for n, out in seen.items()} == {n: b"%d%d" % (n, processes) for n in range(12)}
