// Start of the page, keyboard shortcuts, light and dark, and reloading while the run goes on.

const STATE = ['outcome', 'order', 'step', 'run', 'find', 'question', 'at', 'color', 'token'];
const KEYS = [
  ['j, ↓ / k, ↑', 'next / previous rollout'],
  ['→ / ←', 'next / previous token, with its alternatives'],
  ['Esc', 'let go of the token'],
  ['s', 'only this question, or all of them'],
  ['c', 'next colouring of the tokens'],
  ['/', 'find a question'],
  ['d', 'dark or light'],
  ['p', 'pause, or go on with, the reloading of a page that is followed'],
  ['?', 'these keys'],
];
let browser = null, paused = false;

function addressed() {
  const values = new URLSearchParams(location.hash.includes('=') ? location.hash.slice(1) : '');
  return Object.fromEntries(STATE.map((name) => [name, values.get(name)]));
}

function saveState(state) {
  const values = new URLSearchParams();
  for (const name of STATE) if (state[name] !== null && state[name] !== undefined && state[name] !== '') values.set(name, state[name]);
  try {
    history.replaceState(null, '', '#' + values);
  } catch (error) {
    console.info('The selection cannot be stored in the address:', error.message);
  }
}

function remembered(name, value) {
  try {
    if (value === undefined) return localStorage.getItem('sdpo_jax.report.' + name);
    localStorage.setItem('sdpo_jax.report.' + name, value);
  } catch (error) {
    console.info('Settings of the page cannot be stored:', error.message); // Some browsers store nothing for local files.
  }
  return null;
}

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}

function setTheme(theme) {
  if (theme === 'dark' || theme === 'light') document.documentElement.dataset.theme = theme;
  document.getElementById('theme').textContent = isDark() ? 'Light' : 'Dark';
}

function toggleTheme() {
  const theme = isDark() ? 'light' : 'dark';
  setTheme(theme);
  remembered('theme', theme);
}

function showKeys() {
  const help = document.getElementById('help');
  help.replaceChildren(make('h3', {}, 'Keys'), make('table', {}, make('tbody', {}, KEYS.map(([keys, meaning]) => make('tr', {}, make('td', {}, make('kbd', {}, keys)), make('td', { class: 'left' }, meaning))))), make('form', { method: 'dialog' }, make('button', {}, 'Close')));
  help.showModal();
}

function onKey(event) {
  const typing = event.target.closest('input, select, textarea');
  if (event.key === 'Escape') {
    if (typing) typing.blur();
    if (browser && browser.view) browser.view.pin(null);
    return;
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.getElementById('help').open) return;
  const inBrowser = browser && browser.list.length > 0;
  const actions = {
    j: () => inBrowser && (toRollouts(), browser.step(1)),
    k: () => inBrowser && (toRollouts(), browser.step(-1)),
    s: () => inBrowser && browser.change({ question: browser.state.question === null ? String(browser.index.question[browser.chosen]) : null }),
    c: () => inBrowser && nextColoring(),
    '/': () => browser && browser.find && (document.getElementById('rollouts').scrollIntoView(), browser.find.focus()),
    d: toggleTheme,
    p: togglePause,
    '?': showKeys,
  };
  const atList = document.activeElement && document.activeElement.closest('#rollouts');
  if (inBrowser && (atList || nearRollouts())) {
    Object.assign(actions, { ArrowDown: () => browser.step(1), ArrowUp: () => browser.step(-1), ArrowRight: () => browser.view && browser.view.spans && browser.view.move(1), ArrowLeft: () => browser.view && browser.view.spans && browser.view.move(-1) });
  }
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

// Whether the rollouts section is in view.
function nearRollouts() {
  return document.getElementById('rollouts').getBoundingClientRect().top < innerHeight / 2;
}

function toRollouts() {
  if (!nearRollouts()) document.getElementById('rollouts').scrollIntoView();
}

async function nextColoring() {
  const rollout = (await rolloutsOf(browser.index.piece[browser.chosen]))[browser.index.place[browser.chosen]];
  const names = [...coloringsOf(rollout), 'none'], now = browser.view.coloring || 'none';
  browser.change({ color: names[(names.indexOf(now) + 1) % names.length] });
}

function togglePause() {
  paused = !paused;
}

// With --follow the command rewrites the file; the page checks for a newer version unless it is being used.
function follow(seconds) {
  const live = document.getElementById('live');
  live.hidden = false;
  const busy = () => document.hidden || !!String(getSelection()) || (browser && browser.view && browser.view.pinned !== null) || !!document.activeElement.closest('input, select') || document.getElementById('help').open;
  let left = seconds;
  setInterval(() => {
    if (paused) live.textContent = 'paused';
    else if (busy()) live.textContent = 'live';
    else {
      left -= 1;
      live.textContent = 'live';
      if (left <= 0) {
        try {
          sessionStorage.setItem('scroll', String(scrollY));
        } catch (error) {
          console.info('The scroll position cannot be stored:', error.message);
        }
        location.reload();
      }
    }
    live.className = paused ? 'paused' : '';
  }, 1000);
  live.textContent = 'live';
  live.title = 'Updated while the run goes on (p pauses)';
}

async function start() {
  setTheme(remembered('theme'));
  document.getElementById('theme').addEventListener('click', toggleTheme);
  document.getElementById('keys').addEventListener('click', showKeys);
  addEventListener('keydown', onKey);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => setTheme(null));
  const page = await unpacked('summary');
  const state = addressed(), linked = state.at !== null;
  drawOverview(page);
  drawCharts(page);
  browser = new Browser(page, state);
  browser.draw();
  if (page.reload_s) follow(page.reload_s);
  let scroll = null;
  try {
    scroll = sessionStorage.getItem('scroll');
    sessionStorage.removeItem('scroll');
  } catch (error) {
    console.info('The scroll position cannot be restored:', error.message);
  }
  if (scroll !== null) scrollTo(0, Number(scroll));
  else if (linked) document.getElementById('rollouts').scrollIntoView();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

start().catch((error) => {
  const note = document.getElementById('failed');
  note.textContent = 'The page cannot show its data: ' + error.message;
  note.hidden = false;
});
