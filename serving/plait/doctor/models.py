"""The folders of models: their sums, whether their formats are safe to load, whether they are whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from os.path import expanduser
from pathlib import Path

from plait.config import PlaitConfig, ServedConfig
from plait.doctor.findings import CheckResult, CheckStatus, finding, warning
from plait.errors import PlaitError
from plait.offline.inventory import lora_names, more_models, tensors_of
from plait_disagg.package.manifest import MANIFEST, PackageError, read_manifest, sha256_of
from plait_serving.diffusion.errors import EngineError, LoraError, ModelError
from plait_serving.diffusion.families import check_controlnet, family_row, row_of_file
from plait_serving.diffusion.lora.container import inspect
from plait_serving.diffusion.lora.key_formats import format_of_keys
from plait_serving.diffusion.lora.listing import ADAPTER_FILE, DIFFUSERS_FILE, list_loras
from plait_serving.diffusion.models.folder import INDEX, FolderOfModels
from plait_serving.diffusion.sources.file_kinds import read_json, stem_of, why_unread
from plait_serving.diffusion.sources.names import NOWHERE, composed, shown
from plait_serving.diffusion.weight_files import MAX_FILE_BYTES, find_weights
from plait_serving.images.config import BaseSource, ControlNetSection, ImagesSection
from plait_serving.ranking.config import RankModelSection, ShardsSection
from plait_serving.spelling import hint

_PARTS = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")
"""The folders of a diffusers model that hold weights, beside the model that steps."""
_WEIGHTLESS = ("scheduler", "tokenizer", "tokenizer_2", "tokenizer_3")
"""Those that hold none, and without which no model is loaded."""
_NO_LORA, _LORA_ADVICE = "no LoRA that plait reads", "remove it, or save it as PEFT or kohya safetensors"
_SHOWN = 5
"""Of what is left out of a folder."""


def check_starter(folder: Path) -> list[CheckResult]:
    """Check the starter files against the SHA-256 sums in their manifest."""
    from plait_serving.starter.manifest import files_in, manifest_problems

    problems = manifest_problems(folder)
    detail = "; ".join(problems[:3]) or f"{len(files_in(folder))} files as in the manifest"
    return [finding("starter", not problems, detail, "install plait again")]


def check_models(config: PlaitConfig) -> list[CheckResult]:
    """Check every folder that a configuration names; no weights are loaded. A hub id is checked when it is fetched."""
    images = config.images
    return [
        *check_folders(config, fully=True),
        *([] if images is None or images.loras.folder is None else _loras(images.loras.folder)),
        *([] if images is None or images.models_folder is None else _left_out(images.models_folder)),
    ]


def check_model(config: ServedConfig, model: str) -> Iterator[CheckResult]:
    """Check one model: of a configuration, by the name that requests use, or whatever lies in a folder or file; no
    weights are loaded. Raises `PlaitError` if there is none."""
    images, packages = config.images, config.ranking_models
    bases: dict[str, BaseSource] = {}
    nets: Mapping[str, ControlNetSection] = {}
    loras: Mapping[str, Path] = {}
    stored: Collection[str] = ()
    if images is not None:
        more = {name: BaseSource(model=str(folder)) for name, folder in more_models(images).items()}
        bases, nets = {**more, **images.base_models}, images.resolved_controlnets()
        folder, store = images.resolved_lora_folder(), images.loras.store
        loras, stored = {} if folder is None else list_loras(folder).files, () if store is None else store.entries
    name, path = composed(model), Path(expanduser(model))
    if (base := bases.get(name)) is not None and not base.is_hub_id:
        yield from _check_fully(replace(base, model=base.folder), name, images)
    elif base is not None or name in stored:
        yield CheckResult(name="models", verdict=CheckStatus.OK, detail=f"{name}: checked when it is fetched")
    if name in nets:
        yield _controlnet(nets[name].folder, name)
    if name in loras:
        yield _lora(loras[name])
    if name in packages:
        yield _package(packages[name].folder, name)
    known = (*bases, *nets, *loras, *stored, *packages)
    if name in known:
        return
    if not path.exists():
        raise PlaitError(f"{model}: no model of that name, no folder and no file{hint(name, known)}")
    for found in _at(path, model, images):
        said = found.detail.removeprefix(f"{model}: ")  # most name the file as well
        yield replace(found, detail=said if str(path) in said else found.detail)


def _at(path: Path, key: str, images: ImagesSection | None) -> Iterator[CheckResult]:
    """Check what lies somewhere, by what it looks like; what looks like nothing is said to be no base model."""
    is_model = (path / INDEX).exists()
    saved = () if is_model else [it for name in (DIFFUSERS_FILE, ADAPTER_FILE) if (it := path / name).is_file()]
    if stem_of(path.name) is not None and format_of_keys(tensors_of(path)) != "unknown":
        yield _lora(path)
    elif saved:
        yield from map(_lora, saved)
    elif (path / MANIFEST).is_file():
        yield _package(path, key)
    elif (path / "config.json").is_file() and not is_model:
        yield _controlnet(path, key)
    else:
        yield from _check_fully(BaseSource(model=str(path)), key, images)


def _check_fully(base: BaseSource, key: str, images: ImagesSection | None) -> Iterator[CheckResult]:
    """Check what a base model's folder looks like, and then all that the engine would refuse it for before it reads
    weights, by the engine's own code, which takes seconds to import."""
    yield from (found := list(check_base(base, key)))
    if any(it.verdict is CheckStatus.FAIL for it in found):
        return
    try:
        from plait_serving.diffusion import assemble
    except ImportError:  # another check says so
        return
    images = images or ImagesSection()
    settings = assemble.EngineSettings(
        model=base.model, config=base.config, dtype=images.dtype, device=images.device, executor=images.executor,
        safety_checker=images.safety_checker,
    )  # fmt: skip
    try:
        assemble.check_model(settings)
    except ModelError as error:
        yield finding("models", False, f"{key}: {error.message}", "correct what is named, or take another model")


