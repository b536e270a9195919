"""What is kept of a conversion, checked at every start: damage and disagreement are named, dropped and made again."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file, save

from plait_kernels.executors import Computation, ExecutorError, InputSpec, RowFactors, background
from support.cluster import TESTS
from support.executors import (
    LAYERS,
    by_hand,
    openvino_at,
    small_computation,
    small_factors,
    small_inputs,
)

pytest.importorskip("openvino", reason="needs openvino")

from openvino import opset13  # after the skip

from plait_kernels.executors import conversion, openvino_program


def entries(folder) -> list[str]:
    """The folders in a store."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def answers(program, block) -> bool:
    """Whether it computes what the module does."""
    inputs = small_inputs(3, 4, 5)
    return float((program.run(inputs)[0] - by_hand(block, inputs)[0]).abs().max()) < 1e-4


def test_a_second_start_reads_what_the_first_converted(converted, block):
    """Without the module: `open` finds it by key, and its layers, and knows no other key."""

    def refuse():
        raise AssertionError("converted again")

    again = openvino_at(converted)
    for program in (again.open("k"), again.prepare("k", refuse)):
        assert {layer.path for layer in program.layers} == set(LAYERS)
        assert answers(program, block)
    assert again.open("other") is None
    assert not list((converted / "k").glob("*.pt"))
    weights = sum(parameter.nbytes for parameter in block.parameters())
    assert (converted / "k" / "model.bin").stat().st_size < 1.2 * weights


def with_output(change):
    """A file of the probe whose outputs were changed."""

    def changed(path):
        probe = {name: value.clone() for name, value in load_file(path).items()}
        change(probe)
        return save(probe)

    return changed


def without_a_layer(path):
    facts = json.loads(path.read_text())
    facts["layers"].pop()
    return json.dumps(facts).encode()


