"""Builds the file system of one sandbox, from inside its new mount namespace.

tmpfs (size, inodes limited; thrown away)         the sandbox sees
├── root/       the prepared tree of `host`  ->   /            read-only
│               or upper/ + work/ of an overlay   /            image below, changes in memory
├── box/                                     ->   /box         the workspace, or another `workdir`
└── tmp/ home/ shm/                          ->   /tmp /home/agent /dev/shm

With a writable root, everything else lies on that tmpfs too, and belongs to the sandbox's user:
├── root/       an own tree of `host`        ->   /
├── upper/N/ + work/N/ of overlays           ->   /usr ...     the machine's below, its owner shown as the user
└── masked/N/                                ->   /usr/local and whatever else of the machine is hidden

What all sandboxes share is prepared once, in a mount namespace of the zygote's own, where the zygote may make one: a
clone inherits it and cannot take it apart. Elsewhere each sandbox prepares its own.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from . import kernel

DEVICES = ("null", "zero", "full", "random", "urandom")
FOLDERS = (("box", 0o755), ("tmp", 0o1777), ("home", 0o755), ("shm", 0o1777))
"""The writable folders of the tmpfs, and their initial modes."""
OWN_FOLDERS = ("root", "upper", "work", "masked")
"""With a writable root: the further folders of the tmpfs."""
WRITABLE = (("../tmp", "tmp"), ("../home", "home/agent"), ("../shm", "dev/shm"))
FIXED = (946684800, 946684800)
PROC = "-proc/"
"""After a root's name: the folder of what its sandboxes see in place of the machine's own files of /proc."""

BOUND = kernel.MS_BIND | kernel.MS_REC
SHOWN = "-shown/"
"""After a root's name: the folders of the machine that its sandboxes see besides."""


def open_stage(folder: str) -> str:
    """In the zygote: make a mount namespace with room for prepared roots; return the folder to build sandboxes in."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_SLAVE)  # so that the machine can unmount its own
    kernel.mount("boxes", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    os.mkdir(folder + "/box", 0o755)
    return folder + "/box"


def prepare(plan: dict[str, Any], name: str) -> None:
    """Below the stage, make what the sandboxes of one root share."""
    os.chdir(os.path.dirname(plan["stage"]))
    os.mkdir(name, 0o755)
    if plan["image"] is None:
        kernel.mount(name, name, None, kernel.MS_BIND)
        _host(name, plan)
        _fix_times(name, os.stat(name).st_dev)
        kernel.mount("none", name, None, kernel.READ_ONLY)
    else:
        kernel.mount(plan["image"], name, None, kernel.MS_BIND | kernel.MS_REC)
        kernel.read_only(name)
    _proc(name, plan)
    for number, (path, _) in enumerate(plan.get("shown", ())):  # from here: a sandbox may not walk to where they lie
        os.makedirs(name + SHOWN + str(number), 0o755)
        kernel.mount(path, name + SHOWN + str(number), None, kernel.MS_BIND | kernel.MS_REC)
        kernel.read_only(name + SHOWN + str(number))
    kernel.mount("none", name, None, kernel.MS_REC | kernel.MS_PRIVATE)  # without what the machine mounts there later
    os.chdir("/")


def writable(plan: dict[str, Any], prepared: str) -> int:
    """Mount the sandbox's own file system and return a descriptor of it, for the host to write and read through.

    `prepared` names what the zygote has made for this root; empty if it could not.
    """
    if not prepared:
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    os.chdir(plan["stage"])
    os.umask(0)
    options = "size={},nr_inodes={},mode=755".format(plan["disk"], plan["inodes"])
    kernel.mount("box", ".", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    os.chdir(plan["stage"])
    own = [(name, 0o755) for name in OWN_FOLDERS] if plan["writable_root"] else []
    for name, mode in (*FOLDERS, *own):
        os.mkdir(name, mode)
        os.chown(name, plan["user"], plan["user"])
        os.utime(name, FIXED)
    return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def build(plan: dict[str, Any], prepared: str) -> None:
    """Mount everything else around it, in the current folder, and make that `/`."""
    if not plan["writable_root"]:
        os.mkdir("root", 0o755)
    if plan["writable_root"]:
        _own_root(plan, prepared)
    elif plan["image"] is not None:
        _overlay(plan, prepared)
    elif prepared:
        kernel.mount("../" + prepared, "root", None, kernel.MS_BIND | kernel.MS_REC)
    else:
        kernel.mount("root", "root", None, kernel.MS_BIND)
        _host("root", plan)
        kernel.mount("none", "root", None, kernel.READ_ONLY)
    if not prepared:
        _proc("root", plan)
    os.chdir("root")
    for source, target in (("../box", plan["workdir"][1:]), *WRITABLE):
        kernel.mount(source, target, None, kernel.MS_BIND)
    for number, (path, place) in enumerate(plan.get("shown", ())):  # last, so that nothing above hides them
        os.makedirs(place[1:], 0o755, exist_ok=True)
        source = "../../" + prepared + SHOWN + str(number) if prepared else path
        kernel.mount(source, place[1:], None, kernel.MS_BIND | kernel.MS_REC)
        kernel.read_only(place[1:])
    # no command sees init; init, in group 0 where there is one, sees every process
    options = "hidepid=2,gid=0" if plan["switch"] else "hidepid=2"
    kernel.mount("proc", "proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, options)
    texts = "../../" + prepared if prepared else "../root"
    for name in plan["proc_files"]:
        source = texts + PROC + name if name in plan["proc_texts"] else "dev/null"
        kernel.mount(source, "proc/" + name, None, kernel.MS_BIND)  # read-only, like its source
    for name in plan["proc_folders"]:
        kernel.mount(texts + PROC + "empty", "proc/" + name, None, kernel.MS_BIND)
    kernel.mount(texts + PROC + "sys", "proc/sys", None, kernel.MS_BIND)
    kernel.pivot_root(".", ".")
    kernel.umount(".", kernel.MNT_DETACH)
    os.chdir("/")
    os.umask(0o022)


def _skeleton(top: str, workdir: str) -> None:
    """Make the mount points. For an image they lie in the upper layer: its own folders belong to nobody here."""
    for name in ("proc", "dev", "dev/shm", "tmp", "home", "home/agent"):
        os.mkdir(top + name, 0o755)
    _folder(top + workdir[1:])
    for name in DEVICES:
        _empty_file(top + "dev/" + name)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, top + "dev/" + name)


def _folder(path: str) -> None:
    """Make a folder, and those above it, where there are none; the umask is 0 here."""
    if not os.path.isdir(path):
        _folder(os.path.dirname(path))
        os.mkdir(path, 0o755)


def _devices(top: str) -> None:
    for name in DEVICES:
        kernel.mount("/dev/" + name, top + "dev/" + name, None, kernel.MS_BIND)


def _empty_file(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _host_tree(root: str, plan: dict[str, Any], folders: tuple[str, ...] = ()) -> None:
    """Make what the tree of `host` has of its own: mount points, links, and the files of /etc."""
    _skeleton(root + "/", plan["workdir"])
    for folder in ("etc", "run", "var", "var/tmp", "root", *folders):
        _folder(root + "/" + folder)
    for name, target in plan["links"].items():
        os.symlink(target, root + name)
    for path, content in plan["texts"].items():
        descriptor = os.open(root + path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        os.write(descriptor, content.encode())
        os.close(descriptor)


def _host(root: str, plan: dict[str, Any]) -> None:
    """Build the tree of `host` on the mount point `root`, with the machine's system folders mounted in it."""
    _host_tree(root, plan)
    for path, is_folder in plan["binds"]:
        target = root + path
        if is_folder:
            os.mkdir(target, 0o755)
        else:
            _empty_file(target)
        kernel.mount(path, target, None, kernel.MS_BIND | kernel.MS_REC)
        kernel.read_only(target)
    empty = root + "-empty"
    os.mkdir(empty, 0o555)
    kernel.mount(empty, empty, None, kernel.MS_BIND)
    kernel.read_only(empty)
    for path in plan["masks"]:
        kernel.mount(empty, root + path, None, kernel.MS_BIND)  # read-only, like its source
    for _, place in plan.get("shown", ()):
        with contextlib.suppress(OSError):  # among the machine's own folders it exists already
            os.makedirs(root + place, 0o755)
    _devices(root + "/")


