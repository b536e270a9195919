"""What `images.dtype: auto` means where every process runs on this machine: settled once, before any of them starts, so
that all replicas compute alike and a seed keeps its image.

On a CPU that is bfloat16 where the processor has instructions for it and the model is large enough to gain by them;
float32 otherwise. On a cluster of other machines nothing is settled here: replicas then take float32 on any CPU, as
processors may differ. A GPU's replica takes float16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plait.errors import told
from plait.offline.inventory import tensors_of
from plait_kernels.cores import has_bfloat16
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families import family_row
from plait_serving.diffusion.knobs import Exact
from plait_serving.diffusion.sources.file_kinds import DENOISER
from plait_serving.images.config import BaseSource, ImagesSection

_PAYS_FROM_BYTES = 250_000_000
"""Of the model that steps, from which on bfloat16 is taken: Stable Diffusion 1.5's UNet has 1.7 GB, and `plait bench
images` has recorded 0.114 images/s there and 0.080 in float32 (`sd15-bf16-single`, `sd15-single`). The starter's has
12 MB."""
_GPUS = ("nvidia[0-9]*", "kfd", "dxg")
"""Device files of GPUs: NVIDIA's, AMD's, those of Windows' subsystem."""


def with_dtype(
    images: ImagesSection, *, devices: Path = Path("/dev"), native: Callable[[], bool] = has_bfloat16
) -> ImagesSection:
    """Return the section with its dtype named, if this machine's CPU will run the model; else as it is. Logs
    that the CPU has no instructions for bfloat16 if that was asked for.

    A hub id is downloaded if it is not here yet. `devices`: where device files are; `native`: whether the CPU computes
    bfloat16. Raises `PlaitError` if the download fails.
    """
    if not _on_cpu(images, devices):
        return images
    if images.dtype == "bfloat16" and not native():
        from plait_serving.diffusion.memory import warn_of_emulation

        warn_of_emulation()
    if images.dtype != "auto":
        return images
    # Whoever asks for diffusers' very bits means those of its own default.
    may_gain = images.knobs.exact is not Exact.ALWAYS and native()
    gains = may_gain and max(map(_bytes_of, images.base_models.values())) >= _PAYS_FROM_BYTES
    return images.model_copy(update={"dtype": "bfloat16" if gains else "float32"})


def _on_cpu(images: ImagesSection, devices: Path) -> bool:
    if images.device != "auto":
        return images.device == "cpu"
    return not images.num_gpus if images.num_gpus is not None else not has_gpu(devices)


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether this machine has a device file of a GPU."""
    return any(found for pattern in _GPUS for found in devices.glob(pattern))


def _bytes_of(base: BaseSource) -> int:
    """Return the size of the files of the model that steps; 0 if there are none, which is reported where they are
    loaded."""
    folder = Path(base.folder)
    if base.is_file:
        sizes = {key: info.end - info.begin for key, info in tensors_of(folder).items()}
        # A file of FLUX.1 may be its transformer alone, without a beginning of names.
        return sum(size for key, size in sizes.items() if key.startswith(DENOISER)) or sum(sizes.values())
    if base.is_hub_id and base.revision is not None and not folder.is_dir():
        from plait_serving.diffusion.sources.hub import fetch_from_hub

        with told(ModelError):
            folder = fetch_from_hub(base.model, base.revision)
    try:
        part = folder / family_row(folder).denoiser
    except ModelError:
        return 0
    return sum(path.stat().st_size for path in part.glob("*.safetensors") if path.is_file())  # no link to nowhere
