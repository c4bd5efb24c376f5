"""Random clicks on the page of a service whose answers come late: does a decision ever reach a call that was not shown?

    python -m benchmarks.console_clicks [--decisions=200] [--pages=3] [--seed=0] [--latency=4] [--output=FILE]

Serves the tiny agent, and opens its page in several Chromiums. Every answer takes up to `--latency` seconds, so that
answers overtake each other, and the mouse presses buttons in random order: adapters, sessions, tabs, messages,
decisions, results, undo, with reloads in between. What the document showed at the moment of a click is compared with
what the service has decided because of it. Prints a line of JSON; exit code 1 if they differ. Needs Chromium.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import json
import pathlib
import random
import re
import sys
import tempfile
import time
from typing import Any

import httpx

from benchmarks import chromium, pictures

# Delays the page's requests and their answers, and notes for each change what was shown when the mouse caused it.
WATCH = """
window.sent = [];
let pressed = null;
const fetched = window.fetch;
const some = () => [0, 0, Math.random(), 1][Math.floor(4 * Math.random())];
const late = () => new Promise((go) => setTimeout(go, LATENCY * 500 * some()));
addEventListener('click', (event) => {
  if (!event.isTrusted) return;
  const shown = [...event.target.closest('li')?.querySelectorAll('pre.call') ?? []].filter((call) => call.offsetParent);
  const name = document.querySelector('#adapter-name');
  pressed = { calls: shown.map((call) => call.textContent), adapter: name?.offsetParent ? name.textContent : null };
}, true);
window.fetch = async (path, options) => {
  const change = /(decision|results|undo)$/.exec(path);
  const noted = change && { path, what: change[1], body: options.body, ...pressed, status: null };
  if (noted) window.sent.push(noted);
  await late();
  const answer = await fetched(path, options);
  await late();
  if (noted) noted.status = answer.status;
  return answer;
};
"""
# The buttons that the mouse can press now.
BUTTONS = """[...document.querySelectorAll('button')]
  .filter((button) => button.offsetParent && !button.disabled && !button.closest('[inert]'))"""
# Text of a button → how often it is pressed; the field that is written before, beside the button, and what.
OFTEN = {'Approve': 8, 'Deny': 5, 'Edit': 4, 'Continue': 9, 'Send': 9, 'Try again': 9, 'Open a session': 6, 'Undo': 1}
OFTEN |= {'Session': 1, '': 0.3}
WAIT = 6  # How often the visitor waits instead.
NEVER = ('Learn', 'Ask', 'Fill', 'Use')
LISTED = (r'version \d+$', r'^Session.*\d')  # Adapters and sessions, of which there may be many.
FIELDS = {'Deny': ('.choices', 'input'), 'Continue': ('form', 'textarea'), 'Send': ('form', 'textarea')}
FIELDS |= {
  'Approve as edited': ('.choices', 'textarea'),
  'Open a session': ('form', '#tools'),
  'Create': ('form', 'input'),
}
ADAPTERS = 3
NOTHING = {'calls': [], 'called': [], 'decision': None, 'results': []}  # A turn that is not there.


def click_around(
  page: chromium.Page,
  address: str,
  *,
  decisions: int,
  latency: float,
  seed: int,
  write: Callable[[str, random.Random], str],
) -> dict[str, Any]:
  """Press random buttons of the page of a service; return counts of what was sent, and what reached something else.

  Args:
    page: a page of a browser.
    address: the address of the service.
    decisions: how many decisions to send.
    latency: the most seconds that an answer takes.
    seed: of the choice of buttons.
    write: returns the text to write into a field, for the text of the button beside it.
  """
  rng, noted, clicks = random.Random(seed), [], 0
  page.call('Page.addScriptToEvaluateOnNewDocument', source=WATCH.replace('LATENCY', str(latency)))
  page.open(f'{address}/console')
  while sum(each['what'] == 'decision' for each in [*noted, *page.evaluate('window.sent')]) < decisions:
    while True:
      texts = page.evaluate(f'{BUTTONS}.map((button) => button.textContent)')
      weights = [_weight(text, texts) for text in texts]
      [chosen] = rng.choices(range(len(texts) + 1), [*weights, WAIT])
      if chosen < len(texts):
        break
      time.sleep(rng.uniform(0, max(0.3, latency / 4)))
    _press(page, chosen, texts[chosen], rng, write)
    time.sleep(rng.choice((0, 0.1, 0.2)))
    clicks += 1
    if clicks % 100 == 0:
      noted += page.evaluate('window.sent')
      page.open(f'{address}/console')
  time.sleep(2 * latency)
  noted += page.evaluate('window.sent')
  counts = {'clicks': clicks, 'decision': 0, 'results': 0, 'undo': 0, 'refused': 0}
  with httpx.Client(base_url=address, timeout=60) as http:
    wrong = [found for each in noted if (found := misdirected(http, each, counts)) is not None]
  return {**counts, 'wrong': wrong}


def _weight(text: str, texts: list[str]) -> float:
  listed = next((name for name in LISTED if re.search(name, text)), None)
  if listed is not None:
    return 1.2 / sum(bool(re.search(listed, each)) for each in texts)
  if text.startswith(NEVER) or (text.startswith('Create') and sum('version ' in each for each in texts) >= ADAPTERS):
    return 0
  return next((often for name, often in OFTEN.items() if text.startswith(name)))


def _press(page: chromium.Page, index: int, text: str, rng: random.Random, write: Callable[..., str]) -> None:
  """Write into the field of a button, aim at its place, and press the mouse there a moment later."""
  name = next((name for name in FIELDS if text.startswith(name)), None)
  if name is not None:
    (within, field), said = FIELDS[name], json.dumps(write(name, rng))
    page.evaluate(f"""(() => {{
      const fields = {BUTTONS}[{index}]?.closest({within!r})?.querySelectorAll({field!r}) ?? [];
      for (const field of fields) if (!field.hidden && field.type !== 'checkbox') field.value = {said};
    }})()""")
  place = page.evaluate(f"""(() => {{
    const button = {BUTTONS}[{index}];
    button?.scrollIntoView({{ block: 'center' }});
    const box = button?.getBoundingClientRect();
    return box && [box.x + box.width / 2, box.y + box.height / 2];
  }})()""")
  if place is None:
    return
  time.sleep(rng.choice((0, 0.05, 0.15)))
  for kind in ('mousePressed', 'mouseReleased'):
    page.call('Input.dispatchMouseEvent', type=kind, x=place[0], y=place[1], button='left', clickCount=1)


def misdirected(http: httpx.Client, noted: dict[str, Any], counts: dict[str, int]) -> dict[str, Any] | None:
  """Return what was sent if it has reached another call or adapter than the document showed; count it."""
  adapter, *rest = noted['path'].split('/adapters/')[1].split('/')
  known = http.get(f'/v1/continual/adapters/{adapter}').json()
  if noted['what'] == 'undo':
    reached, shown, done = known['name'], noted['adapter'], noted['status'] == 200
  else:
    turns = http.get(f'/v1/continual/adapters/{adapter}/sessions/{rest[1]}').json().get('turns', [])
    turn = next((turn for turn in turns if turn['n'] == int(rest[3])), NOTHING)
    reached = [[call['name'], _arguments(call)] for call in turn['called' if noted['what'] == 'results' else 'calls']]
    shown = [[text.split(' ')[0], json.loads(text.split(' ', 1)[1])] for text in noted['calls']]
    done = noted['status'] in (200, None) and bool(turn['results'] if noted['what'] == 'results' else turn['decision'])
  counts[noted['what'] if done else 'refused'] += 1
  return None if not done or shown == reached else {**noted, 'reached': reached}


def _arguments(call: dict[str, Any]) -> Any:
  return json.loads(call['arguments']) if isinstance(call['arguments'], str) else call['arguments']


def agent_texts() -> Callable[[str, random.Random], str]:
  """Return what a user of the tiny agent writes into the fields."""
  from sdpo_jax.environments.workspace.tools import TOOLS
  from sdpo_jax.quickstart import tool_tasks

  numbers, tools = iter(range(10**6)), json.dumps([tool.schema() for tool in TOOLS.values()])

  def write(name: str, rng: random.Random) -> str:
    return {
      'Create': f'adapter-{next(numbers)}',
      'Open a session': tools,
      'Send': tool_tasks.draw(rng, rng.choice(list(tool_tasks.KINDS))).ask,
      'Deny': rng.choice(('use rg rather than grep -r', 'use cat', 'run it with pytest')),
      'Continue': 'done',
      'Approve as edited': json.dumps({'command': f'echo {next(numbers)}'}),
    }[name]

  return write


@contextlib.contextmanager
def agent() -> Iterator[str]:
  """Serve the tiny agent with an empty store; yield its address."""
  with tempfile.TemporaryDirectory() as folder, pictures.service(folder, 'session_quickstart') as address:
    yield address


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--decisions', type=int, default=200)
  parser.add_argument('--pages', type=int, default=3, help='browsers at the same time')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--latency', type=float, default=4, help='the most seconds of an answer')
  parser.add_argument('--output', type=pathlib.Path, help='file for the result')
  options = parser.parse_args()
  program = chromium.installed()
  if program is None:
    sys.exit('There is no Chromium here: apt-get install chromium.')
  write, began = agent_texts(), time.monotonic()

  def one(number: int) -> dict[str, Any]:
    seed, decisions = options.seed + number, -(-options.decisions // options.pages)
    with chromium.opened(program) as page:
      return click_around(page, address, decisions=decisions, latency=options.latency, seed=seed, write=write)

  with agent() as address, concurrent.futures.ThreadPoolExecutor(options.pages) as pool:
    runs = list(pool.map(one, range(options.pages)))
  found = {name: sum((run[name] for run in runs[1:]), runs[0][name]) for name in runs[0]}
  found |= {'benchmark': 'console_clicks', 'latency': options.latency, 'seed': options.seed, 'pages': options.pages}
  found['seconds'] = round(time.monotonic() - began)
  print(json.dumps(found))
  if options.output:
    options.output.write_text(json.dumps(found, indent=1) + '\n')
  return 1 if found['wrong'] else 0


if __name__ == '__main__':
  sys.exit(main())
