"""Apply the winning knobs: to a plait.yaml, to a running server, or in the form that a service is deployed with."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from plait.config import key_path, load_config, parse_config
from plait.errors import PlaitError, told
from plait.server.state import replace_text, state_root
from plait.tuning.forms import KeyPath, as_argv, as_environment, as_file, diff, set_at, with_settings
from plait.tuning.measure.knobs import apply_knobs, check_names, known_values, settings_of
from plait_autoconfig.jobs.spec import ServiceTarget, TuningTarget
from plait_autoconfig.values import Value


def apply_to_file(knobs: Mapping[str, Any], path: Path, *, dry_run: bool) -> str:
    """Set the knobs in the file and return the diff. A link keeps leading to the file, which is what is written. Raises
    `PlaitError` if it cannot; nothing is written then."""
    config = load_config(path)
    check_names(config, knobs)
    before = path.read_text(encoding="utf-8")
    changed = {name: value for name, value in knobs.items() if known_values(config, [name])[name] != value}
    after = with_settings(before, settings_of(config, changed)) if changed else before
    parse_config(yaml.safe_load(after) or {}, source=str(path), folder=path.resolve().parent)
    if not dry_run and after != before:
        file = path.resolve()  # a link stays one
        with told(file=path):
            replace_text(file, after, mode=file.stat().st_mode & 0o777)
    return diff(before, after, name=path.name)


def apply_to_server(knobs: Mapping[str, Any], *, port: int, dry_run: bool) -> str:
    """Send the knobs to this user's `plait serve` on the port; return the changes, one per line. They last until the
    server is restarted. Raises `PlaitError`."""
    from plait.tuning.measure.application import compose_of
    from plait.tuning.measure.live import LiveServer, running_config

    root = state_root(os.environ)
    config = running_config(root, port)
    check_names(config, knobs)
    before = known_values(config, knobs)
    apply_knobs(config, knobs)  # which refuses values
    lines = [f"{name}: {before[name]} -> {value}\n" for name, value in knobs.items() if before[name] != value]
    if lines and not dry_run:
        with closing(LiveServer(compose_of(), root=root, port=port)) as live:
            live.keep(apply_knobs(live.original, knobs))
    return "".join(lines)


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
    config = load_config(path, settings=target.settings)  # the winner was measured with them
    if form == "serve":
        from plait.offline.deploying import serve_application
        from plait_deploy.serve import render_serve

        tuned = apply_knobs(config, settings)
        return render_serve(serve_application(tuned), host=tuned.server.host, port=tuned.server.port)
    text = "" if path is None else path.read_text(encoding="utf-8")
    data = yaml.safe_load(text) or {}
    written: dict[KeyPath, Any] = {}
    for name, value in target.settings.items():  # one may lie in what another one makes
        at = key_path(data, name.split("."))
        set_at(data, at, deepcopy(value))
        written[at] = value
    written |= settings_of(config, settings)
    if form == "file":
        return with_settings(text, written)
    if form == "argv":  # as `plait serve` takes them
        words = (word for at, value in written.items() for word in ("--set", f"{'.'.join(at)}={json.dumps(value)}"))
        return shlex.join(words) + "\n"
    raise PlaitError(f"--as {form}: plait takes no knobs from its environment; it has file, serve and argv")
