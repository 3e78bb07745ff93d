// Answer: the span lit up in its passage, and the runners-up, each of which can be looked at in its place.

import { bars } from "../bars.js";
import { characters, h, percent } from "../dom.js";

export const answer = {
  id: "answer",
  title: "Answer",
  ability: "answer",
  lead: "A question about a passage. The answer is a part of the passage; the model points at its first and its last word.",
  button: "Answer",
  fields: [
    { name: "question", label: "Question" },
    { name: "context", label: "Passage", rows: 9 },
  ],
  examples: [
    {
      name: "Muppets",
      question: "What did Henson call his puppets?",
      context: "Jim Henson began to work with puppets while he was at school. In 1955 a television station in Washington gave him a short evening programme, Sam and Friends, for which he made puppets with moving mouths that he called Muppets. The most famous of them, Kermit the Frog, was cut from an old coat of his mother's and half a table tennis ball.",
    },
    {
      name: "Kermit",
      question: "What was Kermit made of?",
      context: "The most famous of the Muppets, Kermit the Frog, was cut in 1955 from an old coat of Jim Henson's mother's, with two halves of a table tennis ball for eyes. He became a frog only years later.",
    },
  ],
  request({ question, context }) {
    if (question.trim() === "" || context.trim() === "") return { hint: "Write a question and a passage." };
    return { route: "/answer", body: { question, context, top: 6 } };
  },
  say: ({ answers: [best] }) => (best?.text ? `The answer is: ${best.text}` : "No answer in the passage."),
  show({ answers, no_answer: none }, { context }) {
    const passage = h("p", { class: "passage" });
    const list = h("div", {});
    const look = (index) => {
      const { start, end } = answers[index];
      const letters = characters(context);
      passage.replaceChildren(...(start === null
        ? [context]
        : [letters.slice(0, start), h("mark", { class: "lit" }, letters.slice(start, end)), letters.slice(end)]));
      // A button that is replaced would lose the focus.
      const focused = list.contains(document.activeElement);
      list.replaceChildren(bars(answers.map(({ text, score, start: from }, i) => ({
        label: from === null ? h("i", {}, "no answer in the passage") : text,
        score,
        current: i === index,
        choose: () => look(i),
        hint: "Show it in the passage",
      })), { name: "Answers, the best first" }));
      if (focused) list.querySelectorAll("button")[index].focus();
    };
    if (answers.length === 0) return h("p", { class: "hint" }, "The model finds nothing that could be an answer.");
    look(0);
    const [{ text, start }] = answers;
    const declined = none !== null && start !== null && h("p", { class: "hint" }, `That there is no answer: ${percent(none)}.`);
    return [h("p", { class: "headline" }, start === null ? "No answer in the passage" : text), passage, h("h3", {}, "Candidates"), list, declined];
  },
};
