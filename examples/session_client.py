"""A coding agent whose proposals are denied with a reason: the adapter learns it, and the next proposal is better.

  python -m launch.serve --config=configs/session_quickstart.py    # In one terminal.
  python examples/session_client.py                                # In another one.

Deny, train, sample again, as continual-coding sessions do it, in plain requests. A scripted person stands in for a real
one, and no tool is run. If the service has keys (`serve.http.keys`), put yours into the environment variable
SDPO_API_KEY.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import os
import secrets
import sys
from typing import Any

import httpx2

BASH = {
  'type': 'function',
  'function': {
    'name': 'bash',
    'description': 'Runs a command in the workspace.',
    'parameters': {'type': 'object', 'properties': {'command': {'type': 'string'}}, 'required': ['command']},
  },
}
TASKS = ('find where total is used in src', 'which files in docs mention price?', 'where is retry used in tests?')
DENIALS = 4  # Denials of one task after which the person gives up.


def objection(turn: dict[str, Any]) -> str | None:
  """Return the scripted person's objection to a proposal; None if there is none."""
  commands = [str(call['arguments'].get('command', '')) for call in turn['calls'] if call['name'] == 'bash']
  if turn['fault'] or not commands:
    return turn['fault'] or 'call bash, which runs a command'
  return 'use rg rather than grep -r' if any(command.startswith('grep') for command in commands) else None


class Session:
  """A session of an adapter, with its address and its token."""

  def __init__(self, client: httpx2.Client, adapter: str, **settings: Any):
    self._client, self._headers = client, {}
    opened = self._send(f'/v1/continual/adapters/{adapter}/sessions', settings)
    self._path = f'/v1/continual/adapters/{adapter}/sessions/{opened["session"]["id"]}'
    self._headers = {'X-Session-Token': opened['token']}  # Sent only once; required to approve anything.

  def _send(self, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = self._client.post(path, json=body, headers={**self._headers, **headers})
    if answer.is_error:
      sys.exit(f'POST {path}: {answer.json()["error"]["message"]}')
    return answer.json()

  def propose(self, *texts: str) -> dict[str, Any]:
    """Return the next proposal, after messages of the user, or in place of a denied one."""
    messages = [{'role': 'user', 'content': text} for text in texts]
    return self._send(f'{self._path}/turns', {'messages': messages})['turn']

  def decide(self, turn: dict[str, Any], **decision: Any) -> dict[str, Any] | None:
    """Return what was learned from a decision, or None. With the key, a request sent twice is learned once."""
    key = secrets.token_hex(8)
    path = f'{self._path}/turns/{turn["n"]}/decision'
    return self._send(path, decision, **{'Idempotency-Key': key})['learned']

  def report(self, turn: dict[str, Any], text: str) -> None:
    """Report the results of a proposal's calls."""
    results = [{'call': number, 'ok': True, 'text': text} for number in range(len(turn['calls']))]
    self._send(f'{self._path}/turns/{turn["n"]}/results', {'results': results})


def shown(turn: dict[str, Any]) -> str:
  """Format a proposal in one line."""
  calls = [f'{call["name"]} {" ".join(map(str, call["arguments"].values()))}' for call in turn['calls']]
  return f'version {turn["version"]}: ' + ('; '.join(calls) or repr(turn['text']))


def main(url: str, key: str | None = None, tools: Sequence[dict[str, Any]] = (BASH,), tasks: Sequence[str] = TASKS):
  """Hold a session for every task with one adapter of the service at an address."""
  headers = {'Authorization': f'Bearer {key}'} if key else {}
  with httpx2.Client(base_url=url, headers=headers, timeout=300) as client:
    try:
      made = client.post('/v1/continual/adapters', json={'name': f'agent-{secrets.token_hex(3)}'})
    except httpx2.ConnectError:
      sys.exit(f'Nobody listens on {url}: start the service (see --help), or name another --url.')
    if made.is_error:
      sys.exit(made.json()['error']['message'])
    for task in tasks:
      session = Session(client, made.json()['id'], tools=list(tools), title=task)
      print(f'> {task}')
      turn = session.propose(task)
      print(shown(turn))
      for _ in range(DENIALS):
        why = objection(turn)
        if why is None:
          session.decide(turn, decision='approve')
          session.report(turn, 'done')
          print('  yes')
          break
        learned = session.decide(turn, decision='deny', correction=why)
        print(f'  no: {why}')
        if learned['accepted']:
          before, after = learned['divergence_before'], learned['divergence_after']
          print(f'  learned: divergence {before:.3f} -> {after:.3f} in {learned["seconds"]:.2f} s')
        else:
          print(f'  not learned: {learned["reason"]}')
        turn = session.propose()  # Another answer to the same question, by the new version.
        print(shown(turn))


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--url', default='http://127.0.0.1:8420', help='address of the service')
  arguments = parser.parse_args()
  main(arguments.url, os.environ.get('SDPO_API_KEY'))
