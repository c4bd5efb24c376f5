// The browser of rollouts: a list with filters, of which only the visible rows are drawn, and one rollout in full.

const ROW = 68; // Height of a row of the list, as in the style sheet.
const OUTCOMES = {
  all: ['all outcomes', () => true],
  success: ['success', (index, i, threshold) => index.score[i] !== null && index.score[i] >= threshold],
  failure: ['no success', (index, i, threshold) => index.score[i] !== null && index.score[i] < threshold],
  ungraded: ['ungraded', (index, i) => index.score[i] === null],
  taught: ['re-prompted', (index, i) => index.taught[i] === 1],
  untaught: ['not re-prompted', (index, i) => index.taught[i] === 0],
  cut: ['cut off at the limit', (index, i) => index.cut[i] === 1],
};
const ORDERS = {
  newest: ['newest first', (index) => (a, b) => index.step[b] - index.step[a] || a - b],
  oldest: ['oldest first', (index) => (a, b) => index.step[a] - index.step[b] || a - b],
  divergence: ['most divergent first', (index) => (a, b) => (index.divergence[b] ?? -1) - (index.divergence[a] ?? -1) || a - b],
  score: ['lowest score first', (index) => (a, b) => (index.score[a] ?? Infinity) - (index.score[b] ?? Infinity) || a - b],
  length: ['longest first', (index) => (a, b) => (index.length[b] ?? -1) - (index.length[a] ?? -1) || a - b],
};

class Browser {
  constructor(page, state) {
    this.page = page;
    this.index = page.rollouts;
    this.state = state; // {outcome, order, step, run, find, question, at, color, token}: stored in the address.
    this.list = [];
    this.chosen = null; // Number of the selected rollout.
    this.view = null;
    this.texts = this.index.questions.map((question) => (question.id + '\n' + question.text).toLowerCase());
  }

  draw() {
    const section = document.getElementById('rollouts');
    const total = this.index.step.length;
    if (!total) {
      section.replaceChildren(make('h2', {}, 'Rollouts'), make('p', { class: 'muted' }, 'None were written up to the last finished step (trainer.rollout_save_freq).'));
      return;
    }
    const select = (name, label, options) => make('select', { 'aria-label': label, onchange: (event) => this.change({ [name]: event.target.value || null }) },
      options.map(([value, text]) => make('option', { value, selected: value === (this.state[name] || options[0][0]) }, text)));
    const steps = [...new Set(this.index.step)].sort((a, b) => b - a);
    this.find = make('input', { type: 'search', placeholder: 'Find a question  ( / )', 'aria-label': 'Find a question', value: this.state.find || '', oninput: (event) => this.change({ find: event.target.value || null }) });
    this.count = make('span', { class: 'muted' });
    this.inner = make('div', { class: 'inner' });
    this.scroller = make('div', { class: 'list', role: 'listbox', tabindex: 0, 'aria-label': 'Rollouts' }, this.inner);
    this.detail = make('div', { class: 'detail', 'aria-live': 'polite' });
    this.scroller.addEventListener('scroll', () => this.drawRows());
    new ResizeObserver(() => this.drawRows()).observe(this.scroller);
    fill(
      section,
      make('div', { class: 'tools' }, make('h2', {}, 'Rollouts'), this.count, make('span', { class: 'space' }), this.find,
        select('outcome', 'Outcome', Object.entries(OUTCOMES).map(([name, [label]]) => [name, label])),
        select('step', 'Step', [['', 'all steps'], ...steps.map((step) => [String(step), 'step ' + step])]),
        this.page.runs.length > 1 ? select('run', 'Run', [['', 'all runs'], ...this.page.runs.map((run, i) => [String(i), run.name])]) : null,
        select('order', 'Order', Object.entries(ORDERS).map(([name, [label]]) => [name, label]))),
      (this.only = make('div', { class: 'only', hidden: true })),
      make('div', { class: 'browser' }, this.scroller, this.detail),
    );
    this.filter();
    const at = this.state.at === null ? -1 : this.list.indexOf(Number(this.state.at));
    this.choose(at >= 0 ? this.list[at] : this.list[0] ?? null);
  }

