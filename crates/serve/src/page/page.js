// The page: asks which models there are, and makes a tab for each thing that some of them can do.

import { Problem, get, setKey } from "./api.js";
import { count, h, roving } from "./dom.js";
import { workbench } from "./workbench.js";
import { answer } from "./panels/answer.js";
import { choose, classify, rank } from "./panels/scores.js";
import { fill } from "./panels/fill.js";
import { inside } from "./panels/inside.js";
import { runs } from "./panels/runs.js";
import { similarity } from "./panels/similarity.js";
import { tag } from "./panels/tag.js";
import { tokens } from "./panels/tokens.js";
import { write } from "./panels/write.js";

const PANELS = [write, fill, classify, rank, tag, answer, choose, similarity, tokens, inside];

switchTheme();
await begin();

async function begin() {
  const start = document.getElementById("start");
  try {
    const models = await get("/models");
    if (models.some(({ abilities }) => abilities.length === 0)) {
      start.textContent = "The server is loading its models …";
      setTimeout(begin, 1000);
      return;
    }
    // The model that answers without being named comes first.
    const able = (ability) => models.filter(({ abilities }) => abilities.includes(ability))
      .sort((a, b) => b.default_for.includes(ability) - a.default_for.includes(ability));
    const shown = PANELS.map((panel) => ({ panel, models: able(panel.ability) }))
      .filter(({ models }) => models.length > 0)
      .map(({ panel, models }) => ({ id: panel.id, title: panel.title, build: () => (panel.build ?? workbench)(panel, models) }));
    const found = await get("/runs").catch(() => null);
    if (found) shown.push({ id: "runs", title: "Runs", build: () => runs(found) });
    start.remove();
    const names = models.map((model) => model.model_id);
    document.getElementById("served").textContent = names.length > 3 ? count(names.length, "model") : names.join(", ");
    tabs(shown);
  } catch (error) {
    if (error instanceof Problem && error.status === 401) askForKey(start);
    else start.replaceChildren(h("p", { class: "problem" }, error.message), h("button", { type: "button", onclick: begin }, "Try again"));
  }
}

/** Tabs that are built when they are first opened, and found again by the address. */
function tabs(shown) {
  const list = document.getElementById("tabs");
  const panels = document.getElementById("panels");
  const buttons = shown.map(({ id, title }) =>
    h("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `panel-${id}`, "aria-selected": "false" }, title));
  const areas = shown.map(({ id }) =>
    h("section", { role: "tabpanel", id: `panel-${id}`, "aria-labelledby": `tab-${id}`, hidden: true, class: "panel" }));
  const built = new Set();
  const open = (index) => {
    buttons.forEach((button, i) => button.setAttribute("aria-selected", String(i === index)));
    areas.forEach((area, i) => (area.hidden = i !== index));
    tabbable(index);
    const button = buttons[index];
    list.scrollTo({ left: button.offsetLeft - (list.clientWidth - button.offsetWidth) / 2, behavior: "smooth" });
    scrollTo({ top: Math.min(scrollY, list.parentElement.offsetTop) });
    if (!built.has(index)) {
      built.add(index);
      areas[index].append(shown[index].build());
    }
    // Canvases are drawn in sizes that a hidden panel does not have.
    areas[index].dispatchEvent(new CustomEvent("shown"));
    if (location.hash !== `#${shown[index].id}`) history.replaceState(null, "", `#${shown[index].id}`);
    document.title = `${shown[index].title} · henson`;
  };
  const tabbable = roving(list, buttons, open);
  buttons.forEach((button, index) => button.addEventListener("click", () => open(index)));
  list.replaceChildren(...buttons);
  panels.append(...areas);
  const named = () => Math.max(0, shown.findIndex(({ id }) => `#${id}` === location.hash));
  addEventListener("hashchange", () => open(named()));
  open(named());
}

function askForKey(start) {
  const input = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const submit = (event) => {
    event.preventDefault();
    setKey(input.value.trim());
    start.replaceChildren("Asking the server for its models …");
    begin();
  };
  start.replaceChildren(
    h("form", { onsubmit: submit, class: "key" },
      h("label", { for: "key" }, "This server asks for its key"), input, h("button", {}, "Enter"),
      h("p", { class: "hint" }, "It is kept in this tab alone, until the tab is closed.")));
  input.focus();
}

/** The switch follows the system until it is used; set back to the system's theme, it follows again. */
function switchTheme() {
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const show = () => {
    button.setAttribute("aria-checked", String(dark()));
    // What is painted on canvases does not follow by itself.
    dispatchEvent(new CustomEvent("theme"));
  };
  button.addEventListener("click", () => {
    const next = dark() ? "light" : "dark";
    const followed = (next === "dark") === system.matches;
    if (followed) delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      if (followed) localStorage.removeItem("henson-theme");
      else localStorage.setItem("henson-theme", next);
    } catch {
      // Then it holds until the page is left.
    }
    show();
  });
  system.addEventListener("change", show);
  show();
}
