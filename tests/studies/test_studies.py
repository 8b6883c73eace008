"""Studies: equal steps are made once, finished ones are kept, and reports say what the steps said."""

import functools
import html
import json
import random
import re
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from prepared_corpus import only_corpus
from scipy import stats

from mvr_ray import __version__
from mvr_ray.comparison import difference
from mvr_ray.config import RunConfig, load_run
from mvr_ray.core.judging.metrics import cluster_interval, interval_over_seeds, paired_test, share_interval
from mvr_ray.distributed.analyze import ALL_VIEWS, ANSWER_VIEW
from mvr_ray.distributed.cluster.session import ClusterInfo, Node
from mvr_ray.distributed.cluster.stage_pool import StagePool
from mvr_ray.distributed.encoders import open_encoder
from mvr_ray.distributed.refine import refine
from mvr_ray.errors import ConfigError, ResourceError, StudyError
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.formats.question_ranks import (
    QUESTION_RANKS,
    QuestionRanks,
    question_ranks_bytes,
    read_question_ranks,
)
from mvr_ray.store.formats.question_views import QUESTION_VIEWS, QuestionViews
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.model_records import ENCODERS, latest_fingerprint
from mvr_ray.store.questions import read_questions, write_questions
from mvr_ray.store.runs import to_plain
from mvr_ray.studies import execute, results
from mvr_ray.studies.definition import load_study
from mvr_ray.studies.earlier_report import read_report
from mvr_ray.studies.execute import StepRecord, changed_sources, run_plan
from mvr_ray.studies.refinement import expand_settings, find_ending, load_views, refinement_grid
from mvr_ray.studies.refinement_simulator import LabelledQuestions, RefinementSimulator, Setting
from mvr_ray.studies.report import make_report
from mvr_ray.studies.results import VariantResult, compare_ranks, variant_results
from mvr_ray.studies.retrieval_tables import contrast_table, cost_table, retrieval_table
from mvr_ray.studies.steps import StudyPlan, plan_study
from mvr_ray.studies.study import run_study
from mvr_ray.studies.tables import format_change
from mvr_ray.studies.view_tables import view_table
from mvr_ray.types import Progress, Question, no_progress

ROOT = Path(__file__).resolve().parent.parent.parent
STUDY_FILES = sorted(
    path for path in (ROOT / "configs" / "studies").glob("*.yaml") if not path.stem.startswith("common")
)

STUDY = {
    "study": "small",
    "title": "A <small> study",
    "paper": "none",
    "run": "run.yaml",
    "questions": "dev",
    "metrics": ["gold/top-1", "gold/top-5"],
    "steps": ["train", "index", "evaluate"],
    "sizes": {"quick": {"about": "tiny", "set": ["train.max_steps=1"], "seeds": [1, 2]}},
    "variants": [
        {"name": "mean", "set": ["encoder.strategy=mean", "train.loss=dpr"], "paper": {"gold/top-1": 0.5}},
        {
            "name": "snippets",
            "set": ["encoder.strategy=snippet_means", "train.loss=camvr"],
            "steps": ["train", "index", "analyze"],
        },
        {"name": "untrained", "set": ["encoder.strategy=mean"], "steps": ["index", "evaluate"], "seeds": False},
    ],
}
SEARCHING = ("refine", "evaluate", "analyze", "mine", "refinement_grid", "reading", "entity_frequency")
"""Stages that search an index of which one version must be live."""
CONTRASTS = [{"better": "snippets", "than": "mean", "metric": "gold/top-1"}]


@pytest.fixture
def write(tmp_path):
    def study(run: dict, **more) -> Path:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump({**STUDY, **more}))
        return path

    return study


@functools.cache
def shipped_plan(path: Path, size: str = "quick") -> StudyPlan:
    return plan_study(load_study(path, size))


@pytest.mark.parametrize("path", STUDY_FILES, ids=lambda path: path.stem)
def test_every_shipped_study_plans_in_every_size(path):
    for size in ("quick", "gpu", "paper"):
        plan = shipped_plan(path, size)
        assert all(key in plan.steps for variant in plan.variants for key in variant.keys)
        order = list(plan.steps)
        for at, step in enumerate(plan.steps.values()):
            assert all(order.index(key) < at for key in step.after)


@pytest.mark.parametrize("path", STUDY_FILES, ids=lambda path: path.stem)
def test_no_epoch_is_chosen_on_questions_that_are_reported(path):
    """Neither by a set that a report shows, nor by a part of one (`dev_gate` of `dev`)."""
    study = load_study(path)
    steps = shipped_plan(path).steps.values()
    report_sets = {study.config.questions for step in steps if step.stage in ("evaluate", "analyze")}
    report_sets |= {name for step in steps if step.stage == "reading" for name in step.options["questions"]}
    chosen_by = {step.run.train.dev_questions for step in steps if step.stage == "train"} - {None}
    assert not chosen_by & report_sets
    assert not [name for name in chosen_by for shown_set in report_sets if name.startswith(f"{shown_set}_")]


def test_equal_steps_of_variants_and_studies_are_one(write):
    twice = [{"name": "a", "set": ["encoder.strategy=mean"]}, {"name": "b", "set": ["encoder.strategy=mean"]}]
    twice.append({"name": "c", "set": ["encoder.strategy=mean", "evaluate.seed=1"]})
    plan = plan_study(load_study(write({}, variants=twice, sizes={"quick": {"seeds": [1]}})))
    assert [step.stage for step in plan.steps.values()] == ["prepare", "train", "index", "evaluate", "evaluate"]
    assert plan.variants[0].keys == plan.variants[1].keys
    other = plan_study(
        load_study(
            write({"resources": {"searchers": 3}}, study="other", variants=twice[:1], sizes={"quick": {"seeds": [1]}})
        )
    )
    assert set(other.steps) < set(plan.steps), "names of studies and resources are no part of a result"
    longer = plan_study(load_study(write({"train": {"lr": 0.1}}, variants=twice[:1], sizes={"quick": {"seeds": [1]}})))
    assert [step.stage for key, step in longer.steps.items() if key in plan.steps] == ["prepare"]


def test_a_setting_that_came_later_leaves_steps_on_file_as_long_as_nothing_else_is_done(write):
    settings = {"as before": [], "said": ["encoder.empty_snippets=masked"], "other": ["encoder.empty_snippets=kept"]}
    variants = [{"name": name, "set": ["encoder.strategy=snippets", *some]} for name, some in settings.items()]
    plan = plan_study(load_study(write({}, variants=variants, sizes={"quick": {"seeds": [1]}})))
    before, explicit, other = (variant.keys for variant in plan.variants)
    assert before == explicit and not {*other[1:]} & {*before[1:]}


@pytest.mark.parametrize("name", ["aopt-quick", "camvr-negatives-quick", "decided-mpnet-quick", "reader-quick"])
def test_steps_on_file_are_those_that_their_study_plans_today(name):
    """A setting that came later must not make others of them: they took days, and `earlier=` takes them over."""
    report = json.loads((ROOT / "benchmarks" / "results" / "studies" / name / "report.json").read_text())
    plan = plan_study(load_study(ROOT / "configs" / "studies" / f"{report['study']}.yaml", report["size"]))
    assert {step["key"] for step in report["steps"]} <= plan.steps.keys(), "others may not have run yet"


def test_a_step_reads_what_the_steps_before_it_made(write):
    steps = [
        "train",
        "index",
        {"stage": "mine", "set": ["mine.method=index"]},
        {"stage": "train", "set": ["train.num_hard_negatives=1"]},
        "index",
        "evaluate",
    ]
    variants = [{"name": "loop", "steps": steps}]
    plan = plan_study(load_study(write({}, variants=variants, sizes={"quick": {"seeds": [1]}})))
    _, first, index_step, mine_step, second, again, _ = plan.steps.values()
    assert index_step.run.encoder.name == first.run.encoder.name == mine_step.run.encoder.name
    assert mine_step.run.index.name == index_step.run.index.name
    assert second.run.train.hard_negatives == mine_step.run.mine.output
    assert first.run.train.hard_negatives is None
    assert again.run.encoder.name == second.run.encoder.name != first.run.encoder.name
    assert {index_step.run.index.encoder, again.run.index.encoder} == {"trained"}
    assert len({step.run.index.name for step in (index_step, again)}) == 2


def test_a_train_step_continues_the_one_before_it_if_requested(write):
    on = {"stage": "train", "set": ["train.init_from=previous"]}
    variants = [
        {"name": "on", "steps": ["train", "index", on, on, "index"]},
        {"name": "anew", "steps": ["train", "train"]},
    ]
    plan = plan_study(load_study(write({}, variants=variants, sizes={"quick": {"seeds": [1]}})))
    _, first, _, second, third, index_step = plan.steps.values()
    assert first.run.train.init_from is None
    assert (second.run.train.init_from, third.run.train.init_from) == (first.run.encoder.name, second.run.encoder.name)
    assert first.key in second.after and second.key in third.after
    assert index_step.run.encoder.name == third.run.encoder.name
    assert plan.variants[1].keys == (first.key, first.key)
    variants[0]["steps"] = [on]
    with pytest.raises(ConfigError, match=r"'on' has train\.init_from=previous in its first train step; leave it out"):
        plan_study(load_study(write({}, variants=variants, sizes={"quick": {"seeds": [1]}})))


def test_steps_that_find_answers_by_patterns_are_others_than_those_that_find_words(write):
    def keys(run: dict) -> dict[str, str]:
        steps = ["mine", {"stage": "train", "set": ["train.task=cross_encoder"]}, "train", "index", "refine"]
        variants = [{"name": "one", "steps": steps}]
        plan = plan_study(load_study(write(run, variants=variants, sizes={"quick": {"seeds": [1]}})))
        return {f"{step.stage} {step.run.train.task}": step.key for step in plan.steps.values()}

    words, patterns = keys({}), keys({"evaluate": {"match": "regex"}})
    assert words == keys({"evaluate": {"match": "string"}})
    assert {name for name in words if words[name] == patterns[name]} == {"prepare retriever"}
    chunks = {"prepare": {"chunk_words": 9}}
    assert keys(chunks)["prepare retriever"] != keys(chunks | {"evaluate": {"match": "regex"}})["prepare retriever"]


