"""The commonest mistakes are told in one sentence and in the user's words, before Ray or a model is loaded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from fakes.images import FakeImageService
from support.http_app import make_client

ROOT = "/* the folder */"

SHELL: list[tuple[str, int, str]] = [
    ("", 2, ""),
    ("serv", 2, "there is no command 'serv'; did you mean serve?"),
    ("serve --prot 8000", 2, "No such option: --prot (Possible options: --host, --port)"),
    ("serve --port 99999", 2, "'--port': must be at most 65535"),
    ("serve --json", 2, "--json: goes with --show-deployments"),
    ("serve nosuch.yaml", 1, "nosuch.yaml: No such file or directory"),
    ("serve .", 1, ".: Is a directory"),
    ("serve --set server.port", 1, "'server.port' is not path=value, for example"),
    ("serve --set images.name=2026-13-45", 1, "images.name: the value is not YAML"),
    ("serve --host 127.0.0..1", 1, "server.host: must be a name or an address of this machine (got '127.0.0..1')"),
    ("serve --model sd15", 1, "'sd15' is neither 'emoji' nor a path (./folder, ./file.safetensors) nor a hub id"),
    ("serve --model owner/name", 1, "'owner/name' is a hub id: give its commit as images.revision"),
    ("serve --model ./model.ckpt", 1, "model.ckpt' is a pickle, which can run code when it is loaded"),
    ("serve --model ./nosuch", 1, "images.model: /* the folder *//nosuch: there is no such folder"),
    ("generate cat", 2, "Missing option '-o' / '--output'"),
    ("generate cat -o x.bmp", 2, "--output: x.bmp must end in .png"),
    ("generate cat -o no/x.png", 2, "--output: the folder no does not exist"),
    ("generate cat -o x.png --lora pixl", 2, "--lora: there is no LoRA 'pixl'; did you mean pixel?"),
    ("generate cat -o x.png --lora zzz", 2, "--lora: there is no LoRA 'zzz'; there is noto, pixel, sketch"),
    ("generate cat -o x.png --lora noto:nan", 2, "--lora: 'nan' in 'noto:nan' is not a scale"),
    ("generate cat -o x.png --controlnet edges", 2, "--controlnet: 'edges' is not NAME=PICTURE"),
    ("generate cat -o x.png --controlnet edges=no.png", 2, "--controlnet: no.png: No such file"),
    ("generate cat -o x.png --controlnet edge=folder/there", 2, "there is no ControlNet 'edge'; did you mean edges?"),
    ("generate cat -o x.png --size big", 2, '--size: a size is "WIDTHxHEIGHT" in pixels'),
    ("generate cat -o x.png --size 100x100", 2, "--size: both edges must be multiples of 8 pixels"),
    ("generate cat -o x.png --size 8000x8000", 2, "--size: edges go from 8 to 4096 pixels"),
    ("generate cat -o x.png --steps 0", 2, "--steps: must be at least 1"),
    ("generate cat -o x.png --steps 1001", 2, "--steps: at most 1000 steps"),
    ("generate cat -o x.png --seed x", 2, "--seed"),
    ("generate cat -o x.png --seed -2", 2, "--seed: "),
    ("generate cat -o x.png --guidance nan", 2, "--guidance: "),
    ("generate cat -o x.png --negative a\x1b", 2, "--negative: "),
    ("generate a\x1b -o x.png", 2, "PROMPT: "),
    ("generate cat -o x.png --lora ../noto", 2, "--lora: "),
    ("generate cat -o x.png --scheduler eular", 2, "did you mean euler?"),
    ("generate cat -o x.png -n 20", 2, "--n: must be at most 10"),
    ("generate cat -o x.png --model emojy", 2, "--model: there is no model 'emojy'; did you mean emoji?"),
    ("generate cat -o x.png --mask x.png", 2, "--mask: needs --image"),
    ("generate cat -o x.png --preprocess", 2, "--preprocess: needs --controlnet"),
    ("recommend nosuch --user {}", 1, "nosuch is no packaged model: package.json: No such file"),
    ("recommend --user {age:3}", 2, "--user: not JSON"),
    ('recommend --user {"age_band":NaN}', 2, "--user: not JSON: NaN is no number"),
    ("models cut rm1 --candidates 1000000000", 2, "'--candidates': must be at most 10000"),
    ("models package x:y -o out --candidates 1000000000", 2, "'--candidates': must be at most 10000"),
    ("links calibrate none.txt", 1, "plait links: none.txt"),
    ("links calibrate folder/there -o out.json", 1, "plait links: folder/there"),
    ("links calibrate folder/there --like carrier-pigeon", 1, "there is no link 'carrier-pigeon'"),
    ("links list folder/there", 1, "plait links: folder/there"),
    ("models list --config nosuch.yaml", 1, "nosuch.yaml: No such file"),
    ("help serv", 2, "there is no command 'serv'; did you mean serve?"),
    ("tune run nosuch.yaml", 1, "nosuch.yaml: there is no such file, nor a job of plait (demo, images, picks)"),
    ("tune run pick", 1, "did you mean picks?"),
    ("tune status nosuch", 1, "nosuch: there is no such file"),
    ("tune best nosuch --as argv --json", 2, ""),
    ("tune apply nosuch plait.yaml --port 8000", 2, ""),
    ("tune library list nothing.log", 1, "there is no library nothing.log"),
    ("tune library merge other.log nothing.log", 1, "there is no library nothing.log"),
    ("tune library import runs.csv --map nothing.yaml", 1, "nothing.yaml"),
    ("tune library import runs.csv", 2, "needs a map"),
    ("loadtest run smok", 2, "'smok' is neither a scenario of plait"),
    ("loadtest run smoke --rate 0", 2, "arrivals.rate_per_s: must be greater than 0, not 0.0"),
    ("deploy render --target mars", 2, "Invalid value for '--target': 'mars' is not one of"),
    ("deploy render --image a/b:1", 1, "--image and --allow-tag go with --target kuberay"),
    ("deploy place", 1, "name the cluster: either --cluster FILE or --live ADDRESS"),
    ("doctor --port -1", 2, "'--port': must be at least 0"),
    ("doctor --address auto", 2, "--address: goes with --cluster"),
    ("demo --out folder/there", 1, "folder/there: File exists"),
    ("audit show --folder nosuch", 1, "nosuch: there is no such folder"),
    ("bench loadtest --workload nosuch", 1, "there is no workload 'nosuch'"),
    ("bench autoconfig --data /nosuch --workload falcon", 1, "nothing was measured: falcon"),
]

FILES: list[tuple[str, str]] = [
    ("\tserver: 1", "not YAML: line 1: found character '\\t'"),
    ("sever: {}", "sever: unknown key; did you mean server?"),
    ("server: {port: eighty}", "server.port: must be a whole number (got 'eighty')"),
    ("server: {drain_s: 20s}", "server.drain_s: must be a number (got '20s')"),
    ("server: [1]", "server: must be a mapping with host, port, "),
    ("server: {api_keys: [sesame]}", "server.api_keys.0: must be a mapping with sha256, tenant, role"),
    ("server: {api_keys: [{sha256: sesame}]}", "must be the key's SHA-256, 64 hexadecimal digits: printf %s KEY | sha"),
    ("server: {allowed_origins: [localhost:3000]}", "must be as browsers send it, without a path: https://"),
    ("images: ./model", "images: must be a mapping: {model: ./model}"),
    ("images: {model: }", "images.model: must be text (got null)"),
    ("images: {dtype: fp16}", "images.dtype: must be 'auto', 'float32', 'bfloat16' or 'float16' (got 'fp16')"),
    ("images: {models: {}}", "images: models is empty"),
    ("images: {models: {a: 3}}", "images.models.a: must be text or a mapping with file, config (got 3)"),
    ("images: {replicas: 0}", "images.replicas: must be at least 1 (got 0)"),
    ("images: {replicas: many}", "images.replicas: must be a whole number or a mapping with min, max, "),
    ("images: {safety_checker: maybe}", "images.safety_checker: must be true or false (got 'maybe')"),
    ("recommend: {models: {shop: ./shop}}", "recommend.models.shop: must be a mapping: {folder: ./shop}"),
    ("recommend: {models: {shop: {}}}", "recommend.models.shop.folder: must be given"),
    # folders
    ("images: {model: ./foldr}", "images.model: /* the folder *//foldr: there is no such folder; did you mean folder?"),
    ("images: {model: ./empty}", "images.model: /* the folder *//empty: no diffusers folder: it is empty"),
    ("images: {model: ./folder}", "folder: no diffusers folder: it has no model_index.json"),
    ("images: {model: ./single}", "it has no model_index.json; name the file: /* the folder *//single/v1.safetensors"),
    ("images: {model: ./single/v1.safetensors}", "v1.safetensors: the file is a Git LFS pointer: the real file was no"),
    ("images: {model: ./single/v2.safetensors}", "images.model: /* the folder *//single/v2.safetensors: there is no "),
    ("images: {model: ./unwhole}", "images.model: /* the folder *//unwhole/vae: there is no such folder"),
    ("images: {model: ./damaged}", "damaged/model_index.json: not readable: Expecting property name"),
    ("images: {models: {a: ./nosuch, b: emoji}}", "images.models.a: /* the folder *//nosuch: there is no such folder"),
    ("images: {loras: {folder: ./lora}}", "images.loras.folder: /* the folder *//lora: there is no such folder; did"),
    ("images: {models_folder: ./nosuch}", "images.models_folder: /* the folder *//nosuch: there is no such folder"),
    ("images: {controlnets: {a: {folder: ./nosuch}}}", "images.controlnets.a.folder: /* the folder *//nosuch: there"),
    ("recommend: {models: {a: {folder: ./nosuch}}}", "recommend.models.a.folder: /* the folder *//nosuch: there is "),
    ("recommend: {models: {a: {folder: ./folder}}}", "folder is no packaged model: package.json: No such file"),
]

FOLDER = {
    "folder/there": "x", "empty/": "", "loras/": "", "single/v1.safetensors": "version https://git-lfs.github.com/spec",
    "damaged/model_index.json": "{", "unwhole/model_index.json":
        '{"_class_name": "StableDiffusionPipeline", "vae": ["diffusers", "AutoencoderKL"]}',
}  # fmt: skip
"""Where commands are given; what ends in a slash is a directory."""

CHILD = """
import contextlib, io, json, os, sys
from plait.cli import main as root
from plait.cli import serve, tune  # what they and most others need is imported once
from plait.offline import images
from plait.server import supervise

