"""Adapts the documents to the site: links out of docs/ become paths, and the decisions get a list."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")
DOCS = Path(__file__).parent


def on_files(files: Any, config: Any) -> Any:
    """Add the list of decisions, by their headings (a hook of mkdocs)."""
    lines = ["# Decisions", ""]
    for path in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        heading = path.read_text(encoding="utf-8").partition("\n")[0].strip("# .")
        title = re.sub(r"^\d+\. ", "", heading)
        lines.append(f"- [{int(path.name[:4])}. {title}]({path.name})")
    files.append(File.generated(config, "decisions/index.md", content="\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page before it becomes HTML (a hook of mkdocs)."""
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
