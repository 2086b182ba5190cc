"""Builds the engine in csrc/ with CMake; everything else is declared in pyproject.toml."""

from setuptools import setup

setup(cmake_source_dir="csrc")
