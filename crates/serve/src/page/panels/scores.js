// Classify, rank and choose: a score for each label, text or continuation.

import { bars } from "../bars.js";
import { lines, percent, short } from "../dom.js";

/** Probabilities as shares of one; anything else (a regression's numbers) as it is. */
function scored(rows, name) {
  const shares = rows.every(({ score }) => score >= 0 && score <= 1);
  const full = shares ? 1 : Math.max(...rows.map(({ score }) => Math.abs(score)));
  const best = Math.max(...rows.map(({ score }) => score));
  return bars(rows.map((row) => ({
    ...row,
    text: shares ? percent(row.score) : short(row.score),
    current: rows.length > 1 && row.score === best,
  })), { full, name });
}

export const classify = {
  id: "classify",
  title: "Classify",
  ability: "predict",
  lead: "One label for a whole text, or for how two texts relate.",
  button: "Classify",
  fields: [
    { name: "text", label: "Text", rows: 4 },
    { name: "second", label: "Second text", rows: 2, hint: "Only for models of pairs: a premise and a hypothesis, a question and an answer." },
  ],
  examples: [
    { name: "Praise", text: "A charming, funny and deeply humane film; the puppets act better than most actors." },
    { name: "Complaint", text: "Two hours that I will never get back. The plot goes nowhere, slowly." },
    { name: "A pair", text: "A man is playing a guitar on stage.", second: "Somebody is making music." },
  ],
  request({ text, second }) {
    if (text.trim() === "") return { hint: "Write a text." };
    return { route: "/predict", body: { inputs: second.trim() ? [[text, second]] : text } };
  },
  say: (body) => `${body.flat()[0].label} comes first.`,
  show: (body) => scored(body.flat().map(({ label, score }) => ({ label, score })), "Labels"),
};

export const rank = {
  id: "rank",
  title: "Rank",
  ability: "rerank",
  lead: "Puts texts in the order in which they answer a question.",
  button: "Rank",
  fields: [
    { name: "query", label: "Question" },
    { name: "texts", label: "Texts", rows: 6, hint: "One on each line." },
  ],
  examples: [{
    name: "Muppets",
    query: "Who made the Muppets?",
    texts: "It rains a lot in London.\nJim Henson created the Muppets in 1955.\nThe Muppets are a group of puppets.\nA puppeteer moves puppets.",
  }],
  request({ query, texts }) {
    if (query.trim() === "" || lines(texts).length === 0) return { hint: "Write a question, and texts below it." };
    return { route: "/rerank", body: { query, texts: lines(texts), return_text: true } };
  },
  say: ([best]) => `First comes: ${best.text}`,
  show: (ranks) => scored(ranks.map(({ text, score }) => ({ label: text, score })), "Texts, the best first"),
};

export const choose = {
  id: "choose",
  title: "Choose",
  ability: "choose",
  lead: "Which of several continuations fits best.",
  button: "Choose",
  fields: [
    { name: "context", label: "What comes before", rows: 3 },
    { name: "choices", label: "Choices", rows: 5, hint: "One on each line." },
  ],
  examples: [{
    name: "On stage",
    context: "The puppeteer lifts the frog above the edge of the stage. The frog",
    choices: "opens its mouth and begins to sing.\nis a small amphibian.\nrains on the parade.\nwas invented in 1492.",
  }],
  request({ context, choices }) {
    if (context.trim() === "" || lines(choices).length < 2) return { hint: "Write a beginning, and at least two choices." };
    return { route: "/choose", body: { context, choices: lines(choices) } };
  },
  say: ({ best }, { choices }) => `The best is: ${lines(choices)[best]}`,
  show(body, { choices }) {
    return scored(lines(choices).map((label, index) => ({ label, score: body.scores[index] })), "Choices");
  },
};
