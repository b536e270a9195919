"""The wire format: the bodies of the image API, field by field.

Only what can be checked without knowing the models is checked here; `resolve.py` does the rest. `null` means "left
out", as in OpenAI's own client. Unknown fields are refused, because a misspelt `num_inference_step` that is dropped
silently costs more than an error. Numbers are strict: `true` is not 1 and `"20"` is not 20.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator, WithJsonSchema, create_model

from plait_serving.diffusion.request_fields import (
    OutputSize,
    Text,
    body_fields,
    echoed_fields,
    member_fields,
    text_of,
)
from plait_serving.diffusion.values import MAX_SEED, ControlRef, Edit, ImageRequest, LoraRef
from plait_serving.http.edge.json_body import MAX_DEADLINE_MS, StrictBody
from plait_serving.images.codec import OutputFormat
from plait_serving.sections import Name, ServedName, checked_name

MAX_MODEL_CHARS = 1024  # a base model and a few LoRAs, whose names may be long
MAX_LIST = 64  # a guard against parsing a million entries; the model's own limits are lower

IGNORED_FIELDS = (
    "quality",
    "style",
    "background",
    "moderation",
    "user",
    "safety_identifier",
    "complexity",
    "svg",
    "frame_count",
    "frame_duration_ms",
)
"""Fields of OpenAI's API that do not apply to these models: accepted, and listed in the response."""


def _output_format(value: object) -> object:
    if value in ("gif", "svg"):
        raise ValueError("gif and svg are not made here; use png, jpeg or webp")
    return value.value if isinstance(value, OutputFormat) else value


def bool_or_name(value: object) -> object:
    """Check `preprocess`: a validator."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return checked_name(value)
    raise ValueError("true, false or the name of a preprocessor")


def _upload(value: object) -> object:
    if isinstance(value, str | bytes) and value:
        return value
    a_list = "one image is edited at a time, not a list of them"
    raise ValueError(a_list if isinstance(value, list) else "a file, or in JSON its base64")


if TYPE_CHECKING:
    ModelText: TypeAlias = str
    Echoed: TypeAlias = BaseModel
    EchoedEdit: TypeAlias = BaseModel

    class GivenFields(StrictBody):
        """Read by name (`request_fields.given`)."""

        def __getattr__(self, name: str) -> Any: ...

    GivenEdit: TypeAlias = StrictBody
    GivenLora: TypeAlias = GivenFields
    GivenControl: TypeAlias = GivenFields
else:  # the fields that go to the engine as they are, declared there
    ModelText = text_of(MAX_MODEL_CHARS)
    Ignored = create_model("Ignored", __base__=StrictBody, **dict.fromkeys(IGNORED_FIELDS, (Any, None)))
    GivenFields = create_model("GivenFields", __base__=Ignored, **body_fields(ImageRequest))
    GivenLora = create_model("GivenLora", __base__=StrictBody, **member_fields(LoraRef))
    GivenControl = create_model("GivenControl", __base__=StrictBody, **member_fields(ControlRef))
    GivenEdit = create_model("GivenEdit", __base__=StrictBody, **body_fields(Edit))
    Echoed = create_model("Echoed", **echoed_fields(ImageRequest))
    of_edits = {name: (kind | None, None) for name, (kind, _) in echoed_fields(Edit).items()}
    EchoedEdit = create_model("EchoedEdit", **of_edits)  # not of a model that reads the image


class LoraBody(GivenLora):
    """One LoRA of the set, addressed by name."""

    name: ServedName


class ControlNetBody(GivenControl):
    """One ControlNet with its control image.

    `image` is base64 (or a data URL) of a PNG, JPEG or WebP and is stretched to the size of the output. With
    `preprocess: true` it is an ordinary image, from which the ControlNet's own preprocessor makes the control map.
    """

    name: Name
    image: str = Field(min_length=1, repr=False)
    preprocess: Annotated[bool | str, BeforeValidator(bool_or_name)] = False


class GenerationBody(GivenFields):
    """`POST /v1/images/generations`: OpenAI's fields, with plait's own at the top level beside them."""

    prompt: Text
    model: ModelText | None = None
    size: OutputSize | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Annotated[Literal["png", "jpeg", "webp"], BeforeValidator(_output_format)] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100, description="quality of jpeg and webp")] | None = None
    stream: bool | None = None
    seed: (
        Annotated[int, Field(ge=-1, le=MAX_SEED, description="image i uses seed + i; random if left out, or -1")] | None
    ) = None
    loras: Annotated[list[LoraBody], Field(max_length=MAX_LIST)] | None = None
    controlnets: Annotated[list[ControlNetBody], Field(max_length=MAX_LIST)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS, description="from acceptance")] | None = None

    @property
    def format(self) -> OutputFormat:
        """The encoding of the images in the response."""
        return OutputFormat(self.output_format or "png")

    @property
    def ignored(self) -> list[str]:
        """The fields that were given but do not apply."""
        names = [name for name in IGNORED_FIELDS if getattr(self, name) is not None]
        if self.output_compression is not None and self.format is OutputFormat.PNG:
            names.append("output_compression")
        return names


class ControlMapBody(StrictBody):
    """`POST /v1/images/control_maps`: the members of an entry of `controlnets` that its map depends on."""

    name: Name
    image: str = Field(min_length=1, repr=False, description="base64 or a data URL of a PNG, JPEG or WebP")
    preprocess: Annotated[bool | str, BeforeValidator(bool_or_name)] = True
    size: OutputSize | None = Field(None, description="of the output; unset: the first model's that takes it")


class ControlMapResponse(BaseModel):
    """The map as a PNG of the output's size."""

    b64_json: str
    size: str


