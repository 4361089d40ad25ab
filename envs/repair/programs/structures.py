"""Reference programs: data structures, as classes."""

from __future__ import annotations

import random

from ..program import Probe, Program, steps, word


def _cache(rng: random.Random) -> Probe:
    ops: list[tuple[object, ...]] = [("Cache", rng.randint(1, 3))]
    for number in range(rng.randint(3, 10)):
        key = rng.choice("abcd")
        ops.append((".put", key, number) if rng.random() < 0.5 else (".get", key))
    return steps(*ops, (".keys",))


CACHE = Program(
    name="cache",
    kind="structures",
    source='''\
class Cache:
    """Keeps the values of the `capacity` keys that were used last; `put` and `get` both count as use."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.values = {}

    def put(self, key, value):
        """Store a value; when there are too many keys, forget the one unused for longest."""
        self.values.pop(key, None)
        self.values[key] = value
        if len(self.values) > self.capacity:
            oldest = next(iter(self.values))
            del self.values[oldest]

    def get(self, key):
        """The value, or None when it is unknown or forgotten."""
        if key not in self.values:
            return None
        value = self.values.pop(key)
        self.values[key] = value
        return value

    def keys(self):
        """The keys, the one unused for longest first."""
        return list(self.values)
''',
    edges=(
        steps(("Cache", 1), (".put", "a", 1), (".put", "b", 2), (".get", "a"), (".get", "b")),
        steps(("Cache", 2), (".put", "a", 1), (".put", "b", 2), (".get", "a"), (".put", "c", 3), (".keys",)),
        steps(("Cache", 2), (".put", "a", 1), (".put", "b", 2), (".put", "a", 3), (".put", "c", 4), (".keys",)),
        steps(("Cache", 2), (".get", "a"), (".keys",)),
    ),
    draw=_cache,
)


def _ring(rng: random.Random) -> Probe:
    ops: list[tuple[object, ...]] = [("Ring", rng.randint(1, 3))]
    for number in range(rng.randint(3, 10)):
        ops.append(rng.choice([(".push", number), (".push", number), (".pop",), (".items",)]))
    return steps(*ops, (".items",), (".full",))


RING = Program(
    name="ring",
    kind="structures",
    source='''\
class Ring:
    """A queue in a list of fixed size: when it is full, a new item takes the place of the oldest."""

    def __init__(self, size):
        self.slots = [None] * size
        self.start = 0
        self.count = 0

    def push(self, item):
        """Add an item; returns the one it pushed out, or None."""
        size = len(self.slots)
        at = (self.start + self.count) % size
        if self.count == size:
            lost = self.slots[self.start]
            self.start = (self.start + 1) % size
        else:
            lost = None
            self.count += 1
        self.slots[at] = item
        return lost

    def pop(self):
        """Take out the oldest item; IndexError when there is none."""
        if self.count == 0:
            raise IndexError("the ring is empty")
        item = self.slots[self.start]
        self.start = (self.start + 1) % len(self.slots)
        self.count -= 1
        return item

    def items(self):
        """All items, the oldest first."""
        size = len(self.slots)
        return [self.slots[(self.start + i) % size] for i in range(self.count)]

    def full(self):
        """Whether the next push pushes something out."""
        return self.count == len(self.slots)
''',
    edges=(
        steps(("Ring", 2), (".pop",)),
        steps(("Ring", 2), (".push", 1), (".push", 2), (".full",), (".push", 3), (".items",), (".pop",), (".items",)),
        steps(("Ring", 1), (".push", 1), (".pop",), (".push", 2), (".items",), (".full",)),
        steps(("Ring", 3), (".push", 1), (".full",), (".items",)),
    ),
    draw=_ring,
)


def _trie(rng: random.Random) -> Probe:
    ops: list[tuple[object, ...]] = [("Trie",)]
    for _ in range(rng.randint(2, 6)):
        ops.append((".add", word(rng, "ab", 1, 3)))
    for _ in range(4):
        ops.append((rng.choice([".has", ".starting", ".count"]), word(rng, "ab", 0, 3)))
    return steps(*ops)


