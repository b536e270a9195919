"""A small module and its conversion, for the tests of what is kept of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.executors import SmallBlock, openvino_at, small_block, small_computation


@pytest.fixture(scope="module")
def block() -> SmallBlock:
    """A small module of float16 weights."""
    return small_block(torch.float16)


@pytest.fixture(scope="module")
def converted(block: SmallBlock, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that has it as "k"; tests change copies."""
    folder = tmp_path_factory.mktemp("converted")
    openvino_at(folder).prepare("k", lambda: small_computation(block))
    return folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What is compiled from now on, not read: the model and the options of each."""
    from plait_kernels.executors import openvino_program

    calls, compile_model = [], openvino_program.compile_model
    monkeypatch.setattr(openvino_program, "compile_model", lambda *of: calls.append(of) or compile_model(*of))
    return calls
