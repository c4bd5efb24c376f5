"""Whole sessions at the terminal: with a model that says what a test has written down, and a person who does, too."""

import io
import json
import math
import types

import pytest

from sdpo_jax.environments.workspace.shell import ShellReport
from sdpo_jax.environments.workspace.tools import Toolbox
from sdpo_jax.errors import UserError
from sdpo_jax.terminal import policies, program
from sdpo_jax.terminal.client import Refused, ServiceClient, SessionClient
from sdpo_jax.terminal.history import History
from sdpo_jax.terminal.inputs import Choice, Leave
from sdpo_jax.terminal.screen import Screen
from sdpo_jax.terminal.script import OutOfStep, Script
from sdpo_jax.terminal.session_context import SessionContext
from sdpo_jax.terminal.session_loop import INTERRUPTED, UNDONE, Conversation
from sdpo_jax.terminal.work import Workbench
from tests.local_server import dead_address
from tests.terminal.session_server import SessionServer, call

WRITE_1, WRITE_2 = (call('write', path='a.py', content=f'x = {number}\n') for number in (1, 2))


SAID_HI, SAID_WRITE = ([{'role': 'user', 'content': text}] for text in ('Hi', 'Write'))


class Typed:
  """A person who does one thing after the other: says a text, presses a key, or whatever a function does."""

  def __init__(self, *acts):
    self.acts, self.asked = list(acts), []

  def _next(self, asked):
    self.asked.append(asked)
    if not self.acts:
      raise Leave
    act = self.acts.pop(0)
    while callable(act):
      act = act()
    return act

  def message(self):
    return self._next('message')

  def choice(self, keys):
    key, _, rest = self._next(''.join(keys)).partition(' ')
    return Choice(key, rest or None)

  def line(self, question, default=''):
    return self._next(question)

  def edited(self, text, kind):
    return self._next(text)


def press_ctrl_c():
  raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def no_disk(monkeypatch):
  """No machine fails here, so that nothing waits for the disk."""
  monkeypatch.setattr('os.fsync', lambda descriptor: None)


@pytest.fixture
def world(tmp_path):
  """Return a workspace, a folder of histories, and what holds a session in them."""
  workspace, states = tmp_path / 'work', tmp_path / 'state'
  workspace.mkdir()

  def hold(server, *acts, rules='', settings=None, script=False, workbench=Workbench, seed=None, paged=False, **tools):
    """Hold the session of a server, which is opened if there is none; return what came of it."""
    client = ServiceClient(server.url, local=True)
    found = sorted(states.glob('*')) if states.exists() else []
    if found:
      history = History(found[0])
    else:
      opened, token = client.open_session('ad-1', settings or {})
      history = History.begin(states, opened['id'], {'adapter': 'ad-1', 'token': token})
    out = io.StringIO()
    screen = Screen(out, colours=False, paged=paged)
    inputs = Script(acts, 'script', screen.say) if script else Typed(*acts)
    policy = policies.ApprovalPolicy(policies.parse(rules, 'rules'))
    session = SessionClient(client, 'ad-1', 'ses-1', history.opened['token'])
    bench = workbench(Toolbox(workspace, tools.get('shell')), workspace)
    result = types.SimpleNamespace(out=lambda: out.getvalue(), inputs=inputs, history=history, path=history.path)
    try:
      context = SessionContext(session, history, screen, inputs, bench, policy, seed)
      result.code = Conversation(context, server.settings).run()
    finally:
      history.close()
      client.close()
    return result

  return types.SimpleNamespace(hold=hold, files=workspace, states=states)


# Decisions.


def test_a_denied_call_is_never_run_and_the_next_one_is_shown(world):
  with SessionServer(WRITE_1, WRITE_2, 'Done.') as server:
    done = world.hold(server, 'Write it', 'n', 'No: 2', '/ /learned', 'y', 'Thanks')
    assert server.decisions() == [{'decision': 'deny', 'correction': 'No: 2'}, {'decision': 'approve'}]
  assert (world.files / 'a.py').read_text() == 'x = 2\n'
  ran = [record for record in done.history.records if record['kind'] == 'ran']
  assert [record['n'] for record in ran] == [1] and ran[0]['result']['ok']
  out = done.out()
  assert out.index('+x = 1') < out.index('Learned: version 0 → 1') < out.index('+x = 2') < out.index('Done.')
  # A proposal is shown once, and again after a command; the numbers of a lesson on request.
  assert out.count('x = 1') == 1 and out.count('x = 2') == 2 and 'tool_call' not in out
  assert out.index('+x = 2') < out.index('0.5000 → 0.2500') < out.index('‘grep⟨escape⟩’')
  assert done.code == 0


def test_nothing_of_a_denied_answer_is_run(world):
  with SessionServer(WRITE_1 + call('write', path='b.py', content=''), 'Well.') as server:
    world.hold(server, 'Write', 'y', 'n Not b.py')
    assert server.decisions() == [{'decision': 'deny', 'correction': 'Not b.py'}]
  assert list(world.files.iterdir()) == []


def test_a_decision_says_which_call_was_seen(world):
  with SessionServer(WRITE_1, 'Done.') as server:

    def exchanged():
      server.turns[0] |= {'text': WRITE_2, 'digest': f'of 0: {WRITE_2}'}
      server.turns[0]['calls'][0]['arguments'] = {'path': 'a.py', 'content': 'x = 2\n'}
      return 'y'

    done = world.hold(server, 'Write', exchanged, '', 'e {"path": "b.py", "content": ""}', 'Thanks')
    assert server.digests == [
      ('decision', f'of 0: {WRITE_1}'),
      ('decision', f'of 0: {WRITE_2}'),
      ('results', f'of 0: {WRITE_2}, edited'),
    ]
  assert done.out().index('Another turn.') < done.out().index('+x = 2') and not (world.files / 'a.py').exists()
  assert (world.files / 'b.py').read_text() == ''


