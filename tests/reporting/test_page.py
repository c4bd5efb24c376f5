"""The page of launch.report in Chromium: what it shows, how it is used, and that no text of a model can do anything."""

import json
import pathlib

import pytest

from benchmarks import chromium
from sdpo_jax import invisible
from sdpo_jax.reporting import report
from tests.reporting import report_runs
from tests.reporting.report_runs import HOSTILE, config, metrics, rollout

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def browser():
  program = chromium.installed()
  if program is None:
    pytest.skip('there is no Chromium: apt-get install chromium')
  with chromium.opened(program) as page:
    yield page


@pytest.fixture
def opened(browser, tmp_path):
  """Return a function that opens the report of runs; afterwards no script may have failed, and nothing been asked
  for.
  """
  asked = []

  def open_report(workdir, *compare, address='', reload_s=None, texts=True):
    output = tmp_path / 'page.html'
    text, *_ = report.Reporter([workdir, *compare], 10_000, texts=texts).page(reload_s)
    output.write_text(text)
    asked.append(output.as_uri() + address)
    browser.call('Page.navigate', url='about:blank')  # Another address of the same page would not load it again.
    browser.open(asked[-1])
    return browser

  browser.events.clear()
  browser.size(1300, 900)
  browser.dark(False)
  yield open_report
  assert browser.complaints() == []
  # The page itself and nothing else; Chromium also asks where a page of an http server has its picture.
  assert {address.partition('#')[0] for address in browser.requested()} == {each.partition('#')[0] for each in asked}


def shown(browser) -> str:
  """Return the text of the completion that is shown, token by token."""
  return browser.evaluate("document.querySelector('.detail .tokens').textContent")


def until_shown(browser, text: str) -> None:
  browser.until(f"document.querySelector('.detail .tokens').textContent === '{text}'")


def choose(browser, place: int) -> None:
  browser.evaluate(f"document.querySelector('.detail').replaceChildren(); browser.choose({place})")
  browser.until("document.querySelector('.detail .tokens')")


def run_of(folder: pathlib.Path, questions: int = 6, **changes):
  lines = [
    metrics(step, score=0.1 * step) | {'eval/t/mean@2': 0.2 * step, 'teacher/divergence': 0.1} for step in range(5)
  ]
  rollouts = {
    step: [rollout(step, group, f'{"ab" * (group + 1)}{step}', advantages=[1.0, -0.5] + [0.0] * (2 * group + 1))
           for group in range(questions)] for step in (2, 4)}  # fmt: skip
  return report_runs.write(folder, lines, rollouts, config(**changes))


def test_hostile_texts_are_shown_and_do_nothing(opened, tmp_path):
  steps = {1: [rollout(1, group, text, id=text, feedback=text, finish_reason=text, rewards={text: 1.0},
                       prompt=[{'role': text, 'content': text}], teacher_prompt=[{'role': 'user', 'content': text}])
               for group, text in enumerate(HOSTILE)]}  # fmt: skip
  lines = [metrics(1) | {HOSTILE[0]: 1.0, HOSTILE[3]: 2.0, 'alarm/1': 1.0}]
  settings = config(name=HOSTILE[0], data__train_files=HOSTILE, alarms__rules=(HOSTILE[1],))
  page = opened(report_runs.write(tmp_path / '<img src=x onerror=alert(1)>', lines, steps, settings))
  page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
  for place, text in enumerate(HOSTILE):
    choose(page, place)
    found = shown(page)
    if text.isprintable():
      assert found == text
    else:
      assert 'U+' in found and not set(found) & set('\u202e\u2066\0\a\ufeff\ud800')
    page.key('ArrowRight')
  assert page.evaluate('typeof window.hacked') == 'undefined'
  assert page.evaluate("document.querySelectorAll('main script, main img, main style, main iframe').length") == 0
  assert 'U+202E' in page.evaluate("document.getElementById('charts').textContent")


