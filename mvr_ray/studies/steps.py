"""Plan the steps of a study: each runs once for all variants that need it.

The product of a step is its stage, except for a `train` step of another task: that makes a reader, or a cross-encoder,
with which the chain's later `mine` steps denoise. With `train.init_from=previous` training continues from the chain's
previous encoder.

A step's key is a digest of its stage, of the sections that determine its result, and of the keys of the steps before
it; it excludes names, resources and the store. Where the files that a step reads (sources, the folder of a model,
feedback) have changed since it finished, the key covers their digests, too. Steps of equal key are one step, in this
and later studies over the same store. The key of a step names its product (an encoder, an index, mined questions), so
no two steps write to one place.
A corpus keeps its name, by which question sets and messages refer to it; `execute` restores it.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from mvr_ray.config import RunConfig
from mvr_ray.distributed.models import pair_spec, reader_spec
from mvr_ray.distributed.train import SNAPSHOT
from mvr_ray.errors import ConfigError
from mvr_ray.stages import STAGES
from mvr_ray.store.files import without_keys
from mvr_ray.studies.definition import StepConfig, Study, VariantConfig


class StageRule(NamedTuple):
    """Rules of a stage in a study.

    sections        of the run file, which determine its result
    needs           products of earlier steps that it reads, where the chain has them; a stage that needs `refine`
                    measures the version that the chain's refinement published
    uses_version    uses one version of the index, which must be live
    alone           no other step runs beside it: `prepare` writes the corpus of other steps, and `cost` measures time
    reads           the setting that may name a file, or the folder of a model, on which the result depends
    report_fields   fields added to its report: part of the key, so a step whose report lacks them runs again
    """

    sections: tuple[str, ...]
    needs: tuple[str, ...]
    uses_version: bool = False
    alone: bool = False
    reads: str = ""
    report_fields: str = ""


RULES = {
    "prepare": StageRule(("prepare",), (), alone=True),
    "train": StageRule(("encoder", "train"), ("prepare", "mine"), reads="encoder.backbone"),
    "mine": StageRule(("mine",), ("prepare", "cross_encoder"), True, reads="mine.cross_encoder"),
    "index": StageRule(("encoder", "index"), ("prepare", "train"), reads="encoder.backbone"),
    "refine": StageRule(("refine",), ("index",), True, reads="refine.feedback"),
    "evaluate": StageRule(("evaluate", "retrieve"), ("index", "refine"), True, report_fields="ranks"),
    "analyze": StageRule(
        ("analyze", "evaluate"),
        ("index", "refine"),
        True,
        report_fields="ranks and values of every question, over all articles",
    ),
    "cost": StageRule(("encoder", "evaluate"), ("prepare",), True, alone=True, reads="encoder.backbone"),
    "refinement_grid": StageRule(
        ("refine", "evaluate"), ("index",), True, report_fields="when rules stop, the newest questions, ranks"
    ),
    "reading": StageRule(
        ("read", "retrieve", "evaluate"),
        ("index", "refine", "reader"),
        True,
        reads="read.reader",
        report_fields="values of every question",
    ),
    "entity_frequency": StageRule(("evaluate", "retrieve"), ("index", "refine"), True),
}
_NAMES = {
    "encoder": ("name",),
    "index": ("name", "encoder"),
    "mine": ("output", "cross_encoder"),
    "train": ("hard_negatives", "cross_encoder", "reader"),
}
_FORMER_DEFAULTS = {
    "encoder": {
        "empty_snippets": "masked",
        "title_view": False,
        "whole_view": False,
        "query_prompt": None,
        "passage_prompt": None,
        "overlap_tokens": 0,
        "truncate_dim": None,
    },
    "index": {"keep_refinement": True, "compact_share": 0.25, "lexical": False, "language": "english"},
    "mine": {"max_passage_questions": 0},
    "prepare": {"fields": {}},
    "retrieve": {"filter": None},
}
"""Behaviour before a setting existed. A setting of this value is not in the key: finished steps stay valid."""

_REMOVED_SETTINGS = {"evaluate": {"hybrid_depth": 1000}, "retrieve": {"dense_weight": None}}
"""Removed settings, with their value in finished steps."""

NO_CHANGES: Mapping[str, list[str]] = MappingProxyType({})
PREVIOUS = "previous"
"""Value of `train.init_from`: the chain's previous encoder."""


@dataclass(frozen=True)
class PlannedStep:
    """One step to run. `after` are the keys of earlier steps, `corpus` is the key of the step that prepares its corpus,
    and `refinement` that of the refinement that it measures."""

    key: str
    stage: str
    run: RunConfig
    command: str
    after: tuple[str, ...]
    corpus: str
    refinement: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedVariant:
    """A variant with one seed: the keys of its steps, in order. `at`: training steps of its last training before the
    measurement; 0: all."""

    variant: VariantConfig
    seed: int
    keys: tuple[str, ...]
    at: int = 0


