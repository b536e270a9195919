"""One diffusers ControlNet in this process: the control image is embedded once per request, then residuals for batches
of rows.

Calls are in `Constants` as their sessions. Shapes: a call has R rows of `sample (R, c, h, w)`; B is the sum of R over
a batch; E the width of the embedding.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import ControlNetModel
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from plait_kernels.devices import is_device_lost, is_gpu, is_out_of_memory
from plait_kernels.executors import Computation, PreparedProgram
from plait_kernels.executors.graphs import GraphMemory, GraphProgram, give_back, graph_memory
from plait_serving.diffusion.controlnet.sessions import Constants, batch_key, check_image
from plait_serving.diffusion.errors import EngineError, ModelError, OutOfMemory
from plait_serving.diffusion.families.encoders import WeightedPart
from plait_serving.diffusion.families.preparation import GRAPH_PATIENCE, Preparer, convert_behind, opened
from plait_serving.diffusion.families.resident_weights import ResidentWeights
from plait_serving.diffusion.families.rows import in_groups
from plait_serving.diffusion.families.unet.computations import ADDED, ControlNetTrunk, controlnet_computation
from plait_serving.diffusion.families.unet.config import check_controlnet
from plait_serving.diffusion.families.unet.fused import Fusion, fuse_
from plait_serving.diffusion.memory import check_memory
from plait_serving.diffusion.protocols import (
    Answers,
    Conditioning,
    ControlCall,
    ControlNetClient,
    ControlSession,
    Residuals,
)
from plait_serving.diffusion.values import RgbImage
from plait_serving.diffusion.weight_files import find_weights


class ControlNetModelRunner(ControlNetClient):
    """Runs one ControlNet. Not thread-safe: one thread owns it, as it owns the weights. It computes when an answer is
    awaited: on one device a ControlNet and the UNet's encoder half would only alternate.

    A batch with a call that needs exact bits goes through `ControlNetModel.forward` itself, on a shallow copy (same
    weights) whose `controlnet_cond_embedding` passes through the embedding that `embed` made earlier. That embedding
    is computed for one row where diffusers computes it for the whole batch; convolutions round the two differently
    (2e-7 in fp32). Other batches go through a prepared program once one was adopted; on a GPU, through fused modules.
    """

    def __init__(
        self,
        model: ControlNetModel,
        *,
        name: str = "",
        dtype: torch.dtype | None = None,
        weights: ResidentWeights | None = None,
    ) -> None:
        """Take a loaded model in its final place.

        `dtype` is what it computes in; None: its parameters'. `weights` brings them into memory when torch is to run
        it; None: they are there.
        """
        self.name = name
        # Asked once: each question walks all modules, and a step asks eight times.
        self.dtype: torch.dtype = dtype or model.dtype
        self.device: torch.device = model.device
        self.model: ControlNetModel = model.eval().requires_grad_(requires_grad=False)
        self._fusion: Fusion | None = fuse_(self.model) if is_gpu(self.device) else None
        self._headless = _without_image_encoder(self.model)
        self._trunk = ControlNetTrunk(self._headless).eval()
        self._program: PreparedProgram | None = None
        self._weights = weights
        self._lock = threading.Lock()
        self._flip_channels = model.config.controlnet_conditioning_channel_order == "bgr"
        factor = 2 ** (len(model.config.conditioning_embedding_out_channels) - 1)
        self._preprocess = VaeImageProcessor(
            vae_scale_factor=factor, do_convert_rgb=True, do_normalize=False
        ).preprocess

    def computation(self) -> Computation:
        """Return what an executor prepares; its weights must be in memory."""
        return controlnet_computation(self._headless)

    def graphed(self, memory: GraphMemory) -> GraphProgram:
        """Return a program of graphs over the model's own weights."""
        return GraphProgram(self._trunk, memory.buffers(), name="a ControlNet", pads=True, patience=GRAPH_PATIENCE)

    def adopt(self, program: PreparedProgram, *, live: bool = False) -> None:
        """Run calls that need not be exact through a prepared program from now on; give torch's weights back unless it
        reads those (`live`).

        From any thread.
        """
        with self._lock:
            self._program = program
            if self._weights is not None and not live:
                self._weights.release()

    @torch.inference_mode()
    def embed(self, image: RgbImage, width: int, height: int) -> torch.Tensor:
        """Return the control image as `(1, E, h, w)`, prepared like `StableDiffusionControlNetPipeline.prepare_image`.

        It is resized (Lanczos) to `width` x `height` and scaled to [0, 1]. Raises `RequestError` for an image that
        is not `uint8 (H, W, 3)`.
        """
        check_image(image)
        pixels = self._preprocess(Image.fromarray(image), height=height, width=width).to(dtype=torch.float32)
        # The pipeline's repeat_interleave leaves row-major memory; the layout decides how a convolution rounds.
        pixels = pixels.contiguous().to(device=self.device, dtype=self.dtype)
        if self._flip_channels:
            pixels = torch.flip(pixels, dims=[1])
        return self.model.controlnet_cond_embedding(pixels)  # type: ignore[no-any-return]

    def open(self, *, image: RgbImage, conditioning: Conditioning, width: int, height: int) -> Constants:
        """Return what a request's steps share, on the model's device. Raises `RequestError`, `ModelError`."""
        self._check_text(conditioning)
        there = Conditioning(
            text=conditioning.text.to(device=self.device, dtype=self.dtype),
            added={name: value.to(device=self.device) for name, value in conditioning.added.items()},
            n=conditioning.n,
        )
        return Constants(embedding=self.embed(image, width, height), conditioning=there)

    def start(self, calls: Sequence[ControlCall]) -> Answers:
        """Return what computes the calls."""
        return partial(self.try_residuals, calls)

    def close(self, session: ControlSession) -> None:
        """Do nothing: the constants go with the last reference."""

    def shutdown(self) -> None:
        """Do nothing: so do the weights."""

    @torch.inference_mode()
    def residuals(self, calls: Sequence[ControlCall]) -> list[Residuals]:
        """Return residuals times scale, per call, from one forward pass; the calls must agree in `batch_key`.

        Timesteps and scales may differ. The results are views of one batch, in the device and dtype of the samples.
        Raises `ModelError` if samples and embedding do not fit each other.
        """
        for call in calls:
            _check_fit(call)
        sizes = [call.session.rows for call in calls]
        exact = any(call.exact for call in calls)
        program = None if exact else self._program
        inputs, scale = self._inputs(calls, sizes), self._scales(calls, sizes)
        with self._lock:
            if self._fusion is not None:
                self._fusion.enabled = not exact
            if program is not None:
                outputs = [output * scale for output in program.run(inputs, copy=False)]
            else:
                if self._weights is not None:
                    self._weights.take()
                outputs = self._trunk(*inputs, scale=scale)
        like = calls[0].sample
        parts = [output.to(self.dtype).to(device=like.device, dtype=like.dtype) for output in outputs]
        blocks = zip(*(part.split_with_sizes(sizes) for part in parts), strict=True)
        return [Residuals(down=tuple(down), mid=mid) for *down, mid in blocks]

    def _inputs(self, calls: Sequence[ControlCall], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return what the trunk takes."""
        given = [call.session.conditioning for call in calls]
        embeddings = [call.session.embedding.expand(size, -1, -1, -1) for call, size in zip(calls, sizes, strict=True)]
        # The model calls `.float()` first, so integer and float timesteps can share a tensor.
        steps = [call.timestep.reshape(1).float().expand(size) for call, size in zip(calls, sizes, strict=True)]
        return [
            torch.cat([call.sample for call in calls]).to(device=self.device, dtype=self.dtype),
            torch.cat(steps).to(self.device),
            torch.cat([each.expand(each.text) for each in given]),
            embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings),
            *(torch.cat([each.expand(each.added[name]) for each in given]) for name in ADDED if name in given[0].added),
        ]

    def try_residuals(self, calls: Sequence[ControlCall]) -> list[Residuals | EngineError]:
        """Compute `residuals` for calls of any key without raising: a failure affects its own call only.

        A batch that does not fit the device is halved until it does.
        """
        return in_groups(calls, batch_key, self._try_batch)

    def _try_batch(self, calls: Sequence[ControlCall]) -> list[Residuals | EngineError]:
        try:
            return list(self.residuals(calls))
        except Exception as error:
            if is_device_lost(error):
                raise
            failure, is_full = _as_engine_error(error), is_out_of_memory(error)
        if is_full:
            give_back(self.device, short=True)
        if len(calls) == 1:
            return [failure]
        half = len(calls) // 2
        return self._try_batch(calls[:half]) + self._try_batch(calls[half:])

    def _scales(self, calls: Sequence[ControlCall], sizes: Sequence[int]) -> float | torch.Tensor:
        """Return one number if all agree, else `float32 (B, 1, 1, 1)`.

        A product with the tensor is float32 and rounded to the model's dtype afterwards; one with a number is
        rounded at once.
        """
        scales = [call.scale for call in calls]
        if all(scale == scales[0] for scale in scales):
            return scales[0]
        rows = torch.tensor(scales, dtype=torch.float32).repeat_interleave(torch.tensor(sizes))
        return rows.reshape(-1, 1, 1, 1).to(self.device)

    def _check_text(self, conditioning: Conditioning) -> None:
        config = self.model.config
        if conditioning.text.shape[-1] != config.cross_attention_dim:
            width = conditioning.text.shape[-1]
            raise ModelError(
                f"this ControlNet reads text of width {config.cross_attention_dim}, the base model's has {width}"
            )
        if config.addition_embed_type == "text_time" and not set(ADDED) <= set(conditioning.added):
            raise ModelError("this ControlNet is for SDXL; the base model is not")


def load_controlnet(
    folder: Path,
    *,
    name: str = "",
    dtype: torch.dtype,
    device: str = "cpu",
    preparer: Preparer | None = None,
    adopted: Callable[[], None] = lambda: None,
    graphs: bool = False,
) -> ControlNetModelRunner:
    """Load a ControlNet from a diffusers folder with safetensors weights, never a pickle. Raises `ModelError`.

    With `preparer`, its program runs at once if it was converted before, else as soon as it is, from another thread;
    `adopted` is called then. `graphs`: it runs as CUDA graphs; `device` is a CUDA device.
    """
    check_controlnet(folder)
    part, target = WeightedPart(ControlNetModel, find_weights(folder), dtype), torch.device(device)

    def adopt(runner: ControlNetModelRunner, programs: Sequence[PreparedProgram]) -> None:
        runner.adopt(*programs)
        adopted()

    computes = {"controlnet": lambda model: ControlNetModelRunner(model, dtype=dtype).computation()}
    programs = opened(preparer, part, computes)
    if not programs:
        check_memory(str(folder), part.nbytes, target)
    model: Any = part.mapped() if programs else part.load(target)
    weights = ResidentWeights(
        model,
        name=f"ControlNet {folder.name}",
        part=part,
        resident=not programs,
        always=("controlnet_cond_embedding",),
    )
    runner = ControlNetModelRunner(model, name=name, dtype=dtype, weights=weights)
    if graphs:
        runner.adopt(runner.graphed(graph_memory(runner.device)), live=True)
    elif programs:
        adopt(runner, programs)
    elif preparer is not None:
        convert_behind(preparer, part, computes, runner, adopt)
    return runner


def _without_image_encoder(model: ControlNetModel) -> ControlNetModel:
    """Return a shallow copy, sharing the weights, that takes the embedding where `forward` takes the image.

    The copy calls itself "rgb" because `forward` would otherwise flip the embedding; `embed` flips the image.
    """
    headless = copy.copy(model)
    headless.__dict__["_modules"] = dict(model._modules)
    headless._modules["controlnet_cond_embedding"] = torch.nn.Identity()
    headless.register_to_config(controlnet_conditioning_channel_order="rgb")
    return headless


def _check_fit(call: ControlCall) -> None:
    constants = call.session
    if call.sample.shape[0] != constants.rows:
        raise ModelError(f"a session of {constants.rows} rows was asked about {call.sample.shape[0]}")
    image, latent = tuple(constants.embedding.shape[-2:]), tuple(call.sample.shape[-2:])
    if image != latent:
        raise ModelError(f"the control image is {image} after embedding, the latents are {latent}: not the same family")


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    if is_out_of_memory(error):
        return OutOfMemory("one request's ControlNet rows do not fit the device")
    return EngineError(f"the ControlNet failed: {type(error).__name__}: {error}")
