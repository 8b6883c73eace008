"""Indexes of vectors that another program made: answers of brute force over them, changes, versions and errors."""

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damaged_file import flip_byte

from mvr_ray import Index
from mvr_ray.cli import main
from mvr_ray.distributed.indexing import rewrite
from mvr_ray.errors import ConfigError, DataError, ExternalEncoderError, MissingInputError, PublishConflictError
from mvr_ray.serving.schemas import to_request_error
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.files import Store
from mvr_ray.store.formats.view_vectors import read_vectors, write_vectors
from mvr_ray.types import EmbeddingBlock, FloatArray

D = 16
RNG = np.random.default_rng(5)
SETTINGS = {"index": {"lexical": True}, "prepare": {"num_shards": 3}}


def unit(*shape: int) -> FloatArray:
    values = RNG.normal(size=shape)
    return (values / np.linalg.norm(values, axis=-1, keepdims=True)).astype(np.float32)


PASSAGES = [{"id": f"p{row}", "text": f"Text {row} about topic {row % 4}.", "year": 1950 + row} for row in range(30)]
VECTORS = {f"p{row}": unit(row % 3 + 1, D) for row in range(30)}
QUERIES_QD = unit(4, D)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("external") / "own"
    Index.build(PASSAGES, vectors=VECTORS, path=path, settings=SETTINGS)
    return path


@pytest.fixture
def index(store: Path, tmp_path: Path) -> Iterator[Index]:
    with Index.open(shutil.copytree(store, tmp_path / "own")) as index:
        yield index


def test_blocks_of_vectors_are_small_and_read_only_also_with_changes_between_their_passages(tmp_path: Path) -> None:
    ids = [f"p{row:05}" for row in range(4200)]
    texts, vectors = {name: f"Text {name}." for name in ids}, dict(zip(ids, unit(len(ids), 2)))
    settings = {"prepare": {"num_shards": 1}}
    with Index.build(texts.items(), vectors=vectors, path=tmp_path / "own", settings=settings) as index:
        new = dict(zip((f"{name}-new" for name in ids[:300]), unit(300, 2)))
        index.upsert([(name, f"Text {name}.") for name in new], vectors=new)
        blocks = list(index.vectors())
    assert [name for block in blocks for name in block.ids] == sorted(vectors | new)
    assert all(len(block.ids) <= 4096 and not block.vectors_ND.flags.writeable for block in blocks)
    expected_ND = np.stack([own for _, own in sorted((vectors | new).items())]).astype(np.float16)
    assert np.array_equal(np.concatenate([block.vectors_ND for block in blocks]), expected_ND)


def brute_force(vectors: Mapping[str, FloatArray], query_D: FloatArray, k: int) -> list[str]:
    scores = {name: (np.float32(np.float16(own_VD)) @ query_D).max() for name, own_VD in vectors.items()}
    return sorted(scores, key=lambda name: (-scores[name], name))[:k]


def assert_exact(index: Index, vectors: Mapping[str, FloatArray]) -> None:
    for hits, query_D in zip(index.search(QUERIES_QD, k=7), QUERIES_QD):
        assert hits.exact.certified
        assert [hit.id for hit in hits] == brute_force(vectors, query_D, 7)


def write(path: Path, vectors: Mapping[str, FloatArray]) -> Path:
    rows = [(name, view, own_D.tolist()) for name, own_VD in vectors.items() for view, own_D in enumerate(own_VD)]
    RNG.shuffle(rows)
    ids, views, lists = zip(*rows)
    pq.write_table(pa.table({"passage_id": ids, "view": views, "vector": lists}), path)
    return path


def test_hits_are_those_of_brute_force_over_the_external_vectors_also_under_a_filter(index: Index):
    assert_exact(index, VECTORS)
    late = {name: own for name, own in VECTORS.items() if int(name[1:]) >= 20}
    for hits, query_D in zip(index.search(QUERIES_QD, k=7, filter={"year": {"gte": 1970}}), QUERIES_QD):
        assert [hit.id for hit in hits] == brute_force(late, query_D, 7)
        assert hits[0].text and hits[0].snippet is None