def test_a_reason_is_needed(world):
  with SessionServer(WRITE_1, 'Well.') as server:
    done = world.hold(server, 'Write', 'n', '', 'n', 'Because')
    assert server.decisions() == [{'decision': 'deny', 'correction': 'Because'}]
  assert 'A denial needs a reason' in done.out()


def test_an_edited_call_runs_as_it_was_edited_and_seen(world):
  changed = json.dumps({'path': 'c.py', 'content': 'y = 3\n'})
  with SessionServer(WRITE_1, 'Done.') as server:
    done = world.hold(server, 'Write', 'e', 'no JSON', '', '[]', 'leave it', 'e', '', 'e', changed, 'y')
    assert server.decisions() == [{'decision': 'edit', 'call': 0, 'arguments': json.loads(changed)}]
    assert server.turns[0]['results'][0]['ok']
  assert [path.name for path in world.files.iterdir()] == ['c.py']
  assert (world.files / 'c.py').read_text() == 'y = 3\n' and '+y = 3' in done.out()
  opened = [json.loads(done.inputs.asked[number]) for number in (2, 7, 9)]
  assert opened == [{'path': 'a.py', 'content': 'x = 1\n'}] * 3 and done.inputs.asked[4] == 'no JSON'
  assert done.out().count('The arguments are not a JSON object') == 2 and 'unchanged' in done.out()


def test_a_command_is_edited_as_it_stands(world):
  shell = types.SimpleNamespace(
    notes='', run=lambda command, **_: ShellReport('ended', 0, f'ran {command}'.encode(), 0, 0.1)
  )
  with SessionServer(call('bash', command='grep x', timeout=5), call('bash', command='a\tb'), 'Done.') as server:
    done = world.hold(server, 'Go', 'e', 'rg x\n', 'y', 'e', '{"command": "a b"}', 'y', shell=shell)
    assert [each['arguments'] for each in server.decisions()] == [{'command': 'rg x', 'timeout': 5}, {'command': 'a b'}]
  assert done.inputs.asked[2] == 'grep x' and json.loads(done.inputs.asked[5]) == {'command': 'a\tb'}
  assert '$ rg x' in done.out() and '│ ran rg x' in done.out()


def test_an_edit_that_no_tool_takes_is_not_run(world):
  with SessionServer(WRITE_1, 'Done.') as server:
    done = world.hold(server, 'Write', 'e', '{"path": "a.py", "text": "x"}', 'n No')
    assert server.decisions() == [{'decision': 'deny', 'correction': 'No'}]
  assert "write takes no 'text'" in done.out() and done.inputs.asked[-2] == 'neq'


def test_one_call_of_an_answer_can_be_edited(world):
  with SessionServer(WRITE_1 + call('write', path='b.py', content='1'), 'Done.') as server:
    done = world.hold(server, 'Write', 'e', '{"path": "c.py", "content": ""}', 'y', 'y')
    assert server.decisions()[0]['call'] == 0
  assert done.inputs.asked[4] == 'yanq'
  assert sorted(path.name for path in world.files.iterdir()) == ['b.py', 'c.py']


def test_a_call_that_no_tool_takes_is_shown_with_its_fault_and_told(world):
  with SessionServer(call('delete', path='a') + call('edit', path='none', old='a', new='b'), 'Sorry.') as server:
    done = world.hold(server, 'Delete', 't', 't')
    first, second = server.turns[0]['results']
    assert server.decisions() == [{'decision': 'approve'}] and server.lessons == 0
  assert "There is no tool 'delete'" in done.out()
  assert not first['ok'] and "There is no tool 'delete'" in first['text']
  assert not second['ok'] and 'none does not exist' in second['text'] and second['field'] == 'path'


def test_a_call_that_could_run_is_told_without_a_lesson(world):
  answer = WRITE_1 + call('write', path='b.py', content='y\n') + call('delete', path='c')
  with SessionServer(answer, 'Well.') as server:
    done = world.hold(server, 'Write', 't', '', 't', 'Wait for b.py.', 'y', 't It is gone.')
    first, second, third = server.turns[0]['results']
    assert server.decisions() == [{'decision': 'approve'}] and server.lessons == 0 and len(server.turns) == 2
  assert done.inputs.asked[1:-1] == ['yanetq', 'What is the model to read? '] * 2 + ['yantq', 'ntq']
  assert not first['ok'] and first['text'] == 'The person has not let this be run: Wait for b.py.'
  assert second['ok'] and [path.name for path in world.files.iterdir()] == ['b.py']
  assert third['text'].endswith(' It is gone.') and 'Nothing was told' in done.out()


def test_an_answer_with_a_call_that_cannot_be_read_runs_nothing(world):
  with SessionServer(WRITE_1 + '<tool_call>{', '<tool_call>{', 'Sorry.') as server:
    done = world.hold(server, 'Write', 'n Close it', 't')
    assert server.decisions() == [{'decision': 'deny', 'correction': 'Close it'}, {'decision': 'approve'}]
    assert 'not closed' in server.turns[2]['messages'][0]['content'] and server.turns[2]['text'] == 'Sorry.'
  assert done.inputs.asked[1:3] == ['nq', 'ntq'] and '+x = 1' in done.out()
  assert list(world.files.iterdir()) == []