def test_a_cross_encoder_denoises_what_is_mined_after_it_and_is_not_the_encoder(write):
    """And what is mined before it is mined alike in a chain without one."""
    teacher = {"stage": "train", "set": ["train.task=cross_encoder"]}
    student = {"stage": "train", "set": ["train.num_hard_negatives=1"]}
    reader = {"stage": "train", "set": ["train.task=reader"]}
    chains = [
        ["mine", teacher, student, "index", "mine", student, "index"],
        ["mine", student, "index", reader, "evaluate"],
    ]
    variants = [{"name": str(number), "steps": steps} for number, steps in enumerate(chains)]
    plan = plan_study(load_study(write({}, variants=variants, sizes={"quick": {"seeds": [1]}})))
    _, mine_step, judge, first, index_step, denoise_step, second, again, read, _ = plan.steps.values()
    assert (judge.run.train.task, read.run.train.task) == ("cross_encoder", "reader")
    assert judge.run.train.hard_negatives == first.run.train.hard_negatives == mine_step.run.mine.output
    assert (mine_step.run.mine.cross_encoder, denoise_step.run.mine.cross_encoder) == (
        None,
        judge.run.train.cross_encoder,
    )
    assert second.run.train.hard_negatives == denoise_step.run.mine.output != mine_step.run.mine.output
    assert index_step.run.encoder.name == first.run.encoder.name != second.run.encoder.name == again.run.encoder.name
    assert plan.variants[1].keys[:3] == (mine_step.key, first.key, index_step.key)
    assert plan.steps[plan.variants[1].keys[-1]].run.read.reader == read.run.train.reader


def test_steps_with_other_inputs_by_name_are_others(write):
    mines, trains = ["mine", {"stage": "train", "set": ["train.num_hard_negatives=1"]}], ["train"]
    model = ["mine.cross_encoder=a"]
    for steps, sets in (
        (
            mines,
            [[], model, ["mine.cross_encoder=b"], [*model, "read.max_question_tokens=9"], ["index.language=german"]],
        ),
        (trains, [[], ["train.hard_negatives=a"], ["train.hard_negatives=b"]]),
        (["index", "analyze"], [[], ["retrieve.filter={title: a}"], ["retrieve.filter={title: b}"]]),
    ):
        variants = [{"name": str(number), "set": own, "steps": steps} for number, own in enumerate(sets)]
        plan = plan_study(load_study(write({}, variants=variants, sizes={"quick": {"seeds": [1]}})))
        assert len({variant.keys for variant in plan.variants}) == len(sets)
    twice = [{"name": "a", "steps": mines}, {"name": "b", "steps": mines, "set": ["train.hard_negatives=a"]}]
    first, second = plan_study(load_study(write({}, variants=twice, sizes={"quick": {"seeds": [1]}}))).variants
    assert first.keys == second.keys, "the chain's own negatives replace those of the name"


def test_a_stored_encoder_is_refused_where_the_study_would_embed_with_the_backbone(write):
    variants = [{"name": "mine", "set": ["index.encoder=trained", "encoder.name=mine"], "steps": ["index"]}]
    with pytest.raises(ConfigError, match=r"'mine' has index\.encoder=trained, but no train step before .*untrained"):
        plan_study(load_study(write({}, variants=variants, sizes={"quick": {"seeds": [1]}})))


@pytest.mark.parametrize("task", ["reader", "cross_encoder"])
def test_a_model_with_a_head_is_trained_once_for_every_readout_of_its_backbone(write, task):
    def train_keys(**sections):
        steps = [{"stage": "train", "set": [f"train.task={task}"]}]
        readouts = [{"name": name, "set": [f"encoder.strategy={name}"]} for name in ("mean", "snippet_means")]
        size = {"quick": {"seeds": [1]}}
        plan = plan_study(load_study(write(sections, variants=readouts, steps=steps, sizes=size)))
        assert [step.stage for step in plan.steps.values()] == ["prepare", "train"]
        return plan.variants[0].keys

    keys = train_keys()
    assert train_keys(encoder={"max_passage_tokens": 64}) == keys
    for section, other in (
        ("train", {"lr": 0.1}),
        ("encoder", {"backbone": "x"}),
        ("read", {"max_question_tokens": 9}),
    ):
        assert train_keys(**{section: other}) != keys


def test_a_variant_and_a_step_may_be_set_otherwise_in_one_size(write):
    step = {"stage": "train", "set": ["train.lr=0.1", "train.epochs=2"], "sizes": {"large": ["train.lr=0.3"]}}
    own = {"set": ["train.lr=0.5", "train.siblings=false"], "sizes": {"large": ["train.lr=0.7", "train.seed=5"]}}
    file = write({}, variants=[{"name": "a", "steps": [step], **own}], sizes={"quick": {}, "large": {}})
    for size, lr, seed in (("quick", 0.1, 1), ("large", 0.3, 5)):
        _, train_step = plan_study(load_study(file, size)).steps.values()
        assert (train_step.run.train.lr, train_step.run.train.epochs, train_step.run.train.seed) == (lr, 2, seed)
        assert not train_step.run.train.siblings


def test_a_variant_is_measured_along_its_last_training_which_runs_once(write):
    reader = {"stage": "train", "set": ["train.task=reader"]}
    steps = ["train", "index", {"stage": "mine", "set": ["mine.method=index"]}, "train", "index", reader, "evaluate"]
    size = {"quick": {"set": ["train.max_steps=9"], "curve": [2, 4], "seeds": [1]}}
    variants = [
        {"name": "along", "steps": steps},
        {"name": "untrained", "steps": ["index", "evaluate"], "seeds": False},
    ]
    plan = plan_study(load_study(write({}, variants=variants, sizes=size)))
    assert [(run.variant.name, run.at) for run in plan.variants] == [
        ("along", 2), ("along", 4), ("along", 0), ("untrained", 0)
    ]  # fmt: skip
    chains = [[plan.steps[key] for key in run.keys] for run in plan.variants[:3]]
    assert len({chain[3].key for chain in chains}) == len({chain[5].key for chain in chains}) == 1
    assert [chain[3].run.train.snapshot_steps for chain in chains] == [[2, 4]] * 3
    assert {tuple(step.run.train.snapshot_steps) for chain in chains for step in (chain[0], chain[5])} == {()}
    name = chains[0][3].run.encoder.name
    assert [chain[4].run.encoder.name for chain in chains] == [f"{name}-step-2", f"{name}-step-4", name]
    assert [chain[6].run.encoder.name for chain in chains] == [f"{name}-step-2", f"{name}-step-4", name]
    assert len({chain[4].run.index.name for chain in chains}) == len({chain[6].key for chain in chains}) == 3
    plain = plan_study(load_study(write({}, variants=variants, sizes={"quick": {**size["quick"], "curve": []}})))
    first = plain.variants[0].keys
    assert first[:3] == plan.variants[0].keys[:3], "what comes before the last training is the same without a curve"


def test_a_part_of_a_study_has_the_steps_that_its_variants_need(write):
    plan = plan_study(load_study(write({})))
    part = plan.part("^snip")
    assert {run.variant.name for run in part.variants} == {"snippets"} and len(part.variants) == 2
    assert [step.stage for step in part.steps.values()] == ["prepare", *["train", "index", "analyze"] * 2]
    assert plan.part("").steps == plan.steps
    with pytest.raises(ConfigError, match=r"only=x\+ has a match in no variant's name; there are mean, snippets, untr"):
        plan.part("x+")
    with pytest.raises(ConfigError, match=r"only=\( is no regular expression"):
        plan.part("(")


def test_a_step_may_belong_to_some_sizes_alone(write):
    steps = [{"stage": "train", "only": ["large"]}, "index"]
    file = write({}, variants=[{"name": "a"}], steps=steps, sizes={"quick": {}, "large": {}})
    for size, stages, encoder in (("quick", ["index"], "untrained"), ("large", ["train", "index"], "trained")):
        _, *own = plan_study(load_study(file, size)).steps.values()
        assert [step.stage for step in own] == stages
        assert own[-1].run.index.encoder == encoder


def test_what_a_study_file_gets_wrong_is_reported_before_anything_runs(write):
    def check_refusal(message: str, run: dict | None = None, size: str = "quick", **more) -> None:
        with pytest.raises(ConfigError, match=message):
            load_study(write(run or {}, **more), size)

    check_refusal("no size 'huge'; there are quick", size="huge")
    check_refusal("variants.0.stps: unknown key; did you mean 'steps'", variants=[{"name": "a", "stps": []}])
    check_refusal("a contrast names variant 'z'", contrasts=[{"better": "z", "than": "mean", "metric": "gold/top-1"}])
    shallow = {"evaluate": {"k": [1, 5]}}
    message = r"variant 'mean', step evaluate: gold/top-20 is compared, but evaluate.k is \[1, 5\], so only 5 hits"
    check_refusal(message, shallow, contrasts=[{"better": "untrained", "than": "mean", "metric": "gold/top-20"}])
    check_refusal("gold/top-10 is compared", shallow, metrics=["gold/top-10"])
    other = [{"better": "untrained", "than": "untrained", "metric": "gold/top-20"}]
    deep = [{"name": "mean", "steps": ["index", "evaluate"]}]
    deep += [{"name": "untrained", "set": ["evaluate.k=[1, 20]"], "steps": ["index", "evaluate"]}]
    load_study(write(shallow, variants=deep, contrasts=other))
    unknown = [{"better": "mean", "than": "mean", "metric": "gold/mrr"}]
    message = "contrasts.0.metric: 'gold/mrr' is not answer/top-K, gold/top-K or gold/ndcg@10"
    check_refusal(message, contrasts=unknown)
    check_refusal(r"metrics: \[\] is not a list of at least 1", metrics=[])
    check_refusal(r"sizes\.quick\.seeds: \[\] is not a list of at least 1", sizes={"quick": {"seeds": []}})
    for step, names in (("cost", "passages, questions, repeats"), ("index", "none")):
        message = rf"steps\.0: {step} has no option 'pasages'; it has {names}"
        check_refusal(message, steps=[{"stage": step, "options": {"pasages": 3}}])
    check_refusal("variant 'a' stands twice", variants=[{"name": "a"}, {"name": "a"}])
    check_refusal(
        "variant 'a', step train: .*encoder.strategy", variants=[{"name": "a", "set": ["encoder.strategy=x"]}]
    )
    elsewhere = {"stage": "train", "sizes": {"gigantic": ["train.lr=1"]}}
    check_refusal(
        "variant 'a', step train: no size 'gigantic'; there are", variants=[{"name": "a", "steps": [elsewhere]}]
    )
    nowhere = {"stage": "train", "only": ["vast"]}
    check_refusal("variant 'a', step train: no size 'vast'; there are", variants=[{"name": "a", "steps": [nowhere]}])
    check_refusal("variant 'a': no size 'tiny'; there are", variants=[{"name": "a", "sizes": {"tiny": ["train.lr=1"]}}])
    for setting, message in (
        ({"betta": 1}, "unknown field 'betta'"),
        ({"method": ["linear", "feedback_view"]}, "a setting is .*'feedback_view'.*method: Input should be"),
        ({"move": "all"}, "move: Input should be 'winner' or 'every'"),
        ({"weight": "0.7"}, "weight: Input should be a valid number"),
    ):
        with pytest.raises(ConfigError, match=message):
            list(expand_settings([setting]))
        grid = {"stage": "refinement_grid", "options": {"settings": [setting]}}
        check_refusal(f"steps.0: .*{message}", steps=[grid])
    for stage, options, message in (
        ("entity_frequency", {"k": 5}, "option k of entity_frequency is 5: .*list"),
        ("entity_frequency", {"k": [0]}, r"option k of entity_frequency is \[0\]: .*greater than or equal to 1"),
        ("reading", {"questions": "dev"}, "option questions of reading is 'dev': .*list"),
        ("cost", {"repeats": 2.5}, "option repeats of cost is 2.5: .*integer"),
    ):
        check_refusal(f"steps.0: {message}", steps=[{"stage": stage, "options": options}])


