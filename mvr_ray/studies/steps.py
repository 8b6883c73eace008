"""Plan the steps of a study: each runs once, however many variants need it.

A `train` step of another task makes a cross-encoder, which the chain's later `mine` steps denoise with, or a reader.
With `train.init_from=previous` it goes on from the encoder that the chain trained before.

A step's key is a digest of its stage, of the sections that decide its result, and of the keys of the steps before it;
names, resources and the store are not in it. Steps of equal key are one step, in this study and in the next one over
the same store. What a step makes (an encoder, an index, mined questions) is named by its key, so no two steps write to
one place. A corpus keeps its name, which is where question sets and messages find it; `execute` puts it back in place.
"""

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass, field
from typing import Any

from mvr_ray.config import RunConfig
from mvr_ray.distributed.models import pair_spec, reader_spec
from mvr_ray.errors import ConfigError
from mvr_ray.stages import STAGES
from mvr_ray.studies.definition import StepConfig, Study, VariantConfig

_SECTIONS = {
    "prepare": ("prepare",),
    "train": ("encoder", "train"),
    "mine": ("mine",),
    "index": ("encoder", "index"),
    "refine": ("refine",),
    "evaluate": ("evaluate", "retrieve"),
    "analyze": ("analyze", "evaluate"),
    "cost": ("encoder", "evaluate"),
    "refinement_grid": ("refine", "evaluate"),
    "reading": ("read", "retrieve", "evaluate"),
    "entity_frequency": ("evaluate", "retrieve"),
}
_NEEDS = {
    "prepare": (),
    "train": ("prepare", "mine"),
    "mine": ("prepare", "cross_encoder"),
    "cross_encoder": ("prepare", "mine"),
    "reader": ("prepare", "mine"),
    "index": ("prepare", "train"),
    "refine": ("index",),
    "evaluate": ("index", "refine"),
    "analyze": ("index", "refine"),
    "cost": ("prepare",),
    "refinement_grid": ("index",),
    "reading": ("index", "refine", "reader"),
    "entity_frequency": ("index", "refine"),
}
_NAMES = {
    "encoder": ("name",),
    "index": ("name", "encoder"),
    "mine": ("output", "cross_encoder"),
    "train": ("hard_negatives", "cross_encoder", "reader"),
}
_BEFORE = {"encoder": {"empty_snippets": "masked", "title_view": False}}
"""What was done before a setting came, so that steps on file stay those of the setting that they had."""

_TELLS_MORE = {
    "refinement_grid": "when rules stop, the newest questions, ranks",
    "evaluate": "ranks",
    "analyze": "eqs. 14 and 15 as in the paper, ranks",
    "reading": "values of every question",
}
"""What a step's report has come to tell: one on file without it is made again."""

_SEES_REFINED = ("evaluate", "analyze", "reading", "entity_frequency")
"""They look at the version that the chain's refinement published."""

PREVIOUS = "previous"
"""As `train.init_from`: the encoder that the chain trained before."""


@dataclass(frozen=True)
class PlannedStep:
    """One step, ready to run. `after` are keys of steps that come first; `refined` is the refinement it looks at."""

    key: str
    stage: str
    run: RunConfig
    command: str
    after: tuple[str, ...]
    refined: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedVariant:
    """A variant with one seed: the keys of its steps, in order."""

    variant: VariantConfig
    seed: int
    keys: tuple[str, ...]


@dataclass
class StudyPlan:
    """Every distinct step in an order that can be run, and which of them each variant takes."""

    steps: dict[str, PlannedStep] = field(default_factory=dict)
    variants: list[PlannedVariant] = field(default_factory=list)

    def ancestors(self, key: str) -> set[str]:
        """Keys of all steps that a step stands on."""
        needed = set(self.steps[key].after)
        return needed.union(*(self.ancestors(one) for one in needed))


def plan_study(study: Study) -> StudyPlan:
    """The steps of every variant and seed, in the order of the file, with equal ones made one."""
    plan = StudyPlan()
    for variant in study.config.variants:
        for seed in study.seeds if variant.seeds else study.seeds[:1]:
            chain = _Chain(study, variant, seed)
            keys = [chain.add(plan, step) for step in study.steps(variant)]
            plan.variants.append(PlannedVariant(variant, seed, tuple(keys)))
    return plan


