"""``plait links``: the shipped links are shown, and a measurement becomes a file of links or one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.cli.main import main
from plait_fabric.link.link_files import read_links
from support.fabric_links import send_lat, shipped, write_bw


def test_calibrate_writes_a_file_that_can_be_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two outputs of perftest become a link with their sources, which `list` shows."""
    link = shipped("200g-same-switch").link
    (tmp_path / "lat.txt").write_text(send_lat(link))
    (tmp_path / "bw.txt").write_text(write_bw(link))
    files = [str(tmp_path / name) for name in ("lat.txt", "bw.txt")]
    assert main(["links", "calibrate", *files, "--name", "ours", "-o", str(tmp_path / "links.json")]) == 0
    assert "at worst" in capsys.readouterr().err
    found = read_links(tmp_path / "links.json")["ours"]
    assert found.link.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.01)
    assert found.sources["alpha_s"] == "fitted to lat.txt, bw.txt"
    assert main(["links", "list", str(tmp_path / "links.json")]) == 0
    assert "ours" in capsys.readouterr().out


def test_a_csv_as_a_spreadsheet_saves_it_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a byte order mark before its first column."""
    link = shipped("200g-same-switch").link
    rows = [f"{nbytes},{1e6 * link.one_way_s(nbytes)}" for nbytes in (1 << 21, 1 << 22, 1 << 23)]
    (tmp_path / "lat.csv").write_text("\n".join(["bytes,latency_us", *rows]), encoding="utf-8-sig")
    assert main(["links", "calibrate", str(tmp_path / "lat.csv")]) == 0
    assert "fitted to lat.csv" in capsys.readouterr().out
