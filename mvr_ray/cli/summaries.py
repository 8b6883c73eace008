"""Summarize the report of a stage: the main figures, a verdict, and the next command.

Everything fits a terminal of 80 columns. `--verbose` prints what a summary leaves out, such as digests and settings,
and report.json has it.
"""

import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from mvr_ray.cli.tables import cell, report_tables, size, table, version_text
from mvr_ray.core.refining.refine_policy import MOVES_QUERIES
from mvr_ray.distributed.text_table import interval_text
from mvr_ray.errors import UNREAD, count_noun

Report = Mapping[str, Any]
NUM_NAMED = 3
WIDTH = 80
COLLAPSE = "; its views are all alike (collapsed): see docs/math.md"


class Summary(NamedTuple):
    """`verdict` is the outcome of the stage in a line or two; `next` is a command without `mvr-ray`, or empty."""

    tables: list[Table]
    verdict: str
    next: str


def summarize(stage: str, report: Report, words: Sequence[str]) -> Summary | None:
    """Summarize a plain report; None for a stage without a summary.

    `words` are CONFIG and the overrides of the command, which the next command shares.
    """
    summary = _SUMMARIES.get(stage)
    return summary(report, shlex.join(words)) if summary else None


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _facts(rows: Mapping[str, Any], title: str = "") -> list[Table]:
    """Return a table of labels and values without those that are zero or empty; no table if none is left."""
    lines = [(label, cell(value)) for label, value in rows.items() if value not in (None, 0, "", [], {})]
    return [table(title, ("", ""), lines)] if lines else []


def _prepare(report: Report, words: str) -> Summary:
    drop_counts = report["dropped_by_reason"]
    bad = report["bad_rows"]
    facts = {
        "passages read": report["passages_read"],
        "chunks gained": report["chunks_gained"],
        "passages not drawn": report["passages_not_drawn"],
        "duplicates": report["duplicates"],
        "bad rows": f"{len(bad):,}, first: {bad[0]['where']}: {bad[0]['reason']}" if bad else 0,
        "rows left out": ", ".join(f"{number:,} ({reason})" for reason, number in drop_counts.items()),
        "questions not drawn": report["questions_not_drawn"],
        "hard negatives dropped": report["hard_negatives_dropped"],
        "fields": ", ".join(f"{name} ({kind})" for name, kind in report["fields"].items()),
        "question sets": "\n".join(f"{name} {cell(number)}" for name, number in report["questions"].items()),
    }
    num = report["passages_written"]
    return Summary(_facts(facts), f"prepared: {count_noun(num, 'passage')}", f"index {words}" if num else "")


def _train(report: Report, words: str) -> Summary:
    epochs = report["epochs"]
    names = [name for name in ("epoch", "step", "loss", "lv", "dev_top1", "collapsed") if epochs and name in epochs[0]]
    rows = [[epoch[name] for name in names] for epoch in epochs]
    tables = [table("epochs", [name.replace("_", " ") for name in names], rows)] if rows else []
    collapse = COLLAPSE * bool(epochs and epochs[-1].get("collapsed"))
    own, number = report["questions"], report["num_examples"]
    source = f"{count_noun(number, 'question')} of {own}" if own else f"sentences of {count_noun(number, 'passage')}"
    verdict = f"trained: {report['name']}/{report['fingerprint']}\n  from {source}{collapse}"
    if report.get("total_steps"):
        at = f"step {report['saved_step']:,} of {report['total_steps']:,}"
        verdict += f"\n  unfinished, weights of {at}; it continues without save=best"
    kind = str(report["folder"]).partition("/")[0]
    other_words = shlex.join(word for word in shlex.split(words) if not word.startswith("train."))
    next_commands = {
        "readers": f"read {other_words} read.reader={report['name']} ranking=FILE",
        "cross_encoders": f"mine {other_words} mine.cross_encoder={report['name']}",
    }
    return Summary(tables, verdict, next_commands.get(kind, f"index {words}"))


