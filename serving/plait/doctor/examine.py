"""All checks of this machine, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from plait.config import PlaitConfig
from plait.doctor import machine, models, sockets
from plait.doctor.findings import CheckResult


def examine(
    environ: Mapping[str, str], *, host: str, port: int, starter: Path, config: PlaitConfig, cluster: bool
) -> list[CheckResult]:
    """Run all checks. `config`: whose folders of models are looked at; `cluster`: whether plait runs on a Ray that it
    did not start."""
    checks: Sequence[Callable[[], list[CheckResult]]] = (
        machine.check_python,
        machine.check_packages,
        machine.check_torch,
        machine.check_cpu,
        machine.check_machine,
        machine.check_files,
        lambda: machine.check_home(environ),
        lambda: machine.check_caches(environ),
        lambda: machine.check_port(host, port),
        lambda: sockets.check_sockets(all_rays=cluster),
        lambda: models.check_starter(starter),
        lambda: models.check_models(config),
    )
    return [finding for check in checks for finding in check()]
