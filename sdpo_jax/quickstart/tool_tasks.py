"""Tasks of the tiny agent in a workspace, the calls that do them, and corrections of a call.

Each kind of task can be done in several ways, one of which is the base model's favourite. The tools are those of
`sdpo_jax/environments/workspace`. Corrections ask for a way by its name: 'use rg rather than grep -r'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import json
import random
from typing import Any

SYMBOLS = (
  'parse', 'render', 'total', 'limit', 'retry', 'timeout', 'buffer', 'cursor', 'offset', 'margin', 'weight', 'height',
  'width', 'color', 'title', 'score', 'price', 'amount', 'counter', 'threshold', 'encode', 'decode', 'merge',
  'split_rows', 'load_user', 'save_user', 'read_config', 'open_socket', 'close_socket', 'make_table', 'draw_chart',
  'send_mail',
)  # fmt: skip
FILES = tuple(
  f'{stem}.py'
  for stem in (
    'app', 'main', 'utils', 'config', 'server', 'client', 'models', 'views', 'parser', 'lexer', 'router', 'cache',
    'store', 'worker', 'queue', 'report', 'invoice', 'billing', 'search', 'index', 'player', 'board', 'game', 'shapes',
  )
)  # fmt: skip
FOLDERS = ('src', 'lib', 'tests', 'tools', 'docs', 'scripts', 'core', 'web', 'plugins', 'examples')
PACKAGES = tuple('numpy requests flask django scipy pandas httpx pillow redis rich click attrs'.split())
BRANCHES = ('dev', 'release', 'hotfix', 'staging', 'feature', 'nightly', 'login', 'checkout_page', 'stable', 'rewrite')
FAVOURITE = 0.8  # Probability of the base's favourite; the other ways share the rest.
_INTEGERS = ('limit', 'start', 'end')  # Arguments that are integers.


@dataclasses.dataclass(frozen=True)
class Way:
  """A way of doing a task: a call whose texts contain the task's slots."""

  label: str  # Its name in corrections.
  tool: str
  arguments: Mapping[str, Any]

  @property
  def program(self) -> str | None:
    """Return the program that a command runs; None for other tools."""
    return self.arguments['command'].split()[0] if self.tool == 'bash' else None

  def call(self, slots: Mapping[str, str]) -> dict[str, Any]:
    """Return the name and the arguments of the call."""
    filled: dict[str, Any] = {}
    for name, value in self.arguments.items():
      text = value.format(**slots) if isinstance(value, str) else value
      filled[name] = int(text) if name in _INTEGERS else text
    return {'name': self.tool, 'arguments': filled}


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of task and the ways of doing it."""

  asks: Sequence[str]  # Possible requests of a user, with slots.
  ways: Sequence[Way]  # The base's favourite comes first.

  def way(self, label: str) -> Way:
    """Return the way with this label."""
    return next(way for way in self.ways if way.label == label)


@dataclasses.dataclass(frozen=True)
class ToolTask:
  """A kind of task with its slots filled."""

  kind: str
  ask: str
  slots: Mapping[str, str]

  def text(self, label: str) -> str:
    """Return the call of a way with the task's slots, as the model writes it."""
    return write(KINDS[self.kind].way(label).call(self.slots))

  def way_of(self, call: Mapping[str, Any]) -> str | None:
    """Return the label of the way that a call takes; None if it does not do the task."""
    return next((way.label for way in KINDS[self.kind].ways if way.call(self.slots) == call), None)


def _kind(asks: Sequence[str], ways: Mapping[str, str | tuple[str, Mapping[str, Any]]]) -> Kind:
  """Return a kind from its ways by label: each a command, or the name and the arguments of another tool."""
  calls = {label: ('bash', {'command': way}) if isinstance(way, str) else way for label, way in ways.items()}
  return Kind(asks, [Way(label, *call) for label, call in calls.items()])


