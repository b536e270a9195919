"""What a change of plait.yaml is said to do, leaf by leaf, against what is bound to deployments before and after."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve._private.build_app import build_app
from ray.serve._private.version import DeploymentVersion
from ray.serve.handle import DeploymentHandle

from plait.app import bind
from plait.config import PlaitConfig
from plait.deployments import deployments, effects

KEY = {"sha256": "0" * 64, "tenant": "ops", "role": "admin"}
TENANT = {"requests_per_s": 2.0, "max_pixels": 9, "max_steps": 9, "max_images": 2, "queued_s": 9.0}
STORE = {"url": "file:///s", "cache_folder": "/c", "entries": {"ink": {"path": "a", "sha256": "1" * 64, "nbytes": 9}}}
SCALED = {"min": 1, "max": 3}
FULL = {
    "server": {
        "direct_port": 8400,
        "allowed_hosts": ["a"],
        "allowed_origins": ["https://a.example"],
        "api_keys": [KEY],
        "tenants": {"ops": TENANT},
    },
    "images": {
        "model": "/m",
        "memory_bytes": 1 << 30,
        "models_folder": "/more",
        "aliases": {"inked": {"model": "m", "loras": {"ink": 1.0}}},
        "name": "m",
        "loras": {"store": STORE},
        "results": {"folder": "/r", "public_url": "https://a.example"},
        "controlnets": {
            "edges": {"folder": "/edges", "preprocessor": "edges", "num_cpus": 0.5},
            "depth": {"folder": "/depth", "replicas": SCALED},
        },
        "replicas": 3,
    },
    "recommend": {
        "models": {
            "shop": {
                "folder": "/shop",
                "cn": {"shards": {"replicas": 2, "memory_gb": 1.0, "num_cpus": 0.3}, "num_cpus": 0.3},
                "hn": {"replicas": SCALED, "num_cpus": 0.3},
            },
            "plain": {"folder": "/plain", "whole": {"replicas": 2, "num_cpus": 1.5}, "cn": {"shards": 2}},
            "both": {"folder": "/both", "mode": "whole"},
        }
    },
}
OTHER = {
    "server": {"api_keys": [KEY]},
    "images": {
        "models": {"a": "/a", "b": {"file": "/b.safetensors", "config": "/b"}},
        "loras": {"folder": "/l"},
        "results": {"url": "file:///r"},
        "replicas": SCALED,
    },
    "recommend": {"models": {"flat": {"folder": "/flat"}}},
    "tuning": {"enabled": True, "folder": "/jobs"},
    "deploy": {"autoscaling": True, "upgrade": {"gateway_class": "a"}},
}
TEXTS = (
    "auto", "user", "cpu", "torch", "openvino", "float32", "whole", "split", "arrival", "first", "active", "tcp",
    "nixl", "float16", "int8", "alone", "always", "never", "local", "ddim", "euler", "none", "direct", "10.0.0.1",
    "url", "/else", "https://b.example", "file:///else", "other", "9", "1Gi", "2", "x:1", "/c.safetensors",
    "static",
    "edges", "2" * 64, "a/b@sha256:" + "3" * 64,
)  # fmt: skip


def parsed(data: Mapping[str, Any]) -> PlaitConfig:
    return PlaitConfig.model_validate(data, context={"folder": Path("/")})  # quicker than with told errors


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def others(value: Any) -> Iterator[Any]:
    """Values that the leaf might have instead."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value - 1, value * 2, value / 2)
    elif isinstance(value, list):
        yield from (value[:1], [], ["b"], ["https://b.example"], [0], [{**KEY, "role": "user"}], [KEY, KEY])
    yield from (*TEXTS, 1, 2.0, True, None, ["b"], ["10.0.0.1"], ["64x64"], {"min": 1, "max": 2}, {"a": "/a"})


