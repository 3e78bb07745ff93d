// Inside: what the heads attend to, and how a word's vector follows its context.

import { h } from "../dom.js";
import { bench, heading } from "../workbench.js";
import { attention } from "./attention.js";
import { neighbours } from "./neighbours.js";

export const inside = {
  id: "inside",
  title: "Inside",
  ability: "inside",
  lead: "How the model arrives at its answers: what each head of each layer attends to, and what a word comes to mean.",
  build(panel, models) {
    const parts = [attention, neighbours].map((part) => ({ part, ...bench(part, models[0]) }));
    const use = (model) => parts.forEach((part) => part.use(model));
    const sections = parts.map(({ part, nodes }) =>
      h("section", { class: "bench wide", "aria-labelledby": `${part.id}-title` },
        h("div", { class: "heading" }, h("div", {}, h("h3", { id: `${part.id}-title` }, part.title), h("p", { class: "lead" }, part.lead))),
        nodes));
    return h("div", {}, heading(panel, models, use), sections);
  },
};
