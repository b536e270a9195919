"""The `plait` command's root: quick, honest exit codes, one sentence per failure."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from plait.cli import main as root
from plait.errors import PlaitError
from plait_serving.diffusion.errors import RequestError


def test_cli_help_loads_nothing_that_only_a_command_needs():
    """`plait --help` lists every command and is quick; the help of a command never waits for the heavy libraries."""
    code = (
        "import sys; from plait.cli.main import COMMANDS, main; codes = [main(['--help'])];"
        "heavy = {'numpy', 'pydantic', 'yaml', 'httpx2', 'plait.config'} & set(sys.modules);"
        "codes += [main([command, '--help']) for command in COMMANDS];"
        "heavy |= {'torch', 'ray', 'diffusers', 'transformers', 'PIL', 'fastapi'} & set(sys.modules);"
        "sys.exit(f'{codes} {heavy}' if any(codes) or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    listed, *helps = done.stdout.split("Usage: ")[1:]
    assert all(name in listed for name in root.COMMANDS)
    assert len(helps) == len(root.COMMANDS)


def test_cli_help_of_a_command_is_its_help(capsys):
    """`plait help tune run` is `plait tune run --help`."""
    said = []
    for arguments in (["help", "tune", "run"], ["tune", "run", "--help"], ["help"], ["--help"]):
        assert root.main(arguments) == 0
        said.append(capsys.readouterr().out)
    assert "picks" in said[0]
    assert (said[0], said[2]) == (said[1], said[3])


@pytest.mark.parametrize("command", ["", *sorted(root.COMMANDS), "models package", "deploy place", "tune run"])
def test_cli_help_names_no_file_of_the_repository(command, capsys):
    """Whoever has installed plait has none."""
    assert root.main(["help", *command.split()]) == 0
    assert not re.search(r"\.md|Dockerfile|(serving|deploy|tests|loadtest|autoconfig)/", capsys.readouterr().out)


def test_cli_says_in_one_sentence_that_its_output_has_no_room():
    """A full disk behind a redirection."""
    command = [sys.executable, "-m", "plait.cli.main", "--version"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "plait: the output: No space left on device\n")


def test_cli_without_any_stream_writes_into_no_file_of_its_own(tmp_path):
    """As some start their services: the first file that is opened would be its stdout."""
    code = (
        "import sys; from plait.cli.main import main; code = main(['--version']); file = open('file', 'w');"
        "print('data', flush=True); sys.exit(code or file.fileno() <= 2)"
    )
    run = f"exec {sys.executable} -c {shlex.quote(code)} <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", run], cwd=tmp_path, timeout=60, check=False).returncode == 0
    assert not (tmp_path / "file").read_text()


def test_cli_completes_what_bash_asks_for(monkeypatch, capsys):
    """Commands and options, by the script that `plait completion bash` prints; else bash offers files."""
    assert root.main(["completion", "bash"]) == 0
    script = f"{capsys.readouterr().out}complete -p plait"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "complete -o default -C 'plait --complete' plait\n"
    for line, offered in (
        ("plait help ge", ["generate"]), ("plait tune re", ["report"]), ("plait models random --s", ["--seed"]),
        ("plait nosuch ", []), ("plait tune run p", []),
    ):  # fmt: skip
        monkeypatch.setenv("COMP_LINE", f"{line} more")
        monkeypatch.setenv("COMP_POINT", str(len(line)))
        assert root.main(["--complete", "plait", "x", "y"]) == 0
        assert capsys.readouterr().out.split() == offered


@pytest.mark.parametrize(("arguments", "unbuffered"), [(["--help"], "1"), (["completion", "bash"], "")])
def test_cli_a_reader_that_has_had_enough_hears_no_complaint(arguments, unbuffered):
    """As `head` that has its lines."""
    reads, writes = os.pipe()
    os.close(reads)
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "plait.cli.main", *arguments]
    with os.fdopen(writes, "w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, env=environ, timeout=60, check=False)
    assert (done.returncode != 0, done.stderr) == (True, b"")


def test_cli_version_is_one_line(capsys):
    """--version prints the name and the version."""
    assert root.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("plait ")


def test_cli_a_command_that_is_to_end_ends_as_by_ctrl_c(monkeypatch, capsys):
    """SIGTERM: what it would remove then is removed, and what the process does at the next one is as before."""
    removed = []

    def app(**_):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            removed.append(True)

    monkeypatch.setitem(sys.modules, "plait.cli.serve", types.SimpleNamespace(app=app))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert (root.main(["serve"]), removed) == (130, [True])
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "plait: interrupted\n"


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (PlaitError("the port is busy"), 1, "plait serve: the port is busy\n"),
        (RequestError("bad steps", param="steps"), 1, "plait serve: bad steps\n"),
        (KeyboardInterrupt(), 130, "plait: interrupted\n"),
        (SystemExit(99), 99, ""),
        (SystemExit(None), 0, ""),
    ],
)
def test_cli_turns_how_a_command_ends_into_an_exit_code(monkeypatch, capsys, raised, code, said):
    """Errors for people become one sentence; interrupts and thresholds keep their codes."""

    def app(**_):
        raise raised

    monkeypatch.setitem(sys.modules, "plait.cli.serve", types.SimpleNamespace(app=app))
    assert root.main(["serve"]) == code
    assert capsys.readouterr().err == said


def test_cli_a_bug_keeps_its_traceback(monkeypatch):
    """What nobody foresaw is not dressed up as a user's mistake."""

    def app(**_):
        raise ZeroDivisionError

    monkeypatch.setitem(sys.modules, "plait.cli.serve", types.SimpleNamespace(app=app))
    with pytest.raises(ZeroDivisionError):
        root.main(["serve"])


