"""What is kept of a conversion, checked at every start: damage and disagreement are named, dropped and made again."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait_kernels.executors import Computation, ExecutorError, InputSpec, RowFactors
from support.cluster import TESTS
from support.executors import (
    LAYERS,
    CallClock,
    SmallBlock,
    by_hand,
    openvino_at,
    small_block,
    small_computation,
    small_factors,
    small_inputs,
    wait_compiled,
)
from support.tiny import seeded

pytest.importorskip("openvino", reason="needs openvino")

from plait_kernels.executors import (  # after the skip
    compiled_cache,
    conversion,
    fixed_shapes,
    openvino_compiled,
    openvino_core,
    openvino_program,
)
from plait_kernels.executors.openvino_compiled import CompiledModel
from plait_kernels.executors.openvino_program import HELD_BY_A_STREAM_BYTES, OpenVinoProgram


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


def damage_weights(entry):
    path = entry / "model.bin"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_facts(entry):
    (entry / "entry.json").write_text('{"layers": [')


def damage_graph(entry):
    (entry / "model.xml").write_text("<net>")


def lose_probe(entry):
    (entry / "probe.safetensors").unlink()


def change_outputs(entry):
    path = entry / "probe.safetensors"
    probe = {name: value.clone() for name, value in load_file(path).items()}
    probe["output.0"][0, 0, 0, 0] += 0.1
    save_file(probe, path)


def make_nan(entry):
    path = entry / "probe.safetensors"
    probe = {name: value.clone() for name, value in load_file(path).items()}
    probe["output.1"].fill_(float("nan"))
    save_file(probe, path)


def rename_layer(entry):
    path = entry / "entry.json"
    facts = json.loads(path.read_text())
    facts["layers"].pop()
    path.write_text(json.dumps(facts))


@pytest.mark.parametrize(
    "damage", [damage_weights, damage_facts, damage_graph, lose_probe, change_outputs, make_nan, rename_layer]
)
def test_a_damaged_entry_is_named_and_dropped(tmp_path, converted, caplog, damage):
    """Half of the weights, broken JSON, other outputs than torch's: one warning with the folder."""
    shutil.copytree(converted, tmp_path, dirs_exist_ok=True)
    executor = openvino_at(tmp_path)
    damage(tmp_path / "k")
    with caplog.at_level(logging.WARNING):
        assert executor.open("k") is None
    assert len(caplog.records) == 1
    assert f"{tmp_path / 'k'} is not usable and will be made again" in caplog.text
    assert entries(tmp_path) == []


def test_what_is_damaged_is_made_again(tmp_path, block, converted):
    """`prepare` converts anew, and what it made is found."""
    shutil.copytree(converted, tmp_path, dirs_exist_ok=True)
    damage_weights(tmp_path / "k")
    executor = openvino_at(tmp_path)
    assert answers(executor.prepare("k", lambda: small_computation(block)), block)
    assert entries(tmp_path) == ["k"]
    assert answers(executor.open("k"), block)


def test_a_conversion_that_is_not_equal_is_refused_and_not_kept(tmp_path, block, monkeypatch):
    """The program computes something else than torch on the probe: `ExecutorError` says by how much."""
    convert = conversion.convert

    def other(computation):
        other_block = small_block(torch.float16)
        other_block.point.weight.mul_(1.01)
        return convert(small_computation(other_block))

    monkeypatch.setattr(conversion, "convert", other)
    executor = openvino_at(tmp_path)
    with pytest.raises(ExecutorError, match="it differs from torch by"):
        executor.prepare("k", lambda: small_computation(block))
    assert entries(tmp_path) == []


