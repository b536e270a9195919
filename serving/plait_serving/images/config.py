"""The `images` section of plait.yaml: what is served and how the deployments are sized.

What may change on a running deployment is its `knobs` (Serve's `user_config`); everything else needs a restart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from plait_serving.cores import CoreBudget
from plait_serving.diffusion.admission import size_range
from plait_serving.diffusion.knobs import EngineKnobs, ExecutorName, Placement
from plait_serving.diffusion.request_terms import RequestTerms
from plait_serving.diffusion.sources.file_kinds import SUFFIX, no_single_file, stem_of, why_unread
from plait_serving.diffusion.sources.names import composed
from plait_serving.diffusion.values import MAX_IMAGES, MAX_SCALE, Scheduler
from plait_serving.sections import FolderPath, GpuShare, Name, Replicas, Replicated, Section, ServedName, folder_of
from plait_serving.spelling import hint
from plait_serving.starter.manifest import WEIGHTS
from plait_serving.starter.preprocess import Preprocessor

STARTER_MODEL = "emoji"
"""The model that ships with plait; its folder is `plait_serving/starter/weights`."""

STARTER_FOLDER = WEIGHTS
"""Contains `emoji/` (the base), `controlnets/NAME/` and `loras/NAME.safetensors`."""

STARTER_GUIDANCE = 3.0
"""The guidance scale with which the starter model was evaluated in training (`starter_training`)."""

_HUB_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")
_SHA256 = r"^[0-9a-f]{64}$"

DType = Literal["auto", "float32", "bfloat16", "float16"]


class StoredLora(Section):
    """One file of a store, pinned."""

    path: Annotated[str, Field(min_length=1, description="below the store's URL")]
    sha256: Annotated[str, Field(pattern=_SHA256)]
    nbytes: Annotated[int, Field(gt=0)]


class LoraStore(Section):
    """A remote store of LoRA files: every entry is pinned by its SHA-256, so the store itself need not be trusted."""

    url: Annotated[str, Field(description="fsspec URL of the folder, for example s3://bucket/loras")]
    entries: Annotated[dict[ServedName, StoredLora], Field(description="LoRAs by name")]
    cache_folder: FolderPath

    @field_validator("url")
    @classmethod
    def _has_scheme(cls, value: str) -> str:
        if not urlsplit(value).scheme:
            raise ValueError("needs a scheme, for example s3://bucket/loras or file:///srv/loras")
        return value


class LorasSection(Section):
    """Where LoRAs come from. If both are unset: the starter model's own, or none."""

    folder: FolderPath | None = None
    store: LoraStore | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.folder is not None and self.store is not None:
            raise ValueError("give a folder or a store, not both")
        return self


class ControlNetSection(Replicated):
    """One ControlNet: its diffusers folder, and the number of replicas of its deployment."""

    folder: Annotated[FolderPath, AfterValidator(no_single_file)]
    threads: Annotated[int, Field(ge=1, le=1024, description="CPU threads of a replica")] = 1
    num_cpus: CoreBudget = None
    num_gpus: GpuShare = None
    preprocessor: Annotated[Preprocessor | None, Field(description="makes the control map of an ordinary image")] = None


class ResultsSection(Section):
    """Where images are kept that requests ask for by URL; every ingress replica must reach it."""

    folder: FolderPath | None = None
    url: Annotated[str | None, Field(description="fsspec URL of a folder, for example s3://bucket/results")] = None
    lifetime_s: Annotated[float, Field(ge=1, le=30 * 86400, description="how long an image is kept")] = 3600.0
    max_bytes: Annotated[int, Field(ge=1, description="of all kept images")] = 1 << 30
    response_format: Annotated[
        Literal["b64_json", "url"], Field(description="what requests get that do not say; url is what DALL-E answered")
    ] = "b64_json"
    public_url: Annotated[
        str | None,
        Field(pattern=r"^https?://[^\s?#]+$", description="what clients reach the server by; unset: as they asked"),
    ] = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.folder is None) == (self.url is None):
            raise ValueError("give a folder or a url")
        return self

    @field_validator("url")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is None:
            return None
        import fsspec

        scheme = urlsplit(value).scheme
        try:
            fsspec.get_filesystem_class(scheme or "none")
        except (ValueError, ImportError) as error:
            raise ValueError(f"cannot be opened: {str(error).rstrip('.')}") from error
        return value


