"""How the effective configuration is computed, and how its errors read."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from core.config import ModelConfig
from core.errors import ConfigError
from server.backends.loading import snapshot_file_of
from server.config import (
    Override,
    ServerConfig,
    build_config,
    describe,
    idle_settings,
    keys,
    load_config,
    value_of,
)
from server.config_models import in_terms_of_entries, public_name
from server.config_rules import RULES

ROOT = Path(__file__).parents[2]


def load(
    text: str | None = None,
    env: dict[str, str] | None = None,
    *overrides: str | Override,
    tmp: Path,
):
    path = None
    if text is not None:
        path = str(tmp / "given.yaml")
        Path(path).write_text(text)
    return load_config(path, env or {}, overrides, default_path=str(tmp / "config.yaml"))


def message_of(
    tmp: Path, text: str | None = None, env: dict[str, str] | None = None, *overrides: str
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, env, *overrides, tmp=tmp)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_the_repository_file_lists_every_key_with_its_default_and_a_comment():
    path = str(ROOT / "config.yaml")
    config, sources = load_config(path, {})
    assert config == ServerConfig()
    assert all(sources[key] == path for key in keys())
    lines = [
        line for line in Path(path).read_text().splitlines() if re.match(r"  \w|\w+: \S", line)
    ]
    assert len(lines) == len(keys())
    assert all("  # " in line for line in lines)


def test_every_key_has_a_rule_and_every_default_passes_it():
    assert list(RULES) == keys()
    config = ServerConfig()
    assert all(RULES[key].accepts(value_of(config, key)) for key in keys())


def test_later_layers_win_and_are_named_as_sources(tmp_path):
    config, sources = load(
        "engine:\n  batch_size: 4\n  max_waiting: 5\n  policy: static\n",
        {"NORIA__ENGINE__MAX_WAITING": "6", "NORIA__ENGINE__POLICY": "single", "PATH": "/bin"},
        "engine.policy=continuous",
        Override("--port", "server.port", 9000),
        tmp=tmp_path,
    )
    engine = config.engine
    assert (engine.batch_size, engine.max_waiting, engine.policy) == (4, 6, "continuous")
    assert config.server.port == 9000
    assert sources["engine.batch_size"].endswith("given.yaml")
    assert sources["engine.max_waiting"] == "NORIA__ENGINE__MAX_WAITING"
    assert sources["engine.policy"] == "--set"
    assert sources["server.port"] == "--port"
    assert sources["server.host"] == "default"


def test_environment_and_set_values_are_yaml(tmp_path):
    config, _ = load(
        None,
        {"NORIA__SERVER__API_KEYS": "[a, b]", "NORIA__ENGINE__PREFIX_CACHING": "false"},
        "server.cors_origins=['https://a.example']",
        "model.revision=null",
        "kv_cache.memory_fraction=1e-1",
        tmp=tmp_path,
    )
    assert config.server.api_keys == ("a", "b")
    assert config.engine.prefix_caching is False
    assert config.server.cors_origins == ("https://a.example",)
    assert config.kv_cache.memory_fraction == 0.1


def test_a_config_yaml_in_the_folder_is_used_only_if_it_is_ours(tmp_path):
    default = tmp_path / "config.yaml"
    default.write_text("# mine\nlog:\n  level: debug\n")
    assert load(tmp=tmp_path)[0].log.level == "debug"
    default.write_text("homeassistant: !include x.yaml\nlog: {level: error}\n")
    assert load(tmp=tmp_path)[0] == ServerConfig()
    default.write_text("- a\n- b\n")
    assert load(tmp=tmp_path)[0] == ServerConfig()


def test_a_section_without_keys_is_empty(tmp_path):
    assert load("model:\nengine:\n  batch_size: 2\n", tmp=tmp_path)[0].engine.batch_size == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.batch_size=0", "engine.batch_size must be an integer from 1"),
        ("engine.batch_size=true", "an integer"),
        ("engine.batch_size=1.0", "an integer"),
        ("engine.batch_size='8'", "an integer"),
        ("engine.batch_size=010", "an integer"),
        ("engine.prefix_caching=on", "true or false, not 'on'"),
        ("engine.prefix_caching=1", "true or false"),
        ("engine.policy=fair", "one of continuous, static, single"),
        ("engine.watchdog_s=.inf", "a number"),
        ("engine.watchdog_s=0", "above 0"),
        ("kv_cache.memory_fraction=1.5", "above 0 and at most 1, or auto"),
        ("kv_cache.memory_fraction=0", "above 0"),
        ("kv_cache.block_size=12", "a power of two"),
        ("kv_cache.num_blocks=null", "an integer from 1 to 2147483647, or auto"),
        ("server.port=65536", "from 0 to 65535"),
        ("server.port=80:80", "an integer"),
        ("server.api_keys=secret", "a list of strings"),
        ("server.api_keys=[1]", "a list of strings"),
        ("server.admin_key=two words", "visible ASCII characters, or null"),
        ("server.cors_origins=[example.org]", "a list of origins"),
        ("server.shutdown_timeout_s=-1", "a number from 0"),
        ("model.name=", "a non-empty string"),
        ("model.revision=12", "a non-empty string (in quotes if it looks like a number), or null"),
    ],
)
def test_an_impossible_value_names_the_key_and_what_it_accepts(tmp_path, override, words):
    message = message_of(tmp_path, None, None, override)
    assert override.split("=")[0] in message
    assert words in message


def test_an_unknown_key_names_its_path_and_the_nearest_one(tmp_path):
    assert "engine.batchsize" in message_of(tmp_path, "engine: {batchsize: 3}\n")
    assert "did you mean engine.batch_size" in message_of(tmp_path, "engine: {batchsize: 3}\n")
    assert "server.colour" in message_of(tmp_path, None, {"NORIA__SERVER__COLOUR": "red"})
    assert "gadget" in message_of(tmp_path, "gadget: {a: 1}\n")
    assert "x.y.z" in message_of(tmp_path, None, None, "x.y.z=1")
    assert "--set takes" in message_of(tmp_path, None, None, "nonsense")


def test_an_unknown_key_of_a_known_section_is_not_answered_by_its_section_alone(tmp_path):
    message = message_of(tmp_path, None, None, "engine.nope=1")
    assert "did you mean" not in message
    assert "engine has: backend, device" in message
    assert "did you mean engine.threads?" in message_of(tmp_path, None, None, "engin.threads=1")
    assert "did you mean engine?" in message_of(tmp_path, "engin: {threads: 1}\n")


def test_broken_files_give_one_line(tmp_path):
    assert "line 3" in message_of(tmp_path, "engine:\n  a: [\n")
    assert "stands twice" in message_of(tmp_path, "log: {level: info}\nlog: {level: debug}\n")
    assert "must hold sections" in message_of(tmp_path, "- 1\n")
    assert "must hold keys" in message_of(tmp_path, "engine: 3\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(str(tmp_path / "absent.yaml"), {})


def test_a_wrong_key_value_is_not_printed(tmp_path):
    assert "hunter2" not in message_of(tmp_path, None, {"NORIA__SERVER__API_KEYS": "hunter2"})


def test_the_description_hides_keys_and_names_sources(tmp_path):
    config, sources = load(None, {"NORIA__SERVER__API_KEYS": "[hunter2]"}, tmp=tmp_path)
    text = describe(config, sources)
    assert "hunter2" not in text
    assert 'api_keys: ["***"]  # NORIA__SERVER__API_KEYS' in text
    assert "batch_size: 32  # default" in text
    config, sources = load(None, {"NORIA__SERVER__ADMIN_KEY": "hunter2"}, tmp=tmp_path)
    assert "hunter2" not in describe(config, sources)


def test_build_config_takes_dotted_keys():
    assert build_config({"engine.batch_size": 3}).engine.batch_size == 3
    with pytest.raises(ConfigError):
        build_config({"engine.batch_size": "3"})


def test_engine_arguments_are_passed_through_but_not_the_model(tmp_path):
    config, _ = load(
        None, {}, "engine.backend=vllm", "vllm.engine_args={tensor_parallel_size: 2}", tmp=tmp_path
    )
    assert (config.engine.backend, config.vllm.model) == ("vllm", None)
    assert config.vllm.engine_args == {"tensor_parallel_size": 2}
    assert ServerConfig().vllm.engine_args == {}
    for wrong in ("{model: a}", "[1]", "{1: 2}", "text"):
        message = message_of(tmp_path, None, {}, f"vllm.engine_args={wrong}")
        assert "vllm.engine_args must be a mapping" in message


def test_several_models_are_entries_with_the_keys_of_model(tmp_path):
    small = "{name: a/b, quantization: int8, served_name: small, aliases: [s]}"
    text = f"models:\n- {{name: a/b, pinned: true}}\n- {small}\nkeep_alive_s: 5"
    config, sources = load(text, {"NORIA__MODELS_MEMORY_MIB": "900"}, tmp=tmp_path)
    first, second = config.models
    assert (first.name, first.pinned, first.quantization) == ("a/b", True, "none")
    assert (public_name(first), public_name(second)) == ("a/b", "small")
    assert (second.quantization, second.aliases) == ("int8", ("s",))
    assert (config.models_memory_mib, config.keep_alive_s) == (900, 5)
    assert sources["models_memory_mib"] == "NORIA__MODELS_MEMORY_MIB"
    assert 'served_name":"small"' in describe(config, sources)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: [{quantization: int8}]", "models[0] must be a mapping with a name"),
        ("models: [{name: a, quantization: int9}]", "models[0].quantization must be one of"),
        ("models: [{name: a, color: red}]", "models[0] has no key 'color'"),
        ("models: [{name: a}, {name: a}]", "models[1] and models[0] are both called a"),
        ("models: [{name: a, aliases: [b]}, {name: b}]", "both called b"),
        ("models: 5", "models must be a list of models"),
        ("models: [{name: a}]\nmodel: {name: b}", "models replaces model"),
        ("models: [{name: a}]\nengine: {backend: vllm}", "models needs engine.backend"),
        (
            "engine: {prefix_caching: false}\nkv_cache: {snapshot_file: a}",
            "kv_cache.snapshot_file needs engine.prefix_caching",
        ),
        (
            "engine: {prefix_caching: false, order: longest_prefix}",
            "engine.order: longest_prefix needs engine.prefix_caching",
        ),
    ],
)
def test_an_impossible_entry_is_named(tmp_path, text, words):
    assert words in message_of(tmp_path, text)


def test_a_model_in_a_folder_is_never_called_by_its_path(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    config, _ = load(f"models: [{{name: {folder}}}, {{name: {folder}/x.gguf}}]", tmp=tmp_path)
    assert [public_name(entry) for entry in config.models] == ["mine", "x"]


def test_settings_of_several_models_are_told_to_do_nothing_without_any(tmp_path):
    text = "keep_alive_s: 5\nmodels_load_share: 0.5"
    config, _ = load(text, tmp=tmp_path)
    assert [sentence.split()[0] for sentence in idle_settings(config)] == [
        "models_load_share",
        "keep_alive_s",
    ]
    config, _ = load("models: [a]\n" + text, tmp=tmp_path)
    assert idle_settings(config) == []


def test_a_draft_model_beside_another_method_is_told_to_do_nothing(tmp_path):
    config, _ = load("speculative: {draft_model: 'self:9'}", tmp=tmp_path)
    assert idle_settings(config) == [
        "speculative.draft_model does nothing: speculative.method is lookup, not draft"
    ]
    config, _ = load("speculative: {draft_model: 'self:9', method: draft}", tmp=tmp_path)
    assert idle_settings(config) == []


def test_loading_one_of_several_models_speaks_of_its_entry_and_their_budget():
    said = (
        "model.name is no model; see model.name, /data/model.gguf; raise kv_cache.memory_fraction."
    )
    assert in_terms_of_entries(said, 2) == (
        "models[2].name is no model; see models[2].name, /data/model.gguf; "
        "raise models_memory_mib or kv_cache.memory_fraction."
    )
    said = "kv_cache.num_blocks 24 needs 1 MiB; what remains beside the weights holds 9 blocks."
    assert "what models_memory_mib leaves beside the weights" in in_terms_of_entries(said, 2)


def test_a_setting_nobody_knows_is_answered_with_sections_and_keys_outside_of_them(tmp_path):
    said = message_of(tmp_path, "zzqx: 1")
    assert "sections are: model, engine" in said
    assert "keys outside of them: models, models_memory_mib" in said


def test_the_share_of_loading_is_more_than_nothing(tmp_path):
    assert "models_load_share must be" in message_of(tmp_path, "models_load_share: 0")


def test_a_draft_model_is_asked_for_and_must_be_readable(tmp_path):
    method = "speculative.method=draft"
    missing = message_of(tmp_path, None, None, method)
    assert missing.startswith("speculative.method: draft needs speculative.draft_model")
    wrong = message_of(tmp_path, None, None, method, "speculative.draft_model=self:int5")
    assert wrong.startswith("speculative.draft_model must be self:N")
    assert "the name of another model" in wrong
    config, _ = load(None, None, method, "speculative.draft_model=self:int4:20", tmp=tmp_path)
    assert config.speculative.draft_model == "self:int4:20"


def test_models_whose_names_are_alike_keep_their_snapshots_in_files_of_their_own(
    tmp_path: Path,
) -> None:
    config, _ = load(
        "models: [{name: a/b}, {name: a-b}]\nkv_cache: {snapshot_file: kept}", tmp=tmp_path
    )
    names = [
        snapshot_file_of(msgspec.structs.replace(config, model=ModelConfig(name=name))).name
        for name in ("a/b", "a-b", "../a", "..")
    ]
    assert len(set(names)) == 4
    assert all(name.startswith("kept-") and "/" not in name for name in names)