def test_what_an_earlier_call_of_the_answer_makes_possible_is_shown_before_it_runs(world):
  answer = WRITE_1 + call('edit', path='a.py', old='1', new='5')
  with SessionServer(answer, 'Done.') as server:
    done = world.hold(server, 'Write', 'y', 'y', 'y')
  assert (world.files / 'a.py').read_text() == 'x = 5\n'
  out = done.out()
  assert out.index('a.py does not exist') < out.index('Wrote a.py') < out.index('-x = 1') < out.index('+x = 5')


def test_what_was_approved_is_what_is_written(world):
  """The file changes after the approval: it is shown again, and left out."""
  (world.files / 'a.py').write_text('x = 0\n')

  class Meddling(Workbench):
    def run(self, name, arguments, begin):
      answer = super().run(name, arguments, begin)
      (world.files / 'a.py').write_text('mine\n')
      return answer

  answer = call('read', path='a.py') + WRITE_1
  with SessionServer(answer, 'Done.') as server:
    done = world.hold(server, 'Write', 'y', 'y', 's', workbench=Meddling)
    results = server.turns[0]['results']
  assert (world.files / 'a.py').read_text() == 'mine\n' and '-mine' in done.out()
  assert results[0]['ok'] and not results[1]['ok'] and 'left this out' in results[1]['text']


def test_rules_allow_and_refuse_without_a_key(world):
  (world.files / 'a.py').write_text('x\n')
  rules = 'allow read **\nnever write *.py'
  with SessionServer(call('read', path='a.py'), WRITE_1, 'Done.') as server:
    done = world.hold(server, 'Read and write', 't', rules=rules)
    assert server.turns[1]['results'][0]['text'] == 'The person never lets this be run.'
  assert (world.files / 'a.py').read_text() == 'x\n' and done.inputs.asked[1] == 'netq'
  assert 'Allowed by the rule: allow read **' in done.out()
  assert 'Refused by the rule: never write *.py' in done.out()


def test_always_is_for_this_session(world):
  with SessionServer(WRITE_1, WRITE_2, 'Done.') as server:
    done = world.hold(server, '/policy', 'Write', 'a', 'b.py', 'a', 'a.py', '/policy')
    assert server.decisions() == [{'decision': 'approve'}] * 2
  assert done.out().startswith('There are no rules: you are asked about each call.\nProposed:')
  assert 'does not match this call' in done.out() and 'allow write a.py   (added' in done.out()
  assert (world.files / 'a.py').read_text() == 'x = 2\n'


def test_always_takes_a_star_in_a_call_as_it_stands(world):
  star, other = (call('grep', pattern='x', path=name) for name in ('*', 'a'))
  (world.files / '*').write_text('x')
  with SessionServer(star, star, other, 'Done.') as server:
    done = world.hold(server, 'Search', 'a', '*', 'y', '/policy')
    assert len(server.decisions()) == 3
  assert done.inputs.asked.count('yanetq') == 2 and 'allow grep * (as it stands)   (added' in done.out()


def test_what_a_model_writes_steers_no_terminal(world):
  evil = '\x1b]0;title\x07\x1b[2K\rls\u202e'
  answer = evil + call('write', path=f'a{evil}', content=evil) + call(evil) + call('read', path='a', x=evil)
  with SessionServer(answer, 'Done.') as server:
    done = world.hold(server, 'Write', 'y', 't', 't')
  assert all(letter == '\n' or letter.isprintable() for letter in done.out())
  assert done.out().count('⟨escape⟩') >= 5


# What was learned, and commands.


def test_guards_and_lessons_that_wait_are_told(world):
  with SessionServer(WRITE_1, WRITE_2, 'Done.') as server:
    server.guard = 'max_kl_to_base: 3.0'
    done = world.hold(server, 'Write', 'n No', 'q')
  assert 'a guard has rejected the new version, and version 0 stays (max_kl_to_base: 3.0)' in done.out()
  with SessionServer(WRITE_1, 'Done.') as server:
    world.states.joinpath('ses-1.jsonl').unlink()
    done = world.hold(server, 'Write', 'n No', settings={'min_sdpo_examples': 2})
  assert '1 of 2 examples wait (/flush' in done.out()


def test_commands_answer_in_their_turn_and_at_a_call(world, tmp_path):
  with SessionServer(WRITE_1, WRITE_2) as server:
    acts = ['Write', 'n No', '/ /undo', '/ /versions', '/ /diff 0 1', f'/ /export {tmp_path / "adapter"}', '/ /retry']
    acts += ['/ /undo --file', '/ /session', '/ /history', '/ /help', '/ /undoo', '/ /diff 1', '/ /export', '/ /quit']
    done = world.hold(server, *acts)
    assert ('undo', {'to': None}) in server.asked and server.turns[-1]['status'] == 'open'
  out = done.out()
  assert 'Version 2 equals version 0; version 1 (ses-1, turn 0) is undone.' in out
  assert 'as version 0' in out and 'feedback  ses-1, turn 0' in out
  assert 'of against=0' in out and 'again, version 7\n│ otherwise' in out and 'correction:\n│ No' in out
  assert "no command /undoo; did you mean '/undo'? /help lists" in out and '/diff takes two versions' in out
  assert out.count('leaves; --resume continues') == 1 and '/quit, /exit, Ctrl-D leaves' in out
  assert "'--file' is not a number: /undo VERSION, or /undo --files." in out
  assert '/export needs the folder' in out and f'history    {done.path}' in out
  assert (tmp_path / 'adapter' / 'adapter_config.json').read_text() == '{}'
  assert done.code == 0


