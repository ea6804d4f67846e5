"""Results from their files, or what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from adaptivespec_vllm.bench import result as bench
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.eval import result as evaluation

_Result = TypeVar("_Result", bench.Result, evaluation.Result)
_OPTION = "results"
_ALLOWED = f"{bench.FILE} of adaptivespec bench, {evaluation.FILE} of adaptivespec eval, or a directory that holds one"


@dataclass
class Results:
    """What a page is made of; all of one machine and one target.

    Attributes:
        benches: speeds; the order is that of the arguments.
        evals: answers.

    """

    benches: list[bench.Result] = field(default_factory=list)
    evals: list[evaluation.Result] = field(default_factory=list)

    @property
    def all(self) -> list[bench.Result | evaluation.Result]:
        return [*self.benches, *self.evals]


def read(paths: Sequence[Path]) -> Results:
    """All results.

    Raises:
        BadInput: a file is no result, or holds no figures, or two of them were not made on the same machine with the
            same target.

    """
    results, seen = Results(), set()
    for path in (file for given in paths for file in _files(given)):
        if path.resolve() in seen:
            raise BadInput(_OPTION, str(path), "each result once")
        seen.add(path.resolve())
        content = _content(path)
        if "schema_version" in content:
            results.benches.append(_with_figures(path, bench.Result.read(path)))
        else:
            results.evals.append(_with_figures(path, _evaluation(path, content)))
    _check_alike(results)
    return results


def _files(given: Path) -> list[Path]:
    if not given.is_dir():
        return [given]
    found = [file for name in (bench.FILE, evaluation.FILE) if (file := given / name).exists()]
    if not found:
        raise BadInput(_OPTION, str(given), _ALLOWED)
    return found


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(_OPTION, str(path), f"{_ALLOWED} ({error.strerror})") from None
    except ValueError:
        raise BadInput(_OPTION, str(path), f"{_ALLOWED} (this is not JSON)") from None
    if not isinstance(content, dict) or not {"provenance", "settings", "figures"} <= content.keys():
        raise BadInput(_OPTION, str(path), f"{_ALLOWED} (this is neither)")
    return content


def _evaluation(path: Path, content: dict[str, Any]) -> evaluation.Result:
    try:
        return evaluation.Result.model_validate(content)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise BadInput(_OPTION, f"{path}, {where}: {fault['msg']}", _ALLOWED) from None


def _with_figures(path: Path, result: _Result) -> _Result:
    if not result.figures:
        raise BadInput(_OPTION, str(path), "a result with figures; this run was stopped before it had any")
    return result


def _check_alike(results: Results) -> None:
    for name, of in (("machine", machine), ("target", target)):
        values = list(dict.fromkeys(of(result) for result in results.all))
        if len(values) > 1:
            raise BadInput(_OPTION, values, f"results of one {name}: others are not comparable")


def machine(result: bench.Result | evaluation.Result) -> str:
    """The hardware, for people."""
    told = result.provenance.get("machine", {})
    cores = told.get("physical_cores")
    counted = f", {cores} core{'s' if cores != 1 else ''}" if cores else ""
    return str(told.get("gpu") or f"{told.get('cpu', 'unknown processor')}{counted}")


def target(result: bench.Result | evaluation.Result) -> str:
    """The target's name and digest."""
    return str(result.settings.get("model", "unknown"))
