"""The LoRAs as every request finds them: what is listed, read and made for how many requests."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plait_serving.deployments.images import lora_cards
from plait_serving.deployments.images.lora_cards import LoraCards
from plait_serving.diffusion.lora.source import FolderSource, NoLoras
from plait_serving.images.service import LoraCard
from support.loras import tiny_lora_file


class Shelf:
    """A folder of LoRAs and their cards, on a clock that the test holds; counts headers."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = tmp_path / "loras"
        self.now_s = 0.0
        self.header_s = 0.0
        self.read: list[str] = []
        self.lora = tmp_path / "one" / "one.safetensors"
        tiny_lora_file(self.lora.parent, "one", seed=1)
        self.source = FolderSource(self.folder, clock=lambda: self.now_s)
        self.cards = LoraCards(self.source, lambda: "sd1", clock=lambda: self.now_s)
        real = lora_cards.inspect

        def counted(path: Path, *, max_bytes: int):
            self.read.append(path.stem)
            self.now_s += self.header_s
            return real(path, max_bytes=max_bytes)

        monkeypatch.setattr(lora_cards, "inspect", counted)

    def put(self, *names: str) -> None:
        """Copy the LoRA under some names."""
        self.folder.mkdir(exist_ok=True)
        for name in names:
            shutil.copy(self.lora, self.folder / f"{name}.safetensors")

    def look(self) -> dict[str, str]:
        """Return the formats by name, a second later."""
        self.now_s += 1.0
        return {card.name: card.format for card in self.cards.cards()}


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Shelf:
    """An empty one."""
    return Shelf(tmp_path, monkeypatch)


def test_a_header_is_read_once(shelf):
    """A file that changed is read again, no other; and nobody looks twice within a second."""
    names = [f"f{i:02}" for i in range(40)]
    shelf.cards.cards()
    shelf.put(*names)
    shelf.now_s += 0.5
    shelf.cards.cards()
    assert shelf.read == []
    for _ in range(12):
        assert shelf.look() == dict.fromkeys(names, "peft")
    assert shelf.read == names
    shelf.put("f07")
    for _ in range(12):
        shelf.look()
    assert shelf.read == [*names, "f07"]


def test_headers_take_a_tenth_of_the_time(shelf):
    """Thousands of new files are read bit by bit, so that images are made meanwhile."""
    shelf.put(*(f"f{i:02}" for i in range(20)))
    shelf.header_s = 0.04
    for read in (3, 6, 9):
        formats = shelf.look()
        assert list(formats.values()) == ["peft"] * read + ["unknown"] * (20 - read)
    assert len(shelf.read) == 9


def test_a_half_written_file_is_read_again_when_there_is_more_of_it(shelf):
    """Nothing fails meanwhile; what is no LoRA says so, and one that is gone is in no list."""
    shelf.put("whole")
    raw = shelf.lora.read_bytes()
    for size in (0, 7, 40, len(raw) // 2, len(raw) - 1):
        (shelf.folder / "half.safetensors").write_bytes(raw[:size])
        for _ in range(10):
            formats = shelf.look()
        assert formats == {"half": "unreadable", "whole": "peft"}
    (shelf.folder / "half.safetensors").write_bytes(raw)
    for _ in range(10):
        formats = shelf.look()
    assert formats == {"half": "peft", "whole": "peft"}
    (shelf.folder / "half.safetensors").unlink()
    assert shelf.look() == {"whole": "peft"}


def test_requests_share_the_cards(shelf):
    """They are made anew only if something has changed, or the models' family."""
    shelf.put("a", "b")
    shelf.look()
    cards = shelf.cards.cards()
    assert cards == tuple(LoraCard(name=name, family="sd1", format="peft") for name in "ab")
    for _ in range(12):
        shelf.look()
        assert shelf.cards.cards() == cards
    shelf.now_s += 1.0
    assert shelf.cards.cards() is shelf.cards.cards()
    families = iter(["sd1", "sdxl"])
    other = LoraCards(shelf.source, lambda: next(families))
    assert [other.cards()[0].family, other.cards()[0].family] == ["sd1", "sdxl"]


def test_who_asks_while_another_one_reads_waits_for_no_file(shelf, monkeypatch):
    """He gets what was known before."""
    shelf.put("a")
    reads, may_read, real = threading.Event(), threading.Event(), lora_cards.inspect

    def slow(path: Path, *, max_bytes: int):
        reads.set()
        assert may_read.wait(60)
        return real(path, max_bytes=max_bytes)

    monkeypatch.setattr(lora_cards, "inspect", slow)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(shelf.cards.cards)
        assert reads.wait(60)
        assert [card.format for card in shelf.cards.cards()] == ["unknown"]
        may_read.set()
        assert [card.format for card in first.result(60)] == ["peft"]


def test_who_needs_no_formats_opens_no_file(shelf):
    """Neither does a source without a folder."""
    shelf.put("a")
    cards = LoraCards(shelf.source, lambda: "sd1", formats=False, clock=lambda: shelf.now_s)
    assert [(card.name, card.format) for card in cards.cards()] == [("a", "unknown")]
    assert LoraCards(NoLoras(), lambda: "sd1").cards() == ()
    assert shelf.read == []
