"""The API in a real browser: from the interactive documentation, and from a page of another origin."""

from __future__ import annotations

from starlette.responses import HTMLResponse

from fakes.images import FakeImageService
from fakes.ranking import fake_rankers
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.local import LocalRankingService
from plait_serving.starter.preprocess import PREPROCESSORS
from support.app_server import AppServer
from support.browser import needs_browser, window
from support.http_app import png
from support.keys import api_key
from support.waiting import wait_for

__all__ = ["window"]

pytestmark = needs_browser

KEY = "sk-other"
LIVE = "return document.querySelector(`#${args[0]} .live-responses-table tbody .response-col_status`)?.innerText"


class Tried:
    """The documentation's block of one operation, opened and ready to be tried out."""

    def __init__(self, page, path):
        self.page, self.id = page, "tried-" + "".join(filter(str.isalnum, path))
        block = "[...document.querySelectorAll('.opblock-post')].find((block) => "
        block += "block.querySelector('[data-path]').dataset.path === args[0])"
        page.wait(f"return {block} !== undefined", path)
        page.run(f"{block}.id = args[1]", path, self.id)
        self.click(".opblock-summary-control")
        page.wait("return document.querySelector(args[0]) !== null", f"#{self.id} .try-out__btn")
        self.click(".try-out__btn")
        page.wait("return document.querySelector(args[0]) !== null", f"#{self.id} .execute")

    def click(self, selector):
        self.page.click(f"#{self.id} {selector}")

    def status(self):
        """What the answer to what is filled in is."""
        self.click(".execute")
        return self.page.wait(LIVE, self.id)


def test_operations_can_be_tried_out_as_they_are(window, tmp_path):
    """Without a word typed but for what only a person can give, a file; a form sends nothing that nobody filled in. The
    page's key goes along, and the browser finds nothing that its policy forbids."""
    service = FakeImageService()
    rankers = LocalRankingService(fake_rankers())
    settings = HttpSettings(preprocessors=PREPROCESSORS, api_keys=(api_key(KEY, tenant="a"),))
    server = AppServer(create_app(service, settings, ranking=rankers))
    (tmp_path / "image.png").write_bytes(png())
    page = window(height=1600)
    for _ in range(2):
        page.open(f"http://127.0.0.1:{server.port}/docs")
        page.run("sessionStorage.setItem('plait.key', args[0])", KEY)
    page.wait("return document.querySelectorAll('.opblock').length > 15")
    assert [each for each in page.complaints() if "401" not in each] == []
    for path in ("/v1/images/generations", "/v2/models/{model}/infer"):
        assert Tried(page, path).status() == "200", path
    edits = Tried(page, "/v1/images/edits")
    assert edits.status() == "200"
    choice = "const select = document.querySelector(args[0]); select.value = 'multipart/form-data';"
    kind, file = f"#{edits.id} .body-param-content-type select", f"#{edits.id} [data-property-name=image] input"
    page.run(choice + "select.dispatchEvent(new Event('change', { bubbles: true }))", kind)
    page.wait("return document.querySelector(args[0]) !== null", file)
    page.type(file, str(tmp_path / "image.png"))
    page.fill(f"#{edits.id} [data-property-name=prompt] input", "green apple")
    before = len(service.submitted)
    edits.click(".execute")
    wait_for(lambda: len(service.submitted) > before)
    request = service.submitted[before]
    page.open("about:blank")
    server.stop()
    assert (request.prompt, request.width, request.loras, request.negative_prompt) == ("green apple", 16, (), None)


async def other_page(scope, receive, send):
    """An application with one empty page."""
    await HTMLResponse("<title>other</title>")(scope, receive, send)


ASK = """try {
  const headers = { "content-type": "application/json", authorization: `Bearer ${args[1]}`, "x-stainless-lang": "js" };
  const answer = await fetch(args[0], { method: "POST", headers, body: JSON.stringify({ prompt: "red apple" }) });
  return [answer.status, answer.headers.get("x-request-id"), Object.keys(await answer.json())];
} catch (error) {
  return String(error);
}"""


def test_a_page_of_another_origin_is_answered_if_it_is_allowed(window):
    """With a key in a header, as OpenAI's client in a browser sends one; it reads errors and headers, too. Any other
    page learns nothing, and what it asks for is not done."""
    service = FakeImageService()
    allowed, stranger = AppServer(other_page), AppServer(other_page)
    settings = HttpSettings(
        api_keys=(api_key(KEY, tenant="a"),),
        allowed_origins=(f"http://127.0.0.1:{allowed.port}",),
    )
    server = AppServer(create_app(service, settings))
    url = f"http://127.0.0.1:{server.port}/v1/images/generations"
    page = window()
    try:
        page.open(f"http://127.0.0.1:{allowed.port}/")
        status, request_id, members = page.run(ASK, url, KEY)
        assert (status, request_id.startswith("req_"), "data" in members) == (200, True, True)
        status, _, members = page.run(ASK, url, "wrong")
        assert (status, members) == (401, ["error"])
        assert len(service.submitted) == 1
        page.open(f"http://127.0.0.1:{stranger.port}/")
        assert page.run(ASK, url, KEY) == "TypeError: Failed to fetch"
        assert len(service.submitted) == 1
    finally:
        page.open("about:blank")
        for each in (allowed, stranger, server):
            each.stop()
