// The web console of the service. It uses the public routes, and shows their responses as text, never as markup.
//
// Every adapter and every session that was chosen has a view: elements of its own, which know what they belong to. One
// view is in the document; what arrives late for another one changes only that one. So a button acts on what it stands
// beside, whatever was clicked or has arrived since.

const ROOT = 'v1/continual';
// In sessionStorage: it outlives a reload, ends with the tab, and no other tab or later program at this address reads it.
const KEY = 'sdpo_jax.key';
const TOKEN = 'sdpo_jax.token.'; // And the id of a session.
const PLACE = 'sdpo_jax.place'; // What was on the screen: adapter, tab and session.
const AGAIN_MS = 2000; // Between two requests to a service that is starting.
const SETTLE_MS = 500; // What has just appeared cannot be decided on: a click at that moment was meant for something else.
const EXAMPLE = [{ type: 'function', function: { name: 'bash', description: 'Run a command.', parameters: { type: 'object', properties: { command: { type: 'string' } }, required: ['command'] } } }];
const by = (id) => document.getElementById(id);
const adapterViews = new Map(); // By the id of the adapter.
let current = null; // The view in the document.

// Escapes characters that are invisible or reorder text (sdpo_jax/invisible.py), since a person approves what is shown.
const visible = (text) => String(text).replace(INVISIBLE, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
// The same within JSON, where it stays JSON of the same value.
const visibleJson = (text) => text.replace(INVISIBLE, (c) => c.split('').map((unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, '0')}`).join(''));

const SHOWN = ['textContent', 'placeholder', 'ariaLabel'];

function element(tag, properties = {}, ...children) {
  const { dataset = {}, ...rest } = properties;
  for (const name of SHOWN) if (name in rest) rest[name] = visible(rest[name]);
  const made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.dataset, dataset);
  made.append(...children);
  return made;
}

function tell(target, text) {
  target.textContent = visible(text);
}

// Returns a copy of a template, and a function that finds its parts by their ids, in the document or not.
function copy(id) {
  const root = by(id).content.firstElementChild.cloneNode(true);
  return [root, (part) => root.querySelector(`#${part}`)];
}

const shown = (value, digits = 3) => (typeof value === 'number' ? value.toFixed(digits).replace('-', '−') : '–');
const when = (seconds) => new Date(1000 * seconds).toLocaleString();

class Refused extends Error {}
class Starting extends Refused {}

// Sends a request; a body that is a text is sent as it is.
async function ask(method, path, body, headers = {}) {
  const key = sessionStorage.getItem(KEY);
  const sent = { ...headers };
  if (key) sent.Authorization = `Bearer ${key}`;
  if (body !== undefined) sent['Content-Type'] = 'application/json';
  let answer;
  try {
    answer = await fetch(path, { method, headers: sent, body: typeof body === 'object' ? JSON.stringify(body) : body });
  } catch {
    throw new Refused('The service does not respond.');
  }
  const said = await answer.json().catch(() => ({}));
  if (answer.status === 401) by('key-form').hidden = false;
  if (!answer.ok) throw new (answer.status === 503 ? Starting : Refused)(said.error?.message ?? `The service responded with status ${answer.status}.`);
  return said;
}

// Returns all entries of a list, which has pages; shows each page.
async function listed(path, name, show = () => {}) {
  const found = [];
  for (let page = { has_more: true }, query = ''; page.has_more; query = `?after=${encodeURIComponent(page.next)}`) {
    page = await ask('GET', `${path}${query}`);
    found.push(...page[name]);
    show(page);
  }
  return found;
}

// Checks that a text is JSON of this kind, and returns it in an object as it was written: parsing would round numbers.
function spliced(values, name, text, fits, what) {
  let read;
  try {
    read = JSON.parse(text);
  } catch (error) {
    throw new Refused(`${what} are not JSON: ${error.message}`);
  }
  if (!fits(read)) throw new Refused(`${what} are of another kind: write ${name === 'tools' ? 'a list' : 'an object'}.`);
  return `${JSON.stringify(values).slice(0, -1)},${JSON.stringify(name)}:${text}}`;
}

function complain(error, view = document.body) {
  if (!(error instanceof Refused)) console.error(error);
  tell(by('error'), `${view.isConnected ? '' : 'In another view: '}${error.message}`);
  by('error').hidden = false;
}

// Runs work when a button or a form is used, unless that is inert; its buttons are disabled meanwhile.
function doing(target, event, work) {
  target.addEventListener(event, async (happened) => {
    happened.preventDefault();
    const buttons = [...(target.tagName === 'FORM' ? target.querySelectorAll('button') : [target])];
    const view = target.closest('section') ?? document.body;
    if (target.closest('[inert]') || buttons.some((button) => button.disabled)) return;
    by('error').hidden = true;
    for (const button of buttons) button.disabled = true;
    try {
      await work(happened);
    } catch (error) {
      complain(error, view);
    } finally {
      for (const button of buttons) button.disabled = false;
    }
  });
}

function button(text, work, plain = true) {
  const made = element('button', { type: 'button', textContent: text, className: plain ? 'plain' : '' });
  doing(made, 'click', work);
  return made;
}

// Makes choices and forms of results inert for a moment, since they have just come onto the screen.
function settle(root) {
  for (const box of root.querySelectorAll('[data-settles]:not([data-sent])')) {
    box.inert = true;
    clearTimeout(box.settling);
    box.settling = setTimeout(() => (box.inert = false), SETTLE_MS);
  }
}

const of = (adapter) => `${ROOT}/adapters/${encodeURIComponent(adapter.id)}`;

// Adapters.

async function list() {
  const adapters = await listed(`${ROOT}/adapters`, 'adapters');
  by('adapters').replaceChildren(
    ...adapters.map((adapter) => {
      const made = element('button', { type: 'button' }, element('bdi', { textContent: adapter.name }), element('small', { textContent: `version ${adapter.version}` }));
      made.setAttribute('aria-current', String(adapter.id === current?.adapter.id));
      doing(made, 'click', () => choose(adapter));
      return element('li', {}, made);
    }),
  );
  by('welcome').hidden = adapters.length > 0;
  by('choose').hidden = adapters.length === 0 || current !== null;
  for (const adapter of adapters) adapterViews.get(adapter.id)?.at(adapter.version);
  return adapters;
}

async function choose(adapter, tab) {
  if (!adapterViews.has(adapter.id)) adapterViews.set(adapter.id, adapterView(adapter));
  current = adapterViews.get(adapter.id);
  for (const id of ['welcome', 'choose']) by(id).hidden = true;
  by('place').replaceChildren(current.root);
  await Promise.all([current.turnTo(tab), list()]);
}

function adapterView(adapter) {
  const [root, part] = copy('adapter-view');
  const sessions = new Map(); // Views by the id of the session.
  const view = { adapter, root, at: (version) => tell(part('adapter-version'), `version ${version}`), turnTo };
  let tab = 'teach';
  let sample = null; // Of the answer that is shown.
  let session = null; // The view of the session that is shown.
  tell(part('adapter-name'), adapter.name);
  view.at(adapter.version);

  async function turnTo(name = tab) {
    tab = name;
    for (const each of root.querySelectorAll('[role=tab]')) {
      const chosen = each.dataset.tab === name;
      each.setAttribute('aria-selected', String(chosen));
      part(each.dataset.tab).hidden = !chosen;
    }
    remember();
    settle(root);
    if (name === 'versions') await versions();
    if (name === 'session') await (session === null ? listSessions() : session.read());
  }

  function remember() {
    if (current === view) sessionStorage.setItem(PLACE, JSON.stringify({ adapter: adapter.id, tab, session: session?.id }));
  }

  // Ask and correct.

  async function askModel() {
    const content = part('question').value;
    const temperature = Number(part('temperature').value);
    for (const id of ['answer', 'credit']) part(id).hidden = true;
    const said = await ask('POST', `${ROOT}/completions`, { model: adapter.id, messages: [{ role: 'user', content }], temperature });
    const [completion] = said.completions;
    sample = completion.sample_id;
    tell(part('answer-text'), completion.text);
    tell(part('answer-version'), `of version ${said.version}`);
    part('answer').hidden = false;
  }

  async function correct() {
    const given = { feedback: part('feedback').value.trim(), correction: part('correction').value.trim() };
    const texts = Object.fromEntries(Object.entries(given).filter(([, text]) => text));
    if (!Object.keys(texts).length) throw new Refused('Write what was wrong, or what would have been right.');
    const mode = part('trial').checked ? 'dry_run' : 'commit';
    credit(await ask('POST', `${of(adapter)}/feedback`, { sample_id: sample, ...texts, mode }));
    await list();
  }

  function credit(said) {
    const [item] = said.items;
    const known = item.per_token;
    const became = said.version_after === said.version_before ? `version ${said.version_before} stays` : `version ${said.version_before} became ${said.version_after}`;
    const nothing = said.unchanged ? ' There was nothing to learn: the gradient is 0.' : '';
    const why = said.accepted ? nothing : ` The new version was rejected: ${said.reason}`;
    tell(part('credit-summary'), `${became}. Mean log-prob of the answer: ${shown(item.mean_log_prob_before)} before, ${shown(item.mean_log_prob_after)} after.${why}`);
    const most = Math.max(1e-9, ...known.divergence.map(Math.abs));
    part('credit-tokens').replaceChildren(
      ...known.tokens.map((text, at) => {
        const change = known.log_probs_after[at] - known.log_probs_before[at];
        const strength = (0.6 * (1 - Math.exp(-Math.abs(change)))).toFixed(3);
        const span = element('span', { textContent: text, tabIndex: 0 });
        span.style.backgroundColor = `rgb(var(--${change < 0 ? 'down' : 'up'}) / ${strength})`;
        span.style.borderBottomColor = `color-mix(in srgb, var(--accent) ${Math.round((100 * Math.abs(known.divergence[at])) / most)}%, transparent)`;
        for (const event of ['mouseenter', 'focus']) span.addEventListener(event, () => token(known, at));
        return span;
      }),
    );
    part('credit-token').hidden = true;
    part('credit').hidden = false;
  }

  function token(known, at) {
    const rows = [
      ['log-prob before', shown(known.log_probs_before[at])],
      ['log-prob after', shown(known.log_probs_after[at])],
      ['log-prob of the teacher', shown(known.teacher_log_probs[at])],
      ['divergence', shown(known.divergence[at], 4)],
      ...(known.top?.[at] ?? []).map((each) => [`teacher: ${each.token}`, shown(each.log_prob)]),
    ];
    const table = part('credit-token');
    tell(table.caption, `Token ${at + 1}: ${known.tokens[at]}`);
    table.tBodies[0].replaceChildren(...rows.map(([name, value]) => element('tr', {}, element('th', { textContent: name }), element('td', { textContent: value }))));
    table.hidden = false;
  }

  // Sessions.

  async function listSessions() {
    const known = await listed(`${of(adapter)}/sessions`, 'sessions');
    part('known').hidden = known.length === 0;
    part('sessions').replaceChildren(
      ...known.toReversed().map((each) => {
        const made = element('button', { type: 'button' }, element('bdi', { textContent: each.settings.title || 'Session' }), element('small', { textContent: `${when(each.created)}${sessionStorage.getItem(TOKEN + each.id) ? '' : ', read only'}` }));
        doing(made, 'click', () => show(each.id, each));
        return element('li', {}, made);
      }),
    );
  }

  async function show(id, known = null) {
    if (id !== null && !sessions.has(id)) sessions.set(id, sessionView(adapter, id, known));
    session = id === null ? null : sessions.get(id);
    part('begin').hidden = session !== null;
    part('shown-session').hidden = session === null;
    part('session-place').replaceChildren(...(session === null ? [] : [session.root]));
    await turnTo('session');
  }
  view.show = show;

  async function open() {
    const system = part('system').value.trim() || null;
    const body = spliced({ system }, 'tools', part('tools').value.trim() || '[]', Array.isArray, 'The tools');
    const said = await ask('POST', `${of(adapter)}/sessions`, body);
    sessionStorage.setItem(TOKEN + said.session.id, said.token);
    await show(said.session.id, said.session);
  }

  // Versions.

  async function versions() {
    const known = await listed(`${of(adapter)}/versions`, 'versions');
    const newest = Math.max(...known.map((each) => each.version));
    part('version-rows').replaceChildren(
      ...known.toReversed().map((each) => {
        const metrics = each.details.metrics ?? {};
        const row = element('tr', {}, ...[each.version, when(each.created), (each.details.to === undefined ? each.reason : `undo to ${each.details.to}`) + (each.undone ? ', undone' : ''), shown(lossOf(each)), shown(metrics.mean_log_prob_change)].map((text) => element('td', { textContent: text })));
        const last = element('td', { dataset: { settles: '' } });
        if (each.version !== newest) {
          const undo = element('button', { type: 'button', className: 'plain', textContent: 'Undo to this' });
          doing(undo, 'click', async () => {
            await ask('POST', `${of(adapter)}/undo`, { to: each.version }, { 'If-Match': `"${newest}"` });
            await list();
            await versions();
          });
          last.append(undo);
        }
        row.append(last);
        return row;
      }),
    );
    settle(part('version-rows'));
    curve(part, known.filter((each) => lossOf(each) !== null).map((each) => [each.version, lossOf(each)]));
  }

  doing(part('ask'), 'submit', askModel);
  doing(part('correct'), 'submit', correct);
  doing(part('open'), 'submit', open);
  doing(part('example'), 'click', () => (part('tools').value = JSON.stringify(EXAMPLE, null, 2)));
  doing(part('all'), 'click', () => show(null));
  for (const each of root.querySelectorAll('[role=tab]')) doing(each, 'click', () => turnTo(each.dataset.tab));
  return view;
}

const lossOf = (version) => version.details.steps?.[0]?.loss ?? null;

function curve(part, points) {
  const svg = part('curve');
  part('curve-figure').hidden = points.length < 2;
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

// Sessions.

const SET = { object: (value) => value !== null && typeof value === 'object' && !Array.isArray(value), array: Array.isArray, null: (value) => value === null, integer: Number.isInteger };
const fits = (value, type) => type === undefined || [type].flat().some((name) => (SET[name] ? SET[name](value) : typeof value === name));

// Returns why a call cannot be approved; null: nothing is wrong with it.
function wrongOf(call, tools) {
  const tool = tools.map((each) => each.function ?? each).find((each) => each.name === call.name);
  if (!tool) return `This session has no tool ${call.name}.`;
  const given = Object.entries(JSON.parse(call.arguments));
  const { required, properties, additionalProperties } = tool.parameters ?? {};
  const missing = [required ?? []].flat().find((name) => !given.some(([each]) => each === name));
  if (missing !== undefined) return `${call.name} needs the argument ${missing}.`;
  const [unfit] = given.find(([name, value]) => (Object.hasOwn(properties ?? {}, name) ? !fits(value, properties[name]?.type) : additionalProperties === false)) ?? [];
  return unfit === undefined ? null : `${call.name} does not take this argument ${unfit}.`;
}

function sessionView(adapter, id, known) {
  const [root, part] = copy('session-view');
  const path = `${of(adapter)}/sessions/${encodeURIComponent(id)}`;
  const token = sessionStorage.getItem(TOKEN + id);
  const change = (rest, body) => ask('POST', path + rest, body, { 'X-Session-Token': token });
  const turns = new Map(); // The newest that is known of each, and its element, by number.
  let tools = null; // Null: the session was not read yet.
  let writing = false; // Whether a proposal is being sampled.

  const step = (turn) => (turn.results.length ? 2 : turn.decision ? 1 : 0);
  const awaited = (turn) => turn.calls.length > 0 && !turn.results.length; // An approved turn whose calls are to be run.

  function describe(session) {
    tools = session.settings.tools;
    tell(part('session-name'), `${session.settings.title || 'Session'}, ${when(session.created)}`);
  }

  async function read() {
    for (const turn of await listed(path, 'turns', (page) => describe(page.session))) put(turn);
    update();
  }

  // Shows a turn, unless this or a later state of it is shown already.
  function put(turn, lesson = turn.learned) {
    const old = turns.get(turn.n);
    if (old && (step(old.turn) > step(turn) || (step(old.turn) === step(turn) && old.turn.digest === turn.digest))) return;
    const item = turnItem(turn, lesson);
    const next = [...turns].filter(([n]) => n > turn.n).sort(([a], [b]) => a - b)[0];
    if (old) old.item.replaceWith(item);
    else part('turns').insertBefore(item, next?.[1].item ?? null);
    turns.set(turn.n, { turn, item });
    settle(item);
  }

  function update() {
    const newest = Math.max(-1, ...turns.keys());
    for (const [n, { item }] of turns) if (n < newest) item.querySelector('.choices, .results')?.remove();
    const last = turns.get(newest)?.turn;
    const closed = token === null || tools === null || writing;
    const waits = last && (last.status === 'open' || (['approved', 'edited'].includes(last.status) && awaited(last)));
    part('read-only').hidden = token !== null;
    part('writing').hidden = !writing;
    part('say').hidden = closed || waits;
    part('again').hidden = closed || waits || !last || last.status === 'answered';
  }

  async function propose(messages) {
    writing = true;
    update();
    try {
      put((await change('/turns', { messages })).turn);
    } catch (error) {
      await read().catch(() => {}); // Another tab may have asked before.
      throw error;
    } finally {
      writing = false;
      update();
    }
  }

  function line(role, text) {
    return element('div', {}, element('span', { className: 'role', textContent: `${role}: ` }), element('bdi', { textContent: text }));
  }

  function turnItem(turn, lesson) {
    const item = element('li', { dataset: { n: turn.n } });
    const wrong = turn.called.map((call) => wrongOf(call, tools));
    for (const message of turn.messages) item.append(line(message.role, message.content ?? ''));
    item.append(line(`version ${turn.version}`, turn.said ?? ''));
    turn.called.forEach((call, at) => {
      item.append(element('pre', { className: 'call', textContent: `${visible(call.name)} ${visibleJson(call.arguments)}` }));
      if (wrong[at]) item.append(element('p', { className: 'note call', textContent: wrong[at] }));
    });
    if (turn.fault) item.append(element('p', { className: 'note', textContent: turn.fault }));
    item.append(element('span', { className: 'status', textContent: turn.status }));
    if (turn.decision?.correction) item.append(line('correction', turn.decision.correction));
    for (const result of turn.results) item.append(line(result.ok ? 'result' : 'it failed', result.text));
    if (lesson) item.append(learned(lesson));
    if (token === null) return item;
    if (turn.status === 'open' || turn.status === 'answered') item.append(choices(turn, wrong));
    else if (turn.status !== 'denied' && awaited(turn)) item.append(results(turn));
    return item;
  }

  function choices(turn, wrong) {
    const box = element('div', { className: 'choices', dataset: { settles: '' } });
    const reason = element('input', { placeholder: 'what is wrong, or what to do instead', ariaLabel: 'Correction' });
    const decide = async (body) => {
      box.inert = true;
      box.dataset.sent = '';
      try {
        const said = await change(`/turns/${turn.n}/decision`, body);
        put(said.turn, said.learned);
      } catch (error) {
        delete box.dataset.sent;
        settle(box.parentElement);
        await read().catch(() => {}); // It may have been decided in another tab.
        throw error;
      }
      update();
      const denied = turns.get(turn.n).turn.status === 'denied';
      await Promise.all([list(), ...(denied ? [propose([])] : [])]);
    };
    // What the service would refuse is not offered; an edit approves the other calls.
    const approvable = (at) => !turn.fault && wrong.every((why, other) => why === null || other === at);
    const approve = button('Approve', () => decide({ decision: 'approve', digest: turn.digest }), false);
    const edits = []; // Of which one is open, and then stands in place of the approval.
    const open = (chosen) => {
      for (const { edited, send } of edits) edited.hidden = send.hidden = edited !== chosen;
      approve.hidden = chosen !== null;
      chosen?.focus();
    };
    if (turn.calls.length && approvable(-1)) box.append(approve);
    turn.called.forEach((call, at) => {
      if (!approvable(at) || !tools.some((tool) => (tool.function ?? tool).name === call.name)) return;
      const edited = element('textarea', { rows: 4, className: 'call', spellcheck: false, hidden: true, ariaLabel: `Arguments of ${call.name}` });
      edited.value = visibleJson(call.arguments);
      const send = button('Approve as edited', async () => {
        if (visibleJson(edited.value) !== edited.value) {
          edited.value = visibleJson(edited.value);
          throw new Refused('There were invisible characters, which are written out now: look again.');
        }
        await decide(spliced({ decision: 'edit', digest: turn.digest, call: at }, 'arguments', edited.value, SET.object, 'The arguments'));
      });
      send.hidden = true;
      edits.push({ edited, send });
      box.append(button(turn.calls.length > 1 ? `Edit ${at + 1}` : 'Edit', () => open(edited.hidden ? edited : null)), edited, send);
    });
    box.append(
      button('Deny', async () => {
        if (!reason.value.trim()) {
          reason.focus();
          throw new Refused('Write what is wrong: the adapter learns from it.');
        }
        await decide({ decision: 'deny', digest: turn.digest, correction: reason.value.trim() });
      }),
      reason,
    );
    return box;
  }

  function results(turn) {
    const form = element('form', { className: 'results', dataset: { settles: '' } });
    const fields = turn.called.map((call) => {
      const text = element('textarea', { rows: 2, className: 'call', ariaLabel: `Result of ${call.name}`, placeholder: `result of ${call.name}` });
      const failed = element('input', { type: 'checkbox' });
      form.append(text, element('label', {}, failed, ' it failed'));
      return { text, failed };
    });
    form.append(element('button', { textContent: 'Continue' }));
    doing(form, 'submit', async () => {
      const given = fields.map(({ text, failed }, call) => ({ call, ok: !failed.checked, text: text.value }));
      const said = await change(`/turns/${turn.n}/results`, { results: given, digest: turn.digest });
      put(said.turn, said.learned ?? said.turn.learned);
      await Promise.all([propose([]), list()]);
    });
    return form;
  }

  doing(part('say'), 'submit', async () => {
    const content = part('message').value.trim();
    if (!content) throw new Refused('Write a message.');
    part('message').value = '';
    try {
      await propose([{ role: 'user', content }]);
    } catch (error) {
      part('message').value ||= content;
      throw error;
    }
  });
  doing(part('again'), 'click', () => propose([]));
  if (known !== null) describe(known);
  update();
  return { id, root, read };
}

// Returns one line on what was learned, with the numbers below it on request.
function learned(said) {
  if (said.waiting) return element('p', { textContent: `${said.waiting} examples wait until there are enough to learn from.` });
  if (!said.accepted) return element('p', { textContent: `Nothing was learned: ${said.reason}` });
  if (said.unchanged) return element('p', { textContent: 'There was nothing to learn: the gradient is 0.' });
  const moved = (each) => `“${each.text}” is ${each.after < each.before ? 'less' : 'more'} likely (${shown(each.before, 2)} → ${shown(each.after, 2)})`;
  const took = said.seconds === null ? '' : ` in ${shown(said.seconds, 1)} s`;
  const summary = element('summary', { textContent: `Learned${took}: version ${said.version_after}${said.moved.length ? `; ${moved(said.moved[0])}` : ''}` });
  const answers = (said.answers ?? []).flatMap((each) => ['rejected', 'wanted'].filter((name) => each[name]).map((name) => [name, ...each[name]]));
  const rows = [
    `divergence from the teacher: ${shown(said.divergence_before)} → ${shown(said.divergence_after)} nats per token`,
    ...answers.map(([name, before, after]) => `log-prob of the whole ${name} answer: ${shown(before, 2)} → ${shown(after, 2)}`),
    ...said.moved.map(moved),
  ];
  const details = element('details', {}, summary, element('ul', {}, ...rows.map((text) => element('li', { textContent: text }))));
  return element('div', {}, details, ...(said.warnings ?? []).map((text) => element('p', { className: 'bad', textContent: text })));
}

// Start.

async function begin() {
  try {
    const known = await ask('GET', 'v1/capabilities');
    tell(by('model'), known.model.name);
    by('key-form').hidden = true;
    by('starting').hidden = true;
    tell(
      by('by-curl'),
      [
        `curl ${new URL(`${ROOT}/adapters`, document.baseURI)}`,
        ...(sessionStorage.getItem(KEY) ? ['-H "Authorization: Bearer $SDPO_API_KEY"'] : []),
        `-H 'Content-Type: application/json' -d '{"name": "first"}'`,
      ].join(' \\\n  '),
    );
    const adapters = await list();
    const place = JSON.parse(sessionStorage.getItem(PLACE) ?? '{}');
    const adapter = adapters.find((each) => each.id === place.adapter);
    if (adapter && current === null) {
      await choose(adapter, place.tab);
      if (place.session) await current.show(place.session);
    }
  } catch (error) {
    if (!(error instanceof Starting)) throw error;
    tell(by('starting'), `${error.message} This page retries by itself.`);
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
  const name = by('name').value;
  await create(name);
  if (by('name').value === name) by('name').value = '';
});
doing(by('first'), 'submit', () => create('first'));
window.addEventListener('focus', () => settle(document)); // The click that brings the window back is not a decision.
begin()
  .catch(complain)
  .finally(() => (document.documentElement.dataset.ready = 'yes'));
