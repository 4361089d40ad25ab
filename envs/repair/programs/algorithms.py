"""Reference programs: searching, sorting, counting, dynamic programming."""

from __future__ import annotations

import random

from ..program import Probe, Program, call, numbers


def _search(rng: random.Random) -> Probe:
    items = sorted(numbers(rng, 0, 12, 0, 9))
    return call("find", items, rng.choice([*items, rng.randint(-1, 13)]))


BISECTING = Program(
    name="bisecting",
    kind="algorithms",
    source='''\
def find(items, wanted):
    """Index of the first item equal to `wanted` in a sorted list, or -1 when there is none."""
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    if low < len(items) and items[low] == wanted:
        return low
    return -1
''',
    edges=(
        call("find", [], 1),
        call("find", [1], 1),
        call("find", [1], 2),
        call("find", [2, 2, 2], 2),
        call("find", [1, 3, 5, 7], 7),
        call("find", [1, 3, 5, 7], 1),
    ),
    draw=_search,
    others=(
        'def find(items, wanted):\n    """Found by a plain search."""\n'
        "    return items.index(wanted) if wanted in items else -1\n",
    ),
)


def _intervals(rng: random.Random) -> Probe:
    found = []
    for _ in range(rng.randint(0, 6)):
        start = rng.randint(0, 15)
        found.append([start, start + rng.randint(0, 5)])
    return call("merge", found)


INTERVALS = Program(
    name="intervals",
    kind="algorithms",
    source='''\
def merge(intervals):
    """Merge intervals [start, end] that overlap or touch; the result is a list of lists, sorted by start.

    merge([[5, 8], [1, 3], [3, 4]]) == [[1, 4], [5, 8]]
    """
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged
''',
    edges=(
        call("merge", []),
        call("merge", [[1, 3], [3, 4]]),
        call("merge", [[1, 9], [2, 4]]),
        call("merge", [[0, 1], [5, 9], [6, 7]]),
        call("merge", [[5, 8], [1, 3], [4, 4]]),
        call("merge", [[1, 2], [3, 4]]),
    ),
    draw=_intervals,
)


def _coins(rng: random.Random) -> Probe:
    return call("fewest", rng.sample([1, 2, 3, 4, 5, 7, 10], rng.randint(1, 3)), rng.randint(0, 30))


COINS = Program(
    name="coins",
    kind="algorithms",
    source='''\
def fewest(coins, amount):
    """The least number of coins that add up to `amount`, each kind as often as needed; -1 when it cannot be done."""
    best = [0] + [None] * amount
    for total in range(1, amount + 1):
        for coin in coins:
            if coin <= total and best[total - coin] is not None:
                count = best[total - coin] + 1
                if best[total] is None or count < best[total]:
                    best[total] = count
    return -1 if best[amount] is None else best[amount]
''',
    edges=(
        call("fewest", [2], 3),
        call("fewest", [5], 0),
        call("fewest", [1, 3, 4], 6),
        call("fewest", [7], 7),
        call("fewest", [1, 10, 7], 14),
    ),
    draw=_coins,
)


def _sack(rng: random.Random) -> Probe:
    items = [[rng.randint(1, 6), rng.randint(1, 9)] for _ in range(rng.randint(0, 5))]
    return call("best_value", items, rng.randint(0, 14))


KNAPSACK = Program(
    name="knapsack",
    kind="algorithms",
    source='''\
def best_value(items, capacity):
    """The greatest total value of items [weight, value], each taken at most once, of total weight up to `capacity`."""
    best = [0] * (capacity + 1)
    for weight, value in items:
        for room in range(capacity, weight - 1, -1):
            best[room] = max(best[room], best[room - weight] + value)
    return best[capacity]
''',
    edges=(
        call("best_value", [], 5),
        call("best_value", [[1, 5]], 3),
        call("best_value", [[3, 4], [2, 3], [2, 3]], 4),
        call("best_value", [[5, 9]], 5),
        call("best_value", [[1, 1]], 0),
        call("best_value", [[6, 9]], 5),
    ),
    draw=_sack,
)

RISING = Program(
    name="rising",
    kind="algorithms",
    source='''\
def longest_rising(numbers):
    """Length of the longest strictly rising subsequence (not necessarily of neighbours)."""
    lengths = []
    for i, number in enumerate(numbers):
        before = [lengths[j] for j in range(i) if numbers[j] < number]
        lengths.append(1 + max(before, default=0))
    return max(lengths, default=0)
''',
    edges=(
        call("longest_rising", []),
        call("longest_rising", [3]),
        call("longest_rising", [3, 3, 3]),
        call("longest_rising", [1, 5, 2, 3]),
        call("longest_rising", [5, 4, 3]),
    ),
    draw=lambda rng: call("longest_rising", numbers(rng, 0, 9, 0, 9)),
)

SIEVE = Program(
    name="sieve",
    kind="algorithms",
    source='''\
def primes(limit):
    """All primes up to and including `limit`, in rising order."""
    composite = set()
    found = []
    for number in range(2, limit + 1):
        if number in composite:
            continue
        found.append(number)
        for multiple in range(number * number, limit + 1, number):
            composite.add(multiple)
    return found
''',
    edges=(call("primes", 1), call("primes", 2), call("primes", 0), call("primes", 9), call("primes", 49)),
    draw=lambda rng: call("primes", rng.randint(3, 60)),
    others=(
        'def primes(limit):\n    """By trial division."""\n'
        "    return [n for n in range(2, limit + 1) if all(n % d for d in range(2, n))]\n",
    ),
)