def test_a_command_that_fails_at_a_call_leaves_the_choice_as_it_is(world):
  with SessionServer(WRITE_1, 'Done.', 'Hello.', 'Hi.') as server:
    server.lose |= {'flush', 'retry'}
    done = world.hold(server, 'Write', '/ /undo', '/ /flush', '/ /retry', 'y')
    assert server.decisions() == [{'decision': 'approve'}]
    assert [len(turn['messages']) for turn in server.turns] == [1, 0]
    assert done.inputs.asked[1:-1] == ['yanetq'] * 4 and done.out().count('does not answer') == 2
    assert 'Version 0 is the first one' in done.out() and done.history.last('reported', n=0) is not None
    server.lose.add('decision')
    done = world.hold(server, 'Hello', '/deny no', '/quit')  # Is sent again by itself, and learned once.
    assert server.lessons == 1 and server.turns[-1]['text'] == 'Hi.' and done.code == 0


def test_a_conversation_is_told_with_calls_as_they_were_shown_and_run(world):
  (world.files / 'b.py').write_text('y = 1\n' * 50)
  with SessionServer('I write. ' + WRITE_1, 'Look:' + call('read', path='b.py'), WRITE_2) as server:
    world.hold(server, 'Write', 'e {"path": "c.py", "content": "z = 3\\n"}', 'y', '/ /quit')
    done = world.hold(server, '/ /history', '/ /retry 0', '/ /quit')
  resumed, told = done.out().split('turn 0 (version 0, edited):\n')
  told, again = told.split('turn 0, version 0')
  assert resumed.startswith('user:\n│ Write\nProposed:\n│ write a.py\n') and '+x = 2' in resumed
  assert 'tool_call' not in done.out() and 'x = 1' not in told
  assert told.startswith('│ I write.\n│ write\n│   path: c.py\n│   content: z = 3\n│   | \n│ Wrote c.py')
  assert '│ Look:\n│ read\n│   path: b.py\n│ 1       y = 1\n' in told and '… 10 more lines' in told
  assert '│ I write.\n│ write\n│   path: a.py\n│   content: x = 1\n' in again
  assert 'again, version 7\n│ otherwise\n│ write' in again


def test_the_rule_of_a_table_is_one_row(world, monkeypatch):
  monkeypatch.setenv('COLUMNS', '80')
  about = {'session': {'id': 'ses-0123456789abcdef', 'turns': [1, 2]}}
  with SessionServer() as server:
    server.versions.append({'version': 1, 'parent': 0, 'reason': 'feedback', 'details': about, 'undone': True})
    done = world.hold(server, '/versions', paged=True)
  assert len(done.out().splitlines()) == 4 and f'\n{"─" * 7}  {"─" * 6}  {"─" * 8}  ───' in done.out()


def test_changes_of_files_are_undone_one_after_the_other(world):
  (world.files / 'a.py').write_text('x = 0\n')
  edit = call('edit', path='a.py', old='x = 0', new='x = 1')
  with SessionServer(edit, call('write', path='b.py', content='b\n'), 'Done.', edit, 'Done.') as server:
    world.hold(server, 'Go', 'y', 'y', '/undo --files', '/undo --files')
    assert not (world.files / 'b.py').exists() and (world.files / 'a.py').read_text() == 'x = 0\n'
    assert len(server.versions) == 1
    done = world.hold(server, '/undo --files', 'Go', 'y', '/undo 1 2')
    assert 'No tool but bash has changed a file' in done.out()
    (world.files / 'a.py').write_text('x = 1\n# Mine.\n')
    done = world.hold(server, '/undo --files')
    assert 'a.py was changed since: restore it by hand' in done.out()
  assert (world.files / 'a.py').read_text() == 'x = 1\n# Mine.\n'


def test_a_file_is_restored_wherever_the_program_was_killed(world, monkeypatch):
  class Killed(BaseException):
    pass

  def killing(kind):
    def dying(self, added, **values):
      if added == kind:
        raise Killed
      add(self, added, **values)

    return dying

  add = History.add
  (world.files / 'a.py').write_text('x = 0\n')
  with SessionServer(WRITE_1, 'Done.', WRITE_2, 'Done.') as server:
    for kind, acts in (('ran', ['Go', 'y']), ('restored', ['y', '/undo --files'])):
      monkeypatch.setattr(History, 'add', killing(kind))
      with pytest.raises(Killed):
        world.hold(server, *acts)
    monkeypatch.setattr(History, 'add', add)
    assert (world.files / 'a.py').read_text() == 'x = 0\n'
    done = world.hold(server, '/undo --files', '/undo --files', 'Go', 'y', '/undo --files')
  assert 'Turn 0: a.py is already as it was before.' in done.out() and 'Turn 2: a.py is as it was' in done.out()
  assert done.out().count('No tool but bash has changed a file') == 1
  assert (world.files / 'a.py').read_text() == 'x = 0\n'


def test_what_cannot_be_restored_does_not_stand_in_the_way(world):
  (world.files / 'dangling').symlink_to('none')
  failing = call('write', path='dangling', content='x')
  with SessionServer(WRITE_1, call('write', path='b.py', content='b\n'), failing, 'Done.') as server:

    def changed():
      (world.files / 'b.py').write_text('mine\n')
      return '/undo --files'

    done = world.hold(server, 'Go', 'y', 'y', 'y', '/undo --files', changed, '/undo --files', '/undo --files')
    assert not server.turns[2]['results'][0]['ok'] and not (world.files / 'a.py').exists()
    out = done.out()
    assert 'Turn 2: dangling is already' in out and 'b.py was changed since: restore it by hand' in out
    assert out.index('b.py was changed') < out.index('again goes on') < out.index('Turn 0: a.py, which was new, is rem')
    assert (world.files / 'b.py').read_text() == 'mine\n' and 'can still be restored' in out
    (world.files / 'b.py').write_text('b\n')
    world.hold(server, '/undo --files')
  assert not (world.files / 'b.py').exists()


