// Tag: entities in colour, each with its label beside it, so that colour is never all there is.

import { characters, count, h, percent } from "../dom.js";

export const tag = {
  id: "tag",
  title: "Tag",
  ability: "tag",
  lead: "Names, places, terms: whatever the model was trained to find, marked in the text.",
  button: "Tag",
  fields: [{ name: "text", label: "Text", rows: 7 }],
  examples: [
    { name: "Jim Henson", text: "Jim Henson was born in Greenville, Mississippi, and met Jane Nebel at the University of Maryland. The Muppet Show was made in London." },
    { name: "A report", text: "Marie Curie left Warsaw for Paris in 1891. With her husband Pierre she worked at the Sorbonne." },
  ],
  request({ text }) {
    return text.trim() === "" ? { hint: "Write a text." } : { route: "/tag", body: { inputs: text } };
  },
  say: ([entities]) => `${count(entities.length, "entity", "entities")} found.`,
  show([entities], { text }, { model }) {
    const kinds = kindsOf(model, entities);
    const letters = characters(text);
    const parts = [];
    let end = 0;
    for (const { start, end: stop, label, score } of entities) {
      parts.push(letters.slice(end, start));
      parts.push(h("mark", { class: `entity kind-${kinds.indexOf(label) % 8}`, title: `${label}, ${percent(score)}` },
        letters.slice(start, stop), h("span", { class: "kind" }, `\u00a0${label}`)));
      end = stop;
    }
    parts.push(letters.slice(end));
    const legend = kinds.map((kind, index) => {
      const number = entities.filter(({ label }) => label === kind).length;
      return h("li", { class: `kind-${index % 8} ${number ? "" : "dim"}` }, h("span", { class: "swatch", "aria-hidden": "true" }), `${kind} `, h("b", {}, number));
    });
    const none = entities.length === 0 && h("p", { class: "hint" }, "The model finds none here.");
    return [
      h("p", { class: "passage marked" }, parts), none,
      h("ul", { class: "legend", "aria-label": `${count(entities.length, "entity", "entities")} by kind` }, legend),
    ];
  },
};

/** A model's labels without B- and I-, in its own order, so that a kind keeps its colour. */
function kindsOf(model, entities) {
  const all = Object.values(model.labels ?? {}).filter((label) => label !== "O").map((label) => label.replace(/^[A-Z]-/, ""));
  return [...new Set([...all, ...entities.map(({ label }) => label)])];
}
