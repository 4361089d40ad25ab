"""The one place that derives seeds: every random choice of a run follows from the run's seed and names.

run seed ─┬─ task     (env, split, level, index)
          ├─ reset    (task, group)               shared by a group, kept by a retry
          ├─ sampling (task, group, rollout, turn) differs within a group
          └─ secret   HMAC(run key, task, group)   verifiers only; never in a sandbox, a log or a trajectory
"""

import hashlib
import hmac
import random

Name = str | int


def derive(seed: int, *names: Name) -> int:
    """Return a 63-bit seed that depends on `seed` and on every name, in order.

    Each part is written with its type and length, so `("a", "bc")` and `("ab", "c")`, or `1` and `"1"`, differ.
    """
    written = []
    for part in (seed, *names):
        text = str(part).encode()
        written.append(b"%s:%d:%s" % (type(part).__name__.encode(), len(text), text))
    return int.from_bytes(hashlib.blake2b(b"".join(written), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *names: Name) -> random.Random:
    """Return a `random.Random` seeded by `derive`."""
    return random.Random(derive(seed, *names))


def secret(key: bytes, task_id: str, group: int) -> bytes:
    """Return the verifier's secret for one group of one task; without the run's key it cannot be guessed."""
    return hmac.new(key, f"{len(task_id)}:{task_id}:{group}".encode(), hashlib.sha256).digest()
