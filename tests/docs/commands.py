"""The commands of documents: `make` and `plait` as a shell finds them while a test runs a block.

``plait`` and ``python`` are where `make` puts them, in ``.venv/bin``, which the shell of README.md does not look into;
``pip install .`` puts ``plait`` where it does. ``plait`` is a client of three lines. The command itself runs in the
test's process, which has torch imported already: a start of its own would cost each of them five seconds. What would
serve, tune for minutes, or ask a server at its usual address, has a twin here; ``make`` says what it would do
(``make -n``).
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

from plait.cli.main import main
from plait.tuning.job.local_run import job_file
from plait_autoconfig.jobs.job_file import parse_job
from support.documents import ROOT
from support.tune_jobs import job, run_directly

USUAL_URL = "http://127.0.0.1:8000"
BLOCK_TIMEOUT_S = 240.0
_MISSED = 99

_CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as peer:
    peer.connect({address!r})
    peer.sendall(json.dumps([os.getcwd(), sys.argv[1:]]).encode() + b"\\n")
    code, out, err = json.loads(peer.makefile().read())
sys.stdout.write(out), sys.stderr.write(err)
sys.exit(code)
"""


class DocumentShell:
    """Runs the blocks of one document in a folder, in one shell as far as PATH goes. ``url``: of the server that stands
    for the usual address. ``finds_plait``: an earlier document has put ``.venv/bin`` into PATH."""

    def __init__(self, folder: Path, *, finds_plait: bool = True) -> None:
        self.folder = folder
        self.url = USUAL_URL
        self._bin, self._made = folder / ".bin", folder / ".venv" / "bin"
        self._bin.mkdir()
        self._made.mkdir(parents=True)
        elsewhere = [each for each in os.environ["PATH"].split(os.pathsep) if not (Path(each) / "plait").exists()]
        self._path = os.pathsep.join(map(str, [self._bin, *[self._made] * finds_plait, *elsewhere]))
        address = f"\0plait-documents-{os.getpid()}-{folder.name}"  # abstract: a path may have 107 bytes only
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._listener.settimeout(0.1)
        self._write("plait", _CLIENT.format(python=sys.executable, address=address), self._made)
        self._write("python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', self._made)
        self._write("generate.yaml", "images: {knobs: {threads: 1}}")  # two teams of threads on two cores spin
        make = shutil.which("make") or "make"
        self._write("pip", f'#!/bin/sh\ntest "$*" = "install ." && cp {self._made}/plait {self._bin}/plait\n')
        self._write("make", f'#!/bin/sh\nexec {make} --dry-run --directory {shlex.quote(str(ROOT))} "$@"\n')

    def close(self) -> None:
        """Commands are not answered any more."""
        self._listener.close()

    def run(self, text: str) -> str:
        """Runs a bash block; returns what it printed. Fails at the first command that fails."""
        text = text.replace(USUAL_URL, self.url).replace("curl -s ", "curl -sfS ")
        path = self._bin / "PATH"
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", f'trap \'printf %s "$PATH" > "$PATH_AFTER"\' EXIT\n{text}'],
            cwd=self.folder,
            env={**os.environ, "PATH": self._path, "PATH_AFTER": str(path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        printed: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: printed.append(process.stdout.read()))  # type: ignore[union-attr]
        reader.start()
        watchdog = threading.Timer(BLOCK_TIMEOUT_S, process.kill)
        watchdog.start()
        while process.poll() is None:
            self._answer_one()
        watchdog.cancel()
        reader.join()
        process.stdout.close()
        self._path = path.read_text() if path.exists() else self._path
        assert process.returncode == 0, f"exit code {process.returncode}:\n{text}\n{printed[0]}"
        return printed[0]

    def _answer_one(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except TimeoutError:
            return
        with peer:
            peer.settimeout(BLOCK_TIMEOUT_S)
            folder, arguments = json.loads(peer.makefile().readline())
            with contextlib.chdir(folder):
                code, out, err = self._command(arguments)
            peer.sendall(json.dumps([code, out, err]).encode())

    def _command(self, arguments: list[str]) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = self._twin(arguments)
        return code, out.getvalue(), err.getvalue()

    def _twin(self, arguments: list[str]) -> int:
        """The command, or what stands for it."""
        options = dict(itertools.pairwise(arguments))
        match arguments[:2]:
            case ["serve"]:
                return main(["serve", "--show-deployments"])
            case ["tune", "run"]:
                file = job_file(Path(arguments[2]))
                parse_job(file.read_text(encoding="utf-8"), folder=file.parent)
                run_directly(Path(options["--out"]), job(name=Path(arguments[2]).stem))
                return 0
            case ["models", "refresh"]:
                return main([*arguments, "--url", self.url])
            case ["loadtest", "run"] if "--show-config" not in arguments:
                return self._load(arguments)
            case ["loadtest", "compare"]:  # of short runs, which differ on a busy machine, or are invalid
                reports = [json.loads(Path(name).read_text(encoding="utf-8")) for name in arguments[2:4]]
                code = main(arguments) if all(report["valid"] for report in reports) else 0
                return 0 if code == _MISSED else code
            case ["generate", _]:
                return main([*arguments, "--steps", "3", "--config", str(self._bin / "generate.yaml")])
        return main(arguments)

    def _load(self, arguments: list[str]) -> int:
        """A load test of a second, or of two at its own rate. So few requests have no percentile for a threshold, and
        that this machine was late, or too busy for an SLO, is no fault of the document: it has shown enough if no
        request failed."""
        out = io.StringIO()
        short = ["--duration", "2"] if "--rate" in arguments else ["--duration", "1", "--rate", "5"]
        with contextlib.redirect_stdout(out):
            code = main([*arguments, *short])
        print(told := out.getvalue(), end="")
        is_only_late = any(verdict in told for verdict in ("INVALID RUN", "SLO MISSED", "no verdict"))
        return 0 if is_only_late and re.search(r"^errors( +0)+$", told, re.MULTILINE) else code

    def _write(self, name: str, text: str, folder: Path | None = None) -> None:
        path = (folder or self._bin) / name
        path.write_text(text)
        path.chmod(0o755)
