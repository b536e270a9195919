"""A pytest plugin that lists every skip by its reason when the run ends. Where nobody reads the output (`CI` is set, or
`--strict-skips`), a skip whose reason the allow-list does not name fails the run."""

from __future__ import annotations

import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

LIST = Path(__file__).resolve().parents[1] / "skips.toml"
_FALSE = {"", "0", "false", "no"}


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """One entry of the allow-list: reasons that begin like `reason`, and why they may skip in CI."""

    reason: re.Pattern[str]
    why: str


@dataclass(kw_only=True, eq=False)
class SkipLedger:
    """The skips of a run. With xdist it lives in the controller, to which the workers' reports come."""

    allowed: list[Allowed]
    strict: bool
    tests: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that skipped itself. An expected failure is no skip."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self.tests[_reason(report)].append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that skipped as a whole. Every worker of xdist collects it: it counts once."""
        if report.skipped and report.nodeid not in self.tests[_reason(report)]:
            self.tests[_reason(report)].append(report.nodeid)

    @property
    def unexpected(self) -> list[str]:
        """Reasons that the allow-list does not name."""
        return [reason for reason in sorted(self.tests) if self.why(reason) is None]

    def why(self, reason: str) -> str | None:
        """Why tests may skip for this reason in CI, if they may."""
        return next((entry.why for entry in self.allowed if entry.reason.match(reason)), None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """A run that passed, be it at a second try, fails after all if something skipped unexpectedly."""
        yield
        passed = session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
        if self.strict and self.unexpected and passed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the reasons, each with its number of tests, and what is not expected about them."""
        if not self.tests:
            return
        terminalreporter.section("skipped, by reason")
        for reason, tests in sorted(self.tests.items()):
            terminalreporter.line(f"{len(tests):4d}  {reason}  [{self.why(reason) or 'not in the allow-list'}]")
            if self.why(reason) is None:
                terminalreporter.line(f"      for example {tests[0]}")
        if self.strict and self.unexpected:
            terminalreporter.line(
                f"{len(self.unexpected)} unexpected reasons: in CI a skip must be named in {LIST.name}", red=True
            )


def allow_list(path: Path) -> list[Allowed]:
    """The entries of a file; raises ValueError for one without a reason or without a why."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("allowed", [])
    for entry in entries:
        if set(entry) != {"reason", "why"} or not all(isinstance(text, str) and text for text in entry.values()):
            raise ValueError(f"{path}: an entry needs 'reason' and 'why', got {entry}")
    return [Allowed(reason=re.compile(entry["reason"]), why=entry["why"]) for entry in entries]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--strict-skips` and `--allowed-skips`."""
    group = parser.getgroup("skips")
    group.addoption(
        "--strict-skips", action="store_true", help="fail if a skip is not in the allow-list (in CI it always does)"
    )
    group.addoption(
        "--allowed-skips", type=Path, default=LIST, metavar="FILE", help="the allow-list (tests/skips.toml)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keep the ledger where all reports arrive: not in a worker of xdist."""
    if hasattr(config, "workerinput"):
        return
    strict = config.getoption("--strict-skips") or os.environ.get("CI", "").lower() not in _FALSE
    config.pluginmanager.register(
        SkipLedger(allowed=allow_list(config.getoption("--allowed-skips")), strict=strict), "skip-ledger"
    )


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """What a skip says of itself, without pytest's "Skipped: "."""
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return said.removeprefix("Skipped: ")
