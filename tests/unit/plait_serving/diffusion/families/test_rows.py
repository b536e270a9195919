"""What a batch must not do: let one request's trouble, weights of yesterday or a late answer reach another request."""

from __future__ import annotations

import pytest
import torch

from plait_serving.diffusion.errors import ControlNetUnavailable, ModelError
from plait_serving.diffusion.families.unet import denoiser as unet
from plait_serving.diffusion.families.unet.controlnet import load_controlnet
from plait_serving.diffusion.families.unet.denoiser import UNetDenoiser
from plait_serving.diffusion.protocols import Residuals
from plait_serving.diffusion.values import ControlRef
from support.bundles import load_bundle
from support.denoise import control_image, first_call, make_request, max_difference


class Client:
    """A ControlNet that answers what the test says; ``log`` is shared, to see the order of events."""

    def __init__(self, name: str, answers, log: list[str] | None = None) -> None:
        self.name, self.answers = name, answers
        self.log = log if log is not None else []

    def open(self, *, image, conditioning, width, height):
        """Any session."""
        return self

    def start(self, calls):
        """Remembers; answers later."""
        self.log.append(f"start {self.name} {len(calls)}")
        return self.wait

    def wait(self):
        """The answers."""
        self.log.append(f"wait {self.name}")
        return self.answers


@pytest.fixture(scope="module")
def denoiser(tiny_sd_folder):
    """Of a tiny model."""
    return UNetDenoiser(load_bundle(tiny_sd_folder))


@pytest.fixture(scope="module")
def real(tiny_sd_controlnets):
    """A ControlNet that works."""
    return load_controlnet(tiny_sd_controlnets[0], name="real", dtype=torch.float32)


def controlled(denoiser, *clients):
    """A call of a request with those ControlNets."""
    refs = tuple(ControlRef(name=client.name, image=control_image(1)) for client in clients)
    return first_call(denoiser, make_request(controlnets=refs), {client.name: client for client in clients})


def test_a_failing_controlnet_fails_its_request_only(denoiser, real):
    """An error of a call, beside others that work: the mates' outputs are as without it."""
    error = ControlNetUnavailable("lost")
    calls = [
        controlled(denoiser),
        controlled(denoiser, Client("lost", [error])),
        controlled(denoiser, real),
        controlled(denoiser, real, Client("one", [error])),
    ]
    outputs = denoiser.predict(calls)
    assert [isinstance(output, ControlNetUnavailable) for output in outputs] == [False, True, False, True]
    for k in (0, 2):
        assert max_difference(outputs[k], denoiser.predict([calls[k]])[0]) < 1e-4


def test_residuals_of_another_shape_are_refused(denoiser):
    """A ControlNet of another model answers: its request fails with a clear error."""
    wrong = Residuals(down=(torch.zeros(2, 4, 8, 8),), mid=torch.zeros(2, 4, 8, 8))
    outputs = denoiser.predict([controlled(denoiser, Client("foreign", [wrong])), controlled(denoiser)])
    assert isinstance(outputs[0], ModelError)
    assert isinstance(outputs[1], torch.Tensor)


def test_questions_leave_before_the_encoder_half(denoiser, monkeypatch):
    """One batch per ControlNet; asked before the encoder half, awaited after it."""
    log: list[str] = []
    encode = unet.encoder_half
    monkeypatch.setattr(unet, "encoder_half", lambda *args: (log.append("encode"), encode(*args))[1])
    error = ControlNetUnavailable("no")
    a, b = Client("a", [error, error], log), Client("b", [error], log)
    denoiser.predict([controlled(denoiser, a, b), controlled(denoiser, a)])
    assert log == ["start a 2", "start b 1", "encode", "wait a", "wait b"]


def test_answers_of_a_failed_step_are_drained(denoiser, monkeypatch):
    """If the encoder half runs out of memory, answers in flight are awaited and dropped."""
    log: list[str] = []

    def fail(*_):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(unet, "encoder_half", fail)
    with pytest.raises(RuntimeError, match="memory"):
        denoiser.predict([controlled(denoiser, Client("a", [], log))])
    assert log == ["start a 1", "wait a"]