  change(values) {
    Object.assign(this.state, values);
    this.filter();
    if (!this.list.includes(this.chosen)) this.choose(this.list[0] ?? null);
    else this.show(this.chosen);
    saveState(this.state);
  }

  filter() {
    const { index, state } = this;
    const allowed = (OUTCOMES[state.outcome] || OUTCOMES.all)[1];
    const words = (state.find || '').toLowerCase().split(/\s+/).filter(Boolean);
    const matching = words.length ? this.texts.map((text) => words.every((word) => text.includes(word))) : null;
    this.list = [];
    for (let i = 0; i < index.step.length; i++) {
      if (state.run && index.run[i] !== Number(state.run)) continue;
      if (state.step && index.step[i] !== Number(state.step)) continue;
      if (state.question !== null && index.question[i] !== Number(state.question)) continue;
      if (matching && !matching[index.question[i]]) continue;
      if (!allowed(index, i, this.page.runs[index.run[i]].threshold)) continue;
      this.list.push(i);
    }
    this.list.sort((ORDERS[state.order] || ORDERS.newest)[1](index));
    this.count.textContent = this.list.length === index.step.length ? counted(this.list.length, 'rollout') : `${this.list.length.toLocaleString('en-US')} of ${counted(index.step.length, 'rollout')}`;
    this.inner.style.height = this.list.length * ROW + 'px';
    this.only.hidden = state.question === null;
    if (state.question !== null) {
      const question = index.questions[Number(state.question)];
      this.only.replaceChildren('Only ', make('b', {}, seen(short(question ? question.text || question.id : '', 90))), ' ', make('button', { type: 'button', onclick: () => this.change({ question: null }) }, 'All questions'));
    }
    this.drawRows();
  }