def _mine(report: Report, words: str) -> Summary:
    facts = {
        "hits": report["hits"],
        "dropped as gold": report["dropped_gold"],
        "dropped as answers": report["dropped_answer_bearing"],
        "dropped by the cross-encoder": report["dropped_by_cross_encoder"],
        "hits beyond mine.num_negatives": report["beyond_count"],
        "questions with fewer negatives than mine.num_negatives": report["short"],
        "questions without any negative": report["without"],
    }
    negatives = f"{count_noun(report['negatives'], 'hard negative')} for {count_noun(report['questions'], 'question')}"
    verdict = f"mined: {negatives}, as question set {report['output']}"
    return Summary(_facts(facts), verdict, f"train {words} train.hard_negatives={report['output']}")


def _index_facts(report: Report) -> dict[str, Any]:
    shards, metrics = report["shards"], report["metrics"]
    vectors = sum(shard["num_vectors"] for shard in shards)
    num_bytes = sum(file["num_bytes"] for shard in shards for file in shard["files"].values())
    return {
        "encoder": report["encoder_name"],
        "kind": report["index_params"].get("kind"),
        "shards": len(shards),
        "vectors": f"{vectors:,} of {report['dimension']} ({report['dtype']}), {size(num_bytes)}",
        "passages encoded": metrics.get("encoded"),
        "of these cut at encoder.max_passage_tokens": metrics.get("encoded_cut"),
        "of these outside the vocabulary of encoder.backbone": metrics.get("encoded_unknown") or None,
        "passages kept": metrics.get("carried_over"),
        "passages deleted": metrics.get("deleted"),
        "recall": report["recall"],
        "view pair cosine": metrics.get("view_pair_cosine"),
    }


def _index(report: Report, words: str) -> Summary:
    passages = sum(shard["num_passages"] for shard in report["shards"])
    collapse = COLLAPSE * bool(report["metrics"].get("collapsed"))
    verdict = f"live: {version_text(report)}, {count_noun(passages, 'passage')}{collapse}"
    for name, problem in UNREAD.items():
        if num_passages := report["metrics"].get(name):
            note = f"{count_noun(num_passages, 'passage')} encoded: {problem}"
            verdict += "\n" + textwrap.fill(note, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return Summary(_facts(_index_facts(report)), verdict, f'search {words} "your question"')


def _refine(report: Report, words: str) -> Summary:
    rows: dict[str, list[tuple[Any, ...]]] = {}
    for row in report["accuracy"]:
        top = [f"{percent(row[f'{k}_before'])} to {percent(row[f'{k}_after'])}" for k in ("top_1", "top_5")]
        rows.setdefault(row["kind"], []).append((row["group"], row["protocol"], row["num_questions"], *top))
    columns = ("group", "protocol", "questions", "top-1", "top-5")
    accuracy = [table(f"accuracy by {kind}, in percent", columns, own) for kind, own in rows.items()]
    manifest = report["published"]
    if manifest is None:
        verdict = f"not published: {report['reason']}; version {report['base_version']} stays live"
        return Summary(accuracy, verdict, f"analyze {words}")
    changes = f"{percent(report['dirty_share'])} % of passages changed ({report['reason']})"
    override = " retrieve.refined_queries=true" * (report["method"] in MOVES_QUERIES)
    return Summary(accuracy, f"live: {version_text(manifest)}, {changes}", f"evaluate {words}{override}")


def _ranked_by(report: Report, system: str | None) -> str:
    """Return a line that names a ranking other than that of the index."""
    return f"\n  ranked by {system}" if system and system != report["index"] else ""


def _accuracy_tables(rows: Sequence[Report], system: str) -> list[Table]:
    """Return a table a question set and kind of metric: systems down, metrics across, in percent."""
    groups: dict[tuple[str, str], list[Report]] = {}
    for row in rows:
        groups.setdefault((row["questions"], row["metric"].partition("/")[0]), []).append(row)
    return [
        _pivot(
            f"{questions}: {count_noun(own[0]['n'], 'question')}, in percent, by {kind}",
            system,
            {(row["system"], row["metric"].partition("/")[2]): row["value"] for row in own},
        )
        for (questions, kind), own in groups.items()
    ]


def _pivot(title: str, corner: str, shares: Mapping[tuple[Any, str], float]) -> Table:
    """Make a table of shares, in percent, by row and column."""
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*shares))
    lines = [[row, *(percent(shares.get((row, column))) for column in columns)] for row in rows]
    return table(title, [corner, *columns], lines)


