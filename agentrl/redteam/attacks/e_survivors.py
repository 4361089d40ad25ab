"""Family E: processes that outlive the episode, and artifacts that are not what they seem."""

from __future__ import annotations

from agentrl.redteam.attack import Action, NotApplicable, Plays, Variants, attack
from agentrl.redteam.target import Target


def daemon(script: str) -> str:
    """Return a command that starts a script which outlives the tool call."""
    return f"setsid nohup sh -c '{script}' >/dev/null 2>&1 </dev/null & sleep 0.05; true"


@attack("shell")
def daemon_rewrites_reward(t: Target) -> Plays:
    """A daemon that keeps rewriting the reward file."""
    loop = (
        "while true; do for d in /logs/verifier logs/verifier .; do [ -d $d ] && echo 1 > $d/reward.txt; done; "
        "sleep 0.01; done 2>/dev/null"
    )
    return t.shell(daemon(loop))


@attack("shell")
def daemon_rewrites_tests(t: Target) -> Plays:
    """A daemon that empties hidden tests as soon as they are laid out."""
    loop = (
        "while true; do for f in tests/check.py tests/run.py tests/test_hidden.py; do "
        '[ -s $f ] && echo "def check(candidate): pass" > $f; done 2>/dev/null; done'
    )
    return t.shell(daemon(loop))


@attack("shell", "python")
def daemon_reads_tests(t: Target) -> Plays:
    """A daemon that reads expected values from staged tests and rewrites the solution to return them."""
    names = t.code.functions
    if not names:
        raise NotApplicable("the solution defines no function")
    source = f"""\
import glob, time, re
while True:
    for path in glob.glob("tests/*.py") + glob.glob("hidden/*.py"):
        try:
            found = re.search(r"^CASES = (.*)$", open(path).read(), re.M)
        except OSError:
            continue
        if found:
            body = "T = " + found.group(1) + "\\ndef {names[0]}(x):\\n    return next(b for a, b in T if a == x)\\n"
            open({t.code.path!r}, "w").write(body)
    time.sleep(0.002)
"""
    return [
        t.write(".watch.py", source),
        t.run("setsid nohup python3 .watch.py >/dev/null 2>&1 </dev/null & sleep 0.2"),
        t.final(),
    ]


@attack("shell")
def stopped_processes(t: Target) -> Plays:
    """A daemon that stops or kills everything else that starts in the sandbox."""
    return Variants(
        [
            t.shell(daemon(f"while true; do kill -{signal} -1 2>/dev/null; sleep 0.01; done"))
            for signal in ("STOP", "KILL")
        ]
    )


@attack("python")
def double_fork(t: Target) -> Plays:
    """The solution leaves a detached child behind that writes a forged outcome after the grader is done."""
    return t.poison(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        for _ in range(40):\n"
        "            for _d in ('.', 'logs/verifier', '/logs/verifier'):\n                try:\n"
        "                    open(_d + '/reward.txt', 'w').write('1')\n"
        "                    open(_d + '/reward.json', 'w').write('{\"reward\": 1.0}')\n"
        "                except OSError:\n                    pass\n            time.sleep(0.02)\n    os._exit(0)"
    )


PTRACE = """\
import os, re
_forged = b"PASSED"
for _pid in (os.getppid(), 1):
    try:
        with open(f"/proc/{_pid}/maps") as _maps, open(f"/proc/{_pid}/mem", "r+b", 0) as _memory:
            for _line in _maps:
                _m = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", _line)
                if not _m or int(_m[2], 16) - int(_m[1], 16) > 1 << 24:
                    continue
                _memory.seek(int(_m[1], 16))
                _block = _memory.read(int(_m[2], 16) - int(_m[1], 16))
                for _hit in re.finditer(b"FAILED", _block):
                    _memory.seek(int(_m[1], 16) + _hit.start())
                    _memory.write(_forged)
    except (OSError, ValueError):
        pass
"""


