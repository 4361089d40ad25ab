"""What a fix may change: the broken function as it likes, and nothing else that no test of the verdict looks at."""

# ruff: noqa: E501  (a version of the code per line)
import pytest

from agentrl.repos import scope

CODE = '''"""A package."""
import re

LIMIT = 10
TABLE = {"a": 1, "b": 2}
_cache = []


def clamp(value, low, high=LIMIT):
    """Return the value within bounds."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def other(text):
    """Return something else."""
    if not text:
        raise ValueError("no text")
    return re.sub("x", "y", text)


class Plain:
    size = 3

    def double(self, items):
        result = []
        for item in items:
            result.append(item + item)
        return result

    def length(self, items):
        return len(items)


class Special(dict):
    def first(self):
        return next(iter(self))


try:
    import fast
except ImportError:
    def slow(n):
        return n + 1
'''
MORE = "from pkg.main import clamp\n\n\ndef helper(a):\n    return clamp(a, 0)\n"
FAULTY = {f"pkg/main.py::{name}" for name in ("clamp", "Plain.double", "Special.first", "slow")}
CLAMP = CODE[CODE.index("def clamp") : CODE.index("def other")]
DOUBLE = CODE[CODE.index("        result = []") : CODE.index("    def length")]


def changed(code: str, more: str = MORE, extra: dict[str, bytes] | None = None) -> set[str] | str:
    """Return the functions that count as written by the agent, or why the work scores 0."""
    before = {"pkg/main.py": CODE.encode(), "pkg/more.py": MORE.encode(), "pkg/data.txt": b"1 2 3\n"}
    after = {**before, "pkg/main.py": code.encode(), "pkg/more.py": more.encode(), **(extra or {})}
    try:
        return scope.rewritten(before, after, FAULTY)
    except scope.Unchecked as error:
        return str(error)


def clamp(body: str, before: str = "", after: str = "") -> str:
    """Return the code with another body of clamp, and statements around the function."""
    function = f'def clamp(value, low, high=LIMIT):\n    """Return the value within bounds."""\n{body}\n\n'
    return CODE.replace(CLAMP, f"{before}{function}{after}\n")


def double(body: str) -> str:
    return CODE.replace(DOUBLE, body + "\n")


HONEST = {
    "as it was": (CODE, set()),
    "a comment and other layout": (CODE.replace("LIMIT = 10", "LIMIT = (  # ten\n    10)"), set()),
    "a comment in another function": (CODE.replace("    return re.sub", "    # all of them\n    return re.sub"), set()),
    "one expression": (clamp("    return max(low, min(value, high))"), {"clamp"}),
    "a conditional expression": (clamp("    return low if value < low else high if value > high else value"), {"clamp"}),
    "an early return": (clamp("    if low <= value <= high:\n        return value\n    return low if value < low else high"), {"clamp"}),
    "another operator": (clamp("    if not value >= low:\n        return low\n    return high if high < value else value"), {"clamp"}),
    "a renamed local": (double("        doubled = []\n        for item in items:\n            doubled.append(item + item)\n        return doubled\n"), {"Plain.double"}),
    "a comprehension": (double("        return [item + item for item in items]\n"), {"Plain.double"}),
    "twice by a product": (double("        return [2 * item for item in items]\n"), {"Plain.double"}),
    "an index": (double("        result = [None] * len(items)\n        for at in range(len(items)):\n            result[at] = items[at] + items[at]\n        return result\n"), {"Plain.double"}),
    "sorted bounds": (clamp("    return sorted((low, value, high))[1]"), {"clamp"}),
    "a local function": (clamp("    def bounded(n):\n        return min(n, high)\n    return max(low, bounded(value))"), {"clamp"}),
    "a helper above": (clamp("    return _bounded(value, low, high)", "def _bounded(a, b, c=None):\n    return max(b, min(a, c))\n\n\n"), {"clamp"}),
    "a helper below": (clamp("    return _bounded(value, low, high)", "", "def _bounded(a, b, c=None):\n    return max(b, min(a, c))\n\n"), {"clamp"}),
    "a new constant": (clamp("    return (low, value, high)[_MIDDLE] if low < value < high else max(low, min(value, high))", "_MIDDLE = 1\n\n\n"), {"clamp"}),
    "a new import": (clamp("    return max(low, min(value, high, math.inf))").replace("import re\n", "import math\nimport re\n"), {"clamp"}),
    "an import inside": (clamp("    import math\n    return max(low, min(value, high, math.inf))"), {"clamp"}),
    "a comment as a docstring": (CODE.replace("Return the value within bounds.", "Return the value, never out of bounds."), {"clamp"}),
    "a new method": (double("        return [self._twice(item) for item in items]\n\n    def _twice(self, item):\n        return item + item\n"), {"Plain.double"}),
    "another way in a subclass": (CODE.replace("return next(iter(self))", "for key in self:\n            return key"), {"Special.first"}),
    "a function under a condition": (CODE.replace("return n + 1", "return 1 + n"), {"slow"}),
    "an attribute with a constant": (double("        self.size = LIMIT\n        self.seen = items\n        return [item + item for item in items]\n"), {"Plain.double"}),
    "a copy of a table": (clamp("    bounds = dict(TABLE)\n    bounds.update(a=low)\n    return max(bounds['a'], min(value, high))"), {"clamp"}),
    "an item of a table": (clamp("    return max(low, min(value, high, TABLE.get('c', high)))"), {"clamp"}),
    "the size of a container": (clamp("    return max(low, min(value, high)) if len(_cache) >= 0 else value"), {"clamp"}),
    "an attribute called like a module": (double("        self.code = items\n        return [item + item for item in self.code]\n"), {"Plain.double"}),
    "an attribute by its name": (double("        return [getattr(item, 'real', item) + item for item in items]\n"), {"Plain.double"}),
    "a key by an attribute": (double("        import operator\n        return sorted(items, key=operator.attrgetter('real'))\n"), {"Plain.double"}),
    "another of its own class": (double("        self.__class__()\n        return [item + item for item in items]\n"), {"Plain.double"}),
    "an attribute of its own object": (double("        self.seen = items\n        return [item + item for item in items]\n"), {"Plain.double"}),
}  # fmt: skip

