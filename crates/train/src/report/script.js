// Draws the curves. Everything else of the page is there without it.
// Names and values come from the block of JSON and go into the page as text and attributes only, never as HTML.
'use strict';
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const one = (selector) => document.querySelector(selector);
  const toolbar = one('.toolbar');
  if (!toolbar) return;

  const state = { axis: 'step', smoothing: 0, hidden: new Set(), zoom: null, cursor: null };
  const axes = {
    step: { label: 'steps', text: (x) => 'step ' + whole(x), tick: short },
    tokens: { label: 'tokens', text: (x) => short(x) + ' tokens', tick: short },
    seconds: { label: 'time', text: duration, tick: (x) => (x ? duration(x) : '0') },
  };
  const margin = { left: 54, right: 14, top: 12, bottom: 24 };
  const colours = 8;

  // Numbers

  function whole(x) { return Math.round(x).toLocaleString('en'); }

  function short(x) {
    const size = Math.abs(x);
    for (const [limit, unit] of [[1e12, ' T'], [1e9, ' G'], [1e6, ' M'], [1e3, ' k']]) {
      if (size >= limit) return trim((x / limit).toPrecision(3)) + unit;
    }
    return size > 0 && size < 1e-3 ? scientific(x, 2) : trim(x.toPrecision(3));
  }

  function trim(text) { return text.includes('e') || !text.includes('.') ? text : text.replace(/\.?0+$/, ''); }

  function scientific(x, digits) { return x.toExponential(digits).replace(/\.?0+e/, 'e').replace('e+', 'e'); }

  function value(chart, y) {
    if (y === null) return 'not finite';
    if (chart.percent) return (100 * y).toFixed(1) + '%';
    const size = Math.abs(y);
    if (size === 0) return '0';
    if (size < 1e-3 || size >= 1e6) return scientific(y, 3);
    return size < 10 ? y.toFixed(3) : size < 100 ? y.toFixed(2) : size < 1e4 ? y.toFixed(1) : whole(y);
  }

  function duration(seconds) {
    const s = Math.round(seconds), parts = [];
    for (const [unit, name] of [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']]) {
      const n = Math.floor(s / unit) % (unit === 86400 ? Infinity : unit === 3600 ? 24 : 60);
      if (n > 0) parts.push(n + ' ' + name);
    }
    return parts.slice(0, 2).join(' ') || '0 s';
  }

  /** About `count` round numbers from low to high. */
  function ticks(low, high, count, steps) {
    const rough = (high - low) / Math.max(1, count);
    let step;
    if (steps) {
      step = steps.find((candidate) => candidate >= rough) || Math.ceil(rough / 86400) * 86400;
    } else {
      const power = 10 ** Math.floor(Math.log10(rough));
      step = [1, 2, 5, 10].map((m) => m * power).find((candidate) => candidate >= rough * 0.999);
    }
    const found = [];
    const [first, last] = [Math.ceil(low / step - 1e-9), Math.floor(high / step + 1e-9)];
    for (let i = first; i <= last && found.length < 50; i++) found.push(i * step);
    return found;
  }

  const clock = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

  function logTicks(low, high) {
    for (const digits of [[1, 2, 3, 5], [1, 2, 5], [1, 3], [1]]) {
      const found = [];
      for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++) {
        for (const digit of digits) {
          const tick = digit * 10 ** p;
          if (tick >= low * 0.9999 && tick <= high * 1.0001) found.push(tick);
        }
      }
      if (found.length > 1 && found.length <= 7) return found;
    }
    // Many powers of ten, or less than a digit's distance between low and high.
    const powers = ticks(Math.log10(low), Math.log10(high), 5).map((p) => 10 ** p);
    return powers.length > 1 && high / low > 10 ? powers : ticks(low, high, 4);
  }

  // Curves

  /** The points of a curve along the axis: its own, and those to smooth. */
  function curve(run, chart, log) {
    const group = run[chart.group], series = group.series[chart.series];
    if (!series) return null;
    const along = (points) => points.y.map((y, i) => ({ x: group[state.axis][points.rows ? points.rows[i] : i], y }));
    const points = along(series), smooth = chart.smooth && state.smoothing > 0;
    return { points, main: smooth ? smoothed(series.mean ? along(series.mean) : points, log) : points, smooth };
  }

  /**
   * A centred mean with bell-shaped weights; on a logarithmic scale that of the logarithms, which a spike moves less.
   * At the beginning, where curves fall steeply, it narrows.
   */
  function smoothed(all, log) {
    const points = all.filter((point) => point.y !== null && (!log || point.y > 0));
    const [to, from] = log ? [Math.log, Math.exp] : [(y) => y, (y) => y];
    const values = points.map((point) => to(point.y));
    const radius = Math.round(points.length * 0.12 * state.smoothing ** 2);
    return points.map((point, i) => {
      const before = Math.min(radius, i), width = Math.max(before, Math.ceil(radius / 5), 1);
      const after = Math.min(radius && width, points.length - 1 - i);
      let sum = 0, weights = 0;
      for (let j = i - before; j <= i + after; j++) {
        const distance = (j - i) / width, weight = Math.exp(-2 * distance * distance);
        sum += weight * values[j];
        weights += weight;
      }
      return { x: point.x, y: from(sum / weights) };
    });
  }

  /** The first of the points that lies at x or after it. */
  function bisect(points, x) {
    let low = 0, high = points.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle].x < x) low = middle + 1; else high = middle;
    }
    return low;
  }

  function nearest(points, x) {
    const i = bisect(points, x);
    if (i === 0) return points[0];
    return i === points.length || x - points[i - 1].x < points[i].x - x ? points[i - 1] : points[i];
  }

  // Elements

  const drawn = ['svg', 'g', 'line', 'path', 'circle', 'rect', 'text', 'clipPath', 'defs', 'title'];

  function element(name, attributes, parent, text) {
    const made = drawn.includes(name) ? document.createElementNS('http://www.w3.org/2000/svg', name) : document.createElement(name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  const look = (run) => 'c' + (run % colours) + (run >= colours ? ' dashed' : '');

  class Figure {
    constructor(frame, number) {
      this.frame = frame;
      this.number = number;
      this.chart = data.charts[number];
      this.log = this.chart.log;
      this.plot = frame.querySelector('.plot');
      this.plot.tabIndex = 0;
      this.plot.setAttribute('role', 'group');
      this.plot.setAttribute('aria-labelledby', 'chart-' + number);
      this.plot.setAttribute('aria-describedby', 'words-' + number);
      const caption = frame.querySelector('figcaption');
      const label = this.chart.title + ': logarithmic scale';
      this.scale = element('button', { type: 'button', 'aria-pressed': this.log, 'aria-label': label }, caption, 'log');
      this.scale.addEventListener('click', () => {
        this.log = !this.log;
        this.scale.setAttribute('aria-pressed', this.log);
        this.draw();
      });
      this.readout = element('div', { class: 'readout', 'aria-hidden': 'true' }, frame);
      this.readout.hidden = true;
      this.listen();
    }

    draw() {
      const { width, height } = this.plot.getBoundingClientRect();
      if (width < 80) return;
      this.curves = data.runs
        .map((run, i) => ({ run: i, ...curve(run, this.chart, this.log) }))
        .filter((curve) => curve.points && curve.points.length && !state.hidden.has(curve.run));
      this.inner = { left: margin.left, right: width - margin.right, top: margin.top, bottom: height - margin.bottom };
      const log = this.ranges();
      const { left, right, top, bottom } = this.inner;

      const labels = `title-${this.number} words-${this.number}`;
      const svg = element('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-labelledby': labels });
      element('title', { id: 'title-' + this.number }, svg, this.chart.title);
      const clip = 'clip-' + this.number;
      element('rect', { x: left - 6, y: top - 6, width: right - left + 12, height: bottom - top + 12 },
        element('clipPath', { id: clip }, element('defs', {}, svg)));
      for (const y of log ? logTicks(this.low, this.high) : ticks(this.low, this.high, (bottom - top) / 40)) {
        element('line', { class: 'grid', x1: left, x2: right, y1: this.y(y), y2: this.y(y) }, svg);
        // All marks of small numbers look alike: 1e-3 above 5e-4.
        const plain = (y) => (y && this.high < 0.01 ? scientific(y, 2) : short(y));
        const text = this.chart.percent ? trim((100 * y).toPrecision(3)) + '%' : plain(y);
        element('text', { x: left - 7, y: this.y(y) + 4, 'text-anchor': 'end' }, svg, text);
      }
      element('line', { class: 'axis', x1: left, x2: right, y1: bottom, y2: bottom }, svg);
      const axis = axes[state.axis], room = (right - left) / (state.axis === 'seconds' ? 95 : 75);
      const marks = ticks(this.from, this.to, room, state.axis === 'seconds' ? clock : null);
      for (const x of marks.filter((x) => state.axis !== 'step' || Number.isInteger(x))) {
        element('line', { class: 'axis', x1: this.x(x), x2: this.x(x), y1: bottom, y2: bottom + 4 }, svg);
        element('text', { x: this.x(x), y: bottom + 17, 'text-anchor': 'middle' }, svg, axis.tick(x));
      }
      element('text', { x: left - 9, y: bottom + 17, 'text-anchor': 'end' }, svg, axis.label);

      const inside = element('g', { 'clip-path': `url(#${clip})` }, svg);
      for (const { run } of this.curves) {
        for (const phase of data.runs[run].phases) {
          const x = this.x(phase[state.axis]);
          const line = element('line', { class: 'phase', x1: x, x2: x, y1: top, y2: bottom }, inside);
          element('title', {}, line, 'a new phase begins');
        }
      }
      // All faint curves first, so that none lies over a strong one.
      for (const { run, points, smooth } of this.curves) {
        if (smooth) element('path', { class: 'curve raw ' + look(run), d: this.path(points) }, inside);
      }
      for (const { run, main } of this.curves) {
        element('path', { class: 'curve ' + look(run), d: this.path(main) }, inside);
        const shown = main.filter((point) => point.y !== null && this.holds(point));
        if (shown.length === 1 || (this.chart.group === 'eval' && shown.length <= (right - left) / 14)) {
          for (const point of shown) this.dot(run, point, inside);
        }
      }
      for (const { points } of this.curves) {
        // Where a number is not finite: crosses at the upper edge.
        const lost = points.filter((point) => point.y === null && this.holds(point));
        const d = lost.map(({ x }) => `M${this.x(x) - 3} ${top - 3}l6 6m0-6l-6 6`).join('');
        if (d) element('title', {}, element('path', { class: 'lost', d }, inside), 'not finite');
      }
      if (!this.curves.length) {
        const middle = { x: (left + right) / 2, y: (top + bottom) / 2, 'text-anchor': 'middle' };
        element('text', middle, svg, 'nothing to show');
      }
      // A click on something that is taken away meanwhile would be lost.
      this.overlay = element('g', { 'pointer-events': 'none' }, svg);
      this.plot.replaceChildren(svg);
      this.point();
    }

    /** What the axes hold; says whether the scale can be logarithmic. */
    ranges() {
      const all = this.curves.flatMap((curve) => [curve.points, curve.main]);
      [this.from, this.to] = state.zoom || extent();
      let low = Infinity, high = -Infinity, least = Infinity;
      for (const { x, y } of all.flat()) {
        if (y === null || x < this.from || x > this.to) continue;
        low = Math.min(low, y);
        high = Math.max(high, y);
        if (y > 0) least = Math.min(least, y);
      }
      if (low > high) [low, high, least] = [0, 1, 1];
      // What smoothing leaves of a constant is no curve.
      if (high - low < Math.abs(high) * 1e-6) low = least = high;
      const log = this.log && high > 0;
      if (log) {
        const space = Math.max(Math.log(high / least) * 0.05, 0.02);
        [this.low, this.high] = [least * Math.exp(-space), high * Math.exp(space)];
      } else {
        const space = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
        // A curve that never falls below zero gets no room there.
        [this.low, this.high] = [low >= 0 ? Math.max(0, low - space) : low - space, high + space];
      }
      const { left, right, top, bottom } = this.inner, transform = log ? Math.log : (y) => y;
      const scale = (bottom - top) / (transform(this.high) - transform(this.low));
      this.x = (x) => round(left + (x - this.from) / (this.to - this.from) * (right - left));
      this.y = (y) => round(bottom - (transform(y) - transform(this.low)) * scale);
      this.drawable = (y) => y !== null && (!log || y > 0);
      return log;
    }

    dot(run, { x, y }, parent) {
      if (this.drawable(y)) element('circle', { class: 'dot ' + look(run), cx: this.x(x), cy: this.y(y), r: 3.6 }, parent);
    }

    holds(point) { return point.x >= this.from && point.x <= this.to; }

    path(points) {
      // One point beyond each edge, so that lines run on to it.
      const first = Math.max(0, bisect(points, this.from) - 1);
      const last = Math.min(points.length, bisect(points, this.to) + 2);
      let d = '', pen = false;
      for (const { x, y } of points.slice(first, last)) {
        if (this.drawable(y)) d += (pen ? 'L' : 'M') + this.x(x) + ' ' + this.y(y);
        pen = this.drawable(y);
      }
      return d;
    }

    /** The cursor's line and dots; in the chart that is pointed at, also the values. */
    point() {
      if (!this.overlay) return;
      this.overlay.replaceChildren();
      this.readout.hidden = true;
      if (state.cursor === null || state.cursor < this.from || state.cursor > this.to) return;
      const { top, bottom } = this.inner, at = this.x(state.cursor);
      element('line', { class: 'cursor', x1: at, x2: at, y1: top, y2: bottom }, this.overlay);
      const rows = [];
      for (const { run, points, main, smooth } of this.curves) {
        const point = nearest(main, state.cursor), raw = nearest(points, state.cursor);
        // A run that ended long before the cursor has no value there.
        if (!point || Math.abs(this.x(point.x) - at) > 40) continue;
        this.dot(run, point, this.overlay);
        rows.push({ run, text: value(this.chart, point.y), raw: smooth ? value(this.chart, raw.y) : null });
      }
      if (state.pointed !== this) return;
      this.readout.replaceChildren();
      element('p', {}, this.readout, axes[state.axis].text(state.cursor));
      for (const { run, text, raw } of rows) {
        const line = element('p', {}, this.readout);
        element('i', { class: 'swatch ' + look(run) }, line);
        if (data.runs.length > 1) element('span', { class: 'name', dir: 'auto' }, line, data.runs[run].name);
        element('b', {}, line, text);
        if (raw !== null) element('i', { class: 'dim' }, line, 'raw ' + raw);
      }
      this.readout.hidden = false;
      const room = this.plot.clientWidth, size = this.readout.offsetWidth, offset = this.plot.offsetLeft;
      const left = at + 14 + size > room ? at - 14 - size : at + 14;
      this.readout.style.left = Math.max(4, left + offset) + 'px';
      this.readout.style.top = this.plot.offsetTop + margin.top + 'px';
      this.rows = rows;
    }

    listen() {
      const { plot } = this;
      const along = (event) => {
        const x = event.clientX - plot.getBoundingClientRect().left, { left, right } = this.inner;
        return this.from + Math.min(1, Math.max(0, (x - left) / (right - left))) * (this.to - this.from);
      };
      let start = null;
      plot.addEventListener('pointermove', (event) => {
        if (!this.inner) return;
        move(this, along(event));
        if (start !== null) {
          const [a, b] = [this.x(start), this.x(state.cursor)].sort((a, b) => a - b), { top, bottom } = this.inner;
          element('rect', { class: 'range', x: a, width: b - a, y: top, height: bottom - top }, this.overlay);
        }
      });
      plot.addEventListener('pointerleave', () => { if (start === null) move(null, null); });
      plot.addEventListener('pointerdown', (event) => {
        // A finger reads values; only a mouse or a pen marks a range.
        if (event.pointerType === 'touch') return move(this, along(event));
        if (event.button !== 0 || !this.inner) return;
        start = along(event);
        plot.setPointerCapture(event.pointerId);
      });
      plot.addEventListener('pointerup', (event) => {
        if (start === null) return;
        const range = [start, along(event)].sort((a, b) => a - b);
        start = null;
        if (this.x(range[1]) - this.x(range[0]) > 8) zoom(range); else move(this, state.cursor);
      });
      plot.addEventListener('pointercancel', () => { start = null; move(null, null); });
      plot.addEventListener('dblclick', () => zoom(null));
      plot.addEventListener('blur', () => move(null, null));
      plot.addEventListener('keydown', (event) => {
        if (!this.inner || event.ctrlKey || event.metaKey || event.altKey) return;
        const width = this.to - this.from, step = width / (event.shiftKey ? 10 : 100);
        const at = state.cursor === null ? this.to : state.cursor;
        const to = { ArrowLeft: at - step, ArrowRight: at + step, Home: this.from, End: this.to }[event.key];
        if (event.key === 'Escape') { move(null, null); zoom(null); }
        if (to === undefined) return;
        event.preventDefault();
        move(this, Math.min(this.to, Math.max(this.from, to)));
        const named = (row) => (data.runs.length > 1 ? data.runs[row.run].name + ' ' : '') + row.text;
        const values = this.rows.map(named).join(', ') || 'no values';
        one('#spoken').textContent = axes[state.axis].text(state.cursor) + ': ' + values;
      });
    }
  }

  const round = (x) => Math.round(x * 10) / 10;

  /** All positions of the runs that are shown, the same for all charts. */
  function extent() {
    let high = 0, low = Infinity;
    data.runs.forEach((run, i) => {
      if (state.hidden.has(i)) return;
      for (const x of [run.train[state.axis], run.eval[state.axis]]) {
        if (x.length) [low, high] = [Math.min(low, x[0]), Math.max(high, x[x.length - 1])];
      }
    });
    // Runs begin at zero, though their logs begin a little later.
    if (low < high * 0.1) low = 0;
    return low < high ? [low, high] : [Math.max(0, high - 1), high + 1];
  }

  function move(figure, x) {
    state.cursor = x;
    state.pointed = figure;
    figures.forEach((figure) => figure.point());
  }

  function zoom(range) {
    state.zoom = range;
    one('#whole').hidden = range === null;
    redraw();
  }

  let waiting = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      figures.forEach((figure) => figure.draw());
    });
  }

  const slider = one('#smoothing');
  const frames = [...document.querySelectorAll('figure')];
  const figures = frames.map((frame) => new Figure(frame, Number(frame.dataset.chart)));
  for (const radio of document.querySelectorAll('input[name=axis]')) {
    const known = data.runs.some((run) => [run.train, run.eval].some((group) => group[radio.value].some((x) => x > 0)));
    radio.disabled = !known;
    radio.addEventListener('change', () => {
      state.axis = radio.value;
      state.cursor = null;
      zoom(null);
    });
    // A browser may remember what was chosen before the page was loaded again.
    if (radio.checked && known) state.axis = radio.value;
  }
  state.smoothing = slider.value / 100;
  slider.addEventListener('input', () => {
    state.smoothing = slider.value / 100;
    redraw();
  });
  one('#whole').addEventListener('click', () => zoom(null));
  for (const button of document.querySelectorAll('.legend button')) {
    button.addEventListener('click', () => {
      const run = Number(button.dataset.run), show = state.hidden.has(run);
      if (show) state.hidden.delete(run); else state.hidden.add(run);
      button.setAttribute('aria-pressed', show);
      redraw();
    });
  }
  toolbar.hidden = false;
  one('.hint[hidden]').hidden = false;
  new ResizeObserver(redraw).observe(one('.charts'));
  redraw();
})();