def _proc(root: str, plan: dict[str, Any]) -> None:
    """Beside `root`, write what its sandboxes see in place of the machine's own files of /proc."""
    top = root + PROC
    os.mkdir(top, 0o755)
    # a file system of its own: what lies here takes nothing from the sandbox's limits
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("texts", top, "tmpfs", flags, "size=4m,nr_inodes=256,mode=755")
    for folder in ("empty", "sys"):
        os.mkdir(top + folder, 0o755)
    for name, text in plan["proc_texts"].items():
        os.makedirs(os.path.dirname(top + name), 0o755, exist_ok=True)
        descriptor = os.open(top + name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444)
        os.write(descriptor, text.encode())
        os.close(descriptor)
    _fix_times(top, os.stat(top).st_dev)
    kernel.read_only(top)


def _fix_times(folder: str, device: int) -> None:
    """Set the fixed mtime on everything that was made here, and on nothing that is mounted."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.stat(follow_symlinks=False).st_dev == device:
                if entry.is_dir(follow_symlinks=False):
                    _fix_times(entry.path, device)
                elif entry.is_symlink() or entry.is_file():
                    os.utime(entry.path, FIXED, follow_symlinks=False)
    os.utime(folder, FIXED)


def _overlay(plan: dict[str, Any], prepared: str) -> None:
    """Mount an unpacked image, read-only, below an upper layer in memory. Names stay relative: all can read them."""
    if not plan["writable_root"]:
        os.mkdir("upper", 0o755)
        os.mkdir("work", 0o755)
    if not plan["restored"]:
        _skeleton("upper/", plan["workdir"])
    lower = plan["lowers"][0] if plan["lowers"] else "../" + prepared
    if not prepared:
        lower = "lower"
        os.mkdir(lower, 0o755)
        kernel.mount(plan["image"], lower, None, kernel.MS_BIND | kernel.MS_REC)
    _layered(lower, "upper", "work", "root")
    if not prepared:
        kernel.umount(lower, kernel.MNT_DETACH)
    _devices("root/")


def _layered(lower: str, upper: str, work: str, target: str) -> None:
    layers = "lowerdir=" + lower + ",upperdir=" + upper + ",workdir=" + work
    try:
        kernel.mount("root", target, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, layers + ",userxattr")
    except OSError:  # before Linux 5.11
        kernel.mount("root", target, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, layers)


# A writable root ---------------------------------------------------------------------------------------------------


def lowers(plan: dict[str, Any], prepared: str, ids: int) -> list[str]:
    """In the zygote: mount what lies below a sandbox's own layers with its owners as the sandbox's user sees them.

    Without that, all of it would belong to ids that the sandbox does not have, and nobody in it could change it.
    Returns the names as the sandbox finds them; `forget_lowers` removes the mounts once it has its copy of them.
    """
    top = os.path.dirname(plan["stage"])
    names = []
    places = [""] if plan["image"] is not None else [path for path, _ in system_folders(plan)]
    for place, path in enumerate(places):
        name = "lower-" + str(place)  # the folders stay: removing one would take the mount from sandboxes too
        with contextlib.suppress(FileExistsError):
            os.mkdir(top + "/" + name, 0o755)
        names.append("../" + name)
        kernel.owned_by(ids, top + "/" + prepared + path, top + "/" + name)
    return names


def forget_lowers(plan: dict[str, Any]) -> None:
    """In the zygote: unmount what `lowers` mounted."""
    top = os.path.dirname(plan["stage"])
    for name in os.listdir(top):
        if name.startswith("lower-"):
            with contextlib.suppress(OSError):
                kernel.umount(top + "/" + name, kernel.MNT_DETACH)


def system_folders(plan: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return the folders of the machine that `host` shows, without the single parts of /etc."""
    return [(path, folder) for path, folder in plan["binds"] if not path.startswith("/etc/")]


