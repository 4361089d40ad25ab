"""Reference programs: calendars and clocks, with plain numbers."""

from __future__ import annotations

import random

from ..program import Probe, Program, call


def _month(rng: random.Random) -> Probe:
    return call("days_in_month", rng.choice([1900, 2000, 2023, 2024, rng.randint(1800, 2200)]), rng.randint(1, 12))


MONTHS = Program(
    name="months",
    kind="dates",
    source='''\
def leap(year):
    """Whether a year has a 29 February: every fourth year, but of the full centuries only every fourth."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in_month(year, month):
    """How many days a month (1 to 12) has."""
    if month == 2:
        return 29 if leap(year) else 28
    return 30 if month in (4, 6, 9, 11) else 31
''',
    edges=(
        *(call("days_in_month", 2023, month) for month in range(1, 13)),
        *(call("leap", year) for year in (1900, 2000, 2024, 2023, 2022, 2100)),
        call("days_in_month", 2024, 2),
    ),
    draw=_month,
    others=(
        "import calendar\n\n\ndef leap(year):\n    return calendar.isleap(year)\n\n\n"
        "def days_in_month(year, month):\n    return calendar.monthrange(year, month)[1]\n",
    ),
)


def _weekday(rng: random.Random) -> Probe:
    return call("weekday", rng.randint(1800, 2200), rng.randint(1, 12), rng.randint(1, 28))


WEEKDAY = Program(
    name="weekday",
    kind="dates",
    source='''\
NAMES = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
BEFORE = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334]


def day_number(year, month, day):
    """Days from 31 December of the year 0 to a date; 1 January of the year 1 has the number 1."""
    past = year - 1
    number = past * 365 + past // 4 - past // 100 + past // 400
    number += BEFORE[month - 1] + day
    if month > 2 and (year % 4 == 0 and year % 100 != 0 or year % 400 == 0):
        number += 1
    return number


def weekday(year, month, day):
    """The day of the week of a date: "Mon" to "Sun". 1 January of the year 1 was a Monday."""
    return NAMES[(day_number(year, month, day) - 1) % 7]
''',
    edges=(
        call("day_number", 1, 1, 1),
        call("day_number", 2000, 12, 31),
        call("day_number", 2001, 1, 1),
        call("day_number", 2023, 10, 5),
        *(call("weekday", 2024, month, 5) for month in range(1, 13)),
        *(call("weekday", year, 3, 1) for year in (1900, 2000, 2100, 2023)),
        call("weekday", 2024, 2, 29),
    ),
    draw=_weekday,
    others=(
        "import datetime\n\n\ndef day_number(year, month, day):\n"
        "    return datetime.date(year, month, day).toordinal()\n\n\n"
        "def weekday(year, month, day):\n"
        '    return ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"][datetime.date(year, month, day).weekday()]\n',
    ),
)


def _later(rng: random.Random) -> Probe:
    date = [rng.choice([1999, 2000, 2023, 2024]), rng.randint(1, 12), rng.choice([1, 15, 28, 29, 30, 31])]
    if date[1] == 2:
        date[2] = min(date[2], 28)
    elif date[1] in (4, 6, 9, 11):
        date[2] = min(date[2], 30)
    return call("add_months", date, rng.randint(-30, 30))


LATER = Program(
    name="later",
    kind="dates",
    source='''\
LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def last_day(year, month):
    """The last day of a month."""
    if month == 2 and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0):
        return 29
    return LENGTHS[month - 1]


def add_months(date, count):
    """The date [year, month, day] `count` months later, or earlier when it is negative.

    Where that month has no such day, its last day is meant: a month after 31 January is the last day of February.
    """
    year, month, day = date
    months = year * 12 + month - 1 + count
    year, month = months // 12, months % 12 + 1
    return [year, month, min(day, last_day(year, month))]
''',
    edges=(
        call("add_months", [2023, 1, 31], 1),
        call("add_months", [2024, 1, 31], 1),
        call("add_months", [2023, 12, 5], 1),
        call("add_months", [2023, 1, 5], -1),
        call("add_months", [2023, 3, 31], 0),
        *(call("last_day", 2023, month) for month in range(1, 13)),
        call("last_day", 1900, 2),
        call("last_day", 2000, 2),
    ),
    draw=_later,
)


def _clock(rng: random.Random) -> Probe:
    def time() -> str:
        return f"{rng.randint(0, 23):02}:{rng.choice([0, 1, 15, 30, 59]):02}"

    if rng.random() < 0.5:
        return call("add", time(), rng.choice([1, -1]) * rng.choice([0, 1, 45, 60, 200, 1500, 3000]))
    return call("between", time(), time())


