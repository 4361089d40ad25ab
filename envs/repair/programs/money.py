"""Reference programs: money, in whole cents."""

from __future__ import annotations

import random

from ..program import Probe, Program, call, numbers


def _split(rng: random.Random) -> Probe:
    return call("split", rng.choice([1, 1, -1]) * rng.randint(0, 500), numbers(rng, 1, 4, 1, 4))


SPLIT = Program(
    name="split",
    kind="money",
    source='''\
def split(cents, shares):
    """Divide an amount in proportion to whole shares; the parts add up to it exactly.

    Every part is first rounded towards zero. Cents left over go one each to the first parts, in order. A negative
    amount is divided like the positive one, with the sign in front of every part.
    """
    sign = -1 if cents < 0 else 1
    amount, total = abs(cents), sum(shares)
    parts = [amount * share // total for share in shares]
    for i in range(amount - sum(parts)):
        parts[i] += 1
    return [sign * part for part in parts]
''',
    edges=(
        call("split", 100, [1, 1, 1]),
        call("split", -100, [1, 1, 1]),
        call("split", 0, [1, 2]),
        call("split", 5, [3]),
        call("split", 2, [1, 1, 1]),
        call("split", 101, [3, 1]),
    ),
    draw=_split,
)


def _amount(rng: random.Random) -> Probe:
    cents = rng.choice([rng.randint(0, 999), rng.randint(0, 99_999), rng.randint(0, 9_999_999)])
    return call("written", rng.choice([1, 1, -1]) * cents)


WRITTEN = Program(
    name="written",
    kind="money",
    source='''\
def written(cents):
    """An amount of cents as people write it: written(-123456) == "-1,234.56"."""
    units, rest = divmod(abs(cents), 100)
    digits = str(units)
    groups = []
    while digits:
        groups.insert(0, digits[-3:])
        digits = digits[:-3]
    sign = "-" if cents < 0 else ""
    return f"{sign}{','.join(groups)}.{rest:02}"
''',
    edges=(
        call("written", 0),
        call("written", 5),
        call("written", -123456),
        call("written", 100000),
        call("written", 99999),
        call("written", 123456789),
        call("written", -1),
    ),
    draw=_amount,
    others=(
        "def written(cents):\n    sign = '-' if cents < 0 else ''\n"
        "    return f'{sign}{abs(cents) // 100:,}.{abs(cents) % 100:02}'\n",
    ),
)


def _prices(rng: random.Random) -> Probe:
    text = rng.choice(["", "-", "", "+"]) + str(rng.randint(0, 3000))
    if rng.random() < 0.3:
        text = f"{rng.randint(1, 9)},{rng.randint(0, 999):03}"
    text += rng.choice(["", ".5", ".05", ".50", ".123", ".", ".x"])
    return call("cents", rng.choice(["", " ", ""]) + text)


PRICES = Program(
    name="prices",
    kind="money",
    source='''\
def cents(text):
    """Cents of an amount such as "3", "-0.5", "1,234.50"; spaces around it do not matter.

    After the point there may be one or two digits ("0.5" is fifty cents). Commas in front of the point are skipped.
    Anything else, a "+" or a point without digits after it included, raises ValueError.
    """
    text = text.strip()
    negative = text.startswith("-")
    if negative:
        text = text[1:]
    units, point, rest = text.partition(".")
    units = units.replace(",", "")
    if not units.isdigit():
        raise ValueError("no amount")
    if point and not (rest.isdigit() and len(rest) <= 2):
        raise ValueError("one or two digits after the point")
    total = int(units) * 100 + int((rest + "00")[:2])
    return -total if negative else total
''',
    edges=(
        call("cents", "3"),
        call("cents", "-0.5"),
        call("cents", "1,234.50"),
        call("cents", " 7.05 "),
        call("cents", ""),
        call("cents", "+1"),
        call("cents", "1."),
        call("cents", "1.123"),
        call("cents", ".5"),
        call("cents", "1.x"),
        call("cents", "--1"),
        call("cents", "9.99"),
    ),
    draw=_prices,
)


def _income(rng: random.Random) -> Probe:
    bounds = sorted(rng.sample(range(100, 5000, 100), rng.randint(0, 3)))
    return call("tax", rng.choice([rng.randint(0, 6000), *bounds]), [[b, rng.randint(1, 30)] for b in [0, *bounds]])


