"""An engine of two base models of which one fits: images, load, switch, sleep, and what each leaves of the memory."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from plait_bench.gpu.rows import GpuRun
from plait_serving.diffusion.assemble import build_engine_of
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.published.architectures import ARCHITECTURES, FamilyName
from plait_serving.diffusion.published.scaled import scaled_down
from plait_serving.diffusion.settings import EngineSettings
from plait_serving.diffusion.values import ImageRequest, Scheduler
from plait_serving.random_models import DtypeName
from plait_serving.random_models.write import write_model

_STEPS, _FEW = 20, 2
_POLL_S, _PATIENCE_S = 0.05, 60.0


def switching(run: GpuRun) -> None:
    """Write the models, then ask for one and the other."""
    architecture = scaled_down(FamilyName.SD15) if run.tiny else ARCHITECTURES[FamilyName.SD15]
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch) / name for name in ("a", "b")}
        dtype = DtypeName.FLOAT16 if run.on_gpu else DtypeName.FLOAT32
        write_model(architecture, folders["a"], seed=0, dtype=dtype, report=lambda *_: None)
        shutil.copytree(folders["a"], folders["b"])
        nbytes = sum(path.stat().st_size for path in folders["a"].rglob("*.safetensors"))
        one = EngineSettings(
            model=folders["a"], device=str(run.device), converts=False, prepared_folder=Path(scratch) / "made"
        )
        settings = {name: replace(one, model=folder) for name, folder in folders.items()}
        engine = build_engine_of(settings, memory_bytes=int(1.5 * nbytes) + (1 << 30 if run.tiny else 0))
        try:
            _measured(run, engine)
        finally:
            engine.stop(drain_s=0)


def _measured(run: GpuRun, engine: Engine) -> None:
    def image_s(model: str) -> float:
        family = engine.pool.first.family
        began_s = time.perf_counter()
        request = ImageRequest(
            request_id="gpu", model=model, prompt="a cat", width=family.width, height=family.height,
            steps=_FEW if run.tiny else _STEPS, guidance_scale=5.0, seed=1, scheduler=Scheduler.EULER,
        )  # fmt: skip
        engine.generate(request)
        return time.perf_counter() - began_s

    for number in range(3):
        run.row("switching", f"image {number + 1}", image_s("a"), metric="s", unit="s")
        time.sleep(_POLL_S if run.tiny else 2.0)  # for the graphs
    run.row("switching", "held", run.held_bytes(), metric="held", unit="bytes")
    for model in ("b", "a"):
        run.row("switching", f"switch to {model}", image_s(model), metric="s", unit="s")
        run.row("switching", f"held after {model} came", run.held_bytes(), metric="held", unit="bytes")
    for model, seconds in engine.pool.statistics().load_s.items():
        run.row("switching", f"load {model}", seconds, metric="s", unit="s")
    engine.rest("a", asleep=True)
    until_s = time.monotonic() + _PATIENCE_S
    while "a" in engine.pool.statistics().resident and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    run.row("switching", "held asleep", run.held_bytes(), metric="held", unit="bytes")
    run.row("switching", "wake", image_s("a"), metric="s", unit="s")
