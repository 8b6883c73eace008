"""Checks the reader of MediaWiki dumps against a plain XML parse of a real one, and what changes between two dumps."""

import bz2
import gzip
import html
import string
import tracemalloc
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from mwparserfromhell.parser import ParserError, tokens
from mwparserfromhell.parser.builder import Builder
from mwparserfromhell.wikicode import Wikicode
from prepared_corpus import only_corpus

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.errors import DataError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.formats.mediawiki import plain_text
from mvr_ray.store.formats.records import BadRow, DroppedRow, PassageRecord, Record
from mvr_ray.store.formats.sources import format_of, read_source
from mvr_ray.store.prepare import PrepareReport, prepare
from mvr_ray.store.update import update
from mvr_ray.types import Passage

Write = Callable[[str, str | bytes], Path]
DUMP = Path("wikipedia_dump", "enwiki-pages-articles-shortened.xml.bz2")


class SourcePage(NamedTuple):
    """A page of the dump as xml.etree reads it whole."""

    title: str
    namespace: str
    is_redirect: bool
    wikitext: str


class WholeDump(NamedTuple):
    """The report on the corpus of the dump, and its passages by id."""

    report: PrepareReport
    articles: dict[str, Passage]


@pytest.fixture(scope="module")
def dump(data_dir: Path) -> Path:
    return data_dir / DUMP


@pytest.fixture(scope="module")
def source_pages(dump: Path) -> dict[str, SourcePage]:
    """The oracle: all pages by id, from the whole tree at once."""
    tree = ET.fromstring(bz2.decompress(dump.read_bytes()))
    return {
        page.findtext("{*}id", ""): SourcePage(
            page.findtext("{*}title", ""),
            page.findtext("{*}ns", ""),
            page.find("{*}redirect") is not None,
            page.findtext("{*}revision/{*}text", ""),
        )
        for page in tree.findall("{*}page")
    }


@pytest.fixture(scope="module")
def whole(dump: Path, tmp_path_factory: pytest.TempPathFactory) -> WholeDump:
    store = Store(tmp_path_factory.mktemp("whole"))
    report = prepare(PrepareConfig(sources=[SourceConfig(path=str(dump))]), store)
    return WholeDump(report, {passage.id: passage for passage in only_corpus(store)})


@pytest.fixture(scope="module")
def articles(whole: WholeDump) -> dict[str, Passage]:
    return whole.articles


def first_pages(dump: Path, count: int) -> str:
    pages = bz2.decompress(dump.read_bytes()).decode().split("</page>")[:count]
    return "</page>".join([*pages, "</mediawiki>"])


@pytest.fixture(scope="module")
def excerpt(dump: Path) -> str:
    """The dump up to its 68th page: six articles among redirects."""
    return first_pages(dump, 68)


def read(path: Path, format: str = "auto", **settings: str) -> list[Record]:
    return list(read_source(SourceConfig(path=str(path), format=format, **settings)))


def page(
    id_: str = "1", text: str = "Some text.", title: str = "T", ns: str = "0", more: str = "", revision: str = ""
) -> str:
    return (
        f"<page><title>{title}</title><ns>{ns}</ns><id>{id_}</id>{more}<revision><id>7</id>{revision}"
        f"<text>{html.escape(text)}</text></revision></page>"
    )


def export(*pages: str, siteinfo: str = "") -> str:
    space = "http://www.mediawiki.org/xml/export-0.11/"
    return f'<mediawiki xmlns="{space}"><siteinfo>{siteinfo}</siteinfo>{"".join(pages)}</mediawiki>'


@pytest.mark.data
def test_every_page_of_the_dump_is_an_article_or_counted_by_why_it_is_none(
    whole: WholeDump, source_pages: Mapping[str, SourcePage]
):
    report = whole.report
    articles = {i: own.title for i, own in source_pages.items() if own.namespace == "0" and not own.is_redirect}
    others = sum(own.namespace != "0" for own in source_pages.values())
    redirects = sum(own.namespace == "0" and own.is_redirect for own in source_pages.values())
    assert len(source_pages) == 206
    assert len(articles) + others + redirects == 206
    assert report.dropped_by_reason == {"page of another namespace": others, "redirect": redirects}
    assert report.rows_dropped == others + redirects
    assert (report.passages_read, report.passages_written, report.bad_rows) == (len(articles), len(articles), ())
    assert {name: passage.title for name, passage in whole.articles.items()} == articles


