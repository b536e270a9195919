"""The weights of a module: names and shapes from the library's own class, and how widely each is spread.

Matrices and convolutions are scaled by their fan-in, so that what has variance 1 keeps it; norms start as the identity
and biases as 0. Every branch of these models begins with a norm, so activations stay far below float16's maximum.
"""

from __future__ import annotations

import math
import re

from torch import nn

from plait_serving.diffusion.published.architectures import ModelPart
from plait_serving.diffusion.published.configs import published_name
from plait_serving.random_models.tensor_file import DrawnTensor

# As CLIP's own initialisation has them.
_EMBEDDINGS = {"token_embedding": 0.02, "position_embedding": 0.01}

_GAINS: tuple[tuple[re.Pattern[str], float], ...] = (
    # Zero in a new ControlNet. Trained ones are small beside what they are added to; zeros would hide every mistake.
    (re.compile(r"^controlnet_(down_blocks\.\d+|mid_block)\.weight$"), 0.1),
    # Between SiLUs without a norm: the second moment of silu(x) is .355 for a standard normal x, and 1.68^2 * .355 = 1.
    (re.compile(r"^controlnet_cond_embedding\.(blocks\.\d+|conv_out)\.weight$"), 1.68),
)


def drawn_weights(part: ModelPart, module: nn.Module) -> list[DrawnTensor]:
    """Return the weights of a module as its file stores them."""
    made: list[DrawnTensor] = []
    for name, value in module.state_dict().items():
        key = published_name(name) if part.library == "transformers" else name
        mean, std = _distribution(key, tuple(value.shape))
        label = f"{part.folder or part.class_name}.{key}"
        made.append(DrawnTensor(key=key, label=label, shape=tuple(value.shape), mean=mean, std=std))
    return made


def _distribution(key: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of a weight."""
    if len(shape) < 2:
        return (0.0 if key.endswith("bias") else 1.0), 0.0
    embedding = _EMBEDDINGS.get(key.split(".")[-2])
    if embedding is not None:
        return 0.0, embedding
    gain = next((gain for pattern, gain in _GAINS if pattern.search(key)), 1.0)
    return 0.0, gain / math.sqrt(math.prod(shape[1:]))