def test_what_is_drawn_again_has_the_seed_with_which_it_was_drawn(world):
  with SessionServer(WRITE_1, WRITE_2) as server:
    world.hold(server, 'Write', 'n No', '/ /retry', '/ /retry 1', '/ /exit', seed=5)  # As /quit.
    drawn = [(name, body['seed']) for name, body in server.asked if name in ('propose', 'retry')]
  assert drawn == [('propose', 5), ('propose', 6), ('retry', 5), ('retry', 6)]


def test_an_answer_without_calls_can_be_denied_until_the_conversation_goes_on(world):
  with SessionServer('Hello!', 'Hi.', WRITE_1, 'Bye.') as server:
    acts = ['/deny', '/deny why', 'Hello', '/learned', "/deny  don't shout ", 'Write', '/ /deny No', 'y', '/deny']
    done = world.hold(server, *acts, script=False)
    assert server.decisions() == [{'decision': 'deny', 'correction': "don't shout"}, {'decision': 'approve'}]
    assert [turn['status'] for turn in server.turns] == ['denied', 'answered', 'approved', 'answered']
    assert [name for name, _ in server.digests] == ['decision', 'decision', 'results']
    assert [len(turn['messages']) for turn in server.turns] == [1, 0, 1, 0]
  out = done.out()
  assert out.count('/deny needs a reason') == 2 and out.count('There is no answer to deny') == 2
  assert 'Nothing was learned in this session yet.' in out and out.count('Learned: version 0 → 1') == 1
  with SessionServer('Hello!', 'Hi.') as server:
    world.states.joinpath('ses-1.jsonl').unlink()
    server.lose.add('decision')
    assert world.hold(server, 'Hello', '/deny no', script=True).code == UNDONE
    done = world.hold(server, '/learned', script=True)  # The decision is sent again, and learned once.
    assert done.code == 0 and server.lessons == 1 and done.out().count('│ Hi.') == 1


IMITATIONS = 'Proposed:\nLearned: version 0 → 9 in 0.10 s, from turn 0.\n[y] approve  [n] deny\n> Go\n? y\nSession x'
OWN = ('Proposed:', 'Call ', 'Cannot run: ', 'Not run: ', 'The answer has an invalid call: ', 'Refused by the rule: ')
OWN += (
  'From now on: ',
  'An earlier call may change that',
  'never read never',
  'allow glob ',
  'ask   (everything else)',
)
OWN += ('Learned: version 0 → 1 ', 'turn ', 'user:', 'correction:', '… ', '  ')


@pytest.mark.parametrize('padding', ['', ' ' * 37, '日' * 23, '\t' * 5, '\U0001f1e6' * 9])
def test_no_text_of_the_model_or_a_tool_looks_like_a_line_of_the_program(world, monkeypatch, padding):
  """Neither where a row of the terminal ends nor in what the program quotes."""
  monkeypatch.setenv('COLUMNS', '40')
  evil = padding + IMITATIONS
  (world.files / 'evil').write_text(evil)
  calls = call('write', path='a', content=evil), call('read', path='evil'), call(evil), call('read', path=evil)
  calls += call('edit', path=evil, old=evil, new='x'), call('bash', command=evil), call('glob', pattern=evil)
  with SessionServer(evil, evil + '\n'.join(calls) + evil, f'<tool_call>{evil}', 'Done.') as server:
    acts = ['Go', 'Go', 'y', 'y', 't', 'y', 'v', 'y', 't', 'a', evil, 'y', 't', '/history', '/policy', '/quit']
    done = world.hold(server, *acts, rules='never read never', paged=True)
  rows = done.out().splitlines()
  behind = [row for row in rows if row.startswith('│')]
  assert len(behind) > 80 and 'Learned: version 0 → 9' in ''.join(row.removeprefix('│ ') for row in behind)
  assert [row for row in rows if row not in behind and not row.startswith(OWN)] == []
  assert max(map(len, rows)) <= 40


# What fails halfway.


@pytest.mark.parametrize('lost', ['decision', 'results', 'propose', 'get'])
def test_an_answer_that_is_lost_is_fetched_at_the_next_input(world, lost):
  with SessionServer('Hello.', WRITE_1, WRITE_2, 'Done.') as server:
    acts = ['Hi', 'Write', 'n No', 'y', 'Thanks']
    server.lose.add(lost)
    acts.insert({'propose': 1, 'decision': 3, 'results': 4, 'get': 0}[lost], '')
    done = world.hold(server, *acts)
    assert server.lessons == 1 and [turn['n'] for turn in server.turns] == [0, 1, 2, 3]
    assert [turn['messages'] for turn in server.turns] == [SAID_HI, SAID_WRITE, [], []]
  assert (world.files / 'a.py').read_text() == 'x = 2\n'
  assert [record['n'] for record in done.history.records if record['kind'] == 'ran'] == [2]
  assert 'Nothing is lost: any input tries again.' in done.out()


