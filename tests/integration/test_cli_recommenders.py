"""`plait models package`, `cut` and `plait recommend`, as a new user would try them on a model of their own."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from fakes import shop
from plait.cli.main import main
from plait.errors import PlaitError
from plait.offline.packaging import make
from plait.targets import load_target

FILE = Path(shop.__file__)
USER = {"customer": 3, "age": 0.4, "seen": [1, 2]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The packaged shop."""
    out = tmp_path_factory.mktemp("packages") / "shop"
    assert main(["models", "package", f"{FILE}:make", "--out", str(out), "--bag", "seen=5"]) == 0
    return out


def test_packaging_prints_the_folder_and_how_to_serve_it(tmp_path, capsys):
    """The folder on stdout; on stderr the words for plait.yaml."""
    out = tmp_path / "mine"
    assert main(["models", "package", f"{FILE}:make", "--out", str(out), "--name", "shop"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert f"recommend: {{models: {{shop: {{folder: {out}}}}}}}" in printed.err
    assert json.loads((out / "package.json").read_text())["name"] == "shop"


def test_recommend_ranks_as_the_model_itself_does(folder, capsys):
    """The scores are the module's own, the best first, with the items' names."""
    assert main(["recommend", str(folder), "--user", json.dumps(USER), "--top-k", "30", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    module, _, items = shop.make()
    n = shop.PRODUCTS
    with torch.inference_mode():
        scores = module(
            torch.full((n,), 3), torch.full((n, 1), 0.4), torch.tensor([1, 2] * n), torch.arange(n + 1) * 2,
            items.features["product"], items.features["price"],
        )  # fmt: skip
    order = scores.argsort(descending=True).tolist()
    assert [item["id"] for item in answer["items"]] == order
    assert [item["score"] for item in answer["items"]] == pytest.approx(scores[order].tolist(), rel=1e-5)
    assert answer["items"][0]["name"] == f"product {order[0]}"


def test_recommend_prints_a_table_of_a_few_candidates(folder, capsys):
    """Ids after a comma."""
    assert main(["recommend", str(folder), "--user", json.dumps(USER), "--candidates", "4, 8,15"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["item", "score", "name"]
    assert {line.split()[0] for line in lines[1:]} == {"4", "8", "15"}


def test_recommend_says_what_is_wrong(folder, capsys):
    """The server's own sentences; exit code 1."""
    assert main(["recommend", str(folder), "--user", '{"custmer": 3}']) == 1
    assert "did you mean customer" in capsys.readouterr().err
    assert main(["recommend", str(folder), "--user", json.dumps(USER), "--candidates", "99"]) == 1
    assert "there is no item 99" in capsys.readouterr().err


def test_a_model_may_know_no_items(tmp_path, capsys):
    """(module, inputs) is enough; candidates then come with their features. Rows may be stored in 8 bits."""
    out = tmp_path / "shop"
    assert main(["models", "package", f"{FILE}:make_without_items", "--out", str(out), "--row-format", "int8"]) == 0
    candidates = json.dumps([{"product": 1, "price": 2}, {"product": 3, "price": 0.5}])
    assert main(["recommend", str(out), "--user", json.dumps(USER), "--candidates", candidates, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.split("\n", 1)[1])
    assert {item["index"] for item in answer["items"]} == {0, 1}


def test_the_cut_is_shown_and_drawn(folder, tmp_path, capsys):
    """A table with the bytes of 1, 64 and 512 candidates, and an image that is well-formed XML."""
    image = tmp_path / "cut.svg"
    assert main(["models", "cut", str(folder), "--bag", "seen=5", "--svg", str(image)]) == 0
    text = capsys.readouterr().out
    assert "runs on the CN" in text
    assert "lookup, mean, 8 wide" in text
    assert ElementTree.parse(image).getroot().tag.endswith("svg")
    assert main(["models", "cut", str(folder), "--shards", "2"]) == 0
    dealt = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in dealt[-2:]] == ["shard 0", "shard 1"]
    assert main(["models", "cut", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    for model in (str(folder), "two-tower"):
        assert main(["models", "cut", model, "--bag", "sen=5"]) == 1
        assert "bag sen: the model has " in capsys.readouterr().err
    total = shown["bytes_per_request"]
    assert set(total) == {"1", "64", "512"}
    for size, nbytes in total.items():
        assert nbytes == sum(value["bytes_at"][size] for value in shown["crosses"])
    # A candidate's vector of 8 floats and its price must get there, or something made of them.
    assert total["512"] - total["1"] >= 511 * 4
    assert total["64"] - total["1"] == (total["512"] - total["1"]) * 63 // 511


@pytest.mark.parametrize("cutter", ["mincut", "prism"])
def test_a_package_can_be_cut_again(folder, cutter, capsys):
    """With either cutter, for a request of another size, whose bytes are shown too."""
    assert main(["models", "cut", str(folder), "--cutter", cutter, "--candidates", "100", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["title"] == f"shop, cut by {cutter}"
    assert set(shown["bytes_per_request"]) == {"1", "64", "100", "512"}


def test_a_named_configuration_can_be_cut(capsys):
    """Without any package."""
    assert main(["models", "cut", "rm1"]) == 0
    assert "rm1, cut by mincut" in capsys.readouterr().out
    assert main(["models", "cut", "rm9"]) == 1
    assert "rm1, rm2" in capsys.readouterr().err
    assert main(["models", "cut", "rm1", "--svg", "/nosuch/x.svg"]) == 1
    assert "/nosuch/x.svg cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("refused", "torch.fft.fft(x)"),
        ("only_the_module", "must return (module, inputs)"),
        ("no_module", "no torch.nn.Module"),
        ("no_inputs", "Dense, Ids and Bag"),
        ("no_items", "Items"),
        ("nope", "no function 'nope'"),
        ("NOT_A_FUNCTION", "no function"),
    ],
)
def test_what_can_not_be_packaged_is_said_in_a_sentence(tmp_path, target, says, capsys):
    """Exit code 1, and no folder is left behind."""
    out = tmp_path / "out"
    assert main(["models", "package", f"{FILE}:{target}", "--out", str(out)]) == 1
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_never_overwritten(folder, capsys):
    """Packaging again needs another folder, which is told before the model is made."""
    assert main(["models", "package", f"{FILE}:nope", "--out", str(folder)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main(["models", "package", f"{FILE}:make", "--out", "x", "--bag", "seen"]) == 2


@pytest.mark.parametrize("text", ["", "x", "x:", ":x", "no/such/file.py:f", "no_such_module_of_mine:f"])
def test_targets_that_are_not_there(text):
    """One sentence for each way to be wrong."""
    with pytest.raises(PlaitError):
        load_target(text)


def test_a_target_can_be_a_module(monkeypatch):
    """module:function, found from the current folder."""
    monkeypatch.chdir(FILE.parent)
    assert len(make("shop:make").inputs) == 5


def test_a_broken_file_says_where(tmp_path):
    """A syntax error is the user's; the line is told. What their code raises is theirs to see whole."""
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    with pytest.raises(PlaitError, match="line 1"):
        load_target(f"{broken}:f")
    raises = tmp_path / "raises.py"
    raises.write_text("def f():\n    raise KeyError('mine')\n")
    with pytest.raises(KeyError, match="mine"):
        make(f"{raises}:f")
