"""Reading a model's files: formats, damage, what they say about the model, and the machine it runs on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import families
import pytest
import torch

from core.config import EngineConfig, KVCacheConfig, ModelConfig
from core.errors import ConfigError, ModelRefused
from core.model import device as device_module
from core.model import loader
from core.model.attention.reference import REFERENCE
from core.model.description import describe
from core.model.device import choose_device, choose_dtype, multiplies_bfloat16
from core.model.kernels import load
from core.model.loader import load_general, load_model, prepare
from core.model.preview import plan_only
from core.model.weights import iterate_weights, list_weight_files, measure_weights, open_weights


def silent(message: str, fraction: float | None) -> None:
    """A report nobody reads."""


def with_config(source: Path, target: Path, **changes: object) -> Path:
    """A copy of a model folder with other settings."""
    shutil.copytree(source, target)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in iterate_weights(folder)}


def rewrite(source: Path, target: Path, *, as_pickle: bool, num_shards: int) -> Path:
    """The same model with its weights in another format."""
    from safetensors.torch import save_file

    state = state_of(source)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    names = sorted(state)
    stem, ending = ("pytorch_model", "bin") if as_pickle else ("model", "safetensors")
    weight_map = {}
    for i in range(num_shards):
        part = {name: state[name] for name in names[i::num_shards]}
        file = (
            f"{stem}.{ending}"
            if num_shards == 1
            else f"{stem}-{i + 1:05}-of-{num_shards:05}.{ending}"
        )
        torch.save(part, target / file) if as_pickle else save_file(
            part, target / file, metadata={"format": "pt"}
        )
        weight_map |= dict.fromkeys(part, file)
    if num_shards > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (target / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    return target


@pytest.mark.parametrize("as_pickle", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_format_gives_the_same_weights(
    tiny_model: Callable[..., Path], tmp_path: Path, as_pickle: bool, num_shards: int
) -> None:
    """OPT-125M, the tutorial's model, comes as pytorch_model.bin."""
    source = tiny_model("opt")
    folder = rewrite(source, tmp_path / "m", as_pickle=as_pickle, num_shards=num_shards)
    assert len(list_weight_files(folder)) == num_shards
    expected, found = state_of(source), state_of(folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert measure_weights(folder).num_weights == measure_weights(source).num_weights
    planned = prepare(ModelConfig(name=str(folder)), EngineConfig(), KVCacheConfig(), silent)
    model = load_general(planned, REFERENCE)
    assert type(model.module).__name__ == "OPTForCausalLM"


def resident_file_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssFile:")[2].split()[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own count")
def test_tensors_that_were_taken_leave_memory(tmp_path: Path) -> None:
    """So that packing a model never holds its file beside the result."""
    from safetensors.torch import save_file

    expected = {f"w{i:02}": torch.full((1 << 20,), float(i)) for i in range(32)}  # 4 MiB each
    save_file(expected, tmp_path / "model.safetensors")
    told: list[float] = []
    weights = open_weights(tmp_path, told.append)
    before_kib, peak_kib = resident_file_kib(), 0
    first = weights.pop("w00")
    for name in sorted(weights):
        assert float(weights.pop(name).sum()) == (1 << 20) * float(name[1:])
        peak_kib = max(peak_kib, resident_file_kib() - before_kib)
    assert peak_kib < 48 * 1024
    assert torch.equal(first, expected["w00"])  # still right, though its pages were given back
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_a_pickle_that_would_run_code_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_model("opt"), folder, ignore=shutil.ignore_patterns("*.safetensors"))

    class Evil:
        def __reduce__(self):
            return (print, ("owned",))

    torch.save({"model.x": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="cannot be read"):
        list(iterate_weights(folder))
    with pytest.raises(ModelRefused, match="cannot be read"):
        measure_weights(folder)


def test_torn_and_missing_weight_files_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = rewrite(tiny_model("gpt2"), tmp_path / "m", as_pickle=False, num_shards=2)
    files = list_weight_files(folder)
    whole = files[0].read_bytes()
    for length in (0, 4, 200, len(whole) - 8):
        files[0].write_bytes(whole[:length])
        with pytest.raises(ModelRefused, match="cannot be read"):
            measure_weights(folder)
    files[0].unlink()
    with pytest.raises(ModelRefused, match="lacks 1 of its 2 weight files"):
        list_weight_files(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelRefused, match="has no weights"):
        list_weight_files(folder)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelRefused, match="outside"):
        list_weight_files(tmp_path)


