"""Rules that hold across packages: imports, module length, shipped files, the README's commands."""

import ast
import importlib.util
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from typer.main import get_command

from mvr_ray import errors
from mvr_ray.cli.commands import app
from mvr_ray.config import RunConfig, load_run

ROOT = Path(__file__).resolve().parent.parent.parent
STUDIES = ROOT / "configs" / "studies"  # study files are loaded by tests/studies
RUN_FILES = sorted(
    path
    for folder in (ROOT / "configs", ROOT / "mvr_ray" / "config" / "presets")
    for path in folder.rglob("*.yaml")
    if path.parent not in (STUDIES, ROOT / "configs" / "presets")
)
STAGES = (
    *("prepare", "train", "mine", "index", "refine", "evaluate", "analyze", "study"),
    *("retrieve", "tune", "read", "search", "explain", "serve", "reshard", "update", "compact", "follow"),
)
PAPERS = ROOT / "docs" / "papers.md"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]


def test_imports_point_down() -> None:
    tool = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert tool, "import-linter is not installed beside this Python"
    process = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout


def test_the_median_module_is_under_160_lines() -> None:
    """A module is as long as its idea, and most ideas are small."""
    paths = (ROOT / "mvr_ray").rglob("*.py")
    assert statistics.median(len(path.read_text(encoding="utf-8").splitlines()) for path in paths) < 160


def lines_without_reason(source: str) -> list[int]:
    """Numbers of the lines that catch every exception, with no comment there or on the line before."""
    lines = ["", *source.splitlines()]
    comments = [re.sub(r"noqa: BLE001\W*", "", line.partition("# ")[2]) for line in lines]
    broad = re.compile(r"\s*except(\s*|\b[^:#]*\b(Base)?Exception\b[^:#]*):")
    return [i for i in range(1, len(lines)) if broad.match(lines[i]) and not comments[i - 1] + comments[i]]


def test_whatever_catches_every_exception_has_a_reason_beside_it() -> None:
    with_reason = "# why\nexcept Exception:\nexcept BaseException:  # why\nexcept Exception:  # noqa: BLE001 - why\n"
    without = "x = 1\nexcept Exception as error:  # noqa: BLE001\nexcept (OSError, BaseException):\nexcept:\n"
    assert lines_without_reason(with_reason + "except OSError:\nexcept* (KeyError, OSError):\n") == []
    assert lines_without_reason(without) == [2, 3, 4]
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "mvr_ray").rglob("*.py")}
    assert {f"{path}:{line}" for path, source in sources.items() for line in lines_without_reason(source)} == set()


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_run_file_loads(path: Path) -> None:
    assert load_run(path).store.path


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_question_set_of_a_shipped_run_file_is_made_by_its_sources(path: Path) -> None:
    run = load_run(path)
    question_sets = {source.questions for source in run.prepare.sources if source.questions}
    for split in run.prepare.splits:
        assert split.source in question_sets
        question_sets |= {f"{split.source}_{part}" for part in ("known", "gate", "other", "unseen")}
    references = {
        run.train.questions,
        run.train.dev_questions,
        run.refine.questions,
        *run.refine.gate,
        *run.refine.report,
    }
    references |= set(run.evaluate.questions)
    if run.prepare.sources:
        assert references - {None} <= question_sets


def test_the_cluster_file_is_one_that_ray_up_takes() -> None:
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    validate_config(prepare_config(cluster))
    nodes = cluster["available_node_types"]
    assert cluster["head_node_type"] in nodes
    assert not nodes["head"]["resources"].get("GPU")
    assert [name for name, node in nodes.items() if "InstanceMarketOptions" in node["node_config"]] == ["encoder"]


def test_the_cluster_file_holds_what_the_wikipedia_run_asks_for() -> None:
    nodes = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))["available_node_types"]
    resources = load_run(ROOT / "configs" / "wikipedia.yaml").resources
    gpus = nodes["encoder"]["max_workers"] * nodes["encoder"]["resources"]["GPU"]
    assert (
        max(resources.encoders_max * resources.gpus_per_encoder, resources.train_workers * resources.gpus_per_trainer)
        <= gpus
    )
    cpus = nodes["searcher"]["max_workers"] * nodes["searcher"]["resources"]["CPU"]
    assert resources.searchers * resources.cpus_per_searcher <= cpus


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_job_that_is_its_command(stage: str) -> None:
    text = (ROOT / "jobs" / f"{stage}.py").read_text(encoding="utf-8")
    assert f'main(["{stage}", *sys.argv[1:]])' in text
    assert len(text.splitlines()) <= 20


