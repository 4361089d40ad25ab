"""The pool hands out fresh boxes, within its bounds, to threads and to any number of event loops."""

import asyncio
import threading
import time
from typing import Any

import pytest

from agentrl.errors import SandboxError, UserError
from agentrl.sandboxes import Backend, Limits, Sandbox, SandboxSpec
from agentrl.sandboxes.pool import Pool

SPEC = SandboxSpec(files={"a/b": "c"}, env={"X": "1"})


class Borrowed:
    """A backend that counts, and that a pool may close without closing the one it borrows from."""

    name, safe = "borrowed", True

    def __init__(self, backend: Backend) -> None:
        self.backend, self.made, self.live, self.peak = backend, 0, 0, 0
        self.lock = threading.Lock()
        self.closers: set[threading.Thread] = set()

    def _count(self, box: Any) -> Any:
        close = box.close
        done: list[bool] = []

        def counted() -> None:
            with self.lock:
                if not done:
                    self.closers.add(threading.current_thread())
                    done.append(True)
                    self.live -= 1
            close()

        with self.lock:
            self.made, self.live = self.made + 1, self.live + 1
            self.peak = max(self.peak, self.live)
        box.close = counted
        return box

    def create(self, spec: SandboxSpec) -> Sandbox:
        return self._count(self.backend.create(spec))  # type: ignore[no-any-return]

    def prepare(self, spec: SandboxSpec) -> Sandbox | None:
        return self._count(self.backend.prepare(spec))  # type: ignore[no-any-return]

    def close(self) -> None: ...


@pytest.fixture
def borrowed(namespace: Backend) -> Any:
    return Borrowed(namespace)


def test_several_event_loops_and_threads_share_one_pool(borrowed: Any) -> None:
    async def one(pool: Pool) -> bytes:
        async with pool.box(SPEC) as box:
            return (await box.aio.exec(["sh", "-c", "cat a/b; echo $X; echo dirt > dirt; ls"])).stdout

    async def many(pool: Pool) -> list[bytes]:
        return await asyncio.gather(*(one(pool) for _ in range(20)))

    with Pool(borrowed, limit=4) as pool:
        for _ in range(2):
            assert asyncio.run(many(pool)) == [b"c1\na\ndirt\n"] * 20
        with pool.take(SPEC) as box:
            assert box.list() == ["a"]
    assert (borrowed.live, borrowed.peak <= 5) == (0, True)


def test_more_waiters_than_threads_do_not_lock_up(borrowed: Any) -> None:
    """700 wait for 2 places while those who hold them still need threads to run in."""

    async def one(pool: Pool) -> int:
        async with pool.box(SPEC) as box:
            return (await box.aio.exec(["true"])).exit_code

    async def many(pool: Pool) -> int:
        tasks = [asyncio.create_task(one(pool)) for _ in range(700)]
        await asyncio.sleep(0.2)
        for task in tasks[8:]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        return sum(result == 0 for result in done)

    with Pool(borrowed, limit=2) as pool:
        assert asyncio.run(many(pool)) >= 2
        with pool.take(SPEC) as box, pool.take(SPEC) as other:  # every place came back
            assert box.exec(["true"]).ok and other.exec(["true"]).ok


def test_prepared_boxes_have_the_digest_of_fresh_ones(borrowed: Any, namespace: Backend) -> None:
    with namespace.create(SPEC) as fresh:
        expected = fresh.digest()
    with Pool(borrowed, limit=6, ahead=2) as pool:
        with pool.take(SPEC):
            pass
        deadline = time.monotonic() + 10
        while pool._prepared() < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        made = borrowed.made
        with pool.take(SPEC) as box:
            assert box.digest() == expected
            assert made == borrowed.made or pool._prepared() >= 1
        other = SandboxSpec(limits=Limits(memory_mb=300))
        with pool.take(other) as box:
            assert box.spec == other


def test_a_prepared_box_that_died_is_not_handed_out(borrowed: Any) -> None:
    with Pool(borrowed, limit=4, ahead=1) as pool:
        with pool.take(SPEC):
            pass
        deadline = time.monotonic() + 10
        while pool._prepared() < 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        for ready in pool._ready.values():
            for waiting in ready:
                waiting.kill_all()
        with pool.take(SPEC) as box:
            assert box.exec(["echo", "well"]).stdout == b"well\n"