TAX = Program(
    name="tax",
    kind="money",
    source='''\
def tax(income, bands):
    """Income tax in cents. Each band [from, percent] taxes only what lies above `from`, up to the next band.

    Bands are sorted. The tax of each band is rounded down to whole cents.
    """
    total = 0
    for i, (start, percent) in enumerate(bands):
        end = bands[i + 1][0] if i + 1 < len(bands) else income
        taxed = min(income, end) - start
        if taxed > 0:
            total += taxed * percent // 100
    return total
''',
    edges=(
        call("tax", 0, [[0, 10]]),
        call("tax", 1000, [[0, 10]]),
        call("tax", 1000, [[0, 0], [500, 20]]),
        call("tax", 999, [[0, 10], [300, 20], [900, 33]]),
        call("tax", 100, [[0, 10], [500, 20]]),
        call("tax", 501, [[0, 10], [500, 50], [600, 90]]),
        call("tax", 601, [[0, 10], [500, 50], [600, 100]]),
    ),
    draw=_income,
)


def _basket(rng: random.Random) -> Probe:
    items = [[rng.choice("abc"), rng.randint(1, 4), rng.randint(50, 1500)] for _ in range(rng.randint(0, 4))]
    return call("total", items, rng.choice([0, 5, 10, 33]), rng.choice([0, 1000, 3000]))


BASKET = Program(
    name="basket",
    kind="money",
    source='''\
SHIPPING = 495


def line_total(count, price):
    """Cents for `count` pieces at a price: of every three pieces one is free."""
    return (count - count // 3) * price


def total(items, percent, free_from):
    """Cents for a basket of [name, count, price in cents].

    The sum of its lines, less `percent` per cent rounded down to whole cents, plus 495 for shipping unless what is
    left comes to at least `free_from`. An empty basket costs nothing.
    """
    if not items:
        return 0
    goods = sum(line_total(count, price) for _, count, price in items)
    goods -= goods * percent // 100
    if goods < free_from:
        goods += SHIPPING
    return goods
''',
    edges=(
        call("total", [], 10, 1000),
        call("total", [["a", 3, 500]], 0, 1000),
        call("total", [["a", 1, 999]], 0, 1000),
        call("total", [["a", 1, 1005], ["b", 2, 33]], 10, 1000),
        call("total", [["a", 1, 1000]], 10, 1000),
        call("total", [["a", 1, 1000]], 33, 0),
        call("line_total", 2, 100),
        call("line_total", 3, 100),
        call("line_total", 7, 100),
    ),
    draw=_basket,
)


def _rounding(rng: random.Random) -> Probe:
    if rng.random() < 0.5:
        return call("divide", rng.randint(-60, 60), rng.choice([2, 3, 4, 8, 10]))
    return call("convert", rng.randint(0, 5000), rng.randint(1, 20_000))


ROUNDING = Program(
    name="rounding",
    kind="money",
    source='''\
def divide(amount, by):
    """amount / by as a whole number; a half is rounded to the even neighbour. `by` is positive."""
    whole, rest = divmod(amount, by)
    if 2 * rest > by or (2 * rest == by and whole % 2 == 1):
        whole += 1
    return whole


def convert(cents, rate):
    """Cents in another currency, at a rate given in ten-thousandths (12345 means 1.2345); a half goes to the even."""
    return divide(cents * rate, 10000)
''',
    edges=(
        call("divide", 5, 2),
        call("divide", 7, 2),
        call("divide", -5, 2),
        call("divide", -7, 2),
        call("divide", 1, 3),
        call("divide", 2, 3),
        call("divide", 0, 4),
        call("convert", 100, 12345),
        call("convert", 5000, 10001),
        call("convert", 5000, 10003),
    ),
    draw=_rounding,
    others=(
        "from fractions import Fraction\n\n\ndef divide(amount, by):\n    return round(Fraction(amount, by))\n\n\n"
        "def convert(cents, rate):\n    return divide(cents * rate, 10000)\n",
    ),
)


def _loan(rng: random.Random) -> Probe:
    return call("schedule", rng.randint(0, 5000), rng.choice([0, 1, 2, 5]), rng.randint(400, 2500))


LOAN = Program(
    name="loan",
    kind="money",
    source='''\
def schedule(debt, percent, payment):
    """How a debt is paid back: a list of [interest, paid, left], one entry a month, until nothing is left.

    Each month brings `percent` per cent of interest on the debt, rounded down to whole cents; then `payment` is paid,
    or what is left when that is less. ValueError when the payment does not exceed the first month's interest.
    """
    if debt and payment <= debt * percent // 100:
        raise ValueError("the debt would never shrink")
    months = []
    while debt > 0:
        interest = debt * percent // 100
        debt += interest
        paid = min(payment, debt)
        debt -= paid
        months.append([interest, paid, debt])
    return months
''',
    edges=(
        call("schedule", 0, 5, 0),
        call("schedule", 1000, 5, 50),
        call("schedule", 1000, 5, 51 * 20),
        call("schedule", 1000, 0, 500),
        call("schedule", 1000, 10, 600),
        call("schedule", 999, 5, 400),
        call("schedule", 10, 5, 3),
    ),
    draw=_loan,
)

PROGRAMS = (SPLIT, WRITTEN, PRICES, TAX, BASKET, ROUNDING, LOAN)
