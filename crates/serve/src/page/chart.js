// Curves over steps: axes, lines, points, and a line that reads them out under the pointer or the arrow keys.

import { h, short, svg } from "./dom.js";

const MARGIN = { top: 26, right: 14, bottom: 34, left: 50 };

/**
 * A chart that is drawn again by `draw({ series, x, y, log })`: `series` are { name, kind, points, faint?, dots? } with points
 * [x, y], `kind` a number for the colour, `x` and `y` the axes' titles.
 */
export function chart() {
  const picture = svg("svg", { "aria-hidden": "true" });
  const readOut = h("p", { class: "hint read-out", "aria-live": "polite" });
  const frame = h("div", { class: "chart", tabindex: 0, role: "group", "aria-label": "Curves; arrow keys read them out" }, picture);
  let drawn = null;
  let at = null;
  let last = null;

  const draw = (content) => {
    last = content;
    const width = Math.max(260, frame.clientWidth);
    const height = Math.round(Math.min(420, Math.max(240, width * 0.5)));
    drawn = plot(picture, content, width, height);
    if (at !== null) point(at);
  };
  const point = (x) => {
    at = x;
    if (drawn) readOut.textContent = drawn.point(x);
  };
  frame.addEventListener("pointermove", (event) => {
    if (drawn) point(drawn.toValue(event.clientX - frame.getBoundingClientRect().left));
  });
  frame.addEventListener("pointerleave", () => {
    if (document.activeElement !== frame) clear();
  });
  frame.addEventListener("blur", clear);
  frame.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: 10, PageDown: -10 }[event.key];
    if (!drawn || (step === undefined && event.key !== "Home" && event.key !== "End")) return;
    event.preventDefault();
    const [low, high] = drawn.range;
    const next = event.key === "Home" ? low : event.key === "End" ? high : (at ?? low) + (step * (high - low)) / 100;
    point(Math.min(high, Math.max(low, next)));
  });
  function clear() {
    at = null;
    drawn?.point(null);
    readOut.textContent = "Point at the curves to read them.";
  }
  clear();
  new ResizeObserver(() => last && draw(last)).observe(frame);
  return { nodes: [frame, readOut], draw };
}

function plot(picture, { series, x: xTitle, y: yTitle, log }, width, height) {
  const seen = series.map((one) => ({ ...one, points: one.points.filter(([, y]) => Number.isFinite(y) && (!log || y > 0)) }))
    .filter(({ points }) => points.length > 0);
  const all = seen.flatMap(({ points }) => points);
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.setAttribute("height", height);
  if (all.length === 0) {
    picture.replaceChildren(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "tick" }, "nothing to show yet"));
    return null;
  }
  const xs = extent(all.map(([x]) => x));
  const ys = extent(all.map(([, y]) => (log ? Math.log10(y) : y)));
  const pad = (ys[1] - ys[0]) * 0.04 || Math.abs(ys[0]) * 0.05 || 1;
  const [bottom, top] = [ys[0] - pad, ys[1] + pad];
  const [left, right] = [MARGIN.left, width - MARGIN.right];
  const [base, roof] = [height - MARGIN.bottom, MARGIN.top];
  const toX = (x) => left + ((x - xs[0]) / (xs[1] - xs[0] || 1)) * (right - left);
  const toY = (y) => base - (((log ? Math.log10(y) : y) - bottom) / (top - bottom)) * (base - roof);

  const grid = [];
  for (const tick of log ? decades(bottom, top) : ticks(bottom, top, height / 48)) {
    const y = toY(tick);
    grid.push(svg("line", { x1: left, x2: right, y1: y, y2: y, class: "rule" }),
      svg("text", { x: left - 8, y: y + 4, "text-anchor": "end", class: "tick" }, short(tick)));
  }
  for (const tick of ticks(xs[0], xs[1], width / 110)) {
    grid.push(svg("text", { x: toX(tick), y: base + 18, "text-anchor": "middle", class: "tick" }, short(tick)));
  }
  grid.push(svg("text", { x: right, y: height - 3, "text-anchor": "end", class: "tick title" }, xTitle),
    svg("text", { x: 12, y: 16, class: "tick title" }, yTitle));

  const curves = seen.map(({ kind, points, faint, dots }) => {
    const places = thinned(points, right - left).map(([x, y]) => [toX(x).toFixed(1), toY(y).toFixed(1)]);
    const line = svg("path", { d: `M${places.map((place) => place.join(" ")).join("L")}`, class: `curve series-${kind % 8} ${faint ? "faint" : ""} ${dots ? "dotted" : ""}` });
    const marks = dots ? places.map(([cx, cy]) => svg("circle", { cx, cy, r: 3, class: `dot series-${kind % 8}` })) : [];
    return [line, marks];
  });
  const cross = svg("line", { y1: roof, y2: base, class: "cross", visibility: "hidden" });
  const beads = svg("g");
  picture.replaceChildren(...grid, ...curves.flat(2), cross, beads);

  return {
    range: xs,
    toValue: (offset) => xs[0] + ((offset - left) / (right - left)) * (xs[1] - xs[0]),
    /** Moves the line to x and says what is there. */
    point(x) {
      cross.setAttribute("visibility", x === null ? "hidden" : "visible");
      beads.replaceChildren();
      if (x === null) return "";
      // Curves that end elsewhere have nothing to say here.
      const reach = (xs[1] - xs[0]) / 50;
      const near = seen.filter(({ faint, points }) => !faint && points[0][0] - reach <= x && x <= points.at(-1)[0] + reach)
        .map((one) => ({ ...one, place: nearest(one.points, x) }));
      if (near.length === 0) return "";
      const best = near.reduce((a, b) => (Math.abs(a.place[0] - x) <= Math.abs(b.place[0] - x) ? a : b)).place[0];
      cross.setAttribute("x1", toX(best));
      cross.setAttribute("x2", toX(best));
      beads.replaceChildren(...near.map(({ kind, place }) => svg("circle", { cx: toX(place[0]), cy: toY(place[1]), r: 4, class: `bead series-${kind % 8}` })));
      return `${xTitle} ${Math.round(best) === best ? best.toLocaleString("en") : short(best)}: ` +
        near.map(({ name, place }) => `${name} ${short(place[1])}`).join(", ");
    },
  };
}

function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

/** Round numbers between two others. */
function ticks(low, high, wanted) {
  const raw = (high - low) / Math.max(2, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) found.push(Number(tick.toPrecision(12)));
  return found;
}

/** Powers of ten, with what is between them where there are few. */
function decades(low, high) {
  const factors = high - low > 2.5 ? [1] : high - low > 0.7 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 7, 8, 9];
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (Math.log10(tick) >= low && Math.log10(tick) <= high) found.push(tick);
    }
  }
  return found;
}

/** At most two points a pixel, each the mean of those that it stands for. */
function thinned(points, width) {
  const group = Math.ceil(points.length / (2 * width));
  if (group <= 1) return points;
  const found = [];
  for (let i = 0; i < points.length; i += group) {
    const some = points.slice(i, i + group);
    found.push([0, 1].map((axis) => some.reduce((sum, point) => sum + point[axis], 0) / some.length));
  }
  return found;
}

/** The point whose x is nearest; points are in order. */
function nearest(points, x) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
}