def _own_root(plan: dict[str, Any], prepared: str) -> None:
    """Build a root of which every part may be changed, in this sandbox alone."""
    if plan["image"] is not None:
        _overlay(plan, prepared)
        if not plan["restored"]:
            _belongs_to(plan["user"], "upper")
        return
    if not plan["restored"]:
        _host_tree("root", plan, ("opt", "srv", "mnt", "var/lib", "var/log", "var/cache"))
        for path, _ in plan["binds"]:
            if path.startswith("/etc/"):
                _copied(path, "root" + path)
            else:
                os.mkdir("root" + path, 0o755)
        for _, place in plan.get("shown", ()):
            with contextlib.suppress(OSError):  # among the machine's own folders it exists already
                os.makedirs("root" + place, 0o755)
        _belongs_to(plan["user"], "root")
    kernel.mount("root", "root", None, kernel.MS_BIND)
    for place, (path, _) in enumerate(system_folders(plan)):
        if plan["lowers"]:
            for folder in ("upper/", "work/"):
                _own_folder(folder + str(place), plan["user"])
            _layered(plan["lowers"][place], "upper/" + str(place), "work/" + str(place), "root" + path)
        else:  # nobody but root can show these as somebody else's: they stay as they are
            kernel.mount("../" + prepared + path if prepared else path, "root" + path, None, BOUND)
            kernel.read_only("root" + path)
    for place, path in enumerate(plan["masks"]):
        _own_folder("masked/" + str(place), plan["user"])
        kernel.mount("masked/" + str(place), "root" + path, None, kernel.MS_BIND)
    for path in (
        plan["closed"] if plan["lowers"] else ()
    ):  # the sandbox's user may read all that is the machine's root's
        if os.path.isdir("root" + path):
            _own_folder("masked/closed", plan["user"])
            kernel.mount("masked/closed", "root" + path, None, kernel.MS_BIND)
        else:
            kernel.mount("/dev/null", "root" + path, None, kernel.MS_BIND)
    _devices("root/")


def _own_folder(path: str, user: int) -> None:
    """Make a folder of the sandbox's user, unless a snapshot has brought it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o755)
        os.chown(path, user, user)
        os.utime(path, FIXED)


def _copied(source: str, target: str) -> None:
    """Copy a file, a link or a folder of the machine; what cannot be read is left out."""
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    elif os.path.isdir(source):
        os.mkdir(target, 0o755)
        for name in os.listdir(source):
            _copied(source + "/" + name, target + "/" + name)
    else:
        with contextlib.suppress(OSError), open(source, "rb") as old, open(target, "wb") as new:
            new.write(old.read())


def _belongs_to(user: int, folder: str) -> None:
    """Give everything that was made here to the sandbox's user, with the fixed mtime."""
    for where, folders, files in os.walk(folder, topdown=False):
        for name in (*folders, *files):
            os.chown(where + "/" + name, user, user, follow_symlinks=False)
            os.utime(where + "/" + name, FIXED, follow_symlinks=False)
    os.chown(folder, user, user)
    os.utime(folder, FIXED)