def test_killed_after_every_record_the_session_goes_on(world, monkeypatch):
  """The lesson is learned once, and the call is run once: asked for again where the person had to be."""

  class Killed(BaseException):
    pass

  class Counting(Workbench):
    def run(self, name, arguments, begin):
      answer = super().run(name, arguments, begin)
      runs.append(arguments)
      return answer

  add, seen, runs = History.add, set(), []

  def dying(self, kind, **values):
    add(self, kind, **values)
    record = kind, values.get('n', values.get('after'))
    if record not in seen:
      seen.add(record)
      raise Killed

  monkeypatch.setattr(History, 'add', dying)
  done = None
  with SessionServer(WRITE_1, WRITE_2, 'Done.') as server:
    acts = ['Write', 'n No', 'y', '/quit']
    while done is None:
      try:
        done = world.hold(server, *acts, workbench=Counting)
      except Killed:
        kinds = [json.loads(line)['kind'] for line in next(world.states.glob('*')).read_text().splitlines()]
        # What the history has is not typed again, but for the approval of what may have run.
        acts = ['Write'][kinds.count('said') :] + ['n No', 'y'][kinds.count('decision') :] + ['/quit']
        if kinds.count('decision') == 2 and 'ran' not in kinds:
          acts = ['y', *acts]
    assert done.code == 0 and server.lessons == 1 and server.turns[-1]['text'] == 'Done.'
    assert [turn['messages'] for turn in server.turns] == [SAID_WRITE, [], []]
    assert len(runs) == 1 and server.turns[1]['results'][0]['ok']
  kinds = {kind for kind, _ in seen}
  assert kinds == {'opened', 'said', 'asking', 'turn', 'decision', 'decided', 'running', 'ran', 'reported'}


def test_a_tool_that_was_running_is_not_run_again_unasked(world):
  class Dying(Workbench):
    def run(self, name, arguments, begin):
      begin()
      raise OSError('the machine has failed')

  with SessionServer(WRITE_1, 'Well.') as server:
    with pytest.raises(OSError, match='the machine has failed'):
      world.hold(server, 'Write', 'y', workbench=Dying)
    done = world.hold(server, 's')
    result = server.turns[0]['results'][0]
  assert 'it may have run completely' in done.out() and 'ysq' in done.inputs.asked
  assert not result['ok'] and 'not known' in result['text'] and list(world.files.iterdir()) == []


def test_a_decision_that_is_refused_is_not_sent_for_ever(world):
  with SessionServer(WRITE_1, 'Done.') as server:

    def decided_elsewhere():
      server.turns[0]['status'], server.turns[0]['decision'] = 'denied', {'decision': 'deny', 'correction': 'Else'}
      return 'n No'

    done = world.hold(server, 'Write', decided_elsewhere, '')
    assert len(server.decisions()) == 1
  assert 'decided otherwise' in done.out() and 'Done.' in done.out() and done.history.last('withdrawn') is not None


def test_a_text_that_is_not_taken_does_not_stand_in_the_way_of_the_next(world):
  with SessionServer('Done.', 'Bye.') as server:
    server.refuse['propose'] = 400, 'messages has 2000000 bytes: shorten it.'
    done = world.hold(server, 'Much', 'Little', '/quit')
    assert [turn['messages'] for turn in server.turns] == [[{'role': 'user', 'content': 'Little'}]]
    server.refuse['propose'] = 503, 'The service is shutting down.'
    again = world.hold(server, 'More', '', '/quit')
    assert server.turns[1]['messages'] == [{'role': 'user', 'content': 'More'}]
  assert 'shorten it' in done.out() and 'write them differently' in done.out() and 'say it in' not in again.out()


def test_ctrl_c_once_goes_on_and_twice_leaves(world):
  with SessionServer(WRITE_1, 'Done.') as server:
    done = world.hold(server, 'Write', press_ctrl_c, '', 'n No', press_ctrl_c, press_ctrl_c)
    assert server.decisions() == [{'decision': 'deny', 'correction': 'No'}]
  assert done.code == INTERRUPTED and done.out().count('Ctrl-C again leaves') == 2


# Scripts.


def test_a_script_gives_a_transcript_and_a_code(world):
  lines = ['Write', 'n No: 2', '/versions', 'e {"path": "b.py", "content": "z\\n"}', 'Thanks']
  with SessionServer(WRITE_1, WRITE_2, 'Done.', 'Bye.') as server:
    done = world.hold(server, *lines, script=True)
    assert server.decisions()[1] == {'decision': 'edit', 'call': 0, 'arguments': {'path': 'b.py', 'content': 'z\n'}}
  assert done.code == 0 and (world.files / 'b.py').read_text() == 'z\n'
  assert '? n No: 2\nLearned: version 0 → 1' in done.out() and done.out().endswith('> Thanks\n│ Bye.\n')


def test_a_script_that_is_not_done_says_so_by_its_code(world):
  with SessionServer(WRITE_1, WRITE_2) as server:
    done = world.hold(server, 'Write', script=True)
    assert done.code == UNDONE and server.turns[0]['status'] == 'open'
    for line, said in (('Hello', "line 1: 'Hello' is not a decision"), ('e', 'JSON after e, such as e {"path"')):
      with pytest.raises(OutOfStep, match=said):
        world.hold(server, line, script=True)
    server.lose.add('decision')
    assert world.hold(server, 'n No', script=True).code == UNDONE
    done = world.hold(server, 'q', script=True)  # What was decided is sent again.
    assert done.code == 0 and server.lessons == 1 and '+x = 2' in done.out()
  assert list(world.files.iterdir()) == []


# The program.


def run(capsys, **values):
  try:
    code = program.run(program.CommandOptions(**values))
  finally:
    out = capsys.readouterr()
  return code, out.out, out.err


