"""Every block of code in a guide, its pages and CONTRIBUTING.md runs, in order, in one folder per document."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.commands import USUAL_URL, DocumentShell
from plait.app import AppArgs, build
from plait.config import ServerSection, load_config
from plait_autoconfig.jobs.job_file import parse_job
from plait_deploy.placement.cluster_file import parse_cluster
from plait_serving.ranking.config import RankingSection, RankModelSection
from support.cluster import SharedServe, is_ready
from support.documents import GUIDES, CodeBlock, blocks_of, read
from support.waiting import wait_for


def run_python(file: Path) -> None:
    """Runs a file as a program would, in its folder and in this process."""
    import runpy

    before: dict[str, Any] = dict(sys.modules)
    with contextlib.chdir(file.parent):
        try:
            runpy.run_path(str(file), run_name="__main__")
        finally:
            for name in set(sys.modules) - set(before):
                if getattr(sys.modules[name], "__file__", None) == str(file):
                    del sys.modules[name]


pytestmark = pytest.mark.cluster

APP, FIRST = "documents", "README.md"
CONFIGS = {
    "plait.yaml": load_config,
    "job.yaml": lambda file: parse_job(file.read_text(encoding="utf-8"), folder=file.parent),
    "cluster.yaml": lambda file: parse_cluster(yaml.safe_load(file.read_text(encoding="utf-8"))),
}
"""Who reads a yaml block that begins with the name."""


class Servers:
    """The starter models on the session's Ray, and beside them the packages that documents have made."""

    def __init__(self, shared: SharedServe, starters: Callable[[], str]) -> None:
        self.url = f"http://127.0.0.1:{shared.port}"
        self._serve, self._starters = shared.serve, starters
        self._served: dict[str, Sequence[Path]] = {}

    def start(self, packages: Sequence[Path]) -> str:
        """Returns an address once it serves: of the starter models, or where there are packages of these alone, so that
        nothing else starts again for them."""
        if not packages:
            return self._starters()
        name = packages[0].parent.parent.name
        if self._served.get(name) != packages:
            self._served[name] = packages
            models = {folder.name: RankModelSection(folder=folder) for folder in packages}
            args = AppArgs(images=None, recommend=RankingSection(models=models), server=ServerSection(drain_s=2))
            self._serve.run(build(args), name=APP + name, route_prefix=f"/{name}")
            wait_for(lambda: is_ready(f"{self.url}/{name}"), timeout_s=240)
        return f"{self.url}/{name}"

    def stop(self) -> None:
        """Their replicas are gone."""
        for name in self._served:
            self._serve.delete(APP + name)


@pytest.fixture(scope="module")
def servers(shared_serve: SharedServe, starters: Callable[[], str]) -> Iterator[Servers]:
    """Started by the first document that needs one."""
    made = Servers(shared_serve, starters)
    yield made
    made.stop()


@pytest.mark.parametrize("document", GUIDES)
def test_the_blocks_of_a_document_run(document: str, servers: Servers, tmp_path: Path) -> None:
    """Commands and programs end well, and configurations are read by the loaders that people's files meet."""
    blocks = [block for block in blocks_of(document, read(document)) if block.reason is None]
    shell = DocumentShell(tmp_path, finds_plait=document != FIRST)
    try:
        for number, block in enumerate(blocks):
            if _asks_a_server(block):
                packages = sorted(path.parent for path in shell.folder.glob("models/*/package.json"))
                shell.url = servers.start(packages)
            _run(block, shell, blocks[number + 1 :])
    finally:
        shell.close()


def test_a_command_that_no_document_has_led_to_is_not_found(tmp_path: Path) -> None:
    """Whoever has just cloned the repository has `plait` once it is installed, and not before."""
    shell = DocumentShell(tmp_path, finds_plait=False)
    try:
        with pytest.raises(AssertionError, match="plait: command not found"):
            shell.run("plait --help")
        shell.run("pip install .")
        assert "serve" in shell.run("plait --help")
        for command, code in (("plait nonsense", 2), (f"curl -s {USUAL_URL}/nothing; true", "")):
            with pytest.raises(AssertionError, match=f"exit code {code}"):
                shell.run(command)
    finally:
        shell.close()


def _asks_a_server(block: CodeBlock) -> bool:
    return USUAL_URL in block.text or "plait models refresh" in block.text


def _run(block: CodeBlock, shell: DocumentShell, later: Sequence[CodeBlock]) -> None:
    file = shell.folder / (block.file or "block.py")
    if block.language == "bash":
        shell.run(block.text)
    elif block.language == "python":
        file.write_text(block.text.replace(USUAL_URL, shell.url), encoding="utf-8")
        if not any(file.name in other.text for other in later):  # else it is a later command's business
            run_python(file)
    elif block.language == "yaml" and block.file in CONFIGS:
        file.write_text(block.text, encoding="utf-8")
        CONFIGS[block.file](file)
    else:
        pytest.fail(f"{block.place}: neither runs nor says why not (<!-- no-run: reason -->)")
