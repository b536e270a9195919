"""A pytest plugin: with `--again`, what fails among the tests of real processes runs once more, alone, after the rest.

A busy machine may end a process or exceed a limit of a library. What passes then counts as passed and is printed as
FLAKY, for somebody to mend. At most three do; more, or any failure of another test, is a failure of the run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

LIMIT = 3
_OF_PROCESSES = ("tests/integration/", "tests/e2e/")
_NEVER = ("tests/unit/", "tests/contract/", "tests/property/")


@dataclass(kw_only=True, eq=False)
class SecondChances:
    """The failures of a run, each with its reason. `passes` runs a test in a process of its own."""

    passes: Callable[[str], bool]
    failed: dict[str, str] = field(default_factory=dict)
    flaky: list[str] = field(default_factory=list)
    final: bool = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure. With xdist all reports come to the controller."""
        if report.failed:
            self.failed.setdefault(report.nodeid, _reason(report))
            self.final |= not may_run_again(report.nodeid, report.keywords)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read fails whatever else does."""
        self.final |= report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Run the failures again, once all workers and what the session kept are gone."""
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or self.final or not 0 < len(self.failed) <= LIMIT:
            return
        if session.shouldstop or session.shouldfail:
            return  # the rest did not run
        self.flaky = [test for test in self.failed if self.passes(test)]
        if len(self.flaky) == len(self.failed):
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what passed at the second try, and why it failed at the first."""
        for test in self.flaky:
            terminalreporter.line(f"FLAKY {test}: {self.failed[test]}", yellow=True)


def may_run_again(test: str, keywords: Mapping[str, Any]) -> bool:
    """Return whether a test is one of real processes: by its folder, or because it starts Ray."""
    return test.startswith(_OF_PROCESSES) or ("cluster" in keywords and not test.startswith(_NEVER))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--again`."""
    parser.addoption("--again", action="store_true", help="run failures of tests of real processes once more, alone")


def pytest_configure(config: pytest.Config) -> None:
    """Watch where all reports arrive: not in a worker of xdist."""
    if config.getoption("--again") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondChances(passes=_passes), "second-chances")


def _passes(test: str) -> bool:
    print(f"\nonce more, alone: {test}", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", "-q", test], check=False).returncode == 0


def _reason(report: pytest.TestReport) -> str:
    """The last line of what a failure says."""
    crash = getattr(report.longrepr, "reprcrash", None)
    said = crash.message if crash is not None else str(report.longrepr)
    return f"{report.when}: {(said.strip().splitlines() or ['no reason'])[0][:200]}"
