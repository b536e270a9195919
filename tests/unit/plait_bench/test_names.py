"""What benchmarks are called stays, so that rows of years can be compared."""

from __future__ import annotations

from importlib import import_module

import pytest

from plait_bench.images.orders import SIZES
from plait_bench.job import NAMES
from plait_bench.kernels import cases

# The names that these workloads had at commit 136959b.
NAMED = {
    "loadtest": "noop",
    "disagg": (
        "in-process-rm1-64 in-process-rm1-512 in-process-rm2-64 in-process-rm2-512 in-process-criteo-kaggle-64 "
        "in-process-criteo-kaggle-512 one-by-one-1 one-by-one-64 one-by-one-512 rm1-1 rm1-64 rm1-512 rm2-1 rm2-64 "
        "rm2-512 criteo-kaggle-1 criteo-kaggle-64 criteo-kaggle-512"
    ),
    "fabric": "shm-1mib round-trip-64b large-messages modelled-links",
    "autoconfig": (
        "falcon synthetic synthetic-features synthetic-noisy synthetic-glitch synthetic-cold synthetic-negated "
        "synthetic-shuffled own-images own-recommend"
    ),
    "tuning": "picks images",
    "placement": "default gpushare100 cpu050 departures ray small-ray",
    "zoo": "zoo",
    "models": "load8-1x2 load8-4x2 load100-1x2 load100-4x2 sd15-switches",
    "faults": (
        "ends night share first-image neighbours-decode neighbours-parse neighbours-lora neighbours-sizes "
        "neighbours-bodies neighbours-all many-models many-files refusals-100 refusals-500 steady"
    ),
}
IMAGES = {
    "starter": "start single controlnet controlnet-service lora same4 same16 mixed4 mixed16 distinct16",
    "sd15": "start single controlnet controlnet-service lora same4 mixed4",
    "sdxl": "start single controlnet lora",
    "sd35m": "start single same4 mixed4",
}
KERNELS = (
    "geglu-sd15-1024x2560 geglu-sd15-256x5120 geglu-sd15-4096x1280 geglu-sdxl-1024x5120 geglu-sdxl-4096x2560 "
    "group-norm-sdxl-1280x32 group-norm-sdxl-640x64 group-norm-silu-sd15-1280x16 group-norm-silu-sd15-2560x8 "
    "group-norm-silu-sd15-320x64 group-norm-silu-sd15-640x32 group-norm-silu-sdxl-1280x32 "
    "group-norm-silu-sdxl-1920x64 group-norm-silu-sdxl-2560x32 group-norm-silu-sdxl-320x128 "
    "group-norm-silu-sdxl-640x64 group-norm-silu-sdxl-960x128 int8-lookup-2048x40 int8-lookup-512x80 "
    "int8-lookup-64x20 lora-merge-sd15-1280 residual-add-sdxl-320x128 residual-add-sdxl-640x64"
)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("images", "kernels")])
def test_workloads_keep_their_names(name):
    """Of every benchmark."""
    made = import_module(f"plait_bench.{name}").benchmark()
    assert [workload.name for workload in made] == NAMED[name].split()


def test_image_workloads_and_operators_keep_their_names():
    """Of every size, and of both devices."""
    assert {name: " ".join(size.workloads) for name, size in SIZES.items()} == IMAGES
    assert sorted({case.name for device in ("cpu", "cuda") for case in cases(device)}) == KERNELS.split()
