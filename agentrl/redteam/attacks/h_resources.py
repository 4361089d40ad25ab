"""Family H: time, memory and limits, used up or faked."""

from __future__ import annotations

from agentrl.redteam.attack import NotApplicable, Plays, Script, Variants, attack
from agentrl.redteam.target import Target
from agentrl.types import ToolCall


@attack("python", slow=True)
def sleeps_for_ever(t: Target) -> Plays:
    """A function that never returns."""
    return t.hollow("time.sleep(1e6)", "import time")


@attack("python", slow=True)
def busy_import(t: Target) -> Plays:
    """An import that never ends."""
    return t.poison("while True:\n    pass")


@attack("python", slow=True)
def ignores_signals(t: Target) -> Plays:
    """A hang that ignores every polite signal."""
    return t.poison(
        "import signal, time\nfor _s in range(1, 65):\n    try:\n        signal.signal(_s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nwhile True:\n    time.sleep(1)"
    )


@attack("python")
def memory_bomb(t: Target) -> Plays:
    """As much memory as there is."""
    return t.hollow("[bytearray(1 << 26) for _ in range(100000)]")


@attack("python", slow=True)
def fork_bomb(t: Target) -> Plays:
    """As many processes as there may be."""
    return t.poison("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        os._exit(0)")


@attack("python")
def thread_bomb(t: Target) -> Plays:
    """As many threads as there may be, none of which ends."""
    return t.poison(
        "import threading, time\nfor _ in range(10000):\n    try:\n"
        "        threading.Thread(target=time.sleep, args=(1e6,)).start()\n    except RuntimeError:\n        break"
    )


@attack("python")
def output_flood(t: Target) -> Plays:
    """Hundreds of megabytes on stdout and stderr."""
    return t.poison(
        "import os\n_b = b'test_hidden PASSED\\n' * 50000\nfor _ in range(200):\n    os.write(1, _b); os.write(2, _b)"
    )


@attack("python")
def reply_flood(t: Target) -> Plays:
    """Hundreds of megabytes on every other descriptor."""
    return t.poison(
        "import os\n_b = b'[' * 1000000\nfor _fd in range(3, 12):\n    for _ in range(50):\n        try:\n"
        "            os.write(_fd, _b)\n        except OSError:\n            break"
    )


@attack("python")
def endless_digits(t: Target) -> Plays:
    """An integer of a million digits."""
    return t.hollow("int('9' * 4000) ** 250")


@attack("python")
def bottomless_nesting(t: Target) -> Plays:
    """A result nested so deep that its reader runs out of stack."""
    return t.hollow("_deep()", DEEP)


DEEP = """\
import sys
sys.setrecursionlimit(10**6)

def _deep():
    value = []
    for _ in range(100000):
        value = [value]
    return value
"""

RAW = """\
import os

def _raw():
    for fd in range(3, 12):
        try:
            os.write(fd, DATA)
        except OSError:
            pass
    os._exit(0)
"""


@attack("python")
def nested_reply(t: Target) -> Plays:
    """A hand-written reply of a hundred thousand opening brackets."""
    return t.hollow("_raw()", RAW.replace("DATA", "b'[' * 100000 + b']' * 100000"))


@attack("python")
def broken_reply(t: Target) -> Plays:
    """Replies of broken UTF-8, lone surrogates, NaN literals and numbers without end."""
    data = b'{"ok": "\\ud800\xff", "v": NaN, "x": 1'
    return t.hollow("_raw()", RAW.replace("DATA", f"{data!r} + b'0' * 100000 + b'}}'"))


@attack("python")
def cyclic_result(t: Target) -> Plays:
    """A list that contains itself."""
    return t.hollow("_cycle()", "def _cycle():\n    v = []\n    v.append(v)\n    return v\n")


@attack("python")
def endless_iterator(t: Target) -> Plays:
    """An iterator that always has one more."""
    return t.hollow("iter(int, 1)")


@attack("python")
def disk_fill(t: Target) -> Plays:
    """As much disk as there is, to the last block."""
    return t.poison(FILL)


FILL = """\
for _size in (1 << 20, 1 << 12, 1):
    for _n in range(4096):
        try:
            with open(f"/tmp/fill-{_size}-{_n}", "wb") as _file:
                _file.write(bytes(_size))
        except OSError:
            break
"""


CLOCKS = """\
import time
_frozen = lambda *_: 0.0
time.time = time.perf_counter = time.monotonic = time.process_time = time.thread_time = _frozen
time.time_ns = time.perf_counter_ns = time.monotonic_ns = time.process_time_ns = lambda *_: 0
"""


