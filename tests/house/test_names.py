"""Checks names in the package, the tests and the benchmarks, the glossary, and the first lines of docstrings."""

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import mvr_ray

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = {name: ROOT / name for name in ("mvr_ray", "tests", "benchmarks")}

PARTICIPLE = re.compile(
    r"[a-z]+ed|become|been|begun|bound|bought|broken|brought|built|caught|chosen|dealt|done|drawn|driven|fallen|felt|"
    r"flown|forgotten|found|frozen|given|gone|got|grown|had|heard|held|hidden|kept|known|laid|left|lent|lost|made|"
    r"meant|met|paid|said|seen|sent|shown|sold|sought|spent|spoken|spun|stolen|stood|sworn|taken|taught|thought|thrown|"
    r"told|torn|understood|woken|won|worn|wound|written"
)
OTHER_WORDS = re.compile("bed|embed|exceed|feed|indeed|need|proceed|red|seed|shed|speed|succeed|weed")
EXCEPTIONS = {
    "expected": "the usual word for the independent side of a comparison",
}
"""Bare participles that stay, each with its reason."""
FIELD_EXCEPTIONS = {
    **dict.fromkeys(("added", "replaced", "unchanged", "deleted"), "keys of the report of an update"),
    **dict.fromkeys(("asked", "chosen", "labelled", "restored", "stopped", "tried"), "keys of the steps of a study"),
    **dict.fromkeys(("certified", "rescored"), "keys of every answer over HTTP"),
    **dict.fromkeys(("checked", "removed"), "keys of the reports of `rollback` and `collect`"),
    "collapsed": "a key of the report of a training",
    "created": "a key of every manifest",
    "damaged": "a key of the report of `repair`",
    "dropped": "a key of the notes on shards in the staging folder",
    "measured": "a key of the results of benchmarks",
    "published": "a key of the report of a refinement",
    "tied": "a setting of the run file",
}
"""Fields that stay since their names are stored, or are in the API."""
METAPHOR = re.compile(
    r"\b(befalls?|canary|crowd|dealt|doors?|guests?|hears?|nobody|reckon(ed|s)?|riddles?|seats?|shelf|somebody|spool|story|"
    r"strangers?|told|usher|whom)\b"
)
"""Words of names that a reader cannot look up, or that stand for a person: a name takes the word of the field."""
SUBJECT_WITHOUT_VERB = re.compile(
    "(does|do|everything|from|how|in|nobody|nothing|of|something|what|when|where|whether|which|who|whose|why)\\b", re.I
)
NO_VERB = re.compile(
    r"`|[^A-Z`]|(?!Warn of)\w+ of\b|[A-Z]\w*[^s\W]s\b|(A|An|All|Any|As|At|Both|By|Each|Entry|Every|For|From|How|In|No|"
    r"One|Our|That|The|Up|What|When|Where|Whether|Which|Who|Whose|Why|With|Without)\b"
)
"""Begins a docstring that does not say what its function does: a noun, as in `Bytes of` and `Passages`, or a clause."""


@functools.cache
def modules(folder: Path) -> list[tuple[str, ast.Module]]:
    """Path from the root and syntax tree of every module under `folder`."""
    paths = sorted(folder.rglob("*.py"))
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def is_bare_participle(name: str) -> bool:
    """Whether the whole name is one past participle: `told`, `_Measured`, `joined`, but not `merged_hits`."""
    word = name.strip("_").lower()
    return word not in EXCEPTIONS and not OTHER_WORDS.fullmatch(word) and PARTICIPLE.fullmatch(word) is not None


def bare_participles(folder: Path) -> Counter[str]:
    """How many functions, parameters, classes, locals and attributes have each name that is a bare participle.

    Names of modules are not in it.
    """
    names: Counter[str] = Counter()
    for _, tree in modules(folder):
        for name in [*defined_names(tree), *local_names(tree, is_function=False)]:
            names[name] += is_bare_participle(name)
        for name in attribute_names(tree):
            names[name] += is_bare_participle(name) and name not in FIELD_EXCEPTIONS
    return +names


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes, parameters, and exceptions that are caught."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def local_names(node: ast.AST, is_function: bool) -> Iterator[str]:
    """Yield the names that functions and comprehensions bind, in order."""
    for child in ast.iter_child_nodes(node):
        is_bound = isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
        if is_bound and (is_function or isinstance(node, ast.comprehension)):
            yield child.id
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.comprehension)
        yield from local_names(child, is_scope or (is_function and not isinstance(child, ast.ClassDef)))


def attribute_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the fields of classes, and of the attributes that are set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for child in node.body:
                targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
                yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def repeated_classes(folder: Path) -> Counter[str]:
    """How many modules define a class of each name that more than one defines."""
    definitions = defaultdict(set)
    for path, tree in modules(folder):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                definitions[node.name].add(path)
    return Counter({name: len(paths) for name, paths in definitions.items() if len(paths) > 1})


