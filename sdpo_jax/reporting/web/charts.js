// Line charts as SVG, drawn when they scroll into view.

const COLOURS = 6; // Number of line colours in the style sheet: --line0 …
const CHART = { height: 180, right: 10, top: 8, bottom: 22 };
const LETTER = 6.4; // Width of a digit of an axis label, in pixels.
let smoothing = 0;
const charts = new Set();
const inView = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      entry.target.chart.visible = entry.isIntersecting;
      if (entry.isIntersecting) entry.target.chart.draw();
    }
  },
  { rootMargin: '200px' },
);
const resized = new ResizeObserver((entries) => {
  for (const entry of entries) entry.target.chart.stale();
});

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9) || 0; i * step <= high + step * 1e-9; i++) found.push(i * step + 0);
  return found;
}

// A running mean that starts at the first value.
function smoothed(points, weight) {
  let mean = 0, total = 0;
  return points.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    total = weight * total + (1 - weight);
    return [x, mean / total];
  });
}

// Keeps only the points that can be seen: of those in one pixel column, the first, the lowest, the highest and the last.
function thinned(points, columns) {
  if (points.length <= 4 * columns) return points;
  const first = points[0][0], width = (points[points.length - 1][0] - first) / columns || 1;
  const found = [];
  for (let i = 0; i < points.length; ) {
    const column = Math.floor((points[i][0] - first) / width);
    let end = i, low = i, high = i;
    while (end < points.length && Math.floor((points[end][0] - first) / width) === column) {
      if (points[end][1] < points[low][1]) low = end;
      if (points[end][1] > points[high][1]) high = end;
      end++;
    }
    for (const place of [...new Set([i, low, high, end - 1])].sort((a, b) => a - b)) found.push(points[place]);
    i = end;
  }
  return found;
}

class Chart {
  // spec: {title, note, lines: [{label, colour, points: [[x, y]], faint: [points …], band: [[x, low, high]]}],
  // marks: [{x, kind, label}], share, zero, stacked}
  constructor(spec) {
    this.spec = spec;
    this.visible = false;
    this.drawn = null;
    this.plot = make('div', { class: 'plot' });
    this.card = make(
      'figure',
      { class: 'card chart' },
      make('figcaption', {}, make('span', { class: 'name', title: spec.title }, seen(spec.title)), make('span', { class: 'value' }, this.latest())),
      this.plot,
      spec.note ? make('p', { class: 'hint' }, spec.note) : null,
    );
    this.plot.chart = this;
    charts.add(this);
    inView.observe(this.plot);
    resized.observe(this.plot);
  }

  latest() {
    if (this.spec.stacked) return '';
    const ends = this.spec.lines.filter((line) => line.points.length);
    if (ends.length !== 1) return '';
    const points = ends[0].points;
    return number(points[points.length - 1][1], this.spec.share);
  }

  stale() {
    this.drawn = null;
    if (this.visible) this.draw();
  }

  range() {
    let low = Infinity, high = -Infinity, left = Infinity, right = -Infinity;
    const see = (x, y) => {
      if (x < left) left = x;
      if (x > right) right = x;
      if (y < low) low = y;
      if (y > high) high = y;
    };
    for (const line of this.spec.lines) {
      for (const [x, y] of line.points) see(x, y);
      for (const points of line.faint || []) for (const [x, y] of points) see(x, y);
    }
    if (this.spec.zero || this.spec.stacked || (this.spec.share && low < 0.5)) low = Math.min(low, 0);
    if (this.spec.share && high > 0.6) high = Math.max(high, 1);
    if (low === high && this.spec.share) [low, high] = [0, 1];
    if (low === high) {
      const room = Math.abs(low) * 0.1 || 1;
      [low, high] = [low - room, high + room];
    }
    if (left === right) [left, right] = [left - 1, right + 1];
    return { low, high, left, right };
  }

