"""What a tuner or an operator may change on a running engine without a restart."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Placement(StrEnum):
    """Where ControlNets run: AUTO chooses by measured step and transfer times and logs the reason."""

    AUTO = "auto"
    LOCAL = "local"
    REMOTE = "remote"


class Exact(StrEnum):
    """When a step runs through diffusers' own modules, and so gives the pipeline's bits (fp32, CPU).

    NEVER: steps run on the fastest executor, whose latents differ by rounding. ALWAYS: for comparisons.
    """

    ALWAYS = "always"
    NEVER = "never"


class ExecutorName(StrEnum):
    """What runs the models. AUTO: openvino on a CPU where it is installed, CUDA graphs on a GPU, else torch."""

    AUTO = "auto"
    TORCH = "torch"
    OPENVINO = "openvino"


class EngineKnobs(BaseModel):
    """The engine's knobs; carried in Serve's `user_config`, so a change reconfigures instead of restarting."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    largest_batch: int = Field(
        default=16,
        ge=1,
        le=256,
        description="images in one denoiser call; with guidance by a negative prompt, each of SD3 and FLUX.1 is two",
    )
    batch_wait_ms: float = Field(
        default=0.0, ge=0, le=10_000, description="how long a first step waits for batch mates"
    )
    threads: int = Field(default=0, ge=0, le=1024, description="CPU threads of the compute thread; 0: all cores")
    exact: Exact = Field(default=Exact.NEVER, description="which requests get diffusers' bits: always or never")
    controlnet_placement: Placement = Field(default=Placement.AUTO, description="where ControlNets run")
    host_lora_bytes: int = Field(default=2 << 30, ge=0, description="host memory for parsed LoRA files")
    queue_limit: int = Field(default=256, ge=1, description="accepted and unfinished requests before Overloaded")
    queue_seconds: float = Field(
        default=300.0, gt=0, description="predicted compute-seconds of accepted requests before Overloaded"
    )
    overtake_limit: int = Field(
        default=64, ge=0, description="steps by later requests that one request may see go first"
    )
