"""Runs one program on one test, in the clean or the reference profile, inside the sandbox.

This file is loaded on its own, without the rest of the package, in a process that then runs model-written code. The
grader outside treats the result as untrusted data: expected outputs are not available here, so a program that forges a
report must forge the right output.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import collections
import contextlib
import io
import json
import linecache
import math
import pickle
import sys
import traceback
import types
import typing

FILE = 'Solution.py'  # The program's file name in error messages.
FRAMES = 3  # Number of the program's innermost frames that an error message shows.
ERROR = 'Error: '  # As in code_feedback.py.
# Parts of a text that the grader keeps: its first characters are shown, the end of its repr() names an answer.
FIRST_CHARACTERS, LAST_CHARACTERS = 4000, 5000
DEBUG_LINES, DEBUG_CHARACTERS = 10, 301  # Limits of standard error in feedback, plus one character.

# lasgroup/SDPO verl/utils/reward_score/feedback/code.py:74-169: all names that a program has there.
REFERENCE_BUILTINS = (
  'abs all any bool bytes callable chr dict enumerate filter float format frozenset hash hex int isinstance issubclass '
  'iter len list map max min next object ord pow print range repr reversed round set slice sorted str sum tuple zip '
  'input'
).split()
REFERENCE_MODULES = frozenset(
  'math cmath itertools functools operator statistics random collections heapq bisect array string re typing json io '
  'fractions decimal dataclasses datetime time sys sortedcontainers numpy'.split()
)
REFERENCE_TYPING = (
  'Any Optional Union List Dict Set Tuple Callable Iterable Iterator Sequence Mapping MutableMapping MutableSequence '
  'MutableSet DefaultDict Deque FrozenSet Type TypeVar Generic Literal TypedDict NoReturn overload'
).split()
UNSEEN = (StopIteration, StopAsyncIteration)  # Exceptions that Python itself catches.
EFFECTS = '<effects>'  # A name that no program can write.
# Standard-library types that hold plain data, just like their base classes.
STANDARD = (collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque)
TYPING = {name: getattr(typing, name) for name in typing.__all__}


class NotPlain(TypeError):
  """A function returned something that is not plain data."""


def run(payload: dict) -> dict:
  """Run `payload['code']` on one test.

  Args:
    payload: profile ('clean' or 'reference'), testtype ('functional', 'stdin', 'code'; clean also 'replay' and
      'operations', see code_replay.py), code, input, fn_name, context (code that runs first).

  Returns:
    'error': the exception, in the reference's layout; or the output: 'output' and 'repr', cut to what can be shown;
      'characters', the full length; 'mentions', whether it is a text about an error; and, last, 'whole', which is
      compared and may be long. In the reference profile also 'debug' and 'debug_lines', the program's standard error.
  """
  profile, kind = payload['profile'], payload['testtype']
  if profile == 'reference':
    return _reference(payload, kind)
  if kind == 'stdin':
    return _caught(lambda: _script(payload))
  module = sys.modules['solution'] = types.ModuleType('solution')  # Dataclasses look up their module.
  namespace = vars(module)
  namespace.update(TYPING, math=math, collections=collections, __builtins__=builtins)
  return _caught(lambda: _replay(payload, namespace) if kind == 'replay' else _clean(payload, kind, namespace))


def _clean(payload: dict, kind: str, namespace: dict) -> dict:
  _execute(payload.get('context') or '', 'context', namespace)
  _execute(payload['code'], FILE, namespace)
  if kind == 'functional':
    function = _find(namespace, payload['fn_name'])
    value = payload['input']
    result = function(**value) if isinstance(value, dict) else function(*_json_values(value))
    whole = json.dumps(result, default=_array)
    return {**_shown(str(result), repr(result)), 'whole': whole}
  if kind == 'operations':
    return _operate(payload['operations'], namespace)
  raise ValueError(f'Invalid test type: {kind}')


def _as_data(value: object) -> object:
  """Convert NumPy scalars, also inside containers, to built-in types; the result is checked outside the sandbox."""
  if isinstance(value, dict):
    return {_as_data(key): _as_data(item) for key, item in value.items()}
  if isinstance(value, tuple):
    return tuple(map(_as_data, value))
  if isinstance(value, list):
    return list(map(_as_data, value))
  module = type(value).__module__
  return value.item() if module == 'numpy' and hasattr(value, 'dtype') and not getattr(value, 'ndim', 1) else value


def _script(payload: dict) -> dict:
  """Run a whole program between the real standard input and output."""
  module = types.ModuleType('__main__')
  sys.modules['__main__'] = module
  try:
    _execute(payload.get('context') or '', 'context', vars(module))
    _execute(payload['code'], FILE, vars(module))
  except SystemExit as error:
    if error.code not in (None, 0):
      raise
  sys.stdout.flush()
  return {}


def _execute(source: str, name: str, namespace: dict) -> None:
  # For error messages that quote the line; the tests' own source is not available here.
  if name == FILE:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
  exec(compile(source, name, 'exec'), namespace)


def _find(namespace: dict, name: str) -> typing.Callable:
  """Return the function of that name: of the program, its class Solution, or else the only class that has it."""
  if callable(namespace.get(name)):
    return namespace[name]
  classes = [value for value in namespace.values() if isinstance(value, type) and callable(vars(value).get(name))]
  for value in sorted(classes, key=lambda value: value.__name__ != 'Solution'):
    return getattr(value(), name)
  raise NameError(f'there is no function {name!r}')


def _json_values(text: str) -> list:
  """Return the JSON values that follow one another in a text."""
  decoder, values, position = json.JSONDecoder(), [], 0
  while True:
    while position < len(text) and text[position].isspace():
      position += 1
    if position == len(text):
      return values
    value, position = decoder.raw_decode(text, position)
    values.append(value)


def _array(value: object) -> object:
  if hasattr(value, 'tolist'):
    return value.tolist()
  raise TypeError(f'{type(value).__name__} is not data that JSON can hold')


def _check_plain(value: object) -> None:
  kind = type(value)
  if kind in STANDARD:
    value, kind = (dict(value), dict) if issubclass(kind, dict) else (list(value), list)
  if value is None or kind in (bool, int, float, complex, str, bytes):
    return
  if kind in (list, tuple, set, frozenset):
    for item in value:
      _check_plain(item)
  elif kind is dict:
    for item in (*value.keys(), *value.values()):
      _check_plain(item)
  else:
    raise NotPlain(f'an object of type {kind.__name__} is not plain data')


def _literal(value: object) -> str:
  """Return the literal of plain data that `ast.literal_eval` reads; raises NotPlain for anything else."""
  value = set(value) if isinstance(value, frozenset) else _as_data(value)
  _check_plain(value)
  return repr(value)


def _read_literal(text: str) -> object:
  """Read a literal that `_literal` wrote; never executes the untrusted text.

  Extends `ast.literal_eval` by the numbers that have no literal.
  """
  return _node_value(ast.parse(text, mode='eval').body)


def _node_value(node: ast.expr) -> object:
  kinds = {ast.Tuple: tuple, ast.List: list, ast.Set: set}
  if type(node) in kinds:
    return kinds[type(node)](map(_node_value, node.elts))
  if isinstance(node, ast.Dict):
    return dict(zip(map(_node_value, node.keys), map(_node_value, node.values), strict=True))
  if isinstance(node, ast.Name) and node.id in ('nan', 'inf'):
    return float(node.id)
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Name):
    return -float(_node_value(node.operand))
  return ast.literal_eval(node)


# ———— Test programs, which run apart from the program under test: code_replay.py ————


def _operate(operations: list, namespace: dict) -> dict:
  """Repeat all operations, of which the earlier ones make and change objects, and return the answer to the last one."""
  results: list[object] = []
  for number, operation in enumerate(operations, 1):
    try:
      holder = results[operation['object']] if 'object' in operation else None
      name = operation['name']
      if operation['do'] == 'truth':
        found = bool(holder)
      else:
        found = getattr(holder, name) if 'object' in operation else _find(namespace, name)
      if operation['do'] in ('attribute', 'truth'):
        value, arguments = found, None
        if callable(found):
          return {'method': True}
      else:
        arguments, options = (_read_literal(operation[part]) for part in ('arguments', 'options'))
        before = repr(arguments)
        value = found(*arguments, **options)
    except BaseException as error:
      if number < len(operations):
        results.append(None)
        continue
      described = _describe(error, quoted=True)
      return {'raised': type(error).__name__, 'message': _limited(str(error)), 'error': described}
    results.append(value)
  answer = {} if arguments is None or repr(arguments) == before else {'arguments': _literal(arguments)}
  try:
    return answer | {'repr': _literal(value)}
  except NotPlain:
    return answer | {'object': True}


class _Unanswered(BaseException):
  """Ends a test that calls the program in a new way; no `except Exception` of the test catches it."""


def _replay(payload: dict, namespace: dict) -> dict:
  """Run a test with stand-ins for all names that are neither the test's own nor built in."""
  tree = ast.fix_missing_locations(_MarkStatements().visit(ast.parse(payload['test'])))
  names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
  _execute(payload.get('context') or '', 'context', namespace)
  known = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | set(namespace) | set(dir(builtins))
  talk = _Talk(payload['answers'], in_place=payload['in_place'])
  for name in {node.id for node in names} - known - {EFFECTS}:
    namespace[name] = talk.function({'name': name})
  namespace[EFFECTS] = lambda found: getattr(found, 'with_effects', found)
  try:
    exec(compile(tree, 'test', 'exec'), namespace)
  except BaseException as error:
    if talk.need is None:
      described = getattr(error, 'described', None)
      return {'error': described or _describe(error, quoted=False), 'called': '' if described else talk.last[:1000]}
  return {'finished': True} if talk.need is None else {'need': talk.need}


