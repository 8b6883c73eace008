"""The page of an explanation: everything is on it, nothing is loaded, no text of a user becomes markup."""

import re
from html.parser import HTMLParser

import pytest

from mvr_ray.explanation import ExplainedPassage, ExplainedView, Explanation, Winner, render_html

EVIL = "<script>alert('x & y')</script><img src=https://a.example/b onerror=\"c\">"
VOID = {"meta", "br"}


class PageParser(HTMLParser):
    """Elements with their attributes, the text of each table row, and whether every element was closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.rows: list[str] = []
        self.text = ""
        self.open_tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append("")
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data
        if self.rows:
            self.rows[-1] += data


def test_an_explanation_prints_as_a_table_of_views_and_questions() -> None:
    lines = str(make("A hill.\n" + "A sea. " * 20)).splitlines()
    assert [line.split()[:4] for line in lines if line[:1].isdigit()] == [
        ["0", "0.5000", "«", "-0.2500"],
        ["8", "0.1250", "0.5000", "«"],
    ]
    assert lines[0].startswith("question 1: ") and max(len(line) for line in lines if line[:1].isdigit()) < 120
    assert repr(make()) == str(make())


def make(text: str = "A hill. A sea.", question: str = "Where?", scores=((0.5, -0.25), (0.125, 0.5))) -> Explanation:
    views = [
        ExplainedView(view=0, kind="snippet", start=0, stop=len(text), text=text, scores=list(scores[0])),
        ExplainedView(view=8, kind="feedback", scores=list(scores[1])),
    ]
    winners = [Winner(view=0, score=scores[0][0], rank=1), Winner(view=8, score=scores[1][1])]
    passage = ExplainedPassage(id="p<1>", title=f"Title {text}", text=text, views=views, winners=winners)
    return Explanation(
        index="made",
        version=3,
        encoder_fingerprint="f" * 16,
        num_views=8,
        questions=[question, "When?"],
        passages=[passage],
    )


def test_text_never_becomes_markup_and_is_all_there() -> None:
    page = PageParser(render_html(make(text=EVIL, question=f"Who {EVIL}?")))
    assert not {tag for tag, _ in page.elements} & {"script", "img"}
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.open_tags == []
    for text in (EVIL, f"Title {EVIL}", f"Who {EVIL}?", "p<1>"):
        assert text in page.text


def test_texts_begin_on_the_side_of_their_script() -> None:
    elements = PageParser(render_html(make("نهر النيل طويل."))).elements
    assert [tag for tag, attributes in elements if attributes.get("dir") == "auto"] == ["h2", "p", "td", "td"]
    assert [tag for tag, _ in elements if tag == "bdi"] == ["bdi"] * 3


def test_nothing_is_loaded_from_anywhere() -> None:
    text = render_html(make())
    assert not re.search(r"https?:|//|url\(|@import", text.replace("<!doctype", ""))
    assert not any({"src", "href"} & attributes.keys() for _, attributes in PageParser(text).elements)
    assert "prefers-color-scheme: dark" in text


def test_each_view_stands_in_a_row_with_what_it_stands_for_and_its_scores() -> None:
    head, first, second = PageParser(render_html(make())).rows
    assert "Where?" in head and "view 0 with 0.5000, hit 1" in head and "view 8 with 0.5000" in head
    assert all(part in first for part in ("A hill. A sea.", "0.5000", "-0.2500"))
    assert all(part in second for part in ("feedback", "0.1250", "0.5000"))


def test_the_best_view_of_each_question_and_no_other_is_marked() -> None:
    elements = PageParser(render_html(make())).elements
    cells = [attributes["class"] for tag, attributes in elements if tag == "td" and "class" in attributes]
    assert cells == ["score won", "score", "score", "score won"]


@pytest.mark.parametrize(
    "scores", [((0.5, -0.25), (0.125, 0.5)), ((-3.0, -1.0), (-2.0, -0.5)), ((0.0, 0.0), (0.0, 0.0))]
)
def test_bars_begin_at_zero_and_are_as_long_as_the_score(scores) -> None:
    elements = PageParser(render_html(make(scores=scores))).elements
    bars = [attributes["style"] for tag, attributes in elements if tag == "i"]
    low, high = min(0.0, *map(min, scores)), max(0.0, *map(max, scores)) or 1.0
    for bar, score in zip(bars, [score for row in scores for score in row], strict=True):
        offset, width = (float(number) for number in re.findall(r"[\d.]+", bar))
        ends = offset / 100 * (high - low) + low, (offset + width) / 100 * (high - low) + low
        assert ends == pytest.approx((min(score, 0.0), max(score, 0.0)), abs=1e-3)


def test_a_page_of_no_passage_is_a_page() -> None:
    assert "Which view answers?" in PageParser(render_html(make().model_copy(update={"passages": []}))).text
