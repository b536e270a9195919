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
from plait.server.state import Keeping, PortState, RunRecord, scratch_root, state_root


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


def test_the_state_of_a_newer_plait_is_refused_in_one_sentence(tmp_path):
    """Its server may still run, and what it wrote may mean something else; a record of before versions is read."""
    state = PortState.claim(tmp_path, 1)
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
    """PLAIT_STATE_DIR wins, and is made private."""
    root = state_root({"PLAIT_STATE_DIR": str(tmp_path / "s"), "HOME": str(tmp_path)})
    assert root == tmp_path / "s"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "environ", [{}, {"HOME": ""}, {"HOME": "/proc/nothing"}, {"XDG_STATE_HOME": "/proc/x", "HOME": "/proc/y"}]
)
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


def test_serve_state_root_refuses_a_folder_that_others_may_write(tmp_path):
    """Somebody else could plant a record there that makes us kill things."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(StateError, match="others may write"):
        state_root({"PLAIT_STATE_DIR": str(shared)})


def test_serve_only_one_plait_per_port(tmp_path):
    """The second claim of a port is refused while the first lives, and another port is free."""
    first = PortState.claim(tmp_path, 8000)
    first.write(record(command=ProcessId(4711, 1)))
    with pytest.raises(StateError, match=r"port 8000 \(process 4711\)"):
        PortState.claim(tmp_path, 8000)
    PortState.claim(tmp_path, 8001).release()
    first.release()
    PortState.claim(tmp_path, 8000).release()


def test_serve_record_survives_a_round_trip(tmp_path):
    """The next start reads what this one wrote; a broken file reads as none."""
    written = record(ray_folder="/x", processes=(ProcessId(3, 4), ProcessId(5, 6)))
    state = PortState.claim(tmp_path, 1)
    state.write(written)
    state.release()
    again = PortState.claim(tmp_path, 1)
    assert again.previous == written
    again.release()
    (again.folder / "run.json").write_text('{"run_id": 1}')
    last = PortState.claim(tmp_path, 1)
    assert last.previous is None
    last.release()


def test_a_full_disk_leaves_the_record_as_it_was(tmp_path):
    """Nothing half written stays, and the next try may succeed (finding 5)."""
    state = PortState.claim(tmp_path, 1)
    state.write(record())
    (state.folder / "run.json.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        state.note_processes(frozenset({ProcessId(3, 4)}))
    assert [path.name for path in state.folder.iterdir() if path.name.startswith("run.json")] == ["run.json"]
    assert state.record == record()
    state.note_processes(frozenset({ProcessId(3, 4)}))
    state.release()
    again = PortState.claim(tmp_path, 1)
    assert again.previous == record(processes=(ProcessId(3, 4),))
    again.release()


def test_a_server_whose_state_cannot_be_written_serves_on_and_says_so_once(tmp_path):
    """Its list of processes is for the next start; a full disk is no reason to stop (finding 5)."""
    state, said = PortState.claim(tmp_path, 1), []
    state.write(record())
    keeping = Keeping(state.folder, said.append)
    found = frozenset({ProcessId(3, 4)})
    for _ in range(2):
        (state.folder / "run.json.new").symlink_to("/dev/full")
        keeping(lambda: state.note_processes(found))
    assert said == [f"plait: WARNING: {state.folder} cannot be written: No space left on device"]
    assert state.record.processes == ()
    keeping(lambda: state.note_processes(found))
    assert state.record.processes == (ProcessId(3, 4),)
    state.release()


def test_a_log_that_has_grown_starts_again_and_the_lines_before_stay_once(tmp_path):
    """Writers go on through the descriptors that they have, from the new start of the file (finding 5)."""
    state = PortState.claim(tmp_path, 1)
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
    state.release()


def test_serve_token_is_private_and_replaced_if_it_was_readable(tmp_path):
    """Ray's token is mode 0600, stays the same, and one that others could read is not trusted again."""
    state = PortState.claim(tmp_path, 1)
    path = state.token_path()
    token = path.read_text()
    assert len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert state.token_path().read_text() == token
    path.chmod(0o644)
    assert state.token_path().read_text() != token
    state.release()


