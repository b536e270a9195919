"""Packaged models: what is written can be opened and gives the module's scores; what is broken is refused by name."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from plait_disagg.graph.inputs import Bag, Dense, Ids
from plait_disagg.graph.sample_inputs import collate, for_module, sample
from plait_disagg.messages.check import check_request
from plait_disagg.messages.layout import layouts_of
from plait_disagg.package import write
from plait_disagg.package.items import Items, StoredItems, read_items, write_items
from plait_disagg.package.manifest import PackageError
from plait_disagg.package.read import open_package
from plait_disagg.package.sharding import Sharding, plan_of
from plait_disagg.package.write import PackageOptions, write_package
from plait_fabric import MessageLimits

INPUTS = (Dense("age", "user"), Bag("liked", "user"), Ids("item"), Bag("genres", weighted=True), Dense("year"))
ITEMS, GENRES = 40, 12


class Model(nn.Module):
    """A small model with all kinds of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.genres = nn.EmbeddingBag(GENRES, 8, mode="sum", include_last_offset=True)
        self.items = nn.Embedding(ITEMS, 8)
        self.top = nn.Sequential(nn.Linear(26, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, age, liked, liked_offsets, item, genres, genres_offsets, genres_weights, year):
        user = torch.cat([age, self.genres(liked, liked_offsets)], 1)
        thing = torch.cat([self.items(item), self.genres(genres, genres_offsets, genres_weights), year], 1)
        return {"scores": torch.sigmoid(self.top(torch.cat([user, thing], 1))).squeeze(1)}


def model() -> Model:
    """Seeded, in evaluation mode."""
    torch.manual_seed(3)
    return Model().eval()


def named(output: str) -> nn.Module:
    """The model with another name for its scores."""

    class Named(Model):
        def forward(self, **inputs):
            return {output: super().forward(**inputs)["scores"]}

    return Named().eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A package of `Model` that no test changes."""
    path = tmp_path_factory.mktemp("packages") / "small"
    write_package(path, model(), INPUTS, name="small")
    return path


@pytest.fixture
def copy(folder, tmp_path):
    """A package of the test's own."""
    return shutil.copytree(folder, tmp_path / "copy")


def scores(package, *requests):
    """Both halves on a batch of checked requests."""
    asked = [check_request(package.card(), request, request_id="r") for request in requests]
    return package.dense().run(package.sparse().run(asked), [one.candidates for one in asked])["scores"]


def some_request(candidates, seed=0):
    """A random request with bags that may be empty."""
    bounds = {"liked": GENRES, "genres": GENRES, "item": ITEMS}
    return sample(INPUTS, bounds, candidates=candidates, ids_per_bag=4, seed=seed, ragged=True)


def wanted(*requests, candidates):
    """The module's own scores."""
    with torch.inference_mode():
        return model()(**for_module(INPUTS, collate(INPUTS, requests, candidates)))["scores"]


class TestRoundTrip:
    @settings(max_examples=15)
    @given(sizes=st.lists(st.sampled_from([1, 2, 7, 64]), min_size=1, max_size=3), seed=st.integers(0, 1000))
    def test_the_halves_give_the_modules_scores(self, folder, sizes, seed):
        """Whatever the candidates, the empty bags and the company."""
        requests = [some_request(size, seed + place) for place, size in enumerate(sizes)]
        found = scores(open_package(folder), *requests)
        torch.testing.assert_close(found, wanted(*requests, candidates=sizes), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("asks", ["user", "item"])
    def test_attention_then_transpose_and_view(self, tmp_path, asks):
        """As torch's own examples write it: a kernel's result lies as its queries do, which tiling moves."""
        inputs = (Ids("history", "user", (5,)), Ids("parts", "item", (3,)))

        class Attends(nn.Module):
            def __init__(self):
                super().__init__()
                self.rows, self.heads = nn.Embedding(ITEMS, 8), nn.Linear(8, 8)

            def forward(self, history, parts):
                asking, asked = (history, parts) if asks == "user" else (parts, history)
                q, k = (self.heads(self.rows(ids)).view(*ids.shape, 2, 4).transpose(1, 2) for ids in (asking, asked))
                made = nn.functional.scaled_dot_product_attention(q, k, k).transpose(1, 2)
                rows = self.rows(asking)
                made = made.view(rows.shape) if asks == "user" else made.view_as(rows.unflatten(2, (1, 8)).squeeze(2))
                return (made * rows).sum((1, 2))

        torch.manual_seed(1)
        module = Attends().eval()
        write_package(tmp_path / "p", module, inputs, name="p")  # where halves that score otherwise are refused

    def test_an_output_may_have_any_name_and_be_an_input(self, tmp_path):
        """As it came: models return what their callers log beside the scores. Workers tell each other of any name."""
        name = "P(click | item), %"

        class Echoes(Model):
            def forward(self, **inputs):
                return {name: super().forward(**inputs)["scores"], "year": inputs["year"]}

        manifest = write_package(tmp_path / "p", Echoes().eval(), INPUTS, name="p")
        assert manifest.outputs == {name: (), "year": (1,)}
        card = open_package(tmp_path / "p").card()
        assert card.outputs == manifest.outputs
        assert [output.name for output in layouts_of(card).outputs.parts] == [name, "year"]

    def test_the_card_tells_what_a_client_needs(self, folder):
        """Inputs, outputs, and the rows behind each id input, the smallest where several tables are fed."""
        card = open_package(folder).card(mode="split")
        assert (card.name, card.inputs, card.mode) == ("small", INPUTS, "split")
        assert card.outputs == {"scores": ()}
        assert card.id_rows == {"liked": GENRES, "genres": GENRES, "item": ITEMS}

    def test_ids_that_a_table_takes_in_are_not_refused_before(self, tmp_path):
        """With the policy clip an id beyond the table is the last row, of a known item too."""
        options = PackageOptions(out_of_range={"items": "clip"})
        items = Items(features={**features(), "item": torch.full((5,), 10**9)})
        write_package(tmp_path / "p", model(), INPUTS, name="p", items=items, options=options)
        request = some_request(3)
        last = {**request, "item": torch.full((3,), ITEMS - 1)}
        beyond = {**request, "item": torch.full((3,), 10**9)}
        package = open_package(tmp_path / "p")
        assert "item" not in package.card().id_rows
        assert torch.equal(scores(package, beyond), scores(package, last))


class TestRefusals:
    @pytest.mark.parametrize("name", ["", "../up", "a b", "x" * 65])
    def test_a_name_is_a_name(self, tmp_path, name):
        """It becomes part of URLs."""
        with pytest.raises(PackageError, match="must match"):
            write_package(tmp_path / "p", model(), INPUTS, name=name)

    def test_what_could_not_be_served_is_not_packaged(self, tmp_path):
        """A number that is none is named by its tensor, an output without a name is told, and so are a version and a
        cutter."""
        spoilt = model()
        with torch.no_grad():
            spoilt.items.weight[3] = torch.nan
        with pytest.raises(PackageError, match=r"items has a number that is NaN"):
            write_package(tmp_path / "a", spoilt, INPUTS, name="a")

        with pytest.raises(PackageError, match="outputs: '' is not a name"):
            write_package(tmp_path / "a", named(""), INPUTS, name="a")
        with pytest.raises(PackageError, match="outputs: 'a;b' is not a name"):
            write_package(tmp_path / "a", named("a;b"), INPUTS, name="a")
        with pytest.raises(PackageError, match=r"the version '../x' must match"):
            write_package(tmp_path / "a", model(), INPUTS, name="a", options=PackageOptions(version="../x"))
        with pytest.raises(PackageError, match="no cutter 'best'; there are mincut, prism"):
            write_package(tmp_path / "a", model(), INPUTS, name="a", options=PackageOptions(cutter="best"))
        assert list(tmp_path.iterdir()) == []

    def test_a_model_that_workers_could_not_tell_each_other_of_is_not_packaged(self, tmp_path, monkeypatch):
        """What they greet with has a header's size: hundreds of inputs with long names are too many."""
        monkeypatch.setattr(write, "MessageLimits", partial(MessageLimits, header_bytes=500))
        with pytest.raises(PackageError, match=r"with 5 inputs: 5\d\d header bytes are over .* can be one input"):
            write_package(tmp_path / "p", model(), INPUTS, name="p")
        assert list(tmp_path.iterdir()) == []

    def test_shards_that_do_not_fit_are_refused(self, parts):
        """The sentence has the bytes, the shards, and what to change."""
        with pytest.raises(PackageError, match=r"do not fit into 3 shards of 100; give it more shards"):
            plan_of(parts, Sharding(shards=3, memory_bytes=100))

    @pytest.mark.parametrize("file", ["whole.json", "cn.json", "hn.json", "constants.safetensors"])
    def test_a_changed_file_is_found(self, copy, file):
        """One flipped byte is enough."""
        data = bytearray((copy / file).read_bytes())
        data[-2] ^= 1
        (copy / file).write_bytes(data)
        with pytest.raises(PackageError, match=f"{file} is not the file that was packaged"):
            open_package(copy)

    @pytest.mark.parametrize("file", ["package.json", "cn.json", "tables.safetensors"])
    def test_a_missing_file_is_named(self, copy, file):
        """Half a copy is no package; tables have no check sum, but a header that must fit."""
        content = (copy / file).read_bytes()
        (copy / file).unlink()
        with pytest.raises(PackageError, match=file):
            open_package(copy)
        (copy / file).write_bytes(content[:-8])
        with pytest.raises(PackageError, match=file):
            open_package(copy).sparse()

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"format": 2}, "format 2 is not 1"),
            ({"name": "../up"}, "name: String should match"),
            ({"inputs": [{"kind": "code", "name": "x"}]}, "is not an input"),
            ({"inputs": [{"kind": "dense", "name": "x", "shape": [math.inf]}]}, "infinity"),
            ({"bounds": 3}, "bounds|object"),
            ({"cut": {}}, r"cut\.cutter: Field required"),
            ({"files": {"../../etc/passwd": "0"}}, "missing"),
            ({"files": {}}, "not listed"),
        ],
    )
    def test_a_foreign_manifest_is_refused(self, copy, change, says):
        """It names the field; a path cannot leave the folder, and check sums cannot be taken out."""
        path = copy / "package.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        with pytest.raises(PackageError, match=says):
            open_package(copy)