def check_folders(config: ServedConfig, *, fully: bool = False) -> Iterator[CheckResult]:
    """Check what directories and the headers of weights tell, in a fraction of a second and without torch; `fully`: all
    that needs no weights. A failure is something that a server would end by, a warning something that it would leave
    out."""
    images = config.images
    if images is not None:
        check = partial(_check_fully, images=images) if fully else check_base
        yield from _twins(images)
        for number, (name, base) in enumerate(images.base_models.items()):
            key = "images.model" if images.models is None else f"images.models.{name}"
            for found in () if base.is_starter or base.is_hub_id else check(base, key):
                yield found if number == 0 else _as_warning(found)
        for name, section in (images.controlnets or {}).items():
            yield _controlnet(section.folder, f"images.controlnets.{name}.folder", _unets(images))
        for key, folder in (("loras.folder", images.loras.folder), ("models_folder", images.models_folder)):
            if folder is not None and not folder.is_dir():
                yield finding("models", False, f"images.{key}: {_missing(folder)}", "make it, or correct the key")
        for name, folder in more_models(images).items():
            yield from map(_as_warning, check(BaseSource(model=str(folder)), f"images.models_folder, {name}"))
        yield from _aliases(images)
    for name, ranking in ({} if config.recommend is None else config.recommend.models or {}).items():
        if (broken := _broken_package(ranking.folder, f"recommend.models.{name}.folder")) is not None:
            yield broken
        elif fully:
            yield from _whole_package(name, ranking)


def _missing(folder: Path) -> str:
    beside = [path.name for path in folder.parent.glob("*")]
    return f"{folder}: there is no such folder{hint(folder.name, beside)}"


def _as_warning(found: CheckResult) -> CheckResult:
    return replace(found, verdict=CheckStatus.WARN) if found.verdict is CheckStatus.FAIL else found


