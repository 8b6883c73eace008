"""Read a folder of text or Markdown files: a file is a passage.

The id is the file's path in the folder. The title is `title` of the front matter (YAML between two lines `---`), else
the heading that a Markdown file begins with, else the file's name. A heading that became the title is no part of the
text.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mvr_ray.config.loader import parse_yaml
from mvr_ray.errors import ConfigError
from mvr_ray.store.formats.records import BadRow, DroppedRow, Record, passage_record
from mvr_ray.store.formats.text_files import open_text, plain_name

MARKDOWN_ENDS = (".md", ".markdown")
TEXT_ENDS = (".txt", *MARKDOWN_ENDS)
_FRONT_MATTER = re.compile(r"---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"\s*#{1,6}[ \t]+(\S.*)(?:\n|\Z)|\s*(\S.*)\n(?:=+|-+)[ \t]*(?:\n|\Z)")


def text_files(folder: Path) -> list[Path]:
    """List the text and Markdown files under a folder by their path; hidden files and folders are left out."""
    files = (path for path in folder.rglob("*") if plain_name(path).suffix.lower() in TEXT_ENDS)
    visible_files = (path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return sorted(path for path in visible_files if path.is_file())


def leaves_folder(path: Path, folder: Path) -> bool:
    """Return whether a path is a link to something outside the folder: a cloned repository may link any file."""
    return not path.resolve().is_relative_to(folder.resolve())


def read_text_file(path: Path, folder: Path | None = None) -> Iterator[Record]:
    """Read one file as a passage, whose id is its path in `folder`, or its name."""
    where = f"{path}:1"
    with open_text(path) as file:
        text = file.read().replace("\r\n", "\n")
    name = path.relative_to(folder).as_posix() if folder else path.name
    title, extras = "", {}
    if match := _FRONT_MATTER.match(text):
        try:
            front_matter = f"\n{match[1]}"  # lines are those of the file
            if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(front_matter)):  # text of any length
                yield BadRow(where, "the front matter between the lines `---` has aliases (*name); write values out")
                return
            extras = parse_yaml(front_matter) or {}
        except yaml.YAMLError as error:
            line = error.problem_mark.line + 1 if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark else 1
            yield BadRow(f"{path}:{line}", "the front matter between the lines `---` is not valid YAML")
            return
        except ConfigError as error:
            yield BadRow(where, f"the front matter between the lines `---`: {error}")
            return
        if not isinstance(extras, dict):
            yield BadRow(where, "the front matter between the lines `---` is not a mapping in YAML")
            return
        title, text = _as_written(extras.pop("title", None), front_matter), text[match.end() :]
    plain = plain_name(path)
    if not title and plain.suffix.lower() in MARKDOWN_ENDS and (heading := _HEADING.match(text)):
        title, text = _title_of(heading), text[heading.end() :]
    text = text.strip("\n")
    if not text.strip():
        yield DroppedRow(where, "a file without text", is_passage=True)
        return
    extras = {str(key): value for key, value in extras.items()}
    yield passage_record(name, title or plain.stem, text, where, extras=extras)


def _as_written(title: Any, front_matter: str) -> str:
    """Return the title of a front matter as its text has it: YAML reads `007`, `1:30` and `No` as 7, 90 and false."""
    if title is None or isinstance(title, str):
        return title or ""
    members = yaml.compose(front_matter, yaml.SafeLoader).value
    value = next(node.value for key, node in members if key.value == "title")
    return value if isinstance(value, str) else str(title or "")


def _title_of(heading: re.Match[str]) -> str:
    """Return the text of a heading, without the marks that may close it, as in `# Title ##`."""
    title = (heading[1] or heading[2]).strip()
    bare = title.rstrip("#")
    return bare.strip() if heading[1] and bare.endswith((" ", "\t")) else title