DAMAGE = {
    "weights": ("model.bin", lambda path: path.read_bytes()[: path.stat().st_size // 2]),
    "facts": ("entry.json", lambda _: b'{"layers": ['),
    "layers": ("entry.json", without_a_layer),
    "graph": ("model.xml", lambda _: b"<net>"),
    "no probe": ("probe.safetensors", lambda _: b""),
    "outputs": ("probe.safetensors", with_output(lambda probe: probe["output.0"].view(-1)[:1].add_(0.1))),
    "nan": ("probe.safetensors", with_output(lambda probe: probe["output.1"].fill_(float("nan")))),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_named_dropped_and_made_again(tmp_path, converted, block, caplog, damage):
    """Half of the weights, broken JSON, other outputs than torch's: one warning with the folder."""
    shutil.copytree(converted, tmp_path, dirs_exist_ok=True)
    executor = openvino_at(tmp_path)
    file, damaged = DAMAGE[damage]
    (tmp_path / "k" / file).write_bytes(damaged(tmp_path / "k" / file))
    with caplog.at_level(logging.WARNING):
        assert executor.open("k") is None
    assert len(caplog.records) == 1
    assert f"{tmp_path / 'k'} is not usable and will be made again" in caplog.text
    assert entries(tmp_path) == []
    if damage == "weights":
        assert answers(executor.prepare("k", lambda: small_computation(block)), block)
        assert answers(executor.open("k"), block)


def test_of_what_was_traced_nothing_is_kept(block):
    """Or each model that comes would take memory for good: torch gives no class of the same name another one."""
    for _ in range(2):
        conversion.convert(small_computation(block))
        traced = conversion._trace(torch.nn.Linear(2, 2), [torch.ones(1, 2)])
        assert "torch.nn.modules.linear.Linear" in str(traced.graph)


def test_a_module_that_cannot_be_traced_is_an_executor_error(tmp_path):
    """The reason is one line, and nothing is left."""

    class Stubborn(torch.nn.Module):
        def forward(self, x, condition):
            if torch.jit.is_tracing():
                raise RuntimeError("no\ntrace")
            return (x,)

    with pytest.raises(ExecutorError, match=r"^conversion failed: no trace$"):
        openvino_at(tmp_path).prepare("k", lambda: small_computation(Stubborn()))
    assert entries(tmp_path) == []


def test_a_key_changes_with_the_folder_and_not_with_what_lies_beside(tmp_path):
    """One byte of the weights or of the configuration is another key; a README is not."""
    model = tmp_path / "unet"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "diffusion_pytorch_model.safetensors").write_bytes(b"\0" * 1000)
    executor = openvino_at(tmp_path / "store")
    key = executor.key(model)
    (model / "README.md").write_text("hello")
    assert executor.key(model) == key
    (model / "diffusion_pytorch_model.safetensors").write_bytes(b"\0" * 999 + b"\1")
    changed = executor.key(model)
    (model / "config.json").write_text("{ }")
    assert len({key, changed, executor.key(model)}) == 3


def recurs(program, block, rows, factors=None):
    """Calls of one shape until it has a copy or never will; all answers are the module's."""
    inputs = small_inputs(rows, 4, 4)
    wanted = by_hand(block, inputs, factors)
    for _ in range(36):
        for got, truth in zip(program.run(inputs, factors), wanted, strict=True):
            assert float((got - truth).abs().max()) < 1e-4
        background.wait()


def test_a_shape_that_recurs_is_compiled_for_itself(converted, block, compiled, monkeypatch):
    """With the factors that it has, of its rows or of one set for all; another shape runs on the model for any. What
    compiles leaves the cores to steps."""
    nice, fixed = [], openvino_program.fixed
    monkeypatch.setattr(
        openvino_program,
        "fixed",
        lambda *of: nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) or fixed(*of),
    )
    program = openvino_at(converted).open("k")
    own = small_factors([{"point": 2}, {"conv_in": 3}, {}])
    shared = RowFactors(rows=3, by_path=small_factors([{"down": 4}]).by_path)
    for factors, inputs in ((None, 2), (own, 6), (shared, 4)):
        recurs(program, block, 3, factors)
        ((model, _),) = compiled
        assert len(model.inputs) == inputs
        compiled.clear()
    program.run(small_inputs(1, 4, 4))
    assert not compiled
    assert min(nice) >= 10


def test_a_call_asks_the_graph_for_nothing(converted, block, monkeypatch):
    """A list of its inputs, of which a UNet that takes LoRAs has hundreds, took a fifth of the thread that steps."""
    program, asked = openvino_at(converted).open("k"), []
    theirs = openvino_program.ov.Model.__getattr__
    monkeypatch.setattr(openvino_program.ov.Model, "__getattr__", lambda *of: asked.append(of[1]) or theirs(*of))
    assert answers(program, block)
    assert not asked


def test_a_size_of_one_request_has_no_copy(converted, compiled):
    """Two thousand sizes of twenty steps are two thousand shapes that recur; of a size that comes again, a shape that
    came three times has one, as soon as all shapes of the size came 32 times."""
    program = openvino_at(converted).open("k")

    def run(rows, width, times):
        for _ in range(times):
            program.run(small_inputs(rows, 4, width))
            background.wait()

    for width in range(4, 10):
        run(2, width, 20)
    run(1, 4, 11)
    assert compiled == []
    run(1, 4, 1)
    assert [model.inputs[0].shape[0] for model, _ in compiled] == [1]
    run(3, 4, 2)
    assert len(compiled) == 1
    run(3, 4, 1)
    assert len(compiled) == 2


def test_copies_of_a_program_stay_within_their_bytes(converted, block, compiled):
    """With room for one it stays while it is in use; without room there is none."""
    for room, rows in ((30 << 20, [1]), (1 << 20, [])):
        program = openvino_at(converted, copies_bytes=room).open("k")
        for count in (1, 2):
            recurs(program, block, count)
        assert [model.inputs[0].shape[0] for model, _ in compiled] == rows
        compiled.clear()


def test_a_copy_takes_only_memory_that_is_free(converted, block, compiled):
    """It is asked for when the copy would be made, again and again: memory may come back."""
    free = [0]
    program = openvino_at(converted, free_bytes=lambda: free[0]).open("k")
    recurs(program, block, 3)
    assert not compiled
    free[0] = 1 << 30
    recurs(program, block, 3)
    assert len(compiled) == 1


@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_a_copy_that_is_wrong_or_fails_is_not_tried_again(converted, block, monkeypatch, caplog, fault):
    """All answers are the model's, also the first that the copy gave; other shapes still get theirs."""
    made, fixed = [], openvino_program.fixed

    def planted(model, layers, key):
        made.append(key)
        if key[0][0] == 3 and fault == "fails":
            raise ValueError("a factor leads to 2 operations")
        copy = fixed(model, layers, key)
        if key[0][0] == 3:
            constant = next(
                node for node in copy.get_ops() if node.get_type_name() == "Constant" and node.data.size > 99
            )
            twice = opset13.constant(2 * constant.data)
            constant.output(0).replace(twice.output(0))
        return copy

    monkeypatch.setattr(openvino_program, "fixed", planted)
    program = openvino_at(converted).open("k")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            recurs(program, block, 3)
    assert len(made) == 1
    assert caplog.text.count("has no program of its own") == 1
    assert {"wrong": "differs from torch", "fails": "leads to 2"}[fault] in caplog.text
    recurs(program, block, 2)
    assert len(made) == 2


class SelfAttention(torch.nn.Module):
    """Of the pixels of `x (R, 48, h, w)`: `(R, h * w, 48)`."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = torch.nn.ModuleList(torch.nn.Linear(48, 48, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        """Compute it with three heads."""
        tokens = x.flatten(2).transpose(1, 2)
        heads = [layer(tokens).unflatten(2, (3, 16)).transpose(1, 2) for layer in self.projections]
        return (torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2),)


@pytest.fixture
def attention(tmp_path):
    """The module, and its programs with these settings."""
    torch.manual_seed(0)
    module = SelfAttention().eval().requires_grad_(requires_grad=False)
    shape = InputSpec(name="x", shape=(None, 48, None, None))
    computation = Computation(module=module, inputs=(shape,), example=(torch.randn(2, 48, 4, 4),))
    return module, lambda **settings: openvino_at(tmp_path, **settings).prepare("k", lambda: computation)


def computes(program, module, *sides):
    """One after the other."""
    for side in sides:
        x = torch.randn(2, 48, side, side)
        torch.testing.assert_close(program.run([x])[0], module(x)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_single_pixel_may_come_first(attention, restarted):
    """OpenVINO's self-attention is wrong for ever if its first sequence is one token: a small image right after the
    start, or after a change of threads, which compiles anew."""
    module, prepare = attention
    threads = [1]
    program = prepare(threads=lambda: threads[0])
    if restarted:
        program.run([torch.randn(2, 48, 4, 4)])
        threads[0] = 2
    computes(program, module, 1, 4, 1, 6)


SIGNALLED = """
import gc, os, signal, sys, threading
from pathlib import Path
from plait_kernels.executors import background
from support.executors import openvino_at, small_block, small_computation
there, new = map(Path, sys.argv[1:])
programs = [openvino_at(there).open("k")]
dropper = threading.Thread(target=lambda: (programs.clear(), gc.collect()))
dropper.start()
dropper.join()
signal.signal(signal.SIGINT, lambda *_: print("heard", end=""))
os.kill(os.getpid(), signal.SIGINT)
executor = openvino_at(new)
background.start("plait-prepare", lambda: executor.prepare("k", lambda: small_computation(small_block())))
"""


def test_a_process_lives_until_it_is_done(converted, tmp_path):
    """A signal reaches who loaded the first program after another thread dropped it: OpenVINO's plugin takes the first
    thread's signal stack with it when it is unloaded, and the signal would kill. A process that ends while a module is
    converted waits for the thread: cut off inside OpenVINO it would abort."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-c", SIGNALLED, converted, tmp_path], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "heard"), ended.stderr
    assert entries(tmp_path) == ["k"]


