"""What `mkdocs build` does to a page before it is rendered."""

import importlib
import os
import re
import subprocess
import sys
from inspect import getdoc
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

import ringdl

ROOT = Path(__file__).parents[1]


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Make the first page of README.md, and put in what ``!help`` and ``!functions`` stand for.

    Links that leave docs/ are for readers of the repository: the site has no such files, and they
    become words.
    """
    if page.file.src_path == "index.md":
        text = (ROOT / "README.md").read_text().replace("](docs/", "](")
        text = re.sub(r"\[([^]]*)\]\((?!https?:|#|[\w-]+\.md)[^)]*\)", r"\1", text)
        text = re.sub(r"\[([^]]*)\]\((?:CHANGELOG|CONTRIBUTING)\.md\)", r"\1", text)
    text = re.sub(r"\[([^]]*)\]\(\.\./[^)]*\)", r"\1", text)
    if page.file.src_path == "reference/ringdl.md":
        text = text.replace("!functions", _functions_of_communicator())
        _check_names(text, "ringdl")
    if page.file.src_path == "reference/torch.md":
        _check_names(text, "ringdl.torch")
    return re.sub(r"^!help ?(.*)$", _help, text, flags=re.MULTILINE)


def _check_names(text: str, module: str) -> None:
    """See that the page has all that the module offers."""
    said = set(re.findall(r"(?:^::: ringdl\.(?:torch\.)?|`(?:ringdl\.)?)(\w+)(?=`|$)", text, re.M))
    missing = set(importlib.import_module(module).__all__) - said
    if missing:
        raise PluginError(f"the reference of {module} lacks {', '.join(sorted(missing))}")


def _functions_of_communicator() -> str:
    lines = ["| function | |", "|---|---|"]
    for name in ringdl.__all__:
        method = getattr(ringdl.Communicator, name, None)
        if method is not None and name != "shutdown":
            first = (getdoc(method) or "").split("\n\n")[0].replace("\n", " ")
            lines.append(f"| [`{name}`][ringdl.Communicator.{name}] | {first} |")
    return "\n".join(lines)


def _help(match: re.Match[str]) -> str:
    command = [sys.executable, "-m", "ringdl", *match[1].split(), "--help"]
    environment = os.environ | {"COLUMNS": "100"}
    told = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return f"```text\n{told.stdout.strip()}\n```"
