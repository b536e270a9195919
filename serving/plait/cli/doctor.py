"""`plait doctor`: check whether plait will run on this machine, and whether a cluster does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="plait.yaml, whose folders of models are checked too")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="the port that the server would take; plait.yaml's if left out")
    ] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="also ask a running Ray: its nodes and Serve")] = False,
    address: Annotated[
        str | None, typer.Option(help="with --cluster: that Ray; else the one of plait serve on the port, or any here")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON list")] = False,
) -> None:
    """Check this machine, its sockets and models, and a cluster; say what to do. Exit with code 1 on a problem."""
    if address is not None and not cluster:
        raise typer.BadParameter("goes with --cluster", param_hint="--address")
    from plait.config import load_config
    from plait.doctor import machine, models
    from plait.doctor.cluster import check_cluster
    from plait.doctor.findings import CheckStatus, listed
    from plait_serving.images.config import STARTER_FOLDER

    loaded = load_config(config)
    port = loaded.server.port if port is None else port
    host, direct = loaded.server.host if loaded.ray.is_local else "127.0.0.1", loaded.server.direct_port
    findings = [
        *machine.check_python(),
        *machine.check_packages(),
        *machine.check_torch(),
        *machine.check_cpu(),
        *machine.check_machine(),
        *machine.check_files(),
        *machine.check_home(os.environ),
        *machine.check_caches(os.environ),
        *machine.check_port(host, port),
        *(machine.check_port(host, direct, option="server.direct_port") if direct and loaded.ray.is_local else ()),
        *machine.sockets_findings(machine.ray_listeners(), all_rays=cluster and address is not None),
        *models.check_starter(STARTER_FOLDER),
        *models.check_models(loaded),
    ]
    if cluster:
        findings += check_cluster(address, port)
    print(listed(findings, as_json=as_json))
    raise typer.Exit(1 if any(finding.verdict is CheckStatus.FAIL for finding in findings) else 0)
