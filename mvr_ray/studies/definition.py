"""Define the study file: a grid of variants over one run file, in several sizes.

    study: mvr-views
    base: common.yaml                       # sizes, run file and questions shared by studies
    variants:
      - {name: DPR, set: [encoder.strategy=cls, train.loss=dpr], paper: {answer/top-5: 0.55}}

A variant is a chain of steps (stages, each with further overrides). Overrides apply to the run file in the order size,
variant, the variant at this size, step, the step at this size, command line; so the command line wins.
"""

import copy
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from mvr_ray.config import RunConfig, loader, parse_run
from mvr_ray.config.base import ALLOWED, Count, Name, Section, explain
from mvr_ray.errors import ConfigError
from mvr_ray.studies.refinement_simulator import expand_settings

StepName = Literal[
    "train", "mine", "index", "refine", "evaluate", "analyze",
    "cost", "refinement_grid", "reading", "entity_frequency",
]  # fmt: skip

Options = Mapping[str, Any]
"""Options of a measure beyond the run file."""
NO_OPTIONS: Options = MappingProxyType({})
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "cost": {"passages": Count, "questions": Count, "repeats": Count},
    "refinement_grid": {"settings": list[dict[str, Any]]},
    "reading": {"questions": list[Name]},
    "entity_frequency": {"k": Annotated[list[Count], Field(min_length=1)]},
}
"""The options of each measure, with their types."""
BM25, WITH_BM25 = "BM25", ", with BM25"
"""Names in reports and in contrasts: BM25 alone, and the suffix of a variant fused with it."""


def _expand_stage_name(value: Any) -> Any:
    return {"stage": value} if isinstance(value, str) else value


class StepConfig(Section):
    """One step of a variant. A bare stage name is a step without overrides."""

    stage: StepName
    set: list[str] = Field(default_factory=list)
    sizes: dict[str, list[str]] = Field(default_factory=dict)
    """Further overrides of this step, of one size only."""
    only: list[str] = Field(default_factory=list)
    """The sizes with this step; absent: all."""
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_options(self) -> "StepConfig":
        names = OPTIONS.get(self.stage, {})
        if unknown_names := [name for name in self.options if name not in names]:
            known_names = f"it has {', '.join(names)}" if names else "it has none"
            raise ValueError(f"{self.stage} has no option {unknown_names[0]!r}; {known_names}")
        for name, value in self.options.items():
            try:
                TypeAdapter(names[name]).validate_python(value, strict=True)
            except ValidationError as error:
                problem = error.errors()[0]["msg"]
                raise ValueError(f"option {name} of {self.stage} is {value!r:.80}: {problem}") from None
        list(expand_settings(self.options.get("settings", [])))
        return self


Steps = list[Annotated[StepConfig, BeforeValidator(_expand_stage_name)]]


class VariantConfig(Section):
    name: str
    set: list[str] = Field(default_factory=list)
    sizes: dict[str, list[str]] = Field(default_factory=dict)
    """Further overrides of this variant, of one size only."""
    steps: Steps = Field(default_factory=list)
    """Absent: the study's."""
    seeds: bool = True
    """False: the variant is deterministic, so one seed is enough."""
    paper: dict[str, float] = Field(default_factory=dict)
    """The paper's own figures by metric, as shares (0..1) or in the metric's unit."""
    setting: str = ""
    """The data of the paper's figures, where they differ from the study's `paper`."""


class SizeConfig(Section):
    about: str = ""
    set: list[str] = Field(default_factory=list)
    seeds: Annotated[list[int], Field(min_length=1)] = Field(default_factory=lambda: [1])
    curve: list[Count] = Field(default_factory=list)
    """Training steps after which every variant is measured, in addition to the end of its last training."""
    at_once: Annotated[int, Field(ge=1)] = 1
    """Steps that run concurrently, where independent and the cluster has the resources."""


class ContrastConfig(Section):
    """Compare `better` with `than`: the difference over the same seeds, with its 95 % interval.

    Each is a variant, a variant followed by ", with BM25" where `evaluate.hybrid` is set, or BM25: that of the first
    variant with it.
    """

    better: str
    than: str
    metric: str = Field(
        pattern=r"^((answer|gold)/top-[0-9]+|gold/ndcg@10)$",
        json_schema_extra={ALLOWED: "answer/top-K, gold/top-K or gold/ndcg@10"},
    )
    """A metric that each question has a value of."""


class StudyConfig(Section):
    study: Name
    title: str
    paper: str
    """The paper's table or figure for comparison, and the data of its measurements."""
    about: str = ""
    run: str
    """The run file, relative to the study file."""
    questions: Name
    metrics: Annotated[list[str], Field(min_length=1)]
    steps: Steps
    sizes: dict[str, SizeConfig]
    variants: Annotated[list[VariantConfig], Field(min_length=1)]
    contrasts: list[ContrastConfig] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    """Sentences for the end of the report: observations, and the limits of this size."""