def test_the_program_opens_and_resumes(tmp_path, capsys, monkeypatch):
  work, script = tmp_path / 'work', tmp_path / 'script'
  work.mkdir()
  script.write_text('Write\nn No\n')
  options = {'url': None, 'workspace': str(work), 'state': str(tmp_path / 'state'), 'script': str(script)}
  (tmp_path / 'rules').write_text('never bash')
  (tmp_path / 'more.json').write_text('{"sampling": {"temperature": 0.5}}')
  with SessionServer(WRITE_1, WRITE_2, 'Done.') as server:
    options['url'] = server.url
    more = {'policy': str(tmp_path / 'rules'), 'system': 'Be brief.', 'settings': str(tmp_path / 'more.json')}
    code, out, err = run(capsys, **options, **more, adapter='mine')
    assert code == UNDONE and '--resume=ses-1' in err and '+x = 2' in out
    assert 'The script ended before a decision on the call of turn 1.' in err
    assert (
      server.settings['title'] == 'work'
      and server.settings['system'] == 'Be brief.'
      and server.settings['sampling'] == {'temperature': 0.5}
    )
    names = [tool['function']['name'] for tool in server.settings['tools']]
    assert names == ['read', 'write', 'edit', 'edit_lines', 'glob', 'grep']
    script.write_text('y\n')
    del options['url'], options['workspace']
    code, out, err = run(capsys, **options, resume=True)
    assert code == 0 and 'Done.' in out and (work / 'a.py').read_text() == 'x = 2\n' and 'ended before' not in err
    assert 'token' not in out + err and 'sst-' not in out + err
    with pytest.raises(UserError, match='--adapter is for a new session'):
      run(capsys, **options, resume=True, adapter='other')
  with pytest.raises(UserError, match='does not answer .*launch.serve'):
    run(capsys, **options, resume=True)


def test_a_policy_is_outside_of_the_workspace_and_the_same_when_resumed(tmp_path, capsys, monkeypatch):
  work, elsewhere = tmp_path / 'work', tmp_path / 'elsewhere'
  work.mkdir()
  elsewhere.mkdir()
  (tmp_path / 'script').write_text('')
  (tmp_path / 'rules').write_text('never bash')
  options = {'workspace': str(work), 'state': str(tmp_path / 'state'), 'script': str(tmp_path / 'script')}
  monkeypatch.chdir(tmp_path)
  with SessionServer() as server:
    assert run(capsys, url=server.url, policy='rules', **options)[0] == 0
    (elsewhere / 'rules').write_text('allow bash *')
    monkeypatch.chdir(elsewhere)
    opened = History(next((tmp_path / 'state').glob('*.jsonl')))
    opened.close()
    assert opened.opened['policy'] == str(tmp_path / 'rules')
    assert run(capsys, resume=True, **options)[0] == 0
    (work / 'rules').write_text('allow bash *')
    (tmp_path / 'link').symlink_to(work / 'rules')
    monkeypatch.chdir(work)
    for named in ('rules', str(work / 'rules'), '../link'):
      with pytest.raises(UserError, match=f'--policy={named}: .*work/rules is in the workspace'):
        run(capsys, resume=True, policy=named, **options)


def test_a_terminal_of_other_characters_ends_nothing(tmp_path, monkeypatch):
  (tmp_path / 'work').mkdir()
  (tmp_path / 'rules').write_text('never bash')
  typed, shown = io.BytesIO(b'Caf\xe9\nn No\n'), io.BytesIO()
  monkeypatch.setattr('sys.stdin', io.TextIOWrapper(typed, 'utf-8'))
  monkeypatch.setattr('sys.stdout', io.TextIOWrapper(shown, 'ascii'))
  with SessionServer(call('read', path='日\x1b'), 'Done.') as server:
    places = {'workspace': str(tmp_path / 'work'), 'state': str(tmp_path / 'state'), 'policy': str(tmp_path / 'rules')}
    assert program.run(program.CommandOptions(url=server.url, script='-', **places)) == 0
    assert server.turns[0]['messages'] == [{'role': 'user', 'content': 'Caf?'}]
  assert b'path: \\u65e5\\u27e8escape\\u27e9' in shown.getvalue()


@pytest.mark.parametrize(
  'values, sentence',
  [
    ({'url': 'localhost'}, '--url=localhost is not the URL'),
    ({'url': 'http://x', 'config': 'c.py'}, '--url names a running service, and --config one'),
    ({'workspace': 'none/there'}, 'The workspace none/there is not a folder'),
    ({'state': 'inside/it'}, 'contains the histories of sessions'),
    ({'workspace': '~nosuchuser'}, 'The workspace ~nosuchuser is not a folder'),
    ({'workspace': 'a/' * 2500}, 'is not a folder: name the folder'),
    ({'state': '~nosuchuser'}, 'contains the histories of sessions'),
    ({'readable': ['~nosuchuser']}, '--readable=~nosuchuser is not a folder'),
    ({'readable': ['a/' * 2500]}, 'is not a folder'),
    ({'readable': ['']}, '--readable= is not a folder'),
    ({'readable': ['.']}, '--readable=. is in the workspace, which commands read anyway'),
    ({'timeout': math.nan}, '--timeout=nan: give it seconds, at most 86,400'),
    ({'timeout': math.inf}, '--timeout=inf: give it seconds'),
    ({'timeout': 1e300}, r'--timeout=1e\+300: give it seconds'),
    ({'script': '/none'}, '--script=/none cannot be read'),
    ({'script': '~nosuchuser'}, '--script=~nosuchuser cannot be read'),
    ({'policy': '/none'}, '--policy=/none cannot be read'),
  ],
)
def test_what_cannot_be_used_is_named(tmp_path, capsys, monkeypatch, values, sentence):
  work = tmp_path / 'work'
  work.mkdir()
  monkeypatch.chdir(work)
  (tmp_path / 'script').write_text('')
  usual = {'state': str(tmp_path / 'state'), 'script': str(tmp_path / 'script'), 'url': dead_address()}
  with pytest.raises(UserError, match=sentence):
    run(capsys, **{**usual, **values})
  assert not (tmp_path / 'state').exists() and list(work.iterdir()) == []