class _MarkStatements(ast.NodeTransformer):
  """Turns `f(xs)` into `EFFECTS(f)(xs)` if the call is a statement, made for its effect on its arguments."""

  def visit_Expr(self, node: ast.Expr) -> ast.Expr:
    self.generic_visit(node)
    if isinstance(node.value, ast.Call):
      mark = ast.Call(ast.Name(EFFECTS, ast.Load()), [node.value.func], [])
      node.value.func = ast.copy_location(mark, node.value.func)
    return node


class _Talk:
  """Answers the calls that a test makes to the program, as far as the answers are known."""

  def __init__(self, answers: dict, *, in_place: bool):
    self.answers, self.in_place = answers, in_place
    self.done: list[dict] = []  # Operations that made or used objects, in order.
    self.need: list[dict] | None = None
    self.last = ''

  def function(self, target: dict) -> typing.Callable:
    """Return a stand-in that leaves its arguments alone; its `with_effects` changes them as the program does.

    A program could otherwise empty the list from which the test makes the expected value after the call, as in
    `assert f(xs) == sorted(xs)`.
    """

    def stand_in(*arguments, **options):
      return self.call(target, arguments, options, effects=self.in_place)

    stand_in.with_effects = lambda *arguments, **options: self.call(target, arguments, options, effects=True)
    return stand_in

  def call(self, target: dict, arguments: tuple, options: dict, *, effects: bool) -> object:
    operation = target | {'do': 'call', 'arguments': _literal(arguments), 'options': _literal(options)}
    answer = self.ask(operation)
    changed = _read_literal(answer['arguments']) if effects and 'arguments' in answer else ()
    for given, after in zip(arguments, changed, strict=False):
      if isinstance(given, list) and isinstance(after, list):
        given[:] = after  # The program changed its arguments.
      elif isinstance(given, dict | set) and isinstance(after, type(given)):
        given.clear()
        given.update(after)
    value = self.value(operation, answer)
    shown = ', '.join([*map(repr, arguments), *(f'{name}={option!r}' for name, option in options.items())])
    self.last = f'{target["name"]}({shown}) gave {answer.get("repr", "an object")}'
    return value

  def ask(self, operation: dict) -> dict:
    needed = [*self.done, operation] if 'object' in operation else [operation]
    key = json.dumps(needed, sort_keys=True)
    if key not in self.answers:
      self.need = self.need or needed
      raise _Unanswered
    answer = self.answers[key]
    if 'raised' in answer:
      if 'object' in operation:
        self.done.append(operation)  # It may still have changed the object.
      error = _raised(answer['raised'], answer.get('message', ''))
      error.described = answer.get('error')
      raise error
    return answer

  def value(self, operation: dict, answer: dict) -> object:
    made = 'repr' not in answer
    if made or 'object' in operation:
      # Recorded for later uses of the object, which replay all operations before them.
      self.done.append(operation)
    return _Object(self, len(self.done) - 1) if made else _read_literal(answer['repr'])