def test_characters_that_leave_no_mark_are_named(opened, tmp_path):
  text = 'a\u3164b\u2800c\ufe0fd\u00a0e\u200bf g\th'
  page = opened(report_runs.write(tmp_path / 'run', [metrics(1)], {1: [rollout(1, 0, text)]}))
  page.until("document.querySelector('.detail .tokens')")
  assert shown(page) == 'aU+3164bU+2800cU+FE0FdU+00A0eU+200Bf g\th'
  # Over all of Unicode as the browser knows it, by its own properties.
  hidden = r'/^(?![\t\n])(?:[\p{C}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u2800]|(?! )\p{Zs})$/u'
  # And overlays and blank signs, which have no property of their own.
  others = [code for code in range(0x110000) if invisible._IS_HIDDEN.match(chr(code))]  # noqa: SLF001
  wrong = f"""[...Array(0x110000).keys()].filter((code) => {{
    const letter = String.fromCodePoint(code);
    return (letter.match(INVISIBLE) !== null) !== ({hidden}.test(letter) || {others}.includes(code));
  }})"""
  assert page.evaluate(wrong) == []


def test_without_texts_rollouts_are_numbers_and_cells(opened, tmp_path):
  page = opened(run_of(tmp_path / 'run'), texts=False)
  page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
  page.until("document.querySelectorAll('.strip .cell').length === 3")  # Of ab4, the newest.
  said = page.evaluate('document.body.innerText')
  for text in ('question 6', 'not in this page', 'score 0', 'left out of this page (--no_texts)', 'optimizer.lr'):
    assert text in said, text
  for text in ('Question', 'Feedback on', 'ab4', 'abab', 'q0', 'reprompt_template', str(tmp_path)):
    assert text not in said, text
  page.key('s')
  page.until("document.querySelector('#rollouts .tools .muted').textContent === '2 of 12 rollouts'")
  page.key('c')
  page.until("document.querySelector('.choice .on').textContent === 'advantage'")


def test_rollouts_are_filtered_chosen_and_read_token_by_token(opened, tmp_path):
  page = opened(run_of(tmp_path / 'run'))
  count = "document.querySelector('#rollouts .tools .muted').textContent"
  assert page.evaluate(count) == '12 rollouts'
  until_shown(page, 'ab4')
  page.key('j')
  until_shown(page, 'abab4')
  page.key('ArrowRight')
  page.key('ArrowRight')
  assert page.evaluate("document.querySelector('.token.pinned').dataset.token") == '1'
  candidates = page.evaluate("[...document.querySelectorAll('.panel .candidate')].map((each) => each.textContent)")
  assert candidates == ['a90.5%', '</b>8.2%'] * 2  # exp(−0.1), exp(−2.5), of student and teacher.
  assert '−0.2' in page.evaluate("document.querySelector('.panel').textContent").replace('-', '−')  # Its credit.
  page.key('Escape')
  assert page.evaluate("document.querySelector('.panel').hidden")
  colour = "getComputedStyle(document.querySelectorAll('.token')[0]).backgroundColor"
  before = page.evaluate(colour)
  page.key('c')
  page.until(f"document.querySelector('.choice .on').textContent === 'advantage' && {colour} !== '{before}'")
  page.key('s')
  page.until(f"{count} === '2 of 12 rollouts'")
  page.key('s')
  page.evaluate(
    "const select = document.querySelector('select'); select.value = 'success'; select.dispatchEvent(new "
    "Event('change'))"
  )
  assert page.evaluate(count) == '6 of 12 rollouts'  # Odd questions have a score of 1.
  page.key('/')
  page.call('Input.insertText', text='question 3')
  page.until(f"{count} === '2 of 12 rollouts'")
  address = page.evaluate('location.hash')
  assert 'outcome=success' in address and 'color=advantage' in address
  page = opened(tmp_path / 'run', address=address + '&step=2')
  assert page.evaluate(count) == '1 of 12 rollouts'
  until_shown(page, 'abababab2')


def test_overview_and_curves_say_what_the_files_say(opened, tmp_path):
  page = opened(run_of(tmp_path / 'run', alarms__rules=('train/loss > 3',)))
  overview = page.evaluate("document.getElementById('overview').innerText")
  for text in ('step 4 of 4', 'finished', 'train/loss > 3', 'never held', 'seed', 't/mean@2'):
    assert text in overview, text
  row = page.evaluate("[...document.querySelector('#overview tbody tr').cells].map((cell) => cell.textContent)")
  assert row == ['t/mean@2', '0%', '80%', '80% at 4']
  charts = page.evaluate("[...document.querySelectorAll('#charts .chart')].map((each) => each.dataset.metric)")
  assert {
    'eval/t/mean@2',
    'rollout/score_mean',
    'teacher/divergence',
    'throughput/tokens_per_s',
    'time sample train',
  } <= set(charts)
  page.until("document.querySelector('#overview .chart svg')")
  label = page.evaluate("document.querySelector('#overview .chart svg').getAttribute('aria-label')")
  assert label.endswith('0% at step 0, 80% at step 4')


