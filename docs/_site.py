"""What the site shows besides docs/: the README as its first page, and the generated results."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_CARDS = "results/demo/demo_*.md"
_BESIDE = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
SHOWN = (
    "results/*.md",
    "results/tables/*.md",
    "results/devices/*.md",
    "results/figures/*",
    _CARDS,
    *_BESIDE,
)
_ABOVE = re.compile(rf"\]\(\.\./((?:\.\./)*(?:results/|{'|'.join(map(re.escape, _BESIDE))}))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in docs/."""
    place = {"dest_dir": config.site_dir, "use_directory_urls": config.use_directory_urls}
    for path in sorted(path for pattern in SHOWN for path in ROOT.glob(pattern)):
        files.append(File(path.relative_to(ROOT).as_posix(), src_dir=str(ROOT), **place))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links between docs/ and the files beside it lead to pages of the site."""
    if page.file.src_uri.startswith("results/"):
        return markdown.replace("](../../docs/", "](../../")
    inside = re.sub(r'(\]\(<?|src=")docs/', r"\1", markdown)
    # In the repository docs/ is one folder further down than in the site.
    inside = re.sub(r"\]\(\.\./((?:\.\./)*)README\.md", r"](\1index.md", inside)
    return _ABOVE.sub(r"](\1", inside)
