"""The search page in a real browser, over the three-passage library: what is shown is what the library says."""

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
import uvicorn
from in_memory_index import InMemoryIndex

from mvr_ray.config import ServeConfig
from mvr_ray.core.encoding.snippets import TITLE
from mvr_ray.deadline import Deadline
from mvr_ray.errors import MissingInputError
from mvr_ray.serving import app as app_module
from mvr_ray.serving.app import create_app
from mvr_ray.serving.auth import TokenStore, read_tokens
from mvr_ray.serving.service import SearchService
from mvr_ray.types import Exactness, HybridParts, Passage, SwapState
from mvr_ray.versions import VersionInfo

PAGE = Path(app_module.__file__).parent / "page"
HOSTILE = "The Nile <img src=x onerror=\"document.title='taken'\"> is long. \U0001f30a The Rhine & co are shorter."


class Versions:
    """Version 3 is live; version 2 was before the refinement that made it."""

    def all(self) -> list[VersionInfo]:
        info = {"created": "2026-11-21", "passages": 3, "vectors": 5, "shards": 2, "encoder": "made/f", "content": "c"}
        return [
            VersionInfo(version=2, parent=1, operation="index", live=False, **info),
            VersionInfo(version=3, parent=2, operation="refine", live=True, **info),
        ]


class VersionIndex(InMemoryIndex):
    """The library under another version's number, perhaps with its first passage's text replaced."""

    def __init__(self, version: int, *, text: str | None = None, **options) -> None:
        super().__init__(**options)
        self.version, self.text = version, text
        self.manifest = SimpleNamespace(**{**vars(self.manifest), "version": version})

    def search(self, queries_QD, k, **options):
        answer = super().search(queries_QD if self.version == 3 else queries_QD[:, ::-1], k, **options)
        return answer._replace(version=self.version)

    def passages(self, ids):
        passages = dict(super().passages(ids))
        if self.text and "p1" in passages:
            passages["p1"] = Passage("p1", "Rivers", self.text)
        return passages


LEXICAL = {"p1": 0.5, "p2": 9.25, "p3": 4.0}


class HybridIndex(VersionIndex):
    """The library with a word score for each passage, by BM25 + 2 x dense: p2, p3, p1."""

    manifest = SimpleNamespace(**{**vars(InMemoryIndex.manifest), "lexical": True})

    def search(self, queries_QD, k, *, hybrid=None, parts=False, **options):
        answer = super().search(queries_QD, k, **options)
        if hybrid is None:
            return answer
        hits = [[hit._replace(score=LEXICAL[hit.passage_id] + 2 * hit.score) for hit in own] for own in answer.hits]
        halves = [[HybridParts(LEXICAL[hit.passage_id], hit.score) for hit in own] for own in answer.hits]
        exact = replace(answer.exact, method="bm25 + flat")
        order = [sorted(range(len(own)), key=lambda at, own=own: -own[at].score) for own in hits]
        return answer._replace(
            hits=[[own[at] for at in one] for own, one in zip(hits, order)],
            parts=[[own[at] for at in one] for own, one in zip(halves, order)] if parts else (),
            exact=exact,
        )

    def lexical_scores(self, texts, passages):
        return {passage.id: np.array([LEXICAL[passage.id]] * len(texts), np.float32) for passage in passages}


class VersionSwitcher:
    """Version 2 beside the live one."""

    state = SwapState(3, follows=False)

    def __init__(self, live: InMemoryIndex) -> None:
        self.live = live

    @contextmanager
    def pin(self, version: int | None = None, deadline: Deadline | None = None) -> Iterator[InMemoryIndex]:
        if version not in (None, 2, 3):
            raise MissingInputError(f"index 'library' has no version {version}; there are 2, 3")
        yield VersionIndex(2) if version == 2 else self.live

    def follow(self) -> bool:
        return False


