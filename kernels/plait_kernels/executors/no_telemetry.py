"""Imported before `openvino`, whose import reports usage over the network unless `openvino_telemetry` is missing.

It does so in a forked copy of the process. A server has other threads, whose locks nobody opens in the copy: one that
waited for standard input's for ever kept the server's pipes open.
"""

from __future__ import annotations

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # an import of it raises ImportError