def _raised(name: str, message: str) -> Exception:
  """Return the exception that a test sees for the program's: the built-in one of that name, else RuntimeError.

  The end of an iteration is RuntimeError as well: otherwise `all(map(f, xs))` would be true.
  """
  kind = getattr(builtins, name, None)
  if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UNSEEN):
    try:
      return kind(message)
    except TypeError:  # Its constructor needs more than a message.
      pass
  return RuntimeError(f'{name}: {message}')


class _Object:
  """Stands for an object that stays in the program's process; equal only to itself."""

  def __init__(self, talk: _Talk, place: int):
    self._talk, self._place = talk, place

  def __getattr__(self, name: str) -> object:
    target = {'object': self._place, 'name': name}
    operation = target | {'do': 'attribute'}
    answer = self._talk.ask(operation)
    if 'method' in answer:
      return self._talk.function(target)
    return self._talk.value(operation, answer)

  def __bool__(self) -> bool:  # Otherwise Python asks for a length, which nodes of a list or a tree lack.
    operation = {'object': self._place, 'name': '__bool__', 'do': 'truth'}
    return bool(self._talk.value(operation, self._talk.ask(operation)))

  def __len__(self) -> int:
    return self.__getattr__('__len__')()

  def __getitem__(self, key: object) -> object:
    return self.__getattr__('__getitem__')(key)

  def __contains__(self, item: object) -> bool:
    return self.__getattr__('__contains__')(item)


