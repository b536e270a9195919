"""The application of a placed configuration around the fake engine, as Serve's configuration names it."""

# No `from __future__ import annotations` here: Serve reads the class of `build`'s argument from its signature.
from ray import serve

from fakes.serve import FakeSource
from plait.app import AppArgs, compose


def build(args: AppArgs) -> serve.Application:
    """Build it; nothing imports torch."""
    return compose(args, FakeSource(step_s=0.01))
