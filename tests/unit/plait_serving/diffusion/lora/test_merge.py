"""The merger: live weights are W0 + the current set, in place, exactly, or the previous ones bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from plait_kernels.lora_merge import reference
from plait_serving.diffusion.errors import LoraError, OutOfMemory
from plait_serving.diffusion.lora import merge as merge_module
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.parse import parse
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.values import LoraRef, LoraSet
from support.loras import TinyFactor, TwoLayers, delta, factors, loaded, lycoris_tensors, shapes_of, snapshot, write

torch.set_num_threads(1)


class Bench:
    """A tiny model, a merger over it, and three LoRAs: on all layers, on lin only, on conv and point."""

    def __init__(self, folder, dtype: torch.dtype = torch.float32, **options: object) -> None:
        self.model = TwoLayers(dtype)
        self.merger = Merger({"unet": self.model}, **options)  # type: ignore[arg-type]
        shapes = shapes_of(self.model)
        self.made = {
            "a": factors(shapes, seed=1, rank=2, alpha=1.0),
            "b": factors({"lin": shapes["lin"]}, seed=2, rank=3),
            "c": factors({k: shapes[k] for k in ("conv", "point")}, seed=3, rank=1, alpha=4.0),
        }
        self.weights = {name: loaded(folder, name, self.model, made) for name, made in self.made.items()}
        self.before = self.now()

    def now(self) -> dict[str, torch.Tensor]:
        """All parameters, copied."""
        return snapshot({"unet": self.model})

    def switch(self, **scales: float) -> None:
        """Makes the set of these names and scales live."""
        self.merger.switch(lora_set(**scales), self.weights)

    def add(self, folder, name: str, made: dict[str, TinyFactor]) -> None:
        """One LoRA more."""
        self.made[name] = made
        self.weights[name] = loaded(folder, name, self.model, made)

    @property
    def copied(self) -> set[str]:
        """The modules whose pristine weights are held."""
        return {ref.module for ref in self.merger._pristine}

    def expected(self, **scales: float) -> dict[str, torch.Tensor]:
        """W0 + sum of deltas in fp64, by the formula."""
        total = {key: value.double() for key, value in self.before.items()}
        for name, scale in scales.items():
            for module, factor in self.made[name].items():
                key = f"unet.{module}.weight"
                total[key] = total[key] + delta(factor, tuple(total[key].shape), scale)
        return total


def lora_set(**scales: float) -> LoraSet:
    """A set in keyword order."""
    return tuple(LoraRef(name=name, scale=scale) for name, scale in scales.items())


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    assert [key for key in left if not torch.equal(left[key], right[key])] == []


@pytest.fixture
def bench(tmp_path) -> Bench:
    """In fp32."""
    return Bench(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str
)
def test_live_weights_are_the_formula(tmp_path, dtype, tolerance):
    """For a set of three, in every dtype, in place; what no LoRA touches is untouched."""
    bench = Bench(tmp_path, dtype)
    addresses = {name: value.data_ptr() for name, value in bench.model.named_parameters()}
    scales = {"a": 0.7, "b": -1.3, "c": 2.0}
    bench.switch(**scales)
    assert bench.merger.current == lora_set(**scales)
    for key, wanted in bench.expected(**scales).items():
        got = bench.now()[key].double()
        assert torch.allclose(got, wanted, rtol=tolerance, atol=tolerance), key
    assert {name: value.data_ptr() for name, value in bench.model.named_parameters()} == addresses
    for untouched in ("lin.bias", "norm.weight", "grouped.weight"):
        assert torch.equal(bench.now()[f"unet.{untouched}"], bench.before[f"unet.{untouched}"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_hundred_merges_and_restores_leave_no_trace(tmp_path, dtype):
    """After every restore all weights are the pristine ones bit for bit; sets in any order, some failing."""
    bench = Bench(tmp_path, dtype)
    names = list(bench.weights)
    for turn in range(100):
        chosen = {names[(turn + i) % 3]: (turn % 7 - 3) / 2 or 1.0 for i in range(turn % 3 + 1)}
        bench.switch(**chosen)
        if turn % 5 == 0:
            with pytest.raises(LoraError):
                bench.switch(missing=1.0)
        if turn % 2:
            bench.switch()
            assert_same(bench.now(), bench.before)
    bench.switch()
    assert_same(bench.now(), bench.before)
    assert bench.merger.current == ()


def test_forgetting_restores_and_keeps_no_copies(bench):
    """The weights are the pristine ones, no memory is held, and merging works again."""
    bench.switch(a=0.5, b=1.0)
    merged = bench.now()
    bench.merger.forget()
    assert_same(bench.now(), bench.before)
    assert bench.copied == set()
    bench.switch(a=0.5, b=1.0)
    assert_same(bench.now(), merged)


@pytest.mark.parametrize("chosen", [{"a": 0.5, "b": 1.0}, {"b": 1.0}], ids=str)
def test_a_set_gives_the_same_bits_whatever_was_live_before(bench, chosen):
    """A request's image does not depend on which sets ran earlier; what only they touched is as it was."""
    bench.switch(**chosen)
    fresh = bench.now()
    for detour in ({}, {"c": 1.0}, {"b": 1.0}, {"b": 1.0, "a": 0.5}, {"a": 0.5, "b": 1.1}):
        bench.switch(**detour)
        bench.switch(**chosen)
        assert_same(bench.now(), fresh)