  draw() {
    const width = Math.floor(this.plot.clientWidth);
    if (!width || this.drawn === width) return;
    this.drawn = width;
    const { height, right, top, bottom } = CHART;
    const range = this.range();
    const levels = ticks(range.low, range.high, 4);
    const told = levels.map((value) => number(value, this.spec.share));
    const left = 10 + LETTER * Math.max(3, ...told.map((text) => text.length));
    const x = (value) => left + ((value - range.left) / (range.right - range.left)) * (width - left - right);
    const y = (value) => height - bottom - ((value - range.low) / (range.high - range.low)) * (height - top - bottom);
    this.scale = { x, y, range, width };
    const columns = width - left - right;
    const path = (points) => points.map(([a, b], i) => (i ? 'L' : 'M') + x(a).toFixed(1) + ' ' + y(b).toFixed(1)).join('');
    const svg = makeSvg('svg', {
      width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': this.description(),
    });
    for (const [i, value] of levels.entries()) {
      svg.append(
        makeSvg('line', { class: 'level', x1: left, x2: width - right, y1: y(value), y2: y(value) }),
        makeSvg('text', { class: 'tick', x: left - 6, y: y(value) + 3.5, 'text-anchor': 'end' }, told[i]),
      );
    }
    const steps = ticks(range.left, range.right, Math.max(2, Math.min(6, columns / 60))).filter(Number.isInteger);
    for (const value of steps) {
      const label = value.toLocaleString('en-US'), fits = x(value) + (LETTER * label.length) / 2 <= width;
      svg.append(makeSvg('text', { class: 'tick', x: x(value), y: height - 6, 'text-anchor': fits ? 'middle' : 'end' }, label));
    }
    for (const mark of this.spec.marks || []) {
      if (mark.x < range.left || mark.x > range.right) continue;
      const line = makeSvg('line', { class: 'mark ' + mark.kind, x1: x(mark.x), x2: x(mark.x), y1: top, y2: height - bottom });
      line.append(makeSvg('title', {}, mark.label));
      svg.append(line);
    }
    if (this.spec.stacked) this.stack(svg, x, y);
    else {
      for (const line of this.spec.lines) {
        const colour = 'colour' + (line.colour % COLOURS);
        if (line.band && line.band.length > 1) {
          const upper = line.band.map(([a, , b]) => [a, b]), lower = line.band.map(([a, b]) => [a, b]).reverse();
          svg.append(makeSvg('path', { class: 'band ' + colour, d: path(upper) + path(lower).replace('M', 'L') + 'Z' }));
        }
        for (const points of line.faint || []) {
          svg.append(makeSvg('path', { class: 'line faint ' + colour, d: path(thinned(points, columns)) }));
        }
        const points = smoothing ? smoothed(line.points, smoothing) : line.points;
        if (smoothing && line.points.length > 2) {
          svg.append(makeSvg('path', { class: 'line faint ' + colour, d: path(thinned(line.points, columns)) }));
        }
        svg.append(makeSvg('path', { class: 'line ' + colour, d: path(thinned(points, columns)) }));
        if (points.length <= 40) {
          for (const [a, b] of points) svg.append(makeSvg('circle', { class: 'dot ' + colour, cx: x(a), cy: y(b), r: points.length > 20 ? 1.5 : 2.5 }));
        }
      }
    }
    this.pointer = makeSvg('line', { class: 'pointer', x1: 0, x2: 0, y1: top, y2: height - bottom, visibility: 'hidden' });
    svg.append(this.pointer);
    svg.addEventListener('pointermove', (event) => this.point(event));
    svg.addEventListener('pointerleave', () => this.unpoint());
    this.plot.replaceChildren(svg);
  }

  // Stacked areas; all lines have the same steps.
  stack(svg, x, y) {
    const columns = this.scale.width;
    let below = new Map();
    for (const line of this.spec.lines) {
      const upper = line.points.map(([a, b]) => [a, (below.get(a) || 0) + b]);
      const lower = line.points.map(([a]) => [a, below.get(a) || 0]);
      const path = (points) => points.map(([a, b], i) => (i ? 'L' : 'M') + x(a).toFixed(1) + ' ' + y(b).toFixed(1)).join('');
      const every = Math.max(1, Math.ceil(upper.length / (2 * columns)));
      const some = (points) => points.filter((_, i) => i % every === 0 || i === points.length - 1);
      svg.append(
        makeSvg('path', {
          class: 'area colour' + (line.colour % COLOURS),
          d: path(some(upper)) + path(some(lower).reverse()).replace('M', 'L') + 'Z',
        }),
      );
      below = new Map(upper);
    }
  }