ARTICLES = ["a", "a", "b", "b", "b", "c", "c", "d", "d", "e"]


def fake(value: float, seed: int, system: str = "x") -> dict:
    """An evaluation of ten questions in five articles: the first `value` of them have their gold passage first."""
    hits = round(10 * value)
    row = {"system": system, "questions": "dev", "metric": "gold/top-1", "value": hits / 10, "n": 10}
    ranks = {
        "system": system,
        "questions": "dev",
        "question_ids": [f"q{number}" for number in range(10)],
        "articles": ARTICLES,
        "answer_ranks": [None] * 10,
        "gold_ranks": [0 if number < hits else -1 for number in range(10)],
        "seed": 0,
    }
    return {"rows": [row | {"low": 0.0, "high": 1.0}], "ranks": [ranks], "seed": seed}


def hits(*shares: float) -> np.ndarray:
    """values_SQ of `fake`, a row a seed."""
    return np.array([[float(number < round(10 * share)) for number in range(10)] for share in shares])


def test_an_interval_of_means_over_few_seeds_ends_at_a_share_of_one():
    rows = [{"value": value, "low": value - 0.01, "high": 1.0, "n": 10} for value in (0.98, 1.0)]
    mean, low, high, *_ = results._cell("gold/mrr", rows, [])
    assert mean == pytest.approx(0.99) and 0.8 < low < mean and high == 1.0


def test_values_of_several_seeds_are_their_mean_with_an_interval_over_seeds_and_articles(write):
    study = load_study(write({}, variants=STUDY["variants"][::2], sizes={"quick": {"seeds": [1, 2, 3]}}))
    plan = plan_study(study)
    values = {("mean", 1): 0.5, ("mean", 2): 0.6, ("mean", 3): 0.7, ("untrained", 1): 0.2}
    records = {}
    for variant_run in plan.variants:
        for key in variant_run.keys:
            step = plan.steps[key]
            report = {"passages_written": 9}
            if step.stage == "evaluate":
                report = fake(values[variant_run.variant.name, variant_run.seed], variant_run.seed)
            records[key] = StepRecord(key, step.stage, step.command, 1.0, report)
    results = {one.name: one for one in variant_results(study, plan, records)}
    low, high = interval_over_seeds(hits(0.5, 0.6, 0.7), ARTICLES)
    assert low < 0 and high > 1  # no share is
    assert results["mean"].cells["gold/top-1"] == pytest.approx((0.6, 0.0, 1.0, 3, 10))
    alone = share_interval(hits(0.2)[0], ARTICLES)
    assert results["untrained"].cells["gold/top-1"] == pytest.approx((0.2, *alone, 1, 10))
    table = retrieval_table(study, list(results.values()))
    columns = ["variant", "paper gold/top-1", "gold/top-1", "n", "seeds", "gold/top-1 against mean, p"]
    assert table.columns == columns
    assert [row[0] for row in table.rows] == ["mean", "untrained"]
    assert table.rows[0][:2] == ["mean", "50.0"]
    assert table.rows[0][3:] == [10, 3, ""]
    p = paired_test(hits(0.2)[0], hits(0.5, 0.6, 0.7).mean(axis=0), ARTICLES)
    assert table.rows[1][3:5] == [10, 1]
    assert table.rows[1][5].startswith("-40.0 (") and table.rows[1][5].endswith(f", {p:.2g}")
    ranks_file = make_report(study, plan, records).files["questions.parquet"]
    ranks = {(part.system, part.seed): list(part.gold_ranks) for part in pq_ranks(ranks_file)}
    assert set(ranks) == {("mean", 1), ("mean", 2), ("mean", 3), ("untrained", 1)}
    assert ranks["mean", 2] == [0] * 6 + [-1] * 4
    assert "gold_ranks" not in make_report(study, plan, records).files["report.json"].decode()


def pq_ranks(data: bytes) -> list[QuestionRanks]:
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return read_question_ranks(Path(file.name))


@pytest.mark.parametrize("num_articles", [1, 2])
def test_a_report_says_where_questions_count_as_articles(write, num_articles):
    study = load_study(write({}, variants=STUDY["variants"][2:], sizes={"quick": {"seeds": [1]}}))
    plan, evaluation = plan_study(study), fake(0.5, 1)
    evaluation["ranks"][0]["articles"] = [str(number % num_articles) for number in range(10)]
    reports = {"prepare": {"passages_written": 9}, "index": {}, "evaluate": evaluation}
    records = {key: StepRecord(key, step.stage, "", 1.0, reports[step.stage]) for key, step in plan.steps.items()}
    facts = json.loads(make_report(study, plan, records).files["report.json"])["facts"]
    assert ("articles" in facts) == (num_articles == 1)


def test_t_tests_over_seeds_stand_beside_the_paired_test_over_articles(write):
    contrasts = [{"better": "mean", "than": "snippets", "metric": "gold/top-1"}]
    variants = [{"name": name, "steps": ["index", "evaluate"]} for name in ("mean", "snippets")]
    sizes = {"quick": {"seeds": [1, 2, 3]}}
    study = load_study(write({}, variants=variants, contrasts=contrasts, sizes=sizes))
    values = {"mean": (0.5, 0.7, 0.6), "snippets": (0.4, 0.5, 0.5)}
    results = {
        name: VariantResult(name, {}, "", {}, ranks, {})
        for name, ranks in (
            (name, {seed: QuestionRanks(**fake(value, seed)["ranks"][0]) for seed, value in enumerate(own, 1)})
            for name, own in values.items()
        )
    }
    table = contrast_table(study.config.contrasts, list(results.values()))
    cells = dict(zip(table.columns, table.rows[0]))
    assert cells["difference (points)"] == "+13.3"
    assert cells["p, t-test over seeds"] == f"{stats.ttest_ind(values['mean'], values['snippets']).pvalue:.2g}"
    assert cells["p, paired t-test over seeds"] == f"{stats.ttest_rel(values['mean'], values['snippets']).pvalue:.2g}"
    apart = [hits(*values[name]).mean(axis=0) for name in ("mean", "snippets")]
    assert cells["p, paired by article"] == f"{paired_test(*apart, ARTICLES):.2g}"
    assert (cells["n"], cells["seeds"]) == (10, 3)


def test_gains_are_compared_question_by_question_as_hits_are():
    chance = np.random.default_rng(1)
    ndcg_SQ = [chance.random(10).tolist(), chance.random(10).tolist()]
    own, than = (
        VariantResult(name, {}, "", {}, {1: QuestionRanks(**fake(0.5, 1)["ranks"][0])._replace(gold_ndcgs=ndcg_Q)}, {})
        for name, ndcg_Q in zip("ab", ndcg_SQ)
    )
    gap = compare_ranks(own.ranks, than.ranks, "gold/ndcg@10")
    assert gap.points == pytest.approx(100 * (np.mean(ndcg_SQ[0]) - np.mean(ndcg_SQ[1])))
    assert gap.p == paired_test(np.array(ndcg_SQ[0]), np.array(ndcg_SQ[1]), ARTICLES)
    unknown = {1: than.ranks[1]._replace(gold_ndcgs=())}
    assert compare_ranks(own.ranks, unknown, "gold/ndcg@10") is None


def refined_round(number: int, share: float, num_moved: int) -> dict:
    top = {"1": share, "5": share + 0.1, "20": share + 0.2}
    ranks = [0 if question < round(10 * share) else -1 for question in range(10)]
    sets = [
        {
            "questions": name,
            "answer": top,
            "gold": top,
            "hubs": {"most": most, "skewness": 1.5},
            "answer_ranks": ranks,
            "gold_ranks": ranks,
        }
        for name, most in (("known", 7), ("gate", 8), ("unseen", 9))
    ]
    counts = {"num_moved": num_moved, "skipped_domain": 3, "skipped_no_positive": 4, "norm_mean": 1.25, "norm_max": 2.0}
    counts["newest"] = share + 0.05
    return {"number": number, "loss": 0.5, **counts, "sets": sets}