def _shown(text: str, spelling: str, *, is_output: bool = False) -> dict:
  """Return the parts of a text that can be shown, of bounded size; `is_output`: the text was printed."""
  mentions = ERROR in text and (is_output or text.startswith(ERROR) or spelling[:1] in ('"', "'"))
  characters, text, spelling = len(text), text[:FIRST_CHARACTERS], spelling[-LAST_CHARACTERS:]
  return {'output': text, 'characters': characters, 'mentions': mentions, 'repr': spelling}


def _limited(text: str) -> str:
  """Cut the middle out of a long text."""
  whole = len(text) <= FIRST_CHARACTERS + LAST_CHARACTERS
  return text if whole else text[:FIRST_CHARACTERS] + text[-LAST_CHARACTERS:]


def _caught(call: typing.Callable[[], dict]) -> dict:
  try:
    return call()
  except BaseException as error:  # Includes SystemExit and KeyboardInterrupt: the program may raise anything.
    return {'error': _describe(error, quoted=True)}


def _describe(error: BaseException, *, quoted: bool) -> str:
  """Format 'Type: message' and the program's innermost frames, with the last one's source line if `quoted`."""
  try:
    message = str(error)
  except BaseException as second:
    message = f'<{type(second).__name__} in its message>'
  lines = [f'{type(error).__name__}: {message}']
  frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == FILE]
  for frame, line in frames[-FRAMES:]:
    source = linecache.getline(FILE, line).strip() if quoted and (frame, line) == frames[-1] else ''
    lines += [f'  {source}'] * bool(source) + [f'Line {line} in {frame.f_code.co_name} ({FILE})']
  return _limited('\n'.join(lines))


# ———— The reference profile ————


