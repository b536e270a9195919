"""The build of torch, and the devices that it finds or misses."""

from __future__ import annotations

from pathlib import Path

from plait.doctor.findings import CheckResult, finding, warning

__all__ = ["check_torch"]


def check_torch(dev: Path = Path("/dev")) -> list[CheckResult]:
    """Check that torch can be imported, and that its build fits the GPUs of the machine."""
    try:
        import torch
    except ImportError as error:
        return [finding("torch", False, f"cannot be imported: {error}", "install it again")]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    gpus = sorted(path.name for path in dev.glob("nvidia[0-9]*"))
    if torch.version.cuda is None:
        detail = f"{torch.__version__} ({build} build)" + (f", but there are {', '.join(gpus)}" if gpus else "")
        return [warning("torch", not gpus, detail, "install a CUDA build of torch: these GPUs stay idle")]
    found = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    detail = f"{torch.__version__} ({build} build), devices: {', '.join(found) or 'none'}"
    if not found and gpus:
        detail += f", though there are {', '.join(gpus)}"
    advice = "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES; without GPUs the CPU build saves gigabytes"
    return [warning("torch", bool(found), detail, advice)]
