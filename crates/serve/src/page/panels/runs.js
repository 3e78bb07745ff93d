// Runs: the curves of training runs while they go on, and what the models wrote into blanks on the way.

import { get } from "../api.js";
import { chart } from "../chart.js";
import { h, percent, short } from "../dom.js";

const EVERY = 2000;
const RECENT = 60;
const TITLES = {
  loss: "Loss",
  mlm_loss: "Masked words' loss",
  nsp_loss: "Next sentences' loss",
  sop_loss: "Sentence order's loss",
  rtd_loss: "Replaced tokens' loss",
  learning_rate: "Learning rate",
  gradient_norm: "Gradient norm",
  tokens_per_s: "Tokens a second",
};
const AXES = { step: "step", tokens: "tokens", hours: "hours" };

export function runs(found) {
  const logs = new Map();
  const chosen = new Set([...found].sort((a, b) => b.modified - a.modified).slice(0, 4).map(({ name }) => name));
  const settings = { metric: "loss", axis: "step", smooth: 0.8, log: false };
  const { nodes, draw } = chart();
  const list = h("ul", { class: "run-list" });
  const samples = samplesView();
  const problem = h("p", { class: "problem", role: "alert", hidden: true });

  const metric = h("select", { id: "run-metric", onchange: () => change("metric", metric.value) });
  const axis = h("select", { id: "run-axis", onchange: () => change("axis", axis.value) },
    Object.keys(AXES).map((name) => h("option", {}, name)));
  const smooth = h("input", { id: "run-smooth", type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smooth,
    oninput: () => change("smooth", Number(smooth.value)) });
  const log = h("input", { id: "run-log", type: "checkbox", onchange: () => change("log", log.checked) });
  const control = (label, input) => h("div", { class: "control" }, h("label", { for: input.id }, label), input);

  const area = h("div", { class: "runs" },
    h("div", { class: "heading" }, h("div", {}, h("h2", {}, "Runs"),
      h("p", { class: "lead" }, "Training runs in the server's directory, followed while they train."))),
    problem,
    h("div", { class: "run-layout" },
      h("div", {}, h("h3", {}, "In this directory"), list),
      h("div", {}, h("div", { class: "controls" }, control("Show", metric), control("over", axis), control("Smooth", smooth), control("Log scale", log)), nodes)),
    samples.node);

  poll();
  return area;

  function change(name, value) {
    settings[name] = value;
    show();
  }

  async function poll() {
    // Nobody looks at what is not shown.
    if (document.visibilityState === "visible" && (!area.isConnected || area.closest("[hidden]") === null)) {
      try {
        found = await get("/runs");
        const changed = await Promise.all(found.filter(({ name }) => chosen.has(name)).map(follow));
        problem.hidden = true;
        if (changed.includes(true) || list.childElementCount !== found.length) show();
      } catch (error) {
        problem.hidden = false;
        problem.textContent = error.message;
      }
    }
    setTimeout(poll, EVERY);
  }

  /** Reads what a log has beyond what is known; whether there was anything. */
  async function follow({ name }) {
    const known = logs.get(name) ?? { next: 0, train: [], eval: [], samples: [] };
    logs.set(name, known);
    let changed = false;
    for (;;) {
      const { next, lines } = await get(`/runs/${encodeURIComponent(name)}?from=${known.next}`);
      // The log is shorter than it was: the run went on from an earlier checkpoint, and all of the log came.
      if (next < known.next) Object.assign(known, { train: [], eval: [], samples: [] });
      for (const line of lines) take(known, line);
      changed ||= lines.length > 0;
      const more = next > known.next;
      known.next = next;
      if (!more) return changed;
    }
  }

  function take(known, line) {
    const list = known[line.kind];
    if (!list) return;
    // Steps that come again replace what was there.
    while (list.length > 0 && list.at(-1).step >= line.step) list.pop();
    list.push(line);
  }

  function show() {
    const kinds = new Map(found.map(({ name }, index) => [name, index]));
    const shown = found.filter(({ name }) => chosen.has(name) && logs.has(name));
    showList();
    const names = metricsOf(shown.map(({ name }) => logs.get(name)));
    if (!names.includes(settings.metric)) settings.metric = names[0] ?? "loss";
    if (names.join() !== [...metric.options].map((option) => option.value).join()) {
      metric.replaceChildren(...names.map((name) => h("option", { value: name }, titleOf(name))));
    }
    metric.value = settings.metric;
    const series = shown.flatMap(({ name }) => curves(name, logs.get(name), kinds.get(name), settings));
    draw({ series, x: AXES[settings.axis], y: titleOf(settings.metric).toLowerCase(), log: settings.log });
    samples.show(shown.map(({ name }) => ({ name, samples: logs.get(name).samples })));
  }

  function showList() {
    const now = Date.now() / 1000;
    const items = found.map(({ name, modified }, index) => {
      const last = logs.get(name)?.train.at(-1);
      const live = now - modified < RECENT;
      const box = h("input", { type: "checkbox", id: `run-${index}` });
      box.checked = chosen.has(name);
      box.addEventListener("change", async () => {
        if (box.checked) chosen.add(name);
        else chosen.delete(name);
        if (box.checked) await follow({ name }).catch(() => {});
        show();
        document.getElementById(box.id)?.focus();
      });
      const about = last ? `step ${last.step.toLocaleString("en")}, loss ${short(last.loss)}` : since(now - modified);
      return h("li", { class: `series-${index % 8}` }, box,
        h("label", { for: box.id }, h("span", { class: "swatch", "aria-hidden": "true" }), h("b", {}, name),
          live && h("span", { class: "live" }, "live"), h("small", {}, about)));
    });
    if (items.length === 0) items.push(h("li", { class: "hint" }, "There are no runs yet. They appear when a training begins."));
    list.replaceChildren(...items);
  }
}