def commands(path: Path) -> list[list[str]]:
    """Words of every `mvr-ray ...` line in a document's code blocks, without comments."""
    blocks = re.findall(r"^(?: {4}|```.*\n)?\s*((?:\$ )?mvr-ray .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.split(r"\s+#", line.removeprefix("$ "))[0].split() for line in blocks]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_and_run_file_in_the_documents_exists(path: Path) -> None:
    subcommands = get_command(app).commands
    for words in commands(path):
        assert words[1] in subcommands or words[1] in ("STAGE", "--help"), " ".join(words)
        for word in words[2:]:
            if word.startswith("configs/"):
                assert (ROOT / word).is_file(), " ".join(words)
            if word.startswith("--"):
                options = {name for option in subcommands[words[1]].params for name in option.opts}
                assert word.split("=")[0] in options, " ".join(words)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_in_the_documents_leads_to_a_file(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert (path.parent / link).exists(), link


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_target_in_the_documents_exists(path: Path) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    mentions = re.findall(r"^(?: {4}|\$ )make (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(mentions) <= targets


def definitions(path: Path) -> set[str]:
    """`function`, `Class` and `Class.method` of a module."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def test_the_table_of_statuses_has_every_code_of_the_server() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \| (.*?) \|", (ROOT / "docs" / "serving.md").read_text(), re.MULTILINE)
    table = {(status, code) for row in rows for status in row[0].split(", ") for code in re.findall(r"`(\w+)`", row[1])}
    sources = [path.read_text() for path in (ROOT / "mvr_ray" / "serving").glob("*.py")]
    codes = {pair for text in sources for pair in re.findall(r'RequestError\(\s*(\d{3}),\s*"(\w+)"', text)}
    assert len(codes) > 30
    assert codes <= table


def test_every_function_that_the_documents_name_exists() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    references = re.findall(r"`(?:mvr_ray/)?([\w/]+\.py):([\w.]+)`", text)
    assert len(references) > 30
    modules = {module: definitions(ROOT / "mvr_ray" / module) for module, _ in references}
    assert [f"{module}:{name}" for module, name in references if name not in modules[module]] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_key_of_a_run_file_in_the_documents_exists(path: Path) -> None:
    sections = "|".join(RunConfig.model_fields)
    for section, key in re.findall(rf"`({sections})\.(\w+)(?:[=:][^`]*)?`", path.read_text(encoding="utf-8")):
        is_module = (ROOT / "mvr_ray" / f"{section}.py").is_file() or key in ("py", "json", "yaml")
        assert is_module or key in RunConfig.model_fields[section].annotation.model_fields, f"{section}.{key}"


def test_every_setting_that_the_papers_document_names_is_the_presets() -> None:
    settings = re.findall(r"`(\w+\.yaml)` `(\w+)\.(\w+): ([^`]+)`", PAPERS.read_text(encoding="utf-8"))
    assert len(settings) > 30
    runs = {name: load_run(ROOT / "configs" / "presets" / name) for name, *_ in settings}
    for name, section, key, value in settings:
        assert getattr(getattr(runs[name], section), key) == yaml.safe_load(value), f"{name}: {section}.{key}"


PAPER_TABLES = {"MVR": 8, "CAMVR": 8, "AOpt": 4}
PAPER_FIGURES = {"MVR": 3, "CAMVR": 4, "AOpt": 7}


def test_the_map_of_the_papers_has_every_table_and_figure_once_and_links_studies_that_exist() -> None:
    text = PAPERS.read_text(encoding="utf-8")
    _, _, rest = text.partition("## Tables and figures\n")
    section = rest.partition("\n## ")[0]
    rows = re.findall(r"^\| (MVR|CAMVR|AOpt) (table|figure)s? (\d+)(?: to (\d+))? \|(.*)\|$", section, re.MULTILINE)
    entries = [
        (paper, kind, number)
        for paper, kind, first, last, _ in rows
        for number in range(int(first), int(last or first) + 1)
    ]
    counts = (("table", PAPER_TABLES), ("figure", PAPER_FIGURES))
    assert sorted(entries) == sorted(
        (paper, kind, number)
        for kind, papers in counts
        for paper, count in papers.items()
        for number in range(1, count + 1)
    )
    for paper, kind, first, _, rest in rows:
        _, study, beside, _ = re.split(r"(?<!\\)\|", rest)
        if kind == "table" and (paper, first) != ("AOpt", "2"):  # an example of labels
            assert "../configs/studies/" in study and beside.strip(), f"{paper} {kind} {first}"
    links = set(re.findall(r"configs/studies/([\w-]+)\.yaml", section))
    assert not {name for name in links if not (STUDIES / f"{name}.yaml").is_file()}
    beside = {
        path.stem
        for path in STUDIES.glob("*.yaml")
        if re.match(
            r"(?:MVR|CAMVR|AOpt) \([^)]*\), (?:table|figure)", str(yaml.safe_load(path.read_text()).get("paper"))
        )
    }
    assert beside <= links, "a study that stands beside a table is in the map"


def test_no_report_names_a_folder_of_the_machine_that_made_it() -> None:
    reports = [*ROOT.glob("benchmarks/results/studies/*/report.md"), *ROOT.glob("benchmarks/results/studies/*/*.json")]
    assert reports
    assert [path for path in reports if re.search(r"=/\w", path.read_text(encoding="utf-8"))] == []


def test_the_tree_of_errors_names_every_class_under_its_base() -> None:
    parents, tree = ["Exception"], {}
    for indent, name in re.findall(r"^([│ ]*(?:[├└]── )?)(\w+Error)\b", errors.__doc__ or "", re.MULTILINE):
        depth = len(indent) // 4
        tree[name] = parents[depth]
        parents[depth + 1 :] = [name]
    classes = {name: one for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)}
    own = {name: one.__mro__[1].__name__ for name, one in classes.items() if one.__module__ == errors.__name__}
    assert tree == own


def test_the_readme_names_every_command() -> None:
    mentions = {words[1] for words in commands(ROOT / "README.md")}
    assert set(get_command(app).commands) - {"version"} <= mentions


def test_the_page_of_every_key_is_what_the_sections_say() -> None:
    spec = importlib.util.spec_from_file_location("configuration", ROOT / "docs" / "configuration.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == module.page(), "run `python docs/configuration.py`"
    for name, section in RunConfig.model_fields.items():
        assert all(f"`{name}.{key}`" in page for key in section.annotation.model_fields)
