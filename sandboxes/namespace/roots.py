"""The pinned roots: what a sandbox sees besides its own files, and the hash that goes with every trajectory.

`host` is the machine's own /usr, read-only, without /usr/local and without any site- or dist-packages folder, and an
/etc of our own. Its hash covers the stat listing (path, type, mode, size, mtime, link target) of all visible files, so
it changes when a package is installed or upgraded; contents are not read, so it takes a fraction of a second, once per
process. Any other root is an unpacked image, given by its absolute path, or by its name in the cache (AGENTRL_CACHE, or
~/.cache/agentrl) as roots/<name>; its hash is made the same way. `python` is such a name if there is a root of that
name, and otherwise the same as `host`, which has the machine's own Python. `host:/a:/b=/opt/b` is `host` with these
folders of the machine visible too, read-only, in their own places or in another; the hash covers their names, not what
is in them. `host:python3.11.2:...` refuses a machine whose Python is another one.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.catalogue import cache_folder
from agentrl.errors import AuthoringError, UserError
from agentrl.sandboxes import shown
from agentrl.sandboxes.base import SandboxSpec

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
SHOWN = {
    *("self", "thread-self", "mounts", "net", "sys", "sysvipc", "bus", "cmdline", "config.gz", "consoles"),
    *("device-tree", "devices", "execdomains", "filesystems", "iomem", "ioports", "kallsyms", "misc", "tty", "version"),
}
"""What stays of /proc besides the sandbox's own processes: constants, and what belongs to a namespace. All else
counts what the whole machine does, so two sandboxes could talk through it; some reveals the host or acts on it."""
ALWAYS_HIDDEN = {"kcore", "sysrq-trigger"}
"""Files of /proc that are hidden whatever their permissions: one holds the machine's memory, one acts on it."""
_SYSCTLS = """
crypto/fips_enabled fs/file-max fs/inotify/max_queued_events fs/inotify/max_user_instances fs/inotify/max_user_watches
fs/nr_open fs/pipe-max-size kernel/cap_last_cap kernel/msgmax kernel/msgmnb kernel/msgmni kernel/ngroups_max
kernel/osrelease kernel/ostype kernel/overflowgid kernel/overflowuid kernel/pid_max kernel/randomize_va_space kernel/sem
kernel/shmall kernel/shmmax kernel/shmmni kernel/threads-max kernel/version net/core/somaxconn
net/ipv4/ip_local_port_range vm/max_map_count vm/mmap_min_addr vm/overcommit_memory vm/overcommit_ratio
"""
SYSCTLS = tuple(_SYSCTLS.split())
"""The settings of the kernel that programs ask for; a sandbox gets a copy of these, and sees no others."""
MASKED_NAMES = ("site-packages", "dist-packages")
SYSTEM_PYTHON = "/usr/bin/python3"
STAGES = ("/sys/kernel", "/mnt", "/srv", "/media", "/tmp")
"""Where sandboxes are built; only the zygote and the new sandbox see it, and no image lies there."""


@dataclass(frozen=True)
class Root:
    """One pinned root, ready to be mounted."""

    plan: dict[str, Any] = field(repr=False)
    """What `inner/rootfs.py` needs: image, links, binds, masks, shown, texts, stage."""
    hash: str
    warm: bool
    """Whether the zygote's interpreter is the one inside, so that `python` may run in a fork of it."""


@functools.lru_cache(maxsize=1)
def interpreter() -> str:
    """Return the machine's own Python, which is part of `host`; without one, ours, and then `python` runs cold."""
    return SYSTEM_PYTHON if os.access(SYSTEM_PYTHON, os.X_OK) else sys.executable


