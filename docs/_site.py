"""Add the README, the results and the generated reference to the site."""

import re
import runpy
from functools import cache
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

from mkdocs.structure.files import File, Files
from PIL import Image

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
_GENERATED = re.compile(r"<!-- generated: (\w+) -->")
_PICTURE = re.compile(r'(<img [^>]*?)src="([^"]+)"([^>]*>)')


@cache
def generated(name: str) -> str:
    """Return a part of the reference, such as "commands"."""
    return runpy.run_path(str(ROOT / "docs/_reference.py"))["PAGES"][name]()


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    options = {"dest_dir": config.site_dir, "use_directory_urls": config.use_directory_urls}
    for path in sorted(path for pattern in SHOWN for path in ROOT.glob(pattern)):
        files.append(File(path.relative_to(ROOT).as_posix(), src_dir=str(ROOT), **options))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in generated parts, and make links out of docs/ lead to pages of the site.

    In a search, pages of results come last and the reference comes first.
    """
    if page.file.src_uri.startswith("results/"):
        page.meta.setdefault("search", {"boost": 0.2})
        return markdown.replace("](../../docs/", "](../../")
    if page.file.src_uri.startswith("reference/"):
        page.meta.setdefault("search", {"boost": 2})
    markdown = _GENERATED.sub(lambda found: generated(found[1]), markdown)
    inside = re.sub(r'(\]\(<?|src=")docs/', r"\1", markdown)
    # Pages of docs/ are one folder higher in the site than in the repository.
    inside = re.sub(r"\]\(\.\./((?:\.\./)*)README\.md", r"](\1index.md", inside)
    return _ABOVE.sub(r"](\1", inside)


def on_page_content(html: str, page: Any, files: Files, **_: Any) -> str:
    """Give each picture its width and height, so that the text does not move while it loads."""
    sources = {file.dest_uri: file.abs_src_path for file in files}

    def sized(tag: re.Match[str]) -> str:
        uri = normpath(join(dirname(page.file.dest_uri), tag[2]))
        if "height=" in tag[0] or not (source := sources.get(uri)):
            return tag[0]
        width, height = picture_size(Path(source))
        return f'{tag[1]}src="{tag[2]}" width="{width}" height="{height}"{tag[3]}'

    return _PICTURE.sub(sized, html)


def picture_size(file: Path) -> tuple[int, int]:
    """Return the width and height of a picture in pixels."""
    if file.suffix != ".svg":
        with Image.open(file) as image:
            return image.size
    box = re.search(r'viewBox="([^"]+)"', file.read_text(encoding="utf-8"))
    numbers = [float(number) for number in box[1].split()] if box else [0, 0, 800, 400]
    return round(numbers[2]), round(numbers[3])
