"""What a model takes that has a use for every field, and for spacings with every sampler but ddim."""

from __future__ import annotations

from plait_serving.diffusion.request_fields import request_fields
from plait_serving.diffusion.request_terms import RequestTerms, SamplerChoice
from plait_serving.diffusion.values import ImageRequest, Scheduler

ALL_TERMS = RequestTerms(
    samplers=SamplerChoice(spaced=tuple(each for each in Scheduler if each is not Scheduler.DDIM)),
    takes=frozenset(request_fields(ImageRequest)),
)