@dataclass
class StudyPlan:
    """Every distinct step in a runnable order, and the steps of each variant."""

    steps: dict[str, PlannedStep] = field(default_factory=dict)
    variants: list[PlannedVariant] = field(default_factory=list)

    def part(self, pattern: str) -> "StudyPlan":
        """Select the variants whose name matches the regular expression, and their steps. Raises ConfigError without
        any."""
        try:
            variants = [run for run in self.variants if re.search(pattern, run.variant.name)]
        except re.error as error:
            raise ConfigError(f"only={pattern} is no regular expression: {error}") from None
        if not variants:
            names = dict.fromkeys(run.variant.name for run in self.variants)
            raise ConfigError(f"only={pattern} has a match in no variant's name; there are {', '.join(names)}")
        return self.of(variants)

    def of(self, variants: "list[PlannedVariant]") -> "StudyPlan":
        """Select variants, and their steps."""
        keys: set[str] = set()
        pending_keys = [key for run in variants for key in run.keys]
        while pending_keys:
            if (key := pending_keys.pop()) not in keys:
                keys.add(key)
                pending_keys += [*self.steps[key].after, self.steps[key].corpus]
        return StudyPlan({key: step for key, step in self.steps.items() if key in keys}, variants)


_PREPARE = StepConfig.model_construct(stage="prepare")
"""The preparation of a corpus, which every step needs; made once, as pydantic takes a millisecond."""


def plan_study(study: Study, changed_sources: Mapping[str, list[str]] = NO_CHANGES) -> StudyPlan:
    """Plan the steps of every variant and seed, in the order of the file, equal ones once. `changed_sources` has,
    by key, the digests of what finished steps read that has changed: these and the steps after them get other keys."""
    plan, curve = StudyPlan(), study.at_size.curve
    for variant in study.config.variants:
        steps = study.steps(variant)
        seeds = study.at_size.seeds if variant.seeds else study.at_size.seeds[:1]
        tasks = [
            step.stage == "train" and study.resolve(study.overrides(variant, step, seeds[0])).train.task
            for step in steps
        ]
        last_train = max((number for number, task in enumerate(tasks) if task == "retriever"), default=-1)
        for seed in seeds:
            for at in [*(curve if last_train >= 0 else []), 0]:
                chain = _Chain(study, variant, seed, at, changed_sources)
                keys = [chain.add(plan, step, number == last_train) for number, step in enumerate(steps)]
                plan.variants.append(PlannedVariant(variant, seed, tuple(keys), at))
    return plan