def check_base(base: BaseSource, key: str) -> Iterator[CheckResult]:
    """Check a base model's folder or file, which `key` names."""
    folder = Path(base.model)
    if base.is_file:
        yield _single_file(folder, key)
        return
    try:
        index, denoiser = read_json(folder / INDEX), family_row(folder).denoiser
    except ModelError as error:
        files = sorted(path.name for path in folder.glob("*.safetensors")) if folder.is_dir() else []
        if not folder.is_dir():
            why = why_unread(folder.name) if folder.is_file() else None
            detail = f"{folder}: {why}" if why else _missing(folder)
        elif (folder / INDEX).exists():
            detail = str(error)
        else:
            state = f"it has no {INDEX}" if any(folder.iterdir()) else "it is empty"
            state = f"its {INDEX} is {NOWHERE}" if (folder / INDEX).is_symlink() else state
            detail = f"{folder}: no diffusers folder: {state}"
        advice = f"name the file: {folder / files[0]}" if files else f"a model's folder has {INDEX} and its parts"
        yield finding("models", False, f"{key}: {detail}", advice)
        return
    named = {part for part, kind in index.items() if isinstance(kind, list) and kind and kind[0] is not None}
    for part in (denoiser, *_PARTS):
        if (folder / part).is_dir() or part in named:
            yield _weights(folder / part, key)
    for part in _WEIGHTLESS:
        if part in named and not (folder / part).is_dir():
            yield finding("models", False, f"{key}: {_missing(folder / part)}", "copy the folder again")


def _twins(images: ImagesSection) -> Iterator[CheckResult]:
    """A folder under two names is served under the first."""
    names: dict[str, str] = {}
    more = {} if images.models_folder is None else FolderOfModels(images.models_folder).list()
    bases = {**{name: BaseSource(model=str(found.folder)) for name, found in more.items()}, **images.base_models}
    for name, base in sorted(bases.items(), key=lambda it: it[0] not in images.base_models):
        where = base.folder if base.is_hub_id else str(Path(base.folder).resolve())
        first = names.setdefault(f"{where}@{base.revision}", name)
        if first != name:
            yield warning(
                "models", False, f"{name} and {first} are both {where}",
                "leave one out; another name for a model belongs into images.aliases",
            )  # fmt: skip


def _aliases(images: ImagesSection) -> Iterator[CheckResult]:
    """What an alias names may come later."""
    names = lora_names(images) if images.aliases else ()
    for name, alias in images.aliases.items():
        for lora in alias.loras:
            detail = f"images.aliases.{name}.loras: there is no LoRA {lora!r}{hint(lora, names)}"
            if lora not in names:
                yield warning("models", False, detail, "requests for the alias are refused until there is")


def _single_file(path: Path, key: str) -> CheckResult:
    kind, detail = "", "there is no such file"
    try:
        tensors = inspect(path, max_bytes=MAX_FILE_BYTES).tensors
        if format_of_keys(tensors) != "unknown":
            detail = "a LoRA; those belong into images.loras.folder"
        else:
            kind, _ = row_of_file(tensors)
    except (LoraError, ModelError) as error:
        detail = error.message if path.is_file() else detail
    if not kind:
        return finding("models", False, f"{key}: {path}: {detail}", "name a whole checkpoint, or a diffusers folder")
    size = path.stat().st_size / 1e9
    return CheckResult(name="models", verdict=CheckStatus.OK, detail=f"{path}: {kind}, {size:.2f} GB")


def _weights(folder: Path, key: str) -> CheckResult:
    """Weights must be safetensors: a pickle runs code when it is loaded."""
    try:
        found = find_weights(folder)
        read_json(folder / "config.json")
    except (EngineError, OSError) as error:
        if not folder.is_dir():
            return finding("models", False, f"{key}: {_missing(folder)}", "correct the key, or copy the folder again")
        advice = "convert it with diffusers' save_pretrained(safe_serialization=True), or copy the folder again"
        return finding("models", False, f"{key}: {error}", advice)
    size = sum(path.stat().st_size for path in found.files) / 1e9
    return CheckResult(name="models", verdict=CheckStatus.OK, detail=f"{folder}: safetensors, {size:.2f} GB")


def _unets(images: ImagesSection) -> list[Path]:
    """Return the configurations of the base models' UNets; none if there may be models that say nothing here."""
    paths = [Path(base.folder) / "unet" / "config.json" for base in images.base_models.values()]
    return paths if images.models_folder is None and all(path.is_file() for path in paths) else []


def _controlnet(folder: Path, key: str, unets: Collection[Path] = ()) -> CheckResult:
    """Check a ControlNet, and that it fits one of the base models, if their UNets are known."""
    found = _weights(folder, key)
    if found.verdict is not CheckStatus.OK:
        return found
    if (why := _why_unfit(folder)) is not None:
        return finding("models", False, f"{key}: {why}", "take another ControlNet")
    whys = [_why_unfit(folder, unet) for unet in unets]
    fits = not whys or None in whys
    return found if fits else warning("models", False, f"{key}: {whys[0]}", "take one that is made for the base model")


