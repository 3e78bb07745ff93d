// Elements, texts and numbers. All text goes into the page as text nodes, never as markup: what users and models write
// cannot become elements. Styles are set through properties, which the page's policy allows; style attributes it does not.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `h("p", { class: "lead", onclick: f, style: { "--share": 0.5 } }, "text", child, …)`. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for SVG. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== undefined && child !== null && child !== false));
  return element;
}

/** A text by its characters (code points), as the server counts them. */
export function characters(text) {
  const list = Array.from(text);
  return { length: list.length, slice: (start, end) => list.slice(start, end).join("") };
}

export function percent(share) {
  const value = 100 * share;
  if (value >= 99.95 && value < 100) return "> 99.9 %";
  if (value > 0 && value < 0.1) return "< 0.1 %";
  return `${value.toFixed(value < 10 ? 1 : 0)} %`;
}

/** A number in few characters, for axes and read-outs. */
export function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  if (size >= 1e-3) return trim(value);
  return value.toExponential(1).replace("e-", "e−").replace("-", "−");
}

function trim(value) {
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

/** Lines with something in them. */
export function lines(text) {
  return text.split("\n").map((line) => line.trim()).filter(Boolean);
}

/**
 * Arrow keys among a group's members, of which one is in the tab order. `columns` makes a grid of it: up and down move by a
 * row. `choose` is told where the focus went.
 */
export function roving(group, members, choose, columns = 0) {
  const tabbable = (index) => members.forEach((member, i) => (member.tabIndex = i === index ? 0 : -1));
  group.addEventListener("keydown", (event) => {
    const at = members.indexOf(event.target.closest("[tabindex]"));
    if (at < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const row = columns || 1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + row, ArrowUp: at - row, Home: 0, End: members.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    // Tabs and lists go round at their ends; in a grid that would jump to another row.
    const inside = to >= 0 && to < members.length;
    if (columns && !inside) return;
    const next = (to + members.length) % members.length;
    tabbable(next);
    members[next].focus();
    choose(next);
  });
  return tabbable;
}
