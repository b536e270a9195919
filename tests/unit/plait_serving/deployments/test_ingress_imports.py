"""What the processes load that hold no model, or another kind of model: they start with each server, and wait for
their imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from plait.app import AppArgs
from plait.deployments import deployments
from plait_serving.deployments import INGRESS

PICTURES_ALONE = """
from unittest.mock import Mock
import plait.app, plait.deployments, plait.tuning.service.actor, plait.tuning.service.http
from plait.config import ServerSection
from plait_serving.deployments.ingress import Ingress
app = Ingress({"engine": Mock()}, lambda: plait.deployments.http_settings(ServerSection())).__serve_build_asgi_app__()
"""
RANKING = "import plait_disagg.package.read, plait_serving.deployments.ranking.worker"
GENERATE = """
from plait.offline.images import parse_order
from plait_serving.starter.preprocess import PREPROCESSORS
"""
ENGINE = """
import plait_serving.deployments.images.engine, plait_serving.deployments.images.hosted
import plait_serving.diffusion.families.unet.family
"""
BUILDING = "from plait.app import AppArgs, build\nbuild(AppArgs())"
MODULES = {row.target.partition(":")[0] for row in deployments(AppArgs()) if row.name != INGRESS}
LIBRARIES = ("diffusers", "transformers", "accelerate", "peft")


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (PICTURES_ALONE, (*LIBRARIES, "torch", "scipy", "plait_deploy.placement.policies", "plait_disagg.values")),
        (BUILDING, ("torch", *MODULES)),
        (ENGINE, ("plait_fabric",)),
        (RANKING, (*LIBRARIES, "sklearn")),
        (GENERATE, (*LIBRARIES, "torch", "scipy", "ray")),
    ],
    ids=["ingress and command", "build", "engine without ControlNet services", "ranking", "order of generate"],
)
def test_a_process_loads_nothing_that_it_does_not_need(code, absent) -> None:
    """Libraries take seconds to load and much memory: torch only for those who hold tensors, the rest for the engine.
    Of ours, what belongs to ranking or to placement's study stays away, and what deployments stand for
    (`LazyReplica`) where the application is built."""
    refuse = f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\n"  # whoever imports one of them fails
    done = subprocess.run([sys.executable, "-c", refuse + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
