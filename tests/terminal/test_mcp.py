"""MCP servers as tools: whole sessions with a server that misbehaves on demand."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from sdpo_jax.environments.workspace.shell import Cancellation
from sdpo_jax.environments.workspace.tools import BadCall
from sdpo_jax.errors import UserError
from sdpo_jax.terminal import mcp_servers, policies, program
from tests.terminal.session_server import SessionServer, call

SERVER = pathlib.Path(__file__).with_name('mcp_server.py')


@pytest.fixture(autouse=True)
def no_disk(monkeypatch):
  """No machine fails here, so that nothing waits for the disk."""
  monkeypatch.setattr('os.fsync', lambda descriptor: None)


@pytest.fixture
def world(tmp_path, capsys):
  """Return what writes the file of servers, holds sessions with them, and reads what the server has noted."""
  work, log = tmp_path / 'work', tmp_path / 'log'
  work.mkdir()

  def file(*modes, name='fs', **more):
    values = {'command': sys.executable, 'args': ['-I', str(SERVER), str(log), *modes], **more}
    path = tmp_path / 'mcp.json'
    path.write_text(json.dumps({'mcpServers': {name: values}}))
    return str(path)

  def hold(server, *lines, **options):
    (tmp_path / 'script').write_text('\n'.join(lines))
    (tmp_path / 'policy').write_text(options.pop('rules', ''))
    names = {name: str(tmp_path / name) for name in ('script', 'state', 'policy')}
    code = program.run(program.CommandOptions(url=server.url, workspace=str(work), **names, **options))
    return code, capsys.readouterr().out

  def started(*modes, known=None, **more):
    return mcp_servers.started(mcp_servers.load(file(*modes, **more), work), tmp_path / 'state' / 'mcp', known)

  def noted():
    return log.read_text().split('\n') if log.exists() else []

  return types.SimpleNamespace(file=file, hold=hold, started=started, noted=noted, work=work, state=tmp_path / 'state')


def until(found, seconds=10):
  deadline = time.monotonic() + seconds
  while not found():
    assert time.monotonic() < deadline
    time.sleep(0.01)


# Sessions.


def test_calls_of_a_server_are_approved_denied_and_ruled_like_others(world):
  answers = [
    call('fs__add', b=2, a=1),
    call('fs__add', a=1, b=2),
    call('fs__say', text='no\u202e'),
    'Well.',
    call('fs__say', text='a secret'),
  ]
  answers += [call('fs__add', a=1), call('fs__add', a=4, b=4), 'Done.']
  rules = 'never fs__say *secret*\nallow fs__add {"a": 4, "b": *}\n'
  with SessionServer(*answers) as server:
    lines = ['Add', 'a', 'n Not this', 'More', 't', 'y']
    code, out = world.hold(server, *lines, mcp=world.file('long'), rules=rules)
    results = [turn['results'][0] for turn in server.turns if turn['results']]
    tools = {tool['function']['name']: tool['function'] for tool in server.settings['tools']}
  assert code == 0
  assert 'MCP server fs: 2 tools; it runs as you, outside of the sandbox.' in out
  assert 'The description of fs__add is cut from 3016 to 1000 characters.' in out
  assert tools['fs__add']['description'].startswith('Does it.⟨U+200B⟩') and tools['fs__add']['parameters']['required']
  assert len(tools['fs__add']['description']) == 1001 and 'read' in tools
  assert 'fs__add of the MCP server fs, outside of the sandbox\n│   {\n│     "b": 2,\n│     "a": 1\n│   }' in out
  assert '"text": "no⟨U+202E⟩"' in out and 'Refused by the rule: never fs__say *secret*' in out
  assert 'From now on: allow fs__add {"a": 1, "b": 2}' in out
  assert [result['text'] for result in results] == [
    '3',
    '3',
    'The person never lets this be run.',
    "'b'",  # What the server says.
    '8',
  ]
  calls = [line for line in world.noted() if line[:3] in ('add', 'say')]
  assert calls == [
    'add {"b": 2, "a": 1}',
    'add {"a": 1, "b": 2}',
    'add {"a": 1}',
    'add {"a": 4, "b": 4}',
  ]  # What was denied or refused never arrives.
  assert world.noted()[-2] == 'stdin closed'  # It has ended in order.


def test_a_tool_that_changes_is_refused_in_this_session_and_a_resumed_one(world):
  answers = [call('fs__say', text='change'), call('fs__add', a=1, b=2), call('fs__add', a=1, b=2), 'Well.']
  with SessionServer(*answers) as server:
    world.hold(server, 'Go', 'y', 'y', 'n no', mcp=world.file())
    assert server.turns[1]['results'][0]['text'].startswith('The MCP server fs has changed or removed fs__add since')
    server.answers += [call('fs__add', a=1, b=2), call('fs__say', text='same'), 'Well.']
    world.file('changed')
    code, out = world.hold(server, 'Again', 't', 'y', resume=True)
    assert 'these since the session began, so they fail: fs__add.' in out
    assert server.turns[-3]['results'][0]['text'].startswith('The MCP server fs has changed or removed fs__add since')
    assert server.turns[-2]['results'][0]['text'] == 'same' and code == 0
    world.file('exit')
    server.answers += [call('fs__say', text='same'), 'Well.']
    code, out = world.hold(server, 'Again', 'y', resume=True)
    assert 'The MCP server fs ended. Its last words: I will not.' in out and code == 0
    assert server.turns[-2]['results'][0]['text'].startswith('The MCP server fs ended. Its last words')
  assert not any(line.startswith('add') for line in world.noted())


def test_servers_that_do_not_start_are_named_before_a_session_is_opened(world):
  for modes, more, why in (
    (['exit'], {}, r'fs ended\. Its last words: I will not\. \(.*/state/mcp/fs.log\) Correct it'),
    ([], {'command': 'no-such-program'}, "mcp.json, server 'fs': there is no program 'no-such-program': correct"),
    ([], {'args': 3}, "server 'fs': args: Input should be a valid list"),
    ([], {'url': 'http://x'}, "server 'fs': url: Input should be None"),
    ([], {'name': 'a__b'}, "server 'a__b': name it with letters"),
    ([], {'cwd': str(world.work)}, 'is in the workspace, so the model could change what runs as you'),
    ([], {'args': [str(world.work / 'server.py')]}, 'work/server.py is in the workspace'),
  ):
    (world.work / 'server.py').write_text('')
    with SessionServer() as server, pytest.raises(UserError, match=why):
      world.hold(server, mcp=world.file(*modes, **more))
    assert server.asked == []
  (world.work / 'mcp.json').write_text(pathlib.Path(world.file()).read_text())
  with SessionServer() as server, pytest.raises(UserError, match=r'--mcp=.*mcp.json is in the workspace'):
    world.hold(server, mcp=str(world.work / 'mcp.json'))
  with SessionServer() as server, pytest.raises(UserError, match=r"there is no tool 'fs__ad', only read, .*, fs__say"):
    world.hold(server, mcp=world.file('prompt'), rules='never fs__ad')


def test_hidden_characters_of_a_server_are_named_or_refused(world):
  with SessionServer() as server:
    _, out = world.hold(server, '/tools', '/help', mcp=world.file('hidden'))
    [tool] = [tool['function'] for tool in server.settings['tools'] if '__' in tool['function']['name']]
  assert tool['parameters']['properties']['a']['description'] == 'A⟨U+200B⟩B'
  assert 'Its tool say is left out: the schema of its arguments has invisible characters.' in out
  assert 'Does it.⟨U+200B⟩' in out and 'A⟨U+200B⟩B' in out and '\u200b' not in out and '/tools  ' in out


def test_a_folder_that_cannot_be_made_is_named(world):
  world.state.write_text('')
  with SessionServer() as server, pytest.raises(UserError, match='state/mcp cannot be made .* with --state'):
    world.hold(server, mcp=world.file())


# Calls.


def test_a_server_that_fails_costs_one_sentence_and_starts_anew(world, monkeypatch):
  with world.started(timeout=0.3) as servers:
    box = servers.toolbox(world.work, None)
    assert (box.call('fs__say', {'text': 'fail'}).ok, box.call('fs__say', {'text': 'fail'}).text) == (
      False,
      'It fails.',
    )
    assert box.call('fs__say', {'text': 'image'}).text == '[image image/png, 4 characters of base64, not shown]'
    assert box.call('fs__say', {'text': 'junk'}).text.startswith('The MCP server fs gave an invalid answer: ')
    assert box.call('fs__say', {'text': 'hang'}).text.startswith('The call took more than 0.3 seconds and was given up')
    surrogate = box.call('fs__say', {'text': 'surrogate'}).text
    assert 'took more than 0.3 seconds' in surrogate and 'Its stdout had what is no message: ' in surrogate
    assert box.call('fs__say', {'text': 'big 30000'}).dropped == 10_000
    died = box.call('fs__say', {'text': 'die'})
    assert died.text.startswith('The MCP server fs ended. Whether the call has done') and not died.ok
    assert box.call('fs__say', {'text': 'again'}).text == 'again'
    os.kill(int(world.noted()[-4].removeprefix('began ')), signal.SIGKILL)  # Between two calls.
    until(lambda: 'again' not in box.call('fs__say', {'text': 'more'}).text)
    assert box.call('fs__say', {'text': 'more'}).text == 'more'
    with pytest.raises(BadCall, match="There is no tool 'fs__x'; there are read, .*, fs__add, fs__say"):
      box.checked('fs__x', {})
    with pytest.raises(BadCall, match='half|surrogates'):
      box.checked('fs__say', {'text': '\ud800'})
  assert world.noted().count('notifications/cancelled') == 2


def test_ctrl_c_ends_the_wait_for_a_call_which_is_shown_and_tells_the_server(world):
  seen = []
  with world.started() as servers, Cancellation() as cancelled:
    box = servers.toolbox(world.work, None)

    def press():
      until(lambda: 'hangs' in world.noted() and len(seen) > 1)
      cancelled.set()

    threading.Thread(target=press).start()
    answer = box.call('fs__say', {'text': 'hang'}, cancelled=cancelled, shown=seen.append)
    assert not any(seen)  # The time goes on, and there is no output.
    assert answer.text.startswith('The call was stopped by the person') and not answer.ok
    assert box.call('fs__say', {'text': 'on'}).text == 'on' and 'notifications/cancelled' in world.noted()


# Rules.


@pytest.mark.parametrize(
  'rule, arguments, verb',
  [
    ('allow fs__read *', {'path': '/etc/passwd'}, 'allow'),
    ('allow fs__read {"path": "docs/*"}', {'path': 'docs/a/b'}, 'allow'),
    ('allow fs__read {"path": "docs/*"}', {'path': 'docs/../a'}, 'ask'),
    ('allow fs__read {"path": "docs/*"}', {'path': 'docs/a', 'then': 'x'}, 'ask'),
    ('allow fs__read {"a": "*", "b": "safe"}', {'a': 'x", "b": "safe"}', 'b': 'y'}, 'ask'),
    ('allow fs__read {"a": *, "b": 1}', {'b': 1, 'a': 2}, 'allow'),
    ('allow fs__reader *', {'path': 'a'}, 'ask'),
    ('never fs__read *passwd*', {'deep': [{'path': '/etc/passwd'}]}, 'never'),
    ('never * secrets/**', {'deep': [{'path': './secrets/a'}]}, 'never'),
    ('never * secrets/**', {'path': 'secret'}, 'ask'),
    ('never *', {}, 'never'),
    ('never write **', {'path': 'a'}, 'ask'),
  ],
)
def test_rules_match_the_arguments_as_json(tmp_path, rule, arguments, verb):
  policy = policies.ApprovalPolicy(policies.parse(rule, 'rules', ['fs__read', 'fs__reader']))
  assert policy.verdict('fs__read', arguments, tmp_path).verb == verb


def test_always_allow_of_a_call_allows_no_other(tmp_path):
  shown = policies.suggestion('fs__read', {'path': '*'}, tmp_path)
  rule = policies.CallRule('allow', 'fs__read', shown, exact=True)
  assert shown == '{"path": "*"}' and rule.matches('fs__read', [shown, '*'])
  assert not rule.matches('fs__read', ['{"path": "a"}', 'a'])


# Servers that fail in rarer ways.


@pytest.mark.slow
def test_servers_that_hang_flood_or_stay(world, monkeypatch):
  monkeypatch.setattr(mcp_servers, 'START_S', 0.5)
  for modes, why in (
    (['hang', 'prompt'], 'did not answer within 0.5 seconds. Its stdout had what is no message: Welc'),
  ):
    with pytest.raises(UserError, match=why), world.started(*modes):
      pass
  monkeypatch.setattr(mcp_servers, 'START_S', 30)
  log = world.state / 'mcp' / 'fs.log'
  with world.started('many', 'stays') as servers:
    box = servers.toolbox(world.work, None)
    assert len(box.tools) == 6 + 202
    assert box.call('fs__say', {'text': 'flood'}).text == 'flood'
    until(lambda: log.stat().st_size)
    assert log.stat().st_size <= mcp_servers.MAX_LOG
    assert box.call('fs__say', {'text': f'big {20 * 2**20}'}).dropped == 20 * 2**20 - 20_000
    assert box.call('fs__say', {'text': 'on'}).text == 'on'
    begun = time.monotonic()
  assert time.monotonic() - begun < 25 and world.noted()[-2] == 'stdin closed'


@pytest.mark.slow
def test_a_server_ends_when_the_program_is_killed(world, tmp_path):
  script = (
    'import pathlib, sys, time\nfrom sdpo_jax.terminal import mcp_servers\n'
    'file, work, logs = map(pathlib.Path, sys.argv[1:])\n'
    'with mcp_servers.started(mcp_servers.load(file, work), logs) as servers:\n  print("up", flush=True)\n'
    '  time.sleep(100)\n'
  )
  command = [sys.executable, '-c', script, world.file('stays'), str(world.work), str(tmp_path / 'logs')]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == 'up\n'
    process.kill()
  server = int(world.noted()[0].removeprefix('began '))
  until(lambda: not pathlib.Path(f'/proc/{server}').exists())


@pytest.mark.slow
def test_a_server_of_the_official_package(world, tmp_path):
  (tmp_path / 'official.py').write_text(
    'from mcp.server.mcpserver import MCPServer\nserver = MCPServer("test")\n\n\n@server.tool()\n'
    'def add(a: int, b: int) -> int:\n  """Add."""\n  return a + b\n\n\nserver.run()\n'
  )
  with world.started(args=['official.py']) as servers:
    box = servers.toolbox(world.work, None)
    assert servers.tools['fs__add'].meaning == 'Add.' and box.call('fs__add', {'a': 1, 'b': 2}).text == '3'
