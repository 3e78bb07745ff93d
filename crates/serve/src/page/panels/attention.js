// Attention: all heads as small maps; one of them large, as lines between the tokens or as a grid.

import { h, percent, roving, svg } from "../dom.js";

// What is shown, kept for the next text once somebody has chosen it.
const state = { layer: 0, head: 0, token: null, view: "lines", chosen: false };

export const attention = {
  id: "attention",
  title: "Attention",
  lead: "Each small square is a head: row by row, how much each token attends to each other one. Choose a head, then point at a token.",
  button: "Look",
  fields: [{ name: "text", label: "Sentence", hint: "The first 128 tokens are shown." }],
  examples: [
    { name: "It", text: "The animal didn't cross the street because it was too tired." },
    { name: "Puppets", text: "Jim Henson made puppets, and he gave them his own voice." },
    { name: "Two banks", text: "He sat on the bank of the river and called his bank." },
  ],
  request({ text }) {
    return text.trim() === "" ? { hint: "Write a sentence." } : { route: "/inside/attention", body: { inputs: text } };
  },
  say: ({ layers, heads }) => `Maps of ${layers} layers with ${heads} heads each.`,
  show({ tokens, layers, heads, attention: maps }) {
    if (!state.chosen || state.layer >= layers || state.head >= heads) Object.assign(state, mostTelling(tokens, maps));
    const detail = h("div", { class: "detail" });
    const draw = () => detail.replaceChildren(...oneHead(tokens, maps[state.layer][state.head], draw));
    draw();
    return h("div", { class: "attention" }, overview(tokens, maps, layers, heads, draw), detail);
  },
};

/** A map of every head, layers downwards and heads to the right. */
function overview(tokens, maps, layers, heads, draw) {
  const cells = [];
  const rows = maps.map((layer, l) => h("div", { role: "row", class: "layer" },
    h("span", { role: "rowheader", class: "axis", "aria-label": `Layer ${l + 1}` }, l + 1),
    layer.map((map, k) => {
      const picture = h("canvas", { width: tokens.length, height: tokens.length, "aria-hidden": "true" });
      const cell = h("div", { role: "gridcell", class: "head", "aria-label": `Layer ${l + 1}, head ${k + 1}: ${habit(tokens, map)}`,
        title: `Layer ${l + 1}, head ${k + 1}`, onclick: () => { choose(cells.indexOf(cell)); cell.focus(); } }, picture);
      cells.push(cell);
      return cell;
    })));
  const grid = h("div", { role: "grid", class: "heads", "aria-label": "Heads, by layer", style: { "--heads": heads } }, rows);
  const choose = (index) => {
    Object.assign(state, { layer: Math.floor(index / heads), head: index % heads, token: null, chosen: true });
    mark();
    draw();
  };
  const mark = () => {
    const at = state.layer * heads + state.head;
    cells.forEach((cell, index) => cell.setAttribute("aria-selected", String(index === at)));
    tabbable(at);
  };
  const tabbable = roving(grid, cells, choose, heads);
  mark();
  const paintAll = () => {
    const ink = inkOf(grid);
    if (ink) cells.forEach((cell, index) => paint(cell.firstChild, maps[Math.floor(index / heads)][index % heads], ink));
  };
  repaint(grid, paintAll);
  return h("div", { class: "overview" }, h("p", { class: "axis-title" }, "layers ↓ heads →"), grid);
}

/** The chosen head, large. */
function oneHead(tokens, map, draw) {
  const readOut = h("p", { class: "hint read-out", "aria-live": "polite" }, "Point at a token, or step through them with the arrow keys.");
  const from = tokens.map((token) => h("li", { class: token.special ? "special" : "", tabindex: -1 }, name(token)));
  const list = h("ul", { class: "from", "aria-label": "Tokens that look" }, from);
  const view = state.view === "lines" ? asLines(tokens, map) : asGrid(tokens, map);
  const look = (index) => {
    from.forEach((item, i) => item.classList.toggle("chosen", i === index));
    view.look(index);
    if (index !== null) readOut.textContent = inWords(tokens, map[index], index);
  };
  from.forEach((item, index) => {
    item.addEventListener("mouseenter", () => look(index));
    item.addEventListener("focus", () => look(index));
    item.addEventListener("click", () => item.focus());
  });
  // What has the focus stays chosen when the pointer leaves.
  list.addEventListener("mouseleave", () => {
    const focused = from.indexOf(document.activeElement);
    look(focused < 0 ? null : focused);
  });
  list.addEventListener("focusout", () => look(null));
  roving(list, from, look)(0);
  view.pointed = (i, j) => {
    look(i);
    readOut.textContent = `${percent(map[i][j])} of “${name(tokens[i])}” goes to “${name(tokens[j])}”.`;
  };
  look(state.token);
  const choices = [["lines", "Lines"], ["grid", "Grid"]].map(([value, title]) =>
    h("button", { type: "button", "aria-pressed": String(state.view === value), onclick: (event) => {
      state.view = value;
      const bar = event.target.closest(".detail");
      draw();
      bar.querySelector(".segmented [aria-pressed=true]").focus();
    } }, title));
  return [
    h("div", { class: "toolbar" },
      h("p", {}, h("b", {}, `Layer ${state.layer + 1}, head ${state.head + 1}`), ` ${habit(tokens, map)}.`),
      h("div", { class: "segmented", role: "group", "aria-label": "Show as" }, choices)),
    readOut,
    h("div", { class: `view ${state.view}`, style: { "--tokens": tokens.length } }, view.above, list, view.nodes),
  ];
}