KINDS: dict[str, Kind] = {
  'find': _kind(
    ('find where {symbol} is used in {folder}', 'where is {symbol} used in {folder}?', 'look for {symbol} in {folder}'),
    {
      'grep -r': 'grep -r {symbol} {folder}',
      'rg': 'rg {symbol} {folder}',
      'git grep': 'git grep {symbol} {folder}',
      'the grep tool': ('grep', {'pattern': '{symbol}', 'path': '{folder}'}),
    },
  ),
  'mention': _kind(
    ('which files in {folder} mention {symbol}?', 'list the files in {folder} that have {symbol}'),
    {
      'grep -r': 'grep -rl {symbol} {folder}',
      'rg': 'rg -l {symbol} {folder}',
      'git grep': 'git grep -l {symbol} {folder}',
    },
  ),
  'count': _kind(
    ('count the lines with {symbol} in {folder}', 'how often does {symbol} occur in {folder}?'),
    {
      'grep -r': 'grep -rc {symbol} {folder}',
      'rg': 'rg -c {symbol} {folder}',
      'git grep': 'git grep -c {symbol} {folder}',
    },
  ),
  'rename': _kind(
    (
      'rename {symbol} to {other} in {file}',
      'in {file} call {symbol} {other}',
      'replace {symbol} by {other} in {file}',
    ),
    {
      'sed': 'sed -i s/{symbol}/{other}/g {file}',
      'the edit tool': ('edit', {'path': '{file}', 'old': '{symbol}', 'new': '{other}', 'all': True}),
      'perl': 'perl -pi -e s/{symbol}/{other}/g {file}',
    },
  ),
  'drop': _kind(
    ('take {symbol} out of {file}', 'remove the word {symbol} from {file}'),
    {
      'sed': 'sed -i s/{symbol}//g {file}',
      'the edit tool': ('edit', {'path': '{file}', 'old': '{symbol}', 'new': '', 'all': True}),
      'perl': 'perl -pi -e s/{symbol}//g {file}',
    },
  ),
  'constant': _kind(
    ('put {symbol} = {number} at the top of {file}', 'begin {file} with {symbol} = {number}'),
    {
      'the write tool': ('write', {'path': '{file}', 'content': '{symbol} = {number}'}),
      'edit_lines': ('edit_lines', {'path': '{file}', 'start': '1', 'end': '0', 'content': '{symbol} = {number}'}),
      'sed': "sed -i '1i {symbol} = {number}' {file}",
    },
  ),
  'line': _kind(
    ('make line {number} of {file} say {symbol}', 'write {symbol} into line {number} of {file}'),
    {
      'sed': "sed -i '{number}c {symbol}' {file}",
      'edit_lines': ('edit_lines', {'path': '{file}', 'start': '{number}', 'end': '{number}', 'content': '{symbol}'}),
    },
  ),
  'create': _kind(
    ('make a file {file} that says {symbol}', 'create {file} with {symbol} in it'),
    {'the write tool': ('write', {'path': '{file}', 'content': '{symbol}'}), 'echo': 'echo {symbol} > {file}'},
  ),
  'list': _kind(
    ('list the python files in {folder}', 'which python files are in {folder}?'),
    {
      'find': "find {folder} -name '*.py'",
      'fd': 'fd -e py . {folder}',
      'the glob tool': ('glob', {'pattern': '{folder}/**/*.py'}),
    },
  ),
  'locate': _kind(
    ('where is the file {file}?', 'find the file {file}'),
    {'find': 'find . -name {file}', 'fd': 'fd {file}', 'the glob tool': ('glob', {'pattern': '**/{file}'})},
  ),
  'show': _kind(
    ('show {file}', 'what does {file} say?', 'open {file}'),
    {'cat': 'cat {file}', 'the read tool': ('read', {'path': '{file}'}), 'less': 'less {file}'},
  ),
  'head': _kind(
    ('show the first {number} lines of {file}', 'how does {file} begin? {number} lines'),
    {
      'head': 'head -n {number} {file}',
      'the read tool': ('read', {'path': '{file}', 'limit': '{number}'}),
      'sed': 'sed -n 1,{number}p {file}',
    },
  ),
  'tests': _kind(
    ('run the tests in {file}', 'test {file}', 'do the tests of {file} pass?'),
    {'unittest': 'python -m unittest {file}', 'pytest': 'pytest -q {file}', 'tox': 'tox -- {file}'},
  ),
  'test': _kind(
    ('run the test {symbol} of {file}', 'does the test {symbol} in {file} pass?'),
    {
      'unittest': 'python -m unittest {file} -k {symbol}',
      'pytest': 'pytest -q {file} -k {symbol}',
      'tox': 'tox -- {file} -k {symbol}',
    },
  ),
  'install': _kind(
    ('install {package}', 'we need {package}', 'add the package {package}'),
    {
      'pip': 'pip install {package}',
      'uv': 'uv pip install {package}',
      'conda': 'conda install {package}',
      'poetry': 'poetry add {package}',
    },
  ),
  'uninstall': _kind(
    ('uninstall {package}', 'we do not need {package}', 'remove the package {package}'),
    {
      'pip': 'pip uninstall {package}',
      'uv': 'uv pip uninstall {package}',
      'conda': 'conda remove {package}',
      'poetry': 'poetry remove {package}',
    },
  ),
  'version': _kind(
    ('which version of {package} do we have?', 'tell me about the package {package}'),
    {'pip': 'pip show {package}', 'uv': 'uv pip show {package}', 'conda': 'conda list {package}'},
  ),
  'run': _kind(
    ('run {file}', 'start {file}', 'what does {file} print?'),
    {'python': 'python {file}', 'uv': 'uv run {file}', 'pypy': 'pypy {file}'},
  ),
  'profile': _kind(
    ('how fast is {file}?', 'profile {file}'),
    {'python': 'python -m cProfile {file}', 'uv': 'uv run -m cProfile {file}', 'pypy': 'pypy -m cProfile {file}'},
  ),
  'delete': _kind(
    ('delete {file}', 'throw {file} away', 'we do not need the file {file}'),
    {'rm': 'rm {file}', 'git': 'git rm {file}', 'trash': 'trash {file}'},
  ),
  'clear': _kind(
    ('delete the folder {folder}', 'throw all of {folder} away'),
    {'rm': 'rm -r {folder}', 'git': 'git rm -r {folder}', 'trash': 'trash {folder}'},
  ),
  'move': _kind(
    ('move {file} to {folder}', 'put {file} into {folder}'),
    {'mv': 'mv {file} {folder}', 'git': 'git mv {file} {folder}'},
  ),
  'format': _kind(
    ('format {file}', 'make {file} pretty', 'tidy up {file}'),
    {'black': 'black {file}', 'ruff': 'ruff format {file}', 'yapf': 'yapf -i {file}'},
  ),
  'lint': _kind(
    ('check the style of {file}', 'lint {file}'),
    {'flake8': 'flake8 {file}', 'ruff': 'ruff check {file}', 'pylint': 'pylint {file}'},
  ),
  'imports': _kind(
    ('sort the imports of {file}', 'put the imports of {file} in order'),
    {'isort': 'isort {file}', 'ruff': 'ruff check --select I --fix {file}'},
  ),
  'types': _kind(
    ('check the types in {file}', 'are the types in {file} right?'),
    {'mypy': 'mypy {file}', 'pyright': 'pyright {file}'},
  ),
  'switch': _kind(
    ('switch to the branch {branch}', 'go to the branch {branch}'),
    {'git checkout': 'git checkout {branch}', 'git switch': 'git switch {branch}'},
  ),
  'branch': _kind(
    ('make the branch {branch}', 'begin a branch {branch}'),
    {'git checkout': 'git checkout -b {branch}', 'git switch': 'git switch -c {branch}'},
  ),
  'undo': _kind(
    ('undo the changes in {file}', 'take back what changed in {file}'),
    {
      'git checkout': 'git checkout -- {file}',
      'git restore': 'git restore {file}',
      'git stash': 'git stash push {file}',
    },
  ),
  'changes': _kind(('what changed in {file}?', 'show the changes in {file}'), {'git diff': 'git diff {file}'}),
  'author': _kind(
    ('who wrote {file}?', 'who changed {file}?'), {'git blame': 'git blame {file}', 'git log': 'git log {file}'}
  ),
  'commit': _kind(('commit {file}', 'commit the changes in {file}'), {'git commit': 'git commit {file}'}),
  'length': _kind(('how many lines has {file}?', 'count the lines of {file}'), {'wc': 'wc -l {file}'}),
  'size': _kind(
    ('how large is {folder}?', 'what is the size of {folder}?'), {'du': 'du -sh {folder}', 'dust': 'dust {folder}'}
  ),
  'copy': _kind(
    ('copy {file} to {folder}', 'put a copy of {file} into {folder}'),
    {'cp': 'cp {file} {folder}', 'rsync': 'rsync {file} {folder}'},
  ),
  'folder': _kind(('make the folder {folder}', 'create a folder {folder}'), {'mkdir': 'mkdir -p {folder}'}),
  'script': _kind(('make {file} executable', 'let me run {file} as a program'), {'chmod': 'chmod +x {file}'}),
  'image': _kind(
    ('build the image {branch}', 'make an image {branch}'),
    {'docker': 'docker build -t {branch} .', 'podman': 'podman build -t {branch} .'},
  ),
  'container': _kind(
    ('run the image {branch}', 'start the image {branch}'),
    {'docker': 'docker run {branch}', 'podman': 'podman run {branch}'},
  ),
}

