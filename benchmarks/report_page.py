"""Opening speed of launch.report's page in Chromium, and a screenshot.

    python -m benchmarks.report_page --page=runs/mine/report.html [--picture=FILE.png] [--at=N] [--token=N]

Opens the page several times in a headless browser, each time in a new process without caches. Prints one JSON line:
`ready_s`, seconds from the navigation until curves and list are drawn and the page takes keys, best and worst;
`busy_s`, the CPU time of its process until then; `empty_s`, seconds for an empty page in comparison; `show_s`, seconds
from choosing a rollout, whose piece was still packed, until its tokens are shown. `--picture` saves a screenshot of the
page, with one token of one rollout pinned.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time

from benchmarks import chromium

EMPTY = '<!doctype html><html data-ready="1"><p>Nothing.</p></html>'
SHOWN = "document.querySelector('.detail .tokens, .detail pre')"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--page', type=pathlib.Path, required=True)
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--picture', type=pathlib.Path)
  parser.add_argument('--at', type=int, default=0, help='number of the rollout in the picture, from 0, oldest first')
  parser.add_argument('--token', type=int, default=0, help='its pinned token, from 0')
  options = parser.parse_args()
  program = chromium.installed()
  if program is None:
    sys.exit('There is no Chromium here: apt-get install chromium.')
  if options.picture is not None:
    take_picture(program, options)
  print(json.dumps(measure(program, options.page.resolve(), options.repeats)))


def measure(program: str, page: pathlib.Path, repeats: int) -> dict[str, object]:
  """Return the fields of the JSON line."""
  ready, empty, show, busy, rollouts = [], [], [], [], 0
  with tempfile.TemporaryDirectory() as folder:
    nothing = pathlib.Path(folder, 'empty.html')
    nothing.write_text(EMPTY)
    for _ in range(repeats):
      for path, seconds in ((nothing, empty), (page, ready)):
        with chromium.opened(program) as browser:
          browser.size(1400, 1000)
          start = time.perf_counter()
          browser.open(path.as_uri())
          seconds.append(time.perf_counter() - start)
          if path == page:
            busy.append(browser.busy_s())
            rollouts = browser.evaluate('browser.index.step.length')
            show.append(_show_last(browser))
  return {
    'page': str(page),
    'mb': round(page.stat().st_size / 1e6, 1),
    'rollouts': rollouts,
    'ready_s': [round(min(ready), 3), round(max(ready), 3)],
    'busy_s': [round(min(busy), 3), round(max(busy), 3)],
    'empty_s': [round(min(empty), 3), round(max(empty), 3)],
    'show_s': [round(min(show), 3), round(max(show), 3)],
  }


def _show_last(browser: chromium.Page) -> float:
  start = time.perf_counter()
  browser.evaluate(
    'document.querySelector(".detail").replaceChildren(); browser.choose(browser.list[browser.list.length - 1])'
  )
  browser.until(SHOWN)
  return time.perf_counter() - start


def take_picture(program: str, options: argparse.Namespace) -> None:
  """Save a picture: the overview, and below it one rollout with the alternatives to one of its tokens."""
  with chromium.opened(program) as browser:
    browser.size(1280, 1410)
    browser.dark(False)
    chosen = f'order=oldest&color=divergence&at={options.at}&token={options.token}'
    browser.open(f'{options.page.resolve().as_uri()}#{chosen}')
    browser.evaluate(
      "document.getElementById('charts').hidden = true;"
      "document.querySelector('.browser').style.height = '860px';"
      'scrollTo(0, 0)'
    )
    browser.until(SHOWN)
    browser.evaluate(
      f'browser.scroller.scrollTop = 0; browser.choose({options.at}); new Promise((done) => setTimeout(done, 200))'
    )
    browser.evaluate(f'browser.view.pin({options.token})')
    browser.evaluate('new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))')
    browser.screenshot(options.picture)


if __name__ == '__main__':
  main()