def test_a_disk_that_is_full_is_an_os_error(tmp_path, block, monkeypatch):
    """It reaches the caller as it is and leaves nothing."""

    def fail(model, path):
        path.write_text("<net")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(conversion, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        openvino_at(tmp_path).prepare("k", lambda: small_computation(block))
    assert entries(tmp_path) == []


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


def test_two_at_once_convert_once(tmp_path, block):
    """The second waits for the first and reads its entry."""
    converted, programs, executor = [], [], openvino_at(tmp_path)

    def computation():
        converted.append(1)
        return small_computation(block)

    threads = [threading.Thread(target=lambda: programs.append(executor.prepare("k", computation))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(converted) == 1
    assert all(answers(program, block) for program in programs)
    assert len(programs) == 2


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


def room_for_one(block: SmallBlock) -> int:
    """Bytes for one copy with few factors. Two without do not fit in."""
    return 2 * HELD_BY_A_STREAM_BYTES + int(1.5 * sum(4 * parameter.numel() for parameter in block.parameters()))


def test_copies_for_single_shapes_stay_within_their_bytes(converted, block):
    """Room for one copy: the last shape that recurred has it. Room for none: no shape is compiled. All answer."""
    room = room_for_one(block)
    program = openvino_at(converted, specialise_bytes=room, clock=CallClock()).open("k")
    for rows in (1, 2, 3):
        inputs, factors = small_inputs(rows, 4, 4), small_factors([{"point": 2}] * rows)
        for _ in range(3):
            found = program.run(inputs, factors)
        wait_compiled(program, 1)
        assert [special.rows for special in program.specials] == [rows]
        for got in (found, program.run(inputs, factors)):
            assert float((got[0] - by_hand(block, inputs, factors)[0]).abs().max()) < 1e-4
    tight = openvino_at(converted, specialise_bytes=100, clock=CallClock()).open("k")
    for _ in range(4):
        tight.run(inputs, factors)
    assert not tight.specials
    assert not tight.is_compiling


def test_a_copy_counts_more_than_its_weights(converted):
    """Most of what a small model's copy holds is generated code: room for two, however small the weights are."""
    program = openvino_at(converted, specialise_bytes=50 << 20, clock=CallClock()).open("k")
    for done, rows in enumerate((1, 2, 3, 4)):
        for _ in range(3):
            program.run(small_inputs(rows, 4, 4))
        wait_compiled(program, min(2, done + 1))
    assert len(program.specials) == 2
    assert program.specials[-1].rows == 4


def test_no_copy_is_made_that_would_leave_the_host_without_memory(converted):
    """The dynamic model answers meanwhile; where memory comes free, shapes that recur get theirs."""
    free = [10 << 20]
    program = openvino_at(converted, free_bytes=lambda: free[0], clock=CallClock()).open("k")
    inputs = small_inputs(2, 4, 4)
    for _ in range(6):
        expected = program.run(inputs)
        assert not program.is_compiling
    assert not program.specials
    free[0] = 1 << 30
    for _ in range(3):
        program.run(inputs)
    wait_compiled(program, 1)
    assert float((program.run(inputs)[0] - expected[0]).abs().max()) < 1e-4


def test_a_copy_is_made_only_where_it_saves_a_share_of_the_time(converted):
    """Calls take one second, and compiling forty: one call in 50 pays for a copy, one in 200 never does."""
    program = openvino_at(converted, clock=CallClock(compile_s=40.0)).open("k")
    for number in range(6_000):
        rows = 3 if number % 200 == 199 else 2 if number % 50 == 49 else 1
        program.run(small_inputs(rows, 4, 4), small_factors([{"point": 2}] * rows))
        wait_compiled(program, 0)
    assert sorted(special.rows for special in program.specials) == [1, 2]


def test_factors_count_as_what_copies_hold(converted, block):
    """A copy whose rows have factors of their own needs room for them; with one set for all rows it fits."""
    room = room_for_one(block)
    program = openvino_at(converted, specialise_bytes=room, clock=CallClock()).open("k")
    inputs, own = small_inputs(24, 4, 4), small_factors([dict.fromkeys(LAYERS, 16)] * 24)
    for _ in range(4):
        program.run(inputs, own)
    assert not program.specials
    assert not program.is_compiling
    shared = small_factors([dict.fromkeys(LAYERS, 1)])
    for _ in range(4):
        program.run(inputs, RowFactors(rows=24, by_path=shared.by_path))
    wait_compiled(program, 1)


def set_of(rows: int, name: object, *, seed: int) -> RowFactors:
    """Factors of every layer but one, the same for all rows, known by a name."""
    one = small_factors([{path: 3 for path in LAYERS if path != "point"}], seed=seed)
    return RowFactors(rows=rows, by_path=one.by_path, name=name)


def differs(program: OpenVinoProgram, block: SmallBlock, rows: int, factors: RowFactors | None) -> float:
    """The largest difference of an answer to the definition."""
    inputs = small_inputs(rows, 5, 4)
    pairs = zip(program.run(inputs, factors), by_hand(block, inputs, factors), strict=True)
    return max(float((got - wanted).abs().max()) for got, wanted in pairs)


def test_a_set_that_recurs_is_merged_into_the_weights(converted, block):
    """A copy without factors answers for the set that it was made for, in a batch that is built anew and one that is
    filled up, and for no other one."""
    program = openvino_at(converted, clock=CallClock()).open("k")
    for _ in range(3):
        assert differs(program, block, 3, set_of(3, "a", seed=3)) < 1e-4
    wait_compiled(program, 1)
    first = program.specials[0]
    assert first.merged == "a"
    assert not first.takes_factors
    for rows, name, seed in ((3, "a", 3), (3, "b", 4), (2, "a", 3), (3, "a", 3)):
        assert differs(program, block, rows, set_of(rows, name, seed=seed)) < 1e-4
    assert differs(program, block, 3, None) < 1e-4


def test_sets_in_turns_do_not_take_each_others_place(converted, block):
    """With room for one it stays while it is asked for, however often another is; when it no longer is, that has it."""
    room = room_for_one(block)
    program = openvino_at(converted, specialise_bytes=room, clock=CallClock()).open("k")

    def merged(*names: str) -> list[object]:
        for name in names:
            assert differs(program, block, 3, set_of(3, name, seed=ord(name))) < 1e-4
            wait_compiled(program, 0)
        return [special.merged for special in program.specials]

    assert merged("a", "a", "a") == ["a"]
    assert merged(*"bababa") == ["a"]
    assert merged("b", "b", "b") == ["b"]


def test_an_answer_in_the_programs_memory_lasts_until_the_next_call(converted, monkeypatch):
    """Whatever is compiled and checked behind it: the halves of a UNet hand their outputs on without a copy."""
    program = openvino_at(converted, clock=CallClock()).open("k")
    merged = set_of(3, "a", seed=3)
    checked = threading.Event()
    compile_model = openvino_program.compile_model

    def compile_later(*of, **how):
        assert checked.wait(20)
        return compile_model(*of, **how)

    monkeypatch.setattr(openvino_program, "compile_model", compile_later)
    while not program.is_compiling:
        program.run(small_inputs(3, 5, 4), merged, copy=False)
    held = program.run([2.0 * value for value in small_inputs(3, 5, 4)], merged, copy=False)
    kept = [output.clone() for output in held]
    checked.set()
    wait_compiled(program, 1)
    assert all(torch.equal(output, was) for output, was in zip(held, kept, strict=True))
    assert program.specials[0].merged == "a"


def test_a_merge_that_answers_otherwise_is_not_used(converted, block, monkeypatch):
    """It is compared with the dynamic model on the call that it was made for."""
    monkeypatch.setattr(fixed_shapes, "merge_factors", lambda *_: None)
    program = openvino_at(converted, clock=CallClock()).open("k")
    for _ in range(3):
        assert differs(program, block, 3, set_of(3, "a", seed=3)) < 1e-4
    wait_compiled(program, 1)
    for _ in range(3):
        assert differs(program, block, 3, set_of(3, "a", seed=3)) < 1e-4


@pytest.fixture
def models(monkeypatch) -> list[CompiledModel]:
    """The models that compute, call by call; that for any shape has 0 `rows`."""
    found = []
    infer = CompiledModel.infer

    def note(model, *of):
        found.append(model)
        return infer(model, *of)

    monkeypatch.setattr(CompiledModel, "infer", note)
    return found


@pytest.mark.parametrize("shared", [True, False])
def test_a_call_takes_the_model_for_somewhat_more_rows(converted, block, models, shared):
    """While there is none for its own rows: filled up to them, with the right answer, and only what it computes in
    vain counts for a model of its own. Many more rows, or other ranks, run on the dynamic model."""
    program = openvino_at(converted, clock=CallClock(compile_s=40.0)).open("k")

    def run(rows: int, rank: int = 2) -> None:
        inputs = small_inputs(rows, 4, 4)
        own = small_factors([{"point": rank}] * (1 if shared else rows))
        factors = RowFactors(rows=rows, by_path=own.by_path)
        found = program.run(inputs, factors)
        for got, wanted in zip(found, by_hand(block, inputs, factors), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, check_dtype=False)

    for _ in range(2):
        run(32)
    wait_compiled(program, 1)
    for rows, rank in ((12, 2), (23, 9)):
        run(rows, rank)
        assert (models[-1].rows, program.settled) == (0, False)
    for _ in range(80):  # a quarter of a second each is in vain, and half of 40 s has to be
        run(23)
        assert (models[-1].rows, program.settled) == (32, True)
        assert not program.is_compiling
    run(24)
    wait_compiled(program, 2)


@pytest.mark.parametrize("name", [None, "a"])
def test_a_call_takes_the_model_for_fewer_rows_in_turns(converted, block, models, name):
    """Where it has none of its own, whatever is left over at the end, and with a set that is merged into the model."""
    program = openvino_at(converted, clock=CallClock(compile_s=1e9)).open("k")
    for _ in range(2):
        differs(program, block, 4, name and set_of(4, name, seed=3))
    wait_compiled(program, 1)
    for rows, computed in ((8, 8), (11, 12), (23, 24), (4, 4)):
        assert differs(program, block, rows, name and set_of(rows, name, seed=3)) < 1e-4
        assert program.settled
        assert (models[-1].rows, models[-1].computed(rows)) == (4, computed)
    assert [(special.rows, special.merged) for special in program.specials] == [(4, name)]


@pytest.mark.parametrize(("names", "merged"), [("abcd", "a"), ("abcdefghijkl", None)])
def test_factors_of_a_set_become_inputs_where_many_sets_come_in_turns(converted, block, names, merged):
    """A handful is merged, each on its own. A call takes a second, and compiling forty."""
    program = openvino_at(converted, clock=CallClock(compile_s=40.0)).open("k")
    for _ in range(2):
        program.run(small_inputs(1, 9, 9))
    wait_compiled(program, 1)  # the first, after which it is known how long one takes
    for name in itertools.cycle(names):
        assert differs(program, block, 3, set_of(3, name, seed=ord(name))) < 1e-4
        if program.is_compiling:
            break
    wait_compiled(program, 2)
    assert program.specials[-1].merged == merged


def test_shapes_that_hardly_recur_are_not_compiled(converted):
    """What their calls took must first be worth half a compilation; then one is made."""
    program = openvino_at(converted, clock=CallClock(compile_s=40.0)).open("k")
    for done, calls in enumerate((2, 21)):
        for _ in range(calls):
            assert not program.is_compiling
            program.run(small_inputs(4, 7 + done, 4))
        wait_compiled(program, done + 1)


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


@pytest.mark.parametrize("restarted", [False, True])
def test_a_single_pixel_may_come_first(tmp_path, restarted):
    """OpenVINO's self-attention is wrong for ever if its first sequence is one token: a small image right after the
    start, or after a change of threads, which compiles anew."""
    with seeded(0):
        module = SelfAttention().eval().requires_grad_(requires_grad=False)
    shape = InputSpec(name="x", shape=(None, 48, None, None))
    computation = Computation(module=module, inputs=(shape,), example=(torch.randn(2, 48, 4, 4),))
    threads = [1]
    program = openvino_at(tmp_path, threads=lambda: threads[0], specialise_bytes=0).prepare("k", lambda: computation)
    if restarted:
        program.run([torch.randn(2, 48, 4, 4)])
        threads[0] = 2
    for side in (1, 4, 1, 6):
        x = torch.randn(2, 48, side, side)
        assert float((program.run([x])[0] - module(x)[0]).abs().max()) < 1e-4


def test_a_process_that_ends_while_a_shape_is_compiled_ends_well(converted):
    """It waits for the thread: cut off inside OpenVINO it would abort."""
    code = """
import sys
from pathlib import Path
from support.executors import openvino_at, small_inputs
program = openvino_at(Path(sys.argv[1])).open("k")
for _ in range(2):
    program.run(small_inputs(1, 9, 9))
assert program.is_compiling
"""
    assert run_in_another_process(code, converted) == ""


def test_a_signal_reaches_who_loaded_the_first_program_after_another_thread_dropped_it(converted):
    """OpenVINO's plugin takes the first thread's signal stack with it when it is unloaded: the signal would kill."""
    code = """
import gc, os, signal, sys, threading
from pathlib import Path
from support.executors import openvino_at
programs = [openvino_at(Path(sys.argv[1])).open("k")]
dropper = threading.Thread(target=lambda: (programs.clear(), gc.collect()))
dropper.start()
dropper.join()
signal.signal(signal.SIGINT, lambda *_: print("heard", end=""))
os.kill(os.getpid(), signal.SIGINT)
"""
    assert run_in_another_process(code, converted) == "heard"


def run_in_another_process(code: str, folder: Path) -> str:
    """Return what it prints. It has to end well."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_code_that_is_kept_for_new_sizes_is_bounded(tmp_path, block, monkeypatch):
    """Whatever compiles a program, or reads what was compiled, tells OpenVINO so: it would keep it for 5,000 sizes."""
    told = {}

    class Told:
        """OpenVINO's core, which notes what it is told."""

        def __getattr__(self, name):
            real = getattr(openvino_core.core(), name)
            if name not in {"compile_model", "import_model"}:
                return real

            def tell(model, device, options):
                told[name] = options["CPU_RUNTIME_CACHE_CAPACITY"]
                return real(model, device, options)

            return tell

    for module in (openvino_compiled, compiled_cache):
        monkeypatch.setattr(module, "core", Told)
    executor = openvino_at(tmp_path)
    assert answers(executor.prepare("k", lambda: small_computation(block)), block)
    assert answers(executor.open("k"), block)
    assert told == {"compile_model": 48, "import_model": 48}