TRICKS = {
    "a byte of a table": CODE.replace('"a": 1', '"7": 1'),
    "a digit of a constant": CODE.replace("LIMIT = 10", "LIMIT = 17"),
    "another function": CODE.replace('"x", "y"', '"x", "7"'),
    "the text of an error": CODE.replace("no text", "n7 text"),
    "a docstring elsewhere": CODE.replace("something else", "something7else"),
    "the module's docstring": CODE.replace("A package.", "A packag7."),
    "another method": CODE.replace("len(items)", "len(items) + 0"),
    "a class attribute": CODE.replace("size = 3", "size = 7"),
    "a default": CODE.replace("high=LIMIT", "high=9"),
    "a decorator": CODE.replace("def clamp", "@staticmethod\ndef clamp"),
    "another kind of function": CODE.replace("def clamp", "async def clamp"),
    "a base class": CODE.replace("class Plain:", "class Plain(dict):"),
    "a statement at the end": CODE + "TABLE.clear()\n",
    "the table bound again": CODE + "TABLE = {}\n",
    "the function bound again": CODE + "def other(text):\n    return text\n",
    "a builtin's name": CODE + "def len(items):\n    return 7\n",
    "a name of another module": CODE + "def helper(a):\n    return 7\n",
    "a hook of Python's": CODE + "def __getattr__(name):\n    return 7\n",
    "a decorated helper": CODE + "@print\ndef _new(a):\n    return 7\n",
    "a helper whose default runs": CODE + "def _new(a=print(7)):\n    return 7\n",
    "a new class": CODE + "class New:\n    print(7)\n",
    "a new method of a dict": CODE.replace("    def first", "    def keys(self):\n        return []\n\n    def first"),
    "an import of another package": "import fastest\n" + CODE,
    "an import of everything": "from math import *\n" + CODE,
    "an import under a known name": CODE.replace("import re\n", "import re\nfrom math import floor as other\n"),
    "an import that shadows": CODE.replace("import re\n", "import re\nfrom math import pow as clamp\n"),
    "an import that runs something": "import antigravity as LIMIT\n" + CODE,
    "a statement left out": CODE.replace("LIMIT = 10\n", ""),
    "statements in another order": CODE.replace("LIMIT = 10\nTABLE", "TABLE").replace("_cache", "LIMIT = 10\n_cache"),
    "a global": clamp("    global LIMIT\n    LIMIT = 7\n    return max(low, min(value, high))"),
    "a global table": clamp("    TABLE['a'] = 7\n    return max(low, min(value, high))"),
    "a global table's method": clamp("    TABLE.update(a=7)\n    return max(low, min(value, high))"),
    "a function's attribute": clamp("    other.__code__ = clamp.__code__\n    return max(low, min(value, high))"),
    "a global table by another name": clamp("    table = TABLE\n    table['a'] = 7\n    return max(low, min(value, high))"),
    "one of two tables": clamp("    for table in (TABLE, {}):\n        table.clear()\n    return max(low, min(value, high))"),
    "a table from a choice": clamp("    (table := TABLE or {}).update(a=7)\n    return max(low, min(value, high))"),
    "a table by an operator": clamp("    import operator\n    operator.setitem(TABLE, 'a', 7)\n    return max(low, min(value, high))"),
    "setattr": clamp("    setattr(Plain, 'size', 7)\n    return max(low, min(value, high))"),
    "globals": clamp("    globals()['LIMIT'] = 7\n    return max(low, min(value, high))"),
    "the modules": clamp("    import sys\n    sys.modules['re'] = None\n    return max(low, min(value, high))"),
    "exec": clamp("    exec('LIMIT = 7', {})\n    return max(low, min(value, high))"),
    "a reaching helper": CODE + "def _new(a):\n    TABLE['a'] = 7\n",
    "an import of the future": CODE.replace("import re\n", "from __future__ import annotations\nimport re\n"),
    "an import that does something": CODE.replace("import re\n", "import antigravity\nimport re\n"),
    "an import that reaches into objects": CODE.replace("import re\n", "from gc import get_referrers\nimport re\n"),
    "a statement before the module's docstring": CODE.replace('"""A package."""', '_first = 1\n"""A package."""'),
    "a table bound in an annotation": CODE + "def _new(a: (TABLE := {})):\n    return a\n",
    "the dictionary of a module": clamp("    getattr(re, '__dict__').update(sub=7)\n    return value"),
    "an attribute by a text that is put together": clamp("    getattr(re, '__di' + 'ct__').update(sub=7)\n    return value"),
    "an attribute by a getter": clamp("    import operator\n    operator.attrgetter('__dict__')(re).update(sub=7)\n    return value"),
    "getattr by another name": clamp("    find = getattr\n    find(_cache, 'append')(7)\n    return value"),
    "a method by a text": clamp("    getattr(_cache, 'append')(7)\n    return value"),
    "setattr of the builtins": clamp("    import builtins\n    builtins.setattr(re, 'sub', 7)\n    return value"),
    "a patch": clamp("    from unittest import mock\n    mock.patch('re.sub', 7).start()\n    return value"),
    "a text that is run": clamp("    import timeit\n    timeit.timeit('import re; re.sub = 7', number=1)\n    return value"),
    "bytes that are run": clamp("    import pickle\n    pickle.loads(b'')\n    return value"),
    "a frame": clamp("    try:\n        1 / 0\n    except Exception as error:\n        error.__traceback__.tb_frame.f_globals.update(LIMIT=7)\n    return value"),
    "its own class": double("        self.__class__.length = lambda own, all: 7\n        return items\n"),
    "its own class by a name": double("        kind = type(self)\n        kind.length = lambda own, all: 7\n        return items\n"),
    "a container by another name, in place": clamp("    rows = _cache\n    rows += [7]\n    return value"),
    "a container in an attribute": double("        self.rows = _cache\n        self.rows.append(7)\n        return items\n"),
    "a container in another": clamp("    {'a': _cache}['a'].append(7)\n    return value"),
    "a container in a local function": clamp("    def push(rows):\n        rows.append(7)\n    push(_cache)\n    return value"),
    "a container in a lambda": clamp("    (lambda: _cache)().append(7)\n    return value"),
    "a method of a type": clamp("    type([]).append(_cache, 7)\n    return value"),
    "a container in a function of Python's": clamp("    import heapq\n    heapq.heappush(_cache, 7)\n    return value"),
    "a container in a block": clamp("    import contextlib\n    with contextlib.nullcontext(_cache) as rows:\n        rows.append(7)\n    return value"),
    "a container in a match": clamp("    match _cache:\n        case rows:\n            rows.append(7)\n    return value"),
    "a part of a table": clamp("    TABLE.get('a').append(7)\n    return value"),
    "each part of a table": clamp("    for row in list(TABLE.values()):\n        row.append(7)\n    return value"),
    "no Python": CODE + "def (:\n",
    "a bomb": CODE + "#" * 200_000,
    "a hundred helpers": CODE + "".join(f"def _new{number}(a):\n    return a\n" for number in range(100)),
    "deep nesting": CODE + "x = " + "(" * 5_000 + ")" * 5_000 + "\n",
    "a long number": CODE + f"_new = {'7' * 9_000}\n",
    "a null byte": CODE + "\0",
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_fix_may_write_the_broken_function_as_it_likes(name: str) -> None:
    code, keys = HONEST[name]
    assert changed(code) == {f"pkg/main.py::{key}" for key in keys}


@pytest.mark.parametrize("name", TRICKS)
def test_what_no_test_of_the_verdict_looks_at_must_stay_as_it_was(name: str) -> None:
    assert TRICKS[name] != CODE
    assert changed(TRICKS[name]) == "changed code that nothing can check"


def test_other_files_must_stay_as_they_were() -> None:
    wrong = "changed code that nothing can check"
    assert changed(CODE, MORE.replace("clamp(a, 0)", "clamp(a, 7)")) == wrong
    assert changed(CODE, extra={"pkg/data.txt": b"1 2 7\n"}) == wrong
    assert changed(CODE, extra={"pkg/new.py": b""}) == wrong
    assert changed(CODE, MORE + "# a comment\n") == set()


def test_docstrings_count_where_the_package_reads_them() -> None:
    before = {"m.py": b'def f(a):\n    """Add."""\n    return a + 1\n'}
    after = {"m.py": b'def f(a):\n    """Adds."""\n    return 1 + a\n'}
    assert scope.rewritten(before, after, {"m.py::f"}) == {"m.py::f"}
    reading = {"n.py": b"def g(f):\n    return f.__doc__\n"}
    with pytest.raises(scope.Unchecked):
        scope.rewritten({**before, **reading}, {**after, **reading}, {"m.py::f"})


FINDS = """class Walker:
    def walk(self, kind):
        return getattr(self, {name}, self.other)(kind)

    def other(self, kind):
        return kind
"""


@pytest.mark.parametrize(
    "name", ['"_visit_" + kind', 'f"_visit_{kind}"', '"_visit_%s" % kind', '"_visit_{}".format(kind)']
)
def test_a_new_method_is_not_found_by_a_name_that_is_put_together(name: str) -> None:
    code = FINDS.format(name=name) if "{" not in name else FINDS.replace("{name}", name)
    method = "\n    def {}(self, kind):\n        return 7\n"
    before, faulty = {"m.py": code.encode()}, {"m.py::Walker.other"}
    with pytest.raises(scope.Unchecked):
        scope.rewritten(before, {"m.py": (code + method.format("_visit_list")).encode()}, faulty)
    assert scope.rewritten(before, {"m.py": (code + method.format("_twice")).encode()}, faulty) == set()


def test_a_name_that_a_data_file_holds_is_not_new() -> None:
    before = {"m.py": b"def f(a):\n    return a + 1\n", "hooks.txt": b"start -> on_start\n"}
    after = {**before, "m.py": before["m.py"] + b"\n\ndef on_start(a):\n    return 7\n"}
    with pytest.raises(scope.Unchecked):
        scope.rewritten(before, after, {"m.py::f"})


def test_a_new_method_stands_before_no_other() -> None:
    """Not before a method of another base, and not where a decorator may look for it."""
    mixin = b"class Mixin:\n    def f(self):\n        return 1\n"
    method = b"\n    def %s(self):\n        return 7\n"
    faulty, users = {"m.py::Mixin.f"}, b"import m\n\n\nclass Both(m.Mixin, dict):\n    pass\n"

    def after(code: bytes, name: bytes, other: bytes = b"") -> set[str]:
        before = {"m.py": code, "n.py": other}
        return scope.rewritten(before, {**before, "m.py": code + method % name}, faulty)

    assert after(mixin, b"popitem") == after(mixin, b"_twice") == after(b"@sized\n" + mixin, b"_twice") == set()
    for wrong in ((mixin, b"popitem", users), (mixin, b"_twice", users), (b"@sized\n" + mixin, b"twice", b"")):
        with pytest.raises(scope.Unchecked):
            after(*wrong)
