"""QASPER (Dasigi et al. 2021): questions about papers, which are one document, with reference answers in words.

The reference answers are for their perplexity; no grader compares free answers with them. They are those of the first
annotator or, in a file of their own, rewritten by a language model for HazyResearch/cartridges, with questions that
name their paper. The wording of the prompt is this project's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
import logging

from sdpo_jax.data import hub_datasets, sources
from sdpo_jax.data.converters import raw
from sdpo_jax.data.converters.raw import ConversionOptions, Parts, Splits, described, field
from sdpo_jax.data.rows import RawRow
from sdpo_jax.errors import UserError
from sdpo_jax.files import json_object, read_text

NAME, PART = 'qasper', 'train'
PROMPT = '{}\n\nAnswer briefly; whole sentences are not needed.'

Asked = Iterator[tuple[RawRow, str, str, str | None]]  # Origin, id, question and answer; None: the paper has no answer.


def read(source: str, setting: str) -> Sequence[RawRow]:
  """Return a row per paper: the original release is a JSON object of papers by their ids; errors as `read_rows`."""
  if source.endswith('.json') and not hub_datasets.is_hub(source):
    papers = json_object(read_text(source, f'name a published file in {setting}'))
    if papers and all(isinstance(paper, Mapping) for paper in papers.values()):
      return raw.by_id(source, papers)
  return sources.read_rows(source, setting)


def convert(parts: Parts, options: ConversionOptions) -> Splits:
  """Return the answered questions about the chosen papers, all held out: training uses the document.

  Those that are left out are counted in warnings.

  Raises:
    UserError: a paper does not exist or is not in the source's schema, or no question is left.
  """
  papers = raw.chosen(parts[PART], options.papers, 'papers')
  made: dict[str, RawRow] = {}
  left_out = Counter[str]()
  for origin, idx, question, answer in _rewritten(options) if options.rewritten else _asked(papers):
    if answer is None:
      left_out['the paper does not answer it'] += 1
    elif not question or not answer:
      left_out['the question or its answer is empty'] += 1
    elif idx in made:
      left_out['its id is that of another question'] += 1
    else:
      prompt, description = PROMPT.format(question), described(question, 'qa')
      made[idx] = raw.make_row(
        origin, idx, kind='qa', dataset=NAME, prompt=prompt, description=description, answer=answer, environment='none'
      )
  for why, count in left_out.items():
    logging.warning('%d of %d questions are left out: %s.', count, left_out.total() + len(made), why)
  if not made:
    raise UserError(f'No question about the papers {", ".join(options.papers)} has an answer: choose other --papers.')
  return {'test': list(made.values())}


def texts(parts: Parts, options: ConversionOptions) -> Mapping[str, str]:
  """Return the chosen papers as the text of one file; errors as in `convert`."""
  return {raw.DOCUMENT: ''.join(_text(paper) for paper in raw.chosen(parts[PART], options.papers, 'papers'))}


def _rewritten(options: ConversionOptions) -> Asked:
  for row in sources.read_rows(options.rewritten, '--rewritten'):
    if (paper := field(row, 'paper_id')) in options.papers:
      yield row, f'{paper}_{row.number}', field(row, 'question').strip(), field(row, 'answer').strip()


def _asked(papers: Sequence[RawRow]) -> Asked:
  for paper in papers:
    for row in raw.listed(paper, 'qas'):
      question, title = field(row, 'question').strip(), field(paper, 'title').strip()
      yield row, field(row, 'question_id'), question and f'About the paper "{title}": {question}', _answer(row)


def _answer(question: RawRow) -> str | None:
  for row in raw.listed(question, 'answers')[:1]:
    spans = ', '.join(map(str, filter(None, field(row, 'answer', 'extractive_spans', kind=list))))
    written = spans.strip() or field(row, 'answer', 'free_form_answer').strip()
    sure = field(row, 'answer', 'yes_no', kind=(bool, type(None)))
    unanswerable = field(row, 'answer', 'unanswerable', kind=bool)
    return None if unanswerable else written or {True: 'Yes', False: 'No', None: ''}[sure]
  return ''


def _text(paper: RawRow) -> str:
  """Return a paper's title, abstract and sections as text."""
  texts = [f'Title: {field(paper, "title")}', f'Abstract: {field(paper, "abstract")}']
  for section in raw.listed(paper, 'full_text'):
    texts += [field(section, 'section_name', kind=(str, type(None))), *field(section, 'paragraphs', kind=list)]
  return '<paper>\n' + '\n\n'.join(str(text).strip() for text in texts if text) + '\n</paper>\n\n'
