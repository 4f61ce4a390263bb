"""Programs in a new interpreter, without the optional libraries."""

from __future__ import annotations

import os
import subprocess
import sys

BLOCKER = """
import sys

class Blocker:
    asked = set()
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            self.asked.add(name)
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

BLOCKED = {"cupy", "cupy_backends", "torch", "ml_dtypes", "cuda", "typer", "rich", "matplotlib"}
sys.meta_path.insert(0, Blocker())
"""


def python(script: str, **environment: str) -> str:
    """The output of a script in a new interpreter; fails if the script fails."""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
