"""Write the commit into wheels and source archives, for the records that installed copies make."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface[Any]):
    """Add the file that `ssl_bench.system.process.source_commit` reads where there is no git."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Ask git; a tree without git, such as an unpacked source archive, keeps its own file."""
        root = Path(self.root)
        # An editable install runs the checkout itself, whose commit changes.
        if version == "editable" or not (root / ".git").exists():
            return
        sys.path.insert(0, str(root))
        from ssl_bench.system.process import COMMIT_FILE, read_git_commit

        if commit := read_git_commit(root):
            self._folder = tempfile.TemporaryDirectory()
            written = Path(self._folder.name) / COMMIT_FILE
            written.write_text(commit + "\n")
            build_data["force_include"][str(written)] = f"ssl_bench/{written.name}"
