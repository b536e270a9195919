"""OpenVINO's one `Core` of this process, kept until the process ends.

Loading its CPU plugin gives the thread that does so an alternate signal stack, and unloading it frees that stack,
whichever thread unloads (OpenVINO 2026.4). Were the last user dropped by another thread, the first would keep a stack
that is gone, and its next signal, a Ctrl-C for example, would end the process with SIGSEGV. So the plugin stays loaded.

ONEDNN_MAX_CPU_ISA limits torch's instructions and half of OpenVINO's: its oneDNN obeys, the code around it does not,
and models then fail or end the process (OpenVINO 2026.4, AVX2 asked for on AVX-512). So OpenVINO does not see it.
"""

from __future__ import annotations

import functools
import os
import threading

import openvino as ov
import torch

_ONE = threading.Lock()
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def core() -> ov.Core:
    """Return it, made at the first call. Thread-safe."""
    with _ONE:
        return _core()


@functools.cache
def _core() -> ov.Core:
    made = ov.Core()
    limits = {name: os.environ[name] for name in _LIMITS if name in os.environ}
    if limits:
        torch.ops.mkldnn._is_mkldnn_bf16_supported()  # a oneDNN reads its limit once, when first asked: torch's now
        try:
            for name in limits:
                del os.environ[name]
            made.get_property("CPU", "OPTIMIZATION_CAPABILITIES")  # and OpenVINO's now
        finally:
            os.environ.update(limits)
    return made