def test_a_file_in_any_order_and_pairs_give_the_same_shards(index: Index, tmp_path: Path):
    file = write(tmp_path / "all.parquet", VECTORS)
    other = Index.build(PASSAGES, vectors=file, path=tmp_path / "other", settings=SETTINGS)
    assert other.manifest.content_digest() == index.manifest.content_digest()
    assert other.manifest.shards == index.manifest.shards


def test_vectors_belong_to_ids_of_every_type_that_passages_may_have(tmp_path: Path):
    ids = [UUID(int=7), 8, np.int64(9), "p"]
    index = Index.build([(one, f"Text {one}.") for one in ids], vectors=[(one, unit(D)) for one in ids], path=tmp_path)
    assert {hit.id for hit in index.search(unit(1, D), k=9)[0]} == {str(one) for one in ids}


def test_vectors_that_go_out_come_in_to_the_last_bit(index: Index, tmp_path: Path):
    store, file = tmp_path / "own", tmp_path / "out.parquet"
    with pytest.raises(SystemExit) as end:
        main(["vectors", f"{store}/run.yaml", f"store.path={store}", f"output={file}"])
    assert not end.value.code
    other = Index.build(PASSAGES, vectors=file, path=tmp_path / "other", settings=SETTINGS)
    assert other.manifest.shards == index.manifest.shards


def test_a_file_of_an_index_is_read_without_the_views_of_feedback(tmp_path: Path):
    block = EmbeddingBlock(["a", "b"], np.array([0, 3, 4]), np.array([0, 1, 4, 1], np.int16), unit(4, 3))
    write_vectors(tmp_path / "all.parquet", [block], dimension=3, num_views=4, total=4)
    own = read_vectors(tmp_path / "all.parquet", "fp32")
    assert (own.ids, own.row_ptr.tolist(), own.view_numbers_N.tolist()) == (["a", "b"], [0, 2, 3], [0, 1, 1])
    assert np.array_equal(own.vectors_ND, block.vectors_ND[[0, 1, 3]])


def test_changes_give_the_answers_and_the_vectors_of_what_they_name_and_keep_the_others(index: Index):
    vectors = {**VECTORS, "p3": unit(2, D), "p99": unit(1, D), "p6": unit(3, D)}
    own = [(name, vectors[name]) for name in ("p3", "p99")]
    index.upsert([("p3", "A new text."), ("p99", PASSAGES[1]["text"])], vectors=own)  # a text of another passage
    index.upsert([], vectors={"p6": vectors["p6"], "p7": vectors["p7"]})  # the texts stay, and of one the vectors
    assert index.manifest.metrics["encoded"] == 1
    index.delete("p4")
    del vectors["p4"]
    index.upsert([{**PASSAGES[5], "year": 1999}])  # a field alone needs no vectors
    assert_exact(index, vectors)
    version = index.manifest.version
    assert index.upsert([], vectors=vectors).version == version  # nothing differs
    index.rollback(1)
    assert_exact(index, VECTORS)


@pytest.mark.parametrize("is_resharded", [False, True])
def test_vectors_that_were_rolled_back_do_not_come_back_with_a_change(tmp_path: Path, is_resharded: bool):
    """The version that was rolled back has the shard of the changed passages, or the only one over a part."""
    settings = {"prepare": {"num_shards": 1}}
    with Index.build(PASSAGES, vectors=VECTORS, path=tmp_path / "own", settings=settings) as index:
        if is_resharded:
            rewrite.reshard(index.run, 2)
        before = index.versions()[-1].version
        new = {"id": "new", "text": "A new text."}
        index.upsert([new], vectors={"new": QUERIES_QD[0], "p0": unit(D)})
        index.rollback(before)
        index.upsert([new], vectors={"new": QUERIES_QD[0]})
        assert_exact(index, {**VECTORS, "new": QUERIES_QD[:1]})
        [hits] = index.search(VECTORS["p0"][:1], k=1)
        assert hits[0].score == pytest.approx(1, abs=1e-3)