def test_a_refinement_is_reported_before_it_where_it_is_kept_and_at_its_end(write):
    """At every depth, with what moved; and its rounds and trade-off are drawn."""
    steps = ["index", {"stage": "refinement_grid"}]
    study = load_study(write({}, variants=[{"name": "a", "steps": steps}], sizes={"quick": {"seeds": [1]}}))
    plan = plan_study(study)
    rounds = [refined_round(number, 0.1 * number, 10 * number) for number in range(5)]
    setting = {"method": "passage", "step_size": 0.02, "decay": 0.3, "keep_length": True}
    kept_trial = {"label": "kept", "setting": setting, "chosen": 3, "stopped": 4, "restored": 2, "lowest_loss": 1}
    kept_trial["rounds"] = rounds
    refused_trial = {
        **kept_trial,
        "label": "refused",
        "setting": {**setting, "method": "linear", "beta": 0.6, "gamma": -0.1},
        "chosen": 0,
        "restored": 0,
    }
    ids = [f"q{number}" for number in range(10)]
    sets = [{"questions": name, "ids": ids, "articles": ARTICLES} for name in ("known", "gate", "unseen")]
    grid = {"passages_written": 9, "tried": [kept_trial, refused_trial], "sets": sets, "gate": "gate"}
    records = {key: StepRecord(key, step.stage, step.command, 1.0, grid) for key, step in plan.steps.items()}
    report = make_report(study, plan, records)
    tables = {table.title: table for table in report.tables}
    heads = [row[:3] for row in tables["Refinement"].rows]
    assert heads == [["a", "before", "0"], ["a", "kept", "3, kept"], ["a", "kept", "4"], ["a", "refused", "4, refused"]]
    assert tables["Refinement"].columns[3:] == [
        "known (n 10) answer", "known (n 10) gold", "gate (n 10) answer", "gate (n 10) gold",
        "unseen (n 10) answer", "unseen (n 10) gold", "unseen change, p", "known newest answer",
    ]  # fmt: skip
    low, high = share_interval(hits(0.3)[0], ARTICLES)
    row = tables["Refinement"].rows[1]
    assert row[3:5] == [f"30.0 ({100 * low:.1f} to {100 * high:.1f})", "30.0"]
    low, high = cluster_interval(hits(0.3)[0], ARTICLES)
    p = paired_test(hits(0.3)[0], hits(0.0)[0], ARTICLES)
    assert row[9] == f"+30.0 ({100 * low:+.1f} to {100 * high:+.1f}), {p:.2g}"
    assert tables["Refinement"].rows[0][9] == ""
    kept_ranks = {(part.system, part.questions) for part in pq_ranks(report.files["questions.parquet"])}
    assert {("a: before, round 0", "known"), ("a: kept, round 3", "unseen")} <= kept_ranks
    assert tables["Refinement"].rows[1][-1] == "35.0"
    depths = tables["Refinement at every depth"]
    assert depths.columns[3:] == [
        "known answer", "known answer, p", "known gold", "known gold, p",
        "unseen answer", "unseen answer, p", "unseen gold", "unseen gold, p",
    ]  # fmt: skip
    assert depths.rows[1][3::2] == ["30.0 / 40.0 / 50.0"] * 4
    assert depths.rows[0][4::2] == [""] * 4
    ps = [paired_test(hits(share)[0], hits(0.0)[0], ARTICLES) for share in (0.3, 0.3, 0.3)]
    assert depths.rows[1][4] == " / ".join(f"{p:.2g}" for p in ps)
    motion = [row[3:] for row in tables["What moved"].rows]
    assert motion[1] == ["0.06", 30, 3, 4, "1.25", "2", 7, "1.5", 9, "1.5"]
    assert [row[0] for row in motion] == ["0", "0.06", "0.08", ""], "the linear form takes no step size"
    ends = [row[1:] for row in tables["When to stop"].rows]
    assert ends[0][:6] == ["kept", "4: 40.0 / 40.0", 4, "2: 20.0 / 20.0", "1: 10.0 / 10.0", "4: 40.0 / 40.0"]
    against = difference(hits(0.2)[0], hits(0.1)[0], ARTICLES)
    assert ends[0][6] == ends[0][7] == format_change(*against[:4])
    assert tables["When to stop"].columns[7:] == [
        "known: restored against lowest loss, p", "unseen: restored against lowest loss, p",
        "known: restored against last round, p", "unseen: restored against last round, p",
    ]  # fmt: skip
    assert "known (n 10) / unseen (n 10)" in tables["When to stop"].note
    assert ends[1][3] == "nothing"
    assert {"rounds-a-kept.png", "rounds-a-refused.png", "trade-off.png"} <= set(report.files)


def test_every_question_of_a_system_and_seed_is_one_row_of_ranks(write):
    steps = ["index", "evaluate", {"stage": "entity_frequency"}, {"stage": "refinement_grid"}]
    study = load_study(write({}, variants=[{"name": "a", "steps": steps}], sizes={"quick": {"seeds": [1, 2]}}))
    plan = plan_study(study)
    setting = {"method": "passage", "step_size": 0.02, "keep_length": True}
    trial = {"label": "steps", "setting": setting, "chosen": 1, "stopped": 1, "restored": 1, "lowest_loss": 1}
    ids = [f"q{number}" for number in range(10)]
    sets = [{"questions": name, "ids": ids, "articles": ARTICLES} for name in ("known", "gate", "unseen")]
    trial["rounds"] = [refined_round(number, 0.1 * number, 10 * number) for number in range(2)]
    ranks = [*fake(0.2, 1)["ranks"], *fake(0.4, 1, "bm25")["ranks"]]
    reports = {
        "evaluate": {"rows": fake(0.2, 1)["rows"], "ranks": ranks[:1]},
        "entity_frequency": {"sets": [], "ranks": ranks},
        "refinement_grid": {"tried": [trial], "sets": sets, "gate": "gate"},
    }
    records = {
        key: StepRecord(key, step.stage, step.command, 1.0, {"passages_written": 9} | reports.get(step.stage, {}))
        for key, step in plan.steps.items()
    }
    parts = pq_ranks(make_report(study, plan, records).files["questions.parquet"])
    assert all(len(part.question_ids) == 10 for part in parts)
    seeds: dict[str, set[int]] = {}
    for part in parts:
        seeds.setdefault(part.system, set()).add(part.seed)
    both = {1, 2}
    assert seeds == {"a": both, "a: before, round 0": both, "a: steps, round 1": both, "BM25": {1}}


@pytest.mark.parametrize(
    "curve, heldout, patience, ending",
    [
        ([60, 71, 74, 73, 73, 75], [70] * 6, 2, (4, 2)),
        ([60, 71, 74, 73, 73, 75], [70] * 6, 3, (5, 5)),
        ([60, 74, 74, 74, 80, 80], [70, 71, 70, 70, 60, 60], 2, (3, 1)),
        ([60, 61, 60, 63], [70, 69.5, 60, 50], 1, (2, 1)),
        ([60, 61, 62, 63], [70, 69.5, 60, 50], 1, (3, 1)),
        ([60, 61, 62, 63], [70, 60, 69, 50], 1, (3, 2)),
        ([60, 61, 62, 63], [70, 60, 50, 40], 2, (3, 0)),
        ([60, 65, 64, 63, 70], [70, 60, 60, 60, 70], 2, (3, 0)),
    ],
)
def test_rounds_that_are_over_tell_where_the_rule_would_have_ended_them(curve, heldout, patience, ending):
    """The best of those seen, of equals the first; none where each lost the gate more than a point."""
    gate = tuple((float(value),) for value in heldout)
    assert find_ending(tuple(map(float, curve)), gate, patience, 1.0) == ending


@pytest.mark.parametrize("order", [["evaluate", "analyze"], ["analyze", "evaluate"]])
def test_what_two_steps_measured_is_reported_as_evaluate_reports_it(write, order):
    steps = ["index", *order]
    study = load_study(write({}, variants=[{"name": "a", "steps": steps}], sizes={"quick": {"seeds": [1]}}))
    plan = plan_study(study)
    reports = {"evaluate": fake(0.5, 1), "analyze": fake(0.7, 1, ALL_VIEWS), "index": {}, "prepare": {}}
    reports["analyze"]["rows"].append({**reports["analyze"]["rows"][0], "metric": "lv"})
    records = {key: StepRecord(key, step.stage, "", 1.0, reports[step.stage]) for key, step in plan.steps.items()}
    [results] = variant_results(study, plan, records)
    assert (results.cells["gold/top-1"].value, results.cells["lv"].value) == (0.5, 0.7)
    assert list(results.ranks[1].gold_ranks) == [0] * 5 + [-1] * 5


def test_what_is_fused_with_bm25_is_a_line_of_its_own_over_all_seeds(write, tmp_path):
    contrasts = [
        {"better": "a, with BM25", "than": "a", "metric": "gold/top-1"},
        {"better": "a, with BM25", "than": "BM25", "metric": "gold/top-1"},
    ]
    sizes = {"quick": {"seeds": [1, 2]}}
    study = load_study(
        write({}, variants=[{"name": "a", "steps": ["index", "evaluate"]}], sizes=sizes, contrasts=contrasts)
    )
    plan = plan_study(study)
    records = {key: StepRecord(key, step.stage, "", 1.0, {"passages_written": 9}) for key, step in plan.steps.items()}
    for variant_run in plan.variants:
        parts = [
            fake(0.1 + variant_run.seed / 10, 1),
            fake(0.5, 1, "bm25"),
            fake(0.5 + variant_run.seed / 10, 1, f"bm25 + {10 * variant_run.seed} x dense"),
        ]
        report = {name: [one for part in parts for one in part[name]] for name in ("rows", "ranks")}
        key = next(key for key in variant_run.keys if plan.steps[key].stage == "evaluate")
        records[key] = records[key]._replace(report=report)
    results = {one.name: one for one in variant_results(study, plan, records)}
    assert list(results) == ["a", "BM25", "a, with BM25"]
    assert results["a, with BM25"].cells["gold/top-1"].value == pytest.approx(0.65)
    words = results["BM25"].cells["gold/top-1"]
    assert words == pytest.approx((0.5, *share_interval(hits(0.5)[0], ARTICLES), 1, 10)), "not of width zero"
    assert words.high - words.low > 0.2
    assert results["a, with BM25"].setting == "bm25 + 10 x dense; bm25 + 20 x dense"
    report = make_report(study, plan, records)
    tables = report.tables
    for name, content in report.files.items():
        (tmp_path / name).write_bytes(content)
    assert read_report(tmp_path, study, plan).keys() == records.keys()
    (tmp_path / QUESTION_RANKS).unlink()
    assert "evaluate" not in {record.stage for record in read_report(tmp_path, study, plan).values()}
    assert "Refinement at every depth" not in [table.title for table in tables], "nothing was refined"
    [table] = [table for table in tables if table.title == "Differences"]
    assert [row[3] for row in table.rows] == ["+40.0", "+15.0"]
    columns = [dict(zip(table.columns, row)) for row in table.rows]
    ps = [max(float(row["p, paired by article"]), float(row["p, paired t-test over seeds"] or 0)) for row in columns]
    assert all(p <= float(row["p, Holm"]) <= 2 * p for p, row in zip(ps, columns))
    facts = report.files["report.md"].decode()
    assert "- tests: 2 planned differences, adjusted by Holm's method; 2 other p's, not corrected\n" in facts
    with pytest.raises(ConfigError, match=r"a contrast names variant 'b, with BM25'"):
        load_study(write({}, contrasts=[{**contrasts[0], "better": "b, with BM25"}]))


