"""What a model needs of memory, what there is, and the sentence when that is too little."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from plait_serving.diffusion import memory
from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.assemble import EngineSettings, build_engine
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.unet.controlnet import load_controlnet
from plait_serving.diffusion.memory import PROCESS_BYTES, available_bytes, cgroup_bytes, check_memory, pixels_that_fit
from plait_serving.diffusion.models.model import image_limits
from plait_serving.diffusion.weight_files import find_weights
from support.bundles import load_bundle
from support.families import opened
from support.tiny import tiny_sd
from support.tiny_flow import tiny_flux

CPU = torch.device("cpu")
GB = 1_000_000_000


def test_weights_take_what_their_dtype_takes(tiny_sd_folder):
    """Every part in its own, whatever the files have."""
    unet, vae = (find_weights(tiny_sd_folder / part) for part in ("unet", "vae"))
    stored = {part: load_file(next((tiny_sd_folder / part).glob("*.safetensors"))) for part in ("unet", "vae")}
    counts = {part: sum(tensor.numel() for tensor in tensors.values()) for part, tensors in stored.items()}
    assert unet.nbytes_as(torch.bfloat16) == 2 * counts["unet"]
    assert vae.nbytes_as(torch.float32) == 4 * counts["vae"]


def test_what_is_needed_is_said_before_loading(monkeypatch, caplog):
    """As much as there is suffices; one byte less is one sentence with both numbers."""
    working_bytes = 2 * GB - PROCESS_BYTES
    monkeypatch.setattr(memory, "available_bytes", lambda _: 7 * GB)
    with caplog.at_level(logging.INFO):
        check_memory("some/model", 5 * GB, CPU, working_bytes=working_bytes)
    told = "some/model needs 7.00 GB of memory (5.00 GB of weights and 2.00 GB to work with); 7.00 GB are available"
    assert caplog.messages == [told]
    monkeypatch.setattr(memory, "available_bytes", lambda _: 3 * GB)
    with pytest.raises(ModelError) as caught:
        check_memory("some/model", 5 * GB, CPU, working_bytes=working_bytes)
    assert caught.value.message == told.replace("; 7.00", "; 3.00")


def test_a_model_that_does_not_fit_is_not_loaded(monkeypatch, tiny_sd_folder, tiny_sd_controlnets):
    """Neither a base model nor a ControlNet; no tensor is read."""

    def refuse(*_):
        raise AssertionError("loaded all the same")

    monkeypatch.setattr(memory, "available_bytes", lambda _: 1000)
    monkeypatch.setattr("plait_serving.diffusion.families.encoders.load_module", refuse)
    with pytest.raises(ModelError, match=rf"{tiny_sd_folder} needs .* are available"):
        opened(tiny_sd_folder).load()
    with pytest.raises(ModelError, match=rf"{tiny_sd_controlnets[0]} needs .* are available"):
        load_controlnet(tiny_sd_controlnets[0], dtype=torch.float32)


@pytest.mark.parametrize(("free", "pixels"), [(0, 64), (63_999, 64), (80_000, 80), (10**9, 400)])
def test_images_are_as_large_as_memory_holds(free, pixels):
    """Never refused: the model's own size; never more than the limit."""
    assert pixels_that_fit(1000, free, native=64, limit=400) == pixels


def test_an_engine_takes_no_size_that_memory_cannot_hold(caplog, tiny_sd_folder):
    """Its limits say so, and the log says why."""
    bundle = load_bundle(tiny_sd_folder)
    per_pixel = 4 * 2 * bundle.vae.config.block_out_channels[0] * 4
    assert bundle.decoding_bytes_per_pixel == per_pixel
    with caplog.at_level(logging.INFO):
        assert image_limits(bundle, ImageLimits(), 5000 * per_pixel).max_pixels == 5000
    assert "images of at most 5000 pixels" in caplog.text
    assert image_limits(bundle, ImageLimits(), 1 << 50).max_pixels == ImageLimits().max_pixels
    assert image_limits(bundle, ImageLimits(), -1).max_pixels == bundle.width * bundle.height


@pytest.mark.parametrize("make", [tiny_sd, tiny_flux])
def test_the_weights_of_a_lone_model_are_not_left_for_its_images(make, tmp_path, monkeypatch):
    """The limit is known before they are read: theirs and its text encoders' are taken off."""
    folder = make(tmp_path / "model")
    family = opened(folder)
    left = 2_000_000 * family.decoding_bytes_per_pixel
    free = left + family.weights_bytes + family.shared_bytes()
    monkeypatch.setattr("plait_serving.diffusion.assemble.available_bytes", lambda _: free)
    engine = build_engine(EngineSettings(model=folder, converts=False))
    try:
        assert engine.pool.first.limits.max_pixels == 2_000_000
    finally:
        engine.stop(drain_s=0)


