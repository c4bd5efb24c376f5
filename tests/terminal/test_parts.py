"""The parts of the terminal program: what is made visible, which calls a policy allows, and what a history survives."""

import difflib
import io
import itertools
import json
import os
import re
import stat
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
import pytest
import wcwidth

from sdpo_jax import extras
from sdpo_jax.environments.workspace.tools import TOOLS
from sdpo_jax.errors import UserError
from sdpo_jax.serving.tool_calls import read_calls
from sdpo_jax.terminal import escaping, history, learned, policies, program, script
from sdpo_jax.terminal.changes import diff
from sdpo_jax.terminal.client import ServiceClient, SessionClient
from sdpo_jax.terminal.history import History
from sdpo_jax.terminal.inputs import Choice
from sdpo_jax.terminal.screen import Line, Screen, has_colours
from tests.docs import pages

ANY_TEXT = st.text(st.characters(codec=None))
# Categories of characters that act, hide or stand for nothing.
ACTING = ('Cc', 'Cf', 'Cs', 'Co', 'Cn', 'Zl', 'Zp')


# What is read.


def test_long_lists_are_read_page_by_page(monkeypatch):
  client, asked = ServiceClient('http://127.0.0.1:1', local=True), []

  def get(path, *fields, after=0):
    asked.append(after)
    following = after + 2 if after < 4 else None
    listed = {'session': {'id': 'ses-1', 'read': len(asked)}, fields[-1]: [{'n': after}, {'n': after + 1}]}
    return listed | {'next': following}

  monkeypatch.setattr(client, 'get', get)
  session, turns = SessionClient(client, 'ad-1', 'ses-1', 'token').state()
  assert session['read'] == 3 and [turn['n'] for turn in turns] == list(range(6)) and asked == [0, 2, 4]
  assert [each['n'] for each in client.versions('ad-1')] == list(range(6))


# What is shown.


@given(ANY_TEXT)
def test_what_is_shown_steers_nothing_and_can_be_read_back(text):
  shown = escaping.visible(text)
  assert not any(unicodedata.category(letter) in ACTING for letter in shown.replace('\n', ''))
  assert escaping.original(shown) == text


@pytest.mark.parametrize(
  'text, shown',
  [
    ('\x1b[2Jrm', '⟨escape⟩[2Jrm'),
    ('a\u202eb', 'a⟨U+202E⟩b'),
    ('a\u200db', 'a⟨U+200D⟩b'),
    ('a\u00a0b', 'a⟨U+00A0⟩b'),
    ('a\u3164b\ufe0f', 'a⟨U+3164⟩b⟨U+FE0F⟩'),
    ('\rls', '⟨return⟩ls'),
    ('⟨escape⟩', '⟨U+27E8⟩escape⟨U+27E9⟩'),
    ('grün 日本 \\x1b', 'grün 日本 \\x1b'),
  ],
)
def test_characters_that_act_have_names(text, shown):
  assert escaping.visible(text) == shown


def test_the_end_of_a_line_can_be_seen():
  assert escaping.visible_line('a\t b  ') == 'a⟨tab⟩ b⟨space⟩⟨space⟩'


FILES = st.lists(st.sampled_from(['a', 'b ', 'c\t', '', 'd\r']), max_size=30).map('\n'.join)


@given(FILES, FILES)
def test_a_diff_says_all_that_changes(before, after):
  lines = [line.text for line in diff('x', before, after)]
  assert applied(before, lines) == after


def applied(before, lines):
  """Do to a text what a diff says, whose unchanged lines must be there."""
  if len(lines) == 1:
    return before
  old = before.split('\n')
  old = [line + '\n' for line in old[:-1]] + ([old[-1]] if old[-1] else [])
  new, at = [], 0
  hunks = [index for index, line in enumerate(lines) if line.startswith('@@')]
  for start, end in zip(hunks, [*hunks[1:], len(lines)], strict=True):
    first, _, count = lines[start].split()[1].removeprefix('-').partition(',')
    place = int(first) - (count != '0')
    new += old[at:place]
    at = place
    body = []
    for line in lines[start + 1 : end]:
      if line.startswith('\\'):
        body[-1] = body[-1][0], body[-1][1].removesuffix('\n')
      else:
        body.append((line[0], escaping.original(line[1:]) + '\n'))
    for mark, text in body:
      if mark != '+':
        assert old[at] == text
        at += 1
      if mark != '-':
        new.append(text)
  return ''.join(new + old[at:])


