"""Commands and configurations of the documentation: each works as it is written, or says why that is not tried here."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer

from adaptivespec_vllm import cli
from adaptivespec_vllm.config import load
from adaptivespec_vllm.demo.model import DemoModel, prepare
from adaptivespec_vllm.policy.costs import Costs
from adaptivespec_vllm.runtime import cache_dir
from tests.docs.pages import LANGUAGES, MARKS, ROOT, Block, blocks, spans, words

SHELL = blocks("bash")
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
QUICK = {block.text: block for block in SHELL if block.mark == "run"}
PLACEHOLDERS = re.compile(r"\b(TARGET|MODEL|HEAD)\b")


def subcommands() -> dict[str, tuple[Callable[..., None], bool]]:
    """What runs each, and whether it takes vLLM's options besides."""
    found: dict[str, tuple[Callable[..., None], bool]] = {"check": (cli.check, False)}

    def record(context: Any, name: str, command: Callable[..., None], **settings: Any) -> None:
        found[name] = (command, settings.get("ignore_unknown_options", False))

    with patch.object(cli, "_pass_on", record):
        for command in cli.app.registered_commands:
            if command.callback not in (None, cli.check):
                command.callback(None)
    return found


COMMANDS = subcommands()


def options(command: Callable[..., None], vllms_too: bool) -> set[str]:
    """Names of a command's options."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    parameters = typer.main.get_command(app).params
    own = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    return own | vllm_options() if vllms_too else own


@functools.cache
def vllm_options() -> set[str]:
    """Names of the options of ``vllm serve``."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return {name for action in make_arg_parser(FlexibleArgumentParser())._actions for name in action.option_strings}


def faults(line: str) -> Iterator[str]:
    """What of a command is not there: its subcommand, an option, a script, a target of make."""
    program, *rest = words(line)
    given = {word.split("=")[0] for word in rest if word.startswith("--")} - {"--help"}
    if program == "adaptivespec" and rest and not rest[0].startswith("-"):
        if rest[0] not in COMMANDS:
            yield f"no subcommand {rest[0]}"
        else:
            yield from (f"no option {name} of {rest[0]}" for name in given - options(*COMMANDS[rest[0]]))
    elif program == "make":
        yield from (f"no target {word}" for word in rest if re.fullmatch("[a-z-]+", word) and word not in TARGETS)
    elif program.startswith("python") and rest[:1] == ["-m"]:
        if importlib.util.find_spec(rest[1]) is None:
            yield f"no module {rest[1]}"
    elif program.startswith("python") and rest and rest[0].endswith(".py") and not (ROOT / rest[0]).is_file():
        yield f"no file {rest[0]}"
    elif "/" in program and not program.startswith(("/", "$", ".venv")) and not (ROOT / program).is_file():
        yield f"no file {program}"


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.language in LANGUAGES, "give the fence a language (tests/docs/pages.py)"
    if block.language == "bash":
        word, _, test = block.mark.partition("=")
        assert word in (*MARKS, "by"), "say how the commands are covered (tests/docs/pages.py)"
        assert word != "by" or (ROOT / test).is_file(), f"{test} is not there"


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_and_options_exist(block: Block) -> None:
    assert [fault for command in block.commands() for fault in faults(command)] == []


@pytest.mark.parametrize(("page", "command"), spans())
def test_commands_inside_sentences_exist(page: str, command: str) -> None:
    assert list(faults(command)) == [], page


def test_options_of_vllm_serve_exist() -> None:
    known = vllm_options()
    for block in SHELL:
        for command in block.commands():
            if command.startswith("vllm serve"):
                given = {word.split("=")[0] for word in words(command) if word.startswith("-")}
                assert given <= known, f"{block}: {sorted(given - known)}"


def test_configurations_in_commands_are_valid() -> None:
    found = [word for block in SHELL for word in block.text.split("'") if '"method"' in word]
    assert found
    for text in found:
        load(text)


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_is_a_configuration_or_costs(block: Block) -> None:
    value = json.loads(block.text)
    if "method" in value:
        load(value)
    elif "target" in value:
        assert Costs.from_dict(value)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_compiles(block: Block) -> None:
    ast.parse(block.text)


def test_breaches_are_seen() -> None:
    assert list(faults("adaptivespec bench --no-such 3")) == ["no option --no-such of bench"]
    assert list(faults("adaptivespec serve x")) == ["no subcommand serve"]
    assert list(faults("make everything")) == ["no target everything"]
    assert list(faults("python scripts/none.py")) == ["no file scripts/none.py"]
    assert list(faults("adaptivespec check a.json --model M")) == list(faults("make test ARGS=--x")) == []


@pytest.fixture(scope="module")
def pair() -> DemoModel:
    return prepare(cache_dir(), lambda message: None)


@pytest.mark.slow
@pytest.mark.parametrize("block", QUICK.values(), ids=map(str, QUICK.values()))
def test_quick_commands_run(block: Block, pair: DemoModel, tmp_path: Path) -> None:
    named = {"TARGET": str(pair.model), "MODEL": str(pair.model), "HEAD": str(pair.head)}
    (tmp_path / "adaptivespec.json").write_text(json.dumps({"method": "adaptivespec", "model": named["HEAD"]}))
    text = PLACEHOLDERS.sub(lambda found: named[found[0]], block.text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{block}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
