"""The setting that pyproject.toml cannot express: build files are outside of the checkout."""

import tempfile

import setuptools  # type: ignore[import-untyped]

with tempfile.TemporaryDirectory() as scratch:
    setuptools.setup(options={"build": {"build_base": scratch}, "egg_info": {"egg_base": scratch}})