@pytest.mark.parametrize(
  'before, after', [('', 'a\nb\n'), ('a\nb\n', ''), ('a\n', 'a\nb\n'), ('b\n' * 9, 'b\n' * 9 + 'a\n')]
)
def test_the_places_of_a_diff_are_written_as_elsewhere(before, after):
  written = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True))
  expected = [line.strip() for line in written if line.startswith('@@')]
  assert [line.text for line in diff('x', before, after) if line.style == 'place'] == expected != []


def test_a_large_change_is_shown_whole_and_at_once():
  before, after = ('\n'.join(f'{name}{number}' for number in range(30_000)) for name in 'ab')
  lines = diff('x', before, after)
  assert sum(line.style == 'removed' for line in lines) == sum(line.style == 'added' for line in lines)
  assert applied(before, [line.text for line in lines]) == after


@pytest.mark.parametrize(
  'lengths, pages',
  [
    ([1] * 24, [24]),
    ([1] * 25, [24, 1]),
    ([80 * 24], [24]),
    ([80 * 24 + 1], [24, 1]),
    ([1, 80 * 50, 1], [1, 24, 24, 3]),
    ([0, 0], [2]),
  ],
)
def test_a_page_is_what_is_seen_at_once(monkeypatch, lengths, pages):
  monkeypatch.setenv('COLUMNS', '82')  # The margin has two.
  monkeypatch.setenv('LINES', '30')
  screen, left = Screen(io.StringIO(), colours=False, paged=True), [Line('x' * each, foreign=True) for each in lengths]
  found = []
  seen = ''
  while left:
    shown, left = screen.page_of(left)
    found.append(sum(max(1, -(-len(line.text) // 80)) for line in shown))
    seen += ''.join(line.text for line in shown)
  assert found == pages and seen == 'x' * sum(lengths)
  wide, _ = screen.page_of([Line('日' * 5000, foreign=True)])
  assert len(wide[0].text) == 24 * 40
  assert Screen(io.StringIO(), colours=False, paged=False).page_of([Line('x' * 9999)])[1] == []


@pytest.mark.parametrize(
  'environment, terminal, wanted',
  [
    ({'TERM': 'xterm'}, True, True),
    ({'TERM': 'xterm', 'NO_COLOR': '1'}, True, False),
    ({'TERM': 'dumb'}, True, False),
    ({}, True, False),
    ({'TERM': 'xterm'}, False, False),
  ],
)
def test_colours_are_where_they_are_seen_and_wanted(environment, terminal, wanted):
  out = io.StringIO()
  out.isatty = lambda: terminal
  assert has_colours(out, environment) == wanted


def turn_of(text, form='hermes'):
  found = read_calls(text, form)
  calls = [{'name': call.name, 'arguments': dict(call.arguments)} for call in found.calls]
  return {'text': text, 'said': found.text, 'calls': calls, 'fault': found.fault}


def test_without_colours_only_text_is_written_and_all_of_it_is_recorded():
  out, recorded = io.StringIO(), []
  screen = Screen(out, colours=False, paged=False, record=recorded.append)
  screen.say('[bold]x[/bold] \x1b[31m', 'wrong')
  screen.draft('a\x07')
  screen.end_draft(turn_of('a\x07b'))
  screen.beside(('old', 'x' * 200), ('new', 'y'))
  assert out.getvalue() == f'[bold]x[/bold] ⟨escape⟩[31m\n│ a⟨U+0007⟩b\nold\n│ {"x" * 200}\nnew\n│ y\n'
  assert recorded == ['[bold]x[/bold] ⟨escape⟩[31m', '│ a⟨U+0007⟩b', 'old', '│ ' + 'x' * 200, 'new', '│ y']


def test_an_answer_is_shown_to_its_end_whatever_was_drafted():
  out = io.StringIO()
  screen = Screen(out, colours=False, paged=False)
  screen.end_draft(turn_of('all of it\n'))
  screen.draft('a dr')
  screen.end_draft(turn_of('a draft'))
  screen.draft('broken')
  screen.end_draft()
  screen.draft('one')
  screen.end_draft(turn_of('two'))
  assert out.getvalue() == '│ all of it\n│ a draft\n│ broken\n│ one\nThe final answer differs:\n│ two\n'


CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'


@pytest.mark.parametrize(
  'text, shown',
  [
    (CALL, ''),
    (f'<think>\nHm: <tool_call>?\n</think>\n\nI look.\n{CALL}\n', '<think>\nHm: <tool_call>?\n</think>\n\nI look.'),
    (f'One.\n{CALL}\nTwo.\n{CALL}', 'One.\nTwo.'),
    (f'Hm: <tool_call>\n</think>Well.{CALL}', 'Hm: <tool_call>\n</think>Well.'),
    ('a < b <tool', 'a < b <tool'),
    ('{"a": 1}', '{"a": 1}'),
    ('I read.\n<tool_call>{"name"', 'I read.\n<tool_call>{"name"'),  # What is wrong with it must be seen.
  ],
)
def test_calls_are_left_out_of_an_answer_however_it_arrives(text, shown):
  for size in (1, 3, 7, len(text)):
    out = io.StringIO()
    screen = Screen(out, colours=False, paged=False)
    for start in range(0, len(text), size):
      screen.draft(text[start : start + size])
      assert '"name"' not in out.getvalue()
    screen.end_draft(turn_of(text))
    assert [line.removeprefix('│').removeprefix(' ') for line in out.getvalue().splitlines()] == shown.splitlines()
  for text in ('{"name": "read", "parameters": {}}', '<|python_tag|>{"name": "read", "parameters": {}}'):
    screen.draft(text)
    screen.end_draft(turn_of(text, 'llama3'))
    assert 'parameters' not in out.getvalue()


PROSE = st.text(
  st.one_of(st.sampled_from('\n\t │日é\u0301😀\U0001f1e6\u05d0x'), st.characters(codec='utf-8')), max_size=200
)


@given(PROSE, st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(10, 40), st.booleans())
def test_every_row_of_an_answer_has_the_margin_and_fits(text, sizes, columns, colours):
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('COLUMNS', str(columns))
    patch.setenv('TERM', 'xterm')
    out = io.StringIO()
    screen = Screen(out, colours=colours, paged=True)
    text, left = 'x' + text.replace('<', '').replace('{', ''), itertools.cycle(sizes)
    start = 0
    while start < len(text):
      screen.draft(text[start : start + (size := next(left))])
      start += size
    screen.end_draft(turn_of(text))
    rows = out.getvalue().removesuffix('\n').split('\n')
    screen.show([Line(escaping.visible(text, keep=''), foreign=True), Line('Own: ' + escaping.visible(text, keep=''))])
  assert all(row == '│' or row.startswith('│ ') for row in rows)
  expected = [line.expandtabs(8) for line in escaping.visible(text.rstrip(), keep='\n\t', prose=True).split('\n')]
  assert ''.join(row[2:] for row in rows) == ''.join(expected)
  assert all(sum(map(wcwidth.wcwidth, row)) <= columns for row in rows)
  later = re.sub(r'\x1b\[[0-9;]*m', '', out.getvalue()).removesuffix('\n').split('\n')[len(rows) :]
  own = next(number for number, row in enumerate(later) if row.startswith('Own: '))
  assert all(row.startswith('│ ') for row in later[:own]) and all(row.startswith('  ') for row in later[own + 1 :])
  assert all(sum(map(wcwidth.wcwidth, row)) <= columns for row in later)


def test_in_colours_no_character_is_lost(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm-256color')
  monkeypatch.setenv('COLUMNS', '100')
  out, recorded = io.StringIO(), []
  screen = Screen(out, colours=True, paged=True, record=recorded.append)
  screen.show([Line('+' + 'x' * 300, 'added', foreign=True)])
  screen.beside(('old', 'abc' * 60), ('new', 'y'))
  rows = re.sub(r'\x1b\[[0-9;]*m', '', out.getvalue()).split('\n')
  assert '\x1b[' in out.getvalue() and ''.join(row.removeprefix('│ ') for row in rows[:4]) == '+' + 'x' * 300
  assert recorded[1].split()[0] == 'old'
  left = [line.split('│')[1].strip() for line in recorded[2].split('\n')]
  assert ''.join(left) == 'abc' * 60


def test_a_call_that_is_written_is_counted_where_the_cursor_moves(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  out = io.StringIO()
  screen = Screen(out, colours=True, paged=True)
  for piece in ('I look.\n<tool', '_call>{"na', 'me"'):
    screen.draft(piece)
  assert out.getvalue().startswith('│ I look.\n') and 'writing a call, 18 characters' in out.getvalue()
  screen.end_draft(turn_of('I look.\n<tool_call>{"name": "read"}</tool_call>'))
  assert out.getvalue().endswith('\r\x1b[K') and '"read"' not in out.getvalue()


def test_what_was_learned_is_said():
  said = {
    'version_before': 3,
    'version_after': 4,
    'accepted': True,
    'reason': None,
    'turns': [7],
    'waiting': 0,
    'divergence_before': 0.5,
    'divergence_after': 0.25,
    'moved': [{'position': 2, 'token': 5, 'text': '\n', 'before': -0.25, 'after': -1.5}],
    'seconds': 0.5,
  }
  [line] = learned.lines_of(said, 1)
  assert line.text == 'Learned: version 3 → 4 in 0.50 s, from turn 7. /learned shows more.'
  [line] = learned.lines_of({**said, 'waiting': 1}, 2)
  assert 'from turn 7; 1 of 2 examples wait.' in line.text
  text = '\n'.join(line.text for line in learned.details_of(said))
  assert '0.5000 → 0.2500 nats' in text
  assert '⟨newline⟩' in text and '-0.250' in text and '-1.500' in text and '-1.250' in text
  guarded = {**said, 'accepted': False, 'version_after': 3, 'reason': 'max_kl_to_base: 2.0 is more than 0.5'}
  assert 'a guard has rejected the new version, and version 3 stays (max_kl' in learned.lines_of(guarded, 1)[0].text
  same = {**said, 'version_after': 3, 'unchanged': True}
  [line] = learned.lines_of(same, 1)
  assert line.text == 'Nothing to learn from turn 7: its gradient is 0, and version 3 stays.'
  moved = {'turn': 7, 'rejected': [-2.34, -0.94], 'wanted': None}
  more = said | {'answers': [moved], 'warnings': ['Likelier!']}
  assert [line.text for line in learned.lines_of(more, 1)][1:] == ['Likelier!']
  assert 'rejected -2.34 → -0.94.' in '\n'.join(line.text for line in learned.details_of(more))
  waits = {**guarded, 'reason': None, 'waiting': 2}
  assert '2 of 4 examples wait' in learned.lines_of(waits, 4)[0].text
  assert learned.lines_of(None, 4) == []


# Policies.

RULES = """
# Secrets stay secret.
never * secrets/**
allow read **
allow grep **
allow write docs/*.md
allow bash rg *
allow bash make test && make lint
ask bash git push*
allow bash git *
never bash rm *
"""


@pytest.mark.parametrize(
  'tool, arguments, verb',
  [
    ('read', {'path': 'a.py'}, 'allow'),
    ('read', {'path': 'deep/er/a.py'}, 'allow'),
    ('read', {'path': 'secrets/key'}, 'never'),
    ('read', {'path': './secrets/../secrets/key'}, 'never'),
    ('read', {'path': 'link/key'}, 'never'),
    ('read', {'path': 'far/../alias'}, 'never'),  # The tools read `alias`, and not what is beside that folder.
    ('read', {'path': 'far/../a.py'}, 'allow'),
    ('read', {'path': 'a\0b'}, 'allow'),
    ('write', {'path': 'docs/a.md', 'content': ''}, 'allow'),
    ('write', {'path': 'docs/deep/a.md', 'content': ''}, 'ask'),
    ('write', {'path': 'docs/../a.md', 'content': ''}, 'ask'),
    ('write', {'path': 'docs/link.md', 'content': ''}, 'ask'),  # It leads to another file.
    ('grep', {'pattern': 'x'}, 'ask'),  # It would read what is not to be read.
    ('bash', {'command': 'rg x'}, 'allow'),
    ('bash', {'command': 'rg x src | wc'}, 'ask'),
    ('bash', {'command': 'rg x; reboot'}, 'ask'),
    ('bash', {'command': 'rg x && reboot'}, 'ask'),
    ('bash', {'command': 'rg x & reboot'}, 'ask'),
    ('bash', {'command': 'rg $(reboot)'}, 'ask'),
    ('bash', {'command': 'rg `reboot`'}, 'ask'),
    ('bash', {'command': 'rg x > a'}, 'ask'),
    ('bash', {'command': 'rg x\nreboot'}, 'ask'),
    ('bash', {'command': "rg ${x:=$'\\x24\\x28reboot\\x29'} ${x@P}"}, 'ask'),
    ('bash', {'command': "rg ${x:=a[$'\\x24\\x28reboot\\x29']} $[x]"}, 'ask'),
    ('bash', {'command': 'X=y rg x'}, 'ask'),
    ('bash', {'command': 'git -c core.pager=reboot status $PWD'}, 'ask'),
    ('bash', {'command': 'make test && make lint'}, 'allow'),
    ('bash', {'command': 'make test && make lint && reboot'}, 'ask'),
    ('bash', {'command': 'git status'}, 'allow'),
    ('bash', {'command': 'git push origin'}, 'ask'),
    ('bash', {'command': 'rm -r a; ls'}, 'never'),
    ('bash', {'command': 'ls'}, 'ask'),
  ],
)
def test_the_first_rule_that_matches_decides(tmp_path, tool, arguments, verb):
  (tmp_path / 'docs').mkdir()
  (tmp_path / 'secrets').mkdir()
  (tmp_path / 'link').symlink_to('secrets')
  (tmp_path / 'docs' / 'link.md').symlink_to('../a.py')
  (tmp_path / 'alias').symlink_to('secrets/key')
  (tmp_path / 'docs' / 'deep').mkdir()
  (tmp_path / 'far').symlink_to('docs/deep')
  policy = policies.ApprovalPolicy(policies.parse(RULES, 'rules'))
  assert policy.verdict(tool, arguments, tmp_path).verb == verb


def test_what_a_person_allows_meanwhile_does_not_reach_what_is_refused(tmp_path):
  policy = policies.ApprovalPolicy(policies.parse('never write a\nask', 'rules'))
  policy.added.append(policies.make_rule('allow', 'write', '**', ''))
  assert policy.verdict('write', {'path': 'a'}, tmp_path).verb == 'never'
  assert policy.verdict('write', {'path': 'b'}, tmp_path).verb == 'allow'
  assert policies.suggestion('write', {'path': './b/../c'}, tmp_path) == 'c'
  assert policies.suggestion('bash', {'command': ' ls '}, tmp_path) == 'ls'


def test_the_rules_of_the_page_do_what_it_says(tmp_path):
  [block] = [block for block in pages.blocks('docs/permissions.md') if block.text.startswith('never ')]
  policy = policies.ApprovalPolicy(policies.parse(block.text, block.page))
  for command, verb in (('rg x', 'allow'), ('make test && make lint', 'allow'), ('rg x; ls', 'never'), ('ls', 'never')):
    assert policy.verdict('bash', {'command': command}, tmp_path).verb == verb
  assert policy.verdict('read', {'path': 'a/b'}, tmp_path).verb == 'allow'
  assert policy.verdict('read', {'path': 'secrets/key'}, tmp_path).verb == 'never'
  assert policy.verdict('edit', {'path': 'a'}, tmp_path).verb == 'ask'


def test_rules_are_the_same_as_text_and_as_json(tmp_path):
  text = policies.parse(RULES, 'rules')
  values = [{'rule': rule.verb, 'tool': rule.tool, 'pattern': rule.pattern} for rule in text]
  path = tmp_path / 'rules.json'
  path.write_text(json.dumps(values))
  assert list(policies.load(str(path)).rules) == text == policies.parse('\n'.join(map(str, text)), 'again')
  assert policies.load('ask').rules == ()
  no_commands = policies.ApprovalPolicy(policies.parse('never bash', 'rules'))
  assert [name for name in TOOLS if no_commands.never(name)] == ['bash']


@pytest.mark.parametrize(
  'text, sentence',
  [
    ('allow read **\npermit read', "rules, line 2: a rule must begin with allow, ask or never, not 'permit'"),
    ('allow reed **', "line 1: there is no tool 'reed', only read"),
    ('allow *', 'line 1: a rule with allow must name one tool'),
    ('allow bash', 'line 1: allow needs a pattern, such as allow bash \\*'),
    ('allow * **', 'line 1: a rule with allow must name one tool'),
    ('[{"rule": "allow", "tol": "x"}]', 'rule 1: a rule must be an object with rule, tool and pattern'),
    ('[{"rule": "never", "tool": "read", "pattern": 1}]', 'rule 1: the pattern must be a text, not 1'),
    ('[{"rule": "never", "tool": ["read"]}]', r"rule 1: there is no tool \['read'\]"),
    ('[', 'rules is not JSON'),
  ],
)
def test_what_is_no_rule_is_named(text, sentence):
  with pytest.raises(UserError, match=sentence):
    policies.parse(text, 'rules')


def test_a_policy_that_is_not_there_is_named(tmp_path):
  with pytest.raises(UserError, match='--policy=.* cannot be read .*name a file of rules, or ask'):
    policies.load(str(tmp_path / 'none'))


# Histories.


def opened(folder, session='ses-1'):
  return History.begin(folder, session, {'token': 'secret', 'adapter': 'ad-1'})


def test_a_history_is_its_owners_alone_and_comes_back(tmp_path):
  made = opened(tmp_path / 'deep' / 'state')
  made.add('said', text='half of a character: \ud800, \x1b')
  made.note('shown', text='x')
  path = made.path
  assert stat.S_IMODE(os.stat(path).st_mode) == 0o600 and stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
  with pytest.raises(UserError, match='Another program has the history'):
    History(path)
  made.close()
  again = History(path)
  assert again.records == made.records and again.opened['token'] == 'secret'
  assert again.last('said')['text'] == 'half of a character: \ud800, \x1b' and again.last('said', text='y') is None
  again.close()
  with pytest.raises(UserError, match='cannot be created'):
    opened(path.parent)


def test_of_every_beginning_of_a_history_the_whole_lines_are_kept(tmp_path):
  made = opened(tmp_path)
  for number in range(3):
    made.add('said', text=f'{number}\u2028ü')
  made.close()
  content, records = made.path.read_bytes(), made.records
  for length in range(content.index(b'\n') + 1, len(content) + 1):
    made.path.write_bytes(content[:length])
    torn = History(made.path)
    assert torn.records == records[: content[:length].count(b'\n')]
    torn.add('said', text='after')
    torn.close()
    later = History(made.path)
    assert later.records == torn.records
    later.close()


def test_a_line_that_is_no_record_is_named(tmp_path):
  made = opened(tmp_path)
  made.close()
  with open(made.path, 'a') as file:
    file.write('{"kind": 1}\n')
  with pytest.raises(UserError, match='line 2 is not a record'):
    History(made.path)


def test_histories_are_found(tmp_path, monkeypatch):
  with pytest.raises(UserError, match='has no history; start'):
    history.find(tmp_path / 'none', None)
  for number, name in enumerate(('ses-1', 'ses-2')):
    made = opened(tmp_path, name)
    made.close()
    os.utime(made.path, (9 - number, 9 - number))
  assert history.find(tmp_path, None).stem == 'ses-1' and history.find(tmp_path, 'ses-2').stem == 'ses-2'
  for wrong in ('ses-3', '../ses-1', ''):
    with pytest.raises(UserError, match='there is no history of that session'):
      history.find(tmp_path, wrong)
  monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path))
  assert history.state_folder(None) == tmp_path / 'sdpo_jax' / 'sessions'
  monkeypatch.setenv('XDG_STATE_HOME', 'not/absolute')
  monkeypatch.setenv('HOME', str(tmp_path))
  assert history.state_folder(None) == tmp_path / '.local' / 'state' / 'sdpo_jax' / 'sessions'


# Scripts.


def test_lines_of_a_script_are_answers():
  shown = []
  lines = ['# comment', '', 'Fix it.', 'y', '/undo 3', 'n Use rg. ', 'e {"path": "a"}', ' yes, do', 'years ago']
  inputs = script.Script(lines, 'file', shown.append)
  keys = {'y': 'approve', 'n': 'deny', 'e': 'edit'}
  assert inputs.message() == 'Fix it.'
  assert inputs.choice(keys) == Choice('y')
  assert inputs.choice(keys) == Choice('/', '/undo 3')
  assert inputs.choice(keys) == Choice('n', 'Use rg.')
  assert inputs.choice(keys) == Choice('e', '{"path": "a"}')
  assert inputs.message() == 'yes, do' and inputs.message() == 'years ago'
  assert inputs.message() is None and not inputs.unanswered
  assert inputs.choice(keys) == Choice('q') and inputs.unanswered
  assert script.Script(['q', 'Hello'], 'file', shown.append).message() is None
  assert shown == ['> Fix it.', '? y', '> /undo 3', '? n Use rg. ', '? e {"path": "a"}', '>  yes, do', '> years ago']


def test_bytes_that_are_no_text_end_nothing():
  lines = ['Fix caf\udce9', 'n no \udcff']
  found = script.Script(lines, 'script', str)
  assert found.message() == 'Fix caf?' and found.choice({'n': 'deny'}) == Choice('n', 'no ?')


def test_lines_that_answer_nothing_are_named():
  inputs = script.Script(['y', 'Hello', 'a'], 'file', lambda line: None)
  with pytest.raises(UserError, match="file, line 1: 'y' is a decision, and no call .*write a space before it"):
    inputs.message()
  with pytest.raises(UserError, match="line 2: 'Hello' is not a decision; possible here: y .approve"):
    inputs.choice({'y': 'approve'})
  with pytest.raises(UserError, match="line 3: 'a' is not a decision"):
    inputs.choice({'y': 'approve'})
  with pytest.raises(UserError, match="write the answer to 'Why. ' on the same line"):
    inputs.line('Why? ')
  with pytest.raises(UserError, match='cannot be read'):
    script.lines_of('/none/of/these')


def test_packages_that_are_missing_are_named_with_the_extra(monkeypatch):
  extras.check('session')
  monkeypatch.setitem(extras.EXTRAS, 'session', (extras.EXTRAS['session'][0], ('rich', 'no_such_package')))
  with pytest.raises(UserError, match=r'needs no_such_package, .*requirements-session.txt.*sdpo_jax\[session\]'):
    extras.check('session')


def test_what_the_command_line_names_is_read_before_a_service_is_asked(tmp_path):
  (tmp_path / 'work').mkdir()
  (tmp_path / 'script').write_text('')
  (tmp_path / 'settings').write_text('{"tools": []}')
  names = {name: str(tmp_path / name) for name in ('script', 'settings', 'state')}
  with pytest.raises(UserError, match='settings has tools, which this program defines'):
    program.run(program.CommandOptions(url='http://127.0.0.1:1', workspace=str(tmp_path / 'work'), **names))