class Study(NamedTuple):
    """A study in one size, with the overrides of the command line."""

    config: StudyConfig
    size: str
    file: Path
    extra: tuple[str, ...]
    run_data: Mapping[str, Any]
    """The run file, read once: a study makes thousands of runs of it."""

    @property
    def at_size(self) -> SizeConfig:
        """The settings of this size."""
        return self.config.sizes[self.size]

    @property
    def run(self) -> RunConfig:
        """The run file at this size, without the overrides of a variant."""
        return self.resolve([*self.at_size.set, *self.extra])

    @property
    def words(self) -> list[str]:
        """The words of the command that runs the study, with its overrides."""
        return ["study", _name_in_commands(self.file), f"size={self.size}", *self.extra]

    @property
    def run_file(self) -> str:
        """The run file, as a command names it."""
        return _name_in_commands(self.file.parent / self.config.run)

    def steps(self, variant: VariantConfig) -> list[StepConfig]:
        """Return the steps of a variant in this size, in order."""
        steps = variant.steps or self.config.steps
        return [step for step in steps if not step.only or self.size in step.only]

    def overrides(self, variant: VariantConfig, step: StepConfig, seed: int) -> list[str]:
        common = [f"evaluate.questions=[{self.config.questions}]", f"train.seed={seed}", f"encoder.seed={seed}"]
        own_overrides = [one for part in (variant, step) for one in (*part.set, *part.sizes.get(self.size, ()))]
        return [*common, *self.at_size.set, *own_overrides, *self.extra]

    def resolve(self, overrides: list[str]) -> RunConfig:
        """Apply overrides to the run file. Raises ConfigError."""
        data = copy.deepcopy(dict(self.run_data))
        for override in overrides:
            loader.apply(data, override)
        return parse_run(data, f"{self.file} ({Path(self.config.run).name})")


def _name_in_commands(path: Path) -> str:
    """Return the path of a file without `..`, relative to the working folder where the file is in it."""
    path = Path(os.path.normpath(path))
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def load_study(path: str | Path, size: str = "quick", extra: tuple[str, ...] = ()) -> Study:
    """Read and check a study file: every variant must give a valid run. Raises ConfigError."""
    file = Path(path)
    try:
        config = StudyConfig.model_validate(loader.read(file))
    except ValidationError as error:
        raise ConfigError(explain(error, str(file), StudyConfig)) from None

    def require_sizes(sizes: Iterable[str], where: str) -> None:
        if unknown_sizes := sorted(set(sizes) - set(config.sizes)):
            raise ConfigError(f"{where}: no size {unknown_sizes[0]!r}; there are {', '.join(config.sizes)}")

    require_sizes([size], str(file))
    names = [variant.name for variant in config.variants]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{file}: variant {duplicates[0]!r} stands twice; give each a name of its own")
    for name in (name for contrast in config.contrasts for name in (contrast.better, contrast.than)):
        if name != BM25 and name.removesuffix(WITH_BM25) not in names:
            raise ConfigError(f"{file}: a contrast names variant {name!r}; there are {', '.join(names)}")
    try:
        study = Study(config, size, file, extra, loader.read(file.parent / config.run))
    except ConfigError as error:
        raise ConfigError(f"{file}: run: {error}") from None
    for variant in config.variants:
        where = f"{file}: variant {variant.name!r}"
        require_sizes(variant.sizes, where)
        for step in variant.steps or config.steps:
            require_sizes([*step.sizes, *step.only], f"{where}, step {step.stage}")
        for step in study.steps(variant):
            try:
                run = study.resolve(study.overrides(variant, step, study.at_size.seeds[0]))
            except ConfigError as error:
                raise ConfigError(f"{where}, step {step.stage}: {error}") from None
            if step.stage in ("evaluate", "analyze"):
                _require_depth(config, variant.name, run, f"{where}, step {step.stage}")
    return study


def _require_depth(config: StudyConfig, variant: str, run: RunConfig, where: str) -> None:
    """Raise ConfigError for a comparison deeper than a variant's ranks: hits below them would count as misses."""
    systems = {variant, variant + WITH_BM25} | ({BM25} if run.evaluate.bm25 else set())
    metrics = {one.metric for one in config.contrasts if systems & {one.better, one.than}} | {*config.metrics[:1]}
    for metric in sorted(metrics):
        cutoff = metric.partition("/top-")[2]
        if cutoff.isdecimal() and int(cutoff) > max(run.evaluate.k):
            raise ConfigError(
                f"{where}: {metric} is compared, but evaluate.k is {run.evaluate.k}, so only {max(run.evaluate.k)} "
                f"hits are ranked; add {cutoff} to evaluate.k, or compare a smaller K"
            )
