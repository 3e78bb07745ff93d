// What most tabs share: examples, fields, a button, the answer, and the request behind it.

import { post } from "./api.js";
import { count, h } from "./dom.js";

/** A tab: its heading, and a bench below. */
export function workbench(panel, models) {
  const { use, nodes } = bench(panel, models[0]);
  return h("div", { class: `bench ${panel.wide ? "wide" : ""}` }, heading(panel, models, use), nodes);
}

/**
 * Builds a form and the place of its answers from a description:
 * `title`, `lead`, `button`, `fields` [{ name, label, rows, hint }], `examples` [{ name, …values }],
 * `request(values, model)` → { route, body } or { hint } where there is nothing to ask yet,
 * `show(answer, values, bench)` → nodes, `say(answer, values)` → the same in a sentence, for those who do not see it,
 * `live` to ask while typing.
 */
export function bench(panel, model) {
  const own = { model, values: {}, run, set };
  const inputs = {};
  let waiting = null;
  let timer = 0;

  const fields = panel.fields.map((field) => {
    const id = `${panel.id}-${field.name}`;
    const input = field.rows
      ? h("textarea", { id, rows: field.rows, spellcheck: "false", "aria-describedby": field.hint && `${id}-hint` })
      : h("input", { id, type: "text", spellcheck: "false", autocomplete: "off", "aria-describedby": field.hint && `${id}-hint` });
    inputs[field.name] = input;
    input.addEventListener("input", () => {
      panel.typed?.(input.value, own);
      if (!panel.live) return;
      clearTimeout(timer);
      timer = setTimeout(run, 200);
    });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey || !field.rows)) {
        event.preventDefault();
        run();
      }
    });
    const hint = field.hint && h("span", { class: "hint", id: `${id}-hint` }, field.hint);
    return h("div", { class: "field" }, h("label", { for: id }, field.label), hint, input);
  });

  const chips = panel.examples.map((example) =>
    h("button", { type: "button", class: "chip", onclick: () => { set(example); run(); } }, example.name));
  const button = h("button", { class: "primary" }, panel.button ?? "Show");
  const submit = (event) => { event.preventDefault(); run(); };
  const form = h("form", { onsubmit: submit, class: `ask ${panel.fields.length > 1 ? "beside" : ""}` },
    h("div", { class: "examples", role: "group", "aria-label": "Examples" }, h("span", { class: "hint" }, "Examples"), chips),
    fields,
    h("div", { class: "actions" }, button, h("span", { class: "hint keys" }, h("kbd", {}, "Ctrl"), " + ", h("kbd", {}, "Enter"))));

  const status = h("p", { class: "status", role: "status" });
  const result = h("div", { class: "result" });
  const behind = h("div", { class: "behind" });
  const output = h("div", { class: "answer" }, result, status, behind);

  set(panel.examples[0]);
  run();
  return { nodes: [form, output], use };

  function use(model) {
    const before = own.model.mask_token;
    own.model = model;
    if (before && model.mask_token) {
      for (const input of Object.values(inputs)) input.value = input.value.replaceAll(before, model.mask_token);
    }
    run();
  }

  function set(values) {
    for (const [name, input] of Object.entries(inputs)) input.value = withMask(values[name] ?? "", own.model);
    panel.typed?.(null, own);
  }

  async function run() {
    clearTimeout(timer);
    waiting?.abort();
    const request = (waiting = new AbortController());
    own.values = Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value]));
    const { route, body, hint, nodes } = panel.request(own.values, own.model, own);
    if (hint) {
      result.replaceChildren(...(nodes ?? []));
      behind.replaceChildren();
      status.textContent = hint;
      output.removeAttribute("aria-busy");
      return;
    }
    output.setAttribute("aria-busy", "true");
    try {
      const answer = await post(`/models/${encodeURIComponent(own.model.model_id)}${route}`, body, request.signal);
      const nodes = [await panel.show(answer.body, own.values, own)].flat().filter(Boolean);
      if (request !== waiting) return;
      result.replaceChildren(...nodes);
      status.replaceChildren(h("span", { class: "unseen" }, `${panel.say(answer.body, own.values)} `), cost(answer));
      behind.replaceChildren(inAShell(answer));
    } catch (error) {
      if (error.name === "AbortError" || request !== waiting) return;
      result.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
      status.textContent = "";
      behind.replaceChildren();
    }
    output.removeAttribute("aria-busy");
  }
}

/** A tab's title, what it is about, and the choice of the model where there is one. */
export function heading(panel, models, choose) {
  const id = `${panel.id}-model`;
  const about = h("span", { class: "about" });
  const describe = (model) => {
    about.textContent = `${model.layers} layers × ${model.heads} heads, width ${model.hidden_size}, ` +
      `${count(model.vocabulary, "token")}, ${model.model_dtype}`;
  };
  describe(models[0]);
  const chosen = (event) => {
    const model = models[event.target.selectedIndex];
    describe(model);
    choose(model);
  };
  const name = models.length > 1
    ? h("select", { id, onchange: chosen }, models.map((model) => h("option", {}, model.model_id)))
    : h("strong", { id }, models[0].model_id);
  return h("div", { class: "heading" },
    h("div", {}, h("h2", {}, panel.heading ?? panel.title), h("p", { class: "lead" }, panel.lead)),
    h("div", { class: "model" }, models.length > 1 ? h("label", { for: id }, "Model") : h("span", {}, "Model"), name, about));
}

/** Examples are written with [MASK]; a model may call it otherwise. */
function withMask(text, model) {
  return model.mask_token ? text.replaceAll("[MASK]", model.mask_token) : text;
}

function cost({ milliseconds, tokens, truncated }) {
  const time = milliseconds < 10 ? milliseconds.toFixed(1) : Math.round(milliseconds);
  const parts = [`${time} ms`];
  if (tokens) parts.unshift(count(tokens, "token"));
  if (truncated) parts.push(`${count(truncated, "token")} cut off: the text is longer than the model takes`);
  return parts.join(" · ");
}

/** The request as a command, and the answer as it came. */
export function inAShell({ command, body }) {
  const json = h("pre", { tabindex: 0, "aria-label": "The answer as JSON" });
  // Attention maps are megabytes: they are written out only for those who look.
  const write = () => {
    const text = JSON.stringify(body, null, 1);
    json.textContent = text.length > 4000 ? `${text.slice(0, 4000)}\n… ${count(text.length - 4000, "more character")}` : text;
  };
  const copy = h("button", { type: "button", class: "quiet" }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Copying is not allowed here";
    }
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  });
  return h("details", { ontoggle: write }, h("summary", {}, "The same from a shell"),
    h("div", { class: "command" }, h("pre", { tabindex: 0, "aria-label": "The request as a command" }, command), copy), json);
}
