"""Lists of nodes and tasks in the public format."""

from __future__ import annotations

import pytest

from plait_bench.errors import BenchError
from plait_bench.placement.filling import read_nodes, read_tasks
from plait_deploy.placement.values import ClusterNode, Task

NODES = "sn,cpu_milli,memory_mib,gpu,model\nn1,64000,262144,2,P100\n"
TASKS = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos
b,6000,12288,1,460,V100M16|V100M32,LS
a,8000,30517,0,0,,BE
"""


def test_lists_are_read(tmp_path):
    """Tasks come sorted by name; a specification may name several models."""
    (tmp_path / "n.csv").write_text(NODES)
    (tmp_path / "t.csv").write_text(TASKS)
    assert read_nodes(tmp_path / "n.csv") == [
        ClusterNode(name="n1", cpu_milli=64_000, memory_mib=262_144, gpus=2, gpu_model="P100")
    ]
    assert read_tasks(tmp_path / "t.csv") == [
        Task(cpu_milli=8_000, memory_mib=30_517),
        Task(cpu_milli=6_000, memory_mib=12_288, gpus=1, gpu_milli=460, gpu_models=frozenset({"V100M16", "V100M32"})),
    ]


@pytest.mark.parametrize("line", ["c,8000,1,two,0,,LS\n", "c,8000,1,2,500,,LS\n", "c,8000\n"])
def test_a_list_that_is_not_as_published_is_one_sentence(tmp_path, line):
    """Naming the file: a number that is none, what no task may ask for, columns that are missing."""
    path = tmp_path / "t.csv"
    path.write_text(TASKS + line)
    with pytest.raises(BenchError, match=r"t\.csv is not as published"):
        read_tasks(path)
