"""Fixtures of the whole suite. Models and the Ray cluster are made once a session."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

# Processes that tests start find what these folders have: fakes are named as strings, `module:name`.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before diffusers imports Triton: GPU kernels run line by line

from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from plait_kernels.executors import background
from support.cluster import TESTS, shared_serve, starters, stop_shared

pytest_plugins = ["support.again", "support.skips", "pytester"]

__all__ = ["shared_serve", "starters"]

# Two cores, several processes: one thread each is what the numbers in the tests assume.
torch.set_num_threads(1)

# A process that has loaded every library's modules looks through a million objects each time: a tenth of its time.
gc.set_threshold(50_000, 20, 100)

# A shell starts its background jobs with Ctrl-C ignored, and Python keeps it so: tests that press it would wait.
signal.signal(signal.SIGINT, signal.default_int_handler)


# A machine that stops for a second is no failure, and what passes today passes tomorrow. "explore" looks for what no
# run has tried yet (CONTRIBUTING.md).
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", settings.get_profile("explore"), derandomize=True)
settings.load_profile("suite")


_OWN_RAYS, _SHARED_RAY = "Rays of their own", "the session's Ray"

_GIVE_WAY = 3
"""Niceness: about half of the other's share of a core that both want."""


class _Sharing(LoadFileScheduling):
    """How the suite is shared between processes: a file's tests stay together, for its fixtures, and files that use the
    session's Ray are one group. Two Rays at a time are as many as two cores bear, so where there are more processes
    (`make test`) files that start servers with Rays of their own are a group, too. (xdist's own groups do not work with
    pytest 9.)"""

    def _split_scope(self, nodeid: str) -> str:
        group = _group(file := super()._split_scope(nodeid))
        return file if group == _OWN_RAYS and self.numnodes <= 2 else group


@cache
def _group(file: str) -> str:
    text = (TESTS.parent / file).read_text(encoding="utf-8")
    if "mark.cluster" not in text:
        return file
    return _SHARED_RAY if any(each.__name__ in text for each in (shared_serve, starters)) else _OWN_RAYS


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """See `_Sharing`."""
    return _Sharing(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts Ray goes first: servers of their own, which take longest, then the session's Ray, where the starter
    models stay once they are there. Then several parts together; units, which are many and short, are last, so that
    all processes end at about the same time."""
    integration = TESTS / "integration"
    items.sort(
        key=lambda item: (
            item.get_closest_marker("cluster") is None,
            "shared_serve" in item.fixturenames,
            "starters" in item.fixturenames,
            integration not in item.path.parents,
        )
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Of several processes, those without Ray give way to those with it, whose tests come one after the other and so
    decide how long all take."""
    if os.environ.get("PYTEST_XDIST_WORKER") and not item.get_closest_marker("cluster"):
        os.nice(max(0, _GIVE_WAY - os.nice(0)))


@pytest.fixture(scope="session", autouse=True)
def _cache_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept in the user's cache folder (converted models), and what torch.compile keeps, whose key does not have
    the instruction set that a run may be limited to, goes to one that the session's processes share, those that they
    start included."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        yield


@pytest.fixture(scope="session")
def tiny_sd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion 1.x folder. What is in it, and in those below, is read only."""
    from support.tiny import tiny_sd  # diffusers takes seconds, which who tests something else need not wait

    return tiny_sd(tmp_path_factory.mktemp("tiny") / "sd")


@pytest.fixture(scope="session")
def tiny_sdxl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion XL folder."""
    from support.tiny import tiny_sdxl

    return tiny_sdxl(tmp_path_factory.mktemp("tiny") / "sdxl")


@pytest.fixture(scope="session")
def tiny_sd_controlnets(tmp_path_factory: pytest.TempPathFactory, tiny_sd_folder: Path) -> tuple[Path, Path]:
    """Two different ControlNets for ``tiny_sd_folder``."""
    return _two_controlnets(tmp_path_factory, tiny_sd_folder)


@pytest.fixture(scope="session")
def tiny_sdxl_controlnets(tmp_path_factory: pytest.TempPathFactory, tiny_sdxl_folder: Path) -> tuple[Path, Path]:
    """Two different ControlNets for ``tiny_sdxl_folder``."""
    return _two_controlnets(tmp_path_factory, tiny_sdxl_folder)


def _two_controlnets(tmp_path_factory: pytest.TempPathFactory, base: Path) -> tuple[Path, Path]:
    from support.tiny import tiny_controlnet

    root = tmp_path_factory.mktemp("tiny")
    return tiny_controlnet(root / "control-a", base, seed=1), tiny_controlnet(root / "control-b", base, seed=2)


@pytest.fixture(scope="module", autouse=True)
def _nothing_converts_behind_the_next_file() -> Iterator[None]:
    """What a file's engines convert behind ends with the file: it would take time from others, and build modules
    while libraries' loaders patch the classes of all."""
    yield
    background.wait()


@pytest.fixture(autouse=True)
def _ctrl_c_is_as_it_was() -> Iterator[None]:
    """Whoever leaves another handler behind fails here, not the next test that presses Ctrl-C."""
    yield
    left = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert left is signal.default_int_handler


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The tests' own Ray ends with the last test that may use it."""
    if item.get_closest_marker("cluster") and not (nextitem and nextitem.get_closest_marker("cluster")):
        stop_shared()