def _sizes(text: str) -> str:
    """Check a size or a range of sizes. Raises ValueError that says what one looks like."""
    try:
        least, most = size_range(text)
    except ValueError:
        least, most = (1, 1), (0, 0)
    if least[0] > most[0] or least[1] > most[1]:
        raise ValueError("must be a size or two of them, the smaller first: 512x768, 256x256-1024x1024")
    return text


class LimitsSection(Section):
    """What one request may ask for. Memory and the model may allow less; `/v1/models` says what holds."""

    max_pixels: Annotated[int, Field(ge=64, le=2**28, description="of an image")] = 4 * 2**20
    max_edge_px: Annotated[int, Field(ge=8, le=2**16)] = 4096
    sizes: Annotated[
        tuple[Annotated[str, AfterValidator(_sizes)], ...],
        Field(description='the only sizes: "512x768", or all from "256x256-1024x1024"; empty: any'),
    ] = ()
    max_steps: Annotated[int, Field(ge=1, le=1000)] = 1000
    max_images: Annotated[int, Field(ge=1, le=MAX_IMAGES)] = MAX_IMAGES
    max_loras: Annotated[int, Field(ge=0, le=64)] = 16
    max_controlnets: Annotated[int, Field(ge=0, le=64)] = 8
    max_prompt_tokens: Annotated[
        int, Field(ge=1, le=20_000, description="of a prompt, and of a negative prompt; text encoders read 75 at once")
    ] = 750


class DefaultsSection(Section):
    """The values for fields that a request leaves out."""

    steps: Annotated[
        int | None, Field(ge=1, le=1000, description="unset: the model's own; 20 for Stable Diffusion 1, 2 and XL")
    ] = None
    guidance_scale: Annotated[
        float | None,
        Field(ge=0, le=100, description="unset: the model's own, 7.5 for Stable Diffusion; the starter model's is 3"),
    ] = None
    scheduler: Annotated[
        Scheduler | None, Field(description="unset, and where a model does not take it: euler; an EDM model's own")
    ] = None


class SingleFileSection(Section):
    """A checkpoint in one file whose configurations are not the published ones of its family."""

    file: Annotated[FolderPath, Field(description="a .safetensors with UNet, VAE and text encoders")]
    config: Annotated[FolderPath, Field(description="a diffusers folder; its weights are not needed")]


