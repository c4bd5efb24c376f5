// The tokens of a completion, coloured by a value, and the tokens that student and teacher would have written instead.

const COLOURINGS = {
  divergence: { label: 'divergence', unit: 'nats', signed: false, values: (rollout) => rollout.divergence },
  advantage: { label: 'advantage', unit: '', signed: true, values: (rollout) => rollout.advantages },
  credit: { label: 'teacher − student', unit: 'nats', signed: true, values: creditOf },
};

// Log-prob of each token under the teacher minus that under the student, clipped to ±10.
function creditOf(rollout) {
  const top = rollout.top_tokens;
  if (!top || !top.student || !top.teacher) return null;
  return top.teacher.own.map((value, i) => value === null || top.student.own[i] === null ? null : Math.max(-10, Math.min(10, value - top.student.own[i])));
}

function coloringsOf(rollout) {
  return Object.keys(COLOURINGS).filter((name) => (COLOURINGS[name].values(rollout) || []).some((value) => value !== null));
}

function shade(element, value, full, signed) {
  if (value === null || value === undefined || value === 0) return;
  const strength = Math.min(1, Math.sqrt(Math.abs(value) / full)) * 0.85;
  const name = !signed ? '--warm' : value > 0 ? '--plus' : '--minus';
  element.style.backgroundColor = `rgb(var(${name}) / ${strength.toFixed(3)})`;
}

function percent(share) {
  return share > 0 && share < 0.0005 ? share.toExponential(0) : (100 * share).toFixed(1) + '%';
}

function tokenText(text) {
  if (/^bytes:(\\x[0-9a-f]{2})+$/.test(text)) return [make('span', { class: 'unseen', title: 'A part of a character' }, text.slice(6))];
  const nodes = [];
  text.split('\n').forEach((line, i) => {
    if (i) nodes.push(make('span', { class: 'break' }, '↵'), '\n');
    if (line) nodes.push(...seen(line));
  });
  return nodes.length ? nodes : [make('span', { class: 'unseen' }, 'empty')];
}

class TokenView {
  // full: the value that gets the full colour, the same for all rollouts of the page.
  constructor(rollout, coloring, full, onPin) {
    this.rollout = rollout;
    this.coloring = coloring;
    this.onPin = onPin;
    this.pinned = null;
    this.values = coloring ? COLOURINGS[coloring].values(rollout) : null;
    this.full = full;
    this.element = this.make();
  }

  make() {
    const rollout = this.rollout;
    if (!rollout.tokens) return make('div', {}, make('pre', { class: 'text', dir: 'auto' }, rollout.completion ? seen(rollout.completion) : make('span', { class: 'muted' }, rollout.completion === '' ? 'nothing' : 'not in this page')), this.strip());
    const body = make('div', { class: 'tokens', tabindex: 0, role: 'group', 'aria-label': 'Tokens of the completion; ← and → move' });
    const signed = this.coloring && COLOURINGS[this.coloring].signed;
    this.spans = rollout.tokens.map((text, i) => {
      const span = make('span', { class: 'token' }, tokenText(text));
      span.dataset.token = i;
      if (this.values) shade(span, this.values[i], this.full, signed);
      return span;
    });
    body.append(...this.spans);
    const at = (event) => event.target.closest('.token');
    body.addEventListener('pointerover', (event) => {
      const span = at(event);
      if (span && this.pinned === null && event.pointerType !== 'touch') showHover(this.about(Number(span.dataset.token)), event.clientX, event.clientY);
    });
    body.addEventListener('pointerleave', () => { if (this.pinned === null) hideHover(); });
    body.addEventListener('click', (event) => {
      const span = at(event);
      if (span) this.pin(Number(span.dataset.token) === this.pinned ? null : Number(span.dataset.token));
    });
    this.panel = make('div', { class: 'panel', 'aria-live': 'polite', hidden: true });
    return make('div', {}, body, this.panel);
  }