def _reference(payload: dict, kind: str) -> dict:
  out, debug = io.StringIO(), io.StringIO()
  namespace = _reference_namespace(debug)
  if payload['context'].strip():
    try:
      with contextlib.redirect_stdout(io.StringIO()):
        _compiled_in(payload['context'], 'Context.py', namespace)
    except BaseException:  # There the process dies, and its parent reads nothing.
      return {}
  try:
    # As the reference's reliability_guard leaves it; namedtuple needs it on Python 3.11.
    sys._getframe = None  # noqa: SLF001
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(debug):
      said = _reference_run(payload, kind, namespace, out)
  except BaseException as error:
    said = {'error': _describe(error, quoted=False)}
  lines = debug.getvalue().strip().split('\n')
  first = '\n'.join(line[:DEBUG_CHARACTERS] for line in lines[:DEBUG_LINES])
  return {'debug': first, 'debug_lines': len(lines), **said}


def _reference_run(payload: dict, kind: str, namespace: dict, out: io.StringIO) -> dict:
  code = payload['code']
  if kind == 'stdin':
    sys.stdin = io.StringIO(payload['input'])
    # The reference puts a line before the program, which shifts the line numbers in error messages by one.
    _compiled_in('__name__ = "__main__"\n' + code, FILE, namespace)
    text = out.getvalue().strip()
    return {**_shown(text, repr(text), is_output=True), 'whole': text}
  if kind not in ('functional', 'code'):
    raise ValueError(f'Invalid test type: {kind}')
  if kind == 'code':
    namespace['__name__'] = '__main__'
    _compiled_in(code, FILE, namespace)
    _compiled_in(payload['input'], 'Tests.py', namespace)
    return _shown('All tests pass', repr('All tests pass'))
  _compiled_in(code, FILE, namespace, flags=__future__.annotations.compiler_flag)
  name, value = _reference_name(code, payload['fn_name'], namespace), payload['input']
  arguments = value if isinstance(value, dict) else [json.loads(word) for word in value.split()]
  result = namespace[name](**arguments) if isinstance(arguments, dict) else namespace[name](*arguments)
  try:
    text = json.dumps(_reference_data(result), sort_keys=True)
  except Exception as error:
    return {'error': _limited(str(error))}
  answer = _shown(str(result), repr(result))
  try:
    pickle.dumps(result)
  except Exception:  # There the result cannot be sent to the parent.
    answer['unsent'] = 'true'
  return {**answer, 'whole': text}


def _compiled_in(source: str, name: str, namespace: dict, flags: int = 0) -> None:
  exec(compile(source, name, 'exec', flags=flags, dont_inherit=True), namespace)


def _reference_name(code: str, name: str | None, namespace: dict) -> str:
  """Return the name of the function to call: `name`, else the first function, or the word before a bracket."""
  if name and callable(namespace.get(name)):
    return name
  defined = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
  if name in defined:
    defined = [name]
  if defined and callable(namespace.get(defined[0])):
    return defined[0]
  return code.split('(')[0].split()[-1]


def _reference_data(value: object) -> object:
  """Return the value as the reference compares it, with all keys as strings."""
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if isinstance(value, list | tuple):
    return [_reference_data(item) for item in value]
  if isinstance(value, dict):
    return {str(key): _reference_data(item) for key, item in value.items()}
  raise TypeError(f'Non-serializable result type: {type(value).__name__}')


def _reference_namespace(debug: io.StringIO) -> dict:
  real_import = builtins.__import__

  def limited_import(name, globals=None, locals=None, fromlist=(), level=0):
    if name.split('.')[0] not in REFERENCE_MODULES:
      raise ImportError(f"Import of module '{name}' is not allowed")
    return real_import(name, globals, locals, fromlist, level)

  allowed = {name: getattr(builtins, name) for name in REFERENCE_BUILTINS}
  allowed |= {'open': None, '__import__': limited_import, '__build_class__': builtins.__build_class__}
  return {
    '__builtins__': allowed,
    '__name__': '__not_main__',
    'debug_print': lambda *values, **options: print(*values, **{**options, 'file': debug}),
    **{name: TYPING[name] for name in REFERENCE_TYPING if name in TYPING},
  }