TRIE = Program(
    name="trie",
    kind="structures",
    source='''\
class Trie:
    """A set of words, kept letter by letter."""

    def __init__(self):
        self.children = {}
        self.ends = False

    def add(self, word):
        """Add a word; returns whether it is new."""
        node = self
        for letter in word:
            node = node.children.setdefault(letter, Trie())
        new = not node.ends
        node.ends = True
        return new

    def find(self, prefix):
        """The node below which all words with this beginning lie, or None."""
        node = self
        for letter in prefix:
            if letter not in node.children:
                return None
            node = node.children[letter]
        return node

    def has(self, word):
        """Whether exactly this word was added."""
        node = self.find(word)
        return node is not None and node.ends

    def starting(self, prefix):
        """All words with this beginning, in alphabetical order."""
        node = self.find(prefix)
        if node is None:
            return []
        words = [prefix] if node.ends else []
        for letter in sorted(node.children):
            words += self.starting(prefix + letter)
        return words

    def count(self, prefix):
        """How many words have this beginning."""
        return len(self.starting(prefix))
''',
    edges=(
        steps(("Trie",), (".has", ""), (".starting", ""), (".count", "a")),
        steps(("Trie",), (".add", "ab"), (".add", "ab"), (".has", "a"), (".has", "ab"), (".has", "abc")),
        steps(("Trie",), (".add", "b"), (".add", "a"), (".add", "ab"), (".starting", ""), (".starting", "a")),
        steps(("Trie",), (".add", "ab"), (".add", "abc"), (".count", "ab"), (".starting", "x")),
    ),
    draw=_trie,
)


def _union(rng: random.Random) -> Probe:
    size = rng.randint(2, 6)
    ops: list[tuple[object, ...]] = [("Groups", size)]
    for _ in range(rng.randint(2, 6)):
        ops.append((".join", rng.randrange(size), rng.randrange(size)))
        ops.append(
            rng.choice([(".together", rng.randrange(size), rng.randrange(size)), (".size", rng.randrange(size))])
        )
    return steps(*ops, (".count",))


GROUPS = Program(
    name="grouping",
    kind="structures",
    source='''\
class Groups:
    """The numbers 0 to n - 1, each in a group of its own until groups are joined."""

    def __init__(self, n):
        self.parent = list(range(n))
        self.members = [1] * n
        self.groups = n

    def root(self, a):
        """The number that stands for a's group."""
        while self.parent[a] != a:
            a = self.parent[a]
        return a

    def join(self, a, b):
        """Join two groups; returns False when they were one already."""
        a, b = self.root(a), self.root(b)
        if a == b:
            return False
        self.parent[b] = a
        self.members[a] += self.members[b]
        self.groups -= 1
        return True

    def together(self, a, b):
        """Whether both are in one group."""
        return self.root(a) == self.root(b)

    def size(self, a):
        """How many numbers a's group has."""
        return self.members[self.root(a)]

    def count(self):
        """How many groups there are."""
        return self.groups
''',
    edges=(
        steps(("Groups", 3), (".count",), (".together", 0, 1), (".together", 1, 1), (".size", 2)),
        steps(("Groups", 4), (".join", 0, 1), (".join", 1, 0), (".join", 2, 3), (".size", 3), (".count",)),
        steps(("Groups", 5), (".join", 1, 2), (".join", 3, 2), (".size", 1), (".together", 3, 1), (".count",)),
        steps(("Groups", 5), (".join", 0, 1), (".join", 2, 3), (".join", 1, 3), (".size", 0), (".together", 0, 2)),
    ),
    draw=_union,
)


def _heap(rng: random.Random) -> Probe:
    ops: list[tuple[object, ...]] = [("Heap",)]
    for _ in range(rng.randint(4, 12)):
        ops.append((".push", rng.randint(0, 9)) if rng.random() < 0.65 else (rng.choice([".pop", ".least"]),))
    return steps(*ops, *[(".pop",)] * 4)


