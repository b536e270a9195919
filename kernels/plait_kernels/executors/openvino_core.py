"""OpenVINO's one `Core` of this process, kept until the process ends.

Loading its CPU plugin gives the thread that does so an alternate signal stack, and unloading it frees that stack,
whichever thread unloads (OpenVINO 2026.4). Were the last user dropped by another thread, the first would keep a stack
that is gone, and its next signal, a Ctrl-C for example, would end the process with SIGSEGV. So the plugin stays loaded.
"""

from __future__ import annotations

import functools
import threading

import openvino as ov

_ONE = threading.Lock()


def core() -> ov.Core:
    """Return it, made at the first call. Thread-safe."""
    with _ONE:
        return _core()


@functools.cache
def _core() -> ov.Core:
    return ov.Core()
