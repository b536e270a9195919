"""A ControlNet beside the UNet's first half: after it, on a second stream, and in a second process on the same GPU."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from plait_bench.benchmark import said, started
from plait_bench.gpu.denoisers import GuidedInputs, GuidedUNet, drawn_module
from plait_bench.gpu.rows import GpuRun
from plait_fabric import connect, listen, new_secret
from plait_fabric.rpc.replicas import ReplicaLink
from plait_kernels.executors.cuda_capture import CudaCapture
from plait_kernels.executors.graphs import GraphMemory
from plait_serving.diffusion.controlnet.remote import RemoteControlNetClient
from plait_serving.diffusion.controlnet.service import ControlNetService
from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner
from plait_serving.diffusion.protocols import Conditioning, ControlCall, ControlNetClient
from plait_serving.diffusion.published.architectures import FamilyName

_NAME = "drawn"


def _runner(run: GpuRun, memory: GraphMemory) -> ControlNetModelRunner:
    family = FamilyName.SDXL_CONTROLNET
    runner = ControlNetModelRunner(drawn_module(run, family, ""), dtype=run.dtype)
    runner.adopt(runner.graphed(memory), live=True)
    return runner


@torch.no_grad()
def controlnet(run: GpuRun) -> None:
    """Measure a guided image's step until its second half could start, at each place."""
    one = GuidedUNet.made(run, FamilyName.SDXL)
    given = GuidedInputs.drawn(run, one.unet.config, 1)
    one.warm(run, given)
    beside = run.memory if not run.on_gpu else GraphMemory(CudaCapture(run.device), budget_bytes=16 << 30)
    here = _runner(run, beside)

    def first_half() -> None:
        one.first_half(given)

    conditioning = Conditioning(text=given.text, added=given.added, n=1)
    side = given.sample.shape[-1] * 8
    timestep = torch.tensor(501, device=run.device)

    def asked(client: ControlNetClient) -> ControlCall:
        image = np.zeros((side, side, 3), np.uint8)
        session = client.open(image=image, conditioning=conditioning, width=side, height=side)
        return ControlCall(session=session, sample=given.sample, timestep=timestep, scale=1.0, exact=False)

    call = asked(here)
    for _ in range(2):
        _step(here, call, first_half)
    while run.memory.capture_waiting() or beside.capture_waiting():
        pass
    run.timed("controlnet", "the first half alone", {"plait": first_half})
    run.timed("controlnet", "after it", {"plait": lambda: _step(here, call, first_half)})
    if run.on_gpu:
        run.timed("controlnet", "on a second stream", {"plait": _on_a_second_stream(run, here, call, first_half)})
    with _second_process(run) as there:
        call = asked(there)
        for _ in range(2):
            _step(there, call, first_half)
        time.sleep(0 if run.tiny else 5)  # it captures its graphs when it has nothing to do
        run.timed("controlnet", "in a second process", {"plait": lambda: _step(there, call, first_half)})


def _step(client: ControlNetClient, call: ControlCall, first_half: Callable[[], object]) -> None:
    """Ask, compute the first half, and take the answer. Raises the call's error."""
    pending = client.start([call])
    first_half()
    (answer,) = pending()
    if isinstance(answer, EngineError):
        raise answer


def _on_a_second_stream(
    run: GpuRun, client: ControlNetClient, call: ControlCall, first_half: Callable[[], object]
) -> Callable[[], None]:
    """Return what computes both at once, each with graphs of its own pool."""
    stream = torch.cuda.Stream(run.device)  # type: ignore[no-untyped-call]

    def both() -> None:
        stream.wait_stream(torch.cuda.current_stream(run.device))
        with torch.cuda.stream(stream):
            _step(client, call, lambda: None)
        first_half()
        torch.cuda.current_stream(run.device).wait_stream(stream)

    return both


@contextmanager
def _second_process(run: GpuRun) -> Iterator[RemoteControlNetClient]:
    secret = new_secret()
    with tempfile.TemporaryDirectory() as folder, started(_serve, Path(folder), secret, run.tiny) as process:
        address = said(process)
        client = RemoteControlNetClient(
            _NAME, lambda _: ReplicaLink(replica=_NAME, channel=connect(address, secret=secret, timeout_s=30))
        )
        try:
            yield client
        finally:
            client.shutdown()


def _serve(folder: Path, secret: bytes, tiny: bool) -> None:
    """Serve the ControlNet until standard input ends."""
    run = GpuRun(folder / "process", ends_s=0.0, tiny=tiny)
    listener = listen(f"shm://{folder}/net", secret=secret)
    service = ControlNetService(_NAME, _runner(run, run.memory), [listener])
    print(service.addresses[0], flush=True)
    sys.stdin.read()
    service.stop()