@pytest.mark.data
def test_no_markup_is_left_and_no_word_is_new(articles: Mapping[str, Passage], source_pages: Mapping[str, SourcePage]):
    num_words = num_new = 0
    for passage in articles.values():
        for markup in ("{{", "}}", "[[", "]]", "{|", "<ref", "</", "''", "&nbsp;", "==", "File:", "Category:", "\x01"):
            assert markup not in passage.text, (passage.title, markup)
        plain = html.unescape(source_pages[passage.id].wikitext)
        for markup in ("[[", "]]", "''"):
            plain = plain.replace(markup, "")
        words = [word.strip(string.punctuation) for word in passage.text.split()]
        source_words = {word.strip(string.punctuation) for word in plain.split()}
        num_words += len(words)
        num_new += sum(word not in source_words and word not in plain for word in words)
    assert num_words > 400_000
    assert num_new < 0.002 * num_words  # a word may be put together across markup, as in H<sub>2</sub>O


@pytest.mark.data
def test_headings_and_items_of_lists_that_are_one_link_stay_as_lines_and_headings_in_order(
    articles: Mapping[str, Passage], source_pages: Mapping[str, SourcePage]
):
    counts: Counter[str] = Counter()
    for passage in articles.values():
        lines = iter(passage.text.split("\n"))
        text = set(passage.text.split("\n"))
        for raw in source_pages[passage.id].wikitext.split("\n"):
            if raw.startswith("==") and raw.rstrip().endswith("=="):
                title = " ".join(raw.strip().strip("=").split())
                counts["headings"] += 1
                if title in text:
                    counts["headings in order"] += title in lines  # goes on from the last one
            elif raw.startswith("*[[") and raw.endswith("]]") and not set(raw[3:-2]) & set("[|:&{<"):
                counts["items"] += 1
                counts["items kept"] += raw[3:-2] in text
    assert counts["headings"] > 2000
    assert counts["headings in order"] > 0.8 * counts["headings"]  # others head references, tables, navigation alone
    assert counts["items kept"] > 0.9 * counts["items"] > 250  # others stand in tables and templates


@pytest.mark.data
def test_a_later_dump_changes_the_passages_of_its_changed_pages_alone(excerpt: str, write: Write, tmp_path: Path):
    before = excerpt
    later = before.replace("'''Anarchism''' is a", "'''Anarchism''' (changed) is a", 1)
    later = later.replace("<id>716551092</id>", "<id>999999999</id>", 1)  # the revision of Anarchism
    start = later.index("<page>", later.index("<title>Autism</title>") - 40)
    autism = later[start : later.index("</page>", start) + len("</page>")]
    new_page = page("999", "One new page. " * 100, "New")
    later = later.replace(autism, "").replace("</mediawiki>", f"{new_page}</mediawiki>")
    corpora = []
    for name, data in (("before", before), ("later", later)):
        store = Store(tmp_path / name)
        source = SourceConfig(path=str(write(f"{name}.xml.bz2", bz2.compress(data.encode(), 1))))
        prepare(PrepareConfig(sources=[source], chunk_words=100, num_shards=3), store)
        corpus = Corpus.open(store, "corpus")
        corpora.append({p.id: p for shard in range(3) for p in corpus.part(shard).passages()})
    first, second = corpora
    pages = {name.partition("#")[0] for name in first.keys() | second.keys() if first.get(name) != second.get(name)}
    anarchism, autistic = "12", "25"
    assert pages == {anarchism, autistic, "999"}
    assert not any(name.startswith(f"{autistic}#") for name in second)
    assert sum(name.startswith("999#") for name in second) == 3
    assert all(len(p.text.split()) <= 100 for p in second.values())
    same_content = [name for name in first if first[name] == second.get(name)]
    assert len(same_content) > 0.5 * len(first) > 150


