// Overview of a run: evaluations before and after, signal, speed, alarms, settings, and the curves of every metric.

const MAIN = /^eval\/[^/]+\/mean@\d+$/;
const SECTIONS = [
  ['Held-out evaluation', (name) => /^eval\/[^/]+\/(mean|best|maj)@\d+$/.test(name) || /^eval\/[^/]+\/kl_on_/.test(name), { zero: true }],
  ['Training', (name) => TRAINING.includes(name) || /^rollout\/reward\//.test(name), {}],
  ['Signal', (name) => name === 'rollout/solved_group_fraction' || /^(self_distillation|teacher|gap)\//.test(name), {}],
  ['Speed', (name) => /^throughput\//.test(name), { zero: true }],
];
const TRAINING = [
  'rollout/score_mean', 'rollout/success_rate', 'rollout/completion_length_mean', 'rollout/truncated_fraction',
  'rollout/entropy', 'train/loss', 'train/grad_norm', 'train/learning_rate',
];
const NOTES = {
  'rollout/solved_group_fraction': 'groups with at least one success',
  'self_distillation/success_group_fraction': 'groups with a success to show as a demonstration',
  'self_distillation/reprompt_sample_fraction': 'completions with a teacher prompt of their own',
  'self_distillation/feedback_used_fraction': 'completions whose teacher read feedback',
  'self_distillation/success_sample_fraction': 'completions whose teacher read a demonstration',
  'teacher/divergence': 'student and teacher, nats per token',
  'throughput/fill_sample': 'share of the sampler’s slots at work',
  'throughput/fill_train': 'share of the update’s tokens that are no padding',
  'throughput/fill_teacher': 'share of the teacher’s tokens that are no padding',
};
// Notes on metrics of each data source.
const noteOf = (name) => NOTES[name]
  || (name.startsWith('gap/') ? 'success rate in training less the held-out mean score' : undefined)
  || (/^eval\/.*\/acc\//.test(name) ? 'a number of the grader, such as the share of an answer that is right' : undefined);
const PHASES = ['sample', 'grade', 'teach', 'record', 'train', 'evaluate'];

function metricsOf(page) {
  const names = new Set();
  for (const run of page.runs) for (const name of Object.keys(run.series)) names.add(name);
  return [...names].sort();
}

// The first, the last and the best value of a metric in every run of a group, as means with their range.
function valuesOf(page, group, metric) {
  const found = group.runs.map((run) => page.runs[run].series[metric]).filter(Boolean);
  if (!found.length) return null;
  const summary = (pick) => {
    const values = found.map(([steps, values]) => pick(values, steps));
    return { mean: values.reduce((a, b) => a + b) / values.length, low: Math.min(...values), high: Math.max(...values) };
  };
  const best = Math.max(...found[0][1]);
  return {
    first: summary((values) => values[0]),
    last: summary((values) => values[values.length - 1]),
    best: summary((values) => values.reduce((a, b) => Math.max(a, b))),
    steps: [found[0][0][0], found[0][0][found[0][0].length - 1]],
    bestStep: found.length === 1 ? found[0][0][found[0][1].indexOf(best)] : null,
    count: found.length,
    all: found.flatMap(([, values]) => values),
  };
}

function told(value, share) {
  if (!value) return '–';
  const spread = value.low !== value.high ? ` (${number(value.low, share)}–${number(value.high, share)})` : '';
  return number(value.mean, share) + spread;
}

function drawOverview(page) {
  const section = document.getElementById('overview');
  const metrics = metricsOf(page);
  const main = metrics.find((name) => MAIN.test(name));
  fill(
    section,
    make('div', { class: 'status' }, page.runs.length === 1 ? statusOf(page, page.runs[0]) : `${counted(page.runs.length, 'run')} in ${counted(page.groups.length, 'group')}`,
      make('span', { class: 'muted' }, ' · written ' + page.written)),
    page.runs.length === 1 ? methodOf(page.runs[0]) : null,
    page.runs.length === 1 ? tiles(page, main) : comparison(page, main),
    make('div', { class: 'columns' }, evaluations(page, metrics), make('div', { class: 'stack' }, main ? metricChart(page, main, { zero: true }) : null, alarmsCard(page)), page.groups.length > 1 ? differencesCard(page) : null),
    page.remarks.length ? make('div', { class: 'card' }, make('h3', {}, 'Remarks'), make('ul', {}, page.remarks.map((text) => make('li', {}, seen(text))))) : null,
    settingsCard(page),
  );
}

function statusOf(page, run) {
  const of = run.total ? ` of ${run.total.toLocaleString('en-US')}` : '';
  const where = run.last === null ? 'no step finished' : `step ${run.last.toLocaleString('en-US')}${of}`;
  const state = run.stopped !== null ? 'stopped by an alarm' : run.over ? 'finished' : 'not finished';
  return [make('b', {}, where), make('span', { class: 'state ' + (run.over && run.stopped === null ? 'good' : 'open') }, state)];
}

function methodOf(run) {
  const get = (name) => run.settings[name];
  const known = (value) => value !== null && value !== undefined;
  const facts = [
    ['objective', get('actor.policy_loss.loss_mode')],
    ['teacher', get('actor.self_distillation.teacher_model') || get('actor.self_distillation.teacher_regularization')],
    ['model', get('model.path')],
    ['LoRA rank', get('model.lora.rank')],
    ['adapter from', get('model.lora.path')],
    ['cartridge slots', get('model.cartridge.tokens')],
    ['cartridge from', get('model.cartridge.path')],
    ['data', Array.isArray(get('data.train_files')) ? get('data.train_files').join(', ') : get('data.train_files')],
    ['questions × completions', known(get('data.train_batch_size')) ? `${get('data.train_batch_size')} × ${get('rollout.n')}` : null],
    ['learning rate', get('optimizer.lr')],
    ['seed', get('seed')],
  ].filter(([, value]) => known(value) && value !== '');
  if (!facts.length) return null;
  return make('dl', { class: 'facts' }, facts.map(([name, value]) => make('div', {}, make('dt', {}, name), make('dd', { title: String(value) }, seen(short(String(value), 60))))));
}

function tiles(page, main) {
  const group = page.groups[0];
  const wanted = [
    [main, main ? 'held-out ' + main.slice(5) : '', true],
    ['rollout/score_mean', 'score in training', true],
    ['rollout/solved_group_fraction', 'groups with a success', true],
    ['self_distillation/reprompt_sample_fraction', 're-prompted', true],
    ['teacher/divergence', 'divergence, nats/token', true],
    ['throughput/tokens_per_s', 'tokens/s, median', false],
  ];
  const cards = wanted.map(([metric, label, both]) => {
    const values = metric && valuesOf(page, group, metric);
    if (!values) return null;
    const share = isShare(metric, values.all);
    const before = both && values.steps[0] !== values.steps[1] ? make('span', { class: 'before' }, number(values.first.mean, share), make('span', { class: 'arrow' }, ' → ')) : null;
    const shown = both ? values.last.mean : median(values.all);
    return make('div', { class: 'tile', title: metric }, make('div', { class: 'label' }, label), make('div', { class: 'figure' }, before, number(shown, share)));
  });
  return make('div', { class: 'tiles' }, cards);
}

function median(values) {
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
}

function comparison(page, main) {
  const share = (metric) => {
    const all = page.groups.flatMap((group) => (valuesOf(page, group, metric) || { all: [] }).all);
    return isShare(metric, all);
  };
  const columns = [main, 'rollout/score_mean', 'throughput/tokens_per_s'].filter(Boolean);
  return make('div', { class: 'card wide' },
    make('table', {},
      make('thead', {}, make('tr', {}, make('th', {}, 'runs'), make('th', {}, 'steps'), columns.map((metric) => [make('th', {}, seen(short(metric, 40)), ', first'), make('th', {}, 'last'), make('th', {}, 'highest')]))),
      make('tbody', {}, page.groups.map((group, colour) => make('tr', {},
        make('td', { title: group.runs.map((run) => page.runs[run].name).join('\n') }, make('span', { class: 'key colour' + (colour % COLOURS) }), seen(group.label), group.runs.length > 1 ? make('span', { class: 'muted' }, ` ${group.runs.length} runs`) : null),
        make('td', {}, [...new Set(group.runs.map((run) => page.runs[run].last))].map((step) => step === null ? '–' : step.toLocaleString('en-US')).join(', ')),
        columns.map((metric) => {
          const values = valuesOf(page, group, metric);
          return ['first', 'last', 'best'].map((name) => make('td', {}, values ? told(values[name], share(metric)) : '–'));
        }))))));
}

function evaluations(page, metrics) {
  const names = metrics.filter((name) => /^eval\//.test(name) && !/\/(std@\d+|questions|completion_length.*)$/.test(name));
  if (!names.length) return make('div', { class: 'card' }, make('h3', {}, 'Evaluations'), make('p', { class: 'muted' }, 'None was made (data.val_files, trainer.test_freq).'));
  const order = ['mean', 'best', 'maj', 'worst'];
  const rank = (name) => (order.indexOf((/^eval\/[^/]+\/([a-z]+)@\d+$/.exec(name) || [])[1]) + 1 || 9);
  names.sort((a, b) => rank(a) - rank(b));
  const rows = (chosen) => chosen.map((name) => {
    const all = page.groups.map((group) => valuesOf(page, group, name));
    const share = isShare(name, all.flatMap((values) => (values ? values.all : [])));
    return make('tr', {}, make('td', {}, seen(name.slice(5))), all.map((values) => page.groups.length > 1
      ? make('td', {}, values ? [make('span', { class: 'muted' }, number(values.first.mean, share) + ' → '), told(values.last, share)] : '–')
      : [make('td', {}, values ? told(values.first, share) : '–'), make('td', { class: 'strong' }, values ? told(values.last, share) : '–'), make('td', {}, values ? told(values.best, share) : '–', values && values.bestStep !== null ? make('span', { class: 'muted' }, ` at ${values.bestStep}`) : null)]));
  });
  const [first] = page.groups.map((group) => valuesOf(page, group, names[0])).filter(Boolean);
  const heads = () => page.groups.length > 1 ? page.groups.map((group, colour) => make('th', {}, make('span', { class: 'key colour' + (colour % COLOURS) }), seen(short(group.label, 40)))) : [...(first.count > 1 ? ['first', 'last'] : first.steps.map((step) => 'step ' + step)), 'highest'].map((text) => make('th', {}, text));
  const table = (chosen) => make('table', {}, make('thead', {}, make('tr', {}, make('th', {}, 'metric'), heads())), make('tbody', {}, rows(chosen)));
  const important = names.filter((name) => rank(name) < 9), others = names.filter((name) => rank(name) === 9);
  return make('div', { class: 'card' }, make('h3', {}, 'Evaluations, before and after'), table(important.length ? important : others),
    important.length && others.length ? make('details', {}, make('summary', {}, counted(others.length, 'other metric')), table(others)) : null);
}

function alarmsCard(page) {
  const items = page.runs.flatMap((run) => {
    const name = page.runs.length > 1 ? run.name + ': ' : '';
    const skipped = (run.series['train/skipped_steps'] || [[], []])[1].reduce((a, b) => a + b, 0);
    return [
      ...run.alarms.map((alarm) => make('li', { class: alarm.steps.length ? 'bad' : '' }, name, make('code', {}, seen(alarm.rule)), ' ',
        alarm.steps.length ? make('b', {}, `held at ${counted(alarm.steps.length, 'step')}: ${spans(alarm.steps)}`) : make('span', { class: 'muted' }, 'never held'))),
      ...run.rollbacks.map(([step, to]) => make('li', { class: 'bad' }, `${name}step ${step} ended with the weights of step ${to}`)),
      run.stopped === null ? null : make('li', { class: 'bad' }, `${name}an alarm stopped the run at step ${run.stopped}`),
      skipped ? make('li', { class: 'bad' }, `${name}${counted(skipped, 'optimizer step')} skipped, whose gradients were not finite`) : null,
    ];
  }).filter(Boolean);
  return make('div', { class: 'card' }, make('h3', {}, 'Alarms'), items.length ? make('ul', { class: 'alarms' }, items) : make('p', { class: 'muted' }, 'No rules were set (alarms.rules), and no optimizer step was skipped.'));
}

function spans(steps) {
  const found = [];
  for (const step of steps) {
    const last = found[found.length - 1];
    if (last && step === last[1] + 1) last[1] = step;
    else found.push([step, step]);
  }
  const shown = found.slice(0, 12).map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(', ');
  return found.length > 12 ? shown + ' …' : shown;
}

function written(value) {
  return value === null || value === undefined ? '–' : typeof value === 'string' ? value : JSON.stringify(value);
}

function differencesCard(page) {
  const names = Object.keys(page.differences);
  if (!names.length) return null;
  return make('div', { class: 'card' }, make('h3', {}, 'Settings that differ'),
    make('table', {}, make('thead', {}, make('tr', {}, make('th', {}, 'setting'), page.groups.map((group, colour) => make('th', {}, make('span', { class: 'key colour' + (colour % COLOURS) }), seen(short(group.label, 40)))))),
      make('tbody', {}, names.map((name) => make('tr', {}, make('td', {}, seen(name)), page.differences[name].map((value) => make('td', {}, seen(short(written(value), 80)))))))));
}

function settingsCard(page) {
  const list = (run) => make('div', { class: 'scroll' }, make('table', {}, make('tbody', {}, Object.entries(run.settings).map(([name, value]) => make('tr', {}, make('td', {}, seen(name)), make('td', { class: 'left' }, seen(written(value))))))));
  const known = page.runs.filter((run) => Object.keys(run.settings).length);
  return known.map((run) => {
    const details = make('details', { class: 'card' }, make('summary', {}, page.runs.length > 1 ? ['Settings of ', seen(run.name)] : 'All settings'));
    details.addEventListener('toggle', () => { if (details.open && details.children.length === 1) details.append(list(run)); });
    return details;
  });
}

function drawCharts(page) {
  const section = document.getElementById('charts');
  const left = new Set(metricsOf(page).filter((name) => !name.startsWith('time/') && name !== 'run/compiled_late'));
  const content = [];
  const used = page.groups.length > 1 ? make('div', { class: 'legend' }, page.groups.map((group, colour) => make('span', {}, make('span', { class: 'key colour' + (colour % COLOURS) }), seen(group.label), group.runs.length > 1 ? make('span', { class: 'muted' }, ` ${group.runs.length} runs`) : null))) : null;
  const slider = make('input', { type: 'range', min: 0, max: 0.98, step: 0.02, value: 0, id: 'smoothing', oninput: (event) => { smoothing = Number(event.target.value); redraw(); } });
  const find = make('input', { type: 'search', placeholder: 'Find a metric', 'aria-label': 'Find a metric', oninput: (event) => {
    const text = event.target.value.trim().toLowerCase();
    for (const card of section.querySelectorAll('.chart')) card.hidden = !!text && !card.dataset.metric.toLowerCase().includes(text);
    for (const part of section.querySelectorAll('.part')) {
      part.hidden = !!text && ![...part.querySelectorAll('.chart')].some((card) => !card.hidden);
      if (text && part.tagName === 'DETAILS') part.open = true;
    }
  } });
  content.push(make('div', { class: 'tools' }, make('h2', {}, 'Curves'), used, make('span', { class: 'space' }), find, make('label', { for: 'smoothing' }, 'Smoothing'), slider));
  const cardOf = (name, options) => {
    const card = metricChart(page, name, { note: noteOf(name), ...options });
    if (card) card.dataset.metric = name;
    return card;
  };
  for (const [title, belongs, options] of SECTIONS) {
    const names = [...left].filter(belongs);
    if (title === 'Training') names.sort((a, b) => (TRAINING.indexOf(a) + 99 * (TRAINING.indexOf(a) < 0)) - (TRAINING.indexOf(b) + 99 * (TRAINING.indexOf(b) < 0)));
    if (title === 'Held-out evaluation') names.sort((a, b) => MAIN.test(b) - MAIN.test(a));
    for (const name of names) left.delete(name);
    const cards = names.map((name) => cardOf(name, options)).filter(Boolean);
    if (title === 'Speed') cards.push(...page.runs.map((run) => phaseChart(page, run)).filter(Boolean));
    if (cards.length) content.push(make('div', { class: 'part' }, make('h3', {}, title), make('div', { class: 'grid' }, cards)));
  }
  const rest = [...left];
  if (rest.length) {
    const details = make('details', { class: 'part' }, make('summary', {}, counted(rest.length, 'other metric')), make('div', { class: 'grid' }, rest.map((name) => cardOf(name, {}))));
    content.push(details);
  }
  if (content.length === 1) content.push(make('p', { class: 'muted' }, 'No step has been measured yet.'));
  fill(section, content);
}

// Stacked seconds of every phase of a step.
function phaseChart(page, run) {
  const steps = new Set();
  const phases = PHASES.filter((phase) => run.series[`time/${phase}_s`]);
  for (const phase of phases) for (const step of run.series[`time/${phase}_s`][0]) steps.add(step);
  if (!phases.length) return null;
  const all = [...steps].sort((a, b) => a - b);
  const lines = phases.map((phase) => {
    const [at, values] = run.series[`time/${phase}_s`];
    const known = new Map(at.map((step, i) => [step, values[i]]));
    return { label: phase, colour: PHASES.indexOf(phase), points: all.map((step) => [step, known.get(step) || 0]) };
  });
  // The first steps, or an evaluation, may take far longer than the others.
  const totals = all.map((_, i) => lines.reduce((sum, line) => sum + line.points[i][1], 0)).sort((a, b) => a - b);
  const card = new PhaseChart({ title: page.runs.length > 1 ? 'seconds by phase, ' + run.name : 'seconds by phase', lines, stacked: true, high: totals[totals.length - 1] }).card;
  card.append(make('div', { class: 'legend' }, lines.map((line) => make('span', {}, make('span', { class: 'key colour' + (line.colour % COLOURS) }), line.label))));
  card.dataset.metric = 'time ' + phases.join(' ');
  return card;
}

class PhaseChart extends Chart {
  range() {
    const found = super.range();
    return { ...found, low: 0, high: this.spec.high || 1 };
  }
}