ImageFile = Annotated[str | bytes, PlainValidator(_upload), WithJsonSchema({"type": "string", "minLength": 1})]
"""Base64 (or a data URL) of a PNG, JPEG or WebP; in a form the file itself."""


class EditBody(GenerationBody, GivenEdit):
    """`POST /v1/images/edits`: a generation that starts from an image. As JSON, or as a form like OpenAI's.

    Without `size` the output has the image's own, rounded down to what the model takes; else the image is stretched.
    """

    image: ImageFile = Field(
        repr=False, description="PNG, JPEG or WebP; without a mask its transparent pixels are made anew, or all of them"
    )
    mask: ImageFile | None = Field(
        None, repr=False, description="of the image's size; its transparent pixels are made anew, or its white ones"
    )
    input_fidelity: Any = None

    @property
    def ignored(self) -> list[str]:
        """The fields that were given but do not apply."""
        return super().ignored if self.input_fidelity is None else [*super().ignored, "input_fidelity"]


class ImageData(BaseModel):
    """One image, or where it is kept for a while. `seed` reproduces it; `flagged`: the safety checker blacked it
    out."""

    b64_json: str | None = None
    url: str | None = None
    seed: int
    flagged: bool


class TimingsBody(BaseModel):
    """Where the time went, in seconds; the parts never overlap."""

    queue: float
    lora: float
    encode: float
    denoise: float
    decode: float
    total: float


class GenerationResponse(Echoed):
    """OpenAI's ImagesResponse with what is needed to make the same images again."""

    id: str = Field(description="the request id, also in the header x-request-id")
    created: int = Field(description="seconds since 1970")
    data: list[ImageData]
    model: str
    dtype: str = Field(description="what the model computes in: the same on all replicas")
    size: str
    output_format: Literal["png", "jpeg", "webp"]
    seed: int
    lora_policy: Literal["exact", "bounded_async"]
    lora_free_steps: int
    timings: TimingsBody
    ignored: list[str]
    hints: list[str] = Field(description="what may not be meant as it is written")


class EditResponse(GenerationResponse, EchoedEdit):
    """A `GenerationResponse` with what an edit adds; `num_inference_steps` is the schedule's, of which a share runs."""