@pytest.mark.data
def test_the_same_dump_reads_the_same_from_bzip2_gzip_and_plain_xml(
    excerpt: str, write: Write, articles: Mapping[str, Passage]
):
    data = excerpt.encode()
    half = len(data) // 2
    several_streams = bz2.compress(data[:half], 1) + bz2.compress(data[half:], 1)
    for name, content in (
        ("d.xml", data),
        ("d.xml.gz", gzip.compress(data, 1)),
        ("d-pages-articles1.xml-p1p800.bz2", several_streams),
    ):
        path = write(name, content)
        assert format_of(SourceConfig(path=str(path))) == "mediawiki"
        records = read(path)
        passages = [r.passage for r in records if isinstance(r, PassageRecord)]
        assert passages == [articles[passage.id] for passage in passages]
        assert len(passages) + sum(isinstance(r, DroppedRow) for r in records) == 68


@pytest.mark.data
def test_a_dump_that_is_cut_short_or_damaged_is_an_error_that_says_so(excerpt: str, write: Write):
    whole = bz2.compress(excerpt.encode(), 1)  # in blocks of 100 kB
    data = bytearray(whole)
    data[len(whole) // 2] ^= 0xFF
    broken_xml = excerpt.encode()[:300_000]
    for content, message in (
        (whole[: len(whole) // 2], r"d\.xml\.bz2 is a damaged or unfinished bzip2 file: Compressed file ended.*again"),
        (bytes(data), r"d\.xml\.bz2 is (a damaged|not a whole).*fetch it again"),  # bzip2 checks a block at its end
        (bz2.compress(broken_xml, 1), r"d\.xml\.bz2 is not a whole MediaWiki dump: .*no element found.*again"),
        (bz2.compress(broken_xml + b"\xff</text>", 1), r"not a whole MediaWiki dump: .*invalid token.*line \d+"),
    ):
        with pytest.raises(DataError, match=message):
            read(write("d.xml.bz2", content))


def test_a_file_that_is_no_dump_is_an_error_that_says_so(write: Write):
    with pytest.raises(DataError, match=r"f\.xml is no MediaWiki dump: its first element is <rss>, not <mediawiki>"):
        read(write("f.xml", "<rss><page/></rss>"))
    dump = export(page().replace("<text>", f'<text bytes="{"9" * 5000}">'))
    encodings = (f'<?xml version="1.0" encoding="{name}"?><mediawiki>' for name in ("GBK", "no-such"))
    for content in ("", "no XML at all", '{"a": 1}', dump, *encodings):
        with pytest.raises(DataError, match=r"f\.xml is not a whole MediaWiki dump"):
            read(write("f.xml", content))
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
    bomb = f'<!DOCTYPE mediawiki [<!ENTITY e0 "{"x" * 100}">{entities}]>' + export(page(text="&e9;"))
    with pytest.raises(DataError, match="not a whole MediaWiki dump"):
        read(write("f.xml", bomb.replace("&amp;e9;", "&e9;")))


def test_pages_that_give_no_passage_are_dropped_or_bad_rows(write: Write, monkeypatch: pytest.MonkeyPatch):
    path = write(
        "d.xml",
        export(
            page("1", "One."),
            page("2", "#REDIRECT [[T]]", more='<redirect title="T"/>'),
            page("3", "Talk.", ns="1"),
            page("4", "{{template}}\n[[Category:C]]\n== References ==\n<references/>"),
            page("5", "{}", revision="<model>json</model>"),
            page("6").replace("<text>Some text.", '<text deleted="deleted" bytes="9">'),
            page("7").replace("<text>Some text.", '<text bytes="9">'),
            page("8").replace("<ns>0</ns>", ""),
            page("", title="N"),
            page("9", "What the parser cannot read."),
            page("10", "Another."),
            page("9" * 5000, title="Long"),
        ),
    )
    build = Builder.build

    def build_or_fail(self: Builder, all_tokens: list[tokens.Token]) -> Wikicode:
        if all_tokens and all_tokens[0].text.startswith("What"):
            raise ParserError("unexpected end")
        return build(self, all_tokens)

    monkeypatch.setattr(Builder, "build", build_or_fail)
    records = read(path)
    assert [(r.passage.id, r.passage.text) for r in records if isinstance(r, PassageRecord)] == [
        ("1", "One."),
        ("10", "Another."),
    ]
    assert [(r.reason, r.where.partition(" (")[2]) for r in records if isinstance(r, DroppedRow)] == [
        ("redirect", "page 2, revision 7, 'T')"),
        ("page of another namespace", "page 3, revision 7, 'T')"),
        ("page without running text", "page 4, revision 7, 'T')"),
        ("page of another content model", "page 5, revision 7, 'T')"),
        ("page whose text is deleted", "page 6, revision 7, 'T')"),
    ]
    assert [str(r).partition(" (")[2] for r in records if isinstance(r, BadRow)] == [
        "page 7, revision 7, 'T'): the dump leaves out the 9 bytes of this page; take one with texts",
        "page 8, revision 7, 'T'): a page lacks its <id>, <title> or <ns>, which dumps have since export format 0.6",
        "page ?, revision 7, 'N'): a page lacks its <id>, <title> or <ns>, which dumps have since export format 0.6",
        "page 9, revision 7, 'T'): the wikitext cannot be parsed: ParserError: This is a bug and should be reported. "
        "Info: unexpected end.",
        f"page {'9' * 5000}, revision 7, 'Long'): a page lacks its <id>, <title> or <ns>, which dumps have since "
        "export format 0.6",
    ]
    assert read(path, id_prefix="enwiki:")[0].passage.id == "enwiki:1"
    assert list(read_source(SourceConfig(path=str(path), passages=False))) == []


def test_of_several_revisions_the_last_one_counts(write: Write):
    older = "<revision><id>5</id><text>Before.</text></revision><revision>"
    path = write("d.xml", export(page("1", "Now.").replace("<revision>", older), page("2", "{{empty}}")))
    article, other = read(path)
    assert isinstance(article, PassageRecord) and isinstance(other, DroppedRow)
    assert article.passage.text == "Now."
    assert "revision 7" in article.where


def page_at(id_: str, text: str, revision: int) -> str:
    return page(id_, text).replace("<id>7</id>", f"<id>{revision}</id>")


@pytest.mark.parametrize("chunk_words", [0, 2])
def test_a_later_dump_changes_the_pages_that_have_another_revision(write: Write, tmp_path: Path, chunk_words: int):
    """A page of the same revision is not looked at, what the dump lacks stays, and redirects go."""
    cfg = PrepareConfig(fields={"page_id": "int", "revision_id": "int"}, num_shards=2, chunk_words=chunk_words)

    def corpus_of(name: str, *pages: str) -> Store:
        store, path = Store(tmp_path / name), write(f"{name}.xml", export(*pages))
        prepare(cfg.model_copy(update={"sources": [SourceConfig(path=str(path))]}), store)
        return store

    before = [page_at(str(number), f"The text of {number}.", 10 + number) for number in range(1, 5)]
    store = corpus_of("store", *before)
    redirect = page("3", "#REDIRECT [[T]]", more='<redirect title="T"/>')
    new_revision, new = page_at("2", "A much longer text of two.", 20), page_at("5", "The text of five.", 15)
    later = write("later.xml.bz2", bz2.compress(export(page_at("1", "x", 11), new_revision, redirect, new).encode()))
    report = update(cfg, store, str(later))
    expected = corpus_of("expected", before[0], new_revision, before[3], new)
    assert sorted(only_corpus(store)) == sorted(only_corpus(expected))
    assert {dict(passage.fields)["revision_id"] for passage in only_corpus(store)} == {11, 20, 14, 15}
    if not chunk_words:
        assert (report.added, report.replaced, report.deleted) == (1, 1, 1)
    assert update(cfg, store, str(later)).parts_written == 0


@pytest.mark.parametrize("num_files", [1, 2])
def test_a_later_dump_has_the_prefix_of_the_folder_of_dumps_that_the_corpus_was_made_from(
    write: Write, tmp_path: Path, num_files: int
):
    pages = [page_at("1", "The first.", 11), page_at("2", "The second.", 12)]
    files = [write(f"wiki/part{number}.xml", export(one)) for number, one in enumerate(pages[:num_files], 1)]
    source = SourceConfig(path=str(files[0].parent), id_prefix="wiki:")
    cfg = PrepareConfig(fields={"page_id": "int", "revision_id": "int"}, sources=[source])
    store = Store(tmp_path / "store")
    prepare(cfg, store)
    report = update(cfg, store, str(write("later.xml", export(page_at("1", "Changed.", 20), pages[1]))))
    assert (report.replaced, report.added) == (1, 2 - num_files)
    assert sorted(only_corpus(store).get(["wiki:1", "wiki:2"])) == ["wiki:1", "wiki:2"]


def test_a_dump_over_a_corpus_without_revisions_is_refused(write: Write, tmp_path: Path):
    store, path = Store(tmp_path / "store"), str(write("d.xml", export(page())))
    prepare(PrepareConfig(sources=[SourceConfig(path=path)]), store)
    with pytest.raises(DataError, match="no field revision_id"):
        update(PrepareConfig(), store, path)


@pytest.mark.slow
@pytest.mark.data
def test_the_second_half_of_a_real_dump_arrives_as_an_update(dump: Path, tmp_path: Path, write: Write):
    cfg = PrepareConfig(fields={"page_id": "int", "revision_id": "int"}, chunk_words=100)
    stores = []
    for name, count in (("half", 67), ("whole", 72)):
        stores.append(Store(tmp_path / name))
        path = write(f"{name}.xml", first_pages(dump, count))
        prepare(cfg.model_copy(update={"sources": [SourceConfig(path=str(path))]}), stores[-1])
    half, whole = stores
    num_before = only_corpus(half).num_passages
    report = update(cfg, half, str(path))
    assert (report.replaced, report.unchanged, report.deleted) == (0, 0, 0)
    assert report.added == only_corpus(whole).num_passages - num_before > 0
    assert sorted(only_corpus(half)) == sorted(only_corpus(whole))


def test_memory_does_not_grow_with_the_dump(write: Write):
    pages = [page(str(number), f"Text {number}. " * 200) for number in range(1000)]
    peaks = []
    for count in (100, 1000):
        path = write(f"{count}.xml", export(*pages[:count]))
        tracemalloc.start()
        assert sum(1 for _ in read_source(SourceConfig(path=str(path)))) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 1_000_000


def test_files_and_categories_in_the_language_of_the_wiki_are_removed(write: Write):
    names = '<namespaces><namespace key="6">Datei</namespace><namespace key="14">Kategorie</namespace></namespaces>'
    text = "[[Datei:x.jpg|mini|Ein [[Bild]]]]Ein Text[[kategorie:K]].[[File:y]] [[:Kategorie:K|Alle]] [[Dateiname]]"
    (article,) = read(write("d.xml", export(page(text=text), siteinfo=names)))
    assert isinstance(article, PassageRecord)
    assert article.passage.text == "Ein Text. Alle Dateiname"


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("''Animal Farm'''s plot", "Animal Farm's plot"),
        ("'''''both'' bold''' and ''it''.", "both bold and it."),
        ("x''''bold'''", "x'bold"),
        ("''open <ref>''x</ref> end", "open end"),
        ("a&nbsp;&lt;b &amp; c&shy;d &#7;", "a <b & cd &#7;"),
        ("می&zwnj;خواهم &rlm;a&#8203;b", "می\u200cخواهم \u200fa\u200bb"),
        ("== H ==\n=== S ===\nline\n== Empty ==\n{{reflist}}", "H\nS\nline"),
        ("* a\n** ''b''\n# [[c]]s\n; t : d\n* {{cite}}.", "a\nb\ncs\nt d"),
        ("[[a|b]] [[:Category:X]] [[File:x|thumb|[[y]]]] [http://x z] [http://x] http://w", "b Category:X z http://w"),
        ("a<!-- c --><br/>b<ref name=x/>c<ref>d</ref> <nowiki>[[x]]</nowiki> {{{p|q}}} <math>x</math>", "a\nbc [[x]]"),
        ("{| class=x\n|-\n| a || b\n|}\nafter\n<table><tr><td>z</td></tr></table>", "after"),
        ("__NOTOC__\n__FILE__ in C", "__FILE__ in C"),
        ("'''-{zh-hans:[[计算机]];zh-hant:電腦}-'''是-{机器}-。-{H|zh-cn:软;zh-tw:軟;}-", "计算机是机器。"),
        ("-{A|zh:内存; zh-tw:記}--{T|zh:题}--{R|a:b}- f(x) -{ y", "内存a:b f(x) -{ y"),
        ("<div>a</div>b<li>c<includeonly>d</includeonly><noinclude>e</noinclude>", "a\nb\nce"),
        ("{{open [[link]] text", "{{open link text"),
    ],
)
def test_wikitext_shows_as_a_reader_sees_it(wikitext: str, text: str):
    assert plain_text(wikitext) == text