def _why_unfit(folder: Path, unet: Path | None = None) -> str | None:
    try:
        check_controlnet(folder, base=None if unet is None else read_json(unet))
    except ModelError as error:
        return error.message
    return None


def _lora(path: Path) -> CheckResult:
    kind = format_of_keys(tensors_of(path))
    is_known = kind != "unknown"
    detail = f"{path}: {f'a LoRA, {kind}' if is_known else _NO_LORA}"
    return finding("models", is_known, detail, _LORA_ADVICE)


def _loras(folder: Path) -> Iterator[CheckResult]:
    listing = list_loras(folder)
    unknown = [path for path in listing.files.values() if format_of_keys(tensors_of(path)) == "unknown"]
    bad = [shown(path.relative_to(folder.resolve())) for path in unknown]
    count = f"{folder}: {len(listing.files)} LoRAs"
    detail = f"{', '.join(bad)} in {folder}: {_NO_LORA}" if bad else count
    yield finding("models", not bad, detail, _LORA_ADVICE)
    yield from _told(folder, listing.left_out)


def _left_out(folder: Path) -> Iterator[CheckResult]:
    found = FolderOfModels(folder)
    yield CheckResult(name="models", verdict=CheckStatus.OK, detail=f"{folder}: {len(found.list())} models")
    yield from _told(folder, found.left_out)


def _told(folder: Path, left_out: Mapping[str, str]) -> Iterator[CheckResult]:
    """Say what a folder holds that is not served, and why."""
    if left_out:
        shown_ones = "; ".join(f"{shown(path)} ({why})" for path, why in islice(sorted(left_out.items()), _SHOWN))
        more = f"; and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
        yield warning("models", False, f"not served of {folder}: {shown_ones}{more}", "rename, convert or remove them")


def _whole_package(name: str, section: RankModelSection) -> Iterator[CheckResult]:
    yield (found := _package(section.folder, name))
    shards = section.cn.shard_section
    if found.verdict is CheckStatus.OK and shards is not None and section.mode == "split":
        yield _shards(name, section.folder, shards)


def _broken_package(folder: Path, key: str) -> CheckResult | None:
    """Return what is wrong with what a package says of itself."""
    try:
        read_manifest(folder)
    except PackageError as error:
        detail = str(error) if folder.is_dir() else _missing(folder)
        return finding("models", False, f"{key}: {detail}", "make one with plait models package")
    return None


def _package(folder: Path, key: str) -> CheckResult:
    """Compare the files of a package with the sums that it says, and open it as a worker would."""
    if (broken := _broken_package(folder, key)) is not None:
        return broken
    files, wrong = read_manifest(folder).files, ""
    changed = [file for file, sum_ in files.items() if not _is(folder / file, sum_)]
    try:
        from plait_disagg.package.read import open_package

        if not changed:
            open_package(folder)
    except PackageError as error:
        wrong = str(error)
    except ImportError:  # another check says so
        pass
    wrong = f"{', '.join(changed[:3])} missing or changed" if changed else wrong
    advice = "copy the folder again, or package the model again"
    return finding("models", not wrong, f"{key}: {wrong or f'{folder}, intact'}", advice)


def _is(path: Path, sha256: str) -> bool:
    try:
        return sha256_of(path) == sha256
    except OSError:
        return False


def _shards(name: str, folder: Path, section: ShardsSection) -> CheckResult:
    """The tables must fit into the shards, and each shard into a machine like this one."""
    from plait.doctor.machine import available_memory_bytes
    from plait_disagg.package.read import open_package
    from plait_disagg.package.sharding import Sharding, plan_of

    advice = "more shards (cn.shards.count), or more memory for each (cn.shards.memory_gb)"
    try:
        sharding = Sharding(shards=section.count, memory_bytes=section.memory_bytes)
        held = plan_of(open_package(folder), sharding).held_bytes
    except PackageError as error:
        return finding("shards", False, f"{name}: {error}", advice)
    here = available_memory_bytes()
    detail = f"{name}: {section.count} shards of at most {max(held) / 1e9:.3g} GB; this machine has {here / 1e9:.3g} GB"
    return warning("shards", max(held) <= here, detail, f"{advice}, or machines with more than this one has")