def with_leaf(data: Mapping[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Copy it with another value there."""
    key, *inner = path
    return {**data, key: with_leaf(data[key], tuple(inner), value) if inner else value}


def changed(base: Mapping[str, Any], config: PlaitConfig, path: tuple[Any, ...]) -> PlaitConfig | None:
    """The configuration with another value for that leaf alone, if any is valid."""
    for value in others(functools.reduce(lambda place, key: place[key], path, base)):
        try:
            found = parsed(with_leaf(base, path, value))
        except (ValidationError, TypeError):
            continue
        if found != config:
            return found
    return None


def is_same(one: Any, other: Any) -> bool:
    """Whether two bound values are alike; a deployment among them is its handle, which knows a name."""
    if isinstance(one, DeploymentHandle) or type(one) is not type(other):
        return type(one) is type(other) and one.deployment_name == other.deployment_name
    if isinstance(one, functools.partial):
        return is_same([one.func, one.args, one.keywords], [other.func, other.args, other.keywords])
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if is_dataclass(one):
        return all(is_same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return bool(one == other)


def differing(before: list[Any], after: list[Any]) -> dict[str, str]:
    """What Serve does to each deployment, by Ray's own rules and the arguments that it was given."""
    olds, news = ({it.name: it for it in each} for each in (before, after))
    found = dict.fromkeys(olds.keys() - news, "removed") | dict.fromkeys(news.keys() - olds, "added")
    for name in olds.keys() & news:
        old, new = olds[name], news[name]
        alike = is_same((old.init_args, old.init_kwargs), (new.init_args, new.init_kwargs))
        versions = [
            DeploymentVersion(code, it._deployment_config, it.ray_actor_options)
            for code, it in (("one", old), ("one" if alike else "another", new))
        ]
        configs = [version.deployment_config for version in versions]
        counts = [(each.num_replicas, each.autoscaling_config) for each in configs]
        if versions[0].requires_actor_restart(versions[1]):
            found[name] = "restarted"
        elif counts[0] != counts[1]:
            found[name] = "scaled"
        elif versions[0].requires_actor_reconfigure(versions[1]) or versions[0] != versions[1]:
            found[name] = "reconfigured"
    return found


def bound(app: Any) -> list[Any]:
    """All deployments, as Serve finds them."""
    return build_app(app, name="app").deployments


def test_what_is_announced_is_what_differs_in_what_is_bound() -> None:
    """For each leaf of plait.yaml that can be changed alone."""
    tried, wrong = set[str](), dict[str, Any]()
    for given in (FULL, OTHER):
        base = parsed(given).model_dump(mode="json")
        config = parsed(base)
        before = deployments(config)
        was = bound(bind(before))
        for path in leaves(base):
            name = ".".join(map(str, path))
            if name in tried or (after := changed(base, config, path)) is None:
                continue
            tried.add(name)
            now = deployments(after)
            if (said := effects(before, now)) != (found := differing(was, bound(bind(now)))):
                wrong[name] = said, found
    assert wrong == {}
    dumped = [parsed(given).model_dump(mode="json") for given in (FULL, OTHER)]
    every = {".".join(map(str, path)) for each in dumped for path in leaves(each)}
    inner = {name for name in every if any(other.startswith(f"{name}.") for other in every)}
    assert every - inner - tried == NEVER_ALONE


NEVER_ALONE = {"version", "images.revision"}
"""There is one version, and a commit is of a model that has a hub id."""


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("images.results.lifetime_s", 60, {"ingress": "restarted"}),
        (
            "images.audit_every",
            7,
            {"engine": "restarted", "controlnet-edges": "restarted", "controlnet-depth": "restarted"},
        ),
        ("images.controlnets.edges.preprocessor", None, {"engine": "restarted"}),
        ("images.controlnets.edges.replicas", 2, {"controlnet-edges": "scaled"}),
        ("images.num_cpus", 2.0, {"engine": "restarted"}),
        ("images.knobs.largest_batch", 4, {"engine": "reconfigured"}),
        ("server.ingress_replicas", 2, {"ingress": "scaled"}),
        ("server.port", 9000, {}),
        (
            "recommend.models.both.mode",
            "split",
            {"whole-both": "removed", "cn-both": "added", "hn-both": "added", "ingress": "restarted"},
        ),
        ("recommend.models.plain.executor", "torch", {"hn-plain": "restarted"}),
        ("recommend.models.both.between_hosts", "nixl", {"whole-both": "restarted"}),
        ("recommend.models.shop.cn.replicas", 2, {"cn-shop": "scaled"}),
        ("recommend.models.shop.hn.replicas.max", 5, {"hn-shop": "scaled"}),
        ("recommend.models.shop.cn.shards.replicas", 3, {"shard0-shop": "scaled", "shard1-shop": "scaled"}),
        ("recommend.models.shop.cn.knobs.window", 2, {"cn-shop": "reconfigured"}),
        (
            "recommend.models.shop.cn.shards.count",
            3,
            {"cn-shop": "restarted", "shard0-shop": "restarted", "shard1-shop": "restarted", "shard2-shop": "added"}
            | {"ingress": "restarted"},
        ),
    ],
)
def test_a_change_restarts_who_reads_it_and_nobody_else(path: str, value: Any, expected: dict[str, str]) -> None:
    """Numbers of replicas scale, knobs reconfigure, and what one deployment alone reads restarts no other."""
    data = with_leaf(parsed(FULL).model_dump(mode="json"), tuple(path.split(".")), value)
    assert effects(deployments(parsed(FULL)), deployments(parsed(data))) == expected


@pytest.mark.parametrize("places", [(), ("l40s", "host")], ids=["anywhere", "placed"])
def test_versions_follow_what_only_a_restart_changes(places: tuple[str, ...]) -> None:
    """Equal where Serve is to keep the replicas, different for another run of the server."""
    tuned = copy.deepcopy(FULL)
    tuned["images"] |= {"knobs": {"largest_batch": 4}, "replicas": 4}
    before = versions(FULL, "a", places)
    assert before == versions(tuned, "a", places)
    assert set(before.values()).isdisjoint(versions(FULL, "b", places).values())
    tuned["images"]["dtype"] = "float32"
    moved = {name for name, version in versions(tuned, "a", places).items() if version != before[name]}
    assert {name.partition("@")[0] for name in moved} == {"engine", "controlnet-edges", "controlnet-depth"}


def versions(data: Mapping[str, Any], salt: str, places: tuple[str, ...] = ()) -> dict[str, str | None]:
    """As Serve finds them."""
    app = bind(deployments(parsed(data)), node_classes=places, salt=salt)
    return {each.name: each.version for each in bound(app)}


def test_versions_are_the_same_in_every_process() -> None:
    """`plait tune apply` is another process than the server: what it deploys alike is to stay."""
    code = (
        f"import json, sys; from pathlib import Path; from plait.config import parse_config\n"
        "from plait.deployments import deployments\n"
        f"rows = deployments(parse_config(json.loads({json.dumps(json.dumps(FULL))}), source='', folder=Path('/')))\n"
        "print(json.dumps({row.name: row.version('a') for row in rows}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == versions(FULL, "a")


def test_what_is_reserved_is_what_ray_is_asked_for() -> None:
    """The tuner's costs come from there, and from nothing that Serve gets."""
    for given in (FULL, OTHER):
        config = parsed(given)
        asked = {it.name: it.ray_actor_options for it in bound(bind(deployments(config)))}
        assert {row.name: (row.num_cpus, row.num_gpus) for row in deployments(config)} == {
            name: (options["num_cpus"], options.get("num_gpus", 0.0)) for name, options in asked.items()
        }