def unclear_first_lines(folder: Path) -> Counter[str]:
    """Modules whose docstring does not begin with a whole sentence that says what the module does.

    A line that opens with a question word or with `From` ("What a server counts about itself") names a subject and has
    no verb that says what is done with it, nor has one of the package that opens with an article. An empty module needs
    no docstring.
    """
    paths: Counter[str] = Counter()
    for path, tree in modules(folder):
        if tree.body:
            line = (ast.get_docstring(tree) or "").partition("\n")[0]
            whole = re.fullmatch(r"[A-Z0-9`].*[.:]", line) is not None
            has_article = folder.name == "mvr_ray" and re.match(r"(An?|Every|The)\b", line) is not None
            paths[path] += not whole or has_article or SUBJECT_WITHOUT_VERB.match(line) is not None
    return +paths


def metaphors(folder: Path) -> Counter[str]:
    """How many functions, parameters, classes, locals and attributes have each name with a word of `METAPHOR`."""
    names: Counter[str] = Counter()
    for _, tree in modules(folder):
        for name in [*defined_names(tree), *local_names(tree, is_function=False), *attribute_names(tree)]:
            names[name] += METAPHOR.search(split_words(name)) is not None
    return +names


def nouns_for_functions(folder: Path) -> Counter[str]:
    """Functions of the package whose docstring begins without a verb ("The header of a frame").

    Properties have values, which nouns describe; `__init__` describes its arguments. In tests and benchmarks, helpers
    may describe their result.
    """
    names: Counter[str] = Counter()
    for path, tree in modules(folder) if folder.name == "mvr_ray" else ():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__":
                is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
                line = ast.get_docstring(node) or "Return nothing."
                names[f"{path} {node.name}"] += not is_property and NO_VERB.match(line) is not None
    return +names


RULES = {
    "bare participles": bare_participles,
    "metaphors": metaphors,
    "repeated classes": repeated_classes,
    "unclear first lines": unclear_first_lines,
    "nouns for functions": nouns_for_functions,
}


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("rule", RULES)
def test_no_name_or_first_line_breaks_a_rule(rule: str, folder: str) -> None:
    assert RULES[rule](FOLDERS[folder]) == {}


def test_the_rules_find_what_they_forbid_and_pass_what_they_allow() -> None:
    for name in ("told", "_Measured", "__joined", "Asked", "left"):
        assert is_bare_participle(name), name
    for name in ("seed", "embed", "merged_hits", "RankedList", "needs", "led_by"):
        assert not is_bare_participle(name), name
    for name in ("test_a_gap_is_told_at_once", "StrangerEnv", "_story"):
        assert METAPHOR.search(split_words(name)), name
    tree = ast.parse(
        "class A:\n a: int = 1\n def b(c):\n  d = [e for e in c]\n  with c as f: (g := d)\n  return lambda h: h\ni = 2"
    )
    assert sorted([*defined_names(tree), *local_names(tree, is_function=False)]) == list("Abcdefgh")
    tree = ast.parse("class A:\n a: int = 1\n b = 2\n def c(self):\n  self.d, e.f = 3, self.g\n  h = 4")
    assert sorted(attribute_names(tree)) == list("abdf")
    for line in ("The header of a frame.", "Bytes of both towers.", "Passages to plan for.", "Whether it is.", "`k`"):
        assert NO_VERB.match(line), line
    for line in ("Return the header.", "Warn of a value.", "Pass all on.", "Number the rows.", "Leave `of` a view."):
        assert not NO_VERB.match(line), line


def glossary_terms() -> list[str]:
    """The words in the first column of the glossary's table."""
    rows = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    words = [row.split("|")[1] for row in rows if row.startswith("| ")]
    return [term.strip(" `") for cell in words[1:] for term in cell.split(",")]


def split_words(text: str) -> str:
    """Text with the words of names apart, in lower case: `EncoderSnapshot` and `encoder_snapshot` as two words."""
    return re.sub(r"[\W_]+", " ", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)).lower()


def test_the_package_uses_every_term_of_the_glossary() -> None:
    words = split_words("\n".join(path.read_text(encoding="utf-8") for path in FOLDERS["mvr_ray"].rglob("*.py")))
    terms = glossary_terms()
    assert len(terms) == len(set(terms)) > 30
    absent = [term for term in terms if not re.search(rf"\b{split_words(term).strip()}(s|es)?\b", words)]
    assert absent == []


def public_classes() -> list[str]:
    """The classes of the values that packages exchange, and those that `import mvr_ray` offers besides errors."""
    tree = ast.parse((FOLDERS["mvr_ray"] / "types.py").read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return [*names, *(name for name in mvr_ray.__all__ if name[0].isupper() and not name.endswith("Error"))]


def test_the_glossary_has_every_public_noun() -> None:
    """The words of a public class's name stand in the glossary, in this order."""
    text = split_words((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    absent = [name for name in public_classes() if not re.search(rf"\b{split_words(name).strip()}\b", text)]
    assert absent == []
