"""Errors of packaged models."""

from __future__ import annotations


class PackageError(Exception):
    """The folder is not a packaged model that can be served; the message names the file and what is wrong with it."""
