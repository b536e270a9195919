"""One thread at a time builds, loads or traces modules.

Loaders of libraries patch `torch.nn.Module` for the whole process while they load (what others build meanwhile lands on
the meta device), and torch's tracer keeps a map of modules in a global (two traces at once mix their graphs).
"""

from __future__ import annotations

import threading

MODULES = threading.RLock()
"""Held by whoever builds, loads or traces a module."""
