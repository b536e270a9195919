"""Replicas on a Ray with numeric GPUs: which devices Ray shows them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

_SCRIPT = """
import json, os, sys
import ray
from plait.config import PlaitConfig
from plait.deployments import deployments
from plait.gpu_shares import running_cluster, with_gpus

def seen():
    return os.environ.get("CUDA_VISIBLE_DEVICES")

os.environ.pop("CUDA_VISIBLE_DEVICES", None)
ray.init(address="local", num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False,
         object_store_memory=100 << 20, _temp_dir=sys.argv[1], _node_ip_address="127.0.0.1")

class Replica:
    def seen(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")

config = PlaitConfig.model_validate({
    "images": {"replicas": 2, "controlnets": {"edges": {"folder": "./edges"}}},
    "recommend": {"models": {"shop": {"folder": "./shop"}}},
})
rows = deployments(with_gpus(config, running_cluster()))
made = [(row, ray.remote(num_cpus=0, num_gpus=row.num_gpus)(Replica).remote())
        for row in reversed(rows) if row.num_gpus or row.name == "ingress" for _ in range(row.max_replicas)]
print(json.dumps([(row.name, row.num_gpus, ray.get(each.seen.remote())) for row, each in made]))
ray.shutdown()
"""


def test_each_replica_sees_the_gpu_that_it_has_a_part_of() -> None:
    """Two GPUs, more replicas than that: none waits, and no device is given out more than once over."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(Path(folder) / "1")], capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr[-2000:]
    replicas = json.loads(done.stdout.splitlines()[-1])
    used: dict[str, float] = {}
    for name, share, device in replicas:
        assert device in (("0", "1") if share else (None, "")), name
        used[device] = used.get(device, 0.0) + share
    assert used["0"] <= 1.0
    assert used["1"] <= 1.0
    assert {name for name, share, _ in replicas if share} == {"engine", "controlnet-edges", "hn-shop"}