def test_a_box_is_destroyed_when_its_block_raises(borrowed: Any) -> None:
    with Pool(borrowed, limit=1, ahead=0) as pool:
        for _ in range(3):
            with pytest.raises(RuntimeError), pool.take(SPEC):
                raise RuntimeError
        assert borrowed.live == 0


def test_cancelled_takers_leave_no_box_behind(borrowed: Any) -> None:
    async def main(pool: Pool) -> None:
        async def one() -> None:
            async with pool.box(SPEC):
                await asyncio.sleep(10)

        tasks = [asyncio.create_task(one()) for _ in range(6)]
        for pause in (0.0, 0.005, 0.02, 0.2):
            await asyncio.sleep(pause)
            tasks.pop().cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        deadline = time.monotonic() + 10
        while pool._places and time.monotonic() < deadline:  # boxes nobody wants any more are still being made
            await asyncio.sleep(0.01)

    with Pool(borrowed, limit=3, ahead=0) as pool:
        asyncio.run(main(pool))
        assert pool._places == 0
    assert borrowed.live == 0


@pytest.mark.parametrize("ends", ["takers", "loop"])
def test_a_sandbox_that_is_being_made_for_nobody_is_closed_off_the_loop(borrowed: Any, ends: str) -> None:
    """Its taker is cancelled, or the whole event loop ends: every place is free soon, and no loop is held up."""
    create, begun = borrowed.create, list[SandboxSpec]()

    def slowly(spec: SandboxSpec) -> Sandbox:
        begun.append(spec)
        time.sleep(0.1)
        return create(spec)  # type: ignore[no-any-return]

    borrowed.create = slowly

    async def main(pool: Pool) -> None:
        async def one() -> None:
            async with pool.box(SPEC):
                await asyncio.sleep(10)

        before = len(begun)
        tasks = [asyncio.create_task(one()) for _ in range(3)]
        while len(begun) < before + len(tasks):
            await asyncio.sleep(0.001)
        if ends == "takers":
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            while pool.held:
                await asyncio.sleep(0.01)

    with Pool(borrowed, limit=3, ahead=0) as pool:
        for _ in range(2):
            asyncio.run(asyncio.wait_for(main(pool), 20))
        deadline = time.monotonic() + 10
        while pool.held and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (pool.held, borrowed.live, borrowed.made) == (0, 0, 6)
        assert threading.current_thread() not in borrowed.closers


def test_bounds(borrowed: Any) -> None:
    with pytest.raises(UserError, match="limit=0"):
        Pool(borrowed, limit=0)
    with Pool(borrowed, limit=8, ahead=4, memory_mb=1100) as pool:
        with pytest.raises(UserError, match="2000 MB"), pool.take(SandboxSpec(limits=Limits(memory_mb=2000))):
            pass
        order: list[int] = []

        def one(number: int) -> None:
            with pool.take(SPEC):
                order.append(number)
                time.sleep(0.05)

        threads = [threading.Thread(target=one, args=(n,)) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(order) == [0, 1, 2, 3, 4]
    assert borrowed.peak <= 3  # two fit, and one more may be in the making


def test_closing_ends_waiters_and_boxes(borrowed: Any) -> None:
    pool = Pool(borrowed, limit=1, ahead=0)
    taken = pool.take(SPEC)
    box = taken.__enter__()
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            with pool.take(SPEC):
                pass
        except SandboxError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    pool.close()
    thread.join(10)
    assert [str(error) for error in failed] == ["the sandbox pool was closed"]
    with pytest.raises(SandboxError):
        box.exec(["true"])
    with pytest.raises(SandboxError, match="closed"), pool.take(SPEC):
        pass


def test_a_backend_that_fails_to_make_a_box_does_not_cost_a_place(borrowed: Any) -> None:
    def broken(spec: SandboxSpec) -> Sandbox:
        raise SandboxError("no boxes today")

    borrowed.create = borrowed.prepare = broken
    with Pool(borrowed, limit=1) as pool:
        for _ in range(3):
            with pytest.raises(SandboxError, match="no boxes today"), pool.take(SPEC):
                pass
