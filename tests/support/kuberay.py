"""What judges manifests: the RayService CRD, where a path to it is given, and Kubernetes' own schemas."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

CRD_VARIABLE = "PLAIT_KUBERAY_CRD"
KUBERNETES = "1.33"
NOT_OF_KUBERNETES = {"RayService", "PodMonitor"}


def crd_schema() -> Mapping[str, Any]:
    """The schema of ``ray.io/v1`` RayService, with unknown fields refused; skips without the file."""
    path = os.environ.get(CRD_VARIABLE, "")
    if not path:
        pytest.skip(f"{CRD_VARIABLE} names no CRD of RayService")
    return _crd_schema(Path(path))


@cache
def _crd_schema(path: Path) -> Mapping[str, Any]:
    document = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = [it for it in document["spec"]["versions"] if it["name"] == "v1"]
    return _strict(version["schema"]["openAPIV3Schema"])


def _strict(schema: Any) -> Any:
    """An object whose properties are listed has no others: what the API server would prune, silently."""
    if isinstance(schema, list):
        return [_strict(it) for it in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items()}
    if isinstance(found.get("properties"), dict) and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    if found.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    return found


def crd_problems(document: Mapping[str, Any]) -> list[str]:
    """What the CRD says against a RayService."""
    body = {key: value for key, value in document.items() if key not in ("apiVersion", "kind", "metadata")}
    schema = {**crd_schema()["properties"]["spec"]}
    found = jsonschema.Draft202012Validator(schema).iter_errors(body["spec"])
    return [f"{error.json_path}: {error.message[:200]}" for error in found]


def kubernetes_problems(document: Mapping[str, Any]) -> list[str]:
    """What Kubernetes' schemas say against an object, or against the pods of a RayService."""
    if document["kind"] == "RayService":
        cluster = document["spec"]["rayClusterConfig"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        return [
            problem
            for group in groups
            for problem in kubernetes_problems({"apiVersion": "v1", "kind": "Pod", **group["template"]})
        ]
    if document["kind"] in NOT_OF_KUBERNETES:
        return []
    try:
        kubernetes_validate.validate(dict(document), KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{document['kind']}: {error.message[:200]}"]
    return []