function since(seconds) {
  if (seconds < 90) return "just now";
  if (seconds < 5400) return `${Math.round(seconds / 60)} minutes ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} hours ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

/** What the logs have: numbers of training, then of held-out data. */
function metricsOf(logs) {
  const train = Object.keys(TITLES).filter((name) => logs.some((log) => log.train.some((line) => line[name] != null)));
  const held = new Set(logs.flatMap((log) => log.eval.flatMap(({ metrics }) => Object.keys(metrics))));
  // Held-out loss is drawn with that of training.
  if (train.includes("loss")) held.delete("loss");
  return [...train, ...[...held].sort().map((name) => `held-out ${name}`)];
}

function titleOf(name) {
  return TITLES[name] ?? name.charAt(0).toUpperCase() + name.slice(1);
}

function curves(name, log, kind, { metric, axis, smooth }) {
  const held = metric.startsWith("held-out ") ? metric.slice(9) : null;
  const place = (step) => placeOf(log.train, step, axis);
  const evals = (key) => log.eval.filter(({ metrics }) => metrics[key] != null).map(({ step, metrics }) => [place(step), metrics[key]]);
  if (held) return [{ name, kind, points: evals(held), dots: true }];
  const points = log.train.filter((line) => line[metric] != null).map((line) => [xOf(line, axis), line[metric]]);
  // A schedule is exact: smoothing would only bend it.
  const curve = smooth > 0 && metric !== "learning_rate"
    ? [{ name, kind, points, faint: true }, { name, kind, points: smoothed(points, smooth) }]
    : [{ name, kind, points }];
  if (metric === "loss") curve.push({ name: `${name} held out`, kind, points: evals("loss"), dots: true });
  return curve;
}

function xOf(line, axis) {
  return axis === "hours" ? line.seconds / 3600 : line[axis];
}

/** Held-out numbers know their step alone; tokens and time are those of the training around it. */
function placeOf(train, step, axis) {
  if (axis === "step") return step;
  const after = train.findIndex((line) => line.step >= step);
  if (after < 0) return train.length > 0 ? xOf(train.at(-1), axis) : 0;
  const before = train[after - 1] ?? { step: 0, tokens: 0, seconds: 0 };
  const share = (step - before.step) / (train[after].step - before.step || 1);
  return xOf(before, axis) + share * (xOf(train[after], axis) - xOf(before, axis));
}

/** A running mean that forgets; its beginning is not drawn towards zero. */
function smoothed(points, weight) {
  let [mean, total] = [0, 0];
  return points.filter(([, y]) => Number.isFinite(y)).map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    total = weight * total + (1 - weight);
    return [x, mean / total];
  });
}

/** Texts with blanks, as a run filled them at a step that a slider chooses. */
function samplesView() {
  const run = h("select", { id: "sample-run" });
  const slider = h("input", { id: "sample-step", type: "range", min: 0, step: 1 });
  const step = h("output", { for: "sample-step" });
  const texts = h("ul", { class: "samples" });
  const node = h("section", { class: "learning", hidden: true, "aria-labelledby": "learning" },
    h("h3", { id: "learning" }, "Watch it learn"),
    h("p", { class: "lead" }, "What the model put into the same blanks, step by step. Move the slider."),
    h("div", { class: "controls" },
      h("div", { class: "control" }, h("label", { for: "sample-run" }, "Run"), run),
      h("div", { class: "control grow" }, h("label", { for: "sample-step" }, "Step"), slider, step)),
    texts);
  let all = [];
  const show = () => {
    const { samples } = all[run.selectedIndex] ?? { samples: [] };
    const at = samples[Math.min(samples.length - 1, Number(slider.value))];
    if (!at) return;
    step.textContent = at.step.toLocaleString("en");
    slider.setAttribute("aria-valuetext", `step ${at.step}`);
    texts.replaceChildren(...at.texts.map(({ text, blanks }) => h("li", {}, filled(text, blanks))));
  };
  run.addEventListener("change", () => { fit(true); show(); });
  slider.addEventListener("input", show);
  const fit = (toEnd) => {
    const most = Math.max(0, (all[run.selectedIndex]?.samples.length ?? 1) - 1);
    const end = toEnd || slider.value === slider.max;
    slider.max = most;
    if (end) slider.value = most;
  };
  return {
    node,
    show(list) {
      const first = all.length === 0;
      const before = run.value;
      all = list.filter(({ samples }) => samples.length > 0);
      node.hidden = all.length === 0;
      if (all.map(({ name }) => name).join() !== [...run.options].map((option) => option.value).join()) {
        run.replaceChildren(...all.map(({ name }) => h("option", { value: name }, name)));
        const longest = all.reduce((best, one) => (one.samples.length > (best?.samples.length ?? 0) ? one : best), null);
        run.value = all.some(({ name }) => name === before) ? before : (longest?.name ?? "");
      }
      fit(first);
      show();
    },
  };
}

function filled(text, blanks) {
  // Mask tokens are bracketed in every tokenizer that is trained here: [MASK] or <mask>.
  const parts = text.split(/\[MASK\]|<mask>/);
  return parts.flatMap((part, index) => {
    const best = index > 0 ? blanks[index - 1]?.[0] : null;
    const guess = best && h("span", { class: "blank", style: { "--share": best.probability }, title: blanks[index - 1].map(({ token, probability }) => `${token} ${percent(probability)}`).join("\n") }, best.token);
    const share = best && h("small", { class: "share" }, percent(best.probability));
    return [guess, share, part];
  });
}
