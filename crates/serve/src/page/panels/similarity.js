// Similarity: how near sentences are to each other, as a heat map.

import { h, lines } from "../dom.js";

const MOST = 24;

export const similarity = {
  id: "similarity",
  title: "Similarity",
  ability: "similarity",
  lead: "Each sentence becomes a vector. The greener a field, the smaller the angle between two of them, and the nearer what they mean.",
  button: "Compare",
  fields: [{ name: "texts", label: "Sentences", rows: 8, hint: "One on each line." }],
  examples: [
    {
      name: "Three topics",
      texts: "The puppeteer moved the frog's mouth.\nA man made a puppet speak.\nThe Muppets are funny.\nThe bank raised its interest rates.\nBorrowing money becomes more expensive.\nIt will rain tomorrow.\nThe forecast says showers.",
    },
    {
      name: "Said otherwise",
      texts: "How do I reset my password?\nI forgot my login and cannot get in.\nWhere can I change my password?\nWhat does the shop sell?\nIs the shop open on Sundays?",
    },
  ],
  request({ texts }) {
    const sentences = lines(texts);
    if (sentences.length < 2) return { hint: "Write at least two sentences, one on each line." };
    if (sentences.length > MOST) return { hint: `These are ${sentences.length} sentences; the map shows up to ${MOST}.` };
    return { route: "/embed", body: { inputs: sentences } };
  },
  say: (vectors) => `A table of ${vectors.length} by ${vectors.length} similarities.`,
  show: (vectors, { texts }) => heatMap(lines(texts), cosines(vectors)),
};

function cosines(vectors) {
  return vectors.map((a) => vectors.map((b) => a.reduce((sum, x, i) => sum + x * b[i], 0)));
}

function twoDigits(value) {
  const text = value.toFixed(2);
  return text === "-0.00" ? "0.00" : text.replace("-", "−");
}

/** A square table; `names` stand before the rows, and above the columns by their numbers. */
export function heatMap(names, values) {
  const others = values.flatMap((row, i) => row.filter((_, j) => i !== j));
  const [low, high] = [Math.min(...others, 0.999), Math.max(...others)];
  // Between the least and the most similar pair, so that differences are seen also where all are near.
  const share = (value) => Math.min(1, Math.max(0, (value - low) / Math.max(high - low, 1e-6)));
  const readOut = h("p", { class: "hint read-out", "aria-live": "polite" }, "Point at a field to read it.");
  const cells = [];
  const look = (i, j) => {
    cells.forEach((row, y) => row.forEach((cell, x) => cell.classList.toggle("crossed", y === i || x === j)));
    readOut.textContent = `${values[i][j].toFixed(3)}: “${names[i]}” and “${names[j]}”`;
  };
  const body = names.map((name, i) => {
    cells.push(values[i].map((value, j) =>
      h("td", { style: { "--share": i === j ? 1 : share(value) }, class: i === j && "self",
        onmouseenter: () => look(i, j), onclick: () => look(i, j) }, i === j ? "·" : twoDigits(value))));
    return h("tr", {}, h("th", { scope: "row" }, h("span", { class: "number" }, i + 1), h("span", { class: "name", title: name }, name)), cells[i]);
  });
  const head = h("tr", {}, h("td", {}), names.map((name, i) => h("th", { scope: "col", title: name, "aria-label": name }, i + 1)));
  return [
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Heat map of similarities" },
      h("table", { class: `heat ${names.length > 12 ? "dense" : ""}` }, h("thead", {}, head), h("tbody", {}, body))),
    readOut,
  ];
}
