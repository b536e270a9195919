"""The application of a placed configuration around the fake engine, as Serve's configuration names it."""

# No `from __future__ import annotations` here: Serve reads the class of `build`'s argument from its signature.
from ray import serve

from fakes.serve import FakeSource
from plait.app import AppArgs, bind
from plait.deployments import deployments


def build(args: AppArgs) -> serve.Application:
    """Build it; nothing imports torch."""
    return bind(deployments(args, engine=FakeSource(step_s=0.01)), node_classes=args.node_classes)
