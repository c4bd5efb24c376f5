"""A tour of the service in ten minutes: ask, correct, ask again, look at what changed, undo it.

  python -m launch.serve --config=configs/serve_quickstart.py    # In one terminal.
  pip install openai                                             # In another one.
  python examples/serve_client.py

Completions come through the `openai` package, as from any other server. Requests that it lacks, such as feedback, are
plain ones, here with `httpx2`, which is installed with the project. If the service has keys (`serve.http.keys`), put
yours into the environment variable SDPO_API_KEY.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import httpx2

try:
  import openai
except ModuleNotFoundError:
  sys.exit('This example asks with the package openai, which is not installed: pip install openai.')

NAME = 'reverse'
DIGITS = '40713 92856 13579 60042 27183 81828 31415 16180 57721 44721 70710 14142'.split()
QUESTIONS = {
  f'Reverse the digits: {digits}': digits[::-1] for digits in DIGITS
}  # Each with the answer that a user wants.
HELD_OUT = 'Reverse the digits: 81276', '67218'  # Never corrected.


def messages(question: str) -> list[dict[str, str]]:
  """Return a conversation that asks a question."""
  return [{'role': 'user', 'content': question}]


class Native:
  """Routes of the service that OpenAI's API does not have."""

  def __init__(self, url: str, key: str | None):
    headers = {'Authorization': f'Bearer {key}'} if key else {}
    self._client = httpx2.Client(base_url=url, headers=headers, timeout=300)

  def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """Send a request and return the JSON of its answer; on an error, exit with its message."""
    try:
      answer = self._client.request(method, path, json=body, headers=headers)
    except httpx2.ConnectError:
      sys.exit(f'Nobody listens on {self._client.base_url}: start the service (see --help), or name another --url.')
    if answer.is_error:
      sys.exit(f'{method} {path}: {answer.json()["error"]["message"]}')
    return answer.json()

  def log_prob(self, model: str, question: str, answer: str) -> float:
    """Return a model's log-prob of an answer, in nats."""
    body = {'model': model, 'messages': messages(question), 'completion': answer}
    return self.ask('POST', '/v1/score', body)['logprob_sum']


def main(url: str, key: str | None = None) -> None:
  """Demonstrate the service at an address."""
  client, native = openai.OpenAI(base_url=f'{url}/v1', api_key=key or 'none'), Native(url, key)

  # Create an adapter: its version 0 answers as the model does.
  for known in native.ask('GET', '/v1/continual/adapters')['adapters']:
    if known['name'] == NAME:  # From an earlier run.
      native.ask('DELETE', f'/v1/continual/adapters/{known["id"]}')
  adapter = native.ask('POST', '/v1/continual/adapters', {'name': NAME})
  path = f'/v1/continual/adapters/{adapter["id"]}'
  print(f'adapter {NAME} at version {adapter["version"]}, {adapter["lora_uri"]}')
  before = native.log_prob(NAME, *HELD_OUT)

  # Ask, and correct the answers. The service stores tokens under the sample_id, so nothing is tokenised again.
  for number, (question, right) in enumerate(QUESTIONS.items()):
    choice = client.chat.completions.create(
      model=NAME, messages=messages(question), max_completion_tokens=8, seed=number
    ).choices[0]
    feedback = {'sample_id': choice.sample_id, 'correction': right}
    # The headers name the version concerned and the request, so that a request sent twice is learned once.
    headers = {'If-Match': f'"{number}"', 'Idempotency-Key': f'{adapter["id"]}-{number}'}
    answer = native.ask('POST', f'{path}/feedback', feedback, **headers)
    told = f'now version {answer["version_after"]}' if answer['accepted'] else f'rejected: {answer["reason"]}'
    print(f'{question} -> {choice.message.content!r}, corrected to {right}: {told}')

  # Every version can still answer.
  question, right = HELD_OUT
  for model in (f'{NAME}@0', NAME):
    said = client.chat.completions.create(model=model, messages=messages(question), temperature=0)
    log_prob = native.log_prob(model, question, right)
    print(f'{model}: {question} -> {said.choices[0].message.content!r}; log-prob of {right}: {log_prob:.2f}')
  print(f'log-prob of an answer that nobody corrected: {before:.2f} before, {log_prob:.2f} after')

  # A stream, token by token.
  print('streamed: ', end='')
  for chunk in client.chat.completions.create(model=NAME, messages=messages(question), temperature=0, stream=True):
    print(chunk.choices[0].delta.content or '', end='', flush=True)
  print()

  # List what made each version, and go back to the first one, which makes a new version with its content.
  for version in native.ask('GET', f'{path}/versions')['versions']:
    parent = version['parent']
    print(f'version {version["version"]}: {version["reason"]}' + ('' if parent is None else f', from version {parent}'))
  undone = native.ask('POST', f'{path}/undo', {'to': 0})
  again = native.log_prob(NAME, *HELD_OUT)
  print(f'version {undone["version"]} is version 0 again: log-prob {again:.2f}')


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--url', default='http://127.0.0.1:8420', help='address of the service')
  arguments = parser.parse_args()
  main(arguments.url, os.environ.get('SDPO_API_KEY'))
