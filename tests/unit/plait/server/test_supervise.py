"""What `plait serve` says."""

from __future__ import annotations

from plait.server.supervise import start_line


def test_the_line_that_it_is_ready_lists_what_is_not_loaded():
    """Each with its reason, and not among what is served."""
    refused = {"dream": "/models/dream: no such folder", "ControlNet wide": "made for sdxl, the base model is sd1"}
    assert start_line(["emoji", "dream", "picks"], refused, "http://127.0.0.1:8000", 12.4) == (
        "plait serves emoji, picks at http://127.0.0.1:8000 (ready after 12 s); not loaded: dream "
        "(/models/dream: no such folder); ControlNet wide (made for sdxl, the base model is sd1)"
    )
    assert start_line(["emoji"], {}, "http://h", 1.0) == "plait serves emoji at http://h (ready after 1 s)"