  // Cells with numbers in place of tokens whose texts are unknown, as in older runs.
  strip() {
    if (!this.values) return null;
    const cells = this.values.slice(0, 4096).map((value, i) => {
      const cell = make('span', { class: 'cell', title: `token ${i + 1}: ${number(value)}` });
      shade(cell, value, this.full, COLOURINGS[this.coloring].signed);
      return cell;
    });
    return make('div', {}, make('div', { class: 'strip' }, cells), make('p', { class: 'hint' }, 'One cell for each token' + (this.rollout.completion === undefined ? '.' : '; where each begins was not recorded.')));
  }

  pin(token) {
    if (!this.spans || !this.spans.length) return;
    if (this.pinned !== null) this.spans[this.pinned].classList.remove('pinned');
    this.pinned = token === null ? null : Math.max(0, Math.min(this.spans.length - 1, token));
    this.onPin(this.pinned);
    hideHover();
    this.panel.hidden = this.pinned === null;
    if (this.pinned === null) return;
    this.spans[this.pinned].classList.add('pinned');
    this.spans[this.pinned].scrollIntoView({ block: 'nearest' });
    this.panel.replaceChildren(this.about(this.pinned));
  }

  move(by) {
    this.pin(this.pinned === null ? (by > 0 ? 0 : this.spans.length - 1) : this.pinned + by);
  }

  about(i) {
    const rollout = this.rollout, top = rollout.top_tokens;
    const facts = Object.values(COLOURINGS).map((coloring) => {
      const values = coloring.values(rollout);
      return values && values[i] !== null && values[i] !== undefined ? make('span', {}, coloring.label + ' ', make('b', {}, number(values[i])), coloring.unit ? ' ' + coloring.unit : '') : null;
    });
    const head = make('div', { class: 'head' }, make('code', {}, tokenText(rollout.tokens[i].slice(0, 80))), ` token ${i + 1} of ${rollout.tokens.length}`);
    const sides = top ? [['student', top.student], ['teacher', top.teacher]].map(([name, side]) => this.side(name, side, i)) : null;
    return make('div', { class: 'about' }, head, make('div', { class: 'facts' }, facts), sides ? make('div', { class: 'sides' }, sides) : null);
  }

  side(name, side, i) {
    if (!side) return make('div', { class: 'side' }, make('div', { class: 'label' }, name), make('p', { class: 'muted' }, 'says nothing of this completion'));
    const texts = this.rollout.top_tokens.texts, own = this.rollout.tokens[i];
    let chosen = false;
    const rows = side.ids[i].map((id, place) => {
      const text = id in texts ? texts[id] : '#' + id, log = side.log_probs[i][place];
      const share = log === null ? 0 : Math.exp(log);
      const isOwn = !chosen && text === own;
      chosen = chosen || isOwn;
      const bar = make('span', { class: 'bar' });
      bar.style.width = (100 * share).toFixed(1) + '%';
      return make('div', { class: 'candidate' + (isOwn ? ' own' : '') }, bar, make('code', {}, tokenText(text.slice(0, 40))), make('span', { class: 'share' }, percent(share)));
    });
    const told = side.own[i] === null ? 'not said' : percent(Math.exp(side.own[i]));
    return make('div', { class: 'side' }, make('div', { class: 'label' }, name, make('span', { class: 'muted' }, ' this token ' + told)), rows);
  }
}

function scaleOf(coloring, full) {
  const { signed, unit } = COLOURINGS[coloring];
  const cells = (signed ? [-1, -0.5, -0.15, 0, 0.15, 0.5, 1] : [0, 0.1, 0.25, 0.5, 1]).map((part) => {
    const cell = make('span', { class: 'cell' });
    shade(cell, part * full, full, signed);
    return cell;
  });
  return make('span', { class: 'scale' }, signed ? '−' + number(full) : '0', cells, number(full) + ' ' + unit);
}
