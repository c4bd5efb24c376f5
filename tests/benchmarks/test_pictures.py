"""The pictures on the pages: each is made by a command."""

from benchmarks import pictures
from tests import tiny

OF_STUDIES = {f'{study}/curves.png' for study in ('quickstart', 'lora', 'cartridge')}  # benchmarks.study
OF_OTHERS = {'performance/scaling.png', 'serving/learning.png', 'sessions/learning.png'}  # tpu_plan, …_learning


def test_every_picture_of_the_pages_is_made_by_a_command(tmp_path):
  shown = {path.relative_to(tiny.REPOSITORY / 'docs').as_posix() for path in (tiny.REPOSITORY / 'docs').rglob('*.png')}
  assert shown == {file for _, file in pictures.PICTURES.values()} | OF_STUDIES | OF_OTHERS
  pictures.draw_step(tmp_path / 'step.png')
  assert (tmp_path / 'step.png').read_bytes().startswith(b'\x89PNG')


def test_what_a_terminal_shows_is_html_with_its_colours():
  assert pictures.as_html('\x1b[1;31m<a>\x1b[0m b\x1b[2K\r\n') == (
    '<span style="font-weight: bold"><span style="color: #ff7b72">&lt;a&gt;</span></span> b\n'
  )
