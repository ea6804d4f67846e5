"""Rows of a batch and what is kept of it: faults by line, resuming, no line twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.batch import rows
from adaptivespec_vllm.batch.journal import Journal
from adaptivespec_vllm.config import ConfigError

MODEL = "m"


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_both_forms_of_a_row(tmp_path: Path) -> None:
    message = [{"role": "user", "content": "hi"}]
    file = write(
        tmp_path / "in.jsonl",
        {"prompt": "a", "max_tokens": 3, "temperature": 0},
        "",
        {"messages": message, "custom_id": "second", "vllm_xargs": {"adaptivespec": "off"}},
        {"custom_id": "third", "method": "POST", "url": rows.CHAT, "body": {"model": MODEL, "messages": message}},
    )
    first, second, third = rows.read(file, MODEL)
    assert first == rows.Row(
        1, "line-1", rows.COMPLETION, {"prompt": "a", "max_tokens": 3, "temperature": 0, "model": MODEL}
    )
    assert (second.line, second.custom_id, second.url) == (3, "second", rows.CHAT)
    assert (third.line, third.url, third.body) == (4, rows.CHAT, {"model": MODEL, "messages": message})


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": ', "not JSON"),
        ([1], "got [1]; allowed: an object"),
        ({"max_tokens": 1}, "no prompt or messages"),
        ({"prompt": "a", "messages": []}, "prompt and messages given"),
        (
            {"prompt": "a", "max_token": 1},
            "max_token: unknown parameter of /v1/completions; did you mean 'max_tokens'?",
        ),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens: Input should be a valid integer"),
        ({"prompt": "a", "temperature": "x"}, "temperature: "),
        ({"prompt": "a", "stream": True}, "stream: got true"),
        ({"prompt": "a", "model": "other"}, "model: got \"other\"; allowed: 'm'"),
        ({"prompt": "a", "custom_id": 7}, "custom_id: got 7"),
        ({"url": "/v1/embeddings", "body": {}}, 'url: got "/v1/embeddings"'),
        ({"url": rows.CHAT, "body": []}, "body: got []"),
        ({"url": rows.CHAT, "body": {}, "method": "GET"}, 'method: got "GET"'),
        ({"url": rows.CHAT, "body": {}, "extra": 1}, "extra: unknown key"),
    ],
)
def test_a_fault_names_its_line(tmp_path: Path, line: Any, fault: str) -> None:
    file = write(tmp_path / "in.jsonl", {"prompt": "good"}, line)
    with pytest.raises(ConfigError) as error:
        rows.read(file, MODEL)
    assert str(error.value).startswith(f"{file}:2: ")
    assert fault in str(error.value)


def test_faults_of_all_lines_are_told_together(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", *[{"prompt": "a", "n": "x"}] * 12, {"prompt": "a"})
    with pytest.raises(ConfigError) as error:
        rows.read(file, MODEL)
    assert str(error.value).count("\n") == 10
    assert str(error.value).endswith("and 2 more")


def test_an_id_that_is_there_twice_and_a_file_without_rows(tmp_path: Path) -> None:
    twice = write(tmp_path / "twice.jsonl", *[{"prompt": "a", "custom_id": "x"}] * 2)
    with pytest.raises(ConfigError, match=r':2: custom_id: "x" is that of line 1'):
        rows.read(twice, MODEL)
    with pytest.raises(ConfigError, match="no rows"):
        rows.read(write(tmp_path / "none.jsonl", ""), MODEL)
    with pytest.raises(ConfigError, match="No such file"):
        rows.read(tmp_path / "missing.jsonl", MODEL)


def answer(text: str, status: int = 200) -> dict[str, Any]:
    return {"custom_id": text, "response": {"status_code": status, "body": {"text": text}}, "error": None}


ASKED = {"rows": ["some"]}


def test_output_is_in_the_order_of_the_input_without_duplicates(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with Journal(output, ASKED, {1, 2, 5}) as journal:
        assert [journal.add(line, answer(str(line))) for line in (5, 1, 5, 2)] == [True, True, False, True]
        assert not output.exists()
        assert journal.finish() == {"answered": 3, "refused": 0}
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == ["1", "2", "5"]
    assert not journal.path.exists()


def test_a_stopped_run_goes_on_after_its_last_whole_answer(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with Journal(output, ASKED, {1, 2, 3}) as journal:
        journal.add(2, answer("first"))
        journal.add(1, answer("cut off"))
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole[:-9])
    with Journal(output, ASKED, {1, 2, 3}) as journal:
        assert list(journal.done) == [2]
        journal.add(1, answer("again", 400))
        journal.add(3, answer("third"))
        assert journal.finish() == {"answered": 2, "refused": 1}
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == ["again", "first", "third"]


def test_what_another_run_left_is_not_taken(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with Journal(output, ASKED, {1}) as journal:
        journal.add(1, answer("a"))
    with pytest.raises(ConfigError, match="another input or other settings"):
        Journal(output, {"rows": ["other"]}, {1})