def test_weights_that_do_not_cover_the_model_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The library would fill the gap with random numbers and a warning."""
    from safetensors.torch import save_file

    source = tiny_model("gpt2")
    state = state_of(source)
    del state["transformer.h.1.mlp.c_fc.weight"]
    folder = tmp_path / "m"
    shutil.copytree(source, folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    planned = prepare(ModelConfig(name=str(folder)), EngineConfig(), KVCacheConfig(), silent)
    with pytest.raises(ModelRefused, match="missing keys"):
        load_general(planned, REFERENCE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "no-such-type"}, "no-such-type"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    tiny_model: Callable[..., Path], tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    folder = with_config(tiny_model("gpt2"), tmp_path / "m", **changes)
    with pytest.raises(ModelRefused, match=reason):
        describe(folder)


def test_a_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelRefused, match=r"config\.json of the model cannot be read"):
        describe(tmp_path)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        ([1, 2], 2, (1, 2)),
        (1, [2, 0], (1, 2, 0)),
        (None, 2, (2,)),
    ],
)
def test_all_end_ids_of_config_and_generation_config_count(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    in_config: object,
    in_generation: object,
    expected: tuple[int, ...],
) -> None:
    """B033."""
    folder = with_config(tiny_model("gpt2"), tmp_path / "m", eos_token_id=in_config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    assert describe(folder).eos_token_ids == expected


def test_generation_defaults_are_the_authors_sampling_fields(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = with_config(tiny_model("gpt2"), tmp_path / "m")
    values = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "max_length": 9}
    (folder / "generation_config.json").write_text(json.dumps(values))
    assert describe(folder).generation_defaults == {"temperature": 0.6, "top_k": 20}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}


@pytest.mark.parametrize(
    ("family", "scaling", "context"),
    [
        ("gpt_neox", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 512),
        ("gpt_neox", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 512),
        ("phi3", LONGROPE, 128),
    ],
)
def test_positions_that_would_depend_on_neighbours_end_the_context(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    family: str,
    scaling: dict[str, object],
    context: int,
) -> None:
    """Beyond it one long sequence in the batch would change the frequencies of all."""
    original = {"original_max_position_embeddings": 128} if family == "phi3" else {}
    folder = with_config(tiny_model(family), tmp_path / "m", rope_parameters=scaling, **original)
    description = describe(folder)
    assert description.max_context == context
    assert bool(description.notes) is (context < 512)


def test_learned_positions_end_the_context_at_their_table(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """B145: whatever the config claims; OPT's table has two rows more than positions."""
    loaded = load_model(
        ModelConfig(name=str(tiny_model("opt", max_position_embeddings=64)), dtype="float32"),
        EngineConfig(device="cpu"),
        KVCacheConfig(),
        silent,
    )
    assert loaded.shape.max_context == 64
    assert loaded.plan.max_model_len == 64


def test_a_padded_embedding_never_widens_the_vocabulary(tiny_model: Callable[..., Path]) -> None:
    """B020: ids between tokenizer and table have no text."""
    loaded = load_model(
        ModelConfig(name=str(tiny_model("gpt2", vocab_size=320)), dtype="float32"),
        EngineConfig(device="cpu"),
        KVCacheConfig(num_blocks=8),
        silent,
    )
    assert loaded.shape.vocab_size == families.NUM_TOKENS