def test_the_code_that_is_kept_for_new_sizes_is_bounded(tmp_path, block, compiled):
    """Whatever compiles a program tells OpenVINO so: it would keep it for 5,000 sizes."""
    openvino_at(tmp_path).prepare("k", lambda: small_computation(block))
    assert {options["CPU_RUNTIME_CACHE_CAPACITY"] for _, options in compiled} == {48}


def test_what_a_large_shape_took_goes_back(converted, block, monkeypatch):
    """Once it comes no more: after 128 calls in a row that are a fourth of it at most. What is computed stays right."""
    released, release = [], openvino_program.ov.CompiledModel.release_memory
    monkeypatch.setattr(
        openvino_program.ov.CompiledModel, "release_memory", lambda self: (released.append(self), release(self))
    )
    program = openvino_at(converted, copies_bytes=0).open("k")
    given = {(height, width): small_inputs(1, height, width) for height, width in ((16, 16), (16, 9), (8, 8), (4, 4))}
    wanted = {size: by_hand(block, inputs)[0] for size, inputs in given.items()}

    def run(*sizes):
        for size in sizes:
            assert float((program.run(given[size])[0] - wanted[size]).abs().max()) < 1e-4

    run((16, 16), *[(8, 8)] * 127, (16, 9), *[(4, 4)] * 127)
    assert released == []
    run((4, 4))
    assert len(released) == 1
    run(*[(4, 4)] * 200, (16, 16), (4, 4))
    assert len(released) == 1


def test_what_new_sizes_freed_goes_back(converted, monkeypatch):
    """After each 64 of them, however often they come."""
    returned = []
    monkeypatch.setattr(openvino_program.background, "start", lambda name, work: returned.append(name))
    program = openvino_at(converted, copies_bytes=0).open("k")
    sizes = [(height, width) for height in range(1, 9) for width in range(1, 9)]
    for height, width in sizes[:-1] * 2:
        program.run(small_inputs(1, height, width))
    assert returned == []
    for height, width in (sizes[-1], sizes[0]):
        program.run(small_inputs(1, height, width))
    assert returned == ["plait-return-memory"]


def test_a_single_token_after_that_spoils_nothing(attention):
    """A dynamic model whose very first sequence has one token is wrong for longer ones; one that gave back is not
    new."""
    module, prepare = attention
    computes(prepare(copies_bytes=0), module, 8, *[1] * 129, 4, 8)
