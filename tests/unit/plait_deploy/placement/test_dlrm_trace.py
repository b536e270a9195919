"""The trace of recommendation services: what is read, and what does not add up."""

from __future__ import annotations

from math import inf

import pytest

from plait_deploy.placement.dlrm_trace import read_instances
from plait_deploy.placement.errors import TraceError
from plait_deploy.placement.values import WHOLE, Stay, Task

HEAD = (
    "instance_sn,role,app_name,cpu_request,cpu_limit,gpu_request,gpu_limit,rdma_request,max_instance_per_node,"
    "creation_time,scheduled_time,deletion_time"
)
CN = "i1,CN,shop,64,64,0,0,1,-1,,,"
HN = "i2,HN,shop,8,8,1,1,25,2,10.0,12.5,400"


def test_instances_are_read(tmp_path):
    """Empty times are before the start and after the end; -1 is no limit; the group is the app's half."""
    path = tmp_path / "t.csv"
    path.write_text(f"{HEAD}\n{CN}\n{HN}\n")
    cn, hn = read_instances(path)
    assert (cn.app, cn.role, hn.role) == ("shop", "CN", "HN")
    assert cn.stay == Stay(task=Task(cpu_milli=64_000, group="shop/CN"), arrives_s=0.0, leaves_s=inf)
    task = Task(cpu_milli=8_000, gpus=1, gpu_milli=WHOLE, group="shop/HN", per_node=2)
    assert hn.stay == Stay(task=task, arrives_s=10.0, leaves_s=400.0)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([HEAD.replace("max_instance_per_node,", ""), CN], "lacks the column max_instance_per_node"),
        ([HEAD.replace(",deletion_time", ""), CN], "lacks the column deletion_time"),
        ([HEAD], "has no rows"),
        ([HEAD, CN, HN.replace("i2", "i1")], "line 3: instance i1 is there twice"),
        ([HEAD, CN], "shop has instances of CN only"),
        ([HEAD, HN], "shop has instances of HN only"),
        ([HEAD, CN.replace("CN", "PS"), HN], "line 2: not an instance .an app and the role CN or HN, not 'shop'"),
        ([HEAD, CN, HN.replace("8,8,1,1", "8,8,2,2")], "line 3: not an instance .a CN asks for cores"),
        ([HEAD, CN.replace("64,64,0,0", "64,64,1,1"), HN], "line 2: not an instance .a CN asks for cores"),
        ([HEAD, CN.replace("64,64", "0,0"), HN], "line 2: not an instance .a CN asks for cores"),
        ([HEAD, CN.replace("64,64", "nan,64"), HN], "line 2: not an instance .a CN asks for cores"),
        ([HEAD, CN, HN.replace(",25,2,", ",25,0,")], "line 3: not an instance .max_instance_per_node is -1"),
        ([HEAD, CN, HN.replace("400", "11")], "line 3: not an instance .created at 10 s, scheduled at 12.5 s, del"),
        ([HEAD, CN, HN.replace("12.5", "9")], "line 3: not an instance .created at 10 s, scheduled at 9 s"),
        ([HEAD, CN, HN.replace("400", "nan")], "line 3: not an instance .created at 10 s"),
        ([HEAD, CN, HN.replace("10.0", "soon")], "line 3: not an instance .could not convert"),
        ([HEAD, CN, "i2,HN,shop,8"], "line 3: not an instance"),
    ],
)
def test_a_trace_that_does_not_add_up_is_one_sentence(tmp_path, rows, sentence):
    """Naming the file, and the column, line or app."""
    path = tmp_path / "t.csv"
    path.write_text("\n".join(rows) + "\n")
    with pytest.raises(TraceError, match=sentence) as caught:
        read_instances(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