class _Chain:
    """The steps of one variant with one seed. `latest` has the key of the last step of each product. `snapshot`: after
    the last training, the suffix of the encoder's name that later steps read; "" for the end of the training."""

    def __init__(
        self, study: Study, variant: VariantConfig, seed: int, at: int, changed_sources: Mapping[str, list[str]]
    ) -> None:
        self.study, self.variant, self.seed, self.at = study, variant, seed, at
        self.changed_sources = changed_sources
        self.latest: dict[str, str] = {}
        self.snapshot = ""

    def add(self, plan: StudyPlan, step: StepConfig, is_last_train: bool) -> str:
        """Plan a step and the preparation of its corpus; returns its key."""
        overrides, curve = self.study.overrides(self.variant, step, self.seed), self.study.at_size.curve
        if is_last_train and curve:
            overrides.append(f"train.snapshot_steps={curve}")
        run = self.study.resolve(overrides)
        self._plan(plan, _PREPARE, run, overrides)
        key = self._plan(plan, step, run, overrides)
        if is_last_train and self.at:
            self.snapshot = f"{SNAPSHOT}{self.at}"
        return key

    def _plan(self, plan: StudyPlan, step: StepConfig, run: RunConfig, overrides: list[str]) -> str:
        stage, rule = step.stage, RULES[step.stage]
        product = run.train.task if stage == "train" and run.train.task != "retriever" else stage
        needs = [self.latest[name] for name in self._needs(product, rule, run) if name in self.latest]
        parts = [
            stage,
            *_deciding_values(product, stage, run),
            *self._inputs_by_name(product, run),
            step.options,
            *needs,
        ]
        parts += [text for text in (rule.report_fields, self.snapshot if "train" in rule.needs else "") if text]
        key = _digest(parts)
        if key in self.changed_sources:
            key = _digest([*parts, self.changed_sources[key]])
        if key not in plan.steps:
            names = self._names(product, run, key)
            words = [stage, self.study.run_file, *overrides, *names] if stage in STAGES else self.study.words
            plan.steps[key] = PlannedStep(
                key,
                stage,
                self.study.resolve([*overrides, *names]),
                without_keys(shlex.join(["mvr-ray", *words])),
                tuple(needs),
                plan.steps[needs[0]].corpus if needs else key,
                self.latest.get("refine") if "refine" in rule.needs else None,
                step.options,
            )
        if product in ("train", "index"):
            self.latest.pop("refine", None)
        self.latest[product] = key
        return key

    def _needs(self, product: str, rule: StageRule, run: RunConfig) -> tuple[str, ...]:
        if product == "mine" and run.mine.method == "index":
            return (*rule.needs, "index")
        if product == "train" and run.train.init_from == PREVIOUS:
            if "train" not in self.latest:
                raise ConfigError(
                    f"{self.study.file}: variant {self.variant.name!r} has train.init_from={PREVIOUS} in its first "
                    f"train step; leave it out there, to start from the backbone"
                )
            return (*rule.needs, "train")
        return rule.needs

    def _inputs_by_name(self, product: str, run: RunConfig) -> list[Any]:
        """Return the settings that name an input of this step which no earlier step of the chain makes."""
        if product == "mine" and run.mine.cross_encoder and "cross_encoder" not in self.latest:
            return [run.mine.cross_encoder, asdict(pair_spec(run))]
        if product in ("train", "cross_encoder", "reader") and run.train.hard_negatives and "mine" not in self.latest:
            return [run.train.hard_negatives]
        if product == "index" and run.index.encoder not in ("auto", "untrained") and "train" not in self.latest:
            raise ConfigError(
                f"{self.study.file}: variant {self.variant.name!r} has index.encoder={run.index.encoder}, but no train "
                f"step before its index step, which therefore embeds with the backbone; add a train step, or set "
                f"index.encoder=untrained"
            )
        return []

    def _names(self, product: str, run: RunConfig, key: str) -> list[str]:
        """Return overrides that name this step's product and inputs, each by the key of its step."""
        if product == "prepare":
            return []
        latest = {**self.latest, product: key}
        names = [f"encoder.name=study-{latest.get('train') or _digest([_deciding_settings(run, 'encoder')])}"]
        names[0] += self.snapshot
        if "index" in latest:
            encoder_kind = "trained" if "train" in latest else "untrained"
            names += [f"index.name=study-{latest['index']}", f"index.encoder={encoder_kind}"]
        if "mine" in latest:
            names.append(f"mine.output=mined-{latest['mine']}")
            if product in ("train", "cross_encoder", "reader"):
                names.append(f"train.hard_negatives=mined-{latest['mine']}")
        if product == "train" and run.train.init_from == PREVIOUS:
            names.append(f"train.init_from=study-{self.latest['train']}")
        if product in ("cross_encoder", "reader"):
            names.append(f"train.{product}=study-{key}")
        if product == "mine" and "cross_encoder" in latest:
            names.append(f"mine.cross_encoder=study-{latest['cross_encoder']}")
        if "reader" in latest:
            names.append(f"read.reader=study-{latest['reader']}")
        return names


def _deciding_values(product: str, stage: str, run: RunConfig) -> list[Any]:
    """Return the settings that determine a step's result. A model with a task head is the same for every readout of its
    backbone; times depend on the device, and BM25's negatives on the language of the words; training, mining,
    refinement and the cutting of passages find answers by `evaluate.match`; views are measured under
    `retrieve.filter`."""
    finds_answers = stage in ("train", "mine", "refine") or (stage == "prepare" and run.prepare.chunk_words > 0)
    patterns = [run.evaluate.match] if finds_answers and run.evaluate.match != "string" else []
    if product in ("reader", "cross_encoder"):
        spec = reader_spec(run) if product == "reader" else pair_spec(run)
        return [run.encoder.backbone, _deciding_settings(run, "train"), asdict(spec), *patterns]
    on_gpu = ["gpu"] if stage == "cost" and run.resources.gpus_per_encoder else []
    ranks_hybrid = stage in ("reading", "evaluate", "entity_frequency") and run.search.hybrid is not None
    hybrid = [run.search.hybrid] if ranks_hybrid else []
    mines_words = stage == "mine" and run.mine.method == "bm25"
    words = [run.index.language] if mines_words and run.index.language != "english" else []
    filters = [run.retrieve.filter] if stage == "analyze" and run.retrieve.filter is not None else []
    settings = [_deciding_settings(run, section) for section in RULES[stage].sections]
    return [*settings, *on_gpu, *hybrid, *words, *patterns, *filters]


def _deciding_settings(run: RunConfig, section: str) -> dict[str, Any]:
    """Return a section without names, and without settings of former default values."""
    former_defaults = _FORMER_DEFAULTS.get(section, {})
    return {
        name: value
        for name, value in {**_REMOVED_SETTINGS.get(section, {}), **run.model_dump(mode="json")[section]}.items()
        if name not in _NAMES.get(section, ()) and (name not in former_defaults or value != former_defaults[name])
    }


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
