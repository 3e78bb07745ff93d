// One word in many contexts: which of its uses the model finds near to each other.

import { bars } from "../bars.js";
import { characters, count, h, lines } from "../dom.js";
import { heatMap } from "./similarity.js";

export const neighbours = {
  id: "neighbours",
  title: "One word, many meanings",
  lead: "The model gives a word another vector in every sentence. Choose a use: those with the nearest vectors come first.",
  button: "Compare",
  fields: [
    { name: "word", label: "Word" },
    { name: "texts", label: "Sentences with it", rows: 8, hint: "One on each line." },
  ],
  examples: [
    {
      name: "play",
      word: "play",
      texts: "A play by Shakespeare was on at the theatre.\nThe actors rehearsed the school play all week.\nShe wrote a play in three acts.\nChildren play in the garden after lunch.\nThe puppies play with a ball.\nHe made a brilliant play and his team scored.\nThe referee stopped the play after the foul.",
    },
    {
      name: "bank",
      word: "bank",
      texts: "He sat on the bank of the river.\nTrees grow along the bank.\nThe boat drifted towards the muddy bank.\nThe bank raised its interest rates.\nShe took the money to the bank.\nThe bank refused the loan.",
    },
    {
      name: "spring",
      word: "spring",
      texts: "The flowers open in spring.\nAfter a cold winter comes a warm spring.\nThe spring in the mattress is broken.\nA steel spring pushes the valve back.\nThey drank from a spring in the mountains.\nWater from the spring is cold and clear.",
    },
  ],
  request({ word, texts }) {
    if (word.trim() === "" || lines(texts).length < 2) return { hint: "Write a word, and at least two sentences that have it." };
    return { route: "/inside/neighbours", body: { word: word.trim(), inputs: lines(texts) } };
  },
  say: ({ uses }) => `${count(uses.length, "use")} compared.`,
  show({ uses, similarity, nearest }, { texts }) {
    const sentences = lines(texts);
    const label = ({ text, start, end }) => {
      const letters = characters(sentences[text]);
      return [letters.slice(0, start), h("mark", { class: "lit" }, letters.slice(start, end)), letters.slice(end)];
    };
    if (uses.length < 2) return h("p", { class: "hint" }, "Only one sentence has the word; there is nothing to compare it with.");
    const list = h("div", { class: "near" });
    const centre = (index, moved) => {
      list.replaceChildren(
        h("p", { class: "sentence small" }, label(uses[index])),
        h("p", { class: "hint" }, "Nearest first; the number is the cosine."),
        bars(nearest[index].map((other) => ({
          label: h("span", {}, label(uses[other])),
          score: Math.max(0, similarity[index][other]),
          text: similarity[index][other].toFixed(2),
          choose: () => centre(other, true),
          hint: "Compare with this one",
        })), { full: 1, name: "Other uses, the nearest first" }));
      if (moved) list.querySelector("button").focus();
    };
    centre(0, false);
    return h("div", { class: "columns" }, list, h("div", {}, heatMap(uses.map(({ text }) => sentences[text]), similarity)));
  },
};
