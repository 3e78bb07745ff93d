// Write: the model continues a prompt, token by token, until it ends, has written enough or is stopped.

import { shell, stream } from "../api.js";
import { count, h } from "../dom.js";
import { heading, inAShell } from "../workbench.js";

export const write = {
  id: "write",
  title: "Write",
  ability: "generate",
  lead: "The model predicts the next token, adds it to the text, and predicts the one after it.",
  build,
};

const EXAMPLES = [
  { name: "Puppets", text: "Jim Henson built his first puppets when he was" },
  { name: "A list", text: "Three things to know about frogs:\n1." },
  { name: "A story", text: "It was a dark night in the theatre, and behind the curtain" },
];

const SETTINGS = [
  { name: "max_tokens", label: "Max tokens", value: 60, min: 1, step: 1 },
  { name: "temperature", label: "Temperature", value: 0.8, min: 0, max: 2, step: 0.1, hint: "0 always takes the likeliest token." },
  { name: "top_p", label: "Top-p", value: 0.95, min: 0, max: 1, step: 0.05, hint: "Draws from the likeliest tokens that reach this share." },
  { name: "seed", label: "Seed", value: 1, step: 1, hint: "The same seed writes the same text. Empty: another one each time." },
];

function build(panel, models) {
  let model = models[0];
  let running = null;

  const prompt = h("textarea", { id: "write-prompt", rows: 5, spellcheck: "false" });
  prompt.value = EXAMPLES[0].text;
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      run();
    }
  });
  const inputs = Object.fromEntries(SETTINGS.map(({ name, label, hint, ...rest }) =>
    [name, h("input", { id: `write-${name}`, type: "number", "aria-describedby": hint && `write-${name}-hint`, ...rest })]));
  const settings = SETTINGS.map(({ name, label, hint }) =>
    h("div", { class: "field" }, h("label", { for: `write-${name}` }, label), inputs[name],
      hint && h("span", { class: "hint", id: `write-${name}-hint` }, hint)));
  const chips = EXAMPLES.map(({ name, text }) =>
    h("button", { type: "button", class: "chip", onclick: () => { prompt.value = text; run(); } }, name));
  const halt = h("button", { type: "button", class: "secondary", disabled: true, onclick: () => running?.abort() }, "Stop");
  const submit = (event) => { event.preventDefault(); run(); };
  const form = h("form", { onsubmit: submit, class: "ask", novalidate: true },
    h("div", { class: "examples", role: "group", "aria-label": "Examples" }, h("span", { class: "hint" }, "Examples"), chips),
    h("div", { class: "field" }, h("label", { for: "write-prompt" }, "Prompt"), prompt),
    h("div", { class: "settings" }, settings),
    h("div", { class: "actions" }, h("button", { class: "primary" }, "Write"), halt,
      h("span", { class: "hint keys" }, h("kbd", {}, "Ctrl"), " + ", h("kbd", {}, "Enter"))));

  const result = h("div", { class: "result" });
  const status = h("p", { class: "status", role: "status" });
  const behind = h("div", { class: "behind" });
  const output = h("div", { class: "answer" }, result, status, behind);
  const use = (chosen) => { model = chosen; run(); };
  run();
  return h("div", { class: "bench" }, heading(panel, models, use), form, output);

  async function run() {
    running?.abort();
    const request = (running = new AbortController());
    const text = prompt.value;
    const body = { prompt: text, stream: true, stream_options: { include_usage: true } };
    for (const [name, input] of Object.entries(inputs)) if (input.value !== "") body[name] = Number(input.value);
    const path = `/models/${encodeURIComponent(model.model_id)}/v1/completions`;
    const written = document.createTextNode("");
    // What an encoder-decoder writes does not continue its source.
    const before = model.encoder_decoder ? null : h("span", { class: "dim" }, text);
    result.replaceChildren(h("p", { class: "passage written" }, before, h("span", { class: "fresh" }, written)));
    behind.replaceChildren();
    status.textContent = "Waiting for the first token …";
    output.setAttribute("aria-busy", "true");
    halt.disabled = false;
    const answer = { command: shell(path, JSON.stringify(body), true), body: [] };
    const begun = performance.now();
    let [first, usage, reason] = [null, null, null];
    try {
      for await (const event of stream(path, body, request.signal)) {
        if (request !== running) return;
        answer.body.push(event);
        first ??= performance.now();
        usage = event.usage ?? usage;
        const [choice] = event.choices;
        if (!choice) continue;
        written.appendData(choice.text);
        reason = choice.finish_reason ?? reason;
        status.textContent = "Writing …";
      }
      status.textContent = summary(usage, reason, begun, first);
    } catch (error) {
      if (request !== running) return;
      if (error.name === "AbortError") {
        status.textContent = `Stopped · ${count(answer.body.length, "event")}`;
      } else {
        result.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
        status.textContent = "";
      }
    }
    if (answer.body.length > 0) behind.replaceChildren(inAShell(answer));
    halt.disabled = true;
    output.removeAttribute("aria-busy");
  }
}

function summary(usage, reason, begun, first) {
  const end = { stop: "ended by the model", length: "as long as asked for" }[reason] ?? "the answer broke off";
  if (!usage || first === null) return end;
  const tokens = usage.completion_tokens;
  const seconds = (performance.now() - first) / 1000;
  // Where all came at once, there is nothing to measure.
  const rate = tokens > 1 && seconds > 0.05 ? [`${Math.round((tokens - 1) / seconds)} a second`] : [];
  return [count(tokens, "token"), `the first after ${Math.round(first - begun)} ms`, ...rate, end].join(" · ");
}