def _evaluate(report: Report, words: str) -> Summary:
    rows = report["rows"]
    verdict = f"evaluated: {version_text(report)}, {count_noun(report['passages'], 'passage')}"
    system = report.get("configured_system") or report["index"]
    verdict += _ranked_by(report, report.get("ranking") or system)
    firsts = {row["questions"]: row for row in reversed(rows) if row["system"] == system}
    main_rows = list(reversed(firsts.values()))[:NUM_NAMED]
    for row in main_rows:
        interval = interval_text(row["low"], row["high"], 100)
        verdict += f"\n  {row['questions']}: {row['metric'].partition('/')[2]} {percent(row['value'])} % ({interval})"
    return Summary(_accuracy_tables(rows, "system"), verdict, f"serve {words}")


def _analyze(report: Report, words: str) -> Summary:
    facts = {
        "best view of the own passage, %": ", ".join(map(percent, report["win_shares"])),
        "PPL": report["ppl"],
        "LV": report["lv"],
        "view pair cosine": report["view_pair_cosine"],
        "attention KL": report["attention_kl"],
    }
    ppl = report["ppl"]
    verdict = f"analyzed: {version_text(report)}, {count_noun(report['num_questions'], 'question')}"
    if ppl is not None:
        verdict += (
            f"\n  of {count_noun(len(report['win_shares']), 'view')}, {ppl:.2f} answer the questions of a passage (PPL)"
        )
    tables = [*_facts(facts), *_accuracy_tables(report["rows"], "view")]
    return Summary(tables, verdict, f'explain {words} "your question"')


def _retrieve(report: Report, words: str) -> Summary:
    questions = count_noun(report["questions"], "question")
    verdict = f"retrieved: {questions}, up to {count_noun(report['k'], 'passage')} each, from {version_text(report)}"
    verdict += f"{_ranked_by(report, report.get('system'))}\n  {report['output']} ({report['format']})"
    command = f"read {words} ranking={shlex.quote(report['output'])}" if report["format"] in ("dpr", "jsonl") else ""
    return Summary([], verdict, command)


def _tune(report: Report, words: str) -> Summary:
    metrics = ("top1", "top5", "top20", "mrr")
    rows = [
        ("dense" if row["weight"] is None else cell(row["weight"]), *(percent(row[name]) for name in metrics))
        for row in report["rows"]
    ]
    curve = table("in percent, by gold", ("weight", "top-1", "top-5", "top-20", "mrr"), rows)
    questions = f"{count_noun(report['num_questions'], 'question')} of {report['questions']}"
    verdict = f"tuned: {report['setting']}\n  {questions}, {version_text(report)}"
    return Summary([curve], verdict, f"evaluate {words} {report['setting']}")


def _read(report: Report, words: str) -> Summary:
    shares = {(row["passages"], row["metric"].replace("_", " ")): row["value"] for row in report["rows"]}
    tables = [_pivot("answers, in percent", "passages", shares)] if shares else []
    verdict = f"read: {count_noun(report['questions'], 'question')} by {report['reader']}"
    if report["unread"]:
        verdict += f", {report['unread']:,} of them without any text"
    if report["output"]:
        verdict += f"\n  {report['output']}"
    return Summary(tables, verdict, "")


