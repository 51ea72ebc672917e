"""What the build of a wheel adds to pyproject.toml: the commit that it is built from, where it is
built in a checkout. `moa/version.py` reads it."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_ROOT = Path(__file__).parent


class BuildWithCommit(build_py):
    """Copies the packages, and writes the commit beside them."""

    def run(self) -> None:
        """Build. An editable install runs the checkout itself, whose commit changes."""
        super().run()
        version = runpy.run_path(str(_ROOT / "moa" / "version.py"))
        commit = version["commit_of"](_ROOT)
        if commit and not self.editable_mode:
            Path(self.build_lib, "moa", version["COMMIT_FILE"]).write_text(f"{commit}\n")


setup(cmdclass={"build_py": BuildWithCommit})
