"""Chat templates of the forms that models have, and a byte-level tokenizer for them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # It strips what people write, and names the day.
    "llama3": (
        "{{ bos_token }}<|system|>\n\nToday is {{ strftime_now('%d %b %Y') }}.\n"
        "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}{% set messages = messages[1:] %}"
        "{% endif %}<|eot|>{% for m in messages %}{{ '<|' + m['role'] + '|>\n\n' + (m['content'] | trim) + '<|eot|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n\n' }}{% endif %}"
    ),
    # It has no system role.
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ '<turn>' + m['role'] + '\n' + "
        "(m['content'] | trim) + '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
    ),
    # It writes the system message into the first message of the user.
    "mistral": (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set loop_messages = "
        "messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}{{ bos_token }}"
        "{% for m in loop_messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}{{ '[INST] ' }}"
        "{% if loop.first and system is defined %}{{ system + '\n\n' }}{% endif %}{{ m['content'] + '[/INST]' }}"
        "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    # It writes the system message into the last message of the user: no prefix of a conversation stays a prefix.
    "last": (
        "{% for m in messages %}{% if m['role'] != 'system' %}{{ '[' + m['role'] + ']' }}{% if loop.last and "
        "messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}{% endif %}{{ m['content'] }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    ),
    # It wants a question in every conversation.
    "asked": (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('no question') }}{% endif %}{% for m in messages %}"
        "{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    ),
}

TOOL_TEMPLATES = {
    # It takes arguments as objects, and opens a thought if it is told to.
    "hermes": (
        "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content "
        "+ '\n' }}{% endif %}{{ '<tools>\n' }}{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}{{ '"
        "</tools><|im_end|>\n' }}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}{{ '<|im_start|>user\n"
        "<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}{% elif not (tools and loop.first and "
        "m.role == 'system') %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content if m.content else '' }}"
        '{% for c in m.tool_calls %}{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
        "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}"
        "{% endif %}{% endif %}"
    ),
    # It writes arguments that are texts, calls only where there is no content, and the name of who answered.
    "joined": (
        "{% for tool in tools or [] %}{{ 'TOOL ' + tool.function.name + '\n' }}{% endfor %}{% for m in messages %}"
        "{% if m.content is not string %}{% for c in m.tool_calls %}{{ '<call>' + c.function.name + ' ' + "
        "c.function.arguments + '\n' }}{% endfor %}{% else %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    ),
    # It insists on ids of nine letters and digits.
    "nine": (
        "{% if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
        "{{ raise_exception('ids have nine letters') }}{% endif %}{{ '[TOOL_RESULTS]' + m.tool_call_id + m.content }}"
        "{% elif m.tool_calls %}{{ '[TOOL_CALLS]' }}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        "{{ raise_exception('ids have nine letters') }}{% endif %}{{ c.id + (c.function | tojson) }}{% endfor %}"
        "{% else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}{% endfor %}"
    ),
}
"""Those that know tools."""


def byte_tokenizer(template: str, special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Returns a fast tokenizer with a token for each byte, a chat template, and more special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<s>": 0, "</s>": 1} | {letter: at + 2 for at, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = (TEMPLATES | TOOL_TEMPLATES)[template]
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


def begin_texts(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Has a tokenizer begin texts with the token for that, as many do."""
    begin = (tokenizer.bos_token, tokenizer.bos_token_id)
    processor = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer
