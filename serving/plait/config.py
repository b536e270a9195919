"""plait.yaml: one frozen model, composed of the sections that the subsystems own.

Precedence: defaults < file < ``--set path=value`` < the command's own options. Relative paths in a file are relative to
that file. An unknown key or a bad value names its path.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from plait.errors import ConfigError
from plait_serving.config import ImagesSection


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ApiKey(Section):
    """A key that requests may carry as ``Authorization: Bearer``. Only its SHA-256 is written down."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "default"
    role: Literal["user", "admin"] = "user"


class ServerSection(Section):
    """Where HTTP listens and who may ask. Without keys everybody who reaches the port may."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="0: any free port")] = 8000
    api_keys: tuple[ApiKey, ...] = ()
    largest_body_bytes: Annotated[int, Field(ge=1024)] = 64 << 20
    drain_s: Annotated[float, Field(ge=0, le=3600, description="how long a stop waits for what runs")] = 20.0
    ready_timeout_s: Annotated[float, Field(gt=0, le=86400, description="how long a start may take")] = 600.0

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the port."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class RaySection(Section):
    """The Ray cluster that carries the deployments."""

    address: Annotated[str, Field(min_length=1, description="'local' starts one; else attach to it")] = "local"
    num_cpus: Annotated[int | None, Field(ge=1, description="logical CPUs of a local Ray; unset: as needed")] = None
    num_gpus: Annotated[int | None, Field(ge=0, description="unset: what Ray finds")] = None
    object_store_bytes: Annotated[int, Field(ge=80 << 20, description="shared memory of a local Ray")] = 256 << 20

    @property
    def is_local(self) -> bool:
        """Whether the command starts (and stops) its own Ray."""
        return self.address == "local"


class PlaitConfig(Section):
    """The whole plait.yaml."""

    server: ServerSection = ServerSection()
    images: ImagesSection = ImagesSection()
    ray: RaySection = RaySection()


def load_config(path: Path | None = None, *, overrides: Sequence[str] = ()) -> PlaitConfig:
    """Reads and checks a configuration; ``path`` None means the defaults. ``overrides``: ``a.b=value`` in YAML syntax.

    Raises `ConfigError`.
    """
    data: dict[str, Any] = {}
    source = "the configuration"
    folder = Path.cwd()
    if path is not None:
        source, folder = str(path), path.resolve().parent
        data = _read(path)
    for override in overrides:
        _override(data, override)
    return parse_config(data, source=source, folder=folder)


def parse_config(data: Mapping[str, Any], *, source: str, folder: Path) -> PlaitConfig:
    """Checks plain data as a configuration; relative paths are taken from ``folder``. Raises `ConfigError`."""
    try:
        return PlaitConfig.model_validate(data, context={"folder": folder})
    except ValidationError as error:
        raise ConfigError(source, [_problem(dict(item)) for item in error.errors()]) from error


def dump_config(config: PlaitConfig) -> str:
    """The configuration as YAML with every default written out; `load_config` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), [error.strerror or str(error)]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), ["not YAML: " + " ".join(str(error).split())]) from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(str(path), ["the top level must be a mapping"])
    return data


def _override(data: dict[str, Any], text: str) -> None:
    """Sets ``a.b.c=value`` inside ``data``; the value is YAML."""
    dotted, equals, value = text.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError("--set", [f"{text!r} is not path=value, for example images.knobs.largest_batch=8"])
    place: dict[str, Any] = data
    for key in keys[:-1]:
        inner = place.get(key)
        if not isinstance(inner, dict):
            inner = place[key] = {}
        place = inner
    try:
        place[keys[-1]] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError("--set", [f"{dotted}: the value is not YAML"]) from error


def _problem(item: Mapping[str, Any]) -> str:
    """``images.knobs.largest_batch: input should be ... (got 0)`` from one of pydantic's error records."""
    where = ".".join(str(part) for part in item["loc"]) or "(top level)"
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key"
    said = str(item["msg"]).removeprefix("Value error, ")
    got = item.get("input")
    shown = f" (got {got!r})" if isinstance(got, str | int | float | bool) or got is None else ""
    return f"{where}: {said[:1].lower()}{said[1:]}{shown}"
