"""Nobody sleeps through news."""

from __future__ import annotations

import threading

from plait_serving.diffusion.request_registry import RequestRegistry

WAIT_S = 60.0


def test_who_is_woken_before_it_sleeps_does_not_sleep():
    """A model may have been loaded between the look for it and the sleep; it is told once."""
    registry = RequestRegistry()
    registry.wake()
    waits = threading.Thread(target=registry.wait_for_news, args=(None,), daemon=True)
    waits.start()
    waits.join(WAIT_S)
    assert not waits.is_alive()
    waits = threading.Thread(target=registry.wait_for_news, args=(None,), daemon=True)
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    registry.wake()
    waits.join(WAIT_S)
    assert not waits.is_alive()