@pytest.mark.parametrize(("sizes", "says"), [("63x64", "is not among the sizes"), ("8192x8192", "edges go from")])
def test_sizes_that_no_request_can_have_are_refused_when_the_model_is_read(sizes, says, tiny_sd_folder):
    """Edges that the model does not make, or beyond the other limits: every request would be refused."""
    with pytest.raises(ModelError, match=rf"^images.limits.sizes: .*{says}"):
        image_limits(load_bundle(tiny_sd_folder), ImageLimits(sizes=(sizes,)), 1 << 50)


def test_this_host_has_some_memory():
    """The real files of this machine can be read."""
    assert 10_000_000 < available_bytes(CPU) < 1 << 60


def limit(folder, *, version, most, used, cache):
    """Write a cgroup's files as the kernel does."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{used}\n")
    active = names[2].replace("inactive", "active")
    (folder / "memory.stat").write_text(f"anon 12\n{active} {cache // 3}\n{names[2]} {cache - cache // 3}\n")


@pytest.mark.parametrize(("version", "controllers"), [(1, "memory"), (2, "")])
def test_a_cgroup_leaves_its_limit_less_what_is_used(tmp_path, version, controllers):
    """The file cache does not count as used; the tightest of a group and its parents decides."""
    own = f"3:cpu:/elsewhere\n4:{controllers}:/a/b\n"
    top = tmp_path / controllers
    limit(top / "a" / "b", version=version, most=1000, used=600, cache=150)
    assert cgroup_bytes(tmp_path, own) == 550
    limit(top / "a", version=version, most=900, used=800, cache=0)
    assert cgroup_bytes(tmp_path, own) == 100
    limit(top, version=version, most=900, used=990, cache=0)
    assert cgroup_bytes(tmp_path, own) == 0


def test_no_limit_leaves_very_much(tmp_path):
    """The words of both versions for it, no cgroups at all, and a path that the container does not see."""
    limit(tmp_path / "a", version=2, most="max", used=5, cache=0)
    limit(tmp_path / "memory" / "a", version=1, most=9223372036854771712, used=5, cache=0)
    for own in ("0::/a\n", "4:memory:/a\n", "", "nonsense\n", "0::/not/here\n"):
        assert cgroup_bytes(tmp_path, own, share=0.9) >= 1 << 60
    limit(tmp_path, version=2, most=1000, used=100, cache=0)
    assert cgroup_bytes(tmp_path, "0::/not/here\n") == 900


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, 0.95),
        ({"RAY_memory_usage_threshold": "0.8"}, 0.8),
        ({"RAY_memory_usage_threshold": "0.8", "RAY_memory_monitor_refresh_ms": "0"}, 1.0),
    ],
    ids=["default", "set", "off"],
)
def test_what_is_available_ends_where_rays_memory_monitor_acts(monkeypatch, tmp_path, environment, share):
    """At its share of the host's memory or of the container's, whichever comes first."""
    for name in ("RAY_memory_usage_threshold", "RAY_memory_monitor_refresh_ms"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    host = SimpleNamespace(total=10 * GB, available=4 * GB)
    monkeypatch.setattr(memory, "psutil", SimpleNamespace(virtual_memory=lambda: host))
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/a\n")
    assert available_bytes(CPU) == pytest.approx(4 * GB - (1 - share) * 10 * GB)
    limit(tmp_path / "a", version=2, most=2 * GB, used=1 * GB, cache=0)
    assert available_bytes(CPU) == pytest.approx(share * 2 * GB - 1 * GB)
    host.available = 0
    assert available_bytes(CPU) == 0


ALLOCATED = """
import ctypes, mmap, sys
from pathlib import Path
import torch
from plait_serving.diffusion.memory import memory_of

reader = memory_of(torch.device("cpu"), excluded=lambda: 0)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def rollup():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("Pss_Anon:")))

def look(what):
    print(what, reader.held_bytes(), rollup(), flush=True)

look("before")
places = [libc.malloc(60_000) for _ in range(4_000)]
for place in places:
    ctypes.memset(place, 1, 60_000)
look("allocated")
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sum(mapped[::4096])
look("mapped")
for place in places[:-1]:
    libc.free(place)
look("freed")
reader.give_back()
look("given")
"""


def test_what_a_process_holds_is_its_set_size_without_files(tmp_path):
    """As the kernel's own sum says, which is far slower to ask for: files are not in it, and what was freed is until it
    is given back."""
    file = tmp_path / "file"
    file.write_bytes(bytes(100_000_000))
    told = subprocess.run(
        [sys.executable, "-c", ALLOCATED, file], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    held = {}
    for line in told.splitlines():
        what, ours, kernels = line.split()
        assert int(ours) == pytest.approx(int(kernels), abs=20_000_000), line
        held[what] = int(ours)
    assert held["allocated"] - held["before"] > 230_000_000
    assert abs(held["mapped"] - held["allocated"]) < 20_000_000
    assert held["freed"] - held["before"] > 200_000_000
    assert held["given"] - held["before"] < 30_000_000
