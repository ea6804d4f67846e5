"""What ``adaptivespec check`` finds out, and how it is shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.text import Text

from adaptivespec_vllm import __version__
from adaptivespec_vllm.config import METHOD, AdaptiveSpecConfig, ConfigError, load, read, reason, resolve, shortened
from adaptivespec_vllm.runtime import looks_like_path, missing_vllm

if TYPE_CHECKING:
    from adaptivespec_vllm.check.costs import CostsFound

T = TypeVar("T")


@dataclass
class Report:
    """What ``check`` found; a section that failed is missing and has its line in ``errors``."""

    errors: list[str] = field(default_factory=list)
    vllm: dict[str, Any] = field(default_factory=dict)
    plugin: str = "unknown"
    runner: dict[str, str] = field(default_factory=dict)
    seams: list[dict[str, Any]] = field(default_factory=list)
    ops: dict[str, str] = field(default_factory=dict)
    head: dict[str, Any] | None = None
    target: dict[str, Any] | None = None
    configuration: dict[str, Any] | None = None
    vllm_keys: dict[str, Any] = field(default_factory=dict)
    verification: str = ""
    costs: CostsFound | None = None

    @classmethod
    def gather(cls, source: Path | None, model: str | None, measure: bool = False) -> Report:
        report = cls()
        supported = None
        if (missing := missing_vllm()) is not None:
            report.errors.append(missing)
        else:
            report._attempt(report._look_at_ops)
            supported = report._attempt(report._look_at_vllm)
        report._attempt(report._look_at_plugin)
        settings = report._attempt(lambda: report._look_at_configuration(source, supported))
        if settings is not None and settings.model is not None and missing is None:
            report._attempt(lambda: report._look_at_head(str(settings.model), model))
        if model is not None and settings is not None and not report.errors:
            report._attempt(lambda: report._look_at_option(source, model))
        start = None
        if model is not None and source is not None and settings is not None and not report.errors:
            start = report._attempt(lambda: report._start(source, model))
        if settings is not None:
            report._attempt(lambda: report._look_at_costs(settings, source, start, measure))
        return report

    def to_dict(self) -> dict[str, Any]:
        costs = {"costs": self.costs.to_dict() if self.costs else None}
        return {"ok": not self.errors, "adaptivespec": __version__} | vars(self) | costs

    def show(self, console: Console) -> None:
        """Print for a reader: one line a fact, errors last."""
        for name, lines in self._lines():
            for line in lines:
                console.print(Text.assemble((f"{name:<14}", "bold"), line))
                name = ""
        for error in self.errors:
            console.print(Text.assemble(("error         ", "bold red"), error))
        console.print(Text("not ready" if self.errors else "ready", style="bold red" if self.errors else "bold green"))

    def _attempt(self, look: Callable[[], T]) -> T | None:
        """The result of a step, or None and a line in ``errors``: no input may end in a traceback."""
        try:
            return look()
        except ConfigError as error:
            self.errors.append(str(error))
        except Exception as error:  # vLLM and its libraries raise anything for a bad model
            self.errors.append(reason(error))
        return None

    # --- looking ---

    def _look_at_ops(self) -> None:
        from adaptivespec_vllm import ops

        self.ops = ops.describe()

    def _look_at_vllm(self) -> bool:
        from adaptivespec_vllm.engine import seams, spec_config

        self.vllm = {"supported": seams.SUPPORTED_VLLM_TEXT, "tested": list(seams.TESTED_VLLM)}
        self.vllm["version"] = seams.vllm_version()
        seams.check_version()
        statuses = seams.check_seams(runner=spec_config.runner())
        self.seams = [
            {"path": status.seam.path, "why": status.seam.why, "found": status.found, "error": status.error}
            for status in statuses
        ]
        self.vllm["platform"] = seams.platform()
        self._look_at_runner()
        missing = [status.seam.path for status in statuses if not status.found]
        if missing:
            raise ConfigError(f"vllm {self.vllm['version']}: missing {', '.join(missing)}")
        return True

    def _look_at_plugin(self) -> None:
        names = {entry.name for entry in entry_points(group="vllm.general_plugins")}
        allowed = os.environ.get("VLLM_PLUGINS")
        if METHOD not in names:
            self.plugin = "not installed"
            raise ConfigError("plugin: vLLM does not find it among its general plugins; install this package with pip")
        if allowed is not None and METHOD not in allowed.split(","):
            self.plugin = "switched off"
            raise ConfigError(f"VLLM_PLUGINS: got {allowed!r}; allowed: unset, or a list with {METHOD!r} in it")
        self.plugin = "found by vLLM"

    def _look_at_runner(self) -> None:
        from adaptivespec_vllm.engine import refusals, spec_config

        self.runner = {"name": spec_config.runner(), "why": spec_config.why_runner()}
        if spec_config.runner() == "V2":
            refusals.check_triton()

    def _look_at_configuration(self, source: Path | None, supported: bool | None) -> AdaptiveSpecConfig:
        if source is None:
            settings = resolve({})
        elif supported:
            from adaptivespec_vllm.engine import spec_config

            settings, self.vllm_keys = spec_config.parse(source)
        else:  # without a vLLM to ask, keys that are not ours are taken for its own
            settings, self.vllm_keys = load(source, read(source).keys())
        self.configuration = settings.to_resolved_dict()
        self.verification = settings.verification
        return settings

    def _look_at_option(self, source: Path | None, model: str) -> None:
        """``--model`` before vLLM sees it, which takes whatever is no directory for the id of a hub."""
        name = shortened(model, 240)
        if not model.strip():
            raise ConfigError("--model: got ''; allowed: the directory or hub id of a target")
        if _is_missing_path(model):
            raise ConfigError(f"--model: {name}: no such directory")
        if source is None:
            raise ConfigError(f"--model: nothing was checked against {name!r}; give a configuration with a head too")

    def _look_at_head(self, path: str, model: str | None) -> None:
        from adaptivespec_vllm.engine import head

        target = head.TargetFacts.of_directory(model) if model is not None else None
        self.target = vars(target) if target is not None else None
        facts = head.check(path)
        self.head = facts.to_dict() if facts is not None else {"path": path, "layout": "hub id, looked at by vLLM"}
        head.check(path, target)

    def _start(self, source: Path, model: str) -> Any:
        """Everything that vLLM and we check before weights are loaded; vLLM's whole configuration."""
        from vllm.engine.arg_utils import EngineArgs

        return EngineArgs(model=model, speculative_config=read(source)).create_engine_config()

    def _look_at_costs(
        self, settings: AdaptiveSpecConfig, source: Path | None, start: Any | None, measure: bool
    ) -> None:
        """Costs of a step: given, kept from an earlier start, or measured now."""
        from adaptivespec_vllm.check import costs

        self.costs = costs.given(settings)
        if measure and self.costs is not None:
            raise ConfigError(f"--measure: there is nothing to measure; costs: {self.costs.source}")
        if self.costs is not None:
            return
        if start is not None and source is not None:
            target, head = start.model_config.model, start.speculative_config.draft_model_config.model
            self.costs = costs.measured(source, target, head) if measure else costs.kept(target, head)
        elif measure and not self.errors:
            raise ConfigError("--measure: give a configuration with a head, and its target with --model")
        elif not self.errors:
            self.costs = costs.CostsFound("measured at the first start; --model shows those of an earlier one")

    # --- showing ---

    def _lines(self) -> Iterator[tuple[str, list[str]]]:
        yield "adaptivespec", [__version__]
        yield "vllm", [self._vllm_line()]
        yield "plugin", [self.plugin]
        if self.runner:
            yield "runner", [f"{self.runner['name']}: {self.runner['why']}"]
        if self.seams:
            found = sum(seam["found"] for seam in self.seams)
            missing = [f"missing: {seam['path']} ({seam['why']})" for seam in self.seams if not seam["found"]]
            yield "seams", [f"{found} of {len(self.seams)} found", *missing]
        yield "ops", [f"{name}: {state}" for name, state in self.ops.items()] or ["unknown"]
        if self.head is not None:
            yield "head", [f"{name}: {_plain(value)}" for name, value in self.head.items()]
        if self.target is not None:
            yield "target", [f"{name}: {_plain(value)}" for name, value in self.target.items()]
        if self.configuration is not None:
            yield "configuration", [f"{name}: {_plain(value)}" for name, value in _flat(self.configuration)]
        if self.vllm_keys:
            yield "vllm's keys", [f"{name}: {_plain(value)}" for name, value in self.vllm_keys.items()]
        if self.verification:
            yield "verification", [self.verification]
        if self.costs is not None:
            yield "costs", list(self.costs.lines())

    def _vllm_line(self) -> str:
        if not self.vllm:
            return "not installed"
        version = self.vllm.get("version", "not found")
        platform = f" on {self.vllm['platform']}" if "platform" in self.vllm else ""
        return (
            f"{version}{platform} (supported: {self.vllm.get('supported')}; tested: {', '.join(self.vllm['tested'])})"
        )


def _is_missing_path(model: str) -> bool:
    """Whether it can only be a path, and there is nothing at it."""
    try:
        return looks_like_path(model) and "://" not in model and not Path(model).exists()
    except (OSError, ValueError):  # too long, or not a path at all
        return True


def _flat(options: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, dict) and set(value) != {"depth", "width", "nodes"}:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    return (
        {None: "-", True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool | None) else str(value)
    )
