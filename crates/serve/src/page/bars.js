// Numbers as bars.

import { h, percent } from "./dom.js";

/**
 * A list of { label, score, text?, choose?, current?, hint? }: `label` is a text or an element, `text` what is written for
 * the score, `choose` makes the label a button and `hint` says what it does. Bars are shares of `full`, or of the largest score.
 */
export function bars(rows, { full, name } = {}) {
  const largest = full ?? Math.max(...rows.map((row) => row.score), 1e-9);
  const items = rows.map(({ label, score, text, choose, current, hint }) => {
    const share = Math.min(1, Math.max(0, score / largest));
    const caption = choose
      ? h("button", { type: "button", class: "label", onclick: choose, title: hint, "aria-current": current ? "true" : undefined }, label)
      : h("span", { class: "label" }, label);
    return h("li", { class: current && "current" }, caption,
      h("span", { class: "track", "aria-hidden": "true" }, h("span", { class: "bar", style: { "--share": share } })),
      h("span", { class: "score" }, text ?? percent(score)));
  });
  return h("ol", { class: "bars", "aria-label": name }, items);
}
