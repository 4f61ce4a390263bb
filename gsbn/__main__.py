"""``python -m gsbn``, the same as the command ``gsbn``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its packages, say in one line how to get them."""
    try:
        from gsbn.bench.cli import main as run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich", "click"):
            raise
        from gsbn.bench.machine import pip_install

        sys.exit(f"gsbn: the command line needs {package}: {pip_install('cli')}")
    run()


if __name__ == "__main__":
    main()
