"""The tokenizer of a model folder: which files say what, and the way through the library without a tokenizer.json.

Called by `loader.py`.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from textwrap import shorten
from typing import Any

from core.errors import ModelRefused
from core.model.chat_template import ChatTemplate
from core.model.tokenizer import Tokenizer, token_text

_SUFFIXES = (".json", ".jinja", ".txt", ".model")  # of files that a tokenizer may be made of
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


MAX_KEPT = 8
_kept: OrderedDict[tuple[object, ...], Tokenizer] = OrderedDict()  # those used last, last


def keep_tokenizer(
    folder: Path, *, eos_token_ids: tuple[int, ...] = (), template_file: str | None = None
) -> Tokenizer:
    """As `load_tokenizer`, but one that was made before from the same files is used again: making one takes Python's
    lock for a fifth of a second and more, which streams of other models would notice whenever this one is loaded."""
    sources = [path for path in folder.iterdir() if path.suffix in _SUFFIXES]
    sources += [] if template_file is None else [Path(template_file)]
    stats = [(path, path.stat()) for path in sorted(sources) if path.is_file()]
    files = tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in stats)
    key = (str(folder), eos_token_ids, template_file, files)
    tokenizer = _kept.get(key)
    if tokenizer is None:
        tokenizer = _kept[key] = load_tokenizer(
            folder, eos_token_ids=eos_token_ids, template_file=template_file
        )
    _kept.move_to_end(key)
    while len(_kept) > MAX_KEPT:
        _kept.popitem(last=False)
    return tokenizer


def load_tokenizer(
    folder: Path, *, eos_token_ids: tuple[int, ...] = (), template_file: str | None = None
) -> Tokenizer:
    """The tokenizer of a model folder, from tokenizer.json, else through transformers' AutoTokenizer.

    Raises `ModelRefused` where there is none, or where it cannot be used without the library's slow classes.
    """
    # One text at a time, in the caller's own thread: a pool of the library's would let long texts queue up.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings = _read_settings(folder)
    definition_file = folder / "tokenizer.json"
    if definition_file.is_file():
        definition = definition_file.read_text(encoding="utf-8")
    else:
        definition, settings = _through_library(folder, settings)
    special = {name: token_text(settings[name]) for name in _SPECIAL_NAMES if settings.get(name)}
    template = ChatTemplate.load(folder, settings, special, template_file)
    return Tokenizer(
        definition, settings=settings, eos_token_ids=eos_token_ids, chat_template=template
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            try:
                settings |= json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ModelRefused(f"{name} of the model is no valid JSON.") from error
    return settings


def _through_library(folder: Path, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        definition = str(tokenizer.backend_tokenizer.to_str())
    except (
        Exception
    ) as error:  # missing files, missing optional packages, classes without a fast form
        reason = shorten(str(error), 200, placeholder=" …")
        raise ModelRefused(
            f"The model has no tokenizer.json and no tokenizer that can be turned into one ({reason}). "
            "Convert its tokenizer with transformers and put tokenizer.json beside the weights."
        ) from error
    return definition, settings | {
        k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)
    }
