"""`ControlNetModel.forward` computed by `layers.py`, for control images that are already embedded.

Equal to diffusers' up to rounding. A ControlNet's weights never change, so the text of a batch is projected once.
B rows; E channels of the embedded control image.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from plait_serving.diffusion.denoisers.convolutions import Convolutions
from plait_serving.diffusion.denoisers.fast import FastText, down_and_mid, fast_text
from plait_serving.diffusion.denoisers.layers import why_not_fast

_COMPOSITIONS = 8
"""The number of batches whose text is remembered, as in `constants.py`."""


class FastControlNet:
    """One ControlNet. Not thread-safe."""

    def __init__(self, net: Any, *, packed_bytes: int = 512 << 20, text_bytes: int = 256 << 20) -> None:
        """Bound the packed convolution weights by `packed_bytes` and the cached keys and values by `text_bytes`."""
        self._net = net
        self._conv = Convolutions(net, limit_bytes=packed_bytes)
        self._text_bytes = text_bytes
        self._texts: OrderedDict[tuple[int, ...], tuple[tuple[torch.Tensor, ...], FastText]] = OrderedDict()

    @staticmethod
    def why_not(net: Any) -> str | None:
        """Return why a ControlNet cannot be run this way, or None."""
        if net.config.addition_embed_type not in (None, "text_time") or net.class_embedding is not None:
            return "it has inputs beyond text, time and SDXL's sizes"
        return why_not_fast(net)

    def residuals(
        self,
        *,
        sample: torch.Tensor,
        timesteps: torch.Tensor,
        texts: Sequence[torch.Tensor],
        repeats: Sequence[int],
        embedding: torch.Tensor,
        scale: float | torch.Tensor,
        added: Mapping[str, torch.Tensor] | None,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return the scaled down and mid residuals of `sample (B, c, h, w)` at `timesteps (B,)`.

        `texts[i]` is one request's `(branches, L, C)`, each row of which stands for `repeats[i]` rows of the batch;
        `embedding (1|B, E, h, w)`; `scale` a number or `(B, 1, 1, 1)`; `added` SDXL's inputs, B rows.
        """
        net = self._net
        time = F.silu(self._time(sample, timesteps, added))
        first = self._conv(net.conv_in, sample.contiguous(memory_format=torch.channels_last)).add_(embedding)
        skips, mid = down_and_mid(net, first, time, self._text(texts, repeats), self._conv)
        outputs = (*zip(net.controlnet_down_blocks, skips, strict=True), (net.controlnet_mid_block, mid))
        scaled = [(self._conv(layer, x) * scale).to(sample.dtype) for layer, x in outputs]
        return tuple(scaled[:-1]), scaled[-1]

    def _time(
        self, sample: torch.Tensor, timesteps: torch.Tensor, added: Mapping[str, torch.Tensor] | None
    ) -> torch.Tensor:
        net = self._net
        embedded: torch.Tensor = net.time_embedding(net.time_proj(timesteps).to(sample.dtype))
        if net.config.addition_embed_type is None:
            return embedded
        assert added is not None, "SDXL's ControlNets need text_embeds and time_ids"
        pooled = added["text_embeds"]
        sizes = net.add_time_proj(added["time_ids"].flatten()).reshape(len(pooled), -1)
        joined = torch.concat([pooled, sizes], dim=-1).to(embedded.dtype)
        embedded += net.add_embedding(joined)
        return embedded

    def _text(self, texts: Sequence[torch.Tensor], repeats: Sequence[int]) -> FastText:
        """Return keys and values of the batch's text. The key's texts are held, so that no other tensor can take their
        ids."""
        key = (*map(id, texts), *repeats)
        known = self._texts.pop(key, None)
        if known is None:
            pairs = zip(texts, repeats, strict=True)
            rows = torch.cat([text.repeat_interleave(repeat, dim=0) for text, repeat in pairs])
            known = (tuple(texts), fast_text(self._net, rows))
        if known[1].nbytes <= self._text_bytes // _COMPOSITIONS:
            self._texts[key] = known
            if len(self._texts) > _COMPOSITIONS:
                self._texts.popitem(last=False)
        return known[1]