def features(count=5, seed=0):
    """Item-side tensors of ``count`` items."""
    return {
        name: tensor
        for name, tensor in some_request(count, seed).items()
        if name in ("item", "genres", "genres_offsets", "genres_weights", "year")
    }


class TestItems:
    @settings(max_examples=30)
    @given(ids=st.lists(st.integers(0, 4), min_size=1, max_size=20))
    def test_bags_are_gathered_item_by_item(self, ids):
        """As a loop over the items would do it, repeated and empty ones too."""
        given_features = features()
        found = StoredItems(Items(features=given_features), INPUTS).gather(torch.tensor(ids))
        offsets, bounds = given_features["genres_offsets"].tolist(), found["genres_offsets"].tolist()
        for name in ("genres", "genres_weights"):
            bags = [given_features[name][offsets[one] : offsets[one + 1]].tolist() for one in ids]
            assert [found[name][bounds[n] : bounds[n + 1]].tolist() for n in range(len(ids))] == bags
        assert bounds[-1] == found["genres"].numel()
        assert torch.equal(found["item"], given_features["item"][ids])
        assert torch.equal(found["year"], given_features["year"][ids])

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"item": None}, "item: missing"),
            ({"color": torch.zeros(5)}, "color: .* has no such input"),
            ({"item": torch.zeros(4, dtype=torch.int64)}, r"has shape \[[56].*; expected \[[45]"),
            ({"year": torch.zeros(5, 2)}, r"year: has shape \[5, 2\]; expected \[5, 1\]"),
            ({"year": torch.zeros(5, 1, dtype=torch.float64)}, "year: is float64; this input takes float32"),
            ({"genres_offsets": torch.tensor([0, 3, 1, 9, 9, 9])}, "genres_offsets: offsets "),
            ({"genres_weights": torch.ones(1)}, r"genres_weights: has shape \[1\]"),
        ],
    )
    def test_features_that_do_not_fit_are_named(self, change, says):
        """Before anything is written."""
        given_features = {name: tensor for name, tensor in {**features(), **change}.items() if tensor is not None}
        with pytest.raises(ValueError, match=says):
            StoredItems(Items(features=given_features), INPUTS)

    def test_an_item_that_no_request_could_rank_is_refused(self, tmp_path):
        """With the input, the item, its number and the bound; the ends of all bounds are taken."""
        inputs = (
            Ids("item"), Bag("genres"), Dense("year", low=1900, high=2050), Ids("month", min=1, max=12),
            Bag("tags", weighted=True),
        )  # fmt: skip
        bounds = {"item": ITEMS, "genres": GENRES, "tags": ITEMS}
        offsets = torch.tensor([0, 2, 2, 5, 5, 6])
        fine = {
            "item": torch.tensor([0, 1, 2, 3, ITEMS - 1]),
            "genres": torch.tensor([0, 1, 2, 3, GENRES - 1, 0]),
            "genres_offsets": offsets,
            "year": torch.tensor([[1900.0], [2050.0], [1999.0], [2000.0], [2001.0]]),
            "month": torch.tensor([1, 12, 3, 4, 5]),
            "tags": torch.full((6,), ITEMS - 1),
            "tags_offsets": offsets.clone(),
            "tags_weights": torch.ones(6),
        }

        def store(name, features):
            write_items(tmp_path / name, tmp_path / "names", Items(features=features), inputs, bounds)

        store("fine", fine)
        for name, place, number, says in [
            ("item", 3, ITEMS, rf"item: id {ITEMS} .* outside 0..{ITEMS - 1} \(of item 3\)"),
            ("item", 1, -1, rf"item: id -1 .* outside 0..{ITEMS - 1} \(of item 1\)"),
            ("genres", 4, 99, rf"genres: id 99 .* outside 0..{GENRES - 1} \(of item 2\)"),
            ("tags", 5, ITEMS, rf"tags: id {ITEMS} .* outside 0..{ITEMS - 1} \(of item 4\)"),
            ("year", 2, 2100.0, r"year: number 2 is 2100.0; this input takes 1900 to 2050 \(of item 2\)"),
            ("year", 2, float("nan"), r"year: number 2 is nan; only finite numbers .* \(of item 2\)"),
            ("month", 4, 13, r"month: number 4 is 13; this input takes 1 to 12 \(of item 4\)"),
            ("tags_weights", 0, float("inf"), r"tags_weights: number 0 is inf; only finite .* \(of item 0\)"),
        ]:
            changed = {**fine, name: fine[name].clone()}
            changed[name].view(-1)[place] = number
            with pytest.raises(ValueError, match=says):
                store("refused", changed)
        assert [path.name for path in tmp_path.iterdir()] == ["fine"]

    @pytest.mark.parametrize("kind", ["ids", "floats", "bag"])
    def test_ids_that_the_model_makes_of_items_are_checked_too(self, tmp_path, kind):
        """Packed into one matrix, of integers or of floats, or computed."""

        class Packs(nn.Module):
            def __init__(self):
                super().__init__()
                self.items, self.genres = nn.Embedding(ITEMS, 4), nn.EmbeddingBag(GENRES, 4, include_last_offset=True)

            def forward(self, age, packed, packed_offsets=None):
                if kind == "bag":
                    return self.genres(packed + 1, packed_offsets).sum(1) + age.squeeze(1)
                return (self.items(packed[:, 1].abs().long()) * age).sum(1)

        offsets = torch.tensor([0, 2, 2, 5])
        packed, bad, features, says = {
            "ids": (Ids("packed", shape=(2,)), (2, 1), torch.full((3, 2), ITEMS - 1), "id 99 of table items"),
            "floats": (Dense("packed", shape=(2,)), (1, 1), torch.full((3, 2), ITEMS - 1.0), "id 99 of table items"),
            "bag": (Bag("packed"), (3,), torch.full((5,), GENRES - 2), "id 100 of table genres"),
        }[kind]
        features = {"packed": features} | ({"packed_offsets": offsets} if kind == "bag" else {})
        inputs = (Dense("age", "user", low=0, high=1), packed)
        check = partial(write_package, module=Packs().eval(), inputs=inputs, name="p", items=Items(features=features))
        check(tmp_path / "p")
        features["packed"][bad] = 99
        item = 2 if kind != "floats" else 1
        with pytest.raises(ValueError, match=f"packed of item {item} is {says}, which takes 0 to"):
            check(tmp_path / "q")

    def test_every_item_has_a_name_or_none_has(self):
        """A list of another length would name the wrong items, and a number is no name."""
        for names, says in ((["a", "b"], "2 names for 5 items"), ([*"abcd", 5], "the name of item 4 is 5, not a text")):
            with pytest.raises(ValueError, match=says):
                StoredItems(Items(features=features(), names=names), INPUTS)

    def test_names_without_an_end_are_refused(self, tmp_path):
        """A file of brackets alone is an error of the package, as any other file that holds no names."""
        paths = tmp_path / "items.safetensors", tmp_path / "items.json"
        write_items(*paths, Items(features=features()), INPUTS, {})
        paths[1].write_text("[" * 100_000)
        with pytest.raises(PackageError, match="recursion"):
            read_items(*paths, INPUTS)

    def test_a_bag_that_is_too_long_is_told_as_such(self):
        """With the item and the bound that its input declares. A shape may be a list."""
        assert len(StoredItems(Items(features={"parts": torch.zeros(3, 2).long()}), [Ids("parts", shape=[2])])) == 3
        bags = {"tags": torch.zeros(6, dtype=torch.int64), "tags_offsets": torch.tensor([0, 1, 6])}
        assert len(StoredItems(Items(features=bags), [Bag("tags", largest=5)])) == 2
        with pytest.raises(ValueError, match="tags_offsets: row 1 has 5 ids; this input takes at most 4"):
            StoredItems(Items(features=bags), [Bag("tags", largest=4)])
