"""Summaries of reports: readable at 80 columns, with a verdict and the command that comes next."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mvr_ray.cli.inputs import ready_command
from mvr_ray.cli.summaries import Summary, summarize, versions_tables
from mvr_ray.config import RunConfig

REPAIRED = {"index": "wiki", "version": 4, "num_shards": 2, "repairs": []}
FOLLOWED = {"index": "wiki", "version": 4, "batches": 1, "files_applied": 2, "left_out": {"c.jsonl": "cut"}}
WORDS = ("run.yaml", "index.kind=flat", "prepare.corpus=two words")
SHARD = {"shard": 0, "digest": "ab", "num_passages": 3, "num_vectors": 20, "files": {"x": {"num_bytes": 2000}}}
MANIFEST = {
    "index": "wiki",
    "encoder_name": "encoder",
    "encoder_fingerprint": "afb6c4a3e008652b",
    "dimension": 384,
    "dtype": "fp16",
    "index_params": {"kind": "flat"},
    "shards": [SHARD, SHARD],
    "version": 4,
    "recall": None,
    "metrics": {"encoded": 6, "carried_over": 0, "view_pair_cosine": 0.82},
}
ACCURACY = {
    "group": "descriptions_of_all_articles_known",
    "protocol": "transductive",
    "kind": "gold",
    "num_questions": 135,
    "top_1_before": 0.8889,
    "top_1_after": 0.9704,
    "top_5_before": 0.9778,
    "top_5_after": 1.0,
}
REFINED = {
    "index": "wiki",
    "base_version": 4,
    "accuracy": [ACCURACY],
    "dirty_share": 0.45,
    "published": MANIFEST | {"version": 5},
    "reason": "1 of 1 rounds done",
    "method": "feedback_views",
}
METRICS = ("top-1", "top-5", "top-20", "top-100", "mrr", "ndcg@10")
ROWS = [
    {"system": "wiki", "questions": "dev", "metric": f"gold/{m}", "value": 0.5, "low": 0.4, "high": 0.6, "n": 20}
    for m in METRICS
]
HYBRID = "bm25 and dense, reciprocal ranks"
HYBRID_ROWS = [row | {"system": HYBRID, "value": 0.7, "low": 0.6, "high": 0.8} for row in ROWS]
EVALUATED = {"index": "wiki", "version": 4, "passages": 6, "rows": ROWS}
PREPARED = {
    "passages_read": 10_033,
    "passages_written": 300,
    "bad_rows": [{"where": "a.jsonl:3", "reason": "text is missing"}],
    "duplicates": 0,
    "questions": {"dev": 20, "train": 0},
    "chunks_gained": 0,
    "passages_not_drawn": 9733,
    "questions_not_drawn": 0,
    "dropped_by_reason": {"redirect": 2},
    "hard_negatives_dropped": 0,
    "fields": {"year": "int"},
}
COMPACTED = {"index": "wiki", "base_version": 4, "version": 5, "shards_written": 1, "bytes_before": 9, "bytes": 8}
RETRIEVED = {"output": "my dev.json", "format": "dpr", "questions": 20, "k": 100, "index": "wiki", "version": 4}

CURVE = [{"weight": weight, "top1": 0.5, "top5": 0.75, "top20": 1.0, "mrr": 0.625} for weight in (None, "rrf", 15.0)]
TUNED = {"index": "wiki", "version": 4, "questions": "train", "num_questions": 20, "setting": "search.hybrid=15"}
TUNED |= {"rows": CURVE}
ROLLED_BACK = {"index": "wiki", "version": 5, "to": 3, "content": "ab", "passages": 6, "files": 9, "bytes": 9}


def draw(summary: Summary) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=80)
    for table in summary.tables:
        console.print(table)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("stage", "report", "verdict", "following"),
    [
        ("prepare", PREPARED, "prepared: 300 passages", "index"),
        ("index", MANIFEST, "live: version 4 of index wiki, 6 passages", "search"),
        (
            "index",
            MANIFEST | {"metrics": {"encoded": 6, "encoded_cut": 2}},
            "live: version 4 of index wiki, 6 passages\n"
            "  2 passages encoded: longer than encoder.max_passage_tokens, and the end is not\n"
            "  searched; set prepare.chunk_words, or encoder.overlap_tokens, and build again",
            "search",
        ),
        (
            "index",
            MANIFEST | {"metrics": {"encoded": 6, "encoded_cut": 0, "encoded_unknown": 1}},
            "live: version 4 of index wiki, 6 passages\n"
            "  1 passage encoded: a quarter or more of the text is outside the vocabulary of\n"
            "  encoder.backbone; choose a model of its language, and build again",
            "search",
        ),
        (
            "refine",
            REFINED,
            "live: version 5 of index wiki, 45.0 % of passages changed (1 of 1 rounds done)",
            "evaluate",
        ),
        (
            "refine",
            REFINED | {"published": None, "reason": "costs 3 points"},
            "not published: costs 3 points; version 4 stays live",
            "analyze",
        ),
        (
            "evaluate",
            EVALUATED,
            "evaluated: version 4 of index wiki, 6 passages\n  dev: top-1 50.0 % (40.0 to 60.0)",
            "serve",
        ),
        (
            "evaluate",
            EVALUATED | {"rows": [row | {"value": 1.0, "low": None, "high": None} for row in ROWS]},
            "evaluated: version 4 of index wiki, 6 passages\n  dev: top-1 100.0 % (no interval, as articles agree)",
            "serve",
        ),
        (
            "evaluate",
            EVALUATED | {"rows": [*ROWS, *HYBRID_ROWS], "configured_system": HYBRID},
            f"evaluated: version 4 of index wiki, 6 passages\n  ranked by {HYBRID}\n  dev: top-1 70.0 % (60.0 to 80.0)",
            "serve",
        ),
        ("compact", COMPACTED, "live: version 5 of index wiki, 1 shard written whole, 9 B before, 8 B now", "versions"),
        (
            "retrieve",
            RETRIEVED,
            "retrieved: 20 questions, up to 100 passages each, from version 4 of index wiki\n  my dev.json (dpr)",
            "read",
        ),
        (
            "retrieve",
            RETRIEVED | {"k": 1},
            "retrieved: 20 questions, up to 1 passage each, from version 4 of index wiki\n  my dev.json (dpr)",
            "read",
        ),
        (
            "retrieve",
            RETRIEVED | {"system": HYBRID},
            "retrieved: 20 questions, up to 100 passages each, from version 4 of index wiki\n"
            f"  ranked by {HYBRID}\n  my dev.json (dpr)",
            "read",
        ),
        ("repair", REPAIRED, "nothing to repair: 2 shards, all whole, in version 4 of index wiki", "versions"),
        ("collect", {"versions": [4], "removed": ["a", "b"]}, "collected: 2 paths removed, 1 version kept", "versions"),
        ("follow", FOLLOWED, "live: version 4 of index wiki, 2 change files applied, 1 left out", "search"),
        ("rollback", ROLLED_BACK, "live: version 5 of index wiki, the content of version 3, 6 passages", "search"),
        ("tune", TUNED, "tuned: search.hybrid=15\n  20 questions of train, version 4 of index wiki", "evaluate"),
    ],
)
def test_a_stage_ends_with_a_verdict_and_the_next_command(
    stage: str, report: dict[str, Any], verdict: str, following: str
) -> None:
    summary = summarize(stage, report, WORDS)
    assert summary
    assert summary.verdict == verdict
    assert summary.next.split()[:2] == [following, "run.yaml"]
    if following not in ("versions",):
        assert "index.kind=flat 'prepare.corpus=two words'" in summary.next
    text = draw(summary)
    assert all(len(line) <= 80 for line in (*text.splitlines(), *summary.verdict.splitlines()))
    assert "afb6c4a3e008652b" not in text


@pytest.mark.parametrize(
    ("folder", "following"),
    [
        ("encoders", "index run.yaml train.task=reader train.reader=large read.batch=4"),
        ("readers", "read run.yaml read.batch=4 read.reader=large ranking=FILE"),
        ("cross_encoders", "mine run.yaml read.batch=4 mine.cross_encoder=large"),
    ],
)
def test_after_a_training_comes_the_command_that_uses_the_model(folder: str, following: str) -> None:
    words = ("run.yaml", "train.task=reader", "train.reader=large", "read.batch=4")
    report = {"name": "large", "fingerprint": "ab", "folder": f"{folder}/large/ab", "epochs": []}
    report |= {"questions": "train", "num_examples": 12_345}
    summary = summarize("train", report, words)
    assert summary.next == following
    assert summary.verdict == "trained: large/ab\n  from 12,345 questions of train"
    of_cloze = summarize("train", report | {"questions": None, "num_examples": 1}, words)
    assert of_cloze.verdict == "trained: large/ab\n  from sentences of 1 passage"
    of_best = summarize("train", report | {"saved_step": 400, "total_steps": 1200}, words)
    last_line = "  unfinished, weights of step 400 of 1,200; it continues without save=best"
    assert of_best.verdict == f"{summary.verdict}\n{last_line}" and len(last_line) < 80


@pytest.mark.parametrize("method", ["query", "rocchio", "hybrid"])
def test_a_refinement_of_queries_is_measured_with_them(method: str) -> None:
    assert summarize("refine", REFINED | {"method": method}, WORDS).next.endswith(" retrieve.refined_queries=true")
    assert "refined_queries" not in summarize("refine", REFINED, WORDS).next


@pytest.mark.parametrize(
    ("command", "settings", "suggestion"),
    [
        ("evaluate run.yaml index.kind=flat", {}, 'search run.yaml index.kind=flat "your question"'),
        ("evaluate run.yaml", {"evaluate": {"questions": ["dev"]}}, "evaluate run.yaml"),
        ("analyze run.yaml", {}, 'search run.yaml "your question"'),
        ("analyze run.yaml", {"analyze": {"questions": "dev"}}, "analyze run.yaml"),
        ("read run.yaml ranking=dev.json", {}, ""),
        ("read run.yaml ranking=dev.json", {"read": {"reader": "."}}, "read run.yaml ranking=dev.json"),
        ("read run.yaml read.reader=. ranking=a.json", {}, "read run.yaml read.reader=. ranking=a.json"),
        ("serve run.yaml", {}, "serve run.yaml"),
        ("", {}, ""),
    ],
)
def test_no_command_is_suggested_whose_questions_or_reader_are_missing(
    command: str, settings: dict[str, Any], suggestion: str, tmp_path: Path
) -> None:
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}, **settings})
    assert ready_command(command, run) == suggestion


def test_the_list_of_versions_that_comes_next_is_of_the_same_store() -> None:
    following = summarize("compact", COMPACTED, ("my run.yaml", "store.path=elsewhere")).next
    assert following == "versions 'my run.yaml' list store.path=elsewhere"


def test_a_summary_shows_what_counts_and_no_zero() -> None:
    text = draw(summarize("prepare", PREPARED, WORDS))
    for part in ("10,033", "9,733", "1, first: a.jsonl:3: text is missing", "2 (redirect)", "year (int)", "dev 20"):
        assert part in text
    assert "duplicates" not in text
    text = draw(summarize("evaluate", EVALUATED, WORDS))
    assert "dev: 20 questions, in percent, by gold" in text
    assert all(metric in text for metric in METRICS)
    assert "descriptions_of_all_articles_known"[:12] in draw(summarize("refine", REFINED, WORDS))


def test_a_summary_of_mining_says_what_questions_lack() -> None:
    counts = dict.fromkeys(("hits", "dropped_gold", "dropped_answer_bearing", "dropped_by_cross_encoder"), 0)
    report = {**counts, "questions": 9, "negatives": 8, "output": "mined", "short": 3, "without": 2}
    report |= {"hits": 20, "dropped_gold": 5, "beyond_count": 7}
    lines = draw(summarize("mine", report, WORDS)).splitlines()
    assert [" ".join(line.split()) for line in lines if line.strip()] == [
        "hits 20",
        "dropped as gold 5",
        "hits beyond mine.num_negatives 7",
        "questions with fewer negatives than mine.num_negatives 3",
        "questions without any negative 2",
    ]


def test_accuracy_by_answer_and_by_gold_passage_are_distinguished() -> None:
    by_answer = ACCURACY | {"kind": "answer", "top_1_before": 0.9}
    summary = summarize("refine", REFINED | {"accuracy": [by_answer, ACCURACY]}, WORDS)
    answer, gold = draw(summary).split("accuracy by gold, in percent")
    assert "accuracy by answer, in percent" in answer
    assert "90.0 to 97.0" in answer and "88.9 to 97.0" in gold


def test_a_list_of_versions_fits_and_verbose_has_every_column() -> None:
    line = {"version": 2, "parent": 1, "operation": "refine:feedback_views", "created": "2026-01-31T12:00:00+00:00"}
    line |= {"passages": 21_015_324, "vectors": 9, "shards": 4, "encoder": "e/ab", "content": "cd", "live": True}
    text = draw(Summary(versions_tables("wiki", "list", [line], verbose=False), "", ""))
    assert max(map(len, text.splitlines())) <= 80
    assert "created (UTC)" in text
    assert "refine:feedback_views   2026-01-31 12:00   21,015,324   live" in text
    [table] = versions_tables("wiki", "list", [line], verbose=True)
    assert [column.header.plain for column in table.columns] == list(line)