def _base(rng: random.Random) -> Probe:
    base = rng.choice([2, 3, 7, 8, 10, 12, 16])
    if rng.random() < 0.6:
        return call("to_base", rng.choice([-1, 1, 1]) * rng.randint(0, 500), base)
    sign = rng.choice(["", "", "-"])
    return call("from_base", sign + "".join(rng.choices("0123456789abcdef"[:base], k=rng.randint(1, 4))), base)


BASES = Program(
    name="bases",
    kind="algorithms",
    source='''\
DIGITS = "0123456789abcdef"


def to_base(number, base):
    """The number written in a base from 2 to 16, with a leading - when it is negative; 0 gives "0"."""
    if number == 0:
        return "0"
    rest, digits = abs(number), ""
    while rest:
        rest, digit = divmod(rest, base)
        digits = DIGITS[digit] + digits
    return "-" + digits if number < 0 else digits


def from_base(text, base):
    """The whole number that `to_base` would write like this."""
    negative = text.startswith("-")
    number = 0
    for char in text.lstrip("-"):
        number = number * base + DIGITS.index(char)
    return -number if negative else number
''',
    edges=(
        call("to_base", 0, 2),
        call("to_base", -5, 2),
        call("to_base", 255, 16),
        call("to_base", 0xFEDCBA98, 16),
        call("to_base", 0x76543210, 16),
        call("to_base", 1, 2),
        call("from_base", "-ff", 16),
        call("from_base", "0", 3),
        call("from_base", "fedcba98", 16),
        call("from_base", "-10", 2),
    ),
    draw=_base,
)


def _sort(rng: random.Random) -> Probe:
    return call("sort", [[rng.choice("abc"), rng.randint(0, 4)] for _ in range(rng.randint(0, 8))])


STABLE = Program(
    name="stable",
    kind="algorithms",
    source='''\
def merge(left, right):
    """Merge two lists of [name, score], each by falling score; of equal scores those from `left` come first."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i][1] >= right[j][1]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]


def sort(entries):
    """Sort a list of [name, score] by falling score; entries with equal scores keep their order."""
    if len(entries) < 2:
        return entries
    middle = len(entries) // 2
    return merge(sort(entries[:middle]), sort(entries[middle:]))
''',
    edges=(
        call("sort", []),
        call("sort", [["a", 1]]),
        call("sort", [["a", 1], ["b", 2]]),
        call("sort", [["a", 1], ["b", 1], ["c", 1]]),
        call("merge", [["a", 3], ["b", 1]], [["c", 3], ["d", 2]]),
        call("merge", [], [["c", 3]]),
    ),
    draw=_sort,
    others=(
        'def merge(left, right):\n    """Both together."""\n    return sort(left + right)\n\n\n'
        'def sort(entries):\n    """Python\'s sort is stable."""\n'
        "    return sorted(entries, key=lambda entry: -entry[1])\n",
    ),
)


def _spiral(rng: random.Random) -> Probe:
    rows, columns = rng.randint(1, 4), rng.randint(1, 4)
    return call("spiral", [[rng.randint(0, 99) for _ in range(columns)] for _ in range(rows)])


SPIRAL = Program(
    name="spiral",
    kind="algorithms",
    source='''\
def spiral(grid):
    """The numbers of a rectangular grid in a spiral: clockwise from the top left corner to the inside."""
    top, bottom, left, right = 0, len(grid) - 1, 0, len(grid[0]) - 1
    found = []
    while top <= bottom and left <= right:
        found += [grid[top][x] for x in range(left, right + 1)]
        found += [grid[y][right] for y in range(top + 1, bottom + 1)]
        if top < bottom and left < right:
            found += [grid[bottom][x] for x in range(right - 1, left - 1, -1)]
            found += [grid[y][left] for y in range(bottom - 1, top, -1)]
        top, bottom, left, right = top + 1, bottom - 1, left + 1, right - 1
    return found
''',
    edges=(
        call("spiral", [[1]]),
        call("spiral", [[1, 2, 3]]),
        call("spiral", [[1], [2], [3]]),
        call("spiral", [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]),
        call("spiral", [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        call("spiral", [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15]]),
    ),
    draw=_spiral,
)


def _window(rng: random.Random) -> Probe:
    found = numbers(rng, -6, 9, 1, 9)
    return call("best_window", found, rng.randint(1, len(found)))


WINDOW = Program(
    name="window",
    kind="algorithms",
    source='''\
def best_window(numbers, size):
    """Start of the `size` neighbouring numbers with the greatest sum; of equal sums the first."""
    total = sum(numbers[:size])
    best, start = total, 0
    for i in range(size, len(numbers)):
        total += numbers[i] - numbers[i - size]
        if total > best:
            best, start = total, i - size + 1
    return start
''',
    edges=(
        call("best_window", [1], 1),
        call("best_window", [1, 1, 1], 2),
        call("best_window", [1, 2, 3], 1),
        call("best_window", [3, 2, 1, 9], 2),
        call("best_window", [-3, -2, -1], 2),
    ),
    draw=_window,
)

PROGRAMS = (BISECTING, INTERVALS, COINS, KNAPSACK, RISING, SIEVE, BASES, STABLE, SPIRAL, WINDOW)
