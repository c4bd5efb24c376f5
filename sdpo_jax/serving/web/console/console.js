// The web console of the service. It uses the public routes, and shows their responses as text, never as markup.

const ROOT = 'v1/continual';
const KEY = 'sdpo_jax.key'; // In sessionStorage, which ends with the tab. Tokens of sessions are only in memory.
const AGAIN_MS = 2000; // Between two requests to a service that is starting.
const by = (id) => document.getElementById(id);
const state = { adapter: null, session: null, token: null, sample: null };

function element(tag, properties = {}, ...children) {
  const { dataset = {}, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.dataset, dataset);
  made.append(...children);
  return made;
}

const shown = (value, digits = 3) => (typeof value === 'number' ? value.toFixed(digits) : '–');
const when = (seconds) => new Date(1000 * seconds).toLocaleString();

// Escapes characters that are invisible or reorder text (sdpo_jax/invisible.py), since a person approves what is shown.
const visible = (text) => text.replace(INVISIBLE, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);

class Refused extends Error {}
class Starting extends Refused {}

async function ask(method, path, body, headers = {}) {
  const key = sessionStorage.getItem(KEY);
  const sent = { ...headers };
  if (key) sent.Authorization = `Bearer ${key}`;
  if (body !== undefined) sent['Content-Type'] = 'application/json';
  let answer;
  try {
    answer = await fetch(path, { method, headers: sent, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Refused('The service does not respond.');
  }
  const said = await answer.json().catch(() => ({}));
  if (answer.status === 401) by('key-form').hidden = false;
  if (!answer.ok) throw new (answer.status === 503 ? Starting : Refused)(said.error?.message ?? `The service responded with status ${answer.status}.`);
  return said;
}

function complain(error) {
  if (!(error instanceof Refused)) console.error(error);
  by('error').textContent = error.message;
  by('error').hidden = false;
}

// Runs work when a button or a form is used; its buttons are disabled meanwhile.
function doing(target, event, work) {
  target.addEventListener(event, async (happened) => {
    happened.preventDefault();
    const buttons = [...(target.tagName === 'FORM' ? target.querySelectorAll('button') : [target])];
    if (buttons.some((button) => button.disabled)) return;
    by('error').hidden = true;
    for (const button of buttons) button.disabled = true;
    try {
      await work(happened);
    } catch (error) {
      complain(error);
    } finally {
      for (const button of buttons) button.disabled = false;
    }
  });
}

const of = (adapter) => `${ROOT}/adapters/${encodeURIComponent(adapter.id)}`;

// Adapters.

async function list() {
  const { adapters } = await ask('GET', `${ROOT}/adapters`);
  by('adapters').replaceChildren(
    ...adapters.map((adapter) => {
      const button = element('button', { type: 'button' }, element('span', { textContent: adapter.name }), element('small', { textContent: `version ${adapter.version}` }));
      button.setAttribute('aria-current', String(adapter.id === state.adapter?.id));
      doing(button, 'click', () => choose(adapter));
      return element('li', {}, button);
    }),
  );
  by('welcome').hidden = adapters.length > 0;
  by('choose').hidden = adapters.length === 0 || state.adapter !== null;
  const same = adapters.find((adapter) => adapter.id === state.adapter?.id);
  if (same) {
    state.adapter = same;
    by('adapter-version').textContent = `version ${same.version}`;
  }
}

async function choose(adapter) {
  Object.assign(state, { adapter, session: null, token: null, sample: null });
  by('adapter').hidden = false;
  by('adapter-name').textContent = adapter.name;
  for (const id of ['welcome', 'choose', 'answer', 'credit', 'say']) by(id).hidden = true;
  by('open').hidden = false;
  by('turns').replaceChildren();
  await list();
  await tab('teach');
}

async function tab(name) {
  for (const button of document.querySelectorAll('[role=tab]')) {
    const chosen = button.dataset.tab === name;
    button.setAttribute('aria-selected', String(chosen));
    by(button.dataset.tab).hidden = !chosen;
  }
  if (name === 'versions') await versions();
}

// Ask and correct.

async function askModel() {
  const content = by('question').value;
  const temperature = Number(by('temperature').value);
  const said = await ask('POST', `${ROOT}/completions`, { model: state.adapter.id, messages: [{ role: 'user', content }], temperature });
  const [completion] = said.completions;
  state.sample = completion.sample_id;
  by('answer-text').textContent = visible(completion.text);
  by('answer-version').textContent = `of version ${said.version}`;
  by('answer').hidden = false;
  by('credit').hidden = true;
}

async function correct() {
  const given = { feedback: by('feedback').value.trim(), correction: by('correction').value.trim() };
  const texts = Object.fromEntries(Object.entries(given).filter(([, text]) => text));
  if (!Object.keys(texts).length) throw new Refused('Write what was wrong, or what would have been right.');
  const mode = by('trial').checked ? 'dry_run' : 'commit';
  const said = await ask('POST', `${of(state.adapter)}/feedback`, { sample_id: state.sample, ...texts, mode });
  credit(said);
  await list();
}

function credit(said) {
  const [item] = said.items;
  const known = item.per_token;
  const became = said.version_after === said.version_before ? `version ${said.version_before} stays` : `version ${said.version_before} became ${said.version_after}`;
  const why = said.accepted ? '' : ` The new version was rejected: ${said.reason}`;
  by('credit-summary').textContent =
    `${became}. Mean log-prob of the answer: ${shown(item.mean_log_prob_before)} before, ${shown(item.mean_log_prob_after)} after.${why}`;
  const most = Math.max(1e-9, ...known.divergence.map(Math.abs));
  by('credit-tokens').replaceChildren(
    ...known.tokens.map((text, at) => {
      const change = known.log_probs_after[at] - known.log_probs_before[at];
      const strength = (0.6 * (1 - Math.exp(-Math.abs(change)))).toFixed(3);
      const span = element('span', { textContent: visible(text), tabIndex: 0 });
      span.style.backgroundColor = `rgb(var(--${change < 0 ? 'down' : 'up'}) / ${strength})`;
      span.style.borderBottomColor = `color-mix(in srgb, var(--accent) ${Math.round((100 * Math.abs(known.divergence[at])) / most)}%, transparent)`;
      for (const event of ['mouseenter', 'focus']) span.addEventListener(event, () => token(known, at));
      return span;
    }),
  );
  by('credit-token').hidden = true;
  by('credit').hidden = false;
}

function token(known, at) {
  const rows = [
    ['log-prob before', shown(known.log_probs_before[at])],
    ['log-prob after', shown(known.log_probs_after[at])],
    ['log-prob of the teacher', shown(known.teacher_log_probs[at])],
    ['divergence', shown(known.divergence[at], 4)],
    ...(known.top?.[at] ?? []).map((each) => [`teacher: ${visible(each.token)}`, shown(each.log_prob)]),
  ];
  const table = by('credit-token');
  table.caption.textContent = `Token ${at + 1}: ${visible(known.tokens[at])}`;
  table.tBodies[0].replaceChildren(...rows.map(([name, value]) => element('tr', {}, element('th', { textContent: name }), element('td', { textContent: value }))));
  table.hidden = false;
}

// Sessions.

const session = () => `${of(state.adapter)}/sessions/${encodeURIComponent(state.session)}`;
const change = (path, body) => ask('POST', `${session()}${path}`, body, { 'X-Session-Token': state.token });

async function open() {
  const text = by('tools').value.trim();
  let tools = [];
  try {
    tools = text ? JSON.parse(text) : [];
  } catch (error) {
    throw new Refused(`The tools are not JSON: ${error.message}`);
  }
  const system = by('system').value.trim() || null;
  const said = await ask('POST', `${of(state.adapter)}/sessions`, { system, tools });
  Object.assign(state, { session: said.session.id, token: said.token });
  by('turns').replaceChildren();
  by('open').hidden = true;
  by('say').hidden = false;
}

async function say() {
  const content = by('message').value.trim();
  await propose(content ? [{ role: 'user', content }] : []);
  by('message').value = '';
}

async function propose(messages) {
  const { turn } = await change('/turns', { messages });
  by('turns').append(turnItem(turn));
}

function turnItem(turn) {
  const item = element('li');
  for (const message of turn.messages) item.append(element('div', {}, element('span', { className: 'role', textContent: `${message.role}: ` }), element('span', { textContent: visible(message.content ?? '') })));
  item.append(element('div', {}, element('span', { className: 'role', textContent: `version ${turn.version}: ` }), element('span', { textContent: visible(turn.said ?? '') })));
  if (turn.fault) item.append(element('p', { className: 'note', textContent: visible(turn.fault) }));
  turn.calls.forEach((call) => item.append(element('pre', { className: 'call', textContent: `${visible(call.name)} ${visible(JSON.stringify(call.arguments, null, 2))}` })));
  const status = element('span', { className: 'status', textContent: turn.status });
  item.append(status);
  if (turn.status === 'open' || turn.status === 'answered') item.append(choices(turn, item, status));
  return item;
}

function choices(turn, item, status) {
  const box = element('div', { className: 'choices' });
  const reason = element('input', { placeholder: 'what is wrong, or what to do instead', ariaLabel: 'Correction' });
  const decide = async (decision) => {
    const said = await change(`/turns/${turn.n}/decision`, decision);
    status.textContent = said.turn.status;
    box.remove();
    if (said.learned) item.append(element('p', { textContent: learnedText(said.learned) }));
    if (said.turn.status === 'denied') await propose([]);
    else if (said.turn.calls.length) item.append(results(said.turn));
    await list();
  };
  const button = (text, work, plain = true) => {
    const made = element('button', { type: 'button', textContent: text, className: plain ? 'plain' : '' });
    doing(made, 'click', work);
    return made;
  };
  if (turn.calls.length) {
    box.append(button('Approve', () => decide({ decision: 'approve' }), false));
    turn.calls.forEach((call, at) => {
      const edited = element('textarea', { rows: 4, value: JSON.stringify(call.arguments, null, 2), hidden: true, ariaLabel: `Arguments of ${call.name}` });
      const edit = button(turn.calls.length > 1 ? `Edit ${at + 1}` : 'Edit', async () => {
        if (edited.hidden) {
          edited.hidden = false;
          edited.focus();
          return;
        }
        let values;
        try {
          values = JSON.parse(edited.value);
        } catch (error) {
          throw new Refused(`The arguments are not JSON: ${error.message}`);
        }
        await decide({ decision: 'edit', call: at, arguments: values });
      });
      box.append(edit, edited);
    });
  }
  box.append(
    button('Deny', async () => {
      if (!reason.value.trim()) {
        reason.focus();
        throw new Refused('Write what is wrong: the adapter learns from it.');
      }
      await decide({ decision: 'deny', correction: reason.value.trim() });
    }),
    reason,
  );
  return box;
}

function learnedText(learned) {
  if (learned.waiting) return `${learned.waiting} examples wait until there are enough to learn from.`;
  if (!learned.accepted) return `Nothing was learned: ${learned.reason}`;
  const moved = learned.moved.map((each) => `${visible(each.text)} ${shown(each.before, 2)} → ${shown(each.after, 2)}`).join(', ');
  return (
    `Learned in ${shown(learned.seconds, 2)} s: version ${learned.version_before} became ${learned.version_after}; divergence ` +
    `${shown(learned.divergence_before)} → ${shown(learned.divergence_after)}` + (moved ? `; log-probs that changed most: ${moved}` : '')
  );
}

function results(turn) {
  const form = element('form');
  const fields = turn.calls.map((call) => {
    const text = element('textarea', { rows: 2, ariaLabel: `Result of ${call.name}`, placeholder: `result of ${call.name}` });
    const failed = element('input', { type: 'checkbox' });
    form.append(text, element('label', {}, failed, ' it failed'));
    return { text, failed };
  });
  form.append(element('button', { textContent: 'Continue' }));
  doing(form, 'submit', async () => {
    const given = fields.map(({ text, failed }, call) => ({ call, ok: !failed.checked, text: text.value }));
    const said = await change(`/turns/${turn.n}/results`, { results: given });
    if (said.learned) form.before(element('p', { textContent: learnedText(said.learned) }));
    form.remove();
    await propose([]);
    await list();
  });
  return form;
}

// Versions.

async function versions() {
  const { versions: known } = await ask('GET', `${of(state.adapter)}/versions`);
  const newest = Math.max(...known.map((each) => each.version));
  by('version-rows').replaceChildren(
    ...known.toReversed().map((each) => {
      const metrics = each.details.metrics ?? {};
      const row = element('tr', {}, ...[each.version, when(each.created), each.details.to === undefined ? each.reason : `undo to ${each.details.to}`, shown(lossOf(each)), shown(metrics.mean_log_prob_change)].map((text) => element('td', { textContent: text })));
      const last = element('td');
      if (each.version !== newest) {
        const undo = element('button', { type: 'button', className: 'plain', textContent: 'Undo to this' });
        doing(undo, 'click', async () => {
          await ask('POST', `${of(state.adapter)}/undo`, { to: each.version }, { 'If-Match': `"${newest}"` });
          await list();
          await versions();
        });
        last.append(undo);
      }
      row.append(last);
      return row;
    }),
  );
  curve(known.filter((each) => lossOf(each) !== null).map((each) => [each.version, lossOf(each)]));
}

const lossOf = (version) => version.details.steps?.[0]?.loss ?? null;

function curve(points) {
  const svg = by('curve');
  by('curve-figure').hidden = points.length < 2;
  const node = (name, attributes, text = '') => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  };
  const [left, right, top, bottom] = [48, 630, 12, 150];
  const values = points.map(([, value]) => value);
  const high = Math.max(...values, 1e-9);
  const low = Math.min(...values, 0);
  const first = points[0]?.[0] ?? 0;
  const last = points.at(-1)?.[0] ?? 1;
  const x = (version) => left + ((right - left) * (version - first)) / Math.max(1, last - first);
  const y = (value) => bottom - ((bottom - top) * (value - low)) / (high - low);
  svg.replaceChildren(
    ...[low, high].flatMap((value) => [node('line', { x1: left, x2: right, y1: y(value), y2: y(value) }), node('text', { x: left - 6, y: y(value) + 4, 'text-anchor': 'end' }, shown(value))]),
    ...[first, last].map((version) => node('text', { x: x(version), y: bottom + 18, 'text-anchor': 'middle' }, String(version))),
    node('polyline', { points: points.map(([version, value]) => `${x(version)},${y(value)}`).join(' ') }),
    ...points.map(([version, value]) => node('circle', { cx: x(version), cy: y(value), r: 3 })),
  );
}

// Start.

async function begin() {
  try {
    const known = await ask('GET', 'v1/capabilities');
    by('model').textContent = known.model.name;
    by('key-form').hidden = true;
    by('starting').hidden = true;
    by('by-curl').textContent = [
      `curl ${new URL(`${ROOT}/adapters`, document.baseURI)}`,
      ...(sessionStorage.getItem(KEY) ? ['-H "Authorization: Bearer $SDPO_API_KEY"'] : []),
      `-H 'Content-Type: application/json' -d '{"name": "first"}'`,
    ].join(' \\\n  ');
    await list();
  } catch (error) {
    if (!(error instanceof Starting)) throw error;
    by('starting').textContent = `${error.message} This page retries by itself.`;
    by('starting').hidden = false;
    setTimeout(() => begin().catch(complain), AGAIN_MS);
  }
}

async function create(name) {
  await choose(await ask('POST', `${ROOT}/adapters`, { name }));
}

doing(by('key-form'), 'submit', async () => {
  sessionStorage.setItem(KEY, by('key').value);
  await begin();
});
doing(by('create'), 'submit', async () => {
  await create(by('name').value);
  by('name').value = '';
});
doing(by('first'), 'submit', () => create('first'));
doing(by('ask'), 'submit', askModel);
doing(by('correct'), 'submit', correct);
doing(by('open'), 'submit', open);
doing(by('say'), 'submit', say);
for (const button of document.querySelectorAll('[role=tab]')) doing(button, 'click', () => tab(button.dataset.tab));
begin()
  .catch(complain)
  .finally(() => (document.documentElement.dataset.ready = 'yes'));