def test_an_index_whose_file_alone_is_damaged_is_built_of_its_vectors(tmp_path: Path):
    settings = {"index": {"kind": "hnsw"}, "prepare": {"num_shards": 1}}
    with Index.build(PASSAGES, vectors=VECTORS, path=tmp_path / "own", settings=settings) as index:
        [entry] = index.manifest.shards
    [name] = {*entry.files} - {paths.EMBEDDINGS}
    flip_byte(tmp_path / "own" / paths.shard_dir("index", entry.digest) / name)
    with pytest.raises(SystemExit) as end:
        main(["index", f"{tmp_path}/own/run.yaml", f"store.path={tmp_path}/own"])
    assert not end.value.code
    store = Store(str(tmp_path / "own"))
    manifest.verify(store, manifest.read(store, "index")).require()


def test_vectors_of_an_index_over_other_shards_are_replaced_by_the_given_ones(index: Index, tmp_path: Path):
    settings = {"index": {"lexical": True, "name": "second"}, "prepare": {"num_shards": 2}}
    vectors = {**VECTORS, "p2": unit(2, D)}
    with Index.build(PASSAGES, vectors=vectors, path=tmp_path / "own", settings=settings) as second:
        assert_exact(second, vectors)


def test_the_command_line_indexes_a_file_then_the_vectors_of_an_update(tmp_path: Path, capsys):
    run, changes = tmp_path / "run.yaml", tmp_path / "new.jsonl"
    (tmp_path / "passages.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in PASSAGES))
    run.write_text(
        f"store: {{path: {tmp_path}/store}}\nprepare: {{sources: [{{path: {tmp_path}/passages.jsonl}}]}}\n"
        "encoder: {name: theirs, num_views: 3}\n"
    )
    changes.write_text('{"id": "p1", "text": "Another text."}\n')
    deletion, source = tmp_path / "deletion.jsonl", tmp_path / "source"
    deletion.write_text('{"id": "p4", "delete": true}\n')
    source.mkdir()
    (source / "1.jsonl").write_text('{"id": "p5", "delete": true}\n')
    vectors = {**VECTORS, "p1": unit(2, D)}
    for words in (
        ["prepare"],
        ["index", f"index.vectors={write(tmp_path / 'all.parquet', VECTORS)}"],
        ["update", f"changes={changes}"],
        ["index", f"index.vectors={write(tmp_path / 'new.parquet', {'p1': vectors['p1']})}"],
        ["versions", "verify"],
        ["update", f"changes={deletion}"],
        ["index", "encoder.name=not-theirs"],  # as where the first command alone names it
        ["follow", f"follow.source={source}", "follow.poll_s=0.1", "encoder.name=not-theirs", "--once"],
    ):
        with pytest.raises(SystemExit) as end:
            main([words[0], str(run), *words[1:]])
        output = capsys.readouterr()
        assert not end.value.code, output.err
        if words[0] in ("index", "follow"):  # no text can be searched
            settings = [word for word in words[1:] if word != "--once"]
            assert output.err.splitlines()[-1] == f"next: mvr-ray {shlex.join(['serve', str(run), *settings])}"
    del vectors["p4"], vectors["p5"]
    with Index.open(tmp_path / "store") as index:
        assert index.manifest.num_views == 3
        assert_exact(index, vectors)


def test_words_alone_rank_a_text_and_whatever_embeds_it_says_what_to_do(index: Index):
    best = index.search("topic text 17", k=1, hybrid=0)
    assert best[0].id == "p17"
    questions = [(f"topic {row}", "topic") for row in range(9)]
    for call in (
        lambda: index.search("topic"),
        lambda: index.search("topic", hybrid=20),
        lambda: index.explain("topic"),
        lambda: index.evaluate(questions),
        lambda: index.refine(questions),
        lambda: index.encoder,
    ):
        with pytest.raises(ExternalEncoderError, match="search with its vector") as error:
            call()
    assert to_request_error(error.value).status == 422


def test_a_file_of_other_columns_is_refused(index: Index, tmp_path: Path):
    file = tmp_path / "other.parquet"
    for columns, problem in (
        ({"id": ["p1"], "vector": [[1.0]]}, "no Parquet file with columns passage_id"),
        ({"passage_id": ["p1"], "view": ["0"], "vector": [[1.0]]}, "view and vector are string"),
        ({"passage_id": ["p1"], "view": [0], "vector": [[1]]}, "vector are int64 and list"),
        ({"passage_id": ["p1", "p2"], "view": [0, 0], "vector": [[1.0], [0.0, 1.0]]}, "vectors of 1, 2 numbers"),
        (
            {"passage_id": ["p1", None], "view": [0, 0], "vector": [[1.0], [1.0]]},
            "1 numbers, and 1 null; give each row",
        ),
        (
            {"passage_id": pa.array([b"\xff"]).view(pa.string()), "view": [0], "vector": [[1.0]]},
            "no Parquet file with columns .*Invalid UTF8",
        ),
        (
            {"passage_id": ["p1", "p2"], "view": [0, 0], "vector": pa.array([[1.0], None], pa.list_(pa.float32(), 1))},
            "1 numbers, and 1 null; give each row an id, a view and equally many",
        ),
        ({"passage_id": ["p1"], "view": [0], "vector": [[1.0, None]]}, "'p1' has a number that is missing"),
        ({"passage_id": ["p1"], "view": [-1], "vector": [[1.0] + [0.0] * (D - 1)]}, "a view outside 0..7"),
    ):
        pq.write_table(pa.table(columns), file)
        with pytest.raises(DataError, match=problem):
            index.upsert([], vectors=file)
    with pytest.raises(MissingInputError, match=r"nothing\.parquet does not exist"):
        index.upsert([], vectors=tmp_path / "nothing.parquet")


@pytest.mark.parametrize(
    ("vectors", "problem"),
    [
        (None, "vectors= lacks those of p3"),
        ({"p4": unit(D)}, "vectors= lacks those of p3"),
        ({"p3": unit(D), "p77": unit(D)}, "has no passage p77"),
        ({"p3": unit(D + 1)}, "vectors of 17 numbers, the index has 16"),
        ({"p3": unit(9, D)}, "a view outside 0..7"),
        ({"p3": np.full(D, np.nan)}, "'p3' has a number that is missing, or not finite"),
        ({"p3": np.full(D, 7e4)}, "not finite in fp16"),
        ({"p3": 2 * unit(D)}, "of another length than 1; scale"),
        ([("p3", unit(D)), ("p3", unit(D))], "'p3' has a view twice"),
        ([("p3", unit(D)), ("p4", unit(3))], "pair 1 is .* give an id and a vector of 16 numbers"),
        ([("p3", [[0.1], [0.1, 0.2]])], "pair 0 is"),
        ([3], "pair 0 is 3"),
        ([], "there are none"),
    ],
)
def test_wrong_vectors_are_refused_before_anything_changes(index: Index, vectors, problem: str):
    corpus = index.manifest.corpus_digest
    with pytest.raises(DataError, match=problem):
        index.upsert([("p3", "A new text.")], vectors=vectors)
    assert (index.manifest.version, index.manifest.corpus_digest) == (1, corpus)


def test_a_build_names_the_passages_without_vectors_and_publishes_nothing(tmp_path: Path):
    vectors = {name: own for name, own in VECTORS.items() if name != "p8"}
    with pytest.raises(DataError, match=r"1 passage without vectors .*: p8"):
        Index.build(PASSAGES, vectors=vectors, path=tmp_path)
    with pytest.raises(MissingInputError):
        Index.open(tmp_path)


def test_stored_vectors_of_another_type_are_refused_with_that_type(index: Index):
    own = Index.open(index.run.store.path, settings={"index": {"dtype": "fp32"}})
    with pytest.raises(DataError, match=rf"{len(PASSAGES)} passages without vectors .* in fp32 \(index.dtype\)"):
        own.reindex()
    assert index.reindex().version == 1


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({}, "1 passage without vectors .*: p98"),
        ({"p98": 2 * unit(D)}, "of another length than 1"),
        ({"p98": unit(D), "p77": unit(D)}, "has no passage p77"),
    ],
)
def test_a_build_that_vectors_do_not_fit_leaves_the_index_as_it_was(index: Index, tmp_path: Path, more, problem: str):
    index.add_questions([("topic 1", "topic")], "dev")
    before = Corpus.open(index._store, "corpus")
    passages = [*PASSAGES, {"id": "p98", "text": "One more."}]
    with pytest.raises(DataError, match=problem):
        Index.build(passages, vectors={**VECTORS, **more}, path=tmp_path / "own", settings=SETTINGS)
    assert Corpus.open(index._store, "corpus").info == before.info
    vectors = {**VECTORS, "p99": unit(D)}
    index.upsert([("p99", "A new text.")], vectors={"p99": vectors["p99"]})
    assert_exact(index, vectors)