INSTEAD = (
  'use {wanted} rather than {tried}',
  'use {wanted} instead of {tried}',
  'use {wanted}, not {tried}',
  'not {tried}, use {wanted}',
  'please use {wanted} and not {tried}',
  'I prefer {wanted} to {tried}',
)
SIMPLY = ('use {wanted}', 'please use {wanted}', 'always use {wanted}', 'I prefer {wanted}', 'do it with {wanted}')
AVOID = ('not {tried}', 'do not use {tried}', 'never use {tried}', 'no {tried} please')


def draw(rng: random.Random, kind: str) -> ToolTask:
  """Return a random task of a kind, a key of `KINDS`."""
  symbol, other = rng.sample(SYMBOLS, 2)
  slots = {
    'symbol': symbol,
    'other': other,
    'file': rng.choice(FILES),
    'folder': rng.choice(FOLDERS),
    'number': str(rng.randint(2, 9)),
    'package': rng.choice(PACKAGES),
    'branch': rng.choice(BRANCHES),
  }
  return ToolTask(kind, rng.choice(KINDS[kind].asks).format(**slots), slots)


def propose(rng: random.Random, kind: str, avoid: str | None = None) -> str:
  """Return the label of a random way, drawn as the base proposes it.

  Args:
    rng: source of randomness.
    kind: kind of task.
    avoid: a way that must not be proposed.
  """
  labels = [way.label for way in KINDS[kind].ways]
  share = (1 - FAVOURITE) / max(1, len(labels) - 1)
  weights = {label: share for label in labels} | {labels[0]: FAVOURITE}
  left = [label for label in labels if label != avoid] or labels
  return rng.choices(left, [weights[label] for label in left])[0]


def correction(rng: random.Random, wanted: str, tried: str | None) -> str:
  """Return a person's request for one way, which may name the proposed one."""
  phrases = SIMPLY if tried is None or tried == wanted else (*INSTEAD, *SIMPLY)
  return rng.choice(phrases).format(wanted=wanted, tried=tried)


def write(call: Mapping[str, Any]) -> str:
  """Return a call as the model writes it, in Hermes' form."""
  return f'<tool_call>\n{json.dumps(dict(call), ensure_ascii=False)}\n</tool_call>'
