"""`adaptivespec report`: what is refused, what the page says, and the numbers behind its pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer

from adaptivespec_vllm.bench import arms
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.bench.result import Place, Result, Trace, TracedStep, TracedToken
from adaptivespec_vllm.eval import result as evaluation
from adaptivespec_vllm.eval.answers import Answer
from adaptivespec_vllm.eval.exercises import Exercises
from adaptivespec_vllm.report import inputs, page, points
from adaptivespec_vllm.report.cli import run
from tests.unit.bench_results import arm, result, sample, two_kinds

MACHINE = {"cpu": "a processor", "load_average": [0.1]}
ARMS = ("plain", "tree:3,4,3", "tree:3,4,3@0.2", "tree:3,4,3@mars")


def evaluated(**changes: object) -> evaluation.Result:
    """Four arms on ten exercises, the lossy ones with a loss in each answer."""
    task = Exercises(10, 0)
    rows = []
    for one in arms.parse(" ".join(ARMS[1:]), "head"):
        own = [
            answer(one.name, item.id, lossy=not one.lossless, right=number > 6 or one.lossless)
            for number, item in enumerate(task.items)
        ]
        plain = [answer("plain", item.id, lossy=False, right=True) for item in task.items]
        rows.append(evaluation.figures(one, task, own, plain))
    speculative = {one.name: one.speculative for one in arms.parse(" ".join(ARMS), "head")}
    values = {
        "provenance": {"machine": MACHINE, "command": ["adaptivespec", "eval"], "versions": {}},
        "settings": {"model": "target 0123", "head": "head", "arms": speculative},
        "complete": True,
        "figures": rows,
    } | changes
    return evaluation.Result.model_validate(values)


def answer(name: str, id: str, *, lossy: bool, right: bool) -> Answer:
    steps = 1.0 * 9 if name == "plain" else 3.0
    return Answer(
        arm=name, task="exercises", id=id, text="x", tokens=list(range(10)), losses=[(3, 0.5)] if lossy else [],
        finish="stop", correct=right, seconds=1.0, steps=steps,
    )  # fmt: skip


def traced() -> Result:
    made = two_kinds()
    steps = [
        TracedStep(tokens=[TracedToken(text="The", lost=0.0)], nodes=0, depth=0, width=0),
        TracedStep(
            tokens=[TracedToken(text=" <b>", lost=0.0), TracedToken(text=" blue", lost=0.69)], nodes=3, depth=2, width=2
        ),
    ]
    made.traces = [Trace(arm="tree:3,4,3@0.2", prompt="math/0", question="Which & why?", steps=steps)]
    return made


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """A directory of bench, and a file of eval."""
    (tmp_path / "bench").mkdir()
    traced().write(tmp_path / "bench")
    evaluated().write(tmp_path)
    return [tmp_path / "bench", tmp_path / evaluation.FILE]


class TestInputs:
    def test_files_and_directories(self, files):
        found = inputs.read(files)
        assert len(found.benches) == len(found.evals) == 1
        assert len(inputs.read([files[1].parent]).evals) == 1

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            ("", "this is not JSON"),
            ("[1]", "this is neither"),
            ('{"figures": []}', "this is neither"),
            ('{"schema_version": 9, "provenance": {}, "settings": {}, "figures": []}', "schema 9"),
            ('{"provenance": {}, "settings": {}, "figures": [{}]}', "figures.0.arm"),
            ('{"provenance": {}, "settings": {}, "figures": []}', "stopped before it had any"),
        ],
    )
    def test_what_is_no_result(self, tmp_path, content, told):
        path = tmp_path / "some.json"
        path.write_text(content)
        with pytest.raises(BadInput, match=re.escape(told)):
            inputs.read([path])

    def test_nothing_there(self, tmp_path):
        for path in (tmp_path / "none.json", tmp_path):
            with pytest.raises(BadInput, match=r"results: got .*allowed: result.json of adaptivespec bench"):
                inputs.read([path])

    def test_one_machine_and_one_target(self, tmp_path, files):
        for changes, told in (
            ({"provenance": {"machine": {"cpu": "another"}}}, "results of one machine"),
            ({"settings": {"model": "another 0"}}, "results of one target"),
        ):
            evaluated(**changes).write(tmp_path)
            with pytest.raises(BadInput, match=told):
                inputs.read(files)

    def test_the_same_twice(self, files):
        with pytest.raises(BadInput, match="each result once"):
            inputs.read([files[0], *files])

    def test_the_command_says_what_is_wrong_in_a_line(self, tmp_path, capsys):
        with pytest.raises(typer.Exit) as stopped:
            run([tmp_path / "none.json"], tmp_path / "out")
        assert stopped.value.exit_code == 2
        assert capsys.readouterr().err.startswith("report: results: got")
        assert not (tmp_path / "out").exists()


class TestPage:
    @pytest.fixture
    def html(self, files, tmp_path) -> str:
        paths = page.write(inputs.read(files), tmp_path)
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[1:])
        assert {path.stem for path in paths[1:]} >= {"ratio", "depth", "shapes", "time-split"}
        return paths[0].read_text()

    def test_it_stands_alone(self, html):
        sources = re.findall(r'(?:src|href)="([^"]{0,30})', html)
        assert sources and all(source.startswith("data:image/png;base64,") for source in sources)

    def test_promoted_tokens_are_marked_in_the_text(self, html):
        assert '<mark title="gave up 0.69 nats"> blue</mark>' in html
        assert "3 tokens in 1 steps, 1 promoted" in html

    def test_text_is_no_markup(self, html):
        assert " &lt;b&gt;" in html and "Which &amp; why?" in html

    def test_what_it_says_in_short(self, html):
        said = html[html.index("In short") : html.index("<img")]
        assert "Fastest with the same text as plain decoding: default" in said
        assert "Fastest with another text than plain decoding: tree:3,4,3@0.2" in said
        assert "tree:3,4,3@mars loses accuracy on exercises: 7 of 10 questions lost, 0 gained" in said
        assert "No change of accuracy could be shown on exercises (10 questions) for: tree:3,4,3." in said

    def test_warnings_are_seen(self, tmp_path):
        made = two_kinds(warnings=["the machine was busy"])
        (path, *_) = page.write(inputs.Results([made], []), tmp_path)
        assert '<p class="warning">the machine was busy</p>' in path.read_text()


class TestPoints:
    def test_arms_by_their_rules(self):
        made = evaluated()
        found = points.points(made.figures, made.settings["arms"], points.tokens_a_step(made.figures))
        assert [(p.arm, p.rule, p.drafts) for p in found] == [
            ("tree:3,4,3", "strict", "tree:3,4,3"),
            ("tree:3,4,3@0.2", "margin", "tree:3,4,3"),
            ("tree:3,4,3@mars", "mars", "tree:3,4,3"),
        ]
        assert [(p.lost, p.speed) for p in found] == [(0.0, 3.0), (0.05, 3.0), (0.05, 3.0)]

    def test_kinds_of_margin(self):
        for name, rule, setting in (
            ("tree:3,4,3@0.2", "margin", "0.2"),
            ("paper@0.2", points.PUBLISHED, "0.2"),
            ("tree:3,4,3@margin:kappa=0.1,lookahead=false", points.PUBLISHED, "0.1"),
            ("tree:3,4,3@typical:delta=0.5", "typical", "delta=0.5"),
            ("tree:3,4,3", "strict", "strict"),
        ):
            (_, made) = arms.parse(name, "head")
            assert points.rule_of(made.name, made.speculative) == rule
            assert points.setting_of(made.name, rule) == setting

    def test_the_best_are_beaten_on_both_axes_by_none(self):
        made = [
            points.Point(str(i), "margin", "t", *at) for i, at in enumerate([(0, 1), (0.1, 2), (0.2, 1.5), (0.3, 3)])
        ]
        assert [point.arm for point in points.best(made)] == ["0", "1", "3"]

    @pytest.mark.parametrize(
        ("ratios", "expected"),
        [
            ({1: 2.0, 4: 1.5}, None),
            ({1: 0.9, 4: 0.8}, 1),
            ({1: 1.5, 4: 0.5}, 2),  # half of the way on a logarithmic scale
            ({1: 0.9, 2: 1.2, 8: 0.8}, 4),
        ],
    )
    def test_crossover(self, ratios, expected):
        found = points.crossover(ratios)
        assert found == (expected if expected is None else pytest.approx(expected))

    def test_ratios_of_the_smallest_batch(self):
        places = [Place(batch=8, context=None), Place(batch=2, context=None)]
        own = [arm("plain"), arm("default", "policy")]
        samples = [sample(a.name, 10 * (1 + (a.name != "plain") * p.batch), place=p) for a in own for p in places]
        assert points.measured([result(samples, own)])["default"] == pytest.approx(3.0)


def test_results_of_before_traces_are_read(tmp_path):
    content = json.loads(two_kinds().model_dump_json())
    del content["traces"]
    (tmp_path / "result.json").write_text(json.dumps(content))
    assert inputs.read([tmp_path]).benches[0].traces == []
