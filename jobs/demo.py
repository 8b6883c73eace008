"""Run all stages on real Wikipedia text, on a CPU: `python jobs/demo.py configs/demo.yaml [section.key=value ...]`.

prepare -> one vector a passage -> several views, untrained -> train -> several views, trained -> refine -> three
questions. Each system is evaluated on the same questions: known ones (refine learns from them) and unseen ones.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import typer

from mvr_ray.cli import exit_on_interrupt
from mvr_ray.cli.app import Config, Overrides, exit_on_error
from mvr_ray.cli.tables import hit_text, print_result, report_tables, table
from mvr_ray.config import RunConfig, load_run
from mvr_ray.distributed.cluster.session import connect
from mvr_ray.distributed.evaluate import EvaluationRow
from mvr_ray.distributed.router import open_router
from mvr_ray.progress import Reporter, duration
from mvr_ray.serving.schemas import SearchRequest
from mvr_ray.serving.service import SearchService
from mvr_ray.stages import STAGES
from mvr_ray.store.files import Store
from mvr_ray.store.runs import record, to_plain

QUESTIONS = (
    "Who painted the ceiling of the Sistine Chapel?",
    "Who designed Central Park in New York?",
    "Which building is the tallest in the world?",
)
METRICS = ("top-1", "top-5", "top-20", "mrr")


class DemoResult(NamedTuple):
    """One system on one question set: by metric, the share of questions answered by their own article."""

    system: str
    questions: str
    num_questions: int
    metrics: dict[str, EvaluationRow]


class Demo:
    """Runs the stages in order, and records the time and the measurements of each."""

    def __init__(self, run: RunConfig, progress: Reporter) -> None:
        self.run = run
        self.progress = progress
        self.seconds: dict[str, float] = {}
        self.results: list[DemoResult] = []

    def run_stages(self) -> None:
        self.stage("prepare", self.run)
        one_vector = replace_keys(
            self.run,
            encoder={"strategy": "mean", "name": f"{self.run.encoder.name}-one-vector"},
            index={"encoder": "untrained", "name": f"{self.run.index.name}-one-vector"},
        )
        before_training = replace_keys(
            self.run,
            encoder={"name": f"{self.run.encoder.name}-untrained"},
            index={"encoder": "untrained", "name": f"{self.run.index.name}-untrained"},
        )
        after_training = replace_keys(self.run, index={"encoder": "trained"})
        for system, run in (("one vector", one_vector), ("several views, untrained", before_training)):
            self.stage("index", run, system)
            self.measure(system, run)
        self.stage("train", after_training)
        self.stage("index", after_training, "several views, trained")
        self.measure("several views, trained", after_training)
        refinement = self.stage("refine", after_training)
        system = "trained and refined" if refinement.published else "trained (refinement not published)"
        self.measure(system, after_training)
        self.ask(after_training)

    def stage(self, name: str, run: RunConfig, what: str = "") -> Any:
        with self.measure_time(f"{name} {what}".strip()), record(run, name) as run_record:
            run_record.report = STAGES[name](run, self.progress)
        if name in ("prepare", "train", "refine"):
            plain = {key: value for key, value in to_plain(run_record.report).items() if key != "rounds"}
            for output in report_tables(name, plain):
                print_result(output)
        return run_record.report

    def measure(self, system: str, run: RunConfig) -> None:
        report = self.stage("evaluate", run, system)
        for kind in dict.fromkeys(row.system for row in report.rows):
            name = system if kind == run.index.name else f"{system}, {kind}"
            for questions in run.evaluate.questions:
                own = [row for row in report.rows if (row.system, row.questions) == (kind, questions)]
                rows = [row for row in own if row.metric.startswith("gold/")]
                metrics = {row.metric.removeprefix("gold/"): row for row in rows}
                self.results.append(DemoResult(name, questions, rows[0].n, metrics))

    def ask(self, run: RunConfig) -> None:
        with self.measure_time("three questions"), open_router(run) as router:
            service = SearchService(router, run.serve, hybrid=run.search.hybrid)
            response = service.search(SearchRequest(queries=list(QUESTIONS), k=1))
        for question, [hit, *_] in zip(QUESTIONS, response.results):
            print_result(f"\n{question}")
            print_result(hit_text(1, hit))

    def print_results(self) -> None:
        sets = self.run.evaluate.questions
        columns = ["system", *(f"{name.rpartition('_')[2]} {label}" for name in sets for label in METRICS)]
        systems = list(dict.fromkeys(row.system for row in self.results))
        rows = [[system, *(self.value(system, name, key) for name in sets for key in METRICS)] for system in systems]
        counts = {row.questions: row.num_questions for row in self.results}
        title = "questions answered by their own article, in percent: " + ", ".join(
            f"{count:,} {name.rpartition('_')[2]}" for name, count in counts.items()
        )
        print_result(table(title, columns, rows))
        print_result(table("time", ["stage", "took"], [(name, duration(s)) for name, s in self.seconds.items()]))
        numbers = {"measured": to_plain(self.results), "seconds": self.seconds, "run": to_plain(self.run)}
        store = Store(self.run.store.path)
        store.write_bytes("demo.json", json.dumps(numbers, indent=2).encode())
        print_result(f"{duration(sum(self.seconds.values()))} in all; numbers in {store.where('demo.json')}")

    def value(self, system: str, questions: str, key: str) -> str:
        [row] = [row for row in self.results if (row.system, row.questions) == (system, questions)]
        return f"{100 * row.metrics[key].value:.1f}"

    @contextmanager
    def measure_time(self, what: str) -> Iterator[None]:
        self.progress.say(f"\n== {what}")
        start = time.monotonic()
        yield
        self.seconds[what] = round(time.monotonic() - start, 1)


def replace_keys(run: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """Return the run with some keys of some sections replaced, validated again."""
    plain = run.model_dump()
    for name, keys in sections.items():
        plain[name] |= keys
    return RunConfig.model_validate(plain)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
@exit_on_error
def main(config: Config = "configs/demo.yaml", overrides: Overrides = None) -> None:
    """Run every stage and compare one vector, several views, trained, and refined."""
    run = load_run(config, overrides or ())
    with Reporter() as progress, connect(run.resources, dashboard=run.resources.train_workers > 0):
        demo = Demo(run, progress)
        demo.run_stages()
    demo.print_results()


if __name__ == "__main__":
    with exit_on_interrupt():
        app()
