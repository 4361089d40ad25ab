"""The kinds of hidden case for functions and classes. Everything here stays on the trusted side.

example       these arguments give this result
raises        these arguments raise this built-in exception
differential  these arguments give what the reference gives (or raise what it raises)
holds         the result of these arguments has a property
metamorphic   the results of several calls, each in a sandbox of its own, stand in a relation
script        a sequence of calls on live objects gives, step by step, what the reference's objects give
"""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import AuthoringError
from agentrl.types import Json
from agentrl.verifiers.values import EXACT, Compare, Opaque, encode


@dataclass(frozen=True, slots=True)
class Ref:
    """Within a script: the result of an earlier step."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call."""

    target: str
    """A dotted name in the candidate's module, or in `builtins.`; with `on`, an attribute of that step's result."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    on: Ref | None = None
    observe: bool = False
    """Report the arguments as they are after the call, for functions that work in place."""

    def form(self) -> dict[str, Json]:
        """Return the step as the sandbox gets it."""
        return {
            "target": self.target if self.on is None else [self.on.step, self.target],
            "args": [_form(arg) for arg in self.args],
            "kwargs": {name: _form(arg) for name, arg in self.kwargs.items()},
            "observe": self.observe,
        }


@dataclass(frozen=True, slots=True)
class Returned:
    """A step returned a value: plain data of exact built-in types, or `Opaque`."""

    value: Any
    args: tuple[Any, ...] = ()
    """The arguments afterwards, where the step observes them."""


@dataclass(frozen=True, slots=True)
class Raised:
    """A step raised."""

    names: tuple[str, ...]
    """The nearest built-in class of the exception and the bases of that class: no exception counts as several kinds."""


Result = Returned | Raised
Check = Callable[[Sequence[Sequence[Result]]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Runs, each in a fresh sandbox, and a check of their results."""

    kind: str
    runs: tuple[tuple[Step, ...], ...]
    check: Check
    """Gets the results of every step of every run. Only `True` is a pass; raising is a failure."""
    name: str = ""
    """Shown in the evidence, so it must not give away what is expected."""


def example(target: str, *args: Any, expect: Any, compare: Compare = EXACT, observe: bool = False) -> Case:
    """These arguments give this result; with `observe`, `expect` is the tuple of the arguments afterwards."""
    encode(expect)

    def check(result: Result) -> bool:
        return isinstance(result, Returned) and compare.same(expect, result.args if observe else result.value)

    return _single("example", Step(target=target, args=args, observe=observe), check)


def raises(target: str, *args: Any, error: type[BaseException]) -> Case:
    """These arguments raise this built-in exception, or one derived from it."""
    if getattr(builtins, error.__name__, None) is not error:
        raise AuthoringError(f"raises: {error.__name__} is not a built-in exception; sandboxes report only those")
    return _single("raises", Step(target=target, args=args), lambda result: _raised(result, error.__name__))


def differential(
    reference: Callable[..., Any], target: str, *args: Any, compare: Compare = EXACT, observe: bool = False
) -> Case:
    """These arguments give or raise what they do with the reference, which runs here and now on a copy of them."""
    reference_args = copy.deepcopy(args)
    try:
        value = reference(*reference_args)
    except Exception as error:
        name = _builtin_name(error)
        return _single("differential", Step(target=target, args=args), lambda result: _raised(result, name))
    encode(value)

    def check(result: Result) -> bool:
        if not isinstance(result, Returned) or not compare.same(value, result.value):
            return False
        return not observe or compare.same(reference_args, result.args)

    return _single("differential", Step(target=target, args=args, observe=observe), check)


def holds(target: str, *args: Any, check: Callable[[Any], bool]) -> Case:
    """The result of these arguments is plain data with a property."""

    def holds_for(result: Result) -> bool:
        return isinstance(result, Returned) and not isinstance(result.value, Opaque) and check(result.value) is True

    return _single("property", Step(target=target, args=args), holds_for)


def metamorphic(target: str, *inputs: Sequence[Any], relation: Callable[..., bool]) -> Case:
    """The results of calls with several argument lists, each in a sandbox of its own, stand in a relation."""

    def check(runs: Sequence[Sequence[Result]]) -> bool:
        values = [run[0].value for run in runs if isinstance(run[0], Returned)]
        if len(values) != len(inputs) or any(isinstance(value, Opaque) for value in values):
            return False
        return relation(*values) is True

    return Case(kind="metamorphic", runs=tuple((Step(target=target, args=tuple(a)),) for a in inputs), check=check)


def script(reference: Mapping[str, Any], steps: Sequence[Step], *, compare: Compare = EXACT) -> Case:
    """A sequence of calls on live objects gives what the same sequence gives on the reference's own.

    `reference` holds the reference's names. A step whose reference result is not plain data (an instance, say) is not
    compared; what later steps get from it is.
    """
    expected: list[Result | None] = []
    results: list[Any] = []
    for step in steps:
        value, outcome = _reference_step(reference, step, results)
        results.append(value)
        expected.append(outcome)
    if all(outcome is None for outcome in expected):
        raise AuthoringError("script: no step gives plain data, so nothing would be compared")

    def check(runs: Sequence[Sequence[Result]]) -> bool:
        return len(runs[0]) == len(expected) and all(map(agree, expected, runs[0]))

    def agree(outcome: Result | None, result: Result) -> bool:
        if isinstance(outcome, Raised):
            return _raised(result, outcome.names[0])
        return isinstance(result, Returned) and (outcome is None or compare.same(outcome.value, result.value))

    return Case(kind="script", runs=(tuple(steps),), check=check)


def _single(kind: str, step: Step, check: Callable[[Result], bool]) -> Case:
    """Return a case of one call."""
    return Case(kind=kind, runs=((step,),), check=lambda runs: check(runs[0][0]))


def _reference_step(reference: Mapping[str, Any], step: Step, results: list[Any]) -> tuple[Any, Result | None]:
    """Return the reference's value of a step, and the outcome to expect; None if it cannot be compared."""
    try:
        if step.on is not None:
            called: Any = results[step.on.step]
            names = step.target.split(".")
        else:
            first, *names = step.target.split(".")
            called = builtins if first == "builtins" else reference[first]
        for name in names:
            called = getattr(called, name)
        args = [results[a.step] if isinstance(a, Ref) else copy.deepcopy(a) for a in step.args]
        kwargs = {n: results[a.step] if isinstance(a, Ref) else copy.deepcopy(a) for n, a in step.kwargs.items()}
        value = called(*args, **kwargs)
    except Exception as error:
        return None, Raised((_builtin_name(error),))
    try:
        encode(value)
    except TypeError:
        return value, None
    return value, Returned(copy.deepcopy(value))


def _builtin_name(error: Exception) -> str:
    """Return the nearest built-in class of an exception."""
    name: str = next(kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    return name


def _raised(result: Result, name: str) -> bool:
    return isinstance(result, Raised) and name in result.names


def _form(value: Any) -> Json:
    return {"r": value.step} if isinstance(value, Ref) else encode(value)