CLOCK = Program(
    name="clock",
    kind="dates",
    source='''\
def minutes(time):
    """Minutes since midnight of a time "hh:mm"; ValueError when there is no such time."""
    hour, minute = time.split(":")
    hour, minute = int(hour), int(minute)
    if not (0 <= hour < 24 and 0 <= minute < 60):
        raise ValueError(f"no time of day: {time}")
    return hour * 60 + minute


def add(time, count):
    """The time of day `count` minutes later (earlier when negative), as "hh:mm"."""
    total = (minutes(time) + count) % 1440
    return f"{total // 60:02}:{total % 60:02}"


def between(start, end):
    """Minutes from one time to the next time it is the other; 0 when they are the same."""
    return (minutes(end) - minutes(start)) % 1440
''',
    edges=(
        call("minutes", "00:00"),
        call("minutes", "24:00"),
        call("minutes", "23:60"),
        call("minutes", "23:59"),
        call("minutes", "-1:00"),
        call("minutes", "1:-1"),
        call("minutes", "01:01"),
        call("add", "23:59", 1),
        call("add", "00:00", -1),
        call("add", "09:05", 0),
        call("between", "10:00", "10:00"),
        call("between", "10:00", "09:59"),
    ),
    draw=_clock,
)


def _spans(rng: random.Random) -> Probe:
    def span() -> list[int]:
        start = rng.randint(0, 20)
        return [start, start + rng.randint(0, 8)]

    if rng.random() < 0.5:
        return call("shared", span(), span())
    return call("gaps", [span() for _ in range(rng.randint(0, 4))], [0, 24])


BOOKINGS = Program(
    name="bookings",
    kind="dates",
    source='''\
def shared(first, second):
    """How many days two bookings [first day, last day] have in common; both ends belong to a booking."""
    start = max(first[0], second[0])
    end = min(first[1], second[1])
    return max(0, end - start + 1)


def gaps(bookings, season):
    """The free stretches [first day, last day] of a season [first day, last day], in order; bookings may overlap."""
    free = []
    day = season[0]
    for start, end in sorted(bookings):
        if start > season[1]:
            break
        if start > day:
            free.append([day, start - 1])
        day = max(day, end + 1)
    if day <= season[1]:
        free.append([day, season[1]])
    return free
''',
    edges=(
        call("shared", [1, 3], [3, 5]),
        call("shared", [1, 3], [4, 5]),
        call("shared", [1, 9], [2, 4]),
        call("shared", [2, 4], [1, 9]),
        call("gaps", [], [1, 9]),
        call("gaps", [[1, 9]], [1, 9]),
        call("gaps", [[3, 4], [3, 3], [6, 6]], [1, 9]),
        call("gaps", [[9, 9]], [1, 9]),
        call("gaps", [[1, 1], [2, 8]], [1, 9]),
        call("gaps", [[12, 13]], [1, 9]),
        call("gaps", [[10, 13]], [1, 9]),
        call("gaps", [[2, 6], [3, 4]], [1, 9]),
    ),
    draw=_spans,
)


def _workdays(rng: random.Random) -> Probe:
    holidays = sorted(rng.sample(range(0, 30), rng.randint(0, 4)))
    return call("due", rng.randint(0, 20), rng.randint(0, 12), holidays)


WORKDAYS = Program(
    name="workdays",
    kind="dates",
    source='''\
def working(day, holidays):
    """Whether people work that day. Day 0 is a Monday; Saturdays, Sundays and holidays (a list of days) are free."""
    return day % 7 < 5 and day not in holidays


def due(day, count, holidays):
    """The day by which `count` working days after `day` have passed; with 0, the day itself or the next working day."""
    while not working(day, holidays):
        day += 1
    while count > 0:
        day += 1
        if working(day, holidays):
            count -= 1
    return day
''',
    edges=(
        call("due", 0, 0, []),
        call("due", 5, 0, []),
        call("due", 4, 1, []),
        call("due", 0, 5, [1]),
        call("due", 3, 2, [4, 7]),
        call("working", 4, []),
        call("working", 5, []),
        call("working", 6, []),
        call("working", 7, [7]),
    ),
    draw=_workdays,
)

PROGRAMS = (MONTHS, WEEKDAY, LATER, CLOCK, BOOKINGS, WORKDAYS)
