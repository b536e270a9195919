"""What the process behind every request loads: it starts with each server, and waits for its imports."""

from __future__ import annotations

import subprocess
import sys

PICTURES_ALONE = """
import sys
sys.modules["torch"] = None  # whoever imports it fails
from unittest.mock import Mock
import plait.app, plait.tuning.service.actor, plait.tuning.service.http
from plait.config import ServerSection
from plait_serving.deployments.ingress import Ingress
app = Ingress(Mock(), lambda: plait.app.http_settings(ServerSection())).__serve_build_asgi_app__()
"""


def test_an_ingress_of_pictures_alone_needs_no_torch() -> None:
    """It takes long to load and much memory; only those who rank hold tensors."""
    done = subprocess.run([sys.executable, "-c", PICTURES_ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