function asLines(tokens, map) {
  const size = tokens.length;
  const paths = [];
  map.forEach((row, i) => row.forEach((weight, j) => {
    if (weight < 0.02) return;
    const d = `M0 ${i + 0.5} C50 ${i + 0.5} 50 ${j + 0.5} 100 ${j + 0.5}`;
    paths.push({ i, weight, path: svg("path", { d, "stroke-width": 0.75 + 4 * weight, "vector-effect": "non-scaling-stroke" }) });
  }));
  const picture = svg("svg", { viewBox: `0 0 100 ${size}`, preserveAspectRatio: "none", "aria-hidden": "true" }, paths.map(({ path }) => path));
  const shares = tokens.map(() => h("small", {}));
  const to = tokens.map((token, j) => h("li", { class: token.special ? "special" : "" }, h("span", {}, name(token)), shares[j]));
  const received = tokens.map((_, j) => map.reduce((sum, row) => sum + row[j], 0) / size);
  return {
    nodes: [picture, h("ul", { class: "to", "aria-hidden": "true" }, to)],
    look(index) {
      paths.forEach(({ i, weight, path }) => path.setAttribute("stroke-opacity", index === null ? 0.85 * weight : i === index ? 0.25 + 0.75 * weight : 0));
      const row = index === null ? received : map[index];
      to.forEach((item, j) => {
        item.style.setProperty("--share", row[j]);
        shares[j].textContent = index === null || row[j] < 0.005 ? "" : percent(row[j]);
      });
    },
  };
}

function asGrid(tokens, map) {
  const size = tokens.length;
  const canvas = h("canvas", { width: size, height: size, "aria-hidden": "true" });
  const row = h("div", { class: "row-mark", hidden: true });
  const picture = h("div", { class: "picture" }, canvas, row);
  const view = {
    above: h("ul", { class: "above", "aria-hidden": "true" }, tokens.map((token) => h("li", { class: token.special ? "special" : "" }, h("span", {}, name(token))))),
    nodes: [picture],
    pointed: () => {},
    look(index) {
      row.hidden = index === null;
      if (index !== null) row.style.setProperty("--row", index);
    },
  };
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const place = (offset, length) => Math.min(size - 1, Math.max(0, Math.floor((offset / length) * size)));
    view.pointed(place(event.clientY - box.top, box.height), place(event.clientX - box.left, box.width));
  });
  canvas.addEventListener("mouseleave", () => view.look(null));
  repaint(picture, () => {
    const ink = inkOf(picture);
    if (ink) paint(canvas, map, ink);
  });
  return view;
}

/** Paints when the element is in the page, and again when the theme changes, for as long as it is there. */
function repaint(element, work) {
  requestAnimationFrame(work);
  const again = () => {
    if (element.isConnected) work();
    else removeEventListener("theme", again);
  };
  addEventListener("theme", again);
}

/** The colour of an element as three numbers; null while it is not in the page. */
function inkOf(element) {
  const numbers = getComputedStyle(element).color.match(/[\d.]+/g);
  return numbers && numbers.slice(0, 3).map(Number);
}

/** Square roots: small weights are many, and should be seen. */
function paint(canvas, map, [red, green, blue]) {
  const context = canvas.getContext("2d");
  const size = map.length;
  const image = context.createImageData(size, size);
  map.forEach((row, i) => row.forEach((weight, j) => image.data.set([red, green, blue, 255 * Math.sqrt(weight)], 4 * (i * size + j))));
  context.putImageData(image, 0, 0);
}

function name({ text }) {
  return text;
}

function inWords(tokens, row, index) {
  const order = row.map((weight, j) => [weight, j]).sort(([a], [b]) => b - a).slice(0, 4).filter(([weight]) => weight >= 0.02);
  const parts = order.map(([weight, j]) => `${j === index ? "itself" : `“${name(tokens[j])}”`} ${percent(weight)}`);
  return `“${name(tokens[index])}” attends to ${parts.join(", ")}.`;
}

/** What a head mostly attends to, over all tokens: the kinds that Clark et al. (2019) found. */
function habit(tokens, map) {
  const size = tokens.length;
  const mean = (test) => map.reduce((sum, row, i) => sum + row.reduce((all, weight, j) => all + (test(i, j) ? weight : 0), 0), 0) / size;
  const ordinary = (j) => !tokens[j].special;
  const kinds = [
    ["to the previous token", mean((i, j) => j === i - 1 && ordinary(j))],
    ["to the next token", mean((i, j) => j === i + 1 && ordinary(j))],
    ["to the token itself", mean((i, j) => j === i && ordinary(j))],
    ...[...new Set(tokens.filter(({ special }) => special).map(({ text }) => text))]
      .map((text) => [`to ${text}`, mean((_, j) => tokens[j].special && tokens[j].text === text)]),
  ];
  const others = 1 - kinds.reduce((sum, [, share]) => sum + share, 0);
  const [what, share] = kinds.reduce((best, kind) => (kind[1] > best[1] ? kind : best));
  return share > 0.3 ? `attends mostly ${what} (${percent(share)})` : `spreads over many tokens (${percent(others)} on other words)`;
}

/** The firmest look from one word to another that is far: a better beginning than a head that rests on [SEP]. */
function mostTelling(tokens, maps) {
  const isWord = tokens.map(({ special, text }) => !special && /\p{L}/u.test(text));
  const best = { layer: 0, head: 0, token: null };
  let most = 0;
  maps.forEach((heads, layer) => heads.forEach((map, head) => map.forEach((row, i) => row.forEach((weight, j) => {
    const worth = isWord[i] && isWord[j] && i !== j ? weight * Math.log(Math.abs(i - j)) : 0;
    if (worth > most) {
      most = worth;
      Object.assign(best, { layer, head, token: i });
    }
  }))));
  return best;
}
