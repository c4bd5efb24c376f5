"""Tasks of the tiny agent in a workspace, the calls that do them, and the corrections that people give.

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
PACKAGES = (
  'numpy',
  'requests',
  'flask',
  'django',
  'scipy',
  'pandas',
  'httpx',
  'pillow',
  'redis',
  'rich',
  'click',
  'attrs',
)
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


def _bash(label: str, command: str) -> Way:
  return Way(label, 'bash', {'command': command})


KINDS: dict[str, Kind] = {
  'find': Kind(
    ('find where {symbol} is used in {folder}', 'where is {symbol} used in {folder}?', 'look for {symbol} in {folder}'),
    (
      _bash('grep -r', 'grep -r {symbol} {folder}'),
      _bash('rg', 'rg {symbol} {folder}'),
      _bash('git grep', 'git grep {symbol} {folder}'),
      Way('the grep tool', 'grep', {'pattern': '{symbol}', 'path': '{folder}'}),
    ),
  ),
  'mention': Kind(
    ('which files in {folder} mention {symbol}?', 'list the files in {folder} that have {symbol}'),
    (
      _bash('grep -r', 'grep -rl {symbol} {folder}'),
      _bash('rg', 'rg -l {symbol} {folder}'),
      _bash('git grep', 'git grep -l {symbol} {folder}'),
    ),
  ),
  'count': Kind(
    ('count the lines with {symbol} in {folder}', 'how often does {symbol} occur in {folder}?'),
    (
      _bash('grep -r', 'grep -rc {symbol} {folder}'),
      _bash('rg', 'rg -c {symbol} {folder}'),
      _bash('git grep', 'git grep -c {symbol} {folder}'),
    ),
  ),
  'rename': Kind(
    (
      'rename {symbol} to {other} in {file}',
      'in {file} call {symbol} {other}',
      'replace {symbol} by {other} in {file}',
    ),
    (
      _bash('sed', 'sed -i s/{symbol}/{other}/g {file}'),
      Way('the edit tool', 'edit', {'path': '{file}', 'old': '{symbol}', 'new': '{other}', 'all': True}),
      _bash('perl', 'perl -pi -e s/{symbol}/{other}/g {file}'),
    ),
  ),
  'drop': Kind(
    ('take {symbol} out of {file}', 'remove the word {symbol} from {file}'),
    (
      _bash('sed', 'sed -i s/{symbol}//g {file}'),
      Way('the edit tool', 'edit', {'path': '{file}', 'old': '{symbol}', 'new': '', 'all': True}),
      _bash('perl', 'perl -pi -e s/{symbol}//g {file}'),
    ),
  ),
  'constant': Kind(
    ('put {symbol} = {number} at the top of {file}', 'begin {file} with {symbol} = {number}'),
    (
      Way('the write tool', 'write', {'path': '{file}', 'content': '{symbol} = {number}'}),
      Way('edit_lines', 'edit_lines', {'path': '{file}', 'start': '1', 'end': '0', 'content': '{symbol} = {number}'}),
      _bash('sed', "sed -i '1i {symbol} = {number}' {file}"),
    ),
  ),
  'line': Kind(
    ('make line {number} of {file} say {symbol}', 'write {symbol} into line {number} of {file}'),
    (
      _bash('sed', "sed -i '{number}c {symbol}' {file}"),
      Way(
        'edit_lines', 'edit_lines', {'path': '{file}', 'start': '{number}', 'end': '{number}', 'content': '{symbol}'}
      ),
    ),
  ),
  'create': Kind(
    ('make a file {file} that says {symbol}', 'create {file} with {symbol} in it'),
    (
      Way('the write tool', 'write', {'path': '{file}', 'content': '{symbol}'}),
      _bash('echo', 'echo {symbol} > {file}'),
    ),
  ),
  'list': Kind(
    ('list the python files in {folder}', 'which python files are in {folder}?'),
    (
      _bash('find', "find {folder} -name '*.py'"),
      _bash('fd', 'fd -e py . {folder}'),
      Way('the glob tool', 'glob', {'pattern': '{folder}/**/*.py'}),
    ),
  ),
  'locate': Kind(
    ('where is the file {file}?', 'find the file {file}'),
    (
      _bash('find', 'find . -name {file}'),
      _bash('fd', 'fd {file}'),
      Way('the glob tool', 'glob', {'pattern': '**/{file}'}),
    ),
  ),
  'show': Kind(
    ('show {file}', 'what does {file} say?', 'open {file}'),
    (_bash('cat', 'cat {file}'), Way('the read tool', 'read', {'path': '{file}'}), _bash('less', 'less {file}')),
  ),
  'head': Kind(
    ('show the first {number} lines of {file}', 'how does {file} begin? {number} lines'),
    (
      _bash('head', 'head -n {number} {file}'),
      Way('the read tool', 'read', {'path': '{file}', 'limit': '{number}'}),
      _bash('sed', 'sed -n 1,{number}p {file}'),
    ),
  ),
  'tests': Kind(
    ('run the tests in {file}', 'test {file}', 'do the tests of {file} pass?'),
    (
      _bash('unittest', 'python -m unittest {file}'),
      _bash('pytest', 'pytest -q {file}'),
      _bash('tox', 'tox -- {file}'),
    ),
  ),
  'test': Kind(
    ('run the test {symbol} of {file}', 'does the test {symbol} in {file} pass?'),
    (
      _bash('unittest', 'python -m unittest {file} -k {symbol}'),
      _bash('pytest', 'pytest -q {file} -k {symbol}'),
      _bash('tox', 'tox -- {file} -k {symbol}'),
    ),
  ),
  'install': Kind(
    ('install {package}', 'we need {package}', 'add the package {package}'),
    (
      _bash('pip', 'pip install {package}'),
      _bash('uv', 'uv pip install {package}'),
      _bash('conda', 'conda install {package}'),
      _bash('poetry', 'poetry add {package}'),
    ),
  ),
  'uninstall': Kind(
    ('uninstall {package}', 'we do not need {package}', 'remove the package {package}'),
    (
      _bash('pip', 'pip uninstall {package}'),
      _bash('uv', 'uv pip uninstall {package}'),
      _bash('conda', 'conda remove {package}'),
      _bash('poetry', 'poetry remove {package}'),
    ),
  ),
  'version': Kind(
    ('which version of {package} do we have?', 'tell me about the package {package}'),
    (_bash('pip', 'pip show {package}'), _bash('uv', 'uv pip show {package}'), _bash('conda', 'conda list {package}')),
  ),
  'run': Kind(
    ('run {file}', 'start {file}', 'what does {file} print?'),
    (_bash('python', 'python {file}'), _bash('uv', 'uv run {file}'), _bash('pypy', 'pypy {file}')),
  ),
  'profile': Kind(
    ('how fast is {file}?', 'profile {file}'),
    (
      _bash('python', 'python -m cProfile {file}'),
      _bash('uv', 'uv run -m cProfile {file}'),
      _bash('pypy', 'pypy -m cProfile {file}'),
    ),
  ),
  'delete': Kind(
    ('delete {file}', 'throw {file} away', 'we do not need the file {file}'),
    (_bash('rm', 'rm {file}'), _bash('git', 'git rm {file}'), _bash('trash', 'trash {file}')),
  ),
  'clear': Kind(
    ('delete the folder {folder}', 'throw all of {folder} away'),
    (_bash('rm', 'rm -r {folder}'), _bash('git', 'git rm -r {folder}'), _bash('trash', 'trash {folder}')),
  ),
  'move': Kind(
    ('move {file} to {folder}', 'put {file} into {folder}'),
    (_bash('mv', 'mv {file} {folder}'), _bash('git', 'git mv {file} {folder}')),
  ),
  'format': Kind(
    ('format {file}', 'make {file} pretty', 'tidy up {file}'),
    (_bash('black', 'black {file}'), _bash('ruff', 'ruff format {file}'), _bash('yapf', 'yapf -i {file}')),
  ),
  'lint': Kind(
    ('check the style of {file}', 'lint {file}'),
    (_bash('flake8', 'flake8 {file}'), _bash('ruff', 'ruff check {file}'), _bash('pylint', 'pylint {file}')),
  ),
  'imports': Kind(
    ('sort the imports of {file}', 'put the imports of {file} in order'),
    (_bash('isort', 'isort {file}'), _bash('ruff', 'ruff check --select I --fix {file}')),
  ),
  'types': Kind(
    ('check the types in {file}', 'are the types in {file} right?'),
    (_bash('mypy', 'mypy {file}'), _bash('pyright', 'pyright {file}')),
  ),
  'switch': Kind(
    ('switch to the branch {branch}', 'go to the branch {branch}'),
    (_bash('git checkout', 'git checkout {branch}'), _bash('git switch', 'git switch {branch}')),
  ),
  'branch': Kind(
    ('make the branch {branch}', 'begin a branch {branch}'),
    (_bash('git checkout', 'git checkout -b {branch}'), _bash('git switch', 'git switch -c {branch}')),
  ),
  'undo': Kind(
    ('undo the changes in {file}', 'take back what changed in {file}'),
    (
      _bash('git checkout', 'git checkout -- {file}'),
      _bash('git restore', 'git restore {file}'),
      _bash('git stash', 'git stash push {file}'),
    ),
  ),
  'changes': Kind(('what changed in {file}?', 'show the changes in {file}'), (_bash('git diff', 'git diff {file}'),)),
  'author': Kind(
    ('who wrote {file}?', 'who changed {file}?'),
    (_bash('git blame', 'git blame {file}'), _bash('git log', 'git log {file}')),
  ),
  'commit': Kind(('commit {file}', 'commit the changes in {file}'), (_bash('git commit', 'git commit {file}'),)),
  'length': Kind(('how many lines has {file}?', 'count the lines of {file}'), (_bash('wc', 'wc -l {file}'),)),
  'size': Kind(
    ('how large is {folder}?', 'what is the size of {folder}?'),
    (_bash('du', 'du -sh {folder}'), _bash('dust', 'dust {folder}')),
  ),
  'copy': Kind(
    ('copy {file} to {folder}', 'put a copy of {file} into {folder}'),
    (_bash('cp', 'cp {file} {folder}'), _bash('rsync', 'rsync {file} {folder}')),
  ),
  'folder': Kind(('make the folder {folder}', 'create a folder {folder}'), (_bash('mkdir', 'mkdir -p {folder}'),)),
  'script': Kind(('make {file} executable', 'let me run {file} as a program'), (_bash('chmod', 'chmod +x {file}'),)),
  'image': Kind(
    ('build the image {branch}', 'make an image {branch}'),
    (_bash('docker', 'docker build -t {branch} .'), _bash('podman', 'podman build -t {branch} .')),
  ),
  'container': Kind(
    ('run the image {branch}', 'start the image {branch}'),
    (_bash('docker', 'docker run {branch}'), _bash('podman', 'podman run {branch}')),
  ),
}

# What the scripted user of benchmarks/session_learning.py wants, by kind of task: never the favourite.
PREFERENCES = {
  'find': 'rg',
  'drop': 'the edit tool',
  'list': 'fd',
  'show': 'the read tool',
  'tests': 'pytest',
  'install': 'uv',
  'run': 'uv',
  'delete': 'git',
  'format': 'ruff',
  'switch': 'git switch',
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
  """Return a random task of a kind."""
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
