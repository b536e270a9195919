"""plait.yaml: one frozen model, composed of the sections that the subsystems own.

Precedence: defaults < file < `--set path=value` < the command's own options. Relative paths in a file are relative
to that file. The error for an unknown key or a bad value names its path.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from plait.errors import ConfigError
from plait_deploy.kuberay.options import DeploySection
from plait_loadtest import strict_yaml
from plait_serving.images.config import ImagesSection
from plait_serving.ranking.config import RankingSection, RankModelSection
from plait_serving.sections import ApiKey, FolderPath, Role, Section, TenantLimits, TenantName
from plait_serving.spelling import choice_hint, fields_at, hint, told_once


def _own_host(text: str) -> str:
    """Check what is listened on. Raises ValueError for what is neither a name nor an address, as `127.0.0..1`."""
    try:
        text.encode("idna")
    except UnicodeError:
        raise ValueError("must be a name or an address of this machine") from None
    return text


def _host_name(text: str) -> str:
    """Check a host name. Raises ValueError if it includes a port, because such a name would never match."""
    if text.count(":") == 1 or (text.startswith("[") and not text.endswith("]")):
        raise ValueError(f"{text} has a port; a name is meant")
    return text


def _network(text: str) -> str:
    """Check an address or a network. Raises ValueError that says what one looks like."""
    try:
        ipaddress.ip_network(text)
    except ValueError:
        raise ValueError("must be an address or a network: 10.0.0.7, 10.0.0.0/8, fd00::/8") from None
    return text


_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


def _origin(text: str) -> str:
    """Check an origin. Raises ValueError that says what one looks like."""
    if _ORIGIN.fullmatch(text) is None:
        raise ValueError("must be as browsers send it, without a path: https://studio.example, http://localhost:3000")
    return text


class ServerSection(Section):
    """Where HTTP listens and who may send requests. Without keys, anyone who can reach the port may."""

    host: Annotated[str, Field(min_length=1), AfterValidator(_own_host)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="0: any free port")] = 8000
    direct_port: Annotated[
        int | None,
        Field(ge=1, le=65535, description="the ingress answers there too, without Serve's proxy before it"),
    ] = None
    ingress_replicas: Annotated[
        int,
        Field(ge=1, le=64, description="processes that answer HTTP; others answer while one is started again"),
    ] = 1
    allowed_hosts: Annotated[
        tuple[Annotated[str, Field(min_length=1), AfterValidator(_host_name)], ...] | None,
        Field(
            description="names in requests' Host header, without ports, beside the server's own; empty: any; "
            "unset: any, but without keys on loopback only its own"
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[Annotated[str, AfterValidator(_origin)], ...],
        Field(description="whose pages may send requests and read answers, as https://site.example, beside the own"),
    ] = ()
    trusted_proxies: Annotated[
        tuple[Annotated[str, AfterValidator(_network)], ...],
        Field(description="addresses or networks of reverse proxies whose X-Forwarded-Host and -Proto are believed"),
    ] = ()
    a1111_api: Annotated[
        bool, Field(description="whether clients of A1111's API (stable-diffusion-webui) are answered below /sdapi/v1")
    ] = False
    api_keys: tuple[ApiKey, ...] = ()
    tenants: dict[TenantName, TenantLimits] = Field(
        default_factory=dict, description="shares and limits by tenant; without keys there is one, 'default'"
    )
    largest_body_bytes: Annotated[int, Field(ge=1024)] = 64 << 20
    start_new_first: Annotated[
        bool | None,
        Field(description="in an update, a new replica starts before an old one stops; unset: those without a GPU"),
    ] = None
    drain_s: Annotated[float, Field(ge=0, le=3600, description="how long a stop waits for what runs")] = 20.0
    ready_timeout_s: Annotated[
        float, Field(gt=0, le=86400, description="how long a start may take, Ray's included")
    ] = 600.0

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.direct_port == self.port:
            raise ValueError(f"direct_port is port ({self.port}), where Serve's proxy listens")
        known = {key.tenant for key in self.api_keys} or {"default"}
        unknown = sorted(set(self.tenants) - known)
        if unknown:
            raise ValueError(f"tenants: no key is of {', '.join(unknown)}")
        return self

    def surge_percent(self, *, num_gpus: float, replicas: int) -> int:
        """Return Serve's `max_surge_percent` of a deployment with at most so many replicas: one more, or none."""
        starts_first = num_gpus == 0 if self.start_new_first is None else self.start_new_first
        return max(1, 100 // replicas) if starts_first else 0

    def behind(self, host: str) -> Self:
        """Return the section as it is true of a Serve instance that listens on `host`. If that is not loopback, its
        public names are unknown here, and so are its clients."""
        seen = self.model_copy(update={"host": host})
        if seen.is_loopback:
            return self
        return seen.model_copy(update={"allowed_hosts": self.allowed_hosts or ()})

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the port."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def answered_hosts(self) -> tuple[str, ...]:
        """The names that requests may call the server by; none: any."""
        from plait_serving.http.edge.hosts import LOOPBACK_HOSTS

        hosts = self.allowed_hosts
        if not hosts and not (hosts is None and self.is_loopback and not self.api_keys):
            return ()
        return (*LOOPBACK_HOSTS, self.host, *(hosts or ()))  # its own as well: plait asks it how it is

    @property
    def is_open(self) -> bool:
        """Whether other machines reach the port and no key is asked for."""
        return not self.is_loopback and not self.api_keys

    @property
    def has_admin(self) -> bool:
        """Whether anyone may use the routes of admins. Without keys, who is on this machine may."""
        return any(key.role is Role.ADMIN for key in self.api_keys) if self.api_keys else self.is_loopback


VERSION = 1
"""Of plait.yaml: raised by a change that files of before do not survive."""
_GONE = {("images", "knobs", "exact"): ("alone", "never is fast, always gives every request diffusers' bits")}
"""Values that earlier plaits took, by key, and what to write instead."""

TUNING_WITHOUT_ADMIN = "tuning over HTTP starts processes: server.api_keys must have a key with the role admin"


class TuningSection(Section):
    """Tuning jobs over HTTP (`/v1/tuning/jobs`, for admins). Off by default: a job starts processes."""

    enabled: bool = False
    folder: Annotated[
        FolderPath | None, Field(description="where jobs are kept; unset: tuning, in plait's state folder")
    ] = None
    live: Annotated[bool, Field(description="whether a job may tune the application that users are on")] = False


class ServedConfig(Section):
    """What is served, and to whom: all that the application needs from a plait.yaml.

    With `images: null` a server only ranks; with `recommend: null` it only makes images.
    """

    server: ServerSection = ServerSection()
    images: ImagesSection | None = ImagesSection()
    recommend: RankingSection | None = RankingSection()
    tuning: TuningSection = TuningSection()

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.tuning.enabled and not self.server.has_admin:
            raise ValueError(TUNING_WITHOUT_ADMIN)
        if self.images is None and (self.recommend is None or not self.recommend.resolved_models()):
            raise ValueError("images is null and there is no model under recommend: nothing to serve")
        if self.images is not None:  # /v1/models, and `plait models`, know both by their names
            keys = dict.fromkeys(self.images.base_models, "models" if self.images.models else "model")
            keys |= dict.fromkeys(self.images.aliases, "aliases")
            for name in self.ranking_models:
                if name in keys:
                    raise ValueError(f"images.{keys[name]} and recommend.models both have the name {name!r}")
        return self

    @property
    def ranking_models(self) -> dict[str, RankModelSection]:
        """The recommendation models by name."""
        return {} if self.recommend is None else self.recommend.resolved_models()

    @property
    def public_names(self) -> tuple[str, ...]:
        """The model names that requests use."""
        return (*(() if self.images is None else self.images.base_models), *self.ranking_models)


class RaySection(Section):
    """The Ray cluster that runs the deployments."""

    address: Annotated[str, Field(min_length=1, description="'local' starts one; else attach to it")] = "local"
    num_cpus: Annotated[int | None, Field(ge=1, description="logical CPUs of a local Ray; unset: as needed")] = None
    num_gpus: Annotated[int | None, Field(ge=0, description="unset: what Ray finds")] = None
    object_store_bytes: Annotated[int, Field(ge=80 << 20, description="shared memory of a local Ray")] = 256 << 20

    @property
    def is_local(self) -> bool:
        """Whether the command starts (and stops) its own Ray."""
        return self.address == "local"


class PlaitConfig(ServedConfig):
    """The whole plait.yaml. A file without a version is of the first."""

    version: Literal[1] = 1
    ray: RaySection = RaySection()
    deploy: DeploySection = DeploySection()


def load_config(
    path: Path | None = None, *, overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> PlaitConfig:
    """Read and check a configuration; `path` None means the defaults. `overrides`: `a.b=value` in YAML syntax;
    `settings`: values by such paths, over all else.

    Raises `ConfigError`.
    """
    data: dict[str, Any] = {}
    source = "the configuration"
    folder = Path.cwd()
    if path is not None:
        data = _read(path)  # first: links that lead in a circle have no folder
        source, folder = str(path), path.resolve().parent
    for text in overrides:
        dotted, equals, value = text.partition("=")
        keys = _keys(dotted if equals else "", text)
        try:
            _set(data, keys, yaml.safe_load(value))
        except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
            raise ConfigError("--set", [f"{dotted}: the value is not YAML"]) from error
    for dotted, value in (settings or {}).items():
        _set(data, _keys(dotted, f"{dotted}={json.dumps(value)}"), deepcopy(value))
    return parse_config(data, source=source, folder=folder)


def parse_config(data: Mapping[str, Any], *, source: str, folder: Path) -> PlaitConfig:
    """Check plain data as a configuration; relative paths are resolved against `folder`. Raises `ConfigError`."""
    if outdated := _outdated(data):
        raise ConfigError(source, [outdated])
    if broken := [f"{field}: not valid Unicode" for field in strict_yaml.not_text(data)]:
        raise ConfigError(source, broken)
    try:
        return PlaitConfig.model_validate(data, context={"folder": folder})
    except ValidationError as error:
        raise ConfigError(source, [_problem(*it) for it in told_once(error.errors(), data)]) from error


def _outdated(data: Mapping[str, Any]) -> str | None:
    """Return in one sentence what this plait cannot read of a file for another one, or None."""
    version = data.get("version", VERSION)
    if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        return f"version: {version} is newer than {VERSION}, the newest that this plait reads; upgrade plait"
    for (*keys, last), (value, advice) in _GONE.items():
        place: Any = data
        for key in keys:
            place = place.get(key) if isinstance(place, Mapping) else None
        if isinstance(place, Mapping) and place.get(last) == value:
            return f"{'.'.join((*keys, last))}: {value} is gone; {advice}"
    return None


def dump_config(config: PlaitConfig) -> str:
    """Return the configuration as YAML with every default written out; `load_config` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = strict_yaml.parse(path.read_text(encoding="utf-8"), str(path))[1]
    except OSError as error:
        raise ConfigError(str(path), [error.strerror or str(error)]) from error
    except strict_yaml.NotYaml as error:
        raise ConfigError(str(path), [f"not YAML: {error.where}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"not text: {error.reason}"]) from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(str(path), ["the top level must be a mapping"])
    return data


def _keys(dotted: str, text: str) -> list[str]:
    keys = dotted.strip().split(".")
    if not all(keys):
        raise ConfigError("--set", [f"{text!r} is not path=value, for example images.knobs.largest_batch=8"])
    return keys


def key_path(data: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of a path inside `data`. Of keys with dots those count that are there: names of models and
    ControlNets may have some."""
    place: Any = data
    found: list[str] = []
    while (parts := _parts_of_key(place, keys)) < len(keys):
        key, keys = ".".join(keys[:parts]), keys[parts:]
        found.append(key)
        place = place.get(key)
        if not isinstance(place, Mapping):
            place = {}
    return (*found, ".".join(keys))


def _set(data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set the value at a path (`key_path`) inside `data`."""
    *path, last = key_path(data, keys)
    place: dict[str, Any] = data
    for key in path:
        inner = place.get(key)
        if not isinstance(inner, dict):
            inner = place[key] = {}
        place = inner
    place[last] = value


def _parts_of_key(place: Mapping[str, Any], keys: Sequence[str]) -> int:
    """Return how many parts the first key of a path has: the most with which it is there, or one."""
    return next((parts for parts in range(len(keys), 1, -1) if ".".join(keys[:parts]) in place), 1)


def _problem(place: Sequence[str], item: Mapping[str, Any]) -> str:
    """Format one of pydantic's error records as `images.knobs.largest_batch: must be ... (got 0)`."""
    where, got = ".".join(place) or "(top level)", item.get("input")
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key{hint(place[-1], fields_at(PlaitConfig, item['loc']))}"
    is_shown = (isinstance(got, str | int | float | bool) or got is None) and "api_keys" not in place
    spelled = json.dumps(got) if got is None or isinstance(got, bool) else repr(got)
    shown = f" (got {spelled})" if is_shown else ""
    return f"{where}: {item['msg']}{_keys_hint(item)}{shown}{choice_hint(item)}"


def _keys_hint(item: Mapping[str, Any]) -> str:
    """Return what to write where a section belongs."""
    if item["type"] != "model_type":
        return ""
    keys = fields_at(PlaitConfig, (*item["loc"], ""))
    key = next((key for key in ("folder", "model") if key in keys), None)
    if key is not None and isinstance(item["input"], str):
        return f": {{{key}: {item['input']}}}"
    return f" with {', '.join(keys[:4])}{', ...' if len(keys) > 4 else ''}"
