"""What pyproject.toml cannot say: a build leaves nothing in the checkout."""

import tempfile

import setuptools  # type: ignore[import-untyped]

with tempfile.TemporaryDirectory() as scratch:
    setuptools.setup(options={"build": {"build_base": scratch}, "egg_info": {"egg_base": scratch}})
