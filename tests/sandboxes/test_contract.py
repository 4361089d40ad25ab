"""The contract of every backend, tested on each of them."""

import asyncio
import errno
import time
from collections.abc import Callable

import pytest

from agentrl.errors import AgentError, AuthoringError, SandboxError
from agentrl.sandboxes import Backend, Entry, Limits, Sandbox, SandboxSpec

Make = Callable[..., Sandbox]
FILES: dict[str, Entry | bytes | str] = {
    "a/b.txt": "hello",
    "run.sh": Entry(content=b"echo hi\n", mode=0o755),
    "to": Entry("link", b"a/b.txt"),
}


def test_exec_gives_output_code_and_input(make: Make) -> None:
    result = make(files=FILES).exec(["sh", "-c", "cat; cat to; echo err >&2; exit 3"], stdin=b"in ")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"in hello", b"err\n")
    assert not result.ok and result.text == "in helloerr\n[exit code 3]"


def test_a_command_that_does_not_exist_is_127(make: Make) -> None:
    result = make().exec(["no-such-command"])
    assert (result.exit_code, result.stderr) == (127, b"no-such-command: No such file or directory\n")


def test_a_signal_is_a_negative_code(make: Make) -> None:
    result = make().exec(["sh", "-c", "kill -TERM $$"])
    assert (result.exit_code, result.text) == (-15, "[ended by a signal: Terminated]")


def test_environment_is_the_fixed_one_the_specs_and_the_calls(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "must not leak")
    box = make(env={"SPEC": "1"})
    text = box.exec(["env"], env={"CALL": "2"}).stdout.decode()
    variables = dict(line.split("=", 1) for line in text.splitlines())
    variables.pop("HOME")
    variables.pop("PWD", None)
    fixed = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}
    assert variables == {**fixed, "SPEC": "1", "CALL": "2"}
    assert box.python("import os; print(os.environ['SPEC'], 'CALL' in os.environ)").stdout == b"1 False\n"


def test_partial_output_survives_a_timeout(make: Make) -> None:
    start = time.monotonic()
    result = make().exec(["sh", "-c", "echo before; sleep 60; echo after"], timeout=0.5)
    assert (result.stdout, result.timed_out, result.ok) == (b"before\n", True, False)
    assert time.monotonic() - start < 10


def test_output_beyond_the_limit_is_cut_and_said(make: Make) -> None:
    result = make(limits=Limits(output_bytes=1000)).exec(["sh", "-c", "head -c 5000000 /dev/zero | tr '\\0' x"])
    assert (result.stdout, result.truncated, result.exit_code) == (b"x" * 1000, True, 0)


def test_a_background_process_does_not_hold_up_the_answer(make: Make) -> None:
    start = time.monotonic()
    assert make().exec(["sh", "-c", "sleep 60 & echo started"]).stdout == b"started\n"
    assert time.monotonic() - start < 10


def test_large_input_and_output_at_once_do_not_deadlock(make: Make) -> None:
    data = bytes(range(256)) * 3000
    assert make(limits=Limits(output_bytes=1 << 20)).exec(["cat"], stdin=data).stdout == data


def test_python_reads_its_message_and_replies(make: Make) -> None:
    source = "import os, sys\nos.write(4, os.read(3, 100)[::-1])\nprint(sys.argv, __name__, sorted(globals()))"
    result = make().python(source, b"abc")
    assert (result.exit_code, result.reply) == (0, b"cba")
    assert result.stdout.startswith(b"['-c'] __main__ [")


def test_python_reports_what_was_raised(make: Make) -> None:
    box = make()
    result = box.python("def f():\n    return 1 / 0\nf()")
    assert result.exit_code == 1
    assert result.stderr.decode().splitlines()[-3:] == [
        '  File "<string>", line 3, in <module>',
        '  File "<string>", line 2, in f',
        "ZeroDivisionError: division by zero",
    ]
    codes = [box.python(f"import sys; sys.exit({code})").exit_code for code in ("0", "7", "None", "'text'")]
    assert codes == [0, 7, 0, 1]


def test_python_runs_exit_handlers_and_threads_to_their_end(make: Make) -> None:
    source = (
        "import atexit, threading, time\natexit.register(lambda: print('bye'))\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()"
    )
    assert make().python(source).stdout == b"late\nbye\n"


def test_python_imports_from_the_workspace_and_hashes_alike(make: Make) -> None:
    box = make(files={"solution.py": "X = 41\n"})
    assert box.python("import solution; print(solution.X + 1)").stdout == b"42\n"
    assert box.python("print(hash('a'))").stdout == box.python("print(hash('a'))").stdout


