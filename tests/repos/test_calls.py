"""Differential tests: which calls are kept, what counts as the same reply, and how near arguments are made."""

import pytest

from agentrl.repos import calls, calls_build

ONE, TWO = {"i": "1"}, {"i": "2"}


def test_equal_values_have_one_form() -> None:
    assert calls.canonical({"s": [ONE, TWO]}) == calls.canonical({"s": [TWO, ONE]})
    assert calls.canonical({"d": [["a", ONE], ["b", TWO]]}) == calls.canonical({"d": [["b", TWO], ["a", ONE]]})
    assert calls.canonical({"l": [ONE, TWO]}) != calls.canonical({"l": [TWO, ONE]})
    assert calls.canonical({"l": [ONE]}) != calls.canonical({"t": [ONE]})
    assert calls.canonical(True) != calls.canonical(ONE) != calls.canonical({"f": "0x1.0p+0"})


@pytest.mark.parametrize(
    "form", [{"o": 1, "type": "X"}, {"l": [{"o": 1, "type": "X"}]}, {"d": [["a", {"m": "os"}]]}, 3]
)
def test_what_is_no_plain_data_has_none(form: object) -> None:
    assert calls.canonical(form) is None


def test_near_arguments_differ_in_one_place_keep_their_types_and_are_the_same_everywhere() -> None:
    recorded = [[[{"l": [ONE, TWO]}, "text", True, None], {"key": {"d": [["a", ONE]]}}]]
    others = calls_build.near(recorded, "m.py::f", [{"i": "9"}, "word"])
    assert others == calls_build.near(recorded, "m.py::f", [{"i": "9"}, "word"])
    assert len(others) == len({str(forms) for forms in others}) > 10 and recorded[0] not in others
    kinds = {(*map(_kind, args), tuple(kwargs), _kind(kwargs["key"])) for args, kwargs in others}
    assert kinds == {("l", "str", "bool", "NoneType", ("key",), "d")}


def _kind(form: object) -> str:
    return next(iter(form)) if isinstance(form, dict) else type(form).__name__


def test_constants_come_with_their_neighbours() -> None:
    source = b"def f(a):\n    return a if a < 255 else 'no'\n\n\ndef g():\n    return 7\n"
    assert calls_build.constants(source, "f") == ["no", {"i": "254"}, {"i": "255"}, {"i": "256"}]


def test_nothing_recorded_gives_nothing_near() -> None:
    assert calls_build.near([], "m.py::f", [ONE]) == []
    assert calls_build.near([[[None], {}]], "m.py::f", [ONE]) == []