  drawRows() {
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW) - 4);
    const last = Math.min(this.list.length, first + Math.ceil(this.scroller.clientHeight / ROW) + 9);
    const rows = [];
    for (let place = first; place < last; place++) rows.push(this.row(this.list[place], place));
    this.inner.replaceChildren(...rows);
    if (!this.list.length) this.inner.replaceChildren(make('p', { class: 'muted pad' }, 'No rollout matches.'));
  }

  row(i, place) {
    const { index } = this;
    const question = index.questions[index.question[i]];
    const details = ['step ' + index.step[i], index.length[i] === null ? null : counted(index.length[i], 'token'), index.divergence[i] === null ? null : 'div. ' + number(index.divergence[i]), index.taught[i] ? 're-prompted' : null, index.cut[i] ? 'cut off' : null];
    if (this.page.runs.length > 1) details.unshift(this.page.runs[index.run[i]].name);
    const row = make('div', { class: 'rollout' + (i === this.chosen ? ' chosen' : ''), role: 'option', 'aria-selected': String(i === this.chosen), onclick: () => this.choose(i) },
      this.badge(i), make('div', { class: 'what' }, make('div', { class: 'question' }, seen(short(question.text || question.id, 110))), make('div', { class: 'said' }, seen(index.said[i])), make('div', { class: 'muted' }, details.filter(Boolean).join(' · '))));
    row.style.transform = `translateY(${place * ROW}px)`;
    return row;
  }

  badge(i) {
    const score = this.index.score[i], threshold = this.page.runs[this.index.run[i]].threshold;
    const kind = score === null ? 'none' : score >= threshold ? 'good' : score > 0 ? 'some' : 'bad';
    return make('span', { class: 'badge ' + kind, title: score === null ? 'ungraded' : 'score ' + score }, score === null ? '–' : number(score));
  }

  choose(i) {
    this.chosen = i;
    if (i === null) {
      this.state.at = null;
      this.detail.replaceChildren();
      return;
    }
    this.state.at = String(i);
    const place = this.list.indexOf(i), top = place * ROW;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top + ROW > this.scroller.scrollTop + this.scroller.clientHeight) this.scroller.scrollTop = top + ROW - this.scroller.clientHeight;
    this.drawRows();
    this.show(i);
    saveState(this.state);
  }

  step(by) {
    if (!this.list.length) return;
    const place = this.list.indexOf(this.chosen);
    this.state.token = null;
    this.choose(this.list[Math.max(0, Math.min(this.list.length - 1, place + by))]);
  }

  async show(i) {
    hideHover();
    let rollout;
    try {
      rollout = (await rolloutsOf(this.index.piece[i]))[this.index.place[i]];
    } catch (error) {
      this.detail.replaceChildren(make('p', { class: 'note' }, 'This rollout cannot be read: ' + error.message));
      return;
    }
    if (this.chosen !== i) return; // Another one was chosen meanwhile.
    const { index } = this;
    const run = this.page.runs[index.run[i]];
    const colorings = coloringsOf(rollout);
    const coloring = this.state.color === 'none' ? null : colorings.includes(this.state.color) ? this.state.color : colorings[0] || null;
    this.view = new TokenView(rollout, coloring, this.page.full[coloring] || 1, (token) => { this.state.token = token === null ? null : String(token); saveState(this.state); });
    const colors = make('span', { class: 'choice', role: 'group', 'aria-label': 'Colour of the tokens' }, [...colorings, 'none'].map((name) =>
      make('button', { type: 'button', class: name === (coloring || 'none') ? 'on' : '', onclick: () => this.change({ color: name }) }, name === 'none' ? 'plain' : COLOURINGS[name].label)));
    const same = index.question.reduce((count, question) => count + (question === index.question[i]), 0);
    const title = make('div', { class: 'title' }, this.badge(i), make('b', {}, this.page.runs.length > 1 ? [seen(run.name), ', '] : '', 'step ' + index.step[i]), make('span', { class: 'muted' }, seen(short(rollout.id || '', 60))), make('span', { class: 'space' }),
      same > 1 && this.state.question === null ? make('button', { type: 'button', title: 'Only this question (s)', onclick: () => this.change({ question: String(index.question[i]) }) }, `${same} of this question`) : null,
      make('button', { type: 'button', 'aria-label': 'Previous rollout', title: 'Previous (k)', onclick: () => this.step(-1) }, '↑'), make('button', { type: 'button', 'aria-label': 'Next rollout', title: 'Next (j)', onclick: () => this.step(1) }, '↓'));
    const end = { stop: 'ended by itself', length: 'cut off at the limit' }[rollout.finish_reason] || rollout.finish_reason;
    const facts = [rollout.score === undefined ? 'ungraded' + (rollout.ungraded ? ': ' + rollout.ungraded : '') : 'score ' + number(rollout.score), end, rollout.tokens ? counted(rollout.tokens.length, 'token') : null, index.divergence[i] === null ? null : 'mean divergence ' + number(index.divergence[i])];
    fill(
      this.detail,
      title,
      make('div', { class: 'pair' },
        make('div', {}, block('Prompt', messages(rollout.prompt)), rollout.feedback ? block('Feedback', make('pre', { class: 'text', dir: 'auto' }, seen(rollout.feedback))) : null),
        rollout.teacher_prompt ? block('Teacher prompt', messages(rollout.teacher_prompt)) : null),
      block(['Completion ', make('span', { class: 'muted' }, seen(facts.filter(Boolean).join(' · ')))], [colorings.length ? make('div', { class: 'coloring' }, colors, coloring ? scaleOf(coloring, this.view.full) : null) : null, this.view.element,
        rollout.tokens && !rollout.top_tokens ? make('p', { class: 'hint' }, 'What else student and teacher would have written was not recorded (trainer.record_top_tokens=20).') : null]),
      rollout.rewards ? block('Rewards', make('table', {}, make('tbody', {}, Object.entries(rollout.rewards).map(([name, value]) => make('tr', {}, make('td', {}, seen(name)), make('td', {}, typeof value === 'number' ? number(value) : '–')))))) : null,
    );
    if (this.state.token !== null) this.view.pin(Number(this.state.token));
  }
}

function block(title, content) {
  return make('section', { class: 'block' }, make('h3', {}, title), content);
}

function messages(all) {
  if (!all) return make('p', { class: 'muted' }, 'not in this page');
  return all.map((message) => make('div', { class: 'message' }, message.role && (all.length > 1 || message.role !== 'user') ? make('span', { class: 'role' }, seen(message.role)) : null, make('pre', { class: 'text', dir: 'auto' }, seen(message.content))));
}
