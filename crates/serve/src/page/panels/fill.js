// Fill a mask: words are hidden and brought back by a click, and the model says what might stand there.

import { bars } from "../bars.js";
import { h, percent } from "../dom.js";

export const fill = {
  id: "fill",
  title: "Fill a mask",
  ability: "fill",
  lead: "The model was trained to guess hidden words. Click any word to hide it, and a blank to bring its word back.",
  button: "Guess",
  fields: [{ name: "text", label: "Text", rows: 4, hint: "Write [MASK] for a blank, or click a word in the sentence." }],
  examples: [
    { name: "University", text: "In 1882 Weber enrolled in the [MASK] of Heidelberg as a law student." },
    { name: "Capital", text: "Paris is the [MASK] of France." },
    { name: "Puppeteer", text: "Jim Henson was an American puppeteer who [MASK] the Muppets." },
    { name: "Two blanks", text: "The film was [MASK] in 1979 and [MASK] by many critics." },
  ],
  request({ text }, model, bench) {
    if (text.trim() === "") return { hint: "Write a sentence." };
    if (!text.includes(model.mask_token)) {
      return { hint: "Nothing is hidden yet.", nodes: [sentence(text, [], bench), h("p", { class: "hint" }, "Click a word to hide it.")] };
    }
    return { route: "/fill", body: { inputs: text, top: 8 } };
  },
  // What was typed over is not known any more.
  typed(text, bench) {
    if (text === null || text.split(bench.model.mask_token).length - 1 !== bench.hidden?.length) bench.hidden = [];
  },
  say: ([{ masks }]) => masks.map(({ predictions: [best] }) => `Best guess: ${best.text.trim()}, ${percent(best.probability)}.`).join(" "),
  show([{ masks }], { text }, bench) {
    const several = masks.length > 1;
    const blanks = masks.map(({ predictions }, number) => {
      const was = bench.hidden?.[number];
      const rows = predictions.map(({ text, probability }) => ({
        label: text.trim(),
        score: probability,
        current: was && text.trim().toLowerCase() === was.toLowerCase(),
        choose: () => put(bench, number, text.trim()),
        hint: `Put “${text.trim()}” into the text`,
      }));
      const title = several && h("h3", {}, `Blank ${number + 1}`);
      return h("div", {}, title, bars(rows, { full: scale(predictions), name: `Guesses for blank ${number + 1}` }), remark(was, predictions));
    });
    return [sentence(text, masks, bench), h("div", { class: several ? "columns" : "" }, blanks)];
  },
};

/** Bars of a hesitant model would not be seen on a scale up to 100 %. */
function scale(predictions) {
  return [0.1, 0.25, 0.5, 1].find((full) => full >= predictions[0].probability) ?? 1;
}

function remark(was, predictions) {
  if (!was) return null;
  const place = predictions.findIndex(({ token }) => token.toLowerCase() === was.toLowerCase());
  const ordinal = ["first", "second", "third"][place] ?? `${place + 1}th`;
  const found = place < 0 ? `is not among the first ${predictions.length}` : `comes ${ordinal}`;
  return h("p", { class: "hint" }, `The hidden word “${was}” ${found}.`);
}

/** The text with its words as buttons, and the best guess in each blank. */
function sentence(text, masks, bench) {
  const parts = [];
  let [end, blank] = [0, 0];
  for (const { index, 0: word } of text.matchAll(wordsOf(bench.model.mask_token))) {
    parts.push(text.slice(end, index));
    end = index + word.length;
    if (word === bench.model.mask_token) {
      const number = blank++;
      const best = masks[number]?.predictions[0];
      const was = bench.hidden?.[number];
      const label = `Blank ${number + 1}${best ? `, best guess ${best.text.trim()}, ${percent(best.probability)}` : ""}. ` +
        (was ? `Bring back “${was}”` : "Put the best guess in");
      parts.push(h("button", { type: "button", class: "blank", "aria-label": label, title: label,
        onclick: () => put(bench, number, was ?? best?.text.trim() ?? "") }, best?.text.trim() ?? "?"));
    } else {
      const before = blank;
      const place = index;
      parts.push(h("button", { type: "button", class: "word", "aria-label": `Hide “${word}”`,
        onclick: () => hide(bench, place, word, before) }, word));
    }
  }
  parts.push(text.slice(end));
  return h("p", { class: "sentence" }, parts);
}

function wordsOf(mask) {
  const escaped = mask.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return new RegExp(`${escaped}|[\\p{L}\\p{N}]+(?:['’-][\\p{L}\\p{N}]+)*`, "gu");
}

function hide(bench, place, word, number) {
  const { text } = bench.values;
  const hidden = bench.hidden ?? [];
  const before = text.slice(0, place).split(bench.model.mask_token).length - 1;
  while (hidden.length < before) hidden.push(null);
  hidden.splice(number, 0, word);
  change(bench, text.slice(0, place) + bench.model.mask_token + text.slice(place + word.length), hidden);
}

function put(bench, number, word) {
  const parts = bench.values.text.split(bench.model.mask_token);
  const before = parts.slice(0, number + 1).join(bench.model.mask_token);
  const after = parts.slice(number + 1).join(bench.model.mask_token);
  const hidden = bench.hidden ?? [];
  hidden.splice(number, 1);
  // A piece that goes on a word is set to it without a space.
  const joined = word.startsWith("##") ? before.trimEnd() + word.slice(2) : before + word;
  change(bench, joined + after, hidden);
}

function change(bench, text, hidden) {
  bench.set({ text });
  bench.hidden = hidden;
  bench.run();
}
