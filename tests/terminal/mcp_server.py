"""An MCP server that misbehaves as its arguments say; without packages, so that it starts fast.

python mcp_server.py LOG [MODE …]
"""

import json
import os
import sys
import time

log, *modes = sys.argv[1:]
TOOLS = {
  'add': {'type': 'object', 'properties': {'a': {'type': 'integer'}, 'b': {'type': 'integer'}}, 'required': ['a', 'b']},
  'say': {'type': 'object', 'properties': {'text': {'type': 'string'}}},
}


def noted(text):
  with open(log, 'a') as file:
    file.write(text + '\n')


def listed():
  described = 'Does it.\u200b' + 'x' * 3000 * ('long' in modes)
  schemas = {**TOOLS, **{f't{number}': {'type': 'object'} for number in range(200 * ('many' in modes))}}
  if 'hidden' in modes:
    schemas['add'] = {'type': 'object', 'properties': {'a': {'description': 'A\u200bB', 'type': 'integer'}}}
    schemas['say'] = {'type': 'object', 'properties': {'te\u200bxt': {'type': 'string'}}}
  if 'changed' in modes:
    schemas['add'] = {'type': 'object'}
  return [{'name': name, 'description': described, 'inputSchema': schema} for name, schema in schemas.items()]


def called(name, arguments):
  if name == 'add':
    return [{'type': 'text', 'text': str(arguments['a'] + arguments['b'])}]
  text = arguments.get('text', '')
  if text == 'die':
    os._exit(3)
  if text == 'hang':
    noted('hangs')
    return None
  if text == 'fail':
    raise ValueError('It fails.')
  if text == 'change':
    modes.append('changed')
    answer({'method': 'notifications/tools/list_changed'})
  if text.startswith('big '):
    text = 'x' * int(text[4:])
  if text == 'surrogate':
    text = '\ud800'
  if text == 'junk':
    return [{'type': 'unheard of'}]
  if text == 'image':
    return [{'type': 'image', 'data': 'AAAA', 'mimeType': 'image/png'}]
  if text == 'flood':
    sys.stderr.write('f' * 3_000_000)
  return [{'type': 'text', 'text': text}]


def answer(values):
  sys.stdout.write(json.dumps({'jsonrpc': '2.0', **values}) + '\n')
  sys.stdout.flush()


def main():
  noted(f'began {os.getpid()}')
  if 'exit' in modes:
    sys.exit('I will not.')
  if 'prompt' in modes:
    print('Welcome! Continue? ', flush=True)
  if 'hang' in modes:
    time.sleep(1000)
  for line in sys.stdin:
    message = json.loads(line)
    method, values = message['method'], message.get('params', {})
    if 'id' not in message:
      noted(method)
    elif method == 'initialize':
      about = {'capabilities': {'tools': {}}, 'serverInfo': {'name': 'test', 'version': '1'}}
      answer({'id': message['id'], 'result': {'protocolVersion': values['protocolVersion'], **about}})
    elif method == 'ping':
      answer({'id': message['id'], 'result': {}})
    elif method == 'tools/list':
      answer({'id': message['id'], 'result': {'tools': listed()}})
    elif method == 'tools/call':
      noted(f'{values["name"]} {json.dumps(values["arguments"])}')
      try:
        content, failed = called(values['name'], values['arguments']), False
      except (KeyError, ValueError) as error:
        content, failed = [{'type': 'text', 'text': str(error)}], True
      if content is not None:
        answer({'id': message['id'], 'result': {'content': content, 'isError': failed}})
  noted('stdin closed')
  if 'stays' in modes:
    time.sleep(1000)


main()