def test_python_draws_other_random_numbers_each_time(make: Make) -> None:
    box = make()
    assert (
        box.python("import random; print(random.random())").stdout
        != box.python("import random; print(random.random())").stdout
    )


def test_reply_limit(make: Make) -> None:
    result = make().python("import os; os.write(4, b'x' * 5000)", reply_limit=100)
    assert (result.reply, result.truncated) == (b"x" * 100, True)


def test_read_write_list(make: Make) -> None:
    box = make(files=FILES)
    box.write("new/deep/file", b"\0\xff data", mode=0o640)
    assert box.read("new/deep/file") == b"\0\xff data"
    assert box.read("/box/to") == b"hello"
    assert box.list() == ["a", "new", "run.sh", "to"] and box.list("a") == ["b.txt"]
    with pytest.raises(FileNotFoundError):
        box.read("missing")
    with pytest.raises(IsADirectoryError):
        box.read("a")
    with pytest.raises(NotADirectoryError):
        box.list("run.sh")


def test_a_file_that_is_too_long_is_refused_and_not_read_whole(make: Make) -> None:
    """Agent code decides how long a file is, and the trainer must not hold all of it."""
    box = make(files=FILES)
    box.exec(["sh", "-c", "head -c 20000000 /dev/zero > big"])
    with pytest.raises(OSError, match="the file has more than 16777216 bytes: 'big'") as caught:
        box.read("big")
    assert caught.value.errno == errno.EFBIG
    assert len(box.read("big", limit=1 << 25)) == 20_000_000
    with pytest.raises(OSError, match="more than 4 bytes"):
        box.read("a/b.txt", limit=4)
    assert box.read("a/b.txt", limit=5) == b"hello"


def test_collect_is_data_and_follows_nothing(make: Make) -> None:
    box = make(files=FILES)
    box.exec(["sh", "-c", "mkfifo pipe; ln -s / up; mkdir d; ln -s ../../../etc/passwd d/out"])
    box.kill_all()
    link = 0o777
    assert box.collect() == {
        "a": Entry("dir", mode=0o755),
        "a/b.txt": Entry("file", b"hello"),
        "d": Entry("dir", mode=0o755),
        "d/out": Entry("link", b"../../../etc/passwd", link),
        "pipe": Entry("special", mode=0o644),
        "run.sh": Entry("file", b"echo hi\n", 0o755),
        "to": Entry("link", b"a/b.txt", link),
        "up": Entry("link", b"/", link),
    }
    assert box.collect("a") == {"b.txt": Entry("file", b"hello")}
    assert box.collect("run.sh") == {"": Entry("file", b"echo hi\n", 0o755)}
    assert box.collect("to") == {"": Entry("link", b"a/b.txt", link)}
    for outside in ("up/etc", "../etc", "d/out", "missing"):
        try:
            collected = box.collect(outside)
        except OSError:
            continue
        assert [entry.kind for entry in collected.values()] == ["link"]


def test_modes_that_shut_out_their_owner_hide_nothing(make: Make) -> None:
    box = make(files={"a/b": "x", "c/d": "y", "e": "z"})
    open_box = box.collect()
    assert box.exec(["sh", "-c", "chmod 0 a/b e; chmod 400 a; chmod 0 c; chmod 0 ."]).ok
    box.kill_all()
    collected, digest = box.collect(), box.digest()
    assert {path: entry.content for path, entry in collected.items()} == {p: e.content for p, e in open_box.items()}
    assert {path: entry.mode for path, entry in collected.items()} == {
        "a": 0o400,
        "a/b": 0,
        "c": 0,
        "c/d": 0o644,
        "e": 0,
    }
    assert box.digest() == digest


def test_collect_has_limits(make: Make) -> None:
    box = make()
    box.exec(["sh", "-c", "head -c 3000 /dev/zero > big; for i in 1 2 3 4 5; do : > $i; done; truncate -s 90M sparse"])
    box.kill_all()
    with pytest.raises(AgentError, match="bytes"):
        box.collect()
    with pytest.raises(AgentError, match="more than 3 files"):
        box.collect(max_files=3)
    assert len(box.collect("big")[""].content) == 3000


def test_after_kill_all_nothing_runs(make: Make) -> None:
    box = make()
    box.kill_all()
    with pytest.raises(SandboxError):
        box.exec(["true"])
    box.close()
    box.close()


