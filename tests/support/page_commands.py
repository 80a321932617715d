"""Collect the shell commands that the documentation pages show."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOPS = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in TOPS)])
PROGRAMS = (
    *("ssl-bench", "make", "torchrun", "python", "python3", "pip", "pytest", "uv", "sbatch"),
    *("mkdocs", "ruff", "pre-commit", "sha256sum", "git", "docker"),
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SHELLS = ("", "bash", "sh", "console", "shell")


@dataclass(frozen=True)
class PageCommand:
    """A shell command that a documentation page shows."""

    page: str  # path in the repository
    text: str  # with continued lines joined
    words: tuple[str, ...]  # program and arguments, without variables and redirection
    in_block: bool  # whether it is in a code block or in running text

    @property
    def is_name(self) -> bool:
        """Return whether the text is only the name of a command, such as `ssl-bench table`."""
        least = 3 if self.words[1] in ("-m", "data") else 2
        return not self.in_block and len(self.words) <= least

    @property
    def suite(self) -> tuple[str, ...]:
        """Return the arguments of an `ssl-bench` command, or an empty tuple for other programs."""
        if self.words[0] == "ssl-bench":
            return self.words[1:]
        if self.words[0] == "torchrun" and "ssl_bench" in self.words:
            return self.words[self.words.index("ssl_bench") + 1 :]
        return ()


def page_commands(page: Path) -> list[PageCommand]:
    """Return the shell commands that a page shows."""
    text, name = page.read_text(), page.relative_to(ROOT).as_posix()
    blocks = [code for language, code in _FENCE.findall(text) if language in _SHELLS]
    lines = [line for code in blocks for line in code.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`([^`]+)`", _FENCE.sub("", text))
    commands = [_command(name, line, in_block=True) for line in lines]
    commands += [_command(name, " ".join(span.split()), in_block=False) for span in spans]
    return [one for one in commands if one and (one.in_block or len(one.words) > 1)]


def _command(page: str, line: str, *, in_block: bool) -> PageCommand | None:
    text = re.sub(r'^eval "\$\((.*?)\)"', r"\1", line.strip().removeprefix("$ "))
    if not re.match(rf"(\w+=\S+ +)*({'|'.join(PROGRAMS)})( |$)", text):
        return None
    words = [word for word in shlex.split(text, comments=True) if word != "..."]
    if ">" in words:
        words = words[: words.index(">")]
    first = next(number for number, word in enumerate(words) if "=" not in word)
    text = " ".join(text.partition(" #")[0].split())
    return PageCommand(page, text, tuple(words[first:]), in_block)


COMMANDS = list(dict.fromkeys(one for page in PAGES for one in page_commands(page)))
"""Commands of all pages, each once per page."""