HEAP = Program(
    name="heap",
    kind="structures",
    source='''\
class Heap:
    """Numbers of which the least can be taken out quickly: none is greater than those at 2i + 1 and 2i + 2."""

    def __init__(self):
        self.items = []

    def push(self, number):
        """Add a number; returns how many there are now."""
        items = self.items
        items.append(number)
        i = len(items) - 1
        while i > 0 and items[(i - 1) // 2] > items[i]:
            parent = (i - 1) // 2
            items[i], items[parent] = items[parent], items[i]
            i = parent
        return len(items)

    def pop(self):
        """Take out the least number; IndexError when there is none."""
        items = self.items
        if not items:
            raise IndexError("the heap is empty")
        least, last = items[0], items.pop()
        if items:
            items[0] = last
            self.sink(0)
        return least

    def sink(self, i):
        items = self.items
        while 2 * i + 1 < len(items):
            child = 2 * i + 1
            if child + 1 < len(items) and items[child + 1] < items[child]:
                child += 1
            if items[i] <= items[child]:
                break
            items[i], items[child] = items[child], items[i]
            i = child

    def least(self):
        """The least number without taking it out, or None."""
        return self.items[0] if self.items else None
''',
    edges=(
        steps(("Heap",), (".pop",)),
        steps(("Heap",), (".least",), (".push", 2), (".push", 1), (".least",), (".pop",), (".pop",)),
        steps(("Heap",), *[(".push", n) for n in (5, 4, 3, 2, 1)], *[(".pop",)] * 5),
        steps(("Heap",), *[(".push", n) for n in (1, 5, 2, 6, 7, 3, 4)], *[(".pop",)] * 7),
        steps(("Heap",), *[(".push", n) for n in (1, 2, 9, 4, 3, 10)], *[(".pop",)] * 6),
        steps(("Heap",), *[(".push", n) for n in (1, 3, 2, 7, 6, 5, 4, 9, 8, 8)], *[(".pop",)] * 10),
        steps(("Heap",), *[(".push", n) for n in (1, 2, 8, 3, 4, 9, 9, 5, 6, 7, 7, 7)], *[(".pop",)] * 12),
    ),
    draw=_heap,
    others=(
        "import bisect\n\n\nclass Heap:\n"
        '    """A sorted list does it as well."""\n\n'
        "    def __init__(self):\n        self.items = []\n\n"
        "    def push(self, number):\n        bisect.insort(self.items, number)\n        return len(self.items)\n\n"
        "    def pop(self):\n        return self.items.pop(0)\n\n"
        "    def least(self):\n        return self.items[0] if self.items else None\n",
    ),
)


def _history(rng: random.Random) -> Probe:
    ops: list[tuple[object, ...]] = [("History", rng.randint(1, 3))]
    for _ in range(rng.randint(3, 10)):
        ops.append(
            rng.choice([(".do", word(rng, "abc", 1, 1)), (".do", word(rng, "abc", 1, 1)), (".undo",), (".redo",)])
        )
    return steps(*ops, (".text",))


HISTORY = Program(
    name="history",
    kind="structures",
    source='''\
class History:
    """A text that grows, with undo and redo; at most `depth` steps can be undone."""

    def __init__(self, depth):
        self.depth = depth
        self.now = ""
        self.past = []
        self.future = []

    def do(self, addition):
        """Add to the text; what was undone before cannot be redone any more. Returns the text."""
        self.past.append(self.now)
        if len(self.past) > self.depth:
            self.past.pop(0)
        self.future.clear()
        self.now += addition
        return self.now

    def undo(self):
        """Go one step back; returns False when that is not possible."""
        if not self.past:
            return False
        self.future.append(self.now)
        self.now = self.past.pop()
        return True

    def redo(self):
        """Take back one undo; returns False when there is none."""
        if not self.future:
            return False
        self.past.append(self.now)
        self.now = self.future.pop()
        return True

    def text(self):
        return self.now
''',
    edges=(
        steps(("History", 2), (".undo",), (".redo",), (".text",)),
        steps(("History", 2), (".do", "a"), (".do", "b"), (".do", "c"), (".undo",), (".undo",), (".undo",), (".text",)),
        steps(("History", 3), (".do", "a"), (".undo",), (".do", "b"), (".redo",), (".text",)),
        steps(("History", 3), (".do", "a"), (".do", "b"), (".undo",), (".undo",), (".redo",), (".text",), (".undo",)),
    ),
    draw=_history,
)

PROGRAMS = (CACHE, RING, TRIE, GROUPS, HEAP, HISTORY)
