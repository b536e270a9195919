"""A sequence model whose small table is at the HN: packaged, cut, served and updated, with the module's scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait_disagg.graph.inputs import Input
from plait_disagg.graph.sample_inputs import collate
from plait_disagg.graph.small_tables import rows_name
from plait_disagg.graph.verify import module_outputs
from plait_disagg.models.configs import build
from plait_disagg.models.history import Hstu
from plait_disagg.package.read import Package, open_package
from plait_disagg.package.write import PackageOptions, write_package
from plait_disagg.refresh.errors import BadUpdate
from plait_disagg.refresh.live_package import checked
from plait_disagg.refresh.make import make_update
from plait_disagg.refresh.update import Update, UpdatedRows
from plait_disagg.values import RankRequest
from support import refresh as kit
from support.rank_fabric import Rig

TABLE = "category_table"


def _module() -> tuple[torch.nn.Module, tuple[Input, ...]]:
    _, inputs = build("hstu", rows_scale=1e-5)
    torch.manual_seed(0)
    return Hstu(rows=(3_000, 128), dim=128, layers=1, heads=4).eval(), inputs  # so many items are no small table


@pytest.fixture(scope="module")
def hstu(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The packaged model, exact."""
    module, inputs = _module()
    folder = tmp_path_factory.mktemp("hstu") / "hstu"
    write_package(folder, module, inputs, name="hstu", options=PackageOptions(tile=False, largest_candidates=100))
    return open_package(folder)


def _request(seed: int, candidates: int = 6) -> RankRequest:
    chance = torch.Generator().manual_seed(seed)
    length = 20 * seed
    history = torch.randint(1, 100, (1, 200), generator=chance)
    history[:, length:] = 0
    tensors = {
        "history": history,
        "history_category": torch.randint(0, 128, (1, 200), generator=chance),
        "item": torch.randint(0, 100, (candidates,), generator=chance),
        "category": torch.randint(0, 128, (candidates,), generator=chance),
    }
    return RankRequest(request_id=f"r{seed}", model="hstu", candidates=candidates, tensors=tensors)


def _wanted(module: torch.nn.Module, asked: RankRequest) -> torch.Tensor:
    _, inputs = _module()
    return module_outputs(module, inputs, collate(inputs, [asked.tensors], [asked.candidates]))["score"]


async def test_served_scores_are_the_modules(hstu: Package, rig: Rig) -> None:
    """The cut is the one that public code has by hand, embeddings on the CN and all else on the HN, but for the small
    table, which is at the HN; scores of histories of any length have the module's bits."""
    assert hstu.hn_tables == {TABLE}
    assert not any("linear" in node.op for node in hstu.cn.nodes)
    assert {str(node.kwargs.get("table")) for node in hstu.cn.nodes if "table" in node.kwargs} == {"item_table"}
    served = await kit.ServedPackage(rig, hstu.folder).ready()
    module, _ = _module()
    for seed in (0, 1, 10):
        asked = _request(seed)
        answer = await served.rankers[0].rank(asked)
        assert torch.equal(answer.outputs["score"], _wanted(module, asked))


async def test_an_update_of_its_rows_reaches_the_hn(hstu: Package, rig: Rig, tmp_path: Path) -> None:
    """Rows of the small table go live with a new dense version, and equal the folded package's."""
    folder = kit.copied(hstu, tmp_path / "own")
    served = await kit.ServedPackage(rig, folder).ready()
    retrained, _ = _module()
    with torch.no_grad():
        retrained.category_table.weight[5:50] += 0.5  # type: ignore[operator, union-attr]
        retrained.item_table.weight[5:50] += 0.5  # type: ignore[operator, union-attr]
    update = make_update(folder, retrained, version="2")
    assert update.rows.keys() == {TABLE, "item_table"}
    assert not update.constants
    await served.publish(kit.written(tmp_path / "u", update))
    asked = _request(7)
    answer = await served.rankers[0].rank(asked)
    assert answer.version == "2"
    assert torch.equal(answer.outputs["score"], _wanted(retrained, asked))
    assert torch.equal(kit.scores(kit.twin(folder, tmp_path / "twin"), asked), _wanted(retrained, asked))


def test_its_rows_are_no_constants_of_an_update(hstu: Package) -> None:
    """An update that gives the small table as a weight is refused, or the two halves would differ."""
    rows = UpdatedRows(ids=torch.tensor([1]), rows=torch.zeros(1, 128))
    weight = {rows_name(TABLE): torch.zeros(128, 128)}
    update = Update(model="hstu", base="1", version="2", rows={TABLE: rows}, constants=weight)
    with pytest.raises(BadUpdate, match="is a table: give its rows"):
        checked(hstu, update, "1")
