"""Review of calls: the person approves, edits or denies them, and they are checked again before they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
from typing import Any

from sdpo_jax.environments.workspace.tools import BadCall, ToolAnswer
from sdpo_jax.errors import UserError, first_line
from sdpo_jax.terminal.calls import Proposed, described, look, output_of
from sdpo_jax.terminal.escaping import visible
from sdpo_jax.terminal.inputs import COMMAND, Choice, EditorFailed, Leave
from sdpo_jax.terminal.policies import make_rule, suggestion
from sdpo_jax.terminal.screen import Line
from sdpo_jax.terminal.session_context import SessionContext

_APPROVE = {'y': 'approve', 'a': 'always allow', 'n': 'deny', 'e': 'edit', 't': 'tell the model'}
_REFUSED = {'n': 'deny', 'e': 'edit', 't': 'tell the model'}
_AGAIN = {'y': 'run it', 's': 'leave it out'}
_LAST = {'q': 'quit'}
_PAGE = {'v': 'view the rest'}
_NEVER = 'The person never lets this be run.'
_NOT_NOW = 'The person has not let this be run:'  # And what they tell the model instead.


@dataclasses.dataclass(frozen=True)
class Reviewed:
  """The outcome of the review of a proposal."""

  decision: Mapping[str, Any]  # The decision as the service takes it.
  told: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)  # Calls not to run, and why.
  approved: Mapping[int, Proposed] = dataclasses.field(default_factory=dict)  # Calls as they were shown, by index.
  says: str | None = None  # A message to send to the model afterwards.


class Reviewer:
  """Shows calls, asks the person to approve, edit or deny them, and runs what was approved."""

  def __init__(self, context: SessionContext, command: Callable[[str], None]):
    self._workbench, self._policy, self._screen = context.workbench, context.policy, context.screen
    self._inputs, self._history, self._command = context.inputs, context.history, command

  def review(self, turn: Mapping[str, Any]) -> Reviewed:
    """Return the decision on a proposal, by the person or the policy; all its calls are reviewed before one runs.

    Raises:
      Leave: the person leaves the program; the proposal stays open.
    """
    if turn['fault'] is not None:
      return self._review_fault(turn)
    approved: dict[int, Proposed] = {}
    told: dict[str, Mapping[str, Any]] = {}
    edited: tuple[int, Mapping[str, Any]] | None = None
    count, changes = len(turn['calls']), False
    for index, call in enumerate(turn['calls']):
      head = f'Call {index + 1} of {count}:' if count > 1 else 'Proposed:'
      proposed = self._look(call['name'], call['arguments'])
      while True:
        # An edit teaches the whole answer, so that its other calls must be right.
        may_edit = not told and (edited is None or edited[0] == index)
        choice = self._judged(head, proposed, may_edit, edited is not None, changes)
        if choice is None or choice.key in ('y', 'a'):
          if choice is not None and choice.key == 'a' and not self._allowed(proposed, choice.rest):
            continue
          approved[index] = proposed
        elif choice.key == 'n':
          reason = choice.rest or self._inputs.line('Why? ')
          if not reason:
            self._screen.say('A denial needs a reason: the model learns from it.')
            continue
          return Reviewed({'decision': 'deny', 'correction': reason})
        elif choice.key == 'e':
          arguments = self._edited(proposed, choice.rest)
          if arguments is None:
            continue
          edited = index, arguments
          proposed = self._look(call['name'], arguments)
          if choice.rest is None or not proposed.can_run:
            continue
          self._screen.show(described(proposed))
          approved[index] = proposed
        else:
          why, text = proposed.wrong or BadCall(_NOT_NOW if proposed.can_run else _NEVER), choice.rest
          if proposed.can_run and not (text := text or self._inputs.line('What is the model to read? ')):
            self._screen.say('Nothing was told: the call is still open.')
            continue
          told[str(index)] = {'text': f'{why} {text or ""}'.strip(), 'field': why.field, 'line': why.line}
        break
      tool = self._workbench.toolbox.tools.get(call['name'])
      changes = changes or (str(index) not in told and tool is not None and tool.changes)
    if edited is not None:
      return Reviewed({'decision': 'edit', 'call': edited[0], 'arguments': edited[1]}, told, approved)
    return Reviewed({'decision': 'approve'}, told, approved)

  def result_of(
    self,
    number: int,
    index: int,
    call: Mapping[str, Any],
    told: Mapping[str, Any] | None,
    reviewed: Reviewed | None,
    begun: bool,
  ) -> dict[str, Any]:
    """Return the result of an approved call; if its effect is no longer the approved one, ask before running it.

    Args:
      number: the number of the turn.
      index: the index of the call.
      call: the name and the arguments of the call.
      told: why not to run the call; None: run it.
      reviewed: the review, if it was in this process; None: the call was approved in an earlier one.
      begun: whether an earlier process has started to run the call.
    """
    if told is not None:
      return _result(index, ToolAnswer(False, **told))
    approved = None if reviewed is None or begun else reviewed.approved.get(index)
    while True:
      now = self._look(call['name'], call['arguments'])
      if not now.can_run:
        wrong = now.wrong or BadCall(_NEVER)
        self._screen.say(f'Not run: {wrong}', 'wrong')
        return _result(index, ToolAnswer(False, str(wrong), field=wrong.field, line=wrong.line))
      if approved is not None and (now.same(approved) or now.verdict.verb == 'allow'):
        break
      if begun:
        why = 'The program ended while this was running: it may have run completely, or in part.'
        left = 'The program that ran this ended meanwhile; whether it has done its work is not known.'
      elif approved is None:
        why, left = 'This was approved, but the program ended before it ran.', 'The person has left this out.'
      else:
        why = 'The files have changed since this was approved; this is what it would do now:'
        left = 'The files had changed, and the person has left this out.'
      choice = self._ask([Line(why, 'wrong')], described(now), _AGAIN)
      if choice.key == 's':
        return _result(index, ToolAnswer(False, left))
      approved, begun = now, False
    saved = None if now.change is None else self._workbench.toolbox.checkpoint(*now.change)
    begin = functools.partial(self._history.add, 'running', n=number, call=index, saved=saved)
    answer = self._workbench.run(now.name, now.arguments, begin)
    self._screen.show(output_of(answer.ok, answer.text))
    return _result(index, answer)

  def _review_fault(self, turn: Mapping[str, Any]) -> Reviewed:
    """Review a proposal with an invalid call; no call runs, since the plan would be incomplete."""
    fault = turn['fault']
    lines = [line for call in turn['calls'] for line in described(self._look(call['name'], call['arguments']))]
    head = Line(f'The answer has an invalid call: {visible(fault, keep="")}', 'wrong')
    # Valid calls that stay in the conversation would need results.
    keys = {'n': 'deny'} if turn['calls'] else {'n': 'deny', 't': 'tell the model'}
    while True:
      choice = self._ask([head], lines, keys)
      if choice.key == 't':
        return Reviewed({'decision': 'approve'}, says=f'{fault} {choice.rest or ""}'.strip())
      reason = choice.rest or self._inputs.line('Why? ', fault)
      if reason:
        return Reviewed({'decision': 'deny', 'correction': reason})
      self._screen.say('A denial needs a reason: the model learns from it.')

  def _judged(self, head: str, proposed: Proposed, may_edit: bool, edited: bool, changes: bool) -> Choice | None:
    """Return the choice of the person on a call; None: a rule allows it.

    Args:
      head: a title that tells which call it is.
      proposed: the checked call.
      may_edit: whether the person may edit its arguments.
      edited: whether a call of this proposal was edited already.
      changes: whether an earlier call of this proposal changes files.
    """
    notes: list[Line] = []
    if proposed.wrong is not None:
      notes = [Line(f'Cannot run: {visible(str(proposed.wrong), keep="")}', 'wrong')]
    rule = visible(str(proposed.verdict), keep='')
    if proposed.verdict.verb == 'never':
      notes.append(Line(f'Refused by the rule: {rule}', 'wrong'))
      keys = _REFUSED
    elif proposed.wrong is None and proposed.verdict.verb == 'allow':
      self._screen.show([Line(head, 'note'), *described(proposed), Line(f'Allowed by the rule: {rule}', 'note')])
      return None
    elif proposed.wrong is None:
      keys = _APPROVE
    elif proposed.for_now and changes:
      notes.append(Line('An earlier call may change that; the call is shown again before it runs.', 'note'))
      keys = {name: meaning for name, meaning in _APPROVE.items() if name not in 'at'}
    else:
      keys = _REFUSED
    without = (() if may_edit else ('e',)) + (('t',) if edited else ())
    return self._ask(
      [Line(head, 'note')], [*described(proposed), *notes], {key: keys[key] for key in keys if key not in without}
    )

  def _ask(self, head: list[Line], lines: list[Line], keys: Mapping[str, str]) -> Choice:
    """Show a call, and return the choice of the person; approval is possible only after all lines were shown.

    Raises:
      Leave: the person leaves the program.
    """
    left = self._page(lines, head)
    while True:
      if left:
        self._screen.say(f'… {len(left)} more lines')
      self._history.sync()
      choice = self._inputs.choice({**keys, **(_PAGE if left else {}), **_LAST})
      if choice.key == 'q':
        raise Leave
      if choice.key == COMMAND:
        if choice.rest:
          self._command(choice.rest)
          left = self._page(lines, head)  # What the command has shown may have pushed it off the screen.
      elif choice.key == 'v' or (left and choice.key in 'ya'):
        left = self._page(left)
      else:
        return choice

  def _page(self, lines: list[Line], head: Sequence[Line] = ()) -> list[Line]:
    """Show the first page of lines, after a head, and return the others."""
    shown, left = self._screen.page_of(lines)
    self._screen.show([*head, *shown])
    return left

  def _allowed(self, proposed: Proposed, pattern: str | None) -> bool:
    """Add a rule that allows a call; return whether it was added."""
    default = suggestion(proposed.name, proposed.arguments, self._workbench.workspace)
    if visible(default, keep='') != default:  # It would not be shown as what it is.
      default = ''
    pattern = pattern or self._inputs.line(f'Always allow {proposed.name} with this pattern: ', default)
    try:
      rule = make_rule('allow', proposed.name, pattern, 'This rule', self._workbench.toolbox.tools)
      # If it is the call itself, the pattern is literal: `rm *.pyc` must not allow `rm -r src a.pyc`.
      rule = dataclasses.replace(rule, exact=pattern == default)
    except UserError as error:
      self._screen.say(str(error), 'wrong')
      return False
    self._policy.added.append(rule)
    if self._look(proposed.name, proposed.arguments).verdict.verb != 'allow':
      self._policy.added.remove(rule)
      self._screen.say(f'{rule} does not match this call, or another rule precedes it: approve it with y.', 'wrong')
      return False
    self._screen.say(f'From now on: {rule}')
    return True

  def _edited(self, proposed: Proposed, text: str | None) -> Mapping[str, Any] | None:
    """Return new arguments of a call; None: they are unchanged or invalid.

    Args:
      proposed: the call; the command of one that runs a command is edited as it stands, other arguments as JSON.
      text: the arguments as JSON, if they were entered with the key.
    """
    command = proposed.arguments['command'] if proposed.name == 'bash' and proposed.wrong is None else ''
    if text is not None or command.endswith('\n') or not all(map(_is_plain, command)):
      command = ''
    written = command or json.dumps(proposed.arguments, ensure_ascii=False, indent=2)
    # In JSON, characters that elsewhere are shown by name have escapes.
    before = ''.join(letter if _is_plain(letter) else json.dumps(letter)[1:-1] for letter in written)
    while True:
      try:
        typed = self._inputs.edited(before, 'sh' if command else 'json') if text is None else text
      except EditorFailed as error:
        self._screen.say(str(error), 'wrong')
        return None
      given = typed or written  # An empty text leaves it as it was.
      try:
        changed = {**proposed.arguments, 'command': given.rstrip('\n')} if command else {**json.loads(given)}
      except (ValueError, TypeError, RecursionError) as error:
        self._screen.say(f'The arguments are not a JSON object ({first_line(error)}): nothing was changed.', 'wrong')
        if text is not None or self._inputs.line('Enter goes on editing, any text leaves the call as it was: '):
          return None
        before = typed
        continue
      if changed != proposed.arguments:
        return changed
      self._screen.say('The arguments are unchanged.')
      return None

  def _look(self, name: str, arguments: Any) -> Proposed:
    return look(name, arguments, self._workbench.toolbox, self._policy, self._workbench.workspace)


def _is_plain(letter: str) -> bool:
  """Return whether a letter of a text that is edited is what it looks like."""
  return letter in '\n⟨⟩' or visible(letter) == letter


def _result(index: int, answer: ToolAnswer) -> dict[str, Any]:
  """Return an answer of a tool as the service takes results."""
  values = {name: getattr(answer, name) for name in ('ok', 'text', 'exit_code', 'field', 'line')}
  for name in ('text', 'field'):  # They may quote names of files that are not valid text.
    values[name] = values[name] and values[name].encode(errors='backslashreplace').decode()
  return {'call': index, 'stderr': None, **values}
