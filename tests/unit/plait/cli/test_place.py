"""``plait deploy place``: a plan as a table, a document and a drawing, or one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli.main import main

CLUSTER = """
nodes:
  - {name: gpu, count: 3, cpus: 16, memory_gib: 64, gpus: 4, gpu_model: L4, used: {gpus: [0.5]}}
  - {name: host, cpus: 32, memory_gib: 64}
"""
CONFIG = """
images:
  replicas: 3
  num_cpus: 2
  num_gpus: 0.8
  controlnets:
    edges: {folder: ./edges, replicas: 2, num_gpus: 0.2}
recommend:
  models:
    shop:
      folder: ./shop
      cn: {replicas: {min: 1, max: 3}, num_cpus: 4}
      hn: {replicas: 2, num_gpus: 1}
    feed: {folder: ./feed, mode: whole, whole: {num_gpus: 2, num_cpus: 1}}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A configuration and a cluster."""
    config, cluster = tmp_path / "plait.yaml", tmp_path / "cluster.yaml"
    config.write_text(CONFIG)
    cluster.write_text(CLUSTER)
    return config, cluster


def place(files: tuple[Path, Path], *more: str) -> int:
    """The command on these files."""
    return main(["deploy", "place", str(files[0]), "--cluster", str(files[1]), *more])


def test_the_plan_is_a_table(files, capsys):
    """A line for each deployment and node, and the use before and after, Ray's strategies included."""
    assert place(files) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert " ".join(lines[0].split()) == "deployment node GPU model replicas CPUs each GPUs each devices"
    assert sum(line.startswith("hn-shop") for line in lines) >= 1
    assert [line.split("  ")[0] for line in lines if line.startswith(("before", "after"))] == [
        "before", "after, plait", "after, ray-pack", "after, ray-spread",
    ]  # fmt: skip


def test_the_document_has_every_replica(files, capsys):
    """Nothing is on a device twice, and sums agree with what is idle."""
    assert place(files, "--json", "--policy", "fgd") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["policy"], len(document["replicas"]), document["unplaced"]) == ("fgd", 12, 0)
    used: dict[tuple[str, int], float] = {(f"gpu-{node}", 0): 0.5 for node in (1, 2, 3)}
    for replica in document["replicas"]:
        for device in replica["devices"]:
            key = replica["node"], device
            used[key] = used.get(key, 0) + replica["num_gpus"] / len(replica["devices"])
    assert max(used.values()) <= 1 + 1e-9
    assert sum(used.values()) == pytest.approx(12 - document["after"]["idle"])
    assert sum(sum(node["idle_gpus"]) for node in document["nodes"]) == pytest.approx(document["after"]["idle"])
    assert set(document["compared"]) == {"ray-pack", "ray-spread"}


def test_replicas_are_kept_apart(files, capsys):
    """With one replica of a deployment on a node, no two of any share one, whoever plans."""
    assert place(files, "--json", "--per-node", "1") == 0
    replicas = json.loads(capsys.readouterr().out)["replicas"]
    where = [(replica["deployment"], replica["node"]) for replica in replicas]
    assert len(set(where)) == len(where)


def test_a_full_cluster_ends_with_1_and_the_plan(files, capsys):
    """What has a place is shown; the others are counted."""
    assert place(files, "--set", "images.replicas=19") == 1
    out, err = capsys.readouterr()
    assert "no room" in out
    assert err.startswith("plait deploy: the cluster is too full for ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("cluster", "arguments", "sentence"),
    [
        (CLUSTER, ["--set", "images.num_gpus=5"], "engine: a replica needs 2 CPUs, 5 GPUs, and no node has that"),
        (CLUSTER, ["--policy", "tetris"], "there is no policy tetris"),
        (CLUSTER, ["--svg", "/proc/nowhere/plan.svg"], "cannot be written"),
        ("nodes: 1\nnodes: 2\n", [], "given twice"),
        (CLUSTER.replace("name: gpu", r'name: "\ud800"'), [], "cluster.yaml: nodes.0.name: not valid Unicode"),
    ],
)
def test_mistakes_are_one_sentence(files, capsys, cluster, arguments, sentence):
    """On stderr, with exit code 1; nothing is printed."""
    files[1].write_text(cluster)
    assert place(files, *arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("plait deploy: ")
    assert sentence in err
    assert err.count("\n") == 1


def test_a_cluster_that_is_not_there_is_one_sentence(files, capsys):
    """Neither as a file nor as a Ray that answers; both together are none."""
    assert place(files, "--live", "auto") == 1
    assert "either --cluster FILE or --live ADDRESS" in capsys.readouterr().err
    files[1].unlink()
    assert place(files) == 1
    assert "cluster.yaml cannot be read: No such file or directory" in capsys.readouterr().err
    assert main(["deploy", "place", str(files[0]), "--live", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert "no Ray answers at 127.0.0.1:1" in error
    assert len(error.strip().splitlines()) == 1
