"""The LoRAs as every request finds them: what is listed, read and made for how many requests."""

from __future__ import annotations

import queue
import shutil
import threading
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
        """Return the formats by name, a second later, after the thread has looked."""
        self.now_s += 1.0
        self.cards.look(self.source)
        return {card.name: card.format for card in self.cards.cards()}


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Shelf:
    """An empty one."""
    return Shelf(tmp_path, monkeypatch)


def test_a_header_is_read_once_and_by_no_request(shelf):
    """Until it was read the format is unknown; a file that changed is read again, no other."""
    names = [f"f{i:02}" for i in range(40)]
    shelf.put(*names)
    assert [(card.name, card.format) for card in shelf.cards.cards()] == [(name, "unknown") for name in names]
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
    shelf.cards.look(shelf.source)
    assert shelf.cards.cards() is shelf.cards.cards()
    families = iter(["sd1", "sdxl"])
    other = LoraCards(shelf.source, lambda: next(families))
    assert [other.cards()[0].family, other.cards()[0].family] == ["sd1", "sdxl"]


def test_the_thread_follows_the_folder_until_it_is_closed(tmp_path):
    """It reads what is there at once, and ends; a source without a folder has none."""
    tiny_lora_file(tmp_path, "a", seed=1)
    cards, looked = LoraCards(FolderSource(tmp_path), lambda: "sd1"), queue.SimpleQueue()
    real = cards.look

    def look(folder: FolderSource) -> None:
        real(folder)
        cards.close()
        looked.put((threading.current_thread(), [card.format for card in cards.cards()]))

    cards.look = look
    cards.watch()
    thread, formats = looked.get(timeout=60)
    thread.join(60)
    assert not thread.is_alive()
    assert formats == ["peft"]
    assert thread is not threading.current_thread()
    stored = LoraCards(NoLoras(), lambda: "sd1")
    stored.look = look
    stored.watch()
    assert looked.empty()
