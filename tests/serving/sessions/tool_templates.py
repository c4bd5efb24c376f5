"""Small chat templates with the structure of those of models that call tools, and tokenizers that have them."""

# ruff: noqa: E501 (templates as they are published)

from __future__ import annotations

import pathlib

import transformers

from tests import tiny

# Groups answers of tools in one turn of the user's, and drops the thinking of answers before the last question.
QWEN3 = r"""
{%- if tools %}
  {{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') + 'Tools:' }}
  {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
  {{- '\nA call: <tool_call>\n{"name": …, "arguments": …}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
  {%- elif message.role == 'assistant' %}
    {%- set said = message.content.split('</think>')[-1].lstrip('\n') %}
    {%- set thought = message.content.split('</think>')[0].split('<think>')[-1] if '</think>' in message.content else '' %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > last.query and (loop.last or thought) %}
      {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- said + '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

# Always has a system turn, puts the tools into the first question, trims, and quotes what tools answer.
LLAMA3 = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}
  {%- set first, rest = messages[0].content | trim, messages[1:] %}
{%- else %}
  {%- set first, rest = '', messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + ('Environment: ipython\n' if tools else '') + 'It is 2024.\n\n' }}
{{- first + '<|eot_id|>' }}
{%- for message in rest %}
  {%- set role = 'ipython' if message.role == 'tool' else message.role %}
  {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
  {%- if tools and loop.first %}
    {{- 'Answer with {"name": …, "parameters": …} to call one of these:\n\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
  {%- endif %}
  {%- if message.role == 'tool' %}{{- message.content | tojson }}{%- else %}{{- message.content | trim }}{%- endif %}
  {{- '<|eot_id|>' }}{#- <|eom_id|> ends an answer that code is run of, behind <|python_tag|>. #}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""

# Has turns of tools, of which the last one ends in another way than those that something follows.
HERMES = r"""
{{- bos_token }}
{%- if tools %}
  {{- '<|im_start|>system\nCall as <tool_call>\n{"name": …, "arguments": …}\n</tool_call> what is in <tools>' }}
  {%- for tool in tools %}{{- ' ' }}{{- tool | tojson }}{%- endfor %}
  {{- '</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role != 'tool' %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
  {%- else %}
    {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>tool\n' }}{%- endif %}
    {{- '<tool_response>\n' + message.content + '\n</tool_response>' + ('' if loop.last else '\n') }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# Describes tools and calls in tags, and writes values as Python does.
QWEN3_CODER = r"""
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if tools or messages[0].role == 'system' %}
  {{- '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else 'You help.') }}
  {%- for tool in tools or [] %}{{- '\n<function>' + tool.function.description + (tool | tojson) + '</function>' }}{%- endfor %}
  {{- '\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in rest %}
  {%- if message.role == 'assistant' and message.tool_calls %}
    {{- '<|im_start|>assistant\n' + (message.content + '\n\n' if message.content else '') }}
    {%- for call in message.tool_calls %}
      {{- ('' if loop.first else '\n') + '<tool_call>\n<function=' + call.function.name + '>\n' }}
      {%- for key, value in call.function.arguments | items %}
        {%- set text = value | tojson if value is mapping or (value is sequence and value is not string) else value | string %}
        {{- '<parameter=' + key + '>\n' + text + '\n</parameter>\n' }}
      {%- endfor %}
      {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user\n' }}{%- endif %}
    {{- '<tool_response>\n' + message.content + '\n</tool_response>\n' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# All of Mistral demand an answer between two questions, and have no header before answers.
_MISTRAL = r"""
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- set first = messages[0].content if messages[0].role == 'system' else 'You help.' %}
{%- set asked, count = rest | selectattr('role', 'equalto', 'user') | list, namespace(said=0) %}
{%- for message in rest %}
  {%- if message.role != 'tool' and not message.tool_calls %}
    {%- if (message.role == 'user') != (count.said % 2 == 0) %}{{- raise_exception('Roles must alternate.') }}{%- endif %}
    {%- set count.said = count.said + 1 %}
  {%- endif %}
{%- endfor %}
{{- bos_token + BEGIN }}
{%- for message in rest %}
  {%- if message.role == 'user' %}
    {{- USER }}
  {%- elif message.role == 'tool' %}
    {{- RESULT }}
  {%- elif message.tool_calls %}
    {{- CALLED + eos_token }}
  {%- else %}
    {{- message.content + eos_token }}
  {%- endif %}
{%- endfor %}
"""


def _mistral(begin: str, user: str, result: str, called: str) -> str:
  made = _MISTRAL.replace('BEGIN', begin).replace('USER', user).replace('RESULT', result)
  return made.replace('{{- CALLED + eos_token }}', called + '{{- eos_token }}')


_ID = (
  "{%- if not message.tool_call_id or message.tool_call_id | length != 9 %}{{- raise_exception('No id.') }}{%- endif %}"
)
_TOOLS = "('[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools and message == asked[-1] else '')"
# Shows tools and system message with the last question.
MISTRAL_V3 = _mistral(
  "''",
  f"{_TOOLS} + '[INST]' + (first + '\\n\\n' if loop.last and rest != messages else '') + message.content + '[/INST]'",
  f"""'[TOOL_RESULTS]{{"content": ' + message.content + ', "call_id": "' }}}}{_ID}
    {{{{- message.tool_call_id + '"}}[/TOOL_RESULTS]'""",
  """
    {{- '[TOOL_CALLS][' }}
    {%- for call in message.tool_calls %}
      {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
    {%- endfor %}
    """,
)
MISTRAL_V11 = _mistral(
  "'[SYSTEM_PROMPT]' + first + '[/SYSTEM_PROMPT]'",
  f"{_TOOLS} + '[INST]' + message.content + '[/INST]'",
  f"'[TOOL_RESULTS]' }}}}{_ID}{{{{- message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]'",
  """
    {%- for call in message.tool_calls %}
      {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson }}
    {%- endfor %}
    """,
)
MISTRAL_V13 = _mistral(
  "'[SYSTEM_PROMPT]' + first + '[/SYSTEM_PROMPT]' + ('[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools else '')",
  "'[INST]' + message.content + '[/INST]'",
  "'[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]'",
  """
    {{- message.content }}
    {%- for call in message.tool_calls %}
      {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
    {%- endfor %}
    """,
)

_CHATML = ('<|im_start|>', '<|im_end|>', '<|endoftext|>')
_LLAMA = tuple(
  '<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>'.split()
)
_BRACKETS = tuple(
  '<s> </s> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] '
  '[TOOL_CONTENT] [/TOOL_RESULTS] [TOOL_CALLS] [CALL_ID] [ARGS]'.split()
)
# Template, control tokens, the one that ends a turn, tags that are text.
FAMILIES = {
  'qwen3': (QWEN3, _CHATML, '<|im_end|>', ('<tool_call>', '</tool_call>', '<think>', '</think>')),
  'llama3': (LLAMA3, _LLAMA, '<|eot_id|>', ()),
  'hermes': (HERMES, _CHATML, '<|im_end|>', ()),
  'qwen3_coder': (QWEN3_CODER, _CHATML, '<|im_end|>', ('<tool_call>', '</tool_call>')),
  'mistral_v3': (MISTRAL_V3, _BRACKETS, '</s>', ()),
  'mistral_v11': (MISTRAL_V11, _BRACKETS, '</s>', ()),
  'mistral_v13': (MISTRAL_V13, _BRACKETS, '</s>', ()),
}


def make_tokenizer(folder: pathlib.Path, family: str) -> transformers.PreTrainedTokenizerFast:
  """Make a byte-level tokenizer with the control tokens and the template of a family."""
  template, special, end, tags = FAMILIES[family]
  tiny.make_tokenizer(folder, template)
  begin = None if special is _CHATML else special[0]
  made = transformers.AutoTokenizer.from_pretrained(folder, eos_token=end, bos_token=begin)
  made.add_tokens([transformers.AddedToken(token, special=True, normalized=False) for token in special])
  made.add_tokens([transformers.AddedToken(token, special=False, normalized=False) for token in tags])
  made.add_special_tokens({'additional_special_tokens': list(special)})
  return made
