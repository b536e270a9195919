"""What `plait serve` says and where it goes, and which signals end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from plait.config import PlaitConfig
from plait.server.supervise import StopSignals, warning_lines

KEYS = [{"sha256": "0" * 64, "tenant": "acme", "role": "admin"}]


NAMING = (
    "plait: any host name is answered to, and URLs of kept images begin with the one that a request says; "
    "images.results.public_url names the server's"
)


@pytest.mark.parametrize(
    ("results", "server", "is_said"),
    [
        ({"folder": "kept"}, {"host": "0.0.0.0", "api_keys": KEYS}, True),
        ({"folder": "kept"}, {"api_keys": KEYS}, True),
        ({"folder": "kept"}, {}, False),
        ({"folder": "kept"}, {"allowed_hosts": ["plait.example"], "api_keys": KEYS}, False),
        ({"folder": "kept", "public_url": "https://plait.example"}, {"api_keys": KEYS}, False),
        (None, {"api_keys": KEYS}, False),
    ],
)
def test_a_server_that_answers_to_any_name_says_what_urls_begin_with(results, server, is_said):
    """Where it keeps images for URLs, and none is configured."""
    config = PlaitConfig.model_validate({"images": {"results": results}, "server": server})
    assert list(warning_lines(config, config.server)) == ([NAMING] if is_said else [])


@pytest.fixture
def dispositions():
    """What this process does at the signals that end a server; as it was in the end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("before", "counted"), [(signal.SIG_IGN, 0), (signal.SIG_DFL, 1)])
def test_a_server_under_nohup_outlives_its_terminal(dispositions, before, counted):
    """A SIGHUP that was ignored when it began still is; any other one ends it."""
    signal.signal(signal.SIGHUP, before)
    signals = StopSignals()
    signals.interrupts = False
    for _ in range(2):  # as often as Ray may have changed them
        signals.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert signals.count == counted


INTERRUPTED = """
import atexit, os, pathlib, signal, sys, time
from plait.config import load_config
from plait.server.cluster import Cluster
from plait.server.supervise import serve

def start_local(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

Cluster.start_local = start_local
atexit.register(pathlib.Path(sys.argv[1]).touch)
sys.exit(serve(load_config(overrides=["server.port=0"]), compose=lambda _: (), num_cpus=1))
"""


def test_a_start_that_is_interrupted_ends_without_the_exit_handlers_of_its_ray(tmp_path):
    """They would wait for what was just killed, and make its folder again."""
    environ = {**os.environ, "PLAIT_STATE_DIR": str(tmp_path / "state")}
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "called")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-2:]) == (0, ["plait: stopped while starting", "plait: stopped"])
    assert not (tmp_path / "called").exists()


CODE = """
import os, sys
from pathlib import Path
from plait.server.supervise import Console

console = Console.divert(Path(sys.argv[1]))
os.write(1, b"of others\\n")
os.write(2, b"of others, too\\n")
console.data("an address")
console.progress("how it goes")
console.restore()
print("why it ended", file=sys.stderr)
"""


def test_our_words_reach_the_terminal_and_those_of_others_the_log(tmp_path):
    """While diverted only our lines come out; after restore the last sentence does, too."""
    log = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", CODE, str(log)], capture_output=True, text=True, check=True)
    assert done.stdout == "an address\n"
    assert done.stderr == "how it goes\nwhy it ended\n"
    assert log.read_text() == "of others\nof others, too\n"