def starts(*_, **__):
    raise SystemExit("it would start")

supervise.serve = starts
folder, results = sys.argv[1:]
for number, arguments in enumerate(json.load(sys.stdin)):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = root.main(arguments)
    heavy = sorted({"torch", "ray", "diffusers", "transformers"} & set(sys.modules))
    seen = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "heavy": heavy}
    with open(f"{results}/{number}", "w") as file:
        json.dump(seen, file)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each command did, by its text: each in a process of its own, in a folder with `FOLDER` in it."""
    folder, results = tmp_path_factory.mktemp("mistakes"), tmp_path_factory.mktemp("told")
    for name, text in FOLDER.items():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(text)
    commands = [text for text, *_ in SHELL]
    for number, (text, _) in enumerate(FILES):
        file = folder / f"{number}.plait.yaml"
        file.write_text(text)
        commands.append(f"serve {file}")
    environ = {**os.environ, "XDG_STATE_HOME": str(results), "COLUMNS": "200"}
    asked = json.dumps([command.split() for command in commands])
    subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(results)],
        input=asked, text=True, env=environ, timeout=600, check=True,
    )  # fmt: skip
    done = [json.loads((results / str(number)).read_text()) for number in range(len(commands))]
    left = {path.name for path in folder.iterdir() if not path.name.endswith(".plait.yaml")}
    keys = [*commands[: len(SHELL)], *(text for text, _ in FILES)]
    return {"folder": folder, "left": left, "told": dict(zip(keys, done, strict=True))}


CASES = [*SHELL, *((text, 1, says) for text, says in FILES)]


@pytest.mark.parametrize(("given", "code", "says"), CASES, ids=[given or "nothing" for given, *_ in CASES])
def test_a_mistake_is_told_before_anything_is_loaded(told: dict[str, Any], given: str, code: int, says: str) -> None:
    """On stderr, by its option, key or file; neither torch nor Ray is imported for it, and nothing is written."""
    seen = told["told"][given]
    err = " ".join(seen["err"].split())
    assert says.replace(ROOT, str(told["folder"])) in err
    assert seen["code"] == code
    assert (seen["out"] == "") == bool(given)  # without a command it is the help
    assert not re.search(r"(?i)traceback|input should|valid dictionary|instance of|validation|sesame|would start", err)
    if not given.startswith(("bench", "models cut", "models package")):  # which compute with torch
        assert seen["heavy"] == []
    assert told["left"] == {name.partition("/")[0] for name in FOLDER}


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("POST", "/v1/images/generations", 400, "prompt: must be given"),
        ("GET", "/v1/images/generations", 405, "GET /v1/images/generations is not allowed; it takes POST"),
        ("POST", "/v1/image/generations", 404, "no route POST /v1/image/generations; did you mean /v1/images/gen"),
        ("POST", "/images/generations", 404, "no route POST /images/generations; did you mean /v1/images/generat"),
    ],
)
def test_a_mistake_over_http_is_told_with_what_is_right(method: str, path: str, status: int, says: str) -> None:
    """A client's base URL without /v1 is the commonest."""
    answer = make_client(FakeImageService()).request(method, path, json={})
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