class AliasSection(Section):
    """A name that requests may use for a model, with a set of LoRAs if it has one; the model's name alone will do."""

    model: ServedName
    loras: dict[ServedName, Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE)]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, data: Any) -> Any:
        return {"model": data} if isinstance(data, str) else data


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSource:
    """Where a base model comes from: 'emoji', a diffusers folder, a checkpoint in one file (with the folder that its
    configurations are in, if they are not the published ones), or a hub id with its commit."""

    model: str
    revision: str | None = None
    config: Path | None = None

    @classmethod
    def parse(cls, text: str | SingleFileSection) -> BaseSource:
        """Read `owner/name@commit`, a folder, a file, or the name of the starter model."""
        if isinstance(text, SingleFileSection):
            return cls(model=str(text.file), config=text.config)
        left, _, right = text.rpartition("@")
        return cls(model=left, revision=right) if left and _HUB_ID.match(left) else cls(model=text)

    @property
    def is_starter(self) -> bool:
        """Whether it is the model that ships with plait."""
        return self.model == STARTER_MODEL

    @property
    def is_file(self) -> bool:
        """Whether it is a checkpoint in one file."""
        return stem_of(self.model) is not None

    @property
    def is_hub_id(self) -> bool:
        """Whether it is named by a hub id."""
        return not self.is_file and bool(_HUB_ID.match(self.model))

    @property
    def folder(self) -> str:
        """What the engine loads: a folder, a file or a hub id."""
        return str(STARTER_FOLDER / self.model) if self.is_starter else self.model

    def check(self, where: str) -> None:
        """Raise ValueError, beginning with `where`, for what could not be loaded."""
        if (why := why_unread(self.model)) is not None:
            raise ValueError(f"{where}{self.model!r} is {why}")
        if self.config is not None and not self.is_file:
            raise ValueError(f"{where}file: {self.model!r} is no {SUFFIX} file")
        if self.is_hub_id and self.revision is None:
            how = "as owner/name@commit" if where else "as images.revision"
            raise ValueError(f"{where}{self.model!r} is a hub id: give its commit {how}; a folder begins with ./ or /")
        if not self.is_hub_id and self.revision is not None:
            raise ValueError(f"{where}revision belongs to a hub id")
        if not (self.is_hub_id or self.is_starter or Path(self.model).is_absolute()):
            raise ValueError(
                f"{where}{self.model!r} is neither {STARTER_MODEL!r} nor a path (./folder, ./file{SUFFIX}) nor a hub "
                "id (owner/name)"
            )


def _rebased(source: str, info: ValidationInfo) -> str:
    """Resolve a model that is spelled as a relative path (./x, ../x) relative to the file."""
    folder = folder_of(info)
    if folder is not None and source.startswith(("./", "../")):
        return str((folder / source).resolve())
    return expanduser(source) if source.startswith("~") else source


ModelSource = Annotated[str, AfterValidator(_rebased)]


