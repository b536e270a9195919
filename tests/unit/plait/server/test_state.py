"""The state folder: one plait per port, private files, and clean-up after kill -9 that touches nobody else's."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from plait.errors import ServeError, StateError
from plait.server import leftovers, ports, processes
from plait.server.processes import ProcessId
from plait.server.state import Keeping, PortState, RunRecord, read_record, scratch_root, state_root


def record(**changes):
    facts = {
        "run_id": "r1",
        "boot_id": processes.boot_id(),
        "command": ProcessId(1, 2),
        "url": "http://127.0.0.1:1",
        "address": "local",
        **changes,
    }
    return RunRecord(**facts)


@pytest.fixture
def state(tmp_path):
    """The state of port 1 in the test's folder, claimed."""
    claimed = PortState.claim(tmp_path, 1)
    yield claimed
    claimed.release()


@pytest.fixture
def sleeper():
    """Starts processes that sleep, with these variables; none is left."""
    started = []

    def start(**variables):
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        started.append(subprocess.Popen(command, env={**os.environ, **variables}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_the_state_of_a_newer_plait_is_refused_in_one_sentence(state, tmp_path):
    """Its server may still run, and what it wrote may mean something else; a record of before versions is read."""
    state.write(record())
    text = (state.folder / "run.json").read_text()
    state.release()
    old = json.loads(text)
    assert old.pop("version") == 1
    assert RunRecord.from_json(json.dumps(old)) == record()
    (state.folder / "run.json").write_text(json.dumps({**old, "version": 2}))
    with pytest.raises(StateError, match="a newer plait wrote the state of this port"):
        PortState.claim(tmp_path, 1)


def test_serve_state_root_prefers_the_explicit_folder(tmp_path):
    """PLAIT_STATE_DIR wins, and is made private; somebody else could plant a record in one that others may write to,
    which makes us kill things."""
    environ = {"PLAIT_STATE_DIR": str(tmp_path / "s"), "HOME": str(tmp_path)}
    root = state_root(environ)
    assert root == tmp_path / "s"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    root.chmod(0o777)
    with pytest.raises(StateError, match="others may write"):
        state_root(environ)


@pytest.mark.parametrize("environ", [{}, {"HOME": ""}, {"XDG_STATE_HOME": "/proc/x", "HOME": "/proc/y"}])
def test_serve_state_root_falls_back_to_a_private_scratch_folder(environ):
    """Without a usable home the state goes to a folder that only this user can enter."""
    root = state_root(environ)
    assert root == scratch_root()
    assert root.stat().st_uid == os.getuid()
    assert not root.stat().st_mode & 0o022


def test_serve_state_root_makes_no_home(tmp_path):
    """A home that does not exist is not made: an empty one is used, a missing one is not."""
    (tmp_path / "home").mkdir()
    assert state_root({"HOME": str(tmp_path / "home")}) == tmp_path / "home/.local/state/plait"
    assert state_root({"HOME": str(tmp_path / "missing")}) == scratch_root()
    assert not (tmp_path / "missing").exists()


def test_serve_only_one_plait_per_port(state, tmp_path):
    """The second claim of a port is refused while the first lives, and another port is free. The next start reads what
    this one wrote; a broken file reads as none."""
    written = record(command=ProcessId(4711, 1), ray_folder="/x", processes=(ProcessId(3, 4), ProcessId(5, 6)))
    state.write(written)
    with pytest.raises(StateError, match=r"port 1 \(process 4711\)"):
        PortState.claim(tmp_path, 1)
    PortState.claim(tmp_path, 2).release()
    state.release()
    again = PortState.claim(tmp_path, 1)
    assert again.previous == written
    again.release()
    (again.folder / "run.json").write_text('{"run_id": 1}')
    last = PortState.claim(tmp_path, 1)
    assert last.previous is None
    last.release()


def test_a_full_disk_leaves_the_record_as_it_was(state):
    """Nothing half written stays, and the next try may succeed (finding 5)."""
    state.write(record())
    (state.folder / "run.json.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        state.note(processes=(ProcessId(3, 4),))
    assert [path.name for path in state.folder.iterdir() if path.name.startswith("run.json")] == ["run.json"]
    assert state.record == record()
    state.note(processes=(ProcessId(3, 4),))
    assert read_record(state.folder) == record(processes=(ProcessId(3, 4),))


def test_a_server_whose_state_cannot_be_written_serves_on_and_says_so_once(state):
    """Its list of processes is for the next start; a full disk is no reason to stop (finding 5)."""
    said = []
    state.write(record())
    keeping = Keeping(state.folder, said.append)
    found = (ProcessId(3, 4),)
    for _ in range(2):
        (state.folder / "run.json.new").symlink_to("/dev/full")
        keeping(lambda: state.note(processes=found))
    assert said == [f"plait: WARNING: {state.folder} cannot be written: No space left on device"]
    assert state.record.processes == ()
    keeping(lambda: state.note(processes=found))
    assert state.record.processes == (ProcessId(3, 4),)


def test_a_log_that_has_grown_starts_again_and_the_lines_before_stay_once(state):
    """Writers go on through the descriptors that they have, from the new start of the file (finding 5)."""
    state.rotate_log(max_bytes=10)
    with state.log_path.open("a", buffering=1) as writer:
        writer.write("short\n")
        state.rotate_log(max_bytes=10)
        assert state.log_path.read_text() == "short\n"
        writer.write("a longer line\n")
        state.rotate_log(max_bytes=10)
        writer.write("after\n")
    old = state.log_path.with_name("serve.log.1")
    assert (old.read_text(), state.log_path.read_text()) == ("short\na longer line\n", "after\n")
    assert stat.S_IMODE(old.stat().st_mode) == 0o600


def test_serve_token_is_private_and_replaced_if_it_was_readable(state):
    """Ray's token is mode 0600, stays the same, and one that others could read is not trusted again."""
    path = state.token_path()
    token = path.read_text()
    assert len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert state.token_path().read_text() == token
    path.chmod(0o644)
    assert state.token_path().read_text() != token


def test_serve_clean_up_ends_the_dead_runs_processes_and_folder_only(state, sleeper):
    """After kill -9: recorded and marked processes go, and so does Ray's folder; a reused pid stays."""
    orphan, bystander = sleeper(**{processes.RUN_ID_VARIABLE: "dead-run"}), sleeper()
    folder = scratch_root() / f"r-test{os.getpid()}"
    folder.mkdir()
    reused = ProcessId(bystander.pid, processes.identify(bystander.pid).start_ticks - 1)
    state.previous = record(run_id="dead-run", ray_folder=str(folder), processes=(reused,))
    state.write(state.previous)
    ended = leftovers.clean_up(state)
    assert {process.pid for process in ended} == {orphan.pid}
    assert orphan.wait(60) != 0
    assert bystander.poll() is None
    assert not folder.exists()
    assert not (state.folder / "run.json").exists()


COMMAND = """
import os, pathlib, subprocess, sys, time
from plait.server import processes
from plait.server.leftovers import end_with_us
from plait.server.state import PortState, RunRecord
state = PortState.claim(pathlib.Path(sys.argv[1]), 1)
me = processes.identify(os.getpid())
boot = processes.boot_id()
state.write(RunRecord(run_id="killed", boot_id=boot, command=me, url="", address="local", ray_folder=sys.argv[2]))
watcher = end_with_us(state.folder / "run.json")
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
named = subprocess.Popen(sleep, start_new_session=True, env={**os.environ, processes.RUN_ID_VARIABLE: "killed"})
agent = subprocess.Popen(sleep, start_new_session=True)  # its title has overwritten its variables, as those of Ray's do
state.note(processes=tuple(map(processes.identify, (agent.pid, watcher.pid))))
print(watcher.pid, named.pid, agent.pid, flush=True)
time.sleep(1000)
"""


def test_what_a_killed_command_leaves_ends_without_the_next_start(tmp_path, sleeper):
    """Processes that no longer have a parent, marked and recorded ones, Ray's folder, and what has seen to it."""
    folder = scratch_root() / f"r-killed{os.getpid()}"
    folder.mkdir()
    bystander = sleeper()
    command = [sys.executable, "-c", COMMAND, str(tmp_path), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        left = [processes.identify(int(pid)) for pid in process.stdout.readline().split()]
        is_there = all(map(processes.is_running, left)) and folder.exists()
        process.kill()
    assert (len(left), is_there) == (3, True)
    assert processes.wait_until_gone(left, timeout_s=120) == []
    assert not folder.exists()
    assert bystander.poll() is None


def test_serve_clean_up_reaches_dead_runs_on_other_ports(state, sleeper, tmp_path):
    """A start on one port also clears what a killed run on another left, and leaves a living run alone."""
    dead = PortState.claim(tmp_path, 2)
    orphans = []
    for each, name in ((state, "living"), (dead, "dead")):
        orphans.append(sleeper(**{processes.RUN_ID_VARIABLE: name}))
        each.write(record(run_id=name, ray_folder="/nowhere"))
    dead.release()  # nobody holds its lock
    leftovers.clean_up_others(tmp_path)
    assert orphans[1].wait(60) != 0
    assert orphans[0].poll() is None
    assert (state.folder / "run.json").exists()


def test_serve_clean_up_never_removes_a_folder_that_is_not_ours(state, tmp_path):
    """A record that points elsewhere removes nothing there."""
    precious = tmp_path / "r-precious"
    precious.mkdir()
    state.previous = record(ray_folder=str(precious))
    leftovers.clean_up(state)
    assert precious.is_dir()


def test_serve_clean_up_of_an_attached_run_ends_nothing(state, sleeper):
    """A run that only attached owns no processes."""
    theirs = sleeper()
    state.previous = record(address="10.0.0.1:6379", processes=(processes.identify(theirs.pid),))
    assert leftovers.clean_up(state) == ()
    assert theirs.poll() is None


def test_a_free_port_is_none_that_connections_are_given():
    """Ray makes connections by the hundred before Serve listens; where no other port is free, one of theirs will do."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {ports.free_port("127.0.0.1") for _ in range(20)}
    assert len(found) > 15
    assert all(20_000 <= port < first for port in found)
    taken = sorted(found)[0]
    with socket.create_server(("127.0.0.1", taken)):
        assert ports.free_port("127.0.0.1", among=range(taken, taken + 1)) >= first
    assert ports.free_port("127.0.0.1", among=range(taken, taken + 1)) == taken


def test_serve_a_host_that_is_not_ours_is_told():
    """An address of another machine cannot be listened on."""
    with pytest.raises(ServeError, match=r"cannot listen on 192\.0\.2\.1:0"):
        ports.check_port("192.0.2.1", 0)
