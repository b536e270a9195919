"""`plait demo`: a second base model, its own server, images over HTTP, a contact sheet with timings, films ranked for
two people, a short load test, and then a tuning job of three trials on a clone."""

from __future__ import annotations

import base64
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from plait.errors import PlaitError, ServeError, told
from plait.server import processes
from plait_serving.images.config import STARTER_GUIDANCE, STARTER_MODEL
from plait_serving.ranking.config import STARTER_RANKING_MODEL
from plait_serving.starter.words import AGE_BANDS, DAYPARTS, GENRES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx2
    from PIL.Image import Image

_PLAIT = (sys.executable, "-m", "plait.cli.main")
_STOP_TIMEOUT_S = 60.0
_THUMBNAIL_PX, _CAPTION_PX, _GAP_PX = 192, 34, 8

PostBody: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Posts a body to one route and returns the response's JSON. Raises `ServeError` if the response is an error."""

SECOND, ITS_LORA = "sketchbook", "sketch"
"""The second base model: the starter with this LoRA in its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One image of the demo. `more`: fields of the request, in which the image of an earlier scene is its name; `anew`:
    the upper share of that image that is made anew."""

    name: str
    prompt: str
    seed: int = 1
    more: Mapping[str, Any] = field(default_factory=dict)
    anew: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoImage:
    """A finished image. Times are in seconds: the whole request as the client saw it, and the server's parts."""

    scene: Scene
    path: Path
    seconds: float
    timings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """One for whom the demo's second half ranks films, with the starter model split in two halves."""

    who: str
    likes: tuple[str, ...]

    def features(self) -> dict[str, Any]:
        """Return the model's inputs as ids. No film has been seen yet, so only the likes express the taste."""
        likes = [GENRES.index(genre) for genre in self.likes]
        age, daypart = AGE_BANDS.index("35-44"), DAYPARTS.index("evening")
        return {"age_band": age, "liked_genres": likes, "history": [], "daypart": daypart}


def _lora(name: str) -> dict[str, Any]:
    return {"loras": [{"name": name, "scale": 1.0}]}


def _control(name: str) -> dict[str, Any]:
    return {"controlnets": [{"name": name, "image": "guide", "preprocess": True}]}


_BY_SECOND = {"model": SECOND, "guidance_scale": STARTER_GUIDANCE}
_FROM_GUIDE = {"image": "guide"}
ALONE = (
    Scene(name="plain", prompt="red apple"),
    Scene(name="guide", prompt="sunflower", seed=2),
    Scene(name="controlnet-edges", prompt="red apple", more=_control("edges")),
    Scene(name="controlnet-colors", prompt="red apple", more=_control("colors")),
    Scene(name="lora-noto", prompt="red apple", more=_lora("noto")),
    Scene(name="lora-sketch", prompt="red apple", more=_lora("sketch")),
    Scene(name="edit", prompt="rose", seed=2, more=_FROM_GUIDE, anew=0.72),
    Scene(name="both", prompt="red apple", more=_lora("noto") | _control("edges")),
    Scene(name="second-model", prompt="umbrella", more=_BY_SECOND),
    Scene(name="second-model-edit", prompt="sunflower", seed=2, more={**_BY_SECOND, **_FROM_GUIDE, "strength": 0.3}),
)
TOGETHER = (
    Scene(name="together-1", prompt="pizza", seed=3),
    Scene(name="together-2", prompt="crab", seed=4, more=_lora("pixel")),
)

PEOPLE = (
    Person(who="one who likes westerns and horror", likes=("western", "horror")),
    Person(who="one who likes music and romance", likes=("music", "romance")),
)


def run(out: Path, *, say: Callable[[str], None]) -> Path:
    """Make a second base model, start a server, make every scene, rank films, write a load report into `out`, stop the
    server and tune a clone.

    Return the path of the contact sheet.
    """
    out.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    folder = second_model(out)
    say(f"  {folder}  a base model: the starter with {ITS_LORA} in its weights, {time.monotonic() - started_s:.1f} s")
    started_s = time.monotonic()
    # One client: making one reads the system's certificates, which takes longer than ranking.
    with own_server(folder) as url, own_client() as client:
        say(f"server ready at {url} after {time.monotonic() - started_s:.1f} s")

        def image(body: Mapping[str, Any]) -> Mapping[str, Any]:
            kind = "edits" if "image" in body else "generations"
            return post(client, f"{url}/v1/images/{kind}", body)

        images = make_scenes(image, out, say=say)
        if ranks := offers_ranking(client, url):
            rank_for_everybody(lambda body: post(client, f"{url}/v1/recommend", body), say=say)
        say(smoke(url, out / "load.html"))
    say("server stopped")
    sheet = out / "contact-sheet.png"
    contact_sheet(images).save(sheet)
    if ranks:
        say(tune_ranking(out / "tune"))
    return sheet