@pytest.fixture
def small(corpus_store, run_over, tmp_path):
    plain = run_over(tmp_path / "store").model_dump(mode="json")
    plain["prepare"]["sources"][0]["path"] = str(corpus_store / "squad.json")
    plain["train"] |= {"questions": "dev", "batch_questions": 4}
    plain["encoder"] |= {"num_views": 2, "max_passage_tokens": 48}
    plain["resources"] |= {"train_workers": 0}
    return plain


class StepsInThisProcess(ExitStack):
    """Stands for `StagePool`: a step has ended when its start returns. Its report is the same as through Ray."""

    def __init__(self, cluster: ClusterInfo) -> None:
        super().__init__()
        self._reports: dict[str, dict] = {}

    def start(self, name: str, stage: Callable, run: RunConfig, progress: Progress, gpus: float = 0) -> None:
        self._reports[name] = to_plain(stage(run, progress))

    def wait(self) -> str:
        return next(iter(self._reports))

    def report(self, name: str) -> dict:
        return self._reports.pop(name)


@pytest.fixture
def steps_without_ray(without_ray, monkeypatch) -> None:
    """Steps of a study run in this process; ask for it before `small`."""
    cluster = SimpleNamespace(connect=lambda resources, dashboard: nullcontext(ClusterInfo(2, 0, (), is_local=True)))
    monkeypatch.setattr(execute, "session", cluster)
    monkeypatch.setattr(execute, "StagePool", StepsInThisProcess)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.ray