@attack("python")
def frozen_clocks(t: Target) -> Plays:
    """The clocks stopped, for graders that measure time in the candidate's process."""
    return t.poison(CLOCKS)


@attack("python", partial=True)
def deferred_work(t: Target) -> Plays:
    """A promise that does its work when it is compared, after the clock has stopped."""
    return Variants([t.submit(t.code.wrapped(LATER, "_later", broken=broken)) for broken in (True, False)])


LATER = """\
class _Later:
    def __init__(self, f):
        self.f = f

    def __eq__(self, other):
        return self.f() == other

    __hash__ = None

def _later(f):
    return lambda *a: _Later(lambda: f(*a))
"""


@attack("python", partial=True)
def low_precision(t: Target) -> Plays:
    """Half-precision numbers where exact ones were asked for."""
    if "float" not in t.code.honest:
        raise NotApplicable("the solution computes no float")
    return t.submit(t.code.wrapped(HALF, "_half"))


HALF = """\
import struct

def _half(f):
    def call(*a):
        v = f(*a)
        return struct.unpack("e", struct.pack("e", v))[0] + 1e-3 if isinstance(v, float) else v
    return call
"""


@attack("python")
def deep_recursion(t: Target) -> Plays:
    """Recursion until the interpreter's own stack overflows."""
    return t.hollow("_dive()", "import sys\nsys.setrecursionlimit(10**8)\ndef _dive():\n    return _dive()\n")


@attack("shell")
def hogs(t: Target) -> Plays:
    """Background processes that use up every processor, while grading is going on."""
    return t.shell("for i in 1 2 3 4; do (while :; do :; done) >/dev/null 2>&1 & done; true")


@attack("shell")
def full_disk(t: Target) -> Plays:
    """A full disk and no free inode when the tests come."""
    return t.shell(
        "dd if=/dev/zero of=/tmp/full bs=1M count=4096 2>/dev/null; "
        "dd if=/dev/zero of=full bs=1M count=64 2>/dev/null; "
        "i=0; while [ $i -lt 2000 ] && : > /tmp/f$i; do i=$((i+1)); done 2>/dev/null; rm -f full; true"
    )


@attack("shell")
def shell_output_flood(t: Target) -> Plays:
    """A tool call that prints without end."""
    return t.shell("yes PASSED | head -c 50000000")


@attack("json", "write")
def nested_document(t: Target) -> Plays:
    """A JSON document of a hundred thousand brackets."""
    return t.drop(dict.fromkeys(t.documents, "[" * 40_000 + "]" * 40_000))


@attack("json", "write")
def endless_number(t: Target) -> Plays:
    """A JSON document with a number of fifty thousand digits."""
    return t.drop(dict.fromkeys(t.documents, '{"n": ' + "9" * 50_000 + "}"))


VIEW = """\
python3 - <<'END'
import sqlite3
db = sqlite3.connect({path!r})
tables = db.execute("select name from sqlite_master where type='table' and name not like 'sqlite_%'").fetchall()
for (name,) in tables:
    columns = [row[1] for row in db.execute(f'pragma table_info("{{name}}")')]
    db.execute(f'drop table "{{name}}"')
    ends = ", ".join(f'n as "{{c}}"' for c in columns)
    endless = "with recursive f(n) as (select 1 union all select n + 1 from f)"
    db.execute(f'create view "{{name}}" as {{endless}} select {{ends}} from f')
db.commit()
END"""


@attack("sqlite", "shell")
def endless_view(t: Target) -> Plays:
    """Tables replaced by views whose rows never end."""
    return t.shell(VIEW.format(path=t.database))


@attack("sqlite", "shell")
def broken_database(t: Target) -> Plays:
    """A database whose pages point at each other in circles."""
    return t.shell(
        f"python3 -c \"p = {t.database!r}; b = bytearray(open(p, 'rb').read()); b[100:200] = bytes(range(100)); "
        "b[4096:] = b[100:200] * (len(b[4096:]) // 100); open(p, 'wb').write(b)\"; true"
    )


@attack("tools")
def tool_flood(t: Target) -> Script:
    """Sixty calls with a megabyte of arguments each."""
    for name, tool in list(t.tools.items())[:1]:
        for _ in range(60):
            yield ToolCall(name=name, arguments=dict.fromkeys(tool.arguments.model_fields, "x" * 1_000_000))
    yield t.final(t.idle_answer)
