"""What mkdocs does besides for this site: pages that lie elsewhere in the checkout are shown as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the changelog, which packages carry at their top."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "changelog.md", content=text))
    return files