def _update(report: Report, words: str) -> Summary:
    names = ("added", "replaced", "deleted", "unchanged", "absent", "questions_dropped")
    facts = {name.replace("_", " "): report[name] for name in names}
    num_changes = report["added"] + report["replaced"] + report["deleted"]
    verdict = (
        f"updated: {count_noun(report['passages'], 'passage')} in corpus {report['corpus']}, {num_changes:,} changed"
    )
    return Summary(_facts(facts), verdict, f"index {words}")


def _compact(report: Report, words: str) -> Summary:
    what = (
        f"{count_noun(report['shards_written'], 'shard')} written whole, {size(report['bytes_before'])} before, "
        f"{size(report['bytes'])} now"
    )
    return _rewrite_summary(report, words, what, "no changes beside its shards")


def _reshard(report: Report, words: str) -> Summary:
    shards = count_noun(report["shards"], "shard")
    what = f"{count_noun(report['passages'], 'passage')} in {shards} ({report['shards_before']:,} before)"
    return _rewrite_summary(report, words, what, shards)


def _rewrite_summary(report: Report, words: str, what: str, reason: str) -> Summary:
    if report["version"] == report["base_version"]:
        return Summary([], f"nothing to do: version {report['version']} has {reason}", "")
    return Summary([], f"live: {version_text(report)}, {what}", _versions_command("list", words))


def _rollback(report: Report, words: str) -> Summary:
    what = f"the content of version {report['to']}, {count_noun(report['passages'], 'passage')}"
    return Summary([], f"live: {version_text(report)}, {what}", f'search {words} "your question"')


def _repair(report: Report, words: str) -> Summary:
    shards, num = count_noun(report["num_shards"], "shard"), len(report["repairs"])
    verdict = f"repaired: {num:,} of {shards} and their words" if num else f"nothing to repair: {shards}, all whole"
    return Summary([], f"{verdict}, in {version_text(report)}", _versions_command("verify", words))


def _collect(report: Report, words: str) -> Summary:
    versions, removals = count_noun(len(report["versions"]), "version"), count_noun(len(report["removed"]), "path")
    return Summary([], f"collected: {removals} removed, {versions} kept", _versions_command("list", words))


def _follow(report: Report, words: str) -> Summary:
    left_out = f", {len(report['left_out']):,} left out" * bool(report["left_out"])
    verdict = f"live: {version_text(report)}, {count_noun(report['files_applied'], 'change file')} applied{left_out}"
    return Summary([], verdict, f'search {words} "your question"')


def _versions_command(action: str, words: str) -> str:
    config, *overrides = shlex.split(words)
    return shlex.join(["versions", config, action, *overrides])


def _state(version: Report) -> str:
    return ": ".join(filter(None, ("live" * version["live"], version.get("problem"))))


def versions_tables(index: str, action: str, report: Any, *, verbose: bool) -> list[Table]:
    """Return the tables of an action on versions; `report` is its plain result."""
    if verbose or action not in ("list", "show"):
        return report_tables(f"index {index}", {"versions": report} if isinstance(report, list) else report)
    if action == "show":
        title = f"version {report['version']} of index {index}, by {report['operation']}"
        return _facts(_index_facts(report), title)
    names = ("version", "parent", "operation")
    rows = [
        (*(row[name] for name in names), row["created"][:16].replace("T", " "), row["passages"], _state(row))
        for row in report
    ]
    return [table(f"index {index}", (*names, "created (UTC)", "passages", ""), rows)]


_STAGES = (
    *(_prepare, _train, _mine, _index, _refine, _evaluate, _analyze),
    *(_retrieve, _tune, _read, _update, _compact, _reshard, _rollback),
    *(_repair, _collect, _follow),
)
_SUMMARIES: dict[str, Callable[[Report, str], Summary]] = {one.__name__.removeprefix("_"): one for one in _STAGES}
