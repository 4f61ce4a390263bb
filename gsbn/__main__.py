"""``python -m gsbn``, the same as the command ``gsbn``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its packages, say in one line how to get them."""
    try:
        from gsbn.bench.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit(f'gsbn: the command line needs {error.name}: pip install "gsbn[cli]"')
    app()


if __name__ == "__main__":
    main()