  description() {
    const told = this.spec.lines.filter((line) => line.points.length).map((line) => {
      const first = line.points[0], last = line.points[line.points.length - 1];
      const from = number(first[1], this.spec.share), to = number(last[1], this.spec.share);
      return `${line.label}: ${from} at step ${first[0]}, ${to} at step ${last[0]}`;
    });
    return this.spec.title + '. ' + told.join('; ');
  }

  point(event) {
    const { x, range } = this.scale;
    const box = this.plot.getBoundingClientRect();
    const at = event.clientX - box.left;
    let nearest = null;
    for (const line of this.spec.lines) {
      for (const [step] of line.points) {
        if (nearest === null || Math.abs(x(step) - at) < Math.abs(x(nearest) - at)) nearest = step;
      }
    }
    if (nearest === null) return;
    this.pointer.setAttribute('x1', x(nearest));
    this.pointer.setAttribute('x2', x(nearest));
    this.pointer.setAttribute('visibility', 'visible');
    const rows = [];
    for (const line of this.spec.lines) {
      const found = line.points.find(([step]) => step === nearest);
      if (!found) continue;
      const band = (line.band || []).find(([step]) => step === nearest);
      const spread = band && band[1] !== band[2] ? ` (${number(band[1], this.spec.share)} to ${number(band[2], this.spec.share)})` : '';
      rows.push(
        make('div', { class: 'row' }, make('span', { class: 'key colour' + (line.colour % COLOURS) }), make('span', { class: 'label' }, seen(short(line.label, 60))),
          make('b', {}, number(found[1], this.spec.share) + spread)),
      );
    }
    showHover(make('div', { class: 'about' }, make('div', { class: 'head' }, 'step ' + nearest.toLocaleString('en-US')), rows), event.clientX, event.clientY);
  }

  unpoint() {
    this.pointer.setAttribute('visibility', 'hidden');
    hideHover();
  }
}

function redraw() {
  for (const chart of charts) chart.stale();
}

// The tooltip, kept inside the window.
function showHover(content, x, y) {
  const box = document.getElementById('hover');
  box.replaceChildren(content);
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
  const top = y + 16 + height > innerHeight ? y - 16 - height : y + 16;
  box.style.left = Math.max(4, Math.min(left, innerWidth - width - 4)) + 'px';
  box.style.top = Math.max(4, Math.min(top, innerHeight - height - 4)) + 'px';
}

function hideHover() {
  document.getElementById('hover').hidden = true;
}

// The curve of a metric for every group of runs: the mean at steps that all runs have, and their range as a band.
function linesOf(page, metric) {
  return page.groups.map((group, colour) => {
    const runs = group.runs.map((run) => page.runs[run].series[metric]).filter(Boolean).map(([steps, values]) => steps.map((step, i) => [step, values[i]]));
    if (runs.length < 2) return { label: group.label, colour, points: runs[0] || [] };
    const known = new Map();
    for (const points of runs) for (const [step, value] of points) known.set(step, [...(known.get(step) || []), value]);
    const whole = [...known].filter(([, values]) => values.length === runs.length).sort((a, b) => a[0] - b[0]);
    return {
      label: `${group.label} (${runs.length} runs)`,
      colour,
      points: whole.map(([step, values]) => [step, values.reduce((a, b) => a + b) / values.length]),
      band: whole.map(([step, values]) => [step, Math.min(...values), Math.max(...values)]),
      faint: runs,
    };
  });
}

function marksOf(page) {
  if (page.runs.length > 1) return [];
  const run = page.runs[0];
  return [
    ...run.resumed.map((step) => ({ x: step, kind: 'resumed', label: 'resumed at step ' + step })),
    ...run.alarms.flatMap((alarm) => alarm.steps.map((step) => ({ x: step, kind: 'alarm', label: `alarm at step ${step}: ${alarm.rule}` }))),
    ...run.rollbacks.map(([step, to]) => ({ x: step, kind: 'alarm', label: `went back from step ${step} to the weights of step ${to}` })),
  ];
}

function metricChart(page, metric, options) {
  const lines = linesOf(page, metric);
  const values = lines.flatMap((line) => line.points.map((point) => point[1]));
  if (!values.length) return null;
  return new Chart({ title: metric, lines, marks: marksOf(page), share: isShare(metric, values), ...options }).card;
}