def test_only_changed_weights_are_written(bench):
    """Adding b to {a, c}, and taking it away, rewrites lin alone."""
    bench.switch(a=1.0, c=1.0)
    for scales in ({"a": 1.0, "c": 1.0, "b": 1.0}, {"a": 1.0, "c": 1.0}):
        before = {name: value._version for name, value in bench.model.named_parameters()}
        bench.switch(**scales)
        written = [name for name, value in bench.model.named_parameters() if value._version != before[name]]
        assert written == ["lin.weight"]


def test_same_name_with_new_content_is_merged_anew(bench, tmp_path):
    """A LoRA file that was replaced acts in the next switch, although name and scale are the same."""
    bench.switch(b=1.0)
    old = bench.now()["unet.lin.weight"]
    bench.add(tmp_path, "b", factors({"lin": (10, 6)}, seed=77))
    bench.switch(b=1.0)
    assert not torch.equal(bench.now()["unet.lin.weight"], old)
    expected = bench.expected(b=1.0)["unet.lin.weight"]
    assert torch.allclose(bench.now()["unet.lin.weight"].double(), expected, atol=1e-6)


def test_pristine_copies_are_kept_only_of_touched_weights(bench):
    """Memory grows with what LoRAs touch, not with the model; one at scale 0 changes no bit and touches nothing."""
    bench.switch(a=0.0)
    assert_same(bench.now(), bench.before)
    assert (bench.copied, bench.merger.current) == (set(), lora_set(a=0.0))
    bench.switch(b=1.0)
    assert bench.copied == {"lin"}
    bench.switch(c=1.0)
    bench.switch(b=0.5)
    assert bench.copied == {"lin", "conv", "point"}


def test_pristine_copies_that_inference_mode_made_serve_outside_of_it(bench):
    """The thread that computes is in it, others are not."""
    with torch.inference_mode():
        bench.switch(a=1.0)
        bench.switch(a=2.0)
    bench.switch(a=1.0)
    bench.switch()
    assert_same(bench.now(), bench.before)


# ---- failures -------------------------------------------------------------------------------------------------------


def spoilt(kind: str, bench: Bench, tmp_path) -> None:
    """Adds a LoRA named "bad" that cannot be merged."""
    if kind == "no finite scale":
        bench.weights["bad"] = bench.weights["b"]
    elif kind == "overflow":
        bench.add(tmp_path, "bad", factors(shapes_of(bench.model), strength=1e38, alpha=1e3, seed=5))
    elif kind == "other model":
        other = nn.ModuleDict({"elsewhere": nn.Linear(3, 3)})
        bench.weights["bad"] = loaded(tmp_path, "bad", other, factors({"elsewhere": (3, 3)}))
    elif kind == "other shape":
        other = nn.ModuleDict({"lin": nn.Linear(5, 9)})
        bench.weights["bad"] = loaded(tmp_path, "bad", other, factors({"lin": (9, 5)}))


@pytest.mark.parametrize("kind", ["missing", "no finite scale", "overflow", "other model", "other shape"])
@pytest.mark.parametrize("live", [{}, {"a": 0.7, "c": 1.0}], ids=str)
def test_on_error_the_previous_set_stays_bit_for_bit(bench, tmp_path, kind, live):
    """Nothing is written before everything is known to work: weights and set are as before."""
    spoilt(kind, bench, tmp_path)
    bench.switch(**live)
    before = bench.now()
    with pytest.raises(LoraError) as caught:
        bench.switch(b=1.0, bad=math.nan if kind == "no finite scale" else 1.0)
    assert caught.value.param == "loras"
    assert_same(bench.now(), before)
    assert bench.merger.current == lora_set(**live)
    bench.switch()
    assert_same(bench.now(), bench.before)