def test_pruned_views_of_another_program_are_refused_before_anything_changes(index: Index, tmp_path: Path):
    settings = {"index": {**SETTINGS["index"], "prune_views": 0.1}}
    with pytest.raises(ConfigError, match="prune_views drops vectors of another program"):
        Index.build(PASSAGES, vectors=VECTORS, path=tmp_path / "own", settings=settings)
    with (
        pytest.raises(ConfigError, match="prune_views drops"),
        Index.open(tmp_path / "own", settings=settings) as other,
    ):
        other.delete("p4")
    index.delete("p4")


def test_vectors_of_chunks_have_the_ids_of_chunks_also_in_an_upsert(tmp_path: Path):
    settings, ids = {"prepare": {"chunk_words": 3}}, ["p0#0", "p0#1", "p1#0", "p1#1"]
    vectors = {name: unit(1, D) for name in ids}
    with Index.build(PASSAGES[:2], vectors=vectors, path=tmp_path, settings=settings) as index:
        corpus = index.manifest.corpus_digest
        new = [("p9", "Four words of text."), PASSAGES[0]]
        for wrong, problem in (({"p9": unit(D)}, "has no passage p9;"), ({"p9#0": unit(D)}, "lacks those of p9#1")):
            with pytest.raises(DataError, match=problem):
                index.upsert(new, vectors=wrong)
        assert Corpus.open(index._store, "corpus").digest == corpus
        vectors |= {"p9#0": unit(1, D), "p9#1": unit(1, D)}
        index.upsert(new[:1], vectors={name: vectors[name] for name in ("p9#0", "p9#1")})
        index.upsert([{"id": "p0", "text": PASSAGES[0]["text"], "year": 1999}])
        assert_exact(index, vectors)


