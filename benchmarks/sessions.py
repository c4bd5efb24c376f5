"""From "no" to the next proposal: seconds between sending a denial and the new version's first token.

    python -m benchmarks.sessions [--denials=100] [--config=configs/session_quickstart.py] [--url=URL]

A server is started as users start it, with its own root, unless `--url` names a running one. One client opens a session
for every fourth denial, lets the adapter propose, denies the proposal with a correction, and streams the next one. One
JSON line, milliseconds as the median and the 95th percentile: `denial_to_first_token_ms`, and its parts `decision_ms`,
from the denial to the answer that says what was learned, and `first_token_ms`, from the next request to its first
draft; `server_cpu_ms`, the server's mean CPU time until the next proposal was complete; `learned`, the fraction of
denials that made a version; `reused_tokens`, the fraction of prompt tokens that were not computed again; and for
comparison `feedback_ms`, a bare feedback with the same words on a completion of the same request.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import httpx2

from benchmarks.serve import cpu_seconds, percentiles, server

CORRECTION = 'use rg rather than grep -r'
NAMES = 'total price retry cursor weight counter encode merge'.split()
FOLDERS = 'src lib tests docs'.split()
PER_SESSION = 4  # Denials of one session.
WARM_UP = 5  # Denials before the measured ones.
BASH = {
  'type': 'function',
  'function': {
    'name': 'bash',
    'description': 'Runs a command in the workspace.',
    'parameters': {'type': 'object', 'properties': {'command': {'type': 'string'}}, 'required': ['command']},
  },
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--denials', type=int, default=100)
  parser.add_argument('--config', default='configs/session_quickstart.py', help='what the server serves')
  parser.add_argument('--tools', type=int, choices=(0, 1), default=1, help='0: the model knows no tools')
  parser.add_argument('--url', help='of a service that runs')
  args = parser.parse_args()
  with server(args.url, config=args.config) as (url, process), httpx2.Client(base_url=url, timeout=120.0) as client:
    print(json.dumps({'sessions': measure(client, args.denials, [BASH] if args.tools else [], process)}), flush=True)


def measure(client: httpx2.Client, denials: int, tools: list[Any], process: int | None = None) -> dict[str, Any]:
  """Return the numbers to print; without the server's CPU time if its process is not ours."""
  adapter = '/v1/continual/adapters/' + post(client, '/v1/continual/adapters', {'name': f'denied-{os.getpid()}'})['id']
  decided, first, reused, bare, spent, learned = [], [], [], [], [], 0
  session: Session | None = None
  for number in range(denials + WARM_UP):
    if number % PER_SESSION == 0:
      session = Session(client, adapter, tools)
      ask = f'find where {NAMES[number % len(NAMES)]} is used in {FOLDERS[number % len(FOLDERS)]}'
      turn, _ = session.propose(ask)
    used, began = cpu_seconds(process), time.perf_counter()
    learned += session.deny(turn)
    answered = time.perf_counter()
    turn, drafted = session.propose()
    spent.append(0.0 if used is None else cpu_seconds(process) - used)
    decided.append(answered - began)
    first.append(drafted - answered)
    reused.append(turn['reused_tokens'] / len(turn['prompt_tokens']))
    bare.append(feedback(client, adapter, ask))
  whole = [one + other for one, other in zip(decided, first, strict=True)]
  return {
    'denials': denials,
    'learned': round(learned / (denials + WARM_UP), 3),
    'denial_to_first_token_ms': percentiles(whole[WARM_UP:]),
    'decision_ms': percentiles(decided[WARM_UP:]),
    'first_token_ms': percentiles(first[WARM_UP:]),
    'server_cpu_ms': None if process is None else round(1000 * sum(spent[WARM_UP:]) / denials, 1),
    'reused_tokens': round(sum(reused[WARM_UP:]) / denials, 3),
    'feedback_ms': percentiles(bare[WARM_UP:]),
  }


class Session:
  """A session of an adapter."""

  def __init__(self, client: httpx2.Client, adapter: str, tools: list[Any]):
    self._client, self._headers = client, {}
    opened = post(client, f'{adapter}/sessions', {'tools': tools})
    self._at = f'{adapter}/sessions/{opened["session"]["id"]}'
    self._headers = {'X-Session-Token': opened['token']}

  def propose(self, *asks: str) -> tuple[dict[str, Any], float]:
    """Return the next proposal and the time of its first draft, or of the proposal itself if there was none."""
    body = {'messages': [{'role': 'user', 'content': ask} for ask in asks], 'stream': True}
    first, kind = None, ''
    with self._client.stream('POST', f'{self._at}/turns', json=body, headers=self._headers) as response:
      if response.is_error:
        raise RuntimeError(f'{self._at}/turns: {response.status_code} {response.read().decode()[:500]}')
      for line in response.iter_lines():
        kind = line.removeprefix('event: ') if line.startswith('event: ') else kind
        if line.startswith('data: '):
          first = time.perf_counter() if first is None else first
          if kind == 'turn':
            return json.loads(line.removeprefix('data: '))['turn'], first
    raise RuntimeError(f'{self._at}/turns ended without a turn: {kind}')

  def deny(self, turn: dict[str, Any]) -> bool:
    """Deny a proposal; return whether it made a version, as the guards may reject it."""
    body = {'decision': 'deny', 'correction': CORRECTION}
    learned = post(self._client, f'{self._at}/turns/{turn["n"]}/decision', body, self._headers)['learned']
    return learned['version_after'] > learned['version_before']


def feedback(client: httpx2.Client, adapter: str, ask: str) -> float:
  """Return the seconds of a feedback on a completion drawn before."""
  body = {'model': adapter.rsplit('/', 1)[1], 'messages': [{'role': 'user', 'content': ask}]}
  sample = post(client, '/v1/continual/completions', body)['completions'][0]
  began = time.perf_counter()
  post(client, f'{adapter}/feedback', {'sample_id': sample['sample_id'], 'feedback': CORRECTION})
  return time.perf_counter() - began


def post(client: httpx2.Client, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
  answer = client.post(path, json=body, headers=headers)
  if answer.is_error:
    raise RuntimeError(f'{path}: {answer.status_code} {answer.text[:500]}')
  return answer.json()


if __name__ == '__main__':
  main()
