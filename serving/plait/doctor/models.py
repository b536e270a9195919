"""The folders of models: their sums, whether their formats are safe to load, whether they are whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from plait.config import PlaitConfig
from plait.doctor.findings import CheckResult, CheckStatus, finding, warning
from plait_serving.images.config import ImagesSection
from plait_serving.ranking.config import ShardsSection


def check_starter(folder: Path) -> list[CheckResult]:
    """Check the starter files against the SHA-256 sums in their manifest."""
    from plait_serving.starter.manifest import files_in, manifest_problems

    try:
        problems = manifest_problems(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems = [f"its manifest cannot be read ({error})"]
    detail = "; ".join(problems[:3]) or f"{len(files_in(folder))} files as in the manifest"
    return [finding("starter", not problems, detail, "install plait again")]


def check_models(config: PlaitConfig) -> list[CheckResult]:
    """Check every folder that a configuration names; nothing is loaded. A hub id is checked when it is fetched."""
    return [*_image_models(config), *_packages(config)]


def _image_models(config: PlaitConfig) -> Iterator[CheckResult]:
    images = config.images
    if images is None:
        return
    key = "images.model" if images.models is None else "images.models"
    yield from _twins(images)
    for name, base in images.base_models.items():
        if base.is_starter or base.is_hub_id:
            continue
        folder = Path(base.model)
        if base.is_file:
            yield _single_file(folder, key)
            continue
        yield from _folder(name, folder, key)
    for section in (images.controlnets or {}).values():
        yield _weights(section.folder)
    if images.loras.folder is not None:
        yield from _loras(images.loras.folder)


def _folder(name: str, folder: Path, key: str) -> Iterator[CheckResult]:
    from plait_serving.diffusion.errors import ModelError
    from plait_serving.diffusion.families import family_row

    try:
        denoiser = family_row(folder).denoiser
    except ModelError as error:
        detail = f"{folder}: no diffusers folder (there is no such folder)"
        detail = error.message if folder.is_dir() else detail
        yield finding("models", False, f"{name}: {detail}", f"{key} names diffusers folders, or whole checkpoints")
        return
    for part in (folder / denoiser, folder / "vae", *sorted(folder.glob("text_encoder*"))):
        if part.is_dir():
            yield _weights(part)


def _twins(images: ImagesSection) -> Iterator[CheckResult]:
    """A folder under two names is served under the first."""
    names: dict[str, str] = {}
    for name, base in images.base_models.items():
        where = base.folder if base.is_hub_id else str(Path(base.folder).resolve())
        first = names.setdefault(f"{where}@{base.revision}", name)
        if first != name:
            detail = f"{name} and {first} are both {where}"
            yield finding(
                "models", False, detail, "leave one out; another name for a model belongs into images.aliases"
            )


def _single_file(path: Path, key: str) -> CheckResult:
    from plait.offline.inventory import safetensors_header
    from plait_serving.diffusion.errors import ModelError
    from plait_serving.diffusion.families import row_of_file

    try:
        kind, _ = row_of_file(safetensors_header(path))
    except ModelError as error:
        detail = error.message if path.is_file() else "there is no such file"
        return finding("models", False, f"{path}: {detail}", f"{key} names whole checkpoints, or diffusers folders")
    size = path.stat().st_size / 1e9
    return CheckResult(name="models", verdict=CheckStatus.OK, detail=f"{path}: {kind}, {size:.2f} GB")


def _weights(folder: Path) -> CheckResult:
    """Weights must be safetensors: a pickle runs code when it is loaded."""
    from plait_serving.diffusion.errors import EngineError
    from plait_serving.diffusion.weight_files import find_weights

    try:
        found = find_weights(folder)
    except (EngineError, OSError) as error:
        advice = "convert it with diffusers' save_pretrained(safe_serialization=True), or copy the folder again"
        return finding("models", False, str(error), advice)
    size = sum(path.stat().st_size for path in found.files) / 1e9
    return CheckResult(name="models", verdict=CheckStatus.OK, detail=f"{folder}: safetensors, {size:.2f} GB")


def _loras(folder: Path) -> Iterator[CheckResult]:
    from plait.offline.inventory import safetensors_header
    from plait_serving.diffusion.lora.key_formats import format_of_keys
    from plait_serving.diffusion.lora.listing import list_loras
    from plait_serving.diffusion.sources.names import shown

    if not folder.is_dir():
        yield finding("models", False, f"{folder}: there is no such folder", "correct images.loras.folder")
        return
    files = list_loras(folder).files
    unknown = [path for path in files.values() if format_of_keys(safetensors_header(path)) == "unknown"]
    bad = [shown(path.relative_to(folder.resolve())) for path in unknown]
    detail = f"{', '.join(bad)} in {folder}: no LoRA that plait reads" if bad else f"{folder}: {len(files)} LoRAs"
    yield finding("models", not bad, detail, "remove it, or save it as PEFT or kohya safetensors")


def _packages(config: PlaitConfig) -> Iterator[CheckResult]:
    from plait_disagg.package.manifest import PackageError, read_manifest, sha256_of

    if config.recommend is None or config.recommend.models is None:
        return
    for name, section in config.recommend.models.items():
        try:
            manifest = read_manifest(section.folder)
            changed = [
                file
                for file, sum_ in manifest.files.items()
                if not (section.folder / file).is_file() or sha256_of(section.folder / file) != sum_
            ]
        except (PackageError, OSError) as error:
            yield finding("models", False, f"{name}: {error}", "package it (plait models package)")
            continue
        state = f"{', '.join(changed[:3])} missing or changed" if changed else f"{section.folder}, intact"
        yield finding("models", not changed, f"{name}: {state}", "copy the folder again, or package the model again")
        if not changed and (shards := section.cn.shard_section) is not None and section.mode == "split":
            yield _shards(name, section.folder, shards)


def _shards(name: str, folder: Path, section: ShardsSection) -> CheckResult:
    """The tables must fit into the shards, and each shard into a machine like this one."""
    from plait.doctor.machine import available_memory_bytes
    from plait_disagg.package.manifest import PackageError
    from plait_disagg.package.read import open_package
    from plait_disagg.package.sharding import Sharding, plan_of

    advice = "more shards (cn.shards.count), or more memory for each (cn.shards.memory_gb)"
    try:
        sharding = Sharding(shards=section.count, memory_bytes=section.memory_bytes)
        held = plan_of(open_package(folder, ahead=False), sharding).held_bytes
    except PackageError as error:
        return finding("shards", False, f"{name}: {error}", advice)
    here = available_memory_bytes()
    detail = f"{name}: {section.count} shards of at most {max(held) / 1e9:.3g} GB; this machine has {here / 1e9:.3g} GB"
    return warning("shards", max(held) <= here, detail, f"{advice}, or machines with more than this one has")
