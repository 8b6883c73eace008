"""Fits the documents to the site: links that lead out of docs/ become paths, and decisions get a list of them all."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")
DOCS = Path(__file__).parent


def on_files(files: Any, config: Any) -> Any:
    """The hook of mkdocs: the list of decisions, by their headings."""
    lines = ["# Decisions", ""]
    for path in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        heading = path.read_text(encoding="utf-8").partition("\n")[0].strip("# .")
        title = re.sub(r"^\d+\. ", "", heading)
        lines.append(f"- [{int(path.name[:4])}. {title}]({path.name})")
    files.append(File.generated(config, "decisions/index.md", content="\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The hook of mkdocs: a page's text before it becomes HTML."""
    folder = posixpath.dirname(page.file.src_uri)

    def rewrite(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path.startswith("../"):
            text = link[1].replace("\n", " ")
            return text if path.removeprefix("../") in text else f"{text} (`{path.removeprefix('../')}`)"
        if (DOCS / path).is_dir():
            return f"[{link[1]}]({link[2].rstrip('/')}/index.md)"
        return link[0]

    return LINK.sub(rewrite, markdown)
