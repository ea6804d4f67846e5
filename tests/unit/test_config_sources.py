"""Where a configuration is read from: files, text, mappings."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from adaptivespec_vllm.config import ConfigError, load, read, resolve

MINIMAL = {"method": "adaptivespec", "model": "HEAD"}


class TestSources:
    OPTIONS = MINIMAL | {"tree": {"low": {"depth": 2}}, "margin": {"kappa": 0.5}, "revision": "main"}

    def test_path_text_and_dict_mean_the_same(self, tmp_path):
        file = tmp_path / "adaptivespec.json"
        text = json.dumps(self.OPTIONS, indent=2)
        file.write_text(text)
        expected = load(self.OPTIONS, {"revision"})
        assert expected.vllm == {"revision": "main"}
        for source in (file, str(file), text, f"\n {text}"):
            assert load(source, {"revision"}) == expected

    def test_dashes_in_keys(self):
        options = {"num-speculative-tokens": 9, "tree": {"min-path-probability": 0.5}}
        config = resolve(options)
        assert (config.num_speculative_tokens, config.tree.min_path_probability) == (9, 0.5)

    def test_the_source_is_not_changed(self):
        options = json.loads(json.dumps(self.OPTIONS))
        load(options, {"revision"})
        assert options == self.OPTIONS

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ('{"method": "adaptivespec",\n "model": }', ["invalid JSON", "line 2 column 11"]),
            ('{"method": "adaptivespec"', ["invalid JSON", "line 1 column 26"]),
            ("[1, 2]", ["a JSON object"]),
            ('{"tree": {"low": 1, "low": 2}}', ["low", "given twice"]),
            ('{"num-speculative-tokens": 1, "num_speculative_tokens": 2}', ["num_speculative_tokens", "given twice"]),
            ('{"margin": {"kappa": NaN}}', ["NaN"]),
            ("[" * 100_000, ["nested too deeply"]),
            ('{"a": ' * 100_000, ["nested too deeply"]),
            ('{"signal": {"alpha": 0.1, "alpha": 0.2}}', ["signal.alpha: given twice"]),
            ('{"tree": {"low": {"nodes": 1, "nodes": 2}}}', ["tree.low.nodes: given twice"]),
            ('{"signal": {"alpha": 1, "alpha": 2}, "signal": {}}', ["signal: given twice"]),
            ('{"num_speculative_tokens": ' + "9" * 5000 + "}", ["too many digits"]),
        ],
    )
    def test_broken_text(self, tmp_path, text, parts):
        file = tmp_path / "broken.json"
        file.write_text(text)
        for source in (text, file):
            with pytest.raises(ConfigError) as error:
                read(source)
            assert all(part in str(error.value) for part in parts)
        assert "broken.json" in str(error.value)

    def test_missing_file_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match=r"nothing\.json: no such file"):
            load(tmp_path / "nothing.json")

    def test_directory_and_binary_files(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(tmp_path)
        (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="not UTF-8"):
            load(tmp_path / "binary.json")

    def test_many_keys_are_read_in_linear_time(self):
        many = json.dumps({f"key{number}": number for number in range(60_000)})
        start = time.perf_counter()
        assert len(read(many)) == 60_000
        assert time.perf_counter() - start < 5

    @pytest.mark.parametrize(
        ("path", "part"), [("x" * 5000, "too long"), ("a\0b.json", "not a path"), ("", "the path")]
    )
    def test_a_path_that_cannot_be_one(self, path, part):
        for look in (read, load):
            with pytest.raises(ConfigError, match=part) as error:
                look(path)
            assert len(str(error.value)) < 200
            assert "\0" not in str(error.value)

    def test_the_home_directory(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "a.json").write_text(json.dumps(MINIMAL | {"model": "~/head"}))
        assert load("~/a.json").config.model == load(Path("~/a.json")).config.model == str(tmp_path / "head")

    def test_a_mapping_nested_too_deeply(self):
        deep: dict = {}
        for _ in range(5000):
            deep = {"tree": deep}
        with pytest.raises(ConfigError, match="nested too deeply"):
            load(MINIMAL | deep)

    def test_a_fault_in_a_file_names_the_file(self, tmp_path):
        file = tmp_path / "a.json"
        file.write_text(json.dumps(MINIMAL | {"tree": {"scope": "x"}}))
        with pytest.raises(ConfigError, match=r"a\.json: tree\.scope: got"):
            load(file)
