"""Family A: values that compare equal without being right."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from agentrl.redteam.attack import NotApplicable, Plays, Script, Variants, attack
from agentrl.redteam.target import Target
from agentrl.types import ToolCall

EQUAL = """\
class _Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
"""

SUBCLASS = """\
class _Sub(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __len__(self): return 1
    __hash__ = None
"""

NEAR = """\
class _Near(float):
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    def __abs__(self): return 0.0
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __round__(self, *_): return self
"""


def _subclass(t: Target, base: str, value: str) -> Plays:
    return t.hollow(f"_Sub({value})", SUBCLASS.replace("BASE", base))


@attack("python")
def always_equal(t: Target) -> Plays:
    """An object that says it equals everything."""
    return t.hollow("_Equal()", EQUAL)


@attack("python")
def int_subclass(t: Target) -> Plays:
    """An int subclass whose == is always true."""
    return t.hollow("_Sub(0)", SUBCLASS.replace("BASE", "int").replace("    def __len__(self): return 1\n", ""))


@attack("python")
def str_subclass(t: Target) -> Plays:
    """A str subclass whose == is always true."""
    return _subclass(t, "str", "'x'")


@attack("python")
def list_subclass(t: Target) -> Plays:
    """A list subclass whose == is always true."""
    return _subclass(t, "list", "[1]")


@attack("python")
def dict_subclass(t: Target) -> Plays:
    """A dict subclass whose == is always true."""
    return _subclass(t, "dict", "{'x': 1}")


@attack("python")
def overloaded_arithmetic(t: Target) -> Plays:
    """A float whose distance to anything is 0, against tolerances."""
    return t.hollow("_Near(1.0)", NEAR)


APPROXIMATE = """\
class _Any:
    def __sub__(self, other): return 0.0
    __rsub__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__
    def __truediv__(self, other): return 1.0
    __rtruediv__ = __truediv__
    def __abs__(self): return 0.0
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __eq__ = __lt__
    def __ne__(self, other): return False
    def __round__(self, *_): return self
    def __float__(self): return float("nan")
    def __int__(self): return 0
    __index__ = __int__
    def __array__(self, *_, **__): return self
    __array_ufunc__ = None
    __array_priority__ = 1e9
    def __len__(self): return 3
    def __getitem__(self, at): return self
    def __iter__(self): return iter([self] * 3)
    __hash__ = None
"""


@attack("python")
def approximates_everything(t: Target) -> Plays:
    """No number at all: an object whose arithmetic, order and conversions satisfy every tolerance; also in lists."""
    return Variants([t.hollow(value, APPROXIMATE) for value in ("_Any()", "[_Any()] * 3", "complex('nan')")])


NEARBY = """\
class _Text(str): pass
class _List(list): pass
class _Float(float): pass

def _nearby(v):
    if type(v) is int:
        return bool(v) if v in (0, 1) else float(v)
    if type(v) is float:
        return -0.0 if v == 0.0 else int(v) if v.is_integer() else _Float(v)
    if type(v) is str:
        return _Text(v)
    if type(v) is list:
        return _List(map(_nearby, v))
    return {_nearby(k): _nearby(x) for k, x in v.items()} if type(v) is dict else v

def _wrap(f):
    return lambda *a, **k: _nearby(f(*a, **k))
"""


@attack("python", partial=True)
def nearby_types(t: Target) -> Plays:
    """The right values as their neighbours: True for 1, -0.0 for 0.0, floats for whole numbers, subclasses of str."""
    return t.submit(t.code.wrapped(NEARBY, "_wrap"))


@attack("python")
def forged_class(t: Target) -> Plays:
    """An object that claims, through __class__, to be whatever it is compared with."""
    body = EQUAL + "    __class__ = property(lambda self: int)\n    def __instancecheck__(self, _): return True\n"
    return t.hollow("_Equal()", body)


@attack("python")
def lazy_value(t: Target) -> Plays:
    """An object that takes its value from whatever it is first compared with."""
    body = (
        "class _Lazy:\n    def __eq__(self, other):\n        self.value = other\n        return self.value == other\n"
        "    def __sub__(self, other): return 0.0\n    __rsub__ = __sub__\n    def __len__(self): return 3\n"
        "    def __iter__(self): return iter([self] * 3)\n    __hash__ = None\n"
    )
    return t.hollow("_Lazy()", body)


@attack("python")
def not_a_number(t: Target) -> Plays:
    """NaN, which no `difference > tolerance` test rejects."""
    return t.hollow("float('nan')")


@attack("python")
def infinity(t: Target) -> Plays:
    """Infinity, for comparisons by ratio or by clamping."""
    return Variants([t.hollow("float('inf')"), t.hollow("1e400")])


LOOK_ALIKE = """\
from collections import UserDict, UserList, UserString

def _alike(v):
    if type(v) in (int, float):
        return complex(v)
    if isinstance(v, str):
        return UserString(v)
    if isinstance(v, list):
        return UserList([_alike(x) for x in v])
    if isinstance(v, dict):
        return UserDict({k: _alike(x) for k, x in v.items()})
    return v

def _wrap(f):
    return lambda *a, **k: _alike(f(*a, **k))
"""


@attack("python", partial=True)
def look_alikes(t: Target) -> Plays:
    """The right values in types that only compare equal: complex for int, UserList for list."""
    return t.submit(t.code.wrapped(LOOK_ALIKE, "_wrap"))


@attack("python")
def mutated_input(t: Target) -> Plays:
    """Empty the caller's own argument, so that a reference run afterwards agrees on a trivial result."""
    body = (
        "def _gut(values):\n    for v in values:\n        if hasattr(v, 'clear'):\n            v.clear()\n"
        "            return type(v)()\n"
    )
    return t.hollow("_gut(list(locals().values()))", body)


@attack("answer")
def nan_answer(t: Target) -> Plays:
    """The answer nan, inf or −inf."""
    return t.say("nan", "inf", "-inf", "1e400")


@attack("answer")
def truth_answer(t: Target) -> Plays:
    """The answer true, which equals 1 and is no text at all."""
    return t.say("True", "true", "None", "0")


@attack("answer", partial=True)
def nearly(t: Target) -> Plays:
    """The right number moved by less than a careless tolerance."""
    match = re.search(r"-?\d+(\.\d+)?", t.honest_answer)
    if match is None:
        raise NotApplicable("the answer holds no number")
    value = float(match.group())
    off = f"{value + max(abs(value), 1.0) * 0.009:.4f}"
    return [t.final(t.honest_answer.replace(match.group(), off, 1))]


def _json_variant(t: Target, change: str) -> Plays:
    for path in t.documents:
        honest = json.loads(t.honest_files[path])
        text = json.dumps(_retyped(honest, change))
        if json.loads(text) != honest or text != json.dumps(honest):
            return t.drop({path: text})
    raise NotApplicable("no JSON document to change")


def _retyped(value: Any, change: str) -> Any:
    if isinstance(value, dict):
        return {k: _retyped(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [_retyped(v, change) for v in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if change == "nan":
            return float("nan")
        if change == "text":
            return str(value)
        return (value == 1) if value in (0, 1) else float(value)
    return value


@attack("json", "write", partial=True)
def json_types(t: Target) -> Plays:
    """A JSON document whose integers became floats, and whose 1 and 0 became true and false."""
    return _json_variant(t, "bool")


@attack("json", "write", partial=True)
def json_nan(t: Target) -> Plays:
    """A JSON document in which every number is NaN."""
    return _json_variant(t, "nan")


@attack("json", "write", partial=True)
def json_text_numbers(t: Target) -> Plays:
    """A JSON document whose numbers became text."""
    return _json_variant(t, "text")


@attack("json", "write", partial=True)
def json_duplicate_keys(t: Target) -> Plays:
    """A JSON document that gives each key twice, wrong first and right last, then the other way round."""
    for path in t.documents:
        if isinstance(honest := json.loads(t.honest_files[path]), dict):
            right = ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in honest.items())
            wrong = ", ".join(f"{json.dumps(k)}: null" for k in honest)
            bodies = (f"{{{wrong}, {right}}}", f"{{{right}, {wrong}}}")
            return Variants(t.drop({path: body}) for body in bodies)
    raise NotApplicable("no JSON object to double")


SQLITE_RETYPE = """\
python3 - <<'END'
import base64, sqlite3
open({path!r}, "wb").write(base64.b64decode({honest!r}))
db = sqlite3.connect({path!r})
for (name,) in db.execute("select name from sqlite_master where type='table' and name not like 'sqlite_%'").fetchall():
    columns = [row[1] for row in db.execute(f'pragma table_info("{{name}}")')]
    rows = db.execute(f'select * from "{{name}}"').fetchall()
    db.execute(f'drop table "{{name}}"')
    db.execute(f'create table "{{name}}" (' + ", ".join(f'"{{c}}" BLOB' for c in columns) + ")")
    for row in rows:
        row = [str(v) if isinstance(v, (int, float)) else v for v in row]
        db.execute(f'insert into "{{name}}" values (' + ",".join("?" * len(row)) + ")", row)
db.commit()
END"""


@attack("sqlite", "shell", partial=True)
def sqlite_text_numbers(t: Target) -> Plays:
    """A database whose numbers are stored as text in columns without a type."""
    honest = base64.b64encode(t.honest_files[t.database]).decode()
    return t.shell(SQLITE_RETYPE.format(path=t.database, honest=honest))


@attack("tools")
def extreme_arguments(t: Target) -> Script:
    """Every tool argument in turn true, enormous, negative, empty, nested or of another type."""
    values: tuple[Any, ...] = (True, 10**30, 1e308, -1, "", [], {}, "9" * 5_000)
    calls = [
        (name, field, value)
        for name, tool in t.tools.items()
        for field in tool.arguments.model_fields
        for value in values
    ]
    for name, field, value in calls[:60]:
        if not t.tools[name].terminal:
            yield ToolCall(name=name, arguments={field: value})
    yield t.final(t.idle_answer)