def test_cli_show_config_prints_a_plait_yaml(tmp_path, capsys):
    """`serve --show-config` prints the configuration in force, with options and --set applied, and starts nothing."""
    import yaml

    path = tmp_path / "plait.yaml"
    path.write_text("server: {port: 9001, host: 127.0.0.2}")
    assert root.main(["serve", str(path), "--port", "9002", "--set", "images.knobs.threads=3", "--show-config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["server"]["port"] == 9002
    assert shown["server"]["host"] == "127.0.0.2"
    assert shown["images"]["knobs"]["threads"] == 3


def test_cli_serve_takes_a_folder_of_the_working_directory(tmp_path, monkeypatch, capsys):
    """With or without a leading ./: what is there is no hub id."""
    import yaml

    (tmp_path / "models" / "\U0001f600").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for given in ("models/\U0001f600", "./models/\U0001f600"):
        assert root.main(["serve", "--model", given, "--show-config"]) == 0
        shown = yaml.safe_load(capsys.readouterr().out)
        assert shown["images"]["model"] == str(tmp_path / "models" / "\U0001f600")


def test_cli_show_deployments_prints_the_table(tmp_path, capsys):
    """`serve --show-deployments`: a line for each deployment, then what a change of each key does, as JSON too."""
    path = tmp_path / "plait.yaml"
    path.write_text(
        "images: {replicas: {min: 1, max: 3}, num_cpus: 2, controlnets: {edges: {folder: /edges, num_gpus: 0.5}}}\n"
        "recommend: {models: {shop: {folder: /shop, cn: {knobs: {window: 7}}}}}\n"
    )
    assert root.main(["serve", str(path), "--show-deployments"]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert lines[2] == ["engine", "EngineReplica", "1", "to", "3", "2", "0"]
    assert lines[3] == ["controlnet-edges", "ControlNetDeployment", "1", "0.4", "0.5"]
    assert "window=7" in shown
    assert root.main(["serve", str(path), "--show-deployments", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["ingress", "engine", "controlnet-edges", "cn-shop", "hn-shop"]
    changes = rows["engine"]["changes"]
    assert [changes[key] for key in ("images.dtype", "num_cpus", "replicas", "largest_batch")] == [
        "restart", "restart", "scale", "reconfigure",
    ]  # fmt: skip
    assert rows["cn-shop"]["knobs"]["window"] == 7
    assert "images.results" not in changes
    assert rows["ingress"]["changes"]["server.tenants"] == "restart"
