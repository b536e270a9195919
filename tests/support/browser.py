"""A headless Chromium that a test drives over chromedriver, in W3C's WebDriver protocol; needs no library."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
WAIT_S = 60.0
AXE = Path(__file__).parents[1] / "vendor" / "axe-core" / "axe.min.js"

needs_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium is not installed"),
]


class JavaScriptError(Exception):
    """The page's script raised, or WebDriver refused."""


class Browser:
    """One window at a time, on a Chromium of its own. `spare` gets it when that was closed."""

    def __init__(self, driver_url: str, profile: Path, spare: list[Browser]) -> None:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
                     "--force-device-scale-factor=1", "--hide-scrollbars", "--disable-dev-shm-usage"]  # fmt: skip
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        self._driver, self._spare = driver_url, spare
        session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._path = f"/session/{session['sessionId']}"

    def shape(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> Browser:
        """Set the page's width and height; `dark`: what it is told that people prefer."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        prefers = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in prefers.items()]
        self.devtools("Emulation.setEmulatedMedia", features=features)
        return self

    def close(self) -> None:
        """Leaves the page and forgets what it stored: the next window is as new."""
        origin = self.run("return location.origin")
        self.open("about:blank")
        self.devtools("Storage.clearDataForOrigin", origin=origin, storageTypes="all")
        self.complaints()
        self._spare.append(self)

    def end(self) -> None:
        """Ends the process."""
        self._ask("DELETE", self._path)

    def open(self, url: str) -> None:
        """Loads a page."""
        self._do("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns in the page; a promise is awaited."""
        body = f"(async (...args) => {{ {script} }})(...[...arguments].slice(0, -1))"
        ends = "value => done({value}), error => done({error: String(error)})"
        wrapped = f"const done = arguments[arguments.length - 1]; {body}.then({ends});"
        answer = self._do("POST", "/execute/async", {"script": wrapped, "args": list(arguments)})
        if "error" in answer:
            raise JavaScriptError(answer["error"])
        return answer.get("value")

    def wait(self, script: str, *arguments: Any, timeout_s: float = WAIT_S) -> Any:
        """What the script returns as soon as that is true."""
        until_s = time.monotonic() + timeout_s
        while not (found := self.run(script, *arguments)):
            if time.monotonic() > until_s:
                says = f"the page says {self.text('#messages')!r}, {self.complaints()}"
                pytest.fail(f"waited {timeout_s:g} s for {script}; {says}")
            time.sleep(0.05)
        return found

    def find(self, selector: str) -> str:
        """An element's id. Raises `JavaScriptError` if there is none."""
        return str(self._do("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT])

    def click(self, selector: str) -> None:
        """A click in its middle, as a person makes it: it is brought into view, and nothing may be in front of it."""
        self.run("document.querySelector(args[0])?.scrollIntoView({ block: 'center', behavior: 'instant' })", selector)
        self._do("POST", f"/element/{self.find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Keys, into whatever has it."""
        self._do("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def fill(self, selector: str, text: str) -> None:
        """Types instead of what was there."""
        self._do("POST", f"/element/{self.find(selector)}/clear", {})
        self.type(selector, text)

    def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(self.run("return document.querySelector(args[0])?.innerText ?? ''", selector))

    def keys(self, *keys: str) -> None:
        """Presses keys one after the other, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._do("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def drag(self, selector: str, points: Sequence[tuple[int, int]]) -> None:
        """Draws over an element; points count from its middle."""
        origin = {ELEMENT: self.find(selector)}
        moves = [{"type": "pointerMove", "duration": 20, "x": x, "y": y, "origin": origin} for x, y in points]
        actions = [moves[0], {"type": "pointerDown", "button": 0}, *moves[1:], {"type": "pointerUp", "button": 0}]
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self._do("POST", "/actions", {"actions": [pointer]})

    def complaints(self) -> list[str]:
        """What the browser complained about since the last question."""
        entries = self._do("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def barriers(self) -> list[Any]:
        """What axe-core has against the page as it is: rule, element, and why."""
        self.devtools("Runtime.evaluate", expression=AXE.read_text(encoding="utf-8"))
        found: list[Any] = self.run(
            """const { violations } = await axe.run(document, { resultTypes: ["violations"] });
            return violations.flatMap(({ id, nodes }) =>
              nodes.map((node) => [id, node.html.slice(0, 160), node.any.map(({ message }) => message).join("; ")]));"""
        )
        return found

    def screenshot(self) -> bytes:
        """The page as it is seen: a PNG."""
        return base64.b64decode(self._do("GET", "/screenshot"))

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._do("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _do(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._ask(method, self._path + path, body)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._driver + path, data=data, method=method)
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise JavaScriptError(json.load(error)["value"]["message"].splitlines()[0]) from None


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Browser]]:
    """``window(width=, height=, dark=)`` opens one, which knows nothing of the others. Starting Chromium takes seconds,
    so that a window that was closed lends its own to the next."""
    assert DRIVER is not None
    process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    folder = tmp_path_factory.mktemp("browser")
    opened: list[Browser] = []
    spare: list[Browser] = []
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if "started successfully on port" in line)
        url = f"http://127.0.0.1:{line.rstrip(' .' + chr(10)).rsplit(' ', 1)[1]}"

        def open_window(**how: Any) -> Browser:
            if not spare:
                spare.append(Browser(url, folder / f"profile-{len(opened)}", spare))
                opened.append(spare[-1])
            return spare.pop().shape(**how)

        yield open_window
    finally:
        for browser in opened:
            browser.end()
        process.terminate()
        process.wait(60)
        process.stdout.close()