def test_serve_clean_up_ends_the_dead_runs_processes_and_folder_only(tmp_path):
    """After kill -9: recorded and marked processes go, and so does Ray's folder; a reused pid stays."""
    sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
    orphan = subprocess.Popen(sleep, env={**os.environ, processes.RUN_ID_VARIABLE: "dead-run"})
    bystander = subprocess.Popen(sleep)
    folder = scratch_root() / f"r-test{os.getpid()}"
    folder.mkdir()
    try:
        reused = ProcessId(bystander.pid, processes.identify(bystander.pid).start_ticks - 1)
        state = PortState.claim(tmp_path, 1)
        state.write(record(run_id="dead-run", ray_folder=str(folder), processes=(reused,)))
        state.release()
        again = PortState.claim(tmp_path, 1)
        ended = leftovers.clean_up(again)
        assert {process.pid for process in ended} == {orphan.pid}
        assert orphan.wait(60) != 0
        assert bystander.poll() is None
        assert not folder.exists()
        assert not (again.folder / "run.json").exists()
        again.release()
    finally:
        for process in (orphan, bystander):
            process.kill()
            process.wait()


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
state.note_processes(frozenset(map(processes.identify, (agent.pid, watcher.pid))))
print(watcher.pid, named.pid, agent.pid, flush=True)
time.sleep(1000)
"""


def test_what_a_killed_command_leaves_ends_without_the_next_start(tmp_path):
    """Processes that no longer have a parent, marked and recorded ones, Ray's folder, and what has seen to it."""
    folder = scratch_root() / f"r-killed{os.getpid()}"
    folder.mkdir()
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path), str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        left = [processes.identify(int(pid)) for pid in command.stdout.readline().split()]
        assert len(left) == 3
        assert all(map(processes.is_running, left))
        assert folder.exists()
        command.kill()
        command.wait()
        assert processes.wait_until_gone(left, timeout_s=120) == []
        assert not folder.exists()
        assert bystander.poll() is None
    finally:
        command.stdout.close()
        for process in (command, bystander):
            process.kill()
            process.wait()


def test_serve_clean_up_reaches_dead_runs_on_other_ports(tmp_path):
    """A start on one port also clears what a killed run on another left, and leaves a living run alone."""
    orphans = {}
    for port in (1, 2):
        environ = {**os.environ, processes.RUN_ID_VARIABLE: f"run-{port}"}
        orphans[port] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], env=environ)
        state = PortState.claim(tmp_path, port)
        state.write(record(run_id=f"run-{port}", ray_folder="/nowhere"))
        if port == 1:
            state.release()  # dead: nobody holds its lock
    try:
        leftovers.clean_up_others(tmp_path)
        assert orphans[1].wait(60) != 0
        assert orphans[2].poll() is None
        assert (state.folder / "run.json").exists()
        state.release()
    finally:
        for process in orphans.values():
            process.kill()
            process.wait()


def test_serve_clean_up_never_removes_a_folder_that_is_not_ours(tmp_path):
    """A record that points elsewhere removes nothing there."""
    precious = tmp_path / "r-precious"
    precious.mkdir()
    state = PortState.claim(tmp_path / "s", 1)
    state.previous = record(ray_folder=str(precious))
    leftovers.clean_up(state)
    assert precious.is_dir()
    state.release()


def test_serve_clean_up_of_an_attached_run_ends_nothing(tmp_path):
    """A run that only attached owns no processes."""
    sleep = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        state = PortState.claim(tmp_path, 1)
        state.previous = record(address="10.0.0.1:6379", processes=(processes.identify(sleep.pid),))
        assert leftovers.clean_up(state) == ()
        assert sleep.poll() is None
        state.release()
    finally:
        sleep.kill()
        sleep.wait()


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