def test_a_study_runs_each_step_once_and_goes_on_after_a_failure(write, small, tmp_path, ray_session, monkeypatch):
    size = {"about": "tiny", "set": ["train.max_steps=1"], "seeds": [1]}
    path = write(small, contrasts=CONTRASTS, sizes={"quick": size}, variants=STUDY["variants"][:2])
    plan = plan_study(load_study(path))
    store = Store(small["store"]["path"])
    run = load_run(tmp_path / "run.yaml")
    ran: list[str] = []
    prepare, start = execute._prepare, execute._start

    def count_prepare(step, store, progress):
        ran.append(step.stage)
        return prepare(step, store, progress)

    def count_start(step, pool, progress):
        ran.append(step.stage)
        if len(ran) == 3:
            raise ConfigError("as if it had failed")
        start(step, pool, progress)

    monkeypatch.setattr(execute, "_prepare", count_prepare)
    monkeypatch.setattr(execute, "_start", count_start)
    with pytest.raises(StudyError, match=r"step 3 of 7 failed: mvr-ray index .*as if it had failed; correct it"):
        run_plan(plan, store, run)
    lines: list[str] = []
    records = run_plan(plan, store, run, lambda what, count, total: lines.append(what), at_once=2)
    assert sorted(ran) == sorted([*(step.stage for step in plan.steps.values()), "index"]), "each once, but what failed"
    assert set(records) == set(plan.steps)
    assert {what.partition(":")[0] for what in lines} == {"lane 1", "lane 2", "study steps"}
    assert run_plan(plan, store, run) == records
    assert len(ran) == 8
    result = run_study(path, output=tmp_path / "out")
    folder = tmp_path / "out" / "small-quick"
    content = json.loads((folder / "report.json").read_text())
    assert [table["title"] for table in content["tables"]][:2] == ["Retrieval", "Differences"]
    assert result.steps == len(content["steps"]) == 7
    page = (folder / "report.html").read_text()
    assert "A &lt;small&gt; study" in page and "://" not in page
    assert (folder / "retrieval.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "attention-kl-snippets.png").is_file()


@pytest.mark.slow
@pytest.mark.data
def test_a_curve_measures_the_weights_of_its_steps_and_a_part_reports_what_is_on_file(
    write, steps_without_ray, small, tmp_path
):
    size = {
        "set": ["train.max_steps=3", "train.batch_questions=8", "index.precision=fp32"],
        "curve": [1, 2],
        "seeds": [1],
    }
    path = write(small, sizes={"quick": size}, variants=[STUDY["variants"][0], STUDY["variants"][2]])
    run_study(path, output=tmp_path / "out", only="mean")
    content = json.loads((tmp_path / "out" / "small-quick" / "report.json").read_text())
    assert content["facts"]["not run yet"] == "untrained"
    assert (tmp_path / "out" / "small-quick" / "curve.png").is_file()
    curve = next(table for table in content["tables"] if table["title"] == "Over the training budget")
    metric = STUDY["metrics"][0]
    assert curve["columns"][:2] == ["variant", "steps"]
    assert curve["columns"][-2:] == ["n", f"{metric} against mean, p"]
    rows = {row[1]: dict(zip(curve["columns"], row, strict=True)) for row in curve["rows"]}
    assert list(rows) == [1, 2, "all"]
    plan, store = plan_study(load_study(path)), Store(small["store"]["path"])
    for run in plan.variants[:3]:
        index, encoder = (getattr(plan.steps[run.keys[1]].run, part).name for part in ("index", "encoder"))
        version = manifest.read(store, index)
        assert (version.encoder_name, version.encoder_fingerprint) == (
            encoder, latest_fingerprint(store, ENCODERS, encoder)
        )  # fmt: skip
        report = execute.read_records(plan, store)[run.keys[2]].report
        [row] = [row for row in report["rows"] if row["metric"] == metric]
        assert rows[run.at or "all"][metric].startswith(f"{100 * row['value']:.1f} (")
        assert rows[run.at or "all"]["n"] == row["n"]
    steps = [(run.at, run.keys[0]) for run in plan.variants[:3]]
    assert len({key for _, key in steps}) == 1
    fingerprints = {
        manifest.read(store, plan.steps[run.keys[1]].run.index.name).encoder_fingerprint for run in plan.variants[:3]
    }
    assert len(fingerprints) == 3
    run_study(path, output=tmp_path / "out")
    content = json.loads((tmp_path / "out" / "small-quick" / "report.json").read_text())
    assert "not run yet" not in content["facts"]
    assert [row[0] for row in content["tables"][0]["rows"]] == ["mean", "untrained"]


@pytest.mark.slow
@pytest.mark.data
def test_a_study_goes_on_from_a_report_that_another_store_made(write, steps_without_ray, small, tmp_path):
    """The variant that the report has does not run, and what is said of both is what one store says."""
    size = {"set": ["train.max_steps=2", "train.batch_questions=8", "index.precision=fp32"], "curve": [1], "seeds": [1]}
    evaluate = {"stage": "evaluate", "set": ["evaluate.bm25=true"]}
    variants = [STUDY["variants"][0] | {"steps": ["train", "index", evaluate]}, STUDY["variants"][2]]
    contrast = {"better": variants[0]["name"], "than": "BM25", "metric": "answer/top-1"}
    path = write(small, sizes={"quick": size}, variants=variants, contrasts=[contrast])
    first, second, whole = (tmp_path / name for name in ("first", "second", "whole"))
    run_study(path, output=first, only=variants[0]["name"])
    run_study(path, output=whole)
    folder, other = first / "small-quick", f"store.path={tmp_path / 'other'}"
    run_study(path, extra=(other,), output=second, earlier=folder)
    train_key = plan_study(load_study(path)).variants[0].keys[0]
    assert f"study-{train_key}" not in Store(str(tmp_path / "other")).list("encoders")
    one, both = (json.loads((at / "small-quick" / "report.json").read_text()) for at in (whole, second))
    assert one["tables"] == both["tables"]
    assert [step["key"] for step in one["steps"]] == [step["key"] for step in both["steps"]]
    assert read_question_ranks(whole / "small-quick" / QUESTION_RANKS) == read_question_ranks(
        second / "small-quick" / QUESTION_RANKS
    )
    with pytest.raises(ConfigError, match=r"earlier=.*first: no study's report is there"):
        run_study(path, earlier=first)
    content = json.loads((folder / "report.json").read_text()) | {"size": "paper"}
    (folder / "report.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="is the report of study small, size paper; name one of study small, size qu"):
        run_study(path, earlier=folder)


@pytest.mark.parametrize("seeds", [[1], [1, 2]])
def test_an_earlier_report_gives_back_every_answer_of_a_reader_where_it_says_of_which_seed_it_is(
    write, tmp_path, seeds
):
    steps = ["index", {"stage": "reading"}]
    variants = [{"name": "a", "steps": steps}, {"name": "b", "set": ["encoder.num_views=3"], "steps": steps}]
    study = load_study(write({}, variants=variants, sizes={"quick": {"seeds": seeds}}))
    plan = plan_study(study)
    row = {"low": 0.1, "high": 0.9, "n": 10, "value": 0.5}
    lines = [row | {"passages": 1, "metric": metric} for metric in ("f1", "exact_match")]
    index = {"shards": [], "dimension": 4, "dtype": "fp16"}
    records = {}
    for number, (key, step) in enumerate(plan.steps.items()):
        values = [
            {"id": f"q{at}", "article": article, "passages": 1, "exact_match": 0.0, "f1": (at + number) / 20}
            for at, article in enumerate(ARTICLES)
        ]
        reading = {"sets": [{"questions": "dev", "asked": 10, "rows": lines, "values": values}]}
        report = {"reading": reading, "index": index}.get(step.stage, {"passages_written": 9})
        records[key] = StepRecord(key, step.stage, step.command, 1.0, report)
    result = make_report(study, plan, records)
    for name, content in result.files.items():
        (tmp_path / name).write_bytes(content)
    actual = read_report(tmp_path, study, plan)
    if len(seeds) > 1:
        assert not [record for record in actual.values() if record.stage == "reading"]
        del records[plan.variants[-1].keys[-1]]
        facts = json.loads(make_report(study, plan, records).files["report.json"])["facts"]
        assert facts["not run yet"] == f"b, seed {seeds[-1]}"
        return
    assert actual.keys() == records.keys()
    again = make_report(study, plan, actual)
    assert again.tables == result.tables
    assert again.files["answers.parquet"] == result.files["answers.parquet"]


def test_an_earlier_report_gives_back_an_analysis_where_it_has_the_ranks_and_values_of_every_question(write, tmp_path):
    variants = [
        {"name": name, "steps": ["index", "analyze"], "set": [f"encoder.num_views={views}"]}
        for name, views in {"a": 2, "b": 3, "one": 1}.items()
    ]
    study = load_study(write({}, variants=variants, sizes={"quick": {"seeds": [1, 2]}}))
    plan, chance = plan_study(study), np.random.default_rng(5)
    ids = [f"q{at}" for at in range(10)]
    means = {"view_pair_cosine": 0.5, "lv": 0.1, "ppl": 1.5, "ppl_of_mean_entropy": 1.4, "ppl_answer": 1.2}
    means |= {"gold_answer_view_share": 0.5, "attention_kl": 0.2, "win_shares": [0.5, 0.5], "examples": []}
    means |= {"num_questions": 10, "questions_per_passage": 5.0, "attention_passages": 2}
    of_one = {run.keys[-1] for run in plan.variants if run.variant.name == "one"}
    records = {}
    for key, step in plan.steps.items():
        if step.stage != "analyze":
            report = (
                {"shards": [], "dimension": 4, "dtype": "fp16"} if step.stage == "index" else {"passages_written": 9}
            )
            records[key] = StepRecord(key, step.stage, step.command, 1.0, report)
            continue
        systems = [ALL_VIEWS] if key in of_one else ["view 0", "view 1", ALL_VIEWS]
        metrics = [(system, "answer/top-1") for system in systems] + [(ALL_VIEWS, "answer_view/top-1")]
        row = {"questions": "dev", "value": 0.5, "low": 0.1, "high": 0.9, "n": 10}
        ranks = [
            QuestionRanks(system, "dev", ids, ARTICLES, chance.integers(-1, 3, 10).tolist(), [-1] * 10)._asdict()
            for system in [*systems, ANSWER_VIEW]
        ]
        values = (
            []
            if key in of_one
            else [
                QuestionViews(i, article, f"p{article}", chance.random(), chance.random() < 0.5, 0.5)._asdict()
                for i, article in zip(ids, ARTICLES, strict=True)
            ]
        )
        table = [[0.0, chance.random()], [0.5, 0.0]]
        rows = [row | {"system": system, "metric": metric} for system, metric in metrics]
        report = means | {"attention_kl_table": table, "rows": rows, "ranks": ranks, "values": values}
        records[key] = StepRecord(key, step.stage, step.command, 1.0, report)
    result = make_report(study, plan, records)
    for name, content in result.files.items():
        (tmp_path / name).write_bytes(content)
    actual = read_report(tmp_path, study, plan)
    assert actual.keys() == records.keys()
    again = make_report(study, plan, actual)
    assert again.tables == result.tables
    assert {"Views", "Each view alone", "Answer view (CAMVR eq. 15)"} < {table.title for table in result.tables}
    from_one = {
        key: record._replace(
            report=json.loads(json.dumps(record.report).replace('"view 1"', '"view 2"').replace('"view 0"', '"view 1"'))
        )
        for key, record in records.items()
    }
    earlier = make_report(study, plan, from_one)  # as of earlier programs
    assert earlier.tables == result.tables and earlier.files[QUESTION_RANKS] == result.files[QUESTION_RANKS]
    assert json.loads(earlier.files["report.json"])["steps"] == json.loads(result.files["report.json"])["steps"]
    files = {name for name in result.files if name.endswith(".parquet")}
    assert files == {"questions.parquet", "views.parquet"}
    assert all(again.files[name] == result.files[name] for name in files)
    parts = [part for part in read_question_ranks(tmp_path / QUESTION_RANKS) if part.system != "a: view 1"]
    (tmp_path / QUESTION_RANKS).write_bytes(question_ranks_bytes(parts))
    assert _analyses(read_report(tmp_path, study, plan)) == _analyses(records) - {
        run.keys[-1] for run in plan.variants[:2]
    }
    (tmp_path / QUESTION_VIEWS).unlink()
    without = read_report(tmp_path, study, plan)
    assert _analyses(without) == of_one, "without values none is complete, but those of one view, which have none"


def _analyses(records: dict[str, StepRecord]) -> set[str]:
    return {key for key, record in records.items() if record.stage == "analyze"}


@pytest.mark.parametrize("path", STUDY_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_steps_side_by_side_never_need_or_disturb_each_other(path, at_once):
    chance = random.Random(at_once)
    plan = shipped_plan(path)
    waiting, running, records = list(plan.steps.values()), [], {}
    most = 0
    while waiting or running:
        step = execute._next_step(waiting, records, running, at_once)
        if step is None:
            assert running, "nothing runs and nothing may start"
            finish = running.pop(chance.randrange(len(running)))
            records[finish.key] = StepRecord(finish.key, finish.stage, "", 0.0, {})
            continue
        assert set(step.after) <= set(records)
        waiting.remove(step)
        running.append(step)
        most = max(most, len(running))
        assert len(running) <= at_once
        assert len(running) == 1 or not {"prepare", "cost"} & {one.stage for one in running}
        index_names = [one.run.index.name for one in running if one.stage in SEARCHING]
        assert len(index_names) == len(set(index_names))
    assert set(records) == set(plan.steps)
    indexes = {step.run.index.name for step in plan.steps.values() if step.stage == "index"}
    assert most > 1 or at_once == 1 or len(indexes) < 2


def test_the_papers_own_figures_stand_beside_ours():
    views = {"view_pair_cosine": 0.9, "ppl": 1.3, "ppl_of_mean_entropy": 1.2, "ppl_answer": None, "attention_kl": 0.2}
    counts = {"gold_answer_view_share": None, "num_questions": 90, "questions_per_passage": 4.5}
    analysis = {"analyze": [{"seed": 1, **views, **counts, "lv": 0.01, "win_shares": [0.7, 0.3], "values": []}]}
    lines = [
        {
            "system": name,
            "vectors_a_passage": 8,
            "encode_ms": 2.0,
            "encode_ratio": 1.0,
            "search_ms": 3.0,
            "search_ratio": ratio,
        }
        for name, ratio in (("DPR", 1.0), ("MVR (k=8)", 3.0), ("snippet means (k=8)", 2.8))
    ]
    cost_report = {"cost": [{"threads": 1, "lines": lines}]}
    results = [
        VariantResult(
            "MVR", {"lv": 0.126, "search_ms/DPR": 10, "search_ms/MVR": 25}, "", {}, {}, {**analysis, **cost_report}
        ),
        VariantResult("CAMVR", {}, "", {}, {}, analysis),
    ]
    views_table = view_table(results)
    assert [dict(zip(views_table.columns, row))["paper LV"] for row in views_table.rows] == ["0.126", ""]
    assert [dict(zip(views_table.columns, row))["LV"] for row in views_table.rows] == ["0.01", "0.01"]
    assert "paper PPL" not in views_table.columns and len(views_table.columns) == len(views_table.rows[0])
    cost = cost_table(results)
    rows = {row[0]: dict(zip(cost.columns, row)) for row in cost.rows}
    assert rows["MVR (k=8)"]["paper search ratio"] == "2.5" and rows["MVR (k=8)"]["search ratio"] == "3"
    assert rows["snippet means (k=8)"]["paper search ratio"] == rows["DPR"]["paper encode ratio"] == ""
    assert "one thread" in cost.note
    on_both = VariantResult(
        "MVR", {}, "", {}, {}, {"cost": [*cost_report["cost"], {"threads": 1, "lines": lines, "device": "H200"}]}
    )
    assert "on H200 and one thread;" in cost_table([on_both]).note


def test_times_on_a_gpu_are_another_step_and_need_one():
    study = ROOT / "configs" / "studies" / "mvr-cost.yaml"
    [on_cpu, on_gpu] = [
        next(step for step in plan_study(load_study(study, "gpu", words)).steps.values() if step.stage == "cost")
        for words in (["resources.gpus_per_encoder=0"], [])
    ]
    assert on_gpu.key != on_cpu.key
    bare = ClusterInfo(4, 0, (Node(4, 0),))
    message = "1 stages of 0 CPU and 1 GPU each, .*; 1 GPUs asked for, the cluster has 0"
    with pytest.raises(ResourceError, match=message):
        execute._start(on_gpu, StagePool(bare), no_progress)


def test_at_once_is_checked_before_anything_runs(write, tmp_path):
    path = write({}, sizes={"quick": {"at_once": 0}})
    with pytest.raises(ConfigError, match=r"at_once: 0 is not a whole number of at least 1"):
        load_study(path)
    with pytest.raises(ConfigError, match="at_once is 0; at least one step must run"):
        run_study(path, at_once=0)


def feedback_in_memory(store: Store, setting: Setting, questions: list[Question]) -> dict[str, np.ndarray]:
    """The feedback views that the simulator adds to version 1, by passage, in order."""
    version = manifest.read(store, "index", 1)
    views, texts = load_views(store, version), Corpus.open(store, version.corpus)
    simulator = RefinementSimulator(
        views, version.num_views, lambda row: texts.get([views.ids[row]])[views.ids[row]].text
    )
    encoder = open_encoder(store, version.encoder_name, version.encoder_fingerprint)
    queries = encoder.embed_queries([question.text for question in questions])
    source = LabelledQuestions("known", queries, [question.answers for question in questions], [set()] * len(questions))
    start = simulator.start(queries)
    hits = simulator.search(simulator.open_index(start), queries, 20)
    changes = simulator.step(setting, start, simulator.label(setting, source, start, hits)).changes
    rows = np.unique(changes.feedback_F)
    return {views.ids[row]: changes.feedback_FD[changes.feedback_F == row] for row in rows}


def feedback_at_rest(store: Store, version: Manifest) -> dict[str, np.ndarray]:
    views = load_views(store, version)
    extra_N = views.view_numbers_N >= version.num_views
    spans = zip(views.ids, views.row_ptr, views.row_ptr[1:])
    feedback = {passage_id: views.vectors_ND[low:high][extra_N[low:high]] for passage_id, low, high in spans}
    return {passage_id: own for passage_id, own in feedback.items() if len(own)}


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.ray
def test_trying_out_in_memory_ends_where_refine_ends(own_index, run_over, without_ray):
    """The simulator against `refine` over the same index: the same accuracies, nothing published."""
    store = Store(str(own_index))
    questions = read_questions(only_corpus(store), "dev")
    write_questions(only_corpus(store), "known", questions[:28])
    write_questions(only_corpus(store), "gate", questions[28:])
    sections = {
        "refine": {
            "questions": "known",
            "gate": ["gate"],
            "depth": 20,
            "max_heldout_loss": 100,
            "rounds": 1,
            "patience": 1,
        },
        "resources": {"local_passages": 100},
        "evaluate": {"k": [5, 20]},  # top-1, by which rounds are chosen, is measured besides
    }
    run = run_over(own_index, **sections)
    settings = [
        {"method": "linear", "positives": "all", "depth": 20},
        {"method": "passage", "positives": "all", "depth": 20, "step_size": 0.05},
        {"method": "feedback_views", "depth": 20, "weight": 0.8},
        {"method": "feedback_views", "depth": 20, "weight": 0.7, "clusters": 2},
        {"method": "feedback_views", "depth": 20, "weight": 0.9, "clusters": 4, "positives": "all"},
    ]
    report = refinement_grid(run, options={"settings": settings})
    assert manifest.list_versions(store, "index") == [1]
    for trial in report.tried:
        settings = {"method": trial.setting["method"], "positives": trial.setting["positives"]}
        sections["refine"] |= settings | {"step_size": trial.setting["step_size"]}
        sections["refine"] |= {f"feedback_{name}": trial.setting[name] for name in ("weight", "clusters")}
        refinement = refine(run_over(own_index, **sections))
        rows = {(row.kind, row.protocol): row for row in refinement.accuracy}
        sets = [(kind, *one) for kind in ("answer", "gold") for one in enumerate(("transductive", "gate"))]
        for kind, number, protocol in sets:
            row = rows[kind, protocol]
            before, after = (getattr(each.sets[number], kind) for each in (trial.rounds[0], trial.rounds[1]))
            assert (before[1], before[5]) == pytest.approx((row.top_1_before, row.top_5_before))
            assert (after[1], after[5], after[20]) == pytest.approx(
                (row.top_1_after, row.top_5_after, row.top_20_after)
            )
        setting = Setting(**trial.setting)
        if setting.method == "feedback_views":
            memory_views = feedback_in_memory(store, setting, questions[:28])
            views_at_rest = feedback_at_rest(store, refinement.published)
            assert memory_views.keys() == views_at_rest.keys()
            for passage_id, views in memory_views.items():
                np.testing.assert_allclose(views_at_rest[passage_id], views, atol=1e-3)
            assert min(2, setting.clusters) <= max(map(len, memory_views.values())) <= setting.clusters
        if refinement.published:
            manifest.rollback(store, "index", 1)


def test_expansion_is_every_combination_of_lists():
    results = list(expand_settings([{"method": "linear", "beta": [0.1, 0.2], "gamma": [0, -1]}, {"weight": 0.5}]))
    assert len(results) == 5
    assert {(one["beta"], one["gamma"]) for one in results[:4]} == {(0.1, 0), (0.1, -1), (0.2, 0), (0.2, -1)}


def test_the_commands_of_a_report_name_the_files_as_given_and_the_overrides(write, monkeypatch, tmp_path):
    write({}, variants=[{"name": "a", "steps": ["index"]}])
    monkeypatch.chdir(tmp_path)
    study = load_study("small.yaml", extra=("index.scan=int8",))
    assert study.words == ["study", "small.yaml", "size=quick", "index.scan=int8"]
    for step in plan_study(study).steps.values():
        assert step.command.startswith(f"mvr-ray {step.stage} run.yaml ") and "index.scan=int8" in step.command
    with_keys = load_study("small.yaml", extra=("store.path=s3://KEY:secret@bucket/p?region=r",))
    plan, empty = plan_study(with_keys), {"passages_written": 9}
    records = {key: StepRecord(key, step.stage, step.command, 1.0, empty) for key, step in plan.steps.items()}
    report = make_report(with_keys, plan, records)
    assert report.files["report.md"].count(b"store.path=s3://bucket/p?region=r") == 1 + len(plan.steps)
    assert not [name for name, content in report.files.items() if b"KEY" in content or b"secret" in content]
    own = load_study(ROOT / "configs" / "studies" / "mvr-views.yaml")
    assert own.run_file == str(ROOT / "configs" / "presets" / "squad-study.yaml")
    monkeypatch.chdir(ROOT)
    assert own.words[1] == "configs/studies/mvr-views.yaml" and own.run_file == "configs/presets/squad-study.yaml"


def test_the_paper_s_figures_of_a_form_stand_beside_its_raw_setting_if_there_is_one(write):
    figures = {"passage: answer/top-1": 0.5, "hybrid: answer/top-1": 0.6}
    variant = {"name": "a", "steps": ["index", {"stage": "refinement_grid"}], "paper": figures}
    study = load_study(write({}, variants=[variant], sizes={"quick": {"seeds": [1]}}))
    plan = plan_study(study)
    ends = {
        "chosen": 1,
        "stopped": 1,
        "restored": 1,
        "lowest_loss": 1,
        "rounds": [refined_round(n, 0, 0) for n in (0, 1)],
    }
    forms = ("passage", True), ("passage", False), ("hybrid", True)
    trials = [
        {
            **ends,
            "label": f"{method} {keeps_length}",
            "setting": {"method": method, "step_size": 0.02, "keep_length": keeps_length},
        }
        for method, keeps_length in forms
    ]
    ids = [f"q{number}" for number in range(10)]
    sets = [{"questions": name, "ids": ids, "articles": ARTICLES} for name in ("known", "gate", "unseen")]
    grid = {"passages_written": 9, "tried": trials, "sets": sets, "gate": "gate"}
    records = {key: StepRecord(key, step.stage, step.command, 1.0, grid) for key, step in plan.steps.items()}
    tables = {table.title: table for table in make_report(study, plan, records).tables}
    depths = tables["Refinement at every depth"]
    paper = [row[depths.columns.index("paper")] for row in depths.rows]
    assert paper == ["", "", "50.0 / - / -", "60.0 / - / -"], "before, kept, raw, and the only hybrid one"


@pytest.mark.parametrize("size", ["quick", "gpu", "paper"])
@pytest.mark.parametrize("path", STUDY_FILES, ids=lambda path: path.stem)
def test_a_variant_named_after_a_paper_trains_by_that_paper_s_loss(path: Path, size: str) -> None:
    plan, config = shipped_plan(path, size), load_study(path, size).config
    for variant in plan.variants:
        trainings = [plan.steps[key].run for key in variant.keys if plan.steps[key].stage == "train"]
        for name, run in ((variant.variant.name, run) for run in trainings):
            train, encoder, strategy = run.train, run.encoder, run.encoder.strategy
            if size == "paper" and re.match("MVR|ME-BERT|.*DPR|CAMVR", name):  # one rate, and DPR's warmup and clip
                assert (train.viewer_lr_factor, train.warmup_share) == (1, 0.067), name
                assert train.clip_norm == 2 * run.resources.train_workers, name
            if name.startswith("MVR"):  # eq. 5 to 8, tables 3 and 8: lambda 0.01, tau from 1 by alpha 0.1 to 0.3
                assert (strategy, train.loss) == ("viewers", "mvr"), name
                assert train.local_weight == (0 if "without the local term" in name else 0.01), name
                assert train.temperature == (1 if "without annealing" in name else None), name
                assert (train.temperature_decay, train.temperature_floor) == (0.1, 0.3), name
            elif name.startswith("ME-BERT") or re.search("(^|, )best view", name):
                assert (train.loss, train.local_weight) == ("mvr", 0), name
            elif "DPR" in name:
                assert (strategy, train.loss) == ("cls", "dpr"), name
                is_announced = size == "quick" and "At the quick size DPR's temperature falls" in config.about
                assert train.temperature == (None if is_announced else 1), name  # eq. 2 has none
            elif name.startswith("CAMVR"):
                assert (strategy, train.loss) == ("snippets", "camvr"), name
                if size == "paper" and config.paper.startswith("CAMVR"):  # eq. 13 alone
                    has_empty = encoder.num_views > 1 and encoder.readout == "viewer"
                    assert (train.local_weight, not has_empty or encoder.empty_snippets == "kept") == (0, True), name
            if re.fullmatch("CAMVR,? as published", name):  # eq. 13 alone, the title under the first viewer
                assert train.temperature is None or "eq. 13 alone at temperature 1" in config.about, name
                assert (train.local_weight, train.warm_start_steps or 0) == (0, 0), name
                assert encoder.title_view and encoder.empty_snippets == "kept" and encoder.readout == "viewer", name
                assert (encoder.normalize, encoder.score_scale) == (False, 1), name


def test_a_report_says_nothing_of_what_was_not_measured(write):
    study = load_study(write({}, variants=STUDY["variants"][:1], sizes={"quick": {"seeds": [1]}}))
    plan = plan_study(study)
    empty = {"passages_written": 9}
    records = {key: StepRecord(key, step.stage, step.command, 1.0, empty) for key, step in plan.steps.items()}
    last = plan.variants[0].keys[-1]
    report = make_report(study, plan, {**records, last: records[last]._replace(report=fake(0.2, 1))})
    assert [table.title for table in report.tables] == ["Retrieval"]
    low, high = share_interval(hits(0.2)[0], ARTICLES)
    assert f"20.0 ({100 * low:.1f} to {100 * high:.1f})" in report.files["report.md"].decode()
    assert set(report.files) == {"report.md", "report.html", "report.json", "questions.parquet"}


def test_bm25_stands_once_where_every_variant_measures_it(write):
    study = load_study(write({}, variants=STUDY["variants"][::2], sizes={"quick": {"seeds": [1]}}))
    plan = plan_study(study)
    records = {}
    for key, step in plan.steps.items():
        report = {"passages_written": 9, "rows": [], "ranks": []}
        for system in ("x", "bm25") if step.stage == "evaluate" else ():
            part = fake(0.2, 1, system)
            report |= {name: report[name] + part[name] for name in ("rows", "ranks")}
        records[key] = StepRecord(key, step.stage, step.command, 1.0, report)
    names = [one.name for one in variant_results(study, plan, records)]
    assert names == ["mean", "BM25", "untrained"]
    ranks = pq.read_table(BytesIO(make_report(study, plan, records).files["questions.parquet"])).to_pylist()
    keys = [(row["system"], row["seed"], row["question_id"]) for row in ranks]
    assert len(keys) == len({*keys}) == 30


def test_bm25_of_other_passages_has_a_name_of_its_own_also_from_an_earlier_report(write, tmp_path):
    study = load_study(write({}, variants=STUDY["variants"][::2], sizes={"quick": {"seeds": [1]}}))
    plan = plan_study(study)
    first_keys, second_keys = (
        {key for key in run.keys if plan.steps[key].stage == "evaluate"} for run in plan.variants
    )

    def records_of(shares: dict[str, float]) -> dict[str, StepRecord]:
        records = {}
        for key, step in plan.steps.items():
            report = {"passages_written": 9, "rows": [], "ranks": []}
            for part in [fake(0.2, 1), fake(shares[key], 1, "bm25")] if key in shares else []:
                ranks = [one | {"gold_ndcgs": []} for one in part["ranks"]]
                report |= {"rows": report["rows"] + part["rows"], "ranks": report["ranks"] + ranks}
            records[key] = StepRecord(key, step.stage, step.command, 1.0, report)
        return records

    for share, names in ((0.4, ["BM25", "BM25, untrained"]), (0.3, ["BM25"])):
        records = records_of({**dict.fromkeys(first_keys, 0.3), **dict.fromkeys(second_keys, share)})
        for name, content in make_report(study, plan, records).files.items():
            (tmp_path / name).write_bytes(content)
        earlier = read_report(tmp_path, study, plan)
        for one in (records, earlier, records | {key: earlier[key] for key in second_keys}):
            words = {one.name: one for one in variant_results(study, plan, one) if "BM25" in one.name}
            assert list(words) == names
            for result, value in zip(words.values(), (0.3, 0.4)):
                assert result.cells["gold/top-1"].value == pytest.approx(value)
                assert result.ranks[1].gold_ranks.count(0) == 10 * value


def test_the_page_shows_every_character_and_column_of_a_name_with_marks(write):
    name = "a | *b* [c](d) \\_ &amp; 2*3*4"
    study = load_study(write({}, variants=[{**STUDY["variants"][0], "name": name}], sizes={"quick": {"seeds": [1]}}))
    plan = plan_study(study)
    empty = {"passages_written": 9}
    records = {key: StepRecord(key, step.stage, step.command, 1.0, empty) for key, step in plan.steps.items()}
    last = plan.variants[0].keys[-1]
    report = make_report(study, plan, {**records, last: records[last]._replace(report=fake(0.2, 1))})
    page = report.files["report.html"].decode()
    assert f"<td>{html.escape(name)}</td>" in page
    assert page.count("<td>") == page.count("<th>") == len(report.tables[0].columns)


@pytest.fixture
def rows(write, tmp_path):
    """A study over a file of passages, its first step, and its store; the step has finished."""
    source = tmp_path / "rows.jsonl"
    source.write_text('{"id": "1", "text": "It rained."}\n')
    path = write({"store": {"path": str(tmp_path / "store")}, "prepare": {"sources": [str(source)], "num_shards": 1}})
    study, store = load_study(path), Store(str(tmp_path / "store"))
    step = next(iter(plan_study(study).steps.values()))
    report = execute._prepare(step, store, no_progress)
    execute._write_json(store, paths.study_step(step.key), StepRecord(step.key, "prepare", "", 1.0, report)._asdict())
    return study, step, store


def test_steps_over_a_source_that_has_changed_are_others_until_it_is_as_before(rows, tmp_path):
    study, step, store = rows
    plan, source = plan_study(study), tmp_path / "rows.jsonl"
    assert changed_sources(plan, store) == {}
    before = source.read_text()
    source.write_text('{"id": "1", "text": "It snowed."}\n')
    changes = changed_sources(plan, store)
    other = plan_study(study, changes)
    assert changes.keys() == {step.key} and not {*plan.steps} & {*other.steps}
    assert [*plan_study(study, changed_sources(plan, store)).steps] == [*other.steps]
    source.write_text(before)
    assert changed_sources(plan, store) == {}
    source.unlink()
    assert changed_sources(plan, store) == {}


def test_steps_over_a_model_or_feedback_that_has_changed_are_others_until_it_is_as_before(write, tmp_path):
    model, feedback = tmp_path / "model", tmp_path / "feedback.jsonl"
    model.mkdir()
    steps = ["train", "index", "refine"]
    run = {"encoder": {"backbone": str(model)}, "refine": {"feedback": str(feedback)}}
    study = load_study(write(run, variants=[{"name": "a", "steps": steps}], sizes={"quick": {"seeds": [1]}}))
    store = Store(str(tmp_path / "store"))

    def stages(weights: str, labels: str) -> list[str]:
        """Finish the study over these files; returns the stages that were not finished before."""
        (model / "weights").write_text(weights)
        feedback.write_text(labels)
        own = [step for step in execute.plan_over_sources(study, store).steps.values() if step.stage != "prepare"]
        new = [step for step in own if not store.exists(paths.study_step(step.key))]
        for step in new:
            record = StepRecord(step.key, step.stage, "", 1.0, {}, inputs=execute._input_digests(step))
            execute._write_json(store, paths.study_step(step.key), record._asdict())
        return [step.stage for step in new]

    assert stages("1", "1") == steps
    assert stages("1", "1") == []
    assert stages("2", "1") == steps
    assert stages("2", "2") == ["refine"], "also after another change"
    assert stages("2", "1") == stages("1", "1") == []
    (model / "weights").unlink()
    model.rmdir()
    assert changed_sources(plan_study(study), store) == {}


def test_a_damaged_record_of_a_step_counts_as_none_and_one_without_a_checksum_is_read(rows, tmp_path):
    study, step, store = rows
    plan, path = plan_study(study), paths.study_step(step.key)
    data = store.read_bytes(path)
    [record] = execute.read_records(plan, store).values()
    for content in (data[:40], data.replace(b'"seconds": 1.0', b'"seconds": 2.0')):
        store.write_bytes(path, content)
        assert execute.read_records(plan, store) == {}
    store.write_bytes(path, json.dumps(record._asdict()).encode())
    assert execute.read_records(plan, store) == {step.key: record}
    store.write_bytes(paths.study_corpus("corpus"), b"{")
    execute._restore_corpus(plan, [*plan.steps.values()][1], store, no_progress)
    assert execute._read_json(store, paths.study_corpus("corpus"))["key"] == step.key


def test_the_code_has_no_commit_without_git_or_in_the_repository_of_another_project(monkeypatch, tmp_path):
    package = tmp_path / "venv" / "mvr_ray" / "studies"
    package.mkdir(parents=True)
    monkeypatch.setattr(execute, "__file__", str(package / "execute.py"))
    for words in ("init -q", "-c user.name=n -c user.email=e commit -q --allow-empty -m m"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    assert execute.code_version() == __version__
    monkeypatch.setenv("PATH", str(tmp_path))
    assert execute.code_version() == __version__


def test_the_code_of_a_report_is_that_of_a_commit_or_has_changes(monkeypatch, tmp_path):
    package = tmp_path / "mvr_ray" / "studies"
    package.mkdir(parents=True)
    monkeypatch.setattr(execute, "__file__", str(package / "execute.py"))
    (package / "execute.py").write_text("1")
    for words in ("init -q", "add .", "-c user.name=n -c user.email=e commit -q -m m"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    (tmp_path / "report.md").write_text("beside the package")
    assert re.fullmatch(rf"{re.escape(__version__)} \(commit [0-9a-f]+\)", execute.code_version())
    (package / "loss.py").write_text("2")
    assert re.fullmatch(rf"{re.escape(__version__)} \(commit [0-9a-f]+ with changes\)", execute.code_version())


@pytest.mark.data
def test_a_corpus_that_another_size_has_replaced_is_put_back_before_a_step_uses_it(write, small):
    sizes = {
        name: {"set": [f"prepare.max_passages={most}"], "seeds": [1]} for name, most in (("quick", 20), ("big", 40))
    }
    path = write(small, sizes=sizes)
    plans = {size: plan_study(load_study(path, size)) for size in sizes}
    store = Store(small["store"]["path"])

    def passages() -> int:
        return Corpus.open(store, "corpus").num_passages

    for plan in plans.values():
        first = next(iter(plan.steps.values()))
        execute._prepare(first, store, no_progress)
    assert passages() == 40
    for size, most in (("quick", 20), ("quick", 20), ("big", 40)):
        training = next(step for step in plans[size].steps.values() if step.stage == "train")
        execute._restore_corpus(plans[size], training, store, no_progress)
        assert passages() == most
    before = Corpus.open(store, "corpus").number
    execute._restore_corpus(plans["big"], training, store, no_progress)
    assert Corpus.open(store, "corpus").number == before