@pytest.mark.parametrize('answer', [{}, [], None, {'adapters': []}])
def test_another_service_that_answers_is_named(tmp_path, capsys, answer):
  (tmp_path / 'work').mkdir()
  (tmp_path / 'script').write_text('')
  names = {name: str(tmp_path / name) for name in ('script', 'state', 'work')}
  with SessionServer() as server:
    server.answer = lambda method, path, body, token: ('any', {} if path == '/readyz' else answer)
    with pytest.raises(UserError, match='(has not adapters|has not id|is not a JSON object): it is not one of launch'):
      run(capsys, url=server.url, workspace=names.pop('work'), **names)


def test_the_start_is_told_in_whole_words(tmp_path, monkeypatch):
  (tmp_path / 'work').mkdir()
  (tmp_path / 'script').write_text('')
  err = io.StringIO()
  err.isatty = lambda: True
  monkeypatch.setattr('sys.stderr', err)
  monkeypatch.setenv('COLUMNS', '40')
  monkeypatch.setattr(program, 'Embedded', lambda *arguments: 1 / 0)
  names = {name: str(tmp_path / name) for name in ('script', 'state')}
  with pytest.raises(ZeroDivisionError):
    program.run(program.CommandOptions(workspace=str(tmp_path / 'work'), **names))
  rows = err.getvalue().split('\n')
  assert max(map(len, rows)) <= 40 and 'Starting a service. Its first start compiles' in ' '.join(map(str.strip, rows))


def test_a_service_that_needs_a_key_names_the_variable(tmp_path, capsys):
  (tmp_path / 'work').mkdir()
  (tmp_path / 'script').write_text('')
  (tmp_path / 'rules').write_text('never bash')
  names = {'script': str(tmp_path / 'script'), 'state': str(tmp_path / 'state'), 'policy': str(tmp_path / 'rules')}
  with SessionServer() as server:
    server.refuse['create'] = 401, 'An API key is required.'
    with pytest.raises(UserError, match='An API key is required. Set the environment variable SDPO_API_KEY.'):
      run(capsys, url=server.url, workspace=str(tmp_path / 'work'), **names)


@pytest.mark.parametrize(
  'values', [{'system': 'half \ud800'}, {'adapter': '\udcff'}, {'settings': '{"sampling": {"temperature": NaN}}'}]
)
def test_what_json_cannot_hold_is_named(tmp_path, capsys, values):
  (tmp_path / 'work').mkdir()
  (tmp_path / 'script').write_text('')
  (tmp_path / 'rules').write_text('never bash')
  if 'settings' in values:
    (tmp_path / 'settings').write_text(values['settings'])
    values = {'settings': str(tmp_path / 'settings')}
  names = {'script': str(tmp_path / 'script'), 'state': str(tmp_path / 'state'), 'policy': str(tmp_path / 'rules')}
  with SessionServer() as server, pytest.raises(UserError, match='cannot be written as JSON .*correct --adapter'):
    run(capsys, url=server.url, workspace=str(tmp_path / 'work'), **names, **values)


def test_a_folder_that_was_removed_is_named(tmp_path, capsys, monkeypatch):
  (tmp_path / 'gone').mkdir()
  monkeypatch.chdir(tmp_path / 'gone')
  (tmp_path / 'gone').rmdir()
  with pytest.raises(UserError, match='The folder in which this program is started was removed'):
    run(capsys, url=dead_address(), state=str(tmp_path / 'state'))


def test_a_workspace_whose_name_is_no_text_can_be_worked_in(tmp_path, capsys):
  (tmp_path / 'rules').write_text('never bash')
  (tmp_path / 'script').write_text('Go\ny\ny\n/export a\0b\n/export ' + 'a/' * 2500)
  names = {name: str(tmp_path / name) for name in ('script', 'state')}
  work = tmp_path / 'caf\udce9'
  work.mkdir()
  with SessionServer(WRITE_1, call('read', path='/etc/passwd'), 'Done.') as server:
    code, out, _ = run(capsys, url=server.url, workspace=str(work), policy=str(tmp_path / 'rules'), **names)
    assert 'caf\\udce9, which is all that can be read' in server.turns[1]['results'][0]['text']
  assert code == 0 and (work / 'a.py').exists()
  assert 'cannot be written (embedded null byte): name another' in out and 'cannot be written ([Errno 36]' in out


def test_the_command_that_goes_on_is_said_also_when_a_script_ends_wrongly(tmp_path, capsys):
  (tmp_path / 'work').mkdir()
  (tmp_path / 'script').write_text('y\n')
  names = {name: str(tmp_path / name) for name in ('script', 'state')}
  with SessionServer('Hello.') as server:
    with pytest.raises(OutOfStep):
      program.run(program.CommandOptions(url=server.url, workspace=str(tmp_path / 'work'), **names))
  said = f'Resume the session with: python -m launch.session --resume=ses-1 --state={tmp_path / "state"}'
  assert said in capsys.readouterr().err


def test_a_token_that_is_wrong_is_refused(world):
  with SessionServer('Hello.') as server:
    with pytest.raises(Refused, match='token'):
      SessionClient(ServiceClient(server.url, local=True), 'ad-1', 'ses-1', 'other').flush()