class _Chain:
    """One variant with one seed, walked step by step."""

    def __init__(self, study: Study, variant: VariantConfig, seed: int) -> None:
        self.study, self.variant, self.seed = study, variant, seed
        self.latest: dict[str, str] = {}

    def add(self, plan: StudyPlan, step: StepConfig) -> str:
        """Plan a step (and the corpus that it stands on); returns its key."""
        overrides = self.study.overrides(self.variant, step, self.seed)
        run = self.study.resolve(overrides)
        self._plan(plan, StepConfig.model_construct(stage="prepare"), run, overrides)
        return self._plan(plan, step, run, overrides)

    def _plan(self, plan: StudyPlan, step: StepConfig, run: RunConfig, overrides: list[str]) -> str:
        stage = step.stage
        made = run.train.task if stage == "train" and run.train.task != "retriever" else stage
        needs = [self.latest[name] for name in self._needs(made, run) if name in self.latest]
        more = [_TELLS_MORE[stage]] if stage in _TELLS_MORE else []
        key = _digest([stage, *_decides(made, stage, run), step.options, *needs, *more])
        names = self._names(made, run, key)
        if key not in plan.steps:
            named = RunConfig.model_validate(_laid_over(run, names))
            refined = self.latest.get("refine") if stage in _SEES_REFINED else None
            typed = [f"{section}.{name}={value}" for section, values in names.items() for name, value in values.items()]
            words = ["mvr-ray", "study", f"configs/studies/{self.study.file.name}", f"size={self.study.size}"]
            if stage in STAGES:
                words = ["mvr-ray", stage, str(self.study.config.run).replace("../", "configs/"), *overrides, *typed]
            plan.steps[key] = PlannedStep(key, stage, named, shlex.join(words), tuple(needs), refined, step.options)
        if made in ("train", "index"):
            self.latest.pop("refine", None)
        if made in ("train", "index", "refine", "mine", "prepare", "cross_encoder", "reader"):
            self.latest[made] = key
        return key

    def _needs(self, stage: str, run: RunConfig) -> tuple[str, ...]:
        if stage == "mine" and run.mine.method == "index":
            return (*_NEEDS[stage], "index")
        if stage == "train" and run.train.init_from == PREVIOUS:
            if "train" not in self.latest:
                raise ConfigError(
                    f"{self.study.file}: variant {self.variant.name!r} has train.init_from={PREVIOUS} in its first "
                    f"train step; leave it out there, to start from the backbone"
                )
            return (*_NEEDS[stage], "train")
        return _NEEDS[stage]

    def _names(self, made: str, run: RunConfig, key: str) -> dict[str, dict[str, Any]]:
        """What this step makes is named by its key, what it reads by the key of the step that made it."""
        if made == "prepare":
            return {}
        latest = {**self.latest, made: key}
        encoder = latest.get("train") or _digest([_deciding(run, "encoder")])
        names: dict[str, dict[str, Any]] = {"encoder": {"name": f"study-{encoder}"}}
        if "index" in latest:
            trained = "trained" if "train" in latest else "untrained"
            names["index"] = {"name": f"study-{latest['index']}", "encoder": trained}
        if "mine" in latest:
            names["mine"] = {"output": f"mined-{latest['mine']}"}
            if made in ("train", "cross_encoder", "reader"):
                names["train"] = {"hard_negatives": f"mined-{latest['mine']}"}
        if made == "train" and run.train.init_from == PREVIOUS:
            names.setdefault("train", {})["init_from"] = f"study-{self.latest['train']}"
        if made in ("cross_encoder", "reader"):
            names.setdefault("train", {})[made] = f"study-{key}"
        if made == "mine" and "cross_encoder" in latest:
            names["mine"]["cross_encoder"] = f"study-{latest['cross_encoder']}"
        if "reader" in latest:
            names["read"] = {"reader": f"study-{latest['reader']}"}
        return names


def _decides(made: str, stage: str, run: RunConfig) -> list[Any]:
    """What a step's result follows from. A model with a head is the same under every readout of its backbone; times are
    those of a device."""
    if made == "reader":
        return [run.encoder.backbone, _deciding(run, "train"), asdict(reader_spec(run))]
    if made == "cross_encoder":
        return [run.encoder.backbone, _deciding(run, "train"), asdict(pair_spec(run))]
    on_gpu = ["gpu"] if stage == "cost" and run.resources.gpus_per_encoder else []
    return [*(_deciding(run, section) for section in _SECTIONS[stage]), *on_gpu]


def _deciding(run: RunConfig, section: str) -> dict[str, Any]:
    plain = run.model_dump(mode="json")[section]
    before = _BEFORE.get(section, {})
    return {
        name: value
        for name, value in plain.items()
        if name not in _NAMES.get(section, ()) and (name not in before or value != before[name])
    }


def _laid_over(run: RunConfig, names: dict[str, dict[str, Any]]) -> dict[str, Any]:
    plain = run.model_dump(mode="json")
    for section, values in names.items():
        plain[section] |= values
    return plain


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
