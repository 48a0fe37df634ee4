"""Chat templates in the manners of the families, and conversations for them."""

from typing import Any

CHATML = """
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.reasoning_content %}
        {%- set thought = '<think>\\n' + message.reasoning_content + '\\n</think>\\n' %}
        {%- set text = thought + message.content %}
    {%- else %}{%- set text = message.content or '' %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + text }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + (call.function.arguments | tojson(indent=2)) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""

TRIMMED = """{{ bos_token }}
{%- if documents %}{% for d in documents %}[{{ loop.index }}: {{ d.title }}] {% endfor %}{% endif %}
{%- set ns = namespace(last='') %}
{%- for message in messages %}
    {%- if message['role'] == ns.last %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- set ns.last = message['role'] %}
    {%- if message['role'] == 'skip' %}{% continue %}{% endif %}
    {%- if message['content'] is string %}{%- set text = message['content'] | trim %}
    {%- else %}{%- set text = '' %}
        {%- for part in message['content'] %}{%- set text = text + part['text'] %}
        {{- '<part>' + part['text'] }}{%- endfor %}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' }}{% generation %}{{ text }}{% endgeneration %}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ strftime_now('%Y') }}{% endif -%}
"""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <hot> & 'dry' - ü",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <b>there</b> "}],
    "several": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?\n"},
        {"role": "assistant", "content": " 2 ", "reasoning_content": "easy"},
        {"role": "user", "content": "日本 🎉"},
    ],
    "called": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": '{"degrees": 20}'},
    ],
    "answered": [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "one, two, "},
    ],
}