def test_runs_that_differ_in_their_seed_only_have_a_band(opened, tmp_path):
  runs = [run_of(tmp_path / f'run{seed}', seed=seed) for seed in range(3)]
  other = run_of(tmp_path / 'other', optimizer__lr=0.5)
  (other / 'metrics.jsonl').write_text(json.dumps(metrics(1)) + '\n')  # Shorter, and without an evaluation.
  page = opened(*runs, other)
  chart = "document.querySelector('#overview .chart')"
  page.until(f"{chart}.querySelector('svg')")
  assert page.evaluate(f"{chart}.querySelectorAll('.band').length") == 1
  assert page.evaluate(f"{chart}.querySelectorAll('.faint').length") == 3
  overview = page.evaluate("document.getElementById('overview').innerText")
  assert '4 runs in 2 groups' in overview and 'optimizer.lr' in overview and 'run0' not in overview.split('Settings')[0]
  assert page.evaluate('browser.index.step.length') == 36  # Of the shorter run none is of a finished step.


def test_light_dark_and_narrow(opened, tmp_path):
  page = opened(run_of(tmp_path / 'run'))
  background = 'getComputedStyle(document.body).backgroundColor'
  light = page.evaluate(background)
  page.dark(True)
  page.until(f"{background} !== '{light}'")
  page.key('d')
  page.until(f"{background} === '{light}'")
  page.evaluate('localStorage.clear()')
  for width in (1300, 700, 360):
    page.size(width, 800)
    page.until(f'innerWidth === {width}')
    assert page.evaluate('document.documentElement.scrollWidth') <= width
  page.key('?')
  assert page.evaluate("document.getElementById('help').open")


def test_of_ten_thousand_rollouts_only_those_in_view_are_drawn(opened, tmp_path):
  steps = {step: [rollout(step, group, f'{step}.{group}') for group in range(1000)] for step in range(1, 11)}
  page = opened(report_runs.write(tmp_path / 'run', [metrics(step) for step in range(11)], steps))
  assert page.evaluate("document.querySelector('#rollouts .tools .muted').textContent") == '10,000 rollouts'
  rows = "document.querySelectorAll('.rollout').length"
  assert 5 < page.evaluate(rows) < 60
  page.evaluate('browser.scroller.scrollTop = browser.scroller.scrollHeight')
  page.until("[...document.querySelectorAll('.said')].some((each) => each.textContent === '1.999')")
  assert page.evaluate(rows) < 60
  choose(page, 9_999)
  assert shown(page) == '10.999' and page.evaluate('pieces.size') <= 2


def test_rollouts_without_tokens_have_a_cell_for_each(opened, tmp_path):
  old = {name: value for name, value in rollout(1, 0, 'abc').items() if name not in ('tokens', 'top_tokens')}
  page = opened(report_runs.write(tmp_path / 'run', [metrics(1)], {1: [old]}))
  page.until("document.querySelectorAll('.strip .cell').length === 3")
  assert page.evaluate("document.querySelector('.detail').innerText.includes('abc')")


def test_an_open_page_takes_the_newer_one(opened, tmp_path):
  folder = report_runs.write(tmp_path / 'run', [metrics(1)], {1: [rollout(1)]})
  page = opened(folder, reload_s=1.0)
  assert page.evaluate("document.getElementById('live').textContent") == 'live'
  with open(folder / 'metrics.jsonl', 'a') as file:
    file.write(''.join(json.dumps(metrics(step)) + '\n' for step in (2, 3, 4)))
  text, *_ = report.Reporter([folder], 10).page(1.0)
  (tmp_path / 'page.html').write_text(text)
  page.until("browser.page.runs[0].last === 4 && document.getElementById('live').hidden")


def test_a_page_whose_data_are_damaged_says_so(browser, tmp_path):
  folder = report_runs.write(tmp_path / 'run', [metrics(1)])
  text, *_ = report.Reporter([folder], 10).page()
  path = tmp_path / 'page.html'
  path.write_text(text.replace('id="summary">', 'id="summary">AAAA'))
  browser.open(path.as_uri())
  assert 'cannot show its data' in browser.evaluate("document.getElementById('failed').textContent")