def make_scenes(ask: PostBody, out: Path, *, say: Callable[[str], None]) -> list[DemoImage]:
    """Make the scenes one after the other, then the concurrent ones all at once."""
    images: list[DemoImage] = []
    for at_once in (*((scene,) for scene in ALONE), TOGETHER):
        started_s = time.monotonic()
        with ThreadPoolExecutor(len(at_once)) as threads:
            made = list(threads.map(lambda scene: make(scene, ask, out), at_once))
        seconds = time.monotonic() - started_s
        for demo_image in made:
            say(describe(demo_image))
        images += made
    say(f"  the last {len(TOGETHER)} were asked for at once and took {seconds:.2f} s together")
    return images


def make(scene: Scene, ask: PostBody, out: Path) -> DemoImage:
    """Request one scene and write its image."""
    body: dict[str, Any] = {"prompt": scene.prompt, "seed": scene.seed, **scene.more}
    if "controlnets" in body:
        body["controlnets"] = [{**net, "image": _encoded(out, net["image"])} for net in body["controlnets"]]
    if scene.anew is not None:
        body["mask"] = _mask(out / f"{body['image']}.png", scene.anew)
    if "image" in body:
        body["image"] = _encoded(out, body["image"])
    started_s = time.monotonic()
    answer = ask(body)
    seconds = time.monotonic() - started_s
    path = out / f"{scene.name}.png"
    path.write_bytes(base64.b64decode(answer["data"][0]["b64_json"]))
    return DemoImage(scene=scene, path=path, seconds=seconds, timings=answer.get("timings", {}))


def _encoded(out: Path, name: str) -> str:
    """Return an earlier scene's image as base64."""
    return base64.b64encode((out / f"{name}.png").read_bytes()).decode()


def _mask(image: Path, anew: float) -> str:
    """Return a mask for an image as base64: white, which is to be made anew, in its upper share."""
    from PIL import Image as Images

    with Images.open(image) as source:
        width, height = source.size
    mask = Images.new("L", (width, height))
    mask.paste(255, (0, 0, width, round(height * anew)))
    file = io.BytesIO()
    mask.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def rank_for_everybody(ask: PostBody, *, say: Callable[[str], None]) -> None:
    """Request each person's best films out of all, and report them and the time taken."""
    for person in PEOPLE:
        body = {"model": STARTER_RANKING_MODEL, "user": person.features(), "candidates": "all", "top_k": 5}
        started_s = time.monotonic()
        answer = ask(body)
        seconds = time.monotonic() - started_s
        say(f"  for {person.who}: {seconds * 1e3:.1f} ms ({_parts(answer['timings'])})")
        for item in answer["items"]:
            say(f"    {item['score']:.3f}  {item['name']}")


def _parts(timings: Mapping[str, float]) -> str:
    """Format the timings as `in the server 3.1: queued 0.1, lookup 0.4, ...`."""
    parts = ", ".join(f"{name.removesuffix('_ms')} {ms:.1f}" for name, ms in timings.items() if name != "total_ms")
    return f"in the server {timings['total_ms']:.1f}: {parts}"


def offers_ranking(client: httpx2.Client, url: str) -> bool:
    """Return whether the server at `url` serves the starter recommendation model."""
    listed = client.get(f"{url}/v1/models", timeout=30.0).json()["data"]
    return any(model["id"] == STARTER_RANKING_MODEL for model in listed)


def smoke(url: str, page: Path) -> str:
    """Run the load tester's smoke scenario (20 s) against the server, write its report, and return a one-line
    summary."""
    from plait_loadtest.errors import LoadtestError
    from plait_loadtest.load import load_scenario
    from plait_loadtest.report.outputs import Outputs
    from plait_loadtest.report.table import headline
    from plait_loadtest.session import run_scenario
    from plait_report.page import number

    with told(LoadtestError, about="the load test could not run", to=ServeError):
        session = run_scenario(load_scenario("smoke", {"target.url": url}))
    Outputs(html=page).write_files(session)
    total = session.summary.total
    median, p95 = number(total.latency_ms.p50), number(total.latency_ms.p95)
    return f"  {page}  {headline(session.summary)}: {total.requests} requests, median {median} ms, p95 {p95} ms"