def test_float16_for_a_model_trained_in_bfloat16_is_warned_of(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """B149."""
    folder = with_config(tiny_model("gpt2"), tmp_path / "m", dtype="bfloat16")
    for dtype, is_warned in (("float16", True), ("bfloat16", False), ("float32", False)):
        model = ModelConfig(name=str(folder), dtype=dtype)
        planned = prepare(model, EngineConfig(), KVCacheConfig(), silent)
        assert any("float16" in note for note in planned.notes) is is_warned


def test_loading_says_what_it_did(tiny_model: Callable[..., Path]) -> None:
    steps: list[str] = []
    loaded = load_model(
        ModelConfig(name=str(tiny_model("gemma2")), dtype="float32"),
        EngineConfig(device="cpu"),
        KVCacheConfig(num_blocks=8),
        lambda message, fraction: steps.append(message),
    )
    assert (loaded.path, loaded.dtype, loaded.device) == ("general", "float32", "cpu")
    assert loaded.architecture == "Gemma2ForCausalLM"
    assert {"files", "weights", "probe", "kv_cache"} <= loaded.start_phases.keys()
    assert "loading weights" in steps
    assert loaded.weights_bytes > 0
    assert loaded.plan.num_blocks == 8


@pytest.mark.parametrize("family", families.FAST)
def test_the_llama_family_takes_the_fast_path(tiny_model: Callable[..., Path], family: str) -> None:
    loaded = load_model(
        ModelConfig(name=str(tiny_model(family)), dtype="float32"),
        EngineConfig(device="cpu"),
        KVCacheConfig(num_blocks=8),
        silent,
    )
    assert loaded.path == "fast"


def test_the_plan_loads_no_weights(default_model_folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("core.model.weights.MappedWeights", None)
    lines, _ = plan_only(ModelConfig(), EngineConfig(device="cpu"), KVCacheConfig(num_blocks=1024))
    text = "\n".join(lines)
    sizes = {
        257,
        513,
        311,
        621,
    }  # bfloat16 or float32; without the kernels a tied embedding is held twice
    assert any(f"weights {size} MiB" in text for size in sizes)
    assert "1,024 blocks x 16 = 16,384 tokens" in text
    assert "decided by kv_cache.num_blocks" in text
    assert "Maximum concurrency for 8,192 tokens per request: 2.00x" in text


@pytest.mark.parametrize(
    ("family", "as_pickle", "is_told"),
    [("llama", False, False), ("llama", True, True), ("gpt2", False, True)],
)
def test_the_plan_tells_where_loading_holds_the_checkpoint_beside_the_model(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, as_pickle: bool, is_told: bool
) -> None:
    folder = rewrite(tiny_model(family), tmp_path / "m", as_pickle=as_pickle, num_shards=1)
    lines, _ = plan_only(ModelConfig(name=str(folder)), EngineConfig(), KVCacheConfig(num_blocks=8))
    assert any(line.startswith("loading: for a while up to ") for line in lines) is is_told


def test_bfloat16_is_chosen_where_the_processor_multiplies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    info = tmp_path / "cpuinfo"
    for line, expected in (
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx2 avx512f", False),
    ):
        info.write_text(f"processor : 0\n{line}\n")
        assert multiplies_bfloat16(info) is expected
    assert not multiplies_bfloat16(tmp_path / "missing")
    for is_native, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(device_module, "multiplies_bfloat16", lambda value=is_native: value)
        assert choose_dtype(ModelConfig(), torch.device("cpu")) == dtype
        assert choose_dtype(ModelConfig(), torch.device("cpu"), widens=True) == torch.bfloat16


@pytest.mark.parametrize(("family", "widens"), [("llama", True), ("gpt_neox", False)])
def test_bfloat16_is_also_chosen_where_our_kernels_widen_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, widens: bool
) -> None:
    monkeypatch.setattr(device_module, "multiplies_bfloat16", lambda: False)
    folder = families.build(family, tmp_path / family)
    settings = (KVCacheConfig(num_blocks=8), silent)
    planned = prepare(ModelConfig(name=str(folder)), EngineConfig(device="cpu"), *settings)
    has_vectors = (kernels := load()) is not None and kernels.name != "plain"
    is_torch = loader.choose_kernels(planned.device)[0] is REFERENCE
    expected = widens and has_vectors and not is_torch
    assert planned.dtype == (torch.bfloat16 if expected else torch.float32)


def test_cuda_where_there_is_none_is_an_error_that_names_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(EngineConfig()).type == "cpu"
    with pytest.raises(ConfigError, match=r"engine\.device"):
        choose_device(EngineConfig(device="cuda"))


def test_a_containers_limit_bounds_the_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    assert device_module._cgroup_available(tmp_path) == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert device_module._cgroup_available(tmp_path) is None
    assert device_module._cgroup_available(tmp_path / "missing") is None
