"""The prefix cache on disk: what comes back, what is refused, and what a save may cost others."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from dummy_engine import end_of, make_engine, make_sequence, run_to_end, solo_text, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import EngineConfig, KVCacheConfig, ModelConfig
from core.engine import Engine
from core.errors import Busy, SnapshotRefused
from core.prefixes import snapshot as prefix_snapshot
from core.prefixes.snapshot import SnapshotReport, restore_at_the_start, save_at_the_end
from core.sampling_params import SamplingParams

SIZE = 4
SYSTEM = "You are helpful."


def engine_with(path: Path, fingerprint: str = "this model", **options: Any) -> Engine:
    max_bytes = options.pop("max_bytes", 1 << 20)
    engine, _ = make_engine(**{"num_blocks": 64, "block_size": SIZE, "max_context": 64} | options)
    engine.keep_snapshots(path, fingerprint, max_bytes)
    return engine


def finish(bits: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(bits)
        except StopIteration as end:
            return end.value


def save(engine: Engine) -> SnapshotReport:
    assert engine.snapshots is not None
    report = finish(engine.snapshots.save())
    assert isinstance(report, SnapshotReport)
    return report


def restore(engine: Engine) -> SnapshotReport | None:
    assert engine.snapshots is not None
    return engine.snapshots.restore()


def cached_of(engine: Engine, prompt: str, max_tokens: int = 4) -> int:
    engine.add(make_sequence("asks", prompt, max_tokens=max_tokens))
    outputs = run_to_end(engine)
    assert text_of(outputs, "asks") == solo_text(prompt.encode(), max_tokens)
    return end_of(outputs, "asks").num_cached_tokens


def test_what_was_cached_is_cached_after_a_restart(tmp_path: Path) -> None:
    engine = engine_with(tmp_path / "file")
    assert cached_of(engine, SYSTEM + "Hello") == 0
    report = save(engine)
    assert report.num_tokens == 24  # with the answer, but for its last token
    again = engine_with(tmp_path / "file")
    found = restore(again)
    assert found is not None
    assert found.num_tokens == 24
    again.check_invariants()
    assert cached_of(again, SYSTEM + "World") == 16
    assert (
        cached_of(again, SYSTEM + "Hello" + solo_text((SYSTEM + "Hello").encode(), 3) + "!") == 24
    )


def test_the_end_of_a_conversation_survives_inside_its_block(tmp_path: Path) -> None:
    engine = engine_with(tmp_path / "file")
    prompt = SYSTEM + "Hi you"
    cached_of(engine, prompt)
    assert save(engine).num_tokens == 25
    again = engine_with(tmp_path / "file")
    restore(again)
    assert cached_of(again, prompt + solo_text(prompt.encode(), 4) + "!") == 25


def test_without_a_file_the_cache_begins_empty(tmp_path: Path) -> None:
    engine = engine_with(tmp_path / "absent")
    assert restore(engine) is None
    assert restore_at_the_start(engine.snapshots) == []


@pytest.mark.parametrize("place", [0, 20, 200, -40, -1])
def test_a_damaged_file_is_refused_and_changes_nothing(tmp_path: Path, place: int) -> None:
    path = tmp_path / "file"
    engine = engine_with(path)
    cached_of(engine, SYSTEM + "Hello")
    save(engine)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    again = engine_with(path)
    with pytest.raises(SnapshotRefused):
        restore(again)
    again.check_invariants()
    assert again.stats().num_blocks_free == 64
    assert cached_of(again, SYSTEM + "World") == 0


@pytest.mark.parametrize("length", [0, 10, 150, 300, -1])
def test_a_file_that_ends_too_soon_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "file"
    engine = engine_with(path)
    cached_of(engine, SYSTEM + "Hello")
    save(engine)
    path.write_bytes(path.read_bytes()[:length])
    (line,) = restore_at_the_start(engine_with(path).snapshots)
    assert line == "prefix snapshot: ignored, it is damaged"


def test_the_file_of_another_model_is_ignored_with_one_line(tmp_path: Path) -> None:
    engine = engine_with(tmp_path / "file")
    cached_of(engine, SYSTEM)
    save(engine)
    other = engine_with(tmp_path / "file", "another model")
    (line,) = restore_at_the_start(other.snapshots)
    assert "another model, dtype, block size or kernels" in line
    assert cached_of(other, SYSTEM + "Hello") == 0


def test_an_engine_that_ends_with_nothing_to_write_leaves_the_file_of_another(
    tmp_path: Path,
) -> None:
    engine = engine_with(tmp_path / "file")
    cached_of(engine, SYSTEM)
    save(engine)
    written = (tmp_path / "file").read_bytes()
    other = engine_with(tmp_path / "file", "another model")
    restore_at_the_start(other.snapshots)
    finish(save_at_the_end(other.snapshots))
    assert (tmp_path / "file").read_bytes() == written


@pytest.mark.parametrize("place", ["absent/file", "folder"])
def test_a_place_that_cannot_be_written_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    (tmp_path / "folder").mkdir()
    restore_at_the_start(engine_with(tmp_path / place).snapshots)
    assert "kv_cache.snapshot_file cannot be written" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_look_at_the_place_of_the_file_leaves_nothing_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert restore_at_the_start(engine_with(tmp_path / "file").snapshots) == []
    assert not caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_its_place_is_ignored_too(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    (line,) = restore_at_the_start(engine_with(tmp_path / "file").snapshots)
    assert "cannot be read" in line


def test_what_was_used_last_is_what_fits_and_a_prefix_is_never_torn(tmp_path: Path) -> None:
    block_bytes = 8 * SIZE
    engine = engine_with(tmp_path / "file", max_bytes=5 * block_bytes)
    for letter in "abcd":
        cached_of(engine, letter * 13)
    report = save(engine)
    assert report.num_blocks == 5
    again = engine_with(tmp_path / "file")
    restore(again)
    assert [cached_of(again, letter * 13) for letter in "dcba"] == [12, 4, 0, 0]


def test_a_smaller_pool_takes_as_much_as_it_holds(tmp_path: Path) -> None:
    engine = engine_with(tmp_path / "file")
    for letter in "abcd":
        cached_of(engine, letter * 21)
    save(engine)
    again = engine_with(tmp_path / "file", num_blocks=10, max_context=32)
    restore(again)
    again.check_invariants()
    assert cached_of(again, "d" * 21) in (0, 20)


def test_the_order_of_eviction_survives(tmp_path: Path) -> None:
    engine = engine_with(tmp_path / "file", num_blocks=16, max_context=32)
    for letter in "abc":
        cached_of(engine, letter * 12, max_tokens=1)
    save(engine)
    again = engine_with(tmp_path / "file", num_blocks=16, max_context=32)
    restore(again)
    cached_of(again, "x" * 29, max_tokens=1)  # 8 blocks of 16, and 9 are cached
    cached_of(again, "y" * 9, max_tokens=1)  # 3 more
    assert cached_of(again, "c" * 12, max_tokens=1) == 11
    assert cached_of(again, "a" * 12, max_tokens=1) == 0


def test_a_save_beside_running_sequences_changes_none_and_keeps_what_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_snapshot, "FRAME_BYTES", 8 * SIZE)  # a block at a time
    engine = engine_with(tmp_path / "file", num_blocks=40)
    for number in range(6):
        engine.add(make_sequence(f"s{number}", f"{number}" * 20, max_tokens=30))
    outputs = [output for _ in range(4) for output in engine.step()]
    assert engine.snapshots is not None
    bits = engine.snapshots.save()
    report = None
    while report is None:
        if engine.has_work:
            outputs += engine.step()
            engine.check_invariants()
        try:
            next(bits)
        except StopIteration as end:
            report = end.value
    outputs += run_to_end(engine)
    for number in range(6):
        assert text_of(outputs, f"s{number}") == solo_text((f"{number}" * 20).encode(), 30)
    again = engine_with(tmp_path / "file", num_blocks=40)
    restore(again)
    again.check_invariants()
    for number in range(6):
        cached_of(again, f"{number}" * 20 + "!")  # asserts the text; the runner every context


def test_a_second_save_at_the_same_time_is_refused(tmp_path: Path) -> None:
    engine = engine_with(tmp_path / "file")
    cached_of(engine, SYSTEM)
    assert engine.snapshots is not None
    first = engine.snapshots.save()
    next(first)
    with pytest.raises(Busy):
        save(engine)
    finish(first)
    save(engine)


def test_a_save_that_is_given_up_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    engine = engine_with(tmp_path / "file")
    cached_of(engine, SYSTEM)
    save(engine)
    before = (tmp_path / "file").read_bytes()
    cached_of(engine, "Another prompt")
    assert engine.snapshots is not None
    bits = engine.snapshots.save()
    next(bits)
    bits.close()
    deadline_s = time.monotonic() + 5
    while len(list(tmp_path.iterdir())) > 1 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == before


def test_only_its_owner_can_read_the_file(tmp_path: Path) -> None:
    engine = engine_with(tmp_path / "file")
    cached_of(engine, SYSTEM)
    save(engine)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_disk_that_takes_nothing_is_an_error_of_the_save_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_with(tmp_path / "absent" / "file")
    cached_of(engine, SYSTEM)
    with pytest.raises(FileNotFoundError):
        save(engine)
    finish(save_at_the_end(engine.snapshots))
    assert "could not be written" in caplog.text
    assert cached_of(engine, SYSTEM + "Hi") == 16


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(st.text("ab", min_size=1, max_size=30), min_size=1, max_size=10),
    more=st.lists(st.text("ab", min_size=1, max_size=30), min_size=1, max_size=10),
    sizes=st.tuples(st.integers(12, 40), st.integers(12, 40)),
    max_blocks=st.integers(1, 40),
    frame_blocks=st.integers(1, 4),
)
def test_after_any_restart_every_answer_is_that_of_a_cold_engine(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[str],
    more: list[str],
    sizes: tuple[int, int],
    max_blocks: int,
    frame_blocks: int,
) -> None:
    path = tmp_path_factory.mktemp("snapshots") / "file"
    before = prefix_snapshot.FRAME_BYTES
    prefix_snapshot.FRAME_BYTES = frame_blocks * 8 * SIZE
    try:
        first, second = (
            engine_with(path, num_blocks=size, max_context=48, max_bytes=max_blocks * 8 * SIZE)
            for size in sizes
        )
        for prompt in prompts:
            cached_of(first, prompt)
        report = save(first)
        assert report.num_blocks <= max_blocks
        found = restore(second)
        assert found is not None
        assert second.stats().num_blocks_cached <= found.num_blocks <= report.num_blocks
        second.check_invariants()
        for prompt in more:
            cached_of(second, prompt)
    finally:
        prefix_snapshot.FRAME_BYTES = before


@pytest.mark.parametrize(
    ("family", "kv_dtype", "changes"),
    [("llama", "auto", {}), ("llama", "int8", {"head_dim": 16}), ("gpt2", "auto", {})],
)
def test_restored_keys_and_values_have_the_same_bits(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    family: str,
    kv_dtype: Any,
    changes: dict[str, int],
) -> None:
    from core.model.loader import load_model

    path = tmp_path / "file"
    model = ModelConfig(name=str(tiny_model(family, **changes)), dtype="float32")
    kv_cache = KVCacheConfig(num_blocks=40, dtype=kv_dtype, snapshot_file=str(path))
    prompt = [3 + 7 * i % 90 for i in range(64)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)

    def load() -> Engine:
        loaded = load_model(model, EngineConfig(device="cpu"), kv_cache, lambda *_: None)
        assert len(loaded.fingerprint) == 64
        engine = Engine(EngineConfig(device="cpu"), loaded.runner, loaded.tokenizer)
        engine.keep_snapshots(path, loaded.fingerprint, 1 << 30)
        return engine

    engine = load()
    cold = engine.generate([prompt], params)[0]
    warm = engine.generate([prompt], params)[0]
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 63)
    save(engine)
    again = load()
    assert restore(again) is not None
    restored = again.generate([prompt], params)[0]
    assert restored.num_cached_tokens == 63
    assert restored.logprobs == warm.logprobs


def test_another_set_of_weights_or_another_dtype_has_another_fingerprint(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    from core.model.loader import load_model

    folder = tiny_model("llama")
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    (file,) = changed.glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name in weights if "layers.0" in name and "k_proj" in name)
    weights[name][0, 0] += 0.5
    save_file(weights, file, metadata={"format": "pt"})
    found = {
        (path.name, dtype, block_size): load_model(
            ModelConfig(name=str(path), dtype=dtype),
            EngineConfig(device="cpu"),
            KVCacheConfig(num_blocks=40, block_size=block_size, snapshot_file="somewhere"),
            lambda *_: None,
        ).fingerprint
        for path, dtype, block_size in (
            (folder, "float32", 16),
            (folder, "bfloat16", 16),
            (folder, "float32", 8),
            (changed, "float32", 16),
        )
    }
    again = load_model(
        ModelConfig(name=str(folder), dtype="float32"),
        EngineConfig(device="cpu"),
        KVCacheConfig(num_blocks=30, snapshot_file="elsewhere"),
        lambda *_: None,
    )
    assert len(set(found.values())) == 4
    assert again.fingerprint == found[folder.name, "float32", 16]
