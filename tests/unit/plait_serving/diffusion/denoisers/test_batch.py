"""What a batch must not do: let one request's trouble, weights of yesterday or a late answer reach another request."""

from __future__ import annotations

import pytest
import torch

from plait_serving.diffusion.bundle import load_bundle, load_controlnet
from plait_serving.diffusion.denoisers.batch import BatchLayout
from plait_serving.diffusion.denoisers.constants import ConstantsStore
from plait_serving.diffusion.denoisers.unet import UNetDenoiser
from plait_serving.diffusion.denoisers.whole import WholeControlNet
from plait_serving.diffusion.errors import ControlNetUnavailable, ModelError, NumericalError
from plait_serving.diffusion.knobs import Exact
from plait_serving.diffusion.protocols import Conditioning, Residuals
from plait_serving.diffusion.values import ControlRef
from plait_serving.diffusion.versions import parameter_version
from support.denoise import control_image, make_request, max_difference, start


class Client:
    """A ControlNet that answers what the test says; ``log`` is shared, to see the order of events."""

    def __init__(self, name: str, answers, log: list[str] | None = None, *, refuses: bool = False) -> None:
        self.name, self.answers, self.refuses = name, answers, refuses
        self.log = log if log is not None else []

    def open(self, *, image, conditioning, width, height):
        """Any session."""
        return self

    def start(self, calls):
        """Remembers; answers later."""
        self.log.append(f"start {self.name} {len(calls)}")
        if self.refuses:
            raise ControlNetUnavailable(f"{self.name} is gone")
        return self

    def wait(self):
        """The answers."""
        self.log.append(f"wait {self.name}")
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers


@pytest.fixture(scope="module")
def bundle(tiny_sd_folder):
    """A tiny model."""
    return load_bundle(tiny_sd_folder)


@pytest.fixture
def denoiser(bundle):
    """A fresh denoiser over it."""
    return UNetDenoiser(bundle)


@pytest.fixture(scope="module")
def real(bundle, tiny_sd_controlnets):
    """A ControlNet that works."""
    return WholeControlNet("real", load_controlnet(tiny_sd_controlnets[0], base=bundle.config, vae_factor=2))


def controlled(bundle, denoiser, *clients, seed: int = 1):
    """A call of a request with those ControlNets."""
    refs = tuple(ControlRef(name=client.name, image=control_image(1)) for client in clients)
    request = make_request(seed=seed, controlnets=refs)
    return start(bundle, denoiser, request, {client.name: client for client in clients}).call()


def test_a_failing_controlnet_fails_its_request_only(bundle, denoiser, real):
    """Refused at the start, lost while waiting, or an error per call: the mates' outputs are as without them."""
    error = ControlNetUnavailable("lost")
    calls = [
        controlled(bundle, denoiser),
        controlled(bundle, denoiser, Client("gone", None, refuses=True)),
        controlled(bundle, denoiser, real),
        controlled(bundle, denoiser, Client("lost", error)),
        controlled(bundle, denoiser, real, Client("one", [error])),
    ]
    outputs = denoiser.predict(calls)
    assert [isinstance(output, ControlNetUnavailable) for output in outputs] == [False, True, False, True, True]
    for k in (0, 2):
        assert max_difference(outputs[k], denoiser.predict([calls[k]])[0]) < 1e-4


def test_residuals_of_another_shape_are_refused(bundle, denoiser):
    """A ControlNet of another model answers: its request fails with a clear error."""
    wrong = Residuals(down=(torch.zeros(2, 4, 8, 8),), mid=torch.zeros(2, 4, 8, 8))
    outputs = denoiser.predict([controlled(bundle, denoiser, Client("foreign", [wrong])), controlled(bundle, denoiser)])
    assert isinstance(outputs[0], ModelError)
    assert isinstance(outputs[1], torch.Tensor)


def test_questions_leave_before_the_encoder_half(bundle, denoiser, monkeypatch):
    """One batch per ControlNet; asked before the encoder half, awaited after it."""
    log: list[str] = []
    encode = denoiser._encode
    monkeypatch.setattr(denoiser, "_encode", lambda *args: (log.append("encode"), encode(*args))[1])
    error = ControlNetUnavailable("no")
    a, b = Client("a", [error, error], log), Client("b", [error], log)
    denoiser.predict([controlled(bundle, denoiser, a, b), controlled(bundle, denoiser, a)])
    assert log == ["start a 2", "start b 1", "encode", "wait a", "wait b"]


def test_answers_of_a_failed_step_are_drained(bundle, denoiser, monkeypatch):
    """If the encoder half runs out of memory, answers in flight are awaited and dropped."""
    log: list[str] = []

    def fail(*_):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(denoiser, "_encode", fail)
    with pytest.raises(RuntimeError, match="memory"):
        denoiser.predict([controlled(bundle, denoiser, Client("a", [], log))])
    assert log == ["start a 1", "wait a"]


