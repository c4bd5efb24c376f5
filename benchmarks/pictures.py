"""Pictures on the pages: a report, the service's page, a session in a terminal, and a training step.

    python -m benchmarks.pictures [--output=docs] [--only=report,console,terminal,step]

Writes report/page.png (of the quickstart, which this runs), serving/console.png (a correction in the page of a service
that this starts), sessions/terminal.png (a scripted session at a pseudo-terminal), and step.png (a drawing). Needs
Chromium and the extras serve, session and figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
import contextlib
import html
import os
import pathlib
import pty
import re
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any

from benchmarks import chromium
from sdpo_jax import extras
from sdpo_jax.environments import digits

QUESTION, RIGHT = 'Rotate the digits left: 40713', '07134'
SCRIPT = ('what does app.py say?', 'n use the read tool rather than cat', 'y', 'q')
COLUMNS = 100
# Select Graphic Rendition parameter → style.
STYLES = {
  '1': 'font-weight: bold',
  '2': 'opacity: .65',
  '31': 'color: #ff7b72',
  '32': 'color: #7ee787',
  '33': 'color: #e3b341',
  '34': 'color: #79c0ff',
  '36': 'color: #76e3ea',
}
# Box → place of its centre and text; arrows are (from, to, label).
BOXES = {
  'questions': (0.9, 3.4, 'questions'),
  'student': (3.2, 3.4, 'student\nsamples a group\nof completions'),
  'graders': (6.0, 3.4, 'graders\nscore, and say\nwhat is wrong'),
  'prompts': (8.9, 3.4, "teacher's prompts\nquestion, successful\nattempt or feedback"),
  'teacher': (8.9, 1.2, 'teacher\nreads prompt and\ncompletion'),
  'loss': (6.0, 1.2, 'divergence\nat every token\nof the completion'),
  'update': (3.2, 1.2, 'optimizer step'),
}
ARROWS = (
  ('questions', 'student', ''),
  ('student', 'graders', ''),
  ('graders', 'prompts', ''),
  ('prompts', 'teacher', ''),
  ('teacher', 'loss', 'log-probs'),
  ('student', 'loss', 'log-probs'),
  ('loss', 'update', ''),
  ('update', 'student', 'new weights'),
)


COLOURS = {'student': '#dbeafe', 'update': '#dbeafe', 'teacher': '#dcfce7', 'prompts': '#dcfce7'}  # Of boxes.


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--output', type=pathlib.Path, default=pathlib.Path('docs'))
  parser.add_argument('--only', default=','.join(PICTURES), help='which of them')
  options = parser.parse_args()
  if chromium.installed() is None:
    sys.exit('There is no Chromium here: apt-get install chromium.')
  for name in options.only.split(','):
    draw, file = PICTURES[name]
    (options.output / file).parent.mkdir(parents=True, exist_ok=True)
    draw(options.output / file)


@contextlib.contextmanager
def service(folder: str, config: str = 'serve_quickstart') -> Iterator[str]:
  """Start the service of a config on a free port, with its storage in a folder; yield its address."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  command = [sys.executable, '-m', 'launch.serve', f'--config=configs/{config}.py']
  command += [f'--config.serve.store.root={folder}/service', f'--config.serve.http.port={port}']
  with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
    said = []
    for line in running.stderr:
      said.append(line)
      if line.startswith('Ready'):
        break
    else:
      sys.exit(''.join(said))
    # Its log, which would stop it once the pipe is full.
    reader = threading.Thread(target=running.stderr.read, daemon=True)
    reader.start()
    try:
      yield f'http://127.0.0.1:{port}'
    finally:
      running.terminate()
      reader.join()


def draw_report(target: pathlib.Path) -> None:
  """Run the quickstart, and take a picture of its report with a wrong answer opened."""
  with tempfile.TemporaryDirectory() as folder, chromium.opened(chromium.installed()) as page:
    train = ['launch.train', '--config=configs/quickstart.py', '--config.trainer.record_top_tokens=20']
    for words in (train, ['launch.report']):
      subprocess.run([sys.executable, '-m', *words, f'--workdir={folder}/quickstart'], check=True)
    page.size(1280, 1410)
    page.dark(False)
    page.open(pathlib.Path(folder, 'quickstart', 'report.html').as_uri() + '#outcome=failure&step=10&find=Reverse')
    page.until("document.querySelector('.token')")
    page.evaluate("document.querySelector('#charts').hidden = true; document.querySelector('.token').click()")
    page.evaluate('scrollTo(0, 0)')
    page.until("!document.querySelector('.panel').hidden")
    page.screenshot(target)


def draw_console(target: pathlib.Path) -> None:
  """Correct an answer on the service's page, and take its picture."""
  with (
    tempfile.TemporaryDirectory() as folder,
    service(folder) as address,
    chromium.opened(chromium.installed()) as page,
  ):

    def press(text: str, then: str) -> None:
      page.evaluate(f'[...document.querySelectorAll("button")].find((b) => b.textContent === {text!r}).click()')
      page.until(then)

    page.size(1100, 900)
    page.dark(False)
    page.open(f'{address}/console')
    press('Create a first adapter', "document.querySelector('#adapter-name').textContent === 'first'")
    page.evaluate(f"document.querySelector('#question').value = {QUESTION!r}")
    page.evaluate("document.querySelector('#temperature').value = 0")
    press('Ask', "document.querySelector('#answer-text').textContent")
    wrong = digits.feedback(RIGHT, page.evaluate("document.querySelector('#answer-text').textContent"))
    page.evaluate(f"document.querySelector('#feedback').value = {wrong!r}")
    press('Learn', "document.querySelector('#credit-tokens span')")
    page.evaluate("document.querySelector('#credit-tokens span').click(); scrollTo(0, 0)")
    page.screenshot(target)


