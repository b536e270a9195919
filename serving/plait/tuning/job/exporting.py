"""The answer of a job in the form that its service is deployed with."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from plait.config import load_config
from plait.errors import PlaitError
from plait.tuning.forms import as_argv, as_environment, as_file
from plait.tuning.measure.knobs import apply_knobs, settings_of
from plait.tuning.yaml_edit import with_settings
from plait_autoconfig.jobs.spec import ServiceTarget, TuningTarget
from plait_autoconfig.values import Value


def exported(target: TuningTarget | ServiceTarget, settings: Mapping[str, Value], form: str) -> str:
    """Return the text. `form`: `file`, the plait.yaml or `target.file` with the settings; `serve`, Ray Serve's; `argv`,
    arguments for a shell; `env`, a variable a line. Raises `PlaitError` where the service has no such form."""
    if isinstance(target, TuningTarget):
        return _of_plait(target, settings, form)
    if form == "argv":
        return shlex.join(as_argv(settings)) + "\n"
    if form == "env":
        return "".join(f"{name}={shlex.quote(value)}\n" for name, value in as_environment(settings).items())
    if target.file is None:
        raise PlaitError(f"--as {form}: the job has no target.file that the values could be written into")
    return as_file(Path(target.file), settings)


def _of_plait(target: TuningTarget, settings: Mapping[str, Value], form: str) -> str:
    path = None if target.config is None else Path(target.config)
    config = load_config(path)
    if form == "serve":
        from plait.offline.manifests import serve_application
        from plait_deploy.serve import render_serve

        tuned = apply_knobs(config, settings)
        return render_serve(serve_application(tuned), host=tuned.server.host, port=tuned.server.port)
    written = settings_of(config, settings)
    if form == "file":
        return with_settings("" if path is None else path.read_text(encoding="utf-8"), written)
    if form == "argv":  # as `plait serve` takes them
        return shlex.join(
            word for at, value in written.items() for word in ("--set", f"{'.'.join(at)}={json.dumps(value)}")
        )
    raise PlaitError(f"--as {form}: plait takes no knobs from its environment; it has file, serve and argv")
