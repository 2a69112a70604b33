"""How a chat template tells in which format its model calls tools, and whether it thinks."""

from __future__ import annotations

import pytest

from core.model.chat_template import ChatTemplate

QWEN = """{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}
{{- '<tool_call>\\n{"name": <function-name>}\\n</tool_call><|im_end|>\\n' }}{%- endif %}"""
LLAMA = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- "Environment: ipython\\n" }}{{- "<|python_tag|>" + tool_call.name }}"""
MISTRAL = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{- "[AVAILABLE_TOOLS] [" }}
{{- "[TOOL_CALLS] [" }}"""
OTHER = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
PLAIN = "{% for m in messages %}You have no tools. {{ m.content }}{% endfor %}"
THINKS = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}<think>\n"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (QWEN, "hermes"),
        (LLAMA, "llama"),
        (MISTRAL, "mistral"),
        (OTHER, "json"),
        (PLAIN, None),
        (THINKS, None),
    ],
)
def test_the_template_tells_the_format(source: str, name: str | None) -> None:
    assert ChatTemplate(source, {}).tool_format == name
    assert ChatTemplate(PLAIN, {}, with_tools=source).tool_format == name
    assert ChatTemplate(source, {}).has_thoughts == (source is THINKS)


def test_the_default_models_template_knows_no_tools(default_model_folder) -> None:
    from core.model.tokenizer_files import load_tokenizer

    tokenizer = load_tokenizer(default_model_folder)
    assert tokenizer.tool_format is None
    assert not tokenizer.has_thoughts
