"""SmolLM2-135M-Instruct in a folder that engines load, written once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kvtier_services.demo.model import NAME, REVISION

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvtier/bench" / f"{NAME}-{REVISION}"


def model() -> Path:
    """The folder; made when it is not there, which takes half a minute."""
    if not FOLDER.is_dir():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as beside:
            made = Path(beside) / "model"
            subprocess.run([sys.executable, "-m", "kvtier_services.demo.model", str(made)], check=True)
            made.rename(FOLDER)
    return FOLDER