def draw_terminal(target: pathlib.Path) -> None:
  """Run a scripted session at a pseudo-terminal, and take a picture of what it shows."""
  with tempfile.TemporaryDirectory() as folder:
    work = pathlib.Path(folder, 'project')
    work.mkdir()
    (work / 'app.py').write_text('def parse(text): return text.split()\n')
    script = pathlib.Path(folder, 'script.txt')
    script.write_text('\n'.join(SCRIPT) + '\n')
    command = [sys.executable, '-m', 'launch.session', f'--workspace={work}', f'--script={script}', '--seed=1']
    shown = at_terminal([*command, f'--state={folder}/state', f'--config.serve.store.root={folder}/service'])
    page_file = pathlib.Path(folder, 'terminal.html')
    body = as_html(shown.replace(str(work), '~/project').replace(folder, '~'))
    style = 'background: #0d1117; color: #e6edf3; font: 15px/1.45 monospace; padding: 20px; margin: 0'
    page_file.write_text(
      f'<!doctype html><html data-ready=1><meta charset=utf-8><body style="margin: 0"><pre style="{style}">{body}</pre>'
    )
    with chromium.opened(chromium.installed()) as page:
      page.size(9 * COLUMNS + 90, 22 * body.count('\n') + 60)
      page.open(page_file.as_uri())
      page.screenshot(target)


def at_terminal(command: list[str]) -> str:
  """Return what a command writes to a pseudo-terminal as its standard output."""
  ours, theirs = pty.openpty()
  environment = os.environ | {'TERM': 'xterm-256color', 'COLUMNS': str(COLUMNS)}
  with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as running:
    os.close(theirs)
    written = b''
    with contextlib.suppress(OSError):  # Linux reports the end of a pseudo-terminal as an error.
      while more := os.read(ours, 1 << 16):
        written += more
  os.close(ours)
  if running.returncode:
    sys.exit(f'{command} ended with {running.returncode}.')
  return written.decode().replace('\r\n', '\n')


def as_html(text: str) -> str:
  """Return the text of a terminal as HTML, with the colours of `STYLES`; other control sequences are dropped."""
  made, open_spans = [], 0
  for part in re.split(r'(\x1b\[[0-9;?]*[A-Za-z])', text):
    if not part.startswith('\x1b['):
      made.append(html.escape(part.replace('\r', '')))
    elif part.endswith('m'):
      for number in part[2:-1].split(';'):
        if number in STYLES:
          made.append(f'<span style="{STYLES[number]}">')
          open_spans += 1
        elif number in ('', '0'):
          made.append('</span>' * open_spans)
          open_spans = 0
  return ''.join(made) + '</span>' * open_spans


def draw_step(target: pathlib.Path) -> None:
  """Draw what happens in a training step."""
  plt = extras.pyplot()
  figure, axes = plt.subplots(figsize=(10, 3.9), constrained_layout=True)
  axes.set(xlim=(0, 10.2), ylim=(0.1, 4.0))
  axes.axis('off')
  boxes: dict[str, Any] = {}
  for name, (x, y, text) in BOXES.items():
    style = {'boxstyle': 'round,pad=0.5', 'facecolor': COLOURS.get(name, '#f1f5f9'), 'edgecolor': '#64748b'}
    boxes[name] = axes.text(x, y, text, ha='center', va='center', fontsize=10.5, bbox=style)
  figure.canvas.draw()
  for start, end, label in ARROWS:
    (x0, y0, _), (x1, y1, _) = BOXES[start], BOXES[end]
    axes.annotate(
      '',
      (x1, y1),
      (x0, y0),
      arrowprops={
        'arrowstyle': '-|>',
        'color': '#475569',
        'patchA': boxes[start].get_bbox_patch(),
        'patchB': boxes[end].get_bbox_patch(),
        'shrinkA': 2,
        'shrinkB': 2,
      },
    )
    axes.text((x0 + x1) / 2, (y0 + y1) / 2, label, ha='center', va='center', fontsize=9, backgroundcolor='white')
  ema = {'arrowstyle': '-|>', 'color': '#16a34a', 'linestyle': '--', 'connectionstyle': 'arc3,rad=0.1'}
  axes.annotate('', (8.9, 0.75), (3.2, 0.85), arrowprops=ema)
  axes.text(
    6.05,
    0.42,
    'teacher ← (1 − rate) · teacher + rate · student',
    ha='center',
    va='center',
    fontsize=9,
    backgroundcolor='white',
  )
  figure.savefig(target, dpi=140)


# Name → how it is drawn, and its file.
PICTURES: dict[str, tuple[Callable[[pathlib.Path], None], str]] = {
  'report': (draw_report, 'report/page.png'),
  'console': (draw_console, 'serving/console.png'),
  'terminal': (draw_terminal, 'sessions/terminal.png'),
  'step': (draw_step, 'step.png'),
}

if __name__ == '__main__':
  main()