def test_a_change_that_was_cut_short_waits_for_its_vectors_before_others(index: Index, monkeypatch, tmp_path):
    def cut_short(*_args: object, **_settings: object) -> None:
        raise KeyboardInterrupt

    vectors, new = {**VECTORS, "p91": unit(1, D), "p92": unit(1, D)}, [("p92", "Another new text.")]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("mvr_ray.distributed.indexing.build_index.index", cut_short)
        index.upsert([("p91", "A new text.")], vectors={"p91": vectors["p91"]})
    corpus = Corpus.open(index._store, "corpus").digest
    with Index.open(tmp_path / "own") as other:
        for call in (lambda: other.upsert(new, vectors={"p92": vectors["p92"]}), lambda: other.delete("p3")):
            with pytest.raises(PublishConflictError, match=r"1 passage .* without vectors: p91; nothing was changed"):
                call()
        assert Corpus.open(index._store, "corpus").digest == corpus
        other.upsert([], vectors={"p91": vectors["p91"]})
        other.upsert(new, vectors={"p92": vectors["p92"]})
        assert_exact(other, vectors)


def test_a_change_opens_no_shards_but_its_own(index: Index, monkeypatch):
    shards: set[int] = set()
    open_shard = manifest.open_shard

    def spy(store: Store, name: str, entry: manifest.ShardEntry) -> Path:
        shards.add(entry.shard)
        return open_shard(store, name, entry)

    monkeypatch.setattr(manifest, "open_shard", spy)
    index.delete("p4")
    assert shards == {shard_of("p4", 3)}


def test_vectors_of_any_length_score_by_their_inner_product(tmp_path: Path):
    vectors = {name: 5 * own for name, own in VECTORS.items()}
    settings = {"encoder": {"normalize": False}}
    with Index.build(PASSAGES, vectors=vectors, path=tmp_path, settings=settings) as index:
        assert index.manifest.similarity == "inner_product"
        assert_exact(index, vectors)


def test_an_index_that_embeds_texts_refuses_vectors(tiny_backbone: Path, tmp_path: Path):
    index = Index.build(PASSAGES[:3], model=tiny_backbone, path=tmp_path, settings={"index": {"precision": "fp32"}})
    with pytest.raises(ConfigError, match="embeds the passages itself; leave the vectors out"):
        index.upsert([("p1", "A new text.")], vectors={"p1": unit(D)})
    assert index.manifest.version == 1