def test_a_nan_row_fails_alone(bundle, denoiser):
    """A request whose sample is NaN gets `NumericalError`; the others get what they would get without it."""
    calls = [controlled(bundle, denoiser, seed=seed) for seed in range(3)]
    clean = denoiser.predict(calls)
    calls[1].sample.fill_(float("nan"))
    outputs = denoiser.predict(calls)
    assert isinstance(outputs[1], NumericalError)
    assert torch.equal(outputs[0], clean[0])
    assert torch.equal(outputs[2], clean[2])


def test_new_weights_are_used_at_once(bundle, denoiser):
    """Keys and values of the text are dropped when a merge writes into a weight, in or out of inference mode."""
    calls = [controlled(bundle, denoiser, seed=seed) for seed in range(2)]
    before = denoiser.predict(calls)[0]
    weight = next(p for name, p in bundle.unet.named_parameters() if name.endswith("attn2.to_k.weight"))
    pristine = weight.detach().clone()
    with torch.inference_mode():
        weight.detach().copy_(pristine * -3.0)
    changed = denoiser.predict(calls)[0]
    weight.copy_(pristine)
    assert not torch.equal(before, changed)
    assert torch.equal(denoiser.predict(calls)[0], before)


def test_packed_convolutions_follow_their_weights(bundle, denoiser):
    """A merge into a convolution is seen in the next call, although its weights are kept packed."""
    calls = [controlled(bundle, denoiser, seed=seed) for seed in range(2)]
    before = denoiser.predict(calls)[0]
    weight = bundle.unet.down_blocks[0].resnets[0].conv1.weight
    pristine = weight.detach().clone()
    with torch.inference_mode():
        weight.detach().copy_(pristine * 2.0)
    fast = denoiser.predict(calls)[0]
    exact = UNetDenoiser(bundle, exact=lambda: Exact.ALWAYS).predict(calls)[0]
    weight.copy_(pristine)
    assert not torch.allclose(before, fast, atol=1e-3)
    assert max_difference(fast, exact) < 1e-4
    assert torch.equal(denoiser.predict(calls)[0], before)


def test_a_single_request_may_run_fast_too(bundle):
    """`Exact.NEVER` gives one request the fast path: the same up to rounding."""
    exact, fast = UNetDenoiser(bundle), UNetDenoiser(bundle, exact=lambda: Exact.NEVER)
    call = controlled(bundle, exact)
    a, b = exact.predict([call])[0], fast.predict([call])[0]
    assert 0.0 < max_difference(a, b) < 1e-4


def conditioning(value: float, n: int = 1, length: int = 77) -> Conditioning:
    """A constant text of the tiny model's width."""
    return Conditioning(text=torch.full((2, length, 32), value), added={}, n=n, uses_cfg=True)


def test_constants_are_kept_per_composition_and_version(bundle):
    """The same texts in the same order hit; another order, another count or another version does not."""
    versions = [0]
    store = ConstantsStore(bundle.unet, lambda: versions[0], limit_bytes=1 << 30)
    a, b = conditioning(1.0), conditioning(2.0)
    first = store.of([a, b], BatchLayout.of([a, b]), fast=True)
    assert store.of([a, b], BatchLayout.of([a, b]), fast=True) is first
    store.of([b, a], BatchLayout.of([b, a]), fast=True)
    assert (store.hits, store.misses) == (1, 2)
    versions[0] = 1
    assert store.of([a, b], BatchLayout.of([a, b]), fast=True) is not first
    assert (store.hits, store.misses) == (1, 3)
    assert store.nbytes == first.nbytes, "what belongs to old weights is gone"


def test_constants_stay_within_their_budget(bundle):
    """The least recently used go first, and what is too large alone is computed every time."""
    texts = [conditioning(float(i)) for i in range(5)]
    one = ConstantsStore(bundle.unet, lambda: 0, limit_bytes=1 << 30).of(
        texts[:1], BatchLayout.of(texts[:1]), fast=True
    )
    store = ConstantsStore(bundle.unet, lambda: 0, limit_bytes=2 * one.nbytes)
    for text in texts:
        store.of([text], BatchLayout.of([text]), fast=True)
        assert store.nbytes <= 2 * one.nbytes
    store.of(texts[-1:], BatchLayout.of(texts[-1:]), fast=True)
    store.of(texts[:1], BatchLayout.of(texts[:1]), fast=True)
    assert (store.hits, store.misses) == (1, 6)
    tight = ConstantsStore(bundle.unet, lambda: 0, limit_bytes=one.nbytes - 1)
    tight.of(texts[:1], BatchLayout.of(texts[:1]), fast=True)
    assert tight.nbytes == 0


def test_layout_places_every_row_once():
    """Unconditional rows of all requests first, then the conditional ones, in request order."""
    layout = BatchLayout.of([conditioning(0.0, n=2), conditioning(1.0), conditioning(2.0, n=3)])
    rows = [range(part.start, part.stop) for k in range(3) for part in layout.rows(k)]
    assert [list(part) for part in rows] == [[0, 1], [6, 7], [2], [8], [3, 4, 5], [9, 10, 11]]


def test_parameter_version_counts_writes(bundle):
    """Every in-place write to any parameter changes the version."""
    version = parameter_version(bundle.unet)
    before = version()
    parameter = next(bundle.unet.parameters())
    parameter.copy_(parameter.clone())
    assert version() > before