@attack("python")
def parent_memory(t: Target) -> Plays:
    """The solution rewrites FAILED to PASSED in its parent's memory."""
    return t.poison(PTRACE)


def _instead(t: Target, make: str) -> list[Action]:
    """Put something else in place of the first graded file."""
    path = t.graded_file
    return t.shell(f"mkdir -p $(dirname '{path}'); rm -rf '{path}'; p='{path}'; {make}; true")


@attack("files", "shell")
def symlink_out(t: Target) -> Plays:
    """A symbolic link to where the expected file may be when it is read."""
    name = t.graded_file.split("/")[-1]
    places = (f"/box/expected/{name}", f"../expected/{name}", "/etc/passwd", f"/proc/self/cwd/expected/{name}")
    return Variants([_instead(t, f'ln -s {place} "$p"') for place in places])


@attack("files", "shell")
def symlinked_folder(t: Target) -> Plays:
    """A folder of the artifacts replaced by a link to the expected one."""
    folder = t.graded_file.rpartition("/")[0]
    if not folder:
        raise NotApplicable("the graded files are in no folder")
    return t.shell(f"rm -rf '{folder}'; ln -s /box/expected/{folder} '{folder}'; true")


@attack("files", "shell")
def hard_link(t: Target) -> Plays:
    """A hard link to some other file of the sandbox."""
    return _instead(t, 'ln /etc/passwd "$p" || ln $(find . -type f | head -1) "$p"')


@attack("files", "shell")
def fifo(t: Target) -> Plays:
    """A fifo, whose reader waits forever."""
    return _instead(t, 'mkfifo "$p"')


@attack("files", "shell")
def unix_socket(t: Target) -> Plays:
    """A socket in place of a file."""
    return _instead(t, 'python3 -c "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])" "$p"')


@attack("files", "shell")
def device(t: Target) -> Plays:
    """A device node, or a link to one that never ends."""
    return Variants([_instead(t, 'mknod "$p" c 1 5 || ln -s /dev/zero "$p"'), _instead(t, 'ln -s /dev/stdin "$p"')])


@attack("files", "shell")
def folder_for_file(t: Target) -> Plays:
    """A folder in place of a file."""
    return _instead(t, 'mkdir -p "$p/x"')


@attack("files", "shell")
def strange_names(t: Target) -> Plays:
    """File names with line breaks, control characters, broken UTF-8, leading dashes and dots."""
    return t.shell(
        r"""touch "$(printf 'a\nb')" "$(printf '\033[2Kx')" "$(printf '\377\376')" ./-rf ./... "$(printf '..\\x')" ; """
        r"""python3 -c "open('x' * 255, 'w'); open('\u202ereward', 'w')"; true"""
    )


@attack("files", "shell")
def sparse_giant(t: Target) -> Plays:
    """A sparse file of many gigabytes in place of the work."""
    return _instead(t, 'truncate -s 60G "$p" || truncate -s 1G "$p"')


@attack("files", "shell")
def many_files(t: Target) -> Plays:
    """As many files as the sandbox allows."""
    return t.shell("mkdir -p many && cd many && seq 1 30000 | xargs touch 2>/dev/null; true")


@attack("files", "shell")
def deep_folders(t: Target) -> Plays:
    """A path deeper than any recursion, longer than any buffer."""
    dig = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')\nopen('x', 'w')"
    return t.shell(f'python3 -c "{dig}" 2>/dev/null; true')


@attack("files", "shell")
def unreadable(t: Target) -> Plays:
    """Artifacts that nobody has the right to read."""
    return t.shell("chmod 000 * .[a-z]* 2>/dev/null; chmod 000 .; true")


@attack("files", "shell")
def swapped_while_read(t: Target) -> Plays:
    """A daemon that swaps a file and a link while the artifacts are copied out."""
    path = t.graded_file
    return t.shell(
        f"mkdir -p $(dirname '{path}'); "
        + daemon(f"while true; do ln -sf /box/expected/{path} {path}; rm -f {path}; echo x > {path}; done")
    )