def describe(demo_image: DemoImage) -> str:
    """Return one line: where the image is and how long it took."""
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in demo_image.timings.items() if name != "total")
    return f"  {demo_image.path}  {demo_image.seconds:.2f} s ({parts})"


def contact_sheet(images: Sequence[DemoImage]) -> Image:
    """Draw all images on one page, four in a row, enlarged without smoothing, each with its caption."""
    from PIL import Image as Images
    from PIL import ImageDraw

    columns = min(4, len(images))
    rows = -(-len(images) // columns)
    cell = (_THUMBNAIL_PX + _GAP_PX, _THUMBNAIL_PX + _CAPTION_PX + _GAP_PX)
    sheet = Images.new("RGB", (columns * cell[0] + _GAP_PX, rows * cell[1] + _GAP_PX), "white")
    draw = ImageDraw.Draw(sheet)
    for i, demo_image in enumerate(images):
        x, y = _GAP_PX + (i % columns) * cell[0], _GAP_PX + (i // columns) * cell[1]
        image = Images.open(io.BytesIO(demo_image.path.read_bytes())).convert("RGB")
        sheet.paste(image.resize((_THUMBNAIL_PX, _THUMBNAIL_PX), Images.Resampling.NEAREST), (x, y))
        draw.text((x, y + _THUMBNAIL_PX + 2), f"{demo_image.scene.name}\n{demo_image.scene.prompt}", fill="black")
    return sheet


def second_model(out: Path) -> Path:
    """Write the second base model anew, as the command does, and return its folder."""
    folder = out / SECOND
    if (folder / "model_index.json").is_file():  # of an earlier demo
        shutil.rmtree(folder)
    command = [*_PLAIT, "models", "merge", STARTER_MODEL, "--lora", ITS_LORA, "--out", str(folder)]
    if code := subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise ServeError(f"plait models merge ended with exit code {code}; what it said is above")
    return folder


@contextmanager
def own_server(second: Path) -> Iterator[str]:
    """Run `plait serve` on a free port for the duration of the block, with the starter and a `second` model, its
    progress on our stderr; yield its URL."""
    models = json.dumps({STARTER_MODEL: STARTER_MODEL, second.name: str(second.resolve())}, ensure_ascii=False)
    command = [*_PLAIT, "serve", "--port", "0", "--set", f"images.models={models}"]
    # A session of its own: Ctrl-C reaches us alone, and we then stop it in the ordinary way. If we are killed the
    # kernel tells the server to stop.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=processes.end_with_parent,  # noqa: PLW1509 - one system call, before our threads start
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise ServeError(f"the server ended with exit code {process.wait()}; what it said is above")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        finally:
            process.kill()
            process.stdout.close()


def own_client() -> httpx2.Client:
    """Return a client of this machine's servers, which no proxy of the environment reaches."""
    import httpx2

    return httpx2.Client(trust_env=False)


def post(client: httpx2.Client, url: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """POST a body. Raises `ServeError` with the server's own message."""
    answer = client.post(url, json=body, timeout=600.0)
    data: dict[str, Any] = answer.json()
    if answer.status_code != 200:
        raise ServeError(f"the server refused {body.get('prompt', 'to rank')!r}: {data['error']['message']}")
    return data


def tune_ranking(folder: Path) -> str:
    """Tune a clone of the ranking service from scratch in `folder`, in three trials, with progress on stderr.

    Return two lines: where the report is, and the answer or why there is none.

    On a host that is too busy to measure on the result is that, as an invalid load test's is.
    """
    from plait.tuning.job import local_run
    from plait_autoconfig.errors import NothingValid
    from plait_autoconfig.jobs.store import holds_job

    if holds_job(folder):  # of an earlier demo
        shutil.rmtree(folder)
    try:
        state, _ = local_run.run(local_run.EXAMPLES / "demo.yaml", folder=folder)
    except PlaitError as error:
        if not isinstance(error.__cause__, NothingValid):
            raise
        return f"  {folder}  NOTHING TUNED: {error}"
    answer = state.recommendation
    sentence = answer.sentence if answer is not None else state.binding or state.reason
    return f"  {folder / 'report.html'}  {state.remaining.used_trials} tuning trials\n  {sentence}"
