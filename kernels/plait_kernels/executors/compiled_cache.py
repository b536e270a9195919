"""What compiling a model for any shape gave, kept beside it: a later start reads it in a tenth of the time.

OpenVINO's own format without the weights (a few MB), which are read from the model's file. An own digest says whether
a file is whole: it is written by one process while others read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from plait_kernels.executors.openvino_core import core

_log = logging.getLogger(__name__)

_DIGEST_BYTES = 32
_FROM_FILE = "WeightlessCacheAttribute_0"
_FACTS = ("FULL_DEVICE_NAME", "DEVICE_ARCHITECTURE", "OPTIMIZATION_CAPABILITIES")


def inline_integers(model: ov.Model) -> None:
    """Have a compiled model's export hold its integers. Before it is compiled.

    Compiling rewrites shapes and axes, for example as int32, and importing would read them from the file as they were:
    the model then fails or computes something else (OpenVINO 2026.4).
    """
    for node in model.get_ops():
        if node.get_type_name() == "Constant" and node.get_element_type().is_integral():
            facts = node.get_rt_info()
            if _FROM_FILE in facts:
                del facts[_FROM_FILE]


class CompiledCache:
    """The compiled forms of one converted model, by options and processor. Processes may share the folder."""

    def __init__(self, folder: Path, weights: Path) -> None:
        """`folder` holds them; `weights` is the model's file of constants."""
        self._folder = folder
        self._weights = weights

    def load(self, options: Mapping[str, Any]) -> ov.CompiledModel | None:
        """Return the compiled model, or None if there is none that can be used."""
        path = self._path(options)
        try:
            kept = path.read_bytes()
        except OSError:
            return None
        body = memoryview(kept)[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != kept[:_DIGEST_BYTES]:
            _log.warning("%s is damaged and will be made again", path)
            return None
        config = {**options, "WEIGHTS_PATH": str(self._weights)}
        try:
            return core().import_model(ov.Tensor(np.frombuffer(body, dtype=np.uint8)), "CPU", config)
        except RuntimeError as error:
            _log.warning("%s cannot be read and will be made again: %s", path, " ".join(str(error).split())[:200])
            return None

    def save(self, options: Mapping[str, Any], compiled: ov.CompiledModel) -> None:
        """Keep what `compile_model` made with `options`. Where nothing can be written, the next start compiles."""
        path = self._path(options)
        written = None
        try:
            body = compiled.export_model().getvalue()
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=f".{path.name}.", delete=False) as file:
                written = Path(file.name)
                file.write(hashlib.sha256(body).digest() + body)
            written.replace(path)
        except (OSError, RuntimeError) as error:
            _log.warning("%s cannot be kept: %s", path, " ".join(str(error).split())[:200])
            if written is not None:
                with suppress(OSError):
                    written.unlink()

    def _path(self, options: Mapping[str, Any]) -> Path:
        facts = [str(core().get_property("CPU", name)) for name in _FACTS]
        made = json.dumps([sorted((name, str(value)) for name, value in options.items()), facts])
        return self._folder / f"compiled-{hashlib.sha256(made.encode()).hexdigest()[:16]}.blob"