@contextmanager
def serve(live: InMemoryIndex, tokens: TokenStore | None = None, hybrid: float | None = None) -> Iterator[str]:
    app = create_app(SearchService(VersionSwitcher(live), ServeConfig(), Versions(), hybrid=hybrid), tokens)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def window():
    """A window of a browser, whose tabs share nothing: each test has a server at a port of its own."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here; install one (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        with chromium.new_context() as context:
            context.new_page()  # a window without a tab closes, and to open one takes a second of CPU
            yield context
        chromium.close()


@pytest.fixture
def tab(window):
    page = window.new_page()
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("console", lambda message: page.wrong.append(message.text) if message.type == "error" else None)
    yield page
    page.close()


def rows(tab, column: int = 0) -> list[str]:
    """The ids of one list, best first."""
    lines = tab.locator(f"#answers > section:nth-child({column + 1}) li > p.soft").all_inner_texts()
    return [re.search(r"id (\S+)", line)[1] for line in lines]


def test_a_question_is_asked_with_the_keyboard_and_its_snippet_is_marked(tab):
    with serve(VersionIndex(3)) as address:
        tab.goto(address)
        tab.locator("#question:focus").wait_for()
        tab.keyboard.type("how long is the nile?")
        tab.keyboard.press("Enter")
        tab.wait_for_selector(".hits li")
        assert rows(tab) == ["p1", "p3", "p2"]
        assert tab.locator(".hits li:first-child mark").inner_text() == "The Nile is long."
        assert tab.locator(".badge").inner_text() == "exact"
        assert tab.locator("#about").inner_text() == "Index library: 3 passages, 5 views, version 3"
        assert tab.locator("#status").inner_text() == "3 results"

        tab.locator(".views button").first.focus()
        tab.keyboard.press("Enter")
        tab.wait_for_selector("table")
        cells = [row.inner_text().split() for row in tab.locator("tbody tr").all()]
        assert cells[0][:3] == ["0", "(best)", "1.0000"] and cells[1][:2] == ["1", "0.0000"]
        button = tab.locator(".views button").first
        assert button.get_attribute("aria-expanded") == "true"
        button.click()
        assert button.get_attribute("aria-expanded") == "false" and not tab.locator("table").is_visible()
        assert tab.wrong == []


def test_a_hybrid_search_shows_both_parts_of_every_hit_and_of_its_views(tab):
    with serve(HybridIndex(3), hybrid=2.0) as address:
        tab.goto(f"{address}?q=how+long+is+the+nile")
        tab.wait_for_selector(".hits li")
        assert rows(tab) == ["p2", "p3", "p1"]
        assert tab.locator(".badge").inner_text() == "exact: bm25 + flat"
        lines = tab.locator(".hits li > p.soft").all_inner_texts()
        assert lines[1].startswith("5.0000 (words 4.0000, view 0.5000), view 0, id p3")
        assert lines[2].startswith("2.5000 (words 0.5000, view 1.0000), view 0, id p1")
        tab.locator(".views button").nth(2).click()
        tab.wait_for_selector("table")
        cells = [row.inner_text().split() for row in tab.locator("tbody tr").all()]
        assert cells[0][:3] == ["0", "(best)", "1.0000"]
        assert cells[-2][:3] == ["0.5000", "words", "(BM25)"] and cells[-1][0] == "2.5000"
        assert tab.wrong == []


def test_the_page_greets_with_examples_that_are_searched_for_at_a_click(tab):
    with serve(VersionIndex(3)) as address:
        tab.goto(address)
        tab.wait_for_selector("#examples button")
        examples = tab.locator("#examples button").all_inner_texts()
        assert examples == ["How long is the Nile?", "What is a hill?", "Is the sea salt?"]
        assert tab.locator("label").all_inner_texts()[:4] == ["Question", "Results", "Index version", "Compare with"]
        tab.locator("#examples button", has_text="hill").click()
        tab.locator(".hits li:first-child h3", has_text="Hills").wait_for()
        assert not tab.locator("#welcome").is_visible()
        assert tab.wrong == []


def test_the_page_of_routes_shows_all_of_them_and_sends_requests_without_anything_from_elsewhere(tab):
    tokens = read_tokens(None, {"MVR_RAY_READ_TOKEN": "read-" + "a" * 32})
    with serve(VersionIndex(3), tokens) as address:
        urls = []
        tab.on("request", lambda request: urls.append(request.url))
        tab.goto(f"{address}docs")
        tab.fill("#token", "read-" + "a" * 32)
        tab.keyboard.press("Enter")
        tab.wait_for_selector("#routes details")
        titles = tab.locator("#routes summary code").all_inner_texts()
        assert {"POST /v1/search", "POST /v1/embeddings", "GET /v1/versions/{n}", "GET /readyz"} <= set(titles)
        search = tab.locator("#routes details", has_text="POST /v1/search").first
        search.locator("summary").click()
        assert "Distinct passages a query." in search.inner_text() and "integer from 1 to 1000" in search.inner_text()
        search.locator("textarea").fill('{"queries": ["nile"], "k": 1}')
        search.locator("button").click()
        search.locator("pre", has_text='"id": "p1"').wait_for()
        assert search.locator("pre").inner_text().startswith("200\n")
        assert all(url.startswith((address, "data:")) for url in urls)
        assert all("401" in line for line in tab.wrong), "the first look at openapi.json alone is refused"


def test_two_versions_stand_side_by_side_and_a_link_asks_them_again(tab):
    with serve(VersionIndex(3)) as address:
        tab.goto(f"{address}?q=nile&k=2&beside=2")
        tab.wait_for_selector("#answers > section:nth-child(2) li")
        assert tab.locator("#answers h2").all_inner_texts() == ["Version 3", "Version 2"]
        assert (rows(tab, 0), rows(tab, 1)) == (["p1", "p3"], ["p2", "p3"])
        assert tab.locator(".moved").all_inner_texts() == ["not in the other list"] * 2
        tab.fill("#question", "hill")
        tab.click("button[type=submit]")
        tab.locator(".hits li:first-child h3", has_text="Hills").wait_for()
        assert "beside=2" in tab.url
        tab.reload()
        tab.wait_for_selector("#answers > section:nth-child(2) li")
        assert tab.locator("#question").input_value() == "hill"
        assert tab.wrong == []


def test_passages_that_were_not_searched_are_shown_by_badge_and_shard(tab):
    with serve(VersionIndex(3, missing=2)) as address:
        tab.goto(f"{address}?q=nile")
        tab.wait_for_selector(".badge")
        assert tab.locator(".badge").inner_text() == "partial: 1 of 3 passages"
        assert tab.locator("#shards li").first.is_visible()
        assert tab.locator("#shards li").all_inner_texts() == ["0: searched, 1", "1: died, 2"]
        assert tab.locator("#shards-summary").inner_text() == "1 of 2 shards are not searched"


@pytest.mark.parametrize(
    ("exact", "badge"),
    [
        (Exactness(False, "hnsw", 1, 12, 0.97349), "approximate: hnsw, recall 0.973 when built"),
        (Exactness(False, "hnsw", 1, 12, None), "approximate: hnsw"),
        (Exactness(True, "flat int8 over stored views", 1, 12, None), "exact: flat int8 over stored views"),
    ],
)
def test_the_badge_says_what_an_answer_is_worth(tab, exact, badge):
    with serve(VersionIndex(3, exact=exact)) as address:
        tab.goto(f"{address}?q=nile")
        tab.wait_for_selector(".badge")
        assert tab.locator(".badge").inner_text() == badge
        assert tab.wrong == []


def test_a_token_is_asked_for_and_stays_in_the_tab(tab, tmp_path):
    tokens = read_tokens(None, {"MVR_RAY_READ_TOKEN": "read-" + "a" * 32})
    with serve(VersionIndex(3), tokens) as address:
        tab.goto(f"{address}?q=nile")
        tab.wait_for_selector("#token", state="visible")
        tab.fill("#token", "read-" + "a" * 32)
        tab.keyboard.press("Enter")
        tab.wait_for_selector(".hits li")
        assert not tab.locator("#token").is_visible()
        assert "aaaa" not in tab.url
        assert tab.evaluate("localStorage.length + document.cookie.length") == 0


@pytest.mark.parametrize("path", ["?q=nile", "docs"])
def test_a_token_that_no_header_holds_is_refused_and_another_can_be_typed(tab, path):
    tokens = read_tokens(None, {"MVR_RAY_READ_TOKEN": "read-" + "a" * 32})
    with serve(VersionIndex(3), tokens) as address:
        tab.goto(address + path)
        for token in ("read-\u043a" + "a" * 32, "read-" + "a" * 32):
            tab.wait_for_selector("#token", state="visible")
            tab.fill("#token", token)
            tab.keyboard.press("Enter")
            if not token.isascii():
                tab.locator("#status", has_text="token is one word of ASCII characters").wait_for()
        tab.wait_for_selector(".hits li" if path != "docs" else "#routes details")


def test_a_late_answer_of_an_earlier_question_is_not_shown(tab):
    with serve(VersionIndex(3)) as address:
        tab.goto(address)
        late_routes = []
        tab.route(
            "**/v1/search",
            lambda route: late_routes.append(route) if "nile" in route.request.post_data else route.continue_(),
        )
        for question in ("nile", "hill"):
            tab.fill("#question", question)
            tab.click("button[type=submit]")
        tab.locator(".hits li:first-child h3", has_text="Hills").wait_for()
        with tab.expect_response("**/v1/search") as response:
            late_routes[0].continue_()
        response.value.finished()
        tab.evaluate("new Promise(requestAnimationFrame)")
        assert rows(tab)[0] == "p2"


def test_the_page_describes_the_version_that_answers(tab):
    with serve(VersionIndex(2)) as address:
        tab.goto(address)
        text = "Index library: 3 passages, 5 views, version 2; version 3 is live, and not open here"
        tab.locator("#about", has_text=text).wait_for()


def test_texts_are_shown_as_they_are_and_never_run(tab):
    with serve(VersionIndex(3, text=HOSTILE)) as address:
        tab.goto(f"{address}?q=rhine")
        tab.wait_for_selector(".hits li")
        assert HOSTILE in tab.locator(".hits").inner_text()
        assert tab.title() != "taken" and tab.locator(".hits img").count() == 0
        assert tab.locator(".hits mark").first.inner_text() == HOSTILE[18:39]


def test_a_viewer_before_no_title_is_shown_as_such(tab):
    """`DualEncoder.view_spans` names one for passages without a title, with `empty_snippets: kept`."""

    class UntitledIndex(VersionIndex):
        def view_spans(self, passage):
            return [TITLE, (0, 17)]

        def passages(self, ids):
            return {name: passage._replace(title="") for name, passage in super().passages(ids).items()}

    with serve(UntitledIndex(3)) as address:
        tab.goto(f"{address}?q=nile")
        tab.locator(".views button").first.click()
        tab.wait_for_selector("table")
        assert tab.locator("tbody td:last-child").all_inner_texts() == ["no title", "The Nile is long."]


def test_a_text_in_arabic_begins_on_the_right_and_its_snippet_is_marked_after_an_emoji(tab):
    text = "\U0001f30a نهر النيل طويل. الراين أقصر."
    with serve(VersionIndex(3, text=text)) as address:
        tab.goto(f"{address}?q=rhine")
        tab.wait_for_selector(".hits li")
        line = tab.locator(".hits p", has=tab.locator("mark")).first
        assert line.evaluate("element => getComputedStyle(element).direction") == "rtl"
        assert line.locator("mark").inner_text() == text[18:39]
        assert tab.locator("#question").evaluate("element => getComputedStyle(element).direction") == "ltr"


def test_a_question_that_is_refused_says_why(tab):
    with serve(VersionIndex(3)) as address:
        tab.goto(f"{address}?q=nile&version=3")
        tab.wait_for_selector(".hits li")
        tab.fill("#question", "   ")
        tab.click("button[type=submit]")
        tab.wait_for_selector("#status.refused")
        assert tab.locator("#status").inner_text() == "the query is empty; send a text with words in it"


def test_every_control_has_a_name(tab):
    with serve(VersionIndex(3)) as address:
        tab.goto(f"{address}?q=nile")
        tab.wait_for_selector(".hits li")
        nameless = tab.evaluate(
            "[...document.querySelectorAll('input, select, button')]"
            ".filter((e) => !(e.labels && e.labels.length) && !e.textContent.trim()).map((e) => e.outerHTML)"
        )
        assert nameless == []
        assert tab.evaluate("document.documentElement.lang") == "en"


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_is_readable_in_light_and_dark():
    """WCAG 2.2, 1.4.3: a contrast of 4.5 : 1 for text."""
    schemes = re.findall(r":root \{(.*?)\}", (PAGE / "page.css").read_text(), re.S)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        for ink, paper in [(one, "paper") for one in ("ink", "soft", "good", "warn", "bad", "focus")] + [
            ("ink", "mark")
        ]:
            low, high = sorted((luminance(colours[ink]), luminance(colours[paper])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, paper)


def test_the_page_and_its_files_need_no_token_and_load_nothing_from_elsewhere():
    tokens = read_tokens(None, {"MVR_RAY_READ_TOKEN": "read-" + "a" * 32})
    with serve(VersionIndex(3), tokens) as address:
        for path in app_module.PAGE:
            with urlopen(address + path[1:]) as reply:
                assert "default-src 'self'" in reply.headers["content-security-policy"]
                assert reply.read() == (PAGE / app_module.PAGE[path][0]).read_bytes()
        for path in ("v1/versions", "page/index.html", "page/..%2fapp.py"):
            with pytest.raises(HTTPError, match="401"):
                urlopen(address + path)
    for file in PAGE.iterdir():
        assert "http://" not in file.read_text() and "https://" not in file.read_text()
