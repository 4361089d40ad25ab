"""A pytest plugin: `pytest --agentrl-env NAME` runs one test for each control and attack.

Nothing heavy is imported unless the option is given: this module is loaded by every pytest run on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from agentrl.redteam.report import Control, Finding, Report


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("agentrl", "agentrl: the red team")
    group.addoption("--agentrl-env", action="append", default=[], metavar="NAME", help="attack this environment")
    group.addoption("--agentrl-family", action="append", default=[], metavar="F", help="only this family of attacks")
    group.addoption("--agentrl-backend", default="namespace", metavar="NAME", help="the sandbox backend")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--agentrl-env") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []  # no path was named, so the red team is all that was asked for


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    for name in session.config.getoption("--agentrl-env"):
        _check(name, session.config)
        items.extend(RedTeam.from_parent(session, name=f"redteam[{name}]", target=name).collect())


def _check(name: str, config: pytest.Config) -> None:
    """Report a mistake in the options once, not for each attack."""
    from agentrl.errors import AgentRLError
    from agentrl.redteam.command import Request, attack_targets, chosen

    try:
        chosen(config.getoption("--agentrl-family"), ())
        attack_targets(Request(target=name, backend=config.getoption("--agentrl-backend")))
    except AgentRLError as error:
        raise pytest.UsageError(f"--agentrl-env {name}: {error}") from None


class RedTeam(pytest.Collector):
    """One environment: its suite runs once, when the first of its tests does."""

    def __init__(self, *, target: str, **options: Any) -> None:
        super().__init__(**options)
        self.target = target
        self._reports: list[Report] = []
        self._trouble: Exception | None = None

    def collect(self) -> Iterator[pytest.Item]:
        from agentrl.redteam.command import chosen

        for control in ("oracle", "no-op", "empty", "garbage"):
            yield Check.from_parent(self, name=f"control {control}")
        for attack in chosen(self.config.getoption("--agentrl-family"), ()):
            yield Check.from_parent(self, name=attack.id)

    @property
    def reports(self) -> list[Report]:
        """The suite's reports: one for an environment, several for a verifier."""
        if self._trouble is not None:
            raise self._trouble
        if not self._reports:
            from agentrl.redteam.command import Request, reports

            names = [item.name for item in self.session.items if item.parent is self]
            ids = tuple(name for name in names if not name.startswith("control "))
            request = Request(
                target=self.target,
                attack=ids or ("A.always_equal",),  # only controls were asked for: one attack is cheaper than all
                backend=self.config.getoption("--agentrl-backend"),
            )
            try:
                self._reports = reports(request)
            except Exception as error:  # kept: the next test would only meet it again
                self._trouble = error
                raise
        return self._reports


class Check(pytest.Item):
    """One control or attack."""

    def runtest(self) -> None:
        from agentrl.redteam.report import worst

        assert isinstance(self.parent, RedTeam)
        reports = self.parent.reports
        if self.name.startswith("control "):
            for control in (c for report in reports for c in report.controls):
                if control.name == self.name.removeprefix("control ") and not control.ok:
                    raise Breach(control)
            return
        finding = worst([f for report in reports for f in report.findings if f.id == self.name])
        if finding.succeeded:
            raise Breach(finding)
        if not finding.tried:
            pytest.skip("; ".join(finding.evidence) or finding.result)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, Breach) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[str, int, str]:
        return f"redteam {self.parent.name if self.parent else ''}", 0, self.name


class Breach(Exception):
    """A control that failed, or an attack that succeeded."""

    def __init__(self, failure: Control | Finding) -> None:
        lines = [f"{failure.task}: score {failure.score}", *failure.evidence]
        title = getattr(failure, "title", "")
        if title:
            lines = [title, *lines, f"fix: {getattr(failure, 'fix', '')}"]
        super().__init__("\n".join(lines))