class ImagesSection(Replicated):
    """Base models with their ControlNets and LoRAs."""

    model: Annotated[
        ModelSource,
        Field(description="'emoji' (ships with plait), a diffusers folder, a .safetensors file, or a hub id"),
    ] = STARTER_MODEL
    models: Annotated[
        dict[Name, ModelSource | SingleFileSection] | None,
        Field(description="several by name: 'emoji', a folder, a file, or owner/name@commit; the first is the default"),
    ] = None
    models_folder: Annotated[
        FolderPath | None,
        Field(description="more models: every diffusers folder in it, by its name; they come and go without a restart"),
    ] = None
    memory_bytes: Annotated[
        int | None,
        Field(ge=1, description="what models in memory may hold, with their programs; unset: most of what is free"),
    ] = None
    aliases: dict[Name, AliasSection] = Field(
        default_factory=dict, description="more names for requests: of a model, or of a model with LoRAs"
    )
    name: Annotated[
        Name | None, Field(description="what requests call it; unset: the folder's or hub id's last part")
    ] = None
    revision: Annotated[str | None, Field(description="commit of a hub id: required, so that it cannot change")] = None
    dtype: Annotated[
        DType,
        Field(
            description="auto: float16 on a GPU; on the CPU of a server with its own Ray bfloat16, if the CPU has "
            "it and the model is large enough to gain, else float32"
        ),
    ] = "auto"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    executor: Annotated[
        ExecutorName, Field(description="what runs the models; auto: openvino on CPUs, CUDA graphs on GPUs")
    ] = ExecutorName.AUTO
    audit_every: Annotated[
        int,
        Field(
            ge=0,
            description="one call of a compiled model in so many, and the first of each shape, is computed again by "
            "torch in an idle moment; 0: none",
        ),
    ] = 10_000
    safety_checker: Annotated[bool, Field(description="run the checker of a folder that has one; off is logged")] = True
    loras: LorasSection = LorasSection()
    results: Annotated[
        ResultsSection | None, Field(description="allows response_format: url; unset: images come in the response only")
    ] = None
    controlnets: Annotated[
        dict[Name, ControlNetSection] | None, Field(description="unset: the starter model's own, or none")
    ] = None
    defaults: DefaultsSection = DefaultsSection()
    limits: LimitsSection = LimitsSection()
    num_cpus: CoreBudget = None
    num_gpus: GpuShare = None
    knobs: EngineKnobs = EngineKnobs()

    @model_validator(mode="after")
    def _models_are_known(self) -> Self:
        alone = {"model": STARTER_MODEL, "name": None, "revision": None}
        given = [key for key, unset in alone.items() if getattr(self, key) != unset]
        if self.models is not None and given:
            raise ValueError(f"models names all models: leave out {', '.join(given)}")
        if self.models is not None and not self.models:
            raise ValueError("models is empty: leave it out for the starter model")
        for name, base in self.base_models.items():
            base.check("" if self.models is None else f"models.{name}: ")
        return self

    @model_validator(mode="after")
    def _aliases_are_of_models(self) -> Self:
        for name, alias in self.aliases.items():
            if name in self.base_models:
                raise ValueError(f"aliases.{name}: there is a model of that name")
            if alias.model in self.aliases:
                raise ValueError(f"aliases.{name}.model: {alias.model!r} is an alias itself; name its model")
            if alias.model not in self.base_models and self.models_folder is None:
                raise ValueError(
                    f"aliases.{name}.model: there is no model {alias.model!r}{hint(alias.model, self.base_models)}"
                )
        return self

    @model_validator(mode="after")
    def _controlnets_follow_engines(self) -> Self:
        for name, section in (self.controlnets or {}).items():
            if isinstance(section.replicas, Replicas) and section.max_replicas > self.max_replicas:
                raise ValueError(
                    f"controlnets.{name}.replicas.max: {section.max_replicas} of them for at most {self.max_replicas} "
                    "base replicas, each of which asks one at a time"
                )
        return self

    @property
    def base_models(self) -> dict[str, BaseSource]:
        """The base models by the names that requests use; the first is what requests without one mean."""
        if self.models is None:
            name = self.name or composed(Path(stem_of(self.model) or self.model).name)
            return {name: BaseSource(model=self.model, revision=self.revision)}
        return {name: BaseSource.parse(text) for name, text in self.models.items()}

    @property
    def starters(self) -> tuple[str, ...]:
        """The names of the model that ships with plait, if it is served."""
        return tuple(name for name, base in self.base_models.items() if base.is_starter)

    @property
    def public_name(self) -> str:
        """The name of the first model in requests."""
        return next(iter(self.base_models))

    def guidance_of(self, name: str, terms: RequestTerms) -> float:
        """Return the guidance scale of requests of a model that give none: of one that takes none it is its own."""
        if self.defaults.guidance_scale is not None and "guidance_scale" in terms.takes:
            return self.defaults.guidance_scale
        return STARTER_GUIDANCE if name in self.starters else terms.guidance_scale

    def resolved_controlnets(self) -> dict[str, ControlNetSection]:
        """Return the ControlNets by name; if none are given for the starter model, those in the starter's folder."""
        if self.controlnets is not None:
            return dict(self.controlnets)
        root = STARTER_FOLDER / "controlnets"
        if not self.starters or not root.is_dir():
            return {}
        folders = sorted(folder for folder in root.iterdir() if (folder / "config.json").is_file())
        made = {folder.name: {"folder": folder, "preprocessor": folder.name} for folder in folders}
        return {name: ControlNetSection.model_validate(section) for name, section in made.items()}

    def controlnet_services(self) -> dict[str, ControlNetSection]:
        """Return the ControlNets with a deployment of their own; none if the knob runs them beside the base model."""
        return {} if self.knobs.controlnet_placement is Placement.LOCAL else self.resolved_controlnets()

    def resolved_lora_folder(self) -> Path | None:
        """Return the folder of LoRAs if they come from one; for the starter model its own if none is given."""
        if self.loras.folder is not None or self.loras.store is not None:
            return self.loras.folder
        return STARTER_FOLDER / "loras" if self.starters else None