def test_a_row_without_length_is_refused(tmp_path):
    """A DoRA whose sum is zero in a row has no direction: an error before anything is written, not NaN."""
    parts = {"unet": TwoLayers()}
    with torch.no_grad():
        parts["unet"].lin.weight[3] = 0.0
    tensors = {key: value for key, value in lycoris_tensors(TwoLayers(), "dora").items() if "_lin." in key}
    tensors["lora_unet_lin.lora_up.weight"][3] = 0.0
    got = parse("x", write(tmp_path / "x.safetensors", tensors), LoraTargets.of(parts))
    before, merger = snapshot(parts), Merger(parts)
    with pytest.raises(LoraError, match=r"unet\.lin would hold NaN or infinity"):
        merger.switch(lora_set(x=1.0), {"x": got})
    assert_same(snapshot(parts), before)


def test_overflow_of_half_precision_is_refused(tmp_path):
    """A delta that fp32 holds but fp16 does not is an error, not an infinite weight."""
    bench = Bench(tmp_path, torch.float16)
    bench.add(tmp_path, "bad", factors({"lin": (10, 6)}, strength=3e5))
    with pytest.raises(LoraError, match=r"unet\.lin would hold NaN or infinity"):
        bench.switch(bad=1.0)
    assert_same(bench.now(), bench.before)
    bench.switch(bad=1e-4)


def test_a_loose_bound_does_not_refuse_what_fits(tmp_path):
    """Where the bound alone cannot tell, the merge is tried aside: large factors whose product is small pass."""
    bench = Bench(tmp_path, torch.float16)
    down, up = torch.zeros(1, 6), torch.zeros(10, 1)
    down[0, 0], up[3, 0] = 300.0, 150.0
    two = {"lin": TinyFactor(torch.cat([down, down]), torch.cat([up, -up], dim=1))}
    bench.add(tmp_path, "loose", two)
    bench.switch(loose=1.0)
    bound = next(iter(bench.weights["loose"].factors.values())).bound
    assert bound > torch.finfo(torch.float16).max
    # 45000 - 45000 in fp32 leaves at most one unit of 45000's last place.
    assert torch.allclose(bench.model.lin.weight, bench.before["unet.lin.weight"], atol=5e-3)


def failing_op(after: int, error: Exception):
    """A merge kernel that raises at its call number ``after``."""
    calls = []

    def op(weight, pristine, terms):
        calls.append(1)
        if len(calls) > after:
            raise error
        reference.merge_(weight, pristine, terms)

    return op


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), MemoryError(), RuntimeError("a bug")], ids=repr)
def test_a_failure_half_way_leaves_the_bare_model(bench, monkeypatch, error):
    """If memory ends between two weights, the model is pristine, never a mixture, and goes on working."""
    bench.switch(b=1.0)
    with monkeypatch.context() as patch:
        op = failing_op(1, error)
        patch.setattr(merge_module, "load", lambda *_: op)
        with pytest.raises(RuntimeError if "bug" in str(error) else OutOfMemory):
            bench.switch(a=1.0)
    assert_same(bench.now(), bench.before)
    assert bench.merger.current == ()
    bench.switch(a=1.0)
    wanted = bench.expected(a=1.0)
    assert all(torch.allclose(value.double(), wanted[key], atol=1e-6) for key, value in bench.now().items())


# ---- costs ----------------------------------------------------------------------------------------------------------


def test_switch_cost_follows_what_switches_took(tmp_path):
    """Merging a set, or restoring the bare model, takes what it took lately; the live set costs nothing."""
    ticks = iter([0.0, 5.0, 10.0, 10.5, 20.0, 27.0])
    bench = Bench(tmp_path, clock=lambda: next(ticks))
    cost_s = bench.merger.switch_cost_s
    assert cost_s(()) == 0.0
    assert cost_s(lora_set(a=1.0)) > 0.0
    bench.switch(b=1.0)
    assert cost_s(lora_set(b=1.0)) == 0.0
    assert cost_s(lora_set(b=2.0)) == 5.0
    bench.switch()
    assert cost_s(lora_set(b=1.0)) == 5.0
    bench.switch(c=1.0)
    assert cost_s(lora_set(b=1.0)) == pytest.approx(5.0 + 0.3 * (7.0 - 5.0))
    assert cost_s(()) == 0.5