def _fingerprint(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _texts(user: int) -> dict[str, str]:
    """Return the files of /etc of the root `host`."""
    agent = "" if user == 0 else f"agent:x:{user}:{user}::/home/agent:/bin/sh\n"
    group = "" if user == 0 else f"agent:x:{user}:\n"
    return {
        "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\n{agent}nobody:x:65534:65534:nobody:/:/bin/false\n",
        "/etc/group": f"root:x:0:\n{group}nogroup:x:65534:\n",
        "/etc/hosts": "127.0.0.1 localhost box\n::1 localhost box\n",
        "/etc/hostname": "box\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "/etc/resolv.conf": "",
    }


def _listing(top: str, lines: list[bytes], masks: list[str], skip: tuple[str, ...], closed: list[str]) -> None:
    """Add a line for everything below `top`, except for folders to mask, which are added to `masks`.

    What not every user may read is added to `closed` too.
    """
    folders = [top]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                if entry.path in skip or entry.name in MASKED_NAMES:
                    masks.append(entry.path)
                    continue
                folders.append(entry.path)
                what = b"dir"
                if status.st_mode & 0o005 != 0o005:
                    closed.append(entry.path)
            elif stat.S_ISLNK(status.st_mode):
                what = os.fsencode(os.readlink(entry.path))
            else:
                what = b"%d %d" % (status.st_size, int(status.st_mtime))
                if not status.st_mode & 0o004:
                    closed.append(entry.path)
            lines.append(b"%s\0%o\0%s" % (os.fsencode(entry.path[len(top) :]), status.st_mode, what))


def _hash(lines: list[bytes]) -> str:
    return hashlib.sha256(b"\n".join(sorted(lines))).hexdigest()


_roots: dict[tuple[str, int], Root] = {}
_lock = threading.Lock()


def find(image: str, user: int) -> Root:
    """Return the root of that name for that user; it is examined once per process, by one thread."""
    with _lock:
        if (image, user) not in _roots:
            _roots[image, user] = _find(image, user)
        return _roots[image, user]


def check(spec: SandboxSpec, root: Root) -> None:
    """Refuse a spec that asks for what this root, or this user of the machine, cannot give."""
    for _, place in root.plan.get("shown", ()):
        if f"{place}/".startswith(f"{spec.workdir}/") or f"{spec.workdir}/".startswith(f"{place}/"):
            raise AuthoringError(
                f"workdir {spec.workdir!r} and the shown folder {place!r} of a sandbox lie in each other"
            )
    image = root.plan["image"]
    if spec.writable_root and image is not None and os.geteuid() not in (0, os.stat(image).st_uid):
        raise AuthoringError(f"image {spec.image!r} gets no writable root: it belongs to another user of the machine")


def unpacked() -> Path:
    """Return the folder of the images that have a name."""
    return cache_folder() / "roots"


def _find(image: str, user: int) -> Root:
    named = image.replace("-", "").replace("_", "").replace(".", "").isalnum() and not image.startswith(".")
    folder = unpacked() / image if named else Path(image).expanduser()
    if image == "host" or (image == "python" and not folder.is_dir()):
        if image == "python" and not os.access(SYSTEM_PYTHON, os.X_OK):
            raise AuthoringError(
                f"image 'python' needs {SYSTEM_PYTHON}, or a root in {folder}: apt-get install python3"
            )
        return _host(user)
    if (more := shown.parse(image)) is not None:
        if more.python and more.python != python_version():
            raise UserError(
                f"these sandboxes need Python {more.python}, which their environment was verified with; this machine's "
                f"{SYSTEM_PYTHON} is {python_version()}: play it on a machine with that version, or build it again"
            )
        return _host(user, more.folders)
    if not folder.is_absolute() or not (folder / "usr").is_dir():
        raise AuthoringError(
            f"image {image!r} of a sandbox is neither 'host' nor 'python' nor the absolute path of an unpacked image "
            f"(with a usr/) nor unpacked in {unpacked() / '<name>'}; for one: mkdir -p FOLDER && "
            "docker export $(docker create IMAGE) | tar -x -C FOLDER"
        )
    path = str(folder.resolve())
    lines: list[bytes] = []
    _listing(path, lines, [], (), [])
    plan = {"image": path, **_common()}
    # a path in the image: its links must be resolved as in the sandbox, so only a plain file counts
    inside = _fingerprint(os.path.join(path, os.path.realpath(SYSTEM_PYTHON).lstrip("/")))
    return Root(plan, _hash(lines), inside != "" and inside == _fingerprint(interpreter()))


def _common() -> dict[str, Any]:
    """Return what every plan holds: where to build the root, and what it shows and hides of /proc."""
    stage = next(folder for folder in STAGES if os.path.isdir(folder))
    files: list[str] = []
    folders: list[str] = []
    for name in sorted(set(os.listdir("/proc")) - SHOWN):
        if not name.isdigit() and not os.path.islink(f"/proc/{name}") and (name in ALWAYS_HIDDEN or _open_to_all(name)):
            (folders if os.path.isdir(f"/proc/{name}") else files).append(name)
    texts = {name: text for name, text in _proc_texts().items() if name in files or name.startswith("sys/")}
    return {"stage": stage, "proc_files": files, "proc_folders": folders, "proc_texts": texts}


def _open_to_all(name: str) -> bool:
    """Return whether anybody may open that file of /proc; each mount costs, and what is the root user's alone needs
    none: no user of a sandbox is the machine's root."""
    try:
        return bool(os.stat(f"/proc/{name}").st_mode & 0o007)
    except OSError:
        return True


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


@functools.lru_cache(maxsize=1)
def _proc_texts() -> dict[str, str]:
    """Return what sandboxes read in files of /proc that programs need: the machine's constants, and idle counters."""
    lines = _read("/proc/meminfo").splitlines()
    total = next((line for line in lines if line.startswith("MemTotal:")), "MemTotal: 0 kB")
    free = total.partition(":")[2]
    empty = ("Buffers", "Cached", "SwapCached", "SwapTotal", "SwapFree", "Shmem", "Slab", "SReclaimable")
    memory = [total, f"MemFree:{free}", f"MemAvailable:{free}", *(f"{name}:{0:>15} kB" for name in empty)]
    cores = ["cpu", *(f"cpu{number}" for number in range(os.cpu_count() or 1))]
    idle = [f"{core} {'0 ' * 9}0" for core in cores]
    texts = {
        "cpuinfo": _read("/proc/cpuinfo"),
        "loadavg": "0.00 0.00 0.00 1/1 1\n",
        "meminfo": "".join(f"{line}\n" for line in memory),
        "stat": "".join(f"{line}\n" for line in (*idle, "ctxt 0", "btime 946684800", "processes 1", "procs_running 1")),
        "swaps": "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n",
        "uptime": "1000.00 1000.00\n",
        "sys/kernel/hostname": "box\n",
        "sys/kernel/domainname": "(none)\n",
    }
    return texts | {f"sys/{name}": text for name in SYSCTLS if (text := _read(f"/proc/sys/{name}"))}


@functools.lru_cache(maxsize=1)
def python_version() -> str:
    """Return the version of the Python that sandboxes of `host` have; "none" without one."""
    command = [SYSTEM_PYTHON, "-I", "-S", "-c", shown.SAYS_PYTHON]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none"


@functools.lru_cache(maxsize=1)
def _system() -> tuple[str, list[str], dict[str, str], list[tuple[str, bool]], list[str]]:
    """Examine the machine's system folders: hash of their listing, folders to mask, links, folders to bind, and what
    is closed to some users of the machine."""
    lines: list[bytes] = []
    masks: list[str] = []
    closed: list[str] = []
    links: dict[str, str] = {}
    binds: list[tuple[str, bool]] = []
    for top in SYSTEM:
        if os.path.islink(top):
            links[top] = os.readlink(top)
        elif os.path.isdir(top):
            binds.append((top, True))
            _listing(top, lines, masks, ("/usr/local",), closed)
    for path in ("/etc/alternatives", "/etc/ld.so.cache"):
        if os.path.exists(path):
            binds.append((path, os.path.isdir(path)))
    links.update({"/etc/os-release": "../usr/lib/os-release"} if os.path.exists("/usr/lib/os-release") else {})
    return _hash(lines), sorted(masks), links, binds, sorted(closed)


def _host(user: int, folders: Sequence[tuple[str, str]] = ()) -> Root:
    listed, masks, links, binds, closed = _system()
    texts = _texts(user)
    own = [os.fsencode(f"{name}\0{text}") for name, text in (*links.items(), *texts.items())]
    # of a folder in another place its name alone: where it lies on this machine makes no difference inside
    names = [path if path == place else f"{place}\0{os.path.basename(path)}" for path, place in folders]
    own += [os.fsencode(f"shown\0{name}") for name in names]
    plan = {"image": None, "links": links, "binds": binds, "masks": masks, "texts": texts, **_common()}
    plan["shown"], plan["closed"] = list(folders), closed
    return Root(plan, _hash([listed.encode(), *own]), interpreter() == SYSTEM_PYTHON)