def test_ledger_tells_what_changed(make: Make) -> None:
    box = make(files=FILES)
    box.exec(["sh", "-c", "rm -r a; echo more >> run.sh; echo x > made"])
    box.exec(["sleep", "9"], timeout=0.1)
    box.kill_all()
    ledger = box.ledger()
    names = {kind: ledger[kind] for kind in ("created", "changed", "deleted")}
    assert names == {"created": ["made"], "changed": ["run.sh"], "deleted": ["a", "a/b.txt"]}
    assert (ledger["execs"], ledger["failures"], ledger["timeouts"]) == (2, 1, 1)


def test_shell_keeps_directory_variables_and_jobs(make: Make) -> None:
    shell = make(files=FILES).shell()
    first = shell.run("cd a; X=5; sleep 60 & echo on")
    second = shell.run("echo $X; cat b.txt; jobs | wc -l\nfalse")
    assert (first.stdout, second.stdout, second.exit_code) == (b"on\n", b"5\nhello1\n", 1)
    assert shell.run("echo 'open").exit_code == 2
    assert shell.run("exit 4").exit_code == 4
    after = shell.run("basename $PWD")
    assert after.stderr == b"[the shell had ended; this is a new one]\n" and after.exit_code == 0
    assert shell.run("printf '%s' \"$X\"").stdout == b""
    shell.close()


def test_shell_survives_forged_answers(make: Make) -> None:
    shell = make().shell()
    shell.run("(for n in 3 4 10 11 12; do printf '0 ' >&$n; done) 2>/dev/null; true")
    assert shell.run("false").exit_code == 1
    shell.close()


def test_snapshot_and_fork_are_exact(make: Make) -> None:
    box = make(files=FILES)
    box.exec(
        ["sh", "-c", "mkfifo f; ln run.sh hard; truncate -s 40M hole; chmod 0 a/b.txt; chmod 2750 a; : > 'new\nline'"]
    )
    name, digest = box.snapshot(), box.digest()
    box.exec(["sh", "-c", "chmod 755 a; rm -r a hard hole"])
    twin = box.fork(name)
    try:
        assert twin.digest() == digest != box.digest()
        assert twin.exec(["sh", "-c", "stat -c %h run.sh; stat -c '%s %b' hole"]).stdout == b"2\n41943040 0\n"
    finally:
        twin.close()
    with pytest.raises(ValueError, match="no snapshot 'nope'"):
        box.fork("nope")


def test_async_face(make: Make) -> None:
    box = make()

    async def talk() -> list[bytes]:
        results = await asyncio.gather(*(box.aio.exec(["echo", str(n)]) for n in range(8)))
        return [result.stdout for result in results]

    async def shell() -> bytes:
        session = await box.aio.shell()
        await session.run("X=1")
        result = await session.run("echo $X")
        await session.close()
        return result.stdout

    assert asyncio.run(talk()) == [b"%d\n" % n for n in range(8)]
    assert asyncio.run(shell()) == b"1\n"
    assert asyncio.run(box.aio.ledger())["execs"] == 10


def test_same_digest_on_every_backend(namespace: Backend, backend: Backend) -> None:
    spec = SandboxSpec(files=FILES)
    with namespace.create(spec) as one, backend.create(spec) as two:
        assert one.digest() == two.digest()


def test_a_box_can_be_held_to_certain_programs(isolated: Make) -> None:
    box = isolated(
        tools=("sh", "cat", "no-such-program"), files={"run.sh": Entry(content=b"#!/bin/sh\nls\n", mode=0o755)}
    )
    assert box.exec(["cat", "run.sh"]).stdout == b"#!/bin/sh\nls\n"
    for argv in (["ls"], ["/usr/bin/ls"], ["./run.sh"], ["python3", "-c", "1"]):
        assert (box.exec(argv).exit_code, box.exec(argv).stdout) == (126, b""), argv
    assert box.exec(["sh", "run.sh"]).exit_code == 126
    assert box.shell().run("echo still; ls").exit_code == 126
    started = "import subprocess\ntry: subprocess.run(['ls'])\nexcept OSError as error: print(type(error).__name__)"
    assert box.python(started).stdout == b"PermissionError\n"
    assert isolated().exec(["ls"]).ok
    for wrong in ("/bin/sh", ""):
        with pytest.raises(AuthoringError, match="plain name"):
            SandboxSpec(tools=(wrong,))


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a//b", "x\0y"])
def test_a_spec_cannot_leave_its_workspace(path: str) -> None:
    with pytest.raises(AuthoringError):
        SandboxSpec(files={path: "x"})


def test_process_backend_says_that_it_isolates_nothing(process: Backend) -> None:
    from agentrl.sandboxes.process import ProcessBackend

    assert process.safe is False and process.available().isolates == ()
    with pytest.warns(UserWarning, match="isolates NOTHING"):
        ProcessBackend().create(SandboxSpec()).close()
