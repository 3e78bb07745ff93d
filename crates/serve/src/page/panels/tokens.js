// Tokens: those that the model really sees, while one types.

import { post } from "../api.js";
import { characters, count, h } from "../dom.js";

export const tokens = {
  id: "tokens",
  title: "Tokens",
  ability: "tokenize",
  lead: "Models do not read letters or words but tokens from a vocabulary. Frequent words are one token, rare ones several.",
  button: "Tokenize",
  live: true,
  fields: [{ name: "text", label: "Text", rows: 4, hint: "Tokenized as you type." }],
  examples: [
    { name: "Puppeteer", text: "Jim Henson was a puppeteer, and his puppeteering was unbelievably heartwarming." },
    { name: "Not English", text: "Der Donaudampfschifffahrtskapitän trank Žižkover Bier – für 3,50 €." },
    { name: "Medicine", text: "Electroencephalography shows spikes; carbamazepine 200 mg was started." },
  ],
  request({ text }) {
    return text === "" ? { hint: "Write something." } : { route: "/tokenize", body: { inputs: text } };
  },
  say: ([pieces]) => `${count(pieces.length, "token")}.`,
  async show([pieces], { text }, { model }) {
    const names = (await post(`/models/${encodeURIComponent(model.model_id)}/decode`,
      { ids: pieces.map(({ id }) => [id]), skip_special_tokens: false }).catch(() => ({ body: [] }))).body;
    const letters = characters(text);
    const marks = [];
    const parts = [];
    let end = 0;
    pieces.forEach(({ start, stop }, index) => {
      if (start === null) return;
      parts.push(letters.slice(end, start));
      // Byte-level pieces can share a character: it is shown once.
      marks[index] = h("span", { class: `piece tone-${index % 2}` }, letters.slice(Math.max(start, end), stop));
      parts.push(marks[index]);
      end = Math.max(end, stop);
    });
    parts.push(letters.slice(end));
    const light = (index, on) => marks[index]?.classList.toggle("lit", on);
    let before = null;
    const cards = pieces.map(({ id, special, start, stop, text: part }, index) => {
      const joined = start !== null && start === before && /[\p{L}\p{N}]/u.test(part);
      before = stop;
      return h("li", { class: `${special ? "special" : ""} ${joined ? "joined" : ""} tone-${index % 2}`,
        title: start === null ? "added by the model's template" : `characters ${start} to ${stop}`,
        onmouseenter: () => light(index, true), onmouseleave: () => light(index, false) },
      h("b", {}, names[index] ?? part), h("small", {}, id));
    });
    const real = pieces.filter(({ special }) => !special).length;
    const words = text.trim().split(/\s+/).length;
    const rows = pieces.map(({ id, start, stop }, index) =>
      h("tr", {}, h("td", {}, index), h("td", { class: "mono" }, names[index] ?? ""), h("td", {}, id), h("td", {}, start === null ? "–" : `${start}–${stop}`)));
    return [
      h("p", { class: "summary" }, h("b", {}, count(real, "token")), ` for ${count(words, "word")} and ${count(letters.length, "character")}`),
      h("p", { class: "sentence pieces" }, parts),
      h("ol", { class: "cards", "aria-label": "Tokens with their ids" }, cards),
      h("details", {}, h("summary", {}, "As a table, with offsets in the text"),
        h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Tokens" },
          h("table", { class: "plain" },
            h("thead", {}, h("tr", {}, ["#", "Token", "Id", "Characters"].map((name) => h("th", { scope: "col" }, name)))),
            h("tbody", {}, rows)))),
    ];
  },
};
